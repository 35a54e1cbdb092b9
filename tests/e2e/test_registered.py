"""An objective, tasks and a logger of another package, that of docs/how-to/register.md, in real
processes, which get its folder as PYTHONPATH.

What is wrong with entries: tests/test_registries.py. Workers of Ray: tests/cluster/test_workers.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.packages import block, install_from_the_page
from support.tiny_models import random_samples

from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.system.files import read_jsonl
from ttrl.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the package in site/, and a model."""
    install_from_the_page(tmp_path / "site")
    make_tiny_model(tmp_path / "model", layers=2, width=64, heads=2)
    return tmp_path


def run(folder: Path, *command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def assert_clipped_above_alone(step: dict[str, float]) -> None:
    assert step["clip_fraction_high"] >= 0 and step["clip_fraction_low"] == 0


def test_a_trainer_finds_the_objective(folder: Path) -> None:
    packed = packed_tensors_from_tokenized_results(
        random_samples(3, prompts=(3, 5)), seq_len=40, pad_id=0
    )
    packed.save(folder / "packed.safetensors")
    config = {"model": "model", "packed": "packed.safetensors", "output_dir": "."}
    config |= {"objective": "one_sided", "clip_high": 0.5, "num_threads": 1}
    (folder / "grpo.yaml").write_text(yaml.safe_dump(config))
    run(folder, "torchtune._cli.tune", "run", "ttrl/grpo_recipe", "--config", "grpo.yaml")
    (step,) = read_jsonl(folder / "train.jsonl")
    assert_clipped_above_alone(step)


@pytest.mark.long
def test_a_run_with_names_of_another_package(folder: Path) -> None:
    """Long: only this runs the page's example as a whole. Its parts are tried in
    tests/test_registries.py, and its trainer above.
    """
    (folder / "run.yaml").write_text(block("yaml"))
    settings = ["model=model", "iterations=1", "num_threads=1", "seq_len=256", "lr=1e-3"]
    run(folder, "ttrl.cli", "train", "run.yaml", "--set", *settings)
    before, after = read_jsonl(folder / "runs" / "run" / "metrics.jsonl")
    assert after["trained"] and "right" in before["validation"]
    (step,) = read_jsonl(folder / "runs" / "run" / "iterations" / "0001" / "train.jsonl")
    assert_clipped_above_alone(step)
    lines = (folder / "runs" / "run" / "by_iteration.txt").read_text().splitlines()
    assert lines == ["0 None", f"1 {float(after['reward'])}"]
