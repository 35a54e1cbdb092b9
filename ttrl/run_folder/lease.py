"""One process per run: a lease on its folder, and one on its mirror.

The holder of a lease is named in owner.json (`ttrl.run_folder.owner`). It sends a heartbeat every
few seconds and has an epoch, a number above those of all earlier owners. `Lease` implements this
rule for two backends: `FolderLease` here, `StoreLease` in `ttrl.run_folder.mirror`.

A folder is taken in two ways. `lock` is locked with flock. The kernel releases it at the process's
death, however it dies; one machine needs nothing more. Other machines may not see the flock, and
some file systems have none. For these, the modification time of owner.json is the heartbeat.

Two processes may start in the same moment, and an owner taken for dead may continue. owners/EPOCH
separates them: every owner makes this folder, and only one can. An owner writes its markers there
first, then links or renames them into place. The next owner begins by removing the folders of
earlier owners, with all unplaced markers: a marker exists before the new owner begins, or never.
This needs no clock and no repeated check, only atomic mkdir, rmdir and link on the file server.

An owner from before the machine's last boot is known to be dead only if the disk belongs to this
machine.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from ttrl.errors import RunFolderError, RunFolderInUseError, StorageError
from ttrl.run_folder.owner import Owner, describe_process, parse_owner
from ttrl.system.files import again, create_text, json_text, make_folders, write_text

logger = logging.getLogger(__name__)

OWNER_FILE = "owner.json"
_OWNERS = "owners"
LEASE_FILES = frozenset({"lock", OWNER_FILE, _OWNERS})
"""The files in a locked, otherwise empty folder."""
HEARTBEAT_SECONDS = 5.0
TAKE_OVER_VARIABLE = "TTRL_TAKE_OVER"
_WATCHED_BEATS = 3.2
"""Beats to watch another machine's owner for a heartbeat before calling it silent."""
_UNSUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}
_ONE_MACHINE = {
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "jfs",
    "btrfs",
    "zfs",
    "f2fs",
    "bcachefs",
    "tmpfs",
    "ramfs",
    "overlay",
    "fuse.fuse-overlayfs",
    "vfat",
    "exfat",
    "ntfs3",
    "fuseblk",
}
"""File systems with a single writing machine at a time."""
_MOUNTS = Path("/proc/self/mountinfo")


class Lease(ABC):
    """This process's hold on a run: its name in an owner.json, and a heartbeat. Use `held`.

    Subclasses read and write the file.
    """

    def __init__(
        self,
        what: object,
        beat_seconds: float,
        describe: Callable[[], Owner] = describe_process,
    ) -> None:
        """what: the run folder or mirror, in messages. beat_seconds: 0 for no heartbeat. describe:
        returns this process as an owner.
        """
        self._what = what
        self._beat_seconds = beat_seconds
        self.describe = describe
        self.owner = Owner()
        self.epoch = 0
        """This process's number among the run's owners; 0 for none."""
        self.lost_to: Owner | None = None
        """The new owner after a takeover."""

    @abstractmethod
    def read(self) -> Owner | None:
        """Return the owner; None without one."""

    @abstractmethod
    def is_gone(self, owner: Owner) -> bool:
        """Tell whether an owner without a heartbeat is known to be dead."""

    @abstractmethod
    def sign(self) -> None:
        """Make this process the owner. Raises RunFolderError if another was quicker."""

    @abstractmethod
    def beat(self, number: int) -> None:
        """Change the value of `pulse`."""

    @abstractmethod
    def pulse(self) -> object:
        """Return a value changing while the owner lives; None after it has left."""

    @abstractmethod
    def other(self) -> Owner | None:
        """Return the latest process to sign since, even if it has left again; None if there is
        none.
        """

    @abstractmethod
    def leave(self) -> None:
        """Record the end of this process's ownership."""

    @contextlib.contextmanager
    def held(self, *, take_over: bool = False) -> Iterator[None]:
        """Hold the run until the block ends. Raises RunFolderError if another process is alive, or
        may be.

        take_over: also from a silent owner on another machine; it may only be disconnected.
        """
        owner = self.read()
        if owner is not None:
            self._judge(owner, take_over=take_over)
        self.owner = self.describe()
        self.lost_to = None
        try:
            self.sign()
            with self._heartbeat():
                yield
        finally:
            self.epoch = 0

    def is_ours(self) -> bool:
        """Tell whether no other process has taken over; a takeover is final. An unreadable file
        names no other.
        """
        if self.epoch and self.lost_to is None:
            self.lost_to = self.other()
            if self.lost_to is not None:
                logger.error(
                    "%s was taken over by another process (%s); this one stops writing there",
                    self._what,
                    self.lost_to,
                )
        return self.lost_to is None

    def in_use_by(self, owner: Owner | None) -> RunFolderInUseError:
        """Return the error for a living `owner`."""
        return RunFolderInUseError(
            f"{self._what} is in use by another process ({owner or 'an unknown owner'}); wait for "
            "it, or stop it"
        )

    def _judge(self, owner: Owner, *, take_over: bool) -> None:
        """Raise RunFolderError if `owner` is alive, or may be."""
        lives = self._lives(owner)
        if lives:
            raise self.in_use_by(owner)
        if lives is not None:
            return
        logger.warning("%s has an owner on another machine; checking for signs of life", self._what)
        if self._pulse_moves():
            raise self.in_use_by(owner)
        if not take_over and not self.is_gone(owner):
            raise RunFolderError(
                f"{self._what} belongs to a process on another machine ({owner}), without a sign "
                "of life; if it is gone, take the run over: train(..., take_over=True), or start "
                f"the command with {TAKE_OVER_VARIABLE}=1"
            )
        logger.warning("taking over %s from %s", self._what, owner)

    def _lives(self, owner: Owner) -> bool | None:
        """Tell whether an owner lives; None if only its heartbeat can tell."""
        return owner.lives()

    def _pulse_moves(self) -> bool:
        seen = self.pulse()
        # Counts looks, not seconds: if everything stalled for a while, the owner did, too.
        for _ in range(round(8 * _WATCHED_BEATS)):
            time.sleep(self._beat_seconds / 8)
            now = self.pulse()
            if now != seen:
                return now is not None  # None: it has just ended
        return False

    @contextlib.contextmanager
    def _heartbeat(self) -> Iterator[None]:
        """Beat until the block ends, then leave."""
        ended = threading.Event()
        beating = threading.Thread(
            target=self._beat_until, args=(ended,), name="run owner", daemon=True
        )
        if self._beat_seconds:
            beating.start()
        try:
            yield
        finally:
            ended.set()
            if self._beat_seconds:
                beating.join()
            with contextlib.suppress(OSError):
                if self.epoch and self.is_ours():
                    self.leave()

    def _beat_until(self, ended: threading.Event) -> None:
        number = 0
        while not ended.wait(self._beat_seconds):
            number += 1
            with contextlib.suppress(OSError):
                if not self.is_ours():
                    return
                self.beat(number)


class FolderLease(Lease):
    """The lease of a run folder: lock, owner.json and owners/EPOCH."""

    def __init__(
        self,
        folder: Path,
        beat_seconds: float = HEARTBEAT_SECONDS,
        *,
        describe: Callable[[], Owner] = describe_process,
        mounts: Path = _MOUNTS,
    ) -> None:
        """beat_seconds, describe: see `Lease`. mounts: the kernel's list of mounted disks."""
        super().__init__(folder, beat_seconds, describe)
        self._folder = folder
        self._mounts = mounts
        self._path = folder / OWNER_FILE
        self._owners = folder / _OWNERS
        self._place: Path | None = None
        """This owner's folder for new markers; None while the run folder is not held."""
        self._earlier: list[int] = []
        self._has_flock = False
        self.token = ""
        """A random name of this run folder, while held."""

    @contextlib.contextmanager
    def held(self, *, take_over: bool = False) -> Iterator[None]:
        """Hold the folder, see `Lease.held`."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = os.fdopen(os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o644), "r+")
        except OSError as error:
            raise RunFolderError(
                f"{self._folder} cannot be a run folder: {error.strerror}; choose another one"
            ) from error
        with file:
            # Read before the owner: later ones are not judged yet, and may be alive.
            self._earlier = self._epochs()
            self._has_flock = self._flock(file)
            try:
                with super().held(take_over=take_over):
                    self.token = _token_in(file)
                    yield
            finally:
                self._place = None

    def create(self, path: Path, text: str) -> None:
        """Make a marker. Raises RunFolderError if another process has taken over, or has made it;
        StorageError.
        """
        self.check()
        try:
            made = again(lambda: create_text(path, text, self._place))
        except StorageError:
            self.check()  # the source of the link is gone
            raise
        if not made:
            raise RunFolderError(
                f"{path} already exists: another process has finished this phase, or it ran twice; "
                "this process stops. Start the same command again to continue from there, or "
                "remove that file first to run the phase again"
            )

    def check(self) -> None:
        """Raise RunFolderError if another process has taken the folder over."""
        if not self.is_ours():
            raise RunFolderError(
                f"another process ({self.lost_to}) took over {self._folder}; this one stops, and "
                "its unfinished phase gets no marker. Start the same command again to continue "
                "from the other's last phase"
            )

    def discard(self) -> None:
        """Remove the folder, held by this process, with its content."""
        self.check()
        assert self.epoch, "only a folder that is held can be discarded"
        self.epoch = 0  # nothing is left to own or to take over
        shutil.rmtree(self._folder)

    def lift(self, epoch: int) -> None:
        """Continue as a later owner if the run's mirror has seen more of them. Raises
        RunFolderError if another process has taken the folder over.
        """
        self.check()
        if self.epoch:
            self.epoch = max(epoch, self.epoch)

    def read(self) -> Owner | None:
        """Return the owner; None without one."""
        with contextlib.suppress(OSError, ValueError):
            return parse_owner(again(lambda: self._path.read_text(encoding="utf-8")))
        return None

    def is_gone(self, owner: Owner) -> bool:
        """Tell whether the disk belongs to this machine only. NFS clients on this machine send
        heartbeats.
        """
        return self._has_flock and only_here(self._folder, self._mounts)

    def sign(self) -> None:
        """Make owners/EPOCH, and write owner.json."""
        self.epoch = max(self._earlier, default=0) + 1
        self._place = place = self._owners / str(self.epoch)
        try:
            make_folders(self._owners)
            again(place.mkdir)
            for epoch in self._earlier:
                _remove(self._owners / str(epoch))
            # A later owner has removed an earlier folder of this number.
            if max(self._epochs(), default=0) != self.epoch:
                raise self.in_use_by(self.read())
            # Fails after a takeover: its source folder is then gone.
            write_text(
                place / OWNER_FILE, json_text(msgspec.to_builtins(self.owner)), durable=False
            )
            os.replace(place / OWNER_FILE, self._path)
        except OSError as error:
            if error.errno == errno.EEXIST or (error.errno in _GONE and not self._has_place()):
                raise self.in_use_by(self.read()) from None
            if isinstance(error, StorageError):
                raise
            way_out = "make room, or check the permissions, and start the same command again"
            raise StorageError(
                error.errno or 0, f"could not write {place}: {error.strerror}; {way_out}"
            ) from error

    def beat(self, number: int) -> None:
        """Update the file's modification time."""
        os.utime(self._path)

    def pulse(self) -> int | None:
        """Return the file's modification time. It depends on one clock only, so differing clocks do
        no harm.
        """
        try:
            # Reopened each time: this makes NFS ask the server.
            with open(self._path, "rb") as file:
                return os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return None

    def other(self) -> Owner | None:
        """Return the process behind our folder's removal, or a later signature."""
        owner = self.read()
        if not self._has_place():
            return owner or Owner()
        # From an older ttrl.
        if owner is None or owner.token == self.owner.token:
            return None
        return owner

    def leave(self) -> None:
        """Move owner.json away instead of removing it: it could be another's by now."""
        assert self._place is not None
        os.replace(self._path, self._place / OWNER_FILE)

    def _lives(self, owner: Owner) -> bool | None:
        # The lock would show if it were alive.
        if self._has_flock and owner.same_boot():
            return False
        return super()._lives(owner)

    def _epochs(self) -> list[int]:
        try:
            return [
                int(name) for name in again(lambda: os.listdir(self._owners)) if name.isdecimal()
            ]
        except FileNotFoundError:
            return []

    def _has_place(self) -> bool:
        assert self._place is not None
        try:
            again(self._place.stat)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return False
        return True

    def _flock(self, file: IO[str]) -> bool:
        """Lock the file; return False if the file system has no such locks."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self.in_use_by(self.read()) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise RunFolderError(
                    f"{self._folder} cannot be locked: {error.strerror}; choose another run folder"
                ) from error
            logger.warning(
                "%s: the file system has no locks; ttrl uses the heartbeat in owner.json",
                self._folder,
            )
            return False
        return True


def only_here(folder: Path, mounts: Path = _MOUNTS) -> bool:
    """Tell whether a folder is on a file system of this machine only; False if unknown. mounts: the
    kernel's list of mounted disks.
    """
    real = os.path.realpath(folder)
    kinds: dict[str, str] = {}
    with (
        contextlib.suppress(OSError),
        open(mounts, encoding="utf-8", errors="surrogateescape") as file,
    ):
        for line in file:
            mount, _, kind = line.partition(" - ")
            place = re.sub(
                r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), mount.split(" ")[4]
            )
            if os.path.commonpath([place, real]) == place:
                # A later mount covers an earlier one at the same place.
                kinds[place] = kind.split(" ")[0]
    return bool(kinds) and kinds[max(kinds, key=len)] in _ONE_MACHINE


def _remove(place: Path) -> None:
    """Remove the folder of an earlier owner, perhaps still writing in it. Only the file server's
    answers count, not a listing.
    """
    for _ in range(100):
        try:
            with contextlib.suppress(FileNotFoundError):
                for name in again(lambda: os.listdir(place)):
                    os.unlink(place / name)  # EBUSY: NFS keeps an open file under another name
            os.rmdir(place)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (
                errno.ENOTEMPTY,
                errno.EEXIST,
                errno.EBUSY,
                errno.ESTALE,
                errno.EIO,
            ):
                raise
            time.sleep(0.02)
        else:
            return
    raise RunFolderError(
        f"{place} of an earlier owner cannot be removed: a process still writes there; stop it"
    )


def _token_in(file: IO[str]) -> str:
    """Return the token in `lock`, written there by its first holder."""
    with contextlib.suppress(OSError, ValueError):
        token = file.read(64)
        if not token:
            token = secrets.token_hex(8)
            os.pwrite(file.fileno(), token.encode(), 0)
        return token
    return ""
