"""Read a packed row for all pictures: segments in the shape of trees, and the savings
from sharing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ttrl.data.packing.packed import PackedTensors
from ttrl.data.packing.packed_format import IGNORE_LABEL
from ttrl.errors import PackError
from ttrl.text import counted, percent

TokenText: TypeAlias = Callable[[int], str]
"""From a token id to its text, as `visible` shows it or not."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A group of a row: neighbouring positions, begin <= t < stop."""

    group: int
    parent: int
    """Its parent group; itself for a root."""
    depth: int
    """0 for a root."""
    tree: int
    """Number of its root among the roots of the row."""
    begin: int
    stop: int
    end: int
    """One past the last position of its continuations, at any depth: positions stop <= t < end see
    all of it.
    """
    sample: int
    """Row of the sample table, -1 if several samples share it."""
    position: int
    """input_pos of its first token."""
    label: int
    """The label of its last position, -100 if nothing is trained there: the only label besides next
    tokens.
    """


@dataclass(frozen=True)
class RowFigures:
    """Counts of one row, or summed over rows, in positions."""

    positions: int
    """seq_len."""
    tokens: int
    """Positions outside padding."""
    trained: int
    """Labels."""
    samples: int
    trees: int
    saved: int
    """Positions saved by sharing among the same samples."""

    @property
    def padding(self) -> int:
        return self.positions - self.tokens

    def words(self) -> list[str]:
        if not self.tokens:
            return [f"{self.positions:,} positions", "padding alone"]
        return [
            f"{self.positions:,} positions",
            f"{self.tokens:,} tokens",
            f"{self.trained:,} trained ({percent(self.trained / self.tokens)} of the tokens)",
            f"{self.padding:,} padding ({percent(self.padding / self.positions)})",
            f"{counted(self.samples, 'sample')} in {counted(self.trees, 'tree')}",
            f"{self.saved:,} shared tokens saved "
            f"({percent(self.saved / (self.tokens + self.saved))})",
        ]


def check_rows(packed: PackedTensors, rows: Sequence[int]) -> list[int]:
    """Return the row numbers as ints. Raises PackError if there are none, or for missing ones."""
    chosen = [int(row) for row in rows]
    if not chosen or not all(0 <= row < packed.num_rows for row in chosen):
        count = f"{packed.num_rows} {'row' if packed.num_rows == 1 else 'rows'}"
        wrong = [row for row in chosen if not 0 <= row < packed.num_rows]
        named = ", ".join(map(str, wrong[:5])) + (" …" if len(wrong) > 5 else "")
        raise PackError(
            f"{f'row {named}' if wrong else 'no row'} of {count}; give rows from 0 to "
            f"{packed.num_rows - 1}"
        )
    return chosen


def segments_of(packed: PackedTensors, row: int) -> list[Segment]:
    """Return the groups of a row from left to right, padding left out. `packed` must hold to the
    format (`PackedTensors.check`)."""
    groups = packed.group_ids[row].numpy()
    used = int((groups >= 0).sum())  # padding comes last
    begins = np.flatnonzero(np.diff(groups[:used], prepend=-1))
    stops = [*begins[1:].tolist(), used]
    parents, samples, positions = (
        tensor[row].numpy()[begins].tolist()
        for tensor in (packed.parent_ids, packed.sample_ids, packed.input_pos)
    )
    labels = packed.labels[row].numpy()[np.array(stops[: len(begins)], dtype=np.int64) - 1].tolist()
    depths: list[int] = []
    trees: list[int] = []
    for group, parent in enumerate(parents):
        depths.append(0 if parent == group else depths[parent] + 1)
        trees.append(max(trees, default=-1) + 1 if parent == group else trees[parent])
    ends = stops[: len(parents)]
    for group in range(len(parents) - 1, -1, -1):  # children before their parents
        ends[parents[group]] = max(ends[parents[group]], ends[group])
    columns = (
        range(len(parents)),
        parents,
        depths,
        trees,
        begins.tolist(),
        stops,
        ends,
        samples,
        positions,
        labels,
    )
    return [Segment(*values) for values in zip(*columns)]


def figures_of(packed: PackedTensors, row: int, segments: Sequence[Segment]) -> RowFigures:
    """Return the figures of one row, from its segments."""
    tokens = segments[-1].stop if segments else 0
    own = [segment for segment in segments if segment.sample >= 0]
    return RowFigures(
        positions=packed.seq_len,
        tokens=tokens,
        trained=int((packed.labels[row] != IGNORE_LABEL).sum()),
        samples=len(own),
        trees=segments[-1].tree + 1 if segments else 0,
        saved=sum(segment.position + segment.stop - segment.begin for segment in own) - tokens,
    )


def figures_of_pack(packed: PackedTensors) -> RowFigures:
    first = (
        (packed.parent_ids == packed.group_ids) & (packed.group_ids >= 0) & (packed.input_pos == 0)
    )
    return RowFigures(
        positions=packed.tokens.numel(),
        tokens=packed.num_tokens,
        trained=packed.num_trained,
        samples=len(packed.samples),
        trees=int(first.sum()),
        saved=packed.num_saved,
    )


def visible(text: str) -> str:
    """Return a token's text for people: control characters as their symbols (␀, newline ↵, tab ⇥),
    other invisible ones (direction marks, joiners, lone surrogates, private characters, line
    separators) as numbers, ⟨200e⟩. Spaces stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _symbol(c) for c in text)


def _symbol(character: str) -> str:
    code = ord(character)
    if character in "\n\t":
        if character == "\n":
            return "↵"
        return "⇥"
    if code < 32 or code == 127:
        return chr(0x2421 if code == 127 else 0x2400 + code)
    if code == 0xA0:
        return "\u00a0"
    return f"⟨{code:x}⟩"
