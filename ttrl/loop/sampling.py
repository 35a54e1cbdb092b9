"""Samples tasks from the run's server: what is there already is not sampled again, and what comes
is kept as it comes.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from ttrl.configs.run import TrainConfig
from ttrl.errors import TtrlError
from ttrl.loop.carried import is_open, kept_groups, place_of, task_key, usage_of
from ttrl.loop.timeline import Timeline
from ttrl.records import Endpoint, TaskResult
from ttrl.rollouts.client.assembly import OnChunk
from ttrl.rollouts.client.wire import EXPERTS
from ttrl.rollouts.divided import Worker, get_divided_results
from ttrl.rollouts.settings import Client, SamplingSettings
from ttrl.rollouts.task_results import TaskResults, get_task_results
from ttrl.system.console import Console, clock
from ttrl.system.coroutines import run_async
from ttrl.system.files import append_jsonl, json_line
from ttrl.tasks.task import Task
from ttrl.weights.policy_server import MAX_DOWNTIME, PolicyServer

logger = logging.getLogger(__name__)

Workers: TypeAlias = Callable[[Sequence[Endpoint]], Sequence[tuple[Worker, Client]]]
"""Given the servers, returns the sampling workers with the servers of each."""


class FinishedGroups:
    """Writes groups to a file as they are finished, for a process after ours; a context manager
    around the sampling.

    A thread of its own writes, so that no fsync holds up the sampling; at the end, everything that
    was handed over is written.
    """

    def __init__(
        self, path: Path | None, tasks: Mapping[int, Task], carried: Sequence[TaskResult]
    ) -> None:
        """path: the file; None writes nothing. tasks: those that are sampled, by their place."""
        self._path = path
        self._carried = carried
        self._places: dict[str, list[int]] = {}
        for place, task in tasks.items():
            self._places.setdefault(task_key(task.id, task.messages), []).append(place)
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
        """Hand over a group that a call of `get_task_results` is done with. Does not wait."""
        # A group without any grade is sampled again, so that a grader that failed can be put right.
        if self._path is not None and group.graded and not is_open(group):
            place = place_of(group, self._places, self._carried)
            if group.prepared is None:
                known = None
            else:
                known = group.prepared.lines
            if known is None:
                lines = [json_line(sample.to_json()) for sample in group.samples]
            else:
                lines = known
            self._rows.append(b'{"position": %d, "samples": [%b]}' % (place, b", ".join(lines)))
            self._writes.append(self._writer.submit(self._write))

    def _write(self) -> None:
        """Write all that waits, with one fsync."""
        rows = [self._rows.popleft() for _ in range(len(self._rows))]
        if self._path is None or not rows:
            return
        try:
            append_jsonl(self._path, *rows)
        # A full disk; what is finished now would only have to be sampled again.
        except TtrlError as error:
            logger.warning("finished groups could not be kept: %s", error)
            self._path = None


@dataclass(frozen=True, kw_only=True)
class SamplingOrder:
    """What a phase wants sampled of its tasks."""

    what: str
    """In the progress line."""
    n: int
    """Samples per task."""
    temperature: float
    version: int
    """Of the policy at the server."""
    partial: Path | None = None
    """The file that keeps finished groups; those that lie there are not sampled again."""
    budget: int | None = None
    """New completion tokens; as many again while no group is finished."""
    carried: Sequence[TaskResult] = ()
    """The groups to continue, those of the first tasks."""
    on_chunk: OnChunk | None = None
    """May end a completion early."""
    log_dir: Path | None = None
    """A folder for one text file per sample."""
    experts: bool = False
    """Whether samples need the experts that vLLM chose."""


def _parameters(config: TrainConfig, order: SamplingOrder) -> dict[str, Any]:
    experts = {EXPERTS: 0} if order.experts else {}
    return {
        **config.sampling,
        "temperature": order.temperature,
        "max_tokens": config.max_tokens,
        **experts,
    }


class Sampler:
    """Turns tasks into graded groups. May be used by several threads at once."""

    def __init__(
        self,
        config: TrainConfig,
        server: PolicyServer,
        console: Console,
        timeline: Timeline,
        workers: Workers | None = None,
    ) -> None:
        """workers: gives the sampling workers their servers, where there are any; they do all of it
        then.
        """
        self._config = config
        self._server = server
        self._console = console
        self._timeline = timeline
        self._workers = workers

    def sample(
        self, tasks: Sequence[Task], order: SamplingOrder, known: TaskResults | None = None
    ) -> TaskResults:
        """Sample from the running server. `known`: what a call for the first of these tasks
        returned.

        Raises ServerDiedError where the server is gone, ServerError, GraderError or RolloutError
        where every sample failed.
        """
        config = self._config
        carried = order.carried
        done = dict(enumerate(known or ()))
        if order.partial is None:
            kept = {}
        else:
            kept = kept_groups(order.partial, tasks, order.n, order.version, carried)
        kept = {place: group for place, group in kept.items() if place not in done}
        done |= kept
        waiting = dict(enumerate(carried))
        missing = {place: task for place, task in enumerate(tasks) if place not in done}
        began = clock()
        spent = sum(usage.new_completion for usage in usage_of(done, carried))
        if order.budget is None:
            left = None
        else:
            left = max(1, order.budget - spent)
        while missing:
            server = self._server
            settings: dict[str, Any] = {
                "client": server.endpoints(),
                "model": server.model_name,
                "n": order.n,
                "params": _parameters(config, order),
                "weights_version": order.version,
                "pbar": not self._console.quiet,
                "pbar_desc": order.what,
                "cache": config.cache or None,
                "weights_digest": server.weights_digest() if config.cache else None,
                "max_downtime": MAX_DOWNTIME,
                "on_chunk": order.on_chunk,
                "log_dir": order.log_dir,
                "requests_log": Path(config.run, "logs", "requests.jsonl")
                if config.requests_log
                else None,
            }
            with (
                FinishedGroups(order.partial, missing, carried) as finished,
                self._timeline.span("sample"),
            ):
                if self._workers is not None:
                    shares = self._workers(settings["client"])
                    given = SamplingSettings(**settings)
                    fresh = run_async(
                        get_divided_results(list(missing.values()), shares, given, finished.add)
                    )
                else:
                    begun = [waiting[place] for place in missing if place in waiting]
                    settings |= {
                        "on_task_done": finished.add,
                        "token_budget": left,
                        "unfinished": begun,
                    }
                    fresh = run_async(get_task_results(list(missing.values()), **settings))
            if any(s.finish_reason is None for s in fresh.samples):
                server.check()  # says why, where the server is gone
            done.update(zip(missing, fresh, strict=True))
            if not all(map(is_open, done.values())):
                break
            waiting = dict(done)
            missing = {place: tasks[place] for place in sorted(done)}
            left = order.budget
        # Tokens that an earlier process sampled took their time there: no speed can be told from
        # ours.
        seconds = clock() - began if not kept else None
        if known is not None:
            before = known.stats.seconds
            if seconds is None or before is None:
                seconds = None
            else:
                seconds = before + seconds
        groups = [done[place] for place in range(len(tasks))]
        results = TaskResults(
            groups, seconds=seconds, usage=usage_of(dict(enumerate(groups)), carried)
        )
        results.raise_if_all_failed()
        return results
