"""Compute an output head on one chunk of positions: probabilities, entropies, divergences, closed-
form gradients.

With raw logits r = h·Wᵀ + b, z = cap·tanh(r/cap)/temperature (for a model with a cap), p =
softmax(z), and per position a label y, H = -Σ p log p and D = Σ p (log p - log q):

    ∂ log p(y)/∂z = onehot(y) - p        ∂H/∂z = -p (log p + H)        ∂D/∂z = p (log p - log q - D)

so one buffer of logits becomes, in place, the gradient to be multiplied with W and h. It is
processed a few rows at a time, small enough for the cache. With a sharded vocabulary, each rank
holds its columns, and only numbers per position are exchanged.

Shapes: n positions of a chunk, r of them at a time, D width, V vocabulary (this rank's).
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

_CACHED_ELEMENTS = 2**19  # of a block of rows on the CPU: 2 MB in fp32
_GRADIENT_COLUMNS = 8192  # of the vocabulary, when products in bf16 are added up in fp32


@dataclass(frozen=True, eq=False)
class VocabShards:
    """This rank's part of the vocabulary, and the sums over all parts."""

    group: dist.ProcessGroup | None
    first: int
    total: int

    @classmethod
    def of(cls, size: int, group: dist.ProcessGroup | None, device: torch.device) -> "VocabShards":
        """Make shards from the number of rows on this rank; a collective. Shards are in the order
        of ranks.
        """
        if group is None:
            return cls(None, 0, size)
        own = torch.tensor([size], device=device)
        sizes = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(sizes, own, group=group)
        every = [int(s) for s in sizes]
        return cls(group, sum(every[: dist.get_rank(group)]), sum(every))

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def logsumexp(self, x: Tensor) -> Tensor:
        """Return log Σ exp over the ranks."""
        if self.group is None:
            return x
        largest = x.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return self.sum(torch.exp(x - largest)).log_().add_(largest)


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """One output projection and its cap and temperature. `weight` and `bias` are in the dtype of
    the products.
    """

    weight: Tensor
    bias: Tensor | None
    temperature: float
    soft_cap: float | None
    shards: VocabShards

    def logits(self, h_nD: Tensor, buffer: Tensor) -> Tensor:
        """Return raw logits [n, V], written into the buffer's first n rows."""
        raw_nV = buffer[: len(h_nD)]
        # On GPUs: bf16 products with fp32 sums stay in fp32.
        if raw_nV.dtype != h_nD.dtype:
            torch.mm(h_nD, self.weight.T, out_dtype=raw_nV.dtype, out=raw_nV)
        else:
            torch.mm(h_nD, self.weight.T, out=raw_nV)
        if self.bias is None:
            return raw_nV
        return raw_nV.add_(self.bias)

    def final(self, raw: Tensor) -> Tensor:
        """Return z from r, fp32 or wider; may share memory with r."""
        z = raw.to(torch.promote_types(raw.dtype, torch.float32))
        if self.soft_cap is not None:
            z = torch.tanh(z / self.soft_cap).mul_(self.soft_cap)
        if self.temperature == 1.0:
            return z
        return z / self.temperature

    def slope(self, z: Tensor) -> Tensor | float:
        """Return ∂z/∂r as a function of z."""
        if self.soft_cap is None:
            return 1.0 / self.temperature
        return (1.0 - (z * (self.temperature / self.soft_cap)) ** 2) / self.temperature

    def log_normaliser(self, raw_nV: Tensor) -> Tensor:
        """Return log Σ exp z over the whole vocabulary, [n]."""
        parts = [torch.logsumexp(self.final(raw_nV[rows]), dim=-1) for rows in blocks(raw_nV)]
        return self.shards.logsumexp(torch.cat(parts))

    def mine(self, labels_n: Tensor) -> tuple[Tensor, Tensor]:
        """Return the labels in this rank's part, and their columns in it, both [m]."""
        if self.shards.group is None:  # all of them are; to look would mean to wait for a GPU
            return torch.arange(len(labels_n), device=labels_n.device), labels_n
        local = labels_n - self.shards.first
        here = ((local >= 0) & (local < self.weight.shape[0])).nonzero().squeeze(1)
        return here, local[here]

    def label_logits(self, raw_nV: Tensor, labels_n: Tensor) -> Tensor:
        """Return z of the labels, [n]."""
        here, columns = self.mine(labels_n)
        values = self.final(raw_nV[here, columns])
        result = values.new_zeros(len(labels_n)).index_put_((here,), values)
        return self.shards.sum(result)


def fused_kernels(raw: Tensor) -> Any:
    """Return `ttrl.training.kernels.fused_head` if it can take such logits, else None."""
    if (
        raw.device.type != "cuda"
        or raw.dtype not in (torch.float32, torch.bfloat16)
        or not _has_triton()
    ):
        return None
    from ttrl.training.kernels import fused_head

    return fused_head


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def blocks(raw_nV: Tensor) -> Iterator[slice]:
    """Return row ranges small enough for a CPU's cache; on other devices all rows at once."""
    n, V = raw_nV.shape
    if raw_nV.device.type == "cpu":
        rows = max(1, _CACHED_ELEMENTS // max(1, V))
    else:
        rows = n
    return (slice(start, min(start + rows, n)) for start in range(0, n, max(1, rows)))


@dataclass(eq=False)
class Distribution:
    """A chunk's facts by position, all [n]; `divergence` only with a reference."""

    logprobs: Tensor
    log_normaliser: Tensor
    entropy: Tensor
    divergence: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all four."""
        return self.logprobs, self.log_normaliser, self.entropy, self.divergence

    def at(self, part: slice) -> "Distribution":
        """Return those of some positions."""
        return Distribution(*(x[part] for x in self.tensors if x is not None))

    def put(self, part: slice, known: "Distribution") -> None:
        """Set those of some positions."""
        for whole, own in zip(self.tensors, known.tensors, strict=True):
            if whole is not None and own is not None:
                whole[part] = own


@dataclass(eq=False)
class HeadChunk:
    """The logits of n positions, and of the reference if there is one."""

    weights: HeadWeights
    labels: Tensor
    raw: Tensor
    reference: tuple[HeadWeights, Tensor] | None = None
    """Its head, and its logits."""

    @property
    def kernels(self) -> Any:
        """`ttrl.training.kernels.fused_head` if it can take this chunk, else None."""
        if self.reference is None:
            return fused_kernels(self.raw)
        return None

    def _columns(self) -> Tensor:
        return self.labels - self.weights.shards.first

    def _measured(self, kernels: Any) -> Distribution:
        """Measure all three at once. Parts of a vocabulary have π_l of the probability each: H = Σ
        π_l (H_l - log π_l).
        """
        shards = self.weights.shards
        part, entropy, label = kernels.measure(
            self.raw, self._columns(), self.weights.temperature, self.weights.soft_cap
        )
        normaliser = shards.logsumexp(part)
        if shards.group is not None:
            share = part - normaliser
            entropy = shards.sum(share.exp().mul_(entropy - share))
        return Distribution(shards.sum(label).sub_(normaliser), normaliser, entropy)

    def _differentiate(self, kernels: Any, known: Distribution, gradients: "Gradients") -> None:
        weights = self.weights
        out = self.raw
        if out.dtype != weights.weight.dtype:
            out = torch.empty_like(out, dtype=weights.weight.dtype)
        found = (known.log_normaliser, known.entropy)
        upstream = (gradients.logprobs, gradients.entropy)
        kernels.gradient(
            self.raw, out, self._columns(), found, upstream, weights.temperature, weights.soft_cap
        )
        self.raw = out

    def measure(self) -> Distribution:
        """Return log-probabilities of the labels and log-normalisers; entropies are not filled in
        yet, but by kernels.
        """
        kernels = self.kernels
        if kernels is not None:
            return self._measured(kernels)
        normaliser = self.weights.log_normaliser(self.raw)
        logprobs = self.weights.label_logits(self.raw, self.labels).sub_(normaliser)
        return Distribution(logprobs, normaliser, torch.zeros_like(logprobs))

    def hidden_gradient(self, known: Distribution, gradients: "Gradients") -> Tensor:
        """Return the gradient at the hidden states [n, D] from these, this rank's share of it; the
        logits stay.
        """
        copied = dataclasses.replace(self, raw=self.raw.clone())
        copied.finish(known, gradients, entropies=False)
        found = copied.raw @ self.weights.weight
        return found.to(torch.promote_types(found.dtype, torch.float32))

    def finish(
        self, known: Distribution, gradients: "Gradients | None", entropies: bool = True
    ) -> None:
        """Fill in entropy and divergence (unless known: `entropies` False), and with `gradients`
        turn the raw logits into the gradient with respect to them, in place, or in the dtype of
        products.
        """
        kernels = self.kernels
        if kernels is not None:
            if gradients is not None:
                self._differentiate(kernels, known, gradients)
            return
        reference_normaliser = None
        if self.reference is not None:
            other, other_raw = self.reference
            reference_normaliser = other.log_normaliser(other_raw)
            if entropies:
                known.divergence = torch.zeros_like(known.entropy)
        for rows in blocks(self.raw):
            z = self.weights.final(self.raw[rows])
            if gradients is None:
                slope = None
            else:
                slope = self.weights.slope(z)
            normaliser = known.log_normaliser[rows].unsqueeze(1)
            # z may be the raw logits themselves, unneeded once the slope is known
            if gradients is not None or z.data_ptr() != self.raw[rows].data_ptr():
                logp = z.sub_(normaliser)
            else:
                logp = z - normaliser
            p = torch.exp(logp)
            log_ratio = None
            if reference_normaliser is not None:
                logq = other.final(other_raw[rows]) - reference_normaliser[rows].unsqueeze(1)
                log_ratio = torch.sub(logp, logq, out=logq)
            if entropies:
                known.entropy[rows] = -_row_dots(p, logp)
                if log_ratio is not None and known.divergence is not None:
                    known.divergence[rows] = _row_dots(p, log_ratio)
            if gradients is not None:
                assert slope is not None
                factor = gradients.factor(rows, known, logp, log_ratio)
                # The label's own part is added before bf16 rounds: for p near 1, 1 - p would be
                # lost.
                if self.raw.dtype == p.dtype:
                    into = self.raw[rows]
                else:
                    into = p
                torch.mul(
                    p, factor.mul_(slope) if isinstance(slope, float) else factor * slope, out=into
                )
                here, columns = self.weights.mine(self.labels[rows])
                of_label = (known.logprobs[rows] + normaliser.squeeze(1))[here]  # z
                into.index_put_(
                    (here, columns),
                    gradients.logprobs[rows][here] * self.weights.slope(of_label),
                    accumulate=True,
                )
                if into is p:
                    self.raw[rows] = p
        if entropies:
            self.weights.shards.sum(known.entropy)
            if known.divergence is not None:
                self.weights.shards.sum(known.divergence)


@dataclass(eq=False)
class Gradients:
    """∂loss/∂ of the three numbers of each position, all [n]."""

    logprobs: Tensor
    entropy: Tensor | None = None
    divergence: Tensor | None = None

    def terms(self) -> Iterator[tuple[str, "Gradients"]]:
        """Yield each term of whole distributions separately."""
        nothing = torch.zeros_like(self.logprobs)
        if self.entropy is not None:
            yield "entropy", Gradients(nothing, entropy=self.entropy)
        if self.divergence is not None:
            yield "divergence", Gradients(nothing, divergence=self.divergence)

    def factor(
        self, rows: slice, known: Distribution, logp: Tensor, log_ratio: Tensor | None
    ) -> Tensor:
        """Return ∂loss/∂z without the label's own part, divided by p: [r, V] or [r, 1]. Overwrites
        `logp` and `log_ratio`.
        """
        constant = -self.logprobs[rows]
        factor: Tensor | None = None
        if self.entropy is not None:
            factor = logp.mul_(-self.entropy[rows].unsqueeze(1))
            constant = constant - self.entropy[rows] * known.entropy[rows]
        if self.divergence is not None:
            assert log_ratio is not None and known.divergence is not None
            share = log_ratio.mul_(self.divergence[rows].unsqueeze(1))
            if factor is None:
                factor = share
            else:
                factor = factor.add_(share)
            constant = constant - self.divergence[rows] * known.divergence[rows]
        if factor is None:
            return constant.unsqueeze(1)
        return factor.add_(constant.unsqueeze(1))


def _row_dots(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a.unsqueeze(1), b.unsqueeze(2)).flatten()


def add_weight_gradient(total_VD: Tensor, gradient_nV: Tensor, h_nD: Tensor, first: bool) -> None:
    """Compute total += gradientᵀ·h, or = for the first chunk. Products in bf16 are added up in the
    total's dtype.
    """
    if total_VD.dtype == gradient_nV.dtype:
        total_VD.addmm_(gradient_nV.T, h_nD, beta=0.0 if first else 1.0)
        return
    for start in range(0, total_VD.shape[0], _GRADIENT_COLUMNS):
        columns = slice(start, start + _GRADIENT_COLUMNS)
        product = torch.mm(gradient_nV[:, columns].T, h_nD)
        if first:
            total_VD[columns].copy_(product)
        else:
            total_VD[columns].add_(product)
