"""`ttrl new`: ask what to train on which machine, and write a script with its plan."""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrl.cli.new.script import LORA, OWN, Script, check_new, trained_family, write_new
from ttrl.errors import UserError
from ttrl.system.console import note
from ttrl.text import duration

HERE = "this"
"""The machine that the script is written on."""
_UNITS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MOST_ITERATIONS = 1000
_ABOUT = """Write a script that trains a model, with its plan.

It asks six questions; the options answer them, and --yes takes the defaults for the rest. The
duration decides the number of iterations, by the plan. A model that does not fit as a whole is
trained by adapters."""


@dataclass(frozen=True)
class Question:
    """A question, its default, and how its answer is read (with a UserError for a wrong one)."""

    option: str
    text: str
    default: str
    read: Callable[[str], Any]


def _task(text: str) -> str:
    if text != OWN:
        trained_family(text.partition("=")[0])
    return text


def _machine(text: str) -> str | None:
    from ttrl.plans.gpu_sheets import sheets_named

    if text == HERE:
        return None
    sheets_named(text)
    return text


def _seconds(text: str) -> float:
    """Read "30 min", "2h" or "1.5 h"."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(s|min|m|h|d)", text.strip().lower())
    if found is None or not float(found[1]):
        raise UserError(f"{text!r} is no duration; write 30 min, 2 h or 1 d")
    return float(found[1]) * _UNITS[found[2]]


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text.strip()):
        raise UserError(f"{text!r} is no number of tasks; write a whole number from 1 to 999999")
    return int(text)


def _goal(text: str) -> float | None:
    if text == "none":
        return None
    try:
        goal = float(text)
    except ValueError:
        goal = -1.0
    if not 0 < goal <= 1:
        raise UserError(f"{text!r} is no goal; write a number above 0 and up to 1, or none")
    return goal


def _model(text: str) -> str:
    from ttrl.ready_models import is_ready

    if not text.strip() or "\n" in text or '"' in text or "'" in text:
        raise UserError(
            f"{text!r} is no model; write a name of `ttrl models`, ORG/NAME or a folder"
        )
    if not Path(text).exists() and text.count("/") != 1 and not is_ready(text):
        raise UserError(
            f"there is no model {text!r}; write a name of `ttrl models`, ORG/NAME for one on the "
            "hub, or a folder"
        )
    return text


QUESTIONS = (
    Question("task", f"Task: {OWN} (you write it), or a family such as countdown", OWN, _task),
    Question("model", "Model: of `ttrl models`, on the hub, or a folder", "smollm2-135m", _model),
    Question("machine", f"Machine: {HERE}, or GPUs such as 4090 or 8xH100", HERE, _machine),
    Question("duration", "Duration, such as 30 min or 2 h", "1 h", _seconds),
    Question("held-out", "Held-out tasks, to measure after each iteration", "64", _count),
    Question("goal", "Goal: the share of right answers that ends the run, or none", "none", _goal),
)


def add_new(parser: argparse.ArgumentParser) -> None:
    parser.description = _ABOUT
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path, metavar="FILE.py", help="such as my_task.py")
    for one in QUESTIONS:
        words = f"{one.text} (default: {one.default})"
        parser.add_argument(f"--{one.option}", metavar="ANSWER", help=words)
    parser.add_argument("--yes", action="store_true", help="ask nothing")
    parser.set_defaults(run_command=run_new)


def run_new(
    arguments: argparse.Namespace,
    ask: Callable[[str], str] | None = None,
    plan: Callable[[Script, Mapping[str, Any]], str] | None = None,
) -> int:
    """Ask, plan, write. ask: default `input`; plan: default, the script plans itself."""
    plan = plan or _own_plan
    path: Path = arguments.file
    check_new(path)
    if ask is None:
        if not arguments.yes and not sys.stdin.isatty():
            raise UserError("nobody can answer here; give the answers as options, and --yes")
        ask = input
    answers = {one.option: _answer(one, arguments, ask) for one in QUESTIONS}
    gpu: str | None = answers["machine"]
    script = Script(
        path.stem,
        task=answers["task"],
        model=answers["model"],
        iterations=1,
        held_out=answers["held-out"],
        goal=answers["goal"],
        on_gpu=gpu is not None or _has_gpu(),
    )
    note("planning")
    made = json.loads(plan(script, {"gpu": gpu, "json": True}))
    if _does_not_fit(made) and script.on_gpu:
        note("the whole model does not fit; trying adapters (lora_rank=32)")
        script = dataclasses.replace(script, changes=LORA)
        made = json.loads(plan(script, {"gpu": gpu, "json": True}))
    seconds = made["seconds"]
    left = answers["duration"] - (seconds["run"] - seconds["iteration"])
    count = min(_MOST_ITERATIONS, int(left / seconds["iteration"]))
    script = dataclasses.replace(script, iterations=max(1, count))
    text = plan(script, {"gpu": gpu}).strip()
    ending = "".join(f"#  {line}".rstrip() + "\n" for line in text.splitlines())
    about = f"# The plan of this file; `ttrl plan {path.name}` makes a new one.\n#\n"
    write_new(path, f"{script.text()}\n\n{about}{ending}")
    print(f"{text}\n\n{path}")
    if count < 1:
        print(f"note: an iteration takes {duration(seconds['iteration'])}, longer than asked for")
    if script.task == OWN:
        print(f"Next: put your task into it, and ttrl tasks try {path} --n 3 --reply 'It is 12.'")
    else:
        print(f"Next: ttrl train {path}")
    return 0


def _answer(question: Question, arguments: argparse.Namespace, ask: Callable[[str], str]) -> Any:
    """Return the answer of an option, of a person, or the default. A person is asked until the
    answer can be read.
    """
    given = getattr(arguments, question.option.replace("-", "_"))
    if given is not None or arguments.yes:
        try:
            return question.read(question.default if given is None else given)
        except UserError as error:
            raise UserError(f"--{question.option}: {error}") from None
    while True:
        try:
            answer = ask(f"{question.text} [{question.default}]: ").strip()
        except EOFError:
            raise UserError("nobody answers; give the answers as options, and --yes") from None
        try:
            return question.read(answer or question.default)
        except UserError as error:
            note(str(error))


def _has_gpu() -> bool:
    from ttrl.system.gpus import visible_gpus

    return bool(visible_gpus())


def _does_not_fit(plan: Mapping[str, Any]) -> bool:
    return any(warning.startswith("does not fit") for warning in plan["warnings"])


def _own_plan(script: Script, how: Mapping[str, Any]) -> str:
    """Let the script plan itself, in a folder of its own; how: a script's --plan. Raises UserError
    with what it says.
    """
    with tempfile.TemporaryDirectory(prefix="ttrl-new-") as folder:
        file = script.write(Path(folder, f"{script.name}.py"))
        command = [sys.executable, str(file), "--plan", json.dumps(how)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().partition("making the tasks\n")[2] or done.stderr
        raise UserError(f"nothing is written, because this run cannot be planned: {said}")
    return done.stdout
