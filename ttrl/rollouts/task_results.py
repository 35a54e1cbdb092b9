"""Sample and grade tasks: `get_task_results` for a list of them, `iter_task_results` for any
number.

A failure is data, not an end. A failed request, a bad completion, or an exception of a grader or
transform costs its own sample or result and nothing else. Its reason is kept (`Sample.error`),
counted (`TaskResults.stats`) and logged in one line at the end.

`ttrl.rollouts.group_samples` samples one task; `servers` has admission, balance and retries,
`client.attempts` the requests.
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
from ttrl.rollouts.client.assembly import OnChunk
from ttrl.rollouts.group import Group
from ttrl.rollouts.group_samples import sample_group
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
    """Sample `n` completions of every task and grade them; results come back in task order.

    For a task with a `rollout`, run its coroutine `n` times instead; each of its requests follows
    the rules below.

    client: an AsyncOpenAI client or a base URL ("http://127.0.0.1:8000/v1"; the key is then taken
        from OPENAI_API_KEY), or a list of them, all serving the same model: requests are spread
        over them and moved away from a failing one.
    params: sampling parameters of the OpenAI API (temperature, max_tokens, stop, …) or of vLLM
        (top_k, min_p, …), and `extra_body`. Logprobs are requested unless it says {"logprobs":
        False}.
    token_ids: requests the server's own token ids (vLLM's return_token_ids) and fails samples
        without them. False for servers without the option: their samples have no ids.

    cache: stores and finds completions: a folder, "memory://", "s3://…", "gs://…", "az://…", a list
        of them, or a Cache. Every sample number has its own entry, so `n` may be raised later.
        Graders always run.
    weights_digest: names the served weights, for the cache; needed with a cache and a server on
        this machine.
    weights_version: marks the samples: the iteration of the served checkpoint.

    concurrency: requests in flight at once, or a semaphore shared with other calls; None: enough to
        keep the server's KV cache full (its /metrics give the size), or as many as an unknown
        server bears.
    samples_per_request: samples of a task per request; None: all, or one if `on_chunk` may end them
        or sampling is greedy. All of them go to the same server, for its prefix cache.
    max_retries: of a request, on broken connections, timeouts, stalled streams, 408, 429 and 5xx,
        with pauses of 0.5, 1, 2 … s.
    max_downtime: seconds requests wait while no server answers (a restart costs no retry).
    stall_timeout: seconds without a byte before a stream counts as broken.

    on_chunk: `on_chunk(chunk, completion)` sees every chunk of the streamed completions;
        StopIteration ends the choices of that chunk (finish_reason "stopped_early"). See
        InferenceEarlyStop. Not called for completions from the cache; of a continued one, it sees
        the earlier part as one chunk.
    isolated: runs graders in their own processes, ended if a grade takes longer than
        `grader_timeout` seconds or more than `grader_memory` bytes; they do not see keys and tokens
        of our environment, and async ones run one per process. Otherwise sync graders run in up to
        16 threads at once and must be thread-safe.
    transform: called with each result once its task is finished; a sync one runs in a thread, one
        call at a time. `TaskResults.transformed` holds its results or exceptions.
    on_task_done: called on the event loop after each task.

    token_budget: new completion tokens of this call, or a TokenBudget. Completions it cuts off are
        kept (`TaskResults.unfinished`); a later call with them as `unfinished` continues exactly
        there. Needs a vLLM server.
    unfinished: groups to continue, for the first tasks of `tasks`, in their order.

    prices: dollars per million prompt and completion tokens. Only new tokens are counted.
    pbar: a progress bar in terminals and notebooks; a string is its description, as is `pbar_desc`.
    log_dir: a folder for one readable text file per sample, with answers as they arrive (they are
        streamed).
    requests_log: a jsonl file; gets one line per request.

    Raises TaskError or UserError for wrong arguments before anything is sent; later failures are
    kept with their samples (see `TaskResults.raise_if_all_failed`). On cancellation, such as
    Ctrl-C, all requests are ended first, and the CancelledError has the finished tasks as `results`
    (a TaskResults).

    >>> def right(choice):
    ...     return float(choice.message.content == "5")
    >>> tasks = [Task([{"role": "user", "content": "What is 2 + 3?"}], right)]
    >>> server = "http://127.0.0.1:8000/v1"
    >>> results = asyncio.run(get_task_results(tasks, server, "m", n=4, pbar=False))
    >>> [sample.reward for sample in results.samples]
    [1.0, 1.0, 1.0, 1.0]
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
        cancelled.results = _collected(sampling, groups, start)  # type: ignore[attr-defined]
        raise
    results = _collected(sampling, groups, start)
    log_stats(results, request.description)
    return results


async def iter_task_results(
    tasks: Iterable[Task], client: Client, model: str, **arguments: Any
) -> AsyncIterator[TaskResult]:
    """Sample any number of tasks as `get_task_results` does: yield each result once it is finished,
    and keep none.

    Tasks are taken from the iterable as needed: it may be an endless generator. Arguments and
    errors are the same, except for wrong tasks: they are found on their turn. Leaving the loop ends
    all requests (`contextlib.aclosing` does so at once). Results of `transform` are lost; use
    `on_task_done`, or the loop's body.

    >>> def right(choice):
    ...     return float(choice.message.content == "5")
    >>> tasks = (Task([{"role": "user", "content": f"What is {n} + 3?"}], right) for n in range(3))
    >>> server = "http://127.0.0.1:8000/v1"
    >>> async def rewards():
    ...     return [result.rewards async for result in iter_task_results(tasks, server, "m", n=2)]
    >>> sorted(asyncio.run(rewards()))
    [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
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
    """Yield every group once it is finished; on an early close `left` gets the finished rest.

    Limits tasks started but not handed over: few enough for memory, yet more than can be in flight,
    so no server waits.
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
                task.result()  # raises only faults of ours
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
    """Return the groups in task order. start: of the call, on the monotonic clock."""
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
    """Yield the tasks, each checked on its turn.

    Raises TaskError for anything but a Task, or a Task without a JSON form.
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
        task.as_json()  # raises now, not after hours of rollouts
        yield task
