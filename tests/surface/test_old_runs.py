"""Runs of earlier trees still resume, replay, report and view.

Each archive of `old_runs/` holds a run folder, its model and the CPU that made it: two iterations of a
tiny model, with a real server and a real trainer. The tasks below made them.
"""

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
from ttrl.loop import train as train_module
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
    name = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "?")
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name.partition(".")[0])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run folder, unpacked; the current folder holds it and its model."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
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
    train_module.train_checked(config, tasks("task", 6), tasks("held-out", 2))
    assert world.count()["train 3"] == 1
    assert not {"train 1", "train 2"} & set(world.events)
    rows = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 4


@pytest.mark.e2e
def test_its_checkpoints_are_trained_again_to_the_same_bits(run: Path) -> None:
    made_on = (run.parent / "cpu.txt").read_text(encoding="utf-8").strip()
    if made_on != cpu():
        pytest.skip(f"made on {made_on}; this is {cpu()}, whose products may round otherwise")
    result = replay(run, grader=grader, train=True, quiet=True)
    for number in (1, 2):
        weights = f"iterations/{number:04}/checkpoint/model.safetensors"
        ours = load_file(result.folder / weights)
        theirs = load_file(run / weights)
        different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
        assert not different
        assert digest(result.folder / weights) == digest(run / weights)
