"""Divide sampling among workers: `get_divided_results` returns the results of `get_task_results`,
with less load on one process.

Each worker has its own share of the servers (worker.py). Workers get tasks as they have room, and
groups are collected as they finish. If a worker or all its servers are gone, others get its
unfinished tasks; it is asked again on its return. A group counts only from its task's current
worker, so none counts twice.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
import uuid
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from ttrl.errors import ServerDiedError
from ttrl.records import Endpoint, Sample, TaskResult
from ttrl.rollouts.progress import Progress, screen
from ttrl.rollouts.request import Client, SamplingRequest
from ttrl.rollouts.results import TaskResults, TaskUsage, log_stats
from ttrl.rollouts.sampling import Job, numbered_jobs
from ttrl.rollouts.worker import FlatGroup, Report
from ttrl.tasks.task import Task

logger = logging.getLogger(__name__)

MOST_DEATHS = 5
"""Worker deaths with the same task before it counts as failed; the task may be their cause."""
_SUSPECT = 2
"""After this many deaths a task is suspect. A worker has only one suspect at a time, so only this
one is blamed for the next death.
"""
PAUSE_SECONDS = 1.0
"""Before asking a missing worker again."""
_NEW_SECONDS = 30.0
"""Seconds a reopened worker does not yet count as working, if all others are gone."""
_CLOSE_SECONDS = 5.0


class Worker(Protocol):
    """A sampling process. Its methods raise ServerDiedError if it is gone or does not know the
    call.
    """

    name: str

    async def open(self, call: str, request: SamplingRequest) -> None:
        """Make a `WorkerCall`, replacing any of this name."""

    async def work(self, call: str, jobs: Sequence[Job], more: bool) -> Report:
        """See `WorkerCall.work`."""

    async def close(self, call: str) -> None:
        """Drop a call."""


async def get_divided_results(
    tasks: Sequence[Task],
    workers: Sequence[tuple[Worker, Client]],
    request: SamplingRequest,
    pause_seconds: float = PAUSE_SECONDS,
) -> TaskResults:
    """Sample and grade tasks as `sample_tasks` does; results come back in task order.

    workers: each with its servers, replacing those of the request.
    request: has no token budget and no callbacks of this process except `on_task_done`. Its
        `max_downtime`: seconds to wait for any worker after all are gone.
    pause_seconds: before asking a missing worker again.

    Raises ServerDiedError if none comes back, UserError for a wrong request.
    """
    assert workers and request.token_budget is None and not request.unfinished
    call = _Call(tasks, workers, request, pause_seconds)
    with call.progress:
        return await call.run()


@dataclasses.dataclass(eq=False)
class _Share:
    """One worker's part."""

    worker: Worker
    request: SamplingRequest
    jobs: dict[int, Job] = dataclasses.field(default_factory=dict)
    """Its open jobs, by position."""
    opened: float = math.inf
    """Start time of its current work."""
    is_missed: bool = False
    """Whether its absence was logged."""
    grading_seconds: dict[float, float] = dataclasses.field(default_factory=dict)
    """By `opened`: a restarted worker counts from zero."""


class _Call:
    def __init__(
        self,
        tasks: Sequence[Task],
        workers: Sequence[tuple[Worker, Client]],
        request: SamplingRequest,
        pause_seconds: float,
    ) -> None:
        self._pause_seconds = pause_seconds
        self._name = uuid.uuid4().hex
        self._request = request
        self._shares = [
            _Share(
                worker,
                dataclasses.replace(
                    request,
                    client=client,
                    pbar=False,
                    on_task_done=None,
                    requests_log=_log_of(request, number),
                ),
            )
            for number, (worker, client) in enumerate(workers)
        ]
        self._pending, self._suspects = deque(numbered_jobs(tasks, request.n)), deque[Job]()
        self._tasks = len(tasks)
        self._done: dict[int, tuple[TaskResult, TaskUsage]] = {}
        self._deaths: Counter[int] = Counter()
        self._over = asyncio.Event()
        self._heard = time.monotonic()
        """Time of the last group."""
        shown = screen() if request.pbar else None
        self.progress = Progress(self._tasks * request.n, request.description, shown)

    async def run(self) -> TaskResults:
        began = time.monotonic()
        drivers = [
            asyncio.create_task(self._drive(share), name=share.worker.name)
            for share in self._shares
        ]
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait([over, *drivers], return_when=asyncio.FIRST_COMPLETED)
            for driver in drivers:
                if driver.done():
                    driver.result()
        finally:
            for one in (over, *drivers):
                one.cancel()
            await asyncio.gather(over, *drivers, return_exceptions=True)
            await asyncio.gather(*map(self._close, self._shares))
        done = [self._done[position] for position in range(self._tasks)]
        results = TaskResults(
            [result for result, _ in done],
            seconds=time.monotonic() - began,
            grading_seconds=sum(sum(share.grading_seconds.values()) for share in self._shares),
            usage=[usage for _, usage in done],
        )
        log_stats(results, self._request.description)
        return results

    async def _close(self, share: _Share) -> None:
        with contextlib.suppress(ServerDiedError, TimeoutError):
            await asyncio.wait_for(share.worker.close(self._name), _CLOSE_SECONDS)

    async def _drive(self, share: _Share) -> None:
        """Keep a worker busy until all is done."""
        while True:
            try:
                await share.worker.open(self._name, share.request)
                share.opened = time.monotonic()
                await self._turns(share)
                if self._over.is_set():
                    return
                why = f"{share.worker.name}: none of its servers answers"
                died = False
            except ServerDiedError as error:
                why = str(error).split("\n", 1)[0]
                died = True
            had = self._take_back(share, died)
            share.opened = math.inf
            if had:
                logger.warning("%s; its %d unfinished tasks go to other workers", why, had)
            elif not share.is_missed:
                logger.warning(
                    "%s; its %d servers are idle meanwhile", why, len(share.request.clients)
                )
            share.is_missed = True
            now = time.monotonic()
            works = any(now - other.opened > _NEW_SECONDS for other in self._shares)
            if not works and now - self._heard > self._request.max_downtime:
                raise ServerDiedError(
                    f"no sampling worker has worked for {now - self._heard:.0f} s; the last error: "
                    f"{why}"
                )
            await asyncio.sleep(self._pause_seconds)

    async def _turns(self, share: _Share) -> None:
        """Give it tasks and take groups, until all is done or its servers are away."""
        wanted = 0
        while not self._over.is_set():
            fair = -(-len(self._pending) // len(self._shares))
            jobs = [self._pending.popleft() for _ in range(min(wanted, fair))]
            if wanted and self._suspects and not self._suspects_of(share):
                jobs.append(self._suspects.popleft())
            share.jobs |= {job.position: job for job in jobs}
            more = bool(self._pending or (self._suspects and not self._suspects_of(share)))
            report = await share.worker.work(self._name, jobs, more)
            share.grading_seconds[share.opened] = report.grading_seconds
            for group in report.groups:
                self._take(share, group)
            if report.is_away:
                return
            wanted = report.wanted

    def _take(self, share: _Share, group: FlatGroup) -> None:
        position = group.result.position
        assert position in share.jobs and position not in self._done
        del share.jobs[position]
        self._heard = time.monotonic()
        self._count(group.restored(), group.usage)

    def _count(self, result: TaskResult, usage: TaskUsage) -> None:
        self._done[result.position] = result, usage
        self.progress.add_tokens(usage.new_completion, usage.new_prompt)
        for sample in result.samples:
            self.progress.add_sample(sample, cached=sample.cached)
        if self._request.on_task_done is not None:
            self._request.on_task_done(result)
        if len(self._done) == self._tasks:
            self._over.set()

    def _take_back(self, share: _Share, died: bool) -> int:
        """Put a worker's tasks back in the queue and return their number."""
        if died:
            self._deaths.update(self._suspects_of(share) or list(share.jobs))
        jobs = share.jobs
        share.jobs = {}
        for position, job in reversed(jobs.items()):
            if self._deaths[position] >= MOST_DEATHS:
                self._count(self._failed(job), TaskUsage())
            elif self._deaths[position] >= _SUSPECT:
                self._suspects.appendleft(job)
            else:
                self._pending.appendleft(job)
        return len(jobs)

    def _suspects_of(self, share: _Share) -> list[int]:
        return [position for position in share.jobs if self._deaths[position] >= _SUSPECT]

    def _failed(self, job: Job) -> TaskResult:
        why = f"ServerDiedError: {MOST_DEATHS} sampling workers died during this task"
        task = job.task
        version = self._request.weights_version
        messages = [dict(message) for message in task.messages]
        samples = [
            Sample(task_id=task.id, sample=k, messages=messages, weights_version=version, error=why)
            for k in range(self._request.n)
        ]
        result = TaskResult(task_id=task.id, messages=messages, samples=samples)
        result.position = job.position
        return result


def _log_of(request: SamplingRequest, number: int) -> Path | None:
    """Return a worker's own log of requests: appends of several machines to one file on a network
    file system may be lost.
    """
    if request.requests_log is None:
        return None
    path = Path(request.requests_log)
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def divided_servers(
    endpoints: Sequence[Endpoint], places: Sequence[str | None]
) -> list[list[Endpoint]]:
    """Return about equally many servers for each worker, those of its own machine first. places:
    the workers' machines.
    """
    most = -(-len(endpoints) // len(places))
    left = sorted(endpoints, key=lambda endpoint: endpoint.base_url)
    shares: list[list[Endpoint]] = []
    for place in places:
        near = [endpoint for endpoint in left if urlsplit(endpoint.base_url).hostname == place][
            :most
        ]
        left = [endpoint for endpoint in left if endpoint not in near]
        shares.append(near)
    for endpoint in left:
        min(shares, key=len).append(endpoint)
    return shares
