"""Vectors of parameters; where a response is linear."""

import math

import torch

from ttrl.instruments.linear_response import (
    Response,
    agreement,
    linear_regime,
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
