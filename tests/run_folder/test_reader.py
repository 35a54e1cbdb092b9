"""What a run folder tells the report."""

from typing import Any

from support.facts import row_of

from ttrl.run_folder import reader


def interval(row: dict[str, Any], name: str) -> tuple[float, float] | None:
    return reader.interval(row_of({"iteration": 1} | row), name)


def held_out_text(row: dict[str, Any], name: str) -> str:
    return reader.held_out_text(row_of({"iteration": 1} | row), name)


def test_intervals_are_only_given_for_counts_of_successes() -> None:
    assert interval({"validation": {"exact": 0.5}, "validation_samples": 200}, "exact") is not None
    assert interval({"validation": {"exact": 0.5017}, "validation_samples": 200}, "exact") is None
    assert interval({"validation": {"exact": 0.5}}, "exact") is None
    assert interval({"validation_reward": -1.0, "validation_samples": 4}, "reward") is None


def test_failed_held_out_samples_are_named_with_the_figure() -> None:
    row = {
        "iteration": 1,
        "validation_reward": 0.5,
        "validation_sampling": "greedy, 4 tasks",
        "validation_failed": 3,
    }
    assert held_out_text(row, "reward") == "0.500 (greedy, 4 tasks, 3 samples failed)"
    assert held_out_text(row | {"validation_failed": 0}, "reward") == "0.500 (greedy, 4 tasks)"


def test_a_held_out_metric_that_some_samples_lack_says_so() -> None:
    row = {"validation": {"exact": 0.5, "form": 1.0}, "validation_sampling": "greedy, 64 tasks"}
    row |= {"validation_partial_metrics": {"exact": 12}}
    assert held_out_text(row, "exact") == "0.500 (greedy, 64 tasks, exact of 12 samples)"
    assert held_out_text(row, "form") == "1.000 (greedy, 64 tasks)"
