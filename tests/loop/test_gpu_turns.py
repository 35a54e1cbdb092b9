"""Who holds a GPU, and when: the real loop, trainer and keeper of servers, on processes that are
threads and book what they hold.

The GPU refuses what CUDA and vLLM refuse: more than there is, a server that starts where less is
free than it was promised, and memory that others take or give back while it profiles. Trainer and
server fit one after the other, and not at the same time.
"""

import functools
import itertools
import json
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from support.fake_vllm import canary_of
from support.world import FakeServer, World

from ttrl.errors import ServerError, ServerStartError, TrainerDiedError, TrainerError
from ttrl.launch.trainer import Trainer
from ttrl.server.vllm import VLLMServer
from ttrl.system.files import read_jsonl
from ttrl.system.request_folder import RequestFolder
from ttrl.weights.policy_server import PolicyServer
from ttrl.weights.sync import SyncReport
from ttrl.weights.verify import Proof

TOTAL, TRAINS, PARKED, ASLEEP = 80, 60, 1, 2  # GB


class Gpu:
    """Its account. events: what happened, in order."""

    def __init__(self):
        self.held, self.events, self._lock = {}, [], threading.Lock()
        self._profiling = None

    def hold(self, who, amount):
        """Hold this much from now on. Raises MemoryError."""
        with self._lock:
            if self.held.get(who, 0) == amount:
                return
            self.held[who] = amount
            self.events.append(f"{who} {amount}")
            if self._profiling not in (None, who):
                self.events.append(f"{who} disturbs {self._profiling}")
            if sum(self.held.values()) > TOTAL:
                raise MemoryError(f"CUDA out of memory: {self.held}")

    def start(self, who, promised):
        """Profile as a server does, and hold what it was promised. Raises ServerStartError."""
        with self._lock:
            self._profiling, before = who, dict(self.held)
            if TOTAL - sum(before.values()) < promised:
                raise ServerStartError(f"free memory on startup is less than desired: {before}")
        for _ in range(20):
            time.sleep(0.005)
        with self._lock:
            self._profiling = None
            if self.held != before:
                raise ServerStartError(f"error in memory profiling: {before}, now {self.held}")
        self.hold(who, promised)


@dataclass
class Turns:
    """A run's GPU, and what happens on it."""

    world: World
    promised: int
    """GB of the server."""
    meet: threading.Barrier | None = None
    """Where server and trainer wait for each other."""
    dies: set[int] = field(default_factory=set)
    """Iterations after which the trainer dies, once."""
    gpu: Gpu = field(default_factory=Gpu)

    def of(self, kind):
        """The class on this GPU."""
        return type(kind.__name__, (kind,), {"turns": self})


class TrainerThread:
    """A trainer's process, as a thread that books what it holds."""

    turns: Turns

    def __init__(self, command, log_path, progress, variables=None):
        self.progress, self._thread, self._error = (
            progress,
            threading.Thread(target=self._run),
            None,
        )
        self._config = yaml.safe_load(Path(command[-1]).read_text())

    def start(self):
        self._thread.start()
        return self

    def _run(self):
        error = None
        try:
            self._follow()
        except BaseException as raised:  # noqa: BLE001 - told to who asks
            error = raised if isinstance(raised, TrainerDiedError) else TrainerError(repr(raised))
        self.turns.gpu.hold("trainer", 0)
        self._error = error

    def _follow(self):
        self.turns.gpu.hold("trainer", TRAINS)
        if self._config["follow"] is None:
            return self._work(self._config)
        self._park()
        folder = RequestFolder(self._config["follow"])
        for number in itertools.count(1):
            if (request := folder.next_request(number)) is None:
                return None
            config = yaml.safe_load(request.read_text())
            if config["packed"] or config["kept"] is None:
                self.turns.gpu.hold("trainer", TRAINS)
            self._work(config)
            self._park()
            if config["packed"] and config["hand_over"]:
                asked = len(self.turns.world.requests)
                said = {"memory": "", "parts": [], "canary": canary_of(0.5)}
                folder.put_handover(number, said)
                if config["iteration"] in self.turns.dies:
                    self.turns.dies.remove(config["iteration"])
                    while len(self.turns.world.requests) == asked:
                        time.sleep(0.001)
                    self.turns.gpu.events.append("dies")
                    raise TrainerDiedError("the trainer failed (killed by signal 9)")
            folder.put_answer(number, {})

    def _park(self):
        if self._config["free_memory"]:
            self.turns.gpu.hold("trainer", PARKED)

    def _work(self, config):
        self.turns.gpu.events.append("trains" if config["packed"] else "canary")
        if self.turns.meet is not None and not config["packed"]:
            self.turns.meet.wait()
        if config["packed"]:
            self.turns.world.fake_tune(config, None)
        elif config["kept"] is not None:
            self.turns.world.fake_files(Path(config["output_dir"]), config["kept"])
        else:
            self.turns.world.fake_canary(Path(config["output_dir"], "checkpoint"))

    def ended(self):
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def show(self, done, **_):
        while not done():
            time.sleep(0.001)

    def log_task_to(self, path):
        pass

    def stop(self, *_):
        self._thread.join()

    __enter__ = start
    __exit__ = stop


class ServerOnGpu(VLLMServer):
    """A server that books what it holds."""

    turns: Turns
    is_started = has_ended = False

    def start(self):
        self.is_started = True
        if self.turns.meet is not None:
            self.turns.meet.wait()
        self.turns.gpu.start("server", self.turns.promised)

    def stop(self):
        self.is_started = False
        self.turns.gpu.hold("server", 0)

    def check(self):
        pass

    def open_version(self):
        return self.version

    def open_to(self, version):
        self.version = version

    def request(self, method, path, *_, **__):
        if path.startswith("/sleep"):
            self.turns.gpu.hold("server", ASLEEP)
        elif path not in ("/reset_prefix_cache", "/ttrl/weights"):
            raise ServerError(f"{method} {path}: 404")
        return {"success": True}


def sync(server, folder, *, mode, asleep, **_):
    """Stands in for the transfer of weights."""
    if mode == "restart":
        server.stop()
        server.start()
    server.turns.gpu.hold("server", server.turns.promised)
    return SyncReport(mode, 0.0, Proof(canary_max_difference=0.0))


class Keeper(PolicyServer):
    """The real keeper of a server on the GPU; its answers are those of the world's."""

    turns: Turns

    def __init__(self, config, logs, console, **_):
        super().__init__(config, logs, console, own=self.turns.of(ServerOnGpu), sync=sync)

    def endpoints(self):
        self.check()
        fake = type("Server", (FakeServer,), {"world": self.turns.world})(None, None, None)
        fake.checkpoint = self._serving.checkpoint
        return fake.endpoints()


@pytest.fixture
def run(world):
    """`run(promised, **settings)`: the account of a run whose server is promised so much."""

    def made(promised, meet=None, dies=(), **settings):
        turns = Turns(world, promised, meet, set(dies))
        world.trainer_class = functools.partial(Trainer, process=turns.of(TrainerThread))
        world.server_class = turns.of(Keeper)
        result = world.train(**settings)
        assert result.metrics[-1]["iteration"] == settings["iterations"]
        assert not [event for event in turns.gpu.events if "disturbs" in event]
        return turns.gpu.events

    return made


TRAIN = [f"trainer {TRAINS}", "trains"]
LOADED, CANARY = (
    f"trainer {TRAINS}",
    [f"trainer {PARKED}", f"trainer {TRAINS}", "canary", f"trainer {PARKED}"],
)


@pytest.mark.long(but=["memory"])
@pytest.mark.parametrize("weight_sync", ["sleep", "restart", "memory"])
def test_on_one_gpu_the_trainer_parks_before_the_server_starts(run, weight_sync):
    """And so at every turn, also when the run is continued.

    Long for restarts and sleep: only these hand over by files.
    """
    rests = f"server {0 if weight_sync == 'restart' else ASLEEP}"
    turn = [rests, *TRAIN, f"trainer {PARKED}", "server 70"]
    ends = ["server 0", "trainer 0"]
    events = run(70, device="cuda", weight_sync=weight_sync, iterations=2)
    assert (
        events[:-2] == [LOADED, *CANARY, "server 70", *turn, *turn] and sorted(events[-2:]) == ends
    )
    events = run(70, device="cuda", weight_sync=weight_sync, iterations=3)
    # The trainer loads while the server rests.
    first = [rests, LOADED, f"trainer {PARKED}", *turn[1:]]
    assert events[:-2] == ["server 70", *first] and sorted(events[-2:]) == ends


@pytest.mark.parametrize("every", [1, 5])
def test_on_one_gpu_a_trainer_that_died_trains_again_when_the_server_sleeps(run, world, every):
    """While it wrote its files and the server sampled, which goes on first; or after that, where
    its weights are lost with it.
    """
    events = run(70, device="cuda", weight_sync="memory", save_every=every, iterations=3, dies=[2])
    died = events.index("dies")
    assert events.count("trains") == (4 if every == 1 else 5)
    assert events[died - 1] == "server 70" and events[died + 1 : died + 3] == [
        "trainer 0",
        f"server {ASLEEP}",
    ]
    assert {
        row["weights_version"] for row in read_jsonl(world.run / "iterations/0003/rollouts.jsonl")
    } == {2}


def test_on_one_gpu_what_no_file_has_is_trained_again_when_the_server_sleeps(run, world):
    """The run is continued by a policy that was in memory alone: the server starts with an older
    one, and gives way.
    """
    settings = {"device": "cuda", "weight_sync": "memory", "save_every": 5}
    run(70, iterations=3, **settings)
    last = world.run / "iterations" / "0003"
    marker = json.loads((last / "done" / "train.json").read_text())
    marker["facts"]["saved"] = False
    (last / "done" / "train.json").write_text(json.dumps(marker))
    for name in ("checkpoint", "state"):
        shutil.rmtree(last / name)
    events = run(70, iterations=4, **settings)
    assert (
        events[:3] == ["server 70", f"server {ASLEEP}", f"trainer {TRAINS}"]
        and events.count("trains") == 4
    )
    assert {
        row["weights_version"] for row in read_jsonl(world.run / "iterations/0004/rollouts.jsonl")
    } == {3}


def test_on_one_gpu_a_trainer_that_is_started_for_each_iteration_is_gone_before_the_server_starts(
    run,
):
    turn = [f"server {ASLEEP}", *TRAIN, "trainer 0", "server 70"]
    events = run(70, device="cuda", weight_sync="sleep", trainer="once", iterations=2)
    assert events == [LOADED, "canary", "trainer 0", "server 70", *turn, *turn, "server 0"]


def test_on_one_gpu_a_server_that_stays_is_promised_what_the_trainer_leaves(run):
    for iterations, began in (
        (1, [LOADED, *CANARY, "server 15"]),
        (2, ["server 15", LOADED, f"trainer {PARKED}"]),
    ):
        events = run(15, device="cuda", iterations=iterations)
        assert events[:-2] == [*began, *TRAIN, f"trainer {PARKED}"] and sorted(events[-2:]) == [
            "server 0",
            "trainer 0",
        ]


@pytest.mark.parametrize(
    "settings", [{"device": "cpu"}, {"device": "cuda", "placement": "split"}], ids=str
)
def test_on_a_cpu_and_with_gpus_of_their_own_nobody_waits(run, world, settings, monkeypatch):
    """The server starts while the trainer loads: neither of the two would be done without the
    other.
    """
    world.gpus = [TOTAL * 1e9] * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    run(15, meet=threading.Barrier(2, timeout=60), iterations=1, **settings)
