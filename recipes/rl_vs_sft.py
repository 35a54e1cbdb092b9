"""Is RL worth its FLOPs? Reinforcement learning against further supervised training from one
checkpoint, at equal FLOPs.

    # A tiny model, on a laptop:
    python recipes/rl_vs_sft.py [--seeds 5] [--run runs/rl_vs_sft]
    # A small chat model counts letters, without a hub:
    python recipes/rl_vs_sft.py --model smollm2-135m --questions letter_counting --seeds 3
    # GSM8K, as the question was asked:
    python recipes/rl_vs_sft.py --model MODEL --data openai/gsm8k --iterations 420
    python recipes/rl_vs_sft.py --model MODEL --data openai/gsm8k --iterations 420 --plan
    python recipes/rl_vs_sft.py --arm more_samples samples_per_task=32 tasks_per_iteration=8
    python recipes/rl_vs_sft.py --sft batch_size=32 --arm small_batch sft.batch_size=8

All arms start from one supervised checkpoint: trained until one held-out word in five is sorted or
one in four counted right, or, for GSM8K, until 95% of the held-out answers have the format that is
asked for. RL takes 16
samples of each question, rewards exact answers alone, and its advantages are rewards minus the mean
of their group; without KL; ratios are not clipped, gradients are, to a norm of 1. SFT goes on with
worked answers to questions of the same kind, until it has taken as many FLOPs as RL did, everything
counted that RL computes: prompts, answers, forward and backward passes. The report,
RUN/compare.html, says which of the two is better on the same held-out tasks, how sure that is, and
how they got there, over FLOPs, answer tokens and time. Supervised training uses the dtype and GPUs
of RL, and settings and memory of all arms are checked before the first one starts.

SFT's learning rate is the best of three by the loss of held-out examples, each tried on as many
FLOPs as the arm has; the report has these FLOPs apart. `--sft lr=…` skips the search. A further arm
is RL or SFT with other settings; one of RL needs as many FLOPs as RL, or all arms are compared at
its end. Five seeds tell arms of a tiny model apart; with --model there is one seed unless you ask
for more, and --plan says what five would take.

The settings for GSM8K are the known ones of the experiment; learning rates, batch of SFT and
questions per iteration are ours. 420 iterations are one pass over the questions. They have not been
run. Press Ctrl-C at any time; the same command continues.
"""

import argparse

from ttrl.cli.arms import Supervised, arm_options, run_arms
from ttrl.cli.recipe_script import mistakes_together, recipe_config, script_arguments
from ttrl.tasks.gsm8k import get_gsm8k_tasks, gsm8k_examples
from ttrl.tasks.letter_counting import get_letter_counting_tasks, letter_counting_examples
from ttrl.tasks.sort_letters import get_sort_letters_tasks, sort_letters_examples
from ttrl.tiny_model import make_tiny_model


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of arms, and the questions of a model."""
    arm_options(parser)
    parser.add_argument(
        "--questions",
        choices=("gsm8k", "letter_counting"),
        default="gsm8k",
        help="the questions, with --model (gsm8k)",
    )


if __name__ == "__main__":
    arguments = script_arguments(
        __doc__,
        run="runs/rl_vs_sft",
        iterations=10,
        model="",
        data="openai/gsm8k",
        options=options,
    )
    seed = arguments.seed
    model = arguments.model
    data = arguments.data
    training: dict[str, object] = {
        "objective": "reinforce",
        "updates_per_iteration": 1,
        "kl_coefficient": 0.0,
    }
    counts = bool(model) and arguments.questions == "letter_counting"
    if counts:
        sizes = {"tasks_per_iteration": 8, "max_tokens": 48, "seq_len": 1024}
        training |= {"lr": 2e-5, "rows_per_microbatch": 1}
    elif model:
        sizes = {"tasks_per_iteration": 16, "max_tokens": 256, "seq_len": 4096}
        training |= {"lr": 2e-6}
    else:
        model = arguments.run / "random_model"
        if not (arguments.check or (model / "config.json").exists()):
            make_tiny_model(model, seed=seed)
        sizes = {"tasks_per_iteration": 32, "max_tokens": 12, "seq_len": 512}
        training |= {"lr": 3e-4, "rows_per_microbatch": 8, "num_output_chunks": 1}
    config = recipe_config(
        arguments,
        model=str(model),
        samples_per_task=16,
        advantages="mean",
        training=training,
        validation_metric="exact",
        **sizes,
    )
    if counts:
        tasks = get_letter_counting_tasks(
            "train", n=4096, seed=seed, max_length=8, partial_credit=0.0
        )
        held_out = get_letter_counting_tasks("validation", n=128, max_length=8)
        examples = letter_counting_examples(4096, seed=seed, max_length=8, spelled=True)
        sft = {"lr": 2e-5, "batch_size": 16, "seq_len": 512, "rows_per_microbatch": 2}
        short = letter_counting_examples(4096, seed=seed + 1, max_length=6, spelled=True)
        start = Supervised(short, sft, marks=range(4, 81, 4), stop_at=0.25)
        sets = {}
    elif arguments.model:
        with mistakes_together(arguments, config):
            tasks = get_gsm8k_tasks("train", seed=seed, path=data)
            held_out = get_gsm8k_tasks("validation", n=200, path=data)
            examples = gsm8k_examples(seed=seed, path=data)
        sft = {"lr": 1e-5, "batch_size": 32, "seq_len": 4096, "rows_per_microbatch": 4}
        start = Supervised(examples, sft, marks=range(20, 401, 20), metric="format", stop_at=0.95)
        sets = f"gsm8k={data},mmlu,arc_easy,arc_challenge,humaneval,spelling,letter_counting"
    else:
        tasks = get_sort_letters_tasks(
            "train", n=4096, seed=seed, length_exponent=2, partial_credit=0
        )
        held_out = get_sort_letters_tasks("validation", n=256, partial_credit=0)
        examples = sort_letters_examples(4096, seed=seed)
        sft = {
            "lr": 3e-4,
            "batch_size": 16,
            "seq_len": 128,
            "rows_per_microbatch": 16,
            "num_output_chunks": 1,
        }
        warm = {**sft, "lr": 1e-3, "batch_size": 64, "rows_per_microbatch": 64}
        short = sort_letters_examples(10240, seed=seed, max_length=5)
        start = Supervised(short, warm, marks=range(120, 401, 40), stop_at=0.2)
        sets = {
            f"{n} letters": get_sort_letters_tasks(
                "validation", n=256, max_length=n, partial_credit=0
            )
            for n in (6, 10)
        }
    print(
        run_arms(
            arguments,
            config,
            tasks,
            held_out,
            start=start,
            sft=Supervised(examples, sft),
            sets=sets,
        )
    )
