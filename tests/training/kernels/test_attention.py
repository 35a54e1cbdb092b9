"""Attention over packed trees: each way against the dense mask, forward and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_trees import siblings, tensors, trees, with_gradients

from ttrl.data.packing import masks
from ttrl.data.packing.masks import dense_mask
from ttrl.training.kernels import attention
from ttrl.training.kernels.attention import (
    attend,
    attend_trees,
    attention_plan,
    dense_attend,
    flex_attend,
)
from ttrl.training.kernels.split_attention import Gathered, Span, split_plan


def assert_same_as_dense(ids, dtype, tolerance, **shape):
    groups, parents, positions = ids
    inputs = tensors(*groups.shape, dtype, **shape)
    plan = attention_plan(groups, parents, positions, dtype)
    ours = with_gradients(attend(*inputs, plan), inputs, groups >= 0)
    dense = with_gradients(
        dense_attend(*inputs, plan, inputs[0].shape[-1] ** -0.5, None, None), inputs, groups >= 0
    )
    for one, other in zip(ours, dense, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.integers(1, 70),
    st.sampled_from([(4, 2), (2, 2), (3, 1)]),
)
def test_split_attention_equals_the_dense_mask(seed, rows, seq_len, heads):
    assert_same_as_dense(
        trees(seed, rows, seq_len),
        torch.float64,
        1e-11,
        heads=heads[0],
        kv_heads=heads[1],
        seed=seed,
    )


@pytest.mark.parametrize(
    "ids",
    [
        # Batches side by side, gathered ones, and long runs alone.
        siblings(70, [300, 300, 40, 40, 40, 41, 3, 1, 299]),
        siblings(5, [20] * 30, rows=3),
        siblings(260, []),  # no sharing
        trees(5, rows=3, seq_len=400, longest=60),
    ],
)
def test_split_attention_in_fp32(ids):
    assert_same_as_dense(ids, torch.float32, 2e-5)


def test_split_attention_in_bf16_is_as_exact_as_the_dense_way():
    """Both against float64; log-sum-exp merging in bf16 would show."""
    groups, parents, positions = siblings(600, [30, 31, 50, 50, 8])
    exact = tensors(*groups.shape, torch.bfloat16)
    plan = attention_plan(groups, parents, positions, torch.float64)
    double = [x.detach().double().requires_grad_() for x in exact]
    expected = with_gradients(dense_attend(*double, plan, 8**-0.5, None, None), double, groups >= 0)
    ours, dense = (
        with_gradients(out, exact, groups >= 0)
        for out in (attend(*exact, plan), dense_attend(*exact, plan, 8**-0.5, None, None))
    )
    for one, other, true in zip(ours, dense, expected, strict=True):
        assert (one - true).norm() <= 2.5 * (other - true).norm()  # each part is rounded once
        assert (one - true).norm() < 0.01 * true.norm()


def test_every_pair_is_in_one_part():
    """Counted, without a kernel: causal parts and rectangles cover the dense mask, each pair
    once.
    """
    groups, parents, _ = trees(3, rows=3, seq_len=120, longest=20)
    plan = split_plan(groups, parents)
    S = groups.numel()
    seen = torch.zeros(S, S, dtype=torch.int64)
    for part in plan.causal:
        places = part.index if isinstance(part, Gathered) else torch.arange(part.start, part.stop)
        for run in places.view(part.count, -1):
            run = run.unique()  # without the copies that fill a run up
            seen[run.unsqueeze(1), run] += torch.ones(len(run), len(run), dtype=torch.int64).tril()
    for queries, keys in plan.rectangles:
        seen[queries.start : queries.stop, keys.start : keys.stop] += 1
    expected = torch.block_diag(*(dense_mask(groups, parents) & (groups >= 0).unsqueeze(1)).long())
    assert torch.equal(seen, expected)


def test_siblings_of_one_length_need_one_call_and_short_ones_few():
    plan = split_plan(*siblings(300, [100] * 16)[:2])
    assert [(part.start, part.length, part.count) for part in plan.causal] == [
        (0, 300, 1),
        (300, 100, 16),
    ]
    assert all(isinstance(part, Span) for part in plan.causal) and len(plan.rectangles) == 1
    assert len(split_plan(*siblings(300, list(range(40, 80)))[:2]).causal) <= 6  # 41 runs


def test_only_children_join_their_parents():
    """A chain of groups without branches is plain causal attention."""
    groups = torch.tensor([[0, 0, 1, 1, 1, 2]])
    parents = torch.tensor([[0, 0, 0, 0, 0, 1]])
    plan = split_plan(groups, parents)
    assert [part.length for part in plan.causal] == [6] and not plan.rectangles


def test_rows_of_padding_give_zeros_and_keep_the_graph():
    groups = torch.full((2, 5), -1)
    inputs = tensors(2, 5, torch.float32)
    out = attend(*inputs, attention_plan(groups, groups, torch.zeros_like(groups), torch.float32))
    grads = torch.autograd.grad(out.sum(), inputs)
    assert not out.any() and not any(grad.any() for grad in grads)


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 7])
def test_windows_and_soft_caps_are_exact(window, soft_cap):
    """The fallback against the definition, with gradients; a window is counted in positions, not in
    places of the row.
    """
    groups, parents, positions = trees(7, rows=2, seq_len=50)
    q, k, v = inputs = tensors(2, 50, torch.float64)
    plan = attention_plan(groups, parents, positions, torch.float64)
    ours = with_gradients(
        attend(q, k, v, plan, scale=0.4, soft_cap=soft_cap, window=window), inputs, groups >= 0
    )
    allowed = dense_mask(groups, parents)
    if window is not None:
        allowed &= positions.unsqueeze(2) - positions.unsqueeze(1) < window
    scores = torch.einsum("bhqe,bhke->bhqk", q, k.repeat_interleave(2, dim=1)) * 0.4
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    probabilities = torch.softmax(scores.masked_fill(~allowed.unsqueeze(1), -torch.inf), dim=-1)
    expected = with_gradients(probabilities @ v.repeat_interleave(2, dim=1), inputs, groups >= 0)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
def test_float64_on_a_gpu_is_exact(monkeypatch, soft_cap, window, heads):
    """A GPU's values cannot be looked at, and FlexAttention adds up in fp32, whatever it is
    given.
    """
    ids = trees(7, rows=2, seq_len=50)
    real = ids[0] >= 0
    inputs = tensors(2, 50, torch.float64, heads=heads[0], kv_heads=heads[1])
    how = {"scale": 0.4, "soft_cap": soft_cap, "window": window}
    expected = with_gradients(
        attend(*inputs, attention_plan(*ids, torch.float64), **how), inputs, real
    )
    for place in (attention, masks):
        monkeypatch.setattr(place, "free_to_look", lambda device: False)
    found = with_gradients(
        attend(*inputs, attention_plan(*ids, torch.float64), **how), inputs, real
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_fast_way_has_no_mask_and_a_window_that_holds_all_is_none():
    groups, parents, positions = trees(7)
    inputs = tensors(*groups.shape, torch.float32)
    plan = attention_plan(groups, parents, positions, torch.float32)
    plain = attend(*inputs, plan)
    assert torch.equal(attend(*inputs, plan, window=int(positions.max()) + 1), plain)
    assert not plan.dense_masks
    attend(*inputs, plan, window=2)
    attend(*inputs, plan, window=2, soft_cap=3.0)
    assert list(plan.dense_masks) == [2]


@pytest.mark.long(but=["300-40-1.5"])
@pytest.mark.parametrize(
    ("seq_len", "window", "soft_cap"), [(50, 1, None), (300, None, None), (300, 40, 1.5)]
)
def test_flex_attentions_masks_and_scores(seq_len, window, soft_cap):
    """The logic of the CUDA way, with the uncompiled kernel.

    Long for one change at a time: only these tell which of them is wrong.
    """
    groups, parents, positions = trees(seq_len, seq_len=seq_len, longest=40)
    inputs = [x.detach() for x in tensors(*groups.shape, torch.float32)]
    plan = attention_plan(groups, parents, positions, torch.float32)
    flex = flex_attend(*inputs, plan, 0.3, soft_cap, window, attend_trees)
    torch.testing.assert_close(
        flex, dense_attend(*inputs, plan, 0.3, soft_cap, window), rtol=1e-5, atol=1e-5
    )


def test_autocast_and_checkpointing():
    groups, parents, positions = trees(9)
    inputs = tensors(*groups.shape, torch.float32)
    plan = attention_plan(groups, parents, positions, torch.bfloat16)

    def attention(*inputs):
        return attend(*inputs, plan)

    with torch.autocast("cpu", torch.bfloat16):
        plain = attention(*inputs)
        again = torch.utils.checkpoint.checkpoint(attention, *inputs, use_reentrant=False)
    assert plain.dtype is torch.bfloat16
    for one, other in zip(
        torch.autograd.grad(plain.sum(), inputs),
        torch.autograd.grad(again.sum(), inputs),
        strict=True,
    ):
        assert one.dtype is torch.float32 and torch.equal(one, other)


@pytest.mark.e2e
def test_compiled_layers_break_at_attention_and_stay_exact():
    """Only a compiler shows where it breaks."""
    groups, parents, positions = trees(9)
    inputs = tensors(*groups.shape, torch.float32)
    plan = attention_plan(groups, parents, positions, torch.float32)

    def layer(q, k, v):
        return attend(q * 2, k, v, plan) * 3

    compiled = torch.compile(layer)
    for one, other in zip(
        with_gradients(compiled(*inputs), inputs, groups >= 0),
        with_gradients(layer(*inputs), inputs, groups >= 0),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
