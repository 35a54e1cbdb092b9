"""How many r are in strawberry? A tiny model learns to count letters aloud, on a laptop, in about ten minutes.

    python recipes/letter_counting.py [--run runs/letter_counting] [--seed 0]

A random model of a million parameters is warmed up by supervised training on answers that spell the word and number the letter
asked for: "str1awber2r3y: 3". It sees few words in which the letter occurs twice and hardly any with three, as in real text, and
so miscounts those. From there on it is told no answers any more: every count is asked equally often, vLLM samples, the grader
rewards the last number of the reply and nothing else, the GRPO recipe trains. Interrupt it whenever you like: the same command
continues where it was.
"""

import argparse
from pathlib import Path

from ttrl import TrainConfig, train, tune
from ttrl.files import write_jsonl
from ttrl.tasks.letter_counting import get_letter_counting_tasks, letter_counting_examples
from ttrl.tiny_model import make_tiny_model

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--run", type=Path, default=Path("runs/letter_counting"), help="the run folder")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--iterations", type=int, default=30, help="at most; the run ends earlier once held-out words are counted")
parser.add_argument("--weight-sync", choices=("reload", "restart"), default="reload")
parser.add_argument("--nproc-per-node", type=int, default=1, help="trainer processes")
arguments = parser.parse_args()


def warm_start(folder: Path, seed: int) -> Path:
    """A tiny model that has seen some words spelled and counted: random weights, then a fixed number of supervised steps."""
    if not (folder / "checkpoint" / "config.json").exists():
        model = make_tiny_model(folder / "random_model", seed=seed)
        examples = letter_counting_examples(
            STEPS * BATCH, seed=seed, max_length=LONGEST, spelled=True, count_weights=(16, 16, 1, 0.2)
        )
        write_jsonl(folder / "examples.jsonl", examples)
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


STEPS, BATCH = 220, 64
LONGEST = 6

if __name__ == "__main__":
    run = arguments.run.absolute()
    result = train(
        TrainConfig(
            run=str(run),
            model=str(warm_start(run / "warm_start", arguments.seed)),
            iterations=arguments.iterations,
            tasks_per_iteration=32,
            samples_per_task=16,
            max_tokens=16,
            seq_len=512,
            seed=arguments.seed,
            training={
                "lr": 1e-4,
                "warmup_steps": 4,
                "updates_per_iteration": 4,
                "rows_per_microbatch": 8,
                "num_output_chunks": 1,
            },
            weight_sync=arguments.weight_sync,
            nproc_per_node=arguments.nproc_per_node,
            validation_metric="exact",
            validation_temperature=0.0,
            stop_at=0.9,
        ),
        tasks=get_letter_counting_tasks("train", n=4096, seed=arguments.seed, max_length=LONGEST, length_exponent=1),
        validation_tasks=get_letter_counting_tasks("validation", n=256, max_length=LONGEST),
    )
    before, after = (row["validation"]["exact"] for row in (result.metrics[0], result.metrics[-1]))
    print(f"held-out words counted right: {before:.3f} before, {after:.3f} after {result.metrics[-1]['iteration']} iterations")
    print(f"report:     {result.report}")
    print(f"checkpoint: {result.checkpoint}")
