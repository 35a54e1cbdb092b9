"""The arguments of `ttrl join`."""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds them, and what is called with them."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run folder, on a file system that all nodes share")
    parser.add_argument(
        "--patience",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="ends when no trainer came up for so long (600)",
    )
    parser.set_defaults(run_command=run)


def run(arguments: argparse.Namespace) -> int:
    """Takes part until there is nothing to take part in."""
    from ttrl.launch.nodes import join

    def say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    join(arguments.run, patience=arguments.patience, say=say)
    return 0
