"""The policy's server: never believed without its canary, and never left running."""

import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from ttrl import TrainConfig
from ttrl.errors import ConfigError, ServerDiedError, ServerError, ServerStartError, WeightSyncError
from ttrl.loop import policy_server
from ttrl.loop.console import Console
from ttrl.loop.policy_server import PolicyServer, make_server


@dataclass
class Report:
    mode: str = "reload"
    seconds: float = 0.5
    canary_max_difference: float = 1e-6
    fell_back: str | None = None
    max_difference: float = 1e-6


class Child:
    pid = 0


class FakeVLLM:
    """As much of VLLMServer as PolicyServer knows: a start that takes as long as the test says, and a record of what happened."""

    made: list["FakeVLLM"] = []  # noqa: RUF012 - emptied by the fixture
    start_error: BaseException | None = None
    slow = False

    def __init__(self, model_folder, **arguments):
        self.model_folder, self.arguments = model_folder, arguments
        self.events, self.dead = [], False
        self.made_child, self.may_be_made, self.may_be_healthy = threading.Event(), threading.Event(), threading.Event()
        self._child = None
        if not self.slow:
            self.may_be_made.set()
            self.may_be_healthy.set()
        self.made.append(self)

    def start(self):
        self._child = Child()  # there, but without a process for a while
        self.made_child.set()
        assert self.may_be_made.wait(30)
        self._child.pid = 7
        self.events.append("process")
        assert self.may_be_healthy.wait(30)
        if self.start_error is not None:
            raise self.start_error
        if self._child is None:
            raise AttributeError("stopped while it started")
        self.events.append("healthy")

    def stop(self):
        child, self._child = self._child, None
        if child is not None:
            assert child.pid, "stop() of a process that is just being made does nothing, or hangs"
            self.events.append("stop")
        self.may_be_healthy.set()

    def check(self):
        if self.dead:
            raise ServerDiedError("gone")


@pytest.fixture
def syncs(monkeypatch):
    """The weights that were synced or verified, in order; `fail` is raised by the next one."""
    record = {"events": [], "fail": None}

    def step(what, folder):
        record["events"].append((what, folder.name))
        if record["fail"] is not None:
            error, record["fail"] = record["fail"], None
            raise error
        return Report()

    monkeypatch.setattr(policy_server, "VLLMServer", FakeVLLM)
    monkeypatch.setattr(policy_server, "sync_weights", lambda server, folder, mode: step(f"sync by {mode}", folder))
    monkeypatch.setattr(policy_server, "verify_canary", lambda server, folder: step("canary", folder))
    monkeypatch.setattr(FakeVLLM, "made", [])
    return record


@pytest.fixture
def server(syncs, tmp_path):
    config = TrainConfig(run="r", model="m", iterations=1, dtype="fp32", seed=5, server={"max_model_len": 99, "max_num_seqs": 3})
    return PolicyServer(config, tmp_path / "logs", Console(quiet=True))


A, B, C = Path("A"), Path("B"), Path("C")


def test_what_the_server_is_started_with(server, tmp_path):
    server.serve(A)
    [made] = FakeVLLM.made
    assert made.model_folder == A
    assert made.arguments == {
        "served_model_name": "policy",
        "log_path": tmp_path / "logs/server.log",
        "dtype": "float32",
        "extra_args": {"max_num_seqs": 3},
        "max_model_len": 99,
        "seed": 5,
    }


def test_half_precision_is_bfloat16(syncs):
    made = make_server(TrainConfig(run="r", model="m", iterations=1, dtype="bf16"), A, Path("log"))
    assert made.arguments["dtype"] == "bfloat16"


def test_arguments_that_ttrl_sets_itself_are_refused():
    with pytest.raises(ConfigError, match="extra_args: api-key is set by ttrl"):
        make_server(TrainConfig(run="r", model="m", iterations=1, server={"api_key": "x"}), A, Path("log"))


def test_every_change_of_weights_is_checked_and_nothing_else(server, syncs):
    assert server.serve(A)["mode"] == "start"
    assert server.serve(A) is None
    assert server.serve(B) == {"mode": "reload", "seconds": 0.5, "canary_max_difference": 1e-6, "fell_back": None}
    assert server.serve(B) is None
    server.serve(A)
    assert syncs["events"] == [("canary", "A"), ("sync by reload", "B"), ("sync by reload", "A")]
    assert len(FakeVLLM.made) == 1


def test_started_ahead_from_the_folder_that_the_checkpoint_links_to(server, syncs):
    server.start(A)
    with pytest.raises(ServerError, match="no server runs"):
        _ = server.running  # started is not proven
    assert server.serve(B)["mode"] == "start"
    assert syncs["events"] == [("canary", "B")]
    assert server.running is FakeVLLM.made[0]
    assert len(FakeVLLM.made) == 1


@pytest.mark.parametrize("error", [WeightSyncError("differs"), ServerDiedError("gone"), KeyboardInterrupt()])
def test_after_a_failed_sync_no_server_is_believed(server, syncs, error):
    server.serve(A)
    syncs["fail"] = error
    with pytest.raises(type(error)):
        server.serve(B)
    with pytest.raises(ServerError, match="no server runs"):
        _ = server.running
    syncs["fail"] = WeightSyncError("still differs")
    with pytest.raises(WeightSyncError):  # nor are the old weights: who knows which of them were replaced
        server.serve(A)
    assert syncs["events"][-1] == ("canary", "A")


def test_a_canary_that_fails_after_the_start(server, syncs):
    syncs["fail"] = WeightSyncError("differs")
    with pytest.raises(WeightSyncError):
        server.serve(A)
    with pytest.raises(ServerError):
        _ = server.running


def test_a_server_that_is_gone_is_noticed_though_the_weights_are_the_same(server):
    server.serve(A)
    FakeVLLM.made[0].dead = True
    with pytest.raises(ServerDiedError):
        server.serve(A)


def test_a_start_that_fails_is_raised_where_it_is_waited_for_and_can_be_tried_again(server, monkeypatch):
    monkeypatch.setattr(FakeVLLM, "start_error", ServerStartError("port in use; last log lines: …"))
    server.start(A)
    with pytest.raises(ServerStartError, match="port in use"):
        server.serve(A)
    with pytest.raises(ServerError):
        _ = server.running
    monkeypatch.setattr(FakeVLLM, "start_error", None)
    assert server.serve(A)["mode"] == "start"
    assert len(FakeVLLM.made) == 2


def test_stop(server, syncs):
    server.stop()  # nothing there
    server.serve(A)
    server.stop()
    server.stop()
    assert FakeVLLM.made[0].events == ["process", "healthy", "stop"]
    with pytest.raises(ServerError):
        _ = server.running
    server.serve(A)  # the same folder, another server: checked anew
    assert syncs["events"] == [("canary", "A"), ("canary", "A")]


def test_stop_while_it_is_starting(server, monkeypatch):
    monkeypatch.setattr(FakeVLLM, "slow", True)
    server.start(A)
    [made] = FakeVLLM.made
    made.may_be_made.set()
    while "process" not in made.events:
        pass
    server.stop()
    assert made.events == ["process", "stop"]
    assert all(thread.name != "server start" for thread in threading.enumerate())


def test_stop_while_its_process_is_just_being_made(server, monkeypatch):
    """A stop between the decision to start a process and its existence would do nothing, and the server would stay."""
    monkeypatch.setattr(FakeVLLM, "slow", True)
    server.start(A)
    [made] = FakeVLLM.made
    made.made_child.wait(30)
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    stopping.join(0.2)
    assert stopping.is_alive()  # it waits for something to stop
    made.may_be_made.set()
    stopping.join(30)
    assert not stopping.is_alive()
    assert made.events == ["process", "stop"]
    assert all(thread.name != "server start" for thread in threading.enumerate())


def test_interrupted_while_waiting_for_the_start(server, monkeypatch):
    monkeypatch.setattr(FakeVLLM, "slow", True)
    monkeypatch.setattr(Console, "waiting", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        server.serve(A)
    FakeVLLM.made[0].may_be_made.set()
    server.stop()
    assert FakeVLLM.made[0].events == ["process", "stop"]


def test_a_start_that_fails_after_the_stop_is_not_raised_later(server, monkeypatch):
    monkeypatch.setattr(FakeVLLM, "slow", True)
    server.start(A)
    FakeVLLM.made[0].may_be_made.set()
    server.stop()
    monkeypatch.setattr(FakeVLLM, "slow", False)
    assert server.serve(B)["mode"] == "start"


def test_the_real_server_has_what_is_looked_at_while_it_starts(tmp_path):
    from ttrl.server.vllm import VLLMServer

    assert VLLMServer(tmp_path, served_model_name="x", log_path=tmp_path / "log")._child is None
