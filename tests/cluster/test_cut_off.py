"""What is cut off from the lead delays a run once and briefly, and is named; actors whose answers never come stand in for it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttrl import TrainConfig
from ttrl.errors import ServerDiedError, TrainerDiedError

ray = pytest.importorskip("ray")


class Silent:
    """An actor of whom nothing comes back."""

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: object())


def test_a_server_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from ttrl.cluster.replicas import ReplicaServer

    waited: list[float] = []

    def wait(refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        waited.append(timeout)
        return [], refs

    monkeypatch.setattr(ray, "wait", wait)
    server = ReplicaServer(3, Silent(), "key", "float32", start_timeout=0.0)
    for _ in range(4):
        with pytest.raises(ServerDiedError, match="replica-3 is being started on some machine of the cluster"):
            server.check()
    assert waited == [5.0, 0.0, 0.0, 0.0]


def test_a_trainer_is_named_and_gives_its_machines_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(TrainerDiedError, match=r"^trainer machine 0 of 2 has not answered for 30 s$"):
        trainer.ended()
    assert waited == [30.0] and killed == nodes
