"""Run graders within their limits, in threads and on the loop or in processes (`isolated`); an
error costs only its sample.

Threads are daemons and our own. An executor's thread keeps its slot forever if it hangs, and both
asyncio.run and the interpreter wait for it at the end. Here a slow call is abandoned with its
thread, and a fresh thread takes its slot. (A grader holding the interpreter lock, such as a regular
expression in endless backtracking, still stops everything; only `isolated=True` helps.)
"""

import asyncio
import contextlib
import contextvars
import inspect
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ttrl.errors import (
    GraderError,
    RolloutError,
    ServerError,
    TokenizationError,
    UserError,
    describe,
)
from ttrl.rollouts.graders.isolated import DEFAULT_MEMORY, IsolatedGraders, usable_cores
from ttrl.system.tracing import Span, span
from ttrl.tasks.rewards import declared
from ttrl.tasks.task import Grade, Grader, Task
from ttrl.text import harmless, is_number, short

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

CallOutcome: TypeAlias = "tuple[Any, BaseException | None]"
"""(value, None) or (None, exception); not raised, because futures and coroutines refuse some
exceptions (StopIteration).
"""

MAX_ERROR_LENGTH = 8000
"""Characters of a traceback kept with its sample; the middle is cut out."""
_LONGEST_CHAIN = 20
"""Causes of an error to check; an error may be its own."""
GRADER_THREADS = 16
MOST_PROCESSES = 16


class TookTooLong(Exception):  # noqa: N818 - never leaves this package
    """A call ran past its time limit. Not TimeoutError: a grader may raise TimeoutError itself."""


class _Thread:
    """One daemon thread. Runs one call at a time and passes its outcome to the event loop."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="ttrl-grader", daemon=True).start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def stop(self) -> None:
        """End the thread after its current call, if any."""
        self._calls.put(None)

    def start(self, function: Callable[..., Any], argument: Any) -> "asyncio.Future[CallOutcome]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[CallOutcome] = loop.create_future()
        context = contextvars.copy_context()

        def deliver(outcome: CallOutcome) -> None:
            if not future.done():  # otherwise no waiter: time limit or cancellation
                future.set_result(outcome)

        def call() -> None:
            outcome: CallOutcome
            try:
                outcome = (context.run(function, argument), None)
            except BaseException as error:  # noqa: BLE001
                # Even sys.exit() in a grader costs only its sample.
                outcome = (None, error)
            try:
                loop.call_soon_threadsafe(deliver, outcome)
            except RuntimeError:  # the loop closed before the end of this abandoned call
                return

        self._calls.put(call)
        return future


class Threads:
    """Runs up to `size` concurrent sync calls, and async ones on the loop, each within `timeout`
    seconds. A context manager; leaving it does not wait.
    """

    def __init__(self, size: int, timeout: float | None = None) -> None:
        self.timeout = timeout
        self._slots = asyncio.Semaphore(size)
        self._idle: list[_Thread] = []

    def __enter__(self) -> "Threads":
        return self

    def __exit__(self, *_: object) -> None:
        while self._idle:
            self._idle.pop().stop()

    async def run(self, function: Callable[..., Any], argument: Any) -> CallOutcome:
        """Call a function in a thread. Raises TookTooLong; waiting for a slot does not count."""
        async with self._slots:
            if self._idle:
                worker = self._idle.pop()
            else:
                worker = _Thread()
            future = worker.start(function, argument)
            try:
                # Not asyncio.timeout: if a busy loop checks the clock late, it discards a finished
                # outcome.
                await asyncio.wait({future}, timeout=self.timeout)
            except asyncio.CancelledError:
                worker.stop()
                raise
            if not future.done():
                future.cancel()
                worker.stop()
                raise TookTooLong
            self._idle.append(worker)
            return future.result()

    async def call(self, function: Callable[..., Any], argument: Any) -> CallOutcome:
        """Call a sync function in a thread, an async one on the loop. Raises TookTooLong, but none
        of the function's exceptions.
        """
        try:
            if is_async(function):
                value = function(argument)
            else:
                value, raised = await self.run(function, argument)
                if raised is not None:
                    return None, raised
            if inspect.isawaitable(value):
                limit = asyncio.timeout(self.timeout)
                try:
                    async with limit:
                        value = await value
                except TimeoutError:
                    if limit.expired():
                        raise TookTooLong from None
                    raise
        except TookTooLong:
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # our own cancellation, not one inside the function
            return None, error
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001
            # Whatever the user's code raises costs one sample.
            return None, error
        return value, None

    async def grade(self, grader: Grader, choice: "Choice", where: str) -> Grade:
        """Grade one choice, as `Graders.grade` does."""
        try:
            output, error = await self.call(grader, choice)
        except TookTooLong:
            took = f"the grader took longer than {self.timeout:g} s"
            raise GraderError(f"{where}: {took}; make it faster or raise grader_timeout") from None
        if error is not None:
            what = f"{describe(error)}{_way_out(error)}"
            raise GraderError(f"{where}: the grader raised {what}\n{own_traceback(error)}")
        return Grade.of(output, where)


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether it is an `async def` function, or an object with an async `__call__`; others
    may still return an awaitable.
    """
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


class Graders:
    """Grades choices, each within its time limit. A context manager; leaving it waits for no
    grader.

    isolated: False runs sync graders in daemon threads and async ones on the event loop. True runs
        both in killable processes, for graders prone to hang, crash, or use up all memory.
        `ttrl.rollouts.graders.isolated` explains the differences. It is not a sandbox: files and
        the network are open. A grader with a true attribute `isolated` always runs in a process.
    timeout: seconds for one grade, without waiting for a thread or process.
    memory: with isolated=True, bytes for one grade beyond those of its process and its modules;
        None for 2 GiB.
    size: sync grades at once, with isolated=True of any kind; None for 16 threads, or as many
        processes as usable cores, at most 16.

    Raises UserError for values out of range.
    """

    def __init__(
        self,
        *,
        isolated: bool = False,
        timeout: float = 60.0,
        memory: int | None = None,
        size: int | None = None,
    ) -> None:
        if not is_number(timeout) or timeout <= 0:
            raise UserError(f"grader_timeout is {timeout!r}; give a positive number of seconds")
        if memory is not None and (type(memory) is not int or memory < 2**20):
            raise UserError(
                f"grader_memory is {memory!r}; give a number of bytes of at least 1 MiB "
                "(1048576), or None for 2 GiB"
            )
        if size is not None and (type(size) is not int or size < 1):
            raise UserError(f"the number of grades at once is {size!r}; give at least 1, or None")
        self.seconds = 0.0
        """Total of all grades so far, including waits for a thread or process."""
        self._timeout = timeout
        if size is None:
            count = min(usable_cores(), MOST_PROCESSES)
        else:
            count = size
        self._processes = IsolatedGraders(
            timeout=timeout, memory=memory or DEFAULT_MEMORY, size=count
        )
        if isolated:
            self._threads = None
        else:
            self._threads = Threads(GRADER_THREADS if size is None else size, timeout)

    def __enter__(self) -> "Graders":
        if self._threads is None:
            self._processes.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.__exit__()
        if self._threads is not None:
            self._threads.__exit__()

    def _runner_of(self, grader: Grader) -> IsolatedGraders | Threads:
        if self._threads is not None and not declared("isolated", grader):
            return self._threads
        return self._processes

    async def grade(self, task: Task, choice: "Choice", where: str) -> Grade:
        """Grade one choice, exactly once: a failed grader is not asked again.

        Raises GraderError, naming `where`, if the grader raises (the traceback follows the first
        line), breaks a limit, or returns something other than a finite number.
        """
        assert task.grader is not None
        with self._timed(task.grader) as traced:
            grade = await self._runner_of(task.grader).grade(task.grader, choice, where)
            traced.set({"gen_ai.evaluation.score.value": grade.reward})
        return grade

    @contextlib.contextmanager
    def _timed(self, grader: Callable[..., Any]) -> Iterator[Span]:
        """Trace a grade, and count its seconds."""
        name = getattr(grader, "__qualname__", type(grader).__qualname__)
        began = time.monotonic()
        with span(f"grade {name}", {"gen_ai.evaluation.name": name}) as traced:
            try:
                yield traced
            finally:
                self.seconds += time.monotonic() - began

    async def grade_group(
        self, task: Task, choices: "list[Choice]", where: str
    ) -> list[Grade | GraderError]:
        """Grade the choices of a task together, once, with `timeout` for each of them. Raises
        GraderError, for all of them.
        """
        grader = task.group_grader
        assert grader is not None
        seconds = self._timeout * len(choices)
        with self._timed(grader), Threads(1, seconds) as threads:
            try:
                outputs, error = await threads.call(grader, choices)
            except TookTooLong:
                took = f"the group_grader took longer than {seconds:g} s for {len(choices)} choices"
                raise GraderError(
                    f"{where}: {took}; make it faster or raise grader_timeout"
                ) from None
        if isinstance(error, GraderError):
            raise GraderError(f"{where}: {error}") from error
        if error is not None:
            raise GraderError(
                f"{where}: the group_grader raised {describe(error)}\n{own_traceback(error)}"
            )
        if (
            not isinstance(outputs, Sequence)
            or isinstance(outputs, str)
            or len(outputs) != len(choices)
        ):
            raise GraderError(
                f"{where}: the group_grader returned {short(outputs, 80)} for {len(choices)} "
                "choices; it must return one output per choice"
            )
        return [
            one if isinstance(one, GraderError) else Grade.of(one, where, who="group_grader")
            for one in outputs
        ]


def _way_out(error: BaseException) -> str:
    """Return advice on errors graders meet only in threads; "" for other errors."""
    cause: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if cause is None:
            break
        if "main thread" in describe(cause):
            return (
                "; the signals for its time limit work only in a process's main thread, and "
                "graders run in others; with isolated=True, they run in main threads of their own "
                "processes"
            )
        cause = cause.__cause__ or cause.__context__
    return ""


def type_and_message(error: BaseException) -> str:
    """Describe our own errors in full (including a grader's traceback), others by type and first
    line.
    """
    if isinstance(error, GraderError | RolloutError | ServerError | TokenizationError):
        return f"{type(error).__name__}: {error}"
    return describe(error)


def own_traceback(error: BaseException, caller: str = __file__) -> str:
    """Return the traceback without this file's (or another `caller`'s) frames above the user's
    code.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == caller:
        frames = frames.tb_next
    text = harmless("".join(traceback.format_exception(type(error), error, frames)).rstrip())
    half = MAX_ERROR_LENGTH // 2
    if len(text) <= MAX_ERROR_LENGTH:
        return text
    return f"{text[:half]}\n[…]\n{text[-half:]}"
