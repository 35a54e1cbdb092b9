"""Correct for the difference of sampler and trainer probabilities: other kernels, another
precision, older weights.

With w = π_start/π_sampler, π_start the trainer's policy at the start of the iteration, a token's
loss is multiplied by

token       min(w, cap)                                 truncated importance sampling
sequence    min(w of the whole sample, cap)             the same, of the product over the sample's
                                                        trained tokens
mask        w if floor <= w <= cap, else 0              IcePop: tokens with too much disagreement
                                                        teach nothing

Truncated importance sampling: E. Ionides, "Truncated Importance Sampling", 2008; for sampler
against trainer: F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training", 2025. IcePop: Ling team, "Small Leak Can Sink a Great Ship", 2025, with [0.5, 5]. The
token form is biased (the tokens before are weighed as the sampler drew them), the sequence form is
not but for the cap, and has a far larger variance for long samples. Weights never have a gradient.
N: trained positions.
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ttrl.training.objective.losses import known_or_current, probability_ratio, sums_by_sample

Correction: TypeAlias = Literal["none", "token", "sequence", "mask"]


def importance_weights(
    kind: Correction,
    start_logprobs_N: Tensor,
    sampled_logprobs_N: Tensor,
    samples_N: Tensor,
    cap: float,
    floor: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return (weights [N] without gradient, bool [N]: capped or masked). Tokens without a known
    sampler log-probability (NaN) count as sampled by the trainer: weight 1 by themselves, and no
    part of their sample's product.

    samples: the sample of each token, int64; for "sequence", all trained tokens of a sample must be
        in the same call.
    """
    start_N = start_logprobs_N.detach()
    if kind == "none":
        return torch.ones_like(start_N), torch.zeros_like(start_N, dtype=torch.bool)
    sampled_N = known_or_current(sampled_logprobs_N, start_N)
    if kind == "sequence":
        sums_S, _, places_N = sums_by_sample(start_N - sampled_N, samples_N)
        ratio_N = probability_ratio(sums_S, torch.zeros_like(sums_S)).to(start_N.dtype)[places_N]
    else:
        ratio_N = probability_ratio(start_N, sampled_N)
    if kind == "mask":
        outside_N = (ratio_N < floor) | (ratio_N > cap)
        return torch.where(outside_N, torch.zeros_like(ratio_N), ratio_N), outside_N
    return ratio_N.clamp(max=cap), ratio_N > cap
