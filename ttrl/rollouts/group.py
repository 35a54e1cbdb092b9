"""Hold one task during sampling: its samples and their shared state."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ttrl.messages import Message
from ttrl.records import Sample, TaskResult
from ttrl.rollouts.client.assembly import OnChunk
from ttrl.rollouts.client.attempts import CountedAttempt
from ttrl.rollouts.client.wire import Answer
from ttrl.rollouts.results import TaskUsage
from ttrl.rollouts.sample_logs import LiveAnswers
from ttrl.rollouts.sampling import Job, Sampling
from ttrl.rollouts.scheduling.servers import Size
from ttrl.text import present


class Group:
    """The samples of one task, in `result`, and their shared state during sampling."""

    def __init__(self, sampling: Sampling, job: Job) -> None:
        self.sampling = sampling
        self.position = job.position
        self.task = job.task
        self.first = job.first
        self.digest = sampling.digest(job.task.messages)
        self.messages: list[Message] = [dict(message) for message in job.task.messages]
        self.size = Size.of(self.messages, 1, sampling.chat_request.max_tokens)
        self.has_asked = False
        """Whether a request was made."""
        self.usage = TaskUsage()
        self.transformed: Any = None
        """The result or exception of the caller's `transform`."""
        self.result = TaskResult(
            task_id=self.task.id, messages=self.messages, samples=self._begun_samples()
        )
        self.result.position = job.position

    def _begun_samples(self) -> list[Sample]:
        """Return copies of an earlier call's samples, else empty samples."""
        version = self.sampling.request.weights_version
        if self.position >= len(self.sampling.kept):
            return [
                Sample(
                    task_id=self.task.id,
                    sample=number,
                    messages=self.messages,
                    weights_version=version,
                )
                for number in range(self.sampling.request.n)
            ]
        samples = [
            dataclasses.replace(sample) for sample in self.sampling.kept[self.position].samples
        ]
        for sample in samples:
            if not sample.token_ids and sample.reward is None:
                # The earlier policy sampled nothing of it.
                sample.weights_version = version
        return samples

    async def hand_on(self) -> None:
        """Show the finished group to the caller's `transform` and `on_task_done`."""
        request = self.sampling.request
        result = self.result
        if request.transform is not None:
            self.transformed, error = await self.sampling.transform_thread.call(
                request.transform, result
            )
            if error is not None:
                self.sampling.count_other("transform", result.task_id, error)
                self.transformed = error
        if request.on_task_done is not None:
            try:
                request.on_task_done(result)
            except Exception as error:  # noqa: BLE001 - a callback must not cost results
                self.sampling.count_other("on_task_done", result.task_id, error)

    def numbers(self, samples: Sequence[Sample]) -> list[int]:
        """Return the samples' numbers for cache keys and logs."""
        return [self.first + sample.sample for sample in samples]

    async def send(
        self,
        attempt: CountedAttempt,
        samples: Sequence[Sample],
        size: Size,
        *,
        digest: str | None,
        ticket: int | None = None,
    ) -> list[Answer | None]:
        """Make the request for these samples, as `Sampling.send` does, and count its prompt."""
        self.has_asked = True
        numbers = self.numbers(samples)
        answers = await self.sampling.send(
            attempt, digest, numbers, size, affinity=self.position, ticket=ticket
        )
        got = present(answers)
        if got:
            self.usage.new_prompt += got[0].prompt_tokens or 0
            self.usage.prefix_cached += max(answer.cached_tokens or 0 for answer in got)
        return answers

    def watch(
        self, samples: Sequence[Sample], messages: Sequence[Mapping[str, Any]]
    ) -> OnChunk | None:
        """Return the writer of a request's answers to the samples' files as they arrive; None
        without files.
        """
        if self.sampling.sample_logs is None:
            return None
        return LiveAnswers(self.sampling.sample_logs, samples, self.numbers(samples), messages)

    def waits(self, sample: Sample) -> bool:
        """Return whether a finished sample waits to be graded with its group."""
        return (
            self.task.group_grader is not None
            and sample.error is None
            and sample.finish_reason != "unfinished"
        )

    def done(self, sample: Sample) -> None:
        """Count and log a finished sample; one waiting for its group is counted with it."""
        if not self.waits(sample):
            self.count(sample)

    def count(self, sample: Sample) -> None:
        """Count and log a sample."""
        self.sampling.progress.add_sample(sample, cached=sample.cached)
        if self.sampling.sample_logs is not None:
            self.sampling.sample_logs.write(sample, number=self.first + sample.sample)
