"""The report's figures: intervals against their defining equation."""

import math

import pytest

from ttrl.run_folder import reader


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
