"""The tiny quickstart: teach a model of a million parameters to sort the letters of a word, on a
laptop, in a few minutes.

    python recipes/sort_letters.py [--run runs/sort_letters] [--seed 0] [--model smollm2-135m]

Supervised training first warms up a random model of a million parameters, on words of 3 to 5
letters. It then sorts about half of the held-out words of 8 letters. From then on, it gets no more
answers: vLLM samples, the grader rewards and the GRPO recipe trains, on words of 3 to 8 letters.
Interrupt it at any time; the same command continues.

With --model, a chat model is warmed up instead, on words of 3 and 4 letters, and then learns from
rewards alone to sort words of up to 6 letters.
"""

from pathlib import Path

from ttrl.cli.recipe_script import recipe_config, run_recipe, script_arguments, supervised_start
from ttrl.tasks.sort_letters import get_sort_letters_tasks, sort_letters_examples

if __name__ == "__main__":
    # The run ends earlier than after 40 iterations once held-out words are sorted.
    arguments = script_arguments(__doc__, run="runs/sort_letters", iterations=40, model="")
    sizes = {"tasks_per_iteration": 32, "samples_per_task": 16, "max_tokens": 12, "seq_len": 512}
    training: dict[str, object] = {
        "lr": 1e-4,
        "updates_per_iteration": 4,
        "rows_per_microbatch": 8,
        "num_output_chunks": 1,
    }
    lr = 1e-3
    rows = 64
    steps = 160
    batch_size = 64
    known = 5
    longest = 8
    questions = 256
    if arguments.model:
        # Words are few tokens to a chat model, and its letters hide in them.
        sizes |= {"tasks_per_iteration": 16, "samples_per_task": 8, "max_tokens": 16}
        training = {"lr": 2e-5, "updates_per_iteration": 2, "rows_per_microbatch": 1}
        lr = 2e-4
        rows = 4
        steps = 120
        batch_size = 16
        known = 4
        longest = 6
        questions = 128
    folder = arguments.run / "warm_start"
    config = recipe_config(
        arguments,
        model=arguments.model or str(folder),
        training=training,
        validation_metric="exact",
        stop_at=0.92,
        **sizes,
    )
    tasks = get_sort_letters_tasks(
        "train", n=4096, seed=arguments.task_seed, max_length=longest, length_exponent=2
    )
    held_out = get_sort_letters_tasks("validation", n=questions, max_length=longest)

    def start() -> Path:
        examples = sort_letters_examples(steps * batch_size, seed=arguments.seed, max_length=known)
        return supervised_start(
            folder,
            examples,
            steps=steps,
            batch_size=batch_size,
            seed=arguments.seed,
            lr=lr,
            rows_per_microbatch=rows,
            model=arguments.model or None,
        )

    print(run_recipe(arguments, config, tasks, held_out, "words sorted exactly", start=start))
