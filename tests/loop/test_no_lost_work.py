"""Whole runs on fake parts (see conftest.py): power cut at any write, what is durable when, a full
disk, another machine.
"""

import errno
import json
import os
import shutil
from uuid import uuid4

import pytest
from support import os_calls
from support.world import Disk, PowerCut

from ttrl.errors import RunFolderError, ServerStartError, StorageError
from ttrl.run_folder.config_changes import history
from ttrl.run_folder.folder import RunFolder
from ttrl.system.files import atomic_folder, read_jsonl
from ttrl.system.mirror_store import MirrorStore

LOGS = {"train.jsonl", "trainer_logprobs.safetensors"}
RUN = {"iterations": 2, "tasks_per_iteration": 2}


def state_of(world):
    """Everything that must be the same, however the run came to it."""
    state = {}
    for path in sorted(world.run.glob("iterations/**/*")):
        if path.is_file() and path.suffix != ".json" and path.name != "train.jsonl":
            name = str(path.relative_to(world.run))
            if path.suffix == ".jsonl":
                rows = read_jsonl(path)
                state[name] = [{k: v for k, v in row.items() if "second" not in k} for row in rows]
            else:
                state[name] = path.read_bytes()
    return state


def samples_of(state):
    return {name: [(row["task_id"], row["reward"], row["weights_version"]) for row in rows]
            for name, rows in state.items() if name.endswith(".jsonl")}  # fmt: skip


# Threads see the cut as well.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_power_cut_at_many_writes(world, monkeypatch):
    """Cut off at many of the changes on the disk, the same command leads to the same end."""
    world.writes_reports = True
    with monkeypatch.context() as patch:
        disk = Disk(patch, None)
        world.train(**RUN)
        total = disk.count
    expected = state_of(world)
    shutil.rmtree(world.run)
    assert total > 60
    for last in range(5, total, total // 4):
        with monkeypatch.context() as patch, pytest.raises(PowerCut):
            Disk(patch, last)
            world.train(**RUN)
        world.train(**RUN)
        after = state_of(world)
        assert after.keys() == expected.keys()
        assert samples_of(after) == samples_of(expected)
        assert [row["iteration"] for row in world.rows()] == [0, 1, 2]
        assert not list(world.run.rglob(".partial-*"))
        assert not (world.run / "owner.json").exists()
        shutil.rmtree(world.run)


def test_what_a_marker_stands_for_is_durable_before_the_marker(world, monkeypatch):
    """At each rename the file's bytes were fsynced after their last change; at each marker, so were
    the folders of all names of its iteration that were made before it."""
    world.writes_reports = True
    synced, unsynced = {}, {}
    originals = {name: getattr(os, name) for name in ("replace", "link", "mkdir", "fsync")}
    problems, markers = [], []

    def fsync(descriptor):
        originals["fsync"](descriptor)
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_mtime_ns
        unsynced.pop(status.st_ino, None)

    def named(path):
        if "/iterations" in str(path) and ".partial-" not in str(path):
            unsynced.setdefault(os.stat(os.path.dirname(path)).st_ino, []).append(str(path))

    def naming(name, source, target):
        inside = "/iterations" in str(target)
        if inside and ".partial-" not in str(target):
            for path in [
                source,
                *(os.path.join(f, name) for f, _, names in os.walk(source) for name in names),
            ]:
                status = os.stat(path)
                if (
                    not os.path.islink(path)
                    and os.path.isfile(path)
                    and synced.get(status.st_ino) != status.st_mtime_ns
                ):
                    problems.append(f"{path} was renamed before it was fsynced")
        if inside and "/done/" in str(target):
            markers.append(str(target))
            # Another thread may be making the next iteration's folder at this moment.
            own = str(target).partition("/done/")[0]
            late = [name for names in unsynced.values() for name in names if name.startswith(own)]
            problems.extend(f"{name} before {target}" for name in late)
        originals[name](source, target)
        named(target)

    def replace(source, target):
        naming("replace", source, target)

    def link(source, target):
        naming("link", source, target)

    def mkdir(path, *arguments, **options):
        originals["mkdir"](path, *arguments, **options)
        if not options.get("dir_fd"):
            named(path)

    for name, function in (
        ("fsync", fsync),
        ("replace", replace),
        ("link", link),
        ("mkdir", mkdir),
    ):
        monkeypatch.setattr(os, name, function)
    world.train(**RUN)
    assert len(markers) == 2 + 2 * 4
    train = RunFolder(world.run).iteration(2).files("train")
    assert train.keys() == {
        "checkpoint/config.json",
        "checkpoint/version.txt",
        "state/state.txt",
        *LOGS,
    }
    assert problems == []


def test_a_full_disk_is_named_and_the_run_goes_on_afterwards(world):
    """The system refuses to write a checkpoint's bytes: what is needed, what is free, and nothing
    that was finished is lost.
    """
    world.writes_reports = True
    write_files = world.fake_files

    def full(output, number):
        if number == 2:
            with atomic_folder(output / "checkpoint") as temporary:
                (temporary / "config.json").write_text("{}")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_files(output, number)

    world.fake_files = full
    with pytest.raises(
        StorageError,
        match=r"iterations/0002/checkpoint: No space left .* free there\); make room",
    ):
        world.train(**RUN)
    world.fake_files = write_files
    assert not list(world.run.rglob(".partial-*"))
    world.events.clear()
    world.requests.clear()
    world.train(**RUN)
    assert [event for event in world.events if event.startswith("train")] == ["train 2"]
    # Only validations: of what was trained now, and of the policy before where the end came in the
    # middle of it.
    assert {prompt.split()[0] for _, prompt in world.requests} == {"held-out"}
    assert 2 in {version for version, _ in world.requests}


@pytest.fixture
def enormous(world):
    """A model whose checkpoints fit on no disk, by its config."""
    folder = shutil.copytree(world.model, world.folder / "enormous")
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] = 10**15
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_run_that_cannot_fit_is_not_begun(world, enormous):
    with pytest.raises(
        StorageError,
        match=r"the next 2 iterations need [\d,.]+ EB .*, but only [\d.]+ .B are free; make room",
    ):
        world.train(**RUN, model=enormous)
    assert world.events == []


def cut_at_the_end(run_folder, rows=None):
    """The last report is of the whole folder."""
    if rows is None:
        raise PowerCut
    return run_folder / "report.html"


def test_the_run_goes_on_on_another_machine(world):
    world.writes_reports = True
    address = f"memory://{uuid4().hex}"
    world.leave_report = cut_at_the_end
    with pytest.raises(PowerCut):
        world.train(**RUN, mirror=address)
    del world.leave_report
    world.run.rename(world.folder / "the other machine")
    world.events.clear()
    result = world.train(**(RUN | {"iterations": 3}), mirror=address)
    assert [event for event in world.events if "train" in event] == ["train 3"]
    assert [row["iteration"] for row in result.metrics] == [0, 1, 2, 3]
    assert result.best_checkpoint.joinpath("version.txt").is_file()
    keys = set(MirrorStore(address).keys())
    assert "iterations/0003/done/validate.json" in keys and "report.html" in keys
    assert json.loads(MirrorStore(address).read("owner.json"))["released"]


def test_a_changed_setting_is_taken_where_it_is_allowed(world):
    world.train(**RUN)
    with pytest.raises(RunFolderError, match=r"\+ training\.lr: 0\.5"):
        world.train(**(RUN | {"iterations": 3}), training={"lr": 0.5})
    changed = RUN | {"iterations": 3, "training": {"lr": 0.5}}
    world.train(allow_changes=["lr"], **changed)
    assert world.recipes[-1]["lr"] == 0.5
    (line,) = history(world.run)
    assert line.iteration == 3
    assert line.changes == {"iterations": [2, 3], "training.lr": ["not set", 0.5]}


def test_a_start_that_was_refused_binds_nobody(world, enormous):
    """The advice of the refusal, other settings, is taken by the same command on the same
    folder.
    """
    with pytest.raises(StorageError, match="adapters \\(lora_rank\\)"):
        world.train(iterations=1, model=enormous)
    world.train(iterations=1, training={"lora_rank": 2}, seed=3)
    assert RunFolder(world.run).config()["seed"] == 3
    with pytest.raises(RunFolderError, match=r"(?s)- seed: 3.*\+ seed: 4"):
        world.train(iterations=1, training={"lora_rank": 2}, seed=4)


def test_a_server_that_never_started_binds_nobody_either(world):
    before = world.server_class

    class Refusing(before):
        def serve(self, *_, **__):
            raise ServerStartError("the vLLM server ended while it started")

    world.server_class = Refusing
    with pytest.raises(ServerStartError):
        world.train(iterations=1)
    world.server_class = before
    world.train(iterations=1, seed=3)


def test_a_run_goes_on_where_finished_groups_cannot_be_stored(world, caplog):
    """They would only have to be sampled again if the run ended here."""

    def full(path, mode, flags):
        if str(path).endswith("rollouts.partial.jsonl") and "a" in (mode or ""):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with os_calls.before("open", full):
        world.train(**RUN)
    assert "finished groups could not be stored" in caplog.text
    assert "No space left" in caplog.text
    assert [row["iteration"] for row in world.rows()] == [0, 1, 2]
