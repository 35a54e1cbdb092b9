"""One process per run folder: a lock with an owner, on this machine and on a shared file system.

Two things say that a folder is taken. `lock` is locked with flock: the kernel frees it when its process dies, however it dies, so
on one machine nothing more is needed. It holds the token of the process that took it last, and stays, so that one that slept
through another's whole work learns of it. `owner.json` names the process (host, pid, user, since when, command), and its time of
change moves every few seconds as long as the process lives: the heartbeat, for file systems whose flock does not reach other
machines, or that have none.

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
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from ttrl.errors import RunFolderError
from ttrl.system.files import write_json
from ttrl.system.process_guard import boot_id, process_id

logger = logging.getLogger(__name__)

LOCK_FILES = frozenset({"lock", "owner.json"})
"""What a folder holds that was locked, and nothing else."""
HEARTBEAT_SECONDS = 5.0
WATCHED_SECONDS = 3.2 * HEARTBEAT_SECONDS
"""How long another machine's owner is watched for a heartbeat before it is taken for silent."""
TAKE_OVER_VARIABLE = "TTRL_TAKE_OVER"
_UNSUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}
_SECRET_OPTION = re.compile(r"(?i)(--?[\w-]*(?:key|token|secret|password)[\w-]*[= ])\S+")


def _pid_namespace() -> str:
    """Pids mean something within it alone; "" where unknown."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def describe_process() -> dict[str, Any]:
    """The owner that this process would be."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        user = str(os.getuid())
    own = process_id(os.getpid())
    command = _SECRET_OPTION.sub(r"\1***", " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]))[:300]
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


def in_words(owner: dict[str, Any]) -> str:
    """For error messages."""
    known = {name: owner.get(name, "unknown") for name in ("pid", "host", "user", "started", "command")}
    return "pid {pid} on {host}, user {user}, since {started}: {command}".format(**known)


def in_use(owner: dict[str, Any] | None, what: object) -> RunFolderError:
    """What is said where `owner` is alive."""
    who = "an unknown owner" if owner is None else in_words(owner)
    return RunFolderError(f"{what} is in use by another process ({who}); wait for it, or stop it")


def judge_owner(
    owner: dict[str, Any], what: object, heartbeat_moves: Callable[[], bool], *, locks: bool, take_over: bool
) -> None:
    """Returns where the owner of `what` is gone. Raises RunFolderError where it is alive, or where nobody can tell.

    heartbeat_moves: watches for a while. locks: whether we hold a lock of the kernel that a living owner on this machine would
    hold. take_over: whether an owner on another machine that gives no sign of life may be taken for gone.
    """
    same_boot = bool(owner.get("boot")) and owner["boot"] == boot_id()
    if same_boot and locks:
        return
    if same_boot and owner.get("pid_namespace") == _pid_namespace():
        if process_id(owner.get("pid", 0)) == (owner.get("pid"), owner.get("process_start")):
            raise in_use(owner, what)
        return
    logger.warning("%s has an owner on another machine; watching for a sign of life", what)
    if heartbeat_moves():
        raise in_use(owner, what)
    if owner.get("host") == socket.gethostname() and not same_boot:
        return  # this machine was started again since
    if not take_over:
        raise RunFolderError(
            f"{what} belongs to a process on another machine ({in_words(owner)}), which gives no sign of life; if it is gone, "
            f"take the run over: train(..., take_over=True), or start the command with {TAKE_OVER_VARIABLE}=1"
        )
    logger.warning("%s is taken over from %s", what, in_words(owner))


class RunLock:
    """The lock of one folder. Use `held`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._owner_path, self._lock_path = folder / "owner.json", folder / "lock"
        self._owner: dict[str, Any] | None = None
        self._lost: dict[str, Any] | None = None
        self._signed = False
        """Whether our token is in `lock`."""

    @contextlib.contextmanager
    def held(self, *, take_over: bool = False) -> Iterator[None]:
        """Holds the folder. Raises RunFolderError naming the owner where another process has it.

        take_over: also from an owner on another machine that gives no sign of life; it may be cut off from the file system alone.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = os.fdopen(os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o644), "r+")
        except OSError as error:
            raise RunFolderError(f"{self._folder} cannot be a run folder: {error.strerror}; choose another one") from error
        with file:
            locks = self._flock(file)
            if (owner := self._read_owner()) is not None:
                judge_owner(owner, self._folder, self._heartbeat_moves, locks=locks, take_over=take_over)
            self._owner, self._lost = describe_process(), None
            write_json(self._owner_path, self._owner)
            self._signed = False
            with contextlib.suppress(OSError):  # it comes on top of owner.json; tokens are equally long
                os.pwrite(file.fileno(), self._owner["token"].encode(), 0)
                self._signed = True
                os.fsync(file.fileno())  # so that NFS shows it to others
            ended = threading.Event()
            beating = threading.Thread(target=self._beat, args=(ended,), name="run lock", daemon=True)
            beating.start()
            try:
                yield
            finally:
                ended.set()
                beating.join()
                if self._is_ours():
                    with contextlib.suppress(OSError):
                        self._owner_path.unlink(missing_ok=True)
                self._owner = None

    def check(self) -> None:
        """Raises RunFolderError where another process has taken the folder over. Harmless where it was never locked."""
        if self._owner is not None and not self._is_ours():
            other = in_words(self._lost) if self._lost else "which has ended since"
            raise RunFolderError(
                f"{self._folder} was taken over by another process ({other}); this one stops here, and what it had begun is not "
                "marked as finished. Start the same command again to go on from where that one ended"
            )

    def _flock(self, file: IO[str]) -> bool:
        """False where the file system has no such locks."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use(self._read_owner(), self._folder) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise RunFolderError(f"{self._folder} cannot be locked: {error.strerror}; choose another run folder") from error
            logger.warning("%s: the file system has no locks; the heartbeat in owner.json has to do", self._folder)
            return False
        return True

    def _read_owner(self) -> dict[str, Any] | None:
        try:
            owner = json.loads(self._owner_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return owner if isinstance(owner, dict) else None

    def _heartbeat_moves(self) -> bool:
        """Watches the file's time of change; its own clock alone counts, so clocks that differ do no harm."""
        seen, deadline = self._heartbeat(), time.monotonic() + WATCHED_SECONDS
        while time.monotonic() < deadline:
            time.sleep(min(0.2, WATCHED_SECONDS / 20))
            now = self._heartbeat()
            if now is None:
                return False  # it has just ended
            if now != seen:
                return True
        return False

    def _heartbeat(self) -> int | None:
        try:
            with open(self._owner_path, "rb") as file:  # opened anew each time: that is what makes NFS look at the server's
                return os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return None

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            if not self._is_ours():
                logger.error("%s was taken over by %s", self._folder, in_words(self._lost or {}))
                return
            with contextlib.suppress(OSError):
                os.utime(self._owner_path)

    def _is_ours(self) -> bool:
        """Whether owner.json still names us, and nobody took the lock since. What is gone or cannot be read names nobody else."""
        if self._owner is None:
            return True
        ours, owner, last = self._owner["token"], self._read_owner(), ""
        with contextlib.suppress(OSError, ValueError):
            last = self._lock_path.read_text(encoding="utf-8")
        if (owner is None or owner.get("token") == ours) and (last in ("", ours) or not self._signed):
            return True
        self._lost = self._lost or owner or {}  # {}: it has ended already
        return False
