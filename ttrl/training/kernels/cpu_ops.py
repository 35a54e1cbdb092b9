"""Compute what a layer needs besides matrix products and attention, in few passes over memory, on
CPUs.

Composed from PyTorch's operations, a norm with its gradient passes over main memory some twenty
times; here a block of rows is processed while it is in the cache, and what the backward pass can
recompute is not kept. The results are those of the plain compositions up to rounding, and the same
for any number of threads. On other devices, under torch.compile (which fuses by itself) and for
sharded tensors the callers use the plain form.

Shapes: B rows, T tokens, H heads, E dimension of a head, R the dimensions of it that are rotated, W
any width.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ttrl.training.kernels.cpu_products import plain_on_cpu as apply_to

__all__ = ["apply_to", "rms_norm", "rotate_halves", "silu_times", "turn_pairs"]

_CACHED_ELEMENTS = 2**17  # of a block: 512 kB in fp32, of which three or four are in use


def rms_norm(x: Tensor, scale_W: Tensor, eps: float) -> Tensor:
    """Return x / √(mean x² + eps) × scale over the last dimension. x [..., W], fp32 or float64, as
    is the scale.
    """
    apply: Callable[..., Tensor] = _RMSNorm.apply
    return apply(x, scale_W, eps)


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """Return SiLU(gate) × up, as in SwiGLU (arXiv 2002.05202); both [..., W], of one dtype."""
    apply: Callable[..., Tensor] = _SiluTimes.apply
    return apply(gate, up)


def rotate_halves(x_BTHE: Tensor, cos_BT1R: Tensor, sin_BT1R: Tensor) -> Tensor:
    """Map (a, b) → (a·cos - b·sin, b·cos + a·sin) for the halves of the first R dimensions; the
    others pass through. Both halves of cosines and of sines must be the same, and get no gradient.
    """
    apply: Callable[..., Tensor] = _RotateHalves.apply
    return apply(x_BTHE, cos_BT1R, sin_BT1R)


def turn_pairs(x_BTHE: Tensor, turns_BT1R: Tensor) -> Tensor:
    """Map (a, b) → (a·cos - b·sin, b·cos + a·sin) for all pairs of neighbours in a head. turns [B,
    T, 1, E/2]: complex, cos + i·sin, without gradient. Five times as fast as `rotate_halves`."""
    apply: Callable[..., Tensor] = _TurnPairs.apply
    return apply(x_BTHE, turns_BT1R)


def _blocks(rows: int, width: int) -> Iterator[slice]:
    each = _rows_of_block(width)
    return (slice(start, start + each) for start in range(0, rows, each))


def _rows_of_block(width: int) -> int:
    return max(1, _CACHED_ELEMENTS // width)


def _as_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.reshape(-1, x.shape[-1]) for x in tensors)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        (rows,) = _as_rows(x)
        inverse = (
            torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
            .square_()
            .div_(x.shape[-1])
            .add_(eps)
            .rsqrt_()
        )
        out = torch.empty_like(rows)
        for part in _blocks(*rows.shape):
            torch.mul(rows[part], inverse[part], out=out[part]).mul_(scale)
        ctx.save_for_backward(x, scale, inverse)
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Return, with r the inverse root and g the gradient, ∂x = r·g·scale - x·r³/W·Σ(g·x·scale)
        and ∂scale = Σ_rows r·g·x.
        """
        x, scale, inverse = ctx.saved_tensors
        grad, rows = _as_rows(grad, x)
        out = torch.empty_like(rows)
        product = torch.empty_like(rows[: _rows_of_block(rows.shape[1])])
        if ctx.needs_input_grad[1]:
            grad_scale = torch.zeros_like(scale)
        else:
            grad_scale = None
        for part in _blocks(*rows.shape):
            g = grad[part]
            r = inverse[part]
            into = out[part]
            gx = torch.mul(g, rows[part], out=product[: len(g)])
            along = torch.mv(gx, scale).unsqueeze(1).mul_(r).mul_(r).mul_(r)
            torch.mul(g, scale, out=into).mul_(r).addcmul_(
                rows[part], along, value=-1.0 / x.shape[-1]
            )
            # A sum in pairs: a product with r, in order, would lose most of a digit.
            if grad_scale is not None:
                grad_scale.add_(gx.mul_(r).sum(0))
        return out.view(x.shape), grad_scale, None


class _SiluTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        gates, ups = _as_rows(gate, up)
        out = torch.empty_like(gates)
        for part in _blocks(*gates.shape):
            torch.ops.aten.silu.out(gates[part], out=out[part]).mul_(ups[part])
        return out.view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grads, gates, ups = _as_rows(grad, gate, up)
        grad_gate = torch.empty_like(gates)
        grad_up = torch.empty_like(ups)
        for part in _blocks(*gates.shape):
            g = grads[part]
            into = grad_up[part]
            torch.mul(g, ups[part], out=into)
            torch.ops.aten.silu_backward.grad_input(into, gates[part], grad_input=grad_gate[part])
            torch.ops.aten.silu.out(gates[part], out=into).mul_(g)
        return grad_gate.view(gate.shape), grad_up.view(up.shape)


class _RotateHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Rotate the gradient back."""
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1.0), None, None


class _TurnPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, turns: Tensor) -> Tensor:
        ctx.save_for_backward(turns)
        return torch.view_as_real(_complex(x) * turns).flatten(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Rotate the gradient back."""
        (turns,) = ctx.saved_tensors
        return torch.view_as_real(_complex(grad) * turns.conj().resolve_conj()).flatten(-2), None


def _complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    whole = torch.empty(x.shape, dtype=x.dtype)
    R = cos.shape[-1]
    half = R // 2
    x, out, cos, sin = (part.flatten(0, 1) for part in (x, whole, cos, sin))
    for part in _blocks(len(x), x.shape[1] * x.shape[2]):
        a = x[part, :, :half]
        b = x[part, :, half:R]
        s = sin[part, :, :half]
        into = out[part]
        torch.mul(x[part, :, :R], cos[part], out=into[..., :R])
        into[..., :half].addcmul_(b, s, value=-sign)
        into[..., half:R].addcmul_(a, s, value=sign)
        if x.shape[-1] > R:
            into[..., R:].copy_(x[part, :, R:])
    return whole
