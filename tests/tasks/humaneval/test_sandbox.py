"""The sandbox: what a program may do, what it may not, and that nothing of it stays."""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ttrl.errors import GraderError, TaskError
from ttrl.system.memory_limit import memory_bytes
from ttrl.tasks.humaneval import sandbox
from ttrl.tasks.humaneval.sandbox import SandboxLimits, SandboxOutcome, run_sandboxed

WHY_NOT = sandbox.why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

LIMITS = SandboxLimits(seconds=100, cpu_seconds=50, memory=256 * 2**20)


@pytest.mark.parametrize(
    "source",
    [
        "import math, re, collections, hashlib, typing, random, heapq, datetime, decimal, json; "
        "assert math.pi > 3",
        "open('a', 'w').write('x' * 1000); assert open('/home/a').read() == 'x' * 1000",
        # The first process of the namespace hears nothing from inside.
        "import os; os.kill(1, 9); os.kill(1, 15)",
        "x = bytearray(100 * 2**20)",
        "print('x' * 10**6); import sys; sys.stderr.write('x' * 10**6)",
        "import threading; t = threading.Thread(target=int); t.start(); t.join()",
    ],
)
def test_what_a_program_may_do(source):
    assert run_sandboxed(source, LIMITS) == SandboxOutcome(True)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("import os; os._exit(0)", "ended by itself"),
        ("import os; os.kill(os.getpid(), 9)", "ended by a signal"),
        (
            "import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'{\"passed\": 1}')\n    "
            "except OSError: pass\nos._exit(0)",
            "ended by itself",
        ),
        (
            "class E(Exception):\n    def __str__(self): raise E\nraise E",
            "an exception without words",
        ),
        ("x = bytearray(10 * 2**30)", "MemoryError"),
        ("x = [0]\nwhile True: x += x", "MemoryError"),
        ("def f(): f()\nf()", "RecursionError"),
        (
            "import threading, time\nfor _ in range(50): threading.Thread(target=time.sleep, "
            "args=(1000,)).start()",
            "RuntimeError: can't start",
        ),
    ],
)
def test_what_ends_a_program(source, reason):
    outcome = run_sandboxed(source, LIMITS)
    assert not outcome.passed and outcome.reason.startswith(reason), outcome


# On x86_64: keyctl (whose session it is), userfaultfd, bpf, io_uring_setup, perf_event_open.
FORBIDDEN = [
    (250, "0, -3, 0"),
    (323, "1"),
    (321, "5, 0, 0"),
    (425, "1, ctypes.create_string_buffer(200)"),
    (298, "0, 0, -1, -1, 0"),
]
ATTEMPTS = [
    ("open('/etc/passwd')", "FileNotFoundError"),
    ("open('/home/../../etc/passwd')", "FileNotFoundError"),
    ("open('/proc/self/status')", "FileNotFoundError"),
    ("open('/dev/sda')", "FileNotFoundError"),
    ("open('/x', 'w')", "OSError 30"),
    ("open('/usr/lib/x', 'w')", "OSError 30"),
    ("open('/dev/x', 'w')", "OSError 30"),
    (f"os.listdir({os.path.dirname(__file__)!r})", "FileNotFoundError"),
    ("open('a', 'w').write('x' * 10**8)", "OSError 27"),
    ("os.remove('a'); [open(f'a{i}', 'w').write('x' * 10**6) for i in range(10)]", "OSError 28"),
    (
        "[os.remove(name) for name in os.listdir()]; [open(f'b{i}', 'w').close() for i in "
        "range(10**4)]",
        "OSError 28",
    ),
    ("f = [open('/dev/null') for _ in range(100)]", "OSError 24"),
    ("socket.create_connection(('127.0.0.1', 22), 2)", "OSError 101"),
    ("socket.create_connection(('1.1.1.1', 53), 2)", "OSError 101"),
    ("subprocess.run(['/bin/ls'])", "OSError 38"),
    ("assert libc.unshare(0x10000000) == 0", "AssertionError"),
    ("assert libc.mount(b't', b'/home', b'tmpfs', 0, None) == 0", "AssertionError"),
    ("assert libc.mount(None, b'/usr/lib', None, 32 | 4096, None) == 0", "AssertionError"),
    ("assert libc.shmget(0, 10**6, 0o1777) >= 0", "AssertionError"),
    ("assert libc.msgget(0, 0o1777) >= 0", "AssertionError"),
    ("assert libc.ptrace(16, 1, 0, 0) == 0", "AssertionError"),
    *(
        (f"assert libc.syscall({number}, {arguments}) >= 0", "AssertionError")
        for number, arguments in FORBIDDEN
    ),
    ("os.fork() or os._exit(0)", "OSError 38"),  # twice its memory
    ("os.memfd_create('m')", "OSError 38"),
    ("os.execv('/lib64/ld-linux-x86-64.so.2', ['ld'])", "OSError 38"),
    # TIPC, whose module the kernel would load.
    ("socket.socketpair(30, socket.SOCK_STREAM)", "OSError 38"),
    ("socket.socket(40)", "OSError 38"),  # vsock, by which a virtual machine talks to its host
    ("os.setuid(65534)", "OSError 22"),
    ("import numpy", "ModuleNotFoundError"),
    (
        "assert set(os.environ) - {'PATH', 'HOME', 'LANG', 'PYTHONHASHSEED', 'LC_CTYPE'}",
        "AssertionError",
    ),
]


def test_what_it_may_not():
    """All in one program, which is much faster than one for each."""
    lines = [
        "import ctypes, os, socket, subprocess",
        "libc, found = ctypes.CDLL(None), []",
        f"for attempt in {[a for a, _ in ATTEMPTS]!r}:",
    ]
    lines += [
        "    try: exec(attempt)",
        '    except BaseException as e: found.append(f\'{type(e).__name__} {getattr(e, "errno", '
        'None) or ""}\')',
    ]
    lines += ["    else: found.append('')", "raise Exception('|'.join(found))"]
    outcome = run_sandboxed("\n".join(lines), LIMITS)
    got = outcome.reason.removeprefix("Exception: ").split("|")
    assert len(got) == len(ATTEMPTS), outcome
    for (attempt, expected), end in zip(ATTEMPTS, got, strict=True):
        assert end.startswith(expected), (attempt, end)


def test_time():
    assert run_sandboxed(
        "while True: pass", SandboxLimits(seconds=100, cpu_seconds=1)
    ) == SandboxOutcome(False, "out of CPU time")
    assert run_sandboxed(
        "import time; time.sleep(1000)", SandboxLimits(seconds=0.3)
    ) == SandboxOutcome(False, "out of time")


@pytest.mark.parametrize(("share", "most"), [(0.05, 3), (0.2, 2), (0.3, 1)])
def test_programs_share_half_of_the_machines_memory(tmp_path, share, most):
    limits = SandboxLimits(seconds=100, memory=int(share * memory_bytes()[0]))
    # A path of its own, by which its processes are told from those of other tests.
    child = tmp_path / "child.py"
    child.write_text(sandbox.CHILD.read_text(encoding="utf-8"), encoding="utf-8")
    at_once = []
    with ThreadPoolExecutor(3) as threads:
        started = [
            threads.submit(run_sandboxed, "import time; time.sleep(0.5)", limits, child=child)
            for _ in range(3)
        ]
        while not all(one.done() for one in started):
            at_once.append(sum(is_first(pid) for pid in running(str(child))))
    assert [one.result() for one in started] == [SandboxOutcome(True)] * 3
    assert max(at_once) == most and not sandbox._given


def is_first(pid):
    """Whether a process is the one that has started the others of its sandbox."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1]) == os.getpid()
    except OSError:
        return False


def test_a_flood_of_answers_is_not_kept():
    """A program may find the pipe to its judge; what it writes there must not fill the judge's
    memory.
    """
    flood = (
        "import os\nwhile True:\n  for fd in range(3, 32):\n    try: os.write(fd, b'x' * "
        "65536)\n    except OSError: pass"
    )
    assert run_sandboxed(flood, LIMITS) == SandboxOutcome(
        False, "ended: it wrote to the judge's own channel"
    )


def test_a_bomb_of_threads_leaves_nothing(tmp_path):
    # A path of its own, by which its processes are told from those of other tests.
    child = tmp_path / "child.py"
    child.write_text(sandbox.CHILD.read_text(encoding="utf-8"), encoding="utf-8")
    bomb = (
        "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, "
        "args=(1000,)).start()\n"
    )
    bomb += "    except RuntimeError: pass"
    outcome = run_sandboxed(bomb, SandboxLimits(seconds=0.5), child=child)
    assert outcome == SandboxOutcome(False, "out of time")
    deadline = time.monotonic() + 60
    while running(str(child)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(str(child))


def test_a_program_ends_with_the_process_that_runs_it(tmp_path):
    child = tmp_path / "child.py"
    child.write_text(sandbox.CHILD.read_text(encoding="utf-8"), encoding="utf-8")
    script = (
        "import pathlib, sys; from ttrl.tasks.humaneval import sandbox; "
        "sandbox.run_sandboxed('import time; time.sleep(1000)', sandbox.SandboxLimits(seconds=900), "
        "child=pathlib.Path(sys.argv[1]))"
    )
    deadline = time.monotonic() + 60
    with subprocess.Popen([sys.executable, "-c", script, str(child)]) as process:
        # The script, the process that shuts itself in, the first of the namespace, the program.
        while len(running(str(child))) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(running(str(child))) == 4
        process.kill()
    while running(str(child)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(str(child))


def running(word):
    """Processes with this in their command lines, zombies left out."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    if word.encode() in file.read():
                        found.append(int(name))
            except OSError:
                continue
    return found


def test_a_machine_that_cannot_is_refused(monkeypatch, tmp_path):
    child = tmp_path / "child.py"
    text = sandbox.CHILD.read_text(encoding="utf-8")
    child.write_text(
        text.replace('"unshare", sum(_NEW.values())', '"unshare", 1')
    )  # the kernel: EINVAL, as where it is forbidden
    with pytest.raises(
        GraderError, match=r"does not allow it: namespaces of its own \(unshare\): Invalid argument"
    ):
        run_sandboxed("pass", child=child)
    assert "namespaces of its own" in sandbox.why_not(child)
    child.write_text("raise SystemExit(3)")
    for source in ("pass", "#" * 10**6):  # more than a pipe holds: nobody reads it
        with pytest.raises(GraderError, match="exit code 3"):
            run_sandboxed(source, child=child)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(GraderError, match="darwin has no namespaces"):
        run_sandboxed("pass")


def test_as_another_user_than_root():
    """Whoever runs the tests as root, as in a container, tries the other way too. Below a folder, a
    writable one is mounted.
    """
    if os.getuid() != 0:
        pytest.skip("needs root, to be somebody else")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        os.mkdir(f"{folder}/below")
        start = f"""
    _call("unshare", _NEW["mount"], what="")
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", "{folder}/below", "tmpfs", 0, "mode=777")
    os.setgid(1234)
    os.setuid(1234)
    _prctl(_DUMPABLE, 1)
    order = """
        program = sandbox.CHILD.read_text(encoding="utf-8").replace("    order = ", start, 1)
        source = (
            f"import os; assert os.getuid() == 0\ntry: open('{folder}/below/x', 'w')\nexcept "
            "OSError as e: assert e.errno == 30"
        )
        source += "\nelse: raise Exception('it wrote outside')"
        order = {
            "source": source,
            "passed": "x",
            "seconds": 9,
            "cpu_seconds": 9,
            "memory": 300000000,
            "processes": 2,
        }
        order |= {"disk": 100000, "folders": ["/lib", "/lib64", "/usr/lib", folder]}
        done = subprocess.run(
            [sys.executable, "-ISc", program],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            cwd="/",
            check=False,
        )
    assert done.stdout == '{"passed": "x"}', done


@pytest.mark.parametrize(
    "changes",
    [
        {"seconds": 0},
        {"seconds": float("nan")},
        {"memory": 0},
        {"processes": 1.5},
        {"disk": -1},
        {"cpu_seconds": 0},
    ],
)
def test_refusals(changes):
    with pytest.raises(TaskError, match=f"sandbox: {next(iter(changes))} is"):
        SandboxLimits(**changes)


KEYRING = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
import sandbox_child
call = ctypes.CDLL(None, use_errno=True).syscall
add_key, keyctl, session, search = (248, 250, -3, 10) if sandbox_child._HAS_FILTER else (217, 219, -3, 10)
if call(ctypes.c_long(add_key), b"user", b"ttrl-test", b"sesame", 6, session) < 0:
    sys.exit("no keys")
assert call(ctypes.c_long(keyctl), search, session, b"user", b"ttrl-test", 0) > 0

def stop(*_, **__):
    raise OSError(0, "far enough")

sandbox_child._call = stop
try:
    sandbox_child._shut_in(sandbox_child.Order("", "", [], 1.0, 1, 1, 1, 1))
except OSError:
    pass
print("found" if call(ctypes.c_long(keyctl), search, session, b"user", b"ttrl-test", 0) > 0 else "gone")
"""


def test_a_program_has_a_keyring_of_its_own():
    folder = os.path.dirname(sandbox.__file__)
    done = subprocess.run(
        [sys.executable, "-c", KEYRING, folder], capture_output=True, text=True, check=False
    )
    if "no keys" in done.stderr:
        pytest.skip("this machine has no session keyrings")
    assert done.stdout.split() == ["gone"], done.stderr
