"""Dynamic sampling (DAPO, arXiv 2503.14476): further tasks of an iteration, until enough of its groups have a signal.

The tasks stay one stream: an iteration begins where the one before stopped (`tasks_taken` in its rollouts marker), further tasks
included, so that none is skipped or begun twice. They are taken in the order of the stream, and how many there are follows from
the rewards of the tasks before them alone, which are kept as they come: an iteration that was interrupted goes on as it would
have. Unlike DAPO, it throws no group with signal away where there are more than were asked for.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from ttrl.configs.run import TrainConfig
from ttrl.data.advantages import has_signal
from ttrl.loop.carried import is_open
from ttrl.records import TaskResult


def further_tasks(
    groups: Sequence[TaskResult], config: TrainConfig, extra: int, new_tokens: int, tokenizer: Callable[[], Any]
) -> int:
    """How many tasks more to sample now; 0 where there are enough groups with signal, or no more tasks may be begun.

    groups: all of the iteration so far. extra: how many of the tasks were further ones. new_tokens: completion tokens sampled in
    this iteration, for `tokens_per_iteration`; while a group is unfinished, that budget is spent.

    It is the number that is expected to bring what is missing, by the share of groups with signal so far; at most as many as were
    sampled before, since a small share is known badly.
    """
    wanted, budget = config.dynamic_sampling, config.tokens_per_iteration
    if wanted is None or any(map(is_open, groups)) or (budget is not None and new_tokens >= budget):
        return 0
    advantages = config.advantage_config()
    needed = tokenizer() if advantages.surprise_until is not None else None
    kept = sum(has_signal(advantages.shaped(group, needed)[0]) for group in groups)
    if kept >= wanted:
        return 0
    share = (kept + 1) / (len(groups) + 2)  # Laplace's rule: neither 0 nor 1 is ever certain
    return max(0, min(math.ceil((wanted - kept) / share), len(groups), config.extra_task_limit - extra))
