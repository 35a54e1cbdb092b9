"""A time limit for a piece of Python that somebody else wrote, such as a chat template, in any thread of this process.

    with time_limit(10.0):
        text = template.render(…)

It is ended between two steps of Python: a loop is, a single call into C (one huge power) is not until it returns. What is not
trusted at all belongs into a process of its own; that is 100 ms for the first and a copy of all arguments for each.
"""

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator

LOOK_SECONDS = 0.5  # between looks: a limit costs its block a microsecond, and no thread of its own


class _Overdue(Exception):  # noqa: N818 - it never leaves this file
    pass


_lock = threading.Lock()
_due: dict[int, float] = {}
"""By thread: when its block must have ended."""
_watcher: threading.Thread | None = None


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block once it takes longer. Blocks of one thread do not nest."""
    global _watcher
    me = threading.get_ident()
    assert me not in _due, "time limits do not nest"
    with _lock:
        _due[me] = time.monotonic() + seconds
        if _watcher is None or not _watcher.is_alive():  # none yet, or this process is a fork
            _watcher = threading.Thread(target=_watch, name="ttrl-time-limit", daemon=True)
            _watcher.start()
    try:
        try:
            yield
        finally:
            while me in _due:
                with contextlib.suppress(_Overdue), _lock:  # it may come just now
                    del _due[me]
                    _raise_in(me, None)  # what was raised, and has not come yet
    except _Overdue:
        raise TimeoutError(f"it took more than {seconds:g} s") from None


def _watch() -> None:
    while True:
        time.sleep(LOOK_SECONDS)
        now = time.monotonic()
        with _lock:
            for thread, due in _due.items():
                if now > due:  # again, until it is out of whatever catches exceptions
                    _raise_in(thread, _Overdue)


def _raise_in(thread: int, kind: type[Exception] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind) if kind is not None else None)
