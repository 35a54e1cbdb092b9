"""A checkpoint in the memory of machines: once for all replicas there, the same bytes, and nothing
of it is left.
"""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("ray")
from support.fake_ray import FakeRay, actor

from ttrl.cluster.broadcast import Broadcast, Staged
from ttrl.cluster.replicas import Link
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
def store():
    """Ray's, as this process's memory."""
    return FakeRay()


@pytest.fixture
def lead(store):
    """The lead's side."""
    return Broadcast(store, piece_bytes=2**20)


@pytest.fixture
def sent(checkpoint, lead):
    """The checkpoint in the store."""
    return lead.send(checkpoint)


def files(memory):
    return sorted(
        path.name for path in memory.rglob("*") if not path.is_dir() and path.name != "lock"
    )


def test_replicas_of_a_machine_share_a_copy(checkpoint, store, sent, tmp_path):
    (memory := tmp_path / "shm").mkdir()
    replicas_here = [Staged(str(memory), store), Staged(str(memory), store)]
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


def test_what_a_replica_that_is_gone_left_is_removed(store, sent, tmp_path):
    (memory := tmp_path / "shm").mkdir()
    gone = Staged(str(memory), store)
    gone.put(sent, 1.0)
    other = Staged(str(memory), store)
    other.drop()
    assert len(files(memory)) == 2
    gone._reading[sent.name].close()  # as its process's end does
    other.drop()
    assert files(memory) == []


def test_memory_that_is_full_keeps_nothing(store, sent, tmp_path):
    (memory := tmp_path / "shm").mkdir()
    with pytest.raises(OSError, match=r"the weights need .*, and .*ttrl-\d+ has room for half of "):
        Staged(str(memory), store).put(sent._replace(size=2**50), 1.0)
    full = {name: [OSError(28, "No space left on device")] for name in sent.pieces}
    with pytest.raises(OSError, match="No space left"):
        Staged(str(memory), store).put(sent._replace(pieces=full), 1.0)
    assert files(memory) == []


def test_a_folder_that_others_can_write_is_refused(checkpoint, sent, tmp_path):
    (pool := tmp_path / f"ttrl-{os.geteuid()}").mkdir()
    pool.chmod(0o777)
    with pytest.raises(OSError, match=r"other users can access .*; remove it"):
        Staged(str(tmp_path)).put(sent, 1.0)


def test_the_store_is_emptied_after_the_last_reader(checkpoint, lead):
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


def test_weights_beyond_the_store_are_read_from_files(checkpoint, store, lead, caplog):
    store.resources["object_store_memory"] = 9e6
    assert lead.send(checkpoint) is None and lead.send(checkpoint) is None
    assert (
        caplog.text.count(
            "Ray's object store on 10.0.0.1 has 9 MiB (ray start --object-store-memory=BYTES)"
        )
        == 1
    )


server = JoinedServer("replica-0", served_model_name="policy", dtype="float32", api_key="k")


def test_a_replica_reads_what_was_brought_until_the_sync_is_over(checkpoint, store, lead, caplog):
    answers, dropped = [Path("/memory"), OSError("its weights take 9 GiB")], []
    replica = actor(stage=lambda sent, seconds: answers.pop(0), drop=dropped.append)
    link = Link(0, replica, 0.0, lead, store)
    with link.bring(server, checkpoint) as places:
        assert places == [Path("/memory"), checkpoint]
        name = lead._sent.name
    assert dropped == [name] and lead._sent is None
    with link.bring(server, checkpoint) as places:
        assert places == [checkpoint]  # it comes later
    other = shutil.copytree(checkpoint, checkpoint.parent / "other")
    with link.bring(server, other) as places:
        assert places == [other] and "reads" in caplog.text and "9 GiB" in caplog.text
    assert len(dropped) == 2 and lead._sent is None  # also what may yet arrive
    (third := checkpoint.parent / "third").mkdir()
    shutil.copy(checkpoint / "model-1.safetensors", third)
    store.is_full = True
    with link.bring(server, third) as places:
        assert places == [third]
    with Link(0, replica, 0.0, None, store).bring(server, other) as places:
        assert places == [other]  # few replicas


def test_a_sync_that_is_tried_again_reads_the_files(checkpoint, store, lead):
    """What the first one read may be dropped under its hands."""
    other = lead.send(checkpoint)  # who still reads
    replica = actor(stage=lambda sent, seconds: Path("/memory"), drop=lambda name: None)
    link = Link(0, replica, 0.0, lead, store)
    for places in ([Path("/memory"), checkpoint], [checkpoint]):
        with link.bring(server, checkpoint) as found:
            assert found == places
    assert lead._sent is other
    lead.has_read(other.name)
    assert lead._sent is None


def test_a_cluster_whose_machines_have_just_gone_has_no_room(checkpoint, store, lead):
    store.machines = []
    assert lead.send(checkpoint) is None


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
