"""The line of metrics.jsonl: what it makes of the steps of an iteration."""

import pytest
from support.facts import mark

from ttrl.facts import RolloutFigures
from ttrl.run_folder.folder import IterationFolder, Marker
from ttrl.run_folder.metrics import metrics_row
from ttrl.system.files import write_json


@pytest.fixture
def row_of(tmp_path):
    """The training part of the line of an iteration with these steps."""

    def make(steps):
        iteration = IterationFolder(tmp_path, 1)
        mark(iteration, "train", [], {"seconds": 1.0, "trained": True, "steps": steps})
        return metrics_row(iteration).to_json()["train"]

    return make


def step(number, **values):
    return {
        "global_step": number,
        "lr": 1e-4 * number,
        "loss": 1.0 * number,
        "grad_norm": 2.0,
        "flops": 10.0,
    } | values


def test_steps_are_averaged_and_work_is_added_up(row_of):
    row = row_of([step(1, kl=0.5), step(2, kl=1.5)])
    assert row == {
        "loss": 1.5,
        "kl": 1.0,
        "grad_norm": 2.0,
        "lr": 2e-4,
        "steps": 2,
        "global_step": 2,
        "flops": 20.0,
    }


def test_skipped_steps_are_counted_and_have_no_loss(row_of):
    row = row_of([step(1), step(2, loss=None, grad_norm=None, skipped="3 losses are not finite")])
    assert row["loss"] == 1.0 and row["grad_norm"] == 2.0 and row["skipped"] == 1
    assert row["steps"] == row["global_step"] == 2


def test_a_term_that_begins_later_is_averaged_over_the_steps_that_have_it(row_of):
    assert row_of([step(1), step(2, kl=0.25)])["kl"] == 0.25


def test_an_iteration_whose_only_step_was_skipped(row_of):
    row = row_of([step(1, loss=None, grad_norm=None, skipped="the gradient norm is nan")])
    assert "loss" not in row and row["skipped"] == 1


def test_the_noise_of_the_gradient_is_averaged_over_the_last_steps_of_several_iterations(tmp_path):
    def noisy(number):
        noise = {
            "prompts": 8.0,
            "samples": 32,
            "noise": 2.0 + number % 2,
            "signal": 1.0 + number % 3,
            "layers": {},
        }
        return step(number, gradient_noise=noise, row_tokens=900, trained_tokens=500)

    for number in range(1, 8):
        iteration = IterationFolder(tmp_path / f"{number:04d}", number)
        steps = [noisy(3 * number + place) for place in range(3)]
        mark(iteration, "train", [], {"seconds": 1.0, "trained": True, "steps": steps})
    found = metrics_row(iteration).to_json()["gradient_noise"]
    last = [noisy(number)["gradient_noise"] for number in range(24 - 16, 24)]
    assert found["steps"] == 16 and found["noise"] == pytest.approx(
        sum(one["noise"] for one in last) / 16
    )
    assert found["scale"] == pytest.approx(8 * found["noise"] / found["signal"])
    assert found["low"] < found["scale"] < found["high"]


# Weights that did not change


def weights(folder, number, phase, text, **facts):
    """An iteration with a checkpoint of this content, and the marker of the phase that made it."""
    iteration = IterationFolder(folder / f"{number:04d}", number)
    path = iteration.path / "checkpoint" / "model.safetensors"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    mark(iteration, phase, ["checkpoint"], {"seconds": 1.0, **facts})
    return iteration


def test_weights_that_training_left_as_they_were_are_named(tmp_path):
    trained = {"trained": True, "steps": [step(1)]}
    weights(tmp_path, 0, "prepare", "start")
    same = weights(tmp_path, 1, "train", "start", **trained)
    skipped = IterationFolder(tmp_path / "0002", 2)
    mark(skipped, "train", [], {"seconds": 1.0, "trained": False})
    other = weights(tmp_path, 3, "train", "other", **trained)
    again = weights(tmp_path, 4, "train", "other", **trained)
    assert metrics_row(same).to_json()["train"]["unchanged"] is True  # as the starting model
    assert (
        "unchanged" not in metrics_row(other).to_json()["train"]
        and "train" not in metrics_row(skipped).to_json()
    )
    assert metrics_row(again).to_json()["train"]["unchanged"] is True


def test_the_worst_tokens_stay_in_train_jsonl(tmp_path):
    compared = {"mean": 1e-6, "worst": [{"row": 1}], "by_version": {"0": {"mean": 1e-6}}}
    iteration = weights(
        tmp_path, 1, "train", "x", trained=True, steps=[step(1, sampler_trainer=compared)]
    )
    assert metrics_row(iteration).to_json()["sampler_trainer"] == {
        "mean": 1e-6,
        "by_version": {"0": {"mean": 1e-6}},
    }


def test_what_the_rollouts_say_stands_by_itself(tmp_path):
    iteration = IterationFolder(tmp_path, 1)
    facts = {
        "groups": {"total": 2},
        "advantages": {"clipped": 0},
        "rollouts": {"truncated": 0.5},
        "rows": 3,
    }
    mark(iteration, "pack", [], {"seconds": 1.0, **facts})
    row = metrics_row(iteration).to_json()
    assert row["rollouts"] == RolloutFigures(truncated=0.5).to_json() and row["pack"] == {
        "advantages": {"clipped": 0},
        "rows": 3,
    }


@pytest.mark.parametrize("finished, speed", [(9.0, 5.0), (10.5, 7.0), (20.0, 5.0)])
def test_the_servers_speed_counts_what_they_held_out_meanwhile(tmp_path, finished, speed):
    """Of two phases at the same time the one that ended last has seen both; another one says
    nothing of this time.
    """
    before, iteration = (IterationFolder(tmp_path / f"{number:04d}", number) for number in (0, 1))
    for folder, phase, ended, per_second in (
        (before, "validate", finished, 7.0),
        (iteration, "rollouts", 10.0, 5.0),
    ):
        stats = {name: None for name in ("prompt_tokens", "completion_tokens", "tokens_per_second")}
        stats |= {
            "mean_reward": 1.0,
            "metrics": {},
            "num_samples": 1,
            "num_failed": 0,
            "finish_reasons": {},
        }
        flops = {"prefill": 1.0, "decode": 2.0, "per_second": per_second}
        facts = {"seconds": 4.0, "flops": flops, "stats": stats}
        marker = Marker(phase=phase, finished=ended, facts=facts, files={})
        write_json(folder.path / "done" / f"{phase}.json", marker.to_json())
    assert metrics_row(iteration).to_json()["server"] == {"flops_per_second": speed}
    mark(
        iteration,
        "train",
        [],
        {
            "seconds": 1.0,
            "trained": True,
            "steps": [{"matmul_peak": 70.0, "lr": 1e-5, "global_step": 1}],
        },
    )
    row = metrics_row(iteration).to_json()
    assert row["server"].get("peak_share") == pytest.approx(speed / 70), row
