"""Make zebra-grid tasks from a published or generated file in ZebraLogic's format, or on demand."""

from typing import Literal, NamedTuple

from ttrl.errors import TaskError
from ttrl.tasks.datasets import (
    Row,
    RowError,
    Rows,
    Source,
    check_name,
    from_json,
    load_rows,
    local_path,
    puzzle_seeds,
    select,
    text_field,
)
from ttrl.tasks.task import Task, question
from ttrl.tasks.zebra_grid.generator import make_puzzle
from ttrl.tasks.zebra_grid.grading import ZebraGridGrader

Split = Literal["train", "validation"]


class ZebraPuzzle(NamedTuple):
    """One row: the text with its clues, and the grid with house numbers in the first column."""

    text: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def load_puzzles(
    source: Source,
    *,
    splits: tuple[str, ...] = (),
    config: str | None = None,
) -> Rows[ZebraPuzzle]:
    """Load the puzzles of a file with ZebraLogic's fields: puzzle, and solution with header and
    rows.

    source: see ttrl.tasks.datasets. Raises TaskError naming the row, also for rows with a hidden
        solution (`___`).
    """
    return load_rows(source, _parse, splits=splits, config=config)


def get_zebra_grid_tasks(
    split: Split = "train",
    n: int | None = 32,
    seed: int = 0,
    *,
    path: Source | None = None,
    config: str | None = None,
    houses: int | None = None,
    attributes: int | None = None,
) -> list[Task]:
    """Return `n` puzzles; reward = share of right cells.

    path: a file of puzzles, or the hub's id with `config` (None for `n`: all of the split). One in
        ten, by a hash of the text, is held out for validation; in a folder, train and validation
        are files of their own.
    Without it puzzles are made here: 2 to 6 houses and attributes, drawn at random if not given.
    validation: the same ones for every seed, never one of train.
    """
    check_name("split", split, ("train", "validation"), "zebra_grid")
    if path is not None:
        if houses is not None or attributes is not None:
            raise TaskError(
                "houses and attributes apply to puzzles generated here; a file of puzzles (path) "
                "has its own"
            )
        in_folder = local_path(path).is_dir()
        # The published set has one split, named test.
        names = (
            ("test", "train")
            if not in_folder
            else (("train",) if split == "train" else ("validation", "val"))
        )
        puzzles = select(
            load_puzzles(path, splits=names, config=config),
            lambda puzzle: puzzle.text,
            split,
            n,
            seed,
            "zebra-grid",
            held_out=not in_folder,
            answer=lambda puzzle: (puzzle.header, puzzle.rows),
        )
    else:
        held_out = split == "validation"
        puzzles = [
            _parse(make_puzzle(one, houses, attributes, held_out=held_out))
            for one in puzzle_seeds(split, n, seed)
        ]
    return [
        Task(question(prompt(puzzle)), ZebraGridGrader(puzzle.header, puzzle.rows))
        for puzzle in puzzles
    ]


def prompt(puzzle: ZebraPuzzle) -> str:
    """Write the text and the answer's format: an empty table to be filled in."""
    table = ["| " + " | ".join(puzzle.header) + " |", "|" + "---|" * len(puzzle.header)]
    table += ["| " + row[0] + " |" + " |" * (len(puzzle.header) - 1) for row in puzzle.rows]
    return (
        f"{puzzle.text}\n\nThink it through, then end your reply with this table, filled in:\n\n"
        + "\n".join(table)
    )


def _parse(row: Row) -> ZebraPuzzle:
    text = text_field(row, "puzzle")
    solution = from_json(row.get("solution"))
    if not isinstance(solution, dict) or not all(
        isinstance(solution.get(part), list) for part in ("header", "rows")
    ):
        raise RowError(
            f"solution is {str(row.get('solution'))[:80]!r}; it must be an object with header "
            "and rows"
        )
    lines = [solution["header"], *solution["rows"]]
    if not all(
        isinstance(line, list) and all(isinstance(cell, str) for cell in line) for line in lines
    ):
        raise RowError("solution: header and rows must be lists of texts")
    if any(cell.strip("_ ") == "" for line in solution["rows"] for cell in line):
        raise RowError(
            "its solution is hidden or has empty cells; use the private copy of the set, not the "
            "public one"
        )
    try:
        ZebraGridGrader(solution["header"], solution["rows"])
    except TaskError as error:
        raise RowError(str(error)) from None
    return ZebraPuzzle(text, tuple(solution["header"]), tuple(map(tuple, solution["rows"])))
