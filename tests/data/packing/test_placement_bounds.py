"""bound ≤ fewest rows ≤ ours, on cases small enough to try everything."""

import functools
import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_bounds import _dffs, lower_bound, lower_bounds

from ttrl.data.packing.placement import Forest, place


def forest_of(prompts, members) -> Forest:
    owner = [group for group, sizes in enumerate(members) for _ in sizes]
    return Forest(
        prompts, [-1] * len(prompts), owner, [size for sizes in members for size in sizes]
    )


def fewest_rows(forest: Forest, seq_len: int, at_most: int) -> int:
    """By trying every row for every sample, the largest first; `at_most` rows are known to do."""
    order = sorted(
        range(len(forest.sample_node)),
        key=lambda s: (forest.sample_node[s], -forest.sample_size[s]),
    )
    best = at_most

    @functools.cache
    def search(done: int, rows: tuple[tuple[int, frozenset[int]], ...]) -> None:
        """rows: what is free, and the groups in it."""
        nonlocal best
        if len(rows) >= best:
            return
        if done == len(order):
            best = len(rows)
            return
        group, size = forest.sample_node[order[done]], forest.sample_size[order[done]]
        for i, (free, groups) in enumerate((*rows, (seq_len, frozenset()))):
            left = free - size - (0 if group in groups else forest.node_size[group])
            if left >= 0:
                others = rows[:i] + rows[i + 1 :]
                search(
                    done + 1,
                    tuple(
                        sorted(
                            (*others, (left, groups | {group})),
                            key=lambda row: (row[0], sorted(row[1])),
                        )
                    ),
                )

    search(0, ())
    return best


@st.composite
def cases(draw):
    seq_len = draw(st.integers(10, 40))
    same = draw(st.booleans())
    prompts = [draw(st.integers(0, seq_len // 2)) for _ in range(draw(st.integers(1, 4)))]
    prompts = [prompts[0]] * len(prompts) if same else prompts
    members = [
        [draw(st.integers(1, seq_len - p)) for _ in range(draw(st.integers(1, 3)))] for p in prompts
    ]
    return prompts, members, seq_len


@given(cases())
@settings(deadline=None, max_examples=80)
def test_bound_optimum_and_ours(case):
    prompts, members, seq_len = case
    forest = forest_of(prompts, members)
    ours = len(place(forest, seq_len))
    optimum = fewest_rows(forest, seq_len, ours)
    assert lower_bound(prompts, members, seq_len) <= optimum <= ours <= optimum + 1


def test_ours_is_the_optimum_and_the_bound_near_it_in_most_small_cases():
    rng = random.Random(1)
    tight = best = 0
    for _ in range(40):
        prompt = rng.choice((1, 3, 8, 15))
        members = [[rng.randint(1, rng.choice((6, 12, 25))) for _ in range(3)] for _ in range(3)]
        forest = forest_of([prompt] * 3, members)
        ours = len(place(forest, 40))
        optimum = fewest_rows(forest, 40, ours)
        tight += lower_bound([prompt] * 3, members, 40) == optimum
        best += ours == optimum
    assert best >= 38 and tight >= 30, (best, tight)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=8), st.lists(st.integers(1, 100), max_size=5)
)
@settings(deadline=None, max_examples=80)
def test_what_fits_into_a_row_never_weighs_more_than_one(sizes, marks):
    relative = np.array(sizes) / max(100, sum(sizes))
    for f in _dffs(np.array(marks, dtype=float) / 100):
        assert f(np.maximum(relative - 1e-9, 0)).sum() <= 1 + 1e-9
        assert np.all(np.diff(f(np.linspace(0, 1, 201) - 1e-9 * np.ones(201)).clip(0)) >= -1e-9)


def test_prompts_of_half_a_row_cannot_share_one():
    # Every group needs two rows of its own: the sum alone (7 · 2 · 20 + 63 of 40 per row) would not
    # show it.
    bounds = lower_bounds([20] * 7, [[11, 11]] * 7, 40)
    assert bounds["members"] >= 14 - 1e-6
    assert lower_bound([20] * 7, [[11, 11]] * 7, 40) == 14
    assert lower_bound([], [], 40) == 0
