"""Entropy of sequences where all of them can be enumerated: every estimate against the exact sum,
and its autograd.
"""

import itertools

import pytest
import torch
from support.every_sequence import SEQUENCES, a_policy, tables
from support.every_sequence import exact_entropy as exact

from ttrl.instruments.entropy import (
    effective_size,
    entropy_by_position,
    entropy_estimates,
    importance_entropy,
    mean_over,
    others_mean,
)


def test_both_estimates_are_unbiased_and_the_second_has_less_variance():
    logits = a_policy()
    logprobs, entropies = tables(logits.detach())
    probability = logprobs.sum(dim=1).exp()
    assert float(probability.sum()) == pytest.approx(1.0)
    truth = float(exact(logits))
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(300):
        drawn = torch.multinomial(probability, 100, replacement=True, generator=generator)
        found.append(
            [
                mean_over(terms.sum(dim=1))
                for terms in entropy_estimates(logprobs[drawn], entropies[drawn])
            ]
        )
    for which in (0, 1):
        values = torch.tensor([one[which].value for one in found])
        error = float(values.std()) / 300**0.5
        assert abs(float(values.mean()) - truth) < 3 * error
        said = sum(one[which].error for one in found) / 300
        assert said == pytest.approx(float(values.std()), rel=0.15)  # the errors are what they say
    plain, better = (torch.tensor([one[which].value for one in found]).var() for which in (0, 1))
    assert better < 0.5 * plain


def test_the_gradient_with_the_score_of_the_prefix_is_that_of_the_exact_entropy():
    """Its expectation, by summing over all sequences; without the prefix's term it is another
    one.
    """
    logits = a_policy()
    (wanted,) = torch.autograd.grad(exact(logits), logits)
    logprobs, entropies = tables(logits)
    probability = logprobs.detach().sum(dim=1).exp()
    values, log_w = importance_entropy(logprobs, entropies, logprobs.detach(), 0.7)
    assert torch.equal(log_w, torch.zeros_like(log_w))
    (found,) = torch.autograd.grad((probability * values).sum(), logits, retain_graph=True)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)
    (bonus,) = torch.autograd.grad((probability * entropies.sum(dim=1)).sum(), logits)
    assert (bonus - wanted).abs().max() > 0.01


def test_the_second_derivative_is_that_of_the_exact_entropy():
    logits = a_policy()
    v = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def curvature(value):
        (gradient,) = torch.autograd.grad(value, logits, create_graph=True)
        return float((torch.autograd.grad((gradient * v).sum(), logits)[0] * v).sum())

    logprobs, entropies = tables(logits)
    probability = logprobs.detach().sum(dim=1).exp()
    values, _ = importance_entropy(logprobs, entropies, logprobs.detach(), -0.3)
    assert curvature((probability * values).sum()) == pytest.approx(
        curvature(exact(logits)), rel=1e-10
    )


def test_weighing_gives_the_entropy_of_another_policy():
    start, other = a_policy().detach(), a_policy().detach() + 0.3 * a_policy(5).detach()
    before = tables(start)[0]
    probability = before.sum(dim=1).exp()
    values, log_w = importance_entropy(*tables(other), before, baseline_ST=2.0)
    assert float((probability * values).sum()) == pytest.approx(float(exact(other)), rel=1e-12)
    assert float((probability * log_w.exp()).sum()) == pytest.approx(1.0)
    drawn = torch.multinomial(
        probability, 20_000, replacement=True, generator=torch.Generator().manual_seed(3)
    )
    w = log_w[drawn].exp()
    assert effective_size(log_w[drawn]) == pytest.approx(
        float(w.sum() ** 2 / (w**2).sum()) / 20_000
    )


def test_weighted_terms_have_the_expectation_of_another_policys_tokens():
    start, other = a_policy().detach(), a_policy().detach() + 0.3 * a_policy(5).detach()
    before = tables(start)[0]
    sampled = before.sum(dim=1).exp()
    own = tables(other)[0].sum(dim=1).exp()
    for weighted, plain in zip(
        entropy_estimates(*tables(other), before), entropy_estimates(*tables(other)), strict=True
    ):
        torch.testing.assert_close(sampled @ weighted, own @ plain)  # for each token by itself
        assert float((sampled @ weighted).sum()) == pytest.approx(float(exact(other)))


def gradient_of(logits, chosen, with_baseline):
    logprobs, entropies = (table[chosen] for table in tables(logits))
    baseline = others_mean(entropies) if with_baseline else 0.0
    values, _ = importance_entropy(logprobs, entropies, logprobs.detach(), baseline)
    return torch.autograd.grad(values.mean(), logits)[0]


def test_the_mean_of_the_others_as_a_baseline_has_no_bias():
    """Over all pairs of sequences."""
    logits = a_policy()
    (wanted,) = torch.autograd.grad(exact(logits), logits)
    probability = tables(logits.detach())[0].sum(dim=1).exp()
    mean = torch.zeros_like(wanted)
    for pair in itertools.product(range(len(SEQUENCES)), repeat=2):
        mean += probability[list(pair)].prod() * gradient_of(logits, torch.tensor(pair), True)
    torch.testing.assert_close(mean, wanted, rtol=0, atol=1e-13)


def test_a_sequence_that_was_drawn_twice_is_no_other_of_its_own():
    _, entropies = tables(a_policy().detach())
    drawn = [3, 5, 5, 1]
    once = others_mean(entropies[[3, 5, 1]], torch.tensor([1, 2, 1]))
    torch.testing.assert_close(once[0], others_mean(entropies[drawn])[0])
    torch.testing.assert_close(once[1], others_mean(entropies[[3, 1, 5]])[2])
    assert not others_mean(entropies[:1]).any()


def test_the_baseline_lowers_the_variance():
    logits = a_policy()
    (wanted,) = torch.autograd.grad(exact(logits), logits)
    probability = tables(logits.detach())[0].sum(dim=1).exp()
    generator, errors = torch.Generator().manual_seed(4), {True: 0.0, False: 0.0}
    for _ in range(200):
        drawn = torch.multinomial(probability, 50, replacement=True, generator=generator)
        for with_baseline in errors:
            errors[with_baseline] += float(
                (gradient_of(logits, drawn, with_baseline) - wanted).square().sum()
            )
    assert errors[True] < 0.9 * errors[False]


def test_sequences_of_one_prompt_count_as_one_draw():
    values = torch.tensor([1.0, 1.0, 1.0, 3.0, 3.0, 3.0])
    clustered = mean_over(values, torch.tensor([7, 7, 7, 4, 4, 4]))
    assert clustered.value == 2.0 and clustered.error == pytest.approx(1.0)  # of two draws, 1 and 3
    assert mean_over(values).error == pytest.approx(float(values.std()) / 6**0.5)
    assert torch.tensor(mean_over(values[:1]).error).isnan()


def test_entropy_by_position_weighs_by_draws():
    """Two answers of two and one tokens; the second was drawn three times."""
    entropies = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    assert entropy_by_position(entropies, torch.tensor([1, 3])) == [2.5, 0.5]
