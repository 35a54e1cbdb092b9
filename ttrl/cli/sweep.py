"""`ttrl sweep FILE`: the runs of a grid, and one comparison at the end.

    recipe: sort_letters                   # a recipe by its name, or a script with the same options
    runs: runs/shape                       # where the runs go, each in a folder named after its
                                           settings
    arguments: ["--iterations", "20"]      # for all of them (none)
    seeds: [0, 1, 2]                       # ([0])
    arms:                                  # settings that belong together, by a name (none)
      wide: {tasks_per_iteration: 32, samples_per_task: 8}
      deep: {tasks_per_iteration: 8, samples_per_task: 32}
    grid:                                  # every combination of these values, with every arm
                                           (none)
      lr: [1.0e-4, 3.0e-4]                 # also model: [FOLDER, NAME]
    by: flops                              # where they are compared (iteration)
    gpus: 1                                # of each run; with more GPUs, runs go side by side
                                           (all GPUs, one run after the other)

Further options go to all of the runs: `ttrl sweep FILE --data PATH --overfit 8`. Runs side by side
write their output to RUNS/NAME.log.

A run is finished when its script has ended without an error. RUNS/sweep.json keeps a digest of
each finished run's command (the command may hold a secret). The same `ttrl sweep` thus
continues after an interruption, even within a run, and runs only the additions to the file. After a
failed run, the others continue.
"""

import argparse
import hashlib
import itertools
import json
import os
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from ttrl.cli.recipe_files import sweeps
from ttrl.cli.runs import script_named
from ttrl.configs.base import Config
from ttrl.configs.machines import shares_of_devices
from ttrl.errors import UserError, complaints
from ttrl.system.console import note, say
from ttrl.system.files import read_object, write_json
from ttrl.system.gpus import visible_devices

_STATE_FILE = "sweep.json"
_LOOK_SECONDS = 0.2


@dataclass(kw_only=True)
class Sweep(Config):
    """Hold the content of the file."""

    recipe: str
    runs: str
    arguments: list[Any] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [0])
    arms: dict[str, Any] = field(default_factory=dict)
    grid: dict[str, Any] = field(default_factory=dict)
    by: Literal["iteration", "flops", "tokens", "seconds"] = "iteration"
    gpus: int | None = None

    def problems(self) -> list[str]:
        """Return the mistakes in the values, one line each."""
        found = [
            f"grid: {name} must be a list of values"
            for name, each in self.grid.items()
            if type(each) is not list
        ]
        found += [
            f"arms: {name} must be a mapping of settings"
            for name, one in self.arms.items()
            if type(one) is not dict
        ]
        if self.recipe:
            found += complaints(lambda: script_named(self.recipe), "recipe: ")
        return found + self.at_least(1, "gpus")

    def commands(self) -> dict[str, list[str]]:
        """Return the command of each run, by the name of its folder; the seeds of one arm follow
        each other.
        """
        found = {}
        recipe = str(script_named(self.recipe))
        for (arm, fixed), *values in itertools.product(
            self.arms.items() or [("", {})],
            *([(name, one) for one in each] for name, each in self.grid.items()),
        ):
            settings = {**fixed, **dict(values)}
            parts = [arm] * bool(arm) + [
                f"{name.rpartition('.')[2]}={_plain(value)}" for name, value in values
            ]
            for seed in self.seeds:
                name = ",".join([*parts, f"seed={seed}"])
                given = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
                command = [
                    recipe,
                    "--run",
                    str(Path(self.runs, name)),
                    "--seed",
                    str(seed),
                    *map(str, self.arguments),
                ]
                found[name] = [*command, *(["--set", *given] if given else [])]
        return found


def read_sweep(path: Path, others: Sequence[str] = ()) -> Sweep:
    """Read a sweep's file, or one of `ttrl recipes` by its name; `others` are further arguments for
    all runs. Raises UserError with its faults.
    """
    if not path.exists():
        path = sweeps().get(str(path).replace("-", "_"), path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if values is None:  # an empty file lacks everything
        values = {}
    needed = "recipe, runs, and arms, grid or seeds: `ttrl sweep --help`"
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a mapping; it needs {needed}")
    sweep = Sweep.parse(values, f"{path} (it needs {needed})")
    sweep.arguments += others
    if len(sweep.commands()) < 2:
        raise UserError(f"{path} defines a single run; give arms, a grid or seeds")
    return sweep


_WITHOUT_RUNS = {"--check", "--plan"}
"""Options of scripts for a look without a run."""


def add_sweep(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    which = "a file, or one of `ttrl recipes` by its name: chess_batch"
    parser.add_argument("file", type=Path, metavar="FILE.yaml", help=which)
    parser.add_argument(
        "--list", action="store_true", help="print the commands without running them"
    )
    parser.set_defaults(run_command=run_sweep, takes_others=True)


def run_sweep(arguments: argparse.Namespace) -> int:
    """Run all unfinished runs, then compare all finished ones."""
    sweep = read_sweep(arguments.file, arguments.others)
    commands = sweep.commands()
    runs = Path(sweep.runs)
    if arguments.list:
        print("\n".join(map(shlex.join, commands.values())))
        return 0
    finished = _finished(runs / _STATE_FILE)
    unfinished = {
        name: command
        for name, command in commands.items()
        # Older files have the command itself.
        if finished.get(name) not in (_digest(command), command)
    }
    failed = []
    # A check or a plan leaves no run to compare.
    are_runs = not _WITHOUT_RUNS.intersection(arguments.others)
    for name, status in _endings(unfinished, _places(sweep), runs, len(commands)):
        if status != 0:
            failed.append(name)
        elif are_runs:
            finished[name] = _digest(commands[name])
            write_json(runs / _STATE_FILE, finished)
    there = [runs / name for name in commands if are_runs and name in finished]
    if len(there) > 1:
        from ttrl.report.compared_runs import compare_runs

        comparison = compare_runs(there, by=sweep.by)
        say(comparison.table())
        print(comparison.write_html(runs / "compare.html"))
    if failed:
        note(
            f"ttrl sweep: {len(failed)} of {len(commands)} runs failed; the same command tries "
            f"them again: {'; '.join(failed)}"
        )
        return 2
    return 0


def _places(sweep: Sweep) -> list[dict[str, str]]:
    """Return the further environment of each run that goes at the same time: its share of the GPUs.
    Raises UserError if a run has too few.
    """
    if sweep.gpus is None:
        return [{}]
    devices = visible_devices()
    if not devices:
        return [{}]
    if len(devices) < sweep.gpus:
        raise UserError(
            f"gpus is {sweep.gpus}, and there are {len(devices)} GPUs; give each run fewer"
        )
    shares = shares_of_devices(len(devices) // sweep.gpus, sweep.gpus, devices)
    return [{"CUDA_VISIBLE_DEVICES": share} for share in shares]


def _endings(
    commands: Mapping[str, list[str]], places: Sequence[dict[str, str]], runs: Path, total: int
) -> Iterator[tuple[str, int]]:
    """Run scripts, one at each place at a time; yield the name and exit status of each at its end.

    An interruption reaches them, too; wait for their orderly ends. total: runs of the sweep.
    """
    waiting = deque(commands.items())
    running: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
    runs.mkdir(parents=True, exist_ok=True)
    try:
        while waiting or running:
            for place, environment in enumerate(places):
                if waiting and place not in running:
                    name, command = waiting.popleft()
                    number = total - len(waiting)
                    said = f"ttrl sweep: run {number} of {total}: {name}"
                    log = None
                    if len(places) > 1:
                        log = runs / f"{name}.log"
                        said += f"; its output is in {log}"
                    note(said)
                    running[place] = name, _start(command, environment, log)
            time.sleep(_LOOK_SECONDS)
            for place, (name, process) in list(running.items()):
                status = process.poll()
                if status is not None:
                    del running[place]
                    yield name, status
    finally:
        for _, process in running.values():
            process.wait()


def _start(
    command: Sequence[str], environment: Mapping[str, str], log: Path | None
) -> subprocess.Popen[bytes]:
    """Start a script. log: for its output; None: it writes where this process does."""
    own = {**os.environ, **environment}
    if log is None:
        return subprocess.Popen([sys.executable, *command], env=own)
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, *command], env=own, stdout=file, stderr=subprocess.STDOUT
        )


def _digest(command: list[str]) -> str:
    return hashlib.sha256(json.dumps(command).encode()).hexdigest()


def _finished(path: Path) -> dict[str, str | list[str]]:
    try:
        return dict(read_object(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is damaged: {error}; remove it: each run's folder also shows whether it is "
            "finished"
        ) from error


def _plain(value: Any) -> str:
    """Write a value as a part of a folder's name."""
    if isinstance(value, str):
        text = value
    else:
        text = json.dumps(value)
    return "".join(letter if letter.isalnum() or letter in "._+-" else "_" for letter in text)
