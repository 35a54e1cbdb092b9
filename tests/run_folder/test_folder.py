"""The run folder: markers, the config, which checkpoint is the policy, and what pruning leaves."""

import contextlib
import errno
import json
import os
from itertools import product
from pathlib import Path

import pytest
import yaml
from support import os_calls
from support.facts import mark

from ttrl.errors import RunFolderError
from ttrl.facts import MetricsRow, PackFacts, TrainFacts
from ttrl.run_folder.folder import RunFolder, TaskList
from ttrl.system import files
from ttrl.system.files import digest
from ttrl.system.request_folder import RequestFolder


def trained(folder, number, yes=True):
    """What a training leaves: a checkpoint, a state and a marker, or the marker alone."""
    one = folder.iteration(number)
    if yes:
        for name in ("checkpoint", "state") if number else ("checkpoint",):
            (one.path / name).mkdir(parents=True)
            (one.path / name / "weights").write_text(str(number))
    mark(one, "train" if number else "prepare", [], {"seconds": 1.0, "trained": yes})


# Markers


def test_a_marker_says_what_was_said_and_what_was_written(tmp_path):
    one = RunFolder(tmp_path).iteration(7)
    assert one.path == tmp_path / "iterations/0007"
    assert not one.is_done("train")
    (one.path / "checkpoint/deep").mkdir(parents=True)
    for name in ("checkpoint/a", "checkpoint/deep/b", "train.jsonl"):
        (one.path / name).write_text(name)
    mark(one, "train", ["checkpoint", "train.jsonl", "absent"], {"seconds": 2.0})
    assert one.marker(TrainFacts) == TrainFacts(seconds=2.0)
    content = json.loads((one.path / "done/train.json").read_text())
    expected = {
        name: digest(one.path / name)
        for name in ("checkpoint/a", "checkpoint/deep/b", "train.jsonl")
    }
    assert content["files"] == expected
    assert content["phase"] == "train"
    known = {"checkpoint/a": "known from its writing", "elsewhere": "not written by this phase"}
    with pytest.raises(
        RunFolderError, match=r"train\.json already exists: another process .*same command again"
    ):
        mark(one, "train", ["checkpoint"], {}, known)
    assert one.files("train") == expected
    one.unmark("train")
    mark(one, "train", ["checkpoint"], {}, known)
    assert one.files("train") == {
        "checkpoint/a": "known from its writing",
        "checkpoint/deep/b": expected["checkpoint/deep/b"],
    }


def test_files_that_changed_after_their_marker(tmp_path):
    one = RunFolder(tmp_path).iteration(1)
    one.path.mkdir(parents=True)
    one.verify("pack")  # not done: nothing to verify
    (one.path / "packed").write_text("right")
    mark(one, "pack", ["packed"], {})
    one.verify("pack")
    (one.path / "packed").write_text("wrong")
    with pytest.raises(
        RunFolderError, match=r"packed was changed .* remove .*pack\.json to run that phase again"
    ):
        one.verify("pack")
    (one.path / "packed").unlink()
    with pytest.raises(RunFolderError, match="packed is gone"):
        one.verify("pack")


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "5", "{}", '{"facts": 1, "files": {}}', '{"facts": {}}', b"\xff\xfe"],
)
def test_a_damaged_marker(tmp_path, content):
    one = RunFolder(tmp_path).iteration(1)
    path = one.path / "done/pack.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(
        RunFolderError, match=r"pack\.json is damaged .*; remove it to run the phase again"
    ):
        one.marker(PackFacts)


def test_a_network_disk_that_is_stale_for_a_moment(tmp_path, monkeypatch):
    """It says ESTALE or EIO once and again, and attributes show what is no longer there."""
    folder = RunFolder(tmp_path)
    one, requests = folder.iteration(1), RequestFolder(tmp_path)
    (tmp_path / "iterations/0001").mkdir(parents=True)
    files.append_jsonl(tmp_path / "metrics.jsonl", {"iteration": 0})
    requests.put(requests.request(1), "{}")

    @contextlib.contextmanager
    def stale(event):
        """For two looks, in two ways; the third one finds the file."""
        with (
            os_calls.refused(event, errno.EIO, tmp_path, times=1),
            os_calls.refused(event, errno.ESTALE, tmp_path, times=1),
        ):
            yield

    with stale("os.link"):
        mark(one, "pack", [], {"rows": 3})
    with stale("open"):
        assert one.marker(PackFacts) == PackFacts(rows=3)
    with stale("open"):
        assert folder.metrics() == [MetricsRow(iteration=0)]
    before = digest(tmp_path / "metrics.jsonl")
    with stale("open"):
        assert digest(tmp_path / "metrics.jsonl") == before
    with (
        os_calls.refused("open", errno.ESTALE, tmp_path),  # for good
        pytest.raises(OSError, match="Stale"),
    ):
        one.marker(PackFacts)
    stat, fails = os.stat, [errno.ESTALE, errno.EIO]

    def failing(path, **options):
        if fails and str(tmp_path) in str(path):
            number = fails.pop()
            raise OSError(number, os.strerror(number))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", failing)  # no audit event announces it
    assert requests.next_request(1) == requests.request(1) and not fails


def test_a_file_that_goes_when_it_has_just_been_seen(tmp_path):
    folder = RunFolder(tmp_path)
    mark(folder.iteration(1), "pack", [], {})
    files.append_jsonl(tmp_path / "metrics.jsonl", {"iteration": 0})

    def vanish(path, *_):
        if str(tmp_path) in str(path):
            os.unlink(path)

    with os_calls.before("open", vanish):
        assert not folder.iteration(1).is_done("pack") and folder.metrics() == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV])
def test_disks_without_links_and_folders_on_another_disk(tmp_path, number):
    def refuse(source, target, *_):
        if number == errno.EPERM or Path(source).parent != Path(target).parent:
            raise OSError(number, os.strerror(number))

    folder = RunFolder(tmp_path)
    with os_calls.before("os.link", refuse), folder.locked():
        mark(folder.iteration(1), "pack", [], {"rows": 3})
        with pytest.raises(RunFolderError, match="already exists"):
            mark(folder.iteration(1), "pack", [], {})
    assert folder.iteration(1).marker(PackFacts) == PackFacts(rows=3)


# The config


BEFORE = {
    "run": "a",
    "iterations": 3,
    "stop_at": None,
    "keep_checkpoints": 3,
    "seq_len": 64,
    "seed": 0,
    "sampling": {"stop": ("x",)},
}


def test_the_same_config_again(tmp_path):
    folder = RunFolder(tmp_path)
    for _ in range(2):
        folder.remember_config(BEFORE)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == BEFORE | {
        "sampling": {"stop": ["x"]}
    }


def test_what_may_change_and_what_may_not(tmp_path):
    folder = RunFolder(tmp_path)
    folder.remember_config(BEFORE)
    now = BEFORE | {
        "run": "b",
        "iterations": 9,
        "stop_at": 0.5,
        "keep_checkpoints": 4,
        "seq_len": 128,
    }
    folder.remember_config(now)
    written = (tmp_path / "config.yaml").read_text()
    assert yaml.safe_load(written)["iterations"] == 9
    with pytest.raises(RunFolderError) as caught:
        folder.remember_config(now | {"seed": 1, "sampling": {}, "new": True, "iterations": 10})
    lines = str(caught.value).splitlines()
    changed = [
        "- new: (not set)",
        "+ new: true",
        "- sampling.stop: [x]",
        "+ sampling.stop: (not set)",
        "- seed: 0",
        "+ seed: 1",
    ]
    assert lines[1:7] == [f"  {line}" for line in changed]
    assert "choose another run folder" in lines[7]
    assert "allow_changes=['new', 'sampling.stop', 'seed']" in lines[7]
    assert (tmp_path / "config.yaml").read_text() == written  # a refused config leaves no trace


def test_a_setting_that_is_younger_than_the_run_folder_had_its_default_then(tmp_path):
    folder = RunFolder(tmp_path)
    folder.remember_config(BEFORE)
    defaults = {"loss": [], "clip": 0.2}
    now = BEFORE | {"loss": [], "clip": 0.2}
    folder.remember_config(now, defaults)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["clip"] == 0.2
    for younger, message in (
        ({"clip": 0.3}, r"- clip: 0\.2\n  \+ clip: 0\.3\n"),
        ({"loss": ["x"]}, r"- loss: \[\]\n  \+ loss: \[x\]\n"),
    ):
        with pytest.raises(RunFolderError, match=message):
            folder.remember_config(now | younger, defaults)
    with pytest.raises(RunFolderError, match=r"- needed: \(not set\)\n  \+ needed: 1\n"):
        folder.remember_config(now | {"needed": 1}, defaults)


def test_an_unset_validation_temperature_of_an_older_run_was_that_of_training(tmp_path):
    folder = RunFolder(tmp_path)
    folder.remember_config(BEFORE | {"temperature": 0.7, "validation_temperature": None})
    with pytest.raises(
        RunFolderError, match=r"- validation_temperature: 0\.7\n  \+ validation_temperature: 0\.0\n"
    ):
        folder.remember_config(BEFORE | {"temperature": 0.7, "validation_temperature": 0.0})
    for unset_or_known in (None, 0.7):
        folder.remember_config(
            BEFORE | {"temperature": 0.7, "validation_temperature": unset_or_known}
        )


@pytest.mark.parametrize("content", ["", "- a", "a: [", b"\xff\xfe\x00"])
def test_a_damaged_config(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
    with pytest.raises(RunFolderError, match=r"config\.yaml is damaged"):
        RunFolder(tmp_path).remember_config(BEFORE)


def test_other_tasks(tmp_path):
    folder = RunFolder(tmp_path)
    tasks = {"tasks": TaskList(3, "a"), "validation_tasks": TaskList(0, "b")}
    for _ in range(2):
        folder.remember_tasks(tasks)
    with pytest.raises(RunFolderError, match=r"\(tasks: 3 before, 4 now; ids"):
        folder.remember_tasks(tasks | {"tasks": TaskList(4, "c")})
    (tmp_path / "tasks.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"tasks\.json is damaged"):
        folder.remember_tasks(tasks)


# Which policy


def test_the_policy_of_an_iteration_that_trained_nothing_is_the_one_before(tmp_path):
    folder = RunFolder(tmp_path)
    for number, yes in enumerate([True, False, True, False, False, True]):
        trained(folder, number, yes)
    assert [folder.policy_version(n) for n in range(6)] == [0, 0, 2, 2, 2, 5]
    assert [folder.checkpoint(n).parent.name for n in range(6)] == [
        "0000",
        "0000",
        "0002",
        "0002",
        "0002",
        "0005",
    ]
    states = [folder.state(n) for n in range(6)]
    assert [state and state.parent.name for state in states] == [
        None,
        None,
        "0002",
        "0002",
        "0002",
        "0005",
    ]
    assert folder.policy_version(6) == 5  # in the middle of an iteration


def test_metrics_are_in_order_whatever_was_appended_when(tmp_path):
    rows = [{"iteration": n, "x": x} for n, x in [(0, 1), (2, 1), (1, 1), (2, 5)]]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + '{"iterat'
    )
    assert RunFolder(tmp_path).metrics_json() == [
        {"iteration": 0, "x": 1},
        {"iteration": 1, "x": 1},
        {"iteration": 2, "x": 5},
    ]


@pytest.mark.parametrize("row", ['{"x": 1}', '{"iteration": 1e400}', "[]"])
def test_metrics_without_an_iteration(row, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(row + "\n")
    with pytest.raises(RunFolderError, match=r"remove metrics\.jsonl"):
        RunFolder(tmp_path).metrics()


# Pruning


def has(folder, number, name):
    return (folder.iteration(number).path / name).exists()


def test_the_newest_and_the_best_are_kept(tmp_path):
    folder = RunFolder(tmp_path)
    for number in range(7):
        trained(folder, number)
    assert folder.prune(6, 3, best=2) == [0, 1, 2, 3]
    assert [n for n in range(7) if has(folder, n, "checkpoint")] == [2, 4, 5, 6]
    assert [n for n in range(7) if has(folder, n, "state")] == [4, 5, 6]
    assert folder.policy_version(3) == 3  # its marker stays
    assert folder.prune(6, 3, best=2) == []
    assert folder.prune(6, 3, best=5) == [2]


def test_without_a_best(tmp_path):
    folder = RunFolder(tmp_path)
    for number in range(5):
        trained(folder, number)
    folder.prune(4, 3, best=None)
    assert [n for n in range(5) if has(folder, n, "checkpoint")] == [2, 3, 4]


@pytest.mark.parametrize("keep", [3, 4])
@pytest.mark.parametrize("pattern", list(product([True, False], repeat=5)))
def test_the_last_two_iterations_can_always_be_trained_again(tmp_path, pattern, keep):
    """Pruned after each iteration, as the loop does, for every pattern of iterations that trained
    nothing.
    """
    folder = RunFolder(tmp_path)
    trained(folder, 0)
    for newest, yes in enumerate([*pattern], 1):
        trained(folder, newest, yes)
        best = folder.policy_version(max(0, newest - 4))
        kept_best = has(folder, best, "checkpoint")
        folder.prune(newest, keep, best=best)
        assert has(folder, best, "checkpoint") == kept_best
        for again in {newest, max(1, newest - 1)}:
            start, state = folder.checkpoint(again - 1), folder.state(again - 1)
            assert (start / "weights").is_file()
            assert state is None or (state / "weights").is_file()
        assert folder.checkpoint(newest).is_dir()
        there = [n for n in range(newest + 1) if has(folder, n, "checkpoint") and n != best]
        assert len(there) <= keep


def test_the_newest_policy_stays_whatever_is_asked_for(tmp_path):
    folder = RunFolder(tmp_path)
    for number in range(3):
        trained(folder, number)
    assert folder.remove(2, (), ()) == [0, 1]
    assert has(folder, 2, "checkpoint") and has(folder, 2, "state")


def test_a_pruning_that_is_cut_off_leaves_no_half_checkpoint(tmp_path):
    """Killed while files are removed: under its name a checkpoint is there as a whole or not at
    all, and the rest goes later.
    """
    folder = RunFolder(tmp_path)
    for number in range(4):
        trained(folder, number)

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    with os_calls.before("shutil.rmtree", killed), pytest.raises(Killed):
        folder.remove(3, [2], [2])
    for number in range(4):
        for name in ("checkpoint", "state"):
            path = folder.iteration(number).path / name
            assert not path.exists() or (path / "weights").is_file()
    assert list(tmp_path.rglob(".partial-*"))
    folder.clean()
    folder.remove(3, [2], [2])
    assert not list(tmp_path.rglob(".partial-*"))
    assert [n for n in range(4) if has(folder, n, "checkpoint")] == [2, 3]
