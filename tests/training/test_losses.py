"""The loss functions against float64 transcriptions of their formulas, and their gradients against finite differences."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from ttrl.training.losses import clipped_ratio_loss, k3_divergence, known_or_current

finite = st.floats(-8, 0, allow_nan=False)


@given(st.lists(st.tuples(finite, finite, st.floats(-3, 3)), min_size=1, max_size=8), st.floats(0, 0.9), st.floats(0, 2))
def test_clipped_ratio_loss_is_ppos_formula(rows, low, high):
    new, old, advantages = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    expected = []
    for n, o, a in rows:
        ratio = math.exp(n - o)
        expected.append(-min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a))
    torch.testing.assert_close(
        clipped_ratio_loss(new, old, advantages, low, high), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12
    )


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=8))
def test_k3_is_schulmans_formula_and_never_negative(rows):
    new, reference = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    expected = [math.exp(r - n) - 1 - (r - n) for n, r in rows]
    result = k3_divergence(new, reference)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert (result >= -1e-12).all()


def test_gradients():
    generator = torch.Generator().manual_seed(0)
    new = (-torch.rand(6, dtype=torch.float64, generator=generator)).requires_grad_()
    old = -torch.rand(6, dtype=torch.float64, generator=generator)
    advantages = torch.randn(6, dtype=torch.float64, generator=generator)
    assert torch.autograd.gradcheck(lambda x: clipped_ratio_loss(x, old, advantages, 0.2, 0.2), (new,))
    assert torch.autograd.gradcheck(lambda x: k3_divergence(x, old), (new,))


def test_tokens_without_a_sampler_logprob_are_trained():
    """Fault 4 of the predecessor: the new logprob took the old one's place undetached, and the gradient vanished."""
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
