"""The report's figures: intervals against their defining equation, and times in words."""

import math

import pytest

from ttrl.run_folder import reader
from ttrl.text import duration


@pytest.mark.parametrize(("share", "count"), [(0.0, 10), (1.0, 10), (0.5, 200), (0.93, 200), (0.02, 50)])
def test_wilsons_interval_solves_its_equation(share: float, count: int) -> None:
    """Its bounds are the shares p at which |share − p| is exactly 1.96 standard errors under p itself."""
    for bound in reader.wilson(share, count):
        assert abs(share - bound) == pytest.approx(1.96 * math.sqrt(bound * (1 - bound) / count), abs=1e-12)


def test_intervals_are_only_given_for_counts_of_successes() -> None:
    assert reader.interval({"validation": {"exact": 0.5}, "validation_samples": 200}, "validation.exact") is not None
    assert reader.interval({"validation": {"exact": 0.5017}, "validation_samples": 200}, "validation.exact") is None
    assert reader.interval({"validation": {"exact": 0.5}}, "validation.exact") is None
    assert reader.interval({"validation_reward": -1.0, "validation_samples": 4}, "validation_reward") is None


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.04, "0.0 s"), (59.9, "59.9 s"), (59.96, "1 min 00 s"), (161, "2 min 41 s"), (3599.6, "1 h 00 min"), (3900, "1 h 05 min")],
)
def test_durations(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


def test_phases_that_overlap_are_counted_once(tmp_path):
    rows = [
        {"iteration": 0, "seconds": {"prepare": 9.0, "validate": 1.0, "total": 10.0}},
        {"iteration": 1, "seconds": {"sample": 4.0, "validate": 4.0, "train": 1.0, "total": 5.5}},
        {"iteration": 2, "seconds": {"sample": 4.0, "train": 1.0}},
    ]
    run = reader.RunData(tmp_path, rows)
    assert reader.total_seconds(run) == 10.0 + 5.5 + 5.0
