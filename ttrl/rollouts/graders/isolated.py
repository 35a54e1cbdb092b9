"""Run graders in separate processes (`isolated=True`): a grader's faults cost only its own sample.

A grader is ended with all its children if it hangs (in Python, in C code holding the interpreter
lock, asleep), ends or crashes its process, or uses too much memory. Its sample gets a GraderError,
and a fresh process takes the next one. A grade is made once: only a choice not yet seen by a grader
goes to another process.

Differences from threads:
- graders are transferred by cloudpickle (lambdas, closures and functions of a script or notebook
  work), once per process and grader; each process has its own copy from the grader's first use, so
  its changes do not come back;
- async graders run one per process at a time, on a loop living as long as the process;
- their output is discarded; context variables do not reach them;
- environment variables resembling keys (`ttrl.system.processes.without_secrets`) do not reach them.
  Landlock (Linux 6.12) keeps them from reading the memory of ttrl, its server, its trainer and
  other graders, and from signalling these. With older kernels no debugger can be attached to ttrl.

This is not a sandbox: files and the network are open, and malicious code can do harm.

Reasons against existing pools: of 15 hostile graders, 4 cost pebble 5.2 more than their own sample
(a signal to the process group ended ttrl; forked children, and bytes written into its pipe and
unpickled by ttrl, stopped or broke the pool), and loky 3.7 has no time limit for a call. On two
busy cores small graders ran at 1,300 to 4,400 a second here and 3,300 with pebble in one process,
and at 2,200 to 5,700 here and 1,700 to 2,000 with pebble in eight.
"""

import asyncio
import itertools
import os
import signal
from collections import OrderedDict
from typing import TYPE_CHECKING

from ttrl.errors import GraderError
from ttrl.rollouts.graders.pickling import pickled
from ttrl.rollouts.graders.worker_processes import LOAD_SECONDS, End, Keeper, Worker
from ttrl.rollouts.graders.worker_wire import Reply, choice_to_json
from ttrl.tasks.task import Grade, Grader

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

DEFAULT_MEMORY = 2 * 2**30
_KEPT_PICKLES = 1024
_STARTS = 3  # failed starts of the keeper in a row before we give up


def usable_cores() -> int:
    """Count the cores usable by this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class IsolatedGraders:
    """Runs up to `size` concurrent grades, each in a process. timeout: seconds; memory: bytes.
    Belongs to one event loop at a time.
    """

    def __init__(self, *, timeout: float, memory: int, size: int) -> None:
        self.timeout = timeout
        self.memory = memory
        self.size = size
        self._keeper: Keeper | None = None
        self._starts = 0
        self._closed = False
        self._idle: list[Worker] = []
        self._pickles: OrderedDict[int, tuple[Grader, int, bytes]] = OrderedDict()
        self._keys = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(size)

    def __enter__(self) -> None:
        """Start the keeper without waiting, to have it ready for the first answers."""
        self._closed = False
        if self._keeper is None:
            self._keeper = Keeper(self.memory, self.timeout * usable_cores())

    def __exit__(self, *_: object) -> None:
        """End all processes within some milliseconds, regardless of the graders."""
        self._closed = True
        self._idle.clear()
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None

    async def grade(self, grader: Grader, choice: "Choice", where: str) -> Grade:
        """Grade one choice, as `Graders.grade` does."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # sockets and semaphore belong to the old loop
            if self._loop is not None:
                self.__exit__()
                self.__enter__()
            self._loop, self._slots = loop, asyncio.Semaphore(self.size)
        key, pickle_ = self._pickled(grader, where)
        try:
            data = choice_to_json(choice)
        except (AttributeError, TypeError, ValueError) as error:
            raise GraderError(
                f"{where}: the choice cannot be sent to the grader's process: {error}"
            ) from error
        async with self._slots:
            # Each worker may have just died, and so may the keeper.
            for _ in range(self.size + 10 * _STARTS):
                worker = await self._take_worker(where)
                try:
                    answer = await worker.grade(key, pickle_, data, where, self.timeout)
                except End as end:
                    worker.end()
                    if end.kind == "not taken":
                        continue
                    raise GraderError(f"{where}: {self._why(end)}") from None
                except BaseException:
                    worker.end()  # cancelled: the grader's further work is useless
                    raise
                self._starts = 0
                if answer.spoilt or not worker.usable:
                    worker.end()
                else:
                    self._idle.append(worker)
                return _grade(answer, where)
            raise GraderError(
                f"{where}: grader processes end right after their start; check this machine's free "
                "memory"
            )

    def _pickled(self, grader: Grader, where: str) -> tuple[int, bytes]:
        """Return (its number, its pickle). A grader is known by identity, and kept alive to reserve
        its id.
        """
        known = self._pickles.get(id(grader))
        if known is None:
            known = self._pickles[id(grader)] = (grader, next(self._keys), pickled(grader, where))
            if len(self._pickles) > _KEPT_PICKLES:
                self._pickles.popitem(last=False)
        else:
            self._pickles.move_to_end(id(grader))
        return known[1], known[2]

    async def _take_worker(self, where: str) -> Worker:
        if self._closed:
            raise GraderError(f"{where}: grading has ended")
        while self._idle:
            worker = self._idle.pop()
            if worker.usable:
                return worker
            worker.end()
        if self._keeper is not None and self._keeper.ended:
            self._starts += 1
            if self._starts >= _STARTS:
                raise GraderError(
                    f"{where}: the process for graders ended {_STARTS} times in a row. Its last "
                    f"words: {self._keeper.last_words}"
                )
            self._keeper = None
        self.__enter__()
        assert self._keeper is not None
        return await self._keeper.worker()

    def _why(self, end: End) -> str:
        """Explain a worker's missing answer."""
        kind = end.kind
        if kind == "closed":
            return (
                "the grader closed the channel between its process and ttrl; a grader may close "
                "only its own files"
            )
        if kind == "timeout":
            return (
                f"the grader took longer than {self.timeout:g} s; make it faster or raise "
                "grader_timeout"
            )
        if kind == "load":
            return (
                f"loading the grader took longer than {LOAD_SECONDS:g} s; its modules take too "
                "long to import"
            )
        if kind == "garbage":
            return (
                "the grader wrote into the channel between its process and ttrl; a grader may "
                "write only to its own files"
            )
        status = end.status
        if status is None:
            return "the grader processes were killed from outside; the grade is lost"
        if status >= 0:
            return (
                f"the grader ended its process with exit code {status} (os._exit?); let it return "
                "its reward, or raise an error"
            )
        if -status in set(signal.Signals):
            name = signal.Signals(-status).name
        else:
            name = f"signal {-status}"
        if name == "SIGXCPU":
            seconds = self.timeout * usable_cores()
            return (
                f"the grader used more than {seconds:g} s of CPU time; make it faster or raise "
                "grader_timeout"
            )
        hint = {
            "SIGKILL": "; the machine may have run out of memory",
            "SIGSEGV": ": a crash in C code, or recursion too deep",
        }
        return f"the grader's process was ended by {name}{hint.get(name, '')}"


def _grade(answer: Reply, where: str) -> Grade:
    if answer.error is not None:
        raise GraderError(f"{where}: {answer.error}")
    if answer.refused is not None:
        raise GraderError(answer.refused)
    return Grade.of((answer.reward, answer.metrics), where)
