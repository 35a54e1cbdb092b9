"""How many r are in strawberry? A tiny model learns to count letters aloud, on a laptop.

    python recipes/letter_counting.py [--run runs/letter_counting] [--seed 0]

A random model of a million parameters is warmed up by supervised training on words of up to 8 letters and answers that spell the
word and number the letter asked for: "str1awber2r3y: 3". Words that contain a letter two or three times are rarer there than in
the questions that follow, as in real text, and words of 9 and 10 letters do not occur. From then on it is no longer given any
answers: every count is asked for equally often, in words of up to 10 letters; vLLM samples, the grader rewards only the last
number of the reply, and the GRPO recipe trains. Interrupt it whenever you like: the same command continues where it left off.

The warm start is long because copying is what the model learns late: after 200 steps (seed 2) most of what was wrong, and half of
what was right, was miscopied, and GRPO, which is told nothing of that, came from 0.67 to 0.78; after 300 (seed 1, constant
learning rate) from 0.71 to 0.85 and back to 0.78. With these settings, seeds 3, 4 and 5: the reward of the samples rose from
0.78, 0.77 and 0.74 (mean of the first five iterations) to 0.88, 0.85 and 0.90 (of the last five), and of 256 held-out words that
played no part in choosing the settings, 0.844, 0.859 and 0.863 were right before and 0.879, 0.918 and 0.898 after.
"""

from ttrl import TrainConfig
from ttrl.cli.recipe_script import run_recipe, script_arguments, supervised_start
from ttrl.tasks.letter_counting import get_letter_counting_tasks, letter_counting_examples

STEPS, BATCH = 600, 64
KNOWN, LONGEST = 8, 10  # letters of the words of the warm start, and of those that are asked

if __name__ == "__main__":
    arguments = script_arguments(__doc__, run="runs/letter_counting", iterations=25)
    examples = letter_counting_examples(
        STEPS * BATCH, seed=arguments.seed, max_length=KNOWN, spelled=True, count_weights=(16, 16, 4, 1)
    )
    start = arguments.run / "warm_start"
    if not arguments.check:
        start = supervised_start(start, examples, steps=STEPS, batch_size=BATCH, seed=arguments.seed)
    config = TrainConfig(
        run=str(arguments.run),
        model=str(start),
        iterations=arguments.iterations,
        tasks_per_iteration=64,
        samples_per_task=8,
        max_tokens=24,
        seq_len=512,
        seed=arguments.seed,
        training={
            "lr": 1e-4,
            "warmup_steps": 4,
            "lr_schedule": "linear",  # without it, what was learnt in the first half wavers in the second
            "total_steps": max(8, 4 * arguments.iterations),
            "updates_per_iteration": 4,
            "rows_per_microbatch": 8,
            "num_output_chunks": 1,
        },
        weight_sync=arguments.weight_sync,
        nproc_per_node=arguments.nproc_per_node,
        validation_metric="exact",
    )
    tasks = get_letter_counting_tasks("train", n=4096, seed=arguments.seed, max_length=LONGEST)
    held_out = get_letter_counting_tasks("validation", n=256, max_length=LONGEST)
    print(run_recipe(arguments, config, tasks, held_out, "words counted right"))
