"""Estimates of KL: the formulas, and what the head of the module says of their expectations, over
whole distributions.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttrl.training.objective.divergences import (
    ESTIMATORS,
    k1_divergence,
    k2_divergence,
    k3_divergence,
)

finite = st.floats(-8, 0, allow_nan=False)


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=8))
def test_formulas(rows):
    new, reference = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)
    )
    for estimate, formula in (
        (k1_divergence, lambda n, r: n - r),
        (k2_divergence, lambda n, r: (n - r) ** 2 / 2),
        (k3_divergence, lambda n, r: math.exp(r - n) - 1 - (r - n)),
    ):
        expected = torch.tensor([formula(n, r) for n, r in rows], dtype=torch.float64)
        torch.testing.assert_close(estimate(new, reference), expected, rtol=1e-12, atol=1e-12)
    assert (k3_divergence(new, reference) >= -1e-12).all()


def distributions():
    logits = torch.tensor(
        [1.5, -0.3, -2.2, 0.6, -1.1, -1.4], dtype=torch.float64, requires_grad=True
    )
    reference = torch.tensor([-0.6, 0.8, -1.7, 0.2, 1.6, 0.1], dtype=torch.float64)
    return logits, torch.log_softmax(reference, -1)


def kl(p_V, q_V):
    return (p_V.exp() * (p_V - q_V)).sum()


def expected_value_and_gradient(estimate):
    """Over all tokens of a small vocabulary, each with its probability; the gradient is taken at
    the logits.
    """
    logits, reference = distributions()
    logprobs = torch.log_softmax(logits, -1)
    probabilities = logprobs.detach().exp()
    values = estimate(logprobs, reference)
    return (probabilities * values).sum().detach(), torch.autograd.grad(
        (probabilities * values).sum(), logits
    )[0]


def gradient_of(divergence):
    logits, reference = distributions()
    return torch.autograd.grad(divergence(torch.log_softmax(logits, -1), reference), logits)[0]


def test_k1_is_unbiased_and_its_gradient_has_expectation_zero():
    value, gradient = expected_value_and_gradient(k1_divergence)
    logits, reference = distributions()
    torch.testing.assert_close(value, kl(torch.log_softmax(logits, -1), reference).detach())
    torch.testing.assert_close(gradient, torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-14)


def test_k2_has_the_gradient_of_kl_but_not_its_value():
    value, gradient = expected_value_and_gradient(k2_divergence)
    logits, reference = distributions()
    assert abs(value - kl(torch.log_softmax(logits, -1), reference)) > 0.05
    torch.testing.assert_close(gradient, gradient_of(kl))


def test_k3_is_unbiased_and_has_the_gradient_of_the_other_direction():
    value, gradient = expected_value_and_gradient(k3_divergence)
    logits, reference = distributions()
    torch.testing.assert_close(value, kl(torch.log_softmax(logits, -1), reference).detach())
    torch.testing.assert_close(gradient, gradient_of(lambda p, q: kl(q, p)))
    assert (gradient - gradient_of(kl)).norm() > 0.05


@pytest.mark.parametrize("name", ESTIMATORS)
def test_gradients(name):
    new = torch.tensor([-0.5, -1.0, -3.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.7, -0.2, math.nan], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: ESTIMATORS[name](x[:2], reference[:2]), (new,))
    result = ESTIMATORS[name](new, reference)
    result.sum().backward()
    assert result[2] == 0 and new.grad[2] == 0  # an unknown reference says nothing
    assert new.grad[:2].abs().min() > 0.1


@pytest.mark.parametrize("name", ESTIMATORS)
def test_far_away_and_very_near_in_fp32(name):
    new = torch.tensor([0.0, -1000.0, -1.0], requires_grad=True)
    result = ESTIMATORS[name](new, torch.tensor([-1000.0, 0.0, -1.0 - 2**-12]))
    result.sum().backward()
    assert result.isfinite().all() and new.grad.isfinite().all()
    exact = {"k1": 2**-12, "k2": 2**-25, "k3": math.expm1(-(2**-12)) + 2**-12}[name]
    # Exp(d) - 1 - d has not one right digit here.
    assert abs(result[2].item() - exact) < 1e-3 * exact


@pytest.mark.parametrize("name", ESTIMATORS)
def test_empty(name):
    assert ESTIMATORS[name](torch.zeros(0), torch.zeros(0)).shape == (0,)
