"""What a whole iteration costs: seconds of sampling, of training, and of everything else. `python
tools/bench_iteration.py`

Starts from the tiny quickstart's warm model, with a real server, the real trainer and the same loop
as any run:

    one update   512 samples, one optimizer step on all of them
    quickstart   512 samples, four optimizer steps, as in recipes/sort_letters.py
    few-shot     a prompt of about 256 tokens in front of each task, shared by the samples of a row
    padded       the same tasks, each sample in a row of its own: what a trainer of padded rows
                 computes

Prints a line for each: means per iteration, and half the width of their 95% intervals. The first
iterations are warm-up and are left out. Nothing is validated, so that all sampling is for training.
Run folders are in --work; a setting whose run is complete there is not run again.
"""

import argparse
import json
import math
import shutil
import statistics
from pathlib import Path
from typing import Any

from ttrl import Task, TrainConfig, train, tune
from ttrl.system.files import write_jsonl
from ttrl.tasks.sort_letters import get_sort_letters_tasks, sort_letters_examples
from ttrl.tiny_model import make_tiny_model

WARM_UP = 2
"""Iterations that are not counted: the server compiles and the trainer loads in them."""
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


def student_t(freedom: int) -> float:
    """Half the width of a 95% interval in standard errors; for more than 15 degrees of freedom,
    that of 15, which is wider.
    """
    return _T95[min(freedom, len(_T95)) - 1]


def warm_model(folder: Path, seed: int = 0) -> Path:
    """The quickstart's model before reinforcement learning."""
    if not (folder / "checkpoint" / "config.json").exists():
        model = make_tiny_model(folder / "random_model", seed=seed)
        write_jsonl(
            folder / "examples.jsonl", sort_letters_examples(160 * 64, seed=seed, max_length=5)
        )
        config = {
            "model": str(model),
            "data": str(folder / "examples.jsonl"),
            "output_dir": str(folder),
            "steps": 160,
        }
        config |= {
            "batch_size": 64,
            "seq_len": 128,
            "lr": 1e-3,
            "seed": seed,
            "rows_per_microbatch": 64,
            "num_output_chunks": 1,
        }
        tune(config, folder / "sft.yaml", recipe="ttrl/sft_recipe", pbar=False)
    return folder / "checkpoint"


def with_few_shots(tasks: list[Task], tokens: int, model: Path) -> list[Task]:
    """The tasks behind so many sorted words that the prompt has about `tokens` tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    shots = ""
    for example in sort_letters_examples(1000, seed=9, max_length=8):
        question, answer = (message["content"] for message in example["messages"])
        if len(tokenizer.encode(shots)) >= tokens:
            break
        shots += f"{question}\n{answer}\n"
    return [
        Task(
            [{"role": "user", "content": shots + task.messages[-1]["content"]}],
            task.grader,
            id=task.id,
        )
        for task in tasks
    ]


def settings(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """TrainConfig's fields of each setting, by name."""
    common = {"num_output_chunks": 1, "lr": 1e-5}
    few = {"max_tokens": 12, "training": common | {"updates_per_iteration": 1}}
    longest = arguments.few_shot_tokens + 48
    return {
        "one update": {
            "seq_len": 512,
            "training": common | {"updates_per_iteration": 1, "rows_per_microbatch": 16},
        },
        "quickstart": {
            "seq_len": 512,
            "training": common | {"updates_per_iteration": 4, "rows_per_microbatch": 8},
        },
        "few-shot": few
        | {"seq_len": 2048, "training": few["training"] | {"rows_per_microbatch": 4}},
        "padded": few
        | {
            "seq_len": longest,
            "share": "none",
            "training": few["training"] | {"rows_per_microbatch": 32},
        },
    }


def run(name: str, changes: dict[str, Any], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl that count."""
    folder = arguments.work / name.replace(" ", "_")
    count = WARM_UP + arguments.iterations
    metrics = folder / "metrics.jsonl"
    if not metrics.exists() or len(metrics.read_text().splitlines()) != count + 1:
        # One process for all of it: what is resumed has other costs.
        shutil.rmtree(folder, ignore_errors=True)
        model = warm_model(arguments.work / "warm_start")
        tasks = get_sort_letters_tasks("train", n=4096, seed=0, length_exponent=2)
        if name in ("few-shot", "padded"):
            tasks = with_few_shots(tasks, arguments.few_shot_tokens, model)
        values = {
            "tasks_per_iteration": 32,
            "samples_per_task": 16,
            "max_tokens": 12,
            "trainer": arguments.trainer,
        }
        values |= {"off_policy_steps": arguments.off_policy_steps}
        train(
            TrainConfig(run=str(folder), model=str(model), iterations=count, **values | changes),
            tasks,
            quiet=True,
        )
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row for row in rows if row["iteration"] > WARM_UP]


def interval(values: list[float]) -> str:
    """Mean ± half the 95% interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.3f}"
    return (
        f"{mean:.3f} ± "
        f"{student_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values)):.3f}"
    )


def parts(row: dict[str, Any]) -> dict[str, float]:
    """Seconds of an iteration, by what they went into."""
    seconds = row["seconds"]
    dead = row["dead_seconds"]
    trained = row["train"]["seconds"] if "seconds" in row.get("train", {}) else None
    sampled = row["samples"] and row["completion_tokens"] / row["tokens_per_second"]
    result = {
        "whole": seconds["total"],
        "sampling": sampled,
        "training": seconds["total"] - dead - sampled,
        "dead": dead,
    }
    result |= {
        "of it train phase": seconds["train"] - result["training"]
        if trained is None
        else seconds["train"] - trained
    }
    return result | {"sync": seconds["sync"], "pack": seconds["pack"]}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("runs/bench_iteration"))
    parser.add_argument("--iterations", type=int, default=10, help="iterations that are measured")
    parser.add_argument("--only", nargs="*", help="names of the settings to run")
    parser.add_argument("--trainer", choices=("resident", "once"), default="resident")
    parser.add_argument("--off-policy-steps", type=int, choices=(0, 1), default=0)
    parser.add_argument("--few-shot-tokens", type=int, default=256)
    arguments = parser.parse_args()
    arguments.work = arguments.work.absolute()
    found: dict[str, list[dict[str, float]]] = {}
    for name, changes in settings(arguments).items():
        if arguments.only and name not in arguments.only:
            continue
        found[name] = [parts(row) for row in run(name, changes, arguments)]
        print(
            f"{name:11s} "
            + "  ".join(
                f"{what} {interval([row[what] for row in found[name]])}" for what in found[name][0]
            )
        )
    if {"few-shot", "padded"} <= found.keys():
        shared, padded = (
            statistics.fmean(row["whole"] for row in found[name]) for name in ("few-shot", "padded")
        )
        print(f"few-shot against padded rows: {shared / padded:.2f} of the seconds of an iteration")


if __name__ == "__main__":
    main()
