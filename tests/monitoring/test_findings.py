"""Why a run may not learn: each finding on a history made for it, and none on healthy ones."""

import json
import math
import random
from typing import Any

import pytest
from support.facts import rows_of

from ttrl.intervals import wilson
from ttrl.monitoring.finding import trend
from ttrl.monitoring.findings import findings as judge


def healthy(count: int = 20, seed: int = 0) -> list[dict[str, Any]]:
    """A run like the quickstart's: rewards rise with noise, entropy falls as tasks are solved,
    groups become all right.
    """
    noise = random.Random(seed)
    rows: list[dict[str, Any]] = [
        {
            "iteration": 0,
            "validation": {"exact": 0.5},
            "validation_reward": 0.6,
            "validation_samples": 256,
        }
    ]
    for iteration in range(1, count + 1):
        level = 0.95 - 0.45 * math.exp(-iteration / 8)
        right = round(24 * level - 4)
        rows.append(
            {
                "iteration": iteration,
                "trained": True,
                "reward": level + noise.gauss(0, 0.02),
                "validation": {"exact": level - 0.05 + noise.gauss(0, 0.02)},
                "validation_reward": level + noise.gauss(0, 0.02),
                "groups": {"total": 32, "kept": 32 - right, "all_right": right, "all_wrong": 0,
                "other_equal": 0, "low_std": 0}, "samples": 512,
                "failed": 0,
                "rollouts": {
                    "truncated": 0.01,
                    "empty": 0.0,
                    "grader_failures": 0,
                    "repeated": 0.9,
                    "repeated_groups": right / 32,
                    "stuck_groups": 0.03,
                    "commonest": 0.03,
                    "commonest_tasks": 0.03,
                    "length_correlation": noise.gauss(0, 0.2),
                    "mean_length": 7 + noise.gauss(0, 0.3),
                },
                "pack": {"dropped": {"too_long": 0}},
                "train": {
                    "entropy": 0.12 * math.exp(-iteration / 15),
                    "grad_norm": 5 + noise.random() * 6,
                    "clip_fraction_low": 0.01,
                    "clip_fraction_high": 0.02,
                    "kl": 0.01 + 0.002 * iteration,
                    "kl_share": 0.1,
                    "lr": 1e-4,
                    "steps": 4,
                },
                "sampler_trainer": {
                    "tokens": 4000, "mean": 4e-7, "p999": 1e-5, "ess": 1.0, "outside": 0.0,
                    "by_version": {str(iteration - 1): {"tokens": 4000, "mean": 4e-7, "p999": 1e-5,
                    "ess": 1.0, "outside": 0.0}},
                },
                "sync": {"mode": "reload", "fell_back": None},
            }
        )  # fmt: skip
    return rows


CONFIG = {"validation_metric": "exact", "dtype": "fp32", "device": "cpu", "tasks_per_iteration": 32}


def findings(rows, config=None):
    return judge(rows_of(rows), config)


def keys(rows, config=CONFIG):
    return [finding.key for finding in findings(rows, config)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("count", [1, 2, 5, 12, 60])
def test_a_healthy_run_has_none(seed, count):
    assert keys(healthy(count, seed)) == []


def test_rows_of_the_quickstart_as_they_were_measured_have_none():
    """Held-out exact match and training figures of a real run of 15 iterations (seed 0)."""
    exact = [
        0.680,
        0.746,
        0.812,
        0.832,
        0.840,
        0.844,
        0.859,
        0.871,
        0.883,
        0.883,
        0.879,
        0.895,
        0.914,
        0.910,
        0.914,
        0.926,
    ]
    reward = [
        0.860,
        0.847,
        0.891,
        0.875,
        0.904,
        0.910,
        0.956,
        0.908,
        0.930,
        0.989,
        0.948,
        0.974,
        0.991,
        0.943,
        0.913,
    ]
    kept = [20, 14, 16, 19, 15, 16, 9, 10, 6, 5, 11, 11, 6, 7, 10]
    rows = healthy(15)
    for row, value in zip(rows, exact, strict=True):
        row["validation"]["exact"] = value
    for row, value, groups in zip(rows[1:], reward, kept, strict=True):
        row["reward"] = value
        row["groups"] |= {"kept": groups, "all_right": 32 - groups}
        row["train"] |= {
            "entropy": 0.10 - 0.03 * row["iteration"] / 15,
            "grad_norm": 5.5 + 5.3 * row["iteration"] / 15,
        }
    assert [keys(rows[:length]) for length in range(len(rows) + 1)] == [[]] * 17


def put(rows, path, value, only=lambda n: True):
    """Sets a dotted path in the rows whose iteration `only` takes; value may be a function of the
    iteration.
    """
    *above, last = path.split(".")
    for row in rows:
        if row["iteration"] > 0 and only(row["iteration"]):
            inner = row
            for key in above:
                inner = inner.setdefault(key, {})
            inner[last] = value(row["iteration"]) if callable(value) else value
    return rows


def late(n):
    return n > 12


SICK = {
    "too_hard": [("groups.all_wrong", 20), ("groups.all_right", 2)],
    "too_easy": [("groups.all_right", 30)],
    "equal_rewards": [("groups.other_equal", 20), ("groups.all_right", 2)],
    "low_std": [("groups.low_std", 9)],
    "truncated": [("rollouts.truncated", 0.3)],
    "empty": [("rollouts.empty", 0.1)],
    "one_answer": [("rollouts.commonest", 0.7), ("rollouts.commonest_tasks", 0.8)],
    "stuck": [("rollouts.stuck_groups", 0.4)],
    "length_rewarded": [
        ("rollouts.length_correlation", 0.6),
        ("rollouts.mean_length", lambda n: 5.0 + n),
    ],
    "solves_nothing": [("validation.right", 0.01)],
    "entropy_fell": [  # a rise that ended where the entropy did
        ("train.entropy", lambda n: 0.8 if n < 10 else 0.01),
        ("groups.all_right", 5),
        ("validation.exact", lambda n: 0.5 + 0.02 * min(n, 10)),
    ],
    "entropy_rose": [("train.entropy", lambda n: 0.3 if n < 10 else 2.0)],
    "clipped": [("train.clip_fraction_high", 0.4)],
    "no_gradient": [("train.grad_norm", 0.0)],
    "gradient_grew": [("train.grad_norm", lambda n: 1.0 if n < 10 else 50.0)],
    "kl_blew_up": [("train.kl", lambda n: 0.001 * 2**n / 1000)],
    "kl_rules": [("train.kl_share", 0.97)],
    "learning_rate_zero": [("train.lr", lambda n: 1e-4 if n < 15 else 0.0)],
    "weights_unchanged": [("train.unchanged", True)],
    "nothing_trained": [("trained", lambda n: n != 19)],
    "failures": [("failed", 30)],
    "skipped_steps": [("train.skipped", lambda n: 1 if n == 7 else 0)],
    "too_long": [("pack.dropped.too_long", 3)],
    "fell_back": [("sync.fell_back", lambda n: "canary 0.3" if n == 4 else None)],
    "read_files": [("sync.files_because", lambda n: "no such memory" if n == 4 else None)],
    "extra_tasks": [("extra_tasks", 64)],
    "dropped_groups": [("dropped_groups", 10)],
    "drift": [
        ("sampler_trainer.by_version", lambda n: {str(n - 1): {"tokens": 4000, "mean": 0.02}})
    ],
    "off_policy": [("sampler_trainer.ess", 0.3)],
}


@pytest.mark.parametrize("key", SICK)
def test_each_sickness_is_found_and_named_alone(key):
    rows = healthy()
    for path, value in SICK[key]:
        put(rows, path, value)
    (finding,) = findings(rows, CONFIG)
    assert finding.key == key
    assert (
        finding.title.endswith(".") and finding.advice and finding.line().startswith(finding.title)
    )


def test_iterations_that_finish_few_tasks_say_nothing_of_one_answer():
    """A token budget leaves one group in some iterations: its commonest answer is most of it."""
    rows = healthy()
    few = {"only": lambda n: n % 4}
    put(rows, "rollouts.commonest", 0.95, **few)
    put(rows, "rollouts.commonest_tasks", 1.0, **few)
    assert keys(rows) == ["one_answer"]
    put(rows, "groups.total", 1, **few)
    assert "one_answer" not in keys(rows)


@pytest.mark.parametrize(
    ("name", "value"),
    [("right", lambda n: 0.002 * n), ("right", 0.2), ("cut_off", 0.0), ("seconds", 3.0)],
    ids=["rises", "is not near zero", "best at zero", "not a share"],
)
def test_a_metric_that_rises_or_stands_for_a_fault_is_no_finding(name, value):
    assert keys(put(healthy(), f"validation.{name}", value)) == []


def test_without_held_out_tasks_the_training_metrics_count():
    rows = healthy()
    for row in rows:
        row.pop("validation", None)
        row.pop("validation_reward", None)
    put(rows, "reward", lambda n: 0.04 + 0.01 * n)
    put(rows, "metrics.right", 0.0)
    (finding,) = findings(rows, CONFIG)
    assert (
        finding.title
        == "The training reward rises from 0.05 to 0.24, but these metrics stay near 0: right (0)."
    )


REWARDS = {
    "reward_flat": lambda n, noise: 0.5 + noise.gauss(0, 0.03),
    "reward_falls": lambda n, noise: 0.7 - 0.02 * n + noise.gauss(0, 0.02),
}


@pytest.mark.parametrize("key", REWARDS)
def test_the_trend_is_judged_against_its_noise(key):
    noise = random.Random(5)
    rows = healthy(20)
    for row in rows:
        row["validation"] = {"exact": REWARDS[key](row["iteration"], noise)}
    put(rows, "reward", lambda n: 0.6)
    assert keys(rows) == [key]
    assert "±" in findings(rows, CONFIG)[0].title
    assert keys(rows[:6]) == []  # too few to tell


def test_a_slow_rise_is_no_flat_reward_once_there_are_enough_iterations_to_see_it():
    noise = random.Random(1)
    rows = healthy(60)
    for row in rows:
        row["validation"] = {"exact": 0.3 + 0.004 * row["iteration"] + noise.gauss(0, 0.03)}
    put(rows, "reward", lambda n: 0.3 + 0.004 * n)
    assert keys(rows) == []


def test_a_reward_that_is_already_at_the_top_is_not_flat():
    rows = healthy(20)
    for row in rows:
        row["validation"] = {"exact": 0.97}
    assert keys(rows) == []


def test_learning_by_heart_shows_in_the_held_out_tasks():
    noise = random.Random(2)
    rows = healthy(20)
    for row in rows:
        row["validation"] = {"exact": 0.8 - 0.02 * row["iteration"] + noise.gauss(0, 0.01)}
    assert set(keys(rows)) == {"overfits", "reward_falls"}


MARKS = [0.38, 0.41, 0.43, 0.39, 0.43, 0.46, 0.55, 0.62]
MARKS += [0.49, 0.65, 0.64, 0.77, 0.54, 0.70, 0.69, 0.66]
RIGHT = [0, 4, 24, 26, 24, 29, 30, 25, 29, 33, 28, 20, 14, 9, 7, 12]


def judged(rights, marks, tasks=64):
    """A run with these rewards, and so many right answers to held-out tasks."""
    rows = healthy(len(rights))
    for row, right in zip(rows[1:], rights, strict=True):
        row["validation"] = {"exact": right / tasks}
        row["validation_intervals"] = {"exact": wilson(right, tasks)}
        row["metrics"] = {"judge/judge_dollars": 0.0, "judge/judge_cached": 0.0}
    return put(rows, "reward", lambda n: marks[n - 1])


def test_an_exploited_judge_shows_in_the_fall_of_another_measure():
    """recipes/json_judge.py: a line through all held-out figures has no slope."""
    (finding,) = [one for one in findings(judged(RIGHT, MARKS), CONFIG) if one.key == "overfits"]
    assert finding.title == (
        "The training reward rises, but the held-out exact fell from 0.456 (iterations 6 to "
        "10) to 0.194 (iterations 12 to 16)."
    )
    assert "solves_nothing" not in keys(judged(RIGHT, MARKS))  # a judge's costs stay near 0
    assert "overfits" not in keys(judged(RIGHT[:13], MARKS[:13]))


def test_the_best_of_a_plateau_is_no_fall():
    noise = random.Random(3)
    for _ in range(300):
        rights = [sum(noise.random() < 0.5 for _ in range(32)) for _ in range(40)]
        rows = judged(rights, [0.3 + 0.01 * n for n in range(40)], tasks=32)
        assert not any("fell from" in one.title for one in findings(rows, CONFIG))


def test_a_run_that_overfits_on_purpose_has_no_held_out_tasks():
    config = {**CONFIG, "overfit": 4}
    rows = healthy(20)
    for row in rows:
        row["validation"]["exact"] = 0.7 - 0.02 * row["iteration"]
    found = findings(rows, config)
    assert [one.key for one in found] == ["reward_falls"]
    assert found[0].title.startswith("The exact on the training tasks falls (")
    (unsolved,) = findings(put(healthy(), "validation.right", 0.01), config)
    assert unsolved.title.startswith("The reward on the training tasks rises from ")


def test_without_a_config_or_held_out_tasks_the_training_reward_is_judged():
    rows = [
        {"iteration": n, "trained": True, "reward": 0.2 + (0.01 if n % 2 else -0.01)}
        for n in range(1, 13)
    ]
    (finding,) = findings(rows)
    assert finding.key == "reward_flat" and finding.title.startswith("The training reward")


def test_entropy_that_falls_because_tasks_are_solved_is_no_finding():
    rows = put(healthy(), "train.entropy", lambda n: 0.8 if n < 10 else 0.01)
    assert keys(put(rows, "groups.all_right", 22)) == []


@pytest.mark.parametrize(
    "curve", [[0.30, 0.80, 0.86, 0.85, 0.89, 0.87, 0.88, 0.906], [0.95, *[0.91] * 7]]
)
def test_entropy_that_falls_while_the_held_out_metric_rises_or_is_at_the_top_is_no_finding(curve):
    """Most groups have a wrong sample left among theirs."""
    rows = put(healthy(7), "groups.all_right", 5)
    put(rows, "train.entropy", lambda n: 0.8 if n < 3 else 0.01)
    for row, value in zip(rows, curve, strict=True):
        row["validation"]["exact"] = value
    assert keys(rows) == []
    for row in rows:
        del row["validation"], row["validation_reward"]
    assert keys(rows) == []  # by the training reward
    assert keys(put(rows, "reward", lambda n: 0.5 + 0.1 * (n % 2))) == ["entropy_fell"]


def test_equal_answers_of_solved_groups_are_no_finding():
    assert keys(put(healthy(), "rollouts.repeated_groups", 0.95)) == []


def test_differences_of_older_policies_are_lag_and_no_drift():
    rows = put(
        healthy(),
        "sampler_trainer.by_version",
        lambda n: {str(n - 2): {"tokens": 4000, "mean": 0.02}},
    )
    assert keys(rows) == []


def test_limits_of_the_run_are_those_of_the_finding():
    rows = put(
        healthy(),
        "sampler_trainer.by_version",
        lambda n: {str(n - 1): {"tokens": 4000, "mean": 0.02}},
    )
    assert (
        keys(rows, CONFIG | {"drift_limits": {"mean": 0.05}})
        == []
        == keys(rows, CONFIG | {"dtype": "bf16"})
    )


def test_wrong_answers_are_told_with_what_would_have_been_right():
    """With a higher limit, by what those got that ended before it; with a more lenient grader, by
    its other metrics.
    """
    rows = put(put(healthy(), "rollouts.truncated", 0.88), "groups.all_wrong", 32)
    rows = put(rows, "metrics", {"lenient": 0.31, "letters": 17.0, "strict": 0.0, "valid": 0.5})
    rows = put(put(rows, "rollouts.ended_reward", 0.4), "rollouts.truncated_reward", 0.0)
    titles = {finding.key: finding.title for finding in findings(rows, CONFIG)}
    assert titles["truncated"].endswith("Their mean reward is 0; the others' is 0.4.")
    said = "A lenient grader would accept 31% of all samples. The grader's metrics: valid 0.5."
    assert titles["too_hard"].endswith(said)
    for row in rows[1:]:
        row["metrics"] = {"lenient": 0.0}
    titles = {finding.key: finding.title for finding in findings(rows, CONFIG)}
    assert titles["too_hard"].endswith("A lenient grader would accept 0% of all samples.")


def test_the_gravest_comes_first():
    rows = put(put(healthy(), "pack.dropped.too_long", 3), "rollouts.truncated", 0.4)
    assert keys(put(rows, "train.lr", 0.0)) == ["learning_rate_zero", "truncated", "too_long"]


def test_anything_may_be_missing_or_null():
    rows = healthy(12)
    for row in rows[1:]:
        for key in list(row):
            if key == "iteration":
                continue
            for value in (None, "?", {}, []):
                changed = [one if one is not row else row | {key: value} for one in rows]
                json.dumps([vars(finding) for finding in findings(changed, CONFIG)])
    assert (
        findings([{"iteration": 0}]) == [] == findings([])
        and findings([{"iteration": n} for n in range(30)]) == []
    )


def test_a_line_through_points_is_that_of_least_squares():
    numpy = pytest.importorskip("numpy")
    noise = random.Random(3)
    points = [(x, 2 + 0.3 * x + noise.gauss(0, 1)) for x in range(12)]
    coefficients, covariance = numpy.polyfit(*zip(*points, strict=True), 1, cov=True)
    line = trend(points)
    assert line is not None and line.count == 12
    assert line.slope == pytest.approx(coefficients[0]) and line.error == pytest.approx(
        math.sqrt(covariance[0, 0])
    )
    assert trend(points[:3]) is None and trend([(1, 1.0)] * 9) is None
    assert trend([(x, 2.0 * x) for x in range(5)]).t == math.inf


def test_skipped_steps_point_at_the_loss_of_another_package():
    rows = healthy()
    rows[7]["train"]["skipped"] = 1
    for objective, cause in (
        ("ppo", ""),
        ("mine", " Look first at the loss of the objective 'mine'."),
    ):
        found = findings(rows, {**CONFIG, "training": {"objective": objective}})
        (text,) = [one.title for one in found if one.key == "skipped_steps"]
        assert text.endswith(f"their loss or gradient was not finite.{cause}")
