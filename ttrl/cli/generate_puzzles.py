"""`ttrl tasks generate`: make many puzzles in parallel; the file appears whole or not at all."""

import functools
import json
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from tqdm import tqdm

from ttrl.errors import UserError
from ttrl.messages import JsonObject
from ttrl.system.files import atomic_file
from ttrl.tasks import temporal_clue, zebra_grid
from ttrl.tasks.clauses import solver_class

Maker = Callable[[str], JsonObject]
FAMILIES = ("temporal-clue", "temporal-clue-night", "zebra-grid")


def _maker(family: str, size: str | None) -> Maker:
    """Return the function from a seed to a row. Raises UserError for an unknown family or size."""
    if family not in FAMILIES:
        raise UserError(f"no puzzles are called {family!r}; choose one of {', '.join(FAMILIES)}")
    if family == "zebra-grid":
        if size is not None and not re.fullmatch("[2-6]x[2-6]", size):
            raise UserError(
                f"zebra-grid has no size {size!r}; give houses x attributes, 2 to 6 each, such as "
                "5x4"
            )
        houses, attributes = map(int, size.split("x")) if size is not None else (None, None)
        return functools.partial(zebra_grid.make_puzzle, houses=houses, attributes=attributes)
    if size is not None and size not in temporal_clue.SIZES:
        raise UserError(
            f"temporal-clue has no size {size!r}; choose one of {', '.join(temporal_clue.SIZES)}"
        )
    scope: temporal_clue.Scope
    if family == "temporal-clue-night":
        scope = "night"
    else:
        scope = "answers"
    return functools.partial(
        temporal_clue.make_puzzle, size=temporal_clue.SIZES.get(size or ""), scope=scope
    )


def generate(
    family: str,
    n: int,
    output: Path,
    *,
    seed: int = 0,
    size: str | None = None,
    processes: int | None = None,
    pbar: bool = True,
) -> Path:
    """Write `n` puzzles as jsonl; the same rows for the same family, seed and size, with any number
    of processes.

    size: for temporal-clue a name such as "medium", for zebra-grid houses and attributes such as
    "5x4"; None mixes sizes. processes: None takes as many as there are cores. Returns the file.
    Raises UserError, also without python-sat; StorageError.
    """
    make = _maker(family, size)
    if n < 1:
        raise UserError(f"n is {n}; ask for at least one puzzle")
    if processes is not None and processes < 1:
        raise UserError(f"processes is {processes}; give at least one")
    solver_class()  # if missing, it raises before any process starts
    seeds = [f"generated {seed} {number}" for number in range(n)]
    count = min(n, processes if processes is not None else len(os.sched_getaffinity(0)))
    with atomic_file(output) as temporary, open(temporary, "w", encoding="utf-8") as file:
        made = _made(make, seeds, count)
        for row in tqdm(made, desc=family, total=n, unit="puzzle", disable=None if pbar else True):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return output


def _made(make: Maker, seeds: list[str], processes: int) -> Iterator[JsonObject]:
    """Make the rows, in the order of their seeds."""
    if processes == 1:
        yield from map(make, seeds)
        return
    # Spawned: a fork of a process with threads (tqdm has one) may hang. Ctrl-C is the parent's.
    ignored = (signal.SIGINT, signal.SIG_IGN)
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=signal.signal, initargs=ignored
    )
    try:
        # All of these jobs are in memory at once.
        yield from pool.map(make, seeds, chunksize=1 + len(seeds) // 1000)
    except BrokenProcessPool as error:
        raise UserError(
            f"a process that makes puzzles was killed ({error}); check this machine's free memory, "
            "or use fewer processes"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
