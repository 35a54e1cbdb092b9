"""What sampling returns: the graded groups in the order of their tasks, what they add up to, and what went wrong how often."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from ttrl.errors import GraderError, ServerError
from ttrl.records import Sample, TaskResult
from ttrl.rollouts.progress import si


@dataclass(frozen=True, kw_only=True)
class RolloutStats:
    """Counts and means. Means are over graded samples, and None where there is nothing to average."""

    num_tasks: int
    num_samples: int
    num_graded: int
    num_failed: int
    """Samples without a reward; num_graded + num_failed = num_samples."""
    mean_reward: float | None
    metrics: dict[str, float]
    """Each metric's mean over the graded samples that have it."""
    prompt_tokens: int
    """Every task's prompt once, however many samples it has."""
    completion_tokens: int
    mean_completion_tokens: float | None
    """Over the samples that the server completed, graded or not."""
    finish_reasons: dict[str, int]
    exceptions: dict[str, int]
    """Why samples, graders, transforms and callbacks failed, and how often, the commonest first."""
    seconds: float | None
    """Wall clock of the whole call; None where the results were read from a file."""
    tokens_per_second: float | None
    """completion_tokens / seconds."""

    def to_json(self) -> dict[str, Any]:
        """A dictionary that `json` can write as it is."""
        return dataclasses.asdict(self)

    def summary(self) -> str:
        """One line for the log."""
        parts = [f"{self.num_samples} samples of {self.num_tasks} tasks"]
        if self.seconds is not None:
            parts.append(f"{self.seconds:.1f} s")
        if self.mean_reward is not None:
            parts.append(f"mean reward {self.mean_reward:.3f}")
        parts += [f"{name} {value:.3f}" for name, value in self.metrics.items()]
        if self.mean_completion_tokens is not None:
            speed = f", {si(self.tokens_per_second)} tokens/s" if self.tokens_per_second is not None else ""
            parts.append(f"{si(self.completion_tokens)} tokens ({self.mean_completion_tokens:.1f} per sample{speed})")
        if self.num_failed:
            parts.append(f"{self.num_failed} failed")
        return ", ".join(parts)

    def failures(self, most: int = 3) -> str:
        """The commonest reasons for failures with their counts, one line."""
        shown = [f"{count} × {reason}" for reason, count in list(self.exceptions.items())[:most]]
        if len(self.exceptions) > most:
            shown.append(f"{len(self.exceptions) - most} other reasons")
        return "; ".join(shown)


class TaskResults(Sequence[TaskResult]):
    """The result of each task, in the order of the tasks that were given; a sequence of TaskResult.

    `transformed` holds what `transform` returned for each of them, or the exception that it raised; None without a transform.
    """

    def __init__(
        self,
        results: Iterable[TaskResult],
        *,
        seconds: float | None = None,
        usage: Sequence[tuple[int, int] | None] | None = None,
        transformed: list[Any] | None = None,
        other_failures: Mapping[str, int] | None = None,
    ) -> None:
        """`usage` is each task's (prompt tokens, completion tokens) as the server counted them, for servers that give no ids."""
        self._results = list(results)
        self._seconds = seconds
        self._usage = list(usage) if usage is not None else [None] * len(self._results)
        self._other_failures = dict(other_failures or {})
        self.transformed = transformed
        assert len(self._usage) == len(self._results)

    def __len__(self) -> int:
        return len(self._results)

    @overload
    def __getitem__(self, index: int) -> TaskResult: ...
    @overload
    def __getitem__(self, index: slice) -> list[TaskResult]: ...
    def __getitem__(self, index: int | slice) -> TaskResult | list[TaskResult]:
        return self._results[index]

    def __repr__(self) -> str:
        return f"<TaskResults: {self.stats.summary()}>"

    @classmethod
    def from_samples(cls, samples: Iterable[Sample]) -> "TaskResults":
        """Rebuilds results from the samples of a rollouts.jsonl, in its order.

        A group ends where the task id changes or the numbers of its samples start again (the same task twice in a row).
        """
        groups: list[list[Sample]] = []
        for sample in samples:
            last = groups[-1][-1] if groups else None
            if last is None or sample.task_id != last.task_id or sample.sample <= last.sample:
                groups.append([])
            groups[-1].append(sample)
        return cls(TaskResult(task_id=g[0].task_id, messages=g[0].messages, samples=g) for g in groups)

    @property
    def samples(self) -> list[Sample]:
        """Every sample, failed ones included, task by task."""
        return [sample for result in self._results for sample in result.samples]

    def to_jsonl_rows(self) -> list[dict[str, Any]]:
        """One JSON object per sample, as rollouts.jsonl holds them."""
        return [sample.to_json() for sample in self.samples]

    @property
    def stats(self) -> RolloutStats:
        """Counted anew at each access, so that it follows changes of the samples (about a microsecond per sample)."""
        samples = self.samples
        graded = [sample for sample in samples if sample.reward is not None]
        metrics: dict[str, list[float]] = {}
        for sample in graded:
            for name, value in sample.metrics.items():
                metrics.setdefault(name, []).append(value)
        reasons = Counter(reason(sample) for sample in samples if sample.reward is None)
        reasons.update(self._other_failures)
        counted = [_tokens(result, usage) for result, usage in zip(self._results, self._usage, strict=True)]
        completion_tokens = sum(completion for _, completion in counted)
        num_completed = sum(sample.finish_reason is not None for sample in samples)
        return RolloutStats(
            num_tasks=len(self._results),
            num_samples=len(samples),
            num_graded=len(graded),
            num_failed=len(samples) - len(graded),
            mean_reward=_mean([sample.reward for sample in graded if sample.reward is not None]),
            metrics={name: sum(values) / len(values) for name, values in metrics.items()},
            prompt_tokens=sum(prompt for prompt, _ in counted),
            completion_tokens=completion_tokens,
            mean_completion_tokens=completion_tokens / num_completed if num_completed else None,
            finish_reasons=dict(Counter(s.finish_reason for s in samples if s.finish_reason is not None).most_common()),
            exceptions=dict(reasons.most_common()),
            seconds=self._seconds,
            tokens_per_second=completion_tokens / self._seconds if self._seconds else None,
        )

    def raise_if_all_failed(self) -> None:
        """Does nothing while a single sample has a reward.

        Raises GraderError when all samples failed in their graders, ServerError otherwise; with the commonest reason in full.
        """
        samples = self.samples
        if not samples or any(sample.reward is not None for sample in samples):
            return
        commonest, count = Counter(map(reason, samples)).most_common(1)[0]
        in_full = next(sample.error or commonest for sample in samples if reason(sample) == commonest)
        kind = GraderError if all((sample.error or "").startswith("GraderError") for sample in samples) else ServerError
        raise kind(f"all {len(samples)} samples of {len(self)} tasks failed, {count} of them with: {in_full}")


def where(task_id: str, sample: int) -> str:
    """How errors name a sample."""
    return f"task {task_id!r}, sample {sample}"


def reason(sample: Sample) -> str:
    """The first line of a failed sample's error without the place where it happened, so that equal failures count as one."""
    line = (
        (sample.error or "no reward and no reason").split("\n", 1)[0].replace(f"{where(sample.task_id, sample.sample)}: ", "", 1)
    )
    return line if len(line) <= 200 else line[:199] + "…"


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _tokens(result: TaskResult, usage: tuple[int, int] | None) -> tuple[int, int]:
    """(prompt tokens, completion tokens) of one task: as the server counted, or from what is known of its samples."""
    if usage is not None:
        return usage
    prompt = max((len(sample.prompt_token_ids or ()) for sample in result.samples), default=0)
    return prompt, sum(len(sample.token_ids or sample.logprobs or ()) for sample in result.samples)
