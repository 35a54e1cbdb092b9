"""One process per run folder: a lock with an owner, on this machine and on a shared file system.

Two things say that a folder is taken. `lock` is locked with flock: the kernel frees it when its
process dies, however it dies, so on one machine nothing more is needed. `owner.json` names the
process (host, pid, user, since when, command), and its time of change moves every few seconds as
long as the process lives: the heartbeat, for file systems whose flock does not reach other
machines, or that have none. A run's mirror has an owner.json of the same kind (`Claim`;
`ttrl.run_folder.mirror`).

Two that start in the same moment, and an owner that was taken for dead and goes on, are kept apart
by owners/EPOCH, a folder that each owner makes (which only one can) with a number above all before
it. In it an owner writes what is to be seen under a name that others use too, markers above all,
and then links or renames it. Whoever takes over removes the folders of those before first, and with
them whatever they had not given its name: a marker of theirs was there before the new owner began,
or never will be. That takes no clock and no second look, and holds wherever mkdir, rmdir and link
are the file server's doing.

Nothing goes by the name of a machine, which a pod that is started again has in common with the one
that may live on. Only on a disk of this machine is an owner from before its last start known to be
gone.
"""

import contextlib
import errno
import fcntl
import getpass
import itertools
import json
import logging
import os
import re
import secrets
import shutil
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from ttrl.errors import RunFolderError, RunFolderInUseError, StorageError
from ttrl.system.files import again, create_text, json_text, make_folders, write_text
from ttrl.system.process_guard import boot_id, process_id
from ttrl.text import harmless

logger = logging.getLogger(__name__)

OWNER_FILE = "owner.json"
_OWNERS = "owners"
LOCK_FILES = frozenset({"lock", OWNER_FILE, _OWNERS})
"""What a folder holds that was locked, and nothing else."""
HEARTBEAT_SECONDS = 5.0
TAKE_OVER_VARIABLE = "TTRL_TAKE_OVER"
_WATCHED_BEATS = 3.2
"""How long another machine's owner is watched for a heartbeat before it is taken for silent, in
beats.
"""
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
}
_ONE_MACHINE |= {"fuse.fuse-overlayfs", "vfat", "exfat", "ntfs3", "fuseblk"}
"""File systems that no other machine writes to at the same time."""
_MOUNTS = Path("/proc/self/mountinfo")
_HIDDEN = "…"
_OPTION = re.compile(r"-[A-Za-z]|--[a-z][a-z0-9_-]{1,40}")
_SHOWN_OPTIONS = {"ttrl", "--run", "--model", "--preset", "--seed", "--iterations", "--overfit"}
_SHOWN_OPTIONS |= {"--weight-sync", "--nproc-per-node"}
"""What recipes call their harmless options (`ttrl.cli.recipe_script`)."""
_PLAIN = re.compile(r"[A-Za-z0-9_./+-]{1,120}")
"""No address: it may hold a key in its path, and a query."""


def _pid_namespace() -> str:
    """Return the name of the namespace in which pids mean something; "" where unknown."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _only_here(folder: Path) -> bool:
    """Tell whether a folder is on a file system of this machine alone; False where that is
    unknown.
    """
    real = os.path.realpath(folder)
    kinds: dict[str, str] = {}
    with (
        contextlib.suppress(OSError),
        open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file,
    ):
        for line in file:
            mount, _, kind = line.partition(" - ")
            place = re.sub(
                r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), mount.split(" ")[4]
            )
            if os.path.commonpath([place, real]) == place:
                # A later one covers an earlier one of the same place.
                kinds[place] = kind.split(" ")[0]
    return bool(kinds) and kinds[max(kinds, key=len)] in _ONE_MACHINE


def describe_process() -> dict[str, Any]:
    """Return the owner that this process would be."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        user = str(os.getuid())
    own = process_id(os.getpid())
    command = " ".join(shown_words(sys.argv or [""]))[:300]
    return {
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pid_namespace": _pid_namespace(),
        "pid": os.getpid(),
        "process_start": None if own is None else own[1],
        "user": user,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": command,
        "token": secrets.token_hex(8),
    }


def shown_words(words: Sequence[str]) -> list[str]:
    """Return a command line for a file that others may read: whatever could be a secret is `…`.

    Any word can be one: scripts have options of their own, and a key looks like any other value. So
    only names of options are shown, and values of the options that ttrl gives its own recipes,
    where they read like a path, a name or a number.
    """
    program = Path(words[0])
    shown = [program.name]
    option = ""
    if program.parts[-3:] == ("ttrl", "cli", "__main__.py") or program.name == "ttrl":
        shown = ["ttrl"]
        option = "ttrl"  # its value is the subcommand
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            shown.append(_value(option, word))
            option = ""
        elif _OPTION.fullmatch(name):
            option = name
            shown.append(name + equals + (_value(name, value) if equals else ""))
        else:
            option = ""
            shown.append(word[:2] + _HIDDEN)  # -kSECRET
    return [word for word, _ in itertools.groupby(shown)]


def _value(option: str, value: str) -> str:
    if option in _SHOWN_OPTIONS and _PLAIN.fullmatch(value):
        return value
    return _HIDDEN


def parse_owner(data: bytes | str | None) -> dict[str, Any] | None:
    """Return the content of an owner.json; None where there is none, or a damaged one, which names
    nobody.
    """
    with contextlib.suppress(ValueError):
        owner = None if data is None else json.loads(data)
        if isinstance(owner, dict):
            return owner
        return None
    return None


def in_words(owner: dict[str, Any]) -> str:
    """Return who an owner is, for messages; {} is one who has left."""
    known = {
        name: harmless(str(owner.get(name, "unknown")))
        for name in ("pid", "host", "user", "started", "command")
    }
    if owner:
        return "pid {pid} on {host}, user {user}, since {started}: {command}".format(**known)
    return "which has ended since"


def _same_boot(owner: dict[str, Any]) -> bool:
    return bool(owner.get("boot")) and owner["boot"] == boot_id()


class Claim(ABC):
    """This process's name in an owner.json, and the heartbeat that shows others that it lives.

    what: the run folder or mirror that it is for, in messages. Subclasses say how the file is read
        and written.
    """

    def __init__(self, what: object, beat_seconds: float) -> None:
        self._what = what
        self._beat_seconds = beat_seconds
        self.owner = describe_process()
        self.epoch = 0
        """Which owner this is, once it has signed: a number above that of every owner before."""
        self.lost_to: dict[str, Any] | None = None
        """Who has taken over; {} where that process has ended since."""
        self.discarded = False
        """Whether this process removed what it owns: then nothing is left to own or to take over.
        """

    @abstractmethod
    def read(self) -> dict[str, Any] | None:
        """Return the owner; None where there is none."""

    @abstractmethod
    def sign(self) -> None:
        """Make this process the owner. Raises RunFolderError where another was quicker."""

    @abstractmethod
    def beat(self, number: int) -> None:
        """Move what `pulse` returns."""

    @abstractmethod
    def pulse(self) -> object:
        """Return what moves as long as the owner lives; None where it has gone."""

    @abstractmethod
    def other(self) -> dict[str, Any] | None:
        """Return the process that has signed since; {} where it has left again, None where nobody
        has.
        """

    @abstractmethod
    def leave(self) -> None:
        """Say that this process is no longer the owner."""

    @contextlib.contextmanager
    def held(
        self,
        *,
        take_over: bool,
        is_dead: Callable[[dict[str, Any]], bool] = lambda _: False,
        trusted: str = "",
    ) -> Iterator[None]:
        """Sign, beat until the block ends, and leave. Raises RunFolderError where another process
        is alive, or may be.

        take_over: also from an owner on another machine that gives no sign of life; it may only be
            cut off.
        is_dead: tells of owners that a lock of the kernel would name as alive if they were.
        trusted: the run folder whose owners are taken over from without `take_over`: this process
            holds it, so they are dead.
        """
        owner = self.read()
        if owner is not None and not is_dead(owner):
            self._judge(
                owner, take_over=take_over or (trusted != "" and owner.get("folder") == trusted)
            )
        self.sign()
        ended = threading.Event()
        beating = threading.Thread(
            target=self._beat_until, args=(ended,), name="run owner", daemon=True
        )
        beating.start()
        try:
            yield
        finally:
            ended.set()
            beating.join()
            with contextlib.suppress(OSError):
                if self.is_ours() and not self.discarded:
                    self.leave()

    def is_ours(self) -> bool:
        """Tell whether nobody else has taken over; once somebody has, that stays so. What cannot be
        read names nobody else.
        """
        if self.discarded:
            return True
        if self.lost_to is None and (other := self.other()) is not None:
            self.lost_to = other
            logger.error(
                "%s was taken over by another process (%s); no more is written there",
                self._what,
                in_words(other),
            )
        return self.lost_to is None

    def in_use_by(self, owner: dict[str, Any] | None) -> RunFolderInUseError:
        """Return what is said where `owner` is alive."""
        if owner is None:
            who = "an unknown owner"
        else:
            who = in_words(owner)
        return RunFolderInUseError(
            f"{self._what} is in use by another process ({who}); wait for it, or stop it"
        )

    def _judge(self, owner: dict[str, Any], *, take_over: bool) -> None:
        """Raise RunFolderError where `owner` is alive, or where nobody can tell."""
        if _same_boot(owner) and owner.get("pid_namespace") == _pid_namespace():
            if process_id(owner.get("pid", 0)) == (owner.get("pid"), owner.get("process_start")):
                raise self.in_use_by(owner)
            return
        logger.warning(
            "%s has an owner on another machine; watching for a sign of life", self._what
        )
        if self._pulse_moves():
            raise self.in_use_by(owner)
        if not take_over:
            raise RunFolderError(
                f"{self._what} belongs to a process on another machine ({in_words(owner)}), "
                "which gives no sign of life; if it "
                "is gone, take the run over: train(..., take_over=True), or start the command "
                f"with {TAKE_OVER_VARIABLE}=1"
            )
        logger.warning("%s is taken over from %s", self._what, in_words(owner))

    def _pulse_moves(self) -> bool:
        seen = self.pulse()
        # Looks, not seconds: where all stood still for a while, the owner did, too.
        for _ in range(round(8 * _WATCHED_BEATS)):
            time.sleep(self._beat_seconds / 8)
            now = self.pulse()
            if now != seen:
                return now is not None  # None: it has just ended
        return False

    def _beat_until(self, ended: threading.Event) -> None:
        number = 0
        while not ended.wait(self._beat_seconds):
            number += 1
            with contextlib.suppress(OSError):
                if not self.is_ours():
                    return
                self.beat(number)


class _FolderClaim(Claim):
    """A claim in a run folder: owner.json, and the folder owners/EPOCH."""

    def __init__(self, folder: Path, beat_seconds: float) -> None:
        super().__init__(folder, beat_seconds)
        self._path, self._owners = folder / OWNER_FILE, folder / _OWNERS
        self._renaming = threading.Lock()
        # Of whoever comes after that, nobody has said that it is dead.
        self._before = self._epochs()

    @property
    def place(self) -> Path:
        """Where this owner writes what then gets a name that others use too."""
        return self._owners / str(self.epoch)

    def read(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            return parse_owner(again(lambda: self._path.read_text(encoding="utf-8")))
        return None

    def sign(self) -> None:
        self.epoch = max(self._before, default=0) + 1
        try:
            make_folders(self._owners)
            again(self.place.mkdir)
            for epoch in self._before:
                _remove(self._owners / str(epoch))
            # Above all, one that has just taken another number (`lift`).
            if max(self._epochs(), default=0) != self.epoch:
                raise FileNotFoundError
            self._show()
        except (FileExistsError, FileNotFoundError):
            raise self.in_use_by(self.read()) from None
        except OSError as error:
            if error.errno in _GONE and not self._has_place():
                raise self.in_use_by(self.read()) from None
            if isinstance(error, StorageError):
                raise
            way_out = "make room, or look at the permissions, and start the same command again"
            raise StorageError(
                error.errno or 0, f"could not write {self.place}: {error.strerror}; {way_out}"
            ) from error

    def _show(self) -> None:
        """Put our name into owner.json, unless somebody has taken over: then the folder that it
        comes from is gone.
        """
        write_text(self.place / OWNER_FILE, json_text(self.owner), durable=False)
        os.replace(self.place / OWNER_FILE, self._path)

    def _epochs(self) -> list[int]:
        try:
            return [
                int(name) for name in again(lambda: os.listdir(self._owners)) if name.isdecimal()
            ]
        except FileNotFoundError:
            return []

    def lift(self, epoch: int) -> None:
        """Go on as a later owner, where the run's mirror knows of more of them. Raises
        RunFolderError where we are none.
        """
        with self._renaming:
            try:
                os.rename(self.place, self._owners / str(max(epoch, self.epoch)))
            except OSError:
                if self._has_place():
                    raise
                raise self.in_use_by(self.read()) from None
            self.epoch = max(epoch, self.epoch)

    def beat(self, number: int) -> None:
        os.utime(self._path)

    def pulse(self) -> int | None:
        """Return the file's time of change. Only its own clock counts, so clocks that differ do no
        harm.
        """
        try:
            # Opened anew each time: that is what makes NFS look at the server's.
            with open(self._path, "rb") as file:
                return os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return None

    def other(self) -> dict[str, Any] | None:
        owner = self.read()
        with self._renaming:
            if not self._has_place():
                return owner or {}
        # Of an older ttrl.
        if owner is None or owner.get("token") == self.owner["token"]:
            return None
        return owner

    def _has_place(self) -> bool:
        try:
            again(lambda: os.stat(self.place))
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return False
        return True

    def leave(self) -> None:
        os.replace(self._path, self.place / OWNER_FILE)  # not removed: it could be another's by now


def _remove(place: Path) -> None:
    """Remove the folder of an earlier owner, which may be writing in it. Only what the file server
    says counts, not a look.
    """
    for _ in range(100):
        try:
            with contextlib.suppress(FileNotFoundError):
                for name in again(lambda: os.listdir(place)):
                    os.unlink(place / name)  # EBUSY: NFS keeps one that is open under another name
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
        f"{place} of an earlier owner cannot be removed: something goes on writing there; stop it"
    )


class RunLock:
    """The lock of one folder. Use `held`."""

    def __init__(self, folder: Path, beat_seconds: float = HEARTBEAT_SECONDS) -> None:
        self._folder = folder
        self._beat_seconds = beat_seconds
        self._claim: _FolderClaim | None = None
        self.token = ""
        """A random name of this run folder, while it is held."""

    @contextlib.contextmanager
    def held(self, *, take_over: bool = False) -> Iterator[None]:
        """Hold the folder. Raises RunFolderError naming the owner where another process has it.
        take_over: see `Claim.held`.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = os.fdopen(os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o644), "r+")
        except OSError as error:
            raise RunFolderError(
                f"{self._folder} cannot be a run folder: {error.strerror}; choose another one"
            ) from error
        with file:
            claim = _FolderClaim(self._folder, self._beat_seconds)
            locks = self._flock(file, claim)
            # But for clients of an NFS server that runs here: those beat.
            alone = locks and _only_here(self._folder)
            with claim.held(
                take_over=take_over or alone, is_dead=lambda owner: locks and _same_boot(owner)
            ):
                self._claim, self.token = claim, _token_in(file)
                try:
                    yield
                finally:
                    self._claim = None

    def discard(self) -> None:
        """Remove the folder, held by this process, with all that is in it."""
        self.check()
        assert self._claim is not None, "only a folder that is held can be discarded"
        self._claim.discarded = True
        shutil.rmtree(self._folder)

    @property
    def epoch(self) -> int:
        """Which owner of the run this process is; 0 where it has not locked the folder."""
        if self._claim is None:
            return 0
        return self._claim.epoch

    def lift(self, epoch: int) -> None:
        """Be at least this owner, by number. Raises RunFolderError where another process has taken
        the folder over.
        """
        if self._claim is not None:
            self._claim.lift(epoch)

    def create(self, path: Path, text: str) -> None:
        """Make a marker. Raises RunFolderError where another process has taken over, or has made
        it; StorageError.
        """
        claim = self._claim
        self.check()
        try:
            made = again(lambda: create_text(path, text, None if claim is None else claim.place))
        except StorageError:
            self.check()  # gone with the place from which it gets its name
            raise
        if not made:
            raise RunFolderError(
                f"{path} is there already: another process has finished this phase meanwhile, or "
                "it was done twice; this one "
                "stops here. Start the same command again to go on from there, or remove that "
                "file first to run the phase again"
            )

    def check(self) -> None:
        """Raise RunFolderError where another process has taken the folder over. Harmless where it
        was never locked.
        """
        if self._claim is not None and not self._claim.is_ours():
            raise RunFolderError(
                f"{self._folder} was taken over by another process "
                f"({in_words(self._claim.lost_to or {})}); this one stops here, "
                "and what it had begun is not marked as finished. Start the same command again "
                "to go on from where that one ended"
            )

    def _flock(self, file: IO[str], claim: _FolderClaim) -> bool:
        """Lock the file; return False where the file system has no such locks."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise claim.in_use_by(claim.read()) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise RunFolderError(
                    f"{self._folder} cannot be locked: {error.strerror}; choose another run folder"
                ) from error
            logger.warning(
                "%s: the file system has no locks; the heartbeat in owner.json has to do",
                self._folder,
            )
            return False
        return True


def _token_in(file: IO[str]) -> str:
    """Return the token in `lock`, written there by the first that holds it."""
    with contextlib.suppress(OSError, ValueError):
        token = file.read(64)
        if not token:
            token = secrets.token_hex(8)
            os.pwrite(file.fileno(), token.encode(), 0)
        return token
    return ""
