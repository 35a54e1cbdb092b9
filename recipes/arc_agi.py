"""ARC-AGI: find the rule from a few pairs of grids, and apply it to another one.

    python recipes/arc_agi.py [--model Qwen/Qwen2.5-7B-Instruct] --data PATH [--run runs/arc_agi]
    python recipes/arc_agi.py --tiny --data PATH  # tries everything out, on a laptop

The data is a folder with `training` and `evaluation`, as published. Every training puzzle appears
turned, mirrored and in other colours. Puzzles with grids of more than 1200 cells are left out. A
grid of the right shape earns up to 0.2. The settings are for one GPU with 80 GB; they have not been
run.
"""

from ttrl.cli.recipe_script import mistakes_together, recipe_config, run_recipe, script_arguments
from ttrl.tasks.arc_agi import get_arc_agi_tasks

MODEL = "Qwen/Qwen2.5-7B-Instruct"

if __name__ == "__main__":
    arguments = script_arguments(__doc__, run="runs/arc_agi", iterations=100, model=MODEL, data="")
    config = recipe_config(
        arguments,
        tasks_per_iteration=32,
        samples_per_task=16,
        max_tokens=2048,
        seq_len=16384,
        advantages="mean",
        training={"lr": 1e-5, "lora_rank": 32, "updates_per_iteration": 1},
        validation_metric="exact",
    )
    options = {"path": arguments.data, "partial_credit": 0.2, "max_cells": 1200}
    augment = ("rotations", "reflections", "colours")
    with mistakes_together(arguments, config):
        tasks = get_arc_agi_tasks("train", seed=arguments.task_seed, augment=augment, **options)
        held_out = get_arc_agi_tasks("validation", **options)
    print(run_recipe(arguments, config, tasks, held_out, "puzzles solved"))
