"""Projections in fp32 on x86 CPUs through oneDNN, where PyTorch takes MKL.

`torch.mm` and `F.linear` hand fp32 products to MKL. oneDNN, which the same wheel holds and PyTorch uses for bf16, is faster with
the shapes of a decoder: on a Zen 4 core by 7 to 12% forward and by 15 to 20% for the gradient of the input; on a Zen 5, where MKL
takes half of the width, 2.2 times. Of the weight's gradient MKL computes 1.4 times as much a second on an Intel Xeon, and oneDNN
2.2 times as much on a Zen 5: `weight_gradients_by_onednn`. oneDNN's operation is the one that TorchInductor calls; it has no
derivative, so that is written out here. Several projections of one input are one operation, in which the gradients of the input
add up inside of the products.

Sums are in another order than MKL's. The choice depends on machine, dtype and modules, and on one measurement that is kept for
good, so that a run that is repeated computes the same.

Shapes: N tokens, D width in, O width out, H heads, E dimension of a head.
"""

import functools
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ttrl.system.files import keep_figure
from ttrl.system.native_code import cpu_name

_X86 = platform.machine().lower() in ("x86_64", "amd64")
PRODUCT = torch.ops.mkldnn._linear_pointwise if hasattr(torch.ops.mkldnn, "_linear_pointwise") else None
"""None where PyTorch was built without oneDNN."""
_COLUMNS = 8192  # of a head's logits at a time: 4 MB for 128 positions


def plain_on_cpu(*tensors: Tensor) -> bool:
    """Tell whether operations for plain CPU tensors can take these: not under torch.compile, nor sharded or quantised ones."""
    # The exact types: subclasses are sharded or quantised tensors and the like.
    ours = all(type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" for x in tensors)
    return ours and not torch.compiler.is_compiling()


def serve(x: Tensor, *layers: nn.Module) -> bool:
    """Tell whether `project` can take these layers: plain ones with whole parameters and without hooks, in fp32 on a CPU."""
    if not all(type(layer) is nn.Linear and not _hooked(layer) and _has_no_gaps(layer.weight) for layer in layers):
        return False
    return fast(x, *(p for layer in layers for p in layer.parameters(recurse=False)))


def fast(*tensors: Tensor) -> bool:
    """Tell whether oneDNN may compute products of these tensors."""
    if not (plain_on_cpu(*tensors) and all(x.dtype is torch.float32 for x in tensors)):  # first: what follows breaks graphs
        return False
    known = _X86 and PRODUCT is not None and torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    return known and not torch.is_autocast_enabled("cpu")


def _has_no_gaps(weight_OD: Tensor) -> bool:
    return weight_OD.is_contiguous() or weight_OD.T.is_contiguous()


def _hooked(layer: nn.Module) -> bool:
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(hooks)


def project(x: Tensor, *layers: nn.Module, pairs: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
    """Project x [..., D] to one [..., O] for each layer. `pairs`: for the first layers, the dimension E of a head if the halves
    of their heads are to come out as pairs (see `as_pairs`), else 0."""
    flat = [p for layer in layers for p in (layer.weight, layer.bias)]
    heads = pairs + (0,) * (len(layers) - len(pairs))
    apply: Callable[..., tuple[Tensor, ...]] = _Projections.apply
    return apply(x, heads, *flat)


def product(x_ND: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x·Wᵀ + b, [N, O], without a derivative; both may be transposed views. W must have no gaps between its rows: with
    gaps, oneDNN takes a thousand times as long."""
    assert PRODUCT is not None and _has_no_gaps(weight_OD)
    out: Tensor = PRODUCT.default(x_ND, weight_OD, bias_O, "none", [], "")
    return out


def product_into(x_ND: Tensor, weight_OD: Tensor, out_NO: Tensor) -> None:
    """Write x·Wᵀ for a few tokens and a wide weight (an output head) into `out`, without a derivative. oneDNN's operation
    allocates its result, so it processes the weight in parts, whose results are copied."""
    for start in range(0, weight_OD.shape[0], _COLUMNS):
        part = slice(start, start + _COLUMNS)
        out_NO[:, part] = product(x_ND, weight_OD[part])


@functools.cache
def weight_gradients_by_onednn(threads: int) -> bool:
    """Tell whether oneDNN computes ∂W = ∂yᵀ·x at least 1.3 times as fast as MKL on this processor by so many threads: measured
    once, in a tenth of a second, and kept in `products.json` of the user's cache."""
    name = f"{cpu_name()} {threads} threads, torch {torch.__version__}: weight gradients, oneDNN's speed over MKL's"
    return keep_figure("products.json", name, lambda kept: _onednn_over_mkl() if kept is None else kept) >= 1.3


def _onednn_over_mkl() -> float:
    grad, rows = torch.ones(1024, 1024), torch.ones(1024, 512)
    ways: tuple[Callable[[], Tensor], ...] = (lambda: torch.mm(grad.T, rows), lambda: product(grad.T, rows.T))
    fastest = [float("inf")] * len(ways)
    for _ in range(8):  # in turns: whatever else runs slows down both
        for number, way in enumerate(ways):
            began = time.perf_counter()
            way()
            fastest[number] = min(fastest[number], time.perf_counter() - began)
    return fastest[0] / fastest[1]


def _weight_gradient(grad_NO: Tensor, rows_ND: Tensor) -> Tensor:
    if grad_NO.numel() and _has_no_gaps(rows_ND) and weight_gradients_by_onednn(torch.get_num_threads()):
        return product(grad_NO.T, rows_ND.T)
    return torch.mm(grad_NO.T, rows_ND)


def as_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder [H·E, ...] from halves of each head, (a₁ … a_E/2, b₁ … b_E/2), to pairs (a₁, b₁, a₂, b₂, …)."""
    heads: Tensor = rows.unflatten(0, (-1, 2, head_dim // 2))
    return heads.transpose(1, 2).reshape(rows.shape)


def as_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Undo `as_pairs`."""
    heads: Tensor = rows.unflatten(0, (-1, head_dim // 2, 2))
    return heads.transpose(1, 2).reshape(rows.shape)


def _ordered(rows: Tensor, head_dim: int) -> Tensor:
    return as_pairs(rows, head_dim) if head_dim else rows


def _rows(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: tuple[int, ...], *flat: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = flat[::2], flat[1::2]
        rows = _rows(x)
        out = []
        for weight, bias, head_dim in zip(weights, biases, heads, strict=True):
            assert weight is not None
            used, added = _ordered(weight, head_dim), None if bias is None else _ordered(bias, head_dim)
            out.append(product(rows, used, added).view(*x.shape[:-1], len(used)))
        trained = any(ctx.needs_input_grad[2::2])  # with adapters, weights may be frozen: their input need not be kept
        ctx.save_for_backward(x if trained else None, *weights)
        ctx.shape, ctx.heads = x.shape, heads
        ctx.set_materialize_grads(False)
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return ∂x = Σ ∂y·W, ∂W = ∂yᵀ·x, ∂b = Σ_rows ∂y."""
        assert PRODUCT is not None
        x, *weights = ctx.saved_tensors
        rows, needed = None if x is None else _rows(x), ctx.needs_input_grad
        grad_x, found = None, list[Tensor | None]()
        for number, (grad, weight, head_dim) in enumerate(zip(grads, weights, ctx.heads, strict=True)):
            if grad is None:
                found += [None, None]
                continue
            grad = _rows(grad)
            if needed[0]:
                used = _ordered(weight, head_dim).T
                grad_x = product(grad, used) if grad_x is None else PRODUCT.binary(grad, grad_x, used, None, "add")
            of_weight = _weight_gradient(grad, rows) if needed[2 + 2 * number] and rows is not None else None
            of_bias = grad.sum(0) if needed[3 + 2 * number] else None
            found += [g if g is None or not head_dim else as_halves(g, head_dim) for g in (of_weight, of_bias)]
        return None if grad_x is None else grad_x.view(ctx.shape), None, *found
