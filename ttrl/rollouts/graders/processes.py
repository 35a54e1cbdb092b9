"""Our side of the processes that run graders (`grader_worker` is theirs): starts them, sends orders, hears answers and ends.

Everything happens on the event loop, in callbacks of the sockets; there are no threads. A worker is one grade's at a time.
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

LOAD_SECONDS = 120.0
"""For a worker to start and to import what a new grader needs; not counted as grading."""
_KEPT_GRADERS = 64  # in each worker: tasks often have a grader each

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from ttrl.rollouts.graders.worker import main; main(int(sys.argv[2]))"
)


def hidden(name: str) -> bool:
    """True for environment variables that graders are not given: AWS's, and what is named a key, token, secret or password."""
    upper = name.upper()
    words = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
    return (upper.startswith("AWS_") or any(word in upper for word in words)) and not upper.startswith("TOKENIZERS_")


class End(Exception):  # noqa: N818 - never leaves this package
    """A worker gave no answer. kind: "timeout", "load" (a timeout too), "garbage", "died", or "not taken": it died before
    it had read its order."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class Keeper:
    """Our side of the keeper process (`grader_worker`), which starts and ends the workers."""

    def __init__(self) -> None:
        self.ended = False
        self.workers: dict[int, Worker] = {}
        """Of which the keeper has not yet said that they have ended."""
        self._numbers = itertools.count()
        self._buffer = b""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._control, theirs = socket.socketpair()
        path = [entry or os.getcwd() for entry in sys.path]
        with theirs:
            self._process = subprocess.Popen(
                # -P: our sys.path is given to it; what lies in the current folder must not come before the standard library.
                [sys.executable, "-P", "-c", _PROGRAM, json.dumps(path), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=(theirs.fileno(),),
                env={name: value for name, value in os.environ.items() if not hidden(name)},
                start_new_session=True,  # Ctrl-C in the terminal is ours to handle
            )

    def listen(self) -> None:
        """Hears on the running loop which workers have ended."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._control, self._hear)

    def tell(self, order: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        """Sends an order; a keeper that is gone is noticed by `_hear`."""
        with contextlib.suppress(OSError):
            socket.send_fds(self._control, [json.dumps(order).encode() + b"\n"], descriptors)

    def _hear(self) -> None:
        try:
            data = self._control.recv(65536)
        except OSError:
            data = b""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            report = json.loads(line)
            if (worker := self.workers.pop(report["ended"], None)) is not None:
                worker.has_ended(report["status"])
        if not data:
            self.ended = True
            self._stop_listening()
            for worker in list(self.workers.values()):
                worker.has_ended(None)

    def _stop_listening(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.remove_reader(self._control)
            self._loop = None

    def number(self) -> int:
        return next(self._numbers)

    def last_words(self) -> str:
        """What the keeper wrote before it ended."""
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        return f"It said: {text[-2000:]}" if text else ""

    def close(self) -> None:
        """The end of its socket makes the keeper kill the workers and end."""
        self._stop_listening()
        self._control.close()
        for worker in self.workers.values():
            worker.has_ended(None)
            worker.end()
        self.workers.clear()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:  # stopped by a debugger, for example; the kernel ends the workers with it
            self._process.kill()
            self._process.wait()
        self._errors.close()
        self.ended = True


class Worker:
    """Our side of one worker: a socket, and the order that it works on."""

    def __init__(self, keeper: Keeper, memory: int, cpu: float) -> None:
        self.broken = False
        """It can grade no more."""
        self.tainted = False
        """It sent what nobody had asked for, so that it is better not given another grade."""
        self._failure = ""
        self._is_loading = False
        self._order = ""
        self._keeper, self._number = keeper, keeper.number()
        self._known: OrderedDict[int, None] = OrderedDict()
        self._buffer = bytearray()
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._status: asyncio.Future[int | None] = self._loop.create_future()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            keeper.listen()
            keeper.workers[self._number] = self
            keeper.tell({"start": self._number, "memory": memory, "cpu": cpu}, (theirs.fileno(),))
        self._loop.add_reader(self._socket, self._read)

    async def grade(self, key: int, pickle_: bytes, choice: bytes, where: str, timeout: float) -> dict[str, Any]:
        """The worker's answer. Raises End when it gives none."""
        new, forget = key not in self._known, []
        self._is_loading = new
        if new:
            self._known[key] = None
            if len(self._known) > _KEPT_GRADERS:
                forget = [self._known.popitem(last=False)[0]]
        else:
            self._known.move_to_end(key)
        # A name that no earlier grader can know: whatever one of them still sends is not taken for the answer to this order.
        self._order = secrets.token_hex(8)
        header = {"order": self._order, "grader": key, "where": where, "forget": forget}
        order = pack(header, *([pickle_] if new else []), choice)
        self._answer = self._loop.create_future()
        timer = self._loop.call_later(LOAD_SECONDS if new else timeout, self._too_late, "load" if new else "timeout")
        try:
            await self._send(order)
            answer = await self._answer
            self._is_loading = False
            if answer.get("loaded"):
                timer.cancel()
                self._answer = self._loop.create_future()
                timer = self._loop.call_later(timeout, self._too_late, "timeout")
                self._take_frame()  # the grade may have come together with it, and so may the end
                if self._failure and not self._answer.done():
                    raise End(self._failure)
                answer = await self._answer
            elif new:
                del self._known[key]
            if self._buffer:
                raise End("garbage")
            return answer
        finally:
            timer.cancel()
            self._answer = None

    async def _send(self, order: bytes) -> None:
        """Most orders fit into the socket's buffer; while the rest of one is sent, the worker's end is waited for, too."""
        try:
            sent = self._socket.send(order)
        except BlockingIOError:
            sent = 0
        except OSError:
            raise End("not taken") from None
        if sent == len(order):
            return
        assert self._answer is not None
        rest = asyncio.ensure_future(self._loop.sock_sendall(self._socket, memoryview(order)[sent:]))
        try:
            await asyncio.wait({rest, self._answer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not rest.done():
                rest.cancel()
            elif not rest.cancelled() and rest.exception() is not None and not self._answer.done():
                self._answer.set_exception(End("not taken"))

    def _read(self) -> None:
        """Whatever comes from the worker. A reset means that it died with (part of) its order unread."""
        kind = "died"
        try:
            data = self._socket.recv(1 << 18)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data, kind = b"", "not taken"
        except OSError:
            data = b""
        if not data:
            self._fail(kind)
            return
        self._buffer += data
        self._take_frame()

    def _take_frame(self) -> None:
        if self._answer is None:
            if self._buffer:
                self.broken = True  # nobody has asked: left by an earlier grader
            return
        while not self._answer.done():
            try:
                frame = unpack(self._buffer, MAX_ANSWER)
            except ValueError:
                self._fail("garbage")
                return
            if frame is None:
                return
            if frame[0].get("order") == self._order:
                self._answer.set_result(frame[0])
            else:
                self.tainted = True

    def _too_late(self, kind: str) -> None:
        self._read()  # where a busy loop looks at the clock late, the answer may be there
        if self._answer is not None and not self._answer.done():
            self._fail(kind)

    def _fail(self, kind: str) -> None:
        self.broken = True
        self._failure = self._failure or kind
        self._loop.remove_reader(self._socket)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(End(kind))

    def has_ended(self, status: int | None) -> None:
        """The keeper says that the worker is gone (None: the keeper itself is)."""
        if not self._status.done():
            self._status.set_result(status)
        if not self.broken:
            self._read()  # the answer may have come just before; and children of a grader may keep the socket open
            # Without its keeper it cannot go on; if it had no grader yet, its choice can still be given to another one.
            self._fail("not taken" if status is None and self._is_loading else "died")

    async def ends_by_itself(self, seconds: float) -> bool:
        """Whether the keeper tells its end within so many seconds, without our doing."""
        await asyncio.wait({self._status}, timeout=seconds)
        return self._status.done()

    async def status(self) -> int | None:
        """The exit code, negative for a signal; None where nobody knows."""
        await asyncio.wait({self._status}, timeout=10)
        return self._status.result() if self._status.done() else None

    def end(self) -> None:
        """Has the worker killed with all that it started. Harmless when repeated."""
        if self._socket.fileno() < 0:
            return
        self.broken = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.remove_reader(self._socket)
        self._socket.close()
        self._keeper.tell({"end": self._number})
