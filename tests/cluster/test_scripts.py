"""The files in cluster/, with stand-ins for SLURM's commands: SLURM and SkyPilot are not here."""

import os
import subprocess
from pathlib import Path

import yaml

CLUSTER = Path(__file__).parents[2] / "cluster"


def test_the_slurm_script(tmp_path: Path) -> None:
    for name, text in (("scontrol", "echo host-a; echo host-b"), ("srun", 'printf "%s\\n" "$RAY_AUTH_MODE" "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "host-[a-b]", "SLURM_JOB_NUM_NODES": "2"}
    command = ["bash", str(CLUSTER / "slurm.sh"), "recipes/gsm8k.py", "--data", "a b"]
    environment = os.environ | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0] == "token" and "--nodes=2" in said
    ray = said[said.index(".venv/bin/ray") :]
    assert ray[1:7] == ["symmetric-run", "--address", "host-a:6379", "--min-nodes", "2", "--"]
    assert ray[7:] == [".venv/bin/python", "recipes/gsm8k.py", "--data", "a b", "--cluster", "auto"]


def test_the_skypilot_task() -> None:
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n", "-c", task[part]], check=True)
    given = task["envs"].keys() | task["secrets"].keys()
    assert given >= {"NFS", "MODEL", "RECIPE", "ARGUMENTS", "RUN", "TOKEN"}
    assert all(f"${name}" in (task["setup"] + task["run"]).replace("{", "") for name in given)
