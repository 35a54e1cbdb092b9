"""Choose the tokens for Clip-Cov and KL-Cov (arXiv 2505.22617): those most likely to lower the
entropy.

The covariance of a token is (log π - mean log π)·(A - mean A), the means over all trained tokens of
the optimizer step (equation 11 there). So the choice covers the whole step, on values from a pass
without gradient; training the step in one microbatch or many, on one rank or several, changes
nothing. N: trained positions of the whole step, over all ranks.
"""

import math

import torch
from torch import Tensor

from ttrl.data.packing.pack import PackedTensors
from ttrl.text import number_of
from ttrl.training.objective.losses import known_or_current, probability_ratio, silenced


def token_keys(rows: PackedTensors) -> Tensor:
    """Return a number for every position [R, T], int64, independent of its sample's place in the
    pack: a hash of the task's id, the number of the sample, the lengths of prompt and completion,
    the position and the label. Meaningful at labels only.
    """
    texts = [
        f"{one.task_id}\0{one.sample}\0{one.prompt_length}\0{one.completion_length}"
        for one in rows.samples
    ]
    # The last one is for sample_ids of -1.
    table_S = torch.tensor([*map(number_of, texts), 0], dtype=torch.int64)
    return _mixed(_mixed(table_S[rows.sample_ids] + rows.input_pos) + rows.labels)


def covariances(logprobs_N: Tensor, advantages_N: Tensor) -> Tensor:
    """Return (log π - mean)·(A - mean) [N], float64, on the CPU; exact sums, so the order of the
    tokens does not matter.
    """
    logprobs = logprobs_N.detach().double().cpu()
    advantages = advantages_N.detach().double().cpu()
    return (logprobs - _mean(logprobs)) * (advantages - _mean(advantages))


def clip_cov_choice(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    keys_N: Tensor,
    seed: int,
    covariance_share: float,
    covariance_bounds: tuple[float, float],
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Draw covariance_share·N tokens for Clip-Cov, at least one: bool [N], on the CPU.

    Drawn, all with the same probability, from tokens with a covariance strictly within the bounds
    and a gradient not removed by PPO's clipping; fewer if there are not enough. old: NaN for
    unknown. The draw depends only on (seed, key) (`token_keys`), not on the order of the tokens.
    """
    ratio_N = probability_ratio(logprobs_N, known_or_current(old_logprobs_N, logprobs_N))
    clipped = silenced(ratio_N, advantages_N, clip_low, clip_high)
    covariance_N = covariances(logprobs_N, advantages_N)
    low, high = covariance_bounds
    candidates_N = (covariance_N > low) & (covariance_N < high)
    candidates_N &= ~(clipped["clipped_low"] | clipped["clipped_high"]).cpu()
    drawn_N = torch.argsort(_mixed(keys_N.cpu() ^ number_of(f"seed {seed}")), stable=True)
    return _first(drawn_N[candidates_N[drawn_N]], covariance_share, candidates_N)


def kl_cov_choice(
    logprobs_N: Tensor, advantages_N: Tensor, keys_N: Tensor, covariance_share: float
) -> Tensor:
    """Return the covariance_share·N tokens of the highest covariances for KL-Cov, at least one:
    bool [N], on the CPU. Equal ones are in the order of their keys (`token_keys`).
    """
    covariance_N = covariances(logprobs_N, advantages_N)
    places_N = torch.argsort(keys_N.cpu(), stable=True)
    order_N = torch.argsort(covariance_N[places_N], descending=True, stable=True)
    return _first(places_N[order_N], covariance_share, covariance_N)


def _first(places: Tensor, share: float, like_N: Tensor) -> Tensor:
    """Return True at the first of these places, a share of all N."""
    chosen_N = torch.zeros_like(like_N, dtype=torch.bool)
    chosen_N[places[: max(1, int(share * len(like_N)))]] = True
    return chosen_N


def _mean(values: Tensor) -> float:
    if len(values):
        return math.fsum(values.tolist()) / len(values)
    return 0.0


def _mixed(values: Tensor) -> Tensor:
    """Permute int64 numbers into a random order: MurmurHash3's finaliser, with logical shifts,
    modulo 2^64.
    """
    for factor in (-49064778989728563, -4265267296055464877):
        values = (values ^ ((values >> 33) & 0x7FFFFFFF)) * factor
    return values ^ ((values >> 33) & 0x7FFFFFFF)
