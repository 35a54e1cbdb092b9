"""Zebra-grid: find each house's person, animal, drink and more from a minimal set of clues; the
answer is a table.

    python recipes/zebra_grid.py [--model Qwen/Qwen2.5-7B-Instruct] [--run runs/zebra_grid]
    python recipes/zebra_grid.py --tiny  # tries everything out, on a laptop

Puzzles with 2 to 6 houses and attributes are generated here, about 100 per CPU second. Reward: the
share of right cells. The settings are for one GPU with 80 GB; they have not been run.
"""

from ttrl.cli.recipe_script import recipe_config, run_recipe, script_arguments
from ttrl.configs.experiments import presets_of
from ttrl.tasks.zebra_grid import get_zebra_grid_tasks

MODEL = "Qwen/Qwen2.5-7B-Instruct"

if __name__ == "__main__":
    arguments = script_arguments(
        __doc__,
        run="runs/zebra_grid",
        iterations=100,
        model=MODEL,
        presets=presets_of("zebra_grid"),
    )
    config = recipe_config(
        arguments,
        tasks_per_iteration=32,
        samples_per_task=16,
        max_tokens=2048,
        seq_len=16384,
        advantages="mean",
        training={"lr": 1e-5, "lora_rank": 32, "updates_per_iteration": 1},
        validation_metric="solved",
    )
    few = arguments.tiny or arguments.check
    tasks = get_zebra_grid_tasks(
        "train", 4 if arguments.tiny else 256 if arguments.check else 2000, arguments.task_seed
    )
    held_out = get_zebra_grid_tasks("validation", 2 if few else 100)
    print(run_recipe(arguments, config, tasks, held_out, "grids solved"))
