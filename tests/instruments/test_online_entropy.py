"""The effect of a step, predicted during training: against gradients of single tasks, and without a
trace in the training.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_models import random_samples
from support.training_steps import ALONE

from ttrl import grpo_recipe
from ttrl.configs import GRPOConfig
from ttrl.data.packing.pack import PackedTensors, packed_tensors_from_tokenized_results
from ttrl.errors import ConfigError
from ttrl.facts import Step, read_facts
from ttrl.instruments.entropy_batch import EntropyBatch, part_of
from ttrl.instruments.linear_response import inner
from ttrl.instruments.online_entropy import OnlineEntropy, tasks_apart
from ttrl.instruments.update_rules import rule_of
from ttrl.run_folder.metrics import _entropy_response
from ttrl.training.batches import updates
from ttrl.training.objective.objective import objective_from
from ttrl.training.parallel.distributed import derived_generator
from ttrl.training.prepass import Prepass
from ttrl.training.resident import load_trained
from ttrl.training.step import GradientStep
from ttrl.training.timing import Stopwatch

PROMPTS = (3, 5, 8, 4)
TASKS = len(PROMPTS)
LR = 1e-3


def config_of(folder, model, prompts=PROMPTS, **settings):
    """Write a pack of some tasks with six samples each; return a config to train on it."""
    folder.mkdir(parents=True, exist_ok=True)
    numbered = enumerate(random_samples(5, prompts, 6))
    samples = [dataclasses.replace(one, sample=k % 6, reward=float(k % 3)) for k, one in numbered]
    pack = folder / "packed.safetensors"
    packed_tensors_from_tokenized_results(samples, seq_len=48, pad_id=0).save(pack)
    values = {"model": str(model), "packed": str(pack), "output_dir": str(folder)}
    values |= {"device": "cpu", "lr": LR, "objective": "reinforce", **settings}
    return GRPOConfig.parse(values, "test")


class Before:
    """A step's gradient, before the optimizer takes it."""

    def __init__(self, config):
        self.trained = load_trained(config, ALONE)
        self.policy = self.trained.policy
        packed = PackedTensors.load(config.packed)
        model = self.policy.decoder.config
        self.steps = updates(packed, 1, (0, 1), ALONE, model)
        (self.step,) = self.steps
        objective = objective_from(config)
        self.objective = objective.at(0)
        prepass = Prepass(self.policy, packed, self.steps, objective, config, ALONE, 0)
        prepass.run()
        self.config = config
        self.online = OnlineEntropy(config, self.trained, prepass, ALONE)
        self.gradient = GradientStep(
            self.policy, config, ALONE, Stopwatch(ALONE.device), None, None, None
        )
        self.gradient.accumulate(self.step, self.objective)

    def gradients(self):
        found = {n: p.grad.clone() for n, p in self.policy.parameters_by_name().items()}
        self.policy.zero_grad()
        return found

    def of_task(self, name):
        """∇H and the gradient of one task's answers, each from passes of its own."""
        numbers = [k for k, one in enumerate(self.step.rows.samples) if one.task_id == name]
        times = dict.fromkeys(numbers, 1)
        batch = EntropyBatch(self.policy, self.step.rows, times, self.config, ALONE)
        slope = batch.gradient({n: p.detach() for n, p in self.policy.parameters_by_name().items()})
        self.policy.zero_grad()
        part = part_of(self.step, numbers)
        self.gradient.accumulate(part, self.objective)
        return numbers, slope, self.gradients(), part.normaliser


def test_over_all_tasks_it_is_the_u_statistic(model_folder, tmp_path):
    """Of SGD, with v = -g: the mean over i of ⟨h_i, -Σ_{j≠i} Z_j·g_j / Σ_{j≠i} Z_j⟩."""
    settings = {"optimizer": "sgd", "max_grad_norm": None}
    before = Before(config_of(tmp_path, model_folder(), **settings))
    names = sorted({one.task_id for one in before.step.rows.samples})
    assert len(names) == TASKS
    kept = {n: p.grad.clone() for n, p in before.policy.parameters_by_name().items()}
    single = {name: before.of_task(name) for name in names}
    for name, p in before.policy.parameters_by_name().items():
        p.grad = kept[name].clone()
    for name, (numbers, slope, _, _) in single.items():
        others = [single[other] for other in names if other != name]
        whole = sum(normaliser for *_, normaliser in others)
        expected = -sum(n * inner(slope, g) for _, _, g, n in others) / whole
        found = before.online.measure_on(numbers, before.step, before.objective, 2.0)
        assert found.first == pytest.approx(2 * LR * expected, rel=1e-3)
        assert found.naive == pytest.approx(-2 * LR * inner(slope, kept), rel=1e-4)
        assert found.tasks == 1 and found.answers == 6 and found.seconds > 0
    # The gradient is back, bit for bit.
    for name, p in before.policy.parameters_by_name().items():
        assert torch.equal(p.grad, kept[name])


def test_a_step_of_adamw_in_fp32_is_that_in_float64(model_folder, tmp_path):
    config = config_of(tmp_path, model_folder(), weight_decay=0.1, max_grad_norm=None)
    before = Before(config)
    parameters = {n: p.detach() for n, p in before.policy.parameters_by_name().items()}
    kept = {n: p.grad.clone() for n, p in before.policy.parameters_by_name().items()}
    numbers, slope, _, _ = before.of_task(before.step.rows.samples[0].task_id)
    for name, p in before.policy.parameters_by_name().items():
        p.grad = kept[name]
    vector = rule_of(config, 0).update(parameters, kept, {}).whole()
    found = before.online.measure_on(numbers, before.step, before.objective, 1.0)
    assert found.naive == pytest.approx(LR * inner(slope, vector), rel=1e-4)


def test_a_quarter_of_the_tasks_is_apart(model_folder, tmp_path):
    before = Before(config_of(tmp_path, model_folder(), entropy_every=3))
    assert [before.online.is_due(step) for step in range(4)] == [True, False, False, True]
    seen = set()
    for number in range(40):
        apart = tasks_apart(before.step, derived_generator(number))
        tasks = {before.step.rows.samples[sample].task_id for sample in apart}
        assert len(tasks) == 1 and len(apart) == 6
        seen |= tasks
    assert len(seen) == TASKS


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adamw", "weight_decay": 0.1},
        {"optimizer": "rmsprop", "momentum": 0.9},
        {"value_head": True, "value_grad_in_decoder": True},
        {"kl_coefficient": 0.1, "kl_estimator": "full"},
    ],
    ids=str,
)
def test_the_training_is_the_same_bit_for_bit(settings, model_folder, tmp_path):
    """… and a step's line has the figures; the second step's come from the state of the first."""
    written = {}
    if "kl_coefficient" in settings:
        settings = settings | {"reference_model": str(model_folder("qwen2"))}
    for name, every in (("off", None), ("on", 1)):
        own = settings | {"updates_per_iteration": 2, "entropy_every": every}
        config = config_of(tmp_path / name, model_folder(), 2 * PROMPTS, **own)
        grpo_recipe.train_iteration(config, ALONE)
        lines = Path(config.output_dir, "train.jsonl").read_text().splitlines()
        written[name] = [read_facts(Step, json.loads(line)) for line in lines]
    weights = [load_file(tmp_path / n / "checkpoint" / "model.safetensors") for n in written]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert all(one.entropy_response is None for one in written["off"])
    measured = [one.entropy_response for one in written["on"]]
    assert len(measured) == 2 and all(one.first and one.answers > 1 for one in measured)
    assert measured[0].first != measured[0].naive and measured[0].entropy > 0
    assert all((one.dtype, one.device) == ("fp32", "cpu") for one in measured)
    mean = _entropy_response(written["on"])
    assert mean.steps == 2 and 0 < mean.share < 1
    assert mean.first == pytest.approx((measured[0].first + measured[1].first) / 2)
    assert "entropy" in written["on"][0].seconds_by_part


def test_where_it_cannot_be_measured_is_said(model_folder, tmp_path):
    refused = {"optimizer_in_backward": True, "max_grad_norm": None, "tensor_parallel": 2}
    with pytest.raises(ConfigError) as error:
        config_of(tmp_path, model_folder(), entropy_every=1, **refused)
    assert "entropy_every with optimizer_in_backward" in str(error.value)
    assert "entropy_every with tensor_parallel" in str(error.value)
    config = config_of(tmp_path, model_folder(), entropy_every=1)
    assert "entropy_every is for one process" in config.problems_here("cpu", 2, {})[0]
