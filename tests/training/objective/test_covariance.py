"""The choice of tokens by their covariance: against the definition, and whatever the order, the
packing and the ranks.
"""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_models import random_samples

from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.training.kernels.logprobs import IGNORE
from ttrl.training.objective.covariance import (
    clip_cov_choice,
    covariances,
    kl_cov_choice,
    token_keys,
)

tokens = st.lists(st.tuples(st.floats(-8, 0), st.floats(-3, 3)), min_size=1, max_size=12)


def columns(rows):
    new, advantages = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)
    )
    return new, advantages, torch.arange(len(rows)) * 7919 - 100


CHOICES = [
    lambda new, advantages, keys: kl_cov_choice(new, advantages, keys, 0.4),
    lambda new, advantages, keys: clip_cov_choice(
        new, new, advantages, keys, 5, 0.4, (0.05, 3.0), 0.2, 0.2
    ),
]


@given(tokens)
def test_covariances(rows):
    new, advantages, _ = columns(rows)
    mean, other = sum(r[0] for r in rows) / len(rows), sum(r[1] for r in rows) / len(rows)
    expected = torch.tensor([(n - mean) * (a - other) for n, a in rows], dtype=torch.float64)
    torch.testing.assert_close(covariances(new, advantages), expected, rtol=1e-9, atol=1e-9)


def test_kl_cov_takes_the_highest():
    new = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0])  # mean -3
    advantages = torch.tensor([1.0, 2.0, 9.0, -3.0, 1.0])  # mean 2: covariances -2, 0, 0, 5, 2
    keys = torch.tensor([3, 9, 4, 1, 2])
    # The lower key first.
    expected = {0.1: {3}, 0.4: {3, 4}, 0.6: {3, 4, 2}, 0.8: {3, 4, 2, 1}, 1.0: {0, 1, 2, 3, 4}}
    for share, places in expected.items():
        chosen = kl_cov_choice(new, advantages, keys, share)
        assert set(chosen.nonzero().flatten().tolist()) == places


@settings(max_examples=40)
@given(tokens, st.floats(0.01, 1), st.integers(0, 3))
def test_clip_cov_draws_within_its_bounds(rows, share, seed):
    new, advantages, keys = columns(rows)
    # PPO's clipping silences half of the tokens.
    old = torch.where(keys % 2 == 0, new, new - advantages.sign())
    allowed = (keys % 2 == 0) | (advantages == 0)
    chosen = clip_cov_choice(new, old, advantages, keys, seed, share, (0.1, 2.0), 0.2, 0.2)
    values = covariances(new, advantages)
    candidates = (values > 0.1) & (values < 2.0) & allowed
    assert not (chosen & ~candidates).any()
    assert chosen.sum() == min(int(candidates.sum()), max(1, int(share * len(rows))))


def test_clip_covs_draw_depends_on_the_seed_and_is_even():
    count = 400
    new, advantages = torch.linspace(-4, -1, count), torch.linspace(-2, 2, count)
    keys = torch.arange(count)
    drawn = [
        clip_cov_choice(new, new, advantages, keys, seed, 0.25, (-1.0, 9.0), 0.2, 0.2)
        for seed in range(40)
    ]
    assert not torch.equal(drawn[0], drawn[1])
    # Each token 10 times of 40 in expectation; seeds and keys are fixed.
    times = torch.stack(drawn).sum(0).float()
    assert times.mean() == 10 and times.max() < 25 and times.min() > 0


@settings(max_examples=40)
@given(tokens, st.randoms(use_true_random=False), st.sampled_from(CHOICES))
def test_the_order_of_the_tokens_does_not_matter(rows, draw, choice):
    new, advantages, keys = columns(rows)
    order = list(range(len(rows)))
    draw.shuffle(order)
    straight = choice(new, advantages, keys)
    shuffled = choice(new[order], advantages[order], keys[order])
    assert shuffled.tolist() == straight[order].tolist()


@pytest.mark.parametrize("choice", CHOICES)
def test_without_tokens(choice):
    empty = torch.zeros(0)
    assert choice(empty, empty, torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_without_candidates():
    new, advantages, keys = torch.ones(2), torch.ones(2), torch.arange(2)
    assert not clip_cov_choice(new, new, advantages, keys, 0, 0.5, (1.0, 5.0), 0.2, 0.2).any()
    # Both are clipped.
    new, old = torch.tensor([-1.0, -4.0]), torch.tensor([-3.0, -2.0])
    advantages = torch.tensor([1.0, -1.0])
    assert not clip_cov_choice(new, old, advantages, keys, 0, 1.0, (-9.0, 9.0), 0.2, 0.2).any()


def test_keys_are_those_of_the_tokens_wherever_they_are_packed():
    samples = random_samples(0, prompts=(3, 5, 2), completions=4)
    draw = random.Random(0)
    found = []
    for _ in range(2):
        packed = packed_tensors_from_tokenized_results(samples, seq_len=32, pad_id=0)
        keys, trained = token_keys(packed), packed.labels != IGNORE
        assert keys.shape == packed.labels.shape and keys.dtype == torch.int64
        assert len(keys[trained].unique()) == packed.num_trained
        table = [(sample.task_id, sample.sample) for sample in packed.samples]
        found.append(
            {
                (*table[owner], position): key
                for owner, position, key in zip(
                    *(t[trained].tolist() for t in (packed.sample_ids, packed.input_pos, keys)),
                    strict=True,
                )
            }
        )
        draw.shuffle(samples)
    assert found[0] == found[1]
