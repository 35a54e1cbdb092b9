"""Compute exact attention over packed trees on CPUs, without a mask: plain kernels for parts, then
a merge.

Query q sees key k if k <= q < end[k] (`ttrl.data.packing.masks.subtree_ends`). A run of tokens with
the same end therefore attends causally within itself, and all tokens from behind the run up to its
end see every key of it. So the whole is

    causal parts       one per run: each token is a query of exactly one
    rectangles         one per continued run: the queries behind it, contiguous, against its keys,
                       nothing masked

each computed by the flash kernel of PyTorch's CPU backend (fp32, bf16, float64; grouped queries
without repeated keys) and merged by log-sum-exp, as in FlashAttention-2 (arXiv 2307.08691) and
Hydragen (arXiv 2402.05099). The backward kernel rebuilds probabilities from scores and log-sum-exp;
given the *merged* output and log-sum-exp, each part yields its share of the exact gradient. Memory:
a few times the size of the queries.

Rows are laid end to end, since a tree never spans rows. Consecutive runs of equal length (siblings)
go through one call; short runs of other lengths are gathered into padded batches: causal attention
needs no mask for padding at the end.

Shapes: B rows, T tokens of a row, S = B·T, H query heads, K key/value heads, E dimension of a head,
n runs of a batch, L tokens of a run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ttrl.data.packing.masks import subtree_ends

P = ParamSpec("P")
R = TypeVar("R")

_forward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_SHORT = 256  # runs up to here are gathered with others of about their length, to save calls
_FULLNESS = 0.8  # of the longest in its batch, at least
# Shorter causal parts are faster in fp32, on CPUs without matrix units for bf16 by a factor of two.
_BF16_FROM = 512


@dataclass(eq=False, frozen=True)
class Span:
    """`count` consecutive runs of `length` tokens, from position `start` of the rows laid end to
    end.
    """

    start: int
    length: int
    count: int = 1

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + self.length * self.count

    def take(self, x: Tensor) -> Tensor:
        """Return [S, H, ...] as [n, H, L, ...], a view."""
        runs: Tensor = x[self.start : self.stop].unflatten(0, (self.count, self.length))
        return runs.transpose(1, 2)

    def put(self, into: Tensor, part: Tensor) -> None:
        """Undo `take`: write [n, H, L, ...] to its place in [S, H, ...]."""
        self.take(into).copy_(part)


@dataclass(eq=False, frozen=True)
class Gathered:
    """Runs of about the same length, at any places. Shorter runs are padded with copies of their
    last token.
    """

    index: Tensor
    """int64 [n·L]: positions."""
    count: int
    real: Tensor
    """int64 [r]: the entries among the n·L without the copies."""
    where: Tensor
    """int64 [r]: their positions."""

    @property
    def length(self) -> int:
        """L."""
        return len(self.index) // self.count

    def take(self, x: Tensor) -> Tensor:
        """Return [S, H, ...] as [n, H, L, ...], copied."""
        runs: Tensor = x.index_select(0, self.index).unflatten(0, (self.count, self.length))
        return runs.transpose(1, 2)

    def take_or_zero(self, x: Tensor) -> Tensor:
        """Return the same with zeros in the copies."""
        out = x.new_zeros(len(self.index), *x.shape[1:])
        out[self.real] = x.index_select(0, self.where)
        runs: Tensor = out.unflatten(0, (self.count, self.length))
        return runs.transpose(1, 2)

    def put(self, into: Tensor, part: Tensor) -> None:
        """Write [n, H, L, ...] to its place in [S, H, ...], without the copies."""
        into.index_copy_(
            0, self.where, part.transpose(1, 2).flatten(0, 1).index_select(0, self.real)
        )


@dataclass(eq=False, frozen=True)
class SplitPlan:
    """The parts of a batch of packed rows."""

    causal: tuple[Span | Gathered, ...]
    rectangles: tuple[tuple[Span, Span], ...]
    """(queries, keys)"""
    complete: bool
    """Whether every position is in a causal part: nothing is padding."""


def split_plan(group_ids_BT: Tensor, parent_ids_BT: Tensor) -> SplitPlan:
    """Return the parts covering exactly the visible pairs of query and key. Padding is
    in no part.
    """
    T = group_ids_BT.shape[1]
    ends_BT = subtree_ends(group_ids_BT, parent_ids_BT)
    # Rows end to end.
    ends_BT = ends_BT + T * torch.arange(len(ends_BT), device=ends_BT.device).unsqueeze(1)
    ends_S = ends_BT.flatten()
    real_S = group_ids_BT.flatten() >= 0
    starts_S = real_S.clone()
    starts_S[1:] &= ends_S[1:] != ends_S[:-1]
    stops_S = real_S.clone()
    stops_S[:-1] &= ends_S[1:] != ends_S[:-1]
    runs = list(
        zip(
            starts_S.nonzero().flatten().tolist(),
            (stops_S.nonzero().flatten() + 1).tolist(),
            strict=True,
        )
    )
    ends = ends_S[starts_S].tolist()
    rectangles = [
        (Span(stop, end - stop), Span(start, stop - start))
        for (start, stop), end in zip(runs, ends, strict=True)
        if end > stop
    ]
    return SplitPlan(tuple(_batched(runs)), tuple(rectangles), bool(real_S.all()))


def _batched(runs: list[tuple[int, int]]) -> Iterator[Span | Gathered]:
    """Group runs into few calls."""
    spans: list[Span] = []
    for start, stop in runs:
        length = stop - start
        if spans and spans[-1].stop == start and spans[-1].length == length:
            spans[-1] = Span(spans[-1].start, length, spans[-1].count + 1)
        else:
            spans.append(Span(start, length))
    short = sorted(
        (span for span in spans if span.length * span.count <= _SHORT),
        key=lambda span: span.length,
        reverse=True,
    )
    yield from (span for span in spans if span.length * span.count > _SHORT)
    batches: list[list[Span]] = []
    for span in short:
        if batches and span.length >= _FULLNESS * batches[-1][0].length:
            batches[-1].append(span)
        else:
            batches.append([span])
    for batch in batches:
        if len(batch) == 1:
            yield batch[0]
        else:
            yield _gathered(batch)


def _gathered(spans: list[Span]) -> Gathered:
    lengths = torch.tensor([span.length for span in spans for _ in range(span.count)])
    starts = torch.tensor(
        [span.start + i * span.length for span in spans for i in range(span.count)]
    )
    offset = torch.arange(int(lengths.max()))
    index = starts.unsqueeze(1) + torch.minimum(offset, lengths.unsqueeze(1) - 1)
    real = (offset < lengths.unsqueeze(1)).flatten().nonzero().flatten()
    return Gathered(index.flatten(), len(starts), real, index.flatten()[real])


def _kernel_dtype(dtype: torch.dtype, length: int) -> torch.dtype:
    """Return the dtype of a causal part."""
    if dtype is torch.bfloat16 and length < _BF16_FROM:
        return torch.float32
    return dtype


class _SplitAttention(torch.autograd.Function):
    """q [S, H, E], k and v [S, K, E] → [S, H, E]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: SplitPlan, scale: float) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        new = torch.empty if plan.complete else torch.zeros
        out = new(q.shape, dtype=wide)
        lse = new(q.shape[:2], dtype=wide)
        for part in plan.causal:
            dtype = _kernel_dtype(q.dtype, part.length)
            part_out, part_lse = _forward_kernel(
                *(part.take(x).to(dtype) for x in (q, k, v)), 0.0, True, scale=scale
            )
            part.put(out, part_out)
            part.put(lse, part_lse)
        for queries, keys in plan.rectangles:
            part_out, part_lse = _forward_kernel(
                queries.take(q), keys.take(k), keys.take(v), 0.0, False, scale=scale
            )
            own_out = queries.take(out)
            own_lse = queries.take(lse)
            merged_lse = torch.logaddexp(own_lse, part_lse)
            own_out.lerp_(part_out.to(wide), torch.exp(part_lse - merged_lse).unsqueeze(-1))
            own_lse.copy_(merged_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan = plan
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        if ctx.plan.complete:
            new = torch.empty_like
        else:
            new = torch.zeros_like
        grads = new(q), new(k), new(v)
        for part in ctx.plan.causal:
            dtype = _kernel_dtype(q.dtype, part.length)
            taken = [part.take(x).to(dtype) for x in (q, k, v, out)]
            if isinstance(part, Gathered):
                grad = part.take_or_zero(grad_out)
            else:
                grad = part.take(grad_out)
            parts = _backward_kernel(
                grad.to(dtype), *taken, part.take(lse), 0.0, True, scale=ctx.scale
            )
            for whole, share in zip(grads, parts, strict=True):
                part.put(whole, share.to(whole.dtype))
        for queries, keys in ctx.plan.rectangles:
            taken = [
                queries.take(grad_out),
                queries.take(q),
                keys.take(k),
                keys.take(v),
                queries.take(out),
                queries.take(lse),
            ]
            shares = _backward_kernel(*taken, 0.0, False, scale=ctx.scale)
            for whole, share, span in zip(grads, shares, (queries, keys, keys), strict=True):
                span.take(whole).add_(share)
        return *grads, None, None


def never_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Keep torch.compile out of a function, such as one looping over batch-dependent parts."""
    kept_out: Callable[P, R] = torch.compiler.disable(function)
    return kept_out


@never_compiled
def split_attend(
    q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, plan: SplitPlan, scale: float
) -> Tensor:
    """Compute softmax attention [B, H, T, E] over packed rows on the CPU; zero at padding. All
    inputs have one dtype.
    """
    B, _, T, _ = q_BHTE.shape
    flat = [x.transpose(1, 2).contiguous().flatten(0, 1) for x in (q_BHTE, k_BKTE, v_BKTE)]
    apply: Callable[..., Tensor] = _SplitAttention.apply
    out: Tensor = apply(*flat, plan, scale).unflatten(0, (B, T))
    return out.transpose(1, 2)
