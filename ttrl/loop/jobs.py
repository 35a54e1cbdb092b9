"""Run phases concurrently, each in its own thread; one thread begins, awaits and ends them.

Python reports Ctrl-C only to the main thread. So the main thread waits here or trains, and ends the
others. A Cancellation ends a sampling job; between two rounds of sampling nothing takes long.
"""

import asyncio
import threading
from collections.abc import Callable

from ttrl.system.coroutines import Cancellation


class PhaseJob:
    """Run one job in a thread; set `done` however it ends."""

    def __init__(self, name: str, work: Callable[[], None], changed: threading.Condition) -> None:
        self.done = False
        self.error: BaseException | None = None
        self._work, self._changed, self.cancellation = work, changed, Cancellation()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        self.cancellation.use()
        error: BaseException | None = None
        try:
            self._work()
        except asyncio.CancelledError as raised:
            # Cancelled from inside: raise an error, or the threads waiting for its results would
            # hang.
            if not self.cancellation.asked:
                error = RuntimeError(f"{self.thread.name}: cancelled without a request")
                error.__cause__ = raised
        except BaseException as raised:  # noqa: BLE001 - raised again in the waiting thread
            error = raised
        with self._changed:
            self.error = error
            self.done = True
            self._changed.notify_all()


class Jobs:
    """Manage all jobs of a run. The waiting thread calls `look` now and then; it may raise to end
    the wait.
    """

    def __init__(self, look: Callable[[], None] = lambda: None) -> None:
        self._look = look
        self._changed = threading.Condition()
        self._jobs: list[PhaseJob] = []

    def begin(self, name: str, work: Callable[[], None]) -> PhaseJob:
        """Run `work` in a thread with this name."""
        job = PhaseJob(name, work, self._changed)
        self._jobs.append(job)
        job.thread.start()
        return job

    def tell(self) -> None:
        """Wake the waiting thread after a change."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait until `until()` is true. Raises any job's error; of several, the earliest job's."""
        with self._changed:
            while True:
                for job in self._jobs:
                    if job.error is not None:
                        raise job.error
                if until():
                    break
                self._look()
                self._changed.wait(0.5)  # another thread's signal is only seen after a wake-up
            self._jobs = [job for job in self._jobs if not job.done]

    def wait_for_all(self) -> None:
        """Wait until no job runs. Raises like `wait`."""
        self.wait(lambda: all(job.done for job in self._jobs))

    def close(self) -> None:
        """End all jobs and wait for them; ignore their errors."""
        for job in self._jobs:
            job.cancellation.cancel()
        for job in self._jobs:
            job.thread.join()
        self._jobs = []
