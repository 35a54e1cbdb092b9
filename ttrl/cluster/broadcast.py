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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

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

    memory/ttrl-USER/lock       held by a process that changes something
                     NAME/      the weights of a checkpoint
                     NAME/lock  held by each process that reads them, until it drops them or ends
    """

    def __init__(self, memory: str = "/dev/shm") -> None:
        self._pool = Path(memory, f"ttrl-{os.geteuid()}")
        self._reading: dict[str, IO[bytes]] = {}
        """By name of the weights: the open lock."""

    def put(self, sent: Sent, seconds: float) -> Path:
        """Return a folder with the weights. Raises OSError, RayError if that fails, or takes
        longer.
        """
        folder = self._pool / sent.name
        with self._locked():
            self._clean()
            free = min(memory_bytes()[1], shutil.disk_usage(self._pool).free)
            if not folder.is_dir() and sent.size > _ROOM * free:
                raise OSError(
                    f"its weights take {gib(sent.size)}, and {self._pool} has room for half of "
                    f"{gib(free)}"
                )
            folder.mkdir(exist_ok=True)
            reading = self._reading[sent.name] = open(folder / "lock", "wb")  # noqa: SIM115 - open as long as they are read
            fcntl.flock(reading, fcntl.LOCK_SH)
            try:
                for name, references in sent.pieces.items():
                    if not (folder / name).exists():
                        _write(folder / name, references, seconds)
            except BaseException:
                self._forget(sent.name)
                raise
        return folder

    def drop(self, name: str = "") -> None:
        """Give back the memory of weights that no process here reads any more. Raises OSError."""
        with self._locked():
            self._forget(name)

    def _forget(self, name: str) -> None:
        reading = self._reading.pop(name, None)
        if reading is not None:
            reading.close()
        self._clean()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._pool.mkdir(mode=0o700, exist_ok=True)
        found = self._pool.lstat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o777 != 0o700:
            raise OSError(f"{self._pool} is not this user's alone; remove it")
        with open(self._pool / "lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _clean(self) -> None:
        """Remove what no process reads."""
        for folder in self._pool.iterdir():
            if folder.is_dir():
                with open(folder / "lock", "wb") as lock, suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)


def _write(path: Path, references: list[Any], seconds: float) -> None:
    """Put a file together; it appears as a whole."""
    unfinished = path.with_suffix(".unfinished")
    with open(unfinished, "wb") as output:
        for reference in references:
            output.write(ray.get(reference, timeout=seconds))
    unfinished.rename(path)
