"""The books of one task while it is sampled: tokens, the log of requests, entries of the cache, finished samples."""

from collections.abc import Sequence
from typing import Any

from ttrl.records import Sample
from ttrl.rollouts.cache.completions import sample_key
from ttrl.rollouts.client.wire import Answer
from ttrl.rollouts.results import Usage
from ttrl.rollouts.sampling import Job, Sampling

_NOT_TO_KEEP = frozenset({None, "abort", "error", "unfinished"})
"""Finish reasons of answers that are no answers of the model: never put into a cache."""


class Ledger:
    """What the samples of one task share, and where each of them is counted and logged."""

    def __init__(self, sampling: Sampling, job: Job) -> None:
        self.s, self.job = sampling, job
        self.messages: list[dict[str, Any]] = [dict(message) for message in job.task.messages]
        self.usage = Usage()

    def sent(self, samples: Sequence[Sample], got: Sequence[Answer], **facts: Any) -> None:
        """Counts and logs a request; `got` are its answers."""
        if got:
            self.usage.new_prompt += got[0].prompt_tokens or 0
            self.usage.prefix_cached += max(answer.cached_tokens or 0 for answer in got)
            self.s.progress.add_tokens(0, got[0].prompt_tokens or 0)
        self.log(
            samples,
            prompt_tokens=got[0].prompt_tokens if got else None,
            cached_prompt_tokens=got[0].cached_tokens if got else None,
            completion_tokens=sum(answer.completion_tokens or 0 for answer in got) if got else None,
            **facts,
        )

    def log(
        self, samples: Sequence[Sample], *, base_url: str, hit: bool = False, digest: str | None = None, **facts: Any
    ) -> None:
        """A line of the requests log. digest: of the request, by default the task's."""
        if self.s.requests_log is not None and self.job.digest is not None:
            numbers = [self.job.first + sample.sample for sample in samples]
            digest = digest or self.job.digest
            self.s.requests_log.append(
                base_url=base_url, model=self.s.request.model, digest=digest, samples=numbers, hit=hit, **facts
            )

    async def keep(self, sample: Sample, answer: Answer, digest: str, body: dict[str, Any]) -> None:
        """Into the cache, unless `on_chunk` ended it, which no key can describe. (Continued samples are not kept: they may have
        tokens of several policies.)"""
        cache = self.s.cache
        own_end = sample.finish_reason != "stopped_early" or getattr(self.s.on_chunk, "cache_key", None) is not None
        if cache is not None and sample.finish_reason not in _NOT_TO_KEEP and own_end:
            await cache.put(sample_key(digest, self.job.first + sample.sample), answer, body)

    def done(self, sample: Sample) -> None:
        """Counts and logs a sample that is finished."""
        self.s.progress.add_sample(sample, cached=sample.cached)
        if self.s.sample_logs is not None:
            self.s.sample_logs.write(sample, number=self.job.first + sample.sample)
