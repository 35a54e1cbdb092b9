"""Projections in fp32 on x86 CPUs through oneDNN, where PyTorch takes MKL.

`torch.mm` and `F.linear` hand fp32 products to MKL. oneDNN, which the same wheel holds and PyTorch
uses for bf16, is faster with the shapes of a decoder: on a Zen 4 core by 7 to 12% forward and by 15
to 20% for the gradient of the input; on a Zen 5, where MKL takes half of the width, 2.2 times. Of
the weight's gradient MKL computes 1.4 times as much a second on an Intel Xeon, and oneDNN 2.2 times
as much on a Zen 5: `weight_gradients_by_onednn`. oneDNN's operation is the one that TorchInductor
calls; it has no derivative, so that is written out here. Several projections of one input are one
operation, in which the gradients of the input add up inside of the products, and so do a layer's
own product and its adapter's.

A frozen weight may be held in 16 bits: it is widened for each product, in the forward pass and
again in the backward pass.

Sums are in another order than MKL's. The choice depends on machine, dtype and modules, and on one
measurement that is kept for good, so that a run that is repeated computes the same.

Shapes: N tokens, D width in, O width out, H heads, E dimension of a head, r rank.
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
from ttrl.system.processor import cpu_name
from ttrl.training.kernels.widening import Linear, held_narrow, linear, widened

_X86 = platform.machine().lower() in ("x86_64", "amd64")
PRODUCT = (
    torch.ops.mkldnn._linear_pointwise if hasattr(torch.ops.mkldnn, "_linear_pointwise") else None
)
"""None where PyTorch was built without oneDNN."""
_COLUMNS = 8192  # of a head's logits at a time: 4 MB for 128 positions


class SumOfProducts(nn.Linear):
    """A linear layer that may add the product of two narrow matrices: W x + b + B A x."""

    def is_sum(self) -> bool:
        """Tell whether that is all it computes at present."""
        return True

    def factors(self) -> tuple[Tensor | None, Tensor | None]:
        """Return A [r, D] and B [O, r]; None where nothing is added."""
        return None, None


def plain_on_cpu(*tensors: Tensor) -> bool:
    """Tell whether operations for plain CPU tensors can take these: not under torch.compile, nor
    sharded or quantised ones.
    """
    # The exact types: subclasses are sharded or quantised tensors and the like.
    ours = all(type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" for x in tensors)
    return ours and not torch.compiler.is_compiling()


def serve(x: Tensor, *layers: nn.Module) -> bool:
    """Tell whether `project` can take these layers: plain ones, or sums, with whole parameters and
    without hooks, in fp32 on a CPU."""
    for layer in layers:
        is_plain = type(layer) in (nn.Linear, Linear)
        if not (is_plain or (isinstance(layer, SumOfProducts) and layer.is_sum())) or _hooked(
            layer
        ):
            return False
        weight = layer.weight
        assert isinstance(weight, Tensor)
        if not _takes(x, *layer.parameters(recurse=False)) or not _has_no_gaps(weight):
            return False
    return True


def fast(*tensors: Tensor) -> bool:
    """Tell whether oneDNN may compute products of these tensors."""
    # First: what follows breaks graphs.
    if not (plain_on_cpu(*tensors) and all(x.dtype is torch.float32 for x in tensors)):
        return False
    known = (
        _X86
        and PRODUCT is not None
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
    )
    return known and not torch.is_autocast_enabled("cpu")


def _takes(x: Tensor, *weights: Tensor) -> bool:
    """Tell whether `_Projections` can compute with these weights: in fp32, or frozen in 16 bits."""
    narrow = [weight for weight in weights if held_narrow(weight)]
    others = [weight for weight in weights if not held_narrow(weight)]
    return plain_on_cpu(*narrow) and fast(x, *others)


def _has_no_gaps(weight_OD: Tensor) -> bool:
    return weight_OD.is_contiguous() or weight_OD.T.is_contiguous()


def _hooked(layer: nn.Module) -> bool:
    hooks = (
        layer._forward_hooks,
        layer._forward_pre_hooks,
        layer._backward_hooks,
        layer._backward_pre_hooks,
    )
    return any(hooks)


def project(x: Tensor, *layers: nn.Module, pairs: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
    """Project x [..., D] to one [..., O] for each layer. `pairs`: for the first layers, the
    dimension E of a head if the halves of their heads are to come out as pairs (see `as_pairs`),
    else 0.
    """
    flat = [
        p
        for layer in layers
        for p in (
            layer.weight,
            layer.bias,
            *(layer.factors() if isinstance(layer, SumOfProducts) else (None, None)),
        )
    ]
    heads = pairs + (0,) * (len(layers) - len(pairs))
    apply: Callable[..., tuple[Tensor, ...]] = _Projections.apply
    return apply(x, heads, *flat)


def product_of(x: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x·Wᵀ + b, [..., O], through oneDNN where it may compute that."""
    parameters = (weight_OD,) if bias_O is None else (weight_OD, bias_O)
    if _takes(x, *parameters) and _has_no_gaps(weight_OD):
        apply: Callable[..., tuple[Tensor, ...]] = _Projections.apply
        return apply(x, (0,), weight_OD, bias_O, None, None)[0]
    return linear(x, weight_OD, bias_O)


def product(x_ND: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x·Wᵀ + b, [N, O], without a derivative; both may be transposed views. W must have no
    gaps between its rows: with gaps, oneDNN takes a thousand times as long."""
    assert PRODUCT is not None and _has_no_gaps(weight_OD)
    out: Tensor = PRODUCT.default(x_ND, weight_OD, bias_O, "none", [], "")
    return out


def product_into(x_ND: Tensor, weight_OD: Tensor, out_NO: Tensor) -> None:
    """Write x·Wᵀ for a few tokens and a wide weight (an output head) into `out`, without a
    derivative. oneDNN's operation allocates its result, so it processes the weight in parts, whose
    results are copied.
    """
    for start in range(0, weight_OD.shape[0], _COLUMNS):
        part = slice(start, start + _COLUMNS)
        out_NO[:, part] = product(x_ND, weight_OD[part])


@functools.cache
def weight_gradients_by_onednn(threads: int) -> bool:
    """Tell whether oneDNN computes ∂W = ∂yᵀ·x at least 1.3 times as fast as MKL on this processor
    by so many threads: measured once, in a tenth of a second, and kept in `products.json` of the
    user's cache.
    """
    name = (
        f"{cpu_name()} {threads} threads, torch {torch.__version__}: weight gradients, oneDNN's "
        "speed over MKL's"
    )
    return (
        keep_figure(
            "products.json", name, lambda kept: _onednn_over_mkl() if kept is None else kept
        )
        >= 1.3
    )


def _onednn_over_mkl() -> float:
    grad = torch.ones(1024, 1024)
    rows = torch.ones(1024, 512)
    ways: tuple[Callable[[], Tensor], ...] = (
        lambda: torch.mm(grad.T, rows),
        lambda: product(grad.T, rows.T),
    )
    fastest = [float("inf")] * len(ways)
    for _ in range(8):  # in turns: whatever else runs slows down both
        for number, way in enumerate(ways):
            began = time.perf_counter()
            way()
            fastest[number] = min(fastest[number], time.perf_counter() - began)
    return fastest[0] / fastest[1]


def _weight_gradient(grad_NO: Tensor, rows_ND: Tensor) -> Tensor:
    if (
        grad_NO.numel()
        and _has_no_gaps(rows_ND)
        and weight_gradients_by_onednn(torch.get_num_threads())
    ):
        return product(grad_NO.T, rows_ND.T)
    return torch.mm(grad_NO.T, rows_ND)


def as_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder [H·E, ...] from halves of each head, (a₁ … a_E/2, b₁ … b_E/2), to pairs (a₁, b₁, a₂,
    b₂, …).
    """
    heads: Tensor = rows.unflatten(0, (-1, 2, head_dim // 2))
    return heads.transpose(1, 2).reshape(rows.shape)


def as_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Undo `as_pairs`."""
    heads: Tensor = rows.unflatten(0, (-1, head_dim // 2, 2))
    return heads.transpose(1, 2).reshape(rows.shape)


def _ordered(rows: Tensor, head_dim: int) -> Tensor:
    """Return a weight or bias as products take it: in fp32, the rows of heads as pairs."""
    return widened(as_pairs(rows, head_dim) if head_dim else rows)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _sum(x_ND: Tensor, weight_OD: Tensor, before_NO: Tensor | None) -> Tensor:
    """Return what was there before, if anything, and x·Wᵀ."""
    if before_NO is None:
        return product(x_ND, weight_OD)
    assert PRODUCT is not None and _has_no_gaps(weight_OD)
    out: Tensor = PRODUCT.binary(x_ND, before_NO, weight_OD, None, "add")
    return out


class _Projections(torch.autograd.Function):
    """Map x to W x + b + B A x for each W, b, A, B of `flat`, of which all but W may be None."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, heads: tuple[int, ...], *flat: Tensor | None
    ) -> tuple[Tensor, ...]:
        rows = _rows(x)
        out = []
        kept = list[Tensor | None]()
        for weight, bias, a, b, head_dim in zip(
            flat[::4], flat[1::4], flat[2::4], flat[3::4], heads, strict=True
        ):
            assert weight is not None
            y = product(
                rows, _ordered(weight, head_dim), None if bias is None else _ordered(bias, head_dim)
            )
            low = None if a is None else product(rows, a)
            if low is not None and b is not None:
                y = _sum(low, _ordered(b, head_dim), y)
            out.append(y.view(*x.shape[:-1], y.shape[-1]))
            kept += [weight, a, b, low]
        needed = ctx.needs_input_grad
        # With frozen weights and no adapters, the input need not be kept.
        trained = any(needed[2::4]) or any(needed[4::4])
        ctx.save_for_backward(x if trained else None, *kept)
        ctx.shape = x.shape
        ctx.heads = heads
        ctx.set_materialize_grads(False)
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return ∂x = Σ ∂y·W + (∂y·B)·A, ∂W = ∂yᵀ·x, ∂b = Σ_rows ∂y, ∂A = (∂y·B)ᵀ·x, ∂B = ∂yᵀ·(A
        x).
        """
        x, *kept = ctx.saved_tensors
        rows: Any = None if x is None else _rows(x)
        needed = ctx.needs_input_grad
        grad_x = None
        found = list[Tensor | None]()
        for number, (grad, head_dim) in enumerate(zip(grads, ctx.heads, strict=True)):
            weight, a, b, low = kept[4 * number : 4 * number + 4]
            if grad is None:
                found += [None] * 4
                continue
            grad = _rows(grad)
            if b is None:
                of_low = None
            else:
                of_low = product(grad, _ordered(b, head_dim).T)
            if needed[0]:
                grad_x = _sum(grad, _ordered(weight, head_dim).T, grad_x)
                if of_low is not None:
                    grad_x = grad_x.addmm_(of_low, a)
            wanted = needed[2 + 4 * number : 6 + 4 * number]
            if wanted[0]:
                of_weight = _weight_gradient(grad, rows)
            else:
                of_weight = None
            of_bias = grad.sum(0) if wanted[1] else None
            if wanted[2] and of_low is not None:
                of_a = _weight_gradient(of_low, rows)
            else:
                of_a = None
            # r rows as outputs: a third of the time of r columns.
            if wanted[3]:
                of_b = _weight_gradient(low, grad).T
            else:
                of_b = None
            of_weight, of_bias, of_b = (
                g if g is None or not head_dim else as_halves(g, head_dim)
                for g in (of_weight, of_bias, of_b)
            )
            found += [of_weight, of_bias, of_a, of_b]
        return None if grad_x is None else grad_x.view(ctx.shape), None, *found
