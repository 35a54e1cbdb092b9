"""One task from its messages to its graded group: cache, requests, continuations, grades; nothing of it can cost another task.

A sample number is asked for until it is there: from the cache, else from a server, in requests of neighbouring numbers. Where a
server returns fewer choices than were asked for (many know no n), the missing ones are asked for again. Every answer becomes a
Sample as soon as it is there, is put into the cache and graded, once.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ttrl.errors import RequestError
from ttrl.records import Sample, TaskResult
from ttrl.rollouts.cache.completions import sample_key
from ttrl.rollouts.client.chat_completions import request_answers
from ttrl.rollouts.client.choices import openai_choice, read_choice, writable
from ttrl.rollouts.client.transport import Transport
from ttrl.rollouts.client.wire import Answer
from ttrl.rollouts.graders.grading import call, type_and_message
from ttrl.rollouts.ledger import Ledger
from ttrl.rollouts.partial import continue_answer, extend
from ttrl.rollouts.play import Play
from ttrl.rollouts.results import Usage, is_unfinished, where
from ttrl.rollouts.sampling import Job, Meter, Sampling
from ttrl.rollouts.scheduling.servers import Size


@dataclass
class Outcome:
    """What became of a job."""

    position: int
    result: TaskResult
    usage: Usage
    transformed: Any


async def run_task(sampling: Sampling, job: Job) -> Outcome:
    """One task from its request to its transform. Raises nothing but CancelledError."""
    ledger = Ledger(sampling, job)
    group = Group(ledger)
    await group.fill()
    result = TaskResult(task_id=job.task.id, messages=ledger.messages, samples=group.samples)
    transformed = None
    if sampling.transform is not None:
        transformed, error = await call(sampling.transform, result, threads=sampling.transform_thread, timeout=None)
        if error is not None:
            sampling.count_other("transform", job.task.id, error)
            transformed = error
    if sampling.on_task_done is not None:
        try:
            sampling.on_task_done(result)
        except Exception as error:  # noqa: BLE001 - a callback must not cost results
            sampling.count_other("on_task_done", job.task.id, error)
    return Outcome(job.position, result, ledger.usage, transformed)


class Group:
    """The samples of one task while they are made."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.s, self.job, self.messages, self.usage = ledger.s, ledger.job, ledger.messages, ledger.usage
        sampling, job, messages = ledger.s, ledger.job, ledger.messages
        if job.kept is not None:
            self.samples = [dataclasses.replace(sample) for sample in job.kept.samples]
            for sample in self.samples:
                if not sample.token_ids and sample.reward is None:
                    sample.weights_version = sampling.weights_version  # nothing of it was sampled by the policy of then
        else:
            version = sampling.weights_version
            self.samples = [
                Sample(task_id=job.task.id, sample=k, messages=messages, weights_version=version) for k in range(sampling.n)
            ]
        self.size = Size(
            prompt=sum(len(str(m.get("content") or "")) for m in messages), n=1, max_tokens=sampling.request.max_tokens
        )

    async def fill(self) -> None:
        """Brings every sample to its end: graded, failed, or cut off by the budget."""
        if self.job.task.rollout is not None:
            async with asyncio.TaskGroup() as tasks:
                for sample in self.samples:
                    tasks.create_task(Play(self.ledger, sample).run())
            return
        begun, fresh = [], []
        for sample in self.samples:
            self.usage.prompt = max(self.usage.prompt, len(sample.prompt_token_ids or ()))
            if is_unfinished(sample) or (sample.finish_reason is None and sample.error is None):
                (begun if sample.token_ids else fresh).append(sample)
            else:  # an earlier call has finished it
                self.usage.completion += len(sample.token_ids or ())
                self.s.progress.add_sample(sample, cached=True)
        async with asyncio.TaskGroup() as tasks:
            for sample in begun:
                tasks.create_task(self._continue(sample))
            tasks.create_task(self._make(fresh, tasks))

    async def _make(self, fresh: Sequence[Sample], tasks: asyncio.TaskGroup) -> None:
        """Samples that have no token yet: from the cache, the rest in requests of neighbouring numbers."""
        missing, found = [], []
        for sample, answer in zip(fresh, await self._from_cache(fresh), strict=True):
            if answer is None:
                missing.append(sample)
            else:
                found.append(sample)
                tasks.create_task(self._finish(sample, answer, cached=True))
        if found:
            self.ledger.log(found, base_url=self.s.cache.describe() if self.s.cache is not None else "", hit=True)
        for part in _neighbours(missing, self.s.samples_per_request):
            tasks.create_task(self._request(part))

    async def _from_cache(self, samples: Sequence[Sample]) -> list[Answer | None]:
        cache, digest = self.s.cache, self.job.digest
        if cache is None or digest is None:
            return [None] * len(samples)
        keys = [sample_key(digest, self.job.first + sample.sample) for sample in samples]
        return list(await asyncio.gather(*map(cache.get, keys)))

    # Requests

    async def _request(self, samples: list[Sample]) -> None:
        """Asks for these samples, whose numbers are consecutive, and again for those that a server left out."""
        first, count = self.job.first + samples[0].sample, len(samples)

        async def attempt(transport: Transport) -> list[Answer | None]:
            if self.s.is_cut:
                return [None] * count
            meter = Meter(self.s)
            answers = await meter.around(
                request_answers(
                    transport,
                    self.s.first_request,
                    self.messages,
                    count,
                    seed_offset=first,
                    on_chunk=self.s.on_chunk,
                    on_tokens=meter.add,
                    cut=self.s.cut,
                )
            )
            if not any(answers) and not self.s.is_cut:
                raise RequestError(f"{transport.base_url}: the server returned 0 choices, {count} were asked for", "malformed")
            return answers

        answers = await self._send(attempt, samples)
        if answers is None:
            return
        left = [sample for sample, answer in zip(samples, answers, strict=True) if answer is None]
        async with asyncio.TaskGroup() as tasks:
            for sample, answer in zip(samples, answers, strict=True):
                if answer is not None:
                    tasks.create_task(self._finish(sample, answer))
            if self.s.is_cut:
                for sample in left:
                    self._leave_open(sample)
            else:
                for part in _neighbours(left, count):
                    tasks.create_task(self._request(part))

    async def _continue(self, sample: Sample) -> None:
        """Goes on where the budget of an earlier call cut this sample off."""
        had = len(sample.token_ids or ())
        most = self.s.request.max_tokens
        room = None if most is None else most - had
        if self.s.budget is not None and self.s.budget.per_sample is not None:
            room = self.s.budget.per_sample if room is None else min(room, self.s.budget.per_sample)

        async def attempt(transport: Transport) -> list[Answer | None]:
            if self.s.is_cut:
                return [None]
            meter = Meter(self.s)
            number = self.job.first + sample.sample
            answer = continue_answer(
                transport, self.s.request, sample, max_tokens=room, number=number, on_tokens=meter.add, cut=self.s.cut
            )
            return await meter.around(_as_list(answer), had=had)

        answers = await self._send(attempt, [sample])
        if answers is not None and answers[0] is not None:
            await self._finish(sample, answers[0], had=had)
            return
        self.usage.completion += had
        if answers is not None:
            self._leave_open(sample)

    async def _send(self, attempt: Callable[[Transport], Any], samples: list[Sample]) -> list[Answer | None] | None:
        """None where it failed for good: the samples have their reason then."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        error: Exception | None = None
        answers: list[Answer | None] = []
        base_url = ""

        async def noted(transport: Transport) -> list[Answer | None]:
            nonlocal base_url
            base_url = transport.base_url  # of the last one that was tried
            return await attempt(transport)

        try:
            answers = await self.s.servers.send(
                noted,
                size=self.size._replace(n=len(samples)),
                max_retries=self.s.max_retries,
                affinity=self.job.position,
            )
        except Exception as failure:  # noqa: BLE001 - whatever a request meets fails its own samples alone
            error = failure
            for sample in samples:
                self._fail(sample, failure)
        got = [answer for answer in answers if answer is not None]
        self.ledger.sent(samples, got, base_url=base_url, seconds=loop.time() - began, error=error)
        return None if error is not None else answers

    # Samples

    async def _finish(self, sample: Sample, answer: Answer, *, cached: bool = False, had: int = 0) -> None:
        """Fills in one sample, keeps it in the cache, and grades it; or leaves it open where the budget cut it off."""
        place = where(sample.task_id, sample.sample)
        s = self.s
        sample.cached = cached
        new = 0 if cached else (answer.completion_tokens or 0) - had
        self.usage.new_completion += new
        self.usage.completion += answer.completion_tokens or 0
        self.usage.prompt = max(self.usage.prompt, answer.prompt_tokens or len(answer.prompt_token_ids or ()))
        try:
            if had:
                extend(sample, answer, s.weights_version)
                sample.logprob_tokens = None  # of the first part alone
            else:
                # One sample of each call is checked token by token against its ids, as all come from the same server.
                first = self.job.position == 0 and sample.sample == 0
                wants = s.request.wants_logprobs
                read_choice(sample, answer, place, token_ids=s.token_ids, logprobs=wants, strings=first)
            if self._is_cut_off(sample, new):
                self._leave_open(sample)
                return
            if not cached and not had and self.job.digest is not None:
                await self.ledger.keep(sample, answer, self.job.digest, self.s.cache_body(self.messages))
            graded = await s.graders.grade(self.job.task, openai_choice(answer), place)
            sample.reward, sample.metrics = graded.reward, graded.metrics
        except Exception as error:  # noqa: BLE001 - one bad sample never costs another
            sample.error = writable(type_and_message(error))
        self.ledger.done(sample)

    def _is_cut_off(self, sample: Sample, new: int) -> bool:
        """True where not the model or max_tokens ended it, but the budget."""
        if sample.finish_reason in (None, "unfinished"):
            return self.s.budget is not None
        per_sample = None if self.s.budget is None else self.s.budget.per_sample
        if sample.finish_reason != "length" or per_sample is None or new < per_sample:
            return False
        return self.s.request.max_tokens is None or len(sample.token_ids or ()) < self.s.request.max_tokens

    def _leave_open(self, sample: Sample) -> None:
        sample.finish_reason = "unfinished"
        self.ledger.done(sample)

    def _fail(self, sample: Sample, error: Exception) -> None:
        if is_unfinished(sample):
            sample.finish_reason = None
        sample.error = writable(type_and_message(error))
        self.ledger.done(sample)


async def _as_list(answer: Any) -> list[Answer | None]:
    return [await answer]


def _neighbours(samples: Sequence[Sample], most: int) -> list[list[Sample]]:
    """Cuts samples into runs of consecutive numbers of at most `most` each: a request's seeds and keys are consecutive."""
    parts: list[list[Sample]] = []
    for sample in samples:
        if parts and len(parts[-1]) < most and parts[-1][-1].sample + 1 == sample.sample:
            parts[-1].append(sample)
        else:
            parts.append([sample])
    return parts
