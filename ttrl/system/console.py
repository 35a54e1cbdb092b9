"""What a run says to the person at the terminal: a line per event, and a sign of life while something takes long."""

import contextlib
import io
import sys
import threading
import time
from collections.abc import Iterator

from tqdm.auto import tqdm


def speak_in_lines() -> None:
    """Send each line of standard output and error as it is written; Python keeps 8 kB back where they are piped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not a notebook's, nor None
            stream.reconfigure(line_buffering=True)


class Console:
    """Write lines to standard output, around any progress bar that is being shown."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet

    def line(self, text: str) -> None:
        if not self.quiet:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show `what` with the seconds that it has taken so far; in terminals only."""
        if self.quiet or not sys.stderr.isatty():
            yield
            return
        over = threading.Event()
        with tqdm(bar_format=f"{what}: {{elapsed}}", leave=False) as bar:

            def tick() -> None:
                while not over.wait(0.5):
                    bar.refresh()

            thread = threading.Thread(target=tick, daemon=True)
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()


def clock() -> float:
    """Return the seconds of a clock that never goes back."""
    return time.perf_counter()
