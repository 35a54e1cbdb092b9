"""One task from its messages to its graded group: cache, requests, continuations, grades; nothing
of it can cost another task.

A sample number is asked for until it is there: from the cache, else from a server, in requests of
neighbouring numbers. Where a server returns fewer choices than were asked for (many know no n), the
missing ones are asked for again. Every answer becomes a Sample as soon as it is there, is put into
the cache and graded, once.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ttrl.errors import GraderError
from ttrl.records import Sample, TaskResult
from ttrl.rollouts.client.attempts import ChatAttempt
from ttrl.rollouts.client.choices import choice_of_sample, openai_choice, read_choice, writable
from ttrl.rollouts.client.wire import Answer
from ttrl.rollouts.graders.grading import Graders, type_and_message
from ttrl.rollouts.ledger import Ledger
from ttrl.rollouts.partial import ContinueAttempt, extend
from ttrl.rollouts.play import Play
from ttrl.rollouts.results import TaskUsage, is_unfinished
from ttrl.rollouts.scheduling.servers import Size
from ttrl.tasks.task import Grade, Task


@dataclass
class TaskOutcome:
    """What became of a task."""

    position: int
    result: TaskResult
    usage: TaskUsage
    transformed: Any


class Group:
    """The samples of one task while they are made."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.s = ledger.s
        self.job = ledger.job
        self.messages = ledger.messages
        self.usage = ledger.usage
        version = self.s.settings.weights_version
        if self.job.kept is not None:
            self.samples = [dataclasses.replace(sample) for sample in self.job.kept.samples]
            for sample in self.samples:
                if not sample.token_ids and sample.reward is None:
                    # Nothing of it was sampled by the policy of then.
                    sample.weights_version = version
        else:
            numbers = range(self.s.n)
            task_id = self.job.task.id
            self.samples = [
                Sample(task_id=task_id, sample=k, messages=self.messages, weights_version=version)
                for k in numbers
            ]
        self.size = Size.of(self.messages, 1, self.s.request.max_tokens)

    async def run(self) -> TaskOutcome:
        """Bring every sample to its end: graded, failed, or cut off by the budget. Raises nothing
        but CancelledError.
        """
        async with asyncio.TaskGroup() as work:
            if self.job.task.rollout is not None:
                for sample in self.samples:
                    work.create_task(Play(self.ledger, sample).run())
            else:
                begun, fresh = self._left_to_do()
                for sample in begun:
                    work.create_task(self._continue(sample))
                missing = []
                for sample, answer in zip(
                    fresh, await self.ledger.from_cache(fresh, self.job.digest), strict=True
                ):
                    if answer is None:
                        missing.append(sample)
                    else:
                        work.create_task(self._finish(sample, answer, cached=True))
                for part in _neighbours(missing, self.s.samples_per_request):
                    work.create_task(self._request(part))
        if self.job.task.group_grader is not None:
            await self._grade_together()
        return await self._handed_on(
            TaskResult(task_id=self.job.task.id, messages=self.messages, samples=self.samples)
        )

    async def _handed_on(self, result: TaskResult) -> TaskOutcome:
        """Show the finished group to the caller's `transform` and `on_task_done`."""
        settings = self.s.settings
        transformed = None
        if settings.transform is not None:
            transformed, error = await self.s.transform_thread.call(settings.transform, result)
            if error is not None:
                self.s.count_other("transform", result.task_id, error)
                transformed = error
        if settings.on_task_done is not None:
            try:
                settings.on_task_done(result)
            except Exception as error:  # noqa: BLE001 - a callback must not cost results
                self.s.count_other("on_task_done", result.task_id, error)
        return TaskOutcome(self.job.position, result, self.usage, transformed)

    def _left_to_do(self) -> tuple[list[Sample], list[Sample]]:
        """Return the samples that have tokens already and those that have none, without those that
        an earlier call finished.
        """
        begun: list[Sample] = []
        fresh: list[Sample] = []
        for sample in self.samples:
            self.usage.prompt = max(self.usage.prompt, len(sample.prompt_token_ids or ()))
            if is_unfinished(sample) or (sample.finish_reason is None and sample.error is None):
                (begun if sample.token_ids else fresh).append(sample)
            else:
                self.usage.completion += len(sample.token_ids or ())
                if not self.ledger.waits(sample):
                    self.s.progress.add_sample(sample, cached=True)
        return begun, fresh

    # Requests

    async def _request(self, samples: list[Sample]) -> None:
        """Ask for these samples, whose numbers are consecutive, and again for those that a server
        left out.
        """
        attempt = ChatAttempt(
            request=self.s.first_request,
            messages=self.messages,
            n=len(samples),
            seed_offset=self.job.first + samples[0].sample,
            on_chunk=self.s.settings.on_chunk,
            watch=self.ledger.watch(samples, self.messages),
            count=self.s.count_tokens,
            cut=self.s.cut,
        )
        try:
            answers = await self.ledger.send(attempt, samples, self.size._replace(n=len(samples)))
        except Exception as error:  # noqa: BLE001 - whatever a request meets fails its own samples alone
            for sample in samples:
                self._fail(sample, error)
            return
        async with asyncio.TaskGroup() as work:
            left = []
            for sample, answer in zip(samples, answers, strict=True):
                if answer is not None:
                    work.create_task(self._finish(sample, answer))
                elif self.s.is_cut:
                    self._leave_open(sample)
                else:
                    left.append(sample)
            for part in _neighbours(left, len(samples)):
                work.create_task(self._request(part))

    async def _continue(self, sample: Sample) -> None:
        """Go on where the budget of an earlier call cut this sample off."""
        had = len(sample.token_ids or ())
        most = self.s.request.max_tokens
        limits = [] if most is None else [most - had]
        if self.s.budget is not None and self.s.budget.per_sample is not None:
            limits.append(self.s.budget.per_sample)
        attempt = ContinueAttempt(
            request=self.s.request,
            sample=sample,
            max_tokens=min(limits, default=None),
            number=self.job.first + sample.sample,
            had=had,
            count=self.s.count_tokens,
            cut=self.s.cut,
        )
        try:
            answers = await self.ledger.send(attempt, [sample], self.size)
        except Exception as error:  # noqa: BLE001 - as above
            self.usage.completion += had
            self._fail(sample, error)
            return
        if answers[0] is not None:
            await self._finish(sample, answers[0], had=had)
        else:
            self.usage.completion += had
            self._leave_open(sample)

    # Samples

    async def _finish(
        self, sample: Sample, answer: Answer, *, cached: bool = False, had: int = 0
    ) -> None:
        """Fill in one sample, keep it in the cache, and grade it; or leave it open where the budget
        cut it off.
        """
        place = sample.where
        s = self.s
        sample.cached = cached
        if cached:
            new = 0
        else:
            new = (answer.completion_tokens or 0) - had
        self.usage.new_completion += new
        self.usage.completion += answer.completion_tokens or 0
        self.usage.prompt = max(
            self.usage.prompt, answer.prompt_tokens or len(answer.prompt_token_ids or ())
        )
        try:
            if had:
                extend(sample, answer, s.settings.weights_version)
                sample.logprob_tokens = None  # of the first part alone
            else:
                # One sample of each call is checked token by token against its ids, as all come
                # from the same server.
                first = self.job.position == 0 and sample.sample == 0
                read_choice(
                    sample,
                    answer,
                    place,
                    token_ids=s.settings.token_ids,
                    logprobs=s.request.wants_logprobs,
                    strings=first,
                )
            if self._is_cut_off(sample, new):
                self._leave_open(sample)
                return
            if not cached and not had and self.job.digest is not None:
                await self.ledger.keep(sample, answer, self.job.digest, s.cache_body(self.messages))
            if self.job.task.grader is not None:
                graded = await s.graders.grade(self.job.task, openai_choice(answer), place)
                sample.reward = graded.reward
                sample.metrics = graded.metrics
        except Exception as error:  # noqa: BLE001 - one bad sample never costs another
            sample.error = writable(type_and_message(error))
        self.ledger.done(sample)

    async def _grade_together(self) -> None:
        """Grade the samples that have not failed with each other, unless some are to be continued
        first.
        """
        if any(is_unfinished(sample) for sample in self.samples):
            return
        waiting = [sample for sample in self.samples if self.ledger.waits(sample)]
        await grade_together(self.job.task, self.samples, self.s.graders)
        for sample in waiting:
            self.ledger.count(sample)

    def _is_cut_off(self, sample: Sample, new: int) -> bool:
        """Return whether the budget ended it, not the model or max_tokens."""
        budget = self.s.budget
        most = self.s.request.max_tokens
        if budget is None:
            return False
        if sample.finish_reason in (None, "unfinished"):
            return True
        if sample.finish_reason != "length" or budget.per_sample is None or new < budget.per_sample:
            return False
        return most is None or len(sample.token_ids or ()) < most

    def _leave_open(self, sample: Sample) -> None:
        sample.finish_reason = "unfinished"
        self.ledger.done(sample)

    def _fail(self, sample: Sample, error: Exception) -> None:
        if is_unfinished(sample):
            sample.finish_reason = None
        sample.error = writable(type_and_message(error))
        self.ledger.done(sample)


async def grade_together(task: Task, samples: Sequence[Sample], graders: Graders) -> None:
    """Grade those of a task's samples that have not failed with each other, once; add that to their
    rewards and metrics.
    """
    ready = [sample for sample in samples if sample.error is None]
    grades: Sequence[Grade | GraderError] = []
    try:
        if ready:
            grades = await graders.grade_group(
                task, [choice_of_sample(sample) for sample in ready], f"task {task.id!r}"
            )
    except Exception as error:  # noqa: BLE001 - one bad group never costs another
        grades = [GraderError(str(error))] * len(ready)
    for sample, grade in zip(ready, grades, strict=True):
        if isinstance(grade, GraderError):
            sample.error = writable(type_and_message(grade))
            sample.reward = None
        else:
            sample.reward = grade.reward + (sample.reward or 0.0)
            sample.metrics = {**sample.metrics, **grade.metrics}


def _neighbours(samples: Sequence[Sample], most: int) -> list[list[Sample]]:
    """Cut samples into runs of consecutive numbers of at most `most` each: a request's seeds and
    keys are consecutive.
    """
    parts: list[list[Sample]] = []
    for sample in samples:
        if parts and len(parts[-1]) < most and parts[-1][-1].sample + 1 == sample.sample:
            parts[-1].append(sample)
        else:
            parts.append([sample])
    return parts
