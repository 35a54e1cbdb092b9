"""A script of recipes/ as its header says to try it out: a real server, a real trainer, and a
checkpoint that was trained.

Long: only this runs a script of recipes/ with real parts. All scripts run on fake parts in
tests/test_recipes.py, arms in tests/cli/test_arms.py; real parts without a script: test_run.py.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from ttrl import TrainConfig
from ttrl.configs.experiments import EXPERIMENTS
from ttrl.launch.tune import TrainerProcess
from ttrl.loop.supervised_run import HeldOut, held_out_config, supervised_run
from ttrl.system.files import read_jsonl, write_jsonl
from ttrl.tasks.sort_letters import get_sort_letters_tasks, sort_letters_examples
from ttrl.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("recipe", "what"),
    [("spelling", "words spelled"), ("json_judge", "sentences written exactly")],
)
def test_tiny(recipe, what, tmp_path):
    """One without a judge, and one with a judge on a server of its own."""
    command = [
        sys.executable,
        str(ROOT / "recipes" / f"{recipe}.py"),
        "--tiny",
        "--run",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"held-out {what}: " in done.stdout
    assert ("the judge gives " in done.stdout) == (recipe == "json_judge")
    assert (tmp_path / "run" / "iterations" / "0001" / "checkpoint" / "config.json").exists()
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]["train"]["steps"] == 1


@pytest.mark.long(but=["048"])
@pytest.mark.parametrize("number", EXPERIMENTS)
def test_an_experiment_of_the_report(number, tmp_path):
    """Long for all but one: each is a run of half a minute. On fake parts: tests/cli."""
    one = EXPERIMENTS[number]
    words = [[[f"w{n}{g}{w}" for w in range(4)] for g in range(4)] for n in range(60)]
    rows = {
        "temporal_clue": [
            {"prompt": f"Puzzle {n}", "solution": {"A": "Miss Violet"}, "num_clues": 1}
            for n in range(30)
        ],
        "nyt_connections": [
            {"answers": [{"members": group} for group in groups]} for groups in words
        ],
    }
    arguments = ["--tiny", "--preset", number, "--run", str(tmp_path / "run")]
    if one.recipe in rows:
        write_jsonl(tmp_path / "train.jsonl", rows[one.recipe])
        write_jsonl(tmp_path / "val.jsonl", rows[one.recipe])
        arguments += ["--data", str(tmp_path)]
    command = [sys.executable, str(ROOT / "recipes" / f"{one.recipe}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tried out" in done.stdout
    row = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert row["train"]["steps"] >= 1 and not row["train"].get("skipped")
    assert ("reward_model_loss" in row["train"]) == (number in ("048", "049"))


def test_a_supervised_run_trains_and_asks(tmp_path, monkeypatch):
    """A piece of an arm of recipes/rl_vs_sft.py: `tune run` in two processes, as on two GPUs, and a
    server before and after.
    """
    data = tmp_path / "data.jsonl"
    write_jsonl(data, sort_letters_examples(64))
    model = make_tiny_model(tmp_path / "model", layers=1, width=64, heads=2)
    settings = {"model": str(model), "data": str(data), "seed": 0, "batch_size": 8, "seq_len": 64}
    config = TrainConfig(run="", model=str(model), iterations=1, max_tokens=9).resolved(False)
    asked = HeldOut(get_sort_letters_tasks("validation", 8), held_out_config(config, "reward"))
    settings |= {"num_threads": 1, "dtype": "bf16"}
    commands = []

    class Watched(TrainerProcess):
        def __init__(self, command, *more):
            commands.append(command)
            super().__init__(command, *more)

    monkeypatch.setattr("ttrl.launch.tune.TrainerProcess", Watched)
    checkpoint = supervised_run(
        tmp_path / "sft", settings, asked, by="flops", marks=[3e8], processes=2
    )
    assert commands[0][4:6] == ["--nproc_per_node", "2"]
    start, end = read_jsonl(tmp_path / "sft" / "metrics.jsonl")
    assert abs(end["train"]["flops"] - 3e8) <= end["train"]["flops"] / end["train"]["steps"]
    assert (
        start["validation_samples"] == end["validation_samples"] == 8
        and (checkpoint / "config.json").exists()
    )
