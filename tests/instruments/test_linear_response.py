"""AdamW's vector against torch's own steps, and its parts; where a response is linear."""

import math

import pytest
import torch

from ttrl.instruments.linear_response import (
    AdamW,
    Response,
    adamw_update,
    agreement,
    inner,
    linear_regime,
    moved,
)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_vector_is_that_of_torchs_steps(weight_decay):
    torch.manual_seed(0)
    weights = {
        "w": torch.nn.Parameter(0.05 * torch.randn(40, 30)),
        "b": torch.nn.Parameter(torch.randn(30)),
    }
    groups = [
        {"params": [weights["w"]], "weight_decay": weight_decay},
        {"params": [weights["b"]], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for step in range(1, 6):
        gradients = {name: torch.randn(p.shape) * 10.0 ** (step - 3) for name, p in weights.items()}
        moments = {}
        for name, parameter in weights.items():
            parameter.grad = gradients[name]
            for part in ("exp_avg", "exp_avg_sq"):
                state = optimizer.state.get(parameter) or {}
                moments[f"{name}.{part}"] = state.get(part, torch.zeros_like(parameter)).clone()
        before = {name: parameter.detach().clone() for name, parameter in weights.items()}
        update = adamw_update(
            before, gradients, moments, AdamW(0.9, 0.95, 1e-8, weight_decay, step)
        )
        optimizer.step()
        truth = {
            name: (weights[name].detach().double() - before[name].double()) / 1e-3
            for name in weights
        }
        found = agreement(update.whole(), truth)
        assert found.cosine > 0.9999999 and found.norm_ratio == pytest.approx(1, abs=1e-6)
        assert bool(update.decay["w"].any()) == (weight_decay > 0) and not update.decay["b"].any()
        assert bool(update.earlier["w"].any()) == (step > 1)
        whole = update.whole()
        assert inner(whole, whole) == pytest.approx(
            sum(inner(part, whole) for part in update.parts().values())
        )
        torch.testing.assert_close(
            moved(before, whole, 1e-3)["w"], weights["w"].detach(), rtol=0, atol=1e-7
        )


def test_vectors_that_are_zero_have_no_direction():
    assert math.isnan(agreement({"w": torch.zeros(3)}, {"w": torch.ones(3)}).cosine)
    found = agreement({"w": torch.tensor([3.0, 0.0])}, {"w": torch.tensor([0.0, 2.0])})
    assert found.cosine == 0.0 and found.norm_ratio == 1.5


def response(eta, measured, first):
    return Response(eta, measured, 0.0, first, 0.0, 1.0)


def test_the_linear_regime_ends_at_both_sides():
    sweep = [
        response(eta, 2 * eta + 30 * eta**2 + 1e-7, 2 * eta)
        for eta in (1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
    ]
    assert linear_regime(sweep) == (1e-6, 1e-3)
    assert linear_regime(list(reversed(sweep))) == (1e-6, 1e-3)
    assert linear_regime([response(1e-3, 1.0, -1.0)]) is None
    assert linear_regime([response(0.0, 0.0, 0.0)]) is None
