"""Folders of runs to compare, without a run."""

import json
import random

import yaml

TASKS = 40
"""Held out."""


def make_run(
    folder, *, seed=0, skill=0.5, gain=0.05, iterations=4, flops=1e12, tasks=TASKS, **settings
):
    """Write a run whose held-out tasks are right where a number of their own lies below its skill,
    which grows with the iterations."""
    noise = random.Random(seed)
    rows = []
    for number in range(iterations + 1):
        level = skill + gain * number + 0.02 * noise.gauss(0, 1)
        lines = []
        for task in range(tasks):
            right = float(random.Random(task).random() < level)
            messages = [{"role": "user", "content": f"task {task}"}]
            lines.append(
                {
                    "task_id": f"v{task}",
                    "sample": 0,
                    "messages": messages,
                    "reward": right,
                    "metrics": {"exact": right},
                }
            )
        path = folder / "iterations" / f"{number:04d}" / "validation.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        exact = sum(line["reward"] for line in lines) / tasks
        row = {
            "iteration": number,
            "validation": {"exact": exact},
            "validation_reward": exact,
            "validation_samples": tasks,
        }
        row |= {
            "seconds": {"total": 10.0},
            "flops": {"total": flops, "cumulated": flops * (number + 1)},
        }
        rows.append(row | ({"reward": level, "completion_tokens": 1000} if number else {}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run": str(folder),
        "seed": seed,
        "validation_metric": "exact",
        "model": f"{folder}/warm_start/checkpoint",
    }
    (folder / "config.yaml").write_text(
        yaml.safe_dump(config | {"training": {"lr": 1e-4}, **settings})
    )
    return folder
