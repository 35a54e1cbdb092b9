"""Estimate KL(π ‖ π_ref), with gradients, from the log-probabilities of sampled tokens.

With d = log π - log π_ref of a token drawn from π (J. Schulman, "Approximating KL Divergence",
2020):

         value               E[value]       gradient                      E[gradient]
k1       d                   KL(π ‖ π_ref)  ∇log π                        0
k2       d²/2                not KL         d·∇log π                      ∇KL(π ‖ π_ref)
k3       e^(-d) - 1 + d      KL(π ‖ π_ref)  (1 - e^(-d))·∇log π           ∇KL(π_ref ‖ π)
full     Σ_v π(v)·d(v)       the same       Σ_v d(v)·∇π(v)                ∇KL(π ‖ π_ref), without
                                            sampling noise

The right-hand column follows from E_π[∇log π] = 0 and holds for tokens drawn by π itself. In words:
**as a loss, k1 does nothing but add noise**, k3 pulls towards the reference along the gradient of
the other direction of KL, and k2, with a biased value, has the expected gradient of KL (arXiv
2506.09477 and 2510.01555 work this out). As a number in the reward it is the other way round: k1 is
the right one. All of them take the sequence before the token as given: only KL in the reward sees
that a token leads further away from the reference.

`full` comes from the head: it has the whole distributions (`ttrl.training.kernels.logprobs`). For
an unknown reference log-probability (NaN), divergence and gradient are 0. N: trained positions.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ttrl.training.objective.losses import LARGEST_LOG_RATIO


def k1_divergence(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """Return log π - log π_ref [N]: unbiased and of any sign. Its gradient has expectation 0 (see
    above); for the reward.
    """
    return _difference(logprobs_N, reference_logprobs_N)


def k2_divergence(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """Return ½·(log π - log π_ref)² [N]: biased as a value, but its gradient is an unbiased one of
    KL(π ‖ π_ref).
    """
    return 0.5 * _difference(logprobs_N, reference_logprobs_N).square()


def k3_divergence(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """Return π_ref/π - 1 - log(π_ref/π) [N]: unbiased and never negative; the form of GRPO (arXiv
    2402.03300). Its gradient is one of KL(π_ref ‖ π)."""
    difference_N = (-_difference(logprobs_N, reference_logprobs_N)).clamp(
        -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO
    )
    # exp(d) - 1 loses all digits of a small d in fp32.
    return torch.expm1(difference_N) - difference_N


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1_divergence,
    "k2": k2_divergence,
    "k3": k3_divergence,
}


def _difference(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    unknown_N = torch.isnan(reference_logprobs_N)
    difference_N = logprobs_N - torch.where(unknown_N, logprobs_N.detach(), reference_logprobs_N)
    # The gradient as well.
    return torch.where(unknown_N, torch.zeros_like(difference_N), difference_N)
