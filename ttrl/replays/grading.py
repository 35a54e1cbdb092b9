"""What a replay (`ttrl.replays.replay`) does in its folder: says what it is, grades anew, compares with the old grades."""

import asyncio
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from ttrl.errors import GraderError, RunFolderError, TaskError
from ttrl.loop.carried import task_key
from ttrl.records import Sample, TaskResult
from ttrl.replays.changes import Changes, RewardComparison, TaskChange, TaskChanges
from ttrl.replays.graders import Regrader
from ttrl.replays.text import changes_text
from ttrl.rollouts.client.choices import choice_of_sample, writable
from ttrl.rollouts.graders.grading import Graders
from ttrl.rollouts.results import TaskResults, is_unfinished, where
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.lock import LOCK_FILES
from ttrl.system.console import Console, clock
from ttrl.system.coroutines import run_async
from ttrl.system.files import digest, read_jsonl, write_json, write_jsonl
from ttrl.system.processes import reap_leftovers
from ttrl.version import __version__

if TYPE_CHECKING:
    from ttrl.replays.training import ReplayTraining

FILE_NAME = "replay.json"
_SCHEMA = 1
_TASKS_SHOWN, _TASKS_KEPT = 5, 50
_AT_ONCE = 64
"""Grades in flight: of async graders, which wait for others; sync ones have as many threads or processes as `Graders` has."""


@dataclass(frozen=True)
class Compared:
    """Everything that differs."""

    iterations: list[Changes]
    total: Changes
    tasks: list[TaskChange]
    num_changed_tasks: int
    failures: dict[str, int]
    tool_calls: int

    def text(self, width: int) -> str:
        """Return all of it for a terminal of `width` columns."""
        shown = self.tasks[:_TASKS_SHOWN]
        text = changes_text(self.iterations, self.total, shown, self.num_changed_tasks, self.failures, width)
        if self.tool_calls:
            text += f"\n{self.tool_calls} rollouts ended in tool calls, which a run does not keep: graded by their text alone."
        return text


class Regrading:
    """One replay: its folder, and what is done there."""

    def __init__(self, original: RunFolder, folder: RunFolder, regrader: Regrader, numbers: list[int], console: Console) -> None:
        self.original, self.folder, self.regrader, self.numbers = original, folder, regrader, numbers
        self.console = console
        self._facts: dict[str, Any] = {}

    def begin(self, training: "ReplayTraining | None", *, again: bool) -> None:
        """Say what this folder is, or check that it is that already. Raises RunFolderError."""
        reap_leftovers(self.folder.path)
        self.folder.clean()
        path = self.folder.path / FILE_NAME
        before: dict[str, Any] = {}
        if path.exists():
            try:
                before = json.loads(path.read_text(encoding="utf-8"))
                is_other = before["identity"] != self.regrader.identity
            except (ValueError, KeyError, TypeError) as error:
                raise RunFolderError(f"{path} is damaged ({error}); remove {self.folder.path}") from error
            if is_other and not again:
                raise RunFolderError(
                    f"{self.folder.path} holds a replay with another grader, or with another version of its file; give another "
                    "--output, or --again to replace it"
                )
            if is_other:
                before = {}
                for entry in self.folder.path.iterdir():
                    if entry.name not in LOCK_FILES:
                        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        self._facts = {
            "schema": _SCHEMA,
            "ttrl": __version__,
            "run": os.path.relpath(self.original.path, self.folder.path),
            "identity": self.regrader.identity,
            "grader": self.regrader.described,
            "training": before.get("training") if training is None else training.merged(before.get("training")),
        }

    def grade(self, graders: Graders, *, again: bool, skip_missing: bool) -> None:
        """Grade every iteration that has no marker yet; with `again`, the others too. Raises GraderError where all grades of an
        iteration fail, TaskError for rollouts without a task unless those are to be left out (`skip_missing`)."""
        todo = [number for number in self.numbers if again or not self._is_done(number)]
        if done := len(self.numbers) - len(todo):
            what = f"{done} of {len(self.numbers)} iterations" if todo else "all iterations"
            self.console.line(f"{self.folder.path}: {what} graded before; --again grades anew")
        if todo:
            count = "1 iteration" if len(todo) == 1 else f"{len(todo)} iterations"
            self.console.line(f"Grading {count} of {self.original.path} again with {self.regrader.reference}")
            run_async(self._grade(graders, todo, skip_missing))

    def _is_done(self, number: int) -> bool:
        marker = self.folder.iteration(number).marker("rollouts")
        if marker is not None and marker["source"] != digest(_rollouts(self.original, number)):
            raise RunFolderError(
                f"{self.folder.path} was made from other rollouts of iteration {number} than {self.original.path} holds now; "
                "give another --output, or --again to replace it"
            )
        return marker is not None

    async def _grade(self, graders: Graders, numbers: list[int], skip_missing: bool) -> None:
        bar = tqdm(desc="grading", unit=" rollouts", leave=False, disable=self.console.quiet or not sys.stderr.isatty())
        with graders, bar:
            for number in numbers:
                began = clock()
                groups = self._groups(self.original, number)
                kept = self._with_task(number, groups, skip_missing)
                bar.total = (bar.total or 0) + sum(len(group.samples) for group in kept)
                after = await self._regraded(kept, graders, bar)
                _check_any_graded(number, after)
                left_out = sum(len(group.samples) for group in groups) - len(after)
                self._write(number, after, {"seconds": clock() - began, "left_out": left_out})

    def _groups(self, folder: RunFolder, number: int) -> list[TaskResult]:
        folder.iteration(number).verify("rollouts")
        try:
            return list(TaskResults.from_samples(Sample.from_json(row) for row in read_jsonl(_rollouts(folder, number))))
        except (ValueError, TypeError, AttributeError) as error:
            raise RunFolderError(f"{_rollouts(folder, number)} is damaged: {error}") from error

    def _with_task(self, number: int, groups: list[TaskResult], skip_missing: bool) -> list[TaskResult]:
        """Return the groups that have a task. Raises TaskError where others have none, unless they are to be left out."""
        known = [self.regrader.task(group.samples[0]) is not None for group in groups]
        names = list(dict.fromkeys(group.task_id for group, is_known in zip(groups, known, strict=True) if not is_known))
        if not names or skip_missing:
            return [group for group, is_known in zip(groups, known, strict=True) if is_known]
        shown = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if names[3:] else "")
        if any(self.regrader.knows_id(name) for name in names):
            shown += " (for some there is a task of that id, but with other messages)"
        count = f"1 task of iteration {number} is" if len(names) == 1 else f"{len(names)} tasks of iteration {number} are"
        raise TaskError(
            f"{count} not among those of {self.regrader.reference}: {shown}; give the tasks that the run was sampled with, or "
            "leave their rollouts out with --skip-missing"
        )

    async def _regraded(self, groups: list[TaskResult], graders: Graders, bar: "tqdm[Any]") -> list[Sample]:
        """Return copies of the samples, graded anew, in their order."""
        samples = [sample for group in groups for sample in group.samples]
        after = [dataclasses.replace(sample, metrics=dict(sample.metrics)) for sample in samples]
        left: Iterator[tuple[Sample, Sample]] = iter([pair for pair in zip(samples, after, strict=True) if _to_grade(pair[0])])

        async def work() -> None:
            for old, new in left:
                task = self.regrader.task(old)
                assert task is not None
                new.reward, new.metrics, new.error = None, {}, None
                try:
                    graded = await graders.grade(task, choice_of_sample(old), where(old.task_id, old.sample))
                    new.reward, new.metrics = graded.reward, graded.metrics
                except GraderError as error:
                    new.error = writable(f"GraderError: {error}")
                bar.update()

        async with asyncio.TaskGroup() as workers:
            for _ in range(min(_AT_ONCE, len(samples))):
                workers.create_task(work())
        return after

    def _write(self, number: int, after: list[Sample], facts: dict[str, Any]) -> None:
        iteration, path = self.folder.iteration(number), _rollouts(self.folder, number)
        write_json(self.folder.path / FILE_NAME, self._facts)  # before the first result, so that none is without its grader
        old = digest(path) if iteration.marker("rollouts") is not None and path.is_file() else None
        write_jsonl(path, [sample.to_json() for sample in after])
        if old is not None and digest(path) != old:
            _forget_training(self.folder)  # it was trained on grades that are no longer there
        source, stats = digest(_rollouts(self.original, number)), TaskResults.from_samples(after).stats.to_json()
        facts |= {"sync_seconds": 0.0, "sync": None, "source": source, "stats": stats}
        iteration.mark("rollouts", ["rollouts.jsonl"], facts)

    def remove_if_empty(self) -> None:
        """Remove the folder of a replay that failed before its first result."""
        if {path.name for path in self.folder.path.iterdir()} <= LOCK_FILES:
            shutil.rmtree(self.folder.path)

    def compare(self) -> Compared:
        """Compare the files of both folders, and write replay.json as a whole. Raises TaskError where nothing was graded."""
        method = self.original.config().get("advantages", "std")
        total, tasks = RewardComparison(None, method), TaskChanges()
        iterations: list[Changes] = []
        tool_calls = 0
        for number in self.numbers:
            one = RewardComparison(number, method)
            groups = self._groups(self.folder, number)
            for before in self._groups(self.original, number):
                tool_calls += sum(sample.finish_reason == "tool_calls" and not sample.turns for sample in before.samples)
                if groups and _key(groups[0]) == _key(before) and len(groups[0].samples) == len(before.samples):
                    after = groups.pop(0)
                    tasks.add(number, before, after)
                    for comparison in (one, total):
                        comparison.add(before, after)
                else:
                    for comparison in (one, total):
                        comparison.leave_out(len(before.samples))
            assert not groups
            iterations.append(one.changes)
        changes, failures = total.changes, dict(total.failures.most_common())
        if changes.left_out == changes.rollouts:
            raise TaskError(f"no rollout of {self.original.path} has a task among those of {self.regrader.reference}")
        compared = Compared(iterations, changes, tasks.largest(_TASKS_KEPT), tasks.num_changed, failures, tool_calls)
        values = dataclasses.asdict(compared)
        written = {name: values[name] for name in ("iterations", "total", "failures", "tasks")}
        write_json(self.folder.path / FILE_NAME, self._facts | written)
        return compared


def _rollouts(folder: RunFolder, number: int) -> Path:
    return folder.iteration(number).path / "rollouts.jsonl"


def _key(group: TaskResult) -> str:
    return task_key(group.task_id, group.messages)


def _to_grade(sample: Sample) -> bool:
    """Return False where there is nothing to grade: the request or the rollout failed, or the sample is unfinished."""
    ended = sample.error is None or sample.error.startswith("GraderError")
    at_limit = sample.error is not None and sample.error.startswith("RolloutLimitError") and bool(sample.turns)
    return not is_unfinished(sample) and (ended or at_limit)


def _check_any_graded(number: int, after: list[Sample]) -> None:
    tried = [sample for sample in after if _to_grade(sample)]
    try:
        TaskResults.from_samples(tried).raise_if_all_failed()
    except GraderError as error:
        raise GraderError(f"iteration {number}: {error}") from None


def _forget_training(folder: RunFolder) -> None:
    """Remove what was trained on grades that are no longer there."""
    for iteration in sorted((folder.path / "iterations").glob("[0-9]*")):
        for phase in ("train", "pack"):  # markers first: what has none is not there
            (iteration / "done" / f"{phase}.json").unlink(missing_ok=True)
        for name in ("checkpoint", "state"):
            shutil.rmtree(iteration / name, ignore_errors=True)
        for name in ("packed.safetensors", "train.jsonl", "train.log", "grpo.yaml"):
            (iteration / name).unlink(missing_ok=True)
    for name in ("metrics.jsonl", "report.html", "config.yaml"):
        (folder.path / name).unlink(missing_ok=True)
