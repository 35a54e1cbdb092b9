"""Shape a grader's rewards for advantages: powers, and a bonus for surprising right answers.

power      r ↦ sign(r)·|r|^p
surprise   r ↦ (1 - b)·r + b·r·s,  s = mean of -logp over the completion's tokens up to the last
                                   answer, in nats per token

In this order: the power's result is the `r` of the bonus. Rollouts keep the grader's reward;
nothing here changes a sample.
"""

import bisect
import math
from collections.abc import Sequence
from typing import Any

from ttrl.configs.data import AdvantageConfig
from ttrl.errors import UserError
from ttrl.records import LARGEST_REWARD, Sample, TaskResult


def reward_power(reward: float, power: float) -> float:
    """Return sign(r)·|r|^power, power > 0.

    Above 1 it favours nearly perfect answers (a puzzle's accuracy of 0.9 counts 0.53 with power 6),
    below 1 any progress. -1, 0 and 1 stay unchanged, the order of rewards stays, and a penalty
    stays a penalty: an even power does not make it a reward.

    Raises UserError if the result is larger than any float.
    """
    try:
        return math.copysign(abs(reward) ** power, reward)
    except OverflowError as error:
        raise UserError(
            f"reward {reward} to the power {power} is larger than any float; scale the rewards down"
        ) from error


def surprise(logprobs: Sequence[float], until: int | None = None) -> float | None:
    """Return the mean of -logp [nats per token] over the first `until` tokens (None: all), NaN left
    out; None if none is known."""
    known = [logprob for logprob in logprobs[:until] if math.isfinite(logprob)]
    if known:
        return -math.fsum(known) / len(known)
    return None


def with_surprise(reward: float, surprised: float | None, bonus: float) -> float:
    """Return (1 - bonus)·reward + bonus·reward·surprised, bonus in [0, 1]; unknown surprises count
    as 0. Wrong answers (reward 0) stay at 0. Meant for accuracies: a negative reward gets worse the
    more surprising it was.
    """
    return (1.0 - bonus) * reward + bonus * reward * (surprised or 0.0)


def answer_end(sample: Sample, metric: str | None, tokenizer: Any) -> int | None:
    """Count the completion tokens up to the end of the last answer in the text; None for all of
    them.

    `metric` names a grader's metric for the end of its last answer: the number of characters of the
    message's content up to there (of a regular expression's match, `match.end()`). All tokens count
    if `metric` is None, if the grader gave no such metric, and if the decoded ids do not contain
    the content. Text before the content in the ids (reasoning taken out by the server, earlier
    turns) counts as before the answer.
    """
    if metric is None or metric not in sample.metrics or not sample.token_ids:
        return None
    if sample.turns:
        earlier = len(sample.token_ids) - sample.turns[-1].num_tokens
    else:
        earlier = 0
    ids = sample.token_ids[earlier:]

    def length(count: int) -> int:
        return len(tokenizer.decode(ids[:count], skip_special_tokens=True))

    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    begin = 0
    if not decoded.startswith(sample.text):
        found = decoded.rfind(sample.text.strip())
        if found < 0:
            return None
        begin = found - (len(sample.text) - len(sample.text.lstrip()))
    characters = max(0, min(int(sample.metrics[metric]), len(sample.text)))
    return earlier + (
        bisect.bisect_left(range(len(ids)), begin + characters, key=length) if characters else 0
    )


def shaped_rewards(
    result: TaskResult, config: AdvantageConfig, tokenizer: Any = None
) -> tuple[list[float], list[float | None]]:
    """Return the shaped rewards of the graded samples, and their surprises (none without a
    `surprise_bonus`). `surprise_until` needs the model's `tokenizer`. Raises UserError, naming the
    sample, for a non-finite reward.
    """
    power = config.reward_power
    bonus = config.surprise_bonus
    until = config.surprise_until
    if until is not None and bonus and tokenizer is None:
        raise UserError(
            f"the end of the last answer ({until!r}) is a position in characters; give a tokenizer "
            "to find its tokens"
        )
    rewards: list[float] = []
    surprises: list[float | None] = []
    for sample in result.graded:
        assert sample.reward is not None
        reward = float(sample.reward)
        if not abs(reward) <= LARGEST_REWARD:  # NaN too
            most = f"{LARGEST_REWARD:g}"
            raise UserError(f"{sample.where}: its reward is {reward}; the limit is ±{most}")
        if power != 1.0:
            reward = reward_power(reward, power)
        if bonus:
            end = answer_end(sample, until, tokenizer)
            surprises.append(surprise(sample.logprobs or (), end))
            reward = with_surprise(reward, surprises[-1], bonus)
        rewards.append(reward)
    return rewards, surprises
