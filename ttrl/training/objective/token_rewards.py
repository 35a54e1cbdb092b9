"""Compute advantages of single tokens, from log-probabilities or values, once per iteration: new
`advantages` for the packed rows.

implicit   β·(log π_φ - log π_ref) of each token as its reward, baseline and outcome by
           leave-one-out in the group (PRIME)
KL         -β·k of each token as its reward, on top of the existing advantages
GAE        advantages and returns from a value head, with the graders' rewards

All take the rows of the *whole* iteration: a task's samples lie in any of them. Log-probabilities
are of labels, the trainer's at the start of the iteration or the reward model's; other positions
are ignored. R rows, T positions.
"""

import itertools
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from ttrl.data.packing.pack import PackedTensors
from ttrl.data.packing.packed_format import IGNORE_LABEL
from ttrl.data.token_advantages import gae, implicit_reward_advantages, implicit_rewards
from ttrl.errors import PackError
from ttrl.training.objective.divergences import ESTIMATORS


@dataclass
class _Completion:
    """The generated part of one sample."""

    places: Tensor
    """Places of its labels in the flattened rows, int64, in order of generation."""
    reward: float


def implicit_advantages(
    rows: PackedTensors,
    logprobs_RT: Tensor,
    reference_logprobs_RT: Tensor,
    beta: float,
    gamma: float = 1.0,
) -> Tensor:
    """Return new advantages [R, T] from implicit process rewards and the samples' rewards (PRIME,
    arXiv 2502.01456); 0 at untrained positions. The formula:
    `ttrl.data.token_advantages.implicit_reward_advantages`.

    logprobs: the reward model's. Where it equals the reference, as in a run's first step, only
    leave-one-out advantages are left. The advantages in the rows take no part.

    Raises PackError if a log-probability of a label is unknown.
    """
    logprobs = _numbers("logprobs", logprobs_RT, rows)
    reference = _numbers("reference logprobs", reference_logprobs_RT, rows)
    advantages = torch.zeros_like(rows.advantages)
    for group in _groups(rows):
        rewards = [
            implicit_rewards(logprobs[one.places].tolist(), reference[one.places].tolist(), beta)
            for one in group
        ]
        found = implicit_reward_advantages(rewards, [one.reward for one in group], gamma)
        for one, values in zip(group, found, strict=True):
            advantages.view(-1)[one.places] = torch.tensor(values, dtype=advantages.dtype)
    return advantages


def divergence_penalties(
    rows: PackedTensors,
    logprobs_RT: Tensor,
    reference_logprobs_RT: Tensor,
    beta: float,
    estimator: str = "k1",
    gamma: float = 1.0,
) -> Tensor:
    """Return the contribution of KL in the reward to the advantages [R, T]; 0 at untrained
    positions.

    A token's reward is -beta·k, k an estimate of KL(π ‖ π_ref)
    (`ttrl.training.objective.divergences`; k1 is the right one here), as in InstructGPT (arXiv
    2203.02155). A token is charged with the sum of γ^(s-t)·k_s from its own on, less the mean of
    this sum over the group's other samples at the same place in their completions (0 after their
    end; nothing in groups of one). The mean is independent of the sample's own draws, and so
    changes only the variance. With γ = 0 each token pays only for itself. Nothing is divided by a
    standard deviation.

    Raises PackError if a log-probability of a label is unknown.
    """
    charges = _charges(rows, logprobs_RT, reference_logprobs_RT, beta, estimator)
    result = torch.zeros_like(rows.advantages)
    for group in _groups(rows):
        ahead = torch.zeros(len(group), max(len(one.places) for one in group), dtype=torch.float64)
        for number, one in enumerate(group):
            ahead[number, : len(one.places)] = _returns(charges[one.places], gamma)
        others = (ahead.sum(0) - ahead) / max(1, len(group) - 1)
        for one, own in zip(group, ahead - others, strict=True):
            result.view(-1)[one.places] = own[: len(one.places)].to(result.dtype)
    return result


def value_advantages(
    rows: PackedTensors,
    values_RT: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    token_rewards_RT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns), both [R, T], by generalised advantage estimation (arXiv
    1506.02438); 0 at untrained positions.

    values: of the text read up to each label-predicting position. A sample's reward belongs to its
    last trained token, with any kind of end: samples cut off at a length count as ended.
    token_rewards: more rewards of single tokens, such as KL. Untrained tokens of a sample (a tool's
    answers) are not steps. The advantages in the rows are not used.

    Raises PackError if the value or reward at a label is not finite.
    """
    values = _numbers("values", values_RT, rows)
    if token_rewards_RT is None:
        extra = torch.zeros_like(values)
    else:
        extra = _numbers("token rewards", token_rewards_RT, rows)
    advantages = torch.zeros_like(rows.advantages)
    returns = torch.zeros_like(rows.advantages)
    for one in itertools.chain.from_iterable(_groups(rows)):
        rewards = extra[one.places].tolist()
        own = values[one.places]
        rewards[-1] += one.reward
        found = torch.tensor(gae(rewards, own.tolist(), gamma, lam), dtype=torch.float64)
        advantages.view(-1)[one.places] = found.to(advantages.dtype)
        returns.view(-1)[one.places] = (found + own).to(returns.dtype)
    return advantages, returns


def token_divergences(
    rows: PackedTensors,
    logprobs_RT: Tensor,
    reference_logprobs_RT: Tensor,
    beta: float,
    estimator: str = "k1",
) -> Tensor:
    """Return -beta·k of each label [R, T], float32, for `value_advantages`; 0 elsewhere. Raises
    PackError if one is unknown.
    """
    charges = (
        _charges(rows, logprobs_RT, reference_logprobs_RT, beta, estimator)
        .view(rows.labels.shape)
        .to(torch.float32)
    )
    return torch.where(rows.labels != IGNORE_LABEL, charges, torch.zeros_like(charges))


def _charges(
    rows: PackedTensors,
    logprobs_RT: Tensor,
    reference_logprobs_RT: Tensor,
    beta: float,
    estimator: str,
) -> Tensor:
    logprobs = _numbers("logprobs", logprobs_RT, rows)
    reference = _numbers("reference logprobs", reference_logprobs_RT, rows)
    return -beta * ESTIMATORS[estimator](logprobs, reference)


def _groups(rows: PackedTensors) -> list[list[_Completion]]:
    """Return the samples of each task. The sequences of a multi-sequence sample (`share` below 1)
    are one completion, in the order of the sample table, the order of its turns. The order of the
    rows does not matter.
    """
    labelled = torch.nonzero((rows.labels != IGNORE_LABEL).view(-1)).squeeze(1)
    owners = rows.sample_ids.view(-1)[labelled]
    order = numpy.lexsort((rows.input_pos.view(-1)[labelled].numpy(), owners.numpy()))
    places = labelled[torch.from_numpy(order)].split(
        torch.bincount(owners, minlength=len(rows.samples)).tolist()
    )
    groups: dict[str, list[_Completion]] = {}
    # With the sample's share so far.
    open_ones: dict[tuple[str, int], tuple[_Completion, float]] = {}
    for sample, own in zip(rows.samples, places, strict=True):
        key = (sample.task_id, sample.sample)
        before, share = open_ones.get(key, (None, 0.0))
        # More belongs to another sample of a repeated task.
        if before is not None and share + sample.share < 1 + 1e-6:
            before.places = torch.cat([before.places, own])
            open_ones[key] = (before, share + sample.share)
            continue
        completion = _Completion(own, sample.reward)
        open_ones[key] = (completion, sample.share)
        groups.setdefault(sample.task_id, []).append(completion)
    return list(groups.values())


def _numbers(what: str, tensor_RT: Tensor, rows: PackedTensors) -> Tensor:
    """Return the tensor, flat and in float64. Raises PackError if it is not finite at a label."""
    if tensor_RT.shape != rows.labels.shape:
        raise PackError(
            f"{what} have the shape {list(tensor_RT.shape)}, but the rows {list(rows.labels.shape)}"
        )
    flat = tensor_RT.detach().double().cpu().reshape(-1)
    wrong = ~torch.isfinite(flat) & (rows.labels.reshape(-1) != IGNORE_LABEL)
    if wrong.any():
        row, position = divmod(int(wrong.nonzero()[0]), rows.seq_len)
        raise PackError(
            f"{what}: {int(wrong.sum())} of {rows.num_trained} labels have no finite one, the "
            f"first at row {row}, position {position}; advantages of single tokens need all of them"
        )
    return flat


def _returns(rewards: Tensor, gamma: float) -> Tensor:
    """Return Σ_{s≥t} γ^(s-t)·r_s."""
    later = 0.0
    result = list[float]()
    for reward in reversed(rewards.tolist()):
        later = reward + gamma * later
        result.append(later)
    return torch.tensor(result[::-1], dtype=torch.float64)
