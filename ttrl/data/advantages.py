"""From the rewards of a group to advantages, and which groups have anything to teach."""

import math
from collections.abc import Sequence
from typing import Literal

from ttrl.errors import ConfigError
from ttrl.records import TaskResult

_EQUAL = 1e-9  # rewards that differ by less are the same


def has_signal(rewards: Sequence[float]) -> bool:
    """True where the rewards of a group differ: advantages within a group are all zero otherwise."""
    return len(rewards) >= 2 and max(rewards) - min(rewards) > _EQUAL


def group_advantages(
    rewards: Sequence[float],
    method: Literal["std", "mean"] = "std",
    std_floor: float = 1e-6,
    clip: float | None = None,
) -> list[float]:
    """Advantages of the samples of one group, in order.

    "std" is (r - mean) / max(std, std_floor) with the population's standard deviation (GRPO, arXiv 2402.03300); "mean" is
    r - mean alone (Dr. GRPO, arXiv 2503.20783). With `clip`, they are cut to [-clip, clip].

    Raises ConfigError for another method.
    """
    if method not in ("std", "mean"):
        raise ConfigError("advantages", [f"method is {method!r}; choose 'std' or 'mean'"])
    if not rewards:
        return []
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not has_signal(rewards):
        return [0.0] * len(rewards)  # rounding in the mean must not be blown up by a tiny standard deviation
    if method == "std":
        std = math.sqrt(math.fsum(value * value for value in centred) / len(centred))
        centred = [value / max(std, std_floor) for value in centred]
    return centred if clip is None else [max(-clip, min(clip, value)) for value in centred]


def drop_groups_without_signal(results: Sequence[TaskResult]) -> tuple[list[TaskResult], dict[str, int]]:
    """The groups whose rewards differ, and how many were left out for which reason.

    "all_right" and "all_wrong" are groups whose samples all have the highest or the lowest reward that was seen in any group;
    where all groups have the same one, it is wrong when it is not positive. "other_equal" is the rest of the groups with one
    reward, "too_few" those with fewer than two graded samples.
    """
    everything = [reward for result in results for reward in result.rewards]
    highest, lowest = (max(everything), min(everything)) if everything else (0.0, 0.0)
    counts = {"all_right": 0, "all_wrong": 0, "other_equal": 0, "too_few": 0}
    kept = []
    for result in results:
        rewards = result.rewards
        if len(rewards) < 2:
            counts["too_few"] += 1
        elif has_signal(rewards):
            kept.append(result)
        elif highest - lowest > _EQUAL and rewards[0] >= highest - _EQUAL:
            counts["all_right"] += 1
        elif rewards[0] <= lowest + _EQUAL and (highest - lowest > _EQUAL or rewards[0] <= 0):
            counts["all_wrong"] += 1
        else:
            counts["other_equal"] += 1
    return kept, counts
