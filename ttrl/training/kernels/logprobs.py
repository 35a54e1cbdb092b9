"""Compute log-probabilities from hidden states, without holding the logits of a whole row. Needs
only torch.

Only trained positions go through the output projection, a chunk at a time: the peak is one chunk's
logits. Two forms:

    gradient in the forward pass   for losses of each token by itself (`token_loss`): a chunk's
                                   logits become the gradient at once, and the backward pass only
                                   scales it; three products in all
    recompute                      for all others: the backward pass computes a chunk's logits
                                   again; four products

Both give log-probabilities and entropies, and with a reference the divergence over the whole
vocabulary, for no more memory than the chunk. The idea of the first is that of Liger Kernel (arXiv
2410.10989); the arithmetic is in `ttrl.training.kernels.head_blocks`.

Shapes: N trained positions, n of a chunk, D width, V vocabulary (of a sharded one, this rank's
part).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from ttrl.data.packing.masks import free_to_look
from ttrl.training.kernels import head_blocks
from ttrl.training.kernels.head_blocks import (
    Distribution,
    Gradients,
    HeadChunk,
    HeadWeights,
    VocabShards,
    add_weight_gradient,
)

IGNORE = -100  # the label of untrained positions, as everywhere in PyTorch
# Positions, by default; twice as many are 7% faster, and take twice the memory.
_CHUNK = {"cpu": 128}
_CHUNK_ELSEWHERE = 1024

TokenLoss = Callable[[Tensor, slice], Tensor]
"""(log-probabilities [n], their places among the N positions) → weighted losses [n], each a
function of its own token only.
"""
Apart = Callable[[str, Tensor], None]
"""("entropy" or "divergence", its gradient [n, D] at a chunk's hidden states)"""


@dataclass(frozen=True, eq=False)
class ReferenceHead:
    """The reference model's hidden states at the same positions, and its output projection; neither
    gets a gradient.
    """

    h_ref_ND: Tensor  # noqa: N815
    weight_ref_VD: Tensor  # noqa: N815
    bias_ref_V: Tensor | None = None  # noqa: N815


@dataclass(frozen=True, eq=False)
class HeadOutput:
    """A head's outputs at N positions, all [N], in nats, fp32 or wider."""

    logprobs_N: Tensor  # noqa: N815
    """Log-probabilities of the labels."""
    entropy_N: Tensor  # noqa: N815
    """Entropies of their distributions."""
    divergence_N: Tensor | None = None  # noqa: N815
    """KL(π ‖ π_ref) = Σ_v π(v) (log π(v) - log π_ref(v)); None without a reference."""
    loss: Tensor | None = None
    """Σ of the weighted losses, with a gradient; None without `token_loss`."""


def run_head(
    h_ND: Tensor,
    labels_N: Tensor,
    weight_VD: Tensor,
    *,
    num_chunks: int | None = None,
    chunk_size: int | None = None,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    bias_V: Tensor | None = None,
    reference: ReferenceHead | None = None,
    entropy_grad: bool = False,
    divergence_grad: bool = False,
    token_loss: TokenLoss | None = None,
    apart: Apart | None = None,
    vocab_group: dist.ProcessGroup | None = None,
) -> HeadOutput:
    """Evaluate the sampler's distributions softmax(cap(h·Wᵀ + b) / temperature) at their labels.

    With `token_loss`, `loss` is Σ of the weighted losses, with its gradient ready on return:
    everything else is detached. `backward` through it may happen once, with any factor. Without,
    `logprobs_N` have a gradient, and on request so have `entropy_N` and `divergence_N`; the
    backward pass then gives `apart`, chunk by chunk, the contribution of these two to the gradient
    of the hidden states, for a product more each.

    Chunks: `num_chunks` of about the same size, or `chunk_size` positions each, or neither.
    Products run in autocast's dtype, or else in the wider one of the two factors'. With
    `vocab_group`, `weight_VD`, `bias_V` and the reference's are this rank's rows, in the order of
    ranks, `h_ND` is the same on all of them, and so is its gradient. N = 0 works, and keeps the
    graph: ranks without a trained token still take part in every collective of the backward pass.
    """
    assert num_chunks is None or chunk_size is None, "num_chunks or chunk_size, not both"
    assert token_loss is None or not (entropy_grad or divergence_grad), (
        "gradients of whole distributions need the recompute form"
    )
    assert not divergence_grad or reference is not None, "a divergence needs a reference"
    device = h_ND.device.type
    autocast = torch.is_autocast_enabled(device)
    shards = VocabShards.of(weight_VD.shape[0], vocab_group, h_ND.device)
    # A frozen head may be held in 16 bits.
    of_products = torch.promote_types(h_ND.dtype, weight_VD.dtype)
    if autocast:
        of_products = torch.get_autocast_dtype(device)
    if num_chunks is not None:
        chunk_size = -(-len(h_ND) // num_chunks)
    task = _Task(
        labels=labels_N,
        chunk_size=max(
            1, _CHUNK.get(device, _CHUNK_ELSEWHERE) if chunk_size is None else chunk_size
        ),
        dtype=of_products,
        temperature=temperature,
        soft_cap=soft_cap,
        shards=shards,
        reference=reference,
        entropy_grad=entropy_grad,
        divergence_grad=divergence_grad,
        token_loss=token_loss,
        apart=apart,
        grad=torch.is_grad_enabled(),
    )
    with torch.autocast(device, enabled=False):
        if token_loss is None:
            recompute: Callable[..., Any] = _RecomputeHead.apply
            return HeadOutput(*recompute(h_ND, weight_VD, bias_V, task))
        with_loss: Callable[..., Any] = _LossHead.apply
        loss, logprobs, entropy, divergence = with_loss(h_ND, weight_VD, bias_V, task)
        return HeadOutput(logprobs, entropy, divergence, loss)


@dataclass(frozen=True, eq=False)
class _Task:
    """One call of `run_head`, without its differentiable tensors."""

    labels: Tensor
    chunk_size: int
    dtype: torch.dtype
    temperature: float
    soft_cap: float | None
    shards: VocabShards
    reference: ReferenceHead | None
    entropy_grad: bool
    divergence_grad: bool
    token_loss: TokenLoss | None
    apart: Apart | None
    grad: bool

    def weights(self, weight_VD: Tensor, bias_V: Tensor | None) -> HeadWeights:
        bias = None if bias_V is None else bias_V.to(self.dtype)
        return HeadWeights(
            weight_VD.to(self.dtype), bias, self.temperature, self.soft_cap, self.shards
        )

    def room(self, h_ND: Tensor) -> Distribution:
        """Return the room for the numbers of all positions."""
        wide = torch.promote_types(self.dtype, torch.float32)
        count = 3 if self.reference is None else 4
        return Distribution(*(h_ND.new_empty(len(h_ND), dtype=wide) for _ in range(count)))

    def chunks(
        self,
        h_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        *,
        use_reference: bool = True,
    ) -> Iterator[tuple[slice, Tensor, HeadChunk]]:
        """Yield (positions, their hidden states, their logits), all in the same buffer."""
        weights = self.weights(weight_VD, bias_V)
        reference = self.reference if use_reference else None
        rows = min(self.chunk_size, len(h_ND))
        buffer = torch.empty(rows, weights.weight.shape[0], dtype=self.dtype, device=h_ND.device)
        if (
            self.reference is None
            and self.dtype is torch.bfloat16
            and head_blocks.fused_kernels(buffer) is not None
        ):
            buffer = torch.empty_like(buffer, dtype=torch.float32)  # without copying them
        if reference is not None:
            other = self.weights(reference.weight_ref_VD, reference.bias_ref_V)
            spare = torch.empty_like(buffer)
        for start in range(0, len(h_ND), self.chunk_size):
            part = slice(start, start + self.chunk_size)
            h = h_ND[part].to(self.dtype)
            chunk = HeadChunk(weights, self.labels[part], weights.logits(h, buffer))
            if reference is not None:
                other_h = reference.h_ref_ND[part].to(self.dtype)
                chunk.reference = (other, other.logits(other_h, spare))
            yield part, h, chunk


class _Totals:
    """Gradients of the inputs, summed over chunks; None for unwanted ones."""

    def __init__(
        self,
        h_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        wanted: tuple[bool, ...],
        task: _Task,
    ) -> None:
        wide = torch.promote_types(task.dtype, torch.float32)
        self.task = task
        self.inputs = (h_ND, weight_VD, bias_V)
        self.h = torch.empty_like(h_ND, dtype=wide) if wanted[0] else None
        new = torch.empty if len(h_ND) else torch.zeros
        self.weight = new(weight_VD.shape, dtype=wide, device=h_ND.device) if wanted[1] else None
        self.bias = (
            torch.zeros_like(bias_V, dtype=wide) if wanted[2] and bias_V is not None else None
        )

    def add(self, part: slice, h_nD: Tensor, chunk: HeadChunk) -> None:
        """Add one chunk's gradients, from logits already turned into their gradient."""
        if self.h is not None:
            self.h[part] = chunk.raw @ chunk.weights.weight
        if self.weight is not None:
            add_weight_gradient(self.weight, chunk.raw, h_nD, first=part.start == 0)
        if self.bias is not None:
            self.bias += chunk.raw.sum(dim=0, dtype=self.bias.dtype)

    def finished(self) -> tuple[Tensor | None, ...]:
        """Return the gradients in the inputs' dtypes; the hidden states' is summed over the whole
        vocabulary.
        """
        if self.h is not None:
            self.task.shards.sum(self.h)
        grads = zip((self.h, self.weight, self.bias), self.inputs, strict=True)
        return tuple(None if g is None or x is None else g.to(x.dtype) for g, x in grads)


class _LossHead(torch.autograd.Function):
    """Gradient in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, h_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, task: _Task
    ) -> tuple[Tensor | None, ...]:
        assert task.token_loss is not None
        wanted = tuple(
            task.grad and x is not None and x.requires_grad for x in (h_ND, weight_VD, bias_V)
        )
        totals = _Totals(h_ND, weight_VD, bias_V, wanted, task)
        found = task.room(h_ND)
        loss = h_ND.new_zeros((), dtype=found.logprobs.dtype)
        for part, h, chunk in task.chunks(h_ND, weight_VD, bias_V):
            known = chunk.measure()
            with torch.enable_grad():
                logprobs = known.logprobs.detach().requires_grad_()
                weighted = task.token_loss(logprobs, part).sum()
            loss += weighted.detach()
            gradients = None
            if any(wanted):
                gradients = Gradients(*torch.autograd.grad(weighted, logprobs))
            chunk.finish(known, gradients)
            found.put(part, known)
            if any(wanted):
                totals.add(part, h, chunk)
        ctx.grads = totals.finished()
        outputs = (found.logprobs, found.entropy, found.divergence)
        ctx.mark_non_differentiable(*(x for x in outputs if x is not None))
        return loss, *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grads = ctx.grads
        ctx.grads = None
        assert grads is not None, "the gradient of a head's loss can be taken once"
        # In place: the gradient of a vocabulary's weight is too large for a copy.
        if not free_to_look(grad_loss.device) or grad_loss.item() != 1.0:
            grads = tuple(None if g is None else g.mul_(grad_loss) for g in grads)
        return *grads, None


class _RecomputeHead(torch.autograd.Function):
    """Logits again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, h_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, task: _Task
    ) -> tuple[Tensor | None, ...]:
        found = task.room(h_ND)
        for part, _, chunk in task.chunks(h_ND, weight_VD, bias_V):
            known = chunk.measure()
            chunk.finish(known, None)
            found.put(part, known)
        ctx.task = task
        ctx.save_for_backward(h_ND, weight_VD, bias_V, *found.tensors)
        ctx.set_materialize_grads(False)
        if task.entropy_grad:
            constant = []
        else:
            constant = [found.entropy]
        if found.divergence is not None and not task.divergence_grad:
            constant.append(found.divergence)
        ctx.mark_non_differentiable(*constant)
        return found.logprobs, found.entropy, found.divergence

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, *others: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        h_ND, weight_VD, bias_V, *tensors = ctx.saved_tensors
        found = Distribution(*tensors)
        task: _Task = ctx.task
        grad_entropy = others[0] if task.entropy_grad else None
        grad_divergence = others[1] if task.divergence_grad else None
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(found.logprobs)
        totals = _Totals(h_ND, weight_VD, bias_V, ctx.needs_input_grad, task)
        for part, h, chunk in task.chunks(
            h_ND, weight_VD, bias_V, use_reference=grad_divergence is not None
        ):
            known = found.at(part)
            gradients = Gradients(
                grad_logprobs[part],
                None if grad_entropy is None else grad_entropy[part],
                None if grad_divergence is None else grad_divergence[part],
            )
            if task.apart is not None:
                for name, alone in gradients.terms():
                    task.apart(name, task.shards.sum(chunk.hidden_gradient(known, alone)))
            chunk.finish(known, gradients, entropies=False)
            totals.add(part, h, chunk)
        return *totals.finished(), None
