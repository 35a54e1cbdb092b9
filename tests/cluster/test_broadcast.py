"""A checkpoint in the memory of machines: once for all replicas there, the same bytes, and nothing of it is left."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.ray_cluster import cluster_of

pytest.importorskip("ray")
from ttrl.cluster import broadcast, replicas
from ttrl.cluster.broadcast import Broadcast, Staged


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "0001" / "checkpoint"
    folder.mkdir(parents=True)
    for number in (1, 2):
        (folder / f"model-{number}.safetensors").write_bytes(os.urandom(2_500_000 + number))
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def sent(checkpoint, monkeypatch):
    """(name, pieces, bytes) as a lead sends them; Ray's store is this process's memory."""
    monkeypatch.setattr(broadcast, "_PIECE", 2**20)
    monkeypatch.setattr(broadcast.ray, "put", lambda piece: piece)
    monkeypatch.setattr(broadcast.ray, "get", lambda piece: piece)
    monkeypatch.setattr(broadcast.ray, "nodes", lambda: [{"Alive": True, "Resources": {"object_store_memory": 1e9}}])
    found = Broadcast(2).of(checkpoint)
    assert found is not None
    return found


def staged(memory, pid):
    found = Staged(str(memory))
    found._own = found._pool / str(pid)
    return found


def files(memory):
    return sorted(path.relative_to(memory).as_posix() for path in memory.rglob("*") if path.name != "lock" and not path.is_dir())


def test_replicas_of_a_machine_share_a_copy(checkpoint, sent, tmp_path):
    memory = tmp_path / "shm"
    memory.mkdir()
    one, other = staged(memory, os.getpid()), staged(memory, os.getppid())
    folders = [each.put(checkpoint, *sent) for each in (one, other)]
    for folder in folders:
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
            path.name: path.read_bytes() for path in checkpoint.iterdir()
        }
    assert len({(folder / "model-1.safetensors").stat().st_ino for folder in folders}) == 1
    one.drop()
    assert (folders[1] / "model-1.safetensors").exists() and not folders[0].exists()
    other.drop()
    assert files(memory) == []


def test_what_a_replica_that_is_gone_left_is_removed(checkpoint, sent, tmp_path):
    memory = tmp_path / "shm"
    memory.mkdir()
    gone = subprocess.Popen(["true"])
    gone.wait()
    staged(memory, gone.pid).put(checkpoint, *sent)
    assert len(files(memory)) == 5
    staged(memory, os.getpid()).drop()
    assert files(memory) == []


def test_memory_that_is_full_keeps_nothing(checkpoint, sent, tmp_path, monkeypatch):
    memory = tmp_path / "shm"
    memory.mkdir()
    name, pieces, size = sent
    with pytest.raises(OSError, match=r"its weights take .* of memory, of which .* is free"):
        staged(memory, os.getpid()).put(checkpoint, name, pieces, 2**50)

    def full(piece):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(broadcast.ray, "get", full)
    with pytest.raises(OSError, match="No space left"):
        staged(memory, os.getpid()).put(checkpoint, name, pieces, size)
    assert files(memory) == []


def test_a_folder_that_others_can_write_is_refused(checkpoint, sent, tmp_path):
    (tmp_path / f"ttrl-{os.geteuid()}").mkdir(mode=0o777)
    os.chmod(tmp_path / f"ttrl-{os.geteuid()}", 0o777)
    with pytest.raises(OSError, match="is not this user's alone; remove it"):
        staged(tmp_path, os.getpid()).put(checkpoint, *sent)


def test_the_store_is_emptied_when_all_serve_and_not_filled_beyond_its_size(checkpoint, sent, monkeypatch, caplog):
    lead = Broadcast(2)
    name, pieces, size = lead.of(checkpoint)
    assert size == 5_000_003 and lead.of(checkpoint)[0] == name != sent[0]
    assert b"".join(pieces["model-2.safetensors"]) == (checkpoint / "model-2.safetensors").read_bytes()
    os.utime(checkpoint / "model-2.safetensors", ns=(1, 1))  # the iteration was done again
    assert lead.of(checkpoint)[0] != name
    lead.serves(0)
    assert lead._pieces
    lead.serves(1)
    assert not lead._pieces and lead.of(checkpoint)[0] != name
    monkeypatch.setattr(broadcast.ray, "nodes", lambda: [{"Alive": True, "Resources": {"object_store_memory": 9e6}}])
    assert Broadcast(2).of(checkpoint) is None and "--object-store-memory" in caplog.text


def test_a_replica_that_cannot_reads_the_checkpoint(checkpoint, sent, monkeypatch, caplog):
    class Actor:
        class stage:  # noqa: N801 - as Ray's
            remote = staticmethod(lambda *asked: asked)

    def fails(asked, timeout):
        raise OSError("its weights take 9 GiB of memory")

    monkeypatch.setattr(replicas.ray, "get", lambda asked, timeout: Path("/memory"))
    few = replicas.ReplicaServer(0, Actor, "k", "float32", 0.0, Broadcast(4))
    assert few.nearer(checkpoint) == checkpoint
    server = replicas.ReplicaServer(0, Actor, "k", "float32", 0.0, Broadcast(5))
    assert server.nearer(checkpoint) == Path("/memory")
    monkeypatch.setattr(replicas.ray, "get", fails)
    assert server.nearer(checkpoint) == Path("/memory")  # asked once for a sync
    assert server.nearer(checkpoint.parent) == checkpoint.parent and "reads" in caplog.text


SCRIPT = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    import ray
    from ttrl.cluster.broadcast import Broadcast, Staged
    from ttrl.cluster.connection import actor_class, connect
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class There:
        def put(self, memory, *sent):
            return {path.name: path.read_bytes() for path in Staged(memory).put(*sent).iterdir()}

    address, checkpoint, memory = sys.argv[1:]
    connect(address)
    sent = Broadcast(2).of(Path(checkpoint))
    for node in ray.nodes():
        if node["Resources"].get("CPU"):
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            actor = actor_class(There, num_cpus=1, scheduling_strategy=there).remote()
            found = ray.get(actor.put.remote(memory, Path(checkpoint), *sent))
            assert found == {path.name: path.read_bytes() for path in Path(checkpoint).iterdir()}
            print("equal", flush=True)
    """
)


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_from_machine_to_machine(checkpoint, tmp_path):
    with cluster_of(tmp_path, {"a": 1, "b": 1}) as cluster:
        command = [sys.executable, "-c", SCRIPT, cluster.address, str(checkpoint), str(tmp_path)]
        done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=200)
    assert done.stdout.count("equal") == 2, done.stdout + done.stderr
