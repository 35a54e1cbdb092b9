"""Runs of earlier trees still resume, replay, report and view.

Each archive of `old_runs/` holds a run folder and its model: two iterations of a tiny model, with a
real server and a real trainer. The tasks below made them. A JSON file next to it holds the digests
of the checkpoints made from the same rollouts by today's trainer, and its CPU.
"""

import json
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.world import World

from ttrl import Task, TrainConfig, replay
from ttrl.cli import main
from ttrl.loop.train import train_checked
from ttrl.system.files import digest

ARCHIVES = sorted(Path(__file__).parent.glob("old_runs/*.tar.xz"))
assert ARCHIVES


def grader(choice: Any) -> tuple[float, dict[str, float]]:
    text = choice.message.content or ""
    return text.count("e") / 4 + len(text) / 100, {"length": float(len(text))}


def tasks(name: str, count: int) -> list[Task]:
    return [
        Task([{"role": "user", "content": f"{name} {n}"}], grader, id=f"{name}/{n}")
        for n in range(count)
    ]


def cpu() -> str:
    """Return the model and the instructions of this CPU, on which the bits of a step depend."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    known = dict(re.split(r"\s*:\s*", line, maxsplit=1) for line in lines if ":" in line)
    names = ("model name", "cpu family", "model", "stepping")
    capability = torch.backends.cpu.get_cpu_capability()
    return ", ".join([*(known.get(name, "?") for name in names), capability])


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name.partition(".")[0])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run folder, unpacked; the current folder holds it and its model."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    name = request.param.name.partition(".")[0]
    shutil.copy(request.param.with_name(f"{name}.json"), tmp_path / "bits.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def test_it_reports(run: Path) -> None:
    page = run / "report.html"
    before = page.read_text(encoding="utf-8")
    page.unlink()
    assert main(["report", "run"]) == 0
    assert page.read_text(encoding="utf-8").count("<svg") == before.count("<svg")


def test_its_rows_are_viewed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", "run", "--iteration", "2", "--text"]) == 0
    assert "task 4<|end|>" in capsys.readouterr().out


def test_it_is_graded_again(run: Path) -> None:
    result = replay(run, grader=grader, quiet=True)
    assert (result.total.rollouts, result.total.compared) == (16, 16)
    assert result.total.changed == 0


def test_it_resumes(run: Path, world: World) -> None:
    """Server and trainer are stand-ins; what was done before is not done again."""
    values = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    config = TrainConfig.parse(values | {"iterations": 3}, "config.yaml")
    train_checked(config, tasks("task", 6), tasks("held-out", 2), parts=world.parts)
    assert world.count()["train 3"] == 1
    assert not {"train 1", "train 2"} & set(world.events)
    rows = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 4


@pytest.mark.e2e
def test_its_checkpoints_are_trained_again(run: Path) -> None:
    """To the same bits on the same CPU: products round differently elsewhere.

    The archive's own weights came from oneDNN's products, which ttrl no longer calls. AdamW's
    first steps are as long for a gradient of rounding errors as for any other.
    """
    bits = json.loads((run.parent / "bits.json").read_text(encoding="utf-8"))
    result = replay(run, grader=grader, train=True, quiet=True)
    for number, expected in bits["checkpoints"].items():
        weights = f"iterations/{number}/checkpoint/model.safetensors"
        ours = load_file(result.folder / weights)
        theirs = load_file(run / weights)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-5)
        if bits["cpu"] == cpu():
            assert digest(result.folder / weights) == expected
