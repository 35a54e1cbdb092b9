"""Rows of whole forests: every sample once, never over the limit, never worse than in order, and
close to the fewest rows.
"""

import functools
import itertools
import random

import pytest
import torch
from bench_packing import deal, row_work, waiting
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrl.data.packing.masks import dense_mask
from ttrl.data.packing.placement import Forest, balance, in_order, place
from ttrl.data.packing.row_building import best_fit, best_subset, fill, filled_bins


@st.composite
def forests(draw, max_nodes=7, max_samples=25):
    """Trees of any depth, also with empty nodes and single samples; (forest, seq_len), where every
    sample fits alone.
    """
    seq_len = draw(st.integers(8, 60))
    parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, max_nodes)))]
    sizes = [draw(st.integers(0, seq_len // 5)) for _ in parents]
    above = Forest(sizes, parents, [], []).above()
    open_nodes = [-1] + [node for node, size in enumerate(above) if size < seq_len]
    nodes = draw(st.lists(st.sampled_from(open_nodes), max_size=max_samples))
    room = [seq_len - (above[node] if node >= 0 else 0) for node in nodes]
    return Forest(
        sizes, parents, nodes, [draw(st.integers(1, min(r, seq_len // 2))) for r in room]
    ), seq_len


def fewest_rows(forest: Forest, seq_len: int) -> int:
    """By trying every row for every sample."""
    count = len(forest.sample_node)

    @functools.cache
    def search(sample: int, rows: frozenset[tuple[int, ...]]) -> int:
        if sample == count:
            return len(rows)
        best = search(sample + 1, rows | {(sample,)})
        for row in rows:
            if forest.cost((*row, sample)) <= seq_len:
                best = min(best, search(sample + 1, rows - {row} | {(*row, sample)}))
        return best

    return search(0, frozenset())


@given(forests(), st.integers(1, 4))
@settings(deadline=None, max_examples=80)
def test_every_sample_once_within_the_limit(case, multiple):
    forest, seq_len = case
    rows = place(forest, seq_len, multiple=multiple)
    assert sorted(sample for row in rows for sample in row) == list(range(len(forest.sample_node)))
    assert all(forest.cost(row) <= seq_len and row == sorted(row) for row in rows)
    assert len(rows) % multiple == 0 and len(rows) - len(place(forest, seq_len)) < multiple
    assert rows == place(forest, seq_len, multiple=multiple)
    if multiple == 1:
        assert all(rows) and len(rows) <= len(in_order(forest, seq_len))


@given(forests(max_nodes=3, max_samples=7))
@settings(deadline=None, max_examples=60)
def test_at_most_one_row_more_than_needed_in_small_cases(case):
    forest, seq_len = case
    assert len(place(forest, seq_len)) <= fewest_rows(forest, seq_len) + 1


@given(forests(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_the_order_of_the_input_changes_at_most_one_row(case, rng):
    forest, seq_len = case
    order = rng.sample(range(len(forest.sample_node)), len(forest.sample_node))
    nodes, sizes = [forest.sample_node[s] for s in order], [forest.sample_size[s] for s in order]
    other = place(Forest(forest.node_size, forest.node_parent, nodes, sizes), seq_len)
    assert abs(len(other) - len(place(forest, seq_len))) <= 1


@given(forests())
@settings(deadline=None, max_examples=60)
def test_in_order_takes_the_last_row_as_long_as_there_is_room(case):
    forest, seq_len = case
    rows = in_order(forest, seq_len)
    assert [sample for row in rows for sample in row] == list(range(len(forest.sample_node)))
    assert all(forest.cost(row) <= seq_len for row in rows)
    assert all(forest.cost([*row, after[0]]) > seq_len for row, after in itertools.pairwise(rows))


def test_a_group_is_split_where_its_pieces_fill_rows():
    # Five groups of 2 + 6·1 in rows of 12: whole groups would take five rows, but one of them can
    # be cut up for the others' room.
    forest = Forest([2] * 5, [-1] * 5, [group for group in range(5) for _ in range(6)], [1] * 30)
    assert len(place(forest, 12)) == 4


def test_a_shared_beginning_is_paid_once_per_row_at_any_depth():
    # A system prompt of 10, two questions of 5, two samples of 5 each: 10 + 5 + 5 + 20 = 40 in one
    # row, and only there.
    forest = Forest([10, 5, 5], [-1, 0, 0], [1, 1, 2, 2], [5, 5, 5, 5])
    assert place(forest, 40) == [[0, 1, 2, 3]]
    assert sorted(place(forest, 39)) == [[0, 1], [2, 3]]


def test_nothing_and_a_sample_that_cannot_fit():
    assert place(Forest([], [], [], []), 10) == []
    assert place(Forest([3], [-1], [], []), 10, multiple=4) == []
    with pytest.raises(AssertionError):
        place(Forest([3], [-1], [0], [8]), 10)


def test_the_last_rows_are_spread_over_the_ranks():
    # 9 samples of 4 behind a prompt of 1 in rows of 13: three rows, one of which 2 ranks would wait
    # for.
    forest = Forest([1], [-1], [0] * 9, [4] * 9)
    rows = place(forest, 13, multiple=2)
    assert sorted(map(len, rows)) == [1, 2, 3, 3]
    assert [len(row) for row in rows[:2]] == [3, 3]  # trained at the same time


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 8))
@settings(deadline=None, max_examples=80)
def test_balance_deals_neighbours_and_even_sums(work, ranks):
    order = balance(work, ranks)
    assert sorted(order) == list(range(len(work)))
    dealt = [work[row] for row in order]
    for start in range(0, len(dealt) - ranks, ranks):
        assert min(dealt[start : start + ranks]) >= max(dealt[start + ranks :])
    if len(work) % ranks == 0:
        sums = [sum(dealt[rank::ranks]) for rank in range(ranks)]
        assert max(sums) - min(sums) <= max(work, default=0)


def test_the_work_of_a_row_is_its_positions_and_its_attention_area():
    groups = torch.tensor([[0, 0, 1, 1, 2, 3, -1], [0, 1, 2, -1, -1, -1, -1], [-1] * 7])
    parents = torch.tensor([[0, 0, 0, 0, 0, 3, -1], [0, 0, 0, -1, -1, -1, -1], [-1] * 7])
    used = groups >= 0
    pairs = [
        int(mask[here].sum()) for mask, here in zip(dense_mask(groups, parents), used, strict=True)
    ]
    assert pairs == [1 + 2 + 3 + 4 + 3 + 1, 1 + 2 + 2, 0]
    expected = [6 + 14 / 60, 3 + 5 / 60, 0]
    assert row_work(groups, parents, width=10) == pytest.approx(expected)


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 8))
@settings(deadline=None, max_examples=60)
def test_every_rank_is_dealt_as_many_rows_and_as_much_work(work, ranks):
    dealt = deal(work, ranks)
    assert sorted(row for rows in dealt for row in rows) == list(range(len(work)))
    counts = [len(rows) for rows in dealt]
    assert (
        len(dealt) == ranks
        and max(counts) - min(counts) <= 1
        and counts == sorted(counts, reverse=True)
    )
    sums = [sum(work[row] for row in rows) for rows in dealt]
    assert max(sums) - min(sums) <= max(work, default=0)
    assert deal(work, ranks) == dealt


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(2, 3))
@settings(deadline=None, max_examples=60)
def test_no_way_of_dealing_has_ranks_wait_less(work, ranks):
    rows = list(range(len(work)))
    least = min(
        waiting(work, [order[rank::ranks] for rank in range(ranks)])
        for order in itertools.permutations(rows)
    )
    assert waiting(work, deal(work, ranks)) == pytest.approx(least)


def test_how_long_ranks_wait():
    assert waiting([4, 4, 2, 2], [[0, 2], [1, 3]]) == 0
    assert waiting([4, 4, 2, 2], [[0, 1], [2, 3]]) == 1 - 12 / (2 * 8)
    assert waiting([4, 4, 2, 2], [[0, 2], [3, 1]]) == 1 - 12 / (2 * 8)
    assert waiting([4, 4, 2, 2], [[0, 2], [3, 1]], microbatch=2) == 0
    assert waiting([3, 3, 3], [[0, 2], [1]]) == 1 - 9 / 12
    assert waiting([], [[], []]) == 0


@given(st.lists(st.integers(1, 30), max_size=10), st.integers(1, 60))
@settings(deadline=None, max_examples=80)
def test_the_subset_with_the_largest_sum(sizes, room):
    sums = {0}
    for size in sizes:
        sums |= {s + size for s in sums if s + size <= room}
    for way in (best_subset, lambda s, r: fill(s, r)):
        chosen = way(sorted(sizes), room)
        assert chosen == sorted(set(chosen)) and sum(sorted(sizes)[i] for i in chosen) == max(sums)


def test_many_candidates_still_fill_to_the_last_position():
    rng = random.Random(0)
    sizes = sorted(rng.randint(20, 400) for _ in range(3000))
    for room in (500, 4096, 16384):
        chosen = fill(sizes, room)
        assert len(chosen) == len(set(chosen)) and sum(sizes[i] for i in chosen) == room


@given(st.lists(st.integers(1, 10), min_size=1, max_size=12))
@settings(deadline=None, max_examples=80)
def test_bins_hold_everything(sizes):
    for way in (best_fit, filled_bins):
        bins = way(sizes, 10)
        assert sorted(item for chosen in bins for item in chosen) == list(range(len(sizes)))
        assert all(0 < sum(sizes[i] for i in chosen) <= 10 for chosen in bins)
    contents = [sum(sizes[i] for i in chosen) for chosen in best_fit(sizes, 10)]
    assert all(a + b > 10 for i, a in enumerate(contents) for b in contents[:i])
