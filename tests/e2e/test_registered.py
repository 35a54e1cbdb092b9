"""A run with an objective, tasks and a logger of another package, that of docs/registering.md.

Only this has them in real processes: the command, its trainer, and workers of Ray. What is wrong
with entries: tests/test_registries.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.packages import block, install_from_the_page
from support.ray_cluster import cluster_of

from ttrl.system.files import read_jsonl
from ttrl.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    install_from_the_page(folder)
    return folder


def test_a_run_with_names_of_another_package(site: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", layers=2, width=64, heads=2)
    (tmp_path / "run.yaml").write_text(block("yaml"))
    settings = ["model=model", "iterations=1", "num_threads=1", "seq_len=256", "lr=1e-3"]
    done = subprocess.run(
        [sys.executable, "-m", "ttrl.cli", "train", "run.yaml", "--set", *settings],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "runs" / "run"
    before, after = read_jsonl(run / "metrics.jsonl")
    assert after["trained"] and "right" in before["validation"]
    (step,) = read_jsonl(run / "iterations" / "0001" / "train.jsonl")
    assert step["clip_high_fraction"] >= 0 and step["clip_low_fraction"] == 0
    lines = (run / "by_iteration.txt").read_text().splitlines()
    assert lines == ["0 None", f"1 {float(after['reward'])}"]


SCRIPT = """
import json, sys, ray
ray.init(address=sys.argv[1], logging_level="WARNING")

@ray.remote
def names():
    import os
    from ttrl.configs.objective import ObjectiveConfig
    from ttrl.evaluation.families import TaskSpec
    from ttrl.training.objective.objective import objective_from

    loss = objective_from(ObjectiveConfig(objective="one_sided")).policy_loss
    return [loss.function.func.__module__, TaskSpec.parse("vowels").tasks(1)[0].id[:7]]

print(json.dumps(ray.get(names.remote())))
"""


def test_workers_of_ray_find_the_package(site: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with cluster_of(tmp_path, {"a": 1}, PYTHONPATH=str(site)) as cluster:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, cluster.address],
            env=cluster.environment | {"PYTHONPATH": ""},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ["ttrl_vowels.losses", "vowels/"]
