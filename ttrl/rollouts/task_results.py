"""Samples and grades tasks: one request per task, all of them concurrently, every completion graded once.

A failure is data, not an end: a failed request, a bad completion, a grader or a transform that raises costs what it concerns and
nothing else. It is kept with its reason (`Sample.error`), counted (`TaskResults.stats`) and logged in one line at the end.
"""

import asyncio
import json
import logging
import math
import numbers
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeAlias

from openai import AsyncOpenAI
from openai.types.chat.chat_completion import ChatCompletion, Choice

from ttrl.errors import GraderError, ServerError, TaskError, TokenizationError, UserError
from ttrl.records import Sample, TaskResult
from ttrl.rollouts.chat_completions import ChatRequest, get_chat_completion
from ttrl.rollouts.choices import choices_by_number, read_choice, token_usage, writable
from ttrl.rollouts.grading import Threads, call, describe, grade
from ttrl.rollouts.progress import Progress
from ttrl.rollouts.results import RolloutStats, TaskResults, where
from ttrl.tasks.task import Task

__all__ = ["RolloutStats", "TaskResults", "get_task_results"]

logger = logging.getLogger(__name__)

DEFAULT_CONCURRENCY = 512
"""Requests in flight. Below the client's 1000 connections and a shell's 1024 open files: what waits inside the client's pool
runs into its timeout without ever having been sent."""
GRADER_THREADS = 16

Transform: TypeAlias = Callable[[TaskResult], Any]


async def get_task_results(
    tasks: Iterable[Task],
    client: AsyncOpenAI,
    model: str,
    *,
    n: int = 1,
    params: Mapping[str, Any] | None = None,
    token_ids: bool = True,
    concurrency: int | asyncio.Semaphore | None = None,
    weights_version: int = -1,
    transform: Transform | Callable[[TaskResult], Awaitable[Any]] | None = None,
    on_task_done: Callable[[TaskResult], None] | None = None,
    pbar: bool | str = True,
    pbar_desc: str = "sampling",
    grader_timeout: float = 60.0,
    max_retries: int = 4,
) -> TaskResults:
    """Samples `n` completions of every task and grades them; results come back in the order of the tasks.

    params: sampling parameters of the OpenAI API (temperature, max_tokens, stop, …) or of vLLM (top_k, min_p, …), and
        `extra_body`. Logprobs are asked for unless it says {"logprobs": False}.
    token_ids: asks for the server's own token ids (vLLM's return_token_ids) and fails samples that come without. False for
        servers that do not know the option: their samples have no ids.
    concurrency: requests in flight at once, or a semaphore shared with other calls; None for 512.
    weights_version: what the samples are marked with: the iteration whose checkpoint the server serves.
    transform: called with each result as soon as its task is finished, if sync one at a time in a thread; what it returns, or the
        exception that it raised, stands in `TaskResults.transformed`.
    on_task_done: called on the event loop after each task.
    pbar: a progress bar in terminals and notebooks; a string is its description, as is `pbar_desc`.
    grader_timeout: seconds for one grade. Sync graders run in up to 16 threads at once: they must be safe to call so.
    max_retries: of a request, on connection errors, timeouts, 408, 429 and 5xx, with pauses of 0.5, 1, 2, 4 … seconds.

    Raises TaskError or UserError before anything is sent if the arguments are wrong; afterwards failures are kept with their
    samples (see `TaskResults.raise_if_all_failed`). On cancellation, such as Ctrl-C, all requests are ended first.
    """
    tasks = _checked_tasks(tasks)
    request = ChatRequest.of(client, model, n=n, params=params, token_ids=token_ids, max_retries=max_retries)
    if not isinstance(grader_timeout, numbers.Real) or not 0 < grader_timeout < math.inf:
        raise UserError(f"grader_timeout is {grader_timeout!r}; give a positive number of seconds")
    for name, function in (("transform", transform), ("on_task_done", on_task_done)):
        if function is not None and not callable(function):
            raise UserError(f"{name} is {function!r}; give a function of a TaskResult")
    semaphore = _semaphore(concurrency)
    description = pbar if isinstance(pbar, str) else pbar_desc
    start = time.monotonic()
    with (
        Progress(len(tasks) * n, description, enabled=bool(pbar)) as progress,
        Threads(GRADER_THREADS) as grader_threads,
        Threads(1) as transform_thread,
    ):
        rollouts = _Rollouts(
            request=request,
            n=n,
            token_ids=token_ids,
            weights_version=weights_version,
            semaphore=semaphore,
            grader_threads=grader_threads,
            grader_timeout=float(grader_timeout),
            transform=transform,
            transform_thread=transform_thread,
            on_task_done=on_task_done,
            progress=progress,
        )
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(rollouts.run(task)) for task in tasks]
    outcomes = [task.result() for task in running]
    results = TaskResults(
        [result for result, _, _ in outcomes],
        seconds=time.monotonic() - start,
        usage=[usage for _, usage, _ in outcomes],
        transformed=None if transform is None else [transformed for _, _, transformed in outcomes],
        other_failures=rollouts.other_failures,
    )
    stats = results.stats
    logger.info("%s: %s", description, stats.summary())
    if stats.exceptions:
        logger.warning("%s: failures: %s", description, stats.failures())
    return results


def _checked_tasks(tasks: Iterable[Task]) -> list[Task]:
    if isinstance(tasks, Task) or not isinstance(tasks, Iterable):
        raise TaskError(f"tasks is a {type(tasks).__name__}; give a list of Task")
    tasks = list(tasks)
    if not tasks:
        raise TaskError("tasks is empty; give at least one Task")
    for number, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise TaskError(f"tasks[{number}] is a {type(task).__name__}; give Task(messages, grader)")
        try:  # now, not when hours of rollouts are to be written
            json.dumps([task.id, task.messages], ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise TaskError(f"task {task.id!r}: its id and messages cannot be written as JSON: {error}") from error
    return tasks


def _semaphore(concurrency: int | asyncio.Semaphore | None) -> asyncio.Semaphore:
    if isinstance(concurrency, asyncio.Semaphore):
        return concurrency
    if concurrency is None:
        return asyncio.Semaphore(DEFAULT_CONCURRENCY)
    if not isinstance(concurrency, int) or isinstance(concurrency, bool) or concurrency < 1:
        raise UserError(f"concurrency is {concurrency!r}; give a number of requests of at least 1, an asyncio.Semaphore, or None")
    return asyncio.Semaphore(concurrency)


class _Rollouts:
    """What all tasks of one call share."""

    def __init__(
        self,
        *,
        request: ChatRequest,
        n: int,
        token_ids: bool,
        weights_version: int,
        semaphore: asyncio.Semaphore,
        grader_threads: Threads,
        grader_timeout: float,
        transform: Transform | None,
        transform_thread: Threads,
        on_task_done: Callable[[TaskResult], None] | None,
        progress: Progress,
    ) -> None:
        self.request, self.n, self.token_ids, self.weights_version = request, n, token_ids, weights_version
        self.semaphore, self.grader_threads, self.grader_timeout = semaphore, grader_threads, grader_timeout
        self.transform, self.transform_thread, self.on_task_done = transform, transform_thread, on_task_done
        self.progress = progress
        self.other_failures: Counter[str] = Counter()
        """Of transforms and callbacks; those of samples stand in the samples."""

    async def run(self, task: Task) -> tuple[TaskResult, tuple[int, int] | None, Any]:
        """One task from its request to its transform: (result, usage, transformed). Raises nothing but CancelledError."""
        messages = [dict(message) for message in task.messages]
        samples = [
            Sample(task_id=task.id, sample=k, messages=messages, weights_version=self.weights_version) for k in range(self.n)
        ]
        usage = None
        try:
            async with self.semaphore:
                completion = await get_chat_completion(self.request, messages)
            usage = token_usage(completion)
            choices = choices_by_number(completion, self.n)
        except Exception as error:  # noqa: BLE001 - whatever a request meets fails its own samples alone
            for sample in samples:
                sample.error = writable(_type_and_message(error))
                self.progress.add_sample(sample)
        else:
            self.progress.add_tokens(usage[1] if usage is not None else 0)
            async with asyncio.TaskGroup() as group:
                for sample, choice in zip(samples, choices, strict=True):
                    group.create_task(self._finish(sample, choice, completion, task))
        result = TaskResult(task_id=task.id, messages=messages, samples=samples)
        transformed = await self._transform(result)
        if self.on_task_done is not None:
            try:
                self.on_task_done(result)
            except Exception as error:  # noqa: BLE001 - a callback must not cost results
                self._count_other("on_task_done", task, error)
        return result, usage, transformed

    async def _finish(self, sample: Sample, choice: Choice | None, completion: ChatCompletion, task: Task) -> None:
        """Fills in one sample and grades it."""
        place = where(sample.task_id, sample.sample)
        try:
            if choice is None:
                given = sum(other is not None for other in completion.choices)
                raise ServerError(f"{place}: the server returned {given} choices, {self.n} were asked for")
            read_choice(sample, choice, completion, place, token_ids=self.token_ids, logprobs=self.request.wants_logprobs)
            graded = await grade(task.grader, choice, where=place, threads=self.grader_threads, timeout=self.grader_timeout)
            sample.reward, sample.metrics = graded.reward, graded.metrics
        except Exception as error:  # noqa: BLE001 - one bad sample never costs another
            sample.error = writable(_type_and_message(error))
        self.progress.add_sample(sample)

    async def _transform(self, result: TaskResult) -> Any:
        if self.transform is None:
            return None
        value, error = await call(self.transform, result, threads=self.transform_thread, timeout=None)
        if error is not None:
            self._count_other("transform", result, error)
            return error
        return value

    def _count_other(self, what: str, where_: Task | TaskResult, error: BaseException) -> None:
        """Each reason is logged once with its traceback; its count is in the statistics."""
        name = f"{what}: {describe(error)}"
        if name not in self.other_failures:
            task_id = where_.id if isinstance(where_, Task) else where_.task_id
            logger.warning("task %r: %s failed", task_id, what, exc_info=error)
        self.other_failures[name] += 1


def _type_and_message(error: BaseException) -> str:
    """Our own errors as they are written (a grader's traceback included), others by their type and first line."""
    if isinstance(error, GraderError | ServerError | TokenizationError):
        return f"{type(error).__name__}: {error}"
    return describe(error)
