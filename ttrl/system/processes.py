"""Run child processes (inference servers, trainers). They never outlive us, not even after kill -9.

Every child runs below its own guard (`ttrl.system.process_guard` explains the mechanism) and writes
to a log. Nothing is ever found or killed by name. `reap_leftovers` ends the leftovers of a run even
if the guard was killed, too.
"""

import contextlib
import json
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from ttrl.errors import StorageError, UserError
from ttrl.system import process_guard
from ttrl.system.process_guard import MARK_VARIABLE, ProcessId

logger = logging.getLogger(__name__)

RECORD_SUFFIX = ".pids.json"  # next to the log; sought by `reap_leftovers`
LOOPBACK = (
    {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if (1, "lo") in socket.if_nameindex()
    else {}
)
"""Makes processes of one machine listen for each other on loopback only, not at the address of the
machine's name.
"""
_SECRET_WORDS = (
    "KEY",
    "TOKEN",
    "SECRET",
    "PASSWORD",
    "PASSWD",
    "CREDENTIAL",
    "CONNECTION_STRING",
    "AUTH_CONFIG",
    "AUTH_SOCK",
)
_SECRET_ENDS = ("_PAT", "_PWD", "_SAS", "DATABASE_URL", "_DSN")
# Characters of one log line in an error message; vLLM dumps its whole config into single lines.
_LONGEST_LINE = 400


def without_secrets() -> dict[str, str]:
    """Return this process's environment for foreign code: no variable of AWS or Azure, no key,
    token, secret or password, and no address of a database or an agent.
    """
    return {name: value for name, value in os.environ.items() if not _is_secret(name.upper())}


def _is_secret(name: str) -> bool:
    if name.startswith("TOKENIZERS_"):
        return False
    return (
        name.startswith(("AWS_", "AZURE_"))
        or name.endswith(_SECRET_ENDS)
        or any(word in name for word in _SECRET_WORDS)
    )


class ChildProcess:
    """Run one child process with its own session, a log file, and a guard to end it and all of its
    descendants with us.

        with ChildProcess(["tune", "run", ...], "runs/NAME/logs/trainer.log") as child:
            returncode = child.wait()

    command: as for `subprocess.Popen`, without a shell.
    log_path: gets stdout and stderr, appended; `log_path` + ".pids.json" is next to it while the
        child may be alive.
    env: the child's whole environment, as for `subprocess.Popen`; None inherits ours. Never written
        to a file or command line.
    cwd: the folder to start in.
    pipes: descriptors for the child's stdin and stdout, closed by the caller after the start; by
        default it reads nothing.

    An object belongs to one thread at a time. A child never stopped ends with our process.
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        log_path: str | os.PathLike[str],
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        pipes: tuple[int, int] | None = None,
    ) -> None:
        self.command = [os.fspath(part) for part in command]
        self.log_path = Path(log_path).absolute()
        self.record_path = self.log_path.with_name(self.log_path.name + RECORD_SUFFIX)
        self.pid = 0
        """The child's pid, not its guard's; 0 before the start."""
        self.returncode: int | None = None
        """The child's exit code, negative for a signal; None until it and its descendants are gone.
        """
        self._env = dict(os.environ if env is None else env)
        self._cwd = None if cwd is None else os.fspath(cwd)
        self._pipes = pipes
        self._mark = secrets.token_hex(16)
        self._guard: subprocess.Popen[bytes] | None = None
        # Known from the end of its socket: a dying process closes its files a moment before its
        # parent can wait for it.
        self._guard_ended = False
        self._buffer = b""
        self._log_start = 0

    def start(self) -> Self:
        """Start the child. Raises UserError if the command cannot be executed, StorageError if the
        log cannot be written.
        """
        if self._guard is not None:
            raise RuntimeError(
                f"{self.command[0]} has been started already; start a new ChildProcess"
            )
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            log = open(self.log_path, "ab")  # noqa: SIM115 - handed to the guard below
        except OSError as error:
            raise StorageError(
                error.errno or 0, f"cannot write the log {self.log_path}: {error.strerror}"
            ) from error
        head = {
            "mark": self._mark,
            "boot": process_guard.boot_id(),
            "owner": process_guard.process_id(os.getpid()),
            "program": self.command[0],
        }
        order = {
            "command": self.command,
            "parent": os.getpid(),
            "record": str(self.record_path),
            "head": head,
        }
        self._control, theirs = socket.socketpair()
        try:
            with log, theirs:
                self._log_start = log.tell()
                self._guard = subprocess.Popen(
                    [
                        sys.executable,
                        # Loads nothing from the user's environment or site-packages.
                        "-I",
                        "-S",
                        process_guard.__file__,
                        str(theirs.fileno()),
                    ],
                    stdin=subprocess.DEVNULL if self._pipes is None else self._pipes[0],
                    stdout=log if self._pipes is None else self._pipes[1],
                    stderr=log,
                    pass_fds=(theirs.fileno(),),
                    # setproctitle (vLLM) would overwrite the environment, and so the mark.
                    env={"SPT_NOENV": "1", **self._env, MARK_VARIABLE: self._mark},
                    cwd=self._cwd,
                    start_new_session=True,  # we handle Ctrl-C in the terminal
                )
        except OSError as error:
            self._fail(error.strerror or str(error))
        self._tell(json.dumps(order))
        report = self._next_report(timeout=30.0) or {}
        if "started" not in report:
            self._fail(report.get("failed", f"its guard process ended; see {self.log_path}"))
        self.pid = report["started"]
        return self

    def poll(self) -> int | None:
        """Return the exit code, or None while the child or a descendant lives. Does not wait."""
        if self.returncode is None:
            self._take_end(timeout=0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the child to end by itself; return its exit code. Raises TimeoutError after
        `timeout` seconds.
        """
        if self.returncode is None:
            self._take_end(timeout)
        if self.returncode is None:
            raise TimeoutError(
                f"{self.command[0]} (pid {self.pid}) is still running after {timeout:g} s; its "
                f"log: {self.log_path}"
            )
        return self.returncode

    def stop(self, timeout: float = 10.0) -> int | None:
        """Ask the child to end (TERM) and end the rest after `timeout` seconds (KILL). Return the
        exit code when all are gone: the child's own if it had ended before, None if it was never
        started. Harmless when repeated.
        """
        if self._guard is not None and self.poll() is None:
            self._tell(str(timeout))
            self._take_end(timeout=None)
        return self.returncode

    def log_tail(self, n_lines: int = 30) -> str:
        return log_tail(self.log_path, self._log_start, n_lines)

    def __enter__(self) -> Self:
        if self._guard is not None:
            return self
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _tell(self, order: str) -> None:
        # A just-ended guard has left a report, or none.
        with contextlib.suppress(ConnectionError):
            self._control.sendall(order.encode() + b"\n")

    def _fail(self, reason: str) -> NoReturn:
        self._control.close()
        if self._guard is not None:
            self._guard.wait()
        self.returncode = 127
        where = f" in {self._cwd}" if self._cwd else ""
        raise UserError(f"cannot start {self.command[0]!r}{where}: {reason}")

    def _next_report(self, timeout: float | None) -> Mapping[str, Any] | None:
        """Return the guard's next message; None if none comes in `timeout` seconds, or the guard
        has ended (`_guard_ended`).
        """
        self._control.settimeout(timeout)
        while b"\n" not in self._buffer:
            try:
                chunk = self._control.recv(65536)
            except (TimeoutError, BlockingIOError):
                return None
            except ConnectionError:
                chunk = b""
            if not chunk:
                self._guard_ended = True
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: Mapping[str, Any] = json.loads(line)
        return message

    def _take_end(self, timeout: float | None) -> None:
        """Wait up to `timeout` seconds for the end of everything, and set `returncode`."""
        assert self._guard is not None, "start() first"
        report = self._next_report(timeout)
        if report is None and not self._guard_ended:
            return
        self._guard.wait()
        self._control.close()
        if report is not None and report["returncode"] is not None:
            self.returncode = report["returncode"]
            if report["left"]:
                logger.warning(
                    "%s: processes %s could not be ended, not even by KILL",
                    self.command[0],
                    report["left"],
                )
        else:
            # The guard was killed, and the kernel killed the child with it; the child's descendants
            # may be left.
            ended = _reap(self.record_path, even_of_living_owner=True)
            logger.warning(
                "the guard of %s was killed; ended its remaining processes: %s",
                self.command[0],
                ended,
            )
            self.returncode = -signal.SIGKILL


def log_tail(path: Path, start: int, n_lines: int) -> str:
    """Return the last lines of a log from byte `start` on, long ones shortened, without colours; ""
    without any.
    """
    try:
        with open(path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - 1000 * n_lines - 100_000))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    if n_lines > 0:
        lines = re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip().splitlines()[-n_lines:]
    else:
        lines = []
    return "\n".join(
        line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 1] + "…" for line in lines
    )


def reap_leftovers(folder: str | os.PathLike[str]) -> list[int]:
    """End the leftover processes of killed runs with logs anywhere below `folder`; return their
    pids. They are recognised by pid and start time, or by the random mark in their environment.
    Children of a living ttrl process keep running.
    """
    ended = []
    # Leftover processes may still rename folders.
    below = [Path(place, name) for place, _, names in os.walk(folder) for name in names]
    for record_path in sorted(path for path in below if path.name.endswith(RECORD_SUFFIX)):
        ended += _reap(record_path)
    return ended


def _reap(record_path: Path, *, even_of_living_owner: bool = False) -> list[int]:
    try:
        record = json.loads(record_path.read_text())
        mark = record["mark"]
        boot = record["boot"]
        owner = record["owner"]
        known = {(pid, start) for pid, start in record.get("processes", [])}
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read, so its processes may still run: %s", record_path, error)
        return []
    if (
        not even_of_living_owner
        and boot == process_guard.boot_id()
        and owner
        and process_guard.process_id(owner[0]) == tuple(owner)
    ):
        return []
    ended: list[int] = []
    if boot == process_guard.boot_id():
        found = _marked(mark, known)
        ended = [pid for pid, _ in found]
        if found:
            logger.warning(
                "ending the remaining processes of a killed run: %s (%s)", ended, record["program"]
            )
        left = process_guard.end_processes(lambda: _marked(mark, known), grace=3.0)
        if left:
            logger.warning(
                "processes %s could not be ended, not even by KILL", [pid for pid, _ in left]
            )
            return ended
    record_path.unlink(missing_ok=True)
    return ended


def _marked(mark: str, known: set[ProcessId]) -> list[ProcessId]:
    """Return the living processes of a record: known by pid and start time, or carrying its mark.
    Never ourselves.
    """
    needle = f"{MARK_VARIABLE}={mark}".encode()
    found = []
    for pid in process_guard.all_pids():
        process = process_guard.process_id(pid)
        if process is None or pid == os.getpid():
            continue
        if process not in known:
            try:
                if needle not in Path(f"/proc/{pid}/environ").read_bytes():
                    continue
            except OSError:  # another user's, or gone
                continue
        found.append(process)
    return found
