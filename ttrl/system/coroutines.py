"""Runs coroutines from ordinary code, in scripts and in notebooks alike, and ends them from another
thread.
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_here = threading.local()


class Cancellation:
    """End the coroutines that `run_async` runs in threads that it was given to (`use`)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.asked = False
        """Whether `cancel` was called."""
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    def use(self) -> None:
        """Apply to what `run_async` runs in the calling thread from now on."""
        _here.cancellation = self

    def cancel(self) -> None:
        """End the coroutine that runs, and every one that is begun later, with
        asyncio.CancelledError. From any thread.
        """
        with self._lock:
            self.asked = True
            if self._running is not None:
                loop, task = self._running
                loop.call_soon_threadsafe(task.cancel)

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        with self._lock:
            if self.asked:
                coroutine.close()
                raise asyncio.CancelledError
            self._running = (asyncio.get_running_loop(), task)
        try:
            return await coroutine
        finally:
            with self._lock:  # the loop may be closed as soon as we return
                self._running = None


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where a loop runs already (a notebook): then in a thread.
    Where a Cancellation is in use, it raises asyncio.CancelledError when that is cancelled."""
    cancellation: Cancellation | None = getattr(_here, "cancellation", None)
    if cancellation is not None:
        return asyncio.run(cancellation.run(coroutine))
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    cancellation = Cancellation()
    with ThreadPoolExecutor(1, "rollouts") as thread:
        try:
            return thread.submit(asyncio.run, cancellation.run(coroutine)).result()
        except BaseException:  # Ctrl-C: the end of the block waits for the thread
            cancellation.cancel()
            raise
