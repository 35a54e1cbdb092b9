"""Puzzles, read from their text, as integers for OR-Tools' CP-SAT: part of check_puzzles.py."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from check_puzzles_text import DIRECTIONS, Mystery, read_mystery, read_subject
from check_puzzles_zebra import read_streets, streets_model


class MysteryModel:
    """A mystery as a CP-SAT model: an integer for each mover and time, for each motive, and for the
    facts of the murder.
    """

    def __init__(self, cp: Any, mystery: Mystery, clues: Sequence[tuple[Any, ...]]) -> None:
        self.m = cp.CpModel()
        self.mystery = mystery
        suspects = len(mystery.suspects)
        rooms = len(mystery.rooms)
        self.victim = suspects
        self.steps = range(len(mystery.times))
        movers = range(suspects + 1 + len(mystery.weapons))
        self.names = list(mystery.motives)
        self.where = [[self.m.new_int_var(0, rooms - 1, "") for _ in self.steps] for _ in movers]
        self.motive = [
            self.m.new_int_var(0, len(self.names) - 1, "")
            for _ in range(suspects if self.names else 0)
        ]
        self.murderer = self.m.new_int_var(0, suspects - 1, "")
        self.weapon = self.m.new_int_var(0, len(mystery.weapons) - 1, "")
        self.time = self.m.new_int_var(0, len(mystery.times) - 1, "")
        self.room = self.m.new_int_var(0, rooms - 1, "")
        for number, count in enumerate(mystery.motives.values()):
            self.m.add(sum(self.equal(one, number) for one in self.motive) == count)
        pairs = [
            (r, s) for r in range(rooms) for s in range(rooms) if r == s or s in self._around(r)
        ]
        for mover in movers:
            for t in self.steps[:-1]:
                now, then = self.where[mover][t : t + 2]
                self.m.add_allowed_assignments([now, then], pairs)
                if mover > self.victim:
                    stays = self.equal(now, then)
                    carrier = self.m.new_int_var(0, suspects - 1, "")
                    before = self.pick(carrier, t)
                    after = self.pick(carrier, t + 1)
                    self.m.add(before == now).only_enforce_if(~stays)
                    self.m.add(after == then).only_enforce_if(~stays)
        for t in self.steps:
            here = self.equal(self.time, t)
            self.m.add(self.where[self.victim][t] == self.room).only_enforce_if(here)
            self.m.add(self.pick(self.weapon, t, self.victim + 1) == self.room).only_enforce_if(
                here
            )
            for s in range(suspects):
                guilty = self.equal(self.murderer, s)
                self.m.add(self.where[s][t] == self.room).only_enforce_if(here, guilty)
                self.m.add(self.where[s][t] != self.room).only_enforce_if(here, ~guilty)
        for clue in clues:
            self._add(clue)

    def _around(self, r: int) -> list[int]:
        return [s for direction in DIRECTIONS if (s := self._next(r, direction)) is not None]

    def _next(self, r: int, direction: str) -> int | None:
        across, down = DIRECTIONS[direction]
        column = r % self.mystery.width + across
        row = r // self.mystery.width + down
        there = row * self.mystery.width + column
        return (
            there
            if 0 <= column < self.mystery.width and 0 <= there < len(self.mystery.rooms)
            else None
        )

    def equal(self, one: Any, other: Any) -> Any:
        """A boolean that is true exactly where they are equal."""
        same = self.m.new_bool_var("")
        self.m.add(one == other).only_enforce_if(same)
        self.m.add(one != other).only_enforce_if(~same)
        return same

    def pick(self, index: Any, t: int, first: int = 0) -> Any:
        """Where the mover number first + index was."""
        count = len(self.mystery.suspects) if first == 0 else len(self.mystery.weapons)
        result = self.m.new_int_var(0, len(self.mystery.rooms) - 1, "")
        self.m.add_element(
            index, [self.where[first + number][t] for number in range(count)], result
        )
        return result

    def mover_of(self, subject: tuple[str, Any]) -> Any:
        """A number or variable: the mover. For a motive of several, one of those that have it."""
        kind, name = subject
        if kind == "mover":
            return name
        if kind == "murderer":
            return self.murderer
        if kind == "murder weapon":
            return self.weapon + self.victim + 1
        holder = self.m.new_int_var(0, len(self.mystery.suspects) - 1, "")
        self.m.add_element(holder, self.motive, self.names.index(name))
        return holder

    def place(self, subject: tuple[str, Any], mover: Any, t: int) -> Any:
        """Where the mover of a subject was."""
        if subject[0] == "mover":
            return self.where[mover][t]
        return (
            self.pick(self.weapon, t, self.victim + 1)
            if subject[0] == "murder weapon"
            else self.pick(mover, t)
        )

    def _truth(self, statement: tuple[Any, ...]) -> Any:
        """A boolean that is true exactly where ("in", who, room, time) is."""
        _, who, room, t = statement
        if who[0] != "motive":
            return self.equal(self.place(who, self.mover_of(who), t), room)
        both = []
        for s, own in enumerate(self.motive):
            both.append(one := self.m.new_bool_var(""))
            has = self.equal(own, self.names.index(who[1]))
            there = self.equal(self.where[s][t], room)
            self.m.add(has + there == 2).only_enforce_if(one)
            self.m.add(has + there <= 1).only_enforce_if(~one)
        return self.equal(self.equal(sum(both), 0), 0)

    def _add(self, clue: tuple[Any, ...]) -> None:
        kind, who = clue[:2]
        if kind in ("or", "iff"):
            first, second = (self._truth(part) for part in clue[1:])
            self.m.add(first + second >= 1 if kind == "or" else first == second)
            return
        if kind in ("killed", "murdered"):
            self.m.add(
                self.weapon + self.victim + 1 == who[1] if kind == "killed" else self.time == who
            )
            return
        mover = self.mover_of(who)
        if kind == "motive":
            own = self.m.new_int_var(0, len(self.names) - 1, "")
            self.m.add_element(mover, self.motive, own)
            self.m.add(own == self.names.index(clue[2]))
        elif kind in ("same", "beside"):
            other, t = clue[-2:]
            them = self.mover_of(other)
            mine = self.place(who, mover, t)
            theirs = self.place(other, them, t)
            if kind == "same":
                self.m.add(mine == theirs)
                self._differ(mover, them)
            else:
                rooms = range(len(self.mystery.rooms))
                pairs = [(there, r) for r in rooms if (there := self._next(r, clue[2])) is not None]
                self.m.add_allowed_assignments([mine, theirs], pairs)
        elif kind == "together":
            them = self.mover_of(clue[2])
            self._differ(mover, them)
            met = []
            for t in self.steps:
                met.append(here := self.m.new_bool_var(""))
                self.m.add(self.place(who, mover, t) == clue[3]).only_enforce_if(here)
                self.m.add(self.place(clue[2], them, t) == clue[3]).only_enforce_if(here)
            self.m.add_bool_or(met)
        elif kind == "moved":
            _, _, thing, before, after, t = clue
            for subject, one in (
                (who, mover),
                *(((thing, self.mover_of(thing)),) if thing else ()),
            ):
                self.m.add(self.place(subject, one, t - 1) == before)
                self.m.add(self.place(subject, one, t) == after)
        elif kind == "never":
            for t in self.steps:
                self.m.add(self.place(who, mover, t) != clue[2])
        else:
            last = clue[4] if kind == "stayed" else clue[3]
            for t in range(clue[3], last + 1):
                self.m.add(self.place(who, mover, t) == clue[2])

    def _differ(self, one: Any, other: Any) -> None:
        if isinstance(one, int) and isinstance(other, int):
            assert one != other, "a clue about somebody and themselves"
        else:
            self.m.add(one != other)

    def answer(self, question: str, value: str) -> Any:
        """A boolean that is true exactly where `value` is the answer."""
        mystery = self.mystery
        if question.startswith("Who murdered"):
            return self.equal(self.murderer, mystery.suspects.index(value))
        if question.startswith("What weapon"):
            return self.equal(self.weapon, mystery.weapons.index(value))
        if question.startswith("Where was the murder committed"):
            return self.equal(self.room, mystery.rooms.index(value))
        if question.startswith("When"):
            return self.equal(self.time, mystery.times.index(value))
        if question.startswith("Why"):
            own = self.m.new_int_var(0, len(self.names) - 1, "")
            self.m.add_element(self.murderer, self.motive, own)
            return self.equal(own, self.names.index(value))
        if match := re.fullmatch(r"Who was motivated by (\w+)\?", question):
            return self.equal(
                self.motive[mystery.suspects.index(value)], self.names.index(match[1])
            )
        if match := re.fullmatch(r"What was the motive of (.+)\?", question):
            return self.equal(
                self.motive[mystery.suspects.index(match[1])], self.names.index(value)
            )
        match = re.fullmatch(r"Where was (.+?)(?: at (\d\d:\d\d [AP]M))?\?", question)
        assert match is not None, question
        who = read_subject(mystery, match[1])
        place = self.place(who, self.mover_of(who), mystery.times.index(match[2] or ""))
        return self.equal(place, mystery.rooms.index(value))


def count_problems(
    solve: Callable[[Sequence[Any]], bool], clues: Sequence[Any]
) -> tuple[bool, int]:
    """(no other answer with all clues, how many clues could be left out). solve: whether another
    answer is possible.
    """
    needless = sum(
        not solve([*clues[:number], *clues[number + 1 :]]) for number in range(len(clues))
    )
    return not solve(clues), needless


def other_mystery(
    cp: Any, row: dict[str, Any]
) -> tuple[Callable[[Sequence[Any]], bool], Sequence[Any]]:
    """(whether some clues allow an answer other than the row's, all clues)."""
    mystery = read_mystery(row["prompt"])
    assert len(mystery.clues) == row["num_clues"] and list(mystery.questions) == list(
        row["solution"]
    )

    def solve(clues: Sequence[Any]) -> bool:
        model = MysteryModel(cp, mystery, clues)
        right = [
            model.answer(question, row["solution"][letter])
            for letter, question in mystery.questions.items()
        ]
        model.m.add_bool_or([~one for one in right])
        return possible(cp, model.m)

    return solve, mystery.clues


def other_streets(
    cp: Any, row: dict[str, Any]
) -> tuple[Callable[[Sequence[Any]], bool], Sequence[Any]]:
    """The same for a zebra puzzle."""
    streets = read_streets(row["puzzle"])
    return lambda clues: possible(
        cp, streets_model(cp, streets, clues, row["solution"]["rows"])
    ), streets.clues


def possible(cp: Any, model: Any) -> bool:
    """Whether the model has a solution. Raises RuntimeError where CP-SAT cannot tell."""
    solver = cp.CpSolver()
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status not in (cp.OPTIMAL, cp.FEASIBLE, cp.INFEASIBLE):
        raise RuntimeError(f"CP-SAT says {solver.status_name(status)}")
    return bool(status != cp.INFEASIBLE)


def cp_mystery(cp: Any, row: dict[str, Any]) -> tuple[bool, int, int]:
    """As `sat_mystery`, by CP-SAT."""
    solve, clues = other_mystery(cp, row)
    return (*count_problems(solve, clues), len(clues))


def cp_streets(cp: Any, row: dict[str, Any]) -> tuple[bool, int, int]:
    """As `sat_streets`, by CP-SAT."""
    solve, clues = other_streets(cp, row)
    return (*count_problems(solve, clues), len(clues))
