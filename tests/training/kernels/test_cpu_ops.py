"""Norm, SwiGLU and rotation for CPUs against their plain compositions, and against finite
differences.
"""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ttrl.training.kernels import cpu_ops


def plain_norm(x, scale):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale


def own_norm(x, scale):
    return cpu_ops.rms_norm(x, scale, 1e-6)


def plain_swiglu(gate, up):
    return F.silu(gate) * up


def angles(x, rotated):
    """Cosines and sines [B, T, 1, R] with equal halves."""
    half = torch.linspace(
        0.1, 3.0, x.shape[0] * x.shape[1] * rotated // 2, dtype=torch.float64
    ).view(*x.shape[:2], 1, -1)
    both = torch.cat([half, half], dim=-1)
    return both.cos().to(x.dtype), both.sin().to(x.dtype)


def plain_rotation(x, rotated=6):
    cos, sin = angles(x, rotated)
    first, second = x[..., :rotated].chunk(2, dim=-1)
    return torch.cat(
        [x[..., :rotated] * cos + torch.cat([-second, first], dim=-1) * sin, x[..., rotated:]],
        dim=-1,
    )


def own_rotation(x, rotated=6):
    return cpu_ops.rotate_halves(x, *angles(x, rotated))


def inputs(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


CASES = {
    "norm": (own_norm, plain_norm, ((2, 5, 8), (8,))),
    "SwiGLU": (cpu_ops.silu_times, plain_swiglu, ((2, 5, 8), (2, 5, 8))),
    "rotation of a part": (own_rotation, plain_rotation, ((2, 3, 2, 8),)),
    "rotation of all": (
        lambda x: own_rotation(x, 8),
        lambda x: plain_rotation(x, 8),
        ((2, 3, 2, 8),),
    ),
}


@pytest.fixture(params=[2**17, 16], ids=["one block", "blocks of two rows or less"])
def block(request, monkeypatch):
    monkeypatch.setattr(cpu_ops, "_CACHED_ELEMENTS", request.param)


@pytest.mark.long(but=["one block-norm", "one block-SwiGLU"])
@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_plain_form_and_to_finite_differences(name, block):
    """Long for the other blocks: only these have rows that fill none."""
    own, plain, shapes = CASES[name]
    given = inputs(*shapes)
    torch.testing.assert_close(own(*given), plain(*given), rtol=1e-13, atol=1e-13)
    direction = torch.randn(
        shapes[0], generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    ours, theirs = (torch.autograd.grad(form(*given), given, direction) for form in (own, plain))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(own, given)


@pytest.mark.parametrize("name", ["SwiGLU", "rotation of a part"])
def test_in_bf16_no_further_from_the_truth_than_the_plain_form(name):
    own, plain, shapes = CASES[name]
    given = inputs(*shapes, dtype=torch.bfloat16)
    truth = plain(*(x.double() for x in given))
    assert own(*given).dtype == torch.bfloat16
    torch.testing.assert_close(own(*given).double(), truth, rtol=2**-6, atol=2**-6)


def test_no_tokens():
    x, scale = inputs((1, 0, 8), (8,))
    own_norm(x, scale).sum().backward()
    assert x.grad.shape == x.shape and not scale.grad.any()
    gate, up = inputs((1, 0, 8), (1, 0, 8))
    cpu_ops.silu_times(gate, up).sum().backward()
    assert gate.grad.shape == up.grad.shape == gate.shape


def test_a_frozen_scale_gets_no_gradient():
    x, scale = inputs((2, 5, 8), (8,))
    expected = torch.autograd.grad(plain_norm(x, scale).square().sum(), x)[0]
    scale.requires_grad_(False)
    own_norm(x, scale).square().sum().backward()
    assert scale.grad is None
    torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_checkpointing_and_repetition_change_no_bit(name):
    own, _, shapes = CASES[name]
    given = inputs(*shapes, dtype=torch.float32)
    first, again, recomputed = (
        torch.autograd.grad(form().square().sum(), given)
        for form in (
            lambda: own(*given),
            lambda: own(*given),
            lambda: checkpoint(own, *given, use_reentrant=False),
        )
    )
    for a, b, c in zip(first, again, recomputed, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_two_threads_change_no_bit():
    """On blocks large enough to be dealt out."""
    x, scale = inputs((1, 3000, 256), (256,), dtype=torch.float32)
    gate, up = inputs((1, 3000, 256), (1, 3000, 256), dtype=torch.float32)

    def gradients():
        together = own_norm(x, scale).square().sum() + cpu_ops.silu_times(gate, up).square().sum()
        return torch.autograd.grad(together, (x, scale, gate, up))

    one = gradients()
    try:
        torch.set_num_threads(2)
        two = gradients()
    finally:
        torch.set_num_threads(1)
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a, b)


def test_what_the_operations_cannot_take():
    assert cpu_ops.apply_to(torch.zeros(1), torch.nn.Parameter(torch.zeros(1)))
    assert not cpu_ops.apply_to(torch.zeros(1), torch.zeros(1, device="meta"))

    class Other(torch.Tensor):
        pass

    assert not cpu_ops.apply_to(torch.zeros(1).as_subclass(Other))
