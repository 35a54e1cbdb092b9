"""The files in cluster/: which commands each machine runs, and when they end. Stand-ins for Python and curl; SLURM and SkyPilot
are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ttrl import TrainConfig
from ttrl.cli import make_parser
from ttrl.cli.recipe_script import script_arguments
from ttrl.cli.settings import with_settings

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "cluster"
ADDRESSES = "10.0.0.1 10.0.0.2 10.0.0.3 10.0.0.4"
# Says what it was asked for. The leading one ends when the others have said it, the others do not by themselves.
PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$SEEN.new" && mv "$SEEN.new" "$SEEN"
if [[ $1 == -m ]]; then exec sleep 1000; fi
until [[ $(ls "$(dirname "$SEEN")" | grep -c '^rank-[0-9]$') == "$EXPECTED" ]]; do sleep 0.02; done
exit "$STATUS"
"""


def start(folder: Path, rank: int, *, trainers: int = 2, status: int = 0, addresses: str = ADDRESSES) -> subprocess.Popen[str]:
    for name, text in (("python", PYTHON), ("curl", "#!/bin/sh\nexit 0\n")):
        if not (folder / name).exists():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
    own = {"RUN": str(folder / "runs" / "one"), "MODEL": "/shared/model", "NODE_ADDRESSES": addresses, "JOB": "a/1"}
    own |= {"NODE_RANK": str(rank), "TRAINERS": str(trainers), "GPUS_PER_NODE": "8", "POLL_SECONDS": "0.02"}
    own |= {"PYTHON": str(folder / "python"), "PATH": f"{folder}:{os.environ['PATH']}", "SEEN": str(folder / f"rank-{rank}")}
    own |= {"EXPECTED": str(len(addresses.split())), "STATUS": str(status)}
    command = ["bash", str(CLUSTER / "node.sh"), "recipes/gsm8k.py", "--data", "/shared/data"]
    return subprocess.Popen(command, env=os.environ | own, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_every_machine_does_its_part_and_ends_with_the_leading_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    machines = [start(tmp_path, rank, status=3) for rank in (3, 2, 1, 0)][::-1]
    try:
        said = [machine.communicate(timeout=60)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [3, 0, 0, 0], said
    lead, join, *serve = [(tmp_path / f"rank-{rank}").read_text().splitlines() for rank in range(4)]
    run, key = tmp_path / "runs" / "one", tmp_path / "runs" / "one.key"

    monkeypatch.setattr(sys, "argv", [*lead, "--set", "lr=1e-3"])
    given = script_arguments(None, run="", iterations=1, model="", data="")
    assert (given.run, given.model, given.nproc_per_node, given.data) == (run, "/shared/model", 8, "/shared/data")
    config, problems = with_settings(TrainConfig(run=str(run), model="m", iterations=1, nproc_per_node=8), given.set)
    assert config.training == {"lr": 1e-3}
    assert problems == config.problems() == []
    assert (config.processes, config.endpoint({}), config.servers) == (16, "10.0.0.1:29400", 0)
    assert config.joined_servers == ["http://10.0.0.3:8000", "http://10.0.0.4:8000"]

    assert join[:3] == ["-m", "ttrl.cli", "join"]
    joining = make_parser().parse_args(join[2:])
    assert joining.run == run
    for number, command in enumerate(serve, 2):
        serving = make_parser().parse_args(command[2:])
        assert (serving.model, serving.host, serving.port) == ("/shared/model", f"10.0.0.{number + 1}", 8000)
        assert (serving.key_file, serving.dtype, serving.vllm) == (key, "bfloat16", ["tensor_parallel_size=8"])
    assert key.stat().st_mode & 0o777 == 0o600 and len(key.read_text().strip()) >= 32
    assert not any(key.read_text().strip() in text for text in said)


def test_one_machine_alone_is_told_of_no_others(tmp_path: Path):
    machine = start(tmp_path, 0, trainers=1, addresses="10.0.0.1")
    assert machine.communicate(timeout=60)[0] == "" and machine.returncode == 0
    lead = (tmp_path / "rank-0").read_text().splitlines()
    assert lead[lead.index("--set") + 1 : -2] == ["nnodes=1"]


def test_more_trainers_than_machines(tmp_path: Path):
    machine = start(tmp_path, 0, trainers=5)
    assert "TRAINERS is 5, and there are 4 machines" in machine.communicate(timeout=60)[0] and machine.returncode == 2


def test_the_slurm_script_and_the_skypilot_task(tmp_path: Path):
    """That they are well-formed, and give node.sh what it asks for."""
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    slurm = (CLUSTER / "slurm.sh").read_text()
    for text in (slurm, task["setup"], task["run"]):
        done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
        assert done.returncode == 0 and not done.stderr
    for name in ("NODE_ADDRESSES", "NODE_RANK", "JOB", "GPUS_PER_NODE"):
        assert f"{name}=" in slurm and f"{name}=" in task["run"]
    assert {"RUN", "MODEL", "TRAINERS"} <= task["envs"].keys() and task["num_nodes"] >= int(task["envs"]["TRAINERS"])
    assert (ROOT / task["envs"]["RECIPE"]).is_file() and json.dumps(task)
    # SLURM's commands in small: two machines, of which one resolves its own name to the loopback.
    for name, text in {
        "scontrol": "echo node-a; echo node-b",
        "getent": 'test $2 = node-b && echo "10.0.0.2 STREAM node-b" || echo "127.0.1.1 STREAM node-a"',
        "hostname": "echo 10.0.0.1 172.17.0.1",
        "srun": 'echo "$NODE_ADDRESSES" "$RUN" "$JOB" "$GPUS_PER_NODE" "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[a-b]"}
    variables |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(CLUSTER / "slurm.sh"), "recipes/gsm8k.py", "--data", "d"]
    done = subprocess.run(command, env=os.environ | variables, text=True, capture_output=True)
    expected = f"10.0.0.1 10.0.0.2 {tmp_path}/runs/gsm8k 7-0 8 --nodes=2"
    assert done.stdout.replace("\n", " ").startswith(expected), done
    assert done.stdout.rstrip().endswith("recipes/gsm8k.py --data d")
