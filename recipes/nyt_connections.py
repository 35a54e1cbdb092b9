"""NYT Connections: sixteen words, four groups of four.

    python recipes/nyt_connections.py [--model Qwen/Qwen2.5-7B-Instruct] --data PATH
        [--run runs/nyt_connections]
    python recipes/nyt_connections.py --tiny --data PATH  # tries everything out, on a laptop

The data is a file of puzzles. They belong to the newspaper, so ttrl does not ship them;
docs/reference/families.md lists the formats. Reward: the share of exactly right groups.
The settings are for one GPU with 80 GB; they have not been run.
"""

from ttrl.cli.recipe_script import mistakes_together, recipe_config, run_recipe, script_arguments
from ttrl.configs.experiments import presets_of
from ttrl.tasks.nyt_connections import get_nyt_connections_tasks

MODEL = "Qwen/Qwen2.5-7B-Instruct"

if __name__ == "__main__":
    arguments = script_arguments(
        __doc__,
        run="runs/nyt_connections",
        iterations=60,
        model=MODEL,
        data="",
        presets=presets_of("nyt_connections"),
    )
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
    with mistakes_together(arguments, config):
        tasks = get_nyt_connections_tasks(
            "train", seed=arguments.task_seed, path=arguments.data, liberal=True
        )
        held_out = get_nyt_connections_tasks("validation", path=arguments.data, liberal=True)
    print(run_recipe(arguments, config, tasks, held_out, "puzzles solved"))
