"""The command `ttrl`: thin. Each subcommand imports what it needs when it runs, so that `ttrl --help` is instant.

Exit codes: 0 done; 1 the answer is no (doctor: this machine cannot run ttrl); 2 something given is wrong, or ttrl stopped for a
reason that it knows, which is said in a line or two without a traceback; 130 interrupted.
"""

import argparse
import contextlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from ttrl.cli.evaluate import COMPARE_HELP, EVAL_HELP, add_compare_arguments, add_eval_arguments
from ttrl.cli.hosts import add_join_arguments, add_serve_arguments
from ttrl.cli.plan import add_plan_arguments
from ttrl.errors import TtrlError, UserError
from ttrl.version import __version__


def _doctor(arguments: argparse.Namespace) -> int:
    from ttrl.cli import doctor

    print("Looking at this machine (about 15 s) ...", file=sys.stderr, flush=True)
    findings = doctor.examine(Path.cwd())
    print(doctor.render(findings))
    return 1 if any(finding.mark == "bad" for finding in findings) else 0


def _report(arguments: argparse.Namespace) -> int:
    from ttrl.report.page import write_report
    from ttrl.report.words import report_text

    print(write_report(arguments.run))
    print(report_text(arguments.run, shutil.get_terminal_size((100, 24)).columns), file=sys.stderr)
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    from ttrl.cli.plan import planned

    print(planned(arguments))
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    from ttrl.cli.evaluate import evaluated

    print(evaluated(arguments))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from ttrl.cli.evaluate import compared

    print(compared(arguments))
    return 0


def _view(arguments: argparse.Namespace) -> int:
    from ttrl.report.view import open_pack, spans

    view = open_pack(arguments.run, arguments.iteration, arguments.rows, arguments.tokenizer)
    if arguments.text:
        print(view.text(shutil.get_terminal_size((130, 24)).columns))
    written = [view.write_png(arguments.png)] if arguments.png else []
    if arguments.output or not (arguments.text or arguments.png):
        written.append(view.write_html(arguments.output))
    shown = f"rows {spans(view.rows)} of {view.packed.num_rows:,}"
    for path in written:
        print(path)
        print(f"({path.stat().st_size / 1e6:.2f} MB, {shown})", file=sys.stderr)
    return 0


def _add_view_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, such as runs/sort_letters, or a packed.safetensors")
    parser.add_argument(
        "--iteration", "--pack", type=int, metavar="N", help="whose pack; without it, the newest iteration's that has one"
    )
    parser.add_argument("--rows", metavar="A-B", help="which rows, such as 3, or 0-7, or 0-3,8; without it, the first 8")
    parser.add_argument("--output", type=Path, metavar="FILE.html", help="instead of packed.html beside the pack")
    parser.add_argument("--png", type=Path, metavar="FILE.png", help="a picture (with matplotlib), instead of the page")
    parser.add_argument("--text", action="store_true", help="print the rows here, instead of writing the page")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="a folder with tokenizer.json; without it, the run's")
    parser.set_defaults(run_command=_view)


def _replay(arguments: argparse.Namespace) -> int:
    from ttrl.replays.replay import replay

    names = ("grader", "tasks", "iterations", "output", "again", "skip_missing", "isolated", "grader_timeout")
    names += ("train", "from_checkpoints")
    replay(arguments.run, **{name: getattr(arguments, name) for name in names})
    return 0


def _add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, such as runs/sort_letters")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--grader", metavar="MODULE:NAME", help="grader(choice) or grader(choice, sample); also FILE.py:NAME")
    how.add_argument("--tasks", metavar="MODULE:NAME", help="a list of tasks with graders, or a function that returns one")
    parser.add_argument("--iterations", metavar="3-5,8", help="which ones; without it, all")
    parser.add_argument("--output", type=Path, metavar="DIR", help="instead of RUN/replays/NAME")
    parser.add_argument("--again", action="store_true", help="grade anew what was graded before in that folder")
    parser.add_argument("--skip-missing", action="store_true", help="with --tasks: leave out rollouts that have no task")
    parser.add_argument("--isolated", action="store_true", help="run graders in processes that can be ended")
    parser.add_argument("--grader-timeout", type=float, default=60.0, metavar="SECONDS", help="for one grade (60)")
    parser.add_argument("--train", action="store_true", help="train again on the new grades")
    parser.add_argument(
        "--from-checkpoints", action="store_true", help="with --train: start each iteration from the run's own checkpoint"
    )
    parser.set_defaults(run_command=_replay)


def _cache_stats(arguments: argparse.Namespace) -> int:
    from ttrl.rollouts.cache import tools

    print(tools.stats(arguments.url).as_table())
    return 0


def _cache_export(arguments: argparse.Namespace) -> int:
    from ttrl.rollouts.cache import tools

    print(f"{tools.export(arguments.url, arguments.file):,} samples in {arguments.file}")
    return 0


def _cache_prune(arguments: argparse.Namespace) -> int:
    from ttrl.rollouts.cache import tools

    older_than = None if arguments.older_than is None else _duration(arguments.older_than)
    print(tools.prune(arguments.url, older_than=older_than, damaged_only=arguments.damaged, dry_run=arguments.dry_run))
    return 0


def _duration(text: str) -> timedelta:
    """30d, 12h, 45m, 90s or 2w."""
    units = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
    if (match := re.fullmatch(r"([0-9]{1,6})([smhdw])", text.strip())) is None:
        raise UserError(f"{text!r} is no length of time; give a number and s, m, h, d or w, such as 30d")
    return timedelta(**{units[match[2]]: int(match[1])})


def _add_cache_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    url_help = "a folder, or s3://bucket/folder, gs://..., az://..."

    stats = commands.add_parser("stats", help="say what lies in a cache")
    stats.add_argument("url", metavar="URL", help=url_help)
    stats.set_defaults(run_command=_cache_stats)

    export = commands.add_parser("export", help="write every sample of a cache as a line of JSON")
    export.add_argument("url", metavar="URL", help=url_help)
    export.add_argument("file", type=Path, metavar="FILE.jsonl", help="the file to write; replaced if it exists")
    export.set_defaults(run_command=_cache_export)

    prune = commands.add_parser("prune", help="remove samples from a cache")
    prune.add_argument("url", metavar="URL", help=url_help)
    which = prune.add_mutually_exclusive_group(required=True)
    which.add_argument("--older-than", metavar="TIME", help="those that were stored longer ago than this: 30d, 12h, 2w")
    which.add_argument("--damaged", action="store_true", help="those that cannot be read")
    which.add_argument("--all", action="store_true", help="all of them")
    prune.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")
    prune.set_defaults(run_command=_cache_prune)


def _tasks_generate(arguments: argparse.Namespace) -> int:
    from ttrl.cli.generate_puzzles import generate

    names = ("seed", "size", "processes")
    print(generate(arguments.family, arguments.n, arguments.out, **{name: getattr(arguments, name) for name in names}))
    return 0


def _tasks_new(arguments: argparse.Namespace) -> int:
    from ttrl.cli.tasks import write_template

    path = write_template(arguments.file)
    print(f"{path}\nNext: ttrl tasks try {path} --n 3 --reply 'The answer is 12.'")
    return 0


def _tasks_try(arguments: argparse.Namespace) -> int:
    from ttrl.cli.tasks import try_tasks
    from ttrl.tasks.reference import load_tasks

    tasks = load_tasks(arguments.file, arguments.n)
    names = ("model", "samples", "max_tokens", "temperature")
    options = {name: getattr(arguments, name) for name in names}
    return 0 if try_tasks(tasks, print, replies=arguments.reply, **options) else 1


def _add_tasks_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="make puzzles and write them to a file, in parallel")
    generate.add_argument(
        "family", metavar="FAMILY", help="temporal-clue, temporal-clue-night (as the published ones), zebra-grid"
    )
    generate.add_argument("--n", type=int, required=True, help="how many")
    generate.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl", help="the file; replaced if it exists")
    generate.add_argument("--seed", type=int, default=0, help="other seeds, other puzzles (0)")
    generate.add_argument("--size", help="temporal-clue: tiny, small, medium, large; zebra-grid: 5x4; without it, mixed")
    generate.add_argument("--processes", type=int, metavar="N", help="without it, one for each core")
    generate.set_defaults(run_command=_tasks_generate)

    new = commands.add_parser("new", help="write a file to start a task of your own from")
    new.add_argument("file", type=Path, metavar="FILE.py", help="such as my_task.py")
    new.set_defaults(run_command=_tasks_new)

    attempt = commands.add_parser("try", help="show prompts, replies and grades of a task before any training")
    attempt.add_argument("file", metavar="FILE.py", help="also FILE.py:NAME or MODULE:NAME; without NAME, get_tasks")
    attempt.add_argument("--n", type=int, default=3, help="how many tasks (3)")
    attempt.add_argument("--model", metavar="URL_OR_FOLDER", help="a server's address, or a model folder to start one for")
    attempt.add_argument("--reply", action="append", default=[], metavar="TEXT", help="grade this reply; may be repeated")
    attempt.add_argument("--samples", type=int, default=1, help="replies of the model to each task (1)")
    attempt.add_argument("--max-tokens", type=int, default=512, help="of one reply (512)")
    attempt.add_argument("--temperature", type=float, default=1.0, help="of the sampling (1)")
    attempt.set_defaults(run_command=_tasks_try)


def make_parser() -> argparse.ArgumentParser:
    """The subcommands that exist, and nothing else."""
    parser = argparse.ArgumentParser(
        prog="ttrl", description="Train a language model by reinforcement learning on your own machine."
    )
    parser.add_argument("--version", action="version", version=f"ttrl {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="say whether this machine can run ttrl, and what to do if not")
    doctor.set_defaults(run_command=_doctor)

    report = commands.add_parser("report", help="write a run's report.html again and print where it is")
    report.add_argument("run", type=Path, metavar="RUN", help="a run folder, such as runs/sort_letters")
    report.set_defaults(run_command=_report)

    view = commands.add_parser("view", help="look at the packed rows that an iteration was trained on")
    _add_view_arguments(view)

    plan = commands.add_parser("plan", help="say what a run will take: memory, disk, FLOPs, time, money")
    add_plan_arguments(plan)
    plan.set_defaults(run_command=_plan)

    again = commands.add_parser("replay", help="grade a run's rollouts again with a changed grader, and train on the new grades")
    _add_replay_arguments(again)

    evaluation = commands.add_parser("eval", help=EVAL_HELP)
    add_eval_arguments(evaluation)
    evaluation.set_defaults(run_command=_eval)
    comparison = commands.add_parser("compare", help=COMPARE_HELP)
    add_compare_arguments(comparison)
    comparison.set_defaults(run_command=_compare)

    serving = commands.add_parser("serve", help="start a server that a run on another host joins")
    add_serve_arguments(serving)
    joining = commands.add_parser("join", help="train together with a run that another machine leads")
    add_join_arguments(joining)

    cache = commands.add_parser("cache", help="look into a cache of completions, export it, clear it")
    _add_cache_commands(cache)

    tasks = commands.add_parser("tasks", help="make puzzles, start a task of your own, try it before training")
    _add_tasks_commands(tasks)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = make_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        return int(arguments.run_command(arguments))
    except TtrlError as error:
        print(f"ttrl: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ttrl: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `ttrl doctor | head`: the reader has seen enough
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
