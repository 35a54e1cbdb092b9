"""Supervise a child of ttrl from a small process between the two. It outlives a killed ttrl just
long enough to end the child.

    ttrl ── guard ── child (own session and process group) ── its descendants

ttrl and the guard talk over a pair of sockets. When ttrl ends, for any reason, its socket closes,
and the guard ends the child and all of its descendants. Four layers cover the four ways to stay
behind:

- ttrl is killed: the guard sees the end of the socket, or another parent;
- the guard is killed as well: the kernel kills the child (PR_SET_PDEATHSIG);
- a descendant left the process group, or its own parent died: the guard is its "subreaper", and so
  keeps it below itself in the process tree and finds it there;
- ttrl, guard and child are all killed at once and a grandchild is not: its environment carries a
  random mark. A record file next to the log names the mark and the processes, for a later
  `ttrl.system.processes.reap_leftovers`.

Commands run below this file as a script (`ttrl.system.processes.ChildProcess`). It needs only the
standard library and starts in some 20 ms. Workers for graders are forks, and so are their guards
(`ttrl.rollouts.graders.grader_worker`). Processes are signalled by pid *and* start time through a
pidfd, never by name. Linux only.
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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

MARK_VARIABLE = "TTRL_PROCESS_MARK"
GRACE_WITHOUT_PARENT = 5.0  # seconds from TERM to KILL with no ttrl left to give a number
# Seconds from KILL to the end of a process, and from there to its exit code; never observed to take
# so long.
_LAST_SECONDS = 20.0
_LOOK_INTERVAL = 3.0  # seconds between looks at the parent and at new descendants
PDEATHSIG, DUMPABLE, CHILD_SUBREAPER, _NO_NEW_PRIVS = 1, 4, 36, 38  # of prctl
# System call numbers, the same on all architectures.
_LANDLOCK_CREATE = 444
_LANDLOCK_RESTRICT = 446
SCOPES = 6  # the first version of Landlock able to confine signals

ProcessId = tuple[int, int]
"""(pid, start time in clock ticks since boot): the pid by itself may belong to another process by
now.
"""


def boot_id(proc: Path = Path("/proc")) -> str:
    """Return a name of this kernel boot; start times of different boots cannot be compared. "" if
    unknown.
    """
    with contextlib.suppress(OSError):
        return (proc / "sys/kernel/random/boot_id").read_text().strip()
    # gVisor, the base of many containers, has none; it knows its start time.
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
    """Return (state letter, parent's pid, start time) of a process, or None without one."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name before it may hold spaces and brackets.
    fields = text[text.rindex(b")") + 2 :].split()
    return fields[0].decode(), int(fields[1]), int(fields[19])


def process_id(pid: int) -> ProcessId | None:
    """Return the process with this pid, unless it is gone or a zombie with nothing but an exit
    code.
    """
    stat = process_stat(pid)
    if stat is None or stat[0] in "ZX":
        return None
    return (pid, stat[2])


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(root: int) -> list[ProcessId]:
    """Return the living processes below `root` in the process tree, parents first; call again until
    there are none.
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
    """Signal exactly this process, never a later one with its pid. Return False if it is gone or
    not ours.
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
    """Send TERM, and KILL after `grace` seconds, until `find()` comes back empty; return the
    processes left `_LAST_SECONDS` later. `first` gets its TERM before all others, to end its own
    children in its own order. `reap` is called between looks.
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

    def __init__(self, path: Path, head: Mapping[str, object]) -> None:
        self._path = path
        self._head = head
        self._known: list[ProcessId] | None = None

    def write(self) -> None:
        """Write the living processes, if they changed. Ignores a failed write, since a full disk
        must not end the child.
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
    """The guard of one child, from its start to its end. Runs in its own process.

    control: the descriptor of a socket to ttrl. A line with a number orders the end of the child,
    with this many seconds between TERM and KILL; the end of the socket orders the same with `grace`
    seconds. Reports are lines of JSON. parent: the pid of the process above; its end ends the child
    too.
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
        """Fork the child into its own session and call `enter` in it; return its pid."""
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
            # A forked copy of ttrl may hold the socket open after ttrl's death.
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
        # Its main thread can be gone, and its pid a zombie's, while other threads still end: there
        # is no exit code yet.
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
    """Call prctl if possible: an old kernel or a sandbox may refuse, and the other layers
    remain.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 without one, or if a sandbox refuses it."""
    return max(0, _system_call(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def leave_others_alone() -> bool:
    """Keep this process and its children from signalling earlier processes and from reading their
    environment and memory. Return whether the kernel can (Landlock since Linux 6.12). Root with
    CAP_PERFMON still reads.
    """
    if landlock_version() < SCOPES:
        return False
    prctl(_NO_NEW_PRIVS, 1)
    attributes = (ctypes.c_uint64 * 3)(0, 0, 2)  # no files and no network; signals
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
    """Guard the command from ttrl's socket: `process_guard.py SOCKET`, in the child's folder and
    environment.
    """
    control = int(sys.argv[1])
    line = _read_line(control)
    if not line:
        return  # ttrl died before naming one
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
    # Leaves these to the child only: others then notice when it closes them.
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
