"""Compute advantages of single tokens: from a value head (GAE), or from the log-ratios of an
implicit reward model (PRIME).

A TokenizedResult holds them as `token_advantages`, one per completion token. Everything is computed
in float64; non-finite numbers are refused, because one NaN would spread over a whole completion.
"""

import math
from collections.abc import Sequence

from ttrl.errors import UserError


def gae(
    rewards: Sequence[float], values: Sequence[float], gamma: float = 1.0, lam: float = 1.0
) -> list[float]:
    """Compute generalised advantage estimation over the T tokens of one completion (arXiv
    1506.02438, equations 11 and 16):

        δ_t = r_t + γ·V_{t+1} - V_t        A_t = Σ_k (γλ)^k · δ_{t+k}

    rewards: of each token; an outcome reward belongs to the last one. values: V_t before each
    token, [T], with V_T = 0 after the last one (the completion has ended); or [T + 1], with the
    value after it as the last entry (it was cut off and would go on). A value head is trained on
    the returns A_t + V_t. λ = 1 gives the return less the value, λ = 0 the one-step error.

    Raises UserError for mismatched lengths, non-finite numbers, and γ or λ outside [0, 1].
    """
    _check_share("gamma", gamma)
    _check_share("lam", lam)
    if len(values) not in (len(rewards), len(rewards) + 1):
        raise UserError(
            f"{len(rewards)} rewards but {len(values)} values; give one for each token, and one "
            "more if it was cut off"
        )
    _check_finite("rewards", rewards)
    _check_finite("values", values)
    if len(values) > len(rewards):
        after = float(values[len(rewards)])
    else:
        after = 0.0
    advantages = [0.0] * len(rewards)
    advantage = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        advantage = rewards[t] + gamma * after - values[t] + gamma * lam * advantage
        advantages[t] = advantage
        after = float(values[t])
    return advantages


def implicit_rewards(
    logprobs: Sequence[float], reference_logprobs: Sequence[float], beta: float
) -> list[float]:
    """Return β·(log π_φ - log π_ref) of each token: the process rewards of an implicit reward model
    φ (PRIME, arXiv 2502.01456). Raises UserError for different lengths and for non-finite
    log-probabilities.
    """
    if len(logprobs) != len(reference_logprobs):
        raise UserError(
            f"{len(logprobs)} logprobs but {len(reference_logprobs)} reference logprobs; give "
            "one of each per token"
        )
    _check_finite("logprobs", logprobs)
    _check_finite("reference_logprobs", reference_logprobs)
    return [beta * (new - old) for new, old in zip(logprobs, reference_logprobs, strict=True)]


def implicit_reward_advantages(
    token_rewards: Sequence[Sequence[float]], rewards: Sequence[float], gamma: float = 1.0
) -> list[list[float]]:
    """Compute the advantages of every token of a group of K samples, from process and outcome
    rewards (PRIME, arXiv 2502.01456):

        A_t^i = Σ_{s≥t} γ^{s-t}·(r_s^i - 1/(K-1) Σ_{j≠i} mean_u r_u^j)  +  R^i - 1/(K-1) Σ_{j≠i} R^j

    token_rewards: r, of each sample's tokens (`implicit_rewards`). rewards: R, the graders'. Both
    parts have a leave-one-out baseline; for the process rewards it is the other samples' mean
    reward per token, 0 for a sample without tokens. Zeros for a group of one sample: there is
    nothing to compare it with.

    Raises UserError for mismatched lengths, non-finite numbers, and γ outside [0, 1].
    """
    _check_share("gamma", gamma)
    if len(token_rewards) != len(rewards):
        raise UserError(
            f"token rewards of {len(token_rewards)} samples but {len(rewards)} rewards; give "
            "both for each sample"
        )
    _check_finite("rewards", rewards)
    for number, one in enumerate(token_rewards):
        _check_finite(f"token rewards of sample {number}", one)
    if len(rewards) < 2:
        return [[0.0] * len(one) for one in token_rewards]
    others = len(rewards) - 1
    means = [math.fsum(one) / len(one) if one else 0.0 for one in token_rewards]
    all_means = math.fsum(means)
    all_rewards = math.fsum(rewards)
    found = []
    for one, mean, reward in zip(token_rewards, means, rewards, strict=True):
        baseline = (all_means - mean) / others
        outcome = reward - (all_rewards - reward) / others
        later = 0.0
        advantages = [0.0] * len(one)
        for t in range(len(one) - 1, -1, -1):
            later = one[t] - baseline + gamma * later
            advantages[t] = later + outcome
        found.append(advantages)
    return found


def _check_finite(what: str, values: Sequence[float]) -> None:
    for place, value in enumerate(values):
        if not math.isfinite(value):
            raise UserError(f"{what}: number {place} is {value}; all must be finite")


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise UserError(f"{name} is {value}; it must be in [0, 1]")
