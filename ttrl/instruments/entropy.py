"""Estimate the entropy of whole sequences with errors, by one function with correct derivatives of
every order.

A policy draws y = y_1 … y_T, by log π(y) = Σ_k log π(y_k | y_<k). Its entropy H = -E[log π(y)] has
two unbiased estimates from a sample,

    plain             -log π(y) = Σ_k -log π(y_k | y_<k)
    Rao-Blackwellised  Σ_k H_k(y_<k),  H_k(y_<k) = -Σ_v π(v | y_<k) log π(v | y_<k).

The second replaces each term of the first by its expectation given the prefix, and usually has a
far smaller variance.

**Gradient.** The tokens before k are drawn from π as well, so the gradient of H has a term for
them:

    ∇H = E[ Σ_k ∇H_k + Σ_k H_k(y_<k) ∇log π(y_<k) ]
       = E[ Σ_k ∇H_k + Σ_j ∇log π(y_j | y_<j) · Σ_{k>j} H_k ].                               (1)

An entropy bonus on single tokens has the first term only. Both come from one function. With samples
from a policy π₀,

    J(θ) = Σ_k w_k(θ) · H_k(θ),   w_k = π_θ(y_<k) / π₀(y_<k),                                (2)

has E J(θ) = H(θ) for every θ, so its derivatives of any order are unbiased estimates of those of H;
at π_θ = π₀, with w_k = 1 and ∇w_k = ∇log π(y_<k), the first is (1). Only the prefix is weighted:
H_k does not need later tokens.

**Baseline.** E[w_{j+1}(θ)] = 1 for every j and θ. So J - Σ_j b_j·(w_{j+1} - w_j) is unbiased too,
for numbers b_j independent of the sample, and puts R_j - b_j in the place of R_j = Σ_{k>j} H_k in
(1). `others_mean` takes the mean of R_j over the other samples (a U-statistic); it follows the
remaining length.

Shapes: N labels in row-major order, S sequences, T labels of the longest.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mean:
    """Hold a mean and its standard error; NaN for a single cluster."""

    value: float
    error: float


def by_sequence(values_N: Tensor, samples_N: Tensor) -> Tensor:
    """Arrange values of labels by sample: [S, T], 0 behind the end. The samples come in the order
    of their numbers, each with its labels in their order. The gradient flows through.
    """
    _, sample_N, counts_S = torch.unique(samples_N, return_inverse=True, return_counts=True)
    order = torch.argsort(sample_N, stable=True)
    first_S = torch.cumsum(counts_S, 0) - counts_S
    place = torch.arange(len(order), device=values_N.device) - first_S[sample_N[order]]
    shape = len(counts_S), int(counts_S.max()) if len(counts_S) else 0
    return values_N.new_zeros(shape).index_put((sample_N[order], place), values_N[order])


def entropy_estimates(
    logprobs_ST: Tensor, entropies_ST: Tensor, start_logprobs_ST: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the plain and the Rao-Blackwellised terms of each token [S, T], in nats; their sums
    over tokens are the estimates. All arguments are 0 behind the end. start_logprobs: under the
    sampling policy; None: this policy itself sampled. Otherwise tokens have importance weights.
    """
    if start_logprobs_ST is None:
        return -logprobs_ST, entropies_ST
    ratio_ST = logprobs_ST - start_logprobs_ST
    through_ST = torch.cumsum(ratio_ST, dim=1)
    plain_ST = -torch.exp(through_ST) * logprobs_ST
    return plain_ST, torch.exp(through_ST - ratio_ST) * entropies_ST


def entropy_by_position(entropies_ST: Tensor, times_S: Tensor) -> list[float]:
    """Return E[H_k] for each place k [T], in nats, with 0 for sequences already ended; their sum is
    the Rao-Blackwellised estimate. entropies: the terms of `entropy_estimates`. times: number of
    draws of each sequence.
    """
    weights_S = times_S.double() / times_S.sum()
    return [float(value) for value in weights_S @ entropies_ST.detach().double()]


def mean_over(values_S: Tensor, clusters_S: Tensor | None = None) -> Mean:
    """Return the mean over sequences and its standard error. clusters: numbers, equal for sequences
    not drawn independently, such as those of one prompt; the error is then for a mean of clusters
    of any sizes.
    """
    values = values_S.detach().double()
    mean = values.mean()
    deviation = values - mean
    if clusters_S is not None:
        _, place = torch.unique(clusters_S, return_inverse=True)
        deviation = deviation.new_zeros(int(place.max()) + 1).index_add(0, place, deviation)
    count = len(deviation)
    if count < 2:
        return Mean(float(mean), float("nan"))
    return Mean(
        float(mean), float((deviation.square().sum() * count / (count - 1)).sqrt()) / len(values)
    )


def importance_entropy(
    logprobs_ST: Tensor,
    entropies_ST: Tensor,
    start_logprobs_ST: Tensor,
    baseline_ST: Tensor | float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return J - Σ_j b_j·(w_{j+1} - w_j) of each sequence [S], by (2), and log w [S].

    start_logprobs: under the sampling policy, without gradient; all 0 behind the end. baseline:
    b_j, such as `others_mean`.
    """
    ratio_ST = logprobs_ST - start_logprobs_ST
    prefix_ST = torch.cumsum(ratio_ST, dim=1) - ratio_ST
    w_ST = torch.exp(prefix_ST)
    return (w_ST * (entropies_ST - baseline_ST * torch.expm1(ratio_ST))).sum(dim=1), ratio_ST.sum(
        dim=1
    )


def others_mean(entropies_ST: Tensor, times_S: Tensor | None = None) -> Tensor:
    """Return for each place of a sequence the mean of the remaining entropy there over all other
    sequences [S, T], without gradient; 0 without others. times: number of draws of each; None:
    once.
    """
    entropies = entropies_ST.detach()
    following = entropies.flip(1).cumsum(1).flip(1) - entropies
    if times_S is None:
        times = torch.ones_like(following[:, :1])
    else:
        times = times_S[:, None].to(following.dtype)
    others = times.sum() - times
    return ((times * following).sum(dim=0) - times * following) / others.clamp(min=1)


def effective_size(log_w_S: Tensor) -> float:
    """Return (Σw)²/Σw² of importance weights, as a share of the sequences."""
    w = torch.exp((log_w_S - log_w_S.max()).double())  # the scale cancels
    return float(w.sum().square() / w.square().sum() / len(w))
