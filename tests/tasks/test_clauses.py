"""Clauses of puzzles: what contradicts them, against all assignments; which switches are needed;
and the way without a solver.
"""

import hashlib
import json
import subprocess
import sys
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pysat import solvers
from support.packages import without

from ttrl.tasks import temporal_clue, zebra_grid
from ttrl.tasks.clauses import Clauses

literals = st.integers(1, 6).flatmap(lambda v: st.sampled_from([v, -v]))
formulas = st.lists(st.lists(literals, min_size=1, max_size=4), max_size=20)


def contradicts(formula, assumptions):
    """Tries every assignment of 6 variables."""
    formula = [*formula, *([x] for x in assumptions)]
    assignments = product([False, True], repeat=6)
    return not any(
        all(any(bits[abs(x) - 1] == (x > 0) for x in clause) for clause in formula)
        for bits in assignments
    )


@settings(max_examples=60, deadline=None)
@given(formulas, formulas, st.lists(literals, max_size=4), st.lists(literals, max_size=4))
def test_answers_are_those_of_trying_all_assignments(first, later, assumptions, others):
    clauses = Clauses()
    assert [clauses.new_variable() for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    formula = []
    for part in (first, later):
        for clause in part:
            clauses.add(clause)
        formula += part
        for assumed in (assumptions, [], others, assumptions[:-1] + others, assumptions):
            assert clauses.contradict(assumed) is contradicts(formula, assumed)


@pytest.mark.parametrize("solver", [solvers.Minisat22, solvers.Glucose42, solvers.Cadical153])
@settings(max_examples=60, deadline=None)
@given(formula=formulas, data=st.data())
def test_what_is_needed_is_what_leaving_out_in_turn_leaves(solver, formula, data):
    """With every solver the same: nothing but yes and no decides."""
    switches = data.draw(st.permutations([1, -1, 2, 3, -4, 5, 6]).map(lambda order: order[:6]))
    if not contradicts(formula, switches):
        return
    wanted = list(switches)
    for switch in switches:
        if contradicts(formula, [x for x in wanted if x != switch]):
            wanted.remove(switch)
    clauses = Clauses(solver)
    for _ in range(6):
        clauses.new_variable()
    for clause in formula:
        clauses.add(clause)
    assert clauses.needed(switches) == wanted


def test_exactly_one():
    clauses = Clauses()
    three = [clauses.new_variable() for _ in range(3)]
    clauses.add_exactly_one(three)
    assert all(clauses.contradict(pair) for pair in combinations(three, 2))
    assert clauses.contradict([-x for x in three])
    for one in three:
        assert not clauses.contradict([one, *(-x for x in three if x != one)])


def test_a_proof_that_needs_learning():
    """Seven pigeons in six holes: no literal follows at once."""
    clauses = Clauses()
    inside = [[clauses.new_variable() for _ in range(6)] for _ in range(7)]
    for row in inside:
        clauses.add(row)
    for hole in range(6):
        for one, other in combinations(inside, 2):
            clauses.add([-one[hole], -other[hole]])
    assert clauses.contradict([]) and clauses.contradict([clauses.new_variable()])


def digest(rows):
    return hashlib.sha256(json.dumps(rows, ensure_ascii=False).encode()).hexdigest()[:16]


def test_the_puzzles_of_a_seed_stay_the_same():
    """Files of puzzles are named by their seeds. A change here is a change for everybody who has
    made some.
    """
    assert {
        "answers": digest(
            [temporal_clue.make_puzzle(f"pin {k}", temporal_clue.SIZES["small"]) for k in range(4)]
        ),
        "night": digest(
            [
                temporal_clue.make_puzzle(f"pin {k}", temporal_clue.SIZES["small"], "night")
                for k in range(4)
            ]
        ),
        "mixed": digest([temporal_clue.make_puzzle(f"pin {k}", held_out=False) for k in range(4)]),
        "zebra": digest([zebra_grid.make_puzzle(f"pin {k}") for k in range(4)]),
    } == PINNED


PINNED = {
    "answers": "fc6eb05cea5bed07",
    "night": "58f3da98d3be8241",
    "mixed": "e613189ea17dd6f3",
    "zebra": "354b50c7058d110d",
}


WITHOUT_SOLVER = """
import sys
from ttrl.errors import TaskError
from ttrl.tasks import temporal_clue, zebra_grid
for make in (temporal_clue.get_temporal_clue_tasks, zebra_grid.get_zebra_grid_tasks):
    try:
        make("train", 1)
    except TaskError as error:
        print(error)
print(temporal_clue.load_puzzles(sys.argv[1])[0].prompt)
"""


def test_without_the_solver_the_way_out_is_named(tmp_path):
    """Only who makes new puzzles needs it."""
    path = tmp_path / "puzzles.jsonl"
    path.write_text(json.dumps({"prompt": "Who?", "solution": {"A": "Miss Violet"}}))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_SOLVER, str(path)],
        env=without(tmp_path, "pysat"),
        capture_output=True,
        text=True,
    )
    first, second, third = done.stdout.splitlines()
    words = "puzzles are made with the package python-sat: pip install 'ttrl[tasks]'"
    assert first.startswith(words) and second.startswith(words) and third == "Who?"
