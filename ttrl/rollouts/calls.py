"""One call of `get_task_results`: its arguments, checked before anything is sent, and the stream of its tasks."""

import asyncio
import contextlib
import itertools
import json
import math
import numbers
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ttrl.errors import TaskError, UserError
from ttrl.records import TaskResult
from ttrl.rollouts.cache.completions import Cache, request_digest
from ttrl.rollouts.client.chat_completions import ChatRequest
from ttrl.rollouts.client.transport import answer_identity, transport_for
from ttrl.rollouts.graders.grading import Graders, Threads
from ttrl.rollouts.group import Outcome, run_task
from ttrl.rollouts.partial import TokenBudget, check_continuable
from ttrl.rollouts.progress import Prices, Progress
from ttrl.rollouts.requests_log import RequestsLog
from ttrl.rollouts.sample_logs import SampleLogs
from ttrl.rollouts.sampling import Job, Sampling, cache_body
from ttrl.rollouts.scheduling.lengths import Lengths
from ttrl.rollouts.scheduling.servers import Servers
from ttrl.tasks.task import Task

LIVE_SAMPLES = 16384
"""Samples of tasks that are begun and not yet handed over, where the server decides how many requests are in flight."""


class Call:
    """`arguments`: those of `get_task_results`, all of them, by name; total: the number of tasks, None where it is not known.

    Raises UserError for everything that can be known to be wrong before a request is made.
    """

    def __init__(self, arguments: Mapping[str, Any], total: int | None) -> None:
        given = dict(arguments)
        client = given["client"]
        clients = list(client) if isinstance(client, Sequence) and not isinstance(client, str) else [client]
        if not clients:
            raise UserError("client is an empty list; give at least one AsyncOpenAI client or base URL")
        self.n: int = given["n"]
        self.kept = list(given["unfinished"])
        self.budget = TokenBudget.of(given["token_budget"])
        for one in clients:
            self.request = ChatRequest.of(
                one,
                given["model"],
                n=self.n,
                params=given["params"],
                token_ids=given["token_ids"],
                max_retries=given["max_retries"],
                stall_timeout=_positive("stall_timeout", given["stall_timeout"]),
            )
        _check_callables(given)
        if self.budget is not None or self.kept:
            check_continuable(self.request)
        per_request = given["samples_per_request"]
        if per_request is not None and (type(per_request) is not int or per_request < 1):
            raise UserError(f"samples_per_request is {per_request!r}; give a number of at least 1, or None")
        # vLLM refuses n > 1 where sampling is greedy; and a choice of many that is ended early would be sampled on.
        alone = given["on_chunk"] is not None or self.request.parameters.get("temperature") == 0
        self.samples_per_request = per_request or (1 if alone else self.n)
        if not all(isinstance(result, TaskResult) for result in self.kept):
            raise UserError("unfinished holds something else than TaskResult; give the `unfinished` of an earlier call")
        if wrong := [result for result in self.kept if len(result.samples) != self.n]:
            raise UserError(
                f"unfinished: task {wrong[0].task_id!r} has {len(wrong[0].samples)} samples, n is {self.n}; give the n of the "
                "call that began them"
            )
        if (self.budget is not None or self.kept) and not given["token_ids"]:
            raise UserError("token_budget and unfinished need token ids: completions are continued from them; set token_ids=True")
        self.prices = None if given["prices"] is None else Prices.of(given["prices"])
        self.description = given["pbar"] if isinstance(given["pbar"], str) else given["pbar_desc"]
        self.cache = Cache.of(given["cache"])
        self.transports = [transport_for(one) for one in clients]
        self.identity = answer_identity(self.transports, given["weights_digest"], has_cache=self.cache is not None)
        self.other_failures: Counter[str] = Counter()
        """Of transforms and callbacks; those of samples stand in the samples."""
        self.not_handed_over: list[Outcome] = []
        """What was finished when the call was cancelled."""
        concurrency = given["concurrency"]
        # More than can be in flight, so that no server waits for us; not many more, as each keeps its answers until it is graded.
        self._live = 4 * concurrency if isinstance(concurrency, int) else max(256, LIVE_SAMPLES // self.n)
        self._servers = Servers(
            self.transports,
            concurrency=concurrency,
            max_downtime=_positive("max_downtime", given["max_downtime"]),
            lengths=_known_lengths(given["model"], [transport.base_url for transport in self.transports]),
        )
        self._graders = Graders(
            isolated=bool(given["isolated"]),
            timeout=_positive("grader_timeout", given["grader_timeout"]),
            memory=given["grader_memory"],
        )
        self._total = None if total is None else total * self.n
        self._given = given

    def check(self, task: Task) -> Task:
        """Raises TaskError for a task that this call cannot sample."""
        if task.rollout is not None and (self.budget is not None or self.kept):
            raise TaskError(
                f"task {task.id!r} has a rollout, which cannot be cut off by a token budget and continued later; leave "
                "token_budget and unfinished out, or give the task no rollout"
            )
        return task

    async def outcomes(self, tasks: Iterable[Task]) -> AsyncIterator[Outcome]:
        """Every task's outcome as it is finished. At most `live` tasks are begun and not yet handed over."""
        given = self._given
        finished: asyncio.Queue[Outcome | Exception] = asyncio.Queue()
        async with contextlib.AsyncExitStack() as stack:
            for transport in self.transports:
                stack.push_async_callback(transport.close)
            servers = await stack.enter_async_context(self._servers)
            graders = stack.enter_context(self._graders)
            progress = stack.enter_context(
                Progress(self._total, self.description, enabled=bool(given["pbar"]), prices=self.prices)
            )
            transform_thread = stack.enter_context(Threads(1))
            sampling = Sampling(
                request=self.request,
                servers=servers,
                n=self.n,
                graders=graders,
                progress=progress,
                transform_thread=transform_thread,
                other_failures=self.other_failures,
                samples_per_request=self.samples_per_request,
                budget=self.budget,
                cache=self.cache,
                requests_log=None if given["requests_log"] is None else RequestsLog(given["requests_log"]),
                sample_logs=None if given["log_dir"] is None else SampleLogs(given["log_dir"]),
                **{
                    name: given[name]
                    for name in ("token_ids", "weights_version", "max_retries", "on_chunk", "transform", "on_task_done")
                },
            )

            async def run(job: Job) -> None:
                try:
                    finished.put_nowait(await run_task(sampling, job))
                except Exception as error:  # noqa: BLE001 - a fault of ours: raised below, instead of waited for
                    finished.put_nowait(error)

            jobs = self._jobs(tasks)
            running: set[asyncio.Task[None]] = set()
            begun = handed_over = 0
            try:
                while True:
                    while finished.empty() and begun - handed_over < self._live and (job := next(jobs, None)) is not None:
                        task = asyncio.create_task(run(job), name=f"task {job.task.id}")
                        running.add(task)
                        task.add_done_callback(running.discard)
                        begun += 1
                        if begun % 64 == 0:
                            await asyncio.sleep(0)  # a generator of a million tasks must not hold up the first ones
                    if begun == handed_over:
                        break
                    outcome = await finished.get()
                    handed_over += 1
                    if isinstance(outcome, Exception):
                        raise outcome
                    yield outcome
            finally:
                left = list(running)
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)
                while not finished.empty():
                    outcome = finished.get_nowait()
                    if not isinstance(outcome, Exception):
                        self.not_handed_over.append(outcome)

    def _jobs(self, tasks: Iterable[Task]) -> Iterator[Job]:
        """Tasks with what an earlier call sampled of them, and with the numbers that tell equal ones apart."""
        times: Counter[str] = Counter()
        logged = self._given["requests_log"] is not None or self._given["log_dir"] is not None
        numbered = logged or self.cache is not None or self.request.seed is not None
        tasks = iter(tasks)
        begun = list(itertools.islice(tasks, len(self.kept)))
        self._check_begun(begun)
        for position, task in enumerate(map(self.check, itertools.chain(begun, tasks))):
            kept = self.kept[position] if position < len(self.kept) else None
            body = cache_body(self.request, self._given["on_chunk"], task.messages) if numbered else None
            digest = request_digest(self.identity, body) if body is not None else None
            first = times[digest] * self.n if digest is not None else 0
            if digest is not None:
                times[digest] += 1
            yield Job(position, task, first, digest, kept)

    def _check_begun(self, tasks: Sequence[Task]) -> None:
        """All of `unfinished` at once, before the first request: a mistake must cost no samples, and none may be left out."""
        for position, (kept, task) in enumerate(zip(self.kept, tasks, strict=False)):
            if (kept.task_id, kept.messages) != (task.id, task.messages):
                raise UserError(
                    f"unfinished[{position}] is of task {kept.task_id!r}, tasks[{position}] is task {task.id!r}; "
                    "the tasks of `unfinished` come first, in the same order"
                )
        if len(tasks) < len(self.kept):
            raise UserError(
                f"unfinished holds {len(self.kept)} groups, but there are {len(tasks)} tasks; "
                "the tasks of `unfinished` come first, in the same order"
            )


def checked_tasks(tasks: Iterable[Task]) -> list[Task]:
    if isinstance(tasks, Task) or not isinstance(tasks, Iterable):
        raise TaskError(f"tasks is a {type(tasks).__name__}; give a list of Task")
    checked = list(checked_one_by_one(tasks))
    if not checked:
        raise TaskError("tasks is empty; give at least one Task")
    return checked


def checked_one_by_one(tasks: Iterable[Task]) -> Iterator[Task]:
    if isinstance(tasks, Task) or not isinstance(tasks, Iterable):
        raise TaskError(f"tasks is a {type(tasks).__name__}; give Tasks, in a list or any other iterable")
    for number, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise TaskError(f"tasks[{number}] is a {type(task).__name__}; give Task(messages, grader)")
        try:  # now, not when hours of rollouts are to be written
            json.dumps([task.id, task.messages], ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise TaskError(f"task {task.id!r}: its id and messages cannot be written as JSON: {error}") from error
        yield task


_lengths: dict[Any, Lengths] = {}


def _known_lengths(model: str, base_urls: Sequence[str]) -> Lengths:
    """What earlier calls of this process saw of the same model: iterations of a run are alike, so the first wave is no guess."""
    key = (model, *base_urls)
    known = _lengths.pop(key, None) or Lengths()
    _lengths[key] = known  # the newest stands last
    if len(_lengths) > 32:
        del _lengths[next(iter(_lengths))]
    return known


def _positive(name: str, seconds: float) -> float:
    if not isinstance(seconds, numbers.Real) or isinstance(seconds, bool) or not 0 < seconds < math.inf:
        raise UserError(f"{name} is {seconds!r}; give a positive number of seconds")
    return float(seconds)


def _check_callables(given: Mapping[str, Any]) -> None:
    for name, argument in (("transform", "a TaskResult"), ("on_task_done", "a TaskResult"), ("on_chunk", "(chunk, completion)")):
        if given[name] is not None and not callable(given[name]):
            raise UserError(f"{name} is {given[name]!r}; give a function of {argument}")
