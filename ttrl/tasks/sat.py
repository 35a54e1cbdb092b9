"""A small exact solver for the puzzles: satisfiability by conflict-driven clause learning (Marques-Silva & Sakallah 1999).

In plain Python, so that puzzles can be made wherever ttrl runs and a seed makes the same puzzle everywhere: two watched literals
per clause and clauses learned at the first unique implication point (Moskewicz et al. 2001), variables of recent conflicts first,
phases kept between calls. A puzzle of ten suspects has about 3,000 variables and 50,000 clauses.

Variables are 1, 2, 3, ...; a literal is a variable or its negative, as in the DIMACS format.
"""

from collections.abc import Iterable, Iterator, Sequence

_FIRST_RESTART = 100  # conflicts


class Solver:
    """Clauses, and whether they can all be true: `solve(assumptions)`, any number of times, with clauses added between."""

    # Inside, variable v's literals are 2v (true) and 2v+1 (false), so that x ^ 1 is the opposite of x.

    def __init__(self) -> None:
        self._values: list[int] = [0, 0]  # by literal: 1 true, -1 false, 0 open
        self._levels: list[int] = [0]
        self._reasons: list[Sequence[int] | None] = [None]
        self._phases: list[int] = [1]  # by variable: added to 2v, so 0 tries true first and 1 false
        self._implied: list[list[int]] = [[], []]  # by literal: what it makes true through clauses of two
        self._watches: list[list[list[int]]] = [[], []]  # by literal: longer clauses to be looked at when it becomes false
        self._trail: list[int] = []
        self._level_starts: list[int] = []
        self._propagated = 0
        # A doubly linked list of variables, those of the newest conflicts last ("move to front", Biere & Fröhlich 2015).
        self._before: list[int] = [0]
        self._after: list[int] = [0]
        self._stamps: list[int] = [0]
        self._stamp = 0
        self._last = 0
        self._next_choice = 0
        self._contradiction = False
        self._assumed: list[int] = []
        self.conflicts = 0
        self.core: list[int] = []
        """After `solve` has said False: assumptions, in the order given, that cannot be true together. Often far fewer than all,
        but not always as few as possible; none where the clauses alone contradict each other."""

    def new_variable(self, likely: bool = False) -> int:
        """A new variable. likely: the value that the search tries first."""
        variable = len(self._levels)
        self._values += [0, 0]
        self._implied += [[], []]
        self._watches += [[], []]
        self._levels.append(0)
        self._reasons.append(None)
        self._phases.append(0 if likely else 1)
        self._before.append(self._last)
        self._after.append(0)
        self._stamp += 1
        self._stamps.append(self._stamp)
        self._after[self._last] = variable
        self._last = self._next_choice = variable
        return variable

    def suggest(self, variable: int, value: bool) -> None:
        """The value that the search tries first from now on."""
        self._phases[variable] = 0 if value else 1

    def add(self, literals: Iterable[int]) -> None:
        """One clause: at least one of these is true."""
        self._back_to(0)
        unique = dict.fromkeys(2 * x if x > 0 else -2 * x + 1 for x in literals)
        if any(x ^ 1 in unique for x in unique) or any(self._values[x] > 0 for x in unique):
            return
        clause = [x for x in unique if self._values[x] == 0]
        if not clause:
            self._contradiction = True
        elif len(clause) == 1:
            self._assign(clause[0], None)
            self._contradiction = self._contradiction or self._propagate() is not None
        else:
            self._attach(clause)

    def add_exactly_one(self, variables: Sequence[int]) -> None:
        """One of these is true and no other."""
        self.add(variables)
        for place, one in enumerate(variables):
            for other in variables[:place]:
                self.add((-one, -other))

    def solve(self, assumptions: Sequence[int] = (), conflict_limit: int | None = None) -> bool | None:
        """Whether all clauses and all assumptions can be true together; None: not known after conflict_limit conflicts.

        After True, `value` tells a solution; after False, `core` some assumptions that are to blame. Calls that begin with the
        same assumptions, with no clause added between, are faster.
        """
        self.core = []
        if self._contradiction:
            return False
        assumed = [2 * x if x > 0 else -2 * x + 1 for x in assumptions]
        # What follows from the first assumptions, a level of the trail for each, stands where they are those of the last call.
        same = 0
        for one, other in zip(assumed, self._assumed):
            if one != other:
                break
            same += 1
        self._back_to(same)
        self._assumed = assumed
        left = conflict_limit if conflict_limit is not None else -1
        for length in _restarts():
            answer, spent = self._search(assumed, length if left < 0 else min(length, left))
            if answer is not None:
                return answer
            if left >= 0:
                left -= spent
                if left <= 0:
                    return None
        raise AssertionError("restarts never end")

    def value(self, variable: int) -> bool:
        """The variable in the solution that `solve` has just found."""
        return self._values[2 * variable] > 0

    def _search(self, assumed: list[int], most: int) -> tuple[bool | None, int]:
        """(answer, conflicts): None when `most` conflicts were not enough."""
        conflicts = 0
        values, level_starts = self._values, self._level_starts
        while True:
            conflict = self._propagate()
            if conflict is not None:
                if not level_starts:
                    self._contradiction = True
                    return False, conflicts
                conflicts += 1
                self.conflicts += 1
                learned, level = self._analyse(conflict)
                self._back_to(level)
                if len(learned) > 1:
                    self._attach(learned)
                self._assign(learned[0], learned if len(learned) > 1 else None)
                continue
            if conflicts >= most:
                self._back_to(0)
                return None, conflicts
            literal = 0
            while len(level_starts) < len(assumed):
                wanted = assumed[len(level_starts)]
                if values[wanted] < 0:
                    self.core = self._blame(wanted)
                    return False, conflicts
                if values[wanted] == 0:
                    literal = wanted
                    break
                level_starts.append(len(self._trail))  # true already: an empty level keeps the count of levels right
            if not literal:
                variable = self._next_choice
                while variable and values[2 * variable]:
                    variable = self._before[variable]
                self._next_choice = variable
                if not variable:
                    return True, conflicts
                literal = 2 * variable + self._phases[variable]
            level_starts.append(len(self._trail))
            self._assign(literal, None)

    def _attach(self, clause: list[int]) -> None:
        if len(clause) == 2:
            self._implied[clause[0] ^ 1].append(clause[1])
            self._implied[clause[1] ^ 1].append(clause[0])
        else:
            self._watches[clause[0]].append(clause)
            self._watches[clause[1]].append(clause)

    def _assign(self, literal: int, reason: Sequence[int] | None) -> None:
        variable = literal >> 1
        self._values[literal], self._values[literal ^ 1] = 1, -1
        self._levels[variable] = len(self._level_starts)
        self._reasons[variable] = reason
        self._trail.append(literal)

    def _back_to(self, level: int) -> None:
        """Takes back every assignment above `level`."""
        if len(self._level_starts) <= level:
            return
        start = self._level_starts[level]
        values, phases, stamps = self._values, self._phases, self._stamps
        choice = self._next_choice
        newest = stamps[choice]
        for literal in self._trail[start:]:
            variable = literal >> 1
            values[literal] = values[literal ^ 1] = 0
            phases[variable] = literal & 1
            if stamps[variable] > newest:
                choice, newest = variable, stamps[variable]
        self._next_choice = choice
        del self._trail[start:]
        del self._level_starts[level:]
        self._propagated = start

    def _propagate(self) -> Sequence[int] | None:
        """Everything that follows from the trail; a clause whose literals are all false, or None."""
        values, trail, levels, reasons = self._values, self._trail, self._levels, self._reasons
        implied, all_watches = self._implied, self._watches
        level = len(self._level_starts)
        place = self._propagated
        while place < len(trail):
            true = trail[place]
            place += 1
            false = true ^ 1
            for other in implied[true]:
                value = values[other]
                if value == 0:
                    values[other], values[other ^ 1] = 1, -1
                    levels[other >> 1], reasons[other >> 1] = level, (other, false)
                    trail.append(other)
                elif value < 0:
                    self._propagated = len(trail)
                    return (other, false)
            watches = all_watches[false]
            if not watches:
                continue
            kept: list[list[int]] = []
            conflict = None
            for number, clause in enumerate(watches):
                first = clause[0]
                if first == false:
                    first = clause[0] = clause[1]
                    clause[1] = false
                if values[first] > 0:
                    kept.append(clause)
                    continue
                for index in range(2, len(clause)):
                    if values[clause[index]] >= 0:
                        clause[1], clause[index] = clause[index], false
                        all_watches[clause[1]].append(clause)
                        break
                else:
                    kept.append(clause)
                    if values[first] < 0:
                        conflict = clause
                        kept += watches[number + 1 :]
                        break
                    values[first], values[first ^ 1] = 1, -1
                    levels[first >> 1], reasons[first >> 1] = level, clause
                    trail.append(first)
            all_watches[false] = kept
            if conflict is not None:
                self._propagated = len(trail)
                return conflict
        self._propagated = place
        return None

    def _analyse(self, conflict: Sequence[int]) -> tuple[list[int], int]:
        """(the clause learned, the level to go back to): its first literal follows there from the others."""
        levels, reasons, trail = self._levels, self._reasons, self._trail
        level = len(self._level_starts)
        seen: set[int] = set()
        learned = [0]
        open_literals, place = 0, len(trail) - 1
        clause: Sequence[int] = conflict
        resolved = -1
        while True:
            for literal in clause:
                variable = literal >> 1
                if literal != resolved and variable not in seen and levels[variable] > 0:
                    seen.add(variable)
                    if levels[variable] == level:
                        open_literals += 1
                    else:
                        learned.append(literal)
            while trail[place] >> 1 not in seen:
                place -= 1
            resolved = trail[place]
            place -= 1
            open_literals -= 1
            if open_literals == 0:
                break
            reason = reasons[resolved >> 1]
            assert reason is not None, "only the last literal of a level has no reason"
            clause = reason
        learned[0] = resolved ^ 1
        # Literals that follow from others of the clause say nothing new.
        learned[1:] = [x for x in learned[1:] if not self._follows(x, seen)]
        for variable in sorted(seen, key=self._stamps.__getitem__):
            self._move_to_front(variable)
        if len(learned) == 1:
            return learned, 0
        second = max(range(1, len(learned)), key=lambda index: levels[learned[index] >> 1])
        learned[1], learned[second] = learned[second], learned[1]
        return learned, levels[learned[1] >> 1]

    def _blame(self, false: int) -> list[int]:
        """The assumptions that made this one false, and itself last. All choices so far are assumptions."""
        reasons, levels = self._reasons, self._levels
        seen, found = {false >> 1}, [false]
        for literal in reversed(self._trail[self._level_starts[0] :] if self._level_starts else ()):
            if literal >> 1 in seen:
                reason = reasons[literal >> 1]
                if reason is None:
                    found.append(literal)
                else:
                    seen.update(x >> 1 for x in reason if levels[x >> 1] > 0)
        return [x >> 1 if not x & 1 else -(x >> 1) for x in reversed(found)]

    def _follows(self, literal: int, seen: set[int]) -> bool:
        reason = self._reasons[literal >> 1]
        return reason is not None and all(x >> 1 in seen or self._levels[x >> 1] == 0 for x in reason if x != literal ^ 1)

    def _move_to_front(self, variable: int) -> None:
        before, after = self._before, self._after
        if variable != self._last:
            left, right = before[variable], after[variable]
            after[left], before[right] = right, left
            after[self._last], before[variable], after[variable] = variable, self._last, 0
            self._last = variable
        self._stamp += 1
        self._stamps[variable] = self._stamp
        if not self._values[2 * variable]:
            self._next_choice = variable


def _restarts() -> Iterator[int]:
    """Conflicts before each restart: longer and longer."""
    length = float(_FIRST_RESTART)
    while True:
        yield int(length)
        length *= 1.5
