"""Bring new weights to the machines of replicas by Ray's object store, from each that has them to others, so that the run's file
system is read once and not by every replica.

The lead puts a checkpoint's weights into the store, in pieces. Each replica puts them together as files in its machine's memory
(/dev/shm), once for all replicas there, beside links to the checkpoint's other files; vLLM reads that folder, and the replica
drops it when its weights are proven. What is proven is the same: the digests of what the workers read are those that the trainer
wrote. Whoever has no room for it reads the checkpoint itself.
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
from typing import Any

import ray

from ttrl.system.memory import memory_bytes
from ttrl.text import gib

logger = logging.getLogger(__name__)

Pieces = Mapping[str, list[Any]]
"""By the name of a file of weights, references to what it consists of."""
_PIECE = 2**28
_ROOM = 0.5
"""Of a machine's part of the object store, and of its free memory, that weights may take."""


class Broadcast:
    """The lead's side. Its methods may be called by several threads."""

    def __init__(self, replicas: int) -> None:
        self.replicas, self._lock = replicas, threading.Lock()
        self._held: tuple[Any, ...] = ()
        """What tells the checkpoint that is in the store from others, of the same path too: an iteration may be done again."""
        self._name, self._pieces = "", dict[str, list[Any]]()
        self._served = set[int]()

    def of(self, folder: Path) -> tuple[str, Pieces, int] | None:
        """Return (a name that is these weights' alone, pieces, bytes) of a checkpoint; None where the store has no room."""
        files = sorted(folder.glob("*.safetensors"))
        stats = [file.stat() for file in files]
        size, held = sum(stat.st_size for stat in stats), (folder, *((stat.st_ino, stat.st_mtime_ns) for stat in stats))
        with self._lock:
            if held != self._held:
                self._forget()
                room = min(node["Resources"].get("object_store_memory", 0.0) for node in ray.nodes() if node["Alive"])
                if size > _ROOM * room:
                    logger.warning(
                        "each server reads %s itself: its weights take %s, and Ray's object store has %s on a machine; start "
                        "it with a larger one (ray start --object-store-memory=BYTES)", folder, gib(size), gib(room),
                    )  # fmt: skip
                    return None
                self._pieces = {file.name: [ray.put(piece) for piece in _pieces(file)] for file in files}
                self._held, self._name = held, secrets.token_hex(8)
            return self._name, self._pieces, size

    def serves(self, number: int) -> None:
        """Take note that a replica serves; when all of them do, the store is emptied."""
        with self._lock:
            self._served.add(number)
            if len(self._served) == self.replicas:
                self._forget()

    def _forget(self) -> None:
        self._held, self._pieces = (), {}
        self._served.clear()


def _pieces(file: Path) -> Iterator[bytes]:
    with open(file, "rb", buffering=0) as whole:
        while piece := whole.read(_PIECE):
            yield piece


class Staged:
    """A replica's side: one checkpoint in its machine's memory."""

    def __init__(self, memory: str = "/dev/shm") -> None:
        self._pool = Path(memory, f"ttrl-{os.geteuid()}")
        self._own = self._pool / str(os.getpid())

    def put(self, checkpoint: Path, name: str, pieces: Pieces, size: int) -> Path:
        """Return a folder with what `checkpoint` holds. Raises OSError where that is not possible."""
        with self._locked():
            self._clean()
            free = memory_bytes()[1]
            if not any(self._pool.glob(f"{name}-*")) and size > _ROOM * free:
                raise OSError(f"its weights take {gib(size)} of memory, of which {gib(free)} is free")
            try:
                self._fill(checkpoint, name, pieces)
            except BaseException:
                self._clean()
                raise
        return self._own

    def _fill(self, checkpoint: Path, name: str, pieces: Pieces) -> None:
        self._own.mkdir()
        for file, references in pieces.items():
            whole = self._pool / f"{name}-{file}"
            if not whole.exists():
                with open(unfinished := self._pool / "unfinished", "wb") as output:
                    for reference in references:
                        output.write(ray.get(reference))
                unfinished.rename(whole)
            os.link(whole, self._own / file)
        for other in checkpoint.iterdir():
            if other.name not in pieces:
                (self._own / other.name).symlink_to(other.absolute())

    def drop(self) -> None:
        """Give the memory back where no other replica of this machine reads it."""
        with self._locked():
            self._clean()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._pool.mkdir(mode=0o700, exist_ok=True)
        found = self._pool.lstat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o777 != 0o700 or self._pool.is_symlink():
            raise OSError(f"{self._pool} is not this user's alone; remove it")
        with open(self._pool / "lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _clean(self) -> None:
        """Remove the own folder, those of processes that are gone, and files that nobody has a link to any more."""
        for path in list(self._pool.iterdir()):
            if path.is_dir() and (path == self._own or not Path("/proc", path.name).exists()):
                shutil.rmtree(path)
        for path in self._pool.iterdir():
            if path.is_file() and path.name != "lock" and path.stat().st_nlink == 1:
                path.unlink()
