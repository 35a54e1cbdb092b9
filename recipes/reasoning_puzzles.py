"""Puzzles of reasoning-gym: a mix of --families, from a hundred generated ones with verifiers.

    python recipes/reasoning_puzzles.py --families chain_sum,letter_counting,word_sorting
        [--level 0 1 2]
    python recipes/reasoning_puzzles.py --tiny  # tries everything out, on a laptop

--level comes from the package's own curriculum, and applies to all families. With several levels, a
run begins with the first and opens one after the other. `ttrl eval MODEL --tasks
reasoning_gym:chain_sum` measures a family's difficulty before training. The settings are for one
GPU with 80 GB; they have not been run.
"""

from ttrl.agents.reasoning_gym import get_reasoning_gym_tasks
from ttrl.cli.recipe_script import recipe_config, run_recipe, script_arguments
from ttrl.tasks.task import in_levels

FAMILIES = "chain_sum,basic_arithmetic,letter_counting,number_sorting,word_sorting,spell_backward"


def add_options(parser):
    parser.add_argument(
        "--families", default=FAMILIES, help=f"of reasoning-gym, separated by commas ({FAMILIES})"
    )
    parser.add_argument(
        "--level",
        type=int,
        nargs="+",
        default=[None],
        help="difficulty, from 0 (default: each family's own)",
    )


if __name__ == "__main__":
    arguments = script_arguments(
        __doc__,
        run="runs/reasoning_puzzles",
        iterations=100,
        model="Qwen/Qwen2.5-3B-Instruct",
        options=add_options,
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
    families = arguments.families.split(",")
    levels = arguments.level

    def puzzles(split, n, level):
        share = n // len(families) // len(levels)
        return [
            task
            for one in families
            for task in get_reasoning_gym_tasks(one, split, share, arguments.task_seed, level=level)
        ]

    tasks = in_levels(*(puzzles("train", 4096, level) for level in levels))
    held_out = [task for level in levels for task in puzzles("validation", 240, level)]
    print(run_recipe(arguments, config, tasks, held_out, "puzzles solved"))
