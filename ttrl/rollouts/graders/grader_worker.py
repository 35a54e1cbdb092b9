"""Run graders in processes: a keeper and its forked workers. Started by
`ttrl.rollouts.graders.worker_processes`.

    ttrl ── guard ── keeper (never runs a grader) ── guard ── worker (one grade at a time) ── …

The keeper imports the graders' needs (most of a second, for openai's types) once, during the first
answers. A worker is then a fork of 3 ms, so replacing one spoilt by a bad grader costs nothing. The
keeper has a single thread, for safe forking. Each worker has a guard (`ttrl.system.process_guard`),
also a fork. The guard ends it with all its descendants when ttrl closes the guard's socket, and
reports its exit code.

ttrl → keeper    a message without content, with two sockets: the worker's and its guard's
ttrl → worker    `worker_wire.Order`, then the pickled grader if it is new, and the choice's JSON
worker → ttrl    `worker_wire.Reply`, after a new grader one more
"""

import asyncio
import contextlib
import gc
import inspect
import os
import pickle
import resource
import signal
import socket
from collections.abc import Awaitable
from typing import Any

from ttrl.errors import GraderError, describe
from ttrl.rollouts.graders.grading import CallOutcome, own_traceback
from ttrl.rollouts.graders.worker_wire import (
    MAX_ANSWER,
    Order,
    Reply,
    choice_from_json,
    pack,
    unpack,
)
from ttrl.system import process_guard
from ttrl.tasks.task import Grade


def main(memory: int, cpu: float) -> None:
    """Run the keeper: fork a worker for each pair of sockets from stdin. Limits: see `_Worker`."""
    # Pydantic builds validators at the first use: here, not in each worker.
    choice_from_json(b'{"message": {}}').to_json()
    # Imported modules are shared with the workers; their collectors need not touch them.
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects guards
    keeper = os.getpid()
    orders = socket.socket(fileno=0)
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, 16, 2)
        if not order:
            # A clean exit of the interpreter takes longer than all the rest.
            os._exit(0)
        if os.fork() == 0:
            try:
                process_guard.prctl(process_guard.PDEATHSIG, signal.SIGKILL)
                if os.getppid() == keeper:
                    _guard(keeper, descriptors, memory, cpu)
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)


def _guard(keeper: int, descriptors: list[int], memory: int, cpu: float) -> None:
    """Start a worker, and guard it."""
    channel, control = descriptors
    guard = process_guard.Guard(control, keeper, grace=0.0)
    guard.start(lambda: _Worker(channel, memory, cpu).run())
    os.close(channel)
    guard.run()


class _Worker:
    """Grades the choices arriving on a socket.

    memory: bytes of one grade, beyond those of the process and its graders' modules; cpu: seconds
        of one grade.
    """

    def __init__(self, channel: int, memory: int, cpu: float) -> None:
        process_guard.leave_others_alone()
        self.connection = socket.socket(fileno=channel)
        self.memory = memory
        self.cpu = cpu
        self.pid = os.getpid()
        self.graders: dict[int, Any] = {}
        self.base = _address_space()
        self.runner = asyncio.Runner()
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):  # discard graders' output; give them empty input
            os.dup2(null, standard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def run(self) -> None:
        buffer = bytearray()
        while True:
            frame = unpack(Order, buffer)
            while frame is None:
                chunk = self.connection.recv(1 << 20)
                if not chunk:
                    return
                buffer += chunk
                frame = unpack(Order, buffer)
            answer = self.answer(*frame)
            # A grader forked, and its child has returned here as if it were the worker.
            if os.getpid() != self.pid:
                os._exit(0)
            self.send(answer)

    def send(self, answer: Reply) -> None:
        data = pack(answer)
        if len(data) > MAX_ANSWER:
            text = (
                f"the grader's answer has {len(data) / 1e6:.1f} MB; the limit is "
                f"{MAX_ANSWER / 1e6:.1f} MB"
            )
            data = pack(Reply(answer.order, error=text))
        self.connection.sendall(data)

    def answer(self, order: Order, parts: list[bytes]) -> Reply:
        for key in order.forget:
            self.graders.pop(key, None)
        choice = parts.pop()
        if parts:
            # Popped, to free the pickle before its memory would count.
            failure = self.load(order.grader, parts.pop())
            if failure is not None:
                return Reply(order.name, error=failure)
            if os.getpid() == self.pid:
                self.send(Reply(order.name, loaded=True))
        try:
            self.limit(resource.RLIMIT_AS, self.base + self.memory)
            used = resource.getrusage(resource.RUSAGE_SELF)
            self.limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + self.cpu) + 1)
            output, error = self.call(self.graders[order.grader], choice)
            if error is None:
                grade = Grade.of(output, order.where)
                return Reply(order.name, reward=grade.reward, metrics=grade.metrics)
        except GraderError as refused:
            return Reply(order.name, refused=str(refused)[: MAX_ANSWER // 8])
        except BaseException as failure:  # noqa: BLE001
            # Reading the output calls its methods (__float__, __repr__).
            error = failure
        finally:
            # A grader's own alarm must not hit the next one.
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
        out_of_memory = isinstance(error, MemoryError)
        text = (
            f"exceeded its limit of {self.memory / 2**20:.0f} MiB of memory; make it leaner or "
            "raise grader_memory"
        )
        if not out_of_memory:
            text = f"raised {describe(error)}"
        text = f"the grader {text}\n{own_traceback(error, __file__)}"
        return Reply(order.name, error=text, spoilt=out_of_memory)

    def load(self, key: int, pickled: bytes) -> str | None:
        """Unpickle a grader, with its imports, and call its `prepare()`; their memory and time do
        not count. Return the error, if any.
        """
        before = _address_space()
        try:
            # The bytes come from ttrl, the parent process, alone.
            self.graders[key] = pickle.loads(pickled)  # noqa: S301 # nosec B301
            prepare = getattr(self.graders[key], "prepare", None)
            if callable(prepare):
                prepare()
        except BaseException as error:  # noqa: BLE001 - imports run any code
            return (
                f"the grader could not be loaded in its process: {describe(error)}; with "
                "isolated=True, its modules must be importable there\n"
                f"{own_traceback(error, __file__)}"
            )
        self.base += max(0, _address_space() - before)
        return None

    def call(self, grader: Any, choice: bytes) -> CallOutcome:
        try:
            value = grader(choice_from_json(choice))
            if inspect.isawaitable(value):
                return self.runner.run(_outcome(value))
        except BaseException as error:  # noqa: BLE001
            # Whatever the user's code raises costs one sample.
            return None, error
        return value, None

    def limit(self, kind: int, value: int) -> None:
        """Set a soft limit, as far as the hard one and the system allow."""
        with contextlib.suppress(ValueError, OSError):
            hard = resource.getrlimit(kind)[1]
            if hard != resource.RLIM_INFINITY and (value == resource.RLIM_INFINITY or value > hard):
                value = hard
            resource.setrlimit(kind, (value, hard))


async def _outcome(awaitable: Awaitable[Any]) -> CallOutcome:
    """Await it and catch errors here: a loop lets SystemExit through at once, and converts
    StopIteration.
    """
    try:
        return await awaitable, None
    except BaseException as error:  # noqa: BLE001 - as above
        return None, error


def _address_space() -> int:
    """Return the bytes of our virtual memory; 0 without /proc, since limits on it then do not work
    either.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0
