"""A run on a Ray cluster of several raylets on this machine: two trainers, two servers, and what is
lost meanwhile.

Long: only this runs vLLM and trainers as actors of Ray. The lead, sampling workers and the weights'
way are each tried with Ray and without vLLM in test_lead.py, test_workers.py and test_broadcast.py;
losses of servers on fake parts: tests/weights/test_policy_server.py.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import network_hosts
from support.ray_cluster import RayCluster, RayHosts, cluster_of, ray_hosts

from ttrl.system.files import read_jsonl
from ttrl.tiny_model import make_tiny_model

pytest.importorskip("ray")
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]
SERVER, ENGINE, TRAINER = "ttrl.vllm_worker.api_server", "VLLM::EngineCore", "ttrl.grpo_recipe"
SCRIPT = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from ttrl import Task, TrainConfig, train

    run, model, address, nnodes, servers, workers, iterations, rank = sys.argv[1:]

    def grade(choice):
        metrics = Path(run, "metrics.jsonl")
        rows = metrics.read_text().count(chr(10)) if metrics.exists() else 0
        while rows >= 2 and not Path(run).with_name(f"gate{rows}").exists():  # goes on when the test has done its deed
            time.sleep(0.02)
        return sum(ord(letter) % 2 for letter in choice.message.content or "") / 8

    result = train(
        TrainConfig(
            run=run, model=model, iterations=int(iterations), tasks_per_iteration=4, samples_per_task=4, max_tokens=8,
            seq_len=256, num_threads=1, nnodes=int(nnodes), servers=int(servers), cluster=address, join_timeout=120,
            sampling_workers=int(workers), training={"lora_rank": int(rank), "lr": 1e-3} if rank != "0" else {},
            server={"max_model_len": 128, "kv_cache_memory_bytes": 2**26},
        ),
        [Task([{"role": "user", "content": f"say {n}"}], grade, id=f"say/{n}") for n in range(16)],
    )
    print("finished", result.metrics[-1]["iteration"], flush=True)
    """
)


def wait_for(condition: Callable[[], Any], log: Path, child: subprocess.Popen | None = None) -> Any:
    deadline = time.monotonic() + 400
    while not (found := condition()):
        assert child is None or child.poll() is None, log.read_text()[-6000:]
        assert time.monotonic() < deadline, log.read_text()[-6000:]
        time.sleep(0.2)
    return found


def processes(run: Path, what: str) -> list[psutil.Process]:
    """Those of a run whose command has a word in it."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if what in words and str(run) in words:
            found.append(process)
    return found


class Run:
    def __init__(
        self,
        folder: Path,
        cluster: RayCluster,
        nnodes: int,
        servers: int,
        workers: int = 0,
        iterations: int = 2,
        rank: int = 0,
    ) -> None:
        self.path, self.log, self.cluster, self.folder = (
            folder / "run",
            folder / "driver.log",
            cluster,
            folder,
        )
        self.model = make_tiny_model(folder / "model", layers=1, width=64, heads=2, context=128)
        (folder / "run.py").write_text(SCRIPT)
        self.iterations = iterations
        words = [
            str(self.path),
            str(self.model),
            cluster.address,
            *map(str, (nnodes, servers, workers, iterations, rank)),
        ]
        there = cluster.hosts.on(cluster.hosts.names[0]) if isinstance(cluster, RayHosts) else []
        self.command = [*there, sys.executable, str(folder / "run.py"), *words]

    def start(self) -> subprocess.Popen:
        with open(self.log, "a") as log:
            return subprocess.Popen(
                self.command, env=self.cluster.environment, stdout=log, stderr=subprocess.STDOUT
            )

    def reaches(self, rows: int, child: subprocess.Popen | None) -> None:
        """Wait for so many lines of metrics.jsonl; grading stops there until `go_on`."""
        wait_for(lambda: len(self.rows()) >= rows, self.log, child)

    def go_on(self) -> None:
        (self.folder / f"gate{len(self.rows())}").touch()

    def ends(self, child: subprocess.Popen) -> None:
        wait_for(lambda: child.poll() is not None, self.log)
        assert child.returncode == 0 and f"finished {self.iterations}" in self.log.read_text(), (
            self.log.read_text()[-8000:]
        )
        self.check()

    def owner(self) -> int | None:
        path = self.path / "owner.json"
        return json.loads(path.read_text())["pid"] if path.exists() else None

    def rows(self) -> list[dict]:
        path = self.path / "metrics.jsonl"
        return read_jsonl(path, key="iteration") if path.exists() else []

    def check(self) -> None:
        """Every iteration, and as many graded samples in each."""
        assert [row["iteration"] for row in self.rows()] == list(range(self.iterations + 1))
        for number in range(1, self.iterations + 1):
            samples = read_jsonl(self.path / "iterations" / f"{number:04d}" / "rollouts.jsonl")
            assert len(samples) == 16 and all(sample["reward"] is not None for sample in samples), (
                number
            )


def test_a_run_on_two_trainers_five_servers_and_two_workers(tmp_path: Path) -> None:
    """So many servers are given weights by the object store."""
    pool = Path(f"/dev/shm/ttrl-{os.geteuid()}")
    shutil.rmtree(pool, ignore_errors=True)
    with cluster_of(tmp_path, {"a": 6, "b": 6}) as cluster:
        run = Run(tmp_path, cluster, nnodes=2, servers=5, workers=2)
        child = run.start()
        run.reaches(2, child)
        # A second one of the same run is refused.
        second = subprocess.run(
            run.command, env=cluster.environment, capture_output=True, text=True, timeout=120
        )
        assert second.returncode != 0 and "is already active on this cluster" in second.stderr
        # A trainer process is killed: as when its machine is.
        processes(run.path, "ttrl.grpo_recipe")[-1].kill()
        run.go_on()
        run.ends(child)
        assert {row["sync"]["mode"] for row in run.rows() if "sync" in row} == {"reload"}
        assert not re.search("reads .* itself", run.log.read_text())
        assert [path.name for path in pool.iterdir() if path.suffix != ".owner"] == ["lock"]


def test_servers_of_a_cluster_are_given_adapters(tmp_path: Path) -> None:
    """One that is lost starts with the base, and gets the newest again."""
    with cluster_of(tmp_path, {"a": 4, "b": 4}) as cluster:
        run = Run(tmp_path, cluster, nnodes=1, servers=2, iterations=3, rank=4)
        child = run.start()
        run.reaches(2, child)
        run.go_on()
        run.reaches(3, child)
        processes(tmp_path, SERVER)[0].kill()
        wait_for(lambda: " is back" in run.log.read_text(), run.log, child)
        run.go_on()
        run.ends(child)
        assert (
            run.rows()[-1]["sync"]["mode"] == "adapter" and run.rows()[-1]["sync"]["servers"] == 2
        )
        # Merged at the end.
        assert (run.path / "iterations/0003/checkpoint/model.safetensors").exists()


def test_the_machine_of_the_lead_dies_with_what_else_runs_there(tmp_path: Path) -> None:
    with cluster_of(tmp_path, {"a": 3, "b": 3, "c": 3}) as cluster:
        run = Run(tmp_path, cluster, nnodes=2, servers=2)
        child = run.start()
        run.reaches(2, child)
        home = run.owner()
        raylet = " ".join(psutil.Process(home).parent().cmdline())
        nodes = cluster.ask("look")["nodes"]
        victim = next(name for name, node in nodes.items() if node in raylet)
        cluster.ask(f"kill {victim}")
        wait_for(lambda: run.owner() not in (None, home), run.log, child)
        assert not psutil.pid_exists(home)  # two never lead at once
        run.go_on()
        run.ends(child)


@pytest.mark.skipif(not network_hosts.possible(), reason="needs root, ip(8) and network namespaces")
def test_hosts_of_a_network_die_and_are_cut_off(tmp_path: Path) -> None:
    with ray_hosts(tmp_path, ["head", "a", "b", "c", "d"], later=["e"]) as cluster:
        hosts = cluster.hosts
        run = Run(tmp_path, cluster, nnodes=2, servers=2, iterations=5)

        def running(what: str) -> set[str]:
            """Names of the hosts that have a process with this in its command."""
            words = {
                process.pid: process.info["cmdline"] or []
                for process in psutil.process_iter(["cmdline"])
            }
            return {
                name
                for name in hosts.names
                if any(what in word for pid in hosts.pids(name) for word in words.get(pid, []))
            }

        child = run.start()
        run.reaches(2, child)
        leads, servers, trainers = run.owner(), running(SERVER), running(TRAINER)
        assert (
            len(servers) == len(trainers) == 2
            and not servers & trainers
            and "head" not in servers | trainers
        )
        # A machine that only serves is switched off, and another comes.
        gone = min(servers)
        cluster.kill(gone)
        cluster.add("e")
        run.go_on()
        run.reaches(3, child)
        wait_for(lambda: running(SERVER) == servers - {gone} | {"e"}, run.log, child)
        # A machine that only trains is switched off; the first one is back.
        dead = min(running(TRAINER))
        cluster.kill(dead)
        cluster.add(gone)
        run.go_on()
        run.reaches(4, child)
        assert running(TRAINER) == trainers - {dead} | {gone}
        # The cable of a serving machine is pulled, and put back after that was noticed.
        cut = min(running(SERVER))
        hosts.cut(cut)
        run.go_on()
        run.reaches(5, child)
        assert re.search(rf"//{hosts.address(cut)}:\d+\S* is (taken|left) out", run.log.read_text())
        hosts.mend(cut)
        # The program that began the run is killed; the run goes on, and the same command waits for
        # it.
        assert run.owner() == leads
        child.kill()
        child.wait()
        run.go_on()
        wait_for(lambda: len(run.rows()) == 6 and run.owner() is None, run.log)
        # Nothing of it runs on, though nobody has asked for the result.
        wait_for(lambda: not running(SERVER) | running(ENGINE) | running(TRAINER), run.log)
        run.ends(run.start())
