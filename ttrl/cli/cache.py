"""`ttrl cache`: stats, export and prune of a cache of completions."""

import argparse
import re
from datetime import timedelta
from pathlib import Path

from ttrl.errors import UserError
from ttrl.system.console import say

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def add_cache(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    stats = commands.add_parser("stats", help="show the contents of a cache")
    export = commands.add_parser("export", help="write every sample of a cache as a line of JSON")
    prune = commands.add_parser("prune", help="remove samples from a cache")
    for one, run in ((stats, run_stats), (export, run_export), (prune, run_prune)):
        one.add_argument(
            "url", metavar="URL", help="a folder, or s3://bucket/folder, gs://..., az://..."
        )
        one.set_defaults(run_command=run)
    export.add_argument(
        "file", type=Path, metavar="FILE.jsonl", help="the output file; an existing one is replaced"
    )
    which = prune.add_mutually_exclusive_group(required=True)
    which.add_argument("--older-than", metavar="TIME", help="entries older than this: 30d, 12h, 2w")
    which.add_argument("--damaged", action="store_true", help="unreadable entries")
    which.add_argument("--all", action="store_true", help="all entries")
    prune.add_argument("--dry-run", action="store_true", help="only list what would be removed")


def run_stats(arguments: argparse.Namespace) -> int:
    from ttrl.rollouts.cache import maintenance

    say(maintenance.stats(arguments.url).as_table())
    return 0


def run_export(arguments: argparse.Namespace) -> int:
    from ttrl.rollouts.cache import maintenance

    print(f"{maintenance.export(arguments.url, arguments.file):,} samples in {arguments.file}")
    return 0


def run_prune(arguments: argparse.Namespace) -> int:
    from ttrl.rollouts.cache import maintenance

    if arguments.older_than is None:
        older_than = None
    else:
        older_than = _age(arguments.older_than)
    print(
        maintenance.prune(
            arguments.url,
            older_than=older_than,
            damaged_only=arguments.damaged,
            dry_run=arguments.dry_run,
        )
    )
    return 0


def _age(text: str) -> timedelta:
    """Read a length of time: 30d, 12h, 45m, 90s or 2w."""
    match = re.fullmatch(r"([0-9]{1,6})([smhdw])", text.strip())
    if match is None:
        raise UserError(f"{text!r} is not an age; give a number and s, m, h, d or w, such as 30d")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})
