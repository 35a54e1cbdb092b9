"""Control the processes of graders from ttrl's side (`ttrl.rollouts.graders.grader_worker` is
theirs): start them, send orders, receive answers.

All of it happens on the event loop, in callbacks of the sockets; there are no threads. A worker has
one grade at a time.
"""

import asyncio
import contextlib
import json
import os
import secrets
import socket
import sys
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from ttrl.rollouts.graders.worker_wire import MAX_ANSWER, Order, Reply, pack, unpack
from ttrl.system.process_guard import DUMPABLE, SCOPES, landlock_version, prctl
from ttrl.system.processes import ChildProcess, without_secrets

LOAD_SECONDS = 120.0
"""For a worker to start and import a new grader's modules; not counted as grading."""
_END_SECONDS = 2.0
"""Wait for the report of a worker's end after its channel closed; without one, the worker is still
running.
"""
_KEPT_GRADERS = 64  # in each worker: many tasks have their own grader

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from ttrl.rollouts.graders.grader_worker import main; "
    "main(int(sys.argv[2]), float(sys.argv[3]))"
)


class End(Exception):  # noqa: N818 - never leaves this package
    """A worker gave no answer.

    kind: "timeout", "load" (a timeout too), "garbage", "closed" (the channel), "died", or "not
        taken": it died before reading its order.
    status: the exit code of a dead worker, negative for a signal; None if unknown.
    """

    def __init__(self, kind: str, status: int | None = None) -> None:
        super().__init__(kind)
        self.kind = kind
        self.status = status


class Keeper:
    """Controls the keeper, the process forking workers. memory: bytes of one grade. cpu: seconds of
    one grade.
    """

    def __init__(self, memory: int, cpu: float) -> None:
        self.ended = False
        self.last_words = ""
        """The end of the keeper's output, after its end."""
        self._workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        self._folder = tempfile.TemporaryDirectory(prefix="ttrl-graders-")
        path = [entry or os.getcwd() for entry in sys.path]
        if landlock_version() < SCOPES:  # else each worker shuts itself in
            # /proc no longer shows our environment and memory to this user's processes.
            prctl(DUMPABLE, 0)
        self._orders, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            self._child = ChildProcess(
                # -P: it gets our sys.path; the current folder must not come before the standard
                # library.
                [sys.executable, "-P", "-c", _PROGRAM, json.dumps(path), str(memory), str(cpu)],
                Path(self._folder.name, "keeper.log"),
                without_secrets(),
                pipes=(theirs.fileno(), theirs.fileno()),
            ).start()

    async def worker(self) -> "Worker":
        """Start a worker. It is not usable if the keeper has ended."""
        channel, its_channel = socket.socketpair()
        control, its_control = socket.socketpair()
        with its_channel, its_control:
            descriptors = [its_channel.fileno(), its_control.fileno()]
            try:
                socket.send_fds(self._orders, [b"start"], descriptors)
            except OSError:
                self.close()
        worker = Worker(channel, control)
        self._workers.add(worker)
        await worker.connect()
        return worker

    def close(self) -> None:
        """End the keeper and its workers. Harmless when repeated."""
        if self.ended:
            return
        self.ended = True
        for worker in self._workers:
            worker.has_ended(None)
            worker.end()
        self._orders.close()
        self._child.stop(0.0)
        self.last_words = self._child.log_tail()
        self._folder.cleanup()


class _Report(asyncio.Protocol):
    """The report of a worker's guard; it ends with its socket."""

    def __init__(self, ended: Callable[[int | None], None]) -> None:
        self._ended = ended
        self._data = b""

    def data_received(self, data: bytes) -> None:
        """Keep the data."""
        self._data += data

    def connection_lost(self, error: Exception | None) -> None:
        """Report the exit code; None if the guard was killed."""
        status = None
        if self._data:
            status = json.loads(self._data)["returncode"]
        self._ended(status)


class Worker(asyncio.Protocol):
    """Controls one worker: its messages and its current order.

    channel: the socket to the worker. control: the socket to its guard.
    """

    def __init__(self, channel: socket.socket, control: socket.socket) -> None:
        self.usable = True
        self._loop = asyncio.get_running_loop()
        self._sockets = (channel, control)
        self._transports: list[asyncio.Transport] = []
        self._known: OrderedDict[int, None] = OrderedDict()
        self._buffer = bytearray()
        self._order = ""
        self._is_loading = True
        self._answers: asyncio.Queue[Reply | End] | None = None

    async def connect(self) -> None:
        """Listen to the worker and to its guard."""
        channel, control = self._sockets
        listen = self._loop.create_unix_connection
        transport, _ = await listen(lambda: self, sock=channel)
        self._transports.append(transport)
        transport, _ = await listen(lambda: _Report(self.has_ended), sock=control)
        self._transports.append(transport)

    async def grade(
        self, key: int, pickle_: bytes, choice: bytes, where: str, timeout: float
    ) -> Reply:
        """Return the worker's answer. Raises End if there is none."""
        new = key not in self._known
        forget = []
        self._known[key] = None
        self._known.move_to_end(key)
        if len(self._known) > _KEPT_GRADERS:
            forget = [self._known.popitem(last=False)[0]]
        # A name unknown to all earlier graders: their late messages are not taken for answers to
        # this order.
        self._order = secrets.token_hex(8)
        order = Order(self._order, key, where, forget)
        self._answers = asyncio.Queue()
        self._is_loading = new
        try:
            if not self.usable:
                raise End("not taken")
            self._transports[0].write(pack(order, *([pickle_] if new else []), choice))
            if new:
                answer = await self._next(LOAD_SECONDS, "load")
            else:
                answer = await self._next(timeout, "timeout")
            self._is_loading = False
            if answer.loaded:
                answer = await self._next(timeout, "timeout")
            elif new:
                del self._known[key]
            if self._buffer:
                raise End("garbage")
            return answer
        finally:
            self._answers = None

    async def _next(self, seconds: float, kind: str) -> Reply:
        assert self._answers is not None
        # The timer's callback runs after those of received data: an arrived answer counts, however
        # late the loop looks.
        timer = asyncio.get_running_loop().call_later(seconds, self._fail, End(kind))
        try:
            answer = await self._answers.get()
        finally:
            timer.cancel()
        if isinstance(answer, End):
            raise answer
        return answer

    def data_received(self, data: bytes) -> None:
        """Take the answers to the order; a worker sending anything else gets no further one."""
        self._buffer += data
        if self._answers is None:
            self.usable = False  # unrequested: left by an earlier grader
            return
        try:
            frame = unpack(Reply, self._buffer, MAX_ANSWER)
            while frame is not None:
                reply, _ = frame
                if reply.order == self._order:
                    self._answers.put_nowait(reply)
                else:
                    self.usable = False
                frame = unpack(Reply, self._buffer, MAX_ANSWER)
        except ValueError:
            self._fail(End("garbage"))

    def connection_lost(self, error: Exception | None) -> None:
        """Report the loss. After a reset, the worker died with (part of) its order unread.
        Otherwise the guard should soon report the worker's end.
        """
        if isinstance(error, ConnectionResetError | BrokenPipeError):
            self._fail(End("not taken"))
        else:
            self.usable = False
            self._loop.call_later(_END_SECONDS, self._fail, End("closed"))

    def has_ended(self, status: int | None) -> None:
        """Handle the guard's report of the worker's end; status: None if the guard or the keeper is
        gone.
        """
        # A worker cannot go on without its guard; if it had no grader yet, another one can take its
        # choice.
        if status is None and self._is_loading:
            end = End("not taken")
        else:
            end = End("died", status)
        # The answer may have just arrived, or the order may be unread: check first (a lost
        # connection has its own callback).
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon(self._loop.call_soon, self._fail, end)

    def end(self) -> None:
        """Kill the worker with all its children. Harmless when repeated."""
        self.usable = False
        with contextlib.suppress(RuntimeError):  # the loop is closed
            for transport in self._transports:
                transport.abort()
        for one in self._sockets:
            one.close()

    def _fail(self, end: End) -> None:
        self.usable = False
        if self._answers is not None:
            self._answers.put_nowait(end)
