"""Let the operating system refuse a call, or let something happen just before it.

Python announces each call that opens, renames or locks as an audit event, before it makes the call
(https://docs.python.org/3/library/audit_events.html). An exception of the listener takes the place
of the call. So a full disk, a race or a kill is tried on the real code, with nothing replaced in it.
There is no event for stat, fsync and write.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

_listeners: list[tuple[str, Callable[..., None]]] = []
_inside = threading.local()


@cache
def _listen() -> None:
    """Install the listener, once per process: Python removes none."""
    sys.addaudithook(_announce)


def _announce(event: str, arguments: tuple[Any, ...]) -> None:
    if not _listeners or getattr(_inside, "now", False):
        return
    _inside.now = True  # a listener's own calls are announced to nobody
    try:
        for wanted, react in tuple(_listeners):
            if wanted == event:
                react(*arguments)
    finally:
        _inside.now = False


@contextlib.contextmanager
def before(event: str, react: Callable[..., None]) -> Iterator[None]:
    """Call `react` with the arguments of each call of this kind, in any thread, before it is made.
    An exception of `react` takes its place.
    """
    _listen()
    entry = (event, react)
    _listeners.append(entry)
    try:
        yield
    finally:
        _listeners.remove(entry)


@contextlib.contextmanager
def refused(
    event: str, number: int, about: object = "", times: int | None = None
) -> Iterator[None]:
    """Refuse calls of this kind with an error number, if the text `about` is in one of their
    paths: all of them, or as many as `times`.
    """
    answered = 0

    def refuse(*arguments: Any) -> None:
        nonlocal answered
        if any(str(about) in str(one) for one in arguments) and answered != times:
            answered += 1
            raise OSError(number, os.strerror(number), str(arguments[0]))

    with before(event, refuse):
        yield
    assert answered, f"no {event} about {about!s} was tried"
