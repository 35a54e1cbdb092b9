"""Other people's environments, by their names in `ttrl eval --tasks`: one, or a mix of several.

    python recipes/environments.py --tasks textarena:TowerOfHanoi-v0
    python recipes/environments.py --tasks openenv:http://127.0.0.1:8000,verifiers:my-taskset
    python recipes/environments.py --tiny  # tries everything out, on a laptop

docs/how-to/environments.md lists the requirements of each name. The default is sums of
reasoning-gym. `ttrl eval MODEL --tasks NAME` measures an environment's difficulty before training.
The settings are for one GPU with 80 GB; they have not been run.
"""

from ttrl.cli.recipe_script import recipe_config, run_recipe, script_arguments
from ttrl.evaluation.families import TaskSpec

TASKS = "reasoning_gym:chain_sum"


def add_options(parser):
    parser.add_argument("--tasks", default=TASKS, help=f"names, separated by commas ({TASKS})")
    parser.add_argument(
        "--n", type=int, default=1024, help="number of training tasks (default: 1024)"
    )


if __name__ == "__main__":
    arguments = script_arguments(
        __doc__,
        run="runs/environments",
        iterations=100,
        model="Qwen/Qwen2.5-3B-Instruct",
        options=add_options,
    )
    config = recipe_config(
        arguments,
        tasks_per_iteration=32,
        samples_per_task=8,
        max_tokens=1024,
        seq_len=8192,
        advantages="mean",
        training={"lr": 1e-6, "updates_per_iteration": 1},
    )
    names = arguments.tasks.split(",")
    tasks = [
        task
        for name in names
        for task in TaskSpec.parse(f"{name}@train").tasks(
            max(1, arguments.n // len(names)), arguments.task_seed
        )
    ]
    held_out = [
        task
        for name in names
        for task in TaskSpec.parse(f"{name}@validation").tasks(max(1, 128 // len(names)))
    ]
    print(run_recipe(arguments, config, tasks, held_out, "reward"))
