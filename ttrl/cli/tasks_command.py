"""`ttrl tasks`: generate puzzles, start a task of one's own, try it."""

import argparse
import json
from pathlib import Path

from ttrl.system.console import say


def add_tasks(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    generate = commands.add_parser(
        "generate", help="make puzzles in parallel and write them to a file"
    )
    families = "temporal-clue, temporal-clue-night (like the published ones), zebra-grid"
    generate.add_argument("family", metavar="FAMILY", help=families)
    generate.add_argument("--n", type=int, required=True, help="number of puzzles")
    generate.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE.jsonl",
        help="the output file; an existing one is replaced",
    )
    generate.add_argument("--seed", type=int, default=0, help="seed of the puzzles (default: 0)")
    generate.add_argument(
        "--size", help="temporal-clue: tiny, small, medium, large; zebra-grid: 5x4 (default: mixed)"
    )
    generate.add_argument(
        "--processes", type=int, metavar="N", help="worker processes (default: one per core)"
    )
    generate.set_defaults(run_command=run_generate)

    new = commands.add_parser("new", help="write a file to start your own task from")
    new.add_argument("file", type=Path, metavar="FILE.py", help="such as my_task.py")
    new.set_defaults(run_command=run_new)

    attempt = commands.add_parser(
        "try", help="show a task's prompts, replies and grades before training"
    )
    attempt.add_argument(
        "file",
        metavar="FILE.py",
        help="also FILE.py:NAME or MODULE:NAME; without NAME, get_tasks or tasks",
    )
    attempt.add_argument("--n", type=int, default=3, help="number of tasks (default: 3)")
    attempt.add_argument(
        "--model",
        metavar="URL_OR_FOLDER",
        help="a server's address, a model folder or a name of `ttrl models`",
    )
    vllm = 'for a local server: arguments of vLLM, such as {"max_num_seqs": 8}'
    attempt.add_argument("--server-args", type=json.loads, default={}, metavar="JSON", help=vllm)
    template = "for a local server: a chat template file to use instead of the model's"
    attempt.add_argument("--chat-template", metavar="FILE", help=template)
    attempt.add_argument(
        "--reply",
        action="append",
        default=[],
        metavar="TEXT",
        help="grade this reply; may be repeated",
    )
    replies = "the model's replies per task (default: 1)"
    attempt.add_argument(
        "--samples-per-task",
        "--samples",
        dest="samples",
        type=int,
        default=1,
        metavar="K",
        help=replies,
    )
    attempt.add_argument(
        "--max-tokens", type=int, default=512, help="tokens per reply (default: 512)"
    )
    attempt.add_argument(
        "--temperature", type=float, default=1.0, help="sampling temperature (default: 1)"
    )
    attempt.set_defaults(run_command=run_try)


def run_generate(arguments: argparse.Namespace) -> int:
    from ttrl.cli.generate_puzzles import generate

    options = {name: getattr(arguments, name) for name in ("seed", "size", "processes")}
    print(generate(arguments.family, arguments.n, arguments.out, **options))
    return 0


def run_new(arguments: argparse.Namespace) -> int:
    from ttrl.cli.new.script import Script

    path = Script(arguments.file.stem).write(arguments.file)
    print(f"{path}\nNext: ttrl tasks try {path} --n 3 --reply 'The answer is 12.'")
    return 0


def run_try(arguments: argparse.Namespace) -> int:
    """Show prompts, replies and grades; return 1 if a reply could not be graded."""
    from ttrl.cli.try_tasks import try_tasks
    from ttrl.tasks.reference import load_tasks

    tasks = load_tasks(arguments.file, arguments.n)
    names = ("model", "samples", "max_tokens", "temperature", "server_args", "chat_template")
    options = {name: getattr(arguments, name) for name in names}
    if try_tasks(tasks, say, replies=arguments.reply, **options):
        return 0
    return 1
