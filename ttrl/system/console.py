"""Write to the person at the terminal: a line per event, and progress during long work."""

import contextlib
import io
import os
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType

from tqdm import tqdm

from ttrl.errors import UserError
from ttrl.text import harmless

TRACEBACK_VARIABLE = "TTRL_TRACEBACK"


def say(text: str, end: str = "\n") -> None:
    """Print words of a model, a server or a file, without terminal control sequences."""
    sys.stdout.write(harmless(text) + end)
    sys.stdout.flush()


def speak_in_lines() -> None:
    """Flush each line of standard output and error; Python buffers 8 kB in pipes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not a notebook's, nor None
            stream.reconfigure(line_buffering=True)


_in_lines: set[type[BaseException]] = set()


def errors_in_lines(*kinds: type[BaseException]) -> None:
    """End a program with the message of one of these errors, without a traceback.

    The exit status stays Python's: 1, and 130 (in a shell) for KeyboardInterrupt. A foreign hook (a
    debugger's, a notebook's) stays. TTRL_TRACEBACK=1 shows tracebacks.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show
    _in_lines.update(kinds)


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if tracebacks_wanted() or not issubclass(kind, tuple(_in_lines)):
        sys.__excepthook__(kind, error, trace)
    elif issubclass(kind, KeyboardInterrupt):
        sys.stderr.write(f"\n{str(error) or 'interrupted'}\n")
    else:
        sys.stderr.write(f"error: {error}\n")


def tracebacks_wanted() -> bool:
    """Tell whether the user asked for tracebacks: TTRL_TRACEBACK=1."""
    return os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0")


@contextlib.contextmanager
def mistakes_in_lines() -> Iterator[None]:
    """End a program with the message of an uncaught UserError; also a decorator for users' entry
    points.
    """
    try:
        yield
    except UserError:
        errors_in_lines(UserError)
        raise


def note(text: str) -> None:
    """Write a line to standard error, around any progress bar: for the person, independent of
    logging, and out of the way of programs reading the output.
    """
    tqdm.write(harmless(text), file=sys.stderr)


class Console:
    """Write lines to standard output, around any visible progress bar."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet

    def line(self, text: str, *, indent: int | None = None) -> None:
        """Write a line. indent: break it at the terminal's width, and indent its other lines by
        this many spaces.
        """
        if not self.quiet:
            if indent is not None and sys.stdout.isatty():
                width = shutil.get_terminal_size().columns
                text = textwrap.fill(
                    text, width, subsequent_indent=" " * indent, break_on_hyphens=False
                )
            tqdm.write(harmless(text), file=sys.stdout)
            sys.stdout.flush()

    @contextlib.contextmanager
    def interruptible(self, way_on: str) -> Iterator[None]:
        """Make Ctrl-C print the way on, and nothing else in a script. SIGTERM ends the block like
        Ctrl-C, then raises SystemExit(143).
        """
        with _sigterm_interrupts() as terminated:
            try:
                yield
            except KeyboardInterrupt as error:
                said = f"interrupted; {way_on}"
                if terminated:
                    if not self.quiet:
                        sys.stderr.write(f"\n{said}\n")
                    raise SystemExit(128 + signal.SIGTERM) from error
                if not self.quiet:
                    error.args = (said,)
                    errors_in_lines(KeyboardInterrupt)
                raise

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show `what` with the elapsed seconds; in terminals only."""
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


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[list[int]]:
    """Treat SIGTERM inside the block as SIGINT; yield a list, not empty from then on. Outside the
    main thread, or with a handler of the program's own, SIGTERM stays as it is.
    """
    terminated: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not terminated:  # asked again, the ending continues
            terminated.append(number)
            # asyncio's, while it runs; none in a shell's background job.
            usual = signal.getsignal(signal.SIGINT)
            (usual if callable(usual) else signal.default_int_handler)(signal.SIGINT, frame)

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if ours:
        signal.signal(signal.SIGTERM, interrupt)
    try:
        yield terminated
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def clock() -> float:
    """Return the seconds of a monotonic clock."""
    return time.perf_counter()
