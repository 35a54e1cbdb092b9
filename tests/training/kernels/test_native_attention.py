"""Our own kernel of attention against the dense mask in float64, and when it is not taken."""

import multiprocessing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_trees import siblings, tensors, trees, with_gradients
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ttrl.training.kernels import native_attention
from ttrl.training.kernels.attention import attend, attention_plan, dense_attend
from ttrl.training.policy.activations import PRODUCTS

needs_the_kernel = pytest.mark.skipif(
    native_attention.library() is None, reason="no C compiler, or a CPU without AVX-512"
)


def served(inputs):
    return native_attention.serves(*(x.detach().transpose(1, 2).flatten(0, 1) for x in inputs))


def assert_exact(ids, scale=None, factor=1.0, **shape):
    """To the rounding of fp32, relative to the norm."""
    groups, parents, positions = ids
    inputs = tensors(*groups.shape, torch.float32, **shape)
    with torch.no_grad():
        inputs[0].mul_(factor)
    assert served(inputs)
    double = [x.detach().double().requires_grad_() for x in inputs]
    plan = attention_plan(groups, parents, positions, torch.float64)
    ours = with_gradients(attend(*inputs, plan, scale=scale), inputs, groups >= 0)
    scale = inputs[0].shape[-1] ** -0.5 if scale is None else scale
    exact = with_gradients(dense_attend(*double, plan, scale, None, None), double, groups >= 0)
    for one, other in zip(ours, exact, strict=True):
        # A query that sees one key has no gradient.
        assert (one - other).norm() <= 3e-6 * factor * other.norm() + 1e-5


@needs_the_kernel
@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.integers(1, 70),
    st.sampled_from([(4, 2, 32), (2, 2, 64), (3, 1, 96)]),
)
def test_trees(seed, rows, seq_len, shape):
    heads, kv_heads, width = shape
    assert_exact(trees(seed, rows, seq_len), heads=heads, kv_heads=kv_heads, width=width, seed=seed)


@needs_the_kernel
@pytest.mark.parametrize(
    ("ids", "width"),
    [
        (siblings(70, [300, 40, 40, 41, 3, 1, 299]), 32),
        (siblings(1, [1, 13, 97]), 64),
        (siblings(289, [12] * 9, rows=2), 128),  # a block of keys and one key more
        (siblings(580, [95, 96, 97]), 256),
        (siblings(260, []), 64),
        (trees(5, rows=2, seq_len=400, longest=60), 64),
    ],
)
def test_lengths_around_the_blocks(ids, width):
    assert_exact(ids, heads=2, kv_heads=1, width=width)


@needs_the_kernel
def test_scores_far_apart():
    """Rows whose probabilities are 0 and 1, in which a wrong maximum would overflow; differences of
    hundreds of nats.
    """
    assert_exact(siblings(70, [40, 41]), factor=100.0, width=32)
    assert_exact(siblings(70, [40, 41]), scale=0.0, width=32)


@needs_the_kernel
def test_in_bf16_no_further_from_the_truth_than_pytorchs_kernel(monkeypatch):
    groups, parents, positions = siblings(70, [30, 31, 50])
    inputs = tensors(*groups.shape, torch.bfloat16, width=32)
    if not served(inputs):
        pytest.skip("a CPU with matrix units for bf16")
    double = [x.detach().double().requires_grad_() for x in inputs]
    plan = attention_plan(groups, parents, positions, torch.float64)
    exact = with_gradients(dense_attend(*double, plan, 32**-0.5, None, None), double, groups >= 0)
    ours = with_gradients(attend(*inputs, plan), inputs, groups >= 0)
    monkeypatch.setattr(native_attention, "library", lambda: None)
    theirs = with_gradients(attend(*inputs, plan), inputs, groups >= 0)
    for one, other, true in zip(ours, theirs, exact, strict=True):
        assert one.dtype is torch.bfloat16
        assert (one - true).norm() <= 1.05 * (other - true).norm()


@needs_the_kernel
def test_what_stands_at_padding_is_not_read():
    groups, parents, positions = trees(9, seq_len=60)
    inputs = tensors(*groups.shape, torch.float32, width=32)
    padding = (groups < 0)[:, None, :, None]
    assert padding.any()
    spoilt = [torch.where(padding, torch.nan, x.detach()).requires_grad_() for x in inputs]
    plan = attention_plan(groups, parents, positions, torch.float32)
    out, other = attend(*inputs, plan), attend(*spoilt, plan)
    assert torch.equal(out, other) and not out[padding.expand_as(out)].any()
    for one, two in zip(
        torch.autograd.grad(out.sum(), inputs),
        torch.autograd.grad(other.sum(), spoilt),
        strict=True,
    ):
        assert torch.equal(one, two)


@needs_the_kernel
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_lost(which, value):
    """A bad number in a prompt's query, key or value makes the outputs of those who see it bad, and
    the gradients.
    """
    groups, parents, positions = siblings(40, [20, 30])
    inputs = tensors(*groups.shape, torch.float32, heads=2, kv_heads=1, width=32)
    with torch.no_grad():
        inputs[which][0, 0, 33, 5] = value
    assert served(inputs)
    out = attend(*inputs, attention_plan(groups, parents, positions, torch.float32))
    bad = ~out.isfinite().all(-1)
    if which == 0:
        assert bad[0, 0, 33]
    elif which == 1 and value == torch.inf:  # a score of -inf is a probability of zero
        assert torch.equal(bad[:, :, 34:], inputs[0][:, :, 34:, 5] > 0)
    else:
        assert bad[:, :, 33:].all()
    assert not all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), inputs))


@needs_the_kernel
def test_nothing_to_attend_to():
    ids = torch.full((2, 9), -1), torch.full((2, 9), -1), torch.zeros(2, 9, dtype=torch.int64)
    inputs, plan = tensors(2, 9, torch.float32, width=32), attention_plan(*ids, torch.float32)
    out = attend(*inputs, plan)
    assert served(inputs) and not out.any()
    assert not any(x.any() for x in torch.autograd.grad(out.sum(), inputs))


@needs_the_kernel
def test_repetition_threads_and_checkpointing_change_no_bit():
    groups, parents, positions = trees(9, seq_len=200, longest=50)
    inputs = tensors(*groups.shape, torch.float32, width=32)
    plan = attention_plan(groups, parents, positions, torch.float32)

    def attention(*inputs):
        return attend(*inputs, plan)

    def kept():
        return create_selective_checkpoint_contexts(PRODUCTS)

    ways = {
        "once": lambda: attention(*inputs),
        "again": lambda: attention(*inputs),
        "recomputed": lambda: checkpoint(attention, *inputs, use_reentrant=False),
        "kept": lambda: checkpoint(attention, *inputs, use_reentrant=False, context_fn=kept),
    }
    found = {name: with_gradients(way(), inputs, groups >= 0) for name, way in ways.items()}
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert served(inputs)
        found["two threads"] = with_gradients(attention(*inputs), inputs, groups >= 0)
        torch.set_num_threads(3)
        # Two heads of keys and values would keep two of three threads busy.
        assert not served(inputs)
    finally:
        torch.set_num_threads(threads)
    for way, results in found.items():
        for one, other in zip(results, found["once"], strict=True):
            assert torch.equal(one, other), way


@needs_the_kernel
def test_checkpoints_keep_its_results(monkeypatch):
    ids = siblings(5, [7, 8])
    inputs, plan, calls = (
        tensors(1, 20, torch.float32, width=32),
        attention_plan(*ids, torch.float32),
        [],
    )
    real = native_attention._for_each_head
    monkeypatch.setattr(
        native_attention, "_for_each_head", lambda *a: (calls.append(1), real(*a))[1]
    )
    for keeps, expected in ((PRODUCTS, 2), ([], 3)):
        calls.clear()
        out = checkpoint(
            lambda *x: attend(*x, plan).cos(),
            *inputs,
            use_reentrant=False,
            context_fn=lambda keeps=keeps: create_selective_checkpoint_contexts(keeps),
        )
        out.sum().backward()
        # Forward, backward, and the forward pass again where it was not kept.
        assert len(calls) == expected


@needs_the_kernel
def test_what_is_left_to_pytorch(monkeypatch, caplog):
    fits = torch.zeros(5, 2, 32)
    assert native_attention.serves(fits, fits, fits)
    for other in (
        fits.double(),
        fits.half(),
        torch.zeros(5, 2, 40),
        torch.zeros(5, 2, 288),
        fits.to("meta"),
    ):
        assert not native_attention.serves(other, other, other)
    assert not native_attention.serves(torch.zeros(5, 3, 32), fits, fits)  # heads that no group has
    assert not native_attention.serves(fits, fits, torch.zeros(5, 2, 64))  # values of another size
    monkeypatch.setattr(native_attention, "library", lambda: None)
    assert not native_attention.serves(fits, fits, fits)
    caplog.set_level("INFO")
    assert (
        not native_attention._keeps_busy.__wrapped__(3, 2)
        and "3 threads, and 2 heads" in caplog.text
    )


def _sum_of_two_threads(found):
    """The sum that two threads find."""
    torch.set_num_threads(2)
    x = torch.ones(5, 2, 32)
    out, _ = native_attention.forward(x, x, x, torch.tensor([[0, 5, 0, 5]]), 1.0)
    found.put(out.sum().item())


@needs_the_kernel
def test_threads_after_a_fork():
    """Those of the parent are not there any more."""
    threads, context = torch.get_num_threads(), multiprocessing.get_context("fork")
    found = context.Queue()
    try:
        _sum_of_two_threads(found)
        child = context.Process(target=_sum_of_two_threads, args=(found,))
        child.start()
        child.join(60)
        assert child.exitcode == 0 and found.get(timeout=10) == found.get(
            timeout=10
        ) == pytest.approx(320, rel=1e-5)
    finally:
        torch.set_num_threads(threads)
