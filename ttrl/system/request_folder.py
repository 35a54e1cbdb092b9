"""Requests and answers between processes, as files that appear in a folder: how the loop talks to a resident trainer.

    request-000001.yaml   written by the one who asks, numbered from 1
    answer-000001.json    written by the one who does it, once it is done
    stop                  no request will come any more

Any number of processes may follow one folder, on other hosts too where it lies on a shared file system: each looks for itself, so
nothing can time out while there is nothing to do. On Linux whoever waits is woken by the kernel (inotify(7)), which tells only of
renames on the same host; for all others there is a look every `LOOK_SECONDS`. A folder belongs to one conversation: whoever
starts another takes another folder.
"""

import contextlib
import ctypes
import json
import os
import select
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

LOOK_SECONDS = 0.1
"""Between looks where the kernel wakes us; without it ten times as many."""
_IN_MOVED_TO = 0x80


class FolderWatch:
    """Sleeps until a file is renamed into the folder."""

    def __init__(self, folder: Path) -> None:
        self._inotify = _inotify(folder)

    def wait(self, seconds: float) -> None:
        """Wait until something was renamed into the folder since the last call, or for `seconds`; perhaps for less."""
        if self._inotify is None:
            time.sleep(min(seconds, LOOK_SECONDS / 10))
            return
        poll = select.poll()
        poll.register(self._inotify, select.POLLIN)
        if poll.poll(max(0.0, seconds) * 1000):
            with contextlib.suppress(BlockingIOError):
                os.read(self._inotify, 65536)

    def close(self) -> None:
        """End the watch."""
        if self._inotify is not None:
            os.close(self._inotify)
            self._inotify = None

    def __enter__(self) -> "FolderWatch":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _inotify(folder: Path) -> int | None:
    """Return a descriptor that becomes readable when something is renamed into the folder; None where there is no such thing,
    or where the user has no watch left."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL(None, use_errno=True)
        descriptor = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, AttributeError):
        return None
    if descriptor < 0:
        return None
    if library.inotify_add_watch(descriptor, os.fsencode(folder), _IN_MOVED_TO) < 0:
        os.close(descriptor)
        return None
    return int(descriptor)


class RequestFolder:
    """The names in such a folder, and their reading and writing. Nothing is fsynced: after a power loss nobody is left to ask."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def request(self, number: int) -> Path:
        """Return where request `number` (from 1) appears."""
        return self.path / f"request-{number:06d}.yaml"

    def answer(self, number: int) -> Path:
        """Return where the answer to it appears."""
        return self.path / f"answer-{number:06d}.json"

    @property
    def stop(self) -> Path:
        """Return what ends the conversation."""
        return self.path / "stop"

    def put(self, path: Path, text: str) -> None:
        """Make a file appear as a whole."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)

    def put_answer(self, number: int, facts: dict[str, Any]) -> None:
        """Say that request `number` is done."""
        self.put(self.answer(number), json.dumps(facts) + "\n")

    def next_request(self, number: int) -> Path | None:
        """Wait for request `number`; return None when there will be none: the conversation has ended, or its folder is gone."""
        with FolderWatch(self.path) as watch:
            while not (wanted := self.request(number)).exists():
                if self.stop.exists() or not self.path.is_dir():
                    return None
                watch.wait(LOOK_SECONDS)
        return wanted
