"""What the tasks of one call share: the request, servers, graders, budget and counts."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ttrl.errors import describe
from ttrl.records import TaskResult
from ttrl.rollouts.cache.completions import Cache
from ttrl.rollouts.client.chat_completions import ChatRequest
from ttrl.rollouts.client.wire import Answer
from ttrl.rollouts.graders.grading import Graders, Threads
from ttrl.rollouts.partial import TokenBudget, first_part
from ttrl.rollouts.progress import Progress
from ttrl.rollouts.requests_log import RequestsLog
from ttrl.rollouts.sample_logs import SampleLogs
from ttrl.rollouts.scheduling.servers import Servers
from ttrl.tasks.task import Task

logger = logging.getLogger(__name__)

OnChunk = Callable[[Any, Any], None]


def cache_body(request: ChatRequest, on_chunk: OnChunk | None, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What an answer depends on. An `on_chunk` with a `cache_key` (InferenceEarlyStop) says how it ends completions early."""
    body = request.cache_body(messages)
    ended_by = getattr(on_chunk, "cache_key", None)
    return body if ended_by is None else {**body, "on_chunk": ended_by}


@dataclass(frozen=True)
class Job:
    """One task of a call."""

    position: int
    task: Task
    first: int
    """The number of its first sample, for cache keys and seeds: equal tasks of one call must not share samples."""
    digest: str | None
    """Of its request, for cache keys and the requests log; None where there is neither."""
    kept: TaskResult | None
    """What an earlier call sampled of it."""


@dataclass(kw_only=True)
class Sampling:
    """What all tasks of one call share."""

    request: ChatRequest
    servers: Servers
    n: int
    samples_per_request: int
    token_ids: bool
    weights_version: int
    max_retries: int
    cache: Cache | None
    requests_log: RequestsLog | None
    graders: Graders
    progress: Progress
    budget: TokenBudget | None
    on_chunk: OnChunk | None
    transform: Callable[[TaskResult], Any] | None
    transform_thread: Threads
    on_task_done: Callable[[TaskResult], None] | None
    sample_logs: SampleLogs | None
    other_failures: Counter[str] = field(default_factory=Counter)
    """Of transforms and callbacks; those of samples stand in the samples."""
    sampled: int = 0
    """New completion tokens so far."""
    cut: asyncio.Event | None = None
    """Set when the budget's total has been sampled."""

    def __post_init__(self) -> None:
        if self.budget is not None and self.budget.total is not None:
            self.cut = asyncio.Event()
        self.first_request = first_part(self.request, self.budget)
        """What samples without a token are asked for with."""

    def cache_body(self, messages: Sequence[Mapping[str, Any]], request: ChatRequest | None = None) -> dict[str, Any]:
        """What an answer depends on, for the cache: the request (by default the call's), and what may end it early where that has
        a name."""
        return cache_body(request or self.request, self.on_chunk, messages)

    def count_tokens(self, tokens: int, prompt: int = 0) -> None:
        """More tokens have come from a server (fewer, where a stream broke that is asked for again)."""
        self.sampled += tokens
        self.progress.add_tokens(tokens, prompt)
        if self.cut is not None and self.budget is not None and self.sampled >= (self.budget.total or 0):
            self.cut.set()

    @property
    def is_cut(self) -> bool:
        """True when nothing more is to be sampled in this call."""
        return self.cut is not None and self.cut.is_set()

    def count_other(self, what: str, task_id: str, error: BaseException) -> None:
        """Each reason is logged once with its traceback; its count is in the statistics."""
        name = f"{what}: {describe(error)}"
        if name not in self.other_failures:
            logger.warning("task %r: %s failed", task_id, what, exc_info=error)
        self.other_failures[name] += 1


class Meter:
    """Counts the tokens of one attempt, and takes them back where it failed and they are lost."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling, self._count = sampling, 0

    def add(self, tokens: int) -> None:
        self._count += tokens
        self._sampling.count_tokens(tokens)

    async def around(self, attempt: Any, had: int = 0) -> list[Answer | None]:
        """Runs the attempt; afterwards exactly its answers' tokens have been counted, without the `had` of earlier calls."""
        try:
            answers = await attempt
        except BaseException:
            self._sampling.count_tokens(-self._count)
            raise
        total = sum(answer.completion_tokens or 0 for answer in answers if answer is not None) - had
        if total != self._count:  # not streamed, or a server that gives no ids
            self._sampling.count_tokens(total - self._count)
        return answers
