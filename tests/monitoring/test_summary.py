"""What a run came to in a few lines: by hand, and against numpy."""

import numpy
import pytest
from support.facts import rows_of

from ttrl.facts import held_out, metric
from ttrl.monitoring.summary import Course, course, overfits, summary_lines


def rows_with(values, **more):
    return [
        {"iteration": k, "validation": {"exact": value}, "reward": value / 2, **more}
        for k, value in enumerate(values)
    ]


def test_start_end_best_worst_and_steps_by_hand():
    found = course(rows_of(rows_with([0.5, 0.4, 0.4, 0.7, 0.9, 0.8])), held_out("exact"))
    assert found.steps == (2, 2, 1)
    assert (
        found.line()
        == "start 0.5 (0), end 0.8 (5), best 0.9 (4), worst 0.4 (1); up 2, down 2, flat 1"
    )
    assert found.moving(10) is None
    assert course(rows_of(rows_with([0.5])), metric("reward")) is None
    assert course([], metric("reward")) is None


def test_moving_averages_and_slopes_are_those_of_numpy():
    draw = numpy.random.default_rng(3)
    values = list(draw.normal(size=37))
    found = Course(values, list(range(37)))
    for window in (10, 20):
        mean, slope = found.moving(window)
        assert mean == pytest.approx(numpy.mean(values[-window:]))
        assert slope == pytest.approx(numpy.polyfit(range(37)[-window:], values[-window:], 1)[0])
    assert (
        "; MA10 " in found.line()
        and "; MA20 " in found.line()
        and found.line().count("an iteration") == 2
    )


def test_means_ranges_and_reward_per_second():
    rows = rows_with([0.2, 0.4, 0.6], samples=100, seconds={"total": 5.0}, grading_seconds=0.25)
    for k, row in enumerate(rows[1:]):
        row["pack"] = {"advantages": {"lowest": -1.0 - k, "highest": 2.0}}
        row["train"] = {
            "kl": 0.01,
            "kl_share": 0.25,
            "grad_norm": 1.0 + k,
            "kl_coefficient": 0.005 * k,
        }
    rows = rows_of(rows)
    *_, last = summary_lines(rows, {"validation_metric": "exact"})
    assert last == (
        "advantages -2 to 2; KL 0.01, its share 25%, gradient norm 1.5, β 0.0025 (means); 4 "
        "reward/s; graders 0.25 s an iteration, summed over samples"
    )
    assert summary_lines(rows, {"validation_metric": "exact"})[0].startswith(
        "held-out exact: start 0.2 (0)"
    )
    assert summary_lines([], {}) == []


def test_overfit_mode_is_told_by_the_tasks_and_said():
    same = {"count": 4, "digest": "a"}
    assert overfits({"tasks": same, "validation_tasks": dict(same)})
    assert not overfits(
        {"tasks": same, "validation_tasks": {**same, "digest": "b"}}
    ) and not overfits({})
    first, second, *_ = summary_lines(
        rows_of(rows_with([0.2, 0.4])), {"validation_metric": "exact"}, overfits=True
    )
    assert first.startswith("overfit mode: ") and second.startswith(
        "exact on the training tasks: start"
    )
