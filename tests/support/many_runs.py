"""Make many run folders quickly, without a run.

    python tests/support/many_runs.py FOLDER [RUNS [ITERATIONS]]

The rows have every figure of a real run. Only a few iterations of a run have samples.
"""

import json
import math
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.records import TokenizedResult

SAMPLES = 8
"""Of an iteration: two tasks, four samples each."""


def make_runs(folder: Path, runs: int = 50, iterations: int = 1_000) -> list[Path]:
    """Write runs, one for each learning rate and seed, and return their folders."""
    return [
        make_run(
            folder / f"lr{1 + seed % 5}e-5,seed={seed}", seed, iterations, lr=(1 + seed % 5) * 1e-5
        )
        for seed in range(runs)
    ]


def make_run(
    folder: Path,
    seed: int = 0,
    iterations: int = 10,
    lr: float = 1e-5,
    planned: int | None = None,
    sampled: int = 2,
) -> Path:
    """Write a run. planned: iterations in its config. sampled: the newest iterations with samples.
    The others have no folder.
    """
    folder.mkdir(parents=True)
    lines = [json.dumps(row) for row in rows(seed, iterations)]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    for iteration in range(max(0, iterations - sampled), iterations + 1):
        write_samples(folder, iteration, seed)
    config = {
        "run": str(folder),
        "model": "models/tiny",
        "seed": seed,
        "iterations": planned or iterations,
        "validation_metric": "exact",
        "training": {"lr": lr},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def write_samples(folder: Path, iteration: int, seed: int = 0) -> None:
    """Write rollouts.jsonl and validation.jsonl of an iteration."""
    noise = random.Random(f"{seed} {iteration}")
    there = folder / "iterations" / f"{iteration:04d}"
    (there / "done").mkdir(parents=True, exist_ok=True)
    names = ["validation.jsonl"] + (["rollouts.jsonl"] if iteration else [])
    for name in names:
        samples = [sample(f"sum/{number // 4}", number % 4, noise) for number in range(SAMPLES)]
        (there / name).write_text("".join(json.dumps(one) + "\n" for one in samples))


def write_pack(folder: Path, iteration: int) -> None:
    """Write the packed row of an iteration: two samples of one prompt."""
    results = [
        TokenizedResult(
            task_id="sum/0",
            sample=number,
            token_ids=[1, 2, 3, 4 + number],
            assistant_mask=[False, False, True, True],
            input_pos=range(4),
            logprobs=[math.nan, math.nan, -0.5, -0.25],
            prompt_length=2,
            reward=float(number),
            advantage=1.0 - 2 * number,
        )
        for number in range(2)
    ]
    path = folder / "iterations" / f"{iteration:04d}" / "packed.safetensors"
    packed_tensors_from_tokenized_results(results, seq_len=16, pad_id=0).save(path)


def sample(task: str, number: int, noise: random.Random) -> Mapping[str, Any]:
    """Return a sample as in rollouts.jsonl."""
    right = float(noise.random() < 0.5)
    return {
        "task_id": task,
        "sample": number,
        "messages": [{"role": "user", "content": f"Add the numbers of {task}."}],
        "text": f"The sum is {noise.randrange(100)}.",
        "token_ids": [noise.randrange(50) for _ in range(12)],
        "logprobs": [-noise.random() for _ in range(12)],
        "finish_reason": "stop" if noise.random() < 0.8 else "length",
        "reward": right,
        "metrics": {"exact": right},
    }


def rows(seed: int, iterations: int) -> Iterator[Mapping[str, Any]]:
    """Return the rows of metrics.jsonl: a run that learns, with noise."""
    noise = random.Random(seed)
    for number in range(iterations + 1):
        level = 1 - math.exp(-(number + 1) / (0.3 * iterations + 1)) * (0.8 + 0.2 * noise.random())
        exact = min(1.0, max(0.0, level + 0.05 * noise.gauss(0, 1)))
        row: dict[str, Any] = {
            "iteration": number,
            "seconds": {"sample": 3.0, "pack": 0.1, "train": 5.0, "sync": 0.2, "total": 8.3},
            "validation_reward": exact,
            "validation": {"exact": exact},
            "validation_samples": 64,
            "validation_intervals": {"exact": [max(0.0, exact - 0.1), min(1.0, exact + 0.1)]},
            "flops": {"decode": 1e12, "training": 5e12, "total": 6e12, "cumulated": 6e12 * number},
        }
        if number:
            row |= {
                "reward": exact - 0.02,
                "metrics": {"exact": exact - 0.02},
                "samples": 256,
                "failed": 0,
                "finish_reasons": {"stop": 250, "length": 6},
                "prompt_tokens": 12_800,
                "completion_tokens": 51_200,
                "tokens_per_second": 2_000 + 100 * noise.random(),
                "groups": {"total": 32, "kept": 20, "all_right": 6, "all_wrong": 6},
                "rollouts": {"truncated": 0.02, "repeated": 0.1, "length_correlation": 0.1},
                "trained": True,
                "train": {
                    "loss": 0.1 * noise.gauss(0, 1),
                    "entropy": 0.5 / (1 + number / iterations),
                    "grad_norm": 1 + 0.2 * noise.random(),
                    "kl": 0.001 * number / iterations,
                    "clip_fraction_high": 0.01,
                    "lr": 1e-5,
                    "steps": 1,
                    "global_step": number,
                    "seconds": 4.5,
                },
                "sampler_trainer": {"mean": 1e-5, "p999": 1e-3, "ess": 0.99},
                "gradient_noise": {"scale": 30.0, "low": 20.0, "high": 40.0},
                "dead_seconds": 0.5,
            }
        yield row


if __name__ == "__main__":
    make_runs(Path(sys.argv[1]), *map(int, sys.argv[2:]))
