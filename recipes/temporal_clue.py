"""Temporal-clue: a murder in a house of many rooms, to be solved from clues about persons, places,
times and motives.

    python recipes/temporal_clue.py [--model Qwen/Qwen2.5-14B-Instruct] --data PATH
        [--run runs/temporal_clue]
    python recipes/temporal_clue.py --tiny --data PATH  # tries everything out, on a laptop

The data is a file or folder of puzzles, either published or generated:

    ttrl tasks generate temporal-clue --n 3000 --out puzzles/train.jsonl --seed 1

Reward: the share of right answers. Settings for eight GPUs with 80 GB; they have not been run.
"""

from ttrl.cli.recipe_script import mistakes_together, recipe_config, run_recipe, script_arguments
from ttrl.configs.experiments import presets_of
from ttrl.tasks.temporal_clue import get_temporal_clue_tasks

MODEL = "Qwen/Qwen2.5-14B-Instruct"

if __name__ == "__main__":
    arguments = script_arguments(
        __doc__,
        run="runs/temporal_clue",
        iterations=100,
        model=MODEL,
        data="",
        presets=presets_of("temporal_clue"),
    )
    config = recipe_config(
        arguments,
        tasks_per_iteration=32,
        samples_per_task=50,
        max_tokens=4096,
        seq_len=16384,
        advantages="mean",
        training={"lr": 6e-6, "updates_per_iteration": 4},
        validation_metric="accuracy",
    )
    with mistakes_together(arguments, config):
        tasks = get_temporal_clue_tasks("train", None, arguments.task_seed, path=arguments.data)
        held_out = get_temporal_clue_tasks("validation", None, path=arguments.data)
    print(run_recipe(arguments, config, tasks, held_out, "answers right"))
