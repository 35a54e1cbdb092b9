"""The lease of a run folder: one process on a machine, one machine on a shared file system, whatever
has died.
"""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import msgspec
import pytest
from support import os_calls
from support.facts import mark

from ttrl.errors import RunFolderError, StorageError
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.lease import FolderLease, only_here
from ttrl.run_folder.owner import describe_process, shown_words

HOLD = (
    "import sys, time\nfrom ttrl.run_folder.folder import RunFolder\n"
    "with RunFolder(sys.argv[1]).locked():\n    print('locked', flush=True)\n    time.sleep(600)\n"
)


def owner_of(folder):
    return json.loads((folder.path / "owner.json").read_text())


def left_by(folder, **changes):
    """owner.json as another process left it, or leaves it."""
    folder.path.mkdir(exist_ok=True)
    owner = msgspec.to_builtins(describe_process()) | changes
    (folder.path / "owner.json").write_text(json.dumps(owner))
    return owner


def quick(path, **settings):
    """One that need not be watched long."""
    return RunFolder(path, FolderLease(path, 0.06, **settings))


def shared(path):
    """One on a disk that other machines have, too."""
    mounts = path.with_name("mountinfo")
    mounts.write_text("22 1 0:45 / / rw - nfs4 server:/x rw\n")
    return quick(path, mounts=mounts)


ELSEWHERE = {"host": "another-host", "boot": "another-boot", "pid_namespace": "", "pid": 1}


def hold(path, *words):
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), *words], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "locked\n"
    return owner


def test_the_lock_names_its_owner_and_dies_with_it(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with hold(folder.path) as owner:
        try:
            words = (
                rf"run is in use by another process \(pid {owner.pid} on {socket.gethostname()}, "
                r"user .*: -c …\)"
            )
            with pytest.raises(RunFolderError, match=words), folder.locked():
                pass
        finally:
            os.kill(owner.pid, signal.SIGKILL)
    assert owner_of(folder)["pid"] == owner.pid  # it could not take its name away
    with folder.locked():
        assert owner_of(folder)["pid"] == os.getpid()
    assert not (folder.path / "owner.json").exists()


def test_a_child_that_outlives_the_owner_does_not_hold_the_lock(tmp_path):
    code = HOLD.replace(
        "    print",
        "    import subprocess; subprocess.Popen(['sleep', '30'], stdout=-3)\n    print",
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, start_new_session=True
    ) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        try:
            with RunFolder(tmp_path).locked():
                pass
        finally:
            os.killpg(owner.pid, signal.SIGKILL)


def test_the_lock_is_freed_by_an_error_and_can_be_taken_again(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(ZeroDivisionError), folder.locked():
        raise ZeroDivisionError
    with (
        folder.locked(),
        pytest.raises(RunFolderError, match=str(os.getpid())),
        RunFolder(tmp_path).locked(),
    ):
        pass


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "run").write_text("")
    for path in (tmp_path / "run", tmp_path / "run/below"):
        with (
            pytest.raises(RunFolderError, match="cannot be a run folder"),
            RunFolder(path).locked(),
        ):
            pass


def test_a_silent_owner_on_another_machine_is_only_taken_over_when_that_is_said(tmp_path):
    folder = shared(tmp_path / "run")
    left_by(folder, **ELSEWHERE)
    with (
        pytest.raises(
            RunFolderError, match=r"pid 1 on another-host.*without a sign of life.*TTRL_TAKE_OVER=1"
        ),
        folder.locked(),
    ):
        pass
    assert owner_of(folder)["host"] == "another-host"
    with folder.locked(take_over=True):
        assert owner_of(folder)["pid"] == os.getpid()


def test_a_living_owner_on_another_machine_is_never_taken_over(tmp_path):
    """Its heartbeat moves the file's time; whose clock that is does not matter."""
    folder = quick(tmp_path / "run")
    left_by(folder, **ELSEWHERE)
    ended = threading.Event()

    def beat():
        tick = 0
        while not ended.wait(0.01):
            tick += 1
            os.utime(folder.path / "owner.json", (tick, tick))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        words = r"in use by another process \(pid 1 on another-host"
        with pytest.raises(RunFolderError, match=words), folder.locked(take_over=True):
            pass
    finally:
        ended.set()
        thread.join()


def test_an_owner_from_before_this_machine_was_started_again_is_gone(tmp_path):
    """On a disk of its own: the name of a machine is also that of the pod that takes its place,
    while it may live on.
    """
    folder = shared(tmp_path / "run")
    left_by(folder, boot="an-earlier-boot", pid=os.getpid())
    with pytest.raises(RunFolderError, match="without a sign of life"), folder.locked():
        pass
    with quick(folder.path).locked():
        pass


def test_which_disks_are_of_this_machine_alone(tmp_path):
    mounts = f"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:45 / {tmp_path}/a\\040b rw - nfs4 server:/x rw
31 30 0:46 / {tmp_path}/a\\040b/c rw - tmpfs none rw
32 22 0:47 / {tmp_path}/d rw - fuse.sshfs x rw
""".replace("\\\\", "\\")
    assert not only_here(tmp_path, tmp_path / "mountinfo")  # there is no such list
    # Named on another system, whose letters were not UTF-8.
    stick = b"33 22 8:17 / /media/Gr\xf6\xdfe rw - vfat /dev/sdb1 rw\n"
    (tmp_path / "mountinfo").write_bytes(mounts.encode() + stick)
    (tmp_path / "link").symlink_to(tmp_path / "a b")
    here = {
        name: only_here(tmp_path / name, tmp_path / "mountinfo")
        for name in ("", "a b", "a b/run", "a b/c/run", "a", "d/run", "link/run")
    }
    assert [name for name, yes in here.items() if yes] == ["", "a b/c/run", "a"]


def test_without_locks_of_the_file_system_the_owner_file_decides(tmp_path):
    folder = quick(tmp_path / "run")
    with os_calls.refused("fcntl.flock", errno.ENOLCK):
        with (
            folder.locked(),
            pytest.raises(RunFolderError, match=f"pid {os.getpid()}"),
            quick(folder.path).locked(),
        ):
            pass
        left_by(folder, pid=2**22 + 1)  # above any pid: dead
        with folder.locked():
            pass


def test_who_was_taken_over_marks_nothing_as_finished_any_more(tmp_path):
    folder = quick(tmp_path / "run")
    with folder.locked():
        mark(folder.iteration(1), "pack", [], {})
        other = left_by(folder, **ELSEWHERE)
        with pytest.raises(RunFolderError, match=r"another process .*another-host.*took over"):
            mark(folder.iteration(1), "train", [], {})
    assert not folder.iteration(1).is_done("train")
    assert owner_of(folder) == other  # its name is not taken away


def test_who_slept_through_all_that_another_did_marks_nothing(tmp_path):
    """The other one has taken its name away again."""
    folder, other = (RunFolder(tmp_path / "run") for _ in range(2))
    with folder.locked():
        mark(folder.iteration(1), "pack", [], {})
        (folder.path / "owner.json").unlink()
        # As on a file system whose locks do not reach other machines.
        (folder.path / "lock").unlink()
        mark(folder.iteration(2), "pack", [], {})  # a name that is gone alone says nothing
        with other.locked():
            mark(other.iteration(1), "train", [], {"trained": True})
        with pytest.raises(
            RunFolderError,
            match=r"another process \(which has ended since\) took over.*same command again",
        ):
            mark(folder.iteration(2), "rollouts", [], {})


def test_the_heartbeat(tmp_path):
    folder = quick(tmp_path / "run")
    with folder.locked():
        path = folder.path / "owner.json"
        first, deadline = path.stat().st_mtime_ns, time.monotonic() + 30
        while path.stat().st_mtime_ns == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("run.py --api-key sesame --token=sesame --lr 1", "run.py --api-key … --token=… --lr …"),
        ("run.py -k sesame", "run.py -k …"),
        ("run.py -ksesame -k=sesame", "run.py -k… -k=…"),
        ("run.py --webhook=https://hooks.example/T00/sesame", "run.py --webhook=…"),
        ("run.py --webhook https://hooks.example/T00/sesame", "run.py --webhook …"),
        ("run.py sesame c2VzYW1l== x=sesame", "run.py …"),
        ("run.py --set server.api_key=sesame max_tokens=7 --check", "run.py --set … --check"),
        ("run.py --Sesame", "run.py --…"),
        ("run.py cache=s3://b/x?secret_access_key=sesame", "run.py …"),
        ("run.py --run https://sesame@host/x --run=runs/x", "run.py --run … --run=runs/x"),
        (
            "/a/gsm8k.py --run runs/x --seed 1 --model org/m-1.5 --preset 036 --tiny",
            "gsm8k.py --run runs/x --seed 1 --model org/m-1.5 --preset 036 --tiny",
        ),
        ("/bin/ttrl replay runs/x --grader sesame.py:f", "ttrl replay … --grader …"),
        ("/x/ttrl/cli/__main__.py proxy sesame --output runs/x", "ttrl proxy … --output …"),
    ],
)
def test_a_command_shows_no_secrets(words, shown):
    """Not by looking for secrets: only what is known to be harmless is shown."""
    assert " ".join(shown_words(words.split())) == shown


def test_a_lock_shows_no_secrets_of_its_command(tmp_path):
    with hold(tmp_path / "run", "--token=sesame", "--lr", "1") as owner:
        owner.kill()
    text = (tmp_path / "run" / "owner.json").read_text(encoding="utf-8")
    assert json.loads(text)["command"] == "-c … --token=… --lr …" and "sesame" not in text


@pytest.mark.parametrize("place", ["owners", "owners/1"])
def test_a_disk_that_takes_nothing_is_no_other_owner(tmp_path, place):
    """Full, read-only, or somebody else's."""
    with (
        os_calls.refused("os.mkdir", errno.ENOSPC, f"run/{place}"),
        pytest.raises(
            StorageError, match=r"could not write .*run/owners.*No space left on device; make room"
        ),
    ):
        RunFolder(tmp_path / "run").locked().__enter__()


def test_a_file_that_the_last_owner_left_open_on_nfs(tmp_path):
    """There, what is removed while somebody has it open stays under another name, and is busy,
    until that one has gone.
    """
    folder = RunFolder(tmp_path / "run")
    left = folder.path / "owners" / "1" / ".nfs0001"
    left.parent.mkdir(parents=True)
    left.touch()
    with os_calls.refused("os.remove", errno.EBUSY, left, times=3), folder.locked():
        assert folder.lease.epoch == 2 and not left.parent.exists()


def test_a_damaged_owner_file_names_nobody(tmp_path):
    folder = RunFolder(tmp_path)
    (tmp_path / "owner.json").write_text("{")
    with folder.locked():
        assert owner_of(folder)["pid"] == os.getpid()


def test_a_lock_that_takes_no_name_of_the_folder_holds_all_the_same(tmp_path):
    folder, unwritable = RunFolder(tmp_path), os.memfd_create("lock", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(unwritable, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    (tmp_path / "lock").symlink_to(f"/proc/self/fd/{unwritable}")
    with folder.locked():
        assert folder.lease.token == ""
        mark(folder.iteration(1), "pack", [], {})
    os.close(unwritable)
