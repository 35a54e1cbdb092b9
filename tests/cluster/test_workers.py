"""Sampling workers as actors of a Ray cluster: their groups are those of one process, also when one
of them is killed.
"""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.packages import install_from_the_page
from support.ray_cluster import RayCluster, cluster_of

from ttrl import TrainConfig
from ttrl.errors import ConfigError
from ttrl.tiny_model import make_tiny_model

SLOW_IMPORTS = """
import sys, time
if any(word.endswith("default_worker.py") for word in sys.orig_argv[1:2]):
    time.sleep(40)
"""
SCRIPT = textwrap.dedent(
    """
    import asyncio, contextlib, dataclasses, json, os, signal, sys
    from pathlib import Path

    sys.path.insert(0, sys.argv[3])
    from support import bad_server
    from ttrl import Task, TrainConfig
    import ray
    from ttrl.cluster.ray_connection import actor_class, connect
    from ttrl.cluster.trainers import ClusterTrainer
    from ttrl.cluster.workers import start_workers
    from ttrl.errors import UserError
    from ttrl.records import Endpoint
    from ttrl.rollouts.divided import get_divided_results
    from ttrl.rollouts.request import SamplingRequest
    from ttrl.rollouts.task_results import get_task_results

    model, address = sys.argv[1:3]
    connect(address)
    config = TrainConfig(run="run", model=model, iterations=1, cluster=address, servers=4, sampling_workers=2,
                         device="cpu")
    shares = start_workers(config, Path(model))

    def grade(choice):
        return float(len(choice.message.content or "")), {"pid": os.getpid()}

    def rows(results):
        return [{**dataclasses.asdict(sample), "metrics": {}} for sample in results.samples]

    done, killed = [], []

    def kill_one(group):
        done.append(group.task_id)
        pid = int(group.samples[0].metrics["pid"])
        if len(done) >= 10 and not killed and pid != os.getpid():
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    class Devices:
        def seen(self):
            return os.environ.get("CUDA_VISIBLE_DEVICES", "all")

    def devices(count):
        return ray.get(actor_class(Devices, num_cpus=0, num_gpus=count).remote().seen.remote())

    def start_trainer():
        nowhere = Path("nowhere").absolute()
        try:
            ClusterTrainer(dataclasses.replace(config, nnodes=2), nowhere, nowhere, {}).start()
        except UserError as error:
            return str(error)

    async def main():
        trainer = asyncio.create_task(asyncio.to_thread(start_trainer))
        tasks = [Task([{"role": "user", "content": f"task {k}"}], grade, id=f"task {k}") for k in range(60)]
        async with contextlib.AsyncExitStack() as stack:
            servers = [await stack.enter_async_context(bad_server.serving(latency=0.3)) for _ in range(4)]
            endpoints = [Endpoint(server.url, "key") for server in servers]
            given = {"model": "m", "n": 3, "params": {"seed": 3}, "pbar": False, "concurrency": 8, "max_downtime": 10.0}
            alone = await get_task_results(tasks, endpoints, **given)
            request = SamplingRequest(client=endpoints, on_task_done=kill_one, **given)
            results = await get_divided_results(tasks, await asyncio.to_thread(shares, endpoints), request)
        pids = {int(sample.metrics["pid"]) for sample in results.samples}
        print(json.dumps({
            "same": rows(alone) == rows(results), "killed": len(killed), "once": sorted(done) == sorted(t.id for t in tasks),
            "lead_grades": os.getpid() in pids, "workers": len(pids),
            "devices": [await asyncio.to_thread(devices, count) for count in (0, 2)],
            "trainer": (await trainer).split(";")[-1],
            "tokenized": sum(len(group.prepared.sequences or ()) for group in results),
        }), flush=True)

    asyncio.run(main())
    """
)


@pytest.mark.e2e
@pytest.mark.timeout(500)
def test_a_worker_is_killed_and_nothing_is_lost(cluster: RayCluster, tmp_path: Path) -> None:
    """Only this samples in actors of Ray, and shows which GPUs an actor sees and what a trainer
    there says.
    """
    check_that_nothing_is_lost(cluster, tmp_path)


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(600)
def test_nothing_is_lost_where_workers_start_slowly(tmp_path: Path) -> None:
    """Long: only here do actors take longer to start than Ray waits for an answer. All else is
    tried above.
    """
    pytest.importorskip("ray")
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORTS)
    with cluster_of(tmp_path, {"a": 2, "b": 2}, PYTHONPATH=str(tmp_path)) as cluster:
        check_that_nothing_is_lost(cluster, tmp_path)


def check_that_nothing_is_lost(cluster: RayCluster, folder: Path) -> None:
    model = make_tiny_model(folder / "model", layers=1, width=64, heads=2)
    (folder / "drive.py").write_text(SCRIPT)
    words = [
        sys.executable,
        str(folder / "drive.py"),
        str(model),
        cluster.address,
        str(Path(__file__).parents[1]),
    ]
    ended = subprocess.run(
        words, env=cluster.environment, capture_output=True, text=True, timeout=480
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    # One of the groups has strings of tokens that are not this tokenizer's: it is left to whoever
    # packs.
    assert found.pop("workers") in (2, 3) and found.pop("tokenized") >= 59 * 3, found
    none, two = found.pop("devices")
    assert none == "" and len(two.split(",")) == 2
    assert found.pop("trainer") == " put the run folder on a file system of all machines"
    assert found == {"same": True, "killed": 1, "once": True, "lead_grades": False}


NAMES = """
import json, sys, ray
ray.init(address=sys.argv[1], logging_level="WARNING")

@ray.remote
def names():
    from ttrl.configs.objective_settings import ObjectiveConfig
    from ttrl.evaluation.families import TaskSpec
    from ttrl.training.objective.objective import objective_from

    loss = objective_from(ObjectiveConfig(objective="one_sided")).policy_loss
    return [loss.function.func.__module__, TaskSpec.parse("vowels").tasks(1)[0].id[:7]]

place = {"env_vars": {"PYTHONPATH": sys.argv[2]}}
print(json.dumps(ray.get(names.options(runtime_env=place).remote())))
"""


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_worker_finds_names_of_another_package(cluster: RayCluster, tmp_path: Path) -> None:
    """Only this loads entries of another package in a worker of Ray."""
    install_from_the_page(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", NAMES, cluster.address, str(tmp_path)],
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ["ttrl_vowels.losses", "vowels/"]


def test_how_many_workers_a_run_has() -> None:
    pytest.importorskip("ray")
    from ttrl.cluster.workers import worker_count

    def count(**settings: object) -> int:
        return worker_count(
            TrainConfig(run="r", model="m", iterations=1, cluster="auto", **settings)
        )  # type: ignore[arg-type]

    assert [count(servers=n) for n in (1, 32, 33, 1000)] == [0, 0, 3, 63]
    assert count(servers=2, sampling_workers=4) == 2 and count(servers=100, sampling_workers=0) == 0
    assert count(servers=100, tokens_per_iteration=1000) == 0


def test_workers_need_a_cluster() -> None:
    with pytest.raises(ConfigError, match="sampling_workers is 2, but there is no cluster"):
        TrainConfig(run="r", model="m", iterations=1, sampling_workers=2).check("TrainConfig")
