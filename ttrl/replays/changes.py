"""How the rewards of a replay differ from those of its run: means, signal of groups, order within groups, advantages, tasks."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ttrl.configs.data import AdvantageKind
from ttrl.data.advantages import group_advantages, has_signal
from ttrl.records import Sample, TaskResult
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
    """With a reward before and after; the next five, and these, add up to `rollouts`."""
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

    def to_json(self) -> dict[str, Any]:
        """A dictionary that `json` can write as it is."""
        return dataclasses.asdict(self)

    @property
    def changed_share(self) -> float | None:
        """changed / compared."""
        return self.changed / self.compared if self.compared else None

    @property
    def flipped_share(self) -> float | None:
        """pairs_flipped / pairs_ordered."""
        return self.pairs_flipped / self.pairs_ordered if self.pairs_ordered else None


class Comparison:
    """Collects groups and adds them up."""

    def __init__(self, iteration: int | None, method: AdvantageKind) -> None:
        # The divisor of "batch" is common to all groups of an iteration, so what it divides is compared.
        self._changes, self._method = Changes(iteration), "mean" if method == "batch" else method
        self._rewards: tuple[list[float], list[float]] = ([], [])
        self._advantages: tuple[list[float], list[float]] = ([], [])
        self._metrics: tuple[dict[str, list[float]], dict[str, list[float]]] = ({}, {})
        self.failures: Counter[str] = Counter()
        """Why the changed grader failed."""

    def leave_out(self, count: int) -> None:
        """Rollouts that have no task."""
        self._changes.rollouts += count
        self._changes.left_out += count

    def add(self, before: TaskResult, after: TaskResult) -> None:
        """One group, the same samples in the same order in both."""
        c = self._changes
        assert len(before.samples) == len(after.samples)
        c.rollouts += len(before.samples)
        for side, samples in enumerate((before.graded, after.graded)):
            self._rewards[side].extend(before_or_after.reward or 0.0 for before_or_after in samples)
            for sample in samples:
                for name, value in sample.metrics.items():
                    self._metrics[side].setdefault(name, []).append(value)
        pairs = list(zip(before.samples, after.samples, strict=True))
        for old, new in pairs:
            if is_unfinished(old):
                c.unfinished += 1
            elif old.reward is None or new.reward is None:
                c.still_failed += old.reward is None and new.reward is None
                c.newly_failed += old.reward is not None
                c.newly_graded += new.reward is not None
                if new.reward is None and new.error != old.error:
                    self.failures[reason(new)] += 1
        self._compare(pairs)
        signal = has_signal(before.rewards), has_signal(after.rewards)
        c.groups += 1
        c.signal_before += signal[0]
        c.signal_after += signal[1]
        c.signal_appeared += signal[1] and not signal[0]
        c.signal_disappeared += signal[0] and not signal[1]
        advantages = [dict(zip(_places(r), group_advantages(r.rewards, self._method), strict=True)) for r in (before, after)]
        for place in sorted(advantages[0].keys() & advantages[1].keys()):
            for side in (0, 1):
                self._advantages[side].append(advantages[side][place])

    def _compare(self, pairs: Sequence[tuple[Sample, Sample]]) -> None:
        c = self._changes
        both = [(old.reward, new.reward) for old, new in pairs if old.reward is not None and new.reward is not None]
        c.compared += len(both)
        c.changed += sum(abs(new - old) > EQUAL for old, new in both)
        if len(both) < 2:
            return
        old, new = np.array(both).T
        upper = np.triu_indices(len(both), 1)
        first, second = (_sign(rewards[:, None] - rewards[None, :])[upper] for rewards in (old, new))
        ordered = first != 0
        c.pairs_ordered += int(ordered.sum())
        c.pairs_kept += int((ordered & (second == first)).sum())
        c.pairs_flipped += int((ordered & (second == -first)).sum())
        c.pairs_tied += int((ordered & (second == 0)).sum())
        c.pairs_untied += int((~ordered & (second != 0)).sum())

    @property
    def changes(self) -> Changes:
        """What was added up so far."""
        return dataclasses.replace(
            self._changes,
            mean_before=_mean(self._rewards[0]),
            mean_after=_mean(self._rewards[1]),
            advantage_correlation=_correlation(*self._advantages),
            metrics_before={name: math.fsum(values) / len(values) for name, values in sorted(self._metrics[0].items())},
            metrics_after={name: math.fsum(values) / len(values) for name, values in sorted(self._metrics[1].items())},
        )


@dataclass
class TaskChange:
    """A task whose rewards changed, over all iterations, and the rollout of it that changed the most."""

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
        """One group, the same samples in the same order in both."""
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
        """By the sum of |after - before|; tasks without a change are left out."""
        changed = [task for task in self._tasks.values() if task.changed]
        return sorted(changed, key=lambda task: (-round(task.total_change, 9), task.task_id))[:count]

    @property
    def num_changed(self) -> int:
        """Tasks with a rollout whose reward changed."""
        return sum(task.changed > 0 for task in self._tasks.values())


def _places(result: TaskResult) -> list[int]:
    """Of the graded samples within the group."""
    return [place for place, sample in enumerate(result.samples) if sample.reward is not None]


def _sign(differences: np.ndarray) -> np.ndarray:
    return np.sign(np.where(np.abs(differences) > EQUAL, differences, 0.0)).astype(int)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _correlation(before: Sequence[float], after: Sequence[float]) -> float | None:
    if len(before) < 2:
        return None
    x, y = np.array(before), np.array(after)
    x, y = x - x.mean(), y - y.mean()
    spread = math.sqrt(float(x @ x) * float(y @ y))
    return max(-1.0, min(1.0, float(x @ y) / spread)) if spread > 0 else None


def _last_text(messages: Iterable[Any]) -> str:
    """Of the last message that has any, as the question that was asked."""
    for message in reversed(list(messages)):
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
        if any(isinstance(text, str) and text for text in texts):
            return " ".join(text for text in texts if isinstance(text, str))
    return ""
