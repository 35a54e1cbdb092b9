"""Lock this process into the sandbox, then run a program. Started by
`ttrl.tasks.humaneval.sandbox` as a script.

    ttrl ── this process (leaves root, makes namespaces, builds a root folder) ── first process of
    the namespace (waits, has the clock) ── the program

Only the standard library is used. If the kernel refuses anything, it is reported as
{"refused": …}, and nothing is run.
"""

import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
from typing import Any, NamedTuple, NoReturn

_NEW = {
    "user": 0x10000000,
    "mount": 0x00020000,
    "network": 0x40000000,
    "process": 0x20000000,
    "ipc": 0x08000000,
    "host name": 0x04000000,
}
_RDONLY = 1
_NOSUID = 2
_NODEV = 4
_REMOUNT = 32
_BIND = 4096
_REC = 16384
_PRIVATE = 1 << 18
_DETACH = 2
_PDEATHSIG = 1
_DUMPABLE = 4
_CAPBSET_DROP = 24
_NO_NEW_PRIVS = 38
_NOBODY = 65534
_LONGEST_REASON = 2000
_START_SECONDS = 30.0
"""Added to the program's own time, for making the namespaces on a busy machine."""
# By their numbers on x86_64, the calls of Python and its standard library: files, memory, time,
# signals, threads, pipes, waiting. No other exists for a program: neither bpf, userfaultfd,
# io_uring, keyctl, perf_event_open nor any future call, nor calls that take memory outside its
# limit: fork, vfork, execve, memfd_create.
_CALL_SPANS = (
    "0-40 42-52 54-55 60-63 72-100 102 104-124 127-128 130-132 137-138 140-151 157-158 160 "
    "186 200-204 213 217-218 221 228-235 247 257-271 273 275 280-288 290-293 295-296 302 306 "
    "309 316 318 326-328 332 334 424 434 436-437 439 441"
)
_CALLS = [
    call
    for first, _, last in (span.partition("-") for span in _CALL_SPANS.split())
    for call in range(int(first), int(last or first) + 1)
]
_SOCKETS = (41, 53)  # socket, socketpair
# Of the machine itself, and of the absent internet; no vsock, no netlink.
_FAMILIES = (1, 2, 10)
_CLONE, _THREAD = 56, 0x10000  # a thread, and no process
_HAS_FILTER = os.uname().machine == "x86_64"
_X86_64 = 0xC000003E
_X32_CALLS = 0x40000000


class Order(NamedTuple):
    """A program and its limits (`ttrl.tasks.humaneval.sandbox.SandboxLimits`)."""

    source: str
    passed: str
    """The answer of a program that ran to its end."""
    folders: list[str]
    seconds: float
    cpu_seconds: int
    memory: int
    processes: int
    disk: int


def main() -> NoReturn:
    """Read an order from stdin; answer on stdout."""
    parent = os.getppid()
    order = Order(**json.loads(sys.stdin.buffer.read()))
    signal.signal(signal.SIGALRM, lambda *_: os._exit(98))
    signal.setitimer(signal.ITIMER_REAL, order.seconds + _START_SECONDS)
    answer = os.dup(1)
    try:
        first = _shut_in(order)
    except OSError as error:
        _refuse(answer, error)
    if first == 0:
        _first_process(order, answer)
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.close(answer)
    _, status = os.waitpid(first, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _shut_in(order: Order) -> int:
    """Make the namespaces and the root folder; fork their first process. Return its pid, and 0 in
    it. Raises OSError.
    """
    # A keyring of its own (keyctl).
    _libc.syscall(ctypes.c_long(250 if os.uname().machine == "x86_64" else 219), 1, None)
    folders = {path: path for path in order.folders}
    place = "/tmp"
    if os.getuid() == 0:  # the kernel does not count root's processes, in spite of any limit
        folders = _stage(order.folders)
        place = "/tmp/root"
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        _prctl(_DUMPABLE, 1)  # or /proc/self is root's
    user = os.getuid()
    group = os.getgid()
    _call("unshare", sum(_NEW.values()), what="namespaces of its own (unshare)")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {user} 1"),
        ("gid_map", f"0 {group} 1"),
    ):
        _write(f"/proc/self/{name}", text)
    # Memory outside every limit of a process, and namespaces: the program would be root in them.
    for name in ("user/max_user_namespaces", "kernel/shmall", "kernel/msgmni"):
        _write(f"/proc/sys/{name}", "0")
    _build_root(place, folders, order.disk)
    first = os.fork()
    if first == 0:
        _prctl(_PDEATHSIG, signal.SIGKILL)
    return first


def _stage(folders: list[str]) -> dict[str, str]:
    """As root, make folders only we can reach (a Python below /root) reachable, only for us. Raises
    OSError.
    """
    _call("unshare", _NEW["mount"], what="a mount namespace (unshare)")
    _mount(None, "/", None, _REC | _PRIVATE)
    opened = {path: os.open(path, os.O_PATH) for path in folders}  # before they may be covered
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    os.mkdir("/tmp/root")
    staged = {}
    for number, (path, descriptor) in enumerate(opened.items()):
        staged[path] = path if os.path.islink(path) else f"/tmp/{number}"
        if not os.path.islink(path):
            os.mkdir(staged[path])
            _mount(f"/proc/self/fd/{descriptor}", staged[path], None, _BIND)
        os.close(descriptor)
    return staged


def _build_root(place: str, folders: dict[str, str], disk: int) -> None:
    """Mount the new root folder at `place` and make it ours; `folders`: names inside, and their
    present places.
    """
    _mount(None, "/", None, _REC | _PRIVATE)
    devices = {path: path for path in ("/dev/null", "/dev/urandom")}
    opened = {path: os.open(now, os.O_PATH) for path, now in (folders | devices).items()}
    _mount("tmpfs", place, "tmpfs", _NOSUID | _NODEV, "size=1m,nr_inodes=256,mode=755")
    for path in folders:
        if os.path.islink(path):
            os.symlink(os.readlink(path), place + path)
            continue
        os.makedirs(place + path, exist_ok=True)
        _mount(f"/proc/self/fd/{opened[path]}", place + path, None, _BIND | _REC)
        _only_read(place + path)
    os.mkdir(place + "/dev")
    for path in devices:
        os.close(os.open(place + path, os.O_CREAT | os.O_WRONLY))
        _mount(f"/proc/self/fd/{opened[path]}", place + path, None, _BIND)
    os.mkdir(place + "/home")
    _mount(
        "tmpfs", place + "/home", "tmpfs", _NOSUID | _NODEV, f"size={disk},nr_inodes=1000,mode=777"
    )
    _mount(None, place, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    for descriptor in opened.values():
        os.close(descriptor)
    os.chdir(place)
    _call("pivot_root", b".", b".", what="a root folder of its own (pivot_root)")
    _call("umount2", b".", _DETACH, what="leaving the old root folder (umount2)")
    os.chdir("/home")


def _first_process(order: Order, answer: int) -> NoReturn:
    """Wait for the program, then exit to end everything in the namespace. Nothing inside can
    signal this process.
    """
    try:
        _drop_capabilities()
        program = os.fork()
        if program == 0:
            _program(order, answer)
        os.close(answer)
        signal.setitimer(signal.ITIMER_REAL, order.seconds)
        signal.signal(signal.SIGALRM, lambda *_: os._exit(98))
        while True:
            pid, status = os.wait()
            if pid == program:
                code = os.waitstatus_to_exitcode(status)
                os._exit(97 if code == -signal.SIGXCPU else 96 if code < 0 else 0)
    except OSError as error:
        _refuse(answer, error)


def _refuse(answer: int, error: OSError) -> NoReturn:
    """Tell the parent about a failed step of shutting a program in, and end."""
    refused = f"{error.filename or 'a step'}: {error.strerror}"
    os.write(answer, json.dumps({"refused": refused}).encode())
    os._exit(1)


def _drop_capabilities() -> None:
    """Give up those of our own namespace, too: they could make read-only folders writable again."""
    for capability in range(64):
        try:
            _prctl(_CAPBSET_DROP, capability)
        except OSError:
            break  # the kernel knows no more of them
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _call(
        "capset",
        ctypes.byref(header),
        ctypes.byref((ctypes.c_uint32 * 6)()),
        what="giving capabilities up (capset)",
    )
    _prctl(_NO_NEW_PRIVS, 1)
    _prctl(_DUMPABLE, 0)


def _filter_calls() -> None:
    """Have the kernel answer ENOSYS to every system call but _CALLS. Only on x86_64: numbers differ
    by machine.
    """
    if not _HAS_FILTER:
        return
    # Of BPF; it gets the number of the call, the machine, an address and the arguments.
    load = 0x20
    equal = 0x15
    at_least = 0x35
    has = 0x45
    done = 0x06
    rules = [(load, 0, 0, 4), (equal, 1, 0, _X86_64), (done, 0, 0, 0x80000000), (load, 0, 0, 0)]
    rules += [(at_least, 0, 1, _X32_CALLS), (done, 0, 0, 0x00050000 | errno.ENOSYS)]
    for call in _CALLS:
        rules += [(equal, 0, 1, call), (done, 0, 0, 0x7FFF0000)]
    rules += [(equal, 0, 4, _CLONE), (load, 0, 0, 16), (has, 0, 1, _THREAD)]
    rules += [(done, 0, 0, 0x7FFF0000), (done, 0, 0, 0x00050000 | errno.ENOSYS)]
    rules += [
        (equal, 1, 0, _SOCKETS[0]),
        (equal, 0, 1 + 2 * len(_FAMILIES), _SOCKETS[1]),
        (load, 0, 0, 16),
    ]
    for family in _FAMILIES:
        rules += [(equal, 0, 1, family), (done, 0, 0, 0x7FFF0000)]
    rules.append((done, 0, 0, 0x00050000 | errno.ENOSYS))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *rule) for rule in rules))
    program = struct.pack("@HP", len(rules), ctypes.addressof(code))
    _call("prctl", 22, ctypes.c_ulong(2), program, 0, 0, what="a filter of system calls (seccomp)")


def _program(order: Order, answer: int) -> NoReturn:
    """Run the source without its output; report to `answer` whether it ran to its end."""
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    limits = {
        resource.RLIMIT_CPU: order.cpu_seconds,
        resource.RLIMIT_AS: order.memory // (1 if _HAS_FILTER else order.processes),
        resource.RLIMIT_NPROC: order.processes + 2,  # and the two above it
        resource.RLIMIT_FSIZE: order.disk,
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        # A second between the signal and the end.
        if kind == resource.RLIMIT_CPU:
            wanted = value + 1
        else:
            wanted = value
        if hard == resource.RLIM_INFINITY:
            hard = wanted
        else:
            hard = min(wanted, hard)
        resource.setrlimit(kind, (min(value, hard), hard))
    _filter_calls()
    report: dict[str, str] = {}
    try:
        program = compile(order.source, "program", "exec")
        # The sandbox confines the program.
        exec(program, {"__name__": "__main__"})  # noqa: S102 # nosec B102
        report = {"passed": order.passed}
    except BaseException as error:  # noqa: BLE001
        # Any exception of the program, even SystemExit, means that it did not finish.
        try:
            text = f"{type(error).__name__}: {error}"
        except BaseException:  # noqa: BLE001 - of its own __str__
            text = "an exception without words"
        report = {"failed": text[:_LONGEST_REASON]}
    os.write(answer, json.dumps(report).encode())
    os._exit(0)


_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any, what: str) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)


def _prctl(option: int, value: int) -> None:
    _call("prctl", option, ctypes.c_ulong(value), 0, 0, 0, what=f"prctl({option})")


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _call(
        "mount",
        texts[0],
        texts[1],
        texts[2],
        ctypes.c_ulong(flags),
        texts[3],
        what=f"mount {source or ''} on {target}",
    )


def _only_read(folder: str) -> None:
    """Make a mount and all mounts below it read-only, keeping existing restrictions
    (mount_setattr).
    """
    attributes = struct.pack("=4Q", _RDONLY | _NOSUID | _NODEV, 0, 0, 0)
    recursive = 0x8000
    arguments = (
        ctypes.c_long(442),
        ctypes.c_long(-1),
        folder.encode(),
        ctypes.c_long(recursive),
        attributes,
        ctypes.c_long(32),
    )
    _call("syscall", *arguments, what=f"mount_setattr (of Linux 5.12) on {folder}")


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None  # os.write names no file
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()
