"""How few rows there can be at all: proven lower bounds, to measure `place` against.

Groups are one level deep here: a prompt of P positions in every row that holds some of the group's members, of c positions each;
S positions in a row. A dual-feasible function (DFF) f maps sizes to weights such that the weights of what fits into a row add up
to at most 1; the bound is then the sum of all weights. Four bounds, of which the largest counts:

- area: a group has at least k parts, by DFFs over its members in rows of S − P, so it takes at least k·P + Σc.
- exclusive rows: with ε = the smallest part of any group, a part above S − ε has its row for itself and weighs 1. A group may
  have e such rows and other parts of at most S − ε; the cheapest e counts.
- members: Σ f(c + P·ψ(c)) for DFFs f over S and ψ over S − P. As Σψ ≤ 1 over the members of a part, these sizes fit into any row
  that the part fits into.
- parts: the cheapest way, measured by f, of cutting a group into parts as if members could be cut anywhere.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

_TINY = 1e-9
"""Sizes are lowered by so much before a DFF sees them, all of which rise: rounding may lower the bound, never raise it."""
_CELLS = 128
_LATEST = 64

Dff = Callable[[np.ndarray], np.ndarray]


def _dffs(marks: np.ndarray) -> Iterator[Dff]:
    """Superadditive functions of [0, 1] with f(1) = 1; `marks` are sizes at which a step may be worth having."""
    yield lambda x: x
    steps = marks[(marks > 0) & (marks <= 0.5)]
    for eps in steps:  # Martello and Toth's L2: what is above 1 - eps has a row for itself, where nothing below eps counts
        yield lambda x, eps=eps: np.where(x > 1 - eps, 1.0, np.where(x < eps, 0.0, x))
    for unit in np.concatenate([1 / np.linspace(2, 12, 41), steps[steps > 1 / 16]]) - 2 * _TINY:
        top = math.floor(1 / unit)
        # Carlier, Clautiaux and Moukrim: a large size takes as many units as it leaves no room for.
        yield (
            lambda x, unit=unit, top=top: (
                np.where(x > 0.5, 2 * top - 2 * np.floor((1 - x) / unit), np.where(x < 0.5, 2 * np.floor(x / unit), top))
                / (2 * top)
            )
        )
    for unit in np.concatenate([1 / np.linspace(1.05, 4, 60), marks[(marks > 0.2) & (marks <= 0.98)]]) - 2 * _TINY:
        top, over = math.floor(1 / unit), 1 / unit - math.floor(1 / unit)
        # Burdet and Johnson: whole units, and of the rest what exceeds the part of a unit that a row has to spare.
        yield (
            lambda x, unit=unit, top=top, over=over: (
                (np.floor(x / unit) + np.maximum(0, x / unit - np.floor(x / unit) - over) / (1 - over)) / top
            )
        )
    for k in range(1, 13):  # Fekete and Schepers
        yield lambda x, k=k: np.floor((k + 1) * x) / k


def lower_bound(prompts: Sequence[int], members: Sequence[Sequence[int]], seq_len: int) -> int:
    """Rows of `seq_len` positions that the groups need at least. Every group has members, and each fits beside its prompt."""
    return math.ceil(max(lower_bounds(prompts, members, seq_len).values(), default=0) - 1e-6)


def lower_bounds(prompts: Sequence[int], members: Sequence[Sequence[int]], seq_len: int) -> dict[str, float]:
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

    sums, smallest = total(c), np.minimum.reduceat(c, first)
    quantiles = np.quantile(c, np.linspace(0, 1, 24), method="nearest")
    inner = quantiles / room.min()
    shares = [f(np.maximum(c / np.repeat(room, groups) - _TINY, 0)) for f in _dffs(np.unique([*inner, *(1 - inner)]))]
    k = np.maximum(1, np.ceil(np.max([total(share) for share in shares], axis=0) - 1e-6))
    best = sorted(range(len(shares)), key=lambda i: -shares[i].sum())[:6]
    shares = [np.zeros_like(c), c / np.repeat(room, groups), 1.0 * (2 * c > np.repeat(room, groups)), *(shares[i] for i in best)]

    outer = np.concatenate(
        [quantiles, quantiles + np.median(P), (P + smallest)[:: max(1, len(P) // 8)], (P + sums)[:: max(1, len(P) // 16)]]
    )
    dffs = list(
        _dffs(np.unique(np.concatenate([outer, seq_len - outer, [P.min(), 2 * P.min(), (P + smallest).min()]]) / seq_len))
    )
    sizes = [np.maximum((c + p * share) / seq_len - _TINY, 0) for share in shares]
    least = np.maximum((P + smallest) / seq_len - _TINY, 0)
    bounds = {
        "area": float((k * P + sums).sum() / seq_len),
        "exclusive rows": _exclusive(P, sums, k, float((P + smallest).min()), seq_len),
        "members": max(float(np.maximum.reduce([k * f(least), *(total(f(size)) for size in sizes)]).sum()) for f in dffs),
    }
    if len(set(prompts)) == 1 and (sums / room).max() <= 4:
        bounds["parts"] = max(_parts(f, float(P[0]), sums, k * f(least), float(smallest.min()), seq_len) for f in dffs)
    return bounds


def _exclusive(P: np.ndarray, sums: np.ndarray, k: np.ndarray, other: float, seq_len: int) -> float:
    """In exclusive rows a group has room for S − P, in shared ones for S − P − other. Every exclusive row makes it cheaper, but
    for rounding the number of shared parts up; without that, the last e covers all smaller ones as well."""
    full, shared = seq_len - P, seq_len - P - min(other, seq_len / 2)
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


def _parts(f: Dff, P: float, sums: np.ndarray, at_least: np.ndarray, smallest: float, seq_len: int) -> float:
    """Members cut anywhere, sizes of parts lowered to the start of their cell: the cheapest sum of weights for each group."""
    cell = (seq_len - P) / _CELLS
    need = np.ceil(sums / cell - _TINY).astype(int)
    weight = f(np.maximum((P + np.maximum(np.floor(np.arange(_CELLS) * cell), smallest)) / seq_len - _TINY, 0))
    cheapest = np.zeros(int(need.max()) + 1)
    for cells in range(1, len(cheapest)):
        most = min(_CELLS, cells)
        cheapest[cells] = (weight[:most] + cheapest[cells - 1 - np.arange(most)]).min()
    return float(np.maximum(cheapest[need], at_least).sum())
