"""Puzzles, read from their text, as clauses for another SAT solver (python-sat's CaDiCaL): part of
check_puzzles.py.

Every clue is one literal that is true exactly if the clue is ("reified", by AND and OR gates over
who was where), so that one solver per puzzle tells whether there is another solution and, by
leaving out one assumption at a time, whether each clue is needed. None of the generator's own
clauses (`ttrl/tasks/temporal_clue/rules.py`) or solver is used.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any

from check_puzzles_text import DIRECTIONS


class Gates:
    """Booleans with and, or and exactly-one, in a solver of python-sat."""

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
        """True exactly where all of them are."""
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
        """True exactly where one of them or more is."""
        return -self.all_of(-literal for literal in literals)

    def exactly(self, count: int, literals: Sequence[int]) -> None:
        """`count` of them are true."""
        for chosen in combinations(literals, count + 1):
            self.add(*(-literal for literal in chosen))
        for chosen in combinations(literals, len(literals) - count + 1):
            self.add(*chosen)

    def one_of(self, count: int) -> list[int]:
        """`count` new booleans of which exactly one is true."""
        fresh = [self.new() for _ in range(count)]
        self.exactly(1, fresh)
        return fresh


class MysteryGates:
    """A temporal-clue puzzle: `truth(clue)` and `answer(question, value)` are literals."""

    def __init__(self, solver: Any, mystery: Any) -> None:
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
        """The booleans that say what was where, whose motive, and who, with what and when."""
        places = [here for mover in self.at for time in mover for here in time]
        return [
            *places,
            *self.murderer,
            *self.weapon,
            *self.time,
            *(own for motives in self.motive for own in motives),
        ]

    def _move(self, t: int, rooms: range) -> None:
        """From the time before to this one: to a neighbouring room at the most, a weapon with a
        suspect who goes the same way.
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
        """The room just north (…) of another."""
        across, down = DIRECTIONS[direction]
        column = r % self.mystery.width + across
        row = r // self.mystery.width + down
        there = row * self.mystery.width + column
        return (
            there
            if 0 <= column < self.mystery.width and 0 <= there < len(self.mystery.rooms)
            else None
        )

    def holders(self, subject: tuple[str, Any]) -> list[tuple[tuple[int, ...], int]]:
        """(what must be true for it to be this mover, mover)."""
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
        """A literal that is true exactly where the clue (see `read_statement`) is."""
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
        """Lists of literals of which one list must be true whole, if the clue's first subject is
        this mover.
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

    def answer(
        self, question: str, value: str, read_subject: Callable[[Any, str], tuple[str, Any]]
    ) -> int:
        """A literal that is true exactly where `value` is the answer."""
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
    """A literal that is true exactly where a zebra puzzle's clue is. at: by value, a literal for
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
