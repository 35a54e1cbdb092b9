"""Run the worker's side of divided sampling: the runner in a process near some of the servers,
given tasks a few at a time.

A `get_task_results` call has all its tasks from the beginning. Here they come as this worker's
servers have room, so no worker has many left at the end. The other side is divided.py.
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from ttrl.errors import TokenizationError, describe
from ttrl.records import Prepared, TaskResult, TokenizedResult
from ttrl.rollouts.group import Group
from ttrl.rollouts.group_samples import sample_group
from ttrl.rollouts.request import SamplingRequest
from ttrl.rollouts.results import TaskUsage
from ttrl.rollouts.sampling import Job, Sampling
from ttrl.system.files import json_line

logger = logging.getLogger(__name__)

PATIENCE = 2.0
"""Seconds until an idle turn ends: tasks left by another worker may be waiting by then."""
AWAY_SECONDS = 8.0
"""Without an answer of any server before a worker leaves its tasks to others; a single runner fails
them after 10 s if the servers have never answered, or later.
"""
GATHER_SECONDS = (0.5, 0.2)
"""Finished groups wait this long for others, because each turn costs the lead some CPU: with more
tasks to come, and without.
"""
_LOOK_SECONDS = 0.02
_TASKS_AHEAD = 2
"""Tasks queued per server beyond its current work, to bridge the request for the next ones."""

Tokenize: TypeAlias = Callable[[TaskResult], tuple[list[TokenizedResult], dict[str, int]]]
"""Makes `Prepared.sequences` and `Prepared.counts`; the packing of rows raises its
TokenizationError again.
"""


@dataclass(frozen=True)
class FlatGroup:
    """A finished group with its long lists as a few arrays, for fast transfer between processes."""

    usage: TaskUsage
    result: TaskResult
    """Without the lists in the arrays."""
    arrays: dict[str, np.ndarray]
    lengths: dict[str, list[int]]
    """Of each sample, by the names of `arrays`; -1 for None."""

    @classmethod
    def of(cls, group: Group, prepared: Prepared) -> "FlatGroup":
        """Return the group with its lists taken out."""
        result = group.result
        arrays = {}
        lengths = {}
        nothing: dict[str, Any] = dict.fromkeys(_LISTS)
        bare = [dataclasses.replace(sample, messages=[], **nothing) for sample in result.samples]
        for name, dtype in _LISTS.items():
            values: list[list[Any] | None] = [getattr(sample, name) for sample in result.samples]
            if name == "prompt_token_ids":  # mostly the same for all
                values = [
                    None if known is None else [] if known == values[0] and k else known
                    for k, known in enumerate(values)
                ]
            lengths[name] = [-1 if value is None else len(value) for value in values]
            arrays[name] = np.array(
                [number for value in values for number in value or ()], dtype=dtype
            )
        flat = TaskResult(
            task_id=result.task_id, messages=result.messages, samples=bare, prepared=prepared
        )
        flat.position = result.position
        return cls(group.usage, flat, arrays, lengths)

    def restored(self) -> TaskResult:
        """Return the original group, without references to its transfer memory; others may be
        waiting for this memory.
        """
        samples = self.result.samples
        messages = self.result.messages
        for name in _LISTS:
            begin = 0
            values = self.arrays[name].tolist()
            for sample, length in zip(samples, self.lengths[name], strict=True):
                setattr(sample, name, None if length < 0 else values[begin : begin + length])
                begin += max(0, length)
        for sample in samples:
            sample.messages = messages
            if sample.prompt_token_ids == []:
                sample.prompt_token_ids = samples[0].prompt_token_ids
        if self.result.prepared is not None and self.result.prepared.sequences is not None:
            self.result.prepared.sequences = [
                _copied(sequence) for sequence in self.result.prepared.sequences
            ]
        return self.result


_LISTS = {"prompt_token_ids": np.int32, "token_ids": np.int32, "logprobs": np.float64}
"""The Sample fields with one entry per token. 64 bits, because rewards may be shaped by
log-probabilities.
"""


def _copied(sequence: TokenizedResult) -> TokenizedResult:
    arrays: dict[str, Any] = {
        name: value.copy()
        for name, value in vars(sequence).items()
        if isinstance(value, np.ndarray)
    }
    return dataclasses.replace(sequence, **arrays)


@dataclass
class Report:
    """A worker's news since the last request."""

    groups: list[FlatGroup] = field(default_factory=list)
    wanted: int = 0
    """Number of further tasks it has room for."""
    is_away: bool = False
    """True if none of its servers answers; it has dropped its tasks, for others to do."""
    grading_seconds: float = 0.0
    """Of all grades of the call so far."""


class WorkerCall:
    """A worker's part of one sampling call."""

    def __init__(
        self,
        request: SamplingRequest,
        tokenize: Tokenize | None = None,
        away_seconds: float = AWAY_SECONDS,
    ) -> None:
        """request: for this worker's servers. away_seconds: without an answer of any server before
        it leaves its tasks to others. Raises UserError for a wrong request.
        """
        self._away_seconds = away_seconds
        self._sampling = Sampling(request)
        self._tokenize = tokenize
        self._running: dict[asyncio.Task[None], Group] = {}
        self._finished: list[Group] = []
        self._fault: BaseException | None = None
        self._ends = contextlib.AsyncExitStack()
        self._ahead = max(4, _TASKS_AHEAD * len(request.clients))
        self._requests_each = -(-request.n // self._sampling.samples_per_request)

    async def start(self) -> None:
        """Start watching the servers."""
        await self._ends.enter_async_context(self._sampling.running())

    async def work(self, jobs: Iterable[Job], *, more: bool, patience: float = PATIENCE) -> Report:
        """Start tasks; return shortly after some are finished, or on room for more if there are
        `more`.
        """
        for job in jobs:
            self._begin(job)
        loop = asyncio.get_running_loop()
        now = loop.time()
        deadline = now + patience
        gathered = now + GATHER_SECONDS[not more]
        while not (self._fault or (more and 2 * self._wanted() >= self._ahead) or now >= deadline):
            if self._finished and now >= gathered:
                break
            if self._sampling.servers.away_seconds > self._away_seconds and not self._finished:
                await self._drop()
                return Report(is_away=True, grading_seconds=self._sampling.graders.seconds)
            await asyncio.sleep(_LOOK_SECONDS)
            now = loop.time()
        if self._fault is not None:
            raise self._fault
        finished = self._finished
        self._finished = []
        groups = [FlatGroup.of(group, self._prepared(group.result)) for group in finished]
        return Report(groups, self._wanted(), grading_seconds=self._sampling.graders.seconds)

    async def close(self) -> None:
        """End all requests."""
        await self._drop()
        await self._ends.aclose()

    async def _drop(self) -> None:
        running = self._running
        self._running = {}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._finished = []

    def _wanted(self) -> int:
        """Return the number of tasks needed for every server to have a few waiting."""
        if self._sampling.servers.away_seconds:
            return 0
        # A task does not wait for a server until its first request.
        young = sum(not group.has_asked for group in self._running.values())
        waiting = -(-self._sampling.servers.waiting // self._requests_each) + young
        return max(0, min(self._ahead - waiting, self._sampling.most_live - len(self._running)))

    def _begin(self, job: Job) -> None:
        self._sampling.check(job.task)
        group = Group(self._sampling, job)
        task = asyncio.create_task(sample_group(group), name=f"task {job.task.id}")
        self._running[task] = group
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        group = self._running.pop(task, None)
        if group is None:  # dropped
            return
        fault = task.exception()
        if fault is not None:  # always one of ours
            self._fault = fault
        else:
            self._finished.append(group)

    def _prepared(self, result: TaskResult) -> Prepared:
        prepared = Prepared(lines=[json_line(sample.to_json()) for sample in result.samples])
        if self._tokenize is not None and result.graded:
            try:
                prepared.sequences, prepared.counts = self._tokenize(result)
            except TokenizationError as error:
                logger.debug("task %r is not tokenized here: %s", result.task_id, describe(error))
        return prepared
