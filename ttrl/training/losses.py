"""Per-token losses: small pure functions of [N] tensors over trained positions, to be minimised.

Unknown log-probabilities are NaN and are replaced by `where` before any arithmetic: multiplying with a mask would keep the NaN,
and its gradient.
"""

import torch
from torch import Tensor

_LARGEST_LOG_RATIO = (
    20.0  # beyond it the exponential is of no use, and soon infinite: such a token has a constant loss, no gradient
)


def known_or_current(old_logprobs_N: Tensor, logprobs_N: Tensor) -> Tensor:
    """The sampler's log-probabilities; where unknown (NaN), the current ones without gradient, so that the ratio is 1 and the
    token is still trained. An exact 0.0 (probability one) is a known value."""
    return torch.where(torch.isnan(old_logprobs_N), logprobs_N.detach(), old_logprobs_N)


def clipped_ratio_loss(
    logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """-min(ρA, clip(ρ, 1 - clip_low, 1 + clip_high)·A) with ρ = π/π_old: PPO's surrogate (arXiv 1707.06347), with separate
    bounds as in DAPO (arXiv 2503.14476). `old_logprobs` must be known everywhere."""
    ratio_N = torch.exp((logprobs_N - old_logprobs_N).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO))
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)


def k3_divergence(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """π_ref/π - 1 - log(π_ref/π): the unbiased, never negative estimate "k3" of KL(π ‖ π_ref) from samples of π
    (J. Schulman, "Approximating KL Divergence", 2020; the form of GRPO, arXiv 2402.03300)."""
    difference_N = (reference_logprobs_N - logprobs_N).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    return torch.exp(difference_N) - 1 - difference_N


def negative_log_likelihood(logprobs_N: Tensor) -> Tensor:
    """-log π: the loss of supervised training."""
    return -logprobs_N
