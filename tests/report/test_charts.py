"""Charts: round ticks, readable numbers, and no point that was not measured."""

import math

import pytest

from ttrl.report import charts


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (0, 0.94, [0, 0.25, 0.5, 0.75, 1]),
        (0, 5.3, [0, 2, 4, 6]),
        (-0.3, 0.2, [-0.4, -0.2, 0, 0.2]),
        (7, 7, [6, 8, 10, 12, 14]),
    ],
)
def test_ticks_are_round_and_cover_the_data(low: float, high: float, expected: list[float]) -> None:
    ticks = charts.nice_ticks(low, high)
    assert ticks == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0"),
        (0.0312, "0.0312"),
        (12.54, "12.5"),
        (8300, "8,300"),
        (3.2e-5, "3.2e-5"),
        (-2e-7, "-2e-7"),
        (999.6, "1,000"),
    ],
)
def test_numbers_for_people(value: float, expected: str) -> None:
    assert charts.compact(value) == expected


def test_points_that_are_not_finite_are_left_out() -> None:
    values = [1.0, None, math.nan, math.inf, 2.0]
    svg = charts.line_chart("x", [0, 1, 2, 3, 4], [charts.Series("a", values)])
    assert svg is not None and svg.count("<circle") == 2
    assert charts.line_chart("x", [0, 1], [charts.Series("a", [None, math.nan])]) is None
    log = charts.line_chart("x", [0, 1, 2], [charts.Series("a", [0.0, 1e-6, 1e-4])], log=True)
    assert log is not None and log.count("<circle") == 2  # zero has no logarithm
