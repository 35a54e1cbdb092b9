"""Measure the effect of one token's update on another's log-probability: the empirical Fisher
kernel between tokens, or sequences.

With g_t = ∇log π(t) the gradient of a token's log-probability, and a diagonal preconditioner P (the
identity for SGD; 1/(√v̂ + ε) for AdamW, v̂ taken as given),

    K(t, t') = g_tᵀ P g_t' = Σ_α P_α ∂_α log π(t) ∂_α log π(t').

A step θ ← θ + η·P·Σ_t' A(t')·g_t' moves log-probabilities by

    δ log π(t) = η Σ_t' K(t, t')·A(t') + O(η²).                                                  (1)

The entropy -E[log π] of the tokens' distributions, at given prefixes, has the gradient -E[(log π(t)
- b) g_t] for any b independent of the token, as E[g_t] = 0. So

    δH = -η Σ_t,t' E[(log π(t) - b)·K(t, t')·A(t')].                                             (2)

The terms t = t' are a token's effect on itself: the covariance of log π and A (arXiv 2505.22617),
weighted with |g_t|²; the others are the effects between tokens. Sums over the tokens of sequences
give the kernel of those.

K is a Gram matrix, so a random projection S with E[SᵀS] = 1 keeps it: (S√P g_t)·(S√P g_t').
`Projection` is a count sketch: each parameter is added, with a random sign, to one of r sums; the
error of an entry is about |g_t||g_t'|/√r, and no matrix is held.

Gradients of single tokens take a backward pass each, so this is for some hundred tokens.

Shapes: N tokens, r sums of a projection, or all parameters.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


class Projection:
    """Sketch vectors over named parameters by a count sketch: `projection(vector)` is [r]."""

    def __init__(self, parameters: Mapping[str, Tensor], size: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.size = size
        self._places: dict[str, Tensor] = {}
        self._signs: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            drawn = torch.randint(
                2 * size, (parameter.numel(),), generator=generator, dtype=torch.int32
            )
            self._places[name] = (drawn // 2).to(parameter.device)
            self._signs[name] = (drawn % 2 * 2 - 1).to(device=parameter.device, dtype=torch.int8)

    def __call__(self, vector: Mapping[str, Tensor]) -> Tensor:
        first = next(iter(vector.values()))
        sums = torch.zeros(self.size, dtype=torch.float64, device=first.device)
        for name, value in vector.items():
            sums.index_add_(0, self._places[name], (value.flatten() * self._signs[name]).double())
        return sums


def token_gradients(
    logprobs: Iterable[Tensor],
    parameters: Mapping[str, Tensor],
    *,
    projection: Projection | None = None,
    preconditioner: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Return √P·∇log π of each scalar [N, r], float64, projected or whole. logprobs: scalars of one
    graph or several, such as the entries of a policy's log-probabilities, or their sums over
    sequences; the graph stays. preconditioner: P, not negative.
    """
    rows = []
    for one in logprobs:
        gradients = torch.autograd.grad(
            one, list(parameters.values()), retain_graph=True, allow_unused=True
        )
        vector = {}
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
            if gradient is None:
                found = torch.zeros_like(parameter)
            else:
                found = gradient
            vector[name] = found if preconditioner is None else found * preconditioner[name].sqrt()
        rows.append(
            projection(vector)
            if projection
            else torch.cat([value.flatten().double() for value in vector.values()])
        )
    return torch.stack(rows)


def fisher_kernel(gradients: Tensor) -> Tensor:
    """Return K [N, N]."""
    return gradients @ gradients.T


@dataclass(frozen=True)
class EntropyChange:
    """Hold δH by (2), per unit of η, as a mean over tokens."""

    own: float
    """t = t'."""
    others: float
    """t ≠ t'."""

    @property
    def whole(self) -> float:
        return self.own + self.others


def entropy_change(
    kernel: Tensor, logprobs: Tensor, advantages: Tensor, baseline: float | None = None
) -> EntropyChange:
    """Split a step's effect on the entropy of the tokens' distributions. logprobs, advantages: [N].
    baseline: b; None: the mean log-probability of the others, for independence of the token.
    """
    logprobs = logprobs.detach().double()
    advantages = advantages.double()
    count = len(logprobs)
    if baseline is None:
        centred = (logprobs - logprobs.mean()) * (count / (count - 1) if count > 1 else math.nan)
    else:
        centred = logprobs - baseline
    terms = -centred[:, None] * kernel * advantages[None, :] / count
    own = float(terms.diagonal().sum())
    return EntropyChange(own, float(terms.sum()) - own)
