"""What is cut off, or does not start, delays a run once and briefly, and is named. Actors that
never answer stand in for it.
"""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttrl import TrainConfig
from ttrl.errors import ServerDiedError, ServerStartError, TrainerDiedError, TrainerError
from ttrl.system.console import Console

ray = pytest.importorskip("ray")


class Silent:
    """An actor of whom nothing comes back."""

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: object())


def test_a_server_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from ttrl.cluster.replicas import Link

    waited: list[float] = []

    def wait(refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        waited.append(timeout)
        return [], refs

    monkeypatch.setattr(ray, "wait", wait)
    link = Link(3, Silent(), 0.0)
    for _ in range(4):
        with pytest.raises(
            ServerDiedError, match="replica-3 is starting on a machine of the cluster"
        ):
            link.find()
    assert waited == [5.0, 0.0, 0.0, 0.0]


def test_a_trainer_is_named_and_gives_its_machines_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ttrl.cluster.trainers import ClusterTrainer

    waited: list[float] = []

    def get(ref: object, timeout: float) -> None:
        waited.append(timeout)
        raise ray.exceptions.GetTimeoutError("Get timed out")

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda refs, **settings: ([], refs))
    killed: list[Any] = []
    monkeypatch.setattr(ray, "kill", killed.append)
    config = TrainConfig(run="run", model="m", iterations=1, cluster="auto", nnodes=2)
    trainer, nodes = ClusterTrainer(config, tmp_path, tmp_path / "log", {}), [Silent(), Silent()]
    trainer._nodes = list(nodes)
    with pytest.raises(
        TrainerDiedError, match=r"^trainer machine 0 of 2 has not answered for 30 s$"
    ):
        trainer.ended()
    assert waited == [30.0] and killed == nodes


def test_a_lead_for_which_there_is_no_room_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from ttrl.cluster import lead

    killed: list[Any] = []
    monkeypatch.setattr(lead, "connect", lambda address: None)
    monkeypatch.setattr(lead, "_begin", lambda *given: (Silent(), True))
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: ([], refs))
    monkeypatch.setattr(ray, "kill", killed.append)
    config = TrainConfig(
        run="run", model="m", iterations=1, cluster="auto", device="cuda", nproc_per_node=8
    )
    with pytest.raises(
        TrainerError, match=r"not started within 600 s: it needs .*'num_gpus': 8.*nproc_per_node"
    ):
        lead.run_detached(config, print, {}, Console(quiet=True))
    assert len(killed) == 1


def test_a_replica_whose_server_does_not_start_tries_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
    monkeypatch.setattr(replicas, "make_server", lambda config, model, log, adapters: server)
    monkeypatch.setattr(replicas, "keep_serving", keep_serving)
    monkeypatch.setattr(replicas, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    replica = replicas.Replica(
        TrainConfig(run="run", model="m", iterations=1, cluster="auto"),
        tmp_path,
        tmp_path / "log",
        "key",
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
