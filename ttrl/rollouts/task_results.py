"""Samples and grades tasks: `get_task_results` for a list of them, `iter_task_results` for any
number.

A failure is data, not an end: a failed request, a bad completion, a grader or a transform that
raises costs what it concerns and nothing else. It is kept with its reason (`Sample.error`), counted
(`TaskResults.stats`) and logged in one line at the end.

The way of a task is in `ttrl.rollouts.answers`; admission, balance and retries in `servers`; what
is sent in `client.attempts`.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

from ttrl.errors import TaskError
from ttrl.records import TaskResult
from ttrl.rollouts.answers import sample_group
from ttrl.rollouts.client.assembly import OnChunk
from ttrl.rollouts.group import Group
from ttrl.rollouts.partial import TokenBudget
from ttrl.rollouts.progress import Prices
from ttrl.rollouts.request import CacheLike, Client, SamplingRequest, Transform
from ttrl.rollouts.results import TaskResults, log_stats
from ttrl.rollouts.sampling import Job, Sampling
from ttrl.tasks.task import Task

__all__ = ["TaskResults", "get_task_results", "iter_task_results"]


async def get_task_results(
    tasks: Iterable[Task],
    client: Client,
    model: str,
    *,
    n: int = 1,
    params: Mapping[str, Any] | None = None,
    token_ids: bool = True,
    cache: CacheLike = None,
    weights_digest: str | None = None,
    weights_version: int = -1,
    concurrency: int | asyncio.Semaphore | None = None,
    samples_per_request: int | None = None,
    max_retries: int = 4,
    max_downtime: float = 60.0,
    stall_timeout: float = 120.0,
    on_chunk: OnChunk | None = None,
    isolated: bool = False,
    grader_timeout: float = 60.0,
    grader_memory: int | None = None,
    transform: Transform | None = None,
    on_task_done: Callable[[TaskResult], None] | None = None,
    token_budget: int | TokenBudget | None = None,
    unfinished: Iterable[TaskResult] = (),
    prices: Prices | tuple[float, float] | None = None,
    pbar: bool | str = True,
    pbar_desc: str = "sampling",
    log_dir: str | os.PathLike[str] | None = None,
    requests_log: str | os.PathLike[str] | None = None,
) -> TaskResults:
    """Sample `n` completions of every task and grade them; results come back in the order of the
    tasks.

    A task with a `rollout` has its coroutine run `n` times instead; each of its requests is made as
    it is told here for one.

    client: an AsyncOpenAI client or a base URL ("http://127.0.0.1:8000/v1"; the key is then taken
        from OPENAI_API_KEY), or a list of them, all of which must serve the same model: requests
        are spread over them and moved away from one that fails.
    params: sampling parameters of the OpenAI API (temperature, max_tokens, stop, …) or of vLLM
        (top_k, min_p, …), and `extra_body`. Logprobs are asked for unless it says {"logprobs":
        False}.
    token_ids: asks for the server's own token ids (vLLM's return_token_ids) and fails samples that
        come without. False for servers that do not know the option: their samples have no ids.

    cache: where completions are kept and looked for: a folder, "memory://", "s3://…", "gs://…",
        "az://…", a list of them, or a Cache. Every sample number has an entry of its own, so `n`
        may be raised later. Graders always run.
    weights_digest: names the weights that the server serves, for the cache; needed with a cache and
        a server on this machine.
    weights_version: what the samples are marked with: the iteration whose checkpoint the server
        serves.

    concurrency: requests in flight at once, or a semaphore shared with other calls; None: as many
        as keep the server's KV cache full (its /metrics say how large it is), or as an unknown
        server bears.
    samples_per_request: how many of a task's samples one request asks for; None: all, or one where
        `on_chunk` may end them and where sampling is greedy. All of them go to the same server,
        whose prefix cache serves the prompt.
    max_retries: of a request, on broken connections, timeouts, stalled streams, 408, 429 and 5xx,
        with pauses of 0.5, 1, 2 … s.
    max_downtime: seconds for which requests wait when no server answers (a restart costs no retry).
    stall_timeout: seconds without a byte after which a stream counts as broken.

    on_chunk: `on_chunk(chunk, completion)` sees every chunk, so that completions are streamed;
        StopIteration ends the choices of that chunk (finish_reason "stopped_early"). See
        InferenceEarlyStop. Not called for completions from the cache.
    isolated: graders run in processes of their own, which are ended when a grade takes longer than
        `grader_timeout` seconds or more than `grader_memory` bytes; they do not see keys and tokens
        of our environment, and async ones run one per process. Otherwise sync graders run in up to
        16 threads at once: they must be safe to call so.
    transform: called with each result as soon as its task is finished, if sync one at a time in a
        thread; what it returns, or the exception that it raised, stands in
        `TaskResults.transformed`.
    on_task_done: called on the event loop after each task.

    token_budget: new completion tokens of this call, or a TokenBudget. What it cuts off is kept
        (`TaskResults.unfinished`), and goes on, exactly where it was, in a later call that is given
        it as `unfinished`. Needs a vLLM server.
    unfinished: groups to continue, for the first tasks of `tasks`, in their order.

    prices: dollars per million prompt and completion tokens. Only what is new is counted.
    pbar: a progress bar in terminals and notebooks; a string is its description, as is `pbar_desc`.
    log_dir: a folder for one readable text file per sample, in which answers can be read while they
        come (they are streamed).
    requests_log: a jsonl file to which one line per request is appended.

    Raises TaskError or UserError before anything is sent if the arguments are wrong; afterwards
    failures are kept with their samples (see `TaskResults.raise_if_all_failed`). On cancellation,
    such as Ctrl-C, all requests are ended first, and the CancelledError carries what was finished
    as `results` (a TaskResults).
    """
    request = SamplingRequest(
        client=client,
        model=model,
        n=n,
        params=params,
        token_ids=token_ids,
        cache=cache,
        weights_digest=weights_digest,
        weights_version=weights_version,
        concurrency=concurrency,
        samples_per_request=samples_per_request,
        max_retries=max_retries,
        max_downtime=max_downtime,
        stall_timeout=stall_timeout,
        on_chunk=on_chunk,
        isolated=isolated,
        grader_timeout=grader_timeout,
        grader_memory=grader_memory,
        transform=transform,
        on_task_done=on_task_done,
        token_budget=token_budget,
        unfinished=unfinished,
        prices=prices,
        pbar=pbar,
        pbar_desc=pbar_desc,
        log_dir=log_dir,
        requests_log=requests_log,
    )
    return await sample_tasks(tasks, request)


async def sample_tasks(tasks: Iterable[Task], request: SamplingRequest) -> TaskResults:
    """Sample and grade tasks as `get_task_results` does."""
    checked = list(_checked(tasks))
    if not checked:
        raise TaskError("tasks is empty; give at least one Task")
    sampling = Sampling(request, len(checked))
    jobs = list(sampling.jobs(checked))
    start = time.monotonic()
    groups: list[Group] = []
    try:
        async with contextlib.aclosing(_finished(sampling, iter(jobs), left=groups)) as stream:
            async for group in stream:
                groups.append(group)
    except asyncio.CancelledError as cancelled:
        # No subclass with a field: asyncio.timeout looks for this very type.
        cancelled.results = _collected(sampling, groups, start)  # type: ignore[attr-defined]  # see above
        raise
    results = _collected(sampling, groups, start)
    log_stats(results, request.description)
    return results


async def iter_task_results(
    tasks: Iterable[Task], client: Client, model: str, **arguments: Any
) -> AsyncIterator[TaskResult]:
    """Sample any number of tasks as `get_task_results` does: yields each result as soon as it is
    finished, and keeps none.

    Tasks are taken from the iterable as they are needed: it may be a generator without end. What
    was said of the arguments and errors there holds here too, except that a wrong task is found
    when its turn comes. Leaving the loop ends all requests (`contextlib.aclosing` does so at once).
    What `transform` returns is lost; use `on_task_done`, or the loop's body.
    """
    request = SamplingRequest(client=client, model=model, **arguments)
    sampling = Sampling(request, len(tasks) if isinstance(tasks, Sequence) else None)
    jobs = sampling.jobs(_checked(tasks))
    async with contextlib.aclosing(_finished(sampling, jobs, left=[])) as stream:
        async for group in stream:
            yield group.result


async def _finished(
    sampling: Sampling, jobs: Iterator[Job], *, left: list[Group]
) -> AsyncGenerator[Group, None]:
    """Yield every group as soon as it is finished; `left` gets those that are finished when it is
    closed early.

    Fewer tasks are begun and not yet handed over than would fill memory; more than can be in
    flight, so that no server waits.
    """
    concurrency = sampling.request.concurrency
    if isinstance(concurrency, int):
        live = 4 * concurrency
    else:
        live = sampling.most_live
    finished: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
    running: dict[asyncio.Task[None], Group] = {}
    begun = 0
    async with sampling.running():
        try:
            while True:
                while (
                    finished.empty()
                    and len(running) < live
                    and (job := next(jobs, None)) is not None
                ):
                    group = Group(sampling, job)
                    task = asyncio.create_task(sample_group(group), name=f"task {job.task.id}")
                    task.add_done_callback(finished.put_nowait)
                    running[task] = group
                    begun += 1
                    if begun % 64 == 0:
                        # A generator of a million tasks must not hold up the first ones.
                        await asyncio.sleep(0)
                if not running:
                    return
                task = await finished.get()
                group = running.pop(task)
                task.result()  # raises what can only be a fault of ours
                yield group
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            left += [
                group
                for task, group in running.items()
                if not task.cancelled() and task.exception() is None
            ]


def _collected(sampling: Sampling, groups: Iterable[Group], start: float) -> TaskResults:
    """Return the groups in the order of their tasks. start: of the call, on the monotonic clock."""
    ordered = sorted(groups, key=lambda group: group.position)
    transformed = None
    if sampling.request.transform is not None:
        transformed = [group.transformed for group in ordered]
    return TaskResults(
        [group.result for group in ordered],
        seconds=time.monotonic() - start,
        grading_seconds=sampling.graders.seconds,
        usage=[group.usage for group in ordered],
        transformed=transformed,
        other_failures=sampling.other_failures,
        prices=sampling.prices,
    )


def _checked(tasks: Iterable[Task]) -> Iterator[Task]:
    """Yield the tasks, each checked when its turn comes.

    Raises TaskError for what is no Task or cannot be written to a file.
    """
    if isinstance(tasks, Task) or not isinstance(tasks, Iterable):
        raise TaskError(
            f"tasks is a {type(tasks).__name__}; give Tasks, in a list or any other iterable"
        )
    for number, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise TaskError(
                f"tasks[{number}] is a {type(task).__name__}; give Task(messages, grader)"
            )
        task.as_json()  # it raises now, not when hours of rollouts are to be written
        yield task
