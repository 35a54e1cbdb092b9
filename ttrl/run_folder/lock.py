"""One process per run folder: a lock with an owner, on this machine and on a shared file system.

Two things say that a folder is taken. `lock` is locked with flock: the kernel frees it when its process dies, however it dies, so
on one machine nothing more is needed. It holds the token of the process that took it last, and stays, so that one that slept
through another's whole work learns of it. `owner.json` names the process (host, pid, user, since when, command), and its time of
change moves every few seconds as long as the process lives: the heartbeat, for file systems whose flock does not reach other
machines, or that have none. A run's mirror has an owner.json of the same kind (`Claim`; `ttrl.run_folder.mirror`).

Guaranteed: on one machine, at most one process. Between machines: the same where flock reaches them (NFS since Linux 2.6.12 and
NFSv4, CephFS, Lustre mounted with flock); elsewhere a living owner is seen by its heartbeat, and two that start in the same
second notice each other at their first heartbeat, before either has finished a phase. What a machine that was cut off from the
file system had begun can never be marked as finished once another has taken over (`RunLock.check`).
"""

import contextlib
import errno
import fcntl
import getpass
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from ttrl.configs.base import without_secrets
from ttrl.errors import RunFolderError
from ttrl.system.files import write_json
from ttrl.system.object_store import redact
from ttrl.system.process_guard import boot_id, process_id

logger = logging.getLogger(__name__)

OWNER_FILE = "owner.json"
LOCK_FILES = frozenset({"lock", OWNER_FILE})
"""What a folder holds that was locked, and nothing else."""
HEARTBEAT_SECONDS = 5.0
TAKE_OVER_VARIABLE = "TTRL_TAKE_OVER"
_WATCHED_BEATS = 3.2
"""How long another machine's owner is watched for a heartbeat before it is taken for silent, in beats."""
_UNSUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}


def _pid_namespace() -> str:
    """Return the name of the namespace in which pids mean something; "" where unknown."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def describe_process() -> dict[str, Any]:
    """Return the owner that this process would be."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        user = str(os.getuid())
    own = process_id(os.getpid())
    command = " ".join([Path(sys.argv[0]).name, *_shown(sys.argv[1:])])[:300]
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


def _shown(words: Iterable[str]) -> Iterator[str]:
    """Yield the words of a command without what is secret in them: in --api-key X, server.api_key=X, loggers={"key": "X"}, and
    addresses."""
    before = ""
    for word in map(redact, words):
        name, equals, value = word.partition("=")
        if not equals:
            name, value = before, word
        parsed: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            parsed = json.loads(value)
        nested = isinstance(parsed, dict | list)
        shown = json.dumps(without_secrets(parsed, name)) if nested else without_secrets(value, name)
        yield f"{name}={shown}" if equals else shown
        before = word if word.startswith("-") else ""


def parse_owner(data: bytes | str | None) -> dict[str, Any] | None:
    """Return the content of an owner.json; None where there is none, or a damaged one, which names nobody."""
    with contextlib.suppress(ValueError):
        owner = None if data is None else json.loads(data)
        return owner if isinstance(owner, dict) else None
    return None


def in_words(owner: dict[str, Any]) -> str:
    """Return who an owner is, for messages; {} is one who has left."""
    known = {name: owner.get(name, "unknown") for name in ("pid", "host", "user", "started", "command")}
    return "pid {pid} on {host}, user {user}, since {started}: {command}".format(**known) if owner else "which has ended since"


class Claim(ABC):
    """This process's name in an owner.json, and the heartbeat that shows others that it lives.

    what: the run folder or mirror that it is for, in messages. Subclasses say how the file is read and written.
    """

    def __init__(self, what: object, beat_seconds: float) -> None:
        self._what, self._beat_seconds = what, beat_seconds
        self.owner = describe_process()
        self.lost_to: dict[str, Any] | None = None
        """Who has taken over; {} where that process has ended since."""

    @abstractmethod
    def read(self) -> dict[str, Any] | None:
        """Return the owner; None where there is none."""

    @abstractmethod
    def sign(self) -> None:
        """Make this process the owner."""

    @abstractmethod
    def beat(self, number: int) -> None:
        """Move what `pulse` returns."""

    @abstractmethod
    def pulse(self) -> object:
        """Return what moves as long as the owner lives; None where it has gone."""

    @abstractmethod
    def other(self) -> dict[str, Any] | None:
        """Return the process that has signed since; {} where it has left again, None where nobody has."""

    @abstractmethod
    def leave(self) -> None:
        """Say that this process is no longer the owner."""

    @contextlib.contextmanager
    def held(self, *, locks: bool, take_over: bool) -> Iterator[None]:
        """Sign, beat until the block ends, and leave. Raises RunFolderError where another process is alive, or may be.

        locks: whether we hold a lock of the kernel that a living owner on this machine would hold.
        take_over: also from an owner on another machine that gives no sign of life; it may only be cut off.
        """
        if (owner := self.read()) is not None:
            self._judge(owner, locks=locks, take_over=take_over)
        self.sign()
        ended = threading.Event()
        beating = threading.Thread(target=self._beat_until, args=(ended,), name="run owner", daemon=True)
        beating.start()
        try:
            yield
        finally:
            ended.set()
            beating.join()
            with contextlib.suppress(OSError):
                if self.is_ours():
                    self.leave()

    def is_ours(self) -> bool:
        """Tell whether nobody else has taken over; once somebody has, that stays so. What cannot be read names nobody else."""
        if self.lost_to is None and (other := self.other()) is not None:
            self.lost_to = other
            logger.error("%s was taken over by another process (%s); no more is written there", self._what, in_words(other))
        return self.lost_to is None

    def in_use_by(self, owner: dict[str, Any] | None) -> RunFolderError:
        """Return what is said where `owner` is alive."""
        who = "an unknown owner" if owner is None else in_words(owner)
        return RunFolderError(f"{self._what} is in use by another process ({who}); wait for it, or stop it")

    def _judge(self, owner: dict[str, Any], *, locks: bool, take_over: bool) -> None:
        """Raise RunFolderError where `owner` is alive, or where nobody can tell."""
        same_boot = bool(owner.get("boot")) and owner["boot"] == boot_id()
        if same_boot and locks:
            return
        if same_boot and owner.get("pid_namespace") == _pid_namespace():
            if process_id(owner.get("pid", 0)) == (owner.get("pid"), owner.get("process_start")):
                raise self.in_use_by(owner)
            return
        logger.warning("%s has an owner on another machine; watching for a sign of life", self._what)
        if self._pulse_moves():
            raise self.in_use_by(owner)
        if owner.get("host") == socket.gethostname() and not same_boot:
            return  # this machine was started again since
        if not take_over:
            raise RunFolderError(
                f"{self._what} belongs to a process on another machine ({in_words(owner)}), which gives no sign of life; if it "
                f"is gone, take the run over: train(..., take_over=True), or start the command with {TAKE_OVER_VARIABLE}=1"
            )
        logger.warning("%s is taken over from %s", self._what, in_words(owner))

    def _pulse_moves(self) -> bool:
        seen = self.pulse()
        for _ in range(round(8 * _WATCHED_BEATS)):  # looks, not seconds: where all stood still for a while, the owner did, too
            time.sleep(self._beat_seconds / 8)
            if (now := self.pulse()) != seen:
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
    """A claim in a run folder: owner.json, and the token in the file `lock`."""

    def __init__(self, folder: Path, lock: IO[str], beat_seconds: float) -> None:
        super().__init__(folder, beat_seconds)
        self._path, self._lock = folder / OWNER_FILE, lock
        self._signed = False
        """Whether our token is in `lock`."""

    def read(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            return parse_owner(self._path.read_text(encoding="utf-8"))
        return None

    def sign(self) -> None:
        write_json(self._path, self.owner)
        with contextlib.suppress(OSError):  # it comes on top of owner.json; tokens are equally long
            os.pwrite(self._lock.fileno(), self.owner["token"].encode(), 0)
            self._signed = True
            os.fsync(self._lock.fileno())  # so that NFS shows it to others

    def beat(self, number: int) -> None:
        os.utime(self._path)

    def pulse(self) -> int | None:
        """Return the file's time of change. Only its own clock counts, so clocks that differ do no harm."""
        try:
            with open(self._path, "rb") as file:  # opened anew each time: that is what makes NFS look at the server's
                return os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return None

    def other(self) -> dict[str, Any] | None:
        ours, owner, last = self.owner["token"], self.read(), ""
        with contextlib.suppress(OSError, ValueError):
            last = self._path.with_name("lock").read_text(encoding="utf-8")
        if (owner is None or owner.get("token") == ours) and (last in ("", ours) or not self._signed):
            return None
        return owner or {}

    def leave(self) -> None:
        self._path.unlink(missing_ok=True)


class RunLock:
    """The lock of one folder. Use `held`."""

    def __init__(self, folder: Path, beat_seconds: float = HEARTBEAT_SECONDS) -> None:
        self._folder, self._beat_seconds = folder, beat_seconds
        self._claim: _FolderClaim | None = None

    @contextlib.contextmanager
    def held(self, *, take_over: bool = False) -> Iterator[None]:
        """Hold the folder. Raises RunFolderError naming the owner where another process has it. take_over: see `Claim.held`."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = os.fdopen(os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o644), "r+")
        except OSError as error:
            raise RunFolderError(f"{self._folder} cannot be a run folder: {error.strerror}; choose another one") from error
        with file:
            claim = _FolderClaim(self._folder, file, self._beat_seconds)
            with claim.held(locks=self._flock(file, claim), take_over=take_over):
                self._claim = claim
                try:
                    yield
                finally:
                    self._claim = None

    def check(self) -> None:
        """Raise RunFolderError where another process has taken the folder over. Harmless where it was never locked."""
        if self._claim is not None and not self._claim.is_ours():
            raise RunFolderError(
                f"{self._folder} was taken over by another process ({in_words(self._claim.lost_to or {})}); this one stops here, "
                "and what it had begun is not marked as finished. Start the same command again to go on from where that one ended"
            )

    def _flock(self, file: IO[str], claim: _FolderClaim) -> bool:
        """Lock the file; return False where the file system has no such locks."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise claim.in_use_by(claim.read()) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise RunFolderError(f"{self._folder} cannot be locked: {error.strerror}; choose another run folder") from error
            logger.warning("%s: the file system has no locks; the heartbeat in owner.json has to do", self._folder)
            return False
        return True
