"""Hold an evaluation's results: means with intervals for each set of tasks, as numbers, JSON or a
terminal table.
"""

import dataclasses
import hashlib
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ttrl.errors import UserError
from ttrl.facts import parse
from ttrl.intervals import Estimate, estimate_mean, pass_at_k, pooled
from ttrl.messages import JsonObject
from ttrl.records import Sample
from ttrl.rollouts.results import TaskResults
from ttrl.system.files import write_text
from ttrl.system.frames import data_frame
from ttrl.system.html_table import html_table
from ttrl.tasks.task import Task
from ttrl.text import counted, percent, present, si

if TYPE_CHECKING:
    from ttrl.system.frames import DataFrame

FORMAT = 1
"""Version of the JSON; incremented if a reader would misread older files."""


@dataclass(frozen=True)
class TaskScores:
    """A task of an evaluation; `compare` pairs these."""

    id: str
    digest: str
    """Of its messages."""
    scores: list[float | None]
    """Each sample's; None for failed ones."""

    @property
    def key(self) -> tuple[str, str]:
        """Its identity in an evaluation."""
        return self.id, self.digest

    @property
    def known(self) -> list[float]:
        """Return the scores of the graded samples."""
        return present(self.scores)


@dataclass(kw_only=True)
class SetResult:
    """One set of tasks: a family, or a user's file."""

    name: str
    score: str
    """Score averaged in `accuracy`: "reward", or a metric of the grader."""
    samples_per_task: int
    accuracy: Estimate
    reward: Estimate
    metrics: dict[str, Estimate]
    partial_metrics: dict[str, int]
    """Samples with a metric, for metrics missing in some graded samples; the mean is over these."""
    pass_at: dict[int, Estimate]
    """By k: the chance of at least one right sample (score 1) in k, and its interval over tasks."""
    num_tasks: int
    num_repeats: int
    """Tasks with the id and messages of an earlier one; estimates pool the samples of both."""
    num_samples: int
    num_failed: int
    """Samples without a grade, after a failed request or grader; excluded from the means."""
    failures: dict[str, int]
    """Counts by reason."""
    num_truncated: int
    """Samples cut off by the token limit, graded as they were."""
    num_cached: int
    prompt_tokens: int
    """Each task's prompt counted once."""
    completion_tokens: int
    mean_completion_tokens: float | None
    new_completion_tokens: int
    """Sampled now, not taken from the cache."""
    tokens_per_second: float | None
    seconds: float | None
    spend: float | None
    """Dollars for new samples; None without prices."""
    tasks: list[TaskScores] = field(repr=False)

    @property
    def accuracy_if_failed_are_wrong(self) -> float | None:
        """Return the mean with 0 for failed samples, in case failures hide wrong answers."""
        by_task = pooled([row.key for row in self.tasks], [row.scores for row in self.tasks])
        means = [statistics.fmean(score or 0.0 for score in scores) for scores in by_task if scores]
        if means:
            return statistics.fmean(means)
        return None

    @classmethod
    def of(
        cls,
        name: str,
        tasks: Sequence[Task],
        results: TaskResults,
        *,
        score: str = "reward",
        samples_per_task: int = 1,
        pass_at: Sequence[int] = (),
        confidence: float = 0.95,
    ) -> "SetResult":
        """Return the figures of `get_task_results`, in the order of the tasks."""
        stats = results.stats
        rows = [
            TaskScores(
                task.id,
                messages_digest(task),
                [_score(sample, score) for sample in result.samples],
            )
            for task, result in zip(tasks, results, strict=True)
        ]
        keys = [row.key for row in rows]
        graded = pooled(keys, [result.graded for result in results])
        scores = pooled(keys, [row.known for row in rows])
        rewards = pooled(keys, [result.rewards for result in results])
        names = dict.fromkeys(
            metric for samples in graded for sample in samples for metric in sample.scores
        )
        metrics = {
            metric: estimate_mean(
                [[s.metrics[metric] for s in group if metric in s.metrics] for group in graded],
                confidence,
            )
            for metric in names
        }
        passed = {
            k: _passed(scores, k, confidence)
            for k in sorted({*pass_at, 1} if pass_at or samples_per_task > 1 else set())
        }
        return cls(
            name=name,
            score=score,
            samples_per_task=samples_per_task,
            accuracy=estimate_mean(scores, confidence),
            reward=estimate_mean(rewards, confidence),
            metrics=metrics,
            partial_metrics=dict(stats.partial_metrics),
            pass_at=passed,
            num_tasks=stats.num_tasks,
            num_repeats=len(rows) - len(scores),
            num_samples=stats.num_samples,
            num_failed=sum(score is None for row in rows for score in row.scores),
            failures=dict(stats.exceptions),
            num_truncated=stats.finish_reasons.get("length", 0),
            num_cached=stats.num_cached,
            prompt_tokens=stats.prompt_tokens,
            completion_tokens=stats.completion_tokens,
            mean_completion_tokens=stats.mean_completion_tokens,
            new_completion_tokens=stats.new_completion_tokens,
            tokens_per_second=stats.tokens_per_second,
            seconds=stats.seconds,
            spend=stats.spend,
            tasks=rows,
        )

    def metric_text(self, name: str) -> str:
        """Format a metric with its interval, and its number of samples if some lack it."""
        estimate = self.metrics[name]
        count = self.partial_metrics.get(name)
        notes = [_interval(estimate)]
        if count is not None:
            notes.append(f"in {counted(count, 'sample')}")
        shown = "; ".join(filter(None, notes))
        return f"{name} {_number(estimate.mean)}" + (f" ({shown})" if shown else "")

    def to_json(self) -> JsonObject:
        row = dataclasses.asdict(self)
        row["pass_at"] = {str(k): estimate for k, estimate in row["pass_at"].items()}
        row["accuracy_if_failed_are_wrong"] = self.accuracy_if_failed_are_wrong
        return row


@dataclass(kw_only=True)
class EvalResult:
    """An evaluation: `sets` and their settings."""

    model: str
    settings: dict[str, Any]
    sets: list[SetResult] = field(default_factory=list)
    complete: bool = False
    """False after an early end: some sets are missing."""
    failed: dict[str, str] = field(default_factory=dict)
    """Reason by name, for sets without any grade."""
    seconds: float = 0.0
    confidence: float = 0.95

    def __getitem__(self, name: str) -> SetResult:
        found = next((one for one in self.sets if one.name == name), None)
        if found is None:
            raise KeyError(f"{name!r}; there are {', '.join(one.name for one in self.sets)}")
        return found

    def to_json(self) -> JsonObject:
        return {
            "format": FORMAT,
            "model": self.model,
            "settings": self.settings,
            "complete": self.complete,
            "failed": self.failed,
            "seconds": round(self.seconds, 3),
            "confidence": self.confidence,
            "sets": {one.name: one.to_json() for one in self.sets},
        }

    def to_pandas(self) -> "DataFrame":
        """Return a DataFrame with a row for each sample: set, task_id, digest of the messages,
        sample, score. Failed samples have no score. Raises UserError without pandas.
        """
        rows = [
            {
                "set": one.name,
                "task_id": task.id,
                "digest": task.digest,
                "sample": number,
                "score": score,
            }
            for one in self.sets
            for task in one.tasks
            for number, score in enumerate(task.scores)
        ]
        return data_frame(rows, columns=("set", "task_id", "digest", "sample", "score"))

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the JSON atomically; return the path."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n")
        return path

    def table(self) -> str:
        """Return a terminal table: a line for each set, then notes on failures."""
        return "\n".join([*aligned(self._rows()), *self._notes()])

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return html_table(self._rows(), caption=self.model, notes=self._notes())

    def _rows(self) -> list[list[str]]:
        """Return the table, its heading first."""
        ks = sorted({k for one in self.sets for k in one.pass_at if k > 1})
        header = [
            "tasks",
            "n",
            "score",
            "accuracy",
            f"{percent(self.confidence)} interval",
            "reward",
            *(f"pass@{k}" for k in ks),
        ]
        header += ["tokens", "cut off", "failed", "tokens/s"]
        priced = any(one.spend is not None for one in self.sets)
        rows = [_line(one, ks, priced) for one in self.sets]
        return [[*header, *(["cost"] if priced else [])], *rows]

    def _notes(self) -> list[str]:
        """Return other metrics, repeats, failures and samples cut off."""
        lines: list[str] = []
        for one in self.sets:
            others = {name: estimate for name, estimate in one.metrics.items() if name != one.score}
            if others:
                lines.append(f"{one.name}: " + ", ".join(one.metric_text(name) for name in others))
            if one.num_repeats:
                lines.append(
                    f"{one.name}: {one.num_repeats} of {one.num_tasks} tasks repeat another one; "
                    "each counts once, with all of its samples"
                )
            if one.num_failed:
                commonest = list(one.failures.items())[:3]
                reasons = "; ".join(
                    f"{count} × {reason.splitlines()[0][:150]}" for reason, count in commonest
                )
                if not reasons:
                    reasons = f"their grader gave no {one.score!r}"
                lines.append(
                    f"{one.name}: {one.num_failed} of {one.num_samples} samples have no grade and "
                    "are left out (counted as wrong, they would make the accuracy "
                    f"{_number(one.accuracy_if_failed_are_wrong)}): {reasons}"
                )
            if one.num_truncated:
                lines.append(
                    f"{one.name}: {one.num_truncated} of {one.num_samples} samples were cut off at "
                    "max_tokens; a higher limit might give a better result"
                )
        return lines


def messages_digest(task: Task) -> str:
    """Return a digest of the messages, equal for equal questions."""
    return hashlib.sha256(
        json.dumps(task.messages, sort_keys=True, default=str).encode()
    ).hexdigest()[:16]


def _score(sample: Sample, score: str) -> float | None:
    if sample.reward is None:
        return None
    if score == "reward":
        return sample.reward
    return sample.metrics.get(score)


def _passed(scores: Sequence[Sequence[float]], k: int, confidence: float) -> Estimate:
    """Estimate pass@k; tasks with fewer than k graded samples are left out."""
    counted = [
        (len(one), sum(score >= 1.0 - 1e-9 for score in one)) for one in scores if len(one) >= k
    ]
    return estimate_mean([[pass_at_k(samples, right, k)] for samples, right in counted], confidence)


def _line(one: SetResult, ks: Sequence[int], priced: bool) -> list[str]:
    if one.samples_per_task > 1:
        per_task = f" x {one.samples_per_task}"
    else:
        per_task = ""
    row = [
        one.name,
        f"{one.num_tasks}{per_task}",
        one.score,
        _number(one.accuracy.mean),
        _interval(one.accuracy),
    ]
    row += [_number(one.reward.mean)] + [
        _number(one.pass_at[k].mean) if k in one.pass_at else "" for k in ks
    ]
    row += [
        si(one.mean_completion_tokens) if one.mean_completion_tokens is not None else "",
        str(one.num_truncated),
        str(one.num_failed),
        si(one.tokens_per_second) if one.tokens_per_second else "cached" if one.num_cached else "",
    ]
    return row + ([f"${one.spend:.4g}" if one.spend is not None else ""] if priced else [])


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}"


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{estimate.low:.3f} to {estimate.high:.3f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if not place else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    ]


@dataclass(frozen=True)
class StoredSet:
    """The figures of a set for comparisons."""

    score: str
    tasks: list[TaskScores]


@dataclass(frozen=True)
class StoredResult:
    """The JSON of an evaluation, as far as it is read again."""

    format: Literal[1]
    sets: dict[str, StoredSet]
    model: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    complete: bool = True


def read_result(path: str | os.PathLike[str]) -> StoredResult:
    """Read the JSON of an evaluation. Raises UserError for any other file."""
    try:
        return parse(StoredResult, Path(path).read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read as an evaluation: {error}") from None
    except ValueError as error:
        raise UserError(
            f"{path} is not a result of ttrl eval (format {FORMAT}): {error}; give a file of "
            "`ttrl eval --output`"
        ) from None
