"""`ttrl tasks generate`: many puzzles in parallel, to a file that is there whole or not at all."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ttrl.errors import UserError
from ttrl.system.files import atomic_file
from ttrl.tasks import temporal_clue, zebra_grid
from ttrl.tasks.clauses import solver_class

_AHEAD = 16  # puzzles in work for each process: the file keeps their order, and a slow one must not stop the others


def make_temporal_clue(seed: str, size: str | None, scope: temporal_clue.Scope = "answers") -> dict[str, Any]:
    """Make one row. size: a name of `temporal_clue.SIZES`; None draws one."""
    return temporal_clue.make_puzzle(seed, None if size is None else temporal_clue.SIZES[size], scope)


def make_published_like(seed: str, size: str | None) -> dict[str, Any]:
    """Make one row of temporal-clue whose clues settle the whole night, like the published ones."""
    return make_temporal_clue(seed, size, "night")


def make_zebra_grid(seed: str, size: str | None) -> dict[str, Any]:
    """Make one row. size: "5x4" for 5 houses and 4 attributes; None draws one."""
    houses, attributes = (None, None) if size is None else map(int, size.split("x"))
    return zebra_grid.make_puzzle(seed, houses, attributes)


MAKERS: dict[str, Callable[[str, str | None], dict[str, Any]]] = {
    "temporal-clue": make_temporal_clue,
    "temporal-clue-night": make_published_like,
    "zebra-grid": make_zebra_grid,
}


def generate(
    family: str, n: int, output: Path, *, seed: int = 0, size: str | None = None, processes: int | None = None, pbar: bool = True
) -> Path:
    """Write `n` puzzles as jsonl; the same rows for the same family, seed and size, however many processes make them.

    size: of temporal-clue a name such as "medium", of zebra-grid houses and attributes such as "5x4"; None mixes sizes.
    processes: None takes as many as there are cores. Returns the file. Raises UserError, also without python-sat; StorageError.
    """
    if family not in MAKERS:
        raise UserError(f"no puzzles are named {family!r}; there are {', '.join(MAKERS)}")
    if n < 1:
        raise UserError(f"n is {n}; ask for at least one puzzle")
    if processes is not None and processes < 1:
        raise UserError(f"processes is {processes}; give at least one")
    _check_size(family, size)
    solver_class()  # where it is missing, this says so before any process starts
    seeds = [f"generated {seed} {number}" for number in range(n)]
    count = min(n, processes if processes is not None else len(os.sched_getaffinity(0)))
    with atomic_file(output) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for row in tqdm(
            _made(MAKERS[family], seeds, size, count), desc=family, total=n, unit="puzzle", disable=None if pbar else True
        ):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return output


def _check_size(family: str, size: str | None) -> None:
    """Check the size before any process starts."""
    if size is None:
        return
    if family.startswith("temporal-clue"):
        if size not in temporal_clue.SIZES:
            raise UserError(f"no size {size!r} of temporal-clue; there are {', '.join(temporal_clue.SIZES)}")
    elif len(parts := size.split("x")) != 2 or not all(part in ("2", "3", "4", "5", "6") for part in parts):
        raise UserError(f"no size {size!r} of zebra-grid; give houses x attributes, 2 to 6 each, such as 5x4")


def _made(
    make: Callable[[str, str | None], dict[str, Any]], seeds: list[str], size: str | None, processes: int
) -> Iterator[dict[str, Any]]:
    """Make the rows, in the order of their seeds."""
    if processes == 1:
        yield from (make(seed, size) for seed in seeds)
        return
    # Spawned: a fork of a process with threads (tqdm has one) may hang.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=_leave_ctrl_c_to_the_parent)
    waiting: list[Future[dict[str, Any]]] = []
    try:
        for seed in seeds:
            waiting.append(pool.submit(make, seed, size))
            if len(waiting) >= _AHEAD * processes:
                yield waiting.pop(0).result()
        while waiting:
            yield waiting.pop(0).result()
    except BrokenProcessPool as error:
        raise UserError(f"a process that makes puzzles was ended from outside ({error}); was there enough memory?") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _leave_ctrl_c_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
