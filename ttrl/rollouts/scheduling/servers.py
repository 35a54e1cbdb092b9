"""Send requests to servers: up to their capacity, to the emptiest server, with retries.

    async with Servers(transports, concurrency=None) as servers:
        answers = await servers.send(attempt, size=Size(prompt=2000, n=16, max_tokens=512),
        max_retries=4)

Requests wait in one queue, first come, first served; a retried request keeps its place. An
unresponsive server is taken out and probed until it is back; its requests move to other servers or
wait, and neither counts as a retry. Completions broken off by a server, as all are when vLLM ends,
count as unanswered.
"""

import asyncio
import contextlib
import heapq
import itertools
import logging
import math
import random
import re
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ttrl.errors import RequestError, UserError
from ttrl.rollouts.client.wire import Answer
from ttrl.rollouts.scheduling.capacity import Load
from ttrl.rollouts.scheduling.emptiest import Emptiest
from ttrl.rollouts.scheduling.lengths import Lengths
from ttrl.rollouts.scheduling.open_files import OpenFiles
from ttrl.rollouts.scheduling.server_state import LONGEST_RETRY_AFTER, Lease, Pauses, Server
from ttrl.text import is_number, present

if TYPE_CHECKING:
    from ttrl.rollouts.client.transport import Transport

logger = logging.getLogger(__name__)

PAUSES = Pauses()
_MOST_MOVES = 8
"""Moves from failed servers before they count as retries: a request killing its servers must not be
sent forever.
"""
_AFFINITY_SLACK = 0.1
"""A server keeps the requests of one affinity if it is fuller than the emptiest by at most this
share of its room.
"""
_AFFINITIES = 100_000
_START_SECONDS = 2.0
_BROKEN_OFF = re.compile(rb'"finish_reason"\s*:\s*"(abort|error)"')
"""In the JSON of a choice; inside a string its quotation marks would have backslashes."""

Attempt: TypeAlias = "Callable[[Transport], Awaitable[list[Answer | None]]]"


class Size(NamedTuple):
    """The size of a request."""

    prompt: int
    """Characters of its messages."""
    n: int
    """Samples."""
    max_tokens: int | None
    """Of each sample; None if the server decides."""

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]], n: int, max_tokens: int | None) -> "Size":
        """Return the size of a chat request."""
        return cls(
            sum(len(str(message.get("content") or "")) for message in messages), n, max_tokens
        )


class _Waiter(NamedTuple):
    lease: "asyncio.Future[Lease]"
    load: Load
    affinity: Hashable


class Servers:
    """Distributes requests over servers. A context manager, within one event loop."""

    def __init__(
        self,
        transports: "Sequence[Transport]",
        *,
        concurrency: int | asyncio.Semaphore | None,
        max_downtime: float = 60.0,
        lengths: Lengths | None = None,
        pauses: Pauses | None = None,
        files: OpenFiles | None = None,
    ) -> None:
        """transports: one per server; they are not closed here.

        concurrency: limit on requests in flight over all servers, or a semaphore held for each;
            None uses the servers' capacity.
        max_downtime: seconds to wait while no server answers.
        lengths: known lengths of prompts and completions from an earlier call with the same model.
        pauses: PAUSES by default. files: this process's limit on open connections.

        Raises UserError for invalid values.
        """
        if not is_number(max_downtime) or max_downtime < 0:
            raise UserError(
                f"max_downtime is {max_downtime!r}; give a number of seconds of at least 0"
            )
        self._semaphore: asyncio.Semaphore | None = None
        self._most: int | None = None
        if isinstance(concurrency, asyncio.Semaphore):
            self._semaphore = concurrency
        elif concurrency is not None:
            if type(concurrency) is not int or concurrency < 1:
                raise UserError(
                    f"concurrency is {concurrency!r}; give a number of requests of at least 1, "
                    "an asyncio.Semaphore, or None"
                )
            self._most = concurrency
        self.lengths = lengths or Lengths()
        self.max_downtime = float(max_downtime)
        self._pauses = pauses or PAUSES
        self.servers = [
            Server(transport, self.lengths, self._changed, self._pauses) for transport in transports
        ]
        # Respect a given number: servers without a known capacity begin with it.
        if self._most is not None:
            for server in self.servers:
                server.room.limit = max(server.room.limit, math.ceil(self._most / len(transports)))
        self._emptiest = Emptiest(self.servers, self.lengths)
        self._down: set[Server] = set()
        self._queue: list[tuple[tuple[int, int], _Waiter]] = []
        self._tickets, self._arrivals = itertools.count(), itertools.count()
        self._in_flight = 0
        self._files = files or OpenFiles()
        self._last_served: dict[Hashable, Server] = {}
        self._nobody_since: float | None = None
        self._give_up: asyncio.TimerHandle | None = None

    def tokens_in_flight(self, finished: int) -> float:
        """Estimate the completion tokens of requests in flight, at servers reporting their speed.

        finished: tokens of all received answers; together they cannot exceed the servers' output.
        """
        now = asyncio.get_running_loop().time()
        rooms = [server.room for server in self.servers]
        made = sum(room.generated(now) for room in rooms)
        return max(0.0, min(sum(room.tokens_in_flight(now) for room in rooms), made - finished))

    @property
    def waiting(self) -> int:
        """Number of requests waiting for a server with room."""
        return len(self._queue)

    @property
    def away_seconds(self) -> float:
        """Seconds since any server answered; 0 while one does."""
        if self._nobody_since is None:
            return 0.0
        return asyncio.get_running_loop().time() - self._nobody_since

    async def __aenter__(self) -> "Servers":
        # Do not wait longer for a server's capacity; treat it as unknown.
        starts = [asyncio.create_task(server.start()) for server in self.servers]
        try:
            _, self._slow_starts = await asyncio.wait(starts, timeout=_START_SECONDS)
        except BaseException:
            for start in starts:
                start.cancel()
            await self._stop(starts)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for start in self._slow_starts:
            start.cancel()
        await self._stop(self._slow_starts)

    async def _stop(self, starts: "Sequence[asyncio.Task[None]] | set[asyncio.Task[None]]") -> None:
        if self._give_up is not None:
            self._give_up.cancel()
        await asyncio.gather(
            *starts, *(server.stop() for server in self.servers), return_exceptions=True
        )

    def ticket(self) -> int:
        """Take a place in the queue for one sample's consecutive requests: see `send`."""
        return next(self._tickets)

    async def send(
        self,
        attempt: Attempt,
        *,
        size: Size,
        max_retries: int,
        affinity: Hashable = None,
        ticket: int | None = None,
    ) -> list[Answer | None]:
        """Run `attempt` with the transport of a server with room, again after temporary failures.

        max_retries: further attempts after connection errors, timeouts, stalls, unreadable answers,
            408, 429 and 5xx, with pauses of 0.5, 1, 2 … 8 seconds or as requested by the server.
            Moving away from a failed server is not counted.
        affinity: requests with an equal one go to the same server if possible: its prefix cache has
            their prompt.
        ticket: the place in the queue, lowest first; None: behind all earlier ones. A conversation
            keeping its ticket continues before new ones begin, while the server's prefix cache
            still has it.

        Raises RequestError: the request's last one or, after `max_downtime` seconds without any
        answering server, one saying so. Other exceptions of `attempt` pass through.
        """
        if ticket is None:
            ticket = next(self._tickets)
        attempts = moves = 0
        while True:
            async with self._semaphore or contextlib.nullcontext():
                lease = await self._admitted(ticket, size, affinity)
                try:
                    async with lease.scope:
                        answers = _without_broken_off(
                            await attempt(lease.server.transport), lease.server.base_url
                        )
                    self._learn(lease, size, answers)
                    return answers
                except RequestError as failure:
                    error = failure
                except TimeoutError:
                    if not lease.scope.expired():
                        raise
                    error = RequestError(
                        f"{lease.server.base_url}: the server died during this request",
                        "connection",
                    )
                finally:
                    self._release(lease)
            if not error.worth_retry:
                lease.server.was_heard = True
                raise _with_attempts(error, attempts + 1) from error
            others = self._others(lease.server)
            is_out = await lease.server.failed(_copied(error, str(error)), has_others=bool(others))
            # A server breaking off requests is soon the emptiest again.
            if others and affinity is not None:
                self._last_served[affinity] = random.choice(
                    self._others(lease.server) or [lease.server]
                )
            if is_out and moves < _MOST_MOVES:
                moves += 1
                continue
            attempts += 1
            if attempts > max_retries:
                raise _with_attempts(error, attempts) from error
            delay = self._delay(error, attempts, elsewhere=bool(others))
            logger.debug("%s; trying again in %.1f s", error, delay)
            await asyncio.sleep(delay)

    def _delay(self, error: RequestError, attempts: int, *, elsewhere: bool) -> float:
        """Return the seconds to wait. elsewhere: another server may take it, so ignore this one's
        Retry-After.
        """
        if error.retry_after is not None and not elsewhere:
            return min(error.retry_after, LONGEST_RETRY_AFTER)
        doubled = self._pauses.first_retry * 2.0 ** min(attempts - 1, 16)
        return min(doubled, self._pauses.longest_retry) * (1.0 - 0.25 * random.random())

    def _learn(self, lease: Lease, size: Size, answers: Sequence[Answer | None]) -> None:
        lease.server.succeeded()
        got = present(answers)
        completions = present(answer.completion_tokens for answer in got)
        if got:
            self.lengths.observe(size.prompt, got[0].prompt_tokens, completions)

    # Admission

    async def _admitted(self, ticket: int, size: Size, affinity: Hashable) -> Lease:
        load = Load(size.prompt, size.n, size.max_tokens)
        if not self._queue:
            server = self._choose(load, affinity)
            if server is not None:
                return self._lease(server, load, affinity)
        # No server has answered for too long.
        if self._nobody_since is not None and self._give_up is None:
            raise self._nobody()
        waiter = _Waiter(asyncio.get_running_loop().create_future(), load, affinity)
        heapq.heappush(self._queue, ((ticket, next(self._arrivals)), waiter))
        self._pump()
        try:
            return await waiter.lease
        except asyncio.CancelledError:
            if (
                waiter.lease.done()
                and not waiter.lease.cancelled()
                and waiter.lease.exception() is None
            ):
                self._release(waiter.lease.result())
            else:
                waiter.lease.cancel()
                self._pump()  # its size may have blocked the queue
            raise

    def _lease(self, server: Server, load: Load, affinity: Hashable) -> Lease:
        lease = Lease(server, load)
        server.leases.add(lease)
        server.room.add(load, asyncio.get_running_loop().time())
        self._emptiest.changed(server)
        self._in_flight += 1
        if affinity is not None and len(self.servers) > 1:
            self._last_served.pop(affinity, None)
            self._last_served[affinity] = server
            if len(self._last_served) > _AFFINITIES:
                del self._last_served[next(iter(self._last_served))]
        return lease

    def _release(self, lease: Lease) -> None:
        if lease in lease.server.leases:
            lease.server.leases.discard(lease)
            lease.server.room.remove(lease.load)
            self._emptiest.changed(lease.server)
            self._in_flight -= 1
            self._pump()

    def _pump(self) -> None:
        """Send waiting requests in order while there is room; wake no others."""
        while self._queue:
            waiter = self._queue[0][1]
            if waiter.lease.done():
                heapq.heappop(self._queue)
                continue
            server = self._choose(waiter.load, waiter.affinity)
            if server is None:
                return
            heapq.heappop(self._queue)
            waiter.lease.set_result(self._lease(server, waiter.load, waiter.affinity))

    def _choose(self, load: Load, affinity: Hashable) -> Server | None:
        """Return the emptiest server with room, or the last one of this affinity."""
        if self._most is not None and self._in_flight >= self._most:
            return None
        if self._in_flight and not self._files.allows(self._in_flight + 1):
            return None
        last = self._last_served.get(affinity) if affinity is not None else None
        return self._emptiest.choose(load, asyncio.get_running_loop().time(), last, _AFFINITY_SLACK)

    def _others(self, server: Server) -> list[Server]:
        """Return the other open servers."""
        now = asyncio.get_running_loop().time()
        return [other for other in self.servers if other is not server and other.is_open(now)]

    # When no server is left

    def _changed(self, server: Server) -> None:
        """Handle a server going out, coming back or gaining room."""
        loop = asyncio.get_running_loop()
        self._emptiest.changed(server)
        (self._down.discard if server.up else self._down.add)(server)
        if len(self._down) < len(self.servers):
            self._nobody_since = None
            if self._give_up is not None:
                self._give_up.cancel()
                self._give_up = None
        elif self._nobody_since is None:
            self._nobody_since = loop.time()
            self._give_up = loop.call_later(self._patience(), self._fail_all)
        self._pump()

    def _patience(self) -> float:
        if any(server.was_heard for server in self.servers):
            return self.max_downtime
        return min(self._pauses.patience, self.max_downtime)

    def _fail_all(self) -> None:
        self._give_up = None
        waiters = self._queue
        self._queue = []
        for _, waiter in waiters:
            if not waiter.lease.done():
                waiter.lease.set_exception(self._nobody())

    def _nobody(self) -> RequestError:
        assert self._nobody_since is not None
        seconds = asyncio.get_running_loop().time() - self._nobody_since
        said = "; ".join(f"{server.last_fault or server.base_url}" for server in self.servers)
        if len(self.servers) == 1:
            who = "the server has"
        else:
            who = f"none of the {len(self.servers)} servers has"
        return RequestError(
            f"{who} not answered for {seconds:.0f} s; check that it is running. The last error: "
            f"{said}",
            "connection",
        )


def _without_broken_off(answers: list[Answer | None], base_url: str) -> list[Answer | None]:
    """Put None for completions the server broke off: like omitted ones, they are requested again.
    Raises RequestError if there are no others.
    """
    kept: list[Answer | None] = []
    reasons = set()
    for answer in answers:
        found = _BROKEN_OFF.search(answer.choice) if answer is not None else None
        if found is not None:
            reasons.add(found[1].decode())
            answer = None
        kept.append(answer)
    if not reasons or any(kept):
        return kept
    if "abort" in reasons:
        why = "the server ended the completion with finish_reason 'abort', as on its end or pause"
        raise RequestError(f"{base_url}: {why}", "connection")
    why = "the server failed the completion with finish_reason 'error'; its log has the reason"
    raise RequestError(f"{base_url}: {why}", "malformed")


def _copied(error: RequestError, text: str) -> RequestError:
    """Return the error with another text and no traceback; a traceback keeps its frames' objects
    alive.
    """
    return RequestError(text, error.kind, status=error.status, retry_after=error.retry_after)


def _with_attempts(error: RequestError, attempts: int) -> RequestError:
    if attempts == 1:
        return error
    return _copied(error, f"{error} ({attempts} attempts)")
