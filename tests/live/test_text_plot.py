"""Curves of characters: are they as wide as asked, and in the right places?"""

from hypothesis import given
from hypothesis import strategies as st

from ttrl.live.text_plot import plain, plot, sparkline

VALUES = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=300)


def drawn(lines) -> list[str]:
    return ["".join(cells.text for cells in line) for line in lines]


@given(values=VALUES, width=st.integers(1, 60))
def test_a_sparkline_keeps_its_width(values, width: int) -> None:
    assert len(sparkline(values, width)) <= width


@given(
    values=VALUES,
    width=st.integers(1, 60),
    height=st.integers(1, 9),
    ends=st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)),
)
def test_a_plot_has_its_size(values, width: int, height: int, ends) -> None:
    """Values may also lie outside the range, and the range may be empty."""
    lines = drawn(plot(values, width, height, (min(ends), max(ends)), values, values))
    assert [len(line) for line in lines] == [width] * height


def test_a_rising_line_goes_from_the_lower_left_to_the_upper_right() -> None:
    lines = drawn(plot([0.0, 1.0], 8, 4, (0.0, 1.0)))
    assert lines[3][0] != " " and lines[0][7] != " "
    assert lines[0][0] == " " and lines[3][7] == " "
    assert all(line.strip() for line in lines)


def test_nothing_is_drawn_beyond_the_known_values() -> None:
    (line,) = drawn(plot([None, 1.0, 1.0, None, None], 10, 1, (0.0, 2.0)))
    assert line[:2] == "  " and line[6:] == "    "
    assert line[3:5].strip()


def test_gaps_between_known_values_are_bridged() -> None:
    """With validate_every, most iterations have no value."""
    (line,) = drawn(plot([1.0, None, None, 1.0], 8, 1, (0.0, 2.0)))
    assert " " not in line


def test_the_interval_is_shaded_where_the_line_is_not() -> None:
    lines = plot([0.5] * 4, 4, 5, (0.0, 1.0), [0.2] * 4, [0.8] * 4)
    assert [[cells.kind for cells in line] for line in lines] == [
        [""],
        ["band"],
        ["line"],
        ["band"],
        [""],
    ]


def test_without_unicode_everything_is_ascii() -> None:
    lines = drawn(plot([0.0, 0.4, 1.0], 20, 5, (0.0, 1.0), [0.0] * 3, [1.0] * 3))
    assert plain("".join(lines) + sparkline([1.0, 2.0, 3.0], 9)).isascii()
