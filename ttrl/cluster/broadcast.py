"""Distribute new weights to the replicas' machines through Ray's object store, peer to peer: the
run's file system is read once, not by every replica.

The lead puts a checkpoint's weights into the store, in pieces. Replicas assemble them as files in
their machine's memory (/dev/shm), once per machine. vLLM loads this folder like the checkpoint; the
end of the sync drops it. The proof is the same: the workers read the trainer's digests. A replica
without room for the weights, or a late one, reads the checkpoint itself.
"""

import fcntl
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from ttrl.cluster.ray_connection import RAY, Cluster
from ttrl.server.model_folder import weight_files
from ttrl.system.memory_limit import memory_bytes
from ttrl.text import gib

logger = logging.getLogger(__name__)

_PIECE = 2**28
_ROOM = 0.5
"""Largest share of a machine's object store, and of its free memory, for weights."""


class Sent(NamedTuple):
    """The weights of a checkpoint in the store."""

    name: str
    """Unique to these weights."""
    pieces: Mapping[str, list[Any]]
    """File name → references to its pieces."""
    size: int
    """Bytes."""


class Broadcast:
    """Offer weights: the lead's side. Safe for several threads."""

    def __init__(self, cluster: Cluster = RAY, piece_bytes: int = _PIECE) -> None:
        self._cluster = cluster
        self._piece_bytes = piece_bytes
        self._lock = threading.Lock()
        self._asked: tuple[Any, ...] = ()
        """Identity of the last requested checkpoint: the path and its files' stats, since a
        repeated iteration reuses the path.
        """
        self._sent: Sent | None = None
        """The last requested checkpoint in the store; None if too large, or read by all."""
        self._readers = 0

    def send(self, checkpoint: Path) -> Sent | None:
        """Return a checkpoint's weights for one reader, to be released by `has_read`; None if the
        reader must read the files. Raises OSError, RayError."""
        files = weight_files(checkpoint)
        stats = [file.stat() for file in files]
        size = sum(stat.st_size for stat in stats)
        asked = (checkpoint, *((stat.st_ino, stat.st_mtime_ns) for stat in stats))
        with self._lock:
            if asked != self._asked:
                self._sent = None
                self._readers = 0
                if self._has_room(checkpoint, size):
                    put = self._cluster.put
                    pieces = {
                        file.name: [put(piece) for piece in _pieces(file, self._piece_bytes)]
                        for file in files
                    }
                    self._sent = Sent(secrets.token_hex(8), pieces, size)
                self._asked = asked
            if self._sent is not None:
                self._readers += 1
            return self._sent

    def has_read(self, name: str) -> None:
        """Release one reader; the last one empties the store."""
        with self._lock:
            if self._sent is not None and self._sent.name == name:
                self._readers -= 1
                if not self._readers:
                    self._sent = None

    def _has_room(self, checkpoint: Path, size: int) -> bool:
        nodes = [
            node for node in self._cluster.nodes() if node["Alive"] and node["Resources"].get("CPU")
        ]
        if not nodes:
            return False  # all have just gone
        least = min(nodes, key=lambda node: node["Resources"].get("object_store_memory", 0.0))
        room = least["Resources"].get("object_store_memory", 0.0)
        if size > _ROOM * room:
            logger.warning(
                "each server reads %s itself: the weights need %s, and Ray's object store on %s "
                "has %s (ray start --object-store-memory=BYTES)",
                checkpoint,
                gib(size),
                least["NodeManagerAddress"],
                gib(room),
            )
        return bool(size <= _ROOM * room)


def _pieces(file: Path, piece_bytes: int) -> Iterator[bytes]:
    with open(file, "rb", buffering=0) as whole:
        while piece := whole.read(piece_bytes):
            yield piece


class Staged:
    """Keep checkpoints in a machine's memory: the replica's side. Safe for several threads.

    memory/ttrl-USER/lock       held by a process while it changes something
                     NAME/      the weights of a checkpoint
                     NAME/lock  held by each reading process until it drops the weights or ends
    """

    def __init__(self, memory: str = "/dev/shm", cluster: Cluster = RAY) -> None:
        self._cluster = cluster
        self._pool = Path(memory, f"ttrl-{os.geteuid()}")
        self._reading: dict[str, IO[bytes]] = {}
        """Name of the weights → open lock."""

    def put(self, sent: Sent, seconds: float) -> Path:
        """Return a folder with the weights. Raises OSError, RayError on failure or timeout."""
        folder = self._pool / sent.name
        with self._locked():
            self._clean()
            free = min(memory_bytes()[1], shutil.disk_usage(self._pool).free)
            if not folder.is_dir() and sent.size > _ROOM * free:
                raise OSError(
                    f"the weights need {gib(sent.size)}, and {self._pool} has room for half of "
                    f"{gib(free)}"
                )
            folder.mkdir(exist_ok=True)
            # The file stays open, locked, while the weights are read.
            reading = self._reading[sent.name] = open(folder / "lock", "wb")  # noqa: SIM115
            fcntl.flock(reading, fcntl.LOCK_SH)
            try:
                for name, references in sent.pieces.items():
                    if not (folder / name).exists():
                        pieces = (self._cluster.get(one, timeout=seconds) for one in references)
                        _write(folder / name, pieces)
            except BaseException:
                self._forget(sent.name)
                raise
        return folder

    def drop(self, name: str = "") -> None:
        """Free the memory of weights without readers here. Raises OSError."""
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
            raise OSError(f"other users can access {self._pool}; remove it")
        with open(self._pool / "lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _clean(self) -> None:
        """Remove folders without readers."""
        for folder in self._pool.iterdir():
            if folder.is_dir():
                with open(folder / "lock", "wb") as lock, suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)


def _write(path: Path, pieces: Iterable[bytes]) -> None:
    """Assemble a file; it appears atomically."""
    unfinished = path.with_suffix(".unfinished")
    with open(unfinished, "wb") as output:
        for piece in pieces:
            output.write(piece)
    unfinished.rename(path)
