"""Run untrusted Python programs, such as those written by a model.

On Linux, with namespaces of the program's own (user, mount, network, process, ipc), as no user,
without any capability:

- CPU time, wall time, memory, number of threads, sizes of files: limited; on x86_64 it has no other
  processes;
- no network: there is none in its namespace, not even the machine's own addresses;
- no files: it sees Python's standard library and the system's libraries, to read, and an empty
  folder in memory of its own;
- no processes of others; when the program ends, everything it has started ends with it.

If a machine cannot enforce all of this, nothing is run (`why_not` says so beforehand). It needs no
root; containers often forbid it, and need the permission to make user namespaces. It relies on the
kernel itself: there is no second wall, and a program in the same process as its tests can always
tell them lies. macOS and Windows have no such thing: refused.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ttrl.errors import GraderError, TaskError
from ttrl.system.memory_limit import memory_bytes

CHILD = Path(__file__).with_name("sandbox_child.py")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_LONGEST_ANSWER = 64 * 2**10
"""Limit on the bytes read from inside. An answer has 2 kB; a program could find the pipe and write
gigabytes into it.
"""
_memory = threading.Condition()
_given = list[int]()
"""Bytes of each running program; guarded by `_memory`."""
_ENDS = {96: "ended by a signal: a crash", 97: "out of CPU time", 98: "out of time"}


@dataclass(frozen=True)
class SandboxLimits:
    """The limits of a program. Raises TaskError for impossible ones."""

    seconds: float = 10.0
    """Wall time, seconds."""
    cpu_seconds: int = 5
    """CPU time of each process, seconds."""
    memory: int = 512 * 2**20
    """Bytes of address space, Python's own 30 MB included. All concurrent programs share half of
    this machine's memory.
    """
    processes: int = 4
    """Concurrent threads, the program's first included; on machines other than x86_64 also
    processes, with equal parts of `memory`.
    """
    disk: int = 4 * 2**20
    """Bytes of its in-memory folder, and of any one file."""

    def __post_init__(self) -> None:
        for name in ("cpu_seconds", "memory", "processes", "disk"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise TaskError(
                    f"sandbox: {name} is {getattr(self, name)!r}; give a whole number of at least 1"
                )
        if not 0 < self.seconds <= 3600:
            raise TaskError(
                f"sandbox: seconds is {self.seconds!r}; give more than 0 and at most 3600"
            )


@dataclass(frozen=True)
class SandboxOutcome:
    """passed: the program ran to its end without an exception. reason: of the failure; "" if it
    passed.
    """

    passed: bool
    reason: str = ""


def run_sandboxed(
    source: str, limits: SandboxLimits | None = None, *, child: Path = CHILD
) -> SandboxOutcome:
    """Run a Python program; return whether it ran to its end (`sys.exit(0)` does not count). Takes
    0.1 s and the program's time. child: the script that shuts itself in and runs the program.

    Raises GraderError if this machine cannot enforce all the limits; nothing was run then.
    """
    limits = limits or SandboxLimits()
    if not sys.platform.startswith("linux"):
        raise GraderError(
            f"sandbox: {sys.platform} has no namespaces; run models' programs on Linux"
        )
    with _share_of_memory(limits.memory):
        return _run(source, limits, child)


@contextlib.contextmanager
def _share_of_memory(size: int) -> Iterator[None]:
    """Wait until this process's running programs have no more than half of the machine's memory
    together.
    """
    most = memory_bytes()[0] / 2
    with _memory:
        _memory.wait_for(lambda: not _given or sum(_given) + size <= most)
        _given.append(size)
    try:
        yield
    finally:
        with _memory:
            _given.remove(size)
            _memory.notify_all()


def _run(source: str, limits: SandboxLimits, child: Path) -> SandboxOutcome:
    passed = secrets.token_hex(16)
    order = {
        "source": source,
        "passed": passed,
        "folders": _folders(),
        **dataclasses.asdict(limits),
    }
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(child)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"PATH": "", "HOME": "/home", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
        cwd="/",
        start_new_session=True,
    ) as done:
        try:
            written = _exchange(done, json.dumps(order).encode())
        finally:
            done.kill()  # if it still runs, and with it the kernel all the others
    if len(written) > _LONGEST_ANSWER:
        return SandboxOutcome(False, "ended: it wrote to the judge's own channel")
    try:
        answer = json.loads(written)
    except ValueError:
        answer = {}
    answer = answer if isinstance(answer, dict) else {}
    if done.returncode == 1 and "refused" in answer:
        raise GraderError(
            f"sandbox: this machine does not allow it: {answer['refused']}. ttrl runs models' "
            "programs only in a sandbox: allow user namespaces for processes (containers and some "
            "distributions forbid them by default), or use another machine"
        )
    if done.returncode != 0 and done.returncode not in _ENDS:
        raise GraderError(
            f"sandbox: it ended with exit code {done.returncode} before or during the program; "
            "check this machine's free memory"
        )
    if done.returncode == 0 and answer.get("passed") == passed:
        return SandboxOutcome(True)
    if isinstance(answer.get("failed"), str):
        return SandboxOutcome(False, answer["failed"])
    return SandboxOutcome(False, _ENDS.get(done.returncode, "ended by itself before its last line"))


def _exchange(process: "subprocess.Popen[bytes]", order: bytes) -> bytes:
    """Send the order; return the answer, once it ends or is too long."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended: the exit code says how
        process.stdin.write(order)  # read to its end before anything else is done
    with contextlib.suppress(BrokenPipeError):  # the unwritten rest is tried once more
        process.stdin.close()
    answer = process.stdout.read(_LONGEST_ANSWER + 1)
    if len(answer) <= _LONGEST_ANSWER:
        process.wait()
    return answer


def why_not(child: Path = CHILD) -> str | None:
    """Try to run a program; return the reason if it is not possible here, or None. child: see
    `run_sandboxed`.
    """
    try:
        outcome = run_sandboxed("pass", child=child)
    except GraderError as error:
        return str(error)
    if outcome.passed:
        return None
    return f"sandbox: an empty program failed here: {outcome.reason}"


def _folders() -> list[str]:
    """Return the program's readable folders, none twice and none inside another."""
    wanted = [path for path in _LIBRARIES if os.path.isdir(path)]
    base = {
        "installed_base": sys.base_prefix,
        "base": sys.base_prefix,
        "platbase": sys.base_exec_prefix,
    }
    for name in ("stdlib", "platstdlib"):
        path = sysconfig.get_path(name, vars=base)
        if not any(
            path == folder or path.startswith(os.path.realpath(folder) + "/") for folder in wanted
        ):
            wanted.append(path)
    return wanted
