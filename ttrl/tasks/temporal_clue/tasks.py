"""Make temporal-clue tasks from a file of puzzles (published or generated), or on demand."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ttrl.errors import TaskError
from ttrl.tasks.datasets import (
    Row,
    RowError,
    Rows,
    Source,
    check_name,
    from_json,
    is_file,
    load_rows,
    puzzle_seeds,
    select,
    text_field,
)
from ttrl.tasks.task import Task, question
from ttrl.tasks.temporal_clue.generator import Scope, make_puzzle
from ttrl.tasks.temporal_clue.grading import TemporalClueGrader
from ttrl.tasks.temporal_clue.scene import PuzzleSize
from ttrl.text import short

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class TemporalCluePuzzle:
    """One row of a file: the whole prompt, the right value for each letter, and the number of
    clues in the prompt.
    """

    prompt: str
    solution: Mapping[str, str]
    num_clues: int | None = None


def load_puzzles(source: Source, *, splits: tuple[str, ...] = ()) -> Rows[TemporalCluePuzzle]:
    """Load the puzzles of a file with the fields prompt, solution (letters and values) and, if
    known, num_clues.

    source: see ttrl.tasks.datasets. Raises TaskError naming the row.
    """
    return load_rows(source, _parse, splits=splits)


def get_temporal_clue_tasks(
    split: Split = "train",
    n: int | None = 32,
    seed: int = 0,
    *,
    path: Source | None = None,
    size: PuzzleSize | None = None,
    scope: Scope = "answers",
    power: float = 1.0,
) -> list[Task]:
    """Return `n` puzzles; reward = (share of right answers) ** power.

    path: a file of puzzles (None for `n`: all of the split). One in ten, by a hash of the prompt,
        is held out for validation; in a folder or on the hub, train and validation are its files
        train and val.
    Without it puzzles are made here, a dozen a second: `ttrl tasks generate temporal-clue` makes
    files of them in parallel.
        size: None mixes sizes. scope: "answers", or "night" for puzzles like the published ones;
        they take longer to make (`ttrl.tasks.temporal_clue.generator`). validation: the same ones
        for every seed, never one of train.
    """
    check_name("split", split, ("train", "validation"), "temporal_clue")
    if size is not None and not isinstance(size, PuzzleSize):
        raise TaskError(f"size is {short(size, 80)}; give a PuzzleSize, or None to mix sizes")
    if path is not None:
        if size is not None or scope != "answers":
            raise TaskError(
                "size and scope apply to puzzles generated here; a file of puzzles (path) has its "
                "own"
            )
        names = ("train",) if split == "train" else ("validation", "val")
        puzzles = select(
            load_puzzles(path, splits=names),
            lambda puzzle: puzzle.prompt,
            split,
            n,
            seed,
            "temporal-clue",
            held_out=is_file(path),
            answer=lambda puzzle: puzzle.solution,
        )
    else:
        held_out = split == "validation"
        puzzles = [
            _parse(make_puzzle(one, size, scope, held_out=held_out))
            for one in puzzle_seeds(split, n, seed)
        ]
    return [
        Task(question(puzzle.prompt), TemporalClueGrader(puzzle.solution, power))
        for puzzle in puzzles
    ]


def _parse(row: Row) -> TemporalCluePuzzle:
    prompt = text_field(row, "prompt")
    solution = from_json(row.get("solution"))
    if not isinstance(solution, Mapping):
        raise RowError(
            f"solution is {str(solution)[:80]!r}; it must be an object of letters and values"
        )
    # Tables of the hub have a column for every letter of any row; the others are null.
    solution = {str(letter): value for letter, value in solution.items() if value is not None}
    if not all(isinstance(value, str) for value in solution.values()):
        raise RowError(f"solution is {str(solution)[:80]!r}; its values must be texts")
    try:
        TemporalClueGrader(solution)
    except TaskError as error:
        raise RowError(str(error)) from None
    clues = row.get("num_clues")
    return TemporalCluePuzzle(prompt, solution, clues if type(clues) is int else None)
