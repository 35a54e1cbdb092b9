"""Which tasks an iteration samples: the next ones of a stream without end, which has each epoch in an order of its own."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from ttrl.configs.run import TrainConfig
from ttrl.data.advantages import groups_with_signal
from ttrl.loop.carried import carried_groups, is_open, oldest_version, ready_to_continue, task_key
from ttrl.records import TaskResult
from ttrl.run_folder.folder import RunFolder
from ttrl.tasks.task import Task


def further_tasks(
    groups: Sequence[TaskResult], config: TrainConfig, extra: int, new_tokens: int, tokenizer: Callable[[], Any]
) -> int:
    """Return how many more tasks to sample now; 0 where there are enough groups with signal, or no more tasks may be begun.

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
    kept = groups_with_signal(groups, advantages, needed)
    if kept >= wanted:
        return 0
    share = (kept + 1) / (len(groups) + 2)  # Laplace's rule: neither 0 nor 1 is ever certain
    return max(0, min(math.ceil((wanted - kept) / share), len(groups), config.extra_task_limit - extra))


class TaskStream:
    """The stream of a run. Where an iteration begins in it follows from the markers of the ones before."""

    def __init__(self, config: TrainConfig, folder: RunFolder, tasks: list[Task]) -> None:
        self._config, self._folder, self._tasks = config, folder, tasks

    def tasks_from(self, first: int, count: int) -> list[Task]:
        """Return some of the stream."""
        total = len(self._tasks)
        orders: dict[int, list[int]] = {}
        chosen = []
        for place in range(first, first + count):
            epoch, position = divmod(place, total)
            if epoch not in orders:
                orders[epoch] = list(range(total))
                random.Random(f"{self._config.seed}/{epoch}").shuffle(orders[epoch])
            chosen.append(self._tasks[orders[epoch][position]])
        return chosen

    def taken_before(self, number: int) -> int:
        """Return how many tasks earlier iterations took, by the marker of the last of them: `tasks_per_iteration` may have
        been another one then. Equal parts, where it does not tell."""
        marker = self._folder.iteration(number - 1).marker("rollouts") or {}
        taken: int = marker.get("tasks_taken", (number - 1) * self._config.tasks_per_iteration)
        return taken

    def tasks_of(self, number: int) -> list[Task]:
        """Return the tasks with which an iteration without a token budget begins."""
        return self.tasks_from(self.taken_before(number), self._config.tasks_per_iteration)

    def continued(self, number: int, version: int) -> tuple[list[TaskResult], list[Task], dict[str, Any]]:
        """Return, for a token budget, the groups to continue, all tasks of the iteration (theirs first), facts for the marker.

        New tasks follow in the stream on those that were taken so far; the markers say how many that are.
        """
        previous = self._folder.iteration(number - 1)
        taken = self.taken_before(number)
        known = {task_key(task.id, task.messages): task for task in self._tasks}
        groups, limit = carried_groups(previous), self._config.max_staleness
        carried = [
            ready_to_continue(group, version)
            for group in groups
            if task_key(group.task_id, group.messages) in known  # the person may have allowed other tasks since
            and (limit is None or version - oldest_version(group, version) <= limit)
        ]
        new = self.tasks_from(taken, max(0, self._config.tasks_per_iteration - len(carried)))
        tasks = [known[task_key(group.task_id, group.messages)] for group in carried] + new
        return carried, tasks, {"tasks_taken": taken + len(new), "dropped_groups": len(groups) - len(carried)}
