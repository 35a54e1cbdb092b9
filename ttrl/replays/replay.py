"""Grades the rollouts of a run again with a changed grader, shows what differs, can train on the new grades; needs no server.

A replay is a folder of its own, laid out like a run, and never touches the run that it is made from:

RUN/replays/NAME/
  replay.json               which grader (digests of its files, git commit) and what changed
  iterations/0001/
    rollouts.jsonl          the same samples with new rewards and metrics
    done/rollouts.json      its marker; a replay that was interrupted continues
    packed.safetensors …    with train=True, as in any run (`ttrl.replays.training`)
"""

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttrl.errors import RunFolderError, TtrlError, UserError
from ttrl.replays.changes import Changes, TaskChange
from ttrl.replays.graders import Regrader, ReplayGrader
from ttrl.replays.grading import FILE_NAME, Regrading
from ttrl.rollouts.graders.grading import Graders
from ttrl.run_folder.folder import RunFolder, check_run_folder
from ttrl.run_folder.lock import LOCK_FILES
from ttrl.system.console import Console
from ttrl.tasks.task import Task


@dataclass(frozen=True)
class ReplayResult:
    """What a replay came to."""

    folder: Path
    iterations: list[Changes]
    total: Changes
    tasks: list[TaskChange]
    """Those whose rewards changed, the most changed first; at most 50."""
    failures: dict[str, int]
    """Why the changed grader failed, and how often."""
    text: str
    """All of it as it is shown at a terminal of 80 columns."""
    checkpoint: Path | None
    """The newest policy, where it was trained again and anything was learned."""


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
    """Grade the rollouts of `run` again, show what changed, and with `train` train on the new grades; nothing is sampled.

    grader: `grader(choice)`, as in training, or `grader(choice, sample)`, whose sample (`ttrl.Sample`) has task id, messages, old
        reward and metrics; or the name of one: "module:name", "path/to/file.py:name".
    tasks: instead of a grader: a list of Task, or the name of one or of a function that returns one. Each rollout is graded by
        the task with its id and messages.
    iterations: which ones: "3-5", "3,5", or numbers; None: all that have rollouts.
    output: the folder of the replay; None: RUN/replays/NAME-DIGEST, another one for every version of the grader's file.
    again: grade anew what was graded before in that folder. (Graders given by name are otherwise not asked twice.)
    skip_missing: leave out, and count, rollouts without a task; otherwise they are an error.
    isolated, grader_timeout (seconds), grader_memory (bytes): as for `get_task_results`.
    train: pack and train with the run's own settings, each iteration from the one before. See `ttrl.replays.training`.
    from_checkpoints: with `train`, start each iteration from the run's own checkpoint instead.

    Failed requests stay failed and unfinished samples unfinished. Samples whose old grader failed are graded. Tool calls are not
    in a run's rollouts: a choice has its text, finish reason, token ids and logprobs. Those of tasks with a rollout are: the
    choice is the last one, tool calls included, and its `messages` are the conversation.

    Raises UserError, TaskError, RunFolderError and ModelFolderError for what is wrong with the arguments, GraderError where every
    rollout of an iteration fails in the grader, TrainerError and StorageError.
    """
    if from_checkpoints and not train:
        raise UserError("--from-checkpoints says how to train; give --train with it")
    check_run_folder(Path(run))
    original, console = RunFolder(run), Console(quiet=quiet)
    numbers = _chosen(original, iterations)
    regrader = Regrader(grader, tasks)
    graders = Graders(isolated=isolated, timeout=grader_timeout, memory=grader_memory)
    folder = RunFolder(output if output is not None else original.path / "replays" / _name(regrader))
    _check_output(folder.path)
    training = None
    if train:
        from ttrl.replays.training import ReplayTraining  # loads torch, which grading does without

        training = ReplayTraining(folder.path, original, numbers, from_checkpoints=from_checkpoints)
    with folder.locked():
        work = Regrading(original, folder, regrader, numbers, console)
        work.begin(training, again=again)
        try:
            work.grade(graders, again=again or not regrader.by_name, skip_missing=skip_missing)
        except TtrlError:
            work.remove_if_empty()
            raise
        compared = work.compare()
        console.line(compared.text(max(80, min(100, shutil.get_terminal_size((100, 24)).columns))))
        checkpoint = None
        if training is not None:
            console.line(_about_training(numbers, from_checkpoints))
            checkpoint = training.train(console)
    console.line(f"replay: {folder.path}")
    if checkpoint is not None:
        console.line(f"checkpoint: {checkpoint}")
    return ReplayResult(
        folder.path, compared.iterations, compared.total, compared.tasks, compared.failures, compared.text(80), checkpoint
    )


def _chosen(original: RunFolder, iterations: str | Iterable[int] | None) -> list[int]:
    """Return the iterations to replay, ascending. Raises RunFolderError where there are none, UserError for a wrong choice."""
    there = sorted(
        int(path.parent.name) for path in (original.path / "iterations").glob("*/rollouts.jsonl") if path.parent.name.isdigit()
    )
    if not there:
        raise RunFolderError(f"{original.path} has no rollouts yet: no iteration has finished sampling; start the run again")
    if iterations is None:
        return there
    wanted = _parsed(iterations) if isinstance(iterations, str) else sorted(set(iterations))
    missing = [number for number in wanted if number not in there]
    if missing or not wanted:
        shown = ", ".join(map(str, missing[:8])) + (", …" if missing[8:] else "") or "none"
        have = f"{there[0]} to {there[-1]}" if len(there) == there[-1] - there[0] + 1 else ", ".join(map(str, there))
        raise UserError(f"iterations {shown} have no rollouts in {original.path}; there are {have}")
    return wanted


def _parsed(text: str) -> list[int]:
    """Return the numbers that "3-5", "3,5" or both together name."""
    numbers: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise UserError(f"iterations {text!r}: give numbers and ranges, such as 3-5 or 1,3,7-9")
        numbers.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return sorted(numbers)


def _check_output(path: Path) -> None:
    there = {entry.name for entry in path.iterdir()} - LOCK_FILES if path.is_dir() else set()
    if path.is_file() or (there and FILE_NAME not in there):
        raise RunFolderError(f"{path} is there already and is not a replay; give another --output")


def _name(regrader: Regrader) -> str:
    clean = re.sub(r"[^A-Za-z0-9_-]+", "-", regrader.name).strip("-") or "grader"
    return f"{clean[:40]}-{regrader.identity[:8]}"


def _about_training(numbers: Sequence[int], from_checkpoints: bool) -> str:
    if from_checkpoints:
        return "Training again, each iteration from the checkpoint of the run that sampled its rollouts."
    text = "Training again on the new grades, each iteration from the one before."
    if len(numbers) > 1:
        text += f"""
After iteration {numbers[0]} the rollouts are another policy's (off-policy): the run's, not that of this training.
Ratios are taken to the sampler's log-probabilities; the effective sample size says how far apart they are."""
    return text
