"""Spelling: p-l-u-m, letter by letter. It is harder than it looks for models, which read tokens.

    python recipes/spelling.py [--model Qwen/Qwen2.5-0.5B-Instruct] [--run runs/spelling]
    python recipes/spelling.py --tiny  # tries everything out, on a laptop

A good first run with a real model: replies are short, and every right letter earns something. The
settings are for one GPU with 80 GB; they have not been run.
"""

from ttrl.cli.recipe_script import recipe_config, run_recipe, script_arguments
from ttrl.tasks.spelling import get_spelling_tasks

if __name__ == "__main__":
    arguments = script_arguments(
        __doc__, run="runs/spelling", iterations=40, model="Qwen/Qwen2.5-0.5B-Instruct"
    )
    config = recipe_config(
        arguments,
        tasks_per_iteration=64,
        samples_per_task=8,
        max_tokens=64,
        seq_len=2048,
        advantages="mean",
        training={"lr": 2e-6, "updates_per_iteration": 1},
        validation_metric="exact",
    )
    tasks = get_spelling_tasks("train", n=4096, seed=arguments.task_seed, partial_credit=0.5)
    held_out = get_spelling_tasks("validation", n=200)
    print(run_recipe(arguments, config, tasks, held_out, "words spelled"))
