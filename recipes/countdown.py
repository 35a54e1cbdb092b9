"""Countdown: make the target from the numbers, each used once. Puzzles are generated, each with a
solution.

    python recipes/countdown.py [--model Qwen/Qwen2.5-3B-Instruct] [--run runs/countdown]
    python recipes/countdown.py --tiny  # tries everything out, on a laptop

An expression of the right numbers with another value earns a tenth of the reward. Without it,
small models get no reward for a long time. The settings are for one GPU with 80 GB; they have not
been run.
"""

from ttrl.cli.recipe_script import recipe_config, run_recipe, script_arguments
from ttrl.tasks.countdown import get_countdown_tasks

if __name__ == "__main__":
    arguments = script_arguments(
        __doc__, run="runs/countdown", iterations=100, model="Qwen/Qwen2.5-3B-Instruct"
    )
    config = recipe_config(
        arguments,
        tasks_per_iteration=64,
        samples_per_task=8,
        max_tokens=1024,
        seq_len=8192,
        advantages="mean",
        training={"lr": 1e-6, "updates_per_iteration": 1},
        validation_metric="exact",
    )
    tasks = get_countdown_tasks("train", n=8192, seed=arguments.task_seed, valid_reward=0.1)
    held_out = get_countdown_tasks("validation", n=200)
    print(run_recipe(arguments, config, tasks, held_out, "puzzles solved"))
