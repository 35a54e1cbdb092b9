"""Bring new weights to the machines of replicas by Ray's object store, from each that has them to
others, so that the run's file system is read once and not by every replica.

The lead puts a checkpoint's weights into the store, in pieces. Each replica puts them together as
files in its machine's memory (/dev/shm), once for all replicas there. vLLM loads them from that
folder as from the checkpoint, and they are dropped when the sync is over. The proof is the same:
the workers read the digests that the trainer wrote. A replica without room for the weights, or one
that comes later, reads the checkpoint itself.
"""

import fcntl
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray

from ttrl.server.model_folder import weight_files
from ttrl.system.memory import memory_bytes
from ttrl.text import gib

logger = logging.getLogger(__name__)

_PIECE = 2**28
_ROOM = 0.5
"""Of a machine's part of the object store, and of its free memory, that weights may take."""


class Sent(NamedTuple):
    """The weights of a checkpoint in the store."""

    name: str
    """Which no other weights have."""
    pieces: Mapping[str, list[Any]]
    """By the name of a file, references to what it consists of."""
    size: int
    """Bytes."""


class Broadcast:
    """The lead's side. Its methods may be called by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: tuple[Any, ...] = ()
        """What tells the checkpoint that was asked for last from others, of the same path too: an
        iteration may be done again.
        """
        self._sent: Sent | None = None
        """That checkpoint in the store; None if it was too large, or everybody has read it."""
        self._readers = 0

    def send(self, checkpoint: Path) -> Sent | None:
        """Return the weights of a checkpoint for one reader, who says later that it `has_read`
        them; None for one that is to read the files. Raises OSError, RayError."""
        files = weight_files(checkpoint)
        stats = [file.stat() for file in files]
        size = sum(stat.st_size for stat in stats)
        asked = (checkpoint, *((stat.st_ino, stat.st_mtime_ns) for stat in stats))
        with self._lock:
            if asked != self._asked:
                self._sent = None
                self._readers = 0
                if self._has_room(checkpoint, size):
                    pieces = {
                        file.name: [ray.put(piece) for piece in _pieces(file)] for file in files
                    }
                    self._sent = Sent(secrets.token_hex(8), pieces, size)
                self._asked = asked
            if self._sent is not None:
                self._readers += 1
            return self._sent

    def has_read(self, name: str) -> None:
        """Take note that a reader is done; after the last one the store is emptied."""
        with self._lock:
            if self._sent is not None and self._sent.name == name:
                self._readers -= 1
                if not self._readers:
                    self._sent = None

    def _has_room(self, checkpoint: Path, size: int) -> bool:
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        if not nodes:
            return False  # all of them have just gone
        least = min(nodes, key=lambda node: node["Resources"].get("object_store_memory", 0.0))
        room = least["Resources"].get("object_store_memory", 0.0)
        if size > _ROOM * room:
            logger.warning(
                "each server reads %s itself: its weights take %s, and Ray's object store on %s "
                "has %s (ray start "
                "--object-store-memory=BYTES)",
                checkpoint,
                gib(size),
                least["NodeManagerAddress"],
                gib(room),
            )
        return bool(size <= _ROOM * room)


def _pieces(file: Path) -> Iterator[bytes]:
    with open(file, "rb", buffering=0) as whole:
        while piece := whole.read(_PIECE):
            yield piece


class Staged:
    """A replica's side: checkpoints in its machine's memory. Its methods may be called by several
    threads.

    memory/ttrl-USER/lock          held by who changes something
                     ID.owner      held by a process as long as it lives, wherever that is seen from
                     ID-NAME/      what it has vLLM read: links to the next
                     NAME-FILE     weights, as long as somebody has a link
    """

    def __init__(self, memory: str = "/dev/shm") -> None:
        self._pool, self._id = Path(memory, f"ttrl-{os.geteuid()}"), secrets.token_hex(8)
        self._owner: Any = None

    def put(self, sent: Sent, seconds: float) -> Path:
        """Return a folder with the weights. Raises OSError, RayError where that fails, or takes
        longer.
        """
        with self._locked():
            self._clean()
            free = min(memory_bytes()[1], shutil.disk_usage(self._pool).free)
            if not any(self._pool.glob(f"{sent.name}-*")) and sent.size > _ROOM * free:
                raise OSError(
                    f"its weights take {gib(sent.size)}, and {self._pool} has room for half of "
                    f"{gib(free)}"
                )
            if self._owner is None:
                self._owner = open(self._pool / f"{self._id}.owner", "wb")  # noqa: SIM115 - open as long as this process lives
                fcntl.flock(self._owner, fcntl.LOCK_EX)
            try:
                return self._fill(self._pool / f"{self._id}-{sent.name}", sent, seconds)
            except BaseException:
                self._remove(sent.name)
                raise

    def _fill(self, own: Path, sent: Sent, seconds: float) -> Path:
        own.mkdir()
        for file, references in sent.pieces.items():
            whole = self._pool / f"{sent.name}-{file}"
            if not whole.exists():
                with open(unfinished := self._pool / "unfinished", "wb") as output:
                    for reference in references:
                        output.write(ray.get(reference, timeout=seconds))
                unfinished.rename(whole)
            os.link(whole, own / file)
        return own

    def drop(self, name: str = "") -> None:
        """Give back the memory of weights that nobody else here reads, and of processes that are
        gone. Raises OSError.
        """
        with self._locked():
            self._remove(name)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._pool.mkdir(mode=0o700, exist_ok=True)
        found = self._pool.lstat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o777 != 0o700:
            raise OSError(f"{self._pool} is not this user's alone; remove it")
        with open(self._pool / "lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _remove(self, name: str) -> None:
        shutil.rmtree(self._pool / f"{self._id}-{name}", ignore_errors=True)
        self._clean()

    def _clean(self) -> None:
        for path in self._pool.glob("*.owner"):
            if path.stem != self._id and _is_free(path):
                for folder in self._pool.glob(f"{path.stem}-*"):
                    shutil.rmtree(folder)
                path.unlink()
        for path in self._pool.iterdir():
            if (
                path.is_file()
                and path.name != "lock"
                and path.suffix != ".owner"
                and path.stat().st_nlink == 1
            ):
                path.unlink()


def _is_free(path: Path) -> bool:
    """Return whether the process that held a file is gone."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
