"""What sampling one step off policy gains and costs, on the tiny quickstart. `python
tools/bench_off_policy.py [--seeds 5]`

Runs both orders of phases (`off_policy_steps` 0 and 1) with the same seeds and number of
iterations, and with the warm models, tasks and settings of recipes/sort_letters.py. Reported are
the share of held-out words sorted exactly after the last iteration, the best share, the first
iteration with at least 0.9, and the wall time of the iterations: a line for each run as it ends,
then means with 95% intervals (Student's t) and the paired differences. Runs that are complete in
--work are not run again; one that was interrupted is restarted from scratch, so that its time is
that of one process.
"""

import argparse
import json
import math
import shutil
import statistics
from pathlib import Path

from bench_iteration import student_t, warm_model

from ttrl import TrainConfig, train
from ttrl.tasks.sort_letters import get_sort_letters_tasks

GOOD = 0.9


def run(steps: int, seed: int, arguments: argparse.Namespace) -> dict[str, float]:
    """What a run came to; NaN for what never happened."""
    folder = arguments.work / f"steps{steps}_seed{seed}"
    metrics = folder / "metrics.jsonl"
    if not metrics.exists() or len(metrics.read_text().splitlines()) != arguments.iterations + 1:
        shutil.rmtree(folder, ignore_errors=True)
        model = warm_model(arguments.work / f"warm_start_{seed}", seed)
        config = TrainConfig(
            run=str(folder),
            model=str(model),
            iterations=arguments.iterations,
            tasks_per_iteration=32,
            samples_per_task=16,
            max_tokens=12,
            seq_len=512,
            seed=seed,
            training={
                "lr": 1e-4,
                "updates_per_iteration": 4,
                "rows_per_microbatch": 8,
                "num_output_chunks": 1,
            },
            validation_metric="exact",
            off_policy_steps=steps,
        )
        tasks = get_sort_letters_tasks("train", n=4096, seed=seed, length_exponent=2)
        train(config, tasks, get_sort_letters_tasks("validation", n=256), quiet=True)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    exact = [row["validation"]["exact"] for row in rows]
    good = next((row["iteration"] for row in rows if row["validation"]["exact"] >= GOOD), math.nan)
    seconds = sum(row["seconds"]["total"] for row in rows[1:])
    dead = sum(row.get("dead_seconds", math.nan) for row in rows[1:])
    return {
        "final": exact[-1],
        "best": max(exact),
        "good at": good,
        "seconds": seconds,
        "dead seconds": dead,
    }


def interval(values: list[float]) -> str:
    """Mean ± half the 95% interval, of the values that are known."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "-"
    if len(known) == 1:
        return f"{known[0]:.3f} (1 run)"
    half = student_t(len(known) - 1) * statistics.stdev(known) / math.sqrt(len(known))
    left_out = f" ({len(known)} of {len(values)} runs)" if len(known) < len(values) else ""
    return f"{statistics.fmean(known):.3f} ± {half:.3f}{left_out}"


def main() -> None:
    """Prints a line per run, and the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("runs/bench_off_policy"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=20)
    arguments = parser.parse_args()
    arguments.work = arguments.work.absolute()
    found: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    for seed in range(arguments.seeds):
        # What else the machine does hits both alike.
        for steps in found if seed % 2 == 0 else reversed(found):
            result = run(steps, seed, arguments)
            found[steps].append(result)
            print(
                f"off_policy_steps {steps}  seed {seed}  "
                + "  ".join(f"{k} {v:.3f}" for k, v in result.items()),
                flush=True,
            )
    for steps, results in found.items():
        print(
            f"off_policy_steps {steps}: "
            + "  ".join(f"{name} {interval([r[name] for r in results])}" for name in results[0])
        )
    pairs = list(zip(found[0], found[1], strict=True))
    names = list(pairs[0][0])
    print(
        "1 minus 0, by seed: "
        + "  ".join(f"{name} {interval([b[name] - a[name] for a, b in pairs])}" for name in names)
    )


if __name__ == "__main__":
    main()
