"""Multiply with frozen weights held in bf16 or fp16, computing in fp32 or wider.

Widening a number changes nothing, so each result equals the one with weights held in fp32, bit for
bit. The wide copy lives for one product. Autograd would keep it until the backward pass, together
with those of all other layers; here the backward pass makes it again.

Shapes: D width in, O width out.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

NARROW = (torch.bfloat16, torch.float16)


def held_narrow(weight: Tensor) -> bool:
    """Tell whether a weight is frozen and held in 16 bits."""
    return weight.dtype in NARROW and not weight.requires_grad


def widened(weight: Tensor) -> Tensor:
    """Return a weight in its intended precision: in fp32, or as it is if wider."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x·Wᵀ + b [..., O] in the dtype of x [..., D], or in autocast's."""
    in_fp32 = x.dtype not in NARROW and not torch.is_autocast_enabled(x.device.type)
    is_narrow = held_narrow(weight) or (bias is not None and held_narrow(bias))
    if not (in_fp32 and is_narrow):
        return F.linear(x, weight, bias)
    assert not weight.requires_grad
    product: Tensor = _WidenedLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return product


class Linear(nn.Linear):
    """A linear layer; its frozen weights may be held in 16 bits."""

    def forward(self, input: Tensor) -> Tensor:
        """Map x [..., D] → [..., O]."""
        return linear(input, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    """PyTorch's, with weights possibly held in 16 bits."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise x [..., D]."""
        shape = self.normalized_shape
        return F.layer_norm(input, shape, widened(self.weight), widened(self.bias), self.eps)


class TiedLinear:
    """An output projection by the embeddings' matrix: h [..., D] → logits [..., V]."""

    def __init__(self, embeddings: nn.Embedding) -> None:
        self.tied_module = embeddings

    def __call__(self, h: Tensor) -> Tensor:
        return linear(h, self.tied_module.weight)


class _WidenedLinear(torch.autograd.Function):
    """x·Wᵀ + b with W and b, both frozen, in the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        wide_bias = None if bias is None else bias.to(x.dtype)
        return F.linear(x, weight.to(x.dtype), wide_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return grad.matmul(weight.to(grad.dtype)), None, None
