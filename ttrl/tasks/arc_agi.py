"""ARC-AGI: find the rule from input to output grids, and apply it (Chollet 2019, arXiv 1911.01547).

A grid has 1 to 30 rows and columns of colours 0–9. One prompt asks for all test inputs of a task.
"""

import hashlib
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ttrl.errors import TaskError
from ttrl.records import ANSWER_END
from ttrl.tasks.answers import after_thinking, place_in_content, reply_text
from ttrl.tasks.datasets import (
    Row,
    RowError,
    Source,
    check_choice,
    check_name,
    check_share,
    check_whole,
    list_field,
    load_rows,
    select,
)
from ttrl.tasks.numerals import ascii_digits
from ttrl.tasks.task import Choice, Task, question
from ttrl.tasks.words import as_typed

Grid: TypeAlias = tuple[tuple[int, ...], ...]
LARGEST = 30
AUGMENTATIONS = ("rotations", "reflections", "colours")

_INSTRUCTION = (
    "Each input grid becomes its output grid by the same rule. Find the rule, and apply it to "
    "{what}. Digits are colours. "
    "Write {answer} at the end of your reply: one line for each row, digits separated by spaces, "
    "as above."
)
# Allowed around the digits of a row; words, points and signs are not.
_ROW = str.maketrans({character: " " for character in ",|[](){};'\"\t\r\u200b\u00a0"})
_BREAKS = ("<answer>", "</answer>", "```")
_BREAK = "\n#\n"


@dataclass(frozen=True)
class Pair:
    """A demonstration, or a test with its answer."""

    input: Grid
    output: Grid


@dataclass(frozen=True)
class ARCPuzzle:
    """One task of the data set."""

    id: str
    train: tuple[Pair, ...]
    test: tuple[Pair, ...]

    def cells(self) -> int:
        return sum(
            len(grid) * len(grid[0])
            for pair in self.train + self.test
            for grid in (pair.input, pair.output)
        )


@dataclass(frozen=True)
class ARCGrader:
    """Mean over the test inputs: 1 for exactly the grid, 0 for another shape, else partial_credit ·
    share of equal cells.

    The last grids of the reply count, after any thinking: as many as there are test inputs, in
    their order. If there are fewer, they answer the first test inputs. Empty lines within grids are
    ignored if the grids between two other lines then make up the answers.
    """

    expected: tuple[Grid, ...]
    partial_credit: float = 0.0

    def __call__(self, choice: Choice) -> tuple[float, dict[str, float]]:
        """Return (reward, {"exact": 1 if all are right, "cells": mean share of equal cells,
        "shape": share of right shapes}), and the end of the last grid (`ttrl.records.ANSWER_END`).
        """
        answer = after_thinking(reply_text(choice))
        grids = _answers(_read_tables(answer), self.expected)
        given: list[Grid | None] = [*grids, *[None] * (len(self.expected) - len(grids))]
        shares = [
            _equal_share(grid, right) for grid, right in zip(given, self.expected, strict=True)
        ]
        count = len(shares)
        reward = (
            sum(1.0 if share == 1.0 else self.partial_credit * (share or 0.0) for share in shares)
            / count
        )
        metrics = {
            "exact": float(all(share == 1.0 for share in shares)),
            "cells": sum(share or 0.0 for share in shares) / count,
            "shape": sum(share is not None for share in shares) / count,
        }
        if grids:
            metrics[ANSWER_END] = place_in_content(choice, answer, _end(answer))
        return reward, metrics

    def reference(self) -> str:
        return "\n\n".join(map(write_grid, self.expected))


def _equal_share(grid: Grid | None, right: Grid) -> float | None:
    """Return the share of equal cells; None for another shape."""
    if grid is None or len(grid) != len(right) or len(grid[0]) != len(right[0]):
        return None
    equal = sum(a == b for row, wanted in zip(grid, right) for a, b in zip(row, wanted))
    return equal / (len(right) * len(right[0]))


@dataclass(frozen=True)
class _Table:
    """A grid in adjacent lines of text."""

    rows: Grid
    has_heading: bool
    """A line of dashes follows its first row."""
    goes_on: bool
    """Only empty lines separate it from the previous grid."""

    def without_numbers(self, height: int) -> Grid:
        """Return its rows, without an extra heading of column numbers."""
        numbers = [tuple(range(first, first + len(self.rows[0]))) for first in (0, 1)]
        if self.has_heading and len(self.rows) == height + 1 and self.rows[0] in numbers:
            return self.rows[1:]
        return self.rows


def read_grids(text: str) -> list[Grid]:
    """Return every grid of a text: adjacent lines of the same number of digits.

    Accepted are "1 2 3", "1, 2, 3", "123", "| 1 | 2 | 3 |" with and without lines of dashes, and
    [[1, 2], [3, 4]] in one line or several, in digits of any script. A line with anything else ends
    a grid; a row of another length begins a new one.
    """
    return [table.rows for table in _read_tables(text)]


def _read_tables(text: str) -> list[_Table]:
    for mark in _BREAKS:
        text = text.replace(mark, _BREAK)
    tables: list[_Table] = []
    rows: list[tuple[int, ...]] = []
    has_heading = goes_on = after_rule = False

    def end(only_empty: bool) -> None:
        nonlocal has_heading, goes_on
        if rows and len(rows) <= LARGEST + has_heading:
            tables.append(_Table(tuple(rows), has_heading, goes_on))
            goes_on = True
        goes_on = goes_on and only_empty
        has_heading = False
        rows.clear()

    for line in ascii_digits(as_typed(text)).split("\n"):
        is_rule = _is_rule(line)
        if is_rule and not after_rule:
            has_heading = has_heading or len(rows) == 1
            after_rule = True
            continue
        after_rule = is_rule
        for piece in _bracketed(line) if "[[" in line or "]]" in line else [line]:
            row = _read_row(piece)
            if row is None:
                end(only_empty=not line.strip())
                continue
            if rows and len(rows[-1]) != len(row):
                end(only_empty=True)
            rows.append(row)
    end(only_empty=True)
    return tables


def _is_rule(line: str) -> bool:
    """Tell whether a line is |---|:-:| or +---+---+ of a table; a line of only dashes is not."""
    return "-" in line and ("|" in line or "+" in line) and not line.strip("-|+:= \t\r")


def _answers(tables: Sequence[_Table], expected: Sequence[Grid]) -> list[Grid]:
    """Return the last grids, at most one for each expected grid."""
    heights = [len(grid) for grid in expected]
    last = tables[-len(heights) :]
    grids = [table.without_numbers(height) for table, height in zip(last, heights)]
    if [len(grid) for grid in grids] == heights:
        return grids
    start = len(tables) - 1
    while start > 0 and tables[start].goes_on:
        start -= 1
    return _joined([table.rows for table in tables[start:]], heights) or grids


def _joined(pieces: Sequence[Grid], heights: Sequence[int]) -> list[Grid]:
    """Join pieces to grids of these heights; [] unless all pieces are used."""
    left = list(pieces)
    grids = []
    for height in heights:
        rows: Grid = ()
        while left and len(rows) < height and (not rows or len(left[0][0]) == len(rows[0])):
            rows += left.pop(0)
        if len(rows) != height:
            return []
        grids.append(rows)
    if left:
        return []
    return grids


def _end(text: str) -> int:
    """Return the end of the last row, in characters; 0 without one."""
    lines = text.split("\n")
    while lines and not read_grids(lines[-1]):
        lines.pop()
    return len("\n".join(lines).rstrip())


def _bracketed(line: str) -> list[str]:
    """Cut [[1, 2], [3, 4]] into its rows, with an empty piece around each list of lists, after any
    words.
    """
    pieces: list[str] = []
    for piece in line.replace("]]", "]\n]").split("]"):
        if "[[" in piece or "\n" in piece:
            pieces.append("")
        row = piece.rpartition("[[")[2].strip(" ,\t\r\n")
        if row:
            pieces.append(row)
    return pieces


def _read_row(line: str) -> tuple[int, ...] | None:
    if len(line) <= 40 * LARGEST:
        tokens = line.translate(_ROW).split()
    else:
        tokens = []
    if len(tokens) == 1 and len(tokens[0]) <= LARGEST:
        tokens = list(tokens[0])
    if not 0 < len(tokens) <= LARGEST or not all(
        len(token) == 1 and token in "0123456789" for token in tokens
    ):
        return None
    return tuple(map(int, tokens))


def write_grid(grid: Grid) -> str:
    """Write one line for each row, digits separated by spaces."""
    return "\n".join(" ".join(map(str, row)) for row in grid)


def get_arc_agi_tasks(
    split: Literal["train", "validation", "test"] = "train",
    n: int | None = None,
    seed: int = 0,
    *,
    path: Source,
    partial_credit: float = 0.0,
    augment: Collection[str] = (),
    max_cells: int | None = None,
) -> list[Task]:
    """Return `n` puzzles (None: all of the split), none twice; in train, the seed decides selection
    and order.

    train: the data set's training puzzles without those of validation, one in ten by a hash of the
        id. test: its evaluation set.
    path: a folder with `training` and `evaluation` (.jsonl, .json, .csv, .parquet, or folders of
        json files, as published), one file, or an id on the Hugging Face hub; rows have "train" and
        "test", lists of {"input", "output"}, and optionally "id".
    augment: any of "rotations", "reflections", "colours": each training puzzle is shown under a
        random one of them, all of its grids alike; the seed decides. Validation and test never
        change.
    max_cells: leaves out puzzles with more cells in all of their grids, about half the tokens of
        the prompt.
    """
    check_name("split", split, ("train", "validation", "test"), "arc_agi")
    check_share("partial_credit", partial_credit)
    check_choice("augment", augment)
    if max_cells is not None:
        check_whole("max_cells", max_cells, 1)
    unknown = [name for name in augment if name not in AUGMENTATIONS]
    if unknown:
        raise TaskError(f"augment has {unknown}; choose from {', '.join(AUGMENTATIONS)}")
    if split == "test":
        names = ("evaluation", "test")
    else:
        names = ("training", "train")
    rows = load_rows(path, parse_row, splits=names)
    if max_cells is not None:
        rows = rows.where(lambda puzzle: puzzle.cells() <= max_cells)
    puzzles = select(
        rows,
        lambda puzzle: puzzle.id,
        split,
        n,
        seed,
        "arc_agi",
        held_out=split != "test",
        question=lambda puzzle: (puzzle.train, tuple(pair.input for pair in puzzle.test)),
        answer=lambda puzzle: [pair.output for pair in puzzle.test],
    )
    if augment and split == "train":
        puzzles = [
            augmented(puzzle, random.Random(f"arc_agi {seed} {puzzle.id}"), augment)
            for puzzle in puzzles
        ]
    return [
        Task(
            question(write_prompt(puzzle)),
            ARCGrader(tuple(pair.output for pair in puzzle.test), partial_credit),
            id=f"arc-agi/{puzzle.id}",
        )
        for puzzle in puzzles
    ]


def write_prompt(puzzle: ARCPuzzle) -> str:
    parts = [
        f"Input:\n{write_grid(pair.input)}\n\nOutput:\n{write_grid(pair.output)}"
        for pair in puzzle.train
    ]
    if len(puzzle.test) == 1:
        parts.append(f"Test input:\n{write_grid(puzzle.test[0].input)}")
        what = "the test input"
        answer = "its output grid"
    else:
        parts += [
            f"Test input {i}:\n{write_grid(pair.input)}" for i, pair in enumerate(puzzle.test, 1)
        ]
        what = f"the {len(puzzle.test)} test inputs"
        answer = "their output grids, in this order, with an empty line between,"
    return "\n\n".join([*parts, _INSTRUCTION.format(what=what, answer=answer)])


def augmented(puzzle: ARCPuzzle, rng: random.Random, augment: Collection[str]) -> ARCPuzzle:
    """Return the puzzle rotated, mirrored and recoloured: one random change for all of its grids.
    The rule stays a rule.
    """
    if "rotations" in augment:
        turns = int(rng.random() * 4)
    else:
        turns = 0
    mirror = "reflections" in augment and rng.random() < 0.5
    colours = list(range(10))
    if "colours" in augment:
        # Fisher and Yates's shuffle, with only random(): the same in every version of Python.
        for last in range(9, 0, -1):
            other = int(rng.random() * (last + 1))
            colours[last], colours[other] = colours[other], colours[last]

    def change(grid: Grid) -> Grid:
        for _ in range(turns):
            grid = tuple(zip(*grid[::-1]))  # a quarter to the right
        if mirror:
            grid = tuple(row[::-1] for row in grid)
        return tuple(tuple(colours[cell] for cell in row) for row in grid)

    return ARCPuzzle(puzzle.id, _changed(puzzle.train, change), _changed(puzzle.test, change))


def _changed(pairs: tuple[Pair, ...], change: Callable[[Grid], Grid]) -> tuple[Pair, ...]:
    return tuple(Pair(change(pair.input), change(pair.output)) for pair in pairs)


def parse_row(row: Row) -> ARCPuzzle:
    """Read {"train": [{"input": grid, "output": grid}], "test": the same}. Raises RowError."""
    train, test = (
        tuple(_pair(pair, f"{part}[{number}]") for number, pair in enumerate(list_field(row, part)))
        for part in ("train", "test")
    )
    if not train or not test:
        raise RowError(
            f"{len(train)} train pairs and {len(test)} test pairs; give at least one of each"
        )
    name = row.get("id", row.get("task_id"))
    if name is None:
        name = hashlib.sha256(repr((train, test)).encode()).hexdigest()[:8]
    return ARCPuzzle(str(name), train, test)


def _pair(pair: Any, where: str) -> Pair:
    if not isinstance(pair, dict) or "input" not in pair or "output" not in pair:
        raise RowError(
            f"{where} lacks input or output; it needs both (a set without answers cannot be graded)"
        )
    return Pair(_grid(pair["input"], f"{where}.input"), _grid(pair["output"], f"{where}.output"))


def _grid(value: Any, where: str) -> Grid:
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        raise RowError(f"{where} is not a list of rows")
    widths = {len(row) for row in value}
    if not 1 <= len(value) <= LARGEST or len(widths) != 1 or not 1 <= min(widths) <= LARGEST:
        raise RowError(
            f"{where} has {len(value)} rows of {sorted(widths)} cells; 1 to {LARGEST} rows of "
            f"one length up to {LARGEST}"
        )
    if not all(type(cell) is int and 0 <= cell <= 9 for row in value for cell in row):
        raise RowError(f"{where} has cells that are not whole numbers from 0 to 9")
    return tuple(map(tuple, value))
