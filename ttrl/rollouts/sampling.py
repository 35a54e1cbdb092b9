"""Hold a running sampling call: its servers, graders, cache, budget, counts and jobs."""

import asyncio
import contextlib
import functools
import itertools
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ttrl.errors import TaskError, UserError, describe
from ttrl.messages import JsonObject
from ttrl.records import TaskResult
from ttrl.rollouts.cache.completions import Cache, request_digest, sample_key
from ttrl.rollouts.client.assembly import STOPPED_EARLY
from ttrl.rollouts.client.attempts import CountedAttempt
from ttrl.rollouts.client.chat_completions import ChatRequest
from ttrl.rollouts.client.transport import answer_identity, transport_for
from ttrl.rollouts.client.wire import Answer
from ttrl.rollouts.graders.grading import Graders, Threads
from ttrl.rollouts.partial import TokenBudget, check_continuable, first_part
from ttrl.rollouts.progress import Prices, Progress, screen
from ttrl.rollouts.request import SamplingRequest
from ttrl.rollouts.requests_log import RequestsLog, describe_request
from ttrl.rollouts.sample_logs import SampleLogs
from ttrl.rollouts.scheduling.lengths import Lengths
from ttrl.rollouts.scheduling.servers import Servers, Size
from ttrl.system.tracing import span
from ttrl.tasks.task import Task
from ttrl.text import present

logger = logging.getLogger(__name__)


_LIVE_SAMPLES = 16384
"""Samples of tasks started but not handed over, if the server decides the number of requests in
flight.
"""
_NOT_TO_KEEP = frozenset({None, "abort", "error", "unfinished"})
"""Finish reasons of answers the model did not end; they never enter a cache."""


@dataclass(frozen=True)
class Job:
    """One task of a call."""

    position: int
    """Among the tasks of the call."""
    task: Task
    first: int
    """The number of its first sample, for cache keys and seeds: equal tasks of one call must not
    share samples.
    """


def numbered_jobs(tasks: Iterable[Task], n: int) -> Iterator[Job]:
    """Yield jobs of `n` samples each; their numbers distinguish equal tasks."""
    times: Counter[str] = Counter()
    for position, task in enumerate(tasks):
        key = json.dumps(task.messages, sort_keys=True)
        yield Job(position, task, times[key] * n)
        times[key] += 1


class Sampling:
    """The shared state of a running `get_task_results` call.

    Raises UserError for a wrong request before anything is sent.
    """

    def __init__(self, request: SamplingRequest, total: int | None = None) -> None:
        """total: the number of tasks; None if unknown."""
        self.request = request
        self.chat_request = ChatRequest.of(
            request.model,
            params=request.params,
            token_ids=request.token_ids,
            stall_timeout=request.stall_timeout,
        )
        self.budget = TokenBudget.of(request.token_budget)
        self.kept = list(request.unfinished)
        """Samples of the first tasks from an earlier call."""
        self._check_budget()
        self.first_request = first_part(self.chat_request, self.budget)
        """The request for empty samples."""
        # vLLM refuses n > 1 for greedy sampling; and it would go on sampling one choice of many
        # after an early stop.
        is_greedy = self.chat_request.parameters.get("temperature") == 0
        alone = request.on_chunk is not None or is_greedy
        self.samples_per_request = request.samples_per_request or (1 if alone else request.n)
        self.most_live = max(256, _LIVE_SAMPLES // request.n)
        """Limit on tasks started but not handed over."""
        self.sampled = 0
        """New completion tokens so far."""
        self.cut: asyncio.Event | None = None
        """Set when the budget's total is reached."""
        if self.budget is not None and self.budget.total is not None:
            self.cut = asyncio.Event()
        self.other_failures: Counter[str] = Counter()
        """Of transforms and callbacks; samples record their own."""
        self.cache = Cache.of(request.cache)
        self.prices = None if request.prices is None else Prices.of(request.prices)
        self._early_end: Any = getattr(request.on_chunk, "cache_key", None)
        """Names an `on_chunk` for the cache, such as InferenceEarlyStop."""
        self.transports = [transport_for(client) for client in request.clients]
        self._identity = answer_identity(
            self.transports, request.weights_digest, has_cache=self.cache is not None
        )
        self.servers = Servers(
            self.transports,
            concurrency=request.concurrency,
            max_downtime=request.max_downtime,
            lengths=_known_lengths(
                request.model, tuple(transport.base_url for transport in self.transports)
            ),
        )
        self.graders = Graders(
            isolated=bool(request.isolated),
            timeout=request.grader_timeout,
            memory=request.grader_memory,
        )
        self.transform_thread = Threads(1)
        log = request.requests_log
        self.requests_log = None if log is None else RequestsLog(log)
        folder = request.log_dir
        self.sample_logs = None if folder is None else SampleLogs(folder)
        self._is_numbered = (
            self.cache is not None
            or self.requests_log is not None
            or self.sample_logs is not None
            or self.chat_request.seed is not None
        )
        self.progress = Progress(
            None if total is None else total * request.n,
            request.description,
            screen() if request.pbar else None,
            self.prices,
        )

    def _check_budget(self) -> None:
        if self.budget is None and not self.kept:
            return
        check_continuable(self.chat_request)
        if not all(isinstance(result, TaskResult) for result in self.kept):
            raise UserError(
                "unfinished holds something other than TaskResult; give the `unfinished` of an "
                "earlier call"
            )
        wrong = [result for result in self.kept if len(result.samples) != self.request.n]
        if wrong:
            raise UserError(
                f"unfinished: task {wrong[0].task_id!r} has {len(wrong[0].samples)} samples, but n "
                f"is {self.request.n}; give the n of the earlier call"
            )
        if not self.request.token_ids:
            raise UserError(
                "token_budget and unfinished need token ids to continue completions; set "
                "token_ids=True"
            )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run servers, graders and progress line within the block; close the connections at the
        end.
        """
        async with contextlib.AsyncExitStack() as stack:
            for transport in self.transports:
                stack.push_async_callback(transport.close)
            await stack.enter_async_context(self.servers)
            for part in (self.graders, self.progress, self.transform_thread):
                stack.enter_context(part)
            listeners = (self.request.on_chunk, self.cut, self.sample_logs)
            # Otherwise answers are streamed and counted as they arrive.
            if all(one is None for one in listeners):
                stack.callback(self.progress.keep_moving(self.servers.tokens_in_flight))
            yield

    # Jobs

    def check(self, task: Task) -> Task:
        """Return the task. Raises TaskError if this call cannot sample it."""
        if task.rollout is not None and (self.budget is not None or self.kept):
            raise TaskError(
                f"task {task.id!r} has a rollout, and a token budget cannot cut off a rollout and "
                "continue it later; leave token_budget and unfinished out, or give the task no "
                "rollout"
            )
        return task

    def jobs(self, tasks: Iterable[Task]) -> Iterator[Job]:
        """Yield a job for each task, each checked on its turn."""
        tasks = iter(tasks)
        begun = list(itertools.islice(tasks, len(self.kept)))
        self._check_begun(begun)
        checked = map(self.check, itertools.chain(begun, tasks))
        if self._is_numbered:
            return numbered_jobs(checked, self.request.n)
        # Numbers would take memory for every task of an endless generator.
        return (Job(position, task, 0) for position, task in enumerate(checked))

    def digest(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the digest of a request for seeds, cache keys and logs; None if none of them is
        used.
        """
        if not self._is_numbered:
            return None
        return request_digest(self._identity, self.cache_body(messages))

    def _check_begun(self, tasks: Sequence[Task]) -> None:
        """Check all of `unfinished` before the first request: a mistake must cost no samples, and
        none may be omitted.
        """
        for position, (kept, task) in enumerate(zip(self.kept, tasks, strict=False)):
            if (kept.task_id, kept.messages) != (task.id, task.messages):
                raise UserError(
                    f"unfinished[{position}] is of task {kept.task_id!r}, but tasks[{position}] is "
                    f"task {task.id!r}; begin with the tasks of `unfinished`, in the same order"
                )
        if len(tasks) < len(self.kept):
            raise UserError(
                f"unfinished holds {len(self.kept)} groups, but there are {len(tasks)} tasks; "
                "begin with the tasks of `unfinished`, in the same order"
            )

    def cache_body(
        self, messages: Sequence[Mapping[str, Any]], request: ChatRequest | None = None
    ) -> JsonObject:
        """Return the inputs of an answer: the request (by default the call's), and any named early
        stop.
        """
        body = (request or self.chat_request).cache_body(messages)
        if self._early_end is None:
            return body
        return {**body, "on_chunk": self._early_end}

    # Answers

    async def cached(self, digest: str | None, numbers: Sequence[int]) -> list[Answer | None]:
        """Look samples up in the cache by number, and log the hits."""
        if self.cache is None or digest is None:
            return [None] * len(numbers)
        answers = await asyncio.gather(
            *(self.cache.get(sample_key(digest, number)) for number in numbers)
        )
        found = [
            number for number, answer in zip(numbers, answers, strict=True) if answer is not None
        ]
        if found:
            self._log(digest, found, base_url=self.cache.describe(), hit=True)
        return answers

    async def send(
        self,
        attempt: CountedAttempt,
        digest: str | None,
        numbers: Sequence[int],
        size: Size,
        *,
        affinity: Hashable = None,
        ticket: int | None = None,
    ) -> list[Answer | None]:
        """Make the request for samples of these numbers, as `Servers.send` does, and log its result
        or error.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        with span(f"chat {self.request.model}", kind="client") as traced:
            try:
                answers = await self.servers.send(
                    attempt,
                    size=size,
                    max_retries=self.request.max_retries,
                    affinity=affinity,
                    ticket=ticket,
                )
            except Exception as error:
                seconds = loop.time() - began
                self._log(digest, numbers, base_url=attempt.base_url, seconds=seconds, error=error)
                describe_request(traced, self.chat_request, len(numbers), attempt.base_url, {})
                raise
            facts: dict[str, Any] = {}
            got = present(answers)
            if got:
                facts = {
                    "prompt_tokens": got[0].prompt_tokens,
                    "cached_prompt_tokens": got[0].cached_tokens,
                    "completion_tokens": sum(answer.completion_tokens or 0 for answer in got),
                }
                self.progress.add_tokens(0, got[0].prompt_tokens or 0)
            seconds = loop.time() - began
            self._log(digest, numbers, base_url=attempt.base_url, seconds=seconds, **facts)
            describe_request(traced, self.chat_request, len(numbers), attempt.base_url, facts)
        return answers

    async def keep(
        self,
        digest: str | None,
        number: int,
        answer: Answer,
        ended: str | None,
        messages: Sequence[Mapping[str, Any]],
        request: ChatRequest | None = None,
    ) -> None:
        """Put an answer into the cache, unless an unnamed `on_chunk` ended it: no key can describe
        this.

        ended: its finish reason.
        messages, request: its input, by default the call's request.
        """
        if self.cache is None or digest is None or ended in _NOT_TO_KEEP:
            return
        if ended == STOPPED_EARLY and self._early_end is None:
            return
        await self.cache.put(sample_key(digest, number), answer, self.cache_body(messages, request))

    def _log(
        self,
        digest: str | None,
        numbers: Sequence[int],
        *,
        base_url: str,
        hit: bool = False,
        **facts: Any,
    ) -> None:
        if self.requests_log is not None and digest is not None:
            model = self.request.model
            self.requests_log.append(
                base_url=base_url, model=model, digest=digest, samples=numbers, hit=hit, **facts
            )

    # Counts

    def count_tokens(self, tokens: int) -> None:
        """Count completion tokens as they arrive (fewer for a broken stream, because it is
        requested again).
        """
        self.sampled += tokens
        self.progress.add_tokens(tokens)
        if (
            self.cut is not None
            and self.budget is not None
            and self.sampled >= (self.budget.total or 0)
        ):
            self.cut.set()

    @property
    def is_cut(self) -> bool:
        """True once this call is to sample no more."""
        return self.cut is not None and self.cut.is_set()

    def count_other(self, what: str, task_id: str, error: BaseException) -> None:
        """Log each reason once with its traceback, and count it for the statistics."""
        name = f"{what}: {describe(error)}"
        if name not in self.other_failures:
            logger.warning("task %r: %s failed", task_id, what, exc_info=error)
        self.other_failures[name] += 1


@functools.lru_cache(32)
def _known_lengths(model: str, base_urls: tuple[str, ...]) -> Lengths:
    """Return the lengths seen by this process's earlier calls of the same model: iterations are
    alike, so the first wave need not guess.
    """
    return Lengths()
