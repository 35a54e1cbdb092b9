"""Show a run in a notebook: its essentials as HTML, kept current by a thread.

Training occupies the cell, and often the whole kernel; so the thread reads the run folder, as
another process would, and never asks the training. The display needs no widgets: each part of it
has an id, and the thread replaces its content.
"""

import contextvars
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup

from ttrl.errors import UserError, describe
from ttrl.live.essentials import Essentials, essentials
from ttrl.monitoring.followed_runs import FollowedRun, State, is_run
from ttrl.report.charts import sparkline
from ttrl.report.conversations import template
from ttrl.report.figures import learning
from ttrl.report.page import css, visible
from ttrl.text import duration

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_OVER = ("finished", "damaged")
Part = Literal["all", "now", "body"]
Display = Callable[..., Any]


def notebook_html(run: FollowedRun, now: float) -> str:
    """Return a run as HTML for a notebook. now: as `time.time`."""
    return _html(run, _now(run), now, "all")


def _html(run: FollowedRun, shown: Essentials, now: float, part: Part) -> str:
    if shown.done is None or part == "now":
        figures = []
    else:
        figures = learning(run.data())
    html = template("live.html", _HERE).render(
        run=shown,
        part=part,
        at=now,
        left=shown.state.left_at(now),
        figures=figures,
        css=_nested(css()),
        own_css=_nested(Markup((_HERE / "live.css").read_text(encoding="utf-8"))),
        duration=duration,
        sparkline=sparkline,
    )
    return visible(html)


@functools.cache
def _nested(rules: str) -> Markup:
    """Return a page's rules to hold inside another rule alone."""
    return Markup(str(rules).replace(":root", "&"))


def _now(run: FollowedRun) -> Essentials:
    if not is_run(run.folder):
        return Essentials(run.name, State("waiting"))
    return essentials(run)


class LiveView:
    """The display of a run in a cell, kept current until the run is over, `stop()`, or the end of
    a `with` block.
    """

    def __init__(
        self,
        run: FollowedRun,
        seconds: float = 2.0,
        display: Display | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """display: default IPython's. Raises UserError outside a notebook."""
        self._run = run
        self._seconds = seconds
        self._clock = clock
        self._display = display or _notebook_display()
        self._handles: dict[Part, Any] = {}
        self._known: dict[Part, object] = {}
        """The content behind each part."""
        self._state = ""
        self._over = threading.Event()
        self._in_block = False
        self._show()
        context = contextvars.copy_context()  # it holds the cell
        self._thread = threading.Thread(
            target=context.run, args=(self._follow,), name=f"live {run.name}", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> "LiveView":
        self._in_block = True
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _ipython_display_(self) -> None:
        """Show nothing more as the value of a cell."""

    def stop(self) -> None:
        """Show the run a last time, and follow it no longer."""
        self._over.set()
        self._thread.join()
        self._show()

    def _follow(self) -> None:
        try:
            while not self._over.wait(self._seconds):
                self._show()
                if not self._in_block and self._state in _OVER:
                    return
        except Exception as error:  # noqa: BLE001
            # A display must not disturb the training in its process.
            logger.warning("%s is shown no longer: %s", self._run.folder, describe(error))

    def _show(self) -> None:
        """Replace the parts with changes."""
        shown = _now(self._run)
        self._state = shown.state.word
        now = _html(self._run, shown, self._clock(), "now")
        self._replace("now", now, now)
        # Charts take longer to draw than to know that nothing is new.
        key = (self._run.stamp(), shown.done, shown.sample)
        if self._known.get("body") != key:
            self._replace("body", key, _html(self._run, shown, self._clock(), "body"))

    def _replace(self, part: Part, key: object, html: str) -> None:
        if self._known.get(part) == key:
            return
        self._known[part] = key
        bundle = {"text/html": html, "text/plain": f"{self._run.folder}, followed by ttrl"}
        if part in self._handles:
            self._handles[part].update(bundle, raw=True)
        else:
            self._handles[part] = self._display(bundle, raw=True, display_id=True)


def _notebook_display() -> Display:
    """Return IPython's display. Raises UserError outside a notebook."""
    ipython = sys.modules.get("IPython")  # notebooks have loaded it
    shell = None if ipython is None else ipython.get_ipython()
    if ipython is None or getattr(shell, "kernel", None) is None:
        raise UserError(
            "live() shows a run in a notebook, and this is none; in a terminal, follow it with "
            "`ttrl watch RUN`"
        )
    from IPython.display import display

    shown: Display = display
    return shown
