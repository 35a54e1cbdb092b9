"""Compute an output head on a GPU, in Triton: log-probability, entropy and gradient from a chunk's
logits.

Each logit is read once for its position's measures (largest, sum and entropy so far go along the
vocabulary), and once to become the gradient; nothing else of the vocabulary's width is made.
PyTorch's operations (with the formulas, in `ttrl.training.kernels.head_blocks`) read and write it
some ten times, and hold two copies in fp32; the savings make room for logits in fp32 of products in
bf16.

Run by Triton's interpreter in the tests, compiled for absent GPUs (tools/check_kernels.py), and
compared on an H100 with float64 at vocabularies of 50,257 and 151,936 (tests/gpu).

Shapes: n positions of a chunk, V vocabulary (this rank's part).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _final(raw, cap, temperature, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return z of raw logits: capped, and divided by the temperature."""
    if CAPPED:
        raw = cap * (2.0 * tl.sigmoid(2.0 * raw / cap) - 1.0)  # tanh
    return raw / temperature


@triton.jit  # type: ignore[untyped-decorator]
def measure_kernel(  # type: ignore[no-untyped-def]
    raw,
    labels,
    normaliser,
    entropy,
    of_label,
    V,
    stride,
    cap,
    temperature,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for a position: log Σ exp z, the entropy of softmax(z), and z of the label, 0 if
    it is another rank's.
    """
    row = tl.program_id(0).to(tl.int64)
    start = raw + row * stride
    # Of z, Σ exp(z - largest), Σ exp(z - largest)·(z - largest).
    largest = -1.0e30
    total = 0.0
    weighted = 0.0
    for begin in range(0, V, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        z = _final(
            tl.load(start + columns, mask=columns < V, other=0.0).to(tl.float32),
            cap,
            temperature,
            CAPPED,
        )
        z = tl.where(columns < V, z, -1.0e30)
        new = tl.maximum(largest, tl.max(z, 0))
        scale = tl.exp(largest - new)
        weighted = scale * (weighted + (largest - new) * total)
        total = scale * total
        each = tl.exp(z - new)
        total += tl.sum(each, 0)
        weighted += tl.sum(each * (z - new), 0)
        largest = new
    tl.store(normaliser + row, largest + tl.log(total))
    tl.store(entropy + row, tl.log(total) - weighted / total)
    label = tl.load(labels + row)
    mine = (label >= 0) & (label < V)
    z = _final(
        tl.load(start + label, mask=mine, other=0.0).to(tl.float32), cap, temperature, CAPPED
    )
    tl.store(of_label + row, tl.where(mine, z, 0.0))


@triton.jit  # type: ignore[untyped-decorator]
def gradient_kernel(  # type: ignore[no-untyped-def]
    raw, out, labels, normaliser, entropy, of_logprobs, of_entropy, V, stride, out_stride, cap,
    temperature, CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for a part of a position's vocabulary: ∂loss/∂raw out of ∂loss/∂log-probability
    and ∂loss/∂entropy.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < V
    z = _final(
        tl.load(raw + row * stride + columns, mask=inside, other=0.0).to(tl.float32),
        cap,
        temperature,
        CAPPED,
    )
    logp = z - tl.load(normaliser + row)
    upstream = tl.load(of_logprobs + row)
    factor = -upstream
    if ENTROPY:
        factor = factor - tl.load(of_entropy + row) * (logp + tl.load(entropy + row))
    gradient = tl.exp(logp) * factor + tl.where(columns == tl.load(labels + row), upstream, 0.0)
    if CAPPED:
        reached = z * temperature / cap
        gradient = gradient * (1.0 - reached * reached)
    gradient = gradient / temperature
    tl.store(out + row * out_stride + columns, gradient.to(out.dtype.element_ty), mask=inside)


def measure(
    raw_nV: Tensor,
    labels_n: Tensor,
    temperature: float,
    soft_cap: float | None,
    block: int = BLOCK,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Σ exp z, entropy and z of the label, [n] each, of this part of the vocabulary.
    labels: columns in it; others are those of other parts."""
    normaliser, entropy, of_label = (
        torch.empty(len(raw_nV), dtype=torch.float32, device=raw_nV.device) for _ in range(3)
    )
    if len(raw_nV):
        measure_kernel[(len(raw_nV),)](
            raw_nV, labels_n, normaliser, entropy, of_label, raw_nV.shape[1], raw_nV.stride(0),
            soft_cap or 1.0, temperature, CAPPED=soft_cap is not None, BLOCK=block, num_warps=WARPS,
        )  # fmt: skip
    return normaliser, entropy, of_label


def gradient(
    raw_nV: Tensor,
    out_nV: Tensor,
    labels_n: Tensor,
    known: tuple[Tensor, Tensor],
    upstream: tuple[Tensor, Tensor | None],
    temperature: float,
    soft_cap: float | None,
    block: int = BLOCK,
) -> None:
    """Write ∂loss/∂raw into `out`, possibly `raw` itself. known: log Σ exp z and entropy, of the
    whole vocabulary. upstream: ∂loss/∂ of log-probability and entropy."""
    of_logprobs, of_entropy = (None if x is None else x.float().contiguous() for x in upstream)
    n, V = raw_nV.shape
    if n:
        gradient_kernel[(n, triton.cdiv(V, block))](
            raw_nV, out_nV, labels_n, *known, of_logprobs, of_entropy, V, raw_nV.stride(0),
            out_nV.stride(0), soft_cap or 1.0, temperature, CAPPED=soft_cap is not None,
            ENTROPY=of_entropy is not None, BLOCK=block, num_warps=WARPS,
        )  # fmt: skip
