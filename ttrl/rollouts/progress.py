"""Show one moving progress line of sampling in a terminal or notebook, and a summary at the end.

Silent without a viewer (a log file, a pipe, pbar off). In a terminal tqdm places the line, so
several lines and other bars do not overwrite each other. In a notebook it is one plain-text output,
updated in place; it needs no ipywidgets and stays in the saved notebook.
"""

import asyncio
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from tqdm.std import tqdm
from tqdm.utils import disp_len, disp_trim

from ttrl.errors import UserError
from ttrl.records import Sample
from ttrl.text import is_number, one_line, si

REDRAW_SECONDS = 0.1
RATE_WINDOW = 15.0  # seconds: long enough for answers arriving whole, a group at a time
NOTEBOOK_WIDTH = 110
_LONGEST_NAME = 16
_BAR_CELLS = 20


class Prices(NamedTuple):
    """Dollars per million tokens.

    >>> Prices(input=0.5, output=2.0).spend(prompt=1_000_000, completion=250_000)
    1.0
    """

    input: float
    output: float

    @classmethod
    def of(cls, value: object) -> "Prices":
        """Read Prices or a pair of numbers (input, output). Raises UserError for anything else."""
        if isinstance(value, tuple | list):
            pair = tuple(value)
        else:
            pair = ()
        if len(pair) != 2 or not all(is_number(price) and price >= 0 for price in pair):
            raise UserError(
                f"prices is {value!r}; give (input, output), two finite numbers of at least 0: "
                "dollars per million prompt tokens "
                "and per million completion tokens"
            )
        return cls(float(pair[0]), float(pair[1]))

    def spend(self, prompt: int, completion: int) -> float:
        """Return the price of new tokens in dollars."""
        return (prompt * self.input + completion * self.output) / 1e6


class Progress:
    """Counts and shows samples and tokens as they arrive. A context manager, so Ctrl-C closes the
    line too.

    total: the number of samples to come; None if unknown (then there is no ETA).
    screen: the display; None for silence.
    prices: for the spend; not shown without them.
    clock: returns seconds that never go back.

    Belongs to one thread.
    """

    def __init__(
        self,
        total: int | None,
        description: str,
        screen: "Screen | None",
        prices: Prices | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = clock
        self._total = total
        self._description = description
        self._prices = prices
        self._screen = screen
        self._start = clock()
        self._next_draw = self._start
        self._marks: deque[tuple[float, int]] = deque([(self._start, 0)])
        self._done = self._graded = self._failed = self._unfinished = self._cached = 0
        self._tokens = self._prompt_tokens = self._in_flight = 0
        self._lengths = self._measured = 0
        self._reward_sum = 0.0
        self._metrics: dict[str, list[float]] = {}  # name: [sum, count]

    def __enter__(self) -> "Progress":
        self._draw_if_due()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(stopped=kind is not None)

    def close(self, *, stopped: bool = False) -> None:
        """Replace the line with the summary. Harmless when repeated."""
        if self._screen is not None:
            self._screen.finish(("stopped: " if stopped else "") + self.summary())
            self._screen = None

    def add_tokens(self, completion: int, prompt: int = 0) -> None:
        """Count new tokens of a server as they arrive (fewer if a broken stream lost some), without
        those from a cache.
        """
        self._tokens += completion
        self._prompt_tokens += prompt
        self._draw_if_due()

    def keep_moving(
        self, tokens_in_flight: Callable[[int], float], pause: float = 0.5
    ) -> Callable[[], None]:
        """Also show tokens in flight of answers arriving whole, until the returned function is
        called.

        tokens_in_flight: takes the tokens of the arrived answers.
        pause: seconds between two updates.
        """
        if self._screen is None:
            return lambda: None
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def tick() -> None:
            nonlocal timer
            self._in_flight = round(tokens_in_flight(self._tokens))
            self._draw_if_due()
            timer = loop.call_later(pause, tick)

        timer = loop.call_later(pause, tick)
        return lambda: timer.cancel()

    def add_sample(self, sample: Sample, cached: bool = False) -> None:
        """Count a finished sample: graded, failed, or cut off by a token budget."""
        self._done += 1
        self._cached += cached or sample.cached
        if sample.reward is not None:
            self._graded += 1
            self._reward_sum += sample.reward
            for name, value in sample.scores.items():
                entry = self._metrics.setdefault(name, [0.0, 0])
                entry[0] += value
                entry[1] += 1
        elif sample.finish_reason == "unfinished" and sample.error is None:
            self._unfinished += 1
        else:
            self._failed += 1
        length = len(sample.token_ids or sample.logprobs or ())
        if length and sample.finish_reason != "unfinished":
            self._lengths += length
            self._measured += 1
        self._draw_if_due()

    def line(self, width: int, now: float | None = None) -> str:
        """Return the moving line in at most `width` columns; parts come by importance, and those
        without room are dropped.
        """
        now = self._now() if now is None else now
        elapsed = now - self._start
        if self._total is not None:
            counted = f"{self._done}/{self._total}"
        else:
            counted = f"{self._done}"
        clock = _clock(elapsed)
        new = self._done - self._cached
        if self._total is not None and self._done < self._total:
            clock += "<" + (_clock(elapsed / new * (self._total - self._done)) if new else "?")
        parts = [
            *self._reward(),
            *_counts((self._failed, "failed")),
            f"{si(self._rate(now))} tok/s",
            *self._spend(),
            *self._metric_means(),
        ]
        parts += [
            f"{si(self._tokens + self._in_flight)} tokens",
            *self._length(),
            *self._other_counts(),
        ]
        # Parts get room in display order; a long part does not exclude short ones after it.
        head = f"{self._description} {counted}"
        room = width - disp_len(head) - disp_len(clock) - 1
        shown = []
        for part in parts:
            if disp_len(part) + 2 <= room:
                shown.append(part)
                room -= disp_len(part) + 2
        bar = ""
        if self._total and room >= 8 + 1:
            cells = min(room - 1, _BAR_CELLS) - 2
            full = round(cells * min(1.0, self._done / self._total))
            bar = f" |{'█' * full}{' ' * (cells - full)}|"
        return disp_trim(f"{head}{bar} {'  '.join([clock, *shown])}", width)

    def summary(self) -> str:
        """Return the final line with everything, at any width."""
        seconds = max(self._now() - self._start, 1e-9)
        if self._total not in (None, self._done):
            count = f"{self._done} of {self._total}"
        else:
            count = f"{self._done}"
        parts = [f"{count} samples in {_clock(seconds) if seconds >= 60 else f'{seconds:.1f} s'}"]
        parts += [
            *self._reward(),
            *self._metric_means(),
            *_counts((self._failed, "failed")),
        ]
        parts += self._other_counts()
        parts += [
            f"{si(self._tokens)} new tokens ({si(self._tokens / seconds)} tok/s)",
            *self._length(),
            *self._spend(),
        ]
        return f"{self._description}: {', '.join(parts)}"

    # Parts

    def _reward(self) -> list[str]:
        if self._graded:
            return [f"reward {_mean(self._reward_sum, self._graded)}"]
        return []

    def _other_counts(self) -> list[str]:
        return _counts((self._unfinished, "unfinished"), (self._cached, "cached"))

    def _spend(self) -> list[str]:
        if self._prices is None:
            return []
        dollars = self._prices.spend(self._prompt_tokens, self._tokens)
        return [
            f"${dollars:.2f}"
            if dollars >= 1 or dollars <= 0
            else f"${dollars:.2g}"
            if dollars >= 1e-4
            else "<$0.0001"
        ]

    def _length(self) -> list[str]:
        if self._measured:
            return [f"{self._lengths / self._measured:.0f} tok/sample"]
        return []

    def _metric_means(self) -> list[str]:
        return [
            f"{one_line(name, _LONGEST_NAME)} {_mean(total, count)}"
            for name, (total, count) in self._metrics.items()
        ]

    def _rate(self, now: float) -> float:
        """Return tokens per second over the last RATE_WINDOW seconds."""
        then, tokens = self._marks[0]
        return max(0.0, (self._tokens + self._in_flight - tokens) / max(now - then, 1e-9))

    def _draw_if_due(self) -> None:
        if self._screen is None or (now := self._now()) < self._next_draw:
            return
        self._next_draw = now + REDRAW_SECONDS
        while len(self._marks) > 1 and self._marks[1][0] <= now - RATE_WINDOW:
            self._marks.popleft()
        self._screen.show(self.line(self._screen.width(), now))
        self._marks.append((now, self._tokens + self._in_flight))


class _Terminal:
    """One line of stderr, kept by tqdm."""

    def __init__(self) -> None:
        # mininterval: we decide when to draw; bar_format: the whole line is ours.
        self._bar: Any = tqdm(
            bar_format="{desc}",
            file=sys.stderr,
            dynamic_ncols=True,
            leave=False,
            mininterval=math.inf,
        )

    def width(self) -> int:
        """Return the columns minus one: a full line makes some terminals wrap."""
        try:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
        except (OSError, ValueError):
            columns = 0
        return max(20, (columns or 80) - 1)  # 0: a terminal of unknown size

    def show(self, line: str) -> None:
        self._bar.set_description_str(line, refresh=True)

    def finish(self, line: str) -> None:
        self._bar.close()
        tqdm.write(line, file=sys.stderr)


class _Notebook:
    """One output of a notebook's cell."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display
        self._handle: Any = None

    def width(self) -> int:
        return NOTEBOOK_WIDTH

    def show(self, line: str) -> None:
        bundle = {"text/plain": line}
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def finish(self, line: str) -> None:
        self.show(line)


Screen: TypeAlias = _Terminal | _Notebook
"""A display for one line; the next line replaces it, and the last one stays."""


def screen() -> Screen | None:
    """Return the display, or None without a viewer: a moving line in a log file would be thousands
    of lines.
    """
    ipython = sys.modules.get("IPython")  # notebooks have loaded it; do not load it for others
    if ipython is not None:
        shell = ipython.get_ipython()
    else:
        shell = None
    if getattr(shell, "kernel", None) is not None:
        return _Notebook(sys.modules["IPython"].display.display)
    if sys.stderr is not None and sys.stderr.isatty():
        return _Terminal()
    return None


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"


def _counts(*named: tuple[int, str]) -> list[str]:
    return [f"{count} {name}" for count, name in named if count]


def _mean(total: float, count: float) -> str:
    mean = total / count
    if abs(mean) < 1000:
        return f"{mean:.3f}"
    if mean > 0:
        return si(mean)
    return f"{mean:.0f}"
