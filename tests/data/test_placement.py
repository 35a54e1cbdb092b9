"""Best fit against exhaustive search, and the price of a prompt."""

import functools

from hypothesis import given, settings
from hypothesis import strategies as st

from ttrl.data.placement import best_fit, place_groups


def fewest_bins(sizes: list[int], capacity: int) -> int:
    """By trying every place for every item."""

    @functools.cache
    def search(item: int, bins: tuple[int, ...]) -> int:
        if item == len(sizes):
            return len(bins)
        choices = {tuple(sorted((*bins[:i], b + sizes[item], *bins[i + 1 :]))) for i, b in enumerate((*bins, 0))}
        return min((search(item + 1, choice) for choice in choices if max(choice) <= capacity), default=len(sizes) + 1)

    return search(0, ())


def test_large_items_first_and_into_the_fullest_bin():
    assert best_fit([3, 3, 7, 7], 10) == [0, 1, 0, 1]
    assert best_fit([6, 8, 2, 4], 10) == [1, 0, 0, 1]  # 2 goes to 8 and not to 6, so that 4 finds room there
    assert best_fit([], 10) == []


@given(st.lists(st.integers(1, 10), min_size=1, max_size=7))
@settings(deadline=None, max_examples=200)
def test_close_to_the_fewest_bins(sizes):
    bins = best_fit(sizes, 10)
    contents = [sum(size for size, chosen in zip(sizes, bins) if chosen == b) for b in range(max(bins) + 1)]
    assert max(contents) <= 10 and min(contents) > 0
    assert 9 * len(contents) <= 11 * fewest_bins(sizes, 10) + 6  # the proven bound of best-fit decreasing
    assert all(a + b > 10 for i, a in enumerate(contents) for b in contents[:i])


@given(
    st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(1, 6), min_size=1, max_size=8)), min_size=1, max_size=6),
    st.integers(12, 30),
)
@settings(deadline=None, max_examples=200)
def test_every_member_once_and_a_group_in_one_row_where_it_fits(groups, seq_len):
    prompts, members = [prompt for prompt, _ in groups], [sizes for _, sizes in groups]
    rows = place_groups(prompts, members, seq_len)
    placed = sorted((part.group, member) for parts in rows for part in parts for member in part.members)
    assert placed == [(group, member) for group, sizes in enumerate(members) for member in range(len(sizes))]
    for parts in rows:
        assert sum(prompts[part.group] + sum(members[part.group][m] for m in part.members) for part in parts) <= seq_len
        assert len({part.group for part in parts}) == len(parts)  # no row pays for a prompt twice
    for group, (prompt, sizes) in enumerate(groups):
        parts = sum(part.group == group for row in rows for part in row)
        assert (parts == 1) == (prompt + sum(sizes) <= seq_len)
