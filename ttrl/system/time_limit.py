"""A time limit for a piece of Python that somebody else wrote, such as a chat template, in any
thread of this process.

    with time_limit(10.0):
        text = template.render(…)

It is ended between two steps of Python: a loop is, a single call into C (one huge power) is not
until it returns. What is not trusted at all belongs into a process of its own; that is 100 ms for
the first and a copy of all arguments for each.
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
"""By thread: the block that it is in."""
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
            # So that no more than one is still on its way, and may come at any call below.
            block.due = math.inf
            try:
                _leave(me, block)
            except _Overdue:
                _leave(me, block)
    except _Overdue:
        raise TimeoutError(f"it took more than {seconds:g} s") from None


def _leave(me: int, block: _Block) -> None:
    """End this thread's block; _Overdue if it was raised in it, and then none is on its way any
    more.
    """
    with _lock:
        _blocks.pop(me, None)
    if block.raised:
        # Raised once more, in place of what has perhaps not come yet. Taking it back (NULL) would
        # leave CPython with a signal that nobody answers: where code is traced (a debugger,
        # coverage), 3.11 then loops for ever.
        _raise_in(me)
        while True:
            pass


def _watch() -> None:
    while True:
        time.sleep(LOOK_SECONDS)
        now = time.monotonic()
        with _lock:
            for thread, block in _blocks.items():
                if now > block.due:  # again, until it is out of whatever catches exceptions
                    block.raised = True
                    _raise_in(thread)


def _raise_in(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Overdue))
