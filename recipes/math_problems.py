"""Mathematics: problems with roots, fractions, sets, intervals and more as answers.

    python recipes/math_problems.py [--model Qwen/Qwen2.5-1.5B-Instruct] [--data PATH]
    python recipes/math_problems.py --data BytedTsinghua-SIA/DAPO-Math-17k
    python recipes/math_problems.py --tiny --data PATH  # tries everything out, on a laptop

The default data is MATH. --data takes anything in the layouts of MATH, AIME and DAPO. A reply earns
1 if math-verify finds its last answer equal to the right one; nothing else counts. One problem in
ten of the train file is held out; the test file is for the end: `ttrl eval CHECKPOINT
--tasks math,aime`. The settings are for one GPU with 80 GB; they have not been run.
"""

from ttrl.cli.recipe_script import mistakes_together, recipe_config, run_recipe, script_arguments
from ttrl.tasks.math import get_math_tasks

MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
DATA = "DigitalLearningGmbH/MATH-lighteval"

if __name__ == "__main__":
    arguments = script_arguments(
        __doc__,
        run="runs/math_problems",
        iterations=100,
        model=MODEL,
        data=DATA,
    )
    config = recipe_config(
        arguments,
        tasks_per_iteration=64,
        samples_per_task=8,
        max_tokens=2048,
        seq_len=8192,
        advantages="mean",
        training={"lr": 1e-6, "updates_per_iteration": 1},
        validation_metric="exact",
    )
    with mistakes_together(arguments, config):
        tasks = get_math_tasks("train", seed=arguments.task_seed, path=arguments.data)
        held_out = get_math_tasks("validation", path=arguments.data)[:200]
    print(run_recipe(arguments, config, tasks, held_out, "problems solved"))
