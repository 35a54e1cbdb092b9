"""Our side of the processes that run graders (`ttrl.rollouts.graders.worker` is theirs): start
them, send orders, hear answers.

Everything happens on the event loop, in callbacks of the sockets; there are no threads. A worker
has one grade at a time.
"""

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections import OrderedDict
from typing import Any

from ttrl.rollouts.graders.wire import MAX_ANSWER, pack, unpack
from ttrl.system.process_guard import DUMPABLE, SCOPES, landlock_version, prctl

LOAD_SECONDS = 120.0
"""For a worker to start and to import what a new grader needs; not counted as grading."""
_KEPT_GRADERS = 64  # in each worker: tasks often have a grader each

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from ttrl.rollouts.graders.worker import main; main(int(sys.argv[2]))"
)


def hidden(name: str) -> bool:
    """Return whether graders are not given this environment variable: AWS's and Azure's, and any
    named a key, token, secret or password, or the address of a database or an agent."""
    upper = name.upper()
    words = (
        "KEY",
        "TOKEN",
        "SECRET",
        "PASSWORD",
        "PASSWD",
        "CREDENTIAL",
        "CONNECTION_STRING",
        "AUTH_CONFIG",
        "AUTH_SOCK",
    )
    if upper.startswith("TOKENIZERS_"):
        return False
    ends = ("_PAT", "_PWD", "_SAS", "DATABASE_URL", "_DSN")
    return (
        upper.startswith(("AWS_", "AZURE_"))
        or upper.endswith(ends)
        or any(word in upper for word in words)
    )


class End(Exception):  # noqa: N818 - never leaves this package
    """A worker gave no answer. kind: "timeout", "load" (a timeout too), "garbage", "died", or "not
    taken": it died before it had read its order."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class Keeper:
    """Our side of the keeper process, which starts and ends the workers."""

    def __init__(self) -> None:
        self.ended = False
        # Of which the keeper has not yet said that they have ended.
        self._workers: dict[int, Worker] = {}
        self._numbers = itertools.count()
        self._buffer = b""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._control, theirs = socket.socketpair()
        path = [entry or os.getcwd() for entry in sys.path]
        if landlock_version() < SCOPES:  # else the keeper shuts itself and its workers in
            # /proc shows our environment and memory no longer to whatever runs as this user.
            prctl(DUMPABLE, 0)
        with theirs:
            self._process = subprocess.Popen(
                # -P: our sys.path is given to it; what lies in the current folder must not come
                # before the standard library.
                [sys.executable, "-P", "-c", _PROGRAM, json.dumps(path), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=(theirs.fileno(),),
                env={name: value for name, value in os.environ.items() if not hidden(name)},
                start_new_session=True,  # Ctrl-C in the terminal is ours to handle
            )

    async def worker(self, memory: int, cpu: float) -> "Worker":
        """Start a worker. memory: bytes of one grade; cpu: seconds of one grade."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._control, self._hear)
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        worker = self._workers[number] = Worker(self, number, ours)
        with theirs:
            self._tell({"start": number, "memory": memory, "cpu": cpu}, (theirs.fileno(),))
        await self._loop.create_unix_connection(lambda: worker, sock=ours)
        return worker

    def end(self, number: int) -> None:
        """Have a worker killed with all that it started."""
        self._tell({"end": number})

    def _tell(self, order: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        with contextlib.suppress(OSError):  # a keeper that is gone is noticed by `_hear`
            socket.send_fds(self._control, [json.dumps(order).encode() + b"\n"], descriptors)

    def _hear(self) -> None:
        try:
            data = self._control.recv(65536)
        except OSError:
            data = b""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            report = json.loads(line)
            worker = self._workers.pop(report["ended"], None)
            if worker is not None:
                worker.has_ended(report["status"])
        if not data:
            self._gone()

    def _gone(self) -> None:
        self.ended = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.remove_reader(self._control)
            self._loop = None
        while self._workers:
            self._workers.popitem()[1].has_ended(None)

    def last_words(self) -> str:
        """Return what the keeper wrote before it ended."""
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        if text:
            return f"It said: {text[-2000:]}"
        return ""

    def close(self) -> None:
        """Close the keeper's socket, which makes it kill the workers and end."""
        workers = list(self._workers.values())
        self._gone()
        self._control.close()
        for worker in workers:
            worker.end()
        try:
            self._process.wait(10)
        # Stopped by a debugger, for example; the kernel ends the workers with it.
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


class Worker(asyncio.Protocol):
    """Our side of one worker: the messages that come, and the order that it works on."""

    def __init__(self, keeper: Keeper, number: int, ours: socket.socket) -> None:
        self.usable = True
        self.status: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        """The exit code, negative for a signal; None where nobody knows."""
        self._keeper = keeper
        self._number = number
        self._socket = ours
        self._known: OrderedDict[int, None] = OrderedDict()
        self._buffer = bytearray()
        self._order = ""
        self._is_loading = False
        self._answers: asyncio.Queue[dict[str, Any] | End] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def grade(
        self, key: int, pickle_: bytes, choice: bytes, where: str, timeout: float
    ) -> dict[str, Any]:
        """Return the worker's answer. Raises End when it gives none."""
        new = key not in self._known
        forget = []
        self._known[key] = None
        self._known.move_to_end(key)
        if len(self._known) > _KEPT_GRADERS:
            forget = [self._known.popitem(last=False)[0]]
        # A name that no earlier grader can know: whatever one of them still sends is not taken for
        # the answer to this order.
        self._order = secrets.token_hex(8)
        header = {"order": self._order, "grader": key, "where": where, "forget": forget}
        self._answers = asyncio.Queue()
        self._is_loading = new
        try:
            if not self.usable:
                raise End("not taken")
            self._transport.write(pack(header, *([pickle_] if new else []), choice))
            if new:
                answer = await self._next(LOAD_SECONDS, "load")
            else:
                answer = await self._next(timeout, "timeout")
            self._is_loading = False
            if answer.get("loaded"):
                answer = await self._next(timeout, "timeout")
            elif new:
                del self._known[key]
            if self._buffer:
                raise End("garbage")
            return answer
        finally:
            self._answers = None

    async def _next(self, seconds: float, kind: str) -> dict[str, Any]:
        assert self._answers is not None
        # A callback of the loop runs after those of what has come: an answer that is there counts,
        # however late the loop looks.
        timer = asyncio.get_running_loop().call_later(seconds, self._fail, kind)
        try:
            answer = await self._answers.get()
        finally:
            timer.cancel()
        if isinstance(answer, End):
            raise answer
        return answer

    def data_received(self, data: bytes) -> None:
        """Take the answers to the order; a worker that sends anything else is not given another
        one.
        """
        self._buffer += data
        if self._answers is None:
            self.usable = False  # nobody has asked: left by an earlier grader
            return
        try:
            while (frame := unpack(self._buffer, MAX_ANSWER)) is not None:
                if frame[0].get("order") == self._order:
                    self._answers.put_nowait(frame[0])
                else:
                    self.usable = False
        except ValueError:
            self._fail("garbage")

    def eof_received(self) -> None:
        """Take the end of the socket for the worker's."""
        self._fail("died")

    def connection_lost(self, error: Exception | None) -> None:
        """Tell how it was lost: a reset means that the worker died with (part of) its order
        unread.
        """
        self._fail(
            "not taken" if isinstance(error, ConnectionResetError | BrokenPipeError) else "died"
        )

    def _fail(self, kind: str) -> None:
        self.usable = False
        if self._answers is not None:
            self._answers.put_nowait(End(kind))

    def has_ended(self, status: int | None) -> None:
        """Take the keeper's word that the worker is gone (None: the keeper itself is)."""
        if not self.status.done():
            self.status.set_result(status)
        # Children of a grader may keep the socket open; but the answer may have come just before,
        # or the order may be unread, so that is heard first (a lost connection by a callback of its
        # own). Without its keeper a worker cannot go on; if it had no grader yet, its choice can
        # still be given to another one.
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if status is None and self._is_loading:
                kind = "not taken"
            else:
                kind = "died"
            loop = self.status.get_loop()
            loop.call_soon(loop.call_soon, self._fail, kind)

    def end(self) -> None:
        """Have the worker killed with all that it started. Harmless when repeated."""
        self.usable = False
        try:
            self._transport.abort()
        except RuntimeError:  # the loop is closed, and closes no socket any more
            self._socket.close()
        self._keeper.end(self._number)
