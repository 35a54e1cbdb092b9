"""What is cut off, or does not start, delays a run once and briefly, and is named. Actors that
never answer stand in for it.
"""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from ttrl import TrainConfig
from ttrl.errors import ServerDiedError, ServerStartError, TrainerDiedError, TrainerError
from ttrl.system.console import Console

pytest.importorskip("ray")
from support.fake_ray import FakeRay, Silent


def test_a_server_is_waited_for_once() -> None:
    from ttrl.cluster.replicas import Link

    cluster = FakeRay()
    link = Link(3, Silent(), 0.0, None, cluster)
    for _ in range(4):
        with pytest.raises(
            ServerDiedError, match="replica-3 is starting on a machine of the cluster"
        ):
            link.find()
    assert cluster.waited == [5.0, 0.0, 0.0, 0.0]


def test_a_trainer_is_named_and_gives_its_machines_back(tmp_path: Path) -> None:
    from ttrl.cluster.trainers import ClusterTrainer

    cluster = FakeRay()
    config = TrainConfig(run="run", model="m", iterations=1, cluster="auto", nnodes=2)
    trainer = ClusterTrainer(config, tmp_path, tmp_path / "log", {}, cluster)
    nodes = [Silent(), Silent()]
    trainer._nodes = list(nodes)
    with pytest.raises(
        TrainerDiedError, match=r"^trainer machine 0 of 2 has not answered for 30 s$"
    ):
        trainer.ended()
    assert cluster.waited == [30.0, 10.0]
    assert cluster.killed == nodes


def test_a_lead_for_which_there_is_no_room_is_given_up() -> None:
    from ttrl.cluster import lead

    actor = Silent()
    cluster = FakeRay(actor)
    config = TrainConfig(
        run="run", model="m", iterations=1, cluster="auto", device="cuda", nproc_per_node=8
    )
    with pytest.raises(
        TrainerError, match=r"not started within 600 s: it needs .*'num_gpus': 8.*nproc_per_node"
    ):
        lead.run_detached(config, print, {}, Console(quiet=True), cluster)
    assert cluster.killed == [actor]


def test_a_replica_whose_server_does_not_start_tries_again(tmp_path: Path) -> None:
    from ttrl.cluster import replicas

    class Server(SimpleNamespace):
        def start(self) -> None:
            calls.append("start")
            if calls.count("start") < 3:
                raise ServerStartError("its GPU is not free yet")

    calls: list[str] = []
    serving, over = threading.Event(), threading.Event()

    def keep_serving(server: Server) -> None:
        serving.set()
        over.wait()

    server = Server(root_url="http://here", stop=lambda: calls.append("stop"))
    replica = replicas.Replica(
        TrainConfig(run="run", model="m", iterations=1, cluster="auto"),
        tmp_path,
        tmp_path / "log",
        "key",
        make=lambda config, model, log, adapters: server,
        serve=keep_serving,
        pause=0.0,
    )
    assert serving.wait(30.0)
    assert replica.state() == ("http://here", None) and calls == [
        "start",
        "stop",
        "start",
        "stop",
        "start",
    ]


def test_the_last_line_of_rays_errors_is_the_cause() -> None:
    from ttrl.cluster.ray_connection import last_line

    words = (
        "The actor died because of an error raised in its creation task, ray::Bad.__init__()\n  "
        "File x\nImportError: no y\n\n"
    )
    assert last_line(RuntimeError(words)) == "ImportError: no y"
