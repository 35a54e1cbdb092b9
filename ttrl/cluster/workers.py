"""Run a run's sampling workers on a cluster: one actor each, on a CPU, with the runner and its
share of the servers.

They sample, grade and tokenize. The lead assigns tasks (`ttrl.rollouts.divided`) and gets groups as
arrays in the object store. Ray restarts a dead worker on any machine; it then takes up its share
again.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from ttrl.cluster.ray_connection import (
    ASK_SECONDS,
    START_SECONDS,
    Words,
    as_words,
    begin_actor,
    from_words,
    last_line,
)
from ttrl.configs.run import TrainConfig
from ttrl.data.tokenization import TaskResultTokenizer, as_arrays
from ttrl.errors import ServerDiedError
from ttrl.records import Endpoint, TaskResult, TokenizedResult
from ttrl.rollouts.divided import Worker, divided_servers
from ttrl.rollouts.request import Client, SamplingRequest
from ttrl.rollouts.sampling import Job
from ttrl.rollouts.worker import Report, WorkerCall

_SERVERS_EACH = 16
_FEW_SERVERS = 32
"""Up to this many servers the lead samples without workers."""
_FIND_SECONDS = 1.0
"""Seconds for the other actors once the first is up; slower ones get the remaining servers."""


class SamplingWorker:
    """Run one worker: the runner, for any number of concurrent calls."""

    def __init__(self, model: Path) -> None:
        self._tokenize, self._calls = tokenized_by(model), dict[str, WorkerCall]()

    def where(self) -> str:
        """Return its machine."""
        return str(ray.util.get_node_ip_address())

    async def open(self, name: str, request: SamplingRequest) -> Words | None:
        """Begin a call, ending an earlier one of this name; return the error."""
        try:
            await self.close(name)
            call = WorkerCall(request, self._tokenize)
            await call.start()
            self._calls[name] = call
        except Exception as error:  # noqa: BLE001 - told to the lead
            return as_words(error)
        return None

    async def work(self, name: str, jobs: Sequence[Job], more: bool) -> Report | Words | None:
        """See `WorkerCall.work`. Returns the error; None for a call unknown after a restart."""
        if name not in self._calls:
            return None
        try:
            return await self._calls[name].work(jobs, more=more)
        except Exception as error:  # noqa: BLE001 - told to the lead
            return as_words(error)

    async def close(self, name: str) -> None:
        """End a call, if there is one."""
        call = self._calls.pop(name, None)
        if call is not None:
            await call.close()


class WorkerActor:
    """Drive a worker (`ttrl.rollouts.divided.Worker`): the lead's side."""

    def __init__(self, number: int, actor: Any) -> None:
        self.name = f"sampling worker {number}"
        self.actor = actor

    async def open(self, call: str, request: SamplingRequest) -> None:
        words = await self._ask(self.actor.open, call, request)
        if words is not None:
            raise from_words(words)

    async def work(self, call: str, jobs: Sequence[Job], more: bool) -> Report:
        answer = await self._ask(self.actor.work, call, jobs, more)
        if answer is None:
            raise ServerDiedError(f"{self.name} was started again")
        if isinstance(answer, Report):
            return answer
        raise from_words(answer)

    async def close(self, call: str) -> None:
        await self._ask(self.actor.close, call)

    async def _ask(self, method: Any, *arguments: Any) -> Any:
        try:
            return await asyncio.wait_for(method.remote(*arguments), ASK_SECONDS)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise ServerDiedError(
                f"{self.name} does not answer: {type(error).__name__}: {last_line(error)}"
            ) from error


def worker_count(config: TrainConfig) -> int:
    """Return the number of workers of a run."""
    servers = config.servers_in_all
    if config.tokens_per_iteration is not None:  # a budget covers all servers together
        return 0
    if config.sampling_workers is None:
        if servers > _FEW_SERVERS:
            return math.ceil(servers / _SERVERS_EACH)
        return 0
    return min(config.sampling_workers, servers)


def start_workers(
    config: TrainConfig, model: Path
) -> Callable[[Sequence[Endpoint]], list[tuple[Worker, Client]]] | None:
    """Begin to start workers, spread over the cluster; return a function to assign their servers,
    None without workers.
    """
    count = worker_count(config)
    if not count:
        return None
    options = {
        "num_cpus": 1,
        "max_restarts": -1,
        "max_task_retries": 0,
        "scheduling_strategy": "SPREAD",
    }
    workers = [
        WorkerActor(number, begin_actor(SamplingWorker, options, model)) for number in range(count)
    ]

    def shares(endpoints: Sequence[Endpoint]) -> list[tuple[Worker, Client]]:
        # Retries while the worker restarts.
        asked = [worker.actor.where.options(max_task_retries=-1).remote() for worker in workers]
        ray.wait(asked, timeout=START_SECONDS)
        known, _ = ray.wait(asked, num_returns=count, timeout=_FIND_SECONDS)
        places = [_answer(one) if one in known else None for one in asked]
        return [
            (worker, share)
            for worker, share in zip(workers, divided_servers(endpoints, places), strict=True)
            if share
        ]

    return shares


def _answer(asked: Any) -> str | None:
    try:
        return str(ray.get(asked))
    except ray.exceptions.RayError:
        return None


def tokenized_by(
    model: Path,
) -> Callable[[TaskResult], tuple[list[TokenizedResult], dict[str, int]]]:
    """Return a function to tokenize groups for `Prepared.sequences`, with the tokenizer of a
    model's folder.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def tokenize(result: TaskResult) -> tuple[list[TokenizedResult], dict[str, int]]:
        tokenizing = TaskResultTokenizer(tokenizer)
        sequences = tokenizing(result, [0.0] * len(result.graded))
        return [as_arrays(sequence) for sequence in sequences], vars(tokenizing.counts)

    return tokenize
