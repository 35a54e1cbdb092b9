"""Importance weights against the formulas, in plain floats."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrl.training.objective.off_policy import importance_weights

finite = st.floats(-4, 0, allow_nan=False)
rows = st.lists(
    st.tuples(finite, st.one_of(finite, st.just(math.nan)), st.sampled_from([5, -1, 8])),
    min_size=1,
    max_size=8,
)


def weigh(kind, rows, cap=1.7, floor=0.6, dtype=torch.float64):
    start, sampled = (torch.tensor([row[i] for row in rows], dtype=dtype) for i in range(2))
    return importance_weights(
        kind, start, sampled, torch.tensor([row[2] for row in rows]), cap, floor
    )


def log_weight(start, sampled):
    return 0.0 if math.isnan(sampled) else start - sampled


@settings(max_examples=40)
@given(rows)
def test_formulas(rows):
    each = [math.exp(log_weight(*row[:2])) for row in rows]
    whole = [
        math.exp(sum(log_weight(*other[:2]) for other in rows if other[2] == row[2]))
        for row in rows
    ]
    for kind, expected, capped in (
        ("none", [1.0] * len(rows), [False] * len(rows)),
        ("token", [min(w, 1.7) for w in each], [w > 1.7 for w in each]),
        ("sequence", [min(w, 1.7) for w in whole], None),
        (
            "mask",
            [w if 0.6 <= w <= 1.7 else 0.0 for w in each],
            [not 0.6 <= w <= 1.7 for w in each],
        ),
    ):
        weights, found = weigh(kind, rows)
        torch.testing.assert_close(
            weights, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12
        )
        if capped is not None:
            assert found.tolist() == capped


def test_a_sequences_weight_is_capped_as_a_whole():
    """Its tokens' weights are 4 and 1/4: capped one by one they would give 2 and 1/4."""
    weights, capped = weigh(
        "sequence",
        [(-1.0, -1.0 - math.log(4), 0), (-2.0, -2.0 + math.log(4), 0), (-1.0, -3.0, 1)],
        cap=2.0,
    )
    torch.testing.assert_close(weights, torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64))
    assert capped.tolist() == [False, False, True]


@pytest.mark.parametrize("kind", ["none", "token", "sequence", "mask"])
def test_no_gradient_finite_in_fp32_and_empty(kind):
    start = torch.tensor([0.0, -1000.0, -1.0], requires_grad=True)
    weights, _ = importance_weights(
        kind, start, torch.tensor([-1000.0, 0.0, 0.0]), torch.tensor([0, 1, 2]), 2.0, 0.5
    )
    assert weights.isfinite().all() and not weights.requires_grad and weights.dtype == torch.float32
    empty, capped = importance_weights(
        kind, torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64), 2.0, 0.5
    )
    assert empty.shape == capped.shape == (0,)


@settings(max_examples=40)
@given(rows, st.randoms(use_true_random=False))
def test_the_order_of_the_tokens_does_not_matter(rows, draw):
    order = list(range(len(rows)))
    draw.shuffle(order)
    straight, shuffled = weigh("sequence", rows)[0], weigh("sequence", [rows[i] for i in order])[0]
    torch.testing.assert_close(shuffled, straight[order], rtol=1e-12, atol=0)
