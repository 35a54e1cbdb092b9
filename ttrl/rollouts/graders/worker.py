"""The processes that run graders: one keeper, and the workers that it forks. Started by
`ttrl.rollouts.graders.processes`.

    ttrl ── keeper (never runs a grader) ── worker (one grade at a time) ── whatever graders start

The keeper imports what graders need (most of a second, for openai's types) once, while the first
answers are being sampled; after that a worker is a fork of 3 ms, so replacing one that a bad grader
has spoilt costs nothing. It has a single thread, which makes forking safe. It ends every worker
with all of its descendants when it is told to, and itself when ttrl is gone: it sees the end of its
socket, or another parent. It is the subreaper of what it started, so that orphans stay below it and
are found; and a worker whose keeper was killed is killed by the kernel. This is the guard of
`ttrl.system.processes` for many children at once: one process more for all workers, where a
ChildProcess each would be one more per worker.

ttrl → keeper    JSON lines: {"start": ID, "memory": BYTES, "cpu": SECONDS} with one end of a socket
                 pair, {"end": ID}
keeper → ttrl    {"ended": ID, "status": exit code, negative for a signal}
ttrl → worker    `wire.pack`: {"order": NAME, "grader": KEY, "where": TEXT, "forget": [KEY]}, then
                 the pickled grader if it is new, and the choice's JSON
worker → ttrl    the same without parts: {"order": NAME, …} with "loaded" after a new grader; then
                 with "reward" and "metrics", or "error", or "refused" (the whole message of a
                 GraderError)
"""

import asyncio
import contextlib
import gc
import inspect
import json
import os
import pickle
import resource
import select
import signal
import socket
from collections.abc import Awaitable
from typing import Any

from ttrl.errors import GraderError, describe
from ttrl.rollouts.graders.grading import CallOutcome, own_traceback
from ttrl.rollouts.graders.wire import MAX_ANSWER, choice_from_json, pack, unpack
from ttrl.system import process_guard
from ttrl.tasks.task import Grade

_LOOK_INTERVAL = 3.0  # seconds between looks at the parent
_FDS = 64


def main(control: int) -> None:
    """Run the keeper. `control`: the descriptor of its socket."""
    process_guard.leave_others_alone()
    with socket.socket(fileno=control) as connection:
        # Pydantic builds validators at the first use: here, not in each worker.
        choice_from_json(b'{"message": {}}').to_json()
        _Keeper(connection).run()
    # Ttrl waits for our end, and a clean exit of the interpreter takes longer than all the rest.
    os._exit(0)


class _Keeper:
    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.parent = os.getppid()
        self.workers: dict[int, int] = {}  # id: pid, which is its session and group too
        self.buffer, self.sockets = b"", list[int]()

    def run(self) -> None:
        self.control.setblocking(True)
        wake_read, wake_write = os.pipe()
        for end in (wake_read, wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        process_guard.prctl(process_guard.CHILD_SUBREAPER, 1)
        # What is imported is shared with the workers; their collectors need not touch it.
        gc.freeze()
        try:
            while True:
                readable, _, _ = select.select(
                    [self.control.fileno(), wake_read], [], [], _LOOK_INTERVAL
                )
                if wake_read in readable:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_read, 4096)
                self.look_for_ended()
                if self.control.fileno() in readable and not self.obey():
                    break
                # A fork of ttrl may hold the socket open although ttrl is dead.
                if os.getppid() != self.parent:
                    break
        finally:
            process_guard.end_processes(
                lambda: process_guard.descendants(os.getpid()), grace=0.0, reap=_reap_all
            )

    def obey(self) -> bool:
        """Read and carry out orders; return False at the end of the socket."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.control, 65536, _FDS)
        except ConnectionError:
            return False
        self.sockets += descriptors
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if "start" in order:
                self.start(order["start"], self.sockets.pop(0), order["memory"], order["cpu"])
            else:
                self.end(order["end"])
        return bool(data)

    def start(self, number: int, descriptor: int, memory: int, cpu: float) -> None:
        keeper = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                process_guard.prctl(process_guard.PDEATHSIG, signal.SIGKILL)
                if os.getppid() == keeper:
                    self.control.close()
                    # Of workers that are to be started next: held open here, they would not end.
                    for other in self.sockets:
                        os.close(other)
                    with socket.socket(fileno=descriptor) as connection:
                        _Worker(connection, memory, cpu).run()
                    status = 0
            except BrokenPipeError:
                status = 0  # ttrl does not listen any more
            finally:
                os._exit(status)
        os.close(descriptor)
        self.workers[number] = pid

    def end(self, number: int) -> None:
        """Kill a worker with everything below it; say how it ended, which may have been before."""
        pid = self.workers.get(number)
        if pid is not None:
            self.clean_up(pid)
            self.report(number, _wait(pid))

    def look_for_ended(self) -> None:
        """Report workers that ended by themselves; collect orphans."""
        by_pid = {pid: number for number, pid in self.workers.items()}
        with contextlib.suppress(ChildProcessError):
            while (
                found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            ) is not None:
                number = by_pid.get(found.si_pid)
                if number is not None:
                    # Before it is collected: until then its group can be no one else's.
                    self.clean_up(found.si_pid)
                    self.report(number, _wait(found.si_pid))
                else:
                    os.waitpid(found.si_pid, 0)

    def clean_up(self, pid: int) -> None:
        """Kill a worker's descendants and, as far as they can be told to be its own, its orphans.

        (An orphan that has made itself a session of its own may belong to any worker; it is ended
        with the keeper.)
        """
        known: set[process_guard.ProcessId] = set()

        def find() -> list[process_guard.ProcessId]:
            known.update(process_guard.descendants(pid))
            for other in process_guard.all_pids():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if (
                        os.getsid(other) == pid
                        and (process := process_guard.process_id(other)) is not None
                    ):
                        known.add(process)
            return [process for process in known if process_guard.process_id(process[0]) == process]

        process_guard.end_processes(find, grace=0.0, seconds=5.0, pause=0.002)

    def report(self, number: int, status: int) -> None:
        del self.workers[number]
        with contextlib.suppress(OSError):
            self.control.sendall(json.dumps({"ended": number, "status": status}).encode() + b"\n")


class _Worker:
    """Our end of a socket on which choices come to be graded.

    memory: bytes of one grade, beyond what the process and its graders' modules take; cpu: seconds
        of one grade.
    """

    def __init__(self, connection: socket.socket, memory: int, cpu: float) -> None:
        self.connection = connection
        self.memory = memory
        self.cpu = cpu
        self.pid = os.getpid()
        self.graders: dict[int, Any] = {}
        self.order = ""
        self.base = _address_space()
        self.runner = asyncio.Runner()
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):  # what graders print goes nowhere, and what they read is empty
            os.dup2(null, standard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def run(self) -> None:
        buffer = bytearray()
        while True:
            while (frame := unpack(buffer)) is None:
                chunk = self.connection.recv(1 << 20)
                if not chunk:
                    return
                buffer += chunk
            self.order = frame[0]["order"]
            answer = self.answer(*frame)
            # A grader forked, and the child has come back here as if it were the worker.
            if os.getpid() != self.pid:
                os._exit(0)
            self.send(answer)

    def send(self, answer: dict[str, Any]) -> None:
        data = pack({"order": self.order, **answer})
        if len(data) > MAX_ANSWER:
            text = (
                f"the grader's answer has {len(data) / 1e6:.1f} MB; it may have "
                f"{MAX_ANSWER / 1e6:.1f} MB"
            )
            data = pack({"order": self.order, "error": text})
        self.connection.sendall(data)

    def answer(self, order: dict[str, Any], parts: list[bytes]) -> dict[str, Any]:
        for key in order["forget"]:
            self.graders.pop(key, None)
        choice = parts.pop()
        if parts:
            # Popped, so that the pickle is gone before its memory would count.
            failure = self.load(order["grader"], parts.pop())
            if failure is not None:
                return {"error": failure}
            if os.getpid() == self.pid:
                self.send({"loaded": True})
        try:
            self.limit(resource.RLIMIT_AS, self.base + self.memory)
            used = resource.getrusage(resource.RUSAGE_SELF)
            self.limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + self.cpu) + 1)
            output, error = self.call(self.graders[order["grader"]], choice)
            if error is None:
                grade = Grade.of(output, order["where"])
                return {"reward": grade.reward, "metrics": grade.metrics}
        except GraderError as refused:
            return {"refused": str(refused)[: MAX_ANSWER // 8]}
        except BaseException as failure:  # noqa: BLE001 - reading the output calls methods of it (__float__, __repr__)
            error = failure
        finally:
            # An alarm that the grader set for itself must not meet the next one.
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
        out_of_memory = isinstance(error, MemoryError)
        text = (
            f"ran out of the {self.memory / 2**20:.0f} MiB of memory that it may use; make it "
            "leaner or raise grader_memory"
        )
        if not out_of_memory:
            text = f"raised {describe(error)}"
        return {
            "error": f"the grader {text}\n{own_traceback(error, __file__)}",
            "spoilt": out_of_memory,
        }

    def load(self, key: int, pickled: bytes) -> str | None:
        """Unpickle a grader, which imports its modules, and let it `prepare()`; their memory and
        time do not count. Return what went wrong."""
        before = _address_space()
        try:
            self.graders[key] = pickle.loads(pickled)  # noqa: S301 # nosec B301 - from ttrl, our parent, alone
            prepare = getattr(self.graders[key], "prepare", None)
            if callable(prepare):
                prepare()
        except BaseException as error:  # noqa: BLE001 - imports run any code
            return (
                f"the grader could not be loaded in its process: {describe(error)}; with "
                "isolated=True the modules that it "
                f"uses must be importable anew\n{own_traceback(error, __file__)}"
            )
        self.base += max(0, _address_space() - before)
        return None

    def call(self, grader: Any, choice: bytes) -> CallOutcome:
        try:
            value = grader(choice_from_json(choice))
            if inspect.isawaitable(value):
                return self.runner.run(_outcome(value))
        except BaseException as error:  # noqa: BLE001 - the user's code: whatever it raises costs one sample
            return None, error
        return value, None

    def limit(self, kind: int, value: int) -> None:
        """Set a soft limit, as far as the hard one and the system let us."""
        with contextlib.suppress(ValueError, OSError):
            hard = resource.getrlimit(kind)[1]
            if hard != resource.RLIM_INFINITY and (value == resource.RLIM_INFINITY or value > hard):
                value = hard
            resource.setrlimit(kind, (value, hard))


async def _outcome(awaitable: Awaitable[Any]) -> CallOutcome:
    """Await it and catch in here: a loop lets SystemExit through at once, and turns StopIteration
    into something else.
    """
    try:
        return await awaitable, None
    except BaseException as error:  # noqa: BLE001 - as above
        return None, error


def _address_space() -> int:
    """Return the bytes of our virtual memory; 0 where there is no /proc, and limits on it do not
    work either.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _reap_all() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
