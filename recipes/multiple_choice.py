"""Multiple choice: ARC-Challenge, by reasoning before the letter.

    python recipes/multiple_choice.py [--model Qwen/Qwen2.5-1.5B-Instruct]
        [--data allenai/ai2_arc] [--run runs/multiple_choice]
    python recipes/multiple_choice.py --tiny --data PATH  # tries everything out, on a laptop

MMLU and ARC are mostly used for evaluation (`ttrl eval`); this trains on the train split of ARC.
The settings are for one GPU with 80 GB; they have not been run.
"""

from ttrl.cli.recipe_script import mistakes_together, recipe_config, run_recipe, script_arguments
from ttrl.tasks.multiple_choice import get_arc_tasks

if __name__ == "__main__":
    arguments = script_arguments(
        __doc__,
        run="runs/multiple_choice",
        iterations=40,
        model="Qwen/Qwen2.5-1.5B-Instruct",
        data="allenai/ai2_arc",
    )
    config = recipe_config(
        arguments,
        tasks_per_iteration=64,
        samples_per_task=8,
        max_tokens=512,
        seq_len=8192,
        advantages="mean",
        training={"lr": 1e-6, "updates_per_iteration": 1},
    )
    with mistakes_together(arguments, config):
        tasks = get_arc_tasks(
            "train", seed=arguments.task_seed, path=arguments.data, style="reasoning"
        )
        held_out = get_arc_tasks("validation", path=arguments.data, style="reasoning")[:200]
    print(run_recipe(arguments, config, tasks, held_out, "questions right"))
