"""Advantages of tokens against sums written out as the papers have them, in float64."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttrl.data.token_advantages import gae, implicit_reward_advantages, implicit_rewards
from ttrl.errors import UserError

numbers = st.floats(-5, 5)
shares = st.sampled_from([0.0, 0.3, 0.95, 1.0])


def gae_by_definition(rewards, values, gamma, lam):
    T = len(rewards)
    V = np.zeros(T + 1)
    V[: len(values)] = values
    delta = [rewards[t] + gamma * V[t + 1] - V[t] for t in range(T)]
    return [math.fsum((gamma * lam) ** k * delta[t + k] for k in range(T - t)) for t in range(T)]


@given(st.lists(st.tuples(numbers, numbers), max_size=15), shares, shares, st.none() | numbers)
def test_gae_against_the_double_sum(pairs, gamma, lam, after):
    rewards = [reward for reward, _ in pairs]
    values = [value for _, value in pairs] + ([] if after is None else [after])
    got = gae(rewards, values, gamma, lam)
    np.testing.assert_allclose(
        got, gae_by_definition(rewards, values, gamma, lam), rtol=1e-12, atol=1e-12
    )


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=15), shares)
def test_the_ends_of_gae(pairs, gamma):
    rewards, values = map(list, zip(*pairs, strict=True))
    returns = [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]
    assert gae(rewards, values, gamma, 1.0) == pytest.approx(
        [g - v for g, v in zip(returns, values, strict=True)], abs=1e-9
    )
    errors = [
        r + gamma * after - v
        for r, v, after in zip(rewards, values, [*values[1:], 0.0], strict=True)
    ]
    assert gae(rewards, values, gamma, 0.0) == pytest.approx(errors, abs=1e-9)


def test_gae_by_hand():
    # an outcome reward on the last token, γ = λ = 1: the reward less what was expected at each
    # token
    assert gae([0.0, 0.0, 1.0], [0.25, 0.5, 0.75]) == [0.75, 0.5, 0.25]
    assert gae([0.0, 0.0], [0.25, 0.5], 1.0, 0.0) == [0.25, -0.5]
    assert gae([0.0, 0.0], [0.25, 0.5, 1.0], 1.0, 0.0) == [0.25, 0.5]
    assert gae([], []) == [] == gae([], [1.0])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([1.0], []), "1 rewards but 0 values"),
        (([1.0], [1.0, 2.0, 3.0]), "1 rewards but 3 values"),
        (([1.0, math.nan], [0.0, 0.0]), "rewards: number 1 is nan"),
        (([1.0], [math.inf]), "values: number 0 is inf"),
        (([1.0], [0.0, math.nan]), "values: number 1 is nan"),
        (([1.0], [1.0], 1.5), "gamma is 1.5"),
        (([1.0], [1.0], 1.0, math.nan), "lam is nan"),
    ],
)
def test_what_gae_refuses(arguments, text):
    with pytest.raises(UserError, match=text):
        gae(*arguments)


def prime_by_definition(token_rewards, rewards, gamma):
    K = len(rewards)
    found = []
    for i in range(K):
        others = [j for j in range(K) if j != i]
        baseline = sum(np.mean(token_rewards[j]) if token_rewards[j] else 0.0 for j in others) / (
            K - 1
        )
        outcome = rewards[i] - sum(rewards[j] for j in others) / (K - 1)
        r = token_rewards[i]
        process = [
            sum(gamma ** (s - t) * (r[s] - baseline) for s in range(t, len(r)))
            for t in range(len(r))
        ]
        found.append([value + outcome for value in process])
    return found


@given(st.lists(st.tuples(st.lists(numbers, max_size=8), numbers), min_size=2, max_size=6), shares)
def test_implicit_rewards_against_the_sum(pairs, gamma):
    token_rewards, rewards = map(list, zip(*pairs, strict=True))
    got = implicit_reward_advantages(token_rewards, rewards, gamma)
    for values, expected in zip(
        got, prime_by_definition(token_rewards, rewards, gamma), strict=True
    ):
        assert values == pytest.approx(expected, abs=1e-9)


def test_without_process_rewards_it_is_leave_one_out():
    got = implicit_reward_advantages([[0.0, 0.0], [0.0], [0.0]], [1.0, 0.0, 0.5])
    assert got == [[0.75, 0.75], [-0.75], [0.0]]
    assert implicit_reward_advantages([[1.0, 2.0]], [1.0]) == [[0.0, 0.0]]
    assert implicit_reward_advantages([], []) == []


def test_implicit_rewards():
    assert implicit_rewards([-1.0, -2.0], [-1.5, -1.0], 0.5) == [0.25, -0.5]
    with pytest.raises(UserError, match="1 logprobs but 2 reference logprobs"):
        implicit_rewards([-1.0], [-1.0, -2.0], 0.5)
    with pytest.raises(UserError, match="reference_logprobs: number 0 is nan"):
        implicit_rewards([-1.0], [math.nan], 0.5)
    with pytest.raises(UserError, match="token rewards of 1 samples but 2 rewards"):
        implicit_reward_advantages([[1.0]], [1.0, 2.0])
    with pytest.raises(UserError, match="token rewards of sample 1: number 0 is inf"):
        implicit_reward_advantages([[1.0], [math.inf]], [1.0, 2.0])
