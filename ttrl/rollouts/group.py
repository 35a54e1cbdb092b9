"""One task while it is sampled: its samples, its tokens, its lines in the logs, its entries in the
cache.
"""

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ttrl.records import Sample, TaskResult
from ttrl.rollouts.cache.completions import sample_key
from ttrl.rollouts.client.assembly import OnChunk
from ttrl.rollouts.client.attempts import CountedAttempt
from ttrl.rollouts.client.wire import Answer
from ttrl.rollouts.results import TaskUsage
from ttrl.rollouts.sample_logs import LiveAnswers
from ttrl.rollouts.sampling import Job, Sampling
from ttrl.rollouts.scheduling.servers import Size

NOT_TO_KEEP = frozenset({None, "abort", "error", "unfinished"})
"""Finish reasons of answers that the model did not end: they never enter a cache."""


class Group:
    """The samples of one task, in `result`, and what they share while they are made."""

    def __init__(self, sampling: Sampling, job: Job) -> None:
        self.s = sampling
        self.position = job.position
        self.task = job.task
        self.first = job.first
        self.digest = sampling.digest(job.task)
        self.messages: list[dict[str, Any]] = [dict(message) for message in job.task.messages]
        self.size = Size.of(self.messages, 1, sampling.chat_request.max_tokens)
        self.has_asked = False
        """Whether a request was made."""
        self.usage = TaskUsage()
        self.transformed: Any = None
        """What the caller's `transform` returned or raised."""
        self.result = TaskResult(
            task_id=self.task.id, messages=self.messages, samples=self._begun_samples()
        )

    def _begun_samples(self) -> list[Sample]:
        """Return copies of what an earlier call sampled, else samples without a token."""
        version = self.s.request.weights_version
        if self.position >= len(self.s.kept):
            return [
                Sample(
                    task_id=self.task.id,
                    sample=number,
                    messages=self.messages,
                    weights_version=version,
                )
                for number in range(self.s.request.n)
            ]
        samples = [dataclasses.replace(sample) for sample in self.s.kept[self.position].samples]
        for sample in samples:
            if not sample.token_ids and sample.reward is None:
                # Nothing of it was sampled by the policy of then.
                sample.weights_version = version
        return samples

    async def hand_on(self) -> None:
        """Show the finished group to the caller's `transform` and `on_task_done`."""
        request = self.s.request
        result = self.result
        if request.transform is not None:
            self.transformed, error = await self.s.transform_thread.call(request.transform, result)
            if error is not None:
                self.s.count_other("transform", result.task_id, error)
                self.transformed = error
        if request.on_task_done is not None:
            try:
                request.on_task_done(result)
            except Exception as error:  # noqa: BLE001 - a callback must not cost results
                self.s.count_other("on_task_done", result.task_id, error)

    async def send(
        self,
        attempt: CountedAttempt,
        samples: Sequence[Sample],
        size: Size,
        *,
        digest: str | None = None,
        ticket: int | None = None,
    ) -> list[Answer | None]:
        """Make the request for these samples, as `Servers.send` does; count and log it, however it
        ends.
        """
        self.has_asked = True
        loop = asyncio.get_running_loop()
        retries = self.s.chat_request.max_retries
        began = loop.time()
        try:
            answers = await self.s.servers.send(
                attempt, size=size, max_retries=retries, affinity=self.position, ticket=ticket
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
        first = self.first
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
        keys = [sample_key(digest, self.first + sample.sample) for sample in samples]
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
        if self.s.requests_log is not None and self.digest is not None:
            numbers = [self.first + sample.sample for sample in samples]
            model = self.s.request.model
            digest = digest or self.digest
            self.s.requests_log.append(
                base_url=base_url, model=model, digest=digest, samples=numbers, hit=hit, **facts
            )

    async def keep(self, sample: Sample, answer: Answer, digest: str, body: dict[str, Any]) -> None:
        """Put an answer into the cache, unless `on_chunk` ended it, which no key can describe.
        (Continued samples are not kept: they may have tokens of several policies.)"""
        cache = self.s.cache
        own_end = (
            sample.finish_reason != "stopped_early"
            or getattr(self.s.request.on_chunk, "cache_key", None) is not None
        )
        if cache is not None and sample.finish_reason not in NOT_TO_KEEP and own_end:
            await cache.put(sample_key(digest, self.first + sample.sample), answer, body)

    def waits(self, sample: Sample) -> bool:
        """Tell whether a sample is there and has to wait for its group, with which it is graded."""
        return (
            self.task.group_grader is not None
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
            self.s.sample_logs.write(sample, number=self.first + sample.sample)
