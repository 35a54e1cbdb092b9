"""`ttrl replay` on a real run of vLLM and `tune run`. The same grades give the same bits; a killed replay goes on."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from ttrl.system.files import digest, read_jsonl
from ttrl.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

SCRIPT = textwrap.dedent(
    """
    import sys
    from ttrl import Task, TrainConfig, train

    def grader(choice):  # so that random text differs within every group: all groups have a signal
        return sum(ord(c) % 2 for c in choice.message.content or "") / 8

    run, model = sys.argv[1:3]
    tasks = [Task([{"role": "user", "content": f"vowels {n}"}], grader, id=f"vowels/{n}") for n in range(8)]
    config = TrainConfig(
        run=run, model=model, iterations=2, tasks_per_iteration=8, samples_per_task=8, max_tokens=8, seq_len=256, num_threads=1,
        training={"lr": 1e-3, "rows_per_microbatch": 1, "kl_coefficient": 0.01}, server={"max_num_seqs": 64},
    )
    train(config, tasks)
    """
)
GRADERS = textwrap.dedent(
    """
    def same(choice):
        return sum(ord(c) % 2 for c in choice.message.content or "") / 8

    def consonants(choice):
        return sum(c.isalpha() and c not in "aeiou" for c in choice.message.content or "") / 8
    """
)
BITS = ("checkpoint/model.safetensors", "checkpoint/canary.json", "state/optimizer.safetensors", "state/state.json")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of two iterations, beside graders.py."""
    folder = tmp_path_factory.mktemp("replayed")
    (folder / "script.py").write_text(SCRIPT)
    (folder / "graders.py").write_text(GRADERS)
    make_tiny_model(folder / "model", layers=2, width=64, heads=2)
    command = [sys.executable, str(folder / "script.py"), str(folder / "run"), str(folder / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "run"


def command(run: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "ttrl.cli", "replay", str(run), *arguments]


def replay(run: Path, *arguments: str) -> str:
    done = subprocess.run(command(run, *arguments), cwd=run.parent, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == f"ttrl replay: reading {run}\n"
    return done.stdout


def test_the_same_grades_give_the_same_bits(run):
    before = {path: digest(path) for path in run.rglob("*") if path.is_file()}
    said = replay(run, "--grader", "graders:same", "--train")
    assert said.count("the same checkpoint as the run's, bit for bit") == 2
    (folder,) = (run / "replays").iterdir()
    for number in (1, 2):
        for name in ("rollouts.jsonl", "packed.safetensors", *BITS):
            assert digest(folder / f"iterations/000{number}" / name) == digest(run / f"iterations/000{number}" / name), name
    assert json.loads((folder / "replay.json").read_text())["total"]["changed"] == 0
    assert {path: digest(path) for path in before} == before
    assert (folder / "report.html").is_file() and not list(folder.rglob(".partial-*"))


@pytest.mark.long
def test_other_grades_and_a_kill(run, tmp_path):
    """Killed with its trainer in iteration 2; the same command goes on there, and ends with the bits of one that was not.

    Long: this alone kills a replay's real trainer. Runs are killed in test_run.py and test_crash.py; replays with other grades
    and interruptions on fake parts: tests/replays/test_training.py.
    """
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    said = replay(run, "--grader", "graders.py:consonants", "--train", "--output", str(whole))
    assert "bit for bit" not in said and "After iteration 1 the rollouts are another policy's" in said
    rows = read_jsonl(whole / "metrics.jsonl")
    assert rows[0]["sampler_trainer"]["ess"] > 0.9999 > rows[1]["sampler_trainer"]["ess"] > 0  # off-policy from iteration 2 on
    assert digest(whole / "iterations/0001" / BITS[0]) != digest(run / "iterations/0001" / BITS[0])

    arguments = ("--grader", "graders.py:consonants", "--train", "--output", str(torn))
    process = subprocess.Popen(command(run, *arguments), cwd=run.parent, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while not (torn / "iterations/0002/train.log").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    for pid in [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    assert not (torn / "iterations/0002/done/train.json").exists()
    done = {path: path.stat().st_mtime_ns for path in torn.rglob("done/*.json")}
    assert "all iterations graded before" in replay(run, *arguments)
    assert all(path.stat().st_mtime_ns == changed for path, changed in done.items())  # nothing finished was done again
    for name in BITS:
        assert digest(torn / "iterations/0002" / name) == digest(whole / "iterations/0002" / name), name


@pytest.mark.long
def test_each_iteration_from_the_checkpoint_that_sampled_it(run, tmp_path):
    """Long: this alone sees the real trainer agree with the sampler there. The option: tests/replays/test_training.py."""
    replay(
        run,
        "--grader",
        "graders.py:consonants",
        "--train",
        "--from-checkpoints",
        "--iterations",
        "2",
        "--output",
        str(tmp_path / "r"),
    )
    (row,) = read_jsonl(tmp_path / "r/metrics.jsonl")
    assert row["iteration"] == 2 and row["sampler_trainer"]["ess"] > 0.9999  # on-policy
