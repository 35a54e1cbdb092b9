"""The quickstart: teach a tiny model to sort the letters of a word, on a laptop, in a few minutes.

    python recipes/sort_letters.py [--run runs/sort_letters] [--seed 0]

A random model of a million parameters is warmed up by supervised training on words of 3 to 5 letters; it then sorts about half of
the held-out words of 8 letters. From there on it is told no answers any more: vLLM samples, the grader rewards, the GRPO recipe
trains, on words of 3 to 8 letters. Interrupt it whenever you like: the same command continues where it was.
"""

import argparse
from pathlib import Path

from ttrl import TrainConfig, train, tune
from ttrl.files import write_jsonl
from ttrl.tasks.sort_letters import get_sort_letters_tasks, sort_letters_examples
from ttrl.tiny_model import make_tiny_model

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--run", type=Path, default=Path("runs/sort_letters"), help="the run folder")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--iterations", type=int, default=40, help="at most; the run ends earlier once held-out words are sorted")
parser.add_argument("--weight-sync", choices=("reload", "restart"), default="reload")
parser.add_argument("--nproc-per-node", type=int, default=1, help="trainer processes")
arguments = parser.parse_args()


def warm_start(folder: Path, seed: int) -> Path:
    """A tiny model that has seen some sorted words: random weights, then a fixed number of supervised steps."""
    if not (folder / "checkpoint" / "config.json").exists():
        model = make_tiny_model(folder / "random_model", seed=seed)
        write_jsonl(folder / "examples.jsonl", sort_letters_examples(STEPS * BATCH, seed=seed, max_length=5))
        config = {
            "model": str(model),
            "data": str(folder / "examples.jsonl"),
            "output_dir": str(folder),
            "steps": STEPS,
            "batch_size": BATCH,
            "seq_len": 128,
            "lr": 1e-3,
            "seed": seed,
            "rows_per_microbatch": 64,
            "num_output_chunks": 1,
        }
        tune(config, folder / "sft.yaml", recipe="ttrl/sft_recipe", pbar_desc="warm start")
    return folder / "checkpoint"


STEPS, BATCH = 160, 64

if __name__ == "__main__":
    run = arguments.run.absolute()
    result = train(
        TrainConfig(
            run=str(run),
            model=str(warm_start(run / "warm_start", arguments.seed)),
            iterations=arguments.iterations,
            tasks_per_iteration=32,
            samples_per_task=16,
            max_tokens=12,
            seq_len=512,
            seed=arguments.seed,
            training={"lr": 1e-4, "updates_per_iteration": 4, "rows_per_microbatch": 8, "num_output_chunks": 1},
            weight_sync=arguments.weight_sync,
            nproc_per_node=arguments.nproc_per_node,
            validation_metric="exact",
            validation_temperature=0.0,
            stop_at=0.92,
        ),
        tasks=get_sort_letters_tasks("train", n=4096, seed=arguments.seed, length_exponent=2),
        validation_tasks=get_sort_letters_tasks("validation", n=256),
    )
    before, after = (row["validation"]["exact"] for row in (result.metrics[0], result.metrics[-1]))
    print(f"held-out words sorted exactly: {before:.3f} before, {after:.3f} after {result.metrics[-1]['iteration']} iterations")
    print(f"report:     {result.report}")
    print(f"checkpoint: {result.checkpoint}")
