"""Trainers on several machines: what torchrun is told, from where, and how a machine finds the run that it joins."""

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from support.pretended_tune import PretendedTune

from ttrl.configs.run import TrainConfig
from ttrl.errors import RunFolderError, UserError
from ttrl.launch import nodes


def config(**settings) -> TrainConfig:
    return TrainConfig(**{"run": "runs/x", "model": "m", "iterations": 1} | settings)


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

    arguments = nodes.torchrun_arguments(2, "127.0.0.1:29400", "a1b2", leads=True, join_timeout=90)
    parsed = get_args_parser().parse_args([*arguments, "script.py"])
    assert (parsed.nnodes, parsed.rdzv_backend, parsed.rdzv_endpoint) == ("2", "ttrl", "127.0.0.1:29400")
    assert (parsed.rdzv_id, parsed.local_addr, parsed.standalone) == ("a1b2", "127.0.0.1", False)
    assert parsed.rdzv_conf == "is_host=true,join_timeout=90"
    assert nodes.torchrun_arguments(2, "[::1]:29400", "a1b2", leads=False, join_timeout=90)[-1] == "::1"


def test_the_network_is_that_of_the_meeting_point(monkeypatch):
    loopback = next(n for n, found in psutil.net_if_addrs().items() if any(one.address == "127.0.0.1" for one in found))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "chosen")  # by the user
    assert nodes.network_environment("127.0.0.1:29400") == {"GLOO_SOCKET_IFNAME": loopback}
    assert nodes.is_loopback("127.0.0.1:29400") and nodes.is_loopback("localhost:1") and nodes.is_loopback("[::1]:1")
    with pytest.raises(UserError, match=r"nowhere\.invalid:1 cannot be reached from this machine"):
        nodes.local_address("nowhere.invalid:1")


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Where somebody listens, in the place of the leading node's torchrun."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def start_trainer(run: Path, name: str, endpoint: str, start: dict | None = None) -> Path:
    """What the leading node leaves for the others."""
    path = run / "trainer" / name
    path.mkdir(parents=True)
    (path / "start.yaml").write_text(yaml.safe_dump(start or {}))
    nodes.write_meeting(path, config(nnodes=2, rdzv_endpoint=endpoint, join_timeout=90), 4)
    return path


def test_a_machine_joins_each_start_of_the_trainer_once(tmp_path: Path, monkeypatch, endpoint: str):
    """Real processes in the place of torchrun; the second one fails, which is for the leading node to say."""
    # The first rank may be here: the leading node's bar is told how far it is all the same.
    told = "import os; open(os.environ['TTRL_PROGRESS_FILE'], 'w').write('3 4')"
    tune = PretendedTune(monkeypatch, tmp_path)
    tune.runs(f"{told}; raise SystemExit('two' in sys.argv[-1])")
    said: list[str] = []
    run = tmp_path / "run"
    paths = [start_trainer(run, "one", endpoint)]
    (run / "config.yaml").write_text(yaml.safe_dump(config(iterations=2).to_dict()))

    def say(text: str) -> None:
        """The leading node: starts the trainer again where it failed, and ends the run after its second iteration."""
        said.append(text)
        if text == "the trainer ended" and len(tune.starts) == 3:
            (run / "metrics.jsonl").write_text('{"iteration": 2}\n')
        elif text == "the trainer ended" or "part of the trainer failed" in text:
            paths.append(start_trainer(run, ("two", "three")[len(tune.starts) - 1], endpoint))

    assert nodes.join(run, say=say, look_seconds=0.01) == 3
    assert [arguments[-1] for arguments in tune.starts] == [str(path / "start.yaml") for path in paths]
    assert [arguments[arguments.index("--rdzv-id") + 1] for arguments in tune.starts] == ["one", "two", "three"]
    assert all(
        arguments[:3] == ["run", "--nproc_per_node", "4"] and "is_host=false,join_timeout=90" in arguments
        for arguments in tune.starts
    )
    assert (
        said[-1] == f"{run} is finished; joined 3 in all"
        and sum("this node's part of the trainer failed" in line for line in said) == 1
    )
    assert [nodes.arrived(path) for path in paths] == [1, 1, 1]  # the leading node knows who came
    assert [(path / "progress").read_text() for path in paths] == ["3 4"] * 3
    assert any(path.name.startswith(f"trainer.{socket.gethostname()}.") for path in (run / "logs").iterdir())


def test_a_trainer_that_does_not_answer_is_not_joined(tmp_path: Path, monkeypatch, endpoint: str):
    """What a leading node that was killed has left; the next one takes its place."""
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as gone:
        nobody = f"127.0.0.1:{gone.getsockname()[1]}"
    old = start_trainer(tmp_path / "run", "old", nobody)
    assert nodes.join(tmp_path / "run", patience=0.0, say=said.append) == 0
    assert f"the trainer at {nobody} does not answer yet" in said[1] and nodes.arrived(old) == 0


def test_a_part_of_a_trainer_that_is_over_is_stopped(tmp_path: Path, monkeypatch, endpoint: str):
    """Such as one that came when the leading node had just started another: it would wait for a meeting without others."""
    path = start_trainer(tmp_path / "run", "one", endpoint)
    PretendedTune(monkeypatch, tmp_path).runs(f"import shutil, time; shutil.rmtree({str(path)!r}); time.sleep(1000)")
    said: list[str] = []
    assert nodes.join(tmp_path / "run", patience=0.0, say=said.append, look_seconds=0.01, grace_seconds=0.0) == 1
    assert "the leading node has ended this trainer; its part here is stopped" in said


def test_a_machine_that_cannot_take_part(tmp_path: Path, endpoint: str):
    path = start_trainer(tmp_path / "run", "one", endpoint, {"model": str(tmp_path / "hub")})
    with pytest.raises(UserError, match=r"model .*/hub cannot be read on this machine; the model must lie on the file system"):
        nodes.join(tmp_path / "run")
    moved = (tmp_path / "run").rename(tmp_path / "mounted_elsewhere")
    with pytest.raises(UserError, match=rf"the leading node has the run at {tmp_path}/run, which is not on this machine"):
        nodes.join(moved)
    assert nodes.arrived(moved / "trainer" / path.name) == 0


def test_a_trainer_that_ends_at_that_moment_is_no_error(tmp_path: Path, monkeypatch, endpoint: str):
    path = start_trainer(tmp_path / "run", "one", endpoint)
    monkeypatch.setattr(nodes, "_silence", lambda endpoint: shutil.rmtree(path))
    assert nodes.join(tmp_path / "run", patience=0.0) == 1


def test_a_run_that_is_not_there_yet_is_waited_for_and_that_is_said_at_once(tmp_path: Path):
    said: list[str] = []
    assert nodes.join(tmp_path / "later", patience=0.0, say=said.append) == 0
    assert said[0] == f"{tmp_path}/later does not exist yet; waiting for a run there, for 0 s at most (--patience)"


def test_a_run_that_is_not_on_this_machine(tmp_path: Path):
    with pytest.raises(RunFolderError, match="must lie on a file system that all nodes share"):
        nodes.join(tmp_path / "nowhere" / "run")
