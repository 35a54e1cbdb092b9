"""Run the command `ttrl`: its subcommands, and its handling of errors and signals.

A subcommand is two functions in a file of its group: `add_X` adds its arguments to a parser, and
`run_X` prints and returns the exit code. `run_X` imports its needs when it runs, to keep
`ttrl --help` instant.

Exit codes: 0 done; 1 the answer is no (doctor: this machine cannot run ttrl); 2 wrong input, or a
stop for a known reason, told in a line or two without a traceback; 130 interrupted.
"""

import argparse
import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from ttrl.cli import (
    config,
    eval_command,
    machine_commands,
    models,
    plan_command,
    proxy_command,
    recipe_files,
    runs,
    sweep,
    tasks_command,
)
from ttrl.cli.new import command as new_command
from ttrl.errors import TtrlError
from ttrl.system.console import speak_in_lines, tracebacks_wanted
from ttrl.text import harmless
from ttrl.version import __version__

SUBCOMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str]] = {
    "quickstart": (
        recipe_files.add_quickstart,
        "teach a small model to answer in JSON, in minutes and without a GPU",
    ),
    "recipes": (recipe_files.add_recipes, "list and copy the recipes and the trainer's configs"),
    "new": (
        new_command.add_new,
        "write a script to train your model: six questions, and its plan",
    ),
    "train": (
        runs.add_train,
        "train a model with a script, a recipe or a file of settings",
    ),
    "doctor": (
        machine_commands.add_doctor,
        "check whether this machine can run ttrl, and list what to fix",
    ),
    "report": (runs.add_report, "write a run's report.html again and print its path"),
    "pack": (
        recipe_files.add_pack,
        "pack rollouts for `tune run ttrl/grpo_recipe`, without a run",
    ),
    "ui": (
        runs.add_ui,
        "follow runs in a browser: curves, samples, comparisons",
    ),
    "watch": (
        runs.add_watch,
        "follow runs in a terminal: curves, phases, time left, the newest sample",
    ),
    "view": (runs.add_view, "look at the packed rows of an iteration"),
    "plan": (plan_command.add_plan, "predict a run's memory, disk, FLOPs, time and cost"),
    "config": (config.add_config, "explain a setting: ttrl config max_tokens"),
    "replay": (
        runs.add_replay,
        "grade a run's rollouts again with another grader, and train on the new grades",
    ),
    "study": (
        runs.add_study,
        "study an optimizer step of a run: its noise, AdamW's vector, its effect on the entropy",
    ),
    "eval": (
        eval_command.add_eval,
        "evaluate a model on families of tasks: accuracy with intervals, pass@k, tokens, cost",
    ),
    "models": (models.add_models, "list and download models without the hub"),
    "chat": (models.add_chat, "talk to a model, such as a checkpoint before and after training"),
    "push": (models.add_push, "push a run's model to the hub, with a model card"),
    "export": (models.add_export, "write a run's model for llama.cpp and Ollama (GGUF)"),
    "compare": (
        eval_command.add_compare,
        "compare runs at equal iterations, FLOPs, tokens or seconds, or two evaluations, task by "
        "task",
    ),
    "sweep": (sweep.add_sweep, "run a grid of settings and seeds, and compare the results"),
    "serve": (machine_commands.add_serve, "start a server for a run on another host"),
    "proxy": (
        proxy_command.add_proxy,
        "record agents' requests to a model as rollouts for training",
    ),
    "cache": (machine_commands.add_cache, "inspect, export or clear a cache of completions"),
    "tasks": (
        tasks_command.add_tasks,
        "generate puzzles, start a task of your own, try it before training",
    ),
}
"""By name: the function for the arguments, and the line in `ttrl --help`."""


class Lines(logging.Formatter):
    """Format progress as plain lines, and problems with their origin."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(
            record.getMessage() if record.levelno == logging.INFO else super().format(record)
        )


def make_parser() -> argparse.ArgumentParser:
    description = "Train a language model by reinforcement learning on your own machine."
    parser = argparse.ArgumentParser(prog="ttrl", description=description)
    parser.add_argument("--version", action="version", version=f"ttrl {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, (add, line) in SUBCOMMANDS.items():
        command = commands.add_parser(name, help=line)
        add(command)
        # A script's own --task is no short form of the command's --tasks.
        command.allow_abbrev = not command.get_default("takes_others")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    speak_in_lines()
    parser = make_parser()
    given = sys.argv[1:] if argv is None else argv
    if not given:  # a user looks around
        parser.exit(2, parser.format_help())
    arguments, others = parser.parse_known_args(given)
    if others and not getattr(arguments, "takes_others", False):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    arguments.others = others
    handler = logging.StreamHandler()
    handler.setFormatter(Lines("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own
    try:
        return int(arguments.run_command(arguments))
    except TtrlError as error:
        if tracebacks_wanted():
            traceback.print_exc()
        print(f"ttrl: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ttrl: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `ttrl doctor | head`: the reader has seen enough
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
