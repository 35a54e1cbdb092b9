"""Compute per-token losses to minimise: small pure functions of [N] tensors over trained positions.
Each returns the loss of each token, and facts about each: "clipped_low" and "clipped_high" if a
clipping of ρ takes effect, and "dual_clipped".

With ρ = π/π_old, A the advantage, sg the value without gradient:

reinforce    -A·log π                                                    Williams 1992
ppo          -min(ρA, clip(ρ, 1 - low, 1 + high)·A)                      arXiv 1707.06347;
                                                                       dual clip: 1912.09729
tanh         -tanh(log ρ)·A
cispo        -sg(clip(ρ, 1 - low, 1 + high))·A·log π                     arXiv 2506.13585
gspo         ppo with sg(s)·π/sg(π) for ρ, s the sample's mean ratio     arXiv 2507.18071
clip_cov     ppo, the chosen tokens without gradient                     arXiv 2505.22617
kl_cov       -ρA, plus c·|log ρ| on the chosen tokens                    arXiv 2505.22617

At ρ = 1 all of them have the gradient of REINFORCE, but for the chosen tokens. `old_logprobs` must
be known everywhere: unknown log-probabilities are NaN and are replaced by torch's `where` before
any arithmetic (`known_or_current`); multiplying with a mask would keep the NaN, and its gradient.
N: trained positions; 0 is as good as any number.
"""

from typing import TypeAlias

import torch
from torch import Tensor

Losses: TypeAlias = tuple[Tensor, dict[str, Tensor]]
"""The loss of each token [N], and facts about each [N], by name."""
LARGEST_LOG_RATIO = 20.0
"""Beyond it the exponential is useless, and soon infinite: such a token has a constant loss and no
gradient.
"""


def known_or_current(old_logprobs_N: Tensor, logprobs_N: Tensor) -> Tensor:
    """Return the sampler's log-probabilities; for unknown ones (NaN), the current ones without
    gradient: the ratio is 1 and the token is still trained. An exact 0.0 (probability one) is a
    known value.
    """
    return torch.where(torch.isnan(old_logprobs_N), logprobs_N.detach(), old_logprobs_N)


def probability_ratio(logprobs_N: Tensor, old_logprobs_N: Tensor) -> Tensor:
    """Return ρ = π/π_old [N], between e^-20 and e^20: constant beyond, without gradient."""
    return torch.exp((logprobs_N - old_logprobs_N).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


def reinforce_loss(logprobs_N: Tensor, advantages_N: Tensor) -> Losses:
    """Return -A·log π (R. Williams, "Simple statistical gradient-following algorithms", 1992).
    Ignores the sampling policy: right for tokens of the current one, or with an off-policy
    correction (`ttrl.training.objective.off_policy`).
    """
    return -advantages_N * logprobs_N, {}


def clipped_ratio_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Losses:
    """Return -min(ρA, clip(ρ, 1 - clip_low, 1 + clip_high)·A) with ρ = π/π_old: PPO's surrogate
    (arXiv 1707.06347), with separate bounds as in DAPO (arXiv 2503.14476).

    dual_clip: c > 1, a lower bound c·A on the objective of negative advantages, -max(min(…), cA),
    to keep an extreme ratio from dominating the step (arXiv 1912.09729, equation 5; there c = 3).
    Positive advantages are not affected.
    """
    return _clipped(
        probability_ratio(logprobs_N, old_logprobs_N), advantages_N, clip_low, clip_high, dual_clip
    )


def _clipped(
    ratio_N: Tensor,
    advantages_N: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Losses:
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    objective_N = torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    facts = silenced(ratio_N, advantages_N, clip_low, clip_high)
    if dual_clip is not None:
        bounded_N = torch.maximum(objective_N, dual_clip * advantages_N)
        objective_N = torch.where(advantages_N < 0, bounded_N, objective_N)
        facts["dual_clipped"] = (ratio_N > dual_clip) & (advantages_N < 0)
    return -objective_N, facts


def silenced(
    ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float
) -> dict[str, Tensor]:
    """Return the tokens without gradient under PPO's clipping: "clipped_low" with a negative
    advantage, "clipped_high" with a positive one.
    """
    return {
        "clipped_low": (ratio_N < 1 - clip_low) & (advantages_N < 0),
        "clipped_high": (ratio_N > 1 + clip_high) & (advantages_N > 0),
    }


def tanh_loss(logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor) -> Losses:
    """Return -tanh(log π - log π_old)·A: soft clipping. The gradient is A·(1 - tanh²)·∇log π. It
    fades in both directions and for either sign of A: unlike PPO's, it does not bring back a token
    far off in the wrong direction.
    """
    return -torch.tanh(logprobs_N - old_logprobs_N) * advantages_N, {}


def cispo_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    clip_low: float,
    clip_high: float,
) -> Losses:
    """Return -sg(clip(ρ, 1 - clip_low, 1 + clip_high))·A·log π (MiniMax-M1, arXiv 2506.13585,
    equation 4): every token keeps its gradient, however far its ratio; its weight is clipped,
    for either sign of the advantage. The paper has no lower bound: clip_low = 1.
    """
    ratio_N = probability_ratio(logprobs_N, old_logprobs_N).detach()
    weight_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    facts = {"clipped_low": ratio_N < 1 - clip_low, "clipped_high": ratio_N > 1 + clip_high}
    return -weight_N * advantages_N * logprobs_N, facts


def sums_by_sample(values_N: Tensor, samples_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (the sum of the values of each of S samples [S], in float64; the number of their
    tokens [S]; the sample of each token [N])."""
    names_S, places_N, counts_S = torch.unique(samples_N, return_inverse=True, return_counts=True)
    sums_S = torch.zeros(len(names_S), dtype=torch.float64, device=values_N.device)
    return sums_S.index_add(0, places_N, values_N.double()), counts_S, places_N


def gspo_ratio(logprobs_N: Tensor, old_logprobs_N: Tensor, samples_N: Tensor) -> Tensor:
    """Return sg(s)·π/sg(π) [N], s = exp(mean over the sample of log π - log π_old): equal to s, and
    each token has its own gradient (GSPO-token, arXiv 2507.18071, equation 14). All trained tokens
    of a sample must be present.
    """
    difference_N = (logprobs_N - old_logprobs_N).detach()
    sums_S, counts_S, places_N = sums_by_sample(difference_N, samples_N)
    log_ratio_N = (sums_S / counts_S).to(difference_N.dtype)[places_N]
    return torch.exp(log_ratio_N.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)) * torch.exp(
        logprobs_N - logprobs_N.detach()
    )


def gspo_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    samples_N: Tensor,
    clip_low: float,
    clip_high: float,
) -> Losses:
    """Return PPO's surrogate with the ratio of the whole sample, normalised by its length (GSPO,
    arXiv 2507.18071).

    Written with a term for each token (equations 13 and 14): value and gradient equal the sequence
    form's (equation 5) if the tokens of a sample share one advantage and are weighed 1/length:
    aggregation "sequence". samples: the sample of each token, int64; all trained tokens of a sample
    must be in the same call.
    """
    return _clipped(
        gspo_ratio(logprobs_N, old_logprobs_N, samples_N), advantages_N, clip_low, clip_high
    )


def clip_cov_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    chosen_N: Tensor,
    clip_low: float,
    clip_high: float,
) -> Losses:
    """Return PPO's surrogate without the chosen tokens (bool); their loss and gradient are 0
    (Clip-Cov, arXiv 2505.22617, equation 12; its code clips the ratio too).
    `ttrl.training.objective.covariance` chooses them; the entropy then falls less, by their
    contribution.
    """
    loss_N, facts = clipped_ratio_loss(
        logprobs_N, old_logprobs_N, advantages_N, clip_low, clip_high
    )
    return torch.where(chosen_N, torch.zeros_like(loss_N), loss_N), facts


def kl_cov_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    chosen_N: Tensor,
    kl_cov_coefficient: float,
) -> Losses:
    """Return -ρA, plus c·|log π - log π_old| on the chosen tokens (bool), c the coefficient
    (KL-Cov, arXiv 2505.22617, equation 14; the absolute difference is how its code estimates
    KL(π_old ‖ π)). No clipping. At ρ = 1 the penalty has no gradient: it takes effect from the
    second step of an iteration on.
    """
    difference_N = (logprobs_N - old_logprobs_N).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    loss_N = -torch.exp(difference_N) * advantages_N
    return torch.where(chosen_N, loss_N + kl_cov_coefficient * difference_N.abs(), loss_N), {}
