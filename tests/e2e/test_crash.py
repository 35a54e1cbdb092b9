"""The crash test of tools/ in short, and a disk that is really full: real trainer processes,
recorded rollouts, no vLLM.

Only this kills real trainers at random moments.
"""

import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import crash_test
import crash_test_run
import pytest

from ttrl.system.files import read_jsonl

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]
TOOLS = Path(__file__).parents[2] / "tools"


@pytest.mark.long
@pytest.mark.parametrize("kills", [1, 2])
def test_kills(tmp_path: Path, kills: int) -> None:
    """A run that is killed at a random moment, trainer and all, ends with the bits of one that is
    not.

    Long: only this kills real trainers. Power cuts at every write, with fake parts:
    tests/loop/test_no_lost_work.py; a rank that dies: tests/e2e/test_resident.py.
    """
    outcome = crash_test.crash_test(tmp_path, kills=kills, iterations=2, seed=1, twice=False)
    assert outcome.problems == [], outcome.table()
    assert len(outcome.kills) == kills
    assert outcome.requests["made"] >= outcome.requests["needed"] > 0


@pytest.mark.long
def test_two_kills_with_weights_out_of_memory(tmp_path: Path) -> None:
    """What no file has is trained again, to the same bits; what finished phases wrote is not
    touched for it.

    Long: only this kills a run that saves only every second checkpoint. test_kills kills runs that
    save all of them, and tests/loop/test_saving.py saves every few iterations on fake parts.
    """
    settings = {"weight_sync": "memory", "save_every": 2}
    outcome = crash_test.crash_test(
        tmp_path, kills=2, iterations=3, seed=5, twice=False, settings=settings
    )
    assert outcome.problems == [], outcome.table()
    written = [
        n for n in range(1, 4) if (tmp_path / f"undisturbed/iterations/{n:04d}/checkpoint").is_dir()
    ]
    assert len(outcome.kills) == 2 and written == [2, 3]


@pytest.mark.long
def test_killed_between_two_groups(tmp_path: Path) -> None:
    """The group that was finished is kept as it was; only the others are asked for again, and one
    of them is checked as well.

    Long: only this kills between two groups on purpose; test_kills does so at random moments.
    """
    harness = crash_test.Harness(tmp_path, 2, 3, {})
    harness.undisturbed(twice=False)
    run = tmp_path / "killed-001"
    kept = run / "iterations" / "0001" / "rollouts.partial.jsonl"
    process = harness.start(run)
    while not kept.exists() and process.poll() is None:
        time.sleep(0.005)
    crash_test.kill(process, "power", harness.chance)
    groups = [row["samples"][0]["messages"][0]["content"] for row in read_jsonl(kept)]
    assert 0 < len(groups) < crash_test_run.TASKS_PER_ITERATION
    harness.killed_run(1, 0)
    assert harness.outcome.problems == []
    asked = [row["prompt"] for row in read_jsonl(crash_test.requests_of(run))]
    assert [asked.count(prompt) for prompt in groups] == [1] * len(groups)
    checked = [
        "logprob_tokens" in row
        for row in read_jsonl(run / "iterations" / "0001" / "rollouts.jsonl")
    ]
    assert 1 <= sum(checked) <= 2


def test_says_what_differs() -> None:
    expected = {"a": [{"b": 1, "seconds": 2.0}], "server": {}}
    same = crash_test.without_times({"a": [{"b": 1, "seconds": 3.0}]})
    assert crash_test.first_difference(crash_test.without_times(expected), same) is None
    assert crash_test.first_difference(expected, {"a": [{"b": 2}]}) == ".a[0].b: 1 became 2"
    assert crash_test.first_difference([1], [1, 2]) == "all of it: [1] became [1, 2]"


# Run in a mount namespace of its own. The disk is filled once the first iteration is validated, and
# emptied afterwards.
FULL_DISK = textwrap.dedent(
    """
    import subprocess, sys, time
    from pathlib import Path

    disk, command = Path(sys.argv[1]), sys.argv[2:]
    marker = disk / "run/iterations/0001/done/pack.json"
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not marker.exists():
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.01)
    with open(disk / "filler", "wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError:
            pass
    _, said = run.communicate(timeout=600)
    assert run.returncode != 0, "the run did not notice that the disk is full"
    assert "No space left on device" in said and "free there); make room" in said, said
    before = {path: path.read_bytes() for path in disk.rglob("done/*.json")}
    assert marker in before
    (disk / "filler").unlink()
    subprocess.run(command, check=True, timeout=600)
    assert all(path.read_bytes() == content for path, content in before.items()), "a finished phase was done again"
    print("survived")
    """
)


@pytest.mark.long
def test_a_disk_that_is_full_in_mid_run(tmp_path: Path) -> None:
    """The run ends with what to do, and goes on once there is room.

    Long: only this fills a real file system under a run. Single writes that fail:
    tests/system/test_files.py.
    """
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare for a private small file system")
    disk, script, work = tmp_path / "disk", tmp_path / "script.py", tmp_path / "work"
    disk.mkdir()
    work.mkdir()
    script.write_text(FULL_DISK)
    harness = crash_test.Harness(work, 2, 0, {})
    command = [*harness.command(disk / "run"), "--record"]
    inside = f'mount -t tmpfs -o size=32m tmpfs "{disk}" || exit 77; exec "$@"'
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inside, "sh"]
    command = [*unshare, sys.executable, str(script), str(disk), *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip(f"no private file system here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert "survived" in done.stdout
