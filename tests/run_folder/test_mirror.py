"""A run folder's copy in an object store: what is uploaded in which order, what another machine
takes, what is refused.
"""

import contextlib
import json
import re
import socket
import threading
import time
from uuid import uuid4

import msgspec
import pytest
from msgspec.structs import replace
from support.facts import mark

from ttrl import TrainConfig
from ttrl.errors import ConfigError, RunFolderError, StorageError, UserError
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.lease import LEASE_FILES, FolderLease
from ttrl.run_folder.mirror import Mirror, mirrored, with_local_run
from ttrl.run_folder.owner import describe_process
from ttrl.run_folder.pruning import prune
from ttrl.system.files import append_jsonl, digest, write_json
from ttrl.system.mirror_store import MirrorStore


class QuickStore(MirrorStore):
    """One that waits for nothing long. `before["write"](key, content)` is called before each write,
    and may raise; so with "fetch" and "keys"."""

    first_pause, beat_seconds, last_wait_seconds, part_bytes = 0.01, 0.05, 60.0, 1000
    before = {}  # noqa: RUF012

    def write(self, key, content):
        self.before.get("write", lambda *_: None)(key, content)
        super().write(key, content)

    def swap(self, key, content, tag):
        self.before.get("write", lambda *_: None)(key, content)
        return super().swap(key, content, tag)

    def fetch(self, key, size, target):
        self.before.get("fetch", lambda *_: None)(key, size, target)
        super().fetch(key, size, target)

    def keys(self):
        self.before.get("keys", lambda *_: None)()
        return super().keys()


@pytest.fixture
def before():
    yield QuickStore.before
    QuickStore.before.clear()


@pytest.fixture
def address():
    return f"memory://{uuid4().hex}"


@pytest.fixture(params=["memory", "folder"])
def any_address(request, tmp_path, address):
    """For what the kind of the store may matter to."""
    return address if request.param == "memory" else (tmp_path / "store").as_uri()


class Machine:
    """A run folder on a machine of its own, and what a loop does to it."""

    def __init__(self, path, address, store_class=QuickStore, **owner):
        """owner: differences from this process."""
        lease = FolderLease(path, describe=lambda: replace(describe_process(), **owner))
        self.folder = RunFolder(path, lease)
        self.store_class = store_class
        self.config = TrainConfig(run=str(path), model="m", iterations=20, mirror=address)

    def __enter__(self):
        self._lease = self.folder.locked()
        self._lease.__enter__()
        self._mirror = mirrored(self.config, self.folder, store_class=self.store_class)
        try:
            return self._mirror.__enter__()
        except BaseException:
            self._lease.__exit__(None, None, None)
            raise

    def taking_over(self):
        return mirrored(self.config, self.folder, take_over=True, store_class=QuickStore)

    def __exit__(self, *error):
        self._mirror.__exit__(*error)
        self._lease.__exit__(None, None, None)

    def phase(self, number, name, *files, **facts):
        """Writes files such as "checkpoint/weights", then the marker."""
        one = self.folder.iteration(number)
        for file in files:
            (one.path / file).parent.mkdir(parents=True, exist_ok=True)
            (one.path / file).write_text(f"{file} of {number} by {self.folder.path.name}")
        mark(one, name, sorted({file.split("/")[0] for file in files}), facts)

    def iteration(self, number):
        """All of an iteration, as the loop does it, with the pruning after it."""
        if number == 0:
            self.phase(0, "prepare", "checkpoint/weights")
        else:
            self.phase(number, "rollouts", "rollouts.jsonl")
            self.phase(number, "pack", "packed.safetensors")
            self.phase(
                number,
                "train",
                "checkpoint/weights",
                "checkpoint/deep/config",
                "state/moments",
                trained=True,
            )
        self.phase(number, "validate", "validation.jsonl")
        append_jsonl(
            self.folder.path / "metrics.jsonl",
            {"iteration": number, "validation_reward": -abs(number - 2)},
        )
        prune(self.folder, self.folder.metrics(), self.config, number)

    def run(self, first, last):
        with self:
            if first == 0:
                write_json(self.folder.path / "tasks.json", {})
            for number in range(first, last + 1):
                self.iteration(number)

    def files(self):
        """All but the lock's."""
        found = (
            path.relative_to(self.folder.path)
            for path in self.folder.path.rglob("*")
            if path.is_file()
        )
        return {str(path) for path in found if path.parts[0] not in LEASE_FILES}


def test_the_mirror_is_the_run_folder(tmp_path, any_address):
    here = Machine(tmp_path / "here", any_address)
    here.run(0, 6)
    store = MirrorStore(any_address)
    assert store.keys().keys() - {"owner.json"} == here.files()  # pruned there too
    assert json.loads(store.read("owner.json"))["released"]  # nobody owns it any more
    for name in here.files():
        assert store.read(name) == (here.folder.path / name).read_bytes()
    kept = {int(key.split("/")[1]) for key in list(store.keys()) if "/checkpoint/" in key}
    assert kept == {2, 4, 5, 6}  # the best one and the newest three


def test_the_ends_of_logs_are_copied_under_the_machine_s_name(tmp_path, address):
    """Of a machine that vanished they are all that is left; the one that goes on leaves them alone,
    and takes none.
    """
    first = Machine(tmp_path / "first", address)
    second = Machine(tmp_path / "second", address, host="other")
    logs = first.folder.path / "logs"
    logs.mkdir(parents=True)
    (logs / "server.log").write_text("started, and then" + 2**20 * "!" + " it died")
    (logs / "loggers.json").write_text("{}")
    (logs / "gone.log").symlink_to("nowhere")
    first.run(0, 2)
    store, name = MirrorStore(address), f"logs/{socket.gethostname()}/server.log"
    assert store.read(name) == (2**20 * b"!" + b" it died")[8:]
    assert [key for key in list(store.keys()) if key.startswith("logs/")] == [name]
    with second:
        second.iteration(3)
        assert not (second.folder.path / "logs").exists()
        (second.folder.path / "logs").mkdir()
        (second.folder.path / "logs/server.log").write_text("fine")
        second.iteration(4)
    assert (
        store.read(name).endswith(b"! it died") and store.read("logs/other/server.log") == b"fine"
    )


def test_a_marker_is_uploaded_after_what_it_stands_for(tmp_path, address, before):
    order = []
    before["write"] = lambda key, content: order.append(key)
    Machine(tmp_path / "here", address).run(0, 2)
    for position, key in enumerate(order):
        if "/done/" in key:
            folder, phase = key.split("/done/")
            mine = {
                "train.json": "checkpoint/",
                "rollouts.json": "rollouts",
                "pack.json": "packed",
            }.get(phase, "?")
            assert not any(later.startswith(f"{folder}/{mine}") for later in order[position:])


def test_a_fresh_machine_takes_what_it_needs_and_goes_on(tmp_path, any_address):
    first, second = (
        Machine(tmp_path / "first", any_address),
        Machine(tmp_path / "second", any_address),
    )
    first.run(0, 6)
    with first:
        first.phase(7, "rollouts", "rollouts.jsonl")
        first.phase(7, "pack", "packed.safetensors")
    with second as mirror:
        taken = second.files()
        assert second.folder.metrics() == first.folder.metrics()
        assert second.folder.policy_version(7) == 6
        assert {name for name in taken if "/checkpoint/weights" in name} == {
            f"iterations/{number:04d}/checkpoint/weights" for number in (5, 6)
        }
        for name in taken:
            assert (second.folder.path / name).read_bytes() == (
                first.folder.path / name
            ).read_bytes()
        second.folder.iteration(7).verify("pack")
        second.phase(7, "train", "checkpoint/weights", "state/moments", trained=True)
        second.phase(7, "validate", "validation.jsonl")
        append_jsonl(
            second.folder.path / "metrics.jsonl", {"iteration": 7, "validation_reward": -5}
        )
        prune(second.folder, second.folder.metrics(), second.config, 7)
        mirror.bring_checkpoint(2)
        best = "iterations/0002/checkpoint/weights"
        assert (second.folder.path / best).read_bytes() == (first.folder.path / best).read_bytes()
    keys = MirrorStore(any_address).keys()
    # What is not here is not lost there.
    assert {int(key.split("/")[1]) for key in keys if "/checkpoint/" in key} == {2, 5, 6, 7}
    # And back: the first machine, which had no part in iteration 7, takes it and goes on.
    with first:
        assert first.folder.policy_version(8) == 7
        assert len(first.folder.metrics()) == 8


def test_killed_while_taking(tmp_path, address, before):
    """Whatever has a marker is there, at every moment; the next try takes the rest."""
    Machine(tmp_path / "first", address).run(0, 3)
    left = [0]

    class Killed(BaseException):
        pass

    def fetch(*_):
        if left[0] == 0:
            raise Killed
        left[0] -= 1

    second, tries = Machine(tmp_path / "second", address), 0
    before["fetch"] = fetch
    while True:
        left[0], tries = 2 + tries, tries + 1
        try:
            with second:
                break
        except Killed:
            for marker in second.folder.path.glob("iterations/*/done/*.json"):
                raise AssertionError(f"{marker} before all files are there") from None
    assert tries > 2
    assert second.folder.policy_version(9) == 3
    second.folder.iteration(3).verify("train")


def test_an_old_checkpoint_is_brought_as_a_whole_or_not_at_all(tmp_path, address, before, caplog):
    Machine(tmp_path / "first", address).run(0, 6)
    second, fails = Machine(tmp_path / "second", address), [True]

    def fetch(key, *_):
        if fails[0] and key.endswith("2/checkpoint/weights"):
            raise OSError("no route to host")

    checkpoint = tmp_path / "second/iterations/0002/checkpoint"
    with second as mirror:
        before["fetch"] = fetch
        mirror.bring_checkpoint(2)
        assert "no route to host" in caplog.text and not checkpoint.exists()
        fails[0] = False
        mirror.bring_checkpoint(2)
        assert sorted(path.name for path in checkpoint.rglob("*")) == ["config", "deep", "weights"]


def test_metrics_that_were_copied_while_they_were_written(tmp_path, address):
    first, second = Machine(tmp_path / "first", address), Machine(tmp_path / "second", address)
    first.run(0, 2)
    whole = (tmp_path / "first/metrics.jsonl").read_bytes()
    MirrorStore(address).write("metrics.jsonl", whole[:-9])
    with second:
        assert second.folder.metrics() == first.folder.metrics()[:-1]


def test_keys_that_lie_in_the_run_folder_stay_there(tmp_path, address):
    machine = Machine(tmp_path / "here", address)
    with machine:
        for name in ("server.key", ".env.json", "token"):
            (tmp_path / "here" / name).write_text("sesame")
        machine.iteration(0)
    keys = list(MirrorStore(address).keys())
    assert {key for key in keys if "/" not in key} == {"metrics.jsonl", "owner.json"}


def test_a_policy_that_is_not_there_as_a_whole_is_trained_again(tmp_path, any_address):
    first, second = (
        Machine(tmp_path / "first", any_address),
        Machine(tmp_path / "second", any_address),
    )
    first.run(0, 5)
    store = MirrorStore(any_address)
    store.remove(["iterations/0005/state/moments"])
    with second:
        folder = second.folder
        assert folder.policy_version(9) == 4
        assert [
            not folder.iteration(5).is_done(name)
            for name in ("rollouts", "pack", "train", "validate")
        ] == [0, 0, 1, 1]
        assert folder.metrics()[-1].iteration == 4
        assert "iterations/0005/done/train.json" not in set(store.keys())
        second.phase(5, "train", "checkpoint/weights", "state/moments", trained=True)
    with pytest.raises(RunFolderError, match="differ; the first difference"), first:
        pass


def test_what_is_needed_at_once_is_stored_before_its_phase_is_finished(
    tmp_path, any_address, before
):
    """An adapter that servers elsewhere wait for: once, again where it was pruned there, and by the
    run's owner alone.
    """
    written, key = [], "iterations/0001/checkpoint/adapter/weights"
    machine, store = Machine(tmp_path / "here", any_address), MirrorStore(any_address)
    adapter = machine.folder.iteration(1).path / "checkpoint" / "adapter"
    with machine as mirror:
        machine.iteration(0)
        before["write"] = lambda key, _: written.append(key)
        adapter.mkdir(parents=True)
        (adapter / "weights").write_bytes(b"123")
        found = mirror.publish(adapter)
        assert found == {key: (3, digest(adapter / "weights"))} == mirror.publish(adapter)
        assert store.read(key) == b"123" and store.read("iterations/0001/done/train.json") is None
        for number in range(1, 10):
            machine.iteration(number)
        deadline = time.monotonic() + 60
        while store.read(key) is not None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert written.count(key) == 1 and not adapter.exists()
        adapter.mkdir(parents=True)
        (adapter / "weights").write_bytes(b"123")
        assert mirror.publish(adapter) == found and store.read(key) == b"123"
        deadline = time.monotonic() + 60
        while mirror.lease.is_ours():
            assert time.monotonic() < deadline
            # Again: a folder has no atomic swap, so a heartbeat under way may overwrite it.
            store.write("owner.json", json.dumps(elsewhere()).encode())
        with pytest.raises(OSError, match="another process has taken the run over"):
            mirror.publish(adapter)


def test_what_is_published_while_it_is_followed_is_stored_once(tmp_path, address, before):
    """As an adapter is, whose phase has just been finished; and a store that fails once is asked
    again.
    """
    machine, written, refusals = Machine(tmp_path / "here", address), [], ["once"]

    def slowly(key, _):
        time.sleep(0.02)
        if "adapter" in key and refusals:
            raise OSError(refusals.pop())
        written.append(key)

    with machine as mirror:
        machine.iteration(0)
        before["write"] = slowly
        machine.phase(
            1,
            "train",
            "checkpoint/adapter/weights",
            "checkpoint/adapter/settings",
            "state/moments",
            trained=True,
        )
        read, fails = mirror.lease.other, ["once"]
        mirror.lease.other = lambda: (
            read() if not fails else (_ for _ in ()).throw(OSError(fails.pop()))
        )
        found = mirror.publish(machine.folder.iteration(1).path / "checkpoint" / "adapter")
    assert len(found) == 2 and all(written.count(key) == 1 for key in found)


def test_two_runs_in_one_place_are_refused(tmp_path, address):
    Machine(tmp_path / "first", address).run(0, 1)
    other = Machine(tmp_path / "other", None)
    other.run(0, 2)
    other.config.mirror = address
    with (
        pytest.raises(RunFolderError, match=r"differ; the first difference.*move the folder away"),
        other,
    ):
        pass
    assert json.loads(MirrorStore(address).read("owner.json"))["released"]


def test_a_mirror_without_a_whole_policy(tmp_path, address):
    Machine(tmp_path / "first", address).run(0, 0)
    MirrorStore(address).remove(["iterations/0000/checkpoint/weights"])
    with (
        pytest.raises(RunFolderError, match="no complete policy to continue from"),
        Machine(tmp_path / "second", address),
    ):
        pass


def test_a_damaged_file_there_is_not_taken(tmp_path, address):
    Machine(tmp_path / "first", address).run(0, 1)
    MirrorStore(address).write("iterations/0001/state/moments", b"other")
    second = Machine(tmp_path / "second", address)
    with pytest.raises(RunFolderError, match=r"state/moments has changed since its phase"), second:
        pass
    assert not list(second.folder.path.glob("iterations/*/done/*"))


def test_one_machine_at_a_time(tmp_path, any_address):
    first, second = (
        Machine(tmp_path / "first", any_address),
        Machine(tmp_path / "second", any_address),
    )
    with first:
        first.iteration(0)
        with pytest.raises(RunFolderError, match="in use by another process"), second:
            pass
    with second:
        assert second.folder.policy_version(1) == 0


def test_two_that_start_at_once(tmp_path, any_address, before):
    """One of them has it, whoever looked first; an earlier owner's record changes nothing about
    that.
    """
    for earlier in (False, True):
        first, second = (
            Machine(tmp_path / f"{name} {earlier}", any_address) for name in ("first", "second")
        )
        with contextlib.ExitStack() as stack:

            def write(key, content, second=second, stack=stack):
                before.clear()
                stack.enter_context(second)

            before["write"] = write  # between the first one's look and its writing
            with pytest.raises(RunFolderError, match="in use by another process"), first:
                pass
            second.iteration(2 * earlier)
            assert second.folder.lease.epoch == 1 + earlier
    # Each owner's number is above those before, wherever it runs.
    with Machine(tmp_path / "third", any_address) as mirror:
        assert mirror.lease.epoch == 3
        markers = sorted(
            (tmp_path / "third").rglob("done/*.json"),
            key=lambda path: json.loads(path.read_text())["finished"],
        )
        assert [json.loads(path.read_text())["epoch"] for path in markers] == [1, 1, 2, 2, 2, 2]


def test_answers_that_are_lost(tmp_path, any_address):
    """The store did what it was asked to, but nobody heard."""
    lost = []

    class LosingStore(QuickStore):
        longest_pause = 0.01

        def swap(self, key, content, tag):
            result = super().swap(key, content, tag)
            if lost.count(key) < 2:
                lost.append(key)
                raise OSError("connection reset")
            return result

    here = Machine(tmp_path / "here", any_address, LosingStore)
    here.run(0, 1)
    assert lost.count("iterations/0001/done/train.json") == 2 and lost.count("owner.json") == 2
    store = MirrorStore(any_address)
    assert store.keys().keys() - {"owner.json"} == here.files()
    assert json.loads(store.read("owner.json"))["released"]


def test_what_an_earlier_owner_left_late_gives_way(tmp_path, address, before):
    """What was under way to the store when another took over arrives there; never in place of a
    later owner's.
    """
    store, machine = MirrorStore(address), Machine(tmp_path / "here", address)
    with machine as mirror:
        machine.folder.lease.lift(4)
        machine.iteration(0)
        key, late = "iterations/0001/done/rollouts.json", b'{"epoch": 3, "facts": {}, "files": {}}'
        store.write(key, late)
        machine.phase(1, "rollouts", "rollouts.jsonl")
    assert mirror.status() is None
    assert store.read(key) == (machine.folder.path / key).read_bytes()
    for other in (late.replace(b"3", b"4"), late.replace(b"3", b"5")):
        store.write(key, other)
        mirror._remote.discard(key)
        mirror.lease.read()
        mirror.lease.sign()
        assert not mirror._try_pass() and store.read(key) == other
        assert re.search(
            r"has another iterations/0001/done/rollouts.json \(of epoch [45], and here of 4\)",
            mirror.status(),
        )


def test_a_machine_of_the_same_name_is_another(tmp_path, address):
    """A pod that is started again, while the one before may live on, cut off; but who holds the run
    folder of before knows.
    """
    first, second = Machine(tmp_path / "first", address), Machine(tmp_path / "second", address)
    first.run(0, 0)
    store = MirrorStore(address)
    left = json.loads(store.read("owner.json")) | {
        "boot": "an earlier one",
        "token": "of another process",
    }
    store.write(
        "owner.json", json.dumps({name: left[name] for name in left if name != "released"}).encode()
    )
    with pytest.raises(RunFolderError, match="without a sign of life"), second:
        pass
    with first:
        pass


def elsewhere():
    """An owner on another machine, as owner.json names it."""
    changes = {"host": "another", "boot": "another", "pid_namespace": "", "pid": 1, "token": "t"}
    return msgspec.to_builtins(describe_process()) | changes


def test_an_owner_on_another_machine(tmp_path, address):
    store, machine = MirrorStore(address), Machine(tmp_path / "here", address)
    owner = elsewhere()
    store.write("owner.json", json.dumps(owner).encode())
    with pytest.raises(RunFolderError, match=r"pid 1 on another.*without a sign of life"), machine:
        pass
    with machine.taking_over():
        assert json.loads(store.read("owner.json"))["pid"] != 1
    ended = threading.Event()

    def beat():
        number = 0
        while not ended.wait(0.01):
            number += 1
            store.write("owner.json", json.dumps(owner | {"beat": number}).encode())

    store.write("owner.json", json.dumps(owner).encode())
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with (
            pytest.raises(RunFolderError, match="in use"),
            machine.taking_over(),
        ):
            pass
    finally:
        ended.set()
        thread.join()


def test_who_was_taken_over_uploads_nothing_more(tmp_path, address, caplog):
    store, machine = MirrorStore(address), Machine(tmp_path / "here", address)
    with machine as mirror:
        store.write("owner.json", json.dumps(elsewhere()).encode())
        deadline = time.monotonic() + 60
        while mirror.lease.lost_to is None and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(
            RunFolderError,
            match=r"taken over in the mirror .*pid 1 on another.*; this one stops here",
        ):
            machine.iteration(0)
        assert "another process has taken over: pid 1 on another" in mirror.status()
    assert set(store.keys()) == {"owner.json"}
    assert json.loads(store.read("owner.json"))["host"] == "another"
    assert "this one stops writing there" in caplog.text


def test_who_slept_through_all_that_another_did_uploads_nothing(tmp_path, address):
    """The other one has let go of the run since."""
    first, second = Machine(tmp_path / "first", address), Machine(tmp_path / "second", address)
    first.run(0, 0)
    store = QuickStore(address)
    slept = Mirror(store, first.folder, first.config)
    slept.lease.owner = describe_process()
    slept.lease.read()
    slept.lease.sign()
    store.write("owner.json", json.dumps(elsewhere() | {"released": True}).encode())
    with second:
        second.iteration(1)
    before = store.keys()
    first.phase(1, "rollouts", "rollouts.jsonl")
    with slept.following():
        pass
    assert store.keys() == before
    with pytest.raises(RunFolderError, match="taken over in the mirror"):
        slept._marked()


def test_a_store_that_fails_never_stops_the_run(tmp_path, address, before, caplog):
    """It is said, and made up for as soon as it works again."""
    machine, failing, tried = Machine(tmp_path / "here", address), [True], threading.Event()

    def write(key, content):
        if failing[0] and key != "owner.json":
            tried.set()
            raise OSError("503 Slow Down")

    before["write"] = write
    with machine as mirror:
        machine.iteration(0)
        assert tried.wait(60)
        machine.iteration(1)
        assert "phases are missing there (503 Slow Down)" in mirror.status()
        failing[0] = False
    assert mirror.status() is None
    assert MirrorStore(address).keys().keys() - {"owner.json"} == machine.files()
    assert (
        "the mirror is behind: 503 Slow Down" in caplog.text and "up to date again" in caplog.text
    )


def test_a_store_that_stays_broken_is_said_at_the_end(tmp_path, address, before, caplog):
    class ImpatientStore(QuickStore):
        last_wait_seconds = 0.05

    def write(key, content):
        if key.startswith("iterations"):
            raise OSError("no route to host")

    before["write"] = write
    Machine(tmp_path / "here", address, ImpatientStore).run(0, 1)
    assert "6 finished phases are missing there (no route to host); the run folder" in caplog.text


def test_a_store_that_cannot_be_read_at_the_start(tmp_path, address, before):
    def keys():
        raise OSError("access denied")

    before["keys"] = keys
    with (
        pytest.raises(StorageError, match=r"access denied; fix it .*leave `mirror` out"),
        Machine(tmp_path / "a", address),
    ):
        pass


def test_links_are_stored_as_what_they_point_to(tmp_path, any_address):
    (tmp_path / "model").write_text("weights")
    machine = Machine(tmp_path / "here", any_address)
    with machine:
        folder = machine.folder.iteration(0).path / "checkpoint"
        folder.mkdir(parents=True)
        (folder / "weights").symlink_to(tmp_path / "model")
        mark(machine.folder.iteration(0), "prepare", ["checkpoint"], {})
    assert MirrorStore(any_address).read("iterations/0000/checkpoint/weights") == b"weights"


def test_large_files_are_moved_in_parts(tmp_path, any_address):
    content = bytes(range(256)) * 20
    (tmp_path / "large").write_bytes(content)
    store = QuickStore(any_address)
    store.write("a/b", tmp_path / "large")
    store.fetch("a/b", store.keys()["a/b"], tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == content
    store.write("empty", b"")
    store.fetch("empty", 0, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b""


def test_an_address_as_run(tmp_path):
    config = with_local_run(
        TrainConfig(run="s3://bucket/runs/letters/?region=x", model="m", iterations=1)
    )
    assert (config.run, config.mirror) == ("runs/letters", "s3://bucket/runs/letters/?region=x")
    assert with_local_run(TrainConfig(run="runs/x", model="m", iterations=1)).mirror is None
    with pytest.raises(ConfigError, match="leave mirror out, or give a folder as run"):
        with_local_run(TrainConfig(run="s3://bucket/x", model="m", iterations=1, mirror="y"))
    for secret in ("s3://b/x?secret_access_key=sesame", "s3://me:sesame@b/x"):
        with pytest.raises(ConfigError, match="carries credentials") as caught:
            with_local_run(TrainConfig(run="x", model="m", iterations=1, mirror=secret))
        assert "sesame" not in str(caught.value)
        # It would stand in config.yaml.
        with pytest.raises(ConfigError, match=r"cache\[1\] .* carries credentials") as caught:
            with_local_run(TrainConfig(run="x", model="m", iterations=1, cache=["kept", secret]))
        assert "sesame" not in str(caught.value)
    with pytest.raises(UserError, match="a mirror cannot be at"):
        MirrorStore("ftp://host/x")


def test_a_marker_of_any_size_is_not_read(tmp_path):
    """Who writes to a mirror could have a machine run out of memory."""

    class SmallStore(MirrorStore):
        most_read = 1000

    store = SmallStore(str(tmp_path))
    store.write("owner.json", b"x" * 1001)
    with pytest.raises(OSError, match="no run writes that much there: remove it"):
        store.read("owner.json")
    store.write("owner.json", b"x" * 1000)
    assert len(store.read("owner.json")) == 1000
