"""Runs coroutines from code that is none, in scripts and in notebooks alike, and ends them from another thread."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_here = threading.local()


class Cancellation:
    """Ends the coroutines that `run_async` runs in threads that it was given to (`use`)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = False
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    def use(self) -> None:
        """From now on, it ends what `run_async` runs in the calling thread."""
        _here.cancellation = self

    def cancel(self) -> None:
        """The coroutine that runs, and every one that would be begun later, ends with asyncio.CancelledError. From any thread."""
        with self._lock:
            self._asked = True
            if self._running is not None:
                loop, task = self._running
                loop.call_soon_threadsafe(task.cancel)

    @property
    def asked(self) -> bool:
        """Whether `cancel` was called."""
        return self._asked

    def check(self) -> None:
        """Raises asyncio.CancelledError where `cancel` was called."""
        if self._asked:
            raise asyncio.CancelledError

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Awaits the coroutine, unless it is cancelled."""
        task = asyncio.current_task()
        assert task is not None
        with self._lock:
            if self._asked:
                coroutine.close()
                raise asyncio.CancelledError
            self._running = (asyncio.get_running_loop(), task)
        try:
            return await coroutine
        finally:
            with self._lock:  # the loop may be closed as soon as we return
                self._running = None


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, also where a loop runs already (a notebook): then in a thread.

    In a thread with a Cancellation, it raises asyncio.CancelledError when that is cancelled.
    """
    cancellation: Cancellation | None = getattr(_here, "cancellation", None)
    if cancellation is not None:
        return asyncio.run(cancellation.run(coroutine))
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    outcome: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(coroutine))
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=run, name="rollouts")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return outcome[0]
