"""The files in cluster/, with stand-ins for the commands of SLURM and Ray and for a recipe: SLURM
and SkyPilot are not here.
"""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

CLUSTER = Path(__file__).parents[2] / "cluster"
STAND_IN = """\
case "$*" in
  status*) [ "$SKYPILOT_NODE_RANK" = 1 ] || grep -qs head said ;;
  *--head*) trap 'kill $!; echo ended >> said; exit' TERM; sleep 60 & echo "$@" >> said; wait ;;
  *) echo "$@" >> said ;;
esac"""
"""For ray."""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_slurm_script(tmp_path: Path) -> None:
    # More than a pipe holds: scontrol writes until someone has read it.
    many = "seq --format 'host-%.0f' 2 20000"
    program(tmp_path / "scontrol", f"echo host-a; {many}")
    program(
        tmp_path / "getent",
        "echo '127.0.1.1  STREAM host-a'; echo '10.1.2.3  STREAM'; echo '10.1.2.4  STREAM'",
    )
    program(tmp_path / "hostname", "echo '10.1.2.3 10.1.2.4 '")
    program(tmp_path / ".venv/bin/ray", "true")
    program(tmp_path / "srun", 'printf "%s\\n" "$RAY_AUTH_MODE" "$(command -v ray)" "$@"')
    job = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "host-[a-b]",
        "SLURM_JOB_NUM_NODES": "2",
    }
    command = ["bash", str(CLUSTER / "slurm.sh"), "recipes/gsm8k.py", "--data", "a b"]
    environment = os.environ | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert said[:2] == ["token", f"{tmp_path}/.venv/bin/ray"] and "--nodes=2" in said
    ray = said[said.index(".venv/bin/ray") :]
    assert ray[1:7] == ["symmetric-run", "--address", "10.1.2.3:6379", "--min-nodes", "2", "--"]
    assert ray[7:] == [".venv/bin/python", "recipes/gsm8k.py", "--data", "a b", "--cluster", "auto"]


def test_the_skypilot_task() -> None:
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n", "-c", task[part]], check=True)
    given = task["envs"].keys() | task["secrets"].keys()
    assert given >= {"NFS", "MODEL", "RECIPE", "ARGUMENTS", "RUN", "TOKEN"}
    assert all(f"${name}" in (task["setup"] + task["run"]).replace("{", "") for name in given)


@pytest.mark.parametrize(("rank", "code"), [(0, 0), (0, 3), (1, 0)])
def test_what_skypilot_runs_on_a_machine(tmp_path: Path, rank: int, code: int) -> None:
    """Only the first machine runs the recipe, whose exit code is the machine's; and it ends the Ray
    that it started.
    """
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    program(tmp_path / ".venv/bin/ray", STAND_IN)
    program(tmp_path / ".venv/bin/python", f'echo "$@" >> said; exit {code}')
    places = {
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "10.1.2.3\n10.1.2.4",
        "TOKEN": "f" * 64,
    }
    given = {"RECIPE": "gsm8k.py", "RUN": "/r", "MODEL": "m", "ARGUMENTS": "--set nnodes=2"}
    done = subprocess.run(
        ["bash", "-c", task["run"]], cwd=tmp_path, env=os.environ | places | given, timeout=30
    )
    said = (tmp_path / "said").read_text().splitlines()
    assert done.returncode == code
    if rank == 1:
        assert said == ["start --address 10.1.2.3:6479 --block"]
    else:
        assert (
            "gsm8k.py --cluster 10.1.2.3:6479 --run /r --model m --set nnodes=2" in said
            and said[-1] == "ended"
        )
