"""`ttrl push` and `ttrl export`: a run's model on the hub, or as a GGUF file."""

import argparse
import importlib.util
import sys
from pathlib import Path

from ttrl.errors import UserError
from ttrl.system.console import say
from ttrl.text import gib, harmless

_RUN = "a run folder, such as runs/sort_letters, or a checkpoint in it"


def _add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help=_RUN)
    parser.add_argument(
        "--iteration",
        type=int,
        metavar="N",
        help="the checkpoint after iteration N (default: the best by validation_metric; without "
        "held-out tasks, the newest)",
    )


def add_push(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Push a run's checkpoint to the hub, with a model card made from the run. Uses HF_TOKEN or "
        "the login of `hf auth login`."
    )
    _add_choice(parser)
    parser.add_argument("--to", required=True, metavar="USER/NAME", help="the repository")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the card and the files; ask no network"
    )
    parser.add_argument(
        "--public", action="store_true", help="make a new repository public (default: private)"
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="also into a repository with other files, and remove those",
    )
    parser.add_argument(
        "--merged", action="store_true", help="push whole weights instead of an adapter"
    )
    parser.add_argument(
        "--base-model", metavar="USER/NAME", help="the starting model's name on the hub"
    )
    parser.set_defaults(run_command=run_push)


def run_push(arguments: argparse.Namespace) -> int:
    print(f"ttrl push: reading {arguments.run}", file=sys.stderr, flush=True)
    from ttrl.exports.checkpoint import choose
    from ttrl.exports.push import package, push

    chosen = choose(arguments.run, arguments.iteration)
    made = package(chosen, arguments.to, base_model=arguments.base_model, merged=arguments.merged)
    if arguments.dry_run:
        say(harmless(made.card))
        print(f"{made.listing()}\n(nothing was sent)", file=sys.stderr)
        return 0
    print(f"{made.listing()}", file=sys.stderr, flush=True)
    print(push(made, public=arguments.public, replace=arguments.replace))
    return 0


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a run's checkpoint for llama.cpp and Ollama: a GGUF file and a Modelfile. An "
        "adapter is merged into its base first."
    )
    _add_choice(parser)
    parser.add_argument("--to", required=True, choices=("gguf",), help="the format: gguf")
    parser.add_argument(
        "--dtype",
        choices=("f32", "bf16", "f16", "q8_0"),
        help="of the matrices; q8_0: 8 bits (default: as in the checkpoint)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="the folder to write (default: exports/NAME)"
    )
    parser.set_defaults(run_command=run_export)


def run_export(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("gguf") is None:
        raise UserError("writing GGUF files needs the package gguf: pip install gguf")
    print(f"ttrl export: reading {arguments.run}", file=sys.stderr, flush=True)
    from ttrl.exports.checkpoint import choose
    from ttrl.exports.gguf import export_gguf

    chosen = choose(arguments.run, arguments.iteration)
    output = arguments.output or Path("exports", chosen.name)
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; choose a folder with --output")
    print(f"iteration {chosen.iteration}, {chosen.why}", file=sys.stderr)
    made = export_gguf(chosen, output, arguments.dtype)
    for path in made:
        print(path)
    print(
        f"({gib(made[0].stat().st_size)}; in {output}: ollama create {chosen.name} -f Modelfile)",
        file=sys.stderr,
    )
    return 0
