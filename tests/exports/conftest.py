"""A run with trained checkpoints, without servers and trainers."""

import json

import pytest
from support.compared_runs import make_run

from ttrl.facts import TrainFacts
from ttrl.run_folder.folder import RunFolder
from ttrl.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """Return a run of four iterations; iteration 3 has the best policy."""
    folder = make_run(
        tmp_path_factory.mktemp("somebody") / "private_run",
        keep_best=1,
        keep_checkpoints=5,
        max_tokens=16,
        seq_len=32,
        iterations=4,
        cache=[str(tmp_path_factory.getbasetemp() / "secret_place")],
        server={"api_key": "sk-very-secret", "max_model_len": 64},
        loggers=[{"name": "wandb", "api_key": "wb-very-secret"}],
        mirror="s3://secret-bucket/run",
    )
    with (folder / "config.yaml").open("a") as config:
        config.write("iterations: 4\n")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row, value in zip(rows, (0.2, 0.4, 0.6, 0.8, 0.7), strict=True):
        row["validation"] = {"exact": value}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sample = {
        "task_id": "fruit/1",
        "messages": [{"role": "user", "content": "How many figs?"}],
        "reward": 1.0,
    }
    for number in range(1, 5):
        iteration = RunFolder(folder).iteration(number)
        (iteration.path / "rollouts.jsonl").write_text(json.dumps(sample) + "\n")
        make_tiny_model(
            iteration.path / "checkpoint", seed=number, layers=1, width=32, heads=2, context=64
        )
        (iteration.path / "checkpoint" / "notes.md").write_text("private")
        iteration.mark(TrainFacts(seconds=1.0, trained=True))
    (folder / "environment.json").write_text(
        json.dumps({"ttrl": "0.1.0", "python": "3.11", "packages": {"torch": "2.13"}})
    )
    return folder
