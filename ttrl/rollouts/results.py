"""Hold the results of sampling: the graded groups in task order, their totals, and counts of their
failures.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from ttrl.errors import GraderError, RolloutError, ServerError, TtrlError
from ttrl.facts import RolloutStats, ratio
from ttrl.messages import JsonObject
from ttrl.records import Sample, TaskResult
from ttrl.rollouts.progress import Prices
from ttrl.system.files import json_line
from ttrl.system.frames import data_frame
from ttrl.system.html_table import html_table
from ttrl.text import compact, one_line, present

if TYPE_CHECKING:
    from ttrl.system.frames import DataFrame

logger = logging.getLogger(__name__)


@dataclass
class TaskUsage:
    """Tokens of one task, counted by the server (or from its token ids)."""

    prompt: int = 0
    """The prompt once for all samples; of rollouts, the first one's."""
    completion: int = 0
    new_prompt: int = 0
    """Of every request sent, as charged by a provider; samples from the cache count nothing."""
    new_completion: int = 0
    prefix_cached: int = 0
    """Tokens of `new_prompt` from the server's prefix cache."""


_COLUMNS = ("task_id", "sample", "reward", "error", "finish_reason", "tokens", "cached", "text")
"""Columns of a DataFrame of samples, before those of metrics."""
_SHOWN = 20
"""Samples of the table in a notebook."""
_SHOWN_TEXT = 300
"""Characters of their texts."""


class TaskResults(Sequence[TaskResult]):
    """The result of each task, in the order of the given tasks; a sequence of TaskResult.

    `transformed` holds each result of `transform`, or its exception; None without a transform.

    >>> question = {"role": "user", "content": "What is 2 + 2?"}
    >>> samples = [
    ...     Sample(task_id="sums/1", sample=number, messages=[question], reward=number / 2)
    ...     for number in range(3)
    ... ]
    >>> results = TaskResults.from_samples(samples)
    >>> len(results), [sample.reward for sample in results.samples]
    (1, [0.0, 0.5, 1.0])
    """

    def __init__(
        self,
        results: Iterable[TaskResult],
        *,
        seconds: float | None = None,
        grading_seconds: float | None = None,
        usage: Sequence[TaskUsage | None] | None = None,
        transformed: list[Any] | None = None,
        other_failures: Mapping[str, int] | None = None,
        prices: Prices | None = None,
    ) -> None:
        """`usage`: each task's tokens; samples do not record all of them (servers without ids; new
        tokens).
        """
        self._results = list(results)
        self._seconds = seconds
        self._grading_seconds = grading_seconds
        if usage is not None:
            self._usage = list(usage)
        else:
            self._usage = [None] * len(self._results)
        self._prices = prices
        self._other_failures = dict(other_failures or {})
        self.transformed = transformed
        assert len(self._usage) == len(self._results)

    def to_pandas(self) -> "DataFrame":
        """Return a DataFrame with a row for each sample: task_id, sample, reward, error,
        finish_reason, tokens, cached, text, and each metric as metrics.NAME. Raises UserError if
        pandas is not installed.
        """
        rows = []
        for result in self._results:
            for sample in result.samples:
                row: dict[str, object] = {
                    name: getattr(sample, name) for name in _COLUMNS if name != "tokens"
                }
                row["tokens"] = None if sample.token_ids is None else len(sample.token_ids)
                rows.append(row | {"metrics": sample.scores})
        return data_frame(rows, columns=_COLUMNS)

    def _repr_html_(self) -> str:
        """Return the totals and the first samples as a table for a notebook."""
        rows = [["task", "sample", "reward", "metrics", "tokens", "end", "text"]]
        samples = self.samples
        for sample in samples[:_SHOWN]:
            scores = ", ".join(f"{name} {compact(one)}" for name, one in sample.scores.items())
            rows.append(
                [
                    one_line(sample.task_id, 60),
                    str(sample.sample),
                    "" if sample.reward is None else compact(sample.reward),
                    one_line(scores, 120),
                    "" if sample.token_ids is None else str(len(sample.token_ids)),
                    sample.finish_reason or "",
                    one_line(sample.error or sample.text, _SHOWN_TEXT),
                ]
            )
        notes = []
        if len(samples) > _SHOWN:
            notes.append(f"the first {_SHOWN} of {len(samples)} samples; to_pandas() has them all")
        return html_table(rows, caption=self.stats.summary(), notes=notes)

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
        """Rebuild results from the samples of a rollouts.jsonl, in its order.

        A new task id or a restart of the sample numbers (the same task twice in a row) begins a new
        group.
        """
        groups: list[list[Sample]] = []
        for sample in samples:
            last = groups[-1][-1] if groups else None
            if last is None or sample.task_id != last.task_id or sample.sample <= last.sample:
                groups.append([])
            groups[-1].append(sample)
        return cls(
            TaskResult(task_id=g[0].task_id, messages=g[0].messages, samples=g) for g in groups
        )

    @property
    def samples(self) -> list[Sample]:
        """Every sample, failed ones included, task by task."""
        return [sample for result in self._results for sample in result.samples]

    def to_jsonl_rows(self) -> list[JsonObject]:
        """Return one JSON object per sample, in the form of rollouts.jsonl."""
        return [sample.to_json() for sample in self.samples]

    def to_jsonl_lines(self) -> Iterator[bytes]:
        """Yield the same rows as JSON; reuse lines written by a rollout worker."""
        for result in self._results:
            if result.prepared is not None:
                yield from result.prepared.lines
            else:
                yield from (json_line(sample.to_json()) for sample in result.samples)

    @property
    def stats(self) -> RolloutStats:
        """Counted at each access, to follow changes of the samples (about a microsecond per
        sample).
        """
        samples = self.samples
        graded = [sample for sample in samples if sample.reward is not None]
        rewards = [reward for result in self._results for reward in result.rewards]
        metrics: dict[str, list[float]] = {}
        for sample in graded:
            for name, value in sample.scores.items():
                metrics.setdefault(name, []).append(value)
        unfinished = [sample for sample in samples if is_unfinished(sample)]
        reasons = Counter(
            reason(sample)
            for sample in samples
            if sample.reward is None and not is_unfinished(sample)
        )
        reasons.update(self._other_failures)
        usage = [
            known or usage_of(result)
            for result, known in zip(self._results, self._usage, strict=True)
        ]
        cut_off = [
            sample for sample in samples if sample.finish_reason is None or is_unfinished(sample)
        ]
        completed = len(samples) - len(cut_off)
        completed_tokens = sum(u.completion for u in usage) - sum(
            len(sample.token_ids or ()) for sample in cut_off
        )
        new_prompt = sum(u.new_prompt for u in usage)
        new_completion = sum(u.new_completion for u in usage)
        return RolloutStats(
            num_tasks=len(self._results),
            num_samples=len(samples),
            num_graded=len(graded),
            num_failed=len(samples) - len(graded) - len(unfinished),
            num_unfinished=len(unfinished),
            num_cached=sum(sample.cached for sample in samples),
            num_turns=sum(len(sample.turns) for sample in samples if sample.turns),
            num_breaks=sum(
                turn.continues is None and turn.prompt_token_ids is not None
                for sample in samples
                if sample.turns
                for turn in sample.turns[1:]
            ),
            mean_reward=ratio(sum(rewards), len(rewards)),
            metrics={name: sum(values) / len(values) for name, values in metrics.items()},
            partial_metrics={
                name: len(values) for name, values in metrics.items() if len(values) < len(graded)
            },
            prompt_tokens=sum(u.prompt for u in usage),
            completion_tokens=sum(u.completion for u in usage),
            mean_completion_tokens=ratio(completed_tokens, completed),
            new_prompt_tokens=new_prompt,
            new_completion_tokens=new_completion,
            prefix_cached_tokens=sum(u.prefix_cached for u in usage),
            spend=None if self._prices is None else self._prices.spend(new_prompt, new_completion),
            finish_reasons=dict(Counter(present(s.finish_reason for s in samples)).most_common()),
            exceptions=dict(reasons.most_common()),
            seconds=self._seconds,
            tokens_per_second=ratio(new_completion or None, self._seconds),
            grading_seconds=self._grading_seconds,
        )

    @property
    def unfinished(self) -> list[TaskResult]:
        """The groups with samples cut off by a token budget, for the `unfinished` of a later
        call.
        """
        return [result for result in self._results if any(map(is_unfinished, result.samples))]

    def raise_if_all_failed(self) -> None:
        """Raise if no sample has a reward.

        Raises GraderError if all samples failed in their graders, RolloutError if all failed there
        or in their rollouts, ServerError otherwise; with the commonest reason in full.
        """
        samples = self.samples
        if not samples or any(
            sample.reward is not None or is_unfinished(sample) for sample in samples
        ):
            return
        commonest, count = Counter(map(reason, samples)).most_common(1)[0]
        in_full = next(
            sample.error or commonest for sample in samples if reason(sample) == commonest
        )
        kinds = {(sample.error or "").split(":", 1)[0] for sample in samples}
        kind: type[TtrlError] = ServerError
        if kinds <= {"GraderError", "RolloutError", "RolloutLimitError"}:
            if kinds == {"GraderError"}:
                kind = GraderError
            else:
                kind = RolloutError
        raise kind(
            f"all {len(samples)} samples of {len(self)} tasks failed, {count} of them with: "
            f"{in_full}"
        )


def log_stats(results: TaskResults, description: str) -> None:
    """Log a call's samples and the reasons of failures."""
    stats = results.stats
    logger.info("%s: %s", description, stats.summary())
    if stats.exceptions:
        logger.warning("%s: failures: %s", description, stats.failures())


def reason(sample: Sample) -> str:
    """Return the first line of a failed sample's error without its place; equal failures then count
    as one.
    """
    line = (
        (sample.error or "no reward and no reason")
        .split("\n", 1)[0]
        .replace(f"{sample.where}: ", "", 1)
    )
    if len(line) <= 200:
        return line
    return line[:199] + "…"


def is_unfinished(sample: Sample) -> bool:
    """Return True for a sample cut off by a token budget: it has neither reward nor error, and can
    be continued.
    """
    return sample.finish_reason == "unfinished" and sample.error is None


def usage_of(result: TaskResult, had: int = 0) -> TaskUsage:
    """Count a group's usage from its samples. All tokens are new but those from the cache, and
    `had` completion tokens of earlier calls."""
    prompt = max((len(sample.prompt_token_ids or ()) for sample in result.samples), default=0)
    counts = [
        (len(sample.token_ids or sample.logprobs or ()), sample.cached)
        for sample in result.samples
        if not sample.turns
    ]
    if any(count for count, cached in counts if not cached):
        sent = prompt
    else:
        sent = 0
    for sample in result.samples:
        lengths: list[int] = []  # of each turn's prompt and reply
        for turn in sample.turns or ():
            asked = len(turn.prompt_token_ids or ()) + (
                0 if turn.continues is None else lengths[turn.continues]
            )
            lengths.append(asked + turn.num_tokens)
            counts.append((turn.num_tokens, turn.cached))
            sent += 0 if turn.cached else asked
    new = sum(count for count, cached in counts if not cached)
    return TaskUsage(
        prompt=prompt,
        completion=sum(count for count, _ in counts),
        new_prompt=sent,
        new_completion=max(new - had, 0),
    )
