"""Sample a group: each of its samples is one answer of the model, or a rollout (`play`).

Each sample number comes from the cache or a server, in requests of consecutive numbers. If a server
returns too few choices (many ignore n), the missing ones are requested again. Every answer becomes
a Sample on arrival, enters the cache and is graded once. Its failures cost no other task.
"""

import asyncio
from collections.abc import Sequence

from ttrl.errors import GraderError
from ttrl.records import Sample
from ttrl.rollouts.client.attempts import ChatAttempt
from ttrl.rollouts.client.choices import choice_of_sample, openai_choice, read_choice, writable
from ttrl.rollouts.client.wire import Answer
from ttrl.rollouts.graders.grading import Graders, type_and_message
from ttrl.rollouts.group import Group
from ttrl.rollouts.partial import ContinueAttempt, extend
from ttrl.rollouts.play import Play
from ttrl.rollouts.results import is_unfinished
from ttrl.tasks.task import Grade, Task


async def sample_group(group: Group) -> None:
    """Finish every sample: graded, failed, or cut off by the budget. Raises only CancelledError."""
    async with asyncio.TaskGroup() as work:
        if group.task.rollout is not None:
            for sample in group.result.samples:
                work.create_task(Play(group, sample).run())
        else:
            begun, fresh = _left_to_do(group)
            for sample in begun:
                work.create_task(_continue(group, sample))
            missing = []
            answers = await group.sampling.cached(group.digest, group.numbers(fresh))
            for sample, answer in zip(fresh, answers, strict=True):
                if answer is None:
                    missing.append(sample)
                else:
                    work.create_task(_finish(group, sample, answer, cached=True))
            for part in _neighbours(missing, group.sampling.samples_per_request):
                work.create_task(_request(group, part))
    if group.task.group_grader is not None:
        await _grade_together(group)
    await group.hand_on()


def _left_to_do(group: Group) -> tuple[list[Sample], list[Sample]]:
    """Return the samples with tokens and those without, except those finished by an earlier
    call.
    """
    begun: list[Sample] = []
    fresh: list[Sample] = []
    for sample in group.result.samples:
        group.usage.prompt = max(group.usage.prompt, len(sample.prompt_token_ids or ()))
        if is_unfinished(sample) or (sample.finish_reason is None and sample.error is None):
            (begun if sample.token_ids else fresh).append(sample)
        else:
            group.usage.completion += len(sample.token_ids or ())
            if not group.waits(sample):
                group.sampling.progress.add_sample(sample, cached=True)
    return begun, fresh


async def _request(group: Group, samples: list[Sample]) -> None:
    """Request these consecutive samples, and again those the server left out."""
    attempt = ChatAttempt(
        request=group.sampling.first_request,
        messages=group.messages,
        n=len(samples),
        seed_offset=group.first + samples[0].sample,
        on_chunk=group.sampling.request.on_chunk,
        watch=group.watch(samples, group.messages),
        count=group.sampling.count_tokens,
        cut=group.sampling.cut,
    )
    try:
        size = group.size._replace(n=len(samples))
        answers = await group.send(attempt, samples, size, digest=group.digest)
    except Exception as error:  # noqa: BLE001
        # A failed request fails only its own samples.
        for sample in samples:
            _fail(group, sample, error)
        return
    async with asyncio.TaskGroup() as work:
        left = []
        for sample, answer in zip(samples, answers, strict=True):
            if answer is not None:
                work.create_task(_finish(group, sample, answer))
            elif group.sampling.is_cut:
                _leave_open(group, sample)
            else:
                left.append(sample)
        for part in _neighbours(left, len(samples)):
            work.create_task(_request(group, part))


async def _continue(group: Group, sample: Sample) -> None:
    """Continue this sample from an earlier call's cut."""
    had = len(sample.token_ids or ())
    most = group.sampling.chat_request.max_tokens
    limits = [] if most is None else [most - had]
    if group.sampling.budget is not None and group.sampling.budget.per_sample is not None:
        limits.append(group.sampling.budget.per_sample)
    attempt = ContinueAttempt(
        request=group.sampling.chat_request,
        sample=sample,
        max_tokens=min(limits, default=None),
        number=group.first + sample.sample,
        on_chunk=group.sampling.request.on_chunk,
        had=had,
        count=group.sampling.count_tokens,
        cut=group.sampling.cut,
    )
    try:
        answers = await group.send(attempt, [sample], group.size, digest=group.digest)
    except Exception as error:  # noqa: BLE001 - as above
        group.usage.completion += had
        _fail(group, sample, error)
        return
    if answers[0] is not None:
        await _finish(group, sample, answers[0], had=had)
    else:
        group.usage.completion += had
        _leave_open(group, sample)


async def _finish(
    group: Group, sample: Sample, answer: Answer, *, cached: bool = False, had: int = 0
) -> None:
    """Fill in one sample, cache and grade it; or leave it open if the budget cut it off."""
    place = sample.where
    sampling = group.sampling
    sample.cached = cached
    new = 0 if cached else (answer.completion_tokens or 0) - had
    group.usage.new_completion += new
    group.usage.completion += answer.completion_tokens or 0
    group.usage.prompt = max(
        group.usage.prompt, answer.prompt_tokens or len(answer.prompt_token_ids or ())
    )
    try:
        if had:
            extend(sample, answer, sampling.request.weights_version)
            sample.logprob_tokens = None  # of the first part only
        else:
            # Check one sample of each call token by token against its ids; all come from the same
            # server.
            first = group.position == 0 and sample.sample == 0
            read_choice(
                sample,
                answer,
                place,
                token_ids=sampling.request.token_ids,
                logprobs=sampling.chat_request.wants_logprobs,
                strings=first,
            )
        if _is_cut_off(group, sample, new):
            _leave_open(group, sample)
            return
        # Do not cache continued samples: they may have tokens of several policies.
        if not cached and not had:
            number = group.first + sample.sample
            await sampling.keep(group.digest, number, answer, sample.finish_reason, group.messages)
        if group.task.grader is not None:
            graded = await sampling.graders.grade(group.task, openai_choice(answer), place)
            sample.reward = graded.reward
            sample.metrics = graded.metrics
    except Exception as error:  # noqa: BLE001 - one bad sample never costs another
        sample.error = writable(type_and_message(error))
    group.done(sample)


async def _grade_together(group: Group) -> None:
    """Grade the group's samples without errors together, unless some are still to be continued."""
    if any(is_unfinished(sample) for sample in group.result.samples):
        return
    waiting = [sample for sample in group.result.samples if group.waits(sample)]
    await grade_together(group.task, group.result.samples, group.sampling.graders)
    for sample in waiting:
        group.count(sample)


def _is_cut_off(group: Group, sample: Sample, new: int) -> bool:
    """Return whether the budget ended it, not the model or max_tokens."""
    budget = group.sampling.budget
    most = group.sampling.chat_request.max_tokens
    if budget is None:
        return False
    if sample.finish_reason in (None, "unfinished"):
        return True
    if sample.finish_reason != "length" or budget.per_sample is None or new < budget.per_sample:
        return False
    return most is None or len(sample.token_ids or ()) < most


def _leave_open(group: Group, sample: Sample) -> None:
    sample.finish_reason = "unfinished"
    group.done(sample)


def _fail(group: Group, sample: Sample, error: Exception) -> None:
    if is_unfinished(sample):
        sample.finish_reason = None
    sample.error = writable(type_and_message(error))
    group.done(sample)


async def grade_together(task: Task, samples: Sequence[Sample], graders: Graders) -> None:
    """Grade a task's samples without errors together, once; add this to their rewards and
    metrics.
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
    """Split samples into runs of at most `most` consecutive numbers, as needed for a request's
    seeds and keys.
    """
    parts: list[list[Sample]] = []
    for sample in samples:
        if parts and len(parts[-1]) < most and parts[-1][-1].sample + 1 == sample.sample:
            parts[-1].append(sample)
        else:
            parts.append([sample])
    return parts
