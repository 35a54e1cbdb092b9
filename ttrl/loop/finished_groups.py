"""What is done with a group as soon as its last sample is graded, while the others still come in: it is kept, and tokenized.

Both happen in one thread beside the event loop, which must not wait for a disk: kept groups are written one after another and
made durable together, as many as have come meanwhile. Nothing depends on the order in which groups end: what is made of a group
stands under that group, and `pack` takes the groups in the order of their tasks.
"""

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from ttrl.data.tokenization import TaskResultTokenizer, TokenizationCounts
from ttrl.errors import TtrlError
from ttrl.records import TaskResult, TokenizedResult
from ttrl.system.files import append_jsonl

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
