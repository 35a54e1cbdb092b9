"""A whole study of a tiny model's second step, in float64 against the truth, and its command."""

import dataclasses
import itertools
import json
import math
import re
import sys

import pytest
import torch
import yaml
from support.tiny_models import random_samples
from support.training_steps import ALONE

from ttrl import grpo_recipe
from ttrl.cli import main
from ttrl.configs import GRPOConfig
from ttrl.data.packing.pack import PackedTensors, packed_tensors_from_tokenized_results
from ttrl.instruments import study as module
from ttrl.instruments.entropy_batch import EntropyBatch, draw, halves, only
from ttrl.instruments.linear_response import inner, moved
from ttrl.instruments.study import study
from ttrl.instruments.study_report import draw_tokens
from ttrl.instruments.study_run import draw_noise
from ttrl.training.policy.loading import load_policy


@pytest.fixture(scope="module")
def run(model_folder, tmp_path_factory):
    """Two iterations, each with its grpo.yaml; the checkpoint of the second."""
    folder, model, state = tmp_path_factory.mktemp("run"), str(model_folder()), None
    for number in (1, 2):
        iteration = folder / f"{number:04d}"
        iteration.mkdir()
        samples = [dataclasses.replace(one, sample=n % 6) for n, one in enumerate(random_samples(number, (3, 5, 8, 4), 6))]
        packed_tensors_from_tokenized_results(samples, seq_len=48, pad_id=0).save(iteration / "packed.safetensors")
        values = {"model": model, "packed": str(iteration / "packed.safetensors"), "output_dir": str(iteration), "state": state}
        values |= {"device": "cpu", "lr": 1e-3, "weight_decay": 0.1, "iteration": number, "objective": "reinforce"}
        (iteration / "grpo.yaml").write_text(yaml.safe_dump(values))
        grpo_recipe.train(GRPOConfig.parse(values, "test"), ALONE)
        model, state = str(iteration / "checkpoint"), str(iteration / "state")
    return iteration / "checkpoint"


def test_the_vector_by_hand_is_the_true_step_and_the_checkpoint(run):
    found = study(run, sequences=16, factors=[1.0])
    assert found["global_step"] == 2 and found["lr"] == 1e-3
    assert found["step"]["cosine"] > 0.9999 and found["step"]["norm_ratio"] == pytest.approx(1, abs=1e-4)
    assert found["step"]["checkpoint_distance"] < 1e-5
    assert 0.2 < found["half_cosine"] < 1
    assert found["slope"] == pytest.approx(sum(found["parts"].values()), rel=1e-4)
    assert all(found["parts"].values())


def test_the_response_follows_its_first_and_second_order(run):
    """In float64, the error of the first order falls as η², and of both together as η³."""
    found = study(run, sequences=24, factors=[0.0, 0.02, 0.04, 0.08], dtype="fp64")
    still, *sweep = found["sweep"]
    assert still["measured"] == pytest.approx(0, abs=1e-12) and still["effective_size"] == pytest.approx(1)
    first = [abs(one["measured"] - one["first"]) for one in sweep]
    both = [abs(one["measured"] - one["first"] - one["second"]) for one in sweep]
    for smaller, larger in itertools.pairwise(first):
        assert larger / smaller == pytest.approx(4, rel=0.3)
    assert all(b < 0.2 * a for a, b in zip(first, both, strict=True))
    assert [one["effective_size"] for one in sweep] == sorted((one["effective_size"] for one in sweep), reverse=True)
    assert all(one["error"] > 0 for one in sweep)
    entropy = found["entropy"]
    assert sum(entropy["by_position"]) == pytest.approx(entropy["rao_blackwell"]["value"], rel=1e-12)
    assert len(entropy["by_position"]) > 1 and min(entropy["by_position"]) > 0
    json.dumps(found, allow_nan=False)


@pytest.fixture(scope="module")
def two_steps(run, tmp_path_factory):
    """A run whose iteration takes two optimizer steps, from where the other run ended; its objective looks at the start."""
    iteration = tmp_path_factory.mktemp("two") / "iterations" / "0003"
    iteration.mkdir(parents=True)
    samples = [dataclasses.replace(one, sample=n % 6) for n, one in enumerate(random_samples(5, (3, 5, 8, 4), 6))]
    packed_tensors_from_tokenized_results(samples, seq_len=48, pad_id=0).save(iteration / "packed.safetensors")
    values = {"model": str(run), "packed": str(iteration / "packed.safetensors"), "output_dir": str(iteration)}
    values |= {"state": str(run.parent / "state"), "device": "cpu", "lr": 1e-3, "iteration": 3, "updates_per_iteration": 2}
    (iteration / "grpo.yaml").write_text(yaml.safe_dump(values))
    grpo_recipe.train(GRPOConfig.parse(values, "test"), ALONE)
    return iteration / "checkpoint"


def test_the_second_step_of_an_iteration_is_studied_where_the_first_has_led(two_steps):
    first = study(two_steps, sequences=16, factors=[1.0])
    assert (first["update"], first["updates"], first["global_step"]) == (1, 2, 3) and "checkpoint_distance" not in first["step"]
    found = study(two_steps, sequences=24, factors=[0.0, 0.02, 0.04, 0.08], dtype="fp64", update=2)
    assert (found["update"], found["updates"], found["global_step"]) == (2, 2, 4)
    # The first step was taken again as the recipe took it, or the second would not lead to the checkpoint.
    assert found["step"]["cosine"] > 0.9999 and found["step"]["checkpoint_distance"] < 1e-5
    still, *sweep = found["sweep"]
    assert still["measured"] == pytest.approx(0, abs=1e-12) and still["effective_size"] < 1  # another policy sampled
    errors = [abs(one["measured"] - one["first"]) for one in sweep]
    for smaller, larger in itertools.pairwise(errors):
        assert larger / smaller == pytest.approx(4, rel=0.3)


def test_adapters_alone_are_studied_where_they_alone_are_trained(model_folder, tmp_path):
    """The second step of an iteration, so that both of an adapter's matrices have a gradient."""
    samples = [dataclasses.replace(one, sample=n % 6) for n, one in enumerate(random_samples(2, (3, 5, 8, 4), 6))]
    packed_tensors_from_tokenized_results(samples, seq_len=48, pad_id=0).save(tmp_path / "packed.safetensors")
    values = {"model": str(model_folder()), "packed": str(tmp_path / "packed.safetensors"), "output_dir": str(tmp_path)}
    values |= {"device": "cpu", "lr": 1e-2, "lora_rank": 4, "lora_base": str(model_folder()), "updates_per_iteration": 2}
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(values))
    grpo_recipe.train(GRPOConfig.parse(values, "test"), ALONE)
    found = study(tmp_path / "checkpoint", sequences=24, factors=[0.02, 0.04], dtype="fp64", update=2)
    assert found["step"]["cosine"] > 0.9999 and found["step"]["norm_ratio"] == pytest.approx(1, abs=1e-4)
    errors = [abs(one["measured"] - one["first"]) for one in found["sweep"]]
    assert errors[1] / errors[0] == pytest.approx(4, rel=0.3)


def test_the_reference_of_a_part_is_that_of_its_own_tokens(run, model_folder, tmp_path):
    """With KL over the vocabulary, a step holds the reference's hidden states at its labels: a half has those of its own."""
    config = module._config_of(run, str(tmp_path))
    reference = {"reference_model": str(model_folder()), "kl_coefficient": 0.1, "kl_estimator": "full", "rows_per_microbatch": 1}
    study_of = module._Study(dataclasses.replace(config, **reference), ALONE, 0, "fp32", 0)
    samples, _ = halves(study_of.step.rows, torch.Generator().manual_seed(0))
    part, whole = study_of._part(samples), study_of.step
    wanted = torch.isin(whole.rows.sample_ids, torch.tensor(samples))
    for row, (states, had) in enumerate(zip(whole.reference_hidden, whole.rows.labels != -100, strict=True)):
        assert torch.equal(part.reference_hidden[row], states[wanted[row][had]])
    assert 0 < sum(map(len, part.reference_hidden)) < sum(map(len, whole.reference_hidden))
    study_of._update(part)


def test_without_matplotlib_the_command_says_so(run, monkeypatch, capsys):
    for name in ("study_run", "study_report"):
        monkeypatch.delitem(sys.modules, f"ttrl.instruments.{name}", raising=False)
        monkeypatch.delattr(f"ttrl.instruments.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["study", str(run)]) == 2
    assert "drawn with matplotlib" in capsys.readouterr().err


def test_every_step_of_every_iteration(two_steps, capsys):
    assert main(["study", str(two_steps.parents[2]), "--sequences", "16"]) == 0
    found = json.loads((two_steps.parents[2] / "study" / "study.json").read_text())
    assert [(one["iteration"], one["global_step"]) for one in found["steps"]] == [(3, 3), (3, 4)]


def test_the_noise_of_a_run_is_drawn(tmp_path):
    noise = {"scale": 30.0, "low": 20.0, "prompts": 32.0, "from_samples": 0.3}
    rows = [{"iteration": n, "gradient_noise": noise | ({"high": 60.0} if n else {})} for n in range(3)]
    assert draw_noise(rows, tmp_path / "noise.png").read_bytes().startswith(b"\x89PNG")


def test_tokens_are_drawn_whatever_a_model_wrote(tmp_path):
    token = {"before": "$x^{ \\frac", "text": "\x1b\u4e2d$", "covariance": -0.5}
    found = {"covariance": {"mean": 0.1, "tokens": [token]}, "mismatch": {}}
    assert draw_tokens(found, tmp_path / "tokens.png").read_bytes().startswith(b"\x89PNG")


def test_the_gradient_is_the_slope_of_the_values_in_any_direction(run, tmp_path):
    config = dataclasses.replace(module._config_of(run, str(tmp_path)), state=None)
    policy = load_policy(config, ALONE).double()
    policy.compute_dtype = torch.float64
    packed = PackedTensors.load(config.packed)
    first, _ = halves(packed, torch.Generator().manual_seed(0))
    times = draw(packed, first, 20, torch.Generator().manual_seed(1))
    batch = EntropyBatch(policy, packed, times, config, ALONE)
    start = {name: p.detach().clone() for name, p in policy.parameters_by_name().items()}
    generator = torch.Generator().manual_seed(2)
    v = {name: torch.randn(p.shape, generator=generator, dtype=torch.float64) for name, p in start.items()}
    sides = [batch.mean(batch.values(moved(start, v, side))[0]).value for side in (1e-6, -1e-6)]
    assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(inner(batch.gradient(start), v), rel=1e-6)
    # Under other parameters the call computes what a policy with these parameters would.
    other = moved(start, v, 1e-3)
    called = next(iter(batch._tables(other)))
    for name, p in policy.parameters_by_name().items():
        p.data.copy_(other[name])
    torch.testing.assert_close(next(iter(batch._tables(None)))[0], called[0])
    assert int(batch.times.sum()) == 20 and len(batch.times) == len(times)


def test_halves_and_draws(run):
    packed = PackedTensors.load(run.parent / "packed.safetensors")
    first, second = halves(packed, torch.Generator().manual_seed(0))
    assert not set(first) & set(second) and len(first) + len(second) == len(packed.samples)
    for half in (first, second):
        kept = only(packed, half)
        owners = kept.sample_ids[kept.labels != -100]
        assert set(owners.tolist()) == set(half)
        assert not kept.weights[kept.labels == -100].any()
    times = draw(packed, first, 4000, torch.Generator().manual_seed(1))
    tasks = [packed.samples[number].task_id for number in times.elements()]
    assert all(abs(tasks.count(task) - 1000) < 120 for task in set(tasks)) and set(times) == set(first)


def test_the_command(run, tmp_path, capsys):
    arguments = ["study", str(run), "--sequences", "8", "--factors", "1,-1", "--kernel", "9", "--output", str(tmp_path / "study")]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "true step: cosine" in said and "Entropy of an answer" in said and "ESS" in said
    found = json.loads((tmp_path / "study" / "study.json").read_text())
    assert len(found["sweep"]) == 2 and math.isfinite(found["curvature"])
    assert "Cov(log π, A)" in said and "Trainer − sampler, rest" in said and "Fisher kernel of 9 tokens (adamw)" in said
    assert len(found["kernel"]["cosines"]) == 9 and found["kernel"]["sgd"]["others"] != 0
    assert all((tmp_path / "study" / f"{name}.png").is_file() for name in ("kernel", "position", "tokens"))
    answers = found["kernel"]["sequences"]
    assert len(answers["cosines"]) == len(answers["task"]) > 2 and answers["cosines"][0][0] == pytest.approx(1)
    assert set(answers["task"]) == set(range(max(answers["task"]) + 1)) and answers["cosines"][0][1] != pytest.approx(1)
    assert re.search(r"Half of it is in the first \d+ of \d+ tokens", said)
    assert (tmp_path / "study" / "study.png").read_bytes().startswith(b"\x89PNG")


def test_every_step_of_a_run(run, tmp_path, capsys):
    """What there is; an iteration whose start is gone is named; each row is that of its own study."""
    folder = tmp_path / "run"
    for number in (1, 2):
        (folder / "iterations" / f"{number:04d}").mkdir(parents=True)
        values = yaml.safe_load((run.parent.parent / f"{number:04d}" / "grpo.yaml").read_text())
        (folder / "iterations" / f"{number:04d}" / "grpo.yaml").write_text(yaml.safe_dump(values))
        (folder / "iterations" / f"{number:04d}" / "checkpoint").symlink_to(run.parent.parent / f"{number:04d}" / "checkpoint")
    for number in (0, 3):
        (folder / "iterations" / f"{number:04d}").mkdir()
    gone = yaml.safe_load((run.parent / "grpo.yaml").read_text()) | {"state": str(tmp_path / "pruned")}
    (folder / "iterations" / "0003" / "grpo.yaml").write_text(yaml.safe_dump(gone))
    (folder / "iterations" / "0000" / "grpo.yaml").write_text(yaml.safe_dump(gone | {"packed": "", "state": None}))
    assert main(["study", str(folder), "--sequences", "24", "--dtype", "fp64"]) == 0
    said = capsys.readouterr().out
    found = json.loads((folder / "study" / "study.json").read_text())
    assert [one["iteration"] for one in found["steps"]] == [1, 2] and found["gone"] == [3] and "iterations 3 started" in said
    own = study(run, sequences=24, factors=[1.0], dtype="fp64")
    assert found["steps"][1]["measured"] == own["sweep"][0]["measured"] and found["steps"][1]["global_step"] == 2
    linear = [one for one in found["steps"] if abs(one["second"]) <= abs(one["first"]) / 2]
    assert [one["is_linear"] for one in found["steps"]] == [one in linear for one in found["steps"]]
    assert found["right"] == sum(one["measured"] * one["first"] > 0 for one in found["steps"])
    assert found["linear"] == len(linear) and found["linear_right"] == sum(one["measured"] * one["first"] > 0 for one in linear)
    assert f"in {found['right']} of 2 steps" in said
    assert (folder / "study" / "steps.png").read_bytes().startswith(b"\x89PNG")
    assert main(["study", str(folder), "--kernel", "3", "--factors", "1"]) == 2
    assert "is a run" in capsys.readouterr().err
    (folder / "iterations" / "0001" / "grpo.yaml").unlink()
    (folder / "iterations" / "0002" / "grpo.yaml").unlink()
    assert main(["study", str(folder)]) == 2
    assert "pruned" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--factors", "a"], ["--sequences", "1"]], ids=str)
def test_wrong_arguments_are_named(run, arguments, capsys):
    assert main(["study", str(run), *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


def test_what_is_gone_is_named(run, tmp_path, capsys):
    assert main(["study", str(tmp_path / "checkpoint")]) == 2
    assert "grpo.yaml" in capsys.readouterr().err
    values = yaml.safe_load((run.parent / "grpo.yaml").read_text())
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(values | {"state": str(tmp_path / "pruned")}))
    assert main(["study", str(tmp_path / "checkpoint")]) == 2
    assert "state" in capsys.readouterr().err
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(values | {"optimizer": "sgd"}))
    assert main(["study", str(tmp_path / "checkpoint")]) == 2
    assert "AdamW" in capsys.readouterr().err
