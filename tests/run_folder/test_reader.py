"""What a run folder tells the report."""

from ttrl.run_folder import reader


def test_intervals_are_only_given_for_counts_of_successes() -> None:
    assert reader.interval({"validation": {"exact": 0.5}, "validation_samples": 200}, "validation.exact") is not None
    assert reader.interval({"validation": {"exact": 0.5017}, "validation_samples": 200}, "validation.exact") is None
    assert reader.interval({"validation": {"exact": 0.5}}, "validation.exact") is None
    assert reader.interval({"validation_reward": -1.0, "validation_samples": 4}, "validation_reward") is None
