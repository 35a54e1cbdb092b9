"""Phases that run concurrently, each in a thread of its own, begun, waited for and ended by one
thread.

Python tells only the main thread of Ctrl-C, so that one waits here or trains, and ends the others.
A job that samples is ended by its Cancellation; between two rounds of sampling nothing takes long.
"""

import asyncio
import threading
from collections.abc import Callable

from ttrl.system.coroutines import Cancellation


class PhaseJob:
    """One thread's work. `done` once it has ended in any way."""

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
            # By something inside of it: whoever waits for what it makes must not wait for ever.
            if not self.cancellation.asked:
                error = RuntimeError(f"{self.thread.name}: cancelled, and nobody had asked for it")
                error.__cause__ = raised
        except BaseException as raised:  # noqa: BLE001 - raised again in the thread that waits
            error = raised
        with self._changed:
            self.error = error
            self.done = True
            self._changed.notify_all()


class Jobs:
    """All jobs of a run. `look` is called now and then by the thread that waits, and may raise to
    end the wait.
    """

    def __init__(self, look: Callable[[], None] = lambda: None) -> None:
        self._look = look
        self._changed = threading.Condition()
        self._jobs: list[PhaseJob] = []

    def begin(self, name: str, work: Callable[[], None]) -> PhaseJob:
        """Run `work` in a thread of that name."""
        job = PhaseJob(name, work, self._changed)
        self._jobs.append(job)
        job.thread.start()
        return job

    def tell(self) -> None:
        """Say that something that `wait` may wait for has changed."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait until `until()` is true. Raises what any job raised, of several the one that was
        begun first.
        """
        with self._changed:
            while True:
                for job in self._jobs:
                    if job.error is not None:
                        raise job.error
                if until():
                    break
                self._look()
                self._changed.wait(0.5)  # a signal that another thread got is seen when we wake
            self._jobs = [job for job in self._jobs if not job.done]

    def wait_for_all(self) -> None:
        """Wait until no job runs. Raises as `wait`."""
        self.wait(lambda: all(job.done for job in self._jobs))

    def close(self) -> None:
        """End all jobs and wait for them; what they raise is not raised here."""
        for job in self._jobs:
            job.cancellation.cancel()
        for job in self._jobs:
            job.thread.join()
        self._jobs = []
