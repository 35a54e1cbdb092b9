"""The smallest possible number of rows: proven lower bounds, to measure `place` against.

Groups are one level deep here: a prompt of P positions in every row that holds some of the group's
members, of c positions each; S positions in a row. A dual-feasible function (DFF) f maps sizes to
weights such that the weights of what fits into a row add up to at most 1; the bound is then the sum
of all weights. Four bounds, of which the largest counts:

- area: a group has at least k parts, by DFFs over its members in rows of S − P, so it takes at
  least k·P + Σc.
- exclusive rows: with ε = the smallest part of any group, a part above S − ε has a row to itself
  and weighs 1. A group may have e such rows and other parts of at most S − ε; the cheapest e
  counts.
- members: Σ f(c + P·ψ(c)) for DFFs f over S and ψ over S − P. As Σψ ≤ 1 over the members of a part,
  these sizes fit into any row that the part fits into.
- parts: the cheapest way, measured by f, of cutting a group into parts as if members could be cut
  anywhere; f may be a mixture of DFFs.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

_TINY = 1e-9
"""Sizes are lowered by so much before a DFF sees them, all of which rise: rounding may lower the
bound, never raise it.
"""
_CELLS = 512
_SEARCH = 16_000
"""Steps of 1 cell for each function while mixtures are looked for, about."""
_SHARES = (0.5, 0.8, 0.9, 0.97)
_ROUNDS = 3
_MOST_PARTS = 16
_LATEST = 64

Dff = Callable[[np.ndarray], np.ndarray]


def _dffs(marks: np.ndarray) -> Iterator[Dff]:
    """Superadditive functions of [0, 1] with f(1) = 1; `marks` are sizes at which a step may be
    worth having.
    """
    yield lambda x: x
    steps = marks[(marks > 0) & (marks <= 0.5)]
    # Martello and Toth's L2: what is above 1 - eps has a row for itself, where nothing below eps
    # counts.
    for eps in steps:
        yield lambda x, eps=eps: np.where(x > 1 - eps, 1.0, np.where(x < eps, 0.0, x))
    for unit in np.concatenate([1 / np.linspace(2, 12, 41), steps[steps > 1 / 16]]) - 2 * _TINY:
        top = math.floor(1 / unit)
        # Carlier, Clautiaux and Moukrim: a large size takes as many units as it leaves no room for.
        yield (
            lambda x, unit=unit, top=top: (
                np.where(
                    x > 0.5,
                    2 * top - 2 * np.floor((1 - x) / unit),
                    np.where(x < 0.5, 2 * np.floor(x / unit), top),
                )
                / (2 * top)
            )
        )
    for unit in (
        np.concatenate([1 / np.linspace(1.05, 4, 60), marks[(marks > 0.2) & (marks <= 0.98)]])
        - 2 * _TINY
    ):
        top = math.floor(1 / unit)
        over = 1 / unit - math.floor(1 / unit)
        # Burdet and Johnson: whole units, and of the rest what exceeds the part of a unit that a
        # row has to spare.
        yield (
            lambda x, unit=unit, top=top, over=over: (
                (
                    np.floor(x / unit)
                    + np.maximum(0, x / unit - np.floor(x / unit) - over) / (1 - over)
                )
                / top
            )
        )
    for k in range(1, 13):  # Fekete and Schepers
        yield lambda x, k=k: np.floor((k + 1) * x) / k


def lower_bound(prompts: Sequence[int], members: Sequence[Sequence[int]], seq_len: int) -> int:
    """Rows of `seq_len` positions that the groups need at least. Every group has members, and each
    fits beside its prompt.
    """
    return math.ceil(max(lower_bounds(prompts, members, seq_len).values(), default=0) - 1e-6)


def lower_bounds(
    prompts: Sequence[int], members: Sequence[Sequence[int]], seq_len: int
) -> dict[str, float]:
    """The bounds by name, not rounded up."""
    if not members:
        return {}
    groups = np.array([len(sizes) for sizes in members])
    assert groups.min() >= 1
    first = np.cumsum(groups) - groups
    P = np.array(prompts, dtype=float)
    c = np.concatenate([np.asarray(sizes, dtype=float) for sizes in members])
    p = np.repeat(P, groups)
    room = seq_len - P  # for members
    assert c.min() >= 1 and (p + c).max() <= seq_len

    def total(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values, first)

    sums = total(c)
    smallest = np.minimum.reduceat(c, first)
    quantiles = np.quantile(c, np.linspace(0, 1, 24), method="nearest")
    inner = quantiles / room.min()
    shares = [
        f(np.maximum(c / np.repeat(room, groups) - _TINY, 0))
        for f in _dffs(np.unique([*inner, *(1 - inner)]))
    ]
    k = np.maximum(1, np.ceil(np.max([total(share) for share in shares], axis=0) - 1e-6))
    best = sorted(range(len(shares)), key=lambda i: -shares[i].sum())[:6]
    shares = [
        np.zeros_like(c),
        c / np.repeat(room, groups),
        1.0 * (2 * c > np.repeat(room, groups)),
        *(shares[i] for i in best),
    ]

    outer = np.concatenate(
        [
            quantiles,
            quantiles + np.median(P),
            (P + smallest)[:: max(1, len(P) // 8)],
            (P + sums)[:: max(1, len(P) // 16)],
        ]
    )
    dffs = list(
        _dffs(
            np.unique(
                np.concatenate(
                    [outer, seq_len - outer, [P.min(), 2 * P.min(), (P + smallest).min()]]
                )
                / seq_len
            )
        )
    )
    sizes = np.maximum((c + p * np.stack(shares)) / seq_len - _TINY, 0)
    least = np.maximum((P + smallest) / seq_len - _TINY, 0)
    at_least = np.stack([k * f(least) for f in dffs])
    by_members = np.stack([np.add.reduceat(f(sizes), first, axis=1).max(axis=0) for f in dffs])
    bounds = {
        "area": float((k * P + sums).sum() / seq_len),
        "exclusive rows": _exclusive(P, sums, k, float((P + smallest).min()), seq_len),
        "members": float(np.maximum(at_least, by_members).sum(axis=1).max()),
    }
    if len(set(prompts)) == 1 and (sums / room).max() <= _MOST_PARTS:
        bounds["parts"] = _parts(dffs, int(P[0]), sums, at_least, float(smallest.min()), seq_len)
    return bounds


def _exclusive(P: np.ndarray, sums: np.ndarray, k: np.ndarray, other: float, seq_len: int) -> float:
    """In exclusive rows a group has room for S − P, in shared ones for S − P − other. Every
    exclusive row makes it cheaper, but for rounding the number of shared parts up; without that,
    the last e covers all smaller ones as well.
    """
    full = seq_len - P
    shared = seq_len - P - min(other, seq_len / 2)
    cost = np.full(len(P), np.inf)
    for back in range(min(_LATEST, int(k.max())) + 2):
        e = np.maximum(k - back, 0)
        rest = np.maximum(sums - e * full, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            parts = np.where(rest > 0, np.where(shared >= 1, rest / shared, np.inf), 0.0)
        if back <= _LATEST:
            parts = np.maximum(np.ceil(parts - _TINY), k - e)
        parts = np.where(np.isfinite(parts), parts, seq_len + sums)
        cost = np.minimum(cost, e + np.where(parts > 0, parts * P + rest, 0.0) / seq_len)
    return float(cost.sum())


def _parts(
    dffs: Sequence[Dff],
    P: int,
    sums: np.ndarray,
    at_least: np.ndarray,
    smallest: float,
    seq_len: int,
) -> float:
    """The best of all mixtures of the functions that a short search finds: a mixture of DFFs is one
    too.

    Mixing pays because a group may be cut in another way for each function: what makes whole groups
    heavy by one of them makes the prompts that cutting costs count for nothing, and by the plain
    size the other way round.
    """
    rooms = float(sums.max()) / (seq_len - P)
    few = int(min(_CELLS, math.sqrt(_SEARCH / rooms)))
    coarse, fine = (_cells(P, smallest, seq_len, count) for count in (few, _CELLS))

    def total(weights: np.ndarray, at_least: np.ndarray, cell: float) -> np.ndarray:
        need = np.ceil(sums / cell - _TINY).astype(int)
        return np.maximum(_cheapest(weights, int(need.max()))[:, need], at_least).sum(axis=1)

    # Each row is a mixture: what it gives to the functions.
    each = np.eye(len(dffs))
    tried = np.stack([f(coarse[1]) for f in dffs])
    _, distinct = np.unique(
        np.round(np.concatenate([tried, at_least], axis=1), 9), axis=0, return_index=True
    )
    best = each[0]
    value = -np.inf
    for _ in range(_ROUNDS):
        mixtures = np.concatenate(
            [each[distinct], *(share * best + (1 - share) * each[distinct] for share in _SHARES)]
        )
        values = total(mixtures @ tried, mixtures @ at_least, coarse[0])
        if values.max() <= value + 1e-6:
            break
        best = mixtures[values.argmax()]
        value = values.max()
    if fine[0] == coarse[0]:
        return float(value)
    weights = np.stack([f(fine[1]) for f in dffs])
    return float(max(total(best[None] @ weights, best[None] @ at_least, fine[0])[0], value))


def _cells(P: int, smallest: float, seq_len: int, count: int) -> tuple[float, np.ndarray]:
    """The room for members as cells: the size of one, and the least size, prompt included, of a
    part that takes 1, 2, … of them. A part takes ceil(its members / cell)."""
    count = min(count, seq_len - P)
    cell = (seq_len - P) / count
    # Whole positions, more than fill one cell less.
    members = np.floor(np.arange(count) * cell - _TINY) + 1
    return cell, np.maximum((P + np.maximum(members, smallest)) / seq_len - _TINY, 0)


def _cheapest(weights: np.ndarray, need: int) -> np.ndarray:
    """[F, need + 1]: for each of F functions the smallest sum of weights of parts that take so many
    cells together; weights: [F, cells], of a part that takes 1, 2, … cells."""
    cheapest = np.zeros((len(weights), need + 1))
    for cells in range(1, need + 1):
        most = min(weights.shape[1], cells)
        cheapest[:, cells] = (weights[:, :most] + cheapest[:, cells - most : cells][:, ::-1]).min(
            axis=1
        )
    return cheapest
