"""A checkpoint in the memory of machines: once for all replicas there, the same bytes, and nothing
of it is left.
"""

import os
import shutil
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

pytest.importorskip("ray")
from ttrl.cluster import broadcast, replicas
from ttrl.cluster.broadcast import Broadcast, Staged
from ttrl.server.connection import JoinedServer


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "0001" / "checkpoint"
    folder.mkdir(parents=True)
    for number in (1, 2):
        (folder / f"model-{number}.safetensors").write_bytes(os.urandom(2_500_000 + number))
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def store(monkeypatch):
    """Ray's, as this process's memory."""
    node = {
        "Alive": True,
        "NodeManagerAddress": "10.0.0.1",
        "Resources": {"object_store_memory": 1e9, "CPU": 1.0},
    }
    monkeypatch.setattr(broadcast, "_PIECE", 2**20)
    monkeypatch.setattr(broadcast.ray, "put", lambda piece: piece)
    monkeypatch.setattr(broadcast.ray, "get", lambda piece, timeout: piece)
    monkeypatch.setattr(broadcast.ray, "nodes", lambda: [node])
    return node["Resources"]


@pytest.fixture
def sent(checkpoint, store):
    """The checkpoint in the store."""
    return Broadcast().send(checkpoint)


def files(memory):
    return sorted(
        path.name for path in memory.rglob("*") if not path.is_dir() and path.name != "lock"
    )


def test_replicas_of_a_machine_share_a_copy(checkpoint, sent, tmp_path):
    (memory := tmp_path / "shm").mkdir()
    replicas_here = [Staged(str(memory)), Staged(str(memory))]
    folders = [one.put(sent, 1.0) for one in replicas_here]
    [folder] = set(folders)
    assert {path.name: path.read_bytes() for path in folder.glob("model*")} == {
        path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")
    }
    replicas_here[0].drop(sent.name)
    assert (folder / "model-1.safetensors").exists()
    replicas_here[1].drop("another's")  # that of an earlier sync, which is late
    assert folder.exists()
    replicas_here[1].drop(sent.name)
    assert files(memory) == [] and not folder.exists()


def test_what_a_replica_that_is_gone_left_is_removed(checkpoint, sent, tmp_path):
    (memory := tmp_path / "shm").mkdir()
    gone = Staged(str(memory))
    gone.put(sent, 1.0)
    other = Staged(str(memory))
    other.drop()
    assert len(files(memory)) == 2
    gone._reading[sent.name].close()  # as its process's end does
    other.drop()
    assert files(memory) == []


def test_memory_that_is_full_keeps_nothing(checkpoint, sent, tmp_path, monkeypatch):
    (memory := tmp_path / "shm").mkdir()
    with pytest.raises(OSError, match=r"the weights need .*, and .*ttrl-\d+ has room for half of "):
        Staged(str(memory)).put(sent._replace(size=2**50), 1.0)

    def full(piece, timeout):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(broadcast.ray, "get", full)
    with pytest.raises(OSError, match="No space left"):
        Staged(str(memory)).put(sent, 1.0)
    assert files(memory) == []


def test_a_folder_that_others_can_write_is_refused(checkpoint, sent, tmp_path):
    (pool := tmp_path / f"ttrl-{os.geteuid()}").mkdir()
    pool.chmod(0o777)
    with pytest.raises(OSError, match=r"other users can access .*; remove it"):
        Staged(str(tmp_path)).put(sent, 1.0)


def test_the_store_is_emptied_after_the_last_reader(checkpoint, store):
    lead = Broadcast()
    first, second = lead.send(checkpoint), lead.send(checkpoint)
    assert first is second and first.size == 5_000_003
    assert (
        b"".join(first.pieces["model-2.safetensors"])
        == (checkpoint / "model-2.safetensors").read_bytes()
    )
    lead.has_read(first.name)
    assert lead._sent is first
    lead.has_read(first.name)
    assert lead._sent is None
    assert lead.send(checkpoint) is None  # who comes later reads the files
    os.utime(checkpoint / "model-2.safetensors", ns=(1, 1))  # the iteration was done again
    again = lead.send(checkpoint)
    lead.has_read(first.name)  # late: of other weights
    assert again is not None and again.name != first.name and lead._sent is again


def test_weights_beyond_the_store_are_read_from_files(checkpoint, store, caplog):
    store["object_store_memory"] = 9e6
    lead = Broadcast()
    assert lead.send(checkpoint) is None and lead.send(checkpoint) is None
    assert (
        caplog.text.count(
            "Ray's object store on 10.0.0.1 has 9 MiB (ray start --object-store-memory=BYTES)"
        )
        == 1
    )


server = JoinedServer("replica-0", served_model_name="policy", dtype="float32", api_key="k")


class Actor:
    """Does what it is told at once."""

    def __init__(self, folder):
        self.folder, self.dropped = folder, []
        self.stage, self.drop = (
            types.SimpleNamespace(remote=call) for call in (self._stage, self.dropped.append)
        )

    def _stage(self, sent, seconds):
        return self.folder


def test_a_replica_reads_what_was_brought_until_the_sync_is_over(
    checkpoint, store, monkeypatch, caplog
):
    def answer(asked, timeout):
        if isinstance(asked, Exception):
            raise asked
        return asked

    monkeypatch.setattr(replicas.ray, "get", answer)
    lead, actor = Broadcast(), Actor(Path("/memory"))
    link = replicas.Link(0, actor, 0.0, lead)
    with link.bring(server, checkpoint) as places:
        assert places == [Path("/memory"), checkpoint]
        name = lead._sent.name
    assert actor.dropped == [name] and lead._sent is None
    with link.bring(server, checkpoint) as places:
        assert places == [checkpoint]  # it comes later
    other = shutil.copytree(checkpoint, checkpoint.parent / "other")
    actor.folder = OSError("its weights take 9 GiB")
    with link.bring(server, other) as places:
        assert places == [other] and "reads" in caplog.text and "9 GiB" in caplog.text
    assert len(actor.dropped) == 2 and lead._sent is None  # also what may yet arrive
    (third := checkpoint.parent / "third").mkdir()
    shutil.copy(checkpoint / "model-1.safetensors", third)
    monkeypatch.setattr(
        broadcast.ray, "put", lambda piece: answer(OSError(28, "the store is full"), 0)
    )
    with link.bring(server, third) as places:
        assert places == [third]
    with replicas.Link(0, actor, 0.0).bring(server, other) as places:
        assert places == [other]  # few replicas


def test_a_sync_that_is_tried_again_reads_the_files(checkpoint, store, monkeypatch):
    """What the first one read may be dropped under its hands."""
    monkeypatch.setattr(replicas.ray, "get", lambda asked, timeout: asked)
    lead = Broadcast()
    other = lead.send(checkpoint)  # who still reads
    link = replicas.Link(0, Actor(Path("/memory")), 0.0, lead)
    for places in ([Path("/memory"), checkpoint], [checkpoint]):
        with link.bring(server, checkpoint) as found:
            assert found == places
    assert lead._sent is other
    lead.has_read(other.name)
    assert lead._sent is None


def test_a_cluster_whose_machines_have_just_gone_has_no_room(checkpoint, store, monkeypatch):
    monkeypatch.setattr(broadcast.ray, "nodes", list)
    assert Broadcast().send(checkpoint) is None


SCRIPT = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    import ray
    from ttrl.cluster.broadcast import Broadcast, Staged
    from ttrl.cluster.ray_connection import actor_class, connect
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class There:
        def put(self, memory, sent):
            self.staged = Staged(memory)
            folder = self.staged.put(sent, 60.0)
            return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}

    address, checkpoint, memory = sys.argv[1:]
    connect(address)
    sent = Broadcast().send(Path(checkpoint))
    for node in ray.nodes():
        if node["Resources"].get("CPU"):
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            actor = actor_class(There, num_cpus=1, scheduling_strategy=there).remote()
            found = ray.get(actor.put.remote(memory, sent))
            assert found == {path.name: path.read_bytes() for path in Path(checkpoint).glob("*.safetensors")}
            print("equal", flush=True)
    """
)


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_from_machine_to_machine(checkpoint, cluster, tmp_path):
    """Only this sends weights through Ray's own store."""
    command = [sys.executable, "-c", SCRIPT, cluster.address, str(checkpoint), str(tmp_path)]
    done = subprocess.run(
        command, env=cluster.environment, capture_output=True, text=True, timeout=200
    )
    assert done.stdout.count("equal") == 2, done.stdout + done.stderr
