"""Advantages of single tokens in packed rows, against the formulas on the unpacked samples."""

import math
import random

import pytest
import torch
from support import tiny_models
from support.tiny_models import random_samples

from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.errors import PackError
from ttrl.records import TokenizedResult
from ttrl.training.kernels.logprobs import IGNORE
from ttrl.training.objective.token_rewards import (
    divergence_penalties,
    implicit_advantages,
    token_divergences,
    value_advantages,
)


def with_a_gap(task: str) -> TokenizedResult:
    """A conversation of two turns: a tool's answer lies between the tokens that were sampled."""
    result = tiny_models.sample([1, 2], [3, 4, 5, 6, 7], task=task, number=9, reward=0.25)
    result.assistant_mask[4] = result.assistant_mask[5] = False
    return result


def packs():
    """The same samples in two orders, so in other rows; groups spread over rows; one task with a
    single sample.
    """
    draw = random.Random(0)
    samples = random_samples(5, prompts=(3, 6), completions=5)
    samples += [tiny_models.sample([8, 8, 9], [4, 5, 6], task="alone"), with_a_gap("g0")]
    for sample in samples:
        sample.reward = draw.choice([0.0, 0.5, 1.0])
    shuffled = samples[:]
    draw.shuffle(shuffled)
    return [
        packed_tensors_from_tokenized_results(some, seq_len=30, pad_id=0)
        for some in (samples, shuffled)
    ]


def known(packed, seed):
    """A number for each label that depends on its sample and place alone, [R, T]; NaN elsewhere."""
    values = torch.full(packed.labels.shape, math.nan)
    for owner, sample in enumerate(packed.samples):
        where = (packed.sample_ids == owner) & (packed.labels != IGNORE)
        draw = random.Random(f"{seed} {sample.task_id} {sample.sample}")
        values[where] = torch.tensor([-4 * draw.random() for _ in range(int(where.sum()))])
    return values


def by_sample(packed, grid):
    """{(task, number): values at its labels, in order}; asserts that there is nothing elsewhere."""
    assert grid.dtype == torch.float32 and not grid[packed.labels == IGNORE].any()
    return {
        (sample.task_id, sample.sample): grid[
            (packed.sample_ids == owner) & (packed.labels != IGNORE)
        ].tolist()
        for owner, sample in enumerate(packed.samples)
    }


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert values == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name


def others_of(name, everything):
    return [values for other, values in everything.items() if other[0] == name[0] and other != name]


def mean(values):
    return sum(values) / len(values)


@pytest.mark.parametrize("packed", packs())
@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_implicit_rewards(packed, gamma):
    assert packed.num_rows > 1
    new, reference = known(packed, 1), known(packed, 2)
    zeroed = [torch.nan_to_num(grid) for grid in (new, reference)]
    rewards = {
        name: [
            0.3 * (n - r) for n, r in zip(values, by_sample(packed, zeroed[1])[name], strict=True)
        ]
        for name, values in by_sample(packed, zeroed[0]).items()
    }
    outcomes = {(sample.task_id, sample.sample): sample.reward for sample in packed.samples}
    expected = {}
    for name, own in rewards.items():
        rest = others_of(name, rewards)
        if not rest:
            expected[name] = [0.0] * len(own)  # nothing to compare with
            continue
        baseline = mean([mean(values) for values in rest])
        outcome = outcomes[name] - mean(others_of(name, outcomes))
        expected[name] = [
            outcome + sum(gamma ** (s - t) * (own[s] - baseline) for s in range(t, len(own)))
            for t in range(len(own))
        ]
    same(by_sample(packed, implicit_advantages(packed, new, reference, 0.3, gamma)), expected)


@pytest.mark.parametrize("packed", packs())
@pytest.mark.parametrize("gamma", [1.0, 0.5, 0.0])
def test_kl_in_the_reward(packed, gamma):
    new, reference = known(packed, 1), known(packed, 2)
    charges = by_sample(packed, token_divergences(packed, new, reference, 0.1, "k1"))
    difference = by_sample(packed, torch.nan_to_num(new - reference))
    same(charges, {name: [-0.1 * d for d in values] for name, values in difference.items()})

    def ahead(values, t):
        return sum(gamma ** (s - t) * values[s] for s in range(t, len(values)))

    expected = {}
    for name, own in charges.items():
        rest = others_of(name, charges)
        expected[name] = [
            ahead(own, t) - (mean([ahead(values, t) for values in rest]) if rest else 0.0)
            for t in range(len(own))
        ]
    same(
        by_sample(packed, divergence_penalties(packed, new, reference, 0.1, "k1", gamma)), expected
    )
    if gamma == 0:
        alone = expected["alone", 0]
        assert alone == pytest.approx(charges["alone", 0])


def test_where_policy_and_reference_are_the_same():
    (packed, _) = packs()
    new = known(packed, 1)
    assert not divergence_penalties(packed, new, new, 1.0).any()
    found = by_sample(packed, implicit_advantages(packed, new, new, 1.0))
    for sample in packed.samples:
        rest = [
            other.reward
            for other in packed.samples
            if other.task_id == sample.task_id and other is not sample
        ]
        advantage = sample.reward - mean(rest) if rest else 0.0
        name = (sample.task_id, sample.sample)
        assert found[name] == pytest.approx([advantage] * len(found[name]), abs=1e-6)


@pytest.mark.parametrize("packed", packs())
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_values(packed, gamma, lam):
    grid, extra = known(packed, 3), known(packed, 4)
    values, more = (by_sample(packed, torch.nan_to_num(some)) for some in (grid, extra))
    advantages, returns = value_advantages(packed, grid, gamma, lam, torch.nan_to_num(extra))
    expected = {}
    for sample in packed.samples:
        name = (sample.task_id, sample.sample)
        own, rewards = [*values[name], 0.0], list(more[name])
        rewards[-1] += sample.reward
        errors = [r + gamma * own[t + 1] - own[t] for t, r in enumerate(rewards)]
        expected[name] = [
            sum((gamma * lam) ** (s - t) * errors[s] for s in range(t, len(errors)))
            for t in range(len(errors))
        ]
    same(by_sample(packed, advantages), expected)
    same(
        by_sample(packed, returns),
        {
            name: [a + v for a, v in zip(some, values[name], strict=True)]
            for name, some in expected.items()
        },
    )


def test_without_more_rewards_the_return_is_the_reward():
    (packed, _) = packs()
    _, returns = value_advantages(packed, known(packed, 3))
    for sample in packed.samples:
        found = by_sample(packed, returns)[sample.task_id, sample.sample]
        assert found == pytest.approx([sample.reward] * len(found), abs=1e-6)


def test_a_label_without_a_number_is_told():
    (packed, _) = packs()
    new, reference = known(packed, 1), known(packed, 2)
    row, position = (int(i) for i in (packed.labels != IGNORE).nonzero()[3])
    new[row, position] = math.nan
    place = (
        f"1 of {packed.num_trained} labels have no finite one, the first at row {row}, "
        f"position {position}"
    )
    for call in (implicit_advantages, divergence_penalties, token_divergences):
        with pytest.raises(PackError, match=f"^logprobs: {place}"):
            call(packed, new, reference, 0.1)
        with pytest.raises(PackError, match=f"^reference logprobs: {place}"):
            call(packed, reference, new, 0.1)
    with pytest.raises(PackError, match=f"^values: {place}"):
        value_advantages(packed, new)
    with pytest.raises(PackError, match="values have the shape"):
        value_advantages(packed, new[:, :-1])


def test_a_sample_of_several_sequences_is_one_completion_and_a_task_may_come_up_twice():
    """Two turns that do not continue each other: the reward comes after the second, and the first
    one's tokens lead to it.
    """
    first, second = (
        tiny_models.sample([1, 2], [3, 4], task="t", reward=1.0),
        tiny_models.sample([1, 5, 6], [7, 8, 9], task="t", reward=1.0),
    )
    first.share, second.share = 0.4, 0.6
    others = [
        tiny_models.sample([1, 2], [4, 5], task="t", number=number, reward=0.0)
        for number in (1, 0, 1)
    ]  # and again 0 and 1
    packed = packed_tensors_from_tokenized_results([first, second, *others], seq_len=8, pad_id=0)
    zeros = torch.zeros(packed.labels.shape)

    def of(owner, grid):
        return grid[(packed.sample_ids == owner) & (packed.labels != IGNORE)].tolist()

    values = torch.full(packed.labels.shape, 0.5)
    advantages, returns = value_advantages(packed, values, 1.0, 1.0)
    assert (
        of(0, returns) == [1.0, 1.0]
        and of(1, returns) == [1.0, 1.0, 1.0]
        and of(3, returns) == [0.0, 0.0]
    )
    assert of(0, advantages) == [0.5, 0.5] and of(4, advantages) == [-0.5, -0.5]
    found = implicit_advantages(packed, zeros, zeros, 0.1)
    assert of(0, found) == pytest.approx([1.0] * 2) and of(1, found) == pytest.approx([1.0] * 3)
    assert of(2, found) == of(3, found) == of(4, found) == pytest.approx([-1 / 3] * 2)
    found = divergence_penalties(packed, torch.where(packed.sample_ids == 1, 1.0, 0.0), zeros, 0.1)
    assert of(0, found) == pytest.approx([-0.3] * 2) and of(1, found) == pytest.approx(
        [-0.3, -0.2, -0.1]
    )
    assert of(4, found) == pytest.approx([0.1] * 2)
