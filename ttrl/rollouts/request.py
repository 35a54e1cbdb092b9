"""Describe one sampling call: model, number of samples and settings."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from openai import AsyncOpenAI

from ttrl.errors import UserError
from ttrl.records import Endpoint, TaskResult
from ttrl.rollouts.cache.completions import Cache
from ttrl.rollouts.client.assembly import OnChunk
from ttrl.rollouts.client.chat_completions import check_int
from ttrl.rollouts.partial import TokenBudget
from ttrl.rollouts.progress import Prices

Client: TypeAlias = "AsyncOpenAI | str | Endpoint | Sequence[AsyncOpenAI | str | Endpoint]"
CacheLike: TypeAlias = "Cache | str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None"
Transform: TypeAlias = Callable[[TaskResult], Any] | Callable[[TaskResult], Awaitable[Any]]


@dataclass(frozen=True, kw_only=True)
class SamplingRequest:
    """Ask for samples of any tasks; `get_task_results` explains the fields.

    Raises UserError for wrong callbacks and counts; `Sampling` checks the rest as it opens servers,
    cache and graders.
    """

    client: Client
    model: str
    n: int = 1
    params: Mapping[str, Any] | None = None
    token_ids: bool = True
    cache: CacheLike = None
    weights_digest: str | None = None
    weights_version: int = -1
    concurrency: int | asyncio.Semaphore | None = None
    samples_per_request: int | None = None
    max_retries: int = 4
    max_downtime: float = 60.0
    stall_timeout: float = 120.0
    on_chunk: OnChunk | None = None
    isolated: bool = False
    grader_timeout: float = 60.0
    grader_memory: int | None = None
    transform: Transform | None = None
    on_task_done: Callable[[TaskResult], None] | None = None
    token_budget: int | TokenBudget | None = None
    unfinished: Iterable[TaskResult] = ()
    prices: Prices | tuple[float, float] | None = None
    pbar: bool | str = True
    pbar_desc: str = "sampling"
    log_dir: str | os.PathLike[str] | None = None
    requests_log: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if not self.clients:
            raise UserError(
                "client is an empty list; give at least one AsyncOpenAI client or base URL"
            )
        for name, argument in (
            ("transform", "a TaskResult"),
            ("on_task_done", "a TaskResult"),
            ("on_chunk", "(chunk, completion)"),
        ):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise UserError(f"{name} is {function!r}; give a function of {argument}")
        check_int("n", self.n, at_least=1)
        check_int("max_retries", self.max_retries, at_least=0)
        most = self.samples_per_request
        if most is not None and (type(most) is not int or most < 1):
            raise UserError(
                f"samples_per_request is {most!r}; give a number of at least 1, or None"
            )

    @property
    def clients(self) -> list[Any]:
        """One per server."""
        if isinstance(self.client, Sequence) and not isinstance(self.client, str):
            return list(self.client)
        return [self.client]

    @property
    def description(self) -> str:
        """The call's name in progress line and log."""
        if isinstance(self.pbar, str):
            return self.pbar
        return self.pbar_desc
