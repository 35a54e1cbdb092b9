"""The little process between ttrl and each process that it starts: it outlives a killed ttrl just
long enough to end the child.

    ttrl ── guard ── child (own session and process group) ── its descendants

ttrl holds the only write end of a pipe that the guard reads. When ttrl ends, however it ends, the
pipe is at its end, and the guard ends the child and all of its descendants. Four layers, for the
four ways in which something could stay behind:

- ttrl is killed: the guard sees the end of the pipe, or another parent;
- the guard is killed as well: the kernel kills the child (PR_SET_PDEATHSIG);
- a descendant left the process group, or its own parent died: the guard is its "subreaper", so that
  it stays below the guard in the tree of processes and is found there;
- ttrl, guard and child are all killed at once and a grandchild is not: its environment carries a
  random mark, and a record file next to the log names the mark and the processes, so that
  `ttrl.system.processes.reap_leftovers` finds it later.

Run as a script by `ttrl.system.processes`, with nothing but the standard library, so that it starts
in some 20 ms. Processes are signalled by pid *and* start time through a pidfd, never by name. Linux
only.
"""

import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

MARK_VARIABLE = "TTRL_PROCESS_MARK"
GRACE_WITHOUT_PARENT = 5.0  # seconds from TERM to KILL when nobody is left who could say how long
# Seconds from the end of a process's main thread to its exit code; far more than was ever seen.
_LAST_THREADS = 20.0
_LOOK_INTERVAL = 3.0  # seconds between looks at the parent and at new descendants
PDEATHSIG, DUMPABLE, CHILD_SUBREAPER, _NO_NEW_PRIVS = 1, 4, 36, 38  # of prctl
# System calls, with one number on all architectures.
_LANDLOCK_CREATE = 444
_LANDLOCK_RESTRICT = 446
SCOPES = 6  # the version of Landlock that can keep signals inside

ProcessId = tuple[int, int]
"""(pid, start time in clock ticks since boot): the pid by itself may belong to another process by
now.
"""


def boot_id(proc: Path = Path("/proc")) -> str:
    """Return a name of this boot of the kernel; start times of different boots cannot be compared.
    "" where unknown.
    """
    with contextlib.suppress(OSError):
        return (proc / "sys/kernel/random/boot_id").read_text().strip()
    # gVisor, in which many containers run, has none; it knows when it was started.
    with contextlib.suppress(OSError):
        return next(
            (
                line
                for line in (proc / "stat").read_text().splitlines()
                if line.startswith("btime ")
            ),
            "",
        )
    return ""


def process_stat(pid: int) -> tuple[str, int, int] | None:
    """Return (state letter, parent's pid, start time) of a process, or None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name before it may hold spaces and brackets.
    fields = text[text.rindex(b")") + 2 :].split()
    return fields[0].decode(), int(fields[1]), int(fields[19])


def process_id(pid: int) -> ProcessId | None:
    """Return the process with this pid, unless it is gone or a zombie, which holds nothing but its
    exit code.
    """
    stat = process_stat(pid)
    if stat is None or stat[0] in "ZX":
        return None
    return (pid, stat[2])


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(root: int) -> list[ProcessId]:
    """Return the living processes below `root` in the tree of processes, parents first; call again
    until there are none.
    """
    children: dict[int, list[int]] = {}
    stats = {pid: stat for pid in all_pids() if (stat := process_stat(pid)) is not None}
    for pid, (_, parent, _) in stats.items():
        children.setdefault(parent, []).append(pid)
    found = []
    queue = list(children.get(root, []))
    while queue:
        pid = queue.pop(0)
        queue += children.get(pid, [])
        if stats[pid][0] not in "ZX":
            found.append((pid, stats[pid][2]))
    return found


def signal_exactly(process: ProcessId, number: int) -> bool:
    """Signal exactly this process, never another that was given its pid meanwhile. Return False
    when it is gone or not ours.
    """
    pid, start = process
    descriptor = None
    try:
        # Pythons built for old kernels, and some sandboxes, have none.
        if hasattr(os, "pidfd_open"):
            try:
                descriptor = os.pidfd_open(pid)
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.EPERM):
                    return False
        stat = process_stat(pid)
        if stat is None or stat[2] != start:
            return False
        if descriptor is not None:
            signal.pidfd_send_signal(descriptor, number)
        else:
            os.kill(pid, number)
    except OSError:
        return False
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return True


def end_processes(
    find: Callable[[], Iterable[ProcessId]],
    grace: float,
    *,
    first: ProcessId | None = None,
    reap: Callable[[], None] = lambda: None,
    seconds: float = 20.0,
    pause: float = 0.05,
) -> list[ProcessId]:
    """Send TERM, and KILL after `grace` seconds, until `find()` comes back empty; return what is
    left `seconds` later. `first` is asked alone, so that it can end its own children in its own
    order. `reap` is called between looks, every `pause` seconds.
    """
    start = time.monotonic()
    asked = set()
    while True:
        reap()
        left = list(find())
        elapsed = time.monotonic() - start
        if not left or elapsed > grace + seconds:
            return left
        for process in left:
            if elapsed >= grace:
                signal_exactly(process, signal.SIGKILL)
            elif process not in asked and (first is None or first not in left or process == first):
                asked.add(process)
                signal_exactly(process, signal.SIGTERM)
        time.sleep(pause)


class _Guard:
    """One child, from its start to its end; talks to ttrl in JSON lines."""

    def __init__(self, commands: int, status: int) -> None:
        self.commands = commands
        self.status = status
        self.child = 0
        self.returncode: int | None = None
        self.known: list[ProcessId] = []

    def run(self) -> None:
        for descriptor in (self.commands, self.status):
            os.set_inheritable(descriptor, False)
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(wake_read, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        terminated = []
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Handlers, not SIG_IGN: an ignored signal would stay ignored in the child.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: terminated.append(True))

        first = self._read_line(b"")
        if first is None:
            return  # ttrl died before it said what to start
        line, buffer = first
        order = json.loads(line)
        self.record_path, self.record = Path(order["record"]), order["record_head"]
        parent = order["parent"]
        prctl(CHILD_SUBREAPER, 1)
        environment = order["env"]
        environment[MARK_VARIABLE] = self.record["mark"]
        # setproctitle (vLLM) would write over the environment, and so over the mark.
        environment.setdefault("SPT_NOENV", "1")
        self._write_record()
        try:
            self.child = _spawn(order["command"], environment, order["cwd"])
        except OSError as error:
            self.record_path.unlink(missing_ok=True)
            return self._say(error=error.errno, text=error.strerror)
        self._write_record()
        self._say(started=self.child)

        grace = GRACE_WITHOUT_PARENT
        last_look = time.monotonic()
        while self.returncode is None and not terminated:
            readable, _, _ = select.select([self.commands, wake_read], [], [], _LOOK_INTERVAL)
            if wake_read in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
            self._reap()
            if self.commands in readable:
                result = self._read_line(buffer)
                if result is not None:
                    grace = json.loads(result[0])["stop"]
                break
            # A forked copy of ttrl may hold the pipe open although ttrl is dead.
            if os.getppid() != parent:
                break
            if time.monotonic() - last_look >= _LOOK_INTERVAL:
                self._write_record()
                last_look = time.monotonic()
        self._end(grace)

    def _end(self, grace: float) -> None:
        """End what is left of child and descendants, and report the child's exit code when all are
        gone.
        """
        left = end_processes(
            lambda: descendants(os.getpid()), grace, first=process_id(self.child), reap=self._reap
        )
        # Its main thread can be gone, and its pid a zombie's, while other threads are still ending:
        # there is no exit code yet.
        deadline = time.monotonic() + _LAST_THREADS
        self._reap()
        while self.returncode is None and not left and time.monotonic() < deadline:
            time.sleep(0.01)
            self._reap()
        if not left:
            self.record_path.unlink(missing_ok=True)
        self._say(returncode=self.returncode, left=[pid for pid, _ in left])

    def _reap(self) -> None:
        """Collect ended children, adopted ones too; keep the child's exit code, negative for a
        signal.
        """
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.child:
                    self.returncode = os.waitstatus_to_exitcode(status)

    def _read_line(self, buffer: bytes) -> tuple[bytes, bytes] | None:
        """Return one line from ttrl and what came after it; None at the end of the pipe."""
        while b"\n" not in buffer:
            chunk = os.read(self.commands, 65536)
            if not chunk:
                return None
            buffer += chunk
        line, _, rest = buffer.partition(b"\n")
        return line, rest

    def _write_record(self) -> None:
        """Write who is there, when it changed. A full disk must not end the child, so what cannot
        be written is left out.
        """
        known = [*([own] if (own := process_id(os.getpid())) else []), *descendants(os.getpid())]
        if known == self.known:
            return
        with contextlib.suppress(OSError):
            temporary = self.record_path.with_name(self.record_path.name + ".new")
            temporary.write_text(json.dumps({**self.record, "processes": known}) + "\n")
            temporary.replace(self.record_path)
            self.known = known

    def _say(self, **message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self.status, json.dumps(message).encode() + b"\n")


def prctl(option: int, value: int) -> None:
    """Call prctl as far as possible: an old kernel or a sandbox may refuse, and the other layers
    remain.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 where there is none, or a sandbox refuses
    it.
    """
    return max(0, _system_call(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def leave_others_alone() -> bool:
    """Keep this process, and all that it starts, from reading the environment and memory of the
    processes that were there before, and from signalling them; return whether the kernel can
    (Landlock since Linux 6.12). Root with CAP_PERFMON still reads.
    """
    if landlock_version() < SCOPES:
        return False
    prctl(_NO_NEW_PRIVS, 1)
    attributes = (ctypes.c_uint64 * 3)(0, 0, 2)  # nothing of files and of the network; signals
    ruleset = _system_call(
        _LANDLOCK_CREATE, ctypes.byref(attributes), ctypes.c_size_t(24), ctypes.c_uint32(0)
    )
    if ruleset < 0:
        return False
    done = _system_call(_LANDLOCK_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0)) == 0
    os.close(ruleset)
    return done


def _system_call(number: int, *arguments: Any) -> int:
    return int(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *arguments))


def _spawn(command: list[str], environment: dict[str, str], cwd: str | None) -> int:
    """Start `command` in a session of its own; return its pid. Raises OSError when it cannot be
    executed.
    """
    error_read, error_write = os.pipe()  # closed by a successful exec
    guard = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            prctl(PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard:
                os._exit(127)
            # Python ignores them, and ignored signals stay ignored after exec.
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            if cwd is not None:
                os.chdir(cwd)
            os.execvpe(command[0], command, environment)
        except OSError as error:
            os.write(error_write, json.dumps([error.errno, error.strerror]).encode())
        finally:
            os._exit(127)
    os.close(error_write)
    with os.fdopen(error_read, "rb") as file:
        failure = file.read()
    if failure:
        os.waitpid(pid, 0)
        raise OSError(*json.loads(failure))
    return pid


if __name__ == "__main__":
    _Guard(int(sys.argv[1]), int(sys.argv[2])).run()
