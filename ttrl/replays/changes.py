"""How the rewards of a replay differ from those of its run: means, signal of groups, order within groups, advantages, tasks."""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ttrl.configs.data import AdvantageKind
from ttrl.data.advantages import group_advantages, has_signal
from ttrl.records import TaskResult
from ttrl.rollouts.results import is_unfinished, reason

EQUAL = 1e-9
"""Rewards that differ by less are the same, as in `ttrl.data.advantages`."""


@dataclass
class Changes:
    """Counts and means over the rollouts of one iteration, or of all together. None where there is nothing to average."""

    iteration: int | None
    """None: all of them together."""
    rollouts: int = 0
    compared: int = 0
    """With a reward before and after; this and the next five add up to `rollouts`."""
    newly_failed: int = 0
    """Had a reward; the changed grader failed."""
    newly_graded: int = 0
    """The old grader had failed."""
    still_failed: int = 0
    unfinished: int = 0
    """Cut off by a token budget, so graded by neither."""
    left_out: int = 0
    """Without a task, so without a changed grader."""
    changed: int = 0
    """Of those compared."""
    mean_before: float | None = None
    """Over all rollouts that had a reward."""
    mean_after: float | None = None
    groups: int = 0
    signal_before: int = 0
    """Groups whose rewards differed, so that they taught something."""
    signal_after: int = 0
    signal_appeared: int = 0
    signal_disappeared: int = 0
    pairs_ordered: int = 0
    """Pairs of rollouts of one group to which the old grader gave different rewards; the next three add up to them."""
    pairs_kept: int = 0
    pairs_flipped: int = 0
    pairs_tied: int = 0
    """Equal after."""
    pairs_untied: int = 0
    """Equal before, different after."""
    advantage_correlation: float | None = None
    """Pearson's, over the rollouts compared; None where either has no spread."""
    metrics_before: dict[str, float] = field(default_factory=dict)
    """Each metric's mean over the rollouts that have it."""
    metrics_after: dict[str, float] = field(default_factory=dict)

    @property
    def changed_share(self) -> float | None:
        """Return changed / compared."""
        return self.changed / self.compared if self.compared else None

    @property
    def flipped_share(self) -> float | None:
        """Return pairs_flipped / pairs_ordered."""
        return self.pairs_flipped / self.pairs_ordered if self.pairs_ordered else None


class RewardComparison:
    """Collects groups before and after, and adds them up."""

    def __init__(self, iteration: int | None, method: AdvantageKind) -> None:
        self._changes = Changes(iteration)
        # The divisor of "batch" is common to all groups of an iteration, so what it divides is compared.
        self._method: AdvantageKind = "mean" if method == "batch" else method
        self._rewards: tuple[list[float], list[float]] = ([], [])
        self._advantages: tuple[list[float], list[float]] = ([], [])
        self._metrics: tuple[dict[str, list[float]], dict[str, list[float]]] = (defaultdict(list), defaultdict(list))
        self.failures: Counter[str] = Counter()
        """Why the changed grader failed."""

    def leave_out(self, count: int) -> None:
        """Count rollouts that have no task."""
        self._changes.rollouts += count
        self._changes.left_out += count

    def add(self, before: TaskResult, after: TaskResult) -> None:
        """Add one group: the same samples in the same order, before and after."""
        c = self._changes
        c.groups += 1
        c.rollouts += len(before.samples)
        both = []
        for place, (old, new) in enumerate(zip(before.samples, after.samples, strict=True)):
            if is_unfinished(old):
                c.unfinished += 1
            elif old.reward is not None and new.reward is not None:
                both.append(place)
            else:
                c.still_failed += old.reward is None and new.reward is None
                c.newly_failed += old.reward is not None
                c.newly_graded += new.reward is not None
                if new.reward is None and new.error != old.error:
                    self.failures[reason(new)] += 1
        for side, result in enumerate((before, after)):
            self._rewards[side].extend(result.rewards)
            advantages = iter(group_advantages(result.rewards, self._method))
            of_place = [None if sample.reward is None else next(advantages) for sample in result.samples]
            self._advantages[side].extend(of_place[place] or 0.0 for place in both)
            for sample in result.graded:
                for name, value in sample.metrics.items():
                    self._metrics[side][name].append(value)
        had, has = has_signal(before.rewards), has_signal(after.rewards)
        c.signal_before += had
        c.signal_after += has
        c.signal_appeared += has and not had
        c.signal_disappeared += had and not has
        old_rewards, new_rewards = (np.array([r.samples[place].reward for place in both], float) for r in (before, after))
        c.compared += len(both)
        c.changed += int((np.abs(new_rewards - old_rewards) > EQUAL).sum())
        first, second = _orders(old_rewards), _orders(new_rewards)
        c.pairs_ordered += int((first != 0).sum())
        c.pairs_kept += int((first * second > 0).sum())
        c.pairs_flipped += int((first * second < 0).sum())
        c.pairs_tied += int(((first != 0) & (second == 0)).sum())
        c.pairs_untied += int(((first == 0) & (second != 0)).sum())

    @property
    def changes(self) -> Changes:
        """Return what was added up so far."""
        metrics = [{name: math.fsum(values) / len(values) for name, values in sorted(one.items())} for one in self._metrics]
        means = [math.fsum(values) / len(values) if values else None for values in self._rewards]
        return dataclasses.replace(
            self._changes,
            mean_before=means[0],
            mean_after=means[1],
            advantage_correlation=_correlation(*self._advantages),
            metrics_before=metrics[0],
            metrics_after=metrics[1],
        )


@dataclass
class TaskChange:
    """A task whose rewards changed, over all iterations, and its rollout that changed the most."""

    task_id: str
    question: str
    """The text of the last message."""
    rollouts: int = 0
    changed: int = 0
    total_change: float = 0.0
    """Sum of |after - before|."""
    mean_before: float = 0.0
    mean_after: float = 0.0
    iteration: int = 0
    """Where the rollout that changed most comes from."""
    sample: int = 0
    answer: str = ""
    before: float = 0.0
    after: float = 0.0


class TaskChanges:
    """Collects what changed by task. Only rollouts with a reward before and after count."""

    def __init__(self) -> None:
        self._tasks: dict[str, TaskChange] = {}

    def add(self, iteration: int, before: TaskResult, after: TaskResult) -> None:
        """Add one group: the same samples in the same order, before and after."""
        for old, new in zip(before.samples, after.samples, strict=True):
            if old.reward is None or new.reward is None:
                continue
            task = self._tasks.setdefault(old.task_id, TaskChange(old.task_id, _last_text(old.messages)))
            size = abs(new.reward - old.reward)
            task.mean_before = (task.mean_before * task.rollouts + old.reward) / (task.rollouts + 1)
            task.mean_after = (task.mean_after * task.rollouts + new.reward) / (task.rollouts + 1)
            if size > abs(task.after - task.before) or not task.rollouts:
                task.iteration, task.sample, task.answer = iteration, old.sample, old.text
                task.before, task.after = old.reward, new.reward
            task.rollouts += 1
            task.changed += size > EQUAL
            task.total_change += size

    def largest(self, count: int) -> list[TaskChange]:
        """Return the tasks with the largest sums of |after - before|, without those that did not change."""
        changed = [task for task in self._tasks.values() if task.changed]
        return sorted(changed, key=lambda task: (-round(task.total_change, 9), task.task_id))[:count]

    @property
    def num_changed(self) -> int:
        """Return how many tasks have a rollout whose reward changed."""
        return sum(task.changed > 0 for task in self._tasks.values())


def _orders(rewards: np.ndarray) -> np.ndarray:
    """Return -1, 0 or 1 for each pair of rewards."""
    differences = (rewards[:, None] - rewards[None, :])[np.triu_indices(len(rewards), 1)]
    return np.where(np.abs(differences) > EQUAL, np.sign(differences), 0.0)


def _correlation(before: Sequence[float], after: Sequence[float]) -> float | None:
    if len(before) < 2:
        return None
    with np.errstate(all="ignore"):
        found = float(np.corrcoef(before, after)[0, 1])
    return found if math.isfinite(found) and np.ptp(before) > 0 and np.ptp(after) > 0 else None


def _last_text(messages: Iterable[Any]) -> str:
    """Return the text of the last message that has any: the question that was asked."""
    for message in reversed(list(messages)):
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
        if any(isinstance(text, str) and text for text in texts):
            return " ".join(text for text in texts if isinstance(text, str))
    return ""
