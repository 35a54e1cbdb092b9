"""Limit the time of foreign Python code, such as a chat template, in any thread of this process.

    with time_limit(10.0):
        text = template.render(…)

The code is ended between two steps of Python. This ends a loop, but a single call into C (one huge
power) ends only at its return. Untrusted code needs its own process; this costs 100 ms for the
first and a copy of all arguments for each.
"""

import contextlib
import ctypes
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

LOOK_SECONDS = 0.5  # between looks: a limit costs its block a microsecond, and no thread of its own


class _Overdue(Exception):  # noqa: N818 - it never leaves this file
    pass


@dataclass
class _Block:
    due: float
    raised: bool = False


_lock = threading.Lock()
_blocks: dict[int, _Block] = {}
"""The current block of each thread."""
_watcher: threading.Thread | None = None


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block once it takes longer. Blocks of one thread do not nest."""
    global _watcher
    me = threading.get_ident()
    assert me not in _blocks, "time limits do not nest"
    block = _Block(time.monotonic() + seconds)
    with _lock:
        _blocks[me] = block
        if _watcher is None or not _watcher.is_alive():  # none yet, or this process is a fork
            _watcher = threading.Thread(target=_watch, name="ttrl-time-limit", daemon=True)
            _watcher.start()
    try:
        try:
            yield
        finally:
            # Leaves at most one exception in flight, due at any call below.
            block.due = math.inf
            try:
                _leave(me, block)
            except _Overdue:
                _leave(me, block)
    except _Overdue:
        raise TimeoutError(f"it took more than {seconds:g} s") from None


def _leave(me: int, block: _Block) -> None:
    """End this thread's block; raise _Overdue if it was raised in it, leaving none in flight."""
    with _lock:
        _blocks.pop(me, None)
    if block.raised:
        # Raised once more, replacing one perhaps still in flight. Taking it back (NULL) would leave
        # CPython with an unanswered signal: in traced code (a debugger, coverage), 3.11 then loops
        # endlessly.
        _raise_in(me)
        while True:
            pass


def _watch() -> None:
    while True:
        time.sleep(LOOK_SECONDS)
        now = time.monotonic()
        with _lock:
            for thread, block in _blocks.items():
                if now > block.due:  # again, until it is past any handler catching exceptions
                    block.raised = True
                    _raise_in(thread)


def _raise_in(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Overdue))
