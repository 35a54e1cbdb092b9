"""Checks puzzles with another solver: exactly one solution, and no redundant clue. `python
tools/check_puzzles.py --n 200`

Each puzzle is read back from its prompt, as a person would read it: only the text and the solution
are taken from the generator. What the sentences say is modelled independently
(check_puzzles_sat.py: clauses for CaDiCaL; or, `--solver cp-sat`, integers for CP-SAT of OR-Tools,
a hundred times slower). The generator uses another solver of the same package, python-sat, and
clauses of its own. OR-Tools requires a different protobuf from the one that vLLM was tested with,
so it goes into a separate folder: `pip install --no-deps --target DIR ortools absl-py
immutabledict`, then `PYTHONPATH=DIR python tools/check_puzzles.py --solver cp-sat`.

`--file FILE` checks the temporal-clue puzzles of a file instead, including the published ones.
"""

import argparse
import functools
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from check_puzzles_cp import cp_mystery, cp_streets
from check_puzzles_sat import Gates, MysteryGates, street_clue
from check_puzzles_text import read_mystery, read_subject
from check_puzzles_zebra import read_streets

from ttrl.tasks import temporal_clue, zebra_grid


def sat_mystery(sat: Any, row: dict[str, Any], *, night: bool = False) -> tuple[bool, int, int]:
    """(one answer, clues that could be left out, all clues) of a temporal-clue puzzle, by a solver
    of python-sat.

    night: it is the whole night of which there must be one, and for which all clues must be needed.
    """
    mystery = read_mystery(row["prompt"])
    assert len(mystery.clues) == row["num_clues"] and list(mystery.questions) == list(
        row["solution"]
    ), "read wrongly"
    with sat.Cadical153() as solver:
        gates = MysteryGates(solver, mystery)
        right = [
            gates.answer(text, row["solution"][letter], read_subject)
            for letter, text in mystery.questions.items()
        ]
        clues = [gates.truth(clue) for clue in mystery.clues]
        if night:
            assert solver.solve([*clues, *right]), (
                "the solution given contradicts the clues, or was read wrongly"
            )
            model = solver.get_model()
            right += [x for x in gates.everything() if model[x - 1] > 0]
        return _needed(solver, clues, right)


def sat_streets(sat: Any, row: dict[str, Any]) -> tuple[bool, int, int]:
    """The same for a zebra puzzle."""
    streets = read_streets(row["puzzle"])
    with sat.Cadical153() as solver:
        gates = Gates(solver)
        at = {value: gates.one_of(streets.houses) for column in streets.columns for value in column}
        for column in streets.columns:
            for house in range(streets.houses):
                gates.exactly(1, [at[value][house] for value in column])
        right = [
            at[value][house]
            for house, line in enumerate(row["solution"]["rows"])
            for value in line[1:]
        ]
        return _needed(solver, [street_clue(gates, at, clue) for clue in streets.clues], right)


def _needed(solver: Any, clues: list[int], right: list[int]) -> tuple[bool, int, int]:
    assert solver.solve([*clues, *right]), (
        "the solution given contradicts the clues, or was read wrongly"
    )
    solver.add_clause([-literal for literal in right])  # from here on, a solution is another answer
    unique = not solver.solve(clues)
    needless = sum(
        not solver.solve([*clues[:number], *clues[number + 1 :]]) for number in range(len(clues))
    )
    return unique, needless, len(clues)


Check = Callable[[Any, dict[str, Any]], tuple[bool, int, int]]
SOLVERS: dict[str, tuple[str, Check, Check]] = {
    "sat": ("pysat.solvers", sat_mystery, sat_streets),
    "cp-sat": ("ortools.sat.python.cp_model", cp_mystery, cp_streets),
}


def check_family(
    name: str, rows: Iterable[tuple[dict[str, Any], float]], check: Check, solver: Any
) -> int:
    """Prints one line about (puzzle, CPU seconds of making it) pairs; returns how much is wrong
    with them.
    """
    making = []
    counts = []
    ambiguous = 0
    needless = 0
    checking = 0.0
    for row, seconds in rows:
        start = time.process_time()
        unique, too_many, count = check(solver, row)
        checking += time.process_time() - start
        making.append(seconds)
        counts.append(count)
        ambiguous = ambiguous + (not unique)
        needless = needless + too_many
    made = ""
    if sum(making) > 0:
        made = (
            f" Making: {len(making) / sum(making):.2f} puzzles per CPU second (median "
            f"{statistics.median(making):.2f} s, "
            f"longest {max(making):.2f} s)."
        )
    clues = (
        f"{sum(counts)} clues ({min(counts)} to {max(counts)}, mean {statistics.mean(counts):.1f})"
    )
    print(
        f"{name}: {len(counts)} puzzles, {clues}; ambiguous: {ambiguous}, clues too many: "
        f"{needless}.{made} "
        f"Checking: {checking:.0f} CPU seconds.",
        flush=True,
    )
    return ambiguous + needless


def _made(
    make: Callable[[str], dict[str, Any]], seeds: Iterable[str]
) -> Iterator[tuple[dict[str, Any], float]]:
    for seed in seeds:
        start = time.process_time()
        row = make(seed)
        yield row, time.process_time() - start


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--n", type=int, default=200, help="puzzles of each kind (200)")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--solver", choices=tuple(SOLVERS), default="sat")
    parser.add_argument(
        "--scope",
        choices=("answers", "night"),
        default="answers",
        help="what the clues of temporal-clue determine",
    )
    parser.add_argument("--only", choices=("temporal-clue", "zebra-grid"), help="one family")
    parser.add_argument(
        "--file",
        type=Path,
        help="a jsonl file of temporal-clue puzzles to check, instead of new ones",
    )
    arguments = parser.parse_args()
    module, mystery, streets = SOLVERS[arguments.solver]
    if arguments.scope == "night" and arguments.solver != "sat":
        parser.error("--scope night is checked by --solver sat")
    try:
        solver = importlib.import_module(module)
    except ImportError as error:
        print(
            f"check_puzzles: {error}. See the top of this file for how to get it.", file=sys.stderr
        )
        return 2
    if arguments.file is not None:
        lines = arguments.file.read_text(encoding="utf-8").splitlines()[: arguments.n]
        return int(
            check_family(
                str(arguments.file), ((json.loads(line), 0.0) for line in lines), mystery, solver
            )
            > 0
        )
    seeds = [f"check {arguments.seed} {number}" for number in range(arguments.n)]
    faulty = 0
    if arguments.only != "zebra-grid":
        make = functools.partial(temporal_clue.make_puzzle, scope=arguments.scope)
        if arguments.scope == "night":
            mystery = functools.partial(mystery, night=True)
        faulty += check_family(
            f"temporal-clue, {arguments.scope}", _made(make, seeds), mystery, solver
        )
    if arguments.only != "temporal-clue":
        faulty += check_family("zebra-grid", _made(zebra_grid.make_puzzle, seeds), streets, solver)
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
