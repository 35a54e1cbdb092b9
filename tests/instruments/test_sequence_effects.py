"""Gradients of single answers against passes over whole rows, and what a study says of them."""

import dataclasses
import itertools

import pytest
import torch
from support.studied_run import changed, train, two_iterations
from support.training_steps import ALONE

from ttrl.data.packing.pack import IGNORE_LABEL, PackedTensors
from ttrl.instruments import study as module
from ttrl.instruments.entropy_batch import EntropyBatch, alone, draw, halves, part_of
from ttrl.instruments.fisher import dot, fit_of
from ttrl.instruments.study import study


@pytest.fixture(scope="module")
def standing(run, tmp_path_factory):
    """A study in float64 before its step, and its answers as an entropy batch."""
    config = module.study_config(run, str(tmp_path_factory.mktemp("scratch")), None)
    found = module._Study(config, ALONE, 0, "fp64", 0)
    found._widen()
    packed = PackedTensors.load(config.packed)
    first, _ = halves(packed, torch.Generator().manual_seed(0))
    times = draw(packed, first, 20, torch.Generator().manual_seed(1))
    return found, EntropyBatch(found.policy, packed, times, config, ALONE)


def test_an_answer_alone_is_what_it_is_in_its_row(standing):
    found, _ = standing
    rows = found.step.rows
    assert any(len(one.groups) > 1 for one in rows.samples)
    for number, one in enumerate(rows.samples):
        step = alone(found.step, number)
        step.rows.check("one answer alone")
        own = (rows.sample_ids[one.row] == number) & (rows.labels[one.row] != IGNORE_LABEL)
        labels = step.rows.labels[0] != IGNORE_LABEL
        for name in ("labels", "advantages", "weights", "input_pos"):
            wanted = getattr(rows, name)[one.row][own]
            assert torch.equal(getattr(step.rows, name)[0][labels], wanted)
        assert step.normaliser == found.step.normaliser


def test_the_forces_of_all_answers_are_the_gradient(standing):
    found, _ = standing
    found.policy.zero_grad()
    found._accumulate(found.step)
    whole = {name: -p.grad.clone() for name, p in found.names.items()}
    total = {name: torch.zeros_like(p) for name, p in whole.items()}
    for number in range(len(found.step.rows.samples)):
        force = found._force(alone(found.step, number))
        found.policy.zero_grad()
        part = dataclasses.replace(part_of(found.step, [number]), normaliser=found.step.normaliser)
        found._accumulate(part)
        for name, p in found.names.items():
            torch.testing.assert_close(force[name], -p.grad, rtol=1e-9, atol=1e-12)
            total[name] += force[name]
    for name, value in whole.items():
        torch.testing.assert_close(total[name], value, rtol=1e-9, atol=1e-12)


def test_the_parts_of_all_answers_are_the_entropys_gradient(standing):
    found, batch = standing
    start = {name: p.detach().clone() for name, p in found.names.items()}
    wanted = batch.gradient(start)
    total = {name: torch.zeros_like(value) for name, value in wanted.items()}
    logprobs = batch.logprobs(start)
    values, _ = batch.values(start)
    for place in range(len(batch.samples)):
        part, logprob = batch.sequence(place)
        assert float(logprob) == pytest.approx(float(logprobs[place]), rel=1e-10)
        share = int(batch.times[place]) / 20
        assert float(part) == pytest.approx(float(values[place]) * share, rel=1e-10)
        parameters = list(found.names.values())
        gradients = torch.autograd.grad(part, parameters, allow_unused=True)
        for name, gradient in zip(found.names, gradients, strict=True):
            if gradient is not None:
                total[name] += gradient
    for name, value in wanted.items():
        torch.testing.assert_close(total[name], value, rtol=1e-8, atol=1e-11)


def explicit_kernel(found, batch, update, forces):
    """g_iᵀ P f_j for all pairs, from whole vectors."""
    rows = []
    for place in range(len(batch.samples)):
        _, logprob = batch.sequence(place)
        gradients = torch.autograd.grad(logprob, list(found.names.values()))
        own = dict(zip(found.names, gradients, strict=True))
        rows.append(
            [
                dot(own, {name: f[name] * update.preconditioner[name] for name in own})
                for f in forces
            ]
        )
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("projected", [False, True])
def test_the_kernel_is_that_of_explicit_gradients(standing, projected):
    found, batch = standing
    update = found._update(found.step)
    once = dict.fromkeys(range(len(found.step.rows.samples)), 1)
    own = EntropyBatch(found.policy, found.step.rows, once, found.config, ALONE)
    forces = [found._force(alone(found.step, number)) for number in own.numbers]
    in_order = [one.task_id for one in own.samples]
    order = sorted(range(len(forces)), key=lambda place: in_order.index(in_order[place]))
    most = 0 if projected else 10**8
    answers = module.Answers(
        own, batch, lambda place: copies(forces[place]), found.names, most_whole=most
    )
    slope = batch.gradient({name: p.detach().clone() for name, p in found.names.items()})
    kinds = {"sgd": None, "adamw": update.preconditioner}
    effects, kernels = answers.kernels(slope, update, 100, kinds)
    wanted = explicit_kernel(found, batch, found._update(found.step), forces)
    kernel = kernels.kinds["adamw"]
    assert kernel.pairs is not None and (kernels.sums is not None) == projected
    torch.testing.assert_close(kernel.moves, wanted.sum(dim=1), rtol=1e-6, atol=1e-9)
    if projected:
        assert kernel.pairs.error is not None and kernel.pairs.error < 1.5
        scale = wanted.abs().max()
        assert (kernel.pairs.effects - wanted[:, order]).abs().max() < 0.2 * scale
    else:
        assert kernel.pairs.error is None
        torch.testing.assert_close(kernel.pairs.effects, wanted[:, order], rtol=1e-6, atol=1e-9)
    plain = [[dot(g, f) for f in forces] for g in _scores(found, batch)]
    torch.testing.assert_close(
        kernels.kinds["sgd"].moves,
        torch.tensor(plain, dtype=torch.float64).sum(dim=1),
        rtol=1e-6,
        atol=1e-9,
    )
    # The split is that of explicit pairs of answers, too.
    h = [
        dict(
            zip(
                found.names,
                torch.autograd.grad(own.sequence(place)[0], list(found.names.values())),
                strict=True,
            )
        )
        for place in range(len(own.samples))
    ]
    pairs = torch.tensor(
        [[dot(a, {n: f[n] * update.preconditioner[n] for n in a}) for f in forces] for a in h],
        dtype=torch.float64,
    )
    tasks = [one.task_id for one in own.samples]
    same = torch.tensor([[one == other for other in tasks] for one in tasks])
    split = effects.split
    assert split.own == pytest.approx(float(pairs.diagonal().sum()), rel=1e-6)
    together = float(pairs[same].sum() - pairs.diagonal().sum())
    assert split.same_prompt == pytest.approx(together, rel=1e-6)
    assert split.other_prompts == pytest.approx(float(pairs[~same].sum()), rel=1e-5)
    assert split.prompts == len(set(tasks)) > 2


def copies(vector):
    return {name: tensor.clone() for name, tensor in vector.items()}


def _scores(found, batch):
    for place in range(len(batch.samples)):
        gradients = torch.autograd.grad(batch.sequence(place)[1], list(found.names.values()))
        yield dict(zip(found.names, gradients, strict=True))


def test_the_parts_of_a_study_sum_to_its_first_order(run):
    found = study(run, sequences=24, factors=[1.0], dtype="fp64", kernel=5)
    current = found["current"]
    assert sum(current["by_answer"]) == pytest.approx(found["parts"]["current"], rel=1e-9)
    assert current["same_prompt"] + current["other_prompts"] == pytest.approx(
        found["parts"]["current"], rel=1e-9
    )
    assert current["same_prompt"] and current["other_prompts"]
    ages = found["ages"]
    assert [(one["newest"], one["oldest"]) for one in ages] == [(1, 1)]
    assert ages[0]["value"] == pytest.approx(found["parts"]["earlier"], rel=1e-9)
    one = found["one_batch"]
    assert one["naive"] == pytest.approx(one["own"] + one["same_prompt"] + one["other_prompts"])
    assert one["bias"] == pytest.approx(one["naive"] - one["unbiased"])
    moves = found["kernel"]["parts"]
    # K·A is this step's part of the prediction, with the learning rate.
    fit = fit_of(moves["current"], found["kernel"]["measured"])
    assert found["kernel"]["kinds"]["adamw"]["fit"]["slope"] == pytest.approx(fit.slope, rel=1e-6)
    assert 0.1 < fit.slope < 10
    for place, predicted in enumerate(found["kernel"]["predicted"]):
        assert predicted == pytest.approx(sum(part[place] for part in moves.values()))


def test_predicted_log_probabilities_are_measured_up_to_the_square_of_the_step(run, tmp_path):
    errors = []
    for factor in (0.04, 0.02, 0.01):
        folder = tmp_path / str(factor)
        folder.mkdir()
        smaller = changed(run, folder, lr=1e-3 * factor)
        kernel = study(smaller, sequences=24, factors=[1.0], dtype="fp64", kernel=8)["kernel"]
        measured, predicted = (torch.tensor(kernel[name]) for name in ("measured", "predicted"))
        errors.append(float((measured - predicted).norm()))
        assert kernel["fit"]["sign"] == 1 and kernel["fit"]["slope"] == pytest.approx(1, abs=0.1)
        assert kernel["fit"]["r_squared"] > 0.95
    for larger, smaller in itertools.pairwise(errors):
        assert larger / smaller == pytest.approx(4, rel=0.3)


def test_ages_reach_through_an_iterations_own_steps(model_folder, tmp_path):
    """Two iterations of two steps: the study of the last step knows three of four by themselves."""
    settings = {"updates_per_iteration": 2}
    checkpoint = two_iterations(tmp_path, model_folder(), **settings)
    found = study(checkpoint, sequences=16, factors=[1.0], dtype="fp64", update=2)
    assert [(one["newest"], one["oldest"]) for one in found["ages"]] == [(1, 1), (2, 3)]
    total = sum(one["value"] for one in found["ages"])
    assert total == pytest.approx(found["parts"]["earlier"], rel=1e-9)


def test_a_sample_of_its_own_row_loses_no_signal(model_folder, tmp_path):
    """With KL over the vocabulary each label has the reference's hidden state; with several steps,
    a start log-probability.
    """
    settings = {
        "reference_model": str(model_folder("qwen2")),
        "kl_coefficient": 0.1,
        "kl_estimator": "full",
        "updates_per_iteration": 2,
    }
    checkpoint = train(tmp_path, 1, model_folder(), **settings)
    found = study(checkpoint, sequences=16, factors=[1.0], dtype="fp64", update=2)
    total = sum(found["current"]["by_answer"])
    assert total == pytest.approx(found["parts"]["current"], rel=1e-7)
