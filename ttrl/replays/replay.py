"""Regrade a run's rollouts with a changed grader, show the changes, optionally train on the new
grades; needs no server.

A replay has its own folder, laid out like a run's. It never touches the original run:

RUN/replays/NAME/
  replay.json               the grader (digests of its files, git commit) and the changes
  iterations/0001/
    rollouts.jsonl          the same samples with new rewards and metrics
    done/rollouts.json      its marker; an interrupted replay continues
    packed.safetensors …    with train=True, as in any run (`ttrl.replays.training`)
"""

import dataclasses
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrl.errors import RunFolderError, TaskError, TtrlError, UserError
from ttrl.facts import RolloutsFacts
from ttrl.loop.carried import groups_of, task_key
from ttrl.records import TaskResult
from ttrl.replays.changes import Changes, ReplayComparison, TaskChange
from ttrl.replays.changes_text import changes_text
from ttrl.replays.graders import Regrader, ReplayGrader
from ttrl.replays.regrading import grade
from ttrl.rollouts.graders.grading import Graders
from ttrl.run_folder.folder import RunFolder, check_run_folder
from ttrl.run_folder.lease import LEASE_FILES
from ttrl.system.console import Console, mistakes_in_lines
from ttrl.system.files import digest, read_object, write_json
from ttrl.system.frames import data_frame
from ttrl.system.html_table import html_text
from ttrl.system.processes import reap_leftovers
from ttrl.tasks.task import Task
from ttrl.text import counted
from ttrl.version import __version__

if TYPE_CHECKING:
    from ttrl.system.frames import DataFrame

FILE_NAME = "replay.json"
_SCHEMA = 1
_TASKS_KEPT = 50


@dataclass(frozen=True)
class ReplayResult:
    """The result of a replay."""

    folder: Path
    iterations: list[Changes]
    total: Changes
    tasks: list[TaskChange]
    """Tasks with changed rewards, the most changed first; at most 50."""
    failures: dict[str, int]
    """Failures of the changed grader: how often, by reason."""
    text: str
    """The whole comparison, as shown at a terminal of 80 columns."""
    checkpoint: Path | None
    """The newest policy, if it was trained again and learned anything."""

    def to_pandas(self) -> "DataFrame":
        """Return a DataFrame with a row for each iteration and the columns of `Changes`. Raises
        UserError without pandas.
        """
        return data_frame(map(dataclasses.asdict, self.iterations), columns=("iteration",))

    def _repr_html_(self) -> str:
        """Return the comparison for a notebook."""
        return html_text(self.text)


@mistakes_in_lines()
def replay(
    run: str | os.PathLike[str],
    *,
    grader: ReplayGrader | str | None = None,
    tasks: Iterable[Task] | str | None = None,
    iterations: str | Iterable[int] | None = None,
    output: str | os.PathLike[str] | None = None,
    again: bool = False,
    skip_missing: bool = False,
    isolated: bool = False,
    grader_timeout: float = 60.0,
    grader_memory: int | None = None,
    train: bool = False,
    from_checkpoints: bool = False,
    quiet: bool = False,
) -> ReplayResult:
    """Grade the rollouts of `run` again, show the changes, and with `train` train on the new
    grades; nothing is sampled.

    grader: `grader(choice)`, as in training, `grader(choice, sample)` with an old sample
        (`ttrl.Sample`: task id, messages, old reward and metrics), or `grader(choices)` with all
        replies of a task; or a grader's name: "module:name", "path/to/file.py:name".
    tasks: instead of a grader: a list of Task, or the name of a list or of a function returning
        one. The task with the rollout's id and messages grades it.
    iterations: the iterations to grade: "3-5", "3,5", or numbers; None: all with rollouts.
    output: the folder of the replay; None: RUN/replays/NAME-DIGEST, another one for every version
        of the grader's file.
    again: regrade iterations already graded in the folder. (Otherwise graders given by name are
        not asked twice.)
    skip_missing: leave out, and count, rollouts without a task; otherwise they are an error.
    isolated, grader_timeout (seconds), grader_memory (bytes): as for `get_task_results`.
    train: pack and train with the run's own settings, each iteration from the one before. See
        `ttrl.replays.training`.
    from_checkpoints: with `train`, start each iteration from the run's own checkpoint instead.

    A choice's fields and the samples to grade: docs/how-to/replay.md.

    Raises UserError, TaskError, RunFolderError and ModelFolderError for wrong arguments,
    GraderError if every rollout of an iteration fails in the grader, TrainerError and
    StorageError.

        changed = replay("runs/sums", grader="my_graders.py:strict", iterations="3-5")
    """
    if from_checkpoints and not train:
        raise UserError("--from-checkpoints applies to training; add --train, or leave it out")
    check_run_folder(Path(run))
    original = RunFolder(run)
    console = Console(quiet=quiet)
    numbers = _chosen(original, iterations)
    regrader = Regrader(grader, tasks)
    graders = Graders(isolated=isolated, timeout=grader_timeout, memory=grader_memory)
    folder = RunFolder(
        output if output is not None else original.path / "replays" / _name(regrader)
    )
    _check_output(folder.path)
    training = None
    if train:
        if regrader.only_evaluates:
            raise UserError(
                f"--train with {regrader.reference}: this grader is for evaluation only: "
                f"{regrader.only_evaluates}; leave --train out"
            )
        from ttrl.replays.training import ReplayTraining  # loads torch; grading needs none

        training = ReplayTraining(folder.path, original, numbers, from_checkpoints=from_checkpoints)
    with folder.locked():
        before = _begin(folder, regrader, again)
        written = {
            "schema": _SCHEMA,
            "ttrl": __version__,
            "run": os.path.relpath(original.path, folder.path),
            "identity": regrader.identity,
            "grader": regrader.described,
            "training": before.get("training")
            if training is None
            else training.merged(before.get("training")),
        }
        try:
            todo = [
                number
                for number in numbers
                if again or not regrader.by_name or not _is_graded(folder, original, number)
            ]
            done = len(numbers) - len(todo)
            if done:
                if todo:
                    what = f"{done} of {len(numbers)} iterations"
                else:
                    what = "all iterations"
                console.line(f"{folder.path}: {what} graded before; --again grades all again")
            if todo:
                count = counted(len(todo), "iteration")
                console.line(f"Grading {count} of {original.path} with {regrader.reference}")
                # Before any grading, to name the grader of every grade.
                write_json(folder.path / FILE_NAME, {**before, **written})
                grade(
                    todo,
                    original,
                    folder,
                    regrader,
                    graders,
                    skip_missing=skip_missing,
                    console=console,
                )
        except TtrlError:
            if {path.name for path in folder.path.iterdir()} <= LEASE_FILES | {FILE_NAME}:
                folder.lease.discard()
            raise
        compared = _compared(original, folder, numbers)
        total = compared.total
        kept = compared.tasks[:_TASKS_KEPT]
        if total.left_out == total.rollouts:
            raise TaskError(
                f"no rollout of {original.path} has a task in {regrader.reference}; give the run's "
                "tasks"
            )
        written |= {
            "iterations": [dataclasses.asdict(one) for one in compared.iterations],
            "total": dataclasses.asdict(total),
        }
        failures = dict(compared.failures.most_common())
        written |= {"failures": failures, "tasks": [dataclasses.asdict(task) for task in kept]}
        write_json(folder.path / FILE_NAME, written)
        console.line(
            changes_text(compared, max(80, min(100, shutil.get_terminal_size((100, 24)).columns)))
        )
        if training is None:
            checkpoint = None
        else:
            checkpoint = training.train_again(console)
    console.line(f"replay: {folder.path}")
    if checkpoint is not None:
        console.line(f"checkpoint: {checkpoint}")
    return ReplayResult(
        folder.path,
        compared.iterations,
        total,
        kept,
        failures,
        changes_text(compared, 80),
        checkpoint,
    )


# Choose iterations and output folder


def _chosen(original: RunFolder, iterations: str | Iterable[int] | None) -> list[int]:
    """Return the iterations to replay, ascending. Raises RunFolderError if there are none,
    UserError for a wrong choice.
    """
    names = (path.parent.name for path in (original.path / "iterations").glob("*/rollouts.jsonl"))
    there = sorted(int(name) for name in names if name.isdigit())
    if not there:
        raise RunFolderError(
            f"{original.path} has no rollouts yet: no iteration has finished sampling; start the "
            "run again"
        )
    if iterations is None:
        return there
    if isinstance(iterations, str):
        wanted = _parsed(iterations)
    else:
        wanted = sorted(set(iterations))
    missing = [number for number in wanted if number not in there]
    if missing or not wanted:
        shown = ", ".join(map(str, missing[:8])) + (", …" if missing[8:] else "") or "none"
        if len(there) == there[-1] - there[0] + 1:
            have = f"{there[0]} to {there[-1]}"
        else:
            have = ", ".join(map(str, there))
        raise UserError(
            f"iterations {shown} have no rollouts in {original.path}; choose from {have}"
        )
    return wanted


def _parsed(text: str) -> list[int]:
    """Return the numbers named by "3-5", "3,5" or a combination."""
    numbers: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise UserError(
                f"iterations {text!r} cannot be read; give numbers and ranges, such as 3-5 or "
                "1,3,7-9"
            )
        numbers.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return sorted(numbers)


def _name(regrader: Regrader) -> str:
    clean = re.sub(r"[^A-Za-z0-9_-]+", "-", regrader.name).strip("-") or "grader"
    return f"{clean[:40]}-{regrader.identity[:8]}"


def _check_output(path: Path) -> None:
    if path.is_dir():
        there = {entry.name for entry in path.iterdir()} - LEASE_FILES
    else:
        there = set()
    if path.is_file() or (there and FILE_NAME not in there):
        raise RunFolderError(f"{path} exists and is not a replay; give another --output")


def _begin(folder: RunFolder, regrader: Regrader, again: bool) -> Mapping[str, Any]:
    """Clean the folder; return the earlier replay.json of this replay. Raises RunFolderError for a
    replay of another grader; with `again`, remove it instead."""
    reap_leftovers(folder.path)
    folder.clean()
    path = folder.path / FILE_NAME
    if not path.exists():
        return {}
    try:
        before = read_object(path)
        is_same = before["identity"] == regrader.identity
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path} is damaged ({error}); remove {folder.path}") from error
    if is_same:
        return before
    if not again:
        raise RunFolderError(
            f"{folder.path} holds a replay with another grader, or another version of its file; "
            "give another --output, or --again to replace it"
        )
    for entry in folder.path.iterdir():
        if entry.name not in LEASE_FILES:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return {}


def _is_graded(folder: RunFolder, original: RunFolder, number: int) -> bool:
    marker = folder.iteration(number).marker(RolloutsFacts)
    if marker is not None and marker.source != digest(
        original.iteration(number).path / "rollouts.jsonl"
    ):
        raise RunFolderError(
            f"{folder.path} does not match iteration {number} of {original.path}: its rollouts "
            "have changed since; give another --output, or --again to replace it"
        )
    return marker is not None


def _compared(original: RunFolder, folder: RunFolder, numbers: list[int]) -> ReplayComparison:
    """Compare the files of both folders. The new ones lack groups without a task and keep the
    order.
    """
    compared = ReplayComparison(original.config().get("advantages", "std"))
    for number in numbers:
        new = groups_of(folder.iteration(number))
        pairs = []
        for before in groups_of(original.iteration(number)):
            is_next = (
                bool(new)
                and _key(new[0]) == _key(before)
                and len(new[0].samples) == len(before.samples)
            )
            pairs.append((before, new.pop(0) if is_next else None))
        assert not new
        compared.add(number, pairs)
    return compared


def _key(group: TaskResult) -> str:
    return task_key(group.task_id, group.messages)
