"""Hold the parts of all pages of `ttrl ui`: a view, its template, its run.

A view returns a stamp of everything shown, and a function to render it. A browser sends its
last stamp each second or two, and an unchanged page costs no rendering.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from ttrl.errors import TtrlError
from ttrl.monitoring.followed_runs import FollowedRun, Runs, State
from ttrl.report.conversations import template
from ttrl.report.page import visible
from ttrl.text import compact, duration

_HERE = Path(__file__).parent


class NotFoundError(Exception):
    """An address without a page."""


class View(NamedTuple):
    """A page to render if its stamp is new to the browser."""

    stamp: str
    render: Callable[[], str]


def run_named(runs: Runs, name: str) -> FollowedRun:
    """Return a run. Raises NotFoundError."""
    run = runs.named(name)
    if run is None:
        raise NotFoundError(f"no run {name}")
    return run


def state_of(run: FollowedRun) -> State:
    """Return the state of a run, damaged or not."""
    try:
        return run.state()
    except TtrlError:
        return State("damaged")


def stamp_of_all(parts: object) -> str:
    """Return a short text of everything shown on a page."""
    return hashlib.sha256(repr(parts).encode(errors="replace")).hexdigest()[:32]


def page(name: str, stamp: str = "", **values: Any) -> str:
    """Render a template of this folder."""
    found = template(name, _HERE)
    return visible(
        found.render(path=path_of, stamp=stamp, compact=compact, duration=duration, **values)
    )


def message_page(title: str, text: str) -> str:
    """Return a page with a message."""
    return page("message.html", title=title, text=text)


def path_of(*parts: object) -> str:
    """Return the address of a page, each part escaped."""
    return "/" + "/".join(quote(str(part), safe="") for part in parts)
