"""The tiny quickstart: teach a model of a million parameters to sort the letters of a word, on a
laptop, in a few minutes.

    python recipes/sort_letters.py [--run runs/sort_letters] [--seed 0]

Supervised training first warms up a random model of a million parameters, on words of 3 to 5
letters. It then sorts about half of the held-out words of 8 letters. From then on, it gets no more
answers: vLLM samples, the grader rewards and the GRPO recipe trains, on words of 3 to 8 letters.
Interrupt it at any time; the same command continues.
"""

from ttrl.cli.recipe_script import recipe_config, run_recipe, script_arguments, supervised_start
from ttrl.tasks.sort_letters import get_sort_letters_tasks, sort_letters_examples

STEPS = 160
BATCH = 64

if __name__ == "__main__":
    # The run ends earlier than after 40 iterations once held-out words are sorted.
    arguments = script_arguments(__doc__, run="runs/sort_letters", iterations=40)
    start = arguments.run / "warm_start"
    if not arguments.check:
        examples = sort_letters_examples(STEPS * BATCH, seed=arguments.seed, max_length=5)
        start = supervised_start(
            start, examples, steps=STEPS, batch_size=BATCH, seed=arguments.seed
        )
    config = recipe_config(
        arguments,
        model=str(start),
        tasks_per_iteration=32,
        samples_per_task=16,
        max_tokens=12,
        seq_len=512,
        training={
            "lr": 1e-4,
            "updates_per_iteration": 4,
            "rows_per_microbatch": 8,
            "num_output_chunks": 1,
        },
        validation_metric="exact",
        stop_at=0.92,
    )
    tasks = get_sort_letters_tasks("train", n=4096, seed=arguments.task_seed, length_exponent=2)
    held_out = get_sort_letters_tasks("validation", n=256)
    print(run_recipe(arguments, config, tasks, held_out, "words sorted exactly"))
