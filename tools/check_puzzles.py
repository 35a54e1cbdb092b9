"""Check puzzles for one solution and no redundant clue: `python tools/check_puzzles.py --n 200`

Each puzzle is read back from its prompt, as a person would read it. Only the text and the solution
come from the generator, not its clauses (`ttrl/tasks/temporal_clue/rules.py`) or its solver. Every
clue becomes a literal, true exactly if the clue is, by AND and OR gates over who was where. So one
solver per puzzle finds other solutions and, by leaving out one assumption at a time, redundant
clues.

The solver is CaDiCaL of python-sat, the package of the generator's solver. `--solver cp-sat` takes
OR-Tools' instead, a hundred times slower. OR-Tools requires another protobuf than vLLM, so it goes
into a folder of its own: `pip install --no-deps --target DIR ortools absl-py immutabledict`, then
`PYTHONPATH=DIR python tools/check_puzzles.py --solver cp-sat`.

`--file FILE` checks the temporal-clue puzzles of a file instead, including the published ones.
"""

import argparse
import importlib
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from ttrl.tasks import temporal_clue, zebra_grid

DIRECTIONS = {"north": (0, -1), "south": (0, 1), "east": (1, 0), "west": (-1, 0)}


class Mystery(NamedTuple):
    """A temporal-clue prompt, read. Statements are tuples (kind, ...), see `read_statement`; names
    are as in the text.
    """

    victim: str
    suspects: list[str]
    weapons: list[str]
    rooms: list[str]
    width: int
    times: list[str]
    motives: dict[str, int]
    """By name: how many suspects have it."""
    clues: list[tuple[Any, ...]]
    questions: dict[str, str]


def read_mystery(prompt: str) -> Mystery:
    """Take a prompt apart. Raises ValueError for a clue that it does not know."""
    victim = "Mr. Boddy" if " invited" not in prompt else prompt.split(" invited", 1)[0]
    lists = [re.findall(r"^• (.+)$", part, re.M) for part in re.split(r"\n\n(?!•)", prompt)]
    lists = [items for items in lists if items]
    suspects = lists[0]
    weapons = lists[1]
    rest = lists[2:]
    times = rest.pop(0) if rest and re.fullmatch(r"\d\d:\d\d [AP]M", rest[0][0]) else [""]
    motives = {}
    for text in rest[0] if rest else []:
        counted = re.fullmatch(r"(.+) \((\d+) suspects?\)", text)
        motives[counted[1] if counted else text] = int(counted[2]) if counted else 1
    rooms = re.findall(r"^\d+\. (.+)$", prompt, re.M)
    first_row = re.search(r"^W (\S+) E$", prompt, re.M)
    assert first_row is not None
    mystery = Mystery(
        victim, suspects, weapons, rooms, first_row[1].count("|") + 1, times, motives, [], {}
    )
    for text in re.findall(r"^- (.+?)\.?$", prompt, re.M):
        mystery.clues.append(read_statement(mystery, text))
    for letter, text in re.findall(r"^([A-Z])\. (.+\?)$", prompt, re.M):
        mystery.questions[letter] = text
    return mystery


def read_statement(mystery: Mystery, text: str) -> tuple[Any, ...]:
    """Return a clue as a tuple: ("in", who, room, time), ("or", statement, statement), ..."""
    for word, kind in ((" if and only if ", "iff"), (" or ", "or")):
        if word in text:
            return (kind, *(read_statement(mystery, part) for part in text.split(word)))
    if known := re.fullmatch(r".+ was murdered by (?:the|a) suspect motivated by (\w+)", text):
        return ("motive", ("murderer", 0), known[1])
    if known := re.fullmatch(r".+ was murdered by (.+)", text):
        return ("by", mystery.suspects.index(known[1]))
    at = r"(?: at (?P<time>\d\d:\d\d [AP]M))?"
    forms = (
        ("killed", r".+ was killed with the (?P<thing>.+)"),
        ("murdered", r".+ was murdered" + at),
        ("motive", r"(?P<who>.+) (?:is|was) motivated by (?P<motive>\w+)"),
        ("same", r"(?P<who>.+) was in the same room as (?P<other>.+?)" + at),
        ("beside", r"(?P<who>.+) was in the room just (?P<direction>\w+) of (?P<other>.+?)" + at),
        ("never", r"(?P<who>.+) was (?:never|not) in the (?P<room>.+)"),
        ("stayed", r"(?P<who>.+) was in the (?P<room>.+) from (?P<time>.+) to (?P<until>.+)"),
        (
            "together",
            r"(?P<who>.+) and (?P<other>.+) were (?:in|at) the (?P<room>.+) together at least "
            r"once",
        ),
        (
            "moved",
            r"(?P<who>.+) moved(?P<thing> .+)? from the (?P<room>.+) to the (?P<second>.+?)" + at,
        ),
        ("in", r"(?P<who>.+) was (?:in|at) the (?P<room>.+?)" + at),
    )
    for kind, form in forms:
        if match := re.fullmatch(form, text):
            found: dict[str, Any] = match.groupdict()
            parts: list[Any] = [kind]
            for name, value in found.items():
                parts.append(_read_part(mystery, name, value))
            return tuple(parts)
    raise ValueError(f"no such kind of clue: {text!r}")


def _read_part(mystery: Mystery, name: str, value: str | None) -> Any:
    if name in ("room", "second"):
        return mystery.rooms.index(str(value))
    if name in ("time", "until"):
        return mystery.times.index(value or "")
    if name in ("who", "other", "thing"):
        return None if value is None else read_subject(mystery, value)
    return value


def read_subject(mystery: Mystery, text: str) -> tuple[str, Any]:
    """Return ("mover", index of suspects, victim, weapons), ("murderer", 0), ("murder weapon", 0)
    or ("motive", name).
    """
    name = re.sub(r"^(?:the|a) ", "", text.strip(), flags=re.I)
    if name in ("murderer", "murder weapon"):
        return name, 0
    if match := re.fullmatch(r"suspect motivated by (\w+)", name):
        return "motive", match[1]
    return "mover", [*mystery.suspects, mystery.victim, *mystery.weapons].index(name)


class CpSat:
    """OR-Tools' CP-SAT, with the methods of python-sat's solvers."""

    def __init__(self, cp: Any) -> None:
        self.cp = cp
        self.model = cp.CpModel()
        self.solver = cp.CpSolver()
        self.solver.parameters.num_workers = 1
        self.variables: list[Any] = []

    def _literals(self, numbers: Iterable[int]) -> list[Any]:
        literals = []
        for number in numbers:
            while len(self.variables) < abs(number):
                self.variables.append(self.model.new_bool_var(""))
            variable = self.variables[abs(number) - 1]
            literals.append(variable if number > 0 else ~variable)
        return literals

    def add_clause(self, numbers: Iterable[int]) -> None:
        """Require one of the literals."""
        self.model.add_bool_or(self._literals(numbers))

    def solve(self, numbers: Iterable[int]) -> bool:
        """Tell whether there is a solution with these literals. Raises RuntimeError in doubt."""
        self.model.clear_assumptions()
        self.model.add_assumptions(self._literals(numbers))
        status = self.solver.solve(self.model)
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE, self.cp.INFEASIBLE):
            raise RuntimeError(f"CP-SAT says {self.solver.status_name(status)}")
        return bool(status != self.cp.INFEASIBLE)

    def get_model(self) -> list[int]:
        """Return the literals of the solution, by variable."""
        values = [self.solver.boolean_value(variable) for variable in self.variables]
        return [number if value else -number for number, value in enumerate(values, 1)]


def make_solver(name: str) -> Callable[[], Any]:
    """Return what makes the solver of a name. Raises ImportError."""
    if name == "sat":
        return importlib.import_module("pysat.solvers").Cadical153
    return partial(CpSat, importlib.import_module("ortools.sat.python.cp_model"))


class Gates:
    """Booleans with and, or and exactly-one, in a solver."""

    def __init__(self, solver: Any) -> None:
        self.solver = solver
        self.count = 0
        self._known: dict[tuple[int, ...], int] = {}

    def new(self) -> int:
        self.count += 1
        return self.count

    def add(self, *literals: int) -> None:
        self.solver.add_clause(list(literals))

    def all_of(self, literals: Iterable[int]) -> int:
        """Return a literal, true exactly where all of them are."""
        parts = tuple(sorted(set(literals)))
        if len(parts) == 1:
            return parts[0]
        if parts not in self._known:
            self._known[parts] = gate = self.new()
            for part in parts:
                self.add(-gate, part)
            self.add(gate, *(-part for part in parts))
        return self._known[parts]

    def any_of(self, literals: Iterable[int]) -> int:
        """Return a literal, true exactly where one of them or more is."""
        return -self.all_of(-literal for literal in literals)

    def exactly(self, count: int, literals: Sequence[int]) -> None:
        """Require `count` of them to be true."""
        for chosen in combinations(literals, count + 1):
            self.add(*(-literal for literal in chosen))
        for chosen in combinations(literals, len(literals) - count + 1):
            self.add(*chosen)

    def one_of(self, count: int) -> list[int]:
        """Return `count` new booleans, exactly one of them true."""
        fresh = [self.new() for _ in range(count)]
        self.exactly(1, fresh)
        return fresh


class MysteryGates:
    """A temporal-clue puzzle: `truth(clue)` and `answer(question, value)` are literals."""

    def __init__(self, solver: Any, mystery: Mystery) -> None:
        self.g = Gates(solver)
        self.mystery = mystery
        g = self.g
        suspects = len(mystery.suspects)
        rooms = range(len(mystery.rooms))
        self.victim, self.steps = suspects, range(len(mystery.times))
        self.movers = range(suspects + 1 + len(mystery.weapons))
        self.at = [[g.one_of(len(rooms)) for _ in self.steps] for _ in self.movers]
        self.murderer, self.weapon = g.one_of(suspects), g.one_of(len(mystery.weapons))
        self.time = g.one_of(len(self.steps))
        self.motive = (
            [g.one_of(len(mystery.motives)) for _ in range(suspects)] if mystery.motives else []
        )
        for number, count in enumerate(mystery.motives.values()):
            g.exactly(count, [own[number] for own in self.motive])
        for t in self.steps[1:]:
            self._move(t, rooms)
        self.room = []
        for r in rooms:
            self.room.append(
                g.any_of(g.all_of((self.time[t], self.at[self.victim][t][r])) for t in self.steps)
            )
        for t in self.steps:
            for r in rooms:
                scene = (-self.time[t], -self.at[self.victim][t][r])
                for s in range(suspects):  # the murderer is there, and no other suspect
                    g.add(*scene, -self.murderer[s], self.at[s][t][r])
                    g.add(*scene, self.murderer[s], -self.at[s][t][r])
                for w, used in enumerate(self.weapon):
                    g.add(*scene, -used, self.at[self.victim + 1 + w][t][r])

    def everything(self) -> list[int]:
        """Return the booleans of all places and motives, and of the murder."""
        places = [here for mover in self.at for time in mover for here in time]
        return [
            *places,
            *self.murderer,
            *self.weapon,
            *self.time,
            *(own for motives in self.motive for own in motives),
        ]

    def _move(self, t: int, rooms: range) -> None:
        """Require moves to neighbouring rooms at the most, and of weapons with a suspect going the
        same way.
        """
        g = self.g
        for r in rooms:
            around = [s for direction in DIRECTIONS if (s := self.beside(r, direction)) is not None]
            for mover in self.movers:
                g.add(-self.at[mover][t - 1][r], *(self.at[mover][t][s] for s in (r, *around)))
                if mover > self.victim:
                    for s in around:
                        carried = [
                            g.all_of((self.at[x][t - 1][r], self.at[x][t][s]))
                            for x in range(self.victim)
                        ]
                        g.add(-self.at[mover][t - 1][r], -self.at[mover][t][s], *carried)

    def beside(self, r: int, direction: str) -> int | None:
        """Return the room just north (…) of another."""
        across, down = DIRECTIONS[direction]
        column = r % self.mystery.width + across
        row = r // self.mystery.width + down
        there = row * self.mystery.width + column
        inside = 0 <= column < self.mystery.width and 0 <= there < len(self.mystery.rooms)
        return there if inside else None

    def holders(self, subject: tuple[str, Any]) -> list[tuple[tuple[int, ...], int]]:
        """Return the movers a subject may be, each after the literals of its being so."""
        kind, name = subject
        if kind == "mover":
            return [((), name)]
        if kind == "murderer":
            return [((literal,), s) for s, literal in enumerate(self.murderer)]
        if kind == "murder weapon":
            return [((literal,), self.victim + 1 + w) for w, literal in enumerate(self.weapon)]
        number = list(self.mystery.motives).index(name)
        return [((own[number],), s) for s, own in enumerate(self.motive)]

    def truth(self, clue: tuple[Any, ...]) -> int:
        """Return a literal, true exactly where the clue (see `read_statement`) is."""
        g = self.g
        kind = clue[0]
        if kind in ("or", "iff"):
            first, second = (self.truth(part) for part in clue[1:])
            if kind == "or":
                return g.any_of((first, second))
            return g.any_of((g.all_of((first, second)), g.all_of((-first, -second))))
        if kind == "killed":
            return self.weapon[clue[1][1] - self.victim - 1]
        if kind == "murdered":
            return self.time[clue[1]]
        if kind == "by":
            return self.murderer[clue[1]]
        return g.any_of(
            g.all_of((*condition, *facts))
            for condition, mover in self.holders(clue[1])
            for facts in self._facts(clue, mover)
        )

    def _facts(self, clue: tuple[Any, ...], mover: int) -> list[list[int]]:
        """Return lists of literals. One list is true whole if the clue is true and this mover its
        first subject.
        """
        kind = clue[0]
        at = self.at
        if kind == "in":
            return [[at[mover][clue[3]][clue[2]]]]
        if kind == "motive":
            return [[self.motive[mover][list(self.mystery.motives).index(clue[2])]]]
        if kind == "never":
            return [[-at[mover][t][clue[2]] for t in self.steps]]
        if kind == "stayed":
            return [[at[mover][t][clue[2]] for t in range(clue[3], clue[4] + 1)]]
        if kind == "moved":
            _, _, thing, before, after, t = clue
            own = [at[mover][t - 1][before], at[mover][t][after]]
            if thing is None:
                return [own]
            return [
                [*own, *c, at[x][t - 1][before], at[x][t][after]] for c, x in self.holders(thing)
            ]
        others = [
            (c, x) for c, x in self.holders(clue[2 if kind == "together" else -2]) if x != mover
        ]
        if kind == "together":
            return [
                [*c, at[mover][t][clue[3]], at[x][t][clue[3]]]
                for c, x in others
                for t in self.steps
            ]
        rooms = range(len(self.mystery.rooms))
        t = clue[-1]
        pairs = [(r, r) if kind == "same" else (self.beside(r, clue[2]), r) for r in rooms]
        return [
            [*c, at[mover][t][mine], at[x][t][theirs]]
            for c, x in others
            for mine, theirs in pairs
            if mine is not None
        ]

    def answer(self, question: str, value: str) -> int:
        """Return a literal, true exactly where `value` is the answer."""
        mystery = self.mystery
        if question.startswith("Who murdered"):
            return self.murderer[mystery.suspects.index(value)]
        if question.startswith("What weapon"):
            return self.weapon[mystery.weapons.index(value)]
        if question.startswith("Where was the murder committed"):
            return self.room[mystery.rooms.index(value)]
        if question.startswith("When"):
            return self.time[mystery.times.index(value)]
        if question.startswith("Why"):
            return self.truth(("motive", ("murderer", 0), value))
        if match := re.fullmatch(r"Who (?:is|was) motivated by (\w+)\?", question):
            return self.truth(("motive", ("mover", mystery.suspects.index(value)), match[1]))
        if match := re.fullmatch(r"(?:What was the motive of|What motivates) (.+)\?", question):
            return self.truth(("motive", ("mover", mystery.suspects.index(match[1])), value))
        match = re.fullmatch(r"Where was (.+?)(?: at (\d\d:\d\d [AP]M))?\?", question)
        assert match is not None, question
        who = read_subject(mystery, match[1])
        return self.truth(
            ("in", who, mystery.rooms.index(value), mystery.times.index(match[2] or ""))
        )


def street_clue(gates: Gates, at: dict[str, list[int]], clue: str) -> int:
    """Return a literal, true exactly where a zebra puzzle's clue is. at: by value, a literal for
    each house.
    """
    houses = range(len(next(iter(at.values()))))
    ordinals = ("first", "second", "third", "fourth", "fifth", "sixth")

    def who(phrase: str) -> list[int]:
        named = [value for value in at if re.search(rf"\b{value}\b", phrase, re.I)]
        assert len(named) == 1, f"{phrase!r} names {named}"
        return at[named[0]]

    if (match := re.fullmatch(r"(.+) is (not )?in the (\w+) house", clue)) and match[3] in ordinals:
        there = who(match[1])[ordinals.index(match[3])]
        return -there if match[2] else there
    forms: tuple[tuple[str, Callable[[int, int], bool]], ...] = (
        (r"(.+) is somewhere to the left of (.+)", lambda x, y: x < y),
        (r"(.+) is somewhere to the right of (.+)", lambda x, y: x > y),
        (r"(.+) is directly left of (.+)", lambda x, y: x + 1 == y),
        (r"(.+) is directly right of (.+)", lambda x, y: x - 1 == y),
        (r"(.+) and (.+) are next to each other", lambda x, y: abs(x - y) == 1),
        (r"There is one house between (.+) and (.+)", lambda x, y: abs(x - y) == 2),
        (r"There are two houses between (.+) and (.+)", lambda x, y: abs(x - y) == 3),
        (r"(.+) is (the person .+|\w+)", lambda x, y: x == y),
    )
    for form, holds in forms:
        if match := re.fullmatch(form, clue):
            one = who(match[1])
            other = who(match[2])
            return gates.any_of(
                gates.all_of((one[x], other[y])) for x in houses for y in houses if holds(x, y)
            )
    raise ValueError(f"no such kind of clue: {clue!r}")


Verdict = tuple[bool, int, int]
"""Whether there is one solution, how many clues could be left out, and how many there are."""


def check_mystery(make: Callable[[], Any], row: dict[str, Any], *, night: bool = False) -> Verdict:
    """Check a temporal-clue puzzle.

    night: there must be one whole night instead of one answer, and all clues needed for it.
    """
    mystery = read_mystery(row["prompt"])
    assert len(mystery.clues) == row["num_clues"], "read wrongly"
    assert list(mystery.questions) == list(row["solution"]), "read wrongly"
    solver = make()
    gates = MysteryGates(solver, mystery)
    right = [
        gates.answer(text, row["solution"][letter]) for letter, text in mystery.questions.items()
    ]
    clues = [gates.truth(clue) for clue in mystery.clues]
    if night and solver.solve([*clues, *right]):
        model = solver.get_model()
        right += [x for x in gates.everything() if model[x - 1] > 0]
    return count_problems(solver, clues, right)


def check_streets(make: Callable[[], Any], row: dict[str, Any]) -> Verdict:
    """Check a zebra puzzle."""
    puzzle = row["puzzle"]
    lines = [line for line in puzzle.splitlines() if line.startswith(" - ")]
    columns = [re.findall(r"`([^`]+)`", line) for line in lines]
    houses = len(columns[0])
    solver = make()
    gates = Gates(solver)
    at = {value: gates.one_of(houses) for column in columns for value in column}
    for column in columns:
        for house in range(houses):
            gates.exactly(1, [at[value][house] for value in column])
    rows = row["solution"]["rows"]
    right = [at[value][house] for house, line in enumerate(rows) for value in line[1:]]
    clues = re.findall(r"^\d+\. (.+)\.$", puzzle, re.M)
    return count_problems(solver, [street_clue(gates, at, clue) for clue in clues], right)


def count_problems(solver: Any, clues: list[int], right: list[int]) -> Verdict:
    """Look for solutions besides the right one, with all clues and without each."""
    consistent = solver.solve([*clues, *right])
    assert consistent, "the solution given contradicts the clues, or was read wrongly"
    solver.add_clause([-literal for literal in right])  # from here on, a solution is another one
    unique = not solver.solve(clues)
    needless = 0
    for number in range(len(clues)):
        needless += not solver.solve([*clues[:number], *clues[number + 1 :]])
    return unique, needless, len(clues)


def check_family(
    name: str,
    rows: Iterable[tuple[dict[str, Any], float]],
    check: Callable[[dict[str, Any]], Verdict],
) -> int:
    """Print a line about puzzles, each with its CPU seconds of making; return the problems."""
    making = []
    counts = []
    ambiguous = 0
    needless = 0
    checking = 0.0
    for row, seconds in rows:
        start = time.process_time()
        unique, too_many, count = check(row)
        checking += time.process_time() - start
        making.append(seconds)
        counts.append(count)
        ambiguous += not unique
        needless += too_many
    clues = f"{min(counts)} to {max(counts)}, mean {statistics.mean(counts):.1f}"
    print(
        f"{name}: {len(counts)} puzzles, {sum(counts)} clues ({clues}); "
        f"ambiguous: {ambiguous}, clues too many: {needless}."
    )
    if any(making):
        print(
            f"Making: {len(making) / sum(making):.2f} puzzles per CPU second "
            f"(median {statistics.median(making):.2f} s, longest {max(making):.2f} s)."
        )
    print(f"Checking: {checking:.0f} CPU seconds.", flush=True)
    return ambiguous + needless


def make_puzzles(
    make: Callable[[str], dict[str, Any]], seeds: Iterable[str]
) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield puzzles with the CPU seconds of making them."""
    for seed in seeds:
        start = time.process_time()
        row = make(seed)
        yield row, time.process_time() - start


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--n", type=int, default=200, help="puzzles of each kind (200)")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--solver", choices=("sat", "cp-sat"), default="sat")
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
    try:
        solver = make_solver(arguments.solver)
    except ImportError as error:
        print(f"check_puzzles: {error}. The top of this file says how to get it.", file=sys.stderr)
        return 2
    scope = arguments.scope
    check = partial(check_mystery, solver, night=scope == "night")
    if arguments.file is not None:
        lines = arguments.file.read_text(encoding="utf-8").splitlines()[: arguments.n]
        rows = ((json.loads(line), 0.0) for line in lines)
        return int(check_family(str(arguments.file), rows, check) > 0)
    seeds = [f"check {arguments.seed} {number}" for number in range(arguments.n)]
    faulty = 0
    if arguments.only != "zebra-grid":
        made = make_puzzles(partial(temporal_clue.make_puzzle, scope=scope), seeds)
        faulty += check_family(f"temporal-clue, {scope}", made, check)
    if arguments.only != "temporal-clue":
        made = make_puzzles(zebra_grid.make_puzzle, seeds)
        faulty += check_family("zebra-grid", made, partial(check_streets, solver))
    return int(faulty > 0)


if __name__ == "__main__":
    sys.exit(main())
