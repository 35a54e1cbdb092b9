"""Sample tasks from the run's server; keep finished groups, and never sample them again."""

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from ttrl.configs.run import TrainConfig
from ttrl.errors import TtrlError
from ttrl.loop.carried import is_open, kept_groups, num_tokens
from ttrl.loop.timeline import Timeline
from ttrl.records import Endpoint, TaskResult
from ttrl.rollouts.divided import Worker, get_divided_results
from ttrl.rollouts.request import Client, SamplingRequest
from ttrl.rollouts.results import TaskResults, usage_of
from ttrl.rollouts.task_results import sample_tasks
from ttrl.system.console import Console, clock
from ttrl.system.coroutines import run_async
from ttrl.system.files import append_jsonl, json_line
from ttrl.tasks.task import Task
from ttrl.text import present
from ttrl.weights.policy_server import MAX_DOWNTIME, PolicyServer

logger = logging.getLogger(__name__)

Workers: TypeAlias = Callable[[Sequence[Endpoint]], Sequence[tuple[Worker, Client]]]
"""Return the sampling workers, each with its servers, for the given servers."""


class FinishedGroups:
    """Write finished groups to a file for a later process; a context manager around the sampling.

    A separate thread writes, to keep fsync out of the sampling. At the end, every added group is
    written.
    """

    def __init__(self, path: Path | None, places: Sequence[int]) -> None:
        """path: the file; None writes nothing. places: of the call's tasks in the iteration."""
        self._path = path
        self._places = places
        self._rows: deque[bytes] = deque()
        self._writer = ThreadPoolExecutor(1, "finished groups")
        self._writes: list[Future[None]] = []

    def __enter__(self) -> "FinishedGroups":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.shutdown()
        if kind is None:
            for write in self._writes:
                write.result()

    def add(self, group: TaskResult) -> None:
        """Add a group finished in a call of `get_task_results`. Does not wait."""
        # Sample a group without any grade again: the failed grader may be repaired by then.
        if self._path is not None and group.graded and not is_open(group):
            if group.prepared is not None:
                lines = group.prepared.lines
            else:
                lines = [json_line(sample.to_json()) for sample in group.samples]
            place = self._places[group.position]
            self._rows.append(b'{"position": %d, "samples": [%b]}' % (place, b", ".join(lines)))
            self._writes.append(self._writer.submit(self._write))

    def _write(self) -> None:
        """Write all waiting groups, with one fsync."""
        rows = [self._rows.popleft() for _ in range(len(self._rows))]
        if self._path is None or not rows:
            return
        try:
            append_jsonl(self._path, *rows)
        # A full disk; groups finished now would only have to be sampled again.
        except TtrlError as error:
            logger.warning("finished groups could not be stored: %s", error)
            self._path = None


class Sampler:
    """Turn tasks into graded groups. Safe to use from several threads at once."""

    def __init__(
        self,
        config: TrainConfig,
        server: PolicyServer,
        console: Console,
        timeline: Timeline,
        workers: Workers | None = None,
    ) -> None:
        """workers: returns the sampling workers and their servers, if any; they then do all
        sampling.
        """
        self._config = config
        self._server = server
        self._console = console
        self._timeline = timeline
        self._workers = workers

    def request(self, what: str, *, n: int, temperature: float, version: int) -> SamplingRequest:
        """Return a request to the policy at the server, with the run's sampling settings.

        what: text for the progress line. version: of the policy.
        """
        config = self._config
        log = Path(config.run, "logs", "requests.jsonl")
        return SamplingRequest(
            client=self._server.endpoints(),
            model=self._server.model_name,
            n=n,
            params={
                **config.sampling,
                "temperature": temperature,
                "max_tokens": config.max_tokens,
            },
            weights_version=version,
            cache=config.cache or None,
            weights_digest=self._server.weights_digest() if config.cache else None,
            max_downtime=MAX_DOWNTIME,
            pbar=not self._console.quiet,
            pbar_desc=what,
            requests_log=log if config.requests_log else None,
        )

    def sample(
        self,
        tasks: Sequence[Task],
        request: SamplingRequest,
        *,
        partial: Path | None = None,
        budget: int | None = None,
        carried: Sequence[TaskResult] = (),
        known: TaskResults | None = None,
    ) -> TaskResults:
        """Sample tasks from the running server.

        partial: the file for finished groups; groups already in it are not sampled again.
        budget: new completion tokens; as many again while no group is finished.
        carried: the groups to continue, those of the first tasks.
        known: results of an earlier call for the first of these tasks.

        Raises ServerDiedError if the server is gone; ServerError, GraderError or RolloutError if
        every sample failed.
        """
        done = dict(enumerate(known or ()))
        earlier = dict(enumerate(map(num_tokens, carried)))
        kept: dict[int, TaskResult] = {}
        if partial is not None:
            kept = kept_groups(partial, tasks, request.n, request.weights_version, carried)
        kept = {place: group for place, group in kept.items() if place not in done}
        done |= kept
        waiting = dict(enumerate(carried))
        missing = {place: task for place, task in enumerate(tasks) if place not in done}
        began = clock()
        grading = [] if known is None else [known.stats.grading_seconds]
        left = None
        if budget is not None:
            usage = (usage_of(group, earlier.get(place, 0)) for place, group in done.items())
            spent = sum(one.new_completion for one in usage)
            left = max(1, budget - spent)
        while missing:
            with (
                FinishedGroups(partial, list(missing)) as finished,
                self._timeline.span("sample"),
            ):
                fresh = self._sampled(
                    list(missing.values()),
                    dataclasses.replace(
                        request,
                        client=self._server.endpoints(),
                        on_task_done=finished.add,
                        token_budget=left,
                        unfinished=[waiting[place] for place in missing if place in waiting],
                    ),
                )
            if any(sample.finish_reason is None for sample in fresh.samples):
                self._server.check()  # names the cause, if the server is gone
            done.update(zip(missing, fresh, strict=True))
            grading.append(fresh.stats.grading_seconds)
            if not all(map(is_open, done.values())):
                break
            waiting = dict(done)
            missing = {place: tasks[place] for place in sorted(done)}
            left = budget
        seconds: float | None = clock() - began
        if kept:
            # An earlier process spent the time for these tokens, and for their grades.
            seconds = None
            grading = [None]
        if known is not None:
            before = known.stats.seconds
            seconds = None if seconds is None or before is None else before + seconds
        groups = [done[place] for place in range(len(tasks))]
        of_groups = [usage_of(group, earlier.get(n, 0)) for n, group in enumerate(groups)]
        graded = present(grading)
        results = TaskResults(
            groups,
            seconds=seconds,
            grading_seconds=math.fsum(graded) if len(graded) == len(grading) else None,
            usage=of_groups,
        )
        results.raise_if_all_failed()
        return results

    def _sampled(self, tasks: Sequence[Task], request: SamplingRequest) -> TaskResults:
        if self._workers is None:
            return run_async(sample_tasks(tasks, request))
        shares = self._workers(self._server.endpoints())
        return run_async(get_divided_results(tasks, shares, request))
