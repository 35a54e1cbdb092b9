"""Hold the clauses of a puzzle, and find its necessary clues with a SAT solver (MiniSat, through
python-sat).

A clue's clauses hold only if its switch, a variable, is true, and one more clause excludes the
solution: so the clues settle the puzzle exactly if their switches contradict the clauses. Only the
solver's yes or no decides the result, so a seed makes the same puzzle with every version of it, and
with others: Glucose and CaDiCaL made the same ones.

Variables are 1, 2, 3, ...; a literal is a variable or its negative, as in the DIMACS format.
"""

from collections.abc import Sequence
from typing import Any

from ttrl.tasks.datasets import optional_package


def solver_class() -> Any:
    """Return the class of the solver. Raises TaskError without python-sat."""
    return optional_package("pysat.solvers", "puzzles are made with", "python-sat").Minisat22


class Clauses:
    """Clauses, and tests of their satisfiability. Raises TaskError without python-sat."""

    def __init__(self, solver: Any = None) -> None:
        """solver: a class of python-sat; `solver_class` by default."""
        self._solver = (solver or solver_class())()
        self._last = 0

    def new_variable(self) -> int:
        self._last += 1
        return self._last

    def add(self, literals: Sequence[int]) -> None:
        """Add a clause: at least one of these is true."""
        self._solver.add_clause(literals)

    def add_exactly_one(self, variables: Sequence[int]) -> None:
        """Require exactly one of these to be true."""
        self.add(variables)
        for place, one in enumerate(variables):
            for other in variables[:place]:
                self.add((-one, -other))

    def contradict(self, assumptions: Sequence[int]) -> bool:
        """Return whether the clauses contradict these literals."""
        # Without limits this is the plain `solve`; it would turn Ctrl-C into an error of its own.
        return self._solver.solve_limited(assumptions, expect_interrupt=True) is False

    def needed(self, switches: Sequence[int]) -> list[int]:
        """Leave out each of these in turn if the others contradict the clauses without it; return
        the rest.

        All together contradict the clauses. This must be the last query: the returned switches
        become clauses.
        """
        assert self.contradict(switches), "what is to be reduced contradicts nothing"
        left = list(reversed(switches))
        needed = list[int]()
        blamed = set(self._solver.get_core() or ())
        while left:
            switch = left.pop()
            if switch not in blamed:  # all the blamed ones are still there: the answer is known
                continue
            if self.contradict(left):
                blamed = set(self._solver.get_core() or ())
            else:
                needed.append(switch)
                self.add([switch])
        return needed
