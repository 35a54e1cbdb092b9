"""Copy the run folder to an object store during the run, phase by phase.

The files of a finished phase are uploaded first, its marker last: a phase with a marker is complete
in the store. Checkpoints and states outside the pruning rules are removed there too, once
everything newer is safe. All this happens in the background, with retries after growing pauses. A
slow, full or missing store stops no run, except one with all servers fetching adapters from it
(`Mirror.publish`). The problem is reported once. At its end the run waits for the store, for a
while, and then reports the copy's delay.

A machine without the run's files takes from the store only the needed ones
(`ttrl.run_folder.mirror_resume`). owner.json in the store prevents two machines from continuing at
the same time, like the run folder's own on one machine (`ttrl.run_folder.lease`).
"""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from ttrl.configs.run import TrainConfig
from ttrl.errors import ConfigError, RunFolderError, StorageError
from ttrl.facts import parse
from ttrl.run_folder.folder import Marker, RunFolder
from ttrl.run_folder.lease import LEASE_FILES, OWNER_FILE, FolderLease, Lease
from ttrl.run_folder.mirror_resume import fetch_folder, take_from
from ttrl.run_folder.owner import Owner, parse_owner
from ttrl.run_folder.pruning import Kept, kept_of
from ttrl.run_folder.redo import throw_away
from ttrl.system.files import digest
from ttrl.system.mirror_store import MirrorStore, Tag
from ttrl.system.object_store import redact

logger = logging.getLogger(__name__)

_OF_PHASES = {
    "rollouts.jsonl",
    "unfinished.jsonl",
    "packed.safetensors",
    "train.jsonl",
    "validation.jsonl",
    "trainer_logprobs.safetensors",
    "weights.json",
}
_NOT_MIRRORED = LEASE_FILES | {"rollouts.partial.jsonl"} | _OF_PHASES
_PATIENT_TRIES = 8  # a minute if a store refuses at once, more if it does not answer
_PRUNED = re.compile("iterations/([0-9]+)/(checkpoint|state)/")
MIRRORED_SUFFIXES = {".yaml", ".json", ".jsonl", ".html", ".log"}
"""Of files named by no marker."""
LOG_BYTES = 2**20
"""Bytes copied from the end of each log in logs/."""


class StoreLease(Lease):
    """The lease of a mirror, for the holder of the run folder.

    Its heartbeat is a number in owner.json. The file stays after the owner leaves, since a machine
    may have slept meanwhile. It is written only over the content last read or written here: of two
    simultaneous takeovers, one fails.
    """

    def __init__(self, store: MirrorStore, folder: FolderLease) -> None:
        super().__init__(store.shown, store.beat_seconds, folder.describe)
        self._store = store
        self._folder = folder
        self._tag: Tag | None = None
        """Tag of the file last read, or of ours."""
        self._epoch_there = 0

    def read(self) -> Owner | None:
        """Return the owner; None without one."""
        data, self._tag = self._store.patiently(lambda: self._store.read_tagged(OWNER_FILE))
        owner = parse_owner(data)
        self._epoch_there = epoch_of(data)
        if owner is None or owner.released:
            return None
        return owner

    pulse = read

    def is_gone(self, owner: Owner) -> bool:
        """Tell whether an owner held this run folder, now ours."""
        return self._folder.token != "" and owner.folder == self._folder.token

    def sign(self) -> None:
        """Write owner.json, with the highest epoch of both media."""
        self.epoch = max(self._epoch_there + 1, self._folder.epoch)
        self.owner = replace(self.owner, epoch=self.epoch, folder=self._folder.token)
        if not self._store.patiently(lambda: self._put(self.owner)):
            raise self.in_use_by(self.read())
        self._folder.lift(self.epoch)

    def beat(self, number: int) -> None:
        """Write the number into owner.json."""
        self._put(replace(self.owner, beat=number))

    def _put(self, owner: Owner) -> bool:
        """Write our record over the known one; return whether it is there. Raises OSError."""
        content = msgspec.json.encode(owner)
        tag = self._store.swap(OWNER_FILE, content, self._tag)
        if tag is None:
            data, there = self._store.read_tagged(OWNER_FILE)
            if data is not None and (parse_owner(data) or Owner()).token != owner.token:
                return False
            # Removed by hand; or ours: the answer to an earlier try was lost.
            if data == content:
                tag = there
            else:
                tag = self._store.swap(OWNER_FILE, content, there)
            if tag is None:
                return False
        self._tag = tag
        return True

    def other(self) -> Owner | None:
        """Return the latest process to sign since; None if there is none."""
        owner = parse_owner(self._store.read(OWNER_FILE))
        if owner is None or owner.token == self.owner.token:
            return None
        return owner

    def leave(self) -> None:
        """Mark owner.json as left."""
        self._put(replace(self.owner, released=True))


def epoch_of(data: bytes | str | None) -> int:
    """Return the epoch in a marker or an owner's record; 0 without one, as from an older ttrl."""
    return (parse_owner(data) or Owner()).epoch


class Mirror:
    """Follow one run folder, held by this process. Use `following`, with `lease` held."""

    def __init__(self, store: MirrorStore, folder: RunFolder, config: TrainConfig) -> None:
        self.store = store
        self._folder = folder
        self._config = config
        self.lease = StoreLease(store, folder.lease)
        self._remote: set[str] = set()
        """Keys known to be in the store."""
        self._is_listed = False
        self._uploaded: dict[str, object] = {}
        """Uploads of this process by file: the digest in its marker, or size and modification time.
        """
        self._locks: dict[str, threading.Lock] = {}
        self._publishing = threading.Lock()
        self._published: tuple[list[Any], dict[Path, tuple[int, str]]] = ([], {})
        """Files, sizes and times of the last upload before the end of its phase, and its digests.
        """
        self._wake, self._ended = threading.Event(), threading.Event()
        self._problem: str | None = None
        self._behind: set[str] = set()

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Upload in the background until the block ends, then upload the rest; after an error, for
        one try. Failures are reported and never raised, with one exception: after another machine's
        takeover, no further phase can be finished here.
        """
        before = self._folder.on_mark
        self._folder.on_mark = self._marked
        follower = threading.Thread(target=self._follow, name="mirror", daemon=True)
        follower.start()
        patience = 0.0
        try:
            self._wake.set()
            yield
            patience = self.store.last_wait_seconds
        finally:
            self._folder.on_mark = before
            self._ended.set()
            self._wake.set()
            follower.join()
            self._last_passes(patience)

    def status(self) -> str | None:
        """Describe the problem; None if the copy is complete."""
        other = self.lease.lost_to
        why = self._problem
        if other is not None:
            why = f"another process has taken over: {other}"
        if not self._behind and why is None:
            return None
        behind = "it is complete"
        if self._behind:
            behind = f"{len(self._behind)} finished phases are missing there"
        return f"the mirror {self.store.shown} is behind: {behind}" + (f" ({why})" if why else "")

    def bring_checkpoint(self, number: int) -> None:
        """Take iteration `number`'s checkpoint from the mirror if missing here; warn on failure."""
        if self._folder.iteration(number).path.joinpath("checkpoint").exists():
            return
        try:
            fetch_folder(self.store, self._folder, number, "checkpoint")
        except (OSError, RunFolderError) as error:
            logger.warning(
                "the best checkpoint, of iteration %d, is not in %s: %s",
                number,
                self._folder.path,
                error,
            )

    def publish(self, folder: Path) -> dict[str, tuple[int, str]]:
        """Store the files of a run's folder before the end of its phase; return their sizes and
        SHA-256 by key. Several threads may call this. Raises OSError after some tries.
        """
        with self._publishing:
            if not self.store.patiently(self.lease.is_ours, _PATIENT_TRIES):
                raise OSError(f"another process has taken the run over in {self.store.shown}")
            stats = {path: path.stat() for path in sorted(folder.iterdir()) if path.is_file()}
            now = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()]
            if self._published[0] != now:
                self._published = (
                    now,
                    {path: (stat.st_size, digest(path)) for path, stat in stats.items()},
                )
            found = {self._key(path): told for path, told in self._published[1].items()}
            for path, (_, sha256) in self._published[1].items():
                self.store.patiently(
                    functools.partial(self._upload, self._key(path), path, sha256), _PATIENT_TRIES
                )
        return found

    def _marked(self) -> None:
        self._wake.set()
        other = self.lease.lost_to
        if other is not None:
            raise RunFolderError(
                f"{self._folder.path}: another process has taken over in the mirror "
                f"{self.store.shown} ({other}); this "
                "one stops here"
            )

    # Uploading

    def _follow(self) -> None:
        failures = 0
        while not self._ended.is_set():
            if failures:
                # Even if phases finish meanwhile.
                self._ended.wait(self.store.pause_before(failures))
            else:
                self._wake.wait()
            if self._ended.is_set():
                return
            self._wake.clear()
            failures = 0 if self._try_pass() else failures + 1

    def _last_passes(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        failures = 0
        while not self._try_pass():
            failures += 1
            pause = self.store.pause_before(failures)
            if time.monotonic() + pause > deadline:
                break
            time.sleep(pause)
        status = self.status()
        if status is not None:
            logger.warning("%s; the run folder %s is complete", status, self._folder.path)

    def _try_pass(self) -> bool:
        """Update the copy, if this process may still write it; return False if something failed."""
        try:
            if self.lease.is_ours():
                self._pass()
        # A damaged marker is one of these.
        except (OSError, ValueError, KeyError, TypeError, RunFolderError) as error:
            if self._problem is None:
                logger.warning(
                    "the mirror is behind: %s; the run continues, and so do new tries", error
                )
            self._problem = str(error)
            return False
        if self._problem is not None and self.lease.lost_to is None:
            logger.warning("the mirror %s is up to date again", self.store.shown)
            self._problem = None
        return True

    def _pass(self) -> None:
        """Make the copy equal to the run folder. Raises OSError."""
        if not self._is_listed:
            self._remote.update(self.store.keys())
            self._is_listed = True
        # Read before the markers: the markers uploaded next then back every iteration in
        # metrics.jsonl.
        others = {path: path.read_bytes() for path in self._unmarked_files(self._folder.path)}
        rows = self._folder.metrics()
        newest = -1
        kept = None
        if rows:
            newest = rows[-1].iteration
            kept = kept_of(self._folder, rows, self._config, newest)
        pending = self._pending()
        self._behind = {key for key, _ in pending}
        for key, marker in pending:
            if not self.lease.is_ours():
                return
            self._upload_phase(marker)
            self._behind.discard(key)
        for path, data in others.items():
            self._upload(self._key(path), data, hashlib.sha256(data).hexdigest())
        self._upload_logs()
        if kept is not None:
            unwanted = [key for key in tuple(self._remote) if _is_pruned(key, newest, kept)]
            if unwanted:
                with self._publishing:
                    self.store.remove(unwanted)
                    self._remote.difference_update(unwanted)
                    for key in unwanted:
                        self._uploaded.pop(key, None)

    def _pending(self) -> list[tuple[str, Path]]:
        """Return the missing markers, in the order of their phases' ends."""
        found = []
        for path in self._folder.path.glob("iterations/*/done/[!.]*.json"):
            key = self._key(path)
            if key not in self._remote:
                found.append((parse(Marker, path.read_bytes()).finished, key, path))
        return [(key, path) for _, key, path in sorted(found)]

    def _upload_phase(self, marker: Path) -> None:
        iteration = marker.parent.parent
        for name, sha in parse(Marker, marker.read_bytes()).files.items():
            # A missing one was pruned in this moment: it is not wanted there either.
            with contextlib.suppress(FileNotFoundError):
                self._upload(self._key(iteration / name), iteration / name, sha)
        for path in self._unmarked_files(iteration):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                self._upload(self._key(path), path, (status.st_size, status.st_mtime_ns))
        self._create(self._key(marker), marker.read_bytes())

    def _create(self, key: str, content: bytes) -> None:
        """Upload a marker if there is none, or only one from an earlier owner still running after
        its replacement. Raises RunFolderError for any other.
        """
        if not self.lease.is_ours():
            return
        if self.store.swap(key, content, None) is None:
            there, tag = self.store.read_tagged(key)
            if there != content:
                if there is not None and epoch_of(there) >= epoch_of(content):
                    epochs = f"of epoch {epoch_of(there)}, and here of {epoch_of(content)}"
                    raise RunFolderError(
                        f"{self.store.shown} has another {key} ({epochs}): the run had two owners; "
                        "remove the wrong one"
                    )
                if self.store.swap(key, content, tag) is None:
                    raise OSError(f"{self.store.shown}: {key} changes during the write")
        self._remote.add(key)

    def _upload_logs(self) -> None:
        """Upload the ends of the logs below this machine's name: the only trace of a vanished
        machine.
        """
        for path in sorted(self._folder.path.glob("logs/*.log")):
            try:
                with open(path, "rb") as file:
                    status = os.fstat(file.fileno())
                    file.seek(max(0, status.st_size - LOG_BYTES))
                    end = file.read(LOG_BYTES)
            except OSError:
                continue
            self._upload(
                f"logs/{self.lease.owner.host}/{path.name}",
                end,
                (status.st_size, status.st_mtime_ns),
            )

    def _upload(self, key: str, content: Path | bytes, identity: object) -> None:
        # Following may run at the same time as publishing.
        with self._locks.setdefault(key, threading.Lock()):
            if self._uploaded.get(key) != identity:
                self.store.write(key, content)
                self._uploaded[key] = identity
                self._remote.add(key)

    @staticmethod
    def _unmarked_files(folder: Path) -> list[Path]:
        """Return the files directly in `folder` outside all phases' markers, without foreign ones
        such as keys.
        """
        return sorted(
            path
            for path in folder.iterdir()
            if path.is_file()
            and path.name not in _NOT_MIRRORED
            and path.suffix in MIRRORED_SUFFIXES
            and path.name[0] != "."
        )

    def _key(self, path: Path) -> str:
        return path.relative_to(self._folder.path).as_posix()


def _is_pruned(key: str, newest: int, kept: Kept) -> bool:
    found = _PRUNED.match(key)
    if found is None:
        return False
    number = int(found[1])
    stays = {"checkpoint": kept.checkpoints, "state": kept.states}[found[2]]
    return number <= newest and number not in stays


def with_local_run(config: TrainConfig) -> TrainConfig:
    """Return a config with a folder as its run. An address becomes the mirror of runs/NAME in the
    current folder. Raises ConfigError, also for addresses of run or cache with credentials.
    """
    if "://" in config.run:
        if config.mirror is not None:
            raise ConfigError(
                "TrainConfig",
                ["run is an address, so leave mirror out, or give a folder as run"],
            )
        name = config.run.partition("?")[0].rstrip("/").rpartition("/")[2]
        config = dataclasses.replace(config, run=str(Path("runs", name)), mirror=config.run)
    addresses = {"mirror": config.mirror} | {
        f"cache[{number}]": address for number, address in enumerate(config.cache)
    }
    # They would appear in config.yaml, and in the mirror.
    problems = [
        f"{name} {redact(address)!r} carries credentials; give them in the environment only, see "
        "docs/reference/cache.md"
        for name, address in addresses.items()
        if address is not None and redact(address) != address
    ]
    if problems:
        raise ConfigError("TrainConfig", problems)
    return config


@contextlib.contextmanager
def mirrored(
    config: TrainConfig,
    folder: RunFolder,
    *,
    take_over: bool = False,
    redo: int | None = None,
    store_class: type[MirrorStore] = MirrorStore,
) -> Iterator[Mirror | None]:
    """Mirror a run with its folder held by this process: take missing files from the mirror, then
    follow the folder until the end of the block. Yields None without a mirror. redo: the first
    iteration to throw away in both before this (`ttrl.run_folder.redo`).

    Raises UserError for an impossible address; RunFolderError if the mirror is of another run or
    another process continues this one; StorageError if it cannot be read at the start, since its
    content is then unknown.
    """
    if config.mirror is None:
        if redo is not None:
            throw_away(folder, config, redo)
        yield None
        return
    mirror = Mirror(store_class(config.mirror), folder, config)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(mirror.lease.held(take_over=take_over))
            if redo is not None:
                throw_away(folder, config, redo, mirror.store)
            take_from(mirror.store, folder)
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                error.errno or 0,
                f"{error}; fix it (credentials come from the environment), or leave `mirror` out",
            ) from error
        with mirror.following():
            yield mirror
