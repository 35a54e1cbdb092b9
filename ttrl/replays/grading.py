"""What a replay (`ttrl.replays.replay`) does in its folder: says what it is, grades anew, compares with the old grades."""

import asyncio
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from tqdm.auto import tqdm

from ttrl.errors import GraderError, RunFolderError, TaskError
from ttrl.loop.carried import task_key
from ttrl.records import Sample, TaskResult
from ttrl.replays.changes import Changes, Comparison, TaskChange, TaskChanges
from ttrl.replays.graders import Regrader
from ttrl.replays.text import changes_text
from ttrl.rollouts.client.choices import choice_of_sample, writable
from ttrl.rollouts.graders.grading import Graders
from ttrl.rollouts.results import TaskResults, is_unfinished, where
from ttrl.run_folder.folder import IterationFolder, RunFolder
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


class Regrading:
    """One replay: its folder, and what is done there."""

    def __init__(
        self,
        original: RunFolder,
        folder: RunFolder,
        regrader: Regrader,
        numbers: list[int],
        console: Console,
        *,
        skip_missing: bool,
    ) -> None:
        self.original, self.folder, self.regrader, self.numbers = original, folder, regrader, numbers
        self.console, self.skip_missing = console, skip_missing
        self.config = _read_config(original)
        self.facts: dict[str, Any] = {}

    def training(self, from_checkpoints: bool) -> "ReplayTraining":
        """Checked before anything is graded."""
        from ttrl.configs.run import TrainConfig
        from ttrl.replays.training import ReplayTraining  # loads torch, which grading does without

        config = TrainConfig.parse(self.config, str(self.original.path / "config.yaml"))
        return ReplayTraining(self.folder.path, self.original, config, self.numbers, from_checkpoints=from_checkpoints)

    def begin(self, training: "ReplayTraining | None", *, again: bool) -> None:
        """Says what this folder is, or checks that it is that already. Raises RunFolderError."""
        reap_leftovers(self.folder.path)
        self.folder.clean()
        path = self.folder.path / FILE_NAME
        before: dict[str, Any] = {}
        if path.exists():
            try:
                before = json.loads(path.read_text(encoding="utf-8"))
                identity = before["identity"]
            except (ValueError, KeyError, TypeError) as error:
                raise RunFolderError(f"{path} is damaged ({error}); remove {self.folder.path}") from error
            if identity != self.regrader.identity and again:
                self._clear()
                before = {}
            elif identity != self.regrader.identity:
                raise RunFolderError(
                    f"{self.folder.path} holds a replay with another grader , or with another version of its file; give another "
                    "--output, or --again to replace it"
                )
        trained = before.get("training")
        if training is not None:
            trained = training.merged(trained)
        self.facts = {
            "schema": _SCHEMA,
            "ttrl": __version__,
            "run": os.path.relpath(self.original.path, self.folder.path),
            "identity": self.regrader.identity,
            "grader": self.regrader.described,
            "training": trained,
        }

    def _clear(self) -> None:
        for path in self.folder.path.iterdir():
            if path.name not in LOCK_FILES:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def grade(self, graders: Graders, *, again: bool) -> None:
        """Every iteration that has no marker yet; with `again`, also the others. Raises GraderError where all grades fail."""
        todo = [number for number in self.numbers if again or not self._is_done(number)]
        done = len(self.numbers) - len(todo)
        if done:
            what = "all iterations" if not todo else f"{done} of {len(self.numbers)} iterations"
            self.console.line(f"{self.folder.path}: {what} graded before; --again grades anew")
        if todo:
            count = "1 iteration" if len(todo) == 1 else f"{len(todo)} iterations"
            self.console.line(f"Grading {count} of {self.original.path} again with {self.regrader.reference}")
            run_async(self._grade(graders, todo))

    def _is_done(self, number: int) -> bool:
        marker = self.folder.iteration(number).marker("rollouts")
        if marker is None:
            return False
        if marker["source"] != digest(rollouts_file(self.original, number)):
            raise RunFolderError(
                f"{self.folder.path} was made from other rollouts of iteration {number} than {self.original.path} holds now; "
                "give another --output, or --again to replace it"
            )
        return True

    async def _grade(self, graders: Graders, numbers: list[int]) -> None:
        bar = tqdm(desc="grading", unit=" rollouts", leave=False, disable=self.console.quiet or not sys.stderr.isatty())
        with graders, bar:
            for number in numbers:
                began = clock()
                before = self._read(self.original, number)
                kept = self._with_task(number, before)
                bar.total = (bar.total or 0) + len(kept)
                after = await self._regraded(kept, graders, bar)
                _check_any_graded(number, kept, after)
                facts = {"source": digest(rollouts_file(self.original, number)), "left_out": len(before) - len(kept)}
                self._write(self.folder.iteration(number), after, facts, began)

    def _read(self, folder: RunFolder, number: int) -> list[Sample]:
        folder.iteration(number).verify("rollouts")
        try:
            return [Sample.from_json(row) for row in read_jsonl(rollouts_file(folder, number))]
        except (ValueError, TypeError, AttributeError) as error:
            raise RunFolderError(f"{rollouts_file(folder, number)} is damaged: {error}") from error

    def _with_task(self, number: int, samples: list[Sample]) -> list[Sample]:
        """The samples that can be graded. Raises TaskError for those that have no task, unless they are to be left out."""
        known: dict[str, bool] = {}  # a group's samples share their messages: looked up once per group
        for group in TaskResults.from_samples(samples):
            known.setdefault(_key(group), self.regrader.task(group.samples[0]) is not None)
        kept, missing = [], []
        for group in TaskResults.from_samples(samples):
            (kept if known[_key(group)] else missing).append(group)
        if missing and not self.skip_missing:
            raise TaskError(self._missing(number, missing))
        return [sample for group in kept for sample in group.samples]

    def _missing(self, number: int, missing: list[TaskResult]) -> str:
        names = list(dict.fromkeys(group.task_id for group in missing))
        shown = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if names[3:] else "")
        hint = ""
        if any(self.regrader.knows_id(name) for name in names):
            hint = " (for some there is a task of that id, but with other messages)"
        count = f"1 task of iteration {number} is" if len(names) == 1 else f"{len(names)} tasks of iteration {number} are"
        return (
            f"{count} not among those of {self.regrader.reference}: {shown}{hint}; give the tasks that the "
            "run was sampled with, or leave their rollouts out with --skip-missing"
        )

    async def _regraded(self, samples: list[Sample], graders: Graders, bar: "tqdm[Any]") -> list[Sample]:
        """The same samples, graded anew, in their order."""
        after = [dataclasses.replace(sample, metrics=dict(sample.metrics)) for sample in samples]
        left = iter([(old, new) for old, new in zip(samples, after, strict=True) if _to_grade(old)])

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

    def _write(self, iteration: IterationFolder, after: list[Sample], facts: dict[str, Any], began: float) -> None:
        path = iteration.path / "rollouts.jsonl"
        write_json(self.folder.path / FILE_NAME, self.facts)  # before the first result, so that none is without its grader
        old = digest(path) if iteration.marker("rollouts") is not None and path.is_file() else None
        write_jsonl(path, [sample.to_json() for sample in after])
        if old is not None and digest(path) != old:
            forget_training(self.folder)  # it was trained on grades that are no longer there
        stats = TaskResults.from_samples(after).stats.to_json()
        seconds = {"seconds": clock() - began, "sync_seconds": 0.0, "sync": None}
        iteration.mark("rollouts", ["rollouts.jsonl"], seconds | facts | {"stats": stats})

    def remove_if_empty(self) -> None:
        """A grader that failed at once leaves nothing behind."""
        if {path.name for path in self.folder.path.iterdir()} <= LOCK_FILES:
            shutil.rmtree(self.folder.path)

    def compare(self) -> Compared:
        """From the files of both folders."""
        method = self.config.get("advantages", "std")
        total, tasks = Comparison(None, method), TaskChanges()
        iterations: list[Changes] = []
        tool_calls = 0
        for number in self.numbers:
            one = Comparison(number, method)
            groups = list(TaskResults.from_samples(self._read(self.folder, number)))
            for before in TaskResults.from_samples(self._read(self.original, number)):
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
        if total.changes.left_out == total.changes.rollouts:
            raise TaskError(f"no rollout of {self.original.path} has a task among those of {self.regrader.reference}")
        return Compared(
            iterations,
            total.changes,
            tasks.largest(_TASKS_KEPT),
            tasks.num_changed,
            dict(total.failures.most_common()),
            tool_calls,
        )

    def finish(self, compared: Compared) -> None:
        """replay.json, whole."""
        write_json(
            self.folder.path / FILE_NAME,
            self.facts
            | {
                "iterations": [changes.to_json() for changes in compared.iterations],
                "total": compared.total.to_json(),
                "failures": compared.failures,
                "tasks": [dataclasses.asdict(task) for task in compared.tasks],
            },
        )

    def text(self, compared: Compared, width: int) -> str:
        """For a terminal of `width` columns."""
        text = changes_text(
            compared.iterations,
            compared.total,
            compared.tasks[:_TASKS_SHOWN],
            compared.num_changed_tasks,
            compared.failures,
            width,
        )
        if compared.tool_calls:
            text += (
                f"\n{compared.tool_calls} rollouts ended in tool calls, which a run does not keep: graded by their text alone."
            )
        return text


def rollouts_file(folder: RunFolder, number: int) -> Path:
    """iterations/NUMBER/rollouts.jsonl."""
    return folder.iteration(number).path / "rollouts.jsonl"


def _key(group: TaskResult) -> str:
    return task_key(group.task_id, group.messages)


def _to_grade(sample: Sample) -> bool:
    """False where there is nothing to grade: the request or the rollout failed, or the sample is unfinished."""
    ended = sample.error is None or sample.error.startswith("GraderError")
    at_limit = sample.error is not None and sample.error.startswith("RolloutLimitError") and bool(sample.turns)
    return not is_unfinished(sample) and (ended or at_limit)


def _check_any_graded(number: int, before: Sequence[Sample], after: Sequence[Sample]) -> None:
    tried = [new for old, new in zip(before, after, strict=True) if _to_grade(old)]
    if tried and all(sample.reward is None for sample in tried):
        try:
            TaskResults.from_samples(tried).raise_if_all_failed()
        except GraderError as error:
            raise GraderError(f"iteration {number}: {error}") from None


def forget_training(folder: RunFolder) -> None:
    """Removes what was trained on grades that are no longer there."""
    for iteration in sorted((folder.path / "iterations").glob("[0-9]*")):
        for phase in ("train", "pack"):  # markers first: what has none is not there
            (iteration / "done" / f"{phase}.json").unlink(missing_ok=True)
        for name in ("checkpoint", "state"):
            shutil.rmtree(iteration / name, ignore_errors=True)
        for name in ("packed.safetensors", "train.jsonl", "train.log", "grpo.yaml"):
            (iteration / name).unlink(missing_ok=True)
    for name in ("metrics.jsonl", "report.html", "config.yaml"):
        (folder.path / name).unlink(missing_ok=True)


def _read_config(original: RunFolder) -> dict[str, Any]:
    """config.yaml of a run as plain values; empty where there is none. Raises RunFolderError for a damaged one."""
    path = original.path / "config.yaml"
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, yaml.YAMLError) as error:
        raise RunFolderError(f"{path} is damaged: {error}") from error
    return values if isinstance(values, dict) else {}
