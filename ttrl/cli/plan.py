"""`ttrl plan CONFIG`: what a run will take."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def add_plan(parser: argparse.ArgumentParser) -> None:
    config = "a run folder, its config.yaml, or a recipe's config (recipe_configs/)"
    parser.add_argument("config", type=Path, metavar="CONFIG", help=config)
    others = "settings to use instead of the file's: model=FOLDER iterations=100 lora_rank=16"
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=others)
    parser.add_argument("--tasks", metavar="FILE.py", help="also FILE.py:NAME or MODULE:NAME: tasks whose prompts are counted")
    parser.add_argument("--prompt-tokens", type=float, metavar="N", help="mean length of prompts, where there are no tasks (200)")
    parser.add_argument("--completion-tokens", type=float, metavar="N", help="mean length of completions (a third of max_tokens)")
    parser.add_argument("--signal-share", type=float, metavar="S", help="share of the groups that are trained on (1)")
    parser.add_argument("--probe", action="store_true", help="start server and trainer, and measure a few iterations")
    which = "plan for this GPU, by its data sheet: H100, 8xH100, 4090, A100-40GB, 2x24GB, ..."
    parser.add_argument("--gpu", metavar="NAME", help=which)
    parser.add_argument("--price-per-hour", type=float, metavar="P", help="of the whole machine")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run_command=run_plan)


def run_plan(arguments: argparse.Namespace) -> int:
    print(f"ttrl plan: reading {arguments.config}", file=sys.stderr, flush=True)
    from ttrl.cli.settings import read_config

    config, run, recipe_only = read_config(arguments.config, arguments.set, elsewhere=arguments.gpu is not None)
    from ttrl.loop.plan import plan  # loads PyTorch, for which no mistake in a config waits
    from ttrl.plans.lengths import Assumptions
    from ttrl.tasks.reference import load_tasks

    tasks: list[Any] = []
    if arguments.tasks is not None:
        tasks = load_tasks(arguments.tasks, config.tasks_per_iteration * config.iterations)
    made = plan(
        config,
        tasks,
        assumptions=Assumptions(arguments.prompt_tokens, arguments.completion_tokens, arguments.signal_share),
        gpu=arguments.gpu,
        probe=arguments.probe,
        price_per_hour=arguments.price_per_hour,
        recipe_only=recipe_only,
        run=None if tasks else run,
    )
    print(json.dumps(made.to_dict(), indent=2) if arguments.json else str(made))
    return 0
