"""Chess: the best move of a position.

    python recipes/chess_moves.py [--model Qwen/Qwen2.5-3B-Instruct] --data PATH [--run runs/chess_moves]
    python recipes/chess_moves.py --tiny --data PATH  # tries everything out, on a laptop

The data is lichess's puzzle table, a test suite in EPD, or rows with fen and best moves (docs/tasks.md). A legal move that is
not the best earns 0.05, or its points where they are known. The settings are for one GPU with 80 GB; they have not been run.
"""

from ttrl import TrainConfig
from ttrl.cli.recipe_script import run_recipe, script_arguments
from ttrl.tasks.chess_moves import get_chess_tasks

if __name__ == "__main__":
    arguments = script_arguments(__doc__, run="runs/chess_moves", iterations=100, model="Qwen/Qwen2.5-3B-Instruct", data="")
    config = TrainConfig(
        run=str(arguments.run),
        model=arguments.model,
        iterations=arguments.iterations,
        tasks_per_iteration=64,
        samples_per_task=8,
        max_tokens=512,
        seq_len=8192,
        advantages="std",
        advantage_std_floor=0.05,
        advantage_clip=2.0,
        training={"lr": 1e-6, "updates_per_iteration": 1},
        seed=arguments.seed,
        weight_sync=arguments.weight_sync,
        nproc_per_node=arguments.nproc_per_node,
        validation_metric="best",
    )
    tasks = get_chess_tasks("train", seed=arguments.seed, path=arguments.data, legal_reward=0.05)
    held_out = get_chess_tasks("validation", path=arguments.data, legal_reward=0.05)[:200]
    print(run_recipe(arguments, config, tasks, held_out, "best moves found"))
