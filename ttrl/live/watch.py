"""Follow runs in a terminal: `ttrl watch`.

In a terminal, frames replace each other on the alternate screen, and the last one stays at the end.
Elsewhere (a pipe, a file), one frame is written.
"""

import contextlib
import math
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live

from ttrl.live.essentials import essentials, run_line
from ttrl.live.frame import Size, run_frame, runs_frame, words
from ttrl.monitoring.followed_runs import FollowedRun, Runs, read_some
from ttrl.system.console import Console as Speaker

SECONDS = 1.0
"""Between two frames."""
_PIPE_LINES = 48
_ESCAPE = "\x1b"
_KEYS = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "k": "up",
    "j": "down",
    "\r": "open",
    "\n": "open",
    _ESCAPE: "back",
    "b": "back",
    "\x7f": "back",
    "q": "quit",
    "Q": "quit",
    "\x04": "quit",
}
"""Keys and what they do; "\x04" is Ctrl-D."""

Wait = Callable[[float], str]
"""Wait for a key, for at most so many seconds; return its meaning, "" without one."""


class Watch:
    """Make the frames of some runs, and take keys."""

    def __init__(self, folders: Sequence[Path], clock: Callable[[], float] = time.time) -> None:
        """folders: run folders, and folders of runs. Raises UserError for a missing one."""
        self._runs = Runs(folders)
        self._clock = clock
        self._opened: str | None = None
        self._chosen: str | None = None

    def frame(self, size: Size, *, is_live: bool = False) -> RenderableType:
        """Return the run if there is one or one was opened; else a table of runs."""
        runs = self._shown()
        now = self._clock()
        if len(runs) == 1:
            return run_frame(essentials(runs[0]), size, now)
        read_some(runs, {True: SECONDS, False: math.inf}[is_live])
        lines = [run_line(run) for run in runs]
        chosen = None
        if is_live:
            chosen = self._place(runs)
        return runs_frame(lines, size, now, chosen)

    def keys(self) -> str:
        """Name the keys that do something now."""
        if self._opened is not None:
            return "esc all runs   q quit"
        if len(self._shown()) > 1:
            return "↑ ↓ enter open a run   q quit"
        return "q quit"

    def press(self, key: str) -> bool:
        """Do what a key asks for; return whether to go on."""
        if key == "quit":
            return False
        runs = self._runs.all()
        if key == "back":
            self._opened = None
        elif runs and self._opened is None:
            place = self._place(runs)
            if key == "open":
                self._opened = runs[place].name
            step = {"up": -1, "down": 1}.get(key, 0)
            self._chosen = runs[min(max(place + step, 0), len(runs) - 1)].name
        return True

    def _shown(self) -> list[FollowedRun]:
        opened = None if self._opened is None else self._runs.named(self._opened)
        if opened is not None:
            return [opened]
        return self._runs.all()

    def _place(self, runs: Sequence[FollowedRun]) -> int:
        """Return the place of the chosen run: the list may have changed its order."""
        names = [run.name for run in runs]
        if self._chosen in names:
            return names.index(self._chosen)
        return 0


def watch(
    folders: Sequence[Path],
    *,
    once: bool = False,
    output: TextIO | None = None,
    keys: Wait | None = None,
) -> None:
    """Show runs until q or Ctrl-C; with `once`, or outside a terminal, a single time.

    output: default standard output. keys: default those of standard input, if it is a terminal.
    Raises UserError for a missing folder.
    """
    watched = Watch(folders)
    console = Console(file=output or sys.stdout, markup=False, highlight=False, emoji=False)
    if once or not console.is_terminal or console.is_dumb_terminal:
        console.print(watched.frame(_size(console, is_live=False)), soft_wrap=False)
        return
    with contextlib.suppress(KeyboardInterrupt):
        _follow(watched, console, keys)
    console.print(watched.frame(_size(console, is_live=False)))


def _follow(watched: Watch, console: Console, keys: Wait | None) -> None:
    with (
        Speaker(quiet=True).interruptible(""),
        _terminal_keys() as of_terminal,
        Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        wait = keys or of_terminal
        goes_on = True
        while goes_on:
            size = _size(console, is_live=True)
            live.update(_with_keys(watched, size), refresh=True)
            key = wait(SECONDS)
            goes_on = watched.press(key)


def _with_keys(watched: Watch, size: Size) -> RenderableType:
    """Return the frame above a line with the keys, at the terminal's last line."""
    from rich.layout import Layout

    layout = Layout()
    foot = Layout(words(watched.keys(), "dim", size), size=1)
    above = size._replace(height=size.height - 1)
    layout.split_column(Layout(watched.frame(above, is_live=True)), foot)
    return layout


def _size(console: Console, *, is_live: bool) -> Size:
    unicode = (console.encoding or "").lower().replace("-", "").startswith("utf")
    if is_live:
        return Size(max(40, console.width), console.height, unicode)
    if console.is_terminal:
        return Size(max(40, console.width), max(console.height - 1, 24), unicode)
    return Size(max(40, console.width), _PIPE_LINES, unicode)


@contextlib.contextmanager
def _terminal_keys() -> Iterator[Wait]:
    """Yield a function that waits for a key of standard input; it only waits if that is no terminal
    of ours.
    """
    try:
        number = sys.stdin.fileno()
        is_ours = os.isatty(number) and os.tcgetpgrp(number) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        is_ours = False
    if not is_ours:
        yield _sleep
        return
    before = termios.tcgetattr(number)
    try:
        tty.setcbreak(number)
        yield lambda seconds: _key(number, seconds)
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _key(number: int, seconds: float) -> str:
    ready, _, _ = select.select([number], [], [], seconds)
    if not ready:
        return ""
    typed = os.read(number, 16).decode(errors="replace")
    if not typed:  # the terminal is gone
        return "quit"
    return _KEYS.get(typed, "")
