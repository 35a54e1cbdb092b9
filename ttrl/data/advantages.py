"""Compute advantages from the rewards of groups, and find the groups with a signal.

With r the rewards of a group of n samples, m their mean and σ their standard deviation (of the
population):

std             (r - m) / max(σ, floor)          GRPO, arXiv 2402.03300
mean            r - m                            Dr. GRPO, arXiv 2503.20783
leave_one_out   r - mean of the others           RLOO, arXiv 2402.14740; equals n/(n - 1)·(r - m)
batch           (r - m) / max(σ_batch, floor)    REINFORCE++ with baseline, arXiv 2501.03262;
                                                 σ_batch: of r - m over all groups

and then cut to [-clip, clip], if asked for. Rewards may be shaped before (`ttrl.data.shaping`).
Advantages of single tokens: `ttrl.data.token_advantages`.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ttrl.configs.data import AdvantageConfig, AdvantageKind
from ttrl.data.shaping import shaped_rewards
from ttrl.errors import ConfigError, UserError
from ttrl.facts import AdvantageFigures, Groups
from ttrl.records import Sample, TaskResult
from ttrl.text import present

logger = logging.getLogger(__name__)


_EQUAL = 1e-9  # rewards closer than this are equal


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """The trained groups of one batch, and their advantages."""

    kept: list[TaskResult]
    """Groups with signal."""
    values: list[list[float]]
    """One advantage per graded sample of each kept group."""
    groups: Groups
    figures: AdvantageFigures


def has_signal(rewards: Sequence[float]) -> bool:
    """Tell whether the rewards of a group differ: otherwise all its advantages are zero."""
    return len(rewards) >= 2 and max(rewards) - min(rewards) > _EQUAL


def group_advantages(
    rewards: Sequence[float], method: AdvantageKind = "std", std_floor: float = 1e-6
) -> list[float]:
    """Return the advantages of one group's samples, in order. Raises ConfigError for a method
    unknown or in need of more than one group ("batch": `batch_advantages`), UserError for a
    non-finite reward.
    """
    if method not in ("std", "mean", "leave_one_out"):
        if method == "batch":
            more = "; 'batch' needs all groups at once (batch_advantages)"
        else:
            more = ""
        raise ConfigError(
            "advantages", [f"method is {method!r}; choose 'std', 'mean' or 'leave_one_out'{more}"]
        )
    centred = _centred(rewards)
    if method == "std":
        std = _std(centred)
        centred = [value / max(std, std_floor) for value in centred]
    elif method == "leave_one_out" and len(centred) > 1:
        centred = [value * (len(centred) / (len(centred) - 1)) for value in centred]
    return centred


def batch_advantages(
    groups: Sequence[Sequence[float]], std_floor: float = 1e-6
) -> list[list[float]]:
    """Return the advantages of every group: r - group mean, divided by its standard deviation over
    all samples (REINFORCE++ with baseline, arXiv 2501.03262). A group without signal takes part in
    it, with zeros. Raises UserError for a non-finite reward."""
    centred = [_centred(rewards) for rewards in groups]
    scale = max(_std([value for group in centred for value in group]), std_floor)
    return [[value / scale for value in group] for group in centred]


def advantages_of(
    results: Sequence[TaskResult],
    config: AdvantageConfig | None = None,
    tokenizer: Any = None,
    *,
    keep_equal: bool = False,
) -> Advantages:
    """Shape the rewards of a batch, leave out groups without signal, and compute the advantages of
    the others.

    `keep_equal`: groups of equal rewards stay, with advantages of 0, for later signals: a value
    head, rewards of single tokens. They still count as groups without signal.

    The shaped rewards decide whether a group has signal: equal answers with different surprise have
    some. Failed samples are left out. `tokenizer`: the model's, needed with `surprise_until`. Warns
    of standard deviations below the floor.

    Raises UserError, naming the sample, for a non-finite reward.

    >>> question = {"role": "user", "content": "What is 2 + 2?"}
    >>> samples = [
    ...     Sample(task_id="sums/1", sample=number, messages=[question], reward=number)
    ...     for number in range(2)
    ... ]
    >>> result = TaskResult(task_id="sums/1", messages=[question], samples=samples)
    >>> advantages = advantages_of([result], AdvantageConfig(kind="mean"))
    >>> advantages.values
    [[-0.5, 0.5]]
    """
    config = config or AdvantageConfig()
    pairs = [shaped_rewards(result, config, tokenizer) for result in results]
    compared = [rewards for rewards, _ in pairs]
    places, counts = _with_signal(results, compared)
    without = len(results) - len(places)
    if keep_equal:
        places = [place for place, result in enumerate(results) if len(result.rewards) > 1]
    kept = [results[place] for place in places]
    rewards = [compared[place] for place in places]
    if config.kind == "batch":
        uncut = batch_advantages(rewards, config.std_floor)
    else:
        uncut = [group_advantages(group, config.kind, config.std_floor) for group in rewards]
    cut = [_cut(group, config.clip) for group in uncut]
    low = _count_low_std([group for group in rewards if has_signal(group)], config)
    if low:
        logger.warning(
            "in %d of %d groups with a signal, the rewards' standard deviation is below the floor "
            "of %g, so their advantages are smaller than those of the others",
            *(low, len(kept), config.std_floor),
        )
    groups = Groups(
        total=len(results),
        kept=len(kept),
        **counts,
        no_signal=without,
        no_signal_share=without / len(results) if results else 0.0,
        low_std=low,
    )
    flat = [value for group in cut for value in group]
    clipped = sum(
        before != after
        for before, after in zip((value for group in uncut for value in group), flat, strict=True)
    )
    figures = AdvantageFigures(
        clipped=clipped,
        mean_abs=math.fsum(map(abs, flat)) / len(flat) if flat else 0.0,
        lowest=min(flat, default=None),
        highest=max(flat, default=None),
        shaped_reward=_mean_reward(pairs, config),
    )
    if config.surprise_bonus:
        surprises = [value for _, group in pairs for value in group]
        known = present(surprises)
        figures = figures.replace(
            surprise=math.fsum(known) / len(known) if known else None,
            surprise_unknown=len(surprises) - len(known),
        )
    return Advantages(kept=kept, values=cut, groups=groups, figures=figures)


def groups_with_signal(
    results: Sequence[TaskResult], config: AdvantageConfig, tokenizer: Any = None
) -> int:
    """Count the groups with advantages other than 0 in `advantages_of`."""
    return len(
        _with_signal(results, [shaped_rewards(result, config, tokenizer)[0] for result in results])[
            0
        ]
    )


def _with_signal(
    results: Sequence[TaskResult], shaped: Sequence[Sequence[float]]
) -> tuple[list[int], dict[str, int]]:
    """Return the places of the groups with different shaped rewards, and counts of the others by
    reason.

    "all_right" and "all_wrong" are groups with all samples, or none, exact by their grader.
    Without such a metric, they are those with only the highest or only the lowest reward of the
    batch; if all groups have the same one, it is wrong unless positive. "other_equal" is the rest
    of the groups with one reward, "too_few" those with fewer than two graded samples. The graders'
    rewards decide the reason.
    """
    everything = [reward for result in results for reward in result.rewards]
    highest, lowest = (max(everything), min(everything)) if everything else (0.0, 0.0)
    counts = {"all_right": 0, "all_wrong": 0, "other_equal": 0, "too_few": 0}
    places = []
    for place, (result, compared) in enumerate(zip(results, shaped, strict=True)):
        rewards = result.rewards
        exact = {_exact(sample) for sample in result.graded}
        if len(rewards) < 2:
            counts["too_few"] += 1
        elif has_signal(compared):
            places.append(place)
        elif has_signal(rewards):
            counts["other_equal"] += 1  # by their shaping only
        elif exact in ({0.0}, {1.0}):
            counts["all_right" if exact == {1.0} else "all_wrong"] += 1
        elif highest - lowest > _EQUAL and rewards[0] >= highest - _EQUAL:
            counts["all_right"] += 1
        elif rewards[0] <= lowest + _EQUAL and (highest - lowest > _EQUAL or rewards[0] <= 0):
            counts["all_wrong"] += 1
        else:
            counts["other_equal"] += 1
    return places, counts


def _exact(sample: Sample) -> float | None:
    """Return the metric "exact", or that of a combined grader's only part with one: "NAME/exact".
    None if there is none, or several.
    """
    if "exact" in sample.metrics:
        return sample.metrics["exact"]
    of_parts = [value for name, value in sample.metrics.items() if name.endswith("/exact")]
    if len(of_parts) == 1:
        return of_parts[0]
    return None


def _centred(rewards: Sequence[float]) -> list[float]:
    for number, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise UserError(
                f"reward {number} of a group is {reward}; rewards must be finite numbers"
            )
    if not has_signal(rewards):
        # Rounding in the mean must not be blown up by a tiny standard deviation.
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _std(centred: Sequence[float]) -> float:
    if centred:
        return math.sqrt(math.fsum(value * value for value in centred) / len(centred))
    return 0.0


def _cut(values: list[float], clip: float | None) -> list[float]:
    if clip is None:
        return values
    return [max(-clip, min(clip, value)) for value in values]


def _count_low_std(rewards: Sequence[Sequence[float]], config: AdvantageConfig) -> int:
    if config.kind == "std":
        return sum(_std(_centred(group)) < config.std_floor for group in rewards)
    if (
        config.kind == "batch"
        and _std([value for group in rewards for value in _centred(group)]) < config.std_floor
    ):
        return len(rewards)
    return 0  # no other divides by it


def _mean_reward(
    pairs: Sequence[tuple[list[float], list[float | None]]], config: AdvantageConfig
) -> float | None:
    """Return the mean of shaped rewards; None without shaping."""
    rewards = [reward for group, _ in pairs for reward in group]
    if rewards and (config.reward_power != 1.0 or config.surprise_bonus):
        return math.fsum(rewards) / len(rewards)
    return None
