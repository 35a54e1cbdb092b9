"""Steps 4 to 6: whole runs, as a user makes them.

4. A random 1.5B model in the shapes of recipes/gsm8k.py, with everything else left to ttrl.
5. A random 7B model with adapters, whose base is in the checkpoint's dtype, bf16.
6. SmolLM2 on the quickstart's task: does it learn as it does on a CPU?

Random models never end an answer by themselves. So answers end at any of some hundred tokens, which
makes them about as long as gsm8k's, each of another length. The reward is the share of a letter:
any model has a signal in it.
"""

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import made_model
from made_model import QWEN_1_5B, QWEN_7B, TINY
from measure import best_product, shares
from steps import Place

from ttrl import Task, TrainConfig, train
from ttrl.system.files import read_jsonl
from ttrl.text import gib

TREE = Path(__file__).resolve().parents[2]
MEAN_ANSWER = 300
"""Tokens; gsm8k's answers by Qwen2.5-1.5B have about as many."""
QUESTION_CHARACTERS = 240


def made_elsewhere(folder: Path, shape: dict[str, Any], device: str) -> Path:
    """Make a model in another process: this one must hold no memory of the GPU during a run."""
    command = [sys.executable, made_model.__file__, str(folder), json.dumps(shape), device]
    subprocess.run(command, check=True)
    return folder / "model"


@dataclass(frozen=True)
class Means:
    """What makes a model and trains it."""

    make: Callable[[Path, dict[str, Any], str], Path] = made_elsewhere
    train: Callable[..., object] = train


HERE = Means()


def whole_run(place: Place, means: Means = HERE) -> None:
    """Run three iterations of 1.5B, all weights trained."""
    settings = {"advantages": "mean", "aggregation": "constant", "constant_length": 1024}
    settings["save_every"] = 3  # a checkpoint and its state take 19 GB
    training = {"lr": 2e-6, "updates_per_iteration": 1}
    run_and_tell(place, "1.5b", QWEN_1_5B, 3, settings, training, means)


def lora_run(place: Place, means: Means = HERE) -> None:
    """Run two iterations of 7B with adapters."""
    training = {"lr": 1e-5, "lora_rank": 32, "updates_per_iteration": 1}
    run_and_tell(place, "7b", QWEN_7B, 2, {}, training, means)


def run_and_tell(
    place: Place,
    name: str,
    shape: dict[str, Any],
    iterations: int,
    settings: dict[str, Any],
    training: dict[str, Any],
    means: Means,
) -> None:
    """Make a model, run, and report seconds, speed and memory of every iteration."""
    if place.rehearse:
        shape = TINY
    models = place.models / name
    model = means.make(models, shape, place.device)
    sizes = {"tasks_per_iteration": 32, "samples_per_task": 8, "max_tokens": 1024, "seq_len": 8192}
    if place.rehearse:
        sizes = {"tasks_per_iteration": 4, "samples_per_task": 4, "max_tokens": 64, "seq_len": 512}
        settings = settings | ({"constant_length": 64} if "constant_length" in settings else {})
    run = place.folder / "run"
    config = TrainConfig(
        run=str(run),
        model=str(model),
        iterations=iterations,
        device=place.device,
        training=training,
        sampling={"extra_body": {"stop_token_ids": endings(shape["vocab_size"])}},
        **sizes,
        **settings,
    )
    try:
        means.train(config, questions(sizes["tasks_per_iteration"] * iterations), quiet=False)
    finally:  # also what was measured before the run was ended
        keep_logs(run, place.logs)
        tell_run(place, run)
        if name != "1.5b":  # which other steps use
            shutil.rmtree(models)


def endings(vocabulary: int) -> list[int]:
    """Return so many tokens that an answer of random ones ends after MEAN_ANSWER tokens."""
    return list(range(1, 1 + max(1, vocabulary // MEAN_ANSWER)))


def questions(count: int) -> list[Task]:
    """Return tasks as long as gsm8k's, no two the same."""
    words = "a farmer sells eggs at the market for two dollars each and buys flour with it"
    found = []
    for number in range(count):
        text = f"{number} " + " ".join([words] * 4)
        message = {"role": "user", "content": text[:QUESTION_CHARACTERS]}
        found.append(Task([message], share_of_e, id=str(number)))
    return found


def share_of_e(choice: Any) -> float:
    """Reward the letter e."""
    answer = choice.message.content or ""
    return answer.count("e") / max(1, len(answer))


def keep_logs(run: Path, logs: Path) -> None:
    """Copy what a run wrote of itself, without its weights."""
    for name in ("metrics.jsonl", "config.yaml", "plan.json", "environment.json"):
        if (run / name).is_file():
            (logs / name).write_bytes((run / name).read_bytes())
    for path in (run / "logs").glob("*.log"):
        (logs / path.name).write_bytes(path.read_bytes()[-2_000_000:])


def tell_run(place: Place, run: Path) -> None:
    """Report what metrics.jsonl says of a run, and what was planned."""
    report = place.report
    rows = [row for row in metrics_of(run) if row["iteration"] > 0]
    report.check("an iteration came to its end", bool(rows), f"{len(rows)} did")
    if not rows:
        return
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    tell_seconds(place, rows)
    best, _ = best_product(place.device)
    last = rows[-1]
    trained = last["train"]
    report.figure("sampling", last["tokens_per_second"], "tokens/s")
    report.figure("training", trained["tokens_per_second"], "tokens/s")
    of_sheet, of_best = shares(trained["flops"] / trained["seconds"], best)
    report.figure("training, of 989 TFLOP/s", of_sheet)
    report.figure("training, of the card's best product", of_best)
    tell_memory(place, trained, plan)
    drift = last["sampler_trainer"]
    report.figure("|Δ log-probability|, mean", drift["mean"], "nats")
    syncs = [row["sync"] for row in rows if row.get("sync")]
    report.figure("weights came by", ", ".join(sorted({sync["mode"] for sync in syncs})))
    fell_back = [sync["fell_back"] for sync in syncs if sync["fell_back"]]
    report.check("no sync fell back", bool(syncs) and not fell_back, "; ".join(fell_back))
    report.check("every iteration trained", all("unchanged" not in row["train"] for row in rows))


def tell_seconds(place: Place, rows: Sequence[dict[str, Any]]) -> None:
    """Report the seconds of every iteration by phase, dead time, and what NVML saw."""
    phases = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    columns = ["iteration", *phases, "dead"]
    table = []
    for row in rows:
        seconds = [row["seconds"].get(name, 0.0) for name in phases]
        table.append([row["iteration"], *seconds, row["dead_seconds"]])
    place.report.table("seconds", columns, table)
    use = []
    for row in rows:
        for kind, seen in row.get("machine", {}).items():
            busy = seen.get("gpu_busy", "not said")
            use.append([row["iteration"], kind, seen["seconds"], busy, seen.get("watts", 0.0)])
    place.report.table("NVML", ["iteration", "while", "seconds", "GPU busy", "W"], use)


def tell_memory(place: Place, trained: dict[str, Any], plan: dict[str, Any]) -> None:
    """Report the trainer's peak, measured and planned."""
    peaks = trained["memory_peaks"]
    measured = peaks.get("cuda", peaks["host"])
    planned = plan["memory"]["trainer"]
    place.report.figure("trainer's peak", measured / 1e9, "GB")
    place.report.figure("planned", planned / 1e9, "GB")
    if place.rehearse:
        place.report.stand_in("the process's memory for the GPU's; imports are no part of the plan")
        return
    found = f"{gib(measured)}, planned {gib(planned)}"
    place.report.check("no more memory than planned", measured < 1.02 * planned, found)


def curve(place: Place) -> None:
    """Run the quickstart's recipe, and report the learning curve."""
    run = place.folder / "run"
    command = [sys.executable, str(TREE / "recipes" / "structured_output.py"), "--run", str(run)]
    if place.rehearse:
        place.report.stand_in("two iterations with SmolLM2 on the CPU")
        command += ["--iterations", "2"]
    try:
        subprocess.run(command, check=True, cwd=TREE)
    finally:  # also what was measured before the run was ended
        keep_logs(run, place.logs)
        tell_curve(place, metrics_of(run))


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl, where there are any."""
    path = run / "metrics.jsonl"
    return read_jsonl(path) if path.is_file() else []


def tell_curve(place: Place, rows: Sequence[dict[str, Any]]) -> None:
    """Report held-out results and rewards of every iteration."""
    place.report.check("an iteration came to its end", len(rows) > 1, f"{len(rows) - 1} did")
    if len(rows) < 2:
        return
    table = []
    for row in rows:
        held_out = row.get("validation", {}).get("exact", "")
        reward = row.get("reward", "")
        table.append([row["iteration"], held_out, reward, row["seconds"]["total"]])
    place.report.table("learning", ["iteration", "held out, exact", "reward", "seconds"], table)
    seconds = [row["seconds"]["total"] for row in rows[1:]]
    place.report.figure("seconds of an iteration, median", statistics.median(seconds), "s")
    first = rows[0]["validation"]["exact"]
    last = rows[-1]["validation"]["exact"]
    found = f"{first:.3f} → {last:.3f} in {len(rows) - 1} iterations"
    limit = first if place.rehearse else 0.9
    place.report.check("it learns", last >= limit, found)
