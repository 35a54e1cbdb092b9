"""GSM8K: grade-school word problems, with an R1-style prompt and think and answer tags.

    python recipes/gsm8k.py [--model Qwen/Qwen2.5-1.5B-Instruct] [--data openai/gsm8k]
        [--run runs/gsm8k]
    python recipes/gsm8k.py --preset entropy-study [--data openai/gsm8k]
    # A small chat model, on a laptop:
    python recipes/gsm8k.py --preset small --model smollm2-135m --data PATH
    python recipes/gsm8k.py --tiny --data PATH  # tries everything out, on a laptop

The settings of a study of entropy and gradient noise: on-policy, rewards minus the mean of their
group, a constant normaliser (Dr. GRPO), 256 samples per iteration. A tenth of the reward is for the
format. Part of the train file is held out; the test file is kept for the end: `ttrl eval CHECKPOINT
--tasks gsm8k --option gsm8k.style=r1`. The settings are for one GPU with 80 GB; they have not been
run.

--preset entropy-study: as that study did it, with LoRA, and eight samples of each held-out problem
for pass@1 and pass@8 (52 to 65% pass@1 in its 64 steps). Rank 78 makes its adapter of 90 million
parameters: 28 layers of 41,216 for each rank, 90,015,744 in all; alpha is ours. Held-out problems
are asked every eighth step: 1,600 samples, and a step trains on 256. It begins with
supervised training on worked answers, until 95% of the held-out answers have the format; a model
that follows it already is left as it is. What the study measured: gradient noise in train.jsonl and
the report, all else by `ttrl study`, of one checkpoint or of the whole run. For that, the adapters
and optimizer states of all steps are kept.

--preset small: SmolLM2-135M never writes R1's tags (0 of 200 greedy replies, 0 of 320 samples), so
it would never get a reward. Three solved problems before each question, as shared turns, show it
the form of an answer (`#### 18`): 0.61 of its samples then have the form, and 0.016 are right. In
half an hour on two cores (34 iterations, bf16), all samples got it. Of 200 held-out problems, 0.030
were right before, 0.055 after 16 iterations, and 0.035 after 32: no more than chance.
"""

import argparse

from ttrl.cli.recipe_script import mistakes_together, recipe_config, run_recipe, script_arguments
from ttrl.errors import UserError
from ttrl.tasks.gsm8k import get_gsm8k_tasks, gsm8k_examples

MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
PRESETS = {
    "entropy-study": {
        "lora_rank": 78,  # 90,015,744 parameters of Qwen2.5-1.5B
        "lora_alpha": 156,
        "gradient_noise": True,
        "validation_samples": 8,
        "validate_every": 8,
    },
    "small": {
        **{
            "tasks_per_iteration": 8,
            "max_tokens": 160,
            "constant_length": 160,
            "seq_len": 3072,
            "validate_every": 16,
        },
        "lr": 2e-5,
    },
}


def options(parser: argparse.ArgumentParser) -> None:
    own = "settings of the supervised training of --preset entropy-study: lr=1e-4"
    parser.add_argument(
        "--sft", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help=own
    )


if __name__ == "__main__":
    arguments = script_arguments(
        __doc__,
        run="runs/gsm8k",
        iterations=64,
        model=MODEL,
        data="openai/gsm8k",
        presets=PRESETS,
        options=options,
    )
    if arguments.sft and arguments.preset != "entropy-study":
        raise UserError("--sft is for --preset entropy-study; leave it out")
    config = recipe_config(
        arguments,
        tasks_per_iteration=32,
        samples_per_task=8,
        max_tokens=1024,
        seq_len=8192,
        advantages="mean",
        aggregation="constant",
        constant_length=1024,
        training={"lr": 2e-6, "updates_per_iteration": 1},
        validation_metric="exact",
    )
    asked = {"style": "plain", "few_shot": 3} if arguments.preset == "small" else {"style": "r1"}
    with mistakes_together(arguments, config):
        tasks = get_gsm8k_tasks(
            "train", seed=arguments.task_seed, path=arguments.data, format_reward=0.1, **asked
        )
        held_out = get_gsm8k_tasks("validation", n=200, path=arguments.data, **asked)
    if arguments.preset == "entropy-study":
        config.keep_checkpoints = max(3, arguments.iterations + 1)  # the start counts, too
        from ttrl.cli.arms import Supervised, supervised_first  # loads PyTorch

        examples = gsm8k_examples(seed=arguments.seed, path=arguments.data, style="r1")
        sft = {"lr": 1e-5, "batch_size": 32, "seq_len": 4096, "rows_per_microbatch": 4}
        start = Supervised(examples, sft, marks=range(5, 201, 5), metric="format", stop_at=0.95)
        config = supervised_first(arguments, config, tasks, held_out, start)
    print(run_recipe(arguments, config, tasks, held_out, "problems solved"))
