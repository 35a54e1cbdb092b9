"""The policy's servers: never believed without proof, never left running, brought back with the
right weights.
"""

import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from ttrl import TrainConfig
from ttrl.configs.machines import shares_of_devices
from ttrl.errors import (
    ConfigError,
    ModelFolderError,
    ServerDiedError,
    ServerError,
    ServerStartError,
    WeightSyncError,
)
from ttrl.facts import Sync
from ttrl.launch.trainer import Trainer
from ttrl.records import Handover
from ttrl.run_folder.folder import RunFolder
from ttrl.server.cpu import is_cpu_build
from ttrl.server.model_folder import merge_adapter
from ttrl.server.vllm import VLLMServer
from ttrl.system.console import Console
from ttrl.weights.policy_server import PolicyServer, make_server, server_environments
from ttrl.weights.sync import SyncReport
from ttrl.weights.verify import Proof


class FakeServer:
    """As much of a server as is asked of it, and a record of what happened."""

    base_url = ""
    other_template: str | None = None
    """The address of the one that writes prompts with another chat template."""
    without_weights: str | None = None
    """The address of the one that knows nothing of weights."""
    sleepless = False

    def __init__(self, base_url, *, serves_adapters=False, **arguments):
        self.base_url, self.arguments, self.serves_adapters = base_url, arguments, serves_adapters
        self.events, self.dead, self.version, self.policy_folder = [], False, None, None

    model_name = "policy"

    def check(self):
        if self.dead:
            raise ServerDiedError(f"{self.base_url} is gone")

    def open_to(self, version):
        self.version = version

    def open_version(self):
        if self.base_url == self.without_weights:
            raise ServerError("GET /ttrl/weights: the server answered 404")
        return self.version

    def check_chat_template(self, model):
        if self.base_url == self.other_template:
            raise WeightSyncError(f"{self.base_url} has another chat template")

    def request(self, method, path, body=None, timeout=0.0):
        if path.startswith("/sleep"):
            if self.sleepless:
                raise ServerError("sleep mode is not enabled")
            self.events.append("sleep")
        return {"success": True}

    def close_to_all(self):
        self.version = None

    def weights_digest(self):
        return f"digest of {self.policy_folder}"

    def endpoint(self, version):
        return self, version


class FakeVLLM(FakeServer, VLLMServer):
    """One of ours: a start that takes as long as the test says."""

    is_started = False
    made: list["FakeVLLM"] = []  # noqa: RUF012 - emptied by the fixture
    start_error: BaseException | None = None
    slow = False
    log_path = Path("server.log")

    def __init__(self, model_folder, **arguments):
        super().__init__(f"http://server-{len(self.made)}/v1", **arguments)
        self.model_folder = model_folder
        self.is_started = self.stopped = False
        self.may_be_healthy = threading.Event()
        self.made.append(self)

    def start(self):
        self.is_started, self.stopped = True, False
        self.events.append(f"start {self.model_folder}")
        while self.slow and not self.may_be_healthy.wait(0.01) and not self.stopped:
            pass
        if self.stopped or self.start_error is not None:
            self.is_started = False
            raise self.start_error or ServerStartError("stopped while it started")
        self.dead, self.version, self.policy_folder = False, None, self.model_folder

    def stop(self):
        if self.is_started:
            self.events.append("stop")
        self.stopped, self.is_started, self.version = True, False, None

    @property
    def has_ended(self):
        return self.is_started and self.dead


@dataclass
class Syncs:
    events: list[tuple[str, str]] = field(default_factory=list)
    fail: dict[str, BaseException] = field(default_factory=dict)
    """What the next sync of a server raises."""

    def step(self, what, server, folder):
        self.events.append((what, str(folder)))
        server.version = None
        if (error := self.fail.pop(server.base_url, None)) is not None:
            raise error
        server.check()
        server.policy_folder = folder

    def sync(self, server, folder, *, mode, compare=True, asleep=False, handover=None):
        if handover is not None and mode != "reload":
            handover.wait_for_files(folder)
        if mode == "restart":
            server.stop()
            server.model_folder = folder
            server.start()
        if mode == "start" and server.serves_adapters:
            mode = "reload"
        how = (" from sleep" if asleep else "") + (" from memory" if handover else "")
        self.step(f"sync by {mode}{how}", server, folder)
        return SyncReport(mode, 0.5, Proof(None, 1e-6, compared=7, unchecked=1))


@pytest.fixture
def syncs():
    record = Syncs()
    FakeVLLM.made, FakeVLLM.start_error, FakeVLLM.slow, FakeServer.without_weights = (
        [],
        None,
        False,
        None,
    )
    FakeServer.other_template = None
    return record


def config_of(**settings):
    return TrainConfig(**{"run": "r", "model": "m", "iterations": 1, "dtype": "fp32", **settings})


@pytest.fixture
def make(syncs, tmp_path):
    made = []

    def make(look_seconds=0.01, console=None, merge=merge_adapter, **settings):
        config = config_of(**settings)
        keys = config.joined_keys()
        made.append(
            PolicyServer(
                config,
                tmp_path / "logs",
                console or Console(quiet=True),
                others=lambda base: [
                    FakeServer(url, api_key=keys[url], serves_adapters=config.adapters == "mirror")
                    for url in config.joined_servers
                ],
                own=FakeVLLM,
                sync=syncs.sync,
                merge=merge,
                look_seconds=look_seconds,
                look_at_others_seconds=0.0,
            )
        )
        return made[-1]

    yield make
    for server in made:
        server.stop()


A, B, C = Path("A"), Path("B"), Path("C")
START = Sync(
    mode="start",
    seconds=0,
    canary_max_difference=1e-6,
    weights_compared=7,
    weights_unchecked=1,
)


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def asked(server):
    """What a rollout would use."""
    endpoints = server.endpoints()
    return endpoints[0] if len(endpoints) == 1 else endpoints


def test_what_a_server_is_started_with(make, tmp_path):
    make(seed=5, server={"max_model_len": 99, "max_num_seqs": 3}).serve(A)
    [made] = FakeVLLM.made
    assert made.model_folder == A
    assert made.arguments == {
        "served_model_name": "policy",
        "log_path": tmp_path / "logs/server.log",
        "dtype": "float32",
        "extra_args": {"max_num_seqs": 3},
        "max_model_len": 99,
        "seed": 5,
        "start_timeout": None,
        "env": {},
        "cpu": is_cpu_build(),
    }


def test_half_precision_is_bfloat16(syncs):
    assert (
        make_server(config_of(dtype="bf16"), A, Path("log"), kind=FakeVLLM).arguments["dtype"]
        == "bfloat16"
    )


def test_arguments_that_ttrl_sets_itself_are_refused():
    with pytest.raises(ConfigError, match="extra_args: api-key is set by ttrl"):
        make_server(config_of(server={"api_key": "x"}), A, Path("log"))


def test_every_change_of_weights_is_proven_and_nothing_else(make, syncs):
    server = make()
    assert server.serve(A).replace(seconds=0) == START
    client, version = asked(server)
    assert client is FakeVLLM.made[0] and version == client.version
    assert server.serve(A) is None and asked(server)[1] == version
    assert server.serve(B).mode == "reload"
    assert asked(server)[1] == client.version != version
    assert server.serve(B) is None
    server.serve(A)
    assert syncs.events == [
        ("sync by start", "A"),
        ("sync by reload", "B"),
        ("sync by reload", "A"),
    ]
    assert server.servers == FakeVLLM.made and server.weights_digest() == "digest of A"


def test_started_ahead_from_the_folder_that_the_checkpoint_links_to(make, syncs):
    server = make()
    server.start(A)
    with pytest.raises(ServerError, match="no server is running"):
        server.endpoints()  # started is not proven
    assert server.serve(B).mode == "start"
    assert syncs.events == [("sync by start", "B")] and len(FakeVLLM.made) == 1


@pytest.mark.parametrize("error", [WeightSyncError("differs"), KeyboardInterrupt()])
def test_after_a_failed_sync_no_server_is_believed(make, syncs, error):
    server = make()
    server.serve(A)
    [made] = FakeVLLM.made
    syncs.fail[made.base_url] = error
    with pytest.raises(type(error)):
        server.serve(B)
    with pytest.raises(ServerError, match="no server is running"):
        server.endpoints()
    syncs.fail[made.base_url] = WeightSyncError("still differs")
    # Nor are the old weights: who knows which of them were replaced.
    with pytest.raises(WeightSyncError):
        server.serve(A)
    assert syncs.events[-1] == ("sync by reload", "A")


@pytest.mark.parametrize("policy", [A, B])
def test_one_that_died_is_started_anew_once(make, syncs, policy, caplog):
    server = make(look_seconds=3600.0)
    server.serve(A)
    [made] = FakeVLLM.made
    made.dead = True
    facts = server.serve(policy)
    assert facts.mode == "restart" and facts.fell_back == "http://server-0/v1 is gone"
    assert "a server died and restarts" in caplog.text
    syncs.fail[made.base_url] = ServerDiedError("gone again")
    made.dead = True
    with pytest.raises(WeightSyncError, match="died again"):
        server.serve(C)


def test_a_look_that_began_under_the_last_policy_does_not_spend_the_next_ones_restart(make, syncs):
    server = make()
    server.serve(A)
    [made], [member] = FakeVLLM.made, server._members
    with member.lock:  # the thread that looks after it can't
        began = server._serving  # what a look reads before `serve` begins
        made.dead = True
        member.look_after(began)
        made.dead = True
        asked_for = threading.Thread(target=lambda: served.append(server.serve(B)))
        served = []
        asked_for.start()
        wait_until(lambda: server._serving is None)
        member.look_after(began)
        assert member.proven is None and made.events.count("start A") == 2
    asked_for.join()
    assert served[0].mode == "restart" and made.events.count("start B") == 1


def test_one_that_dies_in_the_middle_of_the_rollouts_comes_back_with_its_weights(make, syncs):
    server = make()
    server.serve(A)
    [made] = FakeVLLM.made
    _, version = asked(server)
    made.dead = True
    wait_until(lambda: ("sync by restart", "A") in syncs.events and server.servers)
    assert made.version == version  # so requests that wait are answered
    server.check()
    made.dead = True  # a second time under the same policy: it is left to the loop
    wait_until(lambda: not server.servers)
    with pytest.raises(ServerDiedError, match="its process ended"):
        server.check()
    with pytest.raises(ServerDiedError, match="its process ended"):
        _ = server.model_name
    assert made.events.count("start A") == 2
    server.serve(B)  # the next policy may start it once more
    assert made.events.count("start B") == 1


def test_a_start_that_fails_is_raised_where_it_is_waited_for_and_can_be_tried_again(make):
    server = make()
    FakeVLLM.start_error = ServerStartError("port in use; last log lines: …")
    server.start(A)
    with pytest.raises(ServerStartError, match="port in use"):
        server.serve(A)
    assert FakeVLLM.made[0].events == ["start A"]
    with pytest.raises(ServerError):
        server.endpoints()
    FakeVLLM.start_error = ModelFolderError("no tokenizer")
    with pytest.raises(ModelFolderError, match="no tokenizer"):  # the user's mistake stays that
        server.serve(A)
    FakeVLLM.start_error = None
    assert server.serve(A).mode == "start"


def test_stop(make, syncs):
    server = make()
    server.stop()  # nothing there
    server.serve(A)
    server.stop()
    server.stop()
    assert FakeVLLM.made[0].events == ["start A", "stop"]
    with pytest.raises(ServerError):
        server.endpoints()
    server.serve(A)  # the same folder, another server: proven anew
    assert syncs.events == [("sync by start", "A"), ("sync by start", "A")]


def no_thread_is_left():
    return all(
        thread.name not in ("server start", "server watch") for thread in threading.enumerate()
    )


def test_stop_while_it_is_starting(make):
    FakeVLLM.slow = True
    server = make()
    server.start(A)
    server.stop()
    assert not FakeVLLM.made[0].is_started and no_thread_is_left()


def test_interrupted_while_waiting_for_the_start(make):
    class Interrupted(Console):
        def waiting(self, *_):
            raise KeyboardInterrupt

    FakeVLLM.slow = True
    server = make(console=Interrupted())
    with pytest.raises(KeyboardInterrupt):
        server.serve(A)
    server.stop()
    assert not FakeVLLM.made[0].is_started and no_thread_is_left()


@pytest.mark.parametrize(
    "weight_sync, events, how",
    [
        ("reload", ["start A"], [("sync by reload", "B")]),
        ("sleep", ["start A", "sleep"], [("sync by reload from sleep", "B")]),
        ("restart", ["start A", "stop", "start B"], [("sync by start", "B")]),
        ("memory", ["start A", "sleep"], [("sync by reload from sleep", "B")]),
    ],
)
def test_rest(make, syncs, weight_sync, events, how):
    server = make(weight_sync=weight_sync, device="cuda")
    server.serve(A)
    server.rest()
    with pytest.raises(ServerError, match="no server is running"):
        server.endpoints()
    server.serve(B)
    assert FakeVLLM.made[0].events == events and syncs.events == [("sync by start", "A"), *how]


def test_weights_in_memory_are_for_servers_on_this_machine(make, syncs, tmp_path, monkeypatch):
    """The others wait until they are written."""
    monkeypatch.setenv("TTRL_SERVER_KEY", "secret")
    server = make(weight_sync="memory", joined_servers=["http://one:1"])
    server.serve(A)
    syncs.events.clear()
    memory, checkpoint = tmp_path / "memory", tmp_path / "checkpoint"
    memory.touch()

    def write():
        wait_until(lambda: syncs.events)
        checkpoint.mkdir()
        (checkpoint / "canary.json").touch()

    writing = threading.Thread(target=write)
    writing.start()
    server.serve(checkpoint, Handover(str(memory), [], {}))
    writing.join()
    assert syncs.events == [
        ("sync by reload from memory", str(checkpoint)),
        ("sync by reload", str(checkpoint)),
    ]


def test_weights_that_nobody_writes(make, syncs):
    """Servers are started with another checkpoint, also anew, and take them out of memory; whoever
    cannot is left out.
    """
    server, handover = (
        make(look_seconds=3600.0, weight_sync="memory"),
        Handover("not asked for", [], {}),
    )
    server.serve(B, handover, A)
    (vllm,) = FakeVLLM.made
    assert syncs.events == [("sync by reload from memory", "B")] and vllm.events[0] == "start A"
    syncs.events.clear()
    vllm.dead = True
    facts = server.serve(C, handover, A)
    assert [event for event in vllm.events if event.startswith("start")] == ["start A", "start A"]
    assert syncs.events[-1] == ("sync by reload from memory", "C") and facts.fell_back
    syncs.fail[vllm.base_url] = ServerError("it read other bytes than the trainer wrote")
    with pytest.raises(ServerError, match="other bytes"):
        server.serve(Path("D"), handover, A)
    with pytest.raises(ServerError, match="only in the trainer's memory"):
        replace(handover, is_written=False).wait_for_files(A)


def test_a_trainer_that_ends_before_it_has_written_what_another_server_needs(
    make, tmp_path, monkeypatch
):
    monkeypatch.setenv("TTRL_SERVER_KEY", "secret")
    server = make(weight_sync="memory", servers=0, joined_servers=["http://one:1"])
    server.serve(A)
    with pytest.raises(ServerError, match="the trainer ended before it wrote B"):
        server.serve(B, Handover(str(tmp_path / "gone"), [], {}))


def test_one_that_does_not_sleep_is_stopped(make, syncs):
    server = make(weight_sync="sleep")
    server.serve(A)
    FakeVLLM.made[0].sleepless = True
    server.rest()
    assert server.serve(A).mode == "start" and FakeVLLM.made[0].events == [
        "start A",
        "stop",
        "start A",
    ]


# Several


JOINED = {"joined_servers": ["http://one:1", "http://two:2/v1"]}


@pytest.fixture
def key(monkeypatch):
    monkeypatch.setenv("TTRL_SERVER_KEY", "k" * 20)


def test_all_are_synced_and_used(make, syncs, key, tmp_path):
    server = make(servers=2, run=str(tmp_path), **JOINED)
    checkpoint = tmp_path / "iterations/0001/checkpoint"
    facts = server.serve(checkpoint)
    assert (facts.servers, facts.left_out) == (4, {})
    assert sorted(syncs.events) == sorted(
        [("sync by start", str(checkpoint))] * 2 + [("sync by reload", str(checkpoint))] * 2
    )
    clients = asked(server)
    assert [client.base_url for client, _ in clients] == [
        "http://server-0/v1",
        "http://server-1/v1",
        *JOINED["joined_servers"],
    ]
    assert {version for _, version in clients} == {client.version for client, _ in clients}
    assert [made.arguments["log_path"].name for made in FakeVLLM.made] == [
        "server_0.log",
        "server_1.log",
    ]
    assert {made.arguments["api_key"] for made in (client for client, _ in clients[2:])} == {
        "k" * 20
    }
    server.rest()
    server.stop()
    assert [made.events[-1] for made in FakeVLLM.made] == ["stop", "stop"]


def test_one_that_fails_is_left_out_and_comes_back_with_the_right_weights(make, syncs, key, caplog):
    server = make(**JOINED)
    server.serve(A)
    _, one, two = [client for client, _ in asked(server)]
    one.dead = True
    facts = server.serve(B)
    assert facts.servers == 2 and facts.left_out == {one.base_url: "http://one:1 is gone"}
    assert "left out of the rollouts until it is back" in caplog.text
    assert one not in server.servers
    clients = dict(asked(server))
    # It has a client, whose requests it could not answer.
    assert clients[one] == two.version != one.version
    one.dead = False
    wait_until(lambda: one in server.servers)
    assert one.version == two.version and one.policy_folder == B


def test_one_that_was_started_anew_by_its_host_is_synced_before_it_is_used(make, syncs, key):
    server = make(**JOINED)
    server.serve(A)
    _, one, _ = [client for client, _ in asked(server)]
    # In this order: it is being looked at.
    version, one.policy_folder, one.version = one.version, C, None
    wait_until(lambda: one.version is not None)
    assert (one.version, one.policy_folder) == (version, A)


def test_one_that_was_only_out_of_reach_is_not_synced_again(make, syncs, key):
    server = make(look_seconds=3600.0, **JOINED)
    server.serve(A)
    _, one, _ = [client for client, _ in asked(server)]
    before, member = list(syncs.events), server._members[1]
    for one.dead in (True, True, False):
        member.look_after(server._serving)
        assert (one in server.servers) != one.dead
    assert syncs.events == before  # requests that it was answering go on


def test_one_that_knows_nothing_of_weights_is_never_asked(make, syncs, key):
    """A plain vLLM server with the key would answer with whatever it has, whatever the request is
    for.
    """

    FakeServer.without_weights = "http://one:1"
    server = make(**JOINED)
    assert server.serve(A).left_out == {
        "http://one:1": "GET /ttrl/weights: the server answered 404"
    }
    assert [client.base_url for client, _ in asked(server)] == [
        "http://server-0/v1",
        "http://two:2/v1",
    ]
    assert ("sync by reload", "A") in syncs.events


def test_one_that_writes_prompts_with_another_template_is_left_out(make, syncs, key):
    FakeServer.other_template = "http://one:1"
    server = make(**JOINED)
    assert server.serve(A).left_out == {"http://one:1": "http://one:1 has another chat template"}
    proven = [one.base_url for one in server.servers]
    assert proven == ["http://server-0/v1", "http://two:2/v1"]
    assert server._members[1].server.version is None  # open to no request


def test_stop_does_not_wait_for_a_server_of_somebody_else(make, syncs, key):
    server = make(servers=0, **JOINED)
    server.serve(A)
    held, end = threading.Event(), threading.Event()

    def hold(lock=server._members[0].lock):
        with lock:
            held.set()
            end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    server.stop()
    end.set()
    thread.join()


def test_none_is_left(make, syncs, key):
    server = make(servers=0, **JOINED)
    server.serve(A)
    for client, _ in asked(server):
        client.dead = True
    with pytest.raises(ServerDiedError, match="http://one:1 is gone"):
        server.serve(B)
    with pytest.raises(ServerError, match="no server is running"):
        server.endpoints()


# Adapters


LORA = {"training": {"lora_rank": 4}}


def adapted(folder, base):
    (folder / "adapter").mkdir(parents=True)
    (folder / "adapter" / "ttrl_adapter.json").write_text(f'{{"lora_base": "{base}"}}')
    return folder


def test_adapters_are_served_beside_the_base(make, syncs, tmp_path):
    server = make(**LORA, run=str(tmp_path), start_timeout=900.0)
    tuned, other = tmp_path / "iterations/0003/checkpoint", tmp_path / "other"
    server.serve(adapted(tuned, "/base"))
    [made] = FakeVLLM.made
    assert made.serves_adapters and made.arguments["extra_args"] == {"max_lora_rank": 16}
    assert made.arguments["start_timeout"] == 900.0
    assert made.events == ["start /base"] and syncs.events == [("sync by reload", str(tuned))]
    server.stop()
    server.start(adapted(other, "/older"))  # a run that starts from what an earlier one has merged
    server.serve(tuned)
    assert FakeVLLM.made[1].events == [f"start {other}"]


def test_adapters_that_vllm_refuses_are_served_merged(make, syncs, tmp_path, caplog):
    merged = []

    def merge(folder):
        merged.append((folder, len(syncs.events)))

    tuned = adapted(tmp_path / "tuned", "/base")
    server = make(servers=2, merge=merge, **LORA)
    syncs.fail["http://server-1/v1"] = WeightSyncError("no")
    assert server.serve(tuned).fell_back.startswith("vLLM does not serve this run's adapters")
    assert [made.serves_adapters for made in FakeVLLM.made] == [False, False]
    assert [made.events[-1] for made in FakeVLLM.made] == [f"start {tuned}"] * 2
    assert "gets merged weights from now on" in caplog.text
    assert merged[0] == (tuned, 2)  # once they had refused it, and before they were started with it
    server.serve(other := adapted(tmp_path / "other", "/base"))
    assert merged[-1][0] == other


FETCHED = {
    **LORA,
    "joined_servers": ["http://one:1"],
    "adapters": "mirror",
    "mirror": "s3://bucket/run",
}


def test_adapters_that_are_fetched_are_never_merged(make, syncs, tmp_path, monkeypatch):
    """Nobody at another site would find merged weights; whoever does not serve the adapter is left
    out.
    """
    monkeypatch.setenv("TTRL_SERVER_KEY", "secret")
    tuned = adapted(tmp_path / "iterations/0003/checkpoint", "/base")
    given = {"run": str(tmp_path), "merge": lambda folder: pytest.fail("merged"), **FETCHED}
    server = make(**given)
    syncs.fail["http://server-0/v1"] = WeightSyncError("no")
    assert server.serve(tuned).left_out == {"http://server-0/v1": "no"}
    assert FakeVLLM.made[0].serves_adapters and [client.base_url for client in server.servers] == [
        "http://one:1"
    ]
    other = make(**given, servers=0)
    syncs.fail["http://one:1"] = WeightSyncError("no")
    with pytest.raises(WeightSyncError, match=r"^no$"):
        other.serve(tuned)


@pytest.mark.parametrize(
    "change",
    [{"mirror": None}, {"joined_servers": []}, {"training": {}}, {"training": {"lora_rank": 400}}],
)
def test_what_fetching_adapters_takes(change, monkeypatch):
    monkeypatch.setenv("TTRL_SERVER_KEY", "secret")
    problem = (
        "adapters is 'mirror', but that needs a mirror, joined_servers, and adapters supported by "
        "vLLM"
    )
    assert any(line.startswith(problem) for line in config_of(**FETCHED | change).problems())
    assert config_of(**FETCHED).gives_adapters and not config_of(**FETCHED).problems()
    assert not config_of(**FETCHED | {"run": "s3://bucket/run", "mirror": None}).problems()


@pytest.mark.parametrize(
    "settings",
    [
        {"training": {}},
        {"training": {"lora_rank": 4, "lora_kind": "dora"}},
        {"training": {"lora_rank": 4, "lora_base_dtype": "nf4"}},
        {"training": {"lora_rank": 4, "lora_targets": ["q_proj", "output"]}},
        {"training": {"lora_rank": 400}},
        {**LORA, "adapters": "merged"},
        {**LORA, "joined_servers": ["http://h:1"]},
    ],
)
def test_when_adapters_are_merged(settings):
    assert not config_of(**settings).gives_adapters and config_of(**LORA).gives_adapters


@pytest.mark.parametrize(("family", "rank"), [("qwen2", 16), ("phi3", 32)])
def test_a_family_that_stores_matrices_as_one_needs_more_of_vllms_rank(tmp_path, family, rank):
    (tmp_path / "config.json").write_text(f'{{"model_type": "{family}"}}')
    config = config_of(model=str(tmp_path), training={"lora_rank": 10})
    made = make_server(config, tmp_path, tmp_path / "log", adapters=True)
    assert made.extra_args["max-lora-rank"] == rank
    assert config_of(model=str(tmp_path), training={"lora_rank": 400}).gives_adapters == (
        family == "qwen2"
    )
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')  # to which vLLM takes none
    assert not config_of(model=str(tmp_path), training={"lora_rank": 10}).gives_adapters


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_mixtures_adapters_are_merged_on_cpus(device, tmp_path):
    """There vLLM's experts know none, and a server with adapters ends at its start."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts": 8}')
    config = config_of(model=str(tmp_path), device=device, training={"lora_rank": 4})
    assert config.gives_adapters == (device == "cuda")


# Settings


def test_the_key_of_joined_servers(monkeypatch):
    monkeypatch.delenv("TTRL_SERVER_KEY", raising=False)
    [problem] = config_of(**JOINED).server_problems()
    assert "no key for http://one:1, http://two:2/v1; export TTRL_SERVER_KEY=" in problem
    monkeypatch.setenv("TTRL_SERVER_KEY", " secret\r\n")
    assert config_of(**JOINED).joined_keys() == {
        "http://one:1": "secret",
        "http://two:2/v1": "secret",
    }
    assert "secret" not in str(config_of(**JOINED).to_dict())
    monkeypatch.setenv("TTRL_SERVER_KEY", "two\nlines")
    [problem] = config_of(**JOINED).server_problems()
    assert "is not a single ASCII word" in problem and "two\n" not in problem


@pytest.mark.parametrize(
    "settings, problem",
    [
        ({"servers": -1}, "servers is -1"),
        ({"servers": 0}, "no server would sample"),
        ({"joined_servers": ["10.0.0.7:8000"]}, "is not an address such as"),
        ({"joined_servers": ["http://h:80x"]}, "is not an address such as"),
        ({"joined_servers": ["http://["]}, "'http://[' is not an address such as"),
        ({"joined_servers": ["http://user:secret@h:1"]}, "put keys into TTRL_SERVER_KEY"),
        ({"joined_servers": ["http://h:1", "http://h:1/v1"]}, "names a server twice"),
    ],
)
def test_settings_that_cannot_be_meant(settings, problem):
    found = config_of(**settings).problems()
    assert any(problem in line for line in found) and "secret" not in str(found)


@pytest.mark.parametrize(
    "way", [{"weight_sync": "sleep"}, {"weight_sync": "memory"}, {"weight_sync": "reload"}], ids=str
)
def test_servers_that_will_sleep_are_started_so(way):
    sleeps = {
        placement: "enable-sleep-mode"
        in make_server(config_of(placement=placement, **way), A, Path("log"), cpu=False).extra_args
        for placement in ("colocated", "split")
    }
    together = way["weight_sync"] != "reload"
    assert sleeps == {"colocated": together, "split": way["weight_sync"] == "sleep"}


def test_devices_are_divided(syncs, monkeypatch):
    assert shares_of_devices(2, 2, ["0", "1", "GPU-x", "3", "4"]) == ["0,1", "GPU-x,3"]
    with pytest.raises(
        ConfigError, match=r"servers is 3, with 2 GPUs each .* but there are 5 GPUs"
    ):
        shares_of_devices(3, 2, list("01234"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    config = config_of(servers=2, server={"tensor_parallel_size": 2})
    assert server_environments(config, cpu=False) == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "6,7"},
    ]
    ray = config_of(
        servers=2, server={"tensor_parallel_size": 8, "distributed_executor_backend": "ray"}
    )
    assert server_environments(ray, cpu=False) == [{}, {}]


def test_trainer_and_servers_that_are_split_have_no_gpu_in_common(syncs, tmp_path, monkeypatch):
    """One server too, which elsewhere takes the first GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-x,6,7")
    for servers, each, expected in ((1, 1, ["6"]), (2, 1, ["6", "7"]), (1, 2, ["6,7"])):
        config = config_of(
            placement="split",
            nproc_per_node=2,
            servers=servers,
            server={"tensor_parallel_size": each},
        )
        assert server_environments(config, cpu=False) == [
            {"CUDA_VISIBLE_DEVICES": share} for share in expected
        ]
    trainer = Trainer(config, RunFolder(tmp_path), Console(quiet=True))
    assert trainer._variables() == {"CUDA_VISIBLE_DEVICES": "4,GPU-x"}
    # There, Ray gives out the devices.
    for settings in ({}, {"placement": "split", "servers": None, "cluster": "auto"}):
        assert (
            Trainer(
                config_of(nproc_per_node=2, **settings), RunFolder(tmp_path), Console(quiet=True)
            )._variables()
            == {}
        )
    with pytest.raises(ConfigError, match="none is left to serve"):
        server_environments(config_of(placement="split", nproc_per_node=4), cpu=False)
