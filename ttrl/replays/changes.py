"""Compare a replay's rewards with its run's: means, signal of groups, order within groups,
advantages, tasks.
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttrl.configs.data import AdvantageKind
from ttrl.data.advantages import group_advantages, has_signal
from ttrl.messages import text_of
from ttrl.records import TaskResult
from ttrl.rollouts.results import is_unfinished, reason

EQUAL = 1e-9
"""Smaller differences of rewards count as equal, as in `ttrl.data.advantages`."""


@dataclass
class Changes:
    """Counts and means over the rollouts of one iteration, or of all. None without values to
    average.
    """

    iteration: int | None
    """None: all iterations."""
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
    """Among those compared."""
    mean_before: float | None = None
    """Over all rollouts with an old reward."""
    mean_after: float | None = None
    groups: int = 0
    signal_before: int = 0
    """Groups with different rewards, and so with something to learn."""
    signal_after: int = 0
    signal_appeared: int = 0
    signal_disappeared: int = 0
    pairs_ordered: int = 0
    """Pairs of rollouts of one group with different old rewards; the next three add up to them."""
    pairs_kept: int = 0
    pairs_flipped: int = 0
    pairs_tied: int = 0
    """Equal now."""
    pairs_untied: int = 0
    """Equal before, different now."""
    advantage_correlation: float | None = None
    """Pearson's, over the rollouts compared; None if either side has no spread."""
    metrics_before: dict[str, float] = field(default_factory=dict)
    """Each metric's mean over its rollouts."""
    metrics_after: dict[str, float] = field(default_factory=dict)

    @property
    def changed_share(self) -> float | None:
        if self.compared:
            return self.changed / self.compared
        return None

    @property
    def flipped_share(self) -> float | None:
        if self.pairs_ordered:
            return self.pairs_flipped / self.pairs_ordered
        return None


class RewardComparison:
    """Collect groups before and after, and add them up."""

    def __init__(self, iteration: int | None, method: AdvantageKind) -> None:
        self._counts = Changes(iteration)
        # All groups of an iteration share the divisor of "batch", so compare the values before the
        # division.
        self._method: AdvantageKind = "mean" if method == "batch" else method
        self._rewards: tuple[list[float], list[float]] = ([], [])
        self._advantages: tuple[list[float], list[float]] = ([], [])
        self._metrics: tuple[dict[str, list[float]], dict[str, list[float]]] = (
            defaultdict(list),
            defaultdict(list),
        )

    def leave_out(self, count: int) -> None:
        """Count rollouts without a task."""
        self._counts.rollouts += count
        self._counts.left_out += count

    def add(self, before: TaskResult, after: TaskResult) -> None:
        """Add one group: the same samples in the same order, before and after."""
        c = self._counts
        old = _rewards(before)
        new = _rewards(after)
        had = ~np.isnan(old)
        has = ~np.isnan(new)
        both = had & has
        unfinished = sum(map(is_unfinished, before.samples))
        c.groups += 1
        c.rollouts += len(old)
        c.compared += int(both.sum())
        c.newly_failed += int((had & ~has).sum())
        c.newly_graded += int((~had & has).sum())
        c.unfinished += unfinished
        c.still_failed += int((~had & ~has).sum()) - unfinished
        c.changed += int((np.abs(new - old)[both] > EQUAL).sum())
        for side, (result, graded) in enumerate(((before, had), (after, has))):
            self._rewards[side].extend(result.rewards)
            advantages = np.zeros(len(old))
            advantages[graded] = group_advantages(result.rewards, self._method)
            self._advantages[side].extend(advantages[both])
            for sample in result.graded:
                for name, value in sample.scores.items():
                    self._metrics[side][name].append(value)
        taught = has_signal(before.rewards)
        teaches = has_signal(after.rewards)
        c.signal_before += taught
        c.signal_after += teaches
        c.signal_appeared += teaches and not taught
        c.signal_disappeared += taught and not teaches
        first = _orders(old[both])
        second = _orders(new[both])
        c.pairs_ordered += int((first != 0).sum())
        c.pairs_kept += int((first * second > 0).sum())
        c.pairs_flipped += int((first * second < 0).sum())
        c.pairs_tied += int(((first != 0) & (second == 0)).sum())
        c.pairs_untied += int(((first == 0) & (second != 0)).sum())

    @property
    def changes(self) -> Changes:
        """Return the sums so far."""
        metrics = [
            {name: math.fsum(values) / len(values) for name, values in sorted(one.items())}
            for one in self._metrics
        ]
        means = [math.fsum(values) / len(values) if values else None for values in self._rewards]
        return dataclasses.replace(
            self._counts,
            mean_before=means[0],
            mean_after=means[1],
            advantage_correlation=_correlation(*self._advantages),
            metrics_before=metrics[0],
            metrics_after=metrics[1],
        )


@dataclass
class TaskChange:
    """A task with changed rewards, over all iterations, and its most changed rollout. Only rollouts
    with a reward before and after count."""

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
    """Iteration of the most changed rollout."""
    sample: int = 0
    answer: str = ""
    before: float = 0.0
    after: float = 0.0


class ReplayComparison:
    """Collect all differences between a run and its replay: by iteration, in total, by task."""

    def __init__(self, method: AdvantageKind) -> None:
        """method: the run's way to turn rewards into advantages."""
        self._method = method
        self._total = RewardComparison(None, method)
        self._tasks: dict[str, TaskChange] = {}
        self.iterations: list[Changes] = []
        self.failures: Counter[str] = Counter()
        """Failures of the changed grader: how often, by reason."""
        self.tool_calls = 0
        """Rollouts ending in tool calls; a run does not keep the calls."""

    def add(self, iteration: int, groups: Iterable[tuple[TaskResult, TaskResult | None]]) -> None:
        """Add an iteration's groups, before and after; None after: it had no task."""
        one = RewardComparison(iteration, self._method)
        for before, after in groups:
            self.tool_calls += sum(
                sample.finish_reason == "tool_calls" and not sample.turns
                for sample in before.samples
            )
            for comparison in (one, self._total):
                if after is None:
                    comparison.leave_out(len(before.samples))
                else:
                    comparison.add(before, after)
            if after is not None:
                self._add_samples(iteration, before, after)
        self.iterations.append(one.changes)

    def _add_samples(self, iteration: int, before: TaskResult, after: TaskResult) -> None:
        for old, new in zip(before.samples, after.samples, strict=True):
            if new.reward is None and new.error is not None and new.error != old.error:
                self.failures[reason(new)] += 1
            if old.reward is None or new.reward is None:
                continue
            task = self._tasks.setdefault(
                old.task_id, TaskChange(old.task_id, _last_text(old.messages))
            )
            size = abs(new.reward - old.reward)
            task.mean_before = (task.mean_before * task.rollouts + old.reward) / (task.rollouts + 1)
            task.mean_after = (task.mean_after * task.rollouts + new.reward) / (task.rollouts + 1)
            if size > abs(task.after - task.before) or not task.rollouts:
                task.iteration = iteration
                task.sample = old.sample
                task.answer = old.text
                task.before = old.reward
                task.after = new.reward
            task.rollouts += 1
            task.changed += size > EQUAL
            task.total_change += size

    @property
    def total(self) -> Changes:
        """Return the sums over all iterations."""
        return self._total.changes

    @property
    def tasks(self) -> list[TaskChange]:
        """Return the tasks with changed rewards, largest sums of |after - before| first."""
        changed = [task for task in self._tasks.values() if task.changed]
        return sorted(changed, key=lambda task: (-round(task.total_change, 9), task.task_id))


def _rewards(result: TaskResult) -> NDArray[np.float64]:
    """Return a reward for each sample, NaN if missing."""
    # NumPy writes None as NaN.
    return np.array([sample.reward for sample in result.samples], dtype=np.float64)


def _orders(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return -1, 0 or 1 for each pair of rewards."""
    differences = (rewards[:, None] - rewards[None, :])[np.triu_indices(len(rewards), 1)]
    return np.where(np.abs(differences) > EQUAL, np.sign(differences), 0.0)


def _correlation(before: Sequence[float], after: Sequence[float]) -> float | None:
    if len(before) < 2 or not np.ptp(before) > 0 or not np.ptp(after) > 0:
        return None
    with np.errstate(all="ignore"):
        found = float(np.corrcoef(before, after)[0, 1])
    if math.isfinite(found):
        return found
    return None


def _last_text(messages: Iterable[Any]) -> str:
    """Return the text of the last message with text: the question."""
    for message in reversed(list(messages)):
        text = text_of(message.get("content"))
        if text:
            return text
    return ""
