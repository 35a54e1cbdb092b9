"""The solver of puzzles: against all assignments, with assumptions, with clauses that come later, and with a limit."""

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrl.tasks.sat import Solver

literals = st.integers(1, 6).flatmap(lambda v: st.sampled_from([v, -v]))
clauses = st.lists(st.lists(literals, min_size=1, max_size=4), max_size=20)


def solutions(formula, assumptions=()):
    """Every assignment of 6 variables that makes all clauses and assumptions true."""
    for bits in product([False, True], repeat=6):
        if all(any(bits[abs(x) - 1] == (x > 0) for x in clause) for clause in [*formula, *([x] for x in assumptions)]):
            yield bits


@settings(max_examples=60, deadline=None)
@given(clauses, clauses, st.lists(literals, max_size=4), st.lists(literals, max_size=4), st.integers(0, 63))
def test_answers_are_those_of_trying_all_assignments(first, later, assumptions, others, likely):
    solver = Solver()
    variables = [solver.new_variable(bool(likely >> number & 1)) for number in range(6)]
    formula = []
    for part in (first, later):
        for clause in part:
            solver.add(clause)
        formula += part
        for assumed in (assumptions, (), others, assumptions[:-1] + others, assumptions):
            answer = solver.solve(assumed)
            assert answer is (next(solutions(formula, assumed), None) is not None)
            if answer:
                bits = [solver.value(variable) for variable in variables]
                assert tuple(bits) in set(solutions(formula, assumed))
            else:
                assert [x for x in dict.fromkeys(assumed) if x in solver.core] == solver.core
                assert next(solutions(formula, solver.core), None) is None


def pigeons(solver, count, holes):
    """`count` pigeons in `holes` holes, no two in one."""
    inside = [[solver.new_variable() for _ in range(holes)] for _ in range(count)]
    for row in inside:
        solver.add(row)
    for hole in range(holes):
        for one, other in combinations(range(count), 2):
            solver.add([-inside[one][hole], -inside[other][hole]])


def test_the_core_leaves_out_what_is_not_to_blame():
    solver = Solver()
    a, b, c, d = (solver.new_variable() for _ in range(4))
    solver.add([-a, b])
    solver.add([-b, -c])
    assert solver.solve([d, a, -d, c]) is False and solver.core == [d, -d]
    assert solver.solve([d, a, c]) is False and solver.core == [a, c]
    solver.add([a])
    assert solver.solve([d, c]) is False and solver.core == [c]
    solver.add([c])
    assert solver.solve([d]) is False and solver.core == []


def test_a_proof_that_needs_learning_and_restarts():
    """Six pigeons in five holes: no literal follows at once."""
    solver = Solver()
    pigeons(solver, 6, 5)
    assert solver.solve() is False
    assert solver.conflicts > 0
    solver.add([solver.new_variable()])
    assert solver.solve() is False  # it stays so


def test_a_limit_of_conflicts_leaves_the_answer_open():
    solver = Solver()
    pigeons(solver, 7, 6)
    assert solver.solve(conflict_limit=3) is None
    assert solver.conflicts <= 4
    assert solver.solve() is False


def test_exactly_one():
    solver = Solver()
    three = [solver.new_variable() for _ in range(3)]
    solver.add_exactly_one(three)
    for one, other in combinations(three, 2):
        assert solver.solve([one, other]) is False
    assert solver.solve([-x for x in three]) is False
    for one in three:
        assert solver.solve([one]) is True
        assert [solver.value(x) for x in three] == [x == one for x in three]


@pytest.mark.parametrize("likely", [False, True])
def test_the_likely_value_is_tried_first(likely):
    solver = Solver()
    free = [solver.new_variable(likely) for _ in range(20)]
    assert solver.solve() is True
    assert {solver.value(x) for x in free} == {likely}


def test_clauses_that_say_nothing_and_one_that_cannot_be():
    solver = Solver()
    one = solver.new_variable()
    solver.add([one, -one])
    assert solver.solve([one]) is True and solver.solve([-one]) is True
    assert solver.solve([one, -one]) is False
    assert solver.solve() is True
    solver.add([])
    assert solver.solve() is False
