"""Whole runs on real parts: vLLM, `tune run`, the run folder; killed at the worst moments, started
again, and replayed.

Most tests look at one run of two iterations.
Only this has server, trainer and run folder work together with nothing in anybody's place.
"""

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
import torch
import yaml
from support.killed_run import kill_all, wait_for
from transformers import AutoModelForCausalLM

from ttrl import cli
from ttrl.data.packing.pack import PackedTensors
from ttrl.system.files import digest, read_jsonl
from ttrl.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

SCRIPT = textwrap.dedent(
    """
    import asyncio, pathlib, sys
    from ttrl import Task, TrainConfig, train

    run, model, iterations = sys.argv[1:4]
    hold = pathlib.Path(run).parent / "hold-grades"  # while it is there, half of the tasks are not graded

    def grader_of(number):
        async def grader(choice):  # so that random text differs within every group: all groups have a signal
            while number < 16 and number % 2 and hold.exists():
                await asyncio.sleep(0.05)
            text = choice.message.content or ""
            return sum(ord(c) % 2 for c in text) / 8, {"letters": sum(c.isalpha() for c in text)}

        return grader

    tasks = [Task([{"role": "user", "content": f"vowels {n}"}], grader_of(n), id=f"vowels/{n}") for n in range(24)]
    result = train(
        TrainConfig(
            run=run, model=model, iterations=int(iterations), tasks_per_iteration=8, samples_per_task=8, max_tokens=8,
            seq_len=256, num_threads=1, server={"max_num_seqs": 64}, weight_sync=sys.argv[4],
            training={"lr": 1e-3, "rows_per_microbatch": 1, "kl_coefficient": 0.01},
        ),
        tasks[:16],
        tasks[16:],
    )
    print("finished", result.metrics[-1]["iteration"])
    """
)
# As the run's own grader, and another one, for replays.
GRADERS = textwrap.dedent(
    """
    def same(choice):
        text = choice.message.content or ""
        return sum(ord(c) % 2 for c in text) / 8, {"letters": sum(c.isalpha() for c in text)}

    def consonants(choice):
        return sum(c.isalpha() and c not in "aeiou" for c in choice.message.content or "") / 8
    """
)
BITS = (
    "checkpoint/model.safetensors",
    "checkpoint/canary.json",
    "state/optimizer.safetensors",
    "state/state.json",
)
# In every process of a run: while hold-state is there, no trainer gets further than its checkpoint
# in iteration 2.
SITE = textwrap.dedent(
    """
    import os, sys, time

    hold = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "hold-state")

    def before_state(event, arguments):
        if event == "os.rename" and os.fspath(arguments[1]).endswith("iterations/0002/state"):
            while os.path.exists(hold):
                time.sleep(0.05)

    sys.addaudithook(before_state)
    """
)


def start(folder: Path, iterations: int, weight_sync: str = "reload") -> subprocess.Popen:
    (folder / "script.py").write_text(SCRIPT)
    if not (folder / "model").exists():
        make_tiny_model(folder / "model", layers=2, width=64, heads=2)
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    paths = [str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [
        sys.executable,
        str(folder / "script.py"),
        str(folder / "run"),
        str(folder / "model"),
        str(iterations),
    ]
    command.append(weight_sync)
    with open(folder / "output.log", "ab") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )


def finish(folder: Path, iterations: int, weight_sync: str = "reload") -> str:
    process = start(folder, iterations, weight_sync)
    assert process.wait(900) == 0, (folder / "output.log").read_text()[-5000:]
    return (folder / "output.log").read_text()


def processes_of(folder: Path) -> list[psutil.Process]:
    """Everything that has the run folder in its command line or environment: server, trainer,
    guards.
    """
    needle, found = str(folder), []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and (
                needle in " ".join(process.cmdline())
                or any(needle in value for value in process.environ().values())
            ):
                found.append(process)
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two iterations."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "graders.py").write_text(GRADERS)
    finish(folder, 2)
    return folder / "run"


def test_run_folder(finished):
    """Everything that the design promises is there, and nothing half written."""
    for name in (
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "report.html",
        "iterations/0002/done/train.json",
    ):
        assert (finished / name).is_file(), name
    for name in (
        "rollouts.jsonl",
        "validation.jsonl",
        "packed.safetensors",
        "train.jsonl",
        "checkpoint/canary.json",
        "state",
    ):
        assert (finished / "iterations/0001" / name).exists(), name
    assert not list(finished.rglob(".partial-*")) and not list(finished.rglob("*.partial.jsonl"))
    assert not processes_of(finished)
    rows = read_jsonl(finished / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    for number, row in enumerate(rows[1:], 1):
        samples = read_jsonl(finished / f"iterations/{number:04d}/rollouts.jsonl")
        assert len(samples) == row["samples"] == 64
        assert row["reward"] == pytest.approx(sum(s["reward"] for s in samples) / 64)
        assert {s["weights_version"] for s in samples} == {number - 1}
        assert row["sync"]["mode"] == "reload" and row["sync"]["fell_back"] is None
        marker = json.loads((finished / f"iterations/{number:04d}/done/train.json").read_text())
        for name, value in marker["files"].items():
            assert digest(finished / f"iterations/{number:04d}" / name) == value
    text = "".join(
        path.read_text(errors="replace")
        for path in finished.rglob("*")
        if path.suffix in (".log", ".json", ".yaml")
    )
    assert "VLLM_API_KEY" not in text


def test_trainer_and_sampler_agree(finished):
    """The trainer's log-probabilities equal vLLM's on every sampled token, before training and
    after an in-place sync.
    """
    for row in read_jsonl(finished / "metrics.jsonl")[1:]:
        drift = row["sampler_trainer"]
        assert drift["unknown"] == 0 and drift["tokens"] > 50
        assert drift["max"] < 1e-3 and drift["ess"] > 0.9999
        assert row["sync"]["canary_max_difference"] < 1e-3


def test_sampled_logprobs_equal_transformers(finished):
    """A third opinion: the starting model in transformers, on the server's own ids, one plain
    sequence at a time.
    """
    model = AutoModelForCausalLM.from_pretrained(finished / "iterations/0000/checkpoint")
    for row in read_jsonl(finished / "iterations/0001/rollouts.jsonl")[::7]:
        ids = torch.tensor([row["prompt_token_ids"] + row["token_ids"]])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[
                :, 0
            ]
        torch.testing.assert_close(
            logprobs[-len(row["token_ids"]) :], torch.tensor(row["logprobs"]), rtol=0, atol=1e-3
        )


@pytest.mark.long
def test_training_by_hand_gives_the_same_bits(finished, tmp_path):
    """`tune run` on the files of the last iteration, into a folder of its own.

    Long: only this gives `tune run` the config that a run left. A replay below trains from the same
    files to the same bits; a resident trainer and a recipe leave the same in test_resident.py.
    """
    iteration = finished / "iterations/0002"
    command = [sys.executable, "-m", "torchtune._cli.tune", "run", "ttrl/grpo_recipe"]
    command += ["--config", str(iteration / "grpo.yaml"), f"output_dir={tmp_path}"]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    for name in BITS:
        assert digest(tmp_path / name) == digest(iteration / name), name


def test_prompts_are_stored_once(finished):
    packed = PackedTensors.load(finished / "iterations/0001/packed.safetensors")
    rewards: dict[str, set[float]] = {}
    for row in (everything := read_jsonl(finished / "iterations/0001/rollouts.jsonl")):
        rewards.setdefault(row["task_id"], set()).add(row["reward"])
    # Groups with one reward teach nothing.
    rows = [row for row in everything if len(rewards[row["task_id"]]) > 1]
    assert packed.num_trained == sum(len(row["token_ids"]) for row in rows) > 0
    prompts = {row["task_id"]: row["prompt_token_ids"] for row in rows}
    sampled = sum(len(row["token_ids"]) for row in rows)
    # How many rows a task lies in, and which prompts that begin alike meet in a row, is up to what
    # was sampled.
    once_per_row = sum(
        len(prompts[task]) - 1
        for _, task in {(sample.row, sample.task_id) for sample in packed.samples}
    )
    all_beginnings = {
        tuple(prompt[:end]) for prompt in prompts.values() for end in range(1, len(prompt))
    }
    assert (
        len(all_beginnings)
        <= packed.num_tokens - sampled
        <= once_per_row
        < sum(len(row["prompt_token_ids"]) - 1 for row in rows)
    )


@pytest.mark.long
def test_a_finished_run_does_nothing_again(finished):
    """Long: only this starts a finished run in a process of its own. On fake parts:
    tests/loop/test_train_resume.py.
    """

    def changes() -> dict[Path, int]:
        return {
            path: path.stat().st_mtime_ns
            for path in (finished / "iterations").rglob("*")
            if path.is_file()
        }

    before, log = changes(), (finished / "logs" / "server.log").read_bytes()
    assert "finished 2" in finish(finished.parent, 2)
    assert changes() == before
    assert (finished / "logs" / "server.log").read_bytes() == log  # no server was started


def replay_command(run: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "ttrl.cli", "replay", str(run), *arguments]


def replay(run: Path, *arguments: str) -> str:
    done = subprocess.run(
        replay_command(run, *arguments), cwd=run.parent, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == f"ttrl replay: reading {run}\n"
    return done.stdout


def test_the_same_grades_give_the_same_bits(finished, monkeypatch, capsys):
    """Another trainer, from the same files. The command is called here; the long tests below start
    it.
    """
    before = {path: digest(path) for path in finished.rglob("*") if path.is_file()}
    monkeypatch.chdir(finished.parent)
    assert cli.main(["replay", str(finished), "--grader", "graders:same", "--train"]) == 0
    said = capsys.readouterr().out
    assert said.count("the same checkpoint as the run's, bit for bit") == 2
    (folder,) = (finished / "replays").iterdir()
    for number in (1, 2):
        for name in ("rollouts.jsonl", "packed.safetensors", *BITS):
            assert digest(folder / f"iterations/000{number}" / name) == digest(
                finished / f"iterations/000{number}" / name
            ), name
    assert json.loads((folder / "replay.json").read_text())["total"]["changed"] == 0
    assert {path: digest(path) for path in before} == before
    assert (folder / "report.html").is_file() and not list(folder.rglob(".partial-*"))


@pytest.mark.long
def test_a_study_samples_held_out_tasks_once(finished, tmp_path, capsys):
    """Long: only here does a real server sample an entropy batch, with its rounding of
    log-probabilities. tests/instruments/test_held_out.py has the rest, with a stand-in.
    """
    output = tmp_path / "study"
    arguments = ["study", str(finished), "--entropy-samples", "24", "--kernel", "6"]
    assert cli.main([*arguments, "--output", str(output)]) == 0
    said = capsys.readouterr().out
    assert "the run's held-out tasks) was sampled before iterations 1; elsewhere" in said
    found = json.loads((output / "study.json").read_text())
    batches = [one["entropy_batch"] for one in found["steps"]]
    assert all(one["answers"] == 24 and one["mismatch"] < 1e-3 for one in batches)
    assert batches[0]["effective_size"] == pytest.approx(1, abs=1e-3)
    assert found["logprob_fit"]["sign"] > 0.9
    written = (output / "entropy" / "0001.safetensors").stat().st_mtime_ns
    assert cli.main([*arguments, "--output", str(output)]) == 0
    assert (output / "entropy" / "0001.safetensors").stat().st_mtime_ns == written
    again = json.loads((output / "study.json").read_text())
    assert [one["first"] for one in again["steps"]] == pytest.approx(
        [one["first"] for one in found["steps"]], rel=1e-3
    )


@pytest.mark.long
def test_other_grades_and_a_kill(finished, tmp_path):
    """Killed with its trainer in iteration 2; the same command goes on there, and ends with the
    bits of one that was not.

    Long: only this kills a replay's real trainer. Runs are killed below and in test_crash.py;
    replays with other grades and interruptions on fake parts: tests/replays/test_training.py.
    """
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    said = replay(finished, "--grader", "graders.py:consonants", "--train", "--output", str(whole))
    assert "bit for bit" not in said and "After iteration 1, the rollouts are off-policy" in said
    rows = read_jsonl(whole / "metrics.jsonl")
    # Off-policy from iteration 2 on.
    assert rows[0]["sampler_trainer"]["ess"] > 0.9999 > rows[1]["sampler_trainer"]["ess"] > 0
    assert digest(whole / "iterations/0001" / BITS[0]) != digest(
        finished / "iterations/0001" / BITS[0]
    )

    arguments = ("--grader", "graders.py:consonants", "--train", "--output", str(torn))
    process = subprocess.Popen(
        replay_command(finished, *arguments), cwd=finished.parent, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 600
    while not (torn / "iterations/0002/train.log").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    for pid in [
        process.pid,
        *(child.pid for child in psutil.Process(process.pid).children(recursive=True)),
    ]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    assert not (torn / "iterations/0002/done/train.json").exists()
    done = {path: path.stat().st_mtime_ns for path in torn.rglob("done/*.json")}
    assert "all iterations graded before" in replay(finished, *arguments)
    # Nothing finished was done again.
    assert all(path.stat().st_mtime_ns == changed for path, changed in done.items())
    for name in BITS:
        assert digest(torn / "iterations/0002" / name) == digest(
            whole / "iterations/0002" / name
        ), name


@pytest.mark.long
def test_each_iteration_from_the_checkpoint_that_sampled_it(finished, tmp_path):
    """Long: only this sees the real trainer agree with the sampler there. The option:
    tests/replays/test_training.py.
    """
    replay(
        finished,
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


@pytest.mark.long
def test_killed_in_sampling_and_between_checkpoint_and_state(tmp_path):
    """kill -9 of all processes, twice in one run; the same command continues in that iteration each
    time.

    Long: only this kills between checkpoint and state with vLLM running. test_crash.py kills at
    random moments without vLLM.
    """
    run, log, last = tmp_path / "run", tmp_path / "output.log", 2
    one, torn = (run / f"iterations/000{n}" for n in (1, 2))
    partial = one / "rollouts.partial.jsonl"

    (tmp_path / "hold-grades").touch()
    process = start(tmp_path, last)
    wait_for(lambda: partial.exists() and partial.read_bytes().count(b"\n") >= 1, process, log)
    kill_all(process)
    assert not (one / "done/rollouts.json").exists()
    kept = read_jsonl(partial)
    assert 1 <= len(kept) < 8
    (tmp_path / "hold-grades").unlink()

    (tmp_path / "hold-state").touch()
    process = start(tmp_path, last)
    wait_for((torn / "checkpoint").exists, process, log)
    kill_all(process)
    assert not (torn / "state").exists() and not (torn / "done/train.json").exists()
    (tmp_path / "hold-state").unlink()
    done = {path: path.stat().st_mtime_ns for path in run.rglob("done/*.json")}
    for row in kept:  # what had been sampled before the first kill was kept
        texts = [
            s["text"]
            for s in read_jsonl(one / "rollouts.jsonl")
            if s["task_id"] == row["samples"][0]["task_id"]
        ]
        assert texts == [s["text"] for s in row["samples"]]

    assert f"finished {last}" in finish(tmp_path, last)
    # Nothing finished was done again.
    assert all(path.stat().st_mtime_ns == changed for path, changed in done.items())
    assert (torn / "state/optimizer.safetensors").exists() and (torn / "done/train.json").exists()
    assert [row["iteration"] for row in read_jsonl(run / "metrics.jsonl")] == list(range(last + 1))
    assert not processes_of(run), "something of a killed run is left"
    assert yaml.safe_load((run / "config.yaml").read_text())["iterations"] == last


@pytest.mark.long
def test_weights_out_of_memory_and_killed_while_they_are_written(tmp_path):
    """The server samples from a policy whose files are not there yet. After kill -9 that is trained
    again, to the same bits, and what was sampled from it stays.

    Long: only this kills a run whose vLLM has weights that are in no file. A run on fake parts is
    killed at every file in tests/loop/test_overlap.py; real trainers are killed in test_crash.py;
    weights from memory: test_sync.py.
    """
    run, log, last = tmp_path / "run", tmp_path / "output.log", 3
    torn, after = run / "iterations/0002", run / "iterations/0003"
    (tmp_path / "hold-state").touch()
    process = start(tmp_path, last, "memory")
    wait_for((after / "done/rollouts.json").exists, process, log)
    assert not (torn / "state").exists() and not (torn / "done/train.json").exists()
    wait_for((torn / "checkpoint").exists, process, log)
    before = {
        path: digest(path)
        for path in (torn / "checkpoint/model.safetensors", after / "rollouts.jsonl")
    }
    kill_all(process)
    (tmp_path / "hold-state").unlink()
    assert f"finished {last}" in finish(tmp_path, last, "memory")
    assert before == {path: digest(path) for path in before}
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == list(range(last + 1))
    markers = [json.loads(path.read_text())["facts"] for path in run.rglob("done/*.json")]
    syncs = [marker["sync"] for marker in markers if marker.get("sync")]
    assert [sync["mode"] for sync in syncs].count("memory") >= 2 and not any(
        sync.get("files_because") for sync in syncs
    )
    assert all(row["sampler_trainer"]["max"] < 1e-3 for row in rows[1:])
    assert not processes_of(run), "something of a killed run is left"
