"""`ttrl train`, and commands on run folders: `ttrl report`, `ttrl ui`, `ttrl view`, `ttrl replay`
and `ttrl study`.
"""

import argparse
import difflib
import logging
import re
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ttrl.cli.eval_command import add_grading
from ttrl.cli.recipe_files import add_settings, become, recipes
from ttrl.errors import ConfigError, UserError
from ttrl.system.console import note, say

if TYPE_CHECKING:
    from ttrl.instruments.held_out import HeldOut

_RUN = "a run folder, such as runs/sort_letters"
_TRAIN = """Train a model with a script, a recipe or a file of settings. The same command
continues a run.

    ttrl train my_task.py --seed 1 --set lr=1e-5     a script; `ttrl tasks new` writes one
    ttrl train structured_output --iterations 4      a recipe by its name
    ttrl train run.yaml --set lr=1e-5                a file of settings

Scripts and recipes have options of their own: `ttrl train my_task.py --help` lists them. A file of
settings holds those of `ttrl config`, and two more:

    tasks: structured_output                  a family of `ttrl eval`, FILE.py or FILE.py:NAME
    validation_tasks: structured_output       the held-out tasks (optional)"""

_ADDRESS = "open this address; it carries the key, and the pages only read. Ctrl-C ends them:"


def add_train(parser: argparse.ArgumentParser) -> None:
    parser.description = _TRAIN
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", metavar="FILE.py|RECIPE|RUN.yaml")
    parser.add_argument(
        "options",
        nargs=argparse.REMAINDER,
        metavar="…",
        help="--set NAME=VALUE …, --check; a script's own",
    )
    parser.set_defaults(run_command=run_train)


def run_train(arguments: argparse.Namespace, train: Callable[..., object] | None = None) -> int:
    """Train by a file of settings, or become the script. train: default `ttrl.train`."""
    if arguments.what.endswith((".yaml", ".yml")):
        return _train_by_settings(Path(arguments.what), arguments.options, train)
    become(script_named(arguments.what), arguments.options)


def script_named(what: str) -> Path:
    """Return the named script or recipe. Raises UserError if there is none."""
    if what.endswith(".py"):
        if not Path(what).is_file():
            raise UserError(
                f"{what} does not exist; `ttrl tasks new {what}` writes a script to start from"
            )
        text = Path(what).read_text(encoding="utf-8", errors="replace")
        if not text.strip():
            raise UserError(
                f"{what} is empty; remove it, and `ttrl tasks new {what}` writes a script to start "
                "from"
            )
        if not re.search(r"__main__|\b(train|run_recipe)\(", text):
            raise UserError(
                f"{what} defines tasks and starts no training. End it with train(…) or "
                "run_recipe(…), as in the output of `ttrl tasks new`, or name its tasks in a file "
                f"of settings (tasks: {what})"
            )
        return Path(what)
    known = recipes()
    name = what.replace("-", "_")
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UserError(
            f"there is no recipe {what!r}{hint}; give a script (FILE.py), a file of settings "
            "(RUN.yaml) or one of "
            f"{', '.join(known) or 'the recipes, which are not installed'}"
        )
    return known[name]


def _train_by_settings(file: Path, options: list[str], train: Callable[..., object] | None) -> int:
    parser = argparse.ArgumentParser(prog=f"ttrl train {file}")
    others = "settings to use instead of the file's: model=FOLDER iterations=100 lora_rank=16"
    add_settings(parser, others)
    parser.add_argument(
        "--check", action="store_true", help="make the tasks and check the settings, without a run"
    )
    given = parser.parse_args(options)
    from ttrl.cli.settings import read_run
    from ttrl.loop import start
    from ttrl.loop.checks import checked

    config, tasks, validation_tasks, problems, errors = read_run(file, given.set)
    if given.check or problems or errors:
        checked(config, tasks, validation_tasks, problems=problems, errors=errors)
        print(f"{len(tasks)} tasks, {len(validation_tasks)} held out; the settings are right")
        return 0
    (train or start.train)(config, tasks, validation_tasks)
    return 0


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help=_RUN)
    parser.set_defaults(run_command=run_report)


def run_report(arguments: argparse.Namespace) -> int:
    """Write report.html again, and print its findings on standard error."""
    note(f"ttrl report: reading {arguments.run}")
    from ttrl.report.page import write_report
    from ttrl.report.phrases import report_text

    print(write_report(arguments.run))
    note(report_text(arguments.run, shutil.get_terminal_size((100, 24)).columns))
    return 0


def add_view(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help=f"{_RUN}, or a packed.safetensors")
    which = "the iteration to show (default: the newest one with a pack)"
    parser.add_argument("--iteration", "--pack", type=int, metavar="N", help=which)
    parser.add_argument(
        "--rows", metavar="A-B", help="rows to show, such as 3, 0-7 or 0-3,8 (default: the first 8)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE.html",
        help="the page to write (default: packed.html in the pack's folder)",
    )
    parser.add_argument(
        "--png",
        type=Path,
        metavar="FILE.png",
        help="write a picture (with matplotlib) instead of the page",
    )
    parser.add_argument(
        "--text", action="store_true", help="print the rows instead of writing the page"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="a folder with tokenizer.json (default: the run's)",
    )
    parser.set_defaults(run_command=run_view)


def run_view(arguments: argparse.Namespace) -> int:
    from ttrl.report.view import open_pack
    from ttrl.text import spans

    view = open_pack(arguments.run, arguments.iteration, arguments.rows, arguments.tokenizer)
    if arguments.text:
        say(view.text(shutil.get_terminal_size((130, 24)).columns))
    written = []
    if arguments.png:
        written.append(view.write_png(arguments.png))
    if arguments.output or not (arguments.text or arguments.png):
        written.append(view.write_html(arguments.output))
    shown = f"rows {spans(view.rows)} of {view.packed.num_rows:,}"
    for path in written:
        print(path)
        note(f"({path.stat().st_size / 1e6:.2f} MB, {shown})")
    return 0


def add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help=_RUN)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument(
        "--grader",
        metavar="MODULE:NAME",
        help="grader(choice), (choice, sample) or (choices); also FILE.py:NAME",
    )
    how.add_argument(
        "--tasks",
        metavar="MODULE:NAME",
        help="a list of tasks with graders, or a function for it",
    )
    parser.add_argument(
        "--iterations", metavar="3-5,8", help="iterations to grade, such as 3-5 (default: all)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="the replay's folder (default: RUN/replays/NAME)"
    )
    parser.add_argument(
        "--again", action="store_true", help="also grade what is already graded in that folder"
    )
    parser.add_argument(
        "--skip-missing",
        action="store_true",
        help="with --tasks: leave out rollouts without a task",
    )
    add_grading(parser)
    parser.add_argument(
        "--grader-memory",
        type=int,
        metavar="BYTES",
        help="with --isolated: memory of a grader process",
    )
    parser.add_argument("--train", action="store_true", help="train again on the new grades")
    from_checkpoints = "with --train: start each iteration from the run's own checkpoint"
    parser.add_argument("--from-checkpoints", action="store_true", help=from_checkpoints)
    parser.set_defaults(run_command=run_replay)


def run_replay(arguments: argparse.Namespace) -> int:
    note(f"ttrl replay: reading {arguments.run}")
    from ttrl.replays.replay import replay

    names = (
        "grader",
        "tasks",
        "iterations",
        "output",
        "again",
        "skip_missing",
        "isolated",
        "grader_timeout",
        "grader_memory",
        "train",
        "from_checkpoints",
    )
    options = {name: getattr(arguments, name) for name in names}
    replay(arguments.run, **options)
    return 0


def add_study(parser: argparse.ArgumentParser) -> None:
    what = (
        "the checkpoint of an iteration, such as runs/NAME/iterations/0007/checkpoint, or a run, "
        "for the step of each iteration"
    )
    parser.add_argument(
        "path",
        type=Path,
        metavar="CHECKPOINT|RUN",
        help=f"{what}; its starting checkpoint must still exist",
    )
    tasks = (
        "the entropy is measured on answers to these, as for `ttrl eval` (the run's held-out "
        "tasks); pack: on half of the step's own answers, without a server"
    )
    parser.add_argument("--entropy-tasks", metavar="LIST", help=tasks)
    parser.add_argument(
        "--entropy-samples",
        "--sequences",
        dest="sequences",
        type=int,
        default=256,
        metavar="N",
        help="number of answers to measure the entropy on (default: 256)",
    )
    update = "for a checkpoint: which of its iteration's optimizer steps (default: 1, the first)"
    parser.add_argument("--update", type=int, default=1, metavar="N", help=update)
    factors = (
        "for a checkpoint: the sweep of η, in learning rates (default: "
        "-4,-1,0.25,0.5,1,2,4,8,16,32,64)"
    )
    parser.add_argument("--factors", metavar="A,B,…", help=factors)
    dtype = (
        "dtype of the study, not of the run; fp64 shows small steps lost to rounding in fp32 "
        "(default: fp32)"
    )
    parser.add_argument("--dtype", choices=("fp32", "fp64"), help=dtype)
    device = "device of the study (default: the run's); cpu also studies runs on a GPU"
    parser.add_argument("--device", choices=("cpu", "cuda"), help=device)
    precision = (
        "for a checkpoint: repeat the sweep in bf16, fp32 and fp64, and show where precision and "
        "linearity end; takes --dtype fp64"
    )
    parser.add_argument("--precision", action="store_true", help=precision)
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default: 0)")
    kernel = (
        "also the Fisher kernel of N of these answers and of the update's, at a backward pass for "
        "each (default: 0)"
    )
    parser.add_argument("--kernel", type=int, default=0, metavar="N", help=kernel)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for study.json and pictures (default: study/, in the run or next to the "
        "checkpoint)",
    )
    parser.set_defaults(run_command=run_study)


def run_study(arguments: argparse.Namespace) -> int:
    is_run = (arguments.path / "iterations").is_dir()
    problems = []
    factors = None
    try:
        if arguments.factors is not None:
            factors = [float(one) for one in arguments.factors.split(",")]
    except ValueError:
        problems.append(f"--factors is {arguments.factors!r}; it must be numbers, such as -1,1,2")
    for name, least in (("sequences", 2), ("kernel", 0), ("update", 1)):
        value = getattr(arguments, name)
        if value < least:
            problems.append(f"--{name} is {value}; it must be at least {least}")
    if is_run and (arguments.factors is not None or arguments.precision or arguments.update != 1):
        problems.append(
            f"--factors, --precision and --update are for one checkpoint, but {arguments.path} is "
            "a run"
        )
    if arguments.precision and arguments.dtype == "fp32":
        problems.append("--precision compares with float64, and --dtype is fp32: leave it out")
    if problems:
        raise ConfigError("arguments", problems)
    note(f"ttrl study: loading PyTorch, then {arguments.path}")
    logging.getLogger("ttrl.instruments").setLevel(logging.INFO)
    try:
        from ttrl.instruments import study_run
        from ttrl.instruments.precision_sweep import PRECISION_FACTORS
        from ttrl.instruments.study import FACTORS, study
        from ttrl.instruments.study_report import study_text, write_study
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("matplotlib"):
            raise
        raise UserError(
            f"a study draws pictures with matplotlib ({error}); pip install matplotlib"
        ) from error
    from ttrl.report.page import leave_report

    run = arguments.path
    if not is_run:
        run = run.absolute().parent.parent.parent
    names = ("sequences", "device", "seed", "kernel")
    options = {name: getattr(arguments, name) for name in names}
    options["dtype"] = arguments.dtype or ("fp64" if arguments.precision else "fp32")
    options["held_out"] = _held_out(arguments, run)
    if is_run:
        say("\n".join(textwrap.wrap(study_run.HEADING, 100)) + "\n")
        say(study_run.row_text(None))
        output = arguments.output or arguments.path / "study"
        every = study_run.study_run(
            arguments.path, **options, output=output, seen=lambda row: say(study_run.row_text(row))
        )
        say(study_run.last_words(every))
        paths = study_run.write_steps(every, output)
    else:
        found = study(
            arguments.path,
            factors=factors or (PRECISION_FACTORS if arguments.precision else FACTORS),
            precision=arguments.precision,
            update=arguments.update,
            **options,
        )
        say(study_text(found))
        paths = write_study(found, arguments.output or arguments.path.parent / "study")
    for path in paths:
        print(path)
    if arguments.output is None and (run / "metrics.jsonl").is_file():
        print(leave_report(run))  # it shows the pictures
    return 0


def _held_out(arguments: argparse.Namespace, run: Path) -> "HeldOut | None":
    """Return the source of the entropy batch; None for the pack's answers. Raises ConfigError."""
    from ttrl.configs.run import TrainConfig
    from ttrl.evaluation.drawn_answers import RUNS_OWN, DrawnAnswers, tasks_of
    from ttrl.instruments.held_out import HeldOut
    from ttrl.run_folder.folder import RunFolder

    spec = arguments.entropy_tasks
    if spec == "pack":
        return None
    if not (run / "config.yaml").is_file():
        if spec is None:
            return None
        problem = (
            f"--entropy-tasks is {spec}, and {run / 'config.yaml'} is not there: it says how the "
            "run samples; leave --entropy-tasks out to measure on the pack's answers"
        )
        raise ConfigError("arguments", [problem])
    # Nothing is logged here, so the run's loggers need not be installed on this machine.
    values = {**RunFolder(run).config(), "loggers": []}
    config = TrainConfig.parse(values, str(run / "config.yaml"))
    tasks = tasks_of(run, spec, config)
    if not tasks:
        return None
    name = spec or RUNS_OWN
    answers = DrawnAnswers(tasks, arguments.sequences, arguments.seed, config)
    request = answers.request(name)
    own = run / "study" / "entropy"
    if arguments.output is None:
        return HeldOut(name, request, own, answers)
    return HeldOut(name, request, arguments.output / "entropy", answers, also_in=own)


def add_ui(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve pages about runs, kept current: curves, phases, findings, conversations, "
        "packed rows, and comparisons. Only this machine can open them, with the printed key."
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="*",
        metavar="RUN",
        help="run folders, and folders of runs (default: runs)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        metavar="N",
        help="the port on 127.0.0.1 (default: a free one)",
    )
    parser.set_defaults(run_command=run_ui)


def run_ui(arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.port < 2**16:
        raise UserError(f"--port is {arguments.port}; it must be from 1 to 65535, or 0 for any")
    try:
        from ttrl.ui.server import serve
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise UserError(
            f"ttrl ui needs Starlette and uvicorn ({error}); they come with vLLM, or with "
            "pip install starlette uvicorn"
        ) from error

    def announce(address: str) -> None:
        say(f"{_ADDRESS}\n{address}")

    serve(arguments.runs or [Path("runs")], arguments.port, announce)
    return 0


def add_watch(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Follow runs in a terminal: curves, the phase under way, the time left, findings and the "
        "newest sample; several runs as a table. Outside a terminal, a single frame."
    )
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="run folders, and folders of runs (default: runs)",
    )
    parser.add_argument("--once", action="store_true", help="write one frame and end")
    parser.set_defaults(run_command=run_watch)


def run_watch(arguments: argparse.Namespace) -> int:
    from ttrl.live.watch import watch

    away = [one for one in arguments.runs if "://" in one]
    if away:
        raise UserError(
            f"{', '.join(away)}: ttrl watch reads folders; run it where the run folder is, or "
            "continue the mirror's run there"
        )
    watch([Path(one) for one in arguments.runs or ["runs"]], once=arguments.once)
    return 0
