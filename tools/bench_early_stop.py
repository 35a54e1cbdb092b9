"""What `early_stop` does in a run, on a real small model. `python tools/bench_early_stop.py
[--seeds 3]`

For each seed two runs with the quickstart's tasks and settings, but for longer completions: one in
which all end by themselves, one with `early_stop`. Reported of both: the share that was ended,
tokens and seconds an iteration, held-out reward at the start and in the end; of the first also what
other settings would have ended of its samples, how many tokens that would have saved, and the mean
reward of these samples, which is what would have been lost. The same command continues what was
interrupted. `--plan` only says what a run takes. (Not for a machine that does something else:
seconds are compared.)
"""

import argparse
import itertools
import json
import statistics
from pathlib import Path

from ttrl import InferenceEarlyStop, TrainConfig, plan, train
from ttrl.ready_models import ready_model
from ttrl.records import Sample
from ttrl.system.files import read_jsonl
from ttrl.tasks.structured_output import get_structured_output_tasks


def config_of(
    seed: int, early_stop: dict[str, float] | None, arguments: argparse.Namespace
) -> TrainConfig:
    """Return the config of a run."""
    return TrainConfig(
        run=str(arguments.work / f"seed{seed}_{'stopped' if early_stop else 'whole'}"),
        model=arguments.model,
        iterations=arguments.iterations,
        tasks_per_iteration=8,
        samples_per_task=8,
        max_tokens=arguments.max_tokens,
        seq_len=max(1024, 2 * arguments.max_tokens),
        seed=seed,
        training={"lr": 2e-5, "updates_per_iteration": 2, "drift_rows": "first_update"},
        early_stop=early_stop,
        # At start and end alone: beside sampling, it would be measured with it.
        validate_every=arguments.iterations,
        validation_metric="exact",
        save_every=arguments.iterations,  # 2 GB each
    )


def samples_of(run: Path) -> list[Sample]:
    """Return what a run sampled for training."""
    files = sorted(run.glob("iterations/*/rollouts.jsonl"))
    return [Sample.from_json(row) for file in files for row in read_jsonl(file)]


def what_came(run: Path) -> str:
    """Return a run's line."""
    before, *rows = read_jsonl(run / "metrics.jsonl", key="iteration")
    stopped = [row["rollouts"]["stopped_early"] or 0.0 for row in rows]
    tokens = [row["completion_tokens"] for row in rows]
    seconds = [row["seconds"]["total"] for row in rows]
    shown = [
        f"{row['validation_reward']:.3f} (exact {row['validation']['exact']:.3f})"
        for row in (before, rows[-1])
    ]
    return (
        f"ended early {statistics.mean(stopped):6.1%}  tokens {statistics.mean(tokens):7.0f}  "
        f"seconds {statistics.mean(seconds):6.1f}  held-out reward {shown[0]} → {shown[1]}"
    )


def what_would_have(samples: list[Sample], stop: InferenceEarlyStop) -> str:
    """Return what a setting would have ended of samples that ended by themselves."""
    ends = [(one, stop.ends_at(one.logprobs or ())) for one in samples]
    ended = [(one, end) for one, end in ends if end is not None and end < len(one.logprobs or ())]
    tokens = sum(len(one.logprobs or ()) for one in samples)
    saved = sum(len(one.logprobs or ()) - end for one, end in ended)
    reward = statistics.mean(one.reward or 0.0 for one, _ in ended) if ended else float("nan")
    return (
        f"would end {len(ended) / len(samples):6.1%}  saves {saved / tokens:6.1%} of the tokens  "
        f"reward of these {reward:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--early-stop", type=json.loads, default={"alpha": 0.992, "threshold": -3.0}
    )
    parser.add_argument("--work", type=Path, default=Path("runs/early_stop"))
    parser.add_argument(
        "--plan", action="store_true", help="say what a run takes, and start nothing"
    )
    arguments = parser.parse_args()
    held_out = get_structured_output_tasks("validation", n=32)
    if arguments.plan:
        config = config_of(0, None, arguments)
        config.model = str(ready_model(config.model) or config.model)
        made = plan(config, get_structured_output_tasks("train", n=64), held_out)
        print(made, f"\n{2 * arguments.seeds} such runs", sep="\n")
        return
    for seed in range(arguments.seeds):
        tasks = get_structured_output_tasks("train", n=1024, seed=seed)
        for name, early_stop in (("whole", None), ("stopped", arguments.early_stop)):
            config = config_of(seed, early_stop, arguments)
            train(config, tasks, held_out, quiet=True)
            print(f"seed {seed}  {name:8} {what_came(Path(config.run))}", flush=True)
    samples = [
        one
        for seed in range(arguments.seeds)
        for one in samples_of(arguments.work / f"seed{seed}_whole")
    ]
    for alpha, threshold in itertools.product((0.9, 0.97, 0.992), (-1.5, -2.0, -3.0, -4.0)):
        print(
            f"alpha {alpha:5}  threshold {threshold:4}  "
            f"{what_would_have(samples, InferenceEarlyStop(alpha, threshold))}"
        )


if __name__ == "__main__":
    main()
