"""Samples tasks from the run's server: what is there already is not sampled again, and what comes is kept as it comes."""

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ttrl.configs.run import TrainConfig
from ttrl.data.tokenization import TaskResultTokenizer, TokenizationCounts
from ttrl.errors import TtrlError
from ttrl.launch.policy_server import MAX_DOWNTIME, PolicyServer
from ttrl.loop.carried import is_open, kept_groups, place_of, task_key, usage_of
from ttrl.loop.timeline import Timeline
from ttrl.records import TaskResult, TokenizedResult
from ttrl.rollouts.task_results import TaskResults, get_task_results
from ttrl.system.console import Console, clock
from ttrl.system.coroutines import run_async
from ttrl.system.files import append_jsonl
from ttrl.tasks.task import Task

logger = logging.getLogger(__name__)


class GroupTokenizer:
    """Groups as token sequences, each tokenized once, in any order and from any thread."""

    def __init__(self, tokenizer: Callable[[], Any]) -> None:
        """`tokenizer` returns the model's; it is called when first needed."""
        self._load, self._lock = tokenizer, threading.Lock()
        self._tokenize: TaskResultTokenizer | None = None
        self._known: dict[int, tuple[TaskResult, list[TokenizedResult], TokenizationCounts]] = {}

    def tokenize(self, group: TaskResult) -> None:
        """Tokenizes the group, with advantages that are not known yet (0)."""
        with self._lock:
            if self._tokenize is None:
                self._tokenize = TaskResultTokenizer(self._load())
            before = dataclasses.replace(self._tokenize.counts)
            sequences = self._tokenize(group, [0.0] * len(group.graded))
            after = self._tokenize.counts
        counts = {f.name: getattr(after, f.name) - getattr(before, f.name) for f in dataclasses.fields(after)}
        self._known[id(group)] = group, sequences, TokenizationCounts(**counts)  # holds the group, so that its id stays its own

    def sequences(self, group: TaskResult, advantages: list[float]) -> tuple[list[TokenizedResult], TokenizationCounts]:
        """The group's sequences with the advantages of its graded samples, and what was counted. Raises TokenizationError."""
        if id(group) not in self._known:
            self.tokenize(group)
        _, sequences, counts = self._known[id(group)]
        by_sample = {sample.sample: value for sample, value in zip(group.graded, advantages, strict=True)}
        for sequence in sequences:
            sequence.advantage = by_sample[sequence.sample]
        return sequences, counts


class FinishedGroups:
    """Use it as a context manager around the sampling: at its end, everything that was handed over has been done."""

    def __init__(self, partial: Path | None, prepare: Callable[[TaskResult], None] | None) -> None:
        """partial: the file that keeps groups for a process after ours. prepare: called with every group that ended."""
        self._partial, self._prepare = partial, prepare
        self._waiting: queue.SimpleQueue[tuple[TaskResult, int | None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> "FinishedGroups":
        if self._partial is not None or self._prepare is not None:
            self._thread = threading.Thread(target=self._run, name="finished groups", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def add(self, group: TaskResult, position: int | None) -> None:
        """Hands over a group; with a `position`, it is written to the file as the group of that task. Does not wait."""
        if self._thread is not None:
            self._waiting.put((group, position))

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - a fault of ours, raised at the end of the sampling
            self._error = error

    def _work(self) -> None:
        over = False
        while not over:
            came = [self._waiting.get()]
            while not self._waiting.empty():
                came.append(self._waiting.get())
            over = None in came
            groups = [entry for entry in came if entry is not None]
            try:
                self._keep([(group, position) for group, position in groups if position is not None])
            except TtrlError as error:  # a full disk; what is finished now would only have to be sampled again
                logger.warning("finished groups could not be kept: %s", error)
                self._partial = None
            for group, _ in groups:
                self._prepare_one(group)

    def _keep(self, groups: list[tuple[TaskResult, int]]) -> None:
        if self._partial is not None and groups:
            rows = [{"position": place, "samples": [sample.to_json() for sample in group.samples]} for group, place in groups]
            append_jsonl(self._partial, *rows)

    def _prepare_one(self, group: TaskResult) -> None:
        if self._prepare is None:
            return
        try:
            self._prepare(group)
        except TtrlError as error:  # packing comes to it again, and says so
            logger.debug("task %r could not be prepared while samples came in: %s", group.task_id, error)


class Sampler:
    """The way from tasks to graded groups. May be used by several threads at once."""

    def __init__(self, config: TrainConfig, server: PolicyServer, console: Console, timeline: Timeline) -> None:
        self._config, self._server, self._console, self._timeline = config, server, console, timeline

    def sample(
        self,
        tasks: Sequence[Task],
        n: int,
        temperature: float,
        version: int,
        what: str,
        partial: Path | None = None,
        budget: int | None = None,
        carried: Sequence[TaskResult] = (),
        known: TaskResults | None = None,
        prepare: Callable[[TaskResult], None] | None = None,
    ) -> TaskResults:
        """Samples from the running server. With `partial`, finished groups are kept there, and those that lie there are not
        sampled again. With `budget`, so many new tokens are sampled (and as many again while no group is finished); `carried` are
        the groups to continue, those of the first tasks. `known`: what a call for the first of these tasks returned. `prepare` is
        called with every group as soon as it is finished, in another thread. Raises ServerDiedError where the server is gone,
        ServerError, GraderError or RolloutError where every sample failed."""
        done = dict(enumerate(known or ()))
        kept = {} if partial is None else kept_groups(partial, tasks, n, version, carried)
        kept = {position: group for position, group in kept.items() if position not in done}
        done |= kept
        waiting = dict(enumerate(carried))
        missing = [position for position in range(len(tasks)) if position not in done]
        positions: dict[str, list[int]] = {}
        for position in missing:
            positions.setdefault(task_key(tasks[position].id, tasks[position].messages), []).append(position)
        config = self._config

        async def sample(finished: FinishedGroups, token_budget: int | None) -> TaskResults:
            def take(group: TaskResult) -> None:
                if not is_open(group):
                    # A group without any grade is sampled again, so that a grader that failed can be put right.
                    finished.add(group, place_of(group, positions, carried) if group.graded else None)

            async with self._server.running.client() as client:
                return await get_task_results(
                    [tasks[position] for position in missing],
                    client,
                    self._server.running.model_name,
                    n=n,
                    params={**config.sampling, "temperature": temperature, "max_tokens": config.max_tokens},
                    weights_version=version,
                    on_task_done=take,
                    pbar=not self._console.quiet,
                    pbar_desc=what,
                    cache=config.cache or None,
                    weights_digest=self._server.running.weights_digest() if config.cache else None,
                    token_budget=token_budget,
                    unfinished=[waiting[position] for position in missing if position in waiting],
                    max_downtime=MAX_DOWNTIME,
                )

        began = clock()
        spent = sum(usage.new_completion for usage in usage_of(done, carried))
        left = None if budget is None else max(1, budget - spent)
        while missing:
            with FinishedGroups(partial, prepare) as finished, self._timeline.span("sample"):
                fresh = run_async(sample(finished, left))
            if any(s.finish_reason is None for s in fresh.samples):
                self._server.running.check()  # says why, where the server is gone
            done.update(zip(missing, fresh, strict=True))
            if not all(map(is_open, done.values())):
                break
            waiting, missing, left = dict(done), sorted(done), budget
        # Tokens that an earlier process sampled took their time there: no speed can be told from ours.
        seconds = clock() - began if not kept else None
        if known is not None:
            before = known.stats.seconds
            seconds = None if seconds is None or before is None else before + seconds
        groups = [done[position] for position in range(len(tasks))]
        results = TaskResults(groups, seconds=seconds, usage=usage_of(dict(enumerate(groups)), carried))
        results.raise_if_all_failed()
        return results
