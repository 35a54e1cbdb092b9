"""The supervisor of each process that ttrl starts: a little process between the two. It outlives a
killed ttrl just long enough to end the child.

    ttrl ── guard ── child (own session and process group) ── its descendants

ttrl and the guard talk over a pair of sockets. When ttrl ends, however it ends, its socket closes,
and the guard ends the child and all of its descendants. Four layers, for the four ways in which
something could stay behind:

- ttrl is killed: the guard sees the end of the socket, or another parent;
- the guard is killed as well: the kernel kills the child (PR_SET_PDEATHSIG);
- a descendant left the process group, or its own parent died: the guard is its "subreaper", so that
  it stays below the guard in the tree of processes and is found there;
- ttrl, guard and child are all killed at once and a grandchild is not: its environment carries a
  random mark, and a record file next to the log names the mark and the processes, so that
  `ttrl.system.processes.reap_leftovers` finds it later.

Commands run below this file as a script (`ttrl.system.processes.ChildProcess`). It needs only the
standard library and starts in some 20 ms. Workers for graders are forks, and so are their guards
(`ttrl.rollouts.graders.worker`). Processes are signalled by pid *and* start time through a pidfd,
never by name. Linux only.
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
# Seconds from KILL to the end of a process, and from there to its exit code; never seen so long.
_LAST_SECONDS = 20.0
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
) -> list[ProcessId]:
    """Send TERM, and KILL after `grace` seconds, until `find()` comes back empty; return what is
    left `_LAST_SECONDS` later. `first` is asked alone, so that it can end its own children in its
    own order. `reap` is called between looks.
    """
    start = time.monotonic()
    pause = 0.002
    asked = set()
    while True:
        reap()
        left = list(find())
        elapsed = time.monotonic() - start
        if not left or elapsed > grace + _LAST_SECONDS:
            return left
        for process in left:
            if elapsed >= grace:
                signal_exactly(process, signal.SIGKILL)
            elif process not in asked and (first is None or first not in left or process == first):
                asked.add(process)
                signal_exactly(process, signal.SIGTERM)
        time.sleep(pause)
        pause = min(0.05, 2 * pause)


class Record:
    """The file with a child's mark and processes, for `ttrl.system.processes.reap_leftovers`.

    head: the rest of its content.
    """

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self._path = path
        self._head = head
        self._known: list[ProcessId] | None = None

    def write(self) -> None:
        """Write the living processes, if they changed. A full disk must not end the child, so a
        failed write is ignored.
        """
        own = process_id(os.getpid())
        known = [*([own] if own else []), *descendants(os.getpid())]
        if known == self._known:
            return
        with contextlib.suppress(OSError):
            temporary = self._path.with_name(self._path.name + ".new")
            temporary.write_text(json.dumps({**self._head, "processes": known}) + "\n")
            temporary.replace(self._path)
            self._known = known

    def remove(self) -> None:
        """Remove the file. Harmless when repeated."""
        self._path.unlink(missing_ok=True)


class Guard:
    """The guard of one child, from its start to its end. Runs in a process of its own.

    control: the descriptor of a socket to ttrl. A line with a number of seconds orders the child to
        be ended, with so much time between TERM and KILL; the end of the socket orders the same
        with `grace` seconds. Reports are lines of JSON.
    parent: the pid of the process above, whose end ends the child too.
    """

    def __init__(
        self,
        control: int,
        parent: int,
        *,
        grace: float = GRACE_WITHOUT_PARENT,
        record: Record | None = None,
    ) -> None:
        self._control = control
        self._parent = parent
        self._grace = grace
        self._record = record
        self._child = 0
        self._returncode: int | None = None
        self._terminated = False
        self._wake_read, self._wake_write = os.pipe()

    def start(self, enter: Callable[[], object]) -> int:
        """Fork the child, in a session of its own, and call `enter` in it; return its pid."""
        os.set_inheritable(self._control, False)
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        # Handlers, not SIG_IGN: an ignored signal would stay ignored in the child.
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGTERM, self._terminate)
        prctl(CHILD_SUBREAPER, 1)
        if self._record is not None:
            self._record.write()
        guard = os.getpid()
        self._child = os.fork()
        if self._child == 0:
            status = 1
            try:
                self._become_child(guard)
                enter()
                status = 0
            finally:
                os._exit(status)
        if self._record is not None:
            self._record.write()
        return self._child

    def run(self) -> None:
        """Wait for the child's end, or for an order to end it; end its descendants, and report."""
        last_look = time.monotonic()
        self._reap()
        while self._returncode is None and not self._terminated:
            readable, _, _ = select.select([self._control, self._wake_read], [], [], _LOOK_INTERVAL)
            if self._wake_read in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            self._reap()
            if self._control in readable:
                order = _read_line(self._control)
                if order:
                    self._grace = float(order)
                break
            # A forked copy of ttrl may hold the socket open although ttrl is dead.
            if os.getppid() != self._parent:
                break
            if self._record is not None and time.monotonic() - last_look >= _LOOK_INTERVAL:
                self._record.write()
                last_look = time.monotonic()
        self._end()

    def say(self, **report: Any) -> None:
        """Send a report to ttrl, if it still listens."""
        with contextlib.suppress(ConnectionError):
            os.write(self._control, json.dumps(report).encode() + b"\n")

    def _terminate(self, *_: object) -> None:
        self._terminated = True

    def _become_child(self, guard: int) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor in (self._control, self._wake_read, self._wake_write):
            os.close(descriptor)
        os.setsid()
        prctl(PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)

    def _end(self) -> None:
        """End the child and its descendants, and report the child's exit code when all are gone."""
        left = end_processes(
            lambda: descendants(os.getpid()),
            self._grace,
            first=process_id(self._child),
            reap=self._reap,
        )
        # Its main thread can be gone, and its pid a zombie's, while other threads are still ending:
        # there is no exit code yet.
        deadline = time.monotonic() + _LAST_SECONDS
        self._reap()
        while self._returncode is None and not left and time.monotonic() < deadline:
            time.sleep(0.01)
            self._reap()
        if not left and self._record is not None:
            self._record.remove()
        self.say(returncode=self._returncode, left=[pid for pid, _ in left])

    def _reap(self) -> None:
        """Collect ended children, adopted ones too; keep the child's exit code, negative for a
        signal.
        """
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._child:
                    self._returncode = os.waitstatus_to_exitcode(status)


def _read_line(control: int) -> bytes:
    """Return one line from ttrl; nothing at the end of the socket."""
    line = b""
    with contextlib.suppress(ConnectionError):
        while not line.endswith(b"\n"):
            chunk = os.read(control, 65536)
            if not chunk:
                return b""
            line += chunk
    return line


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


def main() -> None:
    """Guard the command that ttrl names through a socket: `process_guard.py SOCKET`, in the folder
    and with the environment of the child.
    """
    control = int(sys.argv[1])
    line = _read_line(control)
    if not line:
        return  # ttrl died before it named one
    order = json.loads(line)
    command = order["command"]
    record = Record(Path(order["record"]), order["head"])
    guard = Guard(control, order["parent"], record=record)
    error_read, error_write = os.pipe()  # closed by a successful exec

    def execute() -> None:
        # Python ignores them, and ignored signals stay ignored after exec.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(error_write, (error.strerror or "").encode())

    pid = guard.start(execute)
    os.close(error_write)
    # The child's alone, so that others see when it closes them.
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(null, standard)
    with os.fdopen(error_read) as file:
        failure = file.read()
    if failure:
        guard.say(failed=failure)
    else:
        guard.say(started=pid)
    guard.run()


if __name__ == "__main__":
    main()
