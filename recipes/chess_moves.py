"""Chess: the best move of a position.

    python recipes/chess_moves.py [--model Qwen/Qwen2.5-3B-Instruct] --data PATH
        [--run runs/chess_moves]
    python recipes/chess_moves.py --preset rookworld --data PATH [--overfit 8]
    # A tiny model, on a laptop:
    python recipes/chess_moves.py --preset rookworld --model "" --data PATH --overfit 8
        --set lr=1e-4
    python recipes/chess_moves.py --tiny --data PATH  # tries everything out, on a laptop

The data is lichess's puzzle table, a test suite in EPD, rows with fen and best moves, or
RookWorld's text (docs/reference/families.md). Any other legal move earns 0.05, or its points if
known. The last line also gives the share of random legal moves that are best. The settings are for
one GPU with 80 GB; they have not been run.

--preset rookworld: RookWorld-LM-124M, a GPT-2 trained only on chess, with its text format and the
settings of its GRPO log: 8 positions with 12 samples each at temperature 0.5; KL over the whole
vocabulary, watched for 20 steps and then weighted with 0.005; an entropy bonus of 0.005 that falls
from step 200 to 500; a legal move earns 0.1. Greedy replies are judged by their reward. The log's
top-p of 0.9 is left out: the trainer could not tell how likely the sampled tokens were.

With --model "", a random model of a million parameters is warmed up first, on random legal moves of
the training positions. With --overfit, it sees only those N: it is too small to find legal moves in
new positions.
"""

from pathlib import Path
from statistics import fmean

from ttrl.cli.recipe_script import (
    mistakes_together,
    recipe_config,
    run_recipe,
    script_arguments,
    supervised_start,
    with_plain_template,
)
from ttrl.tasks.chess_moves import get_chess_tasks, legal_move_examples

MODEL = "Qwen/Qwen2.5-3B-Instruct"
ROOKWORLD = "jrahn/RookWorld-LM-124M"
PRESETS = {
    "rookworld": {
        **{
            "tasks_per_iteration": 8,
            "samples_per_task": 12,
            "temperature": 0.5,
            "max_tokens": 144,
            "seq_len": 2048,
        },
        **{"lr": 2e-6, "max_grad_norm": 1.0, "watch_kl": True},
        **{"kl_coefficient": 0.005, "kl_estimator": "full", "kl_after_steps": 20},
        **{
            "entropy_coefficient": 0.005,
            "entropy_schedule": "linear",
            "entropy_from_step": 200,
            "entropy_until_step": 500,
        },
        "validation_metric": "reward",
    }
}
STEPS, BATCH = 400, 32  # of a tiny model's warm start

if __name__ == "__main__":
    arguments = script_arguments(
        __doc__, run="runs/chess_moves", iterations=100, model=MODEL, data="", presets=PRESETS
    )
    rookworld = arguments.preset == "rookworld"
    model = (
        ROOKWORLD
        if rookworld and arguments.model == MODEL
        else arguments.model or arguments.run / "warm_start"
    )
    style, legal_reward = ("P", 0.1) if rookworld else ("plain", 0.05)
    config = recipe_config(
        arguments,
        model=str(model),
        tasks_per_iteration=64,
        samples_per_task=8,
        max_tokens=512,
        seq_len=8192,
        advantages="std",
        advantage_std_floor=0.05,
        advantage_clip=2.0,
        training={"lr": 1e-6, "updates_per_iteration": 1},
        validation_metric="best",
    )
    with mistakes_together(arguments, config):
        tasks = get_chess_tasks(
            "train",
            seed=arguments.task_seed,
            path=arguments.data,
            style=style,
            legal_reward=legal_reward,
        )
        held_out = get_chess_tasks(
            "validation", path=arguments.data, style=style, legal_reward=legal_reward
        )[:200]

    def start() -> Path:
        if arguments.model:
            return with_plain_template(str(model), arguments.run / "start")
        which = {"path": arguments.data, "style": style, "positions": arguments.overfit}
        examples = legal_move_examples(STEPS * BATCH, arguments.task_seed, **which)
        return supervised_start(
            Path(model), examples, steps=STEPS, batch_size=BATCH, seed=arguments.seed, seq_len=256
        )

    is_made_here = rookworld or not arguments.model
    asked = tasks[: arguments.overfit] if arguments.overfit else held_out
    chance = fmean([task.grader.chance() for task in asked] or [0.0])
    judged = "reward of greedy replies" if rookworld else "best moves found"
    print(
        run_recipe(
            arguments,
            config,
            tasks,
            held_out,
            f"{judged} ({chance:.3f} of random legal moves are best)",
            start=start if is_made_here else None,
        )
    )
