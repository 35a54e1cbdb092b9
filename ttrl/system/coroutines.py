"""Run coroutines from ordinary code, in scripts and in notebooks, and cancel them from another
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
    """Cancel the coroutines of `run_async` in its threads (`use`)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.asked = False
        """Whether `cancel` was called."""
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    def use(self) -> None:
        """Apply to every later `run_async` of the calling thread."""
        _here.cancellation = self

    def cancel(self) -> None:
        """End the running coroutine, and every later one, with asyncio.CancelledError. From any
        thread.
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
            with self._lock:  # the loop may be closed right after our return
                self._running = None


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; if a loop is already running (a notebook), in a thread. Raises
    asyncio.CancelledError when the Cancellation in use is cancelled.
    """
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
