"""The books of one task while it is sampled: its tokens, its lines in the logs, its entries in the
cache.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from ttrl.records import Sample
from ttrl.rollouts.cache.completions import sample_key
from ttrl.rollouts.client.assembly import OnChunk
from ttrl.rollouts.client.attempts import Attempt
from ttrl.rollouts.client.wire import Answer
from ttrl.rollouts.results import TaskUsage
from ttrl.rollouts.sample_logs import LiveAnswers
from ttrl.rollouts.sampling import Sampling, SamplingJob
from ttrl.rollouts.scheduling.servers import Size

NOT_TO_KEEP = frozenset({None, "abort", "error", "unfinished"})
"""Finish reasons of answers that the model did not end: they never enter a cache."""


class Ledger:
    """What the samples of one task share, and where each of them is counted and logged."""

    def __init__(self, sampling: Sampling, job: SamplingJob) -> None:
        self.s = sampling
        self.job = job
        self.messages: list[dict[str, Any]] = [dict(message) for message in job.task.messages]
        self.usage = TaskUsage()

    async def send(
        self,
        attempt: Attempt,
        samples: Sequence[Sample],
        size: Size,
        *,
        digest: str | None = None,
        ticket: int | None = None,
    ) -> list[Answer | None]:
        """Make the request for these samples, as `Servers.send` does; count and log it, however it
        ends.
        """
        loop = asyncio.get_running_loop()
        retries = self.s.request.max_retries
        began = loop.time()
        try:
            answers = await self.s.servers.send(
                attempt, size=size, max_retries=retries, affinity=self.job.position, ticket=ticket
            )
        except Exception as error:
            self.log(
                samples,
                base_url=attempt.base_url,
                digest=digest,
                seconds=loop.time() - began,
                error=error,
            )
            raise
        facts: dict[str, Any] = {}
        got = [answer for answer in answers if answer is not None]
        if got:
            prompt = got[0].prompt_tokens
            cached = got[0].cached_tokens
            self.usage.new_prompt += prompt or 0
            self.usage.prefix_cached += max(answer.cached_tokens or 0 for answer in got)
            self.s.progress.add_tokens(0, prompt or 0)
            completion = sum(answer.completion_tokens or 0 for answer in got)
            facts = {
                "prompt_tokens": prompt,
                "cached_prompt_tokens": cached,
                "completion_tokens": completion,
            }
        self.log(
            samples, base_url=attempt.base_url, digest=digest, seconds=loop.time() - began, **facts
        )
        return answers

    def watch(
        self, samples: Sequence[Sample], messages: Sequence[Mapping[str, Any]]
    ) -> OnChunk | None:
        """Return what shows the answers of a request in the samples' files while they come; None
        where there are no files.
        """
        logs = self.s.sample_logs
        first = self.job.first
        if logs is None:
            return None
        return LiveAnswers(logs, samples, [first + sample.sample for sample in samples], messages)

    async def from_cache(
        self, samples: Sequence[Sample], digest: str | None
    ) -> list[Answer | None]:
        """Look the samples of a request up in the cache; hits are logged."""
        cache = self.s.cache
        if cache is None or digest is None:
            return [None] * len(samples)
        keys = [sample_key(digest, self.job.first + sample.sample) for sample in samples]
        answers = await asyncio.gather(*map(cache.get, keys))
        found = [
            sample for sample, answer in zip(samples, answers, strict=True) if answer is not None
        ]
        if found:
            self.log(found, base_url=cache.describe(), hit=True, digest=digest)
        return list(answers)

    def log(
        self,
        samples: Sequence[Sample],
        *,
        base_url: str,
        hit: bool = False,
        digest: str | None = None,
        **facts: Any,
    ) -> None:
        """Append a line to the requests log. digest: of the request, by default the task's."""
        if self.s.requests_log is not None and self.job.digest is not None:
            numbers = [self.job.first + sample.sample for sample in samples]
            model = self.s.request.model
            digest = digest or self.job.digest
            self.s.requests_log.append(
                base_url=base_url, model=model, digest=digest, samples=numbers, hit=hit, **facts
            )

    async def keep(self, sample: Sample, answer: Answer, digest: str, body: dict[str, Any]) -> None:
        """Put an answer into the cache, unless `on_chunk` ended it, which no key can describe.
        (Continued samples are not kept: they may have tokens of several policies.)"""
        cache = self.s.cache
        own_end = (
            sample.finish_reason != "stopped_early"
            or getattr(self.s.settings.on_chunk, "cache_key", None) is not None
        )
        if cache is not None and sample.finish_reason not in NOT_TO_KEEP and own_end:
            await cache.put(sample_key(digest, self.job.first + sample.sample), answer, body)

    def waits(self, sample: Sample) -> bool:
        """Tell whether a sample is there and has to wait for its group, with which it is graded."""
        return (
            self.job.task.group_grader is not None
            and sample.error is None
            and sample.finish_reason != "unfinished"
        )

    def done(self, sample: Sample) -> None:
        """Count and log a sample that is finished; one that waits for its group, later."""
        if not self.waits(sample):
            self.count(sample)

    def count(self, sample: Sample) -> None:
        """Count and log a sample."""
        self.s.progress.add_sample(sample, cached=sample.cached)
        if self.s.sample_logs is not None:
            self.s.sample_logs.write(sample, number=self.job.first + sample.sample)
