"""Children of every kind of misbehaviour, under a parent that is really killed. Nothing is timed:
waits only have deadlines.
"""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ttrl.errors import UserError
from ttrl.system import process_guard
from ttrl.system.processes import RECORD_SUFFIX, ChildProcess, reap_leftovers

linux_only = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="descendants are found through /proc"
)

# Writes its pid and its children's into a folder: one in the same group, one with a session of its
# own that ignores TERM, and one whose own parent is gone (a daemon). Then sleeps.
FAMILY = """
import os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
sleeper = "import time; time.sleep(600)"
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
a = subprocess.Popen([sys.executable, "-c", sleeper])
b = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True, stdout=subprocess.PIPE)
b.stdout.readline()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        (folder / "daemon.new").write_text(str(os.getpid())); (folder / "daemon.new").rename(folder / "daemon")
        time.sleep(600)
    os._exit(0)
os.wait()
while not (folder / "daemon").exists():
    time.sleep(0.01)
(folder / "pids.new").write_text(f"{os.getpid()} {a.pid} {b.pid} {(folder / 'daemon').read_text()}")
(folder / "pids.new").rename(folder / "pids")
time.sleep(600)
"""


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]


def family_pids(folder: Path) -> list[int]:
    wait_until((folder / "pids").exists, "the family")
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def kill_exactly(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def own_children():
    """Ends what a failing test would leave behind; by handle, of course."""
    started: list[int] = []
    yield started
    for pid in started:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "code, returncode",
    [
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
    ],
)
def test_exit_codes_are_told_faithfully(tmp_path, code, returncode):
    with ChildProcess(python(code), tmp_path / "child.log") as child:
        assert child.wait(60) == returncode
        assert child.poll() == child.returncode == returncode
    assert child.stop() == returncode
    assert not list(tmp_path.glob("*" + RECORD_SUFFIX))


def test_log_tail_shows_the_last_lines_of_this_child_alone(tmp_path):
    log = tmp_path / "logs" / "child.log"
    log.parent.mkdir()
    log.write_text("of an earlier start\n")
    with ChildProcess(
        python("import sys; print('a'); print('b' * 5000); print('c', file=sys.stderr)"), log
    ) as child:
        child.wait(60)
    lines = child.log_tail().splitlines()
    assert sorted(line[0] for line in lines) == ["a", "b", "c"] and max(map(len, lines)) == 400
    assert child.log_tail(1).count("\n") == 0
    assert log.read_text().startswith("of an earlier start\n")


def test_environment_folder_and_signals_of_the_child(tmp_path):
    code = """
    import json, os, signal, sys
    signals = [signal.getsignal(s) == signal.SIG_DFL for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)]
    own_session = os.getsid(0) == os.getpid()
    print(json.dumps([os.environ["SECRET"], os.getcwd(), own_session, signals, os.listdir("/proc/self/fd")]))
    """
    env = {**os.environ, "SECRET": "value-\udcff-é"}
    (tmp_path / "inner").mkdir()
    with ChildProcess(
        python(code), tmp_path / "child.log", env=env, cwd=tmp_path / "inner"
    ) as child:
        assert child.wait(60) == 0, child.log_tail()
    secret, folder, own_session, signals, descriptors = json.loads(child.log_tail())
    assert (secret, folder, own_session) == (env["SECRET"], str(tmp_path / "inner"), True)
    assert signals == [True, True, True]
    # Stdin, stdout, stderr, and the one that lists the folder: no pipe of ours leaks into the
    # child.
    assert len(descriptors) == 4


def test_a_command_that_cannot_be_started(tmp_path):
    child = ChildProcess([str(tmp_path / "no-such-program"), "x"], tmp_path / "child.log")
    with pytest.raises(UserError, match=r"no-such-program.*No such file"):
        child.start()
    assert child.poll() == 127 and child.stop() == 127
    assert not list(tmp_path.glob("*" + RECORD_SUFFIX))


def test_wait_times_out_and_stop_sends_term(tmp_path):
    code = """
    import signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    print("ready", flush=True)
    time.sleep(600)
    """
    with ChildProcess(python(code), tmp_path / "child.log") as child:
        wait_until(lambda: "ready" in child.log_tail(), "the handler")
        with pytest.raises(TimeoutError, match="is still running"):
            child.wait(0.05)
        assert child.poll() is None
        assert child.stop() == 7


@linux_only
def test_stop_returns_only_when_all_descendants_are_gone(tmp_path):
    child = ChildProcess(python(FAMILY, tmp_path), tmp_path / "child.log").start()
    pids = family_pids(tmp_path)
    assert pids[0] == child.pid and all(map(is_alive, pids))
    # Long enough to die of TERM on a busy machine.
    assert child.stop(timeout=2.0) == -signal.SIGTERM
    assert not any(map(is_alive, pids))


@linux_only
def test_descendants_end_when_the_child_ends_by_itself(tmp_path):
    child = ChildProcess(python(FAMILY, tmp_path), tmp_path / "child.log").start()
    pids = family_pids(tmp_path)
    kill_exactly(child.pid)
    assert child.wait(60) == -signal.SIGKILL
    assert not any(map(is_alive, pids))


OWNER = """
import pathlib, sys, time
from ttrl.system import process_guard
from ttrl.system.processes import ChildProcess
folder = pathlib.Path(sys.argv[1])
process_guard.__file__ = sys.argv[4]  # the guard is started as a file
child = ChildProcess([sys.executable, "-c", sys.argv[2], str(folder)], folder / "child.log").start()
(folder / "guard").write_text(str(child._guard.pid))
if sys.argv[3] == "fork":  # a forked copy keeps our end of the pipe open
    import os
    pid = os.fork()
    if pid:
        (folder / "fork").write_text(str(pid))
time.sleep(600)
"""


def hasty_guard(folder: Path) -> Path:
    """The guard's file, with pauses so short that tests need not wait."""
    text = Path(process_guard.__file__).read_text()
    for name, seconds in (("GRACE_WITHOUT_PARENT", 1.0), ("_LOOK_INTERVAL", 0.5)):
        text, count = re.subn(rf"(?m)^{name} = [\d.]+", f"{name} = {seconds}", text)
        assert count == 1, name
    path = folder / "hasty_guard.py"
    path.write_text(text)
    return path


def start_owner(
    folder: Path, own_children: list[int], how: str = ""
) -> tuple[subprocess.Popen, int, list[int]]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder), FAMILY, how, str(hasty_guard(folder))]
    )
    own_children.append(owner.pid)
    pids = family_pids(folder)
    wait_until((folder / "guard").exists, "the guard's pid")
    guard = int((folder / "guard").read_text())
    own_children += [guard, *pids]
    return owner, guard, pids


@linux_only
@pytest.mark.parametrize("how", ["", "fork"])
def test_nothing_outlives_a_killed_parent(tmp_path, own_children, how):
    owner, guard, pids = start_owner(tmp_path, own_children, how)
    if how == "fork":
        wait_until((tmp_path / "fork").exists, "the forked copy")
        own_children.append(int((tmp_path / "fork").read_text()))
    owner.kill()
    owner.wait()
    wait_until(lambda: not any(map(is_alive, [guard, *pids])), "the guard to end the family")
    assert not list(tmp_path.glob("*" + RECORD_SUFFIX))


@linux_only
def test_a_killed_guard_takes_the_child_along_and_the_parent_ends_the_rest(tmp_path):
    child = ChildProcess(python(FAMILY, tmp_path), tmp_path / "child.log").start()
    pids = family_pids(tmp_path)
    kill_exactly(child._guard.pid)
    assert child.wait(60) == -signal.SIGKILL
    assert not any(map(is_alive, pids))


@linux_only
def test_the_end_of_a_guard_is_told_by_its_pipe_even_before_it_can_be_waited_for(
    tmp_path, monkeypatch
):
    child = ChildProcess(python("import time; time.sleep(600)"), tmp_path / "child.log").start()
    # A dying process closes its pipes before it is a zombie.
    monkeypatch.setattr(child._guard, "poll", lambda: None)
    kill_exactly(child._guard.pid)
    assert child.wait(60) == -signal.SIGKILL
    assert not is_alive(child.pid)


@linux_only
def test_reap_leftovers_ends_what_outlived_parent_guard_and_child(tmp_path, own_children):
    owner, guard, pids = start_owner(tmp_path, own_children)
    kill_exactly(owner.pid, guard, pids[0])
    owner.wait()
    left = [pid for pid in pids[1:] if is_alive(pid)]
    assert left, "this test needs grandchildren that survive"
    bystander = subprocess.Popen(python("import time; time.sleep(600)"))
    own_children.append(bystander.pid)
    assert sorted(reap_leftovers(tmp_path.parent)) == sorted(left)
    assert not any(map(is_alive, pids)) and is_alive(bystander.pid)
    assert reap_leftovers(tmp_path.parent) == [] and not list(tmp_path.glob("*" + RECORD_SUFFIX))


def test_a_boot_without_a_name_of_its_own_goes_by_its_time(tmp_path):
    """As in gVisor. Without either, an owner that was killed here could not be told from one on
    another machine.
    """
    assert process_guard.boot_id(tmp_path) == ""
    (tmp_path / "stat").write_text("cpu  1 2 3\nctxt 5\nbtime 1700000000\nprocesses 7\n")
    assert process_guard.boot_id(tmp_path) == "btime 1700000000"


@linux_only
def test_reap_leftovers_leaves_living_runs_and_reused_pids_alone(tmp_path, own_children):
    bystander = subprocess.Popen(python("import time; time.sleep(600)"))
    own_children.append(bystander.pid)
    pid, start = process_guard.process_id(bystander.pid)
    boot = process_guard.boot_id()
    record = {
        "mark": "0" * 32,
        "boot": boot,
        "owner": [pid, start - 1],
        "program": "x",
        "processes": [[pid, start - 1]],
    }
    path = tmp_path / ("server.log" + RECORD_SUFFIX)
    # The pid lives, but started at another time: another process.
    path.write_text(json.dumps(record))
    assert reap_leftovers(tmp_path) == [] and not path.exists()
    path.write_text(json.dumps({**record, "processes": [[pid, start]], "boot": "another boot"}))
    assert reap_leftovers(tmp_path) == [] and not path.exists()
    path.write_text("{")
    assert reap_leftovers(tmp_path) == []
    path.unlink()
    assert is_alive(bystander.pid)
    path.write_text(json.dumps({**record, "processes": [[pid, start]]}))
    # The same record with the true start time.
    assert reap_leftovers(tmp_path) == [pid] and not is_alive(pid)

    with ChildProcess(python("import time; time.sleep(600)"), tmp_path / "child.log") as child:
        # Its owner, this test, is alive.
        assert reap_leftovers(tmp_path) == [] and child.poll() is None


def test_no_secret_on_a_command_line_or_in_a_file(tmp_path):
    env = {**os.environ, "VLLM_API_KEY": "the-secret-key"}
    with ChildProcess(
        python("import time; time.sleep(600)"), tmp_path / "child.log", env=env
    ) as child:
        lines = [
            " ".join(process.cmdline())
            for process in (psutil.Process(child.pid), psutil.Process(child._guard.pid))
        ]
        assert not [line for line in lines if "the-secret-key" in line]
        for path in tmp_path.rglob("*"):
            assert b"the-secret-key" not in path.read_bytes()


def test_the_guard_needs_the_standard_library_alone():
    code = (
        "import sys, ttrl.system.process_guard; print({'torch', 'psutil'} & {m.partition('.')[0] "
        "for m in sys.modules})"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "set()"
    )
    result = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import runpy; runpy.run_path({process_guard.__file__!r})",
        ],
        capture_output=True,
    )
    assert result.returncode == 0, result.stderr
