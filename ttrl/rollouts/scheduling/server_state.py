"""Track one server: requests in flight, health and load."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, NamedTuple

from ttrl.errors import RequestError
from ttrl.rollouts.scheduling.capacity import Load, ServerRoom, read_metrics
from ttrl.rollouts.scheduling.lengths import Lengths

if TYPE_CHECKING:
    from ttrl.rollouts.client.transport import Transport

logger = logging.getLogger(__name__)

FAULTS_IN_A_ROW = 3
"""5xx, timeouts, stalls and unreadable answers in a row before a server is doubted."""
PROBE_TIMEOUT = 5.0
UNANSWERED_IN_A_ROW = 2
"""Reads of /metrics timing out before a server is doubted, if no request is answered in between."""
LONGEST_RETRY_AFTER = 120.0
"""A server's Retry-After is obeyed up to this many seconds."""
ABANDON_AFTER = 30.0
"""Seconds before requests in flight to a failed server are moved: a dead machine closes no
connection.
"""


class Pauses(NamedTuple):
    """Seconds of waiting."""

    first_retry: float = 0.5
    """Before a request's first retry; doubled each time, with up to a quarter taken off at
    random.
    """
    longest_retry: float = 8.0
    probes: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0, 5.0)
    """Between the probes of a failed server; the last one repeats."""
    poll: float = 1.0
    """Between two reads of /metrics while requests are in flight."""
    patience: float = 10.0
    """Until giving up if no server has ever answered: the address is probably wrong."""


class Lease:
    """One request in flight."""

    __slots__ = ("load", "scope", "server")

    def __init__(self, server: "Server", load: Load) -> None:
        self.server = server
        self.load = load
        self.scope = asyncio.timeout(None)
        """Ends the request when its server is given up."""


class Server:
    """One server. Probes decide its health: a broken connection or many faults only make it
    doubtful, and a probe follows at once.
    """

    def __init__(
        self,
        transport: "Transport",
        lengths: Lengths,
        changed: Callable[["Server"], None],
        pauses: Pauses,
    ) -> None:
        """`changed` is called with it whenever it has more room or has failed."""
        self._pauses = pauses
        self.transport, self.room = transport, ServerRoom(lengths)
        self.leases: set[Lease] = set()
        self.up = True
        self.was_heard = False
        """Whether it has ever answered."""
        self.last_fault: RequestError | None = None
        self.held_until = 0.0
        """End of its requested pause, on the loop's clock."""
        self._changed = changed
        self._faults = self._rests = self._unanswered = 0
        self._examination: asyncio.Task[bool] | None = None
        self._hold: asyncio.TimerHandle | None = None
        self._background: set[asyncio.Task[None]] = set()

    @property
    def base_url(self) -> str:
        return self.transport.base_url

    def is_open(self, now: float) -> bool:
        """Return whether it accepts requests at all."""
        return self.up and now >= self.held_until and self._examination is None

    async def start(self) -> None:
        """Read /metrics once, and then regularly while requests are in flight."""
        if await self._poll():
            self._spawn(self._keep_polling())

    async def stop(self) -> None:
        """End all background tasks."""
        if self._hold is not None:
            self._hold.cancel()
        tasks: list[asyncio.Task[None] | asyncio.Task[bool]] = [*self._background]
        if self._examination is not None:
            tasks.append(self._examination)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Reports of requests

    def succeeded(self) -> None:
        """Record an answered request."""
        self.was_heard = True
        self._faults = self._rests = self._unanswered = 0
        self.room.succeeded()

    async def failed(self, error: RequestError, *, has_others: bool) -> bool:
        """Record a retryable failure; return True if the server is now out, or was already.

        has_others: another server would take the requests, so this one may rest even if it still
            answers probes.
        """
        loop = asyncio.get_running_loop()
        self.last_fault = error
        if error.kind == "status":
            self.was_heard = True
        if error.status in (408, 429) or error.kind == "timeout":
            self.room.refused(loop.time())
        if error.status == 429:
            if error.retry_after:
                self.hold(min(error.retry_after, LONGEST_RETRY_AFTER))
            self._faults = 0
            return False
        if not self.up:
            return True
        if error.kind != "connection":
            self._faults += 1
            if self._faults < FAULTS_IN_A_ROW:
                return False
        rest = has_others and error.kind != "connection"
        if self._examination is None:
            self._examination = loop.create_task(self._examine(rest))
        return not await asyncio.shield(self._examination)

    def hold(self, seconds: float) -> None:
        """Send nothing new for this long."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        if until > self.held_until:
            self.held_until = until
            if self._hold is not None:
                self._hold.cancel()
            self._hold = loop.call_at(until, self._go_on)

    def _go_on(self) -> None:
        """End the pause, even slightly early on the loop's clock: timers fire early by its
        resolution.
        """
        self._hold = None
        self.held_until = 0.0
        self._changed(self)

    # Health

    async def _examine(self, rest: bool) -> bool:
        """Return whether it is still in use after a doubt."""
        try:
            alive = await self._answers()
        finally:
            self._examination = None
        self._faults = 0
        if alive and not rest:
            self._changed(self)
            return True
        self.up = False
        if alive:
            state = f"{FAULTS_IN_A_ROW} faults in a row"
        else:
            state = "it does not answer"
        logger.warning(
            "%s is out of use, %s; the last fault: %s", self.base_url, state, self.last_fault
        )
        self._spawn(self._bring_back(self._rests if alive else 0))
        self._rests += alive
        self._changed(self)
        return False

    async def _bring_back(self, number: int) -> None:
        """Probe with growing pauses, starting at this number, until it answers."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            await asyncio.sleep(self._pauses.probes[min(number, len(self._pauses.probes) - 1)])
            if await self._answers():
                break
            number += 1
            if loop.time() - began >= ABANDON_AFTER:
                for lease in self.leases:
                    if not lease.scope.expired():
                        lease.scope.reschedule(loop.time())
        self.up = True
        logger.warning("%s is back after %.1f s", self.base_url, loop.time() - began)
        self._changed(self)

    async def _answers(self) -> bool:
        """Return whether it answers GET /models; anything below 500 is a sign of life."""
        try:
            async with asyncio.timeout(2 * PROBE_TIMEOUT):  # in case a transport ignores its own
                await self.transport.get("/models", timeout=PROBE_TIMEOUT)
        except RequestError as error:
            alive = error.kind == "malformed" or (
                error.kind == "status" and (error.status or 0) < 500
            )
            if not alive:
                self.last_fault = error
            self.was_heard |= error.kind in ("status", "malformed")
            return alive
        except TimeoutError:
            return False
        self.was_heard = True
        return True

    # Load

    async def _poll(self) -> bool:
        """Read /metrics; return False if there are none."""
        try:
            text = await self.transport.get("/metrics", root=True, timeout=PROBE_TIMEOUT)
        except RequestError as error:
            logger.debug("no metrics of %s: %s", self.base_url, error)
            self.was_heard |= error.kind in ("status", "malformed")
            self._unanswered += error.kind == "timeout" and not _waited_for_a_connection(error)
            doubtful = error.kind == "connection" or self._unanswered >= UNANSWERED_IN_A_ROW
            if doubtful and self.up and self._examination is None:
                self.last_fault = error
                self._examination = asyncio.get_running_loop().create_task(
                    self._examine(rest=False)
                )
            return error.kind != "status" or (error.status or 0) >= 500
        self.was_heard = True
        self._unanswered = 0
        metrics = read_metrics(text.decode(errors="replace"))
        if metrics is None:
            logger.debug("%s reports no KV cache at /metrics", self.base_url)
            return False
        self.room.update(metrics, asyncio.get_running_loop().time())
        self._changed(self)
        return True

    async def _keep_polling(self) -> None:
        while True:
            await asyncio.sleep(self._pauses.poll)
            if self.leases and self.up and not await self._poll():
                return

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _waited_for_a_connection(error: BaseException | None) -> bool:
    """Return whether the client's own connection pool took the time; this says nothing about the
    server.
    """
    while error is not None and "PoolTimeout" not in type(error).__name__:
        error = error.__cause__ or error.__context__
    return error is not None
