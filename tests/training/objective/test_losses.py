"""The policy losses against float64 transcriptions of their formulas, and their gradients against
finite differences.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrl.training.objective import losses
from ttrl.training.objective.losses import known_or_current

finite = st.floats(-8, 0, allow_nan=False)
tokens = st.lists(st.tuples(finite, finite, st.floats(-3, 3)), min_size=1, max_size=8)
shares = st.floats(0, 0.9)
LOW, HIGH = 0.2, 0.3


def without_facts(function):
    return lambda *given: function(*given)[0]


reinforce_loss = without_facts(losses.reinforce_loss)
clipped_ratio_loss = without_facts(losses.clipped_ratio_loss)
tanh_loss = without_facts(losses.tanh_loss)
cispo_loss = without_facts(losses.cispo_loss)
gspo_loss = without_facts(losses.gspo_loss)
clip_cov_loss = without_facts(losses.clip_cov_loss)
kl_cov_loss = without_facts(losses.kl_cov_loss)


def columns(rows):
    return tuple(torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))


def check(result, expected):
    torch.testing.assert_close(
        result, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12
    )


def cut(value, low, high):
    return min(max(value, 1 - low), 1 + high)


def ppo(new, old, a, low, high):
    """The formula, in plain floats."""
    ratio = math.exp(new - old)
    return -min(ratio * a, cut(ratio, low, high) * a)


@given(tokens)
def test_reinforce(rows):
    new, _, advantages = columns(rows)
    check(reinforce_loss(new, advantages), [-a * n for n, _, a in rows])


@given(tokens, shares, st.floats(0, 2))
def test_clipped_ratio_loss_is_ppos_formula(rows, low, high):
    check(clipped_ratio_loss(*columns(rows), low, high), [ppo(*row, low, high) for row in rows])


@given(tokens, shares, st.floats(0, 2), st.floats(1.01, 5))
def test_dual_clip(rows, low, high, bound):
    expected = []
    for n, o, a in rows:
        objective = -ppo(n, o, a, low, high)
        expected.append(-max(objective, bound * a) if a < 0 else -objective)
    check(clipped_ratio_loss(*columns(rows), low, high, bound), expected)


@given(tokens)
def test_dual_clip_leaves_positive_advantages_alone(rows):
    new, old, advantages = columns(rows)
    advantages = advantages.abs()
    torch.testing.assert_close(
        clipped_ratio_loss(new, old, advantages, LOW, HIGH, 1.5),
        clipped_ratio_loss(new, old, advantages, LOW, HIGH),
        rtol=0,
        atol=0,
    )


@given(tokens)
def test_tanh(rows):
    check(tanh_loss(*columns(rows)), [-math.tanh(n - o) * a for n, o, a in rows])


@given(tokens, shares, st.floats(0, 2))
def test_cispo(rows, low, high):
    check(
        cispo_loss(*columns(rows), low, high),
        [-cut(math.exp(n - o), low, high) * a * n for n, o, a in rows],
    )


@given(
    st.lists(
        st.tuples(finite, finite, st.floats(-3, 3), st.sampled_from([7, -2, 30])),
        min_size=1,
        max_size=9,
    )
)
def test_gspo(rows):
    new, old, advantages = columns([row[:3] for row in rows])
    samples = torch.tensor([row[3] for row in rows])
    expected = []
    for _, _, a, sample in rows:
        differences = [n - o for n, o, _, s in rows if s == sample]
        ratio = math.exp(sum(differences) / len(differences))
        expected.append(-min(ratio * a, cut(ratio, LOW, HIGH) * a))
    check(gspo_loss(new, old, advantages, samples, LOW, HIGH), expected)


@given(st.lists(st.tuples(finite, finite, st.floats(-3, 3), st.booleans()), min_size=1, max_size=8))
def test_clip_cov_and_kl_cov(rows):
    new, old, advantages = columns([row[:3] for row in rows])
    chosen = torch.tensor([row[3] for row in rows])
    expected = [0.0 if picked else ppo(n, o, a, LOW, HIGH) for n, o, a, picked in rows]
    check(clip_cov_loss(new, old, advantages, chosen, LOW, HIGH), expected)
    expected = [
        -math.exp(n - o) * a + (0.7 * abs(n - o) if picked else 0.0) for n, o, a, picked in rows
    ]
    check(kl_cov_loss(new, old, advantages, chosen, 0.7), expected)


def given_tokens(count=8):
    """Fixed tokens whose ratios lie inside and outside of the bounds, none near a kink."""
    offsets = torch.tensor([0.1, -0.1, 0.6, -0.6, 1.7, -1.7, 0.05, -0.05], dtype=torch.float64)[
        :count
    ]
    advantages = torch.tensor([1.0, -2.0, 0.5, -0.5, -1.5, 1.5, -1.0, 2.0], dtype=torch.float64)[
        :count
    ]
    new = -torch.linspace(2, 4, count, dtype=torch.float64)
    samples = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])[:count]
    return new, new - offsets, advantages, samples, torch.arange(count) % 3 == 0


def functions():
    """name → (logprobs → losses), with everything else fixed; constants of the formulas move with
    the logprobs' values alone.
    """
    new, old, advantages, _, chosen = given_tokens()
    offsets = new - old
    return {
        "reinforce": lambda x: reinforce_loss(x, advantages),
        "ppo": lambda x: clipped_ratio_loss(x, old, advantages, LOW, HIGH),
        "dual clip": lambda x: clipped_ratio_loss(x, old, advantages, LOW, HIGH, 2.0),
        "tanh": lambda x: tanh_loss(x, old, advantages),
        # the weight has no gradient: the difference to the old logprobs stays what it is
        "cispo": lambda x: cispo_loss(x, x.detach() - offsets, advantages, LOW, HIGH),
        "clip_cov": lambda x: clip_cov_loss(x, old, advantages, chosen, LOW, HIGH),
        "kl_cov": lambda x: kl_cov_loss(x, old, advantages, chosen, 0.7),
    }


@pytest.mark.parametrize("name", functions())
def test_gradients(name):
    assert torch.autograd.gradcheck(functions()[name], (given_tokens()[0].requires_grad_(),))


def test_gspos_gradient_is_that_of_the_sequence_form():
    """Σ over samples of -min(sA, clip(s)A) has its own gradient through s; each token's term
    1/length has the same one.
    """
    new, old, _, samples, _ = given_tokens()
    advantages = torch.tensor([-1.0, 1.0, 2.0, -0.5], dtype=torch.float64)[samples]
    weights = 1 / torch.bincount(samples)[samples]

    def loss(x):
        return (gspo_loss(x, old, advantages, samples, 0.02, 0.9) * weights).sum()

    assert torch.autograd.gradcheck(loss, (new.clone().requires_grad_(),))
    (gradient,) = torch.autograd.grad(loss(x := new.clone().requires_grad_()), x)
    # Clipped from below: ratio e^-0.325 and a negative advantage.
    assert set(samples[gradient == 0].tolist()) == {3}


def test_gspo_does_not_mind_the_order():
    new, old, advantages, samples, _ = given_tokens()
    order = torch.tensor([5, 0, 3, 7, 1, 6, 2, 4])
    straight = gspo_loss(new, old, advantages, samples, LOW, HIGH)
    shuffled = gspo_loss(new[order], old[order], advantages[order], samples[order], LOW, HIGH)
    torch.testing.assert_close(shuffled, straight[order], rtol=1e-14, atol=0)


@settings(max_examples=40)
@given(st.lists(st.tuples(finite, st.floats(-3, 3)), min_size=1, max_size=8))
def test_on_policy_every_gradient_is_that_of_reinforce(rows):
    new, advantages = columns(rows)
    samples, nothing = (
        torch.zeros(len(new), dtype=torch.int64),
        torch.zeros(len(new), dtype=torch.bool),
    )
    for name, loss in {
        "ppo": lambda x: clipped_ratio_loss(x, new, advantages, LOW, HIGH),
        "dual clip": lambda x: clipped_ratio_loss(x, new, advantages, LOW, HIGH, 3.0),
        "tanh": lambda x: tanh_loss(x, new, advantages),
        "cispo": lambda x: cispo_loss(x, new, advantages, LOW, HIGH),
        "gspo": lambda x: gspo_loss(x, new, advantages, samples, LOW, HIGH),
        "clip_cov": lambda x: clip_cov_loss(x, new, advantages, nothing, LOW, HIGH),
        "kl_cov": lambda x: kl_cov_loss(x, new, advantages, ~nothing, 1.0),
    }.items():
        x = new.clone().requires_grad_()
        loss(x).sum().backward()
        torch.testing.assert_close(
            x.grad, -advantages, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_tokens_without_a_sampler_logprob_are_trained():
    """Fault 4 of the predecessor: the new logprob took the old one's place undetached, and the
    gradient vanished.
    """
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    old = known_or_current(torch.tensor([math.nan, -2.0]), new)
    clipped_ratio_loss(new, old, torch.tensor([2.0, 3.0]), 0.2, 0.2).sum().backward()
    torch.testing.assert_close(new.grad, torch.tensor([-2.0, -3.0]))


def test_a_sampled_logprob_of_zero_is_known():
    """Fault 5 of the predecessor: an exact 0.0 became NaN."""
    new = torch.tensor([-0.5], requires_grad=True)
    old = known_or_current(torch.tensor([0.0]), new)
    assert old.item() == 0.0
    loss = clipped_ratio_loss(new, old, torch.tensor([1.0]), 0.5, 0.5)
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), torch.tensor([-math.exp(-0.5)]))
    torch.testing.assert_close(new.grad, torch.tensor([-math.exp(-0.5)]))


ALL = {
    "reinforce": lambda new, old, a, s, c: reinforce_loss(new, a),
    "ppo": lambda new, old, a, s, c: clipped_ratio_loss(new, old, a, LOW, HIGH),
    "dual clip": lambda new, old, a, s, c: clipped_ratio_loss(new, old, a, LOW, HIGH, 3.0),
    "tanh": lambda new, old, a, s, c: tanh_loss(new, old, a),
    "cispo": lambda new, old, a, s, c: cispo_loss(new, old, a, LOW, HIGH),
    "gspo": lambda new, old, a, s, c: gspo_loss(new, old, a, s, LOW, HIGH),
    "clip_cov": lambda new, old, a, s, c: clip_cov_loss(new, old, a, c, LOW, HIGH),
    "kl_cov": lambda new, old, a, s, c: kl_cov_loss(new, old, a, c, 1.0),
}


@pytest.mark.parametrize("name", ALL)
def test_ratios_beyond_all_bounds_stay_finite_in_fp32(name):
    """e^1000 is infinite, and so is e^100 in fp32; infinity times 0 is NaN, in the backward pass as
    well.
    """
    new = torch.tensor([0.0, -1000.0, 0.0, -1000.0, -1.0, -100.0], requires_grad=True)
    old = torch.tensor([-1000.0, 0.0, -1000.0, 0.0, -100.0, -1.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0, 0.0])
    loss = ALL[name](new, old, advantages, torch.arange(6), torch.tensor([True, False] * 3))
    loss.sum().backward()
    assert loss.isfinite().all() and new.grad.isfinite().all()
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("name", ALL)
def test_no_trained_token_at_all(name):
    """A rank whose rows are padding still takes part in the backward pass."""
    hidden = torch.zeros(0, requires_grad=True)
    empty = torch.zeros(0)
    ids, chosen = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)
    loss = ALL[name](hidden * 1, empty, empty, ids, chosen)
    loss.sum().backward()
    assert loss.shape == (0,) and hidden.grad.shape == (0,)
