"""Trainers on several machines: what torchrun is told, from where, and how a machine finds the run that it joins."""

import json
import socket
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from ttrl.errors import RunFolderError, UserError
from ttrl.loop import nodes
from ttrl.loop.config import TrainConfig


def config(**settings) -> TrainConfig:
    return TrainConfig(run="runs/x", model="m", iterations=1, **settings)


SLURM = {"SLURM_JOB_ID": "4242", "SLURMD_NODENAME": "gpu-07", "SLURM_JOB_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("settings", "environment", "expected"),
    [
        ({}, {}, None),
        ({"nproc_per_node": 2}, SLURM, None),
        ({"nnodes": 2, "rdzv_endpoint": "10.0.0.7:29400"}, {}, None),
        ({"nnodes": 2, "rdzv_endpoint": "[fd00::7]:29400"}, {}, None),
        ({"nnodes": 2}, SLURM, None),
        ({"nnodes": 0}, {}, "nnodes is 0; it must be at least 1"),
        ({"nnodes": 2}, {}, "where they meet is not known"),
        ({"nnodes": 2}, {"SLURM_JOB_ID": "4242"}, "where they meet is not known"),
        ({"rdzv_endpoint": "10.0.0.7:29400"}, {}, "nobody would be met there"),
        ({"nnodes": 2, "rdzv_endpoint": "10.0.0.7"}, {}, "must be HOST:PORT"),
        ({"nnodes": 2, "rdzv_endpoint": "http://10.0.0.7:80"}, {}, "must be HOST:PORT"),
        ({"nnodes": 2, "rdzv_endpoint": "10.0.0.7:70000"}, {}, "a port is a number from 1 to 65535"),
        ({"nnodes": 2, "rdzv_endpoint": "a:1", "trainer": "once"}, {}, "needs trainer: resident"),
        ({"nnodes": 3}, SLURM, "this SLURM job has 2"),
    ],
)
def test_settings(settings, environment, expected):
    problems = config(**settings).node_problems(environment)
    assert (problems == []) if expected is None else (len(problems) == 1 and expected in problems[0]), problems


def test_the_meeting_point_of_a_slurm_job():
    assert config(nnodes=2).endpoint(SLURM) == "gpu-07:24242"
    assert config(nnodes=2).endpoint(SLURM | {"SLURM_JOB_ID": "12345678"}) == "gpu-07:25678"
    assert config(nnodes=2, rdzv_endpoint="h:1").endpoint(SLURM) == "h:1"  # what is given counts


def test_rows_are_dealt_to_all_processes():
    assert config(nnodes=3, nproc_per_node=4, rdzv_endpoint="h:1").processes == 12


def test_what_torchrun_is_told():
    from torch.distributed.run import get_args_parser

    arguments = nodes.torchrun_arguments(2, "127.0.0.1:29400", "a1b2", leads=True)
    parsed = get_args_parser().parse_args([*arguments, "script.py"])
    assert (parsed.nnodes, parsed.rdzv_backend, parsed.rdzv_endpoint) == ("2", "c10d", "127.0.0.1:29400")
    assert (parsed.rdzv_id, parsed.local_addr, parsed.standalone) == ("a1b2", "127.0.0.1", False)
    assert parsed.rdzv_conf == "is_host=true"


def test_the_network_is_that_of_the_meeting_point(monkeypatch):
    loopback = next(n for n, found in psutil.net_if_addrs().items() if any(one.address == "127.0.0.1" for one in found))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "chosen")  # by the user
    assert nodes.network_environment("127.0.0.1:29400") == {"GLOO_SOCKET_IFNAME": loopback}
    with pytest.raises(UserError, match=r"nowhere\.invalid:1 cannot be reached from this machine"):
        nodes.local_address("nowhere.invalid:1")


def test_a_machine_joins_each_start_of_the_trainer_once(tmp_path: Path, monkeypatch):
    """Real processes in the place of torchrun; the second one fails, which is for the leading node to say."""
    code = "import os, sys; sys.exit(int(sys.argv[1] == 'fail'))"
    started = []

    def command(arguments):
        started.append(arguments)
        return [sys.executable, "-c", code, "fail" if len(started) == 2 else "well"]

    monkeypatch.setattr(nodes, "tune_command", command)
    said: list[str] = []
    run, endpoint = tmp_path / "run", "127.0.0.1:29400"
    both = config(nnodes=2, rdzv_endpoint=endpoint)
    thread = threading.Thread(target=lambda: said.append(str(nodes.join(run, patience=2.0, say=said.append))))
    thread.start()
    for name in ("one", "two", "three"):
        (run / "trainer" / name).mkdir(parents=True)
        (run / "trainer" / name / "start.yaml").write_text("{}")
        nodes.write_meeting(run / "trainer" / name, both, 4)
        assert json.loads((run / "trainer" / name / "nodes.json").read_text()) == {
            "nnodes": 2,
            "nproc_per_node": 4,
            "endpoint": endpoint,
        }
        while len(started) < len(list((run / "trainer").iterdir())) and thread.is_alive():
            time.sleep(0.01)
    thread.join()
    assert [arguments[-1] for arguments in started] == [str(run / "trainer" / n / "start.yaml") for n in ("one", "two", "three")]
    assert [arguments[arguments.index("--rdzv-id") + 1] for arguments in started] == ["one", "two", "three"]
    assert all(arguments[:3] == ["run", "--nproc_per_node", "4"] for arguments in started)
    assert said[-1] == "3" and sum("this node's part of the trainer failed" in line for line in said) == 1
    assert any(path.name.startswith(f"trainer.{socket.gethostname()}.") for path in (run / "logs").iterdir())


def test_a_run_that_is_not_on_this_machine(tmp_path: Path):
    with pytest.raises(RunFolderError, match="must lie on a file system that all nodes share"):
        nodes.join(tmp_path / "nowhere" / "run")
