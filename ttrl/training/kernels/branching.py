"""Run recurrent layers over packed trees: a prompt once, its state passed to every completion.

A packed row holds groups of tokens, each continuing its parent (`ttrl.data.packing.masks`).
Attention sees the tree through a mask. A recurrence has no mask, so this file cuts rows into
groups:

- `branching_scan` runs a scan (gated delta rule, Mamba 2, KDA) over all groups of one depth at a
  time. A group begins with the final state of its parent. The gradients of all children add up in
  this state.
- `branching_convolution` puts the last k - 1 inputs of its ancestors before each group.

Both call the model's own functions, unchanged, with other arguments.

Shapes: B rows, T tokens of a row, N = B·T, n groups of a batch, L tokens of the longest of them, C
channels, k taps of a convolution. Has never run on a GPU.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_FULLNESS = 0.5  # of the longest group of a batch, at least: the others are filled up


class Group(NamedTuple):
    """A run of tokens, by positions in the rows laid end to end."""

    start: int
    stop: int
    parent: int | None
    """The number of its parent group."""
    depth: int

    @property
    def length(self) -> int:
        """Return the number of tokens."""
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class Batch:
    """Groups of one depth, scanned together."""

    index: Tensor
    """int64 [n, L]: positions; N in the padding of a group."""
    parents: Tensor | None
    """int64 [n]: each group's initial state, by its number in the depth above; None for roots."""
    has_children: bool
    """Whether the groups' final states are needed. Batches with children come first."""


@dataclass(frozen=True, eq=False)
class Branches:
    """The groups of packed rows, and batches of them. Made by `branches_of`."""

    groups: tuple[Group, ...]
    tokens: int
    """N"""
    device: torch.device
    _taps: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @functools.cached_property
    def batches(self) -> tuple[tuple[Batch, ...], ...]:
        """Return batches of about equally long groups, by depth."""
        return self._batched(_FULLNESS)

    @functools.cached_property
    def exact_batches(self) -> tuple[tuple[Batch, ...], ...]:
        """Return batches; their groups with children are equally long: nothing is padded before a
        final state."""
        return self._batched(1.0)

    def _batched(self, fullness: float) -> tuple[tuple[Batch, ...], ...]:
        parents = {group.parent for group in self.groups if group.parent is not None}
        by_depth: dict[int, list[int]] = defaultdict(list)
        for number, group in enumerate(self.groups):
            by_depth[group.depth].append(number)
        found = []
        state_of: dict[int, int] = {}
        for depth in sorted(by_depth):
            inner = [number for number in by_depth[depth] if number in parents]
            leaves = [number for number in by_depth[depth] if number not in parents]
            batches = []
            states: dict[int, int] = {}
            for numbers, full, has_children in (
                (inner, fullness, True),
                (leaves, _FULLNESS, False),
            ):
                for together in _of_similar_length(numbers, self.groups, full):
                    batches.append(self._batch(together, state_of, has_children))
                    if has_children:
                        states |= {number: len(states) + n for n, number in enumerate(together)}
            state_of = states
            found.append(tuple(batches))
        return tuple(found)

    def _batch(
        self, numbers: Sequence[int], state_of: Mapping[int, int], has_children: bool
    ) -> Batch:
        groups = [self.groups[number] for number in numbers]
        longest = max(group.length for group in groups)
        index = torch.full((len(groups), longest), self.tokens, dtype=torch.int64)
        for row, group in zip(index, groups, strict=True):
            row[: group.length] = torch.arange(group.start, group.stop)
        parents = None
        if groups[0].parent is not None:
            rows = [state_of[group.parent] for group in groups if group.parent is not None]
            parents = torch.tensor(rows, device=self.device)
        return Batch(index.to(self.device), parents, has_children)

    def order(self, batches: tuple[tuple[Batch, ...], ...]) -> Tensor:
        """Return int64 [N]: each position's place in the outputs of all batches, laid end to end;
        behind the last of them for padding."""
        everywhere = torch.cat([batch.index.flatten() for depth in batches for batch in depth])
        places = torch.full(
            (self.tokens + 1,), len(everywhere), dtype=torch.int64, device=self.device
        )
        places[everywhere] = torch.arange(len(everywhere), device=self.device)
        return places[:-1]

    @functools.cached_property
    def scan_order(self) -> Tensor:
        """Return the `order` of `batches`."""
        return self.order(self.batches)

    @functools.cached_property
    def exact_order(self) -> Tensor:
        """Return the `order` of `exact_batches`."""
        return self.order(self.exact_batches)

    def taps(self, before: int) -> tuple[Tensor, Tensor]:
        """Return int64 (positions, places): each group after `before` inputs of its ancestors, N
        for missing ones; and each position's place therein, behind the end for padding.
        """
        if before not in self._taps:
            self._taps[before] = self._find_taps(before)
        return self._taps[before]

    def _find_taps(self, before: int) -> tuple[Tensor, Tensor]:
        positions: list[int] = []
        places = torch.full((self.tokens,), -1, dtype=torch.int64)
        tails: list[list[int]] = []
        for group in self.groups:
            if group.parent is None:
                above = []
            else:
                above = tails[group.parent]
            own = list(range(group.start, group.stop))
            positions += [self.tokens] * (before - len(above)) + above
            places[group.start : group.stop] = torch.arange(len(own)) + len(positions)
            positions += own
            tails.append((above + own)[-before:] if before else [])
        places[places < 0] = len(positions)
        return torch.tensor(positions, device=self.device), places.to(self.device)


def _of_similar_length(
    numbers: Sequence[int], groups: Sequence[Group], fullness: float
) -> list[list[int]]:
    found: list[list[int]] = []
    for number in sorted(numbers, key=lambda number: -groups[number].length):
        longest = groups[found[-1][0]].length if found else 0
        if groups[number].length < fullness * longest or not found:
            found.append([])
        found[-1].append(number)
    return found


def branches_of(group_ids: Tensor, parent_ids: Tensor) -> Branches:
    """Return the groups of packed rows. Waits for the device of the ids.

    group_ids, parent_ids: int64 [B, T], -1 in padding, as in `ttrl.data.packing.masks`.
    """
    rows, length = group_ids.shape
    groups: list[Group] = []
    for row, (ids, parents) in enumerate(zip(group_ids.cpu(), parent_ids.cpu(), strict=True)):
        runs, counts = torch.unique_consecutive(ids, return_counts=True)
        numbers: dict[int, int] = {}
        start = 0
        for group, count in zip(runs.tolist(), counts.tolist(), strict=True):
            if group >= 0:
                parent = int(parents[start])
                if parent == group:
                    above = None
                else:
                    above = numbers[parent]
                if above is None:
                    depth = 0
                else:
                    depth = groups[above].depth + 1
                numbers[group] = len(groups)
                begin = row * length + start
                groups.append(Group(begin, begin + count, above, depth))
            start += count
    # Rows of pure padding: a process gets them if only others have rows left.
    if not groups:
        groups.append(Group(0, length, None, 0))
    return Branches(tuple(groups), rows * length, group_ids.device)


class Scan(NamedTuple):
    """How a scan function takes its arguments."""

    tokens: tuple[str, ...]
    """Arguments with a vector for each token, [B, T, …]."""
    state: str
    """The argument with initial states."""
    wants_state: str
    """The argument requesting final states."""
    fill: Mapping[str, float] | None = None
    """Neutral values: a token with them changes no state; zeros unless listed. None: there are
    none, and nothing may be padded."""
    always_two: bool = True
    """Whether it returns (outputs, states) even without a request for states."""


def branching_scan(
    function: Callable[..., Any], scan: Scan, given: Mapping[str, Any], branches: Branches
) -> Tensor:
    """Return the outputs [B, T, …] of a scan over packed trees; finite and meaningless at padding.

    given: the function's arguments by name, for rows as they are packed.
    """
    rows = given[scan.tokens[0]].shape[:2]
    if scan.fill is None:
        batches = branches.exact_batches
        order = branches.exact_order
    else:
        batches = branches.batches
        order = branches.scan_order
    laid = {}
    for name in scan.tokens:
        x = given[name].flatten(0, 1)
        row = x.new_full((1, *x.shape[1:]), (scan.fill or {}).get(name, 0.0))
        laid[name] = torch.cat([x, row])
    others = {name: value for name, value in given.items() if name not in scan.tokens}
    outputs: list[Tensor] = []
    states: Tensor | None = None
    for depth in batches:
        finals = []
        for batch in depth:
            arguments = others | {name: x[batch.index] for name, x in laid.items()}
            if batch.parents is not None:
                assert states is not None
                arguments[scan.state] = states[batch.parents]
            arguments[scan.wants_state] = batch.has_children
            found = function(**arguments)
            if isinstance(found, tuple):
                own = found[0]
            else:
                own = found
            outputs.append(own.flatten(0, 1))
            if batch.has_children:
                finals.append(found[1])
        states = torch.cat(finals) if finals else None
    outputs.append(outputs[0].new_zeros(1, *outputs[0].shape[1:]))
    out: Tensor = torch.cat(outputs)[order].unflatten(0, rows)
    return out


def branching_convolution(
    function: Callable[..., Tensor],
    x_BCT: Tensor,
    weight_Ck: Tensor,
    branches: Branches,
    **others: Any,
) -> Tensor:
    """Return a causal convolution [B, C, T] over packed trees; finite and meaningless at
    padding.
    """
    rows, _, length = x_BCT.shape
    positions, places = branches.taps(weight_Ck.shape[-1] - 1)
    laid_CN = F.pad(x_BCT.transpose(0, 1).flatten(1), (0, 1))
    out_CM = function(laid_CN[:, positions].unsqueeze(0), weight_Ck, **others)[0]
    out_CN = F.pad(out_CM, (0, 1))[:, places]
    out_BCT: Tensor = out_CN.unflatten(1, (rows, length)).transpose(0, 1)
    return out_BCT
