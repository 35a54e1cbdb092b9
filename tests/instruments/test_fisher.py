"""The kernel's predictions against steps that are taken, its split against exact entropy,
projections against whole gradients.
"""

import itertools

import pytest
import torch
from support.tiny_models import load_policy_in, random_samples
from torch.func import functional_call

from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.instruments.fisher import Projection, entropy_change, fisher_kernel, token_gradients


@pytest.fixture(scope="module")
def policy(model_folder):
    return load_policy_in(model_folder())


@pytest.fixture(scope="module")
def tokens(policy):
    """A row's log-probabilities, their gradients and the parameters."""
    row = packed_tensors_from_tokenized_results(random_samples(3, (3, 5), 3), seq_len=60, pad_id=0)
    inputs = (row.tokens, row.labels, row.group_ids, row.parent_ids, row.input_pos)
    parameters = dict(policy.named_parameters())
    return inputs, policy(*inputs).logprobs, parameters


@pytest.mark.parametrize("preconditioned", [False, True])
def test_the_error_of_the_prediction_goes_to_zero_with_the_step(preconditioned, policy, tokens):
    inputs, logprobs, parameters = tokens
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(len(logprobs), generator=generator, dtype=torch.float64)
    scale = None
    if preconditioned:
        scale = {
            name: torch.rand(p.shape, generator=generator, dtype=torch.float64) + 0.1
            for name, p in parameters.items()
        }
    kernel = fisher_kernel(token_gradients(logprobs, parameters, preconditioner=scale))
    direction = torch.autograd.grad(
        (logprobs * advantages).sum(), list(parameters.values()), retain_graph=True
    )
    errors = []
    for eta in (1e-4, 1e-5, 1e-6):
        moves = [
            eta * (d if scale is None else d * scale[name])
            for name, d in zip(parameters, direction, strict=True)
        ]
        other = {
            name: (p + move).detach()
            for (name, p), move in zip(parameters.items(), moves, strict=True)
        }
        change = functional_call(policy, other, inputs).logprobs - logprobs
        predicted = eta * (kernel @ advantages)  # (1)
        errors.append(float((change - predicted).norm() / change.norm()))
    assert errors[-1] < 1e-3
    for larger, smaller in itertools.pairwise(errors):
        assert smaller < 0.2 * larger


def test_a_projection_keeps_the_kernel(tokens):
    _, logprobs, parameters = tokens
    chosen = logprobs[:6]
    exact = fisher_kernel(token_gradients(chosen, parameters))
    norms = exact.diagonal().sqrt()
    found = [
        fisher_kernel(
            token_gradients(chosen, parameters, projection=Projection(parameters, 256, seed))
        )
        for seed in range(8)
    ]
    scaled = torch.stack([(one - exact) / norms[:, None] / norms[None] for one in found])
    assert scaled.abs().mean() < 2 / 256**0.5
    assert scaled.mean(dim=0).abs().max() < 5 / (256 * 8) ** 0.5  # no bias


def test_sequences_are_sums_of_their_tokens(tokens):
    _, logprobs, parameters = tokens
    labels = torch.tensor([0, 0, 1, 1, 1, 2])
    member = torch.nn.functional.one_hot(labels).double().T
    whole = fisher_kernel(
        token_gradients([logprobs[:6][labels == one].sum() for one in range(3)], parameters)
    )
    torch.testing.assert_close(
        member @ fisher_kernel(token_gradients(logprobs[:6], parameters)) @ member.T, whole
    )


def test_the_split_adds_up_to_the_change_of_the_exact_entropy():
    """One distribution over 4 tokens: its expectation over the token whose entropy it is, with an
    update of two given tokens.
    """
    logits = torch.randn(
        4, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True
    )
    logp = torch.log_softmax(logits, dim=0)
    gradients = token_gradients(logp, {"logits": logits})
    advantages = torch.tensor([0.0, 1.5, 0.0, -0.5], dtype=torch.float64)
    (slope,) = torch.autograd.grad(-(logp.exp() * logp).sum(), logits, retain_graph=True)
    wanted = float(slope @ (gradients.T @ advantages))
    kernel = fisher_kernel(gradients)
    # The mean over tokens becomes their expectation with rows weighted by 4π.
    for baseline in (0.0, -1.3):
        weighted = kernel * (4 * logp.detach().exp())[:, None]
        found = entropy_change(weighted, logp, advantages, baseline)
        assert found.whole == pytest.approx(wanted)
    assert found.own != 0 and found.others != 0
    own = entropy_change(torch.diag(kernel.diagonal()), logp, advantages, 0.0)
    assert own.others == 0 and own.own == pytest.approx(
        entropy_change(kernel, logp, advantages, 0.0).own
    )


def test_without_a_baseline_the_others_mean_is_taken():
    kernel, logp, advantages = (
        torch.eye(3, dtype=torch.float64),
        torch.tensor([-1.0, -2.0, -6.0]),
        torch.ones(3),
    )
    found = entropy_change(kernel, logp, advantages)
    centred = [-1 - (-2 - 6) / 2, -2 - (-1 - 6) / 2, -6 - (-1 - 2) / 2]
    assert found.own == pytest.approx(-sum(centred) / 3) and found.others == 0
