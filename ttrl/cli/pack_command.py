"""`ttrl pack`: rollouts to packed rows, for `tune run ttrl/grpo_recipe` without a run."""

import argparse
import json
import shlex
from pathlib import Path

from ttrl.text import harmless


def add_pack(parser: argparse.ArgumentParser) -> None:
    files = "rollouts.jsonl of a run, or the lines of TaskResults.to_jsonl_lines()"
    parser.add_argument("rollouts", nargs="+", type=Path, metavar="ROLLOUTS.jsonl", help=files)
    model = "the sampling model: a folder, a name of `ttrl models` or on the hub"
    parser.add_argument("--model", required=True, metavar="MODEL", help=model)
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="the output, such as packed.safetensors; an existing file is replaced",
    )
    config = "settings of a run or of a recipe: a YAML file, or a run folder (default: none)"
    parser.add_argument("--config", type=Path, metavar="FILE", help=config)
    settings = "settings to use instead: seq_len=4096 advantages=leave_one_out objective=gspo"
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help=settings
    )
    parser.set_defaults(run_command=run_pack)


def run_pack(arguments: argparse.Namespace) -> int:
    """Pack the rollouts, and print the facts and the command for the next step."""
    from ttrl.cli.settings import model_run, read_planned
    from ttrl.loop.pack_files import pack_files

    settings = ["max_tokens=1", *arguments.set]  # nothing is sampled: short rows are fine
    if arguments.config is None:
        config = model_run(arguments.model, settings)
    else:
        settings.append(f"model={json.dumps(arguments.model)}")
        config = read_planned(arguments.config, settings, with_tasks=False).config
    made = pack_files(arguments.rollouts, config, arguments.out)
    print(harmless("\n".join(made.lines())))
    command = ["tune", "run", "ttrl/grpo_recipe", "--config", "CONFIG.yaml"]
    command += [f"model={arguments.model}", f"packed={arguments.out}", "output_dir=FOLDER"]
    if config.temperature != 1.0:
        command.append(f"temperature={config.temperature}")
    print(f"Next: {shlex.join(command)}")
    return 0
