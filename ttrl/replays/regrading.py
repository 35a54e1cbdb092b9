"""Regrade the rollouts of a run's iterations, and write them as the replay's rollouts."""

import asyncio
import dataclasses
import shutil
import sys
from collections.abc import Sequence

from tqdm import tqdm

from ttrl.errors import GraderError, TaskError
from ttrl.facts import RolloutsFacts
from ttrl.loop.carried import groups_of
from ttrl.records import Sample, TaskResult
from ttrl.replays.graders import Regrader
from ttrl.rollouts.client.choices import choice_of_sample, writable
from ttrl.rollouts.graders.grading import Graders
from ttrl.rollouts.group_samples import grade_together
from ttrl.rollouts.results import TaskResults, is_unfinished
from ttrl.run_folder.folder import RunFolder
from ttrl.system.console import Console, clock
from ttrl.system.coroutines import run_async
from ttrl.system.files import digest, write_jsonl

_AT_ONCE = 64
"""Grades of async graders in flight, since these wait for others; sync ones use the threads or
processes of `Graders`.
"""


def grade(
    numbers: Sequence[int],
    original: RunFolder,
    folder: RunFolder,
    regrader: Regrader,
    graders: Graders,
    *,
    skip_missing: bool,
    console: Console,
) -> None:
    """Write rollouts.jsonl and its marker for each of these iterations.

    Raises GraderError if all grades of an iteration fail, TaskError for rollouts without a task
    unless `skip_missing` leaves them out.
    """
    with (
        graders,
        tqdm(
            desc="grading",
            unit=" rollouts",
            leave=False,
            disable=console.quiet or not sys.stderr.isatty(),
        ) as bar,
    ):

        async def graded_alone(old: Sample, free: asyncio.Semaphore) -> Sample:
            new = dataclasses.replace(old, metrics=dict(old.metrics))
            if not _to_grade(old):
                return new
            new.reward = None
            new.metrics = {}
            new.error = None
            task = regrader.task(old)
            assert task is not None
            if task.grader is not None:
                async with free:
                    try:
                        graded = await graders.grade(task, choice_of_sample(old), old.where)
                        new.reward = graded.reward
                        new.metrics = graded.metrics
                    except GraderError as error:
                        new.error = writable(f"GraderError: {error}")
            bar.update()
            return new

        async def regraded(group: TaskResult, free: asyncio.Semaphore) -> list[Sample]:
            async with asyncio.TaskGroup() as tasks:
                jobs = [tasks.create_task(graded_alone(sample, free)) for sample in group.samples]
            after = [job.result() for job in jobs]
            task = regrader.task(group.samples[0])
            assert task is not None
            if task.group_grader is not None and not any(map(is_unfinished, after)):
                async with free:
                    await grade_together(task, after, graders)
            return after

        async def grade_all() -> None:
            for number in numbers:
                began = clock()
                source = original.iteration(number)
                groups = groups_of(source)
                kept = _with_task(number, groups, regrader, skip_missing)
                bar.total = (bar.total or 0) + sum(len(group.samples) for group in kept)
                free = asyncio.Semaphore(_AT_ONCE)
                async with asyncio.TaskGroup() as tasks:
                    jobs = [tasks.create_task(regraded(group, free)) for group in kept]
                after = [sample for job in jobs for sample in job.result()]
                try:
                    TaskResults.from_samples(filter(_to_grade, after)).raise_if_all_failed()
                except GraderError as error:
                    raise GraderError(f"iteration {number}: {error}") from None
                facts = RolloutsFacts(
                    left_out=sum(len(group.samples) for group in groups) - len(after),
                    source=digest(source.path / "rollouts.jsonl"),
                    seconds=clock() - began,
                )
                _write(folder, number, TaskResults.from_samples(after), facts)

        run_async(grade_all())


def _with_task(
    number: int, groups: list[TaskResult], regrader: Regrader, skip_missing: bool
) -> list[TaskResult]:
    """Return the groups with a task. Raises TaskError for others, unless `skip_missing` leaves them
    out.
    """
    known = [group for group in groups if regrader.task(group.samples[0]) is not None]
    if skip_missing or len(known) == len(groups):
        return known
    names = list(
        dict.fromkeys(group.task_id for group in groups if regrader.task(group.samples[0]) is None)
    )
    shown = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if names[3:] else "")
    if any(regrader.knows_id(name) for name in names):
        shown += " (some ids match, but with other messages)"
    if len(names) == 1:
        count = f"1 task of iteration {number} is"
    else:
        count = f"{len(names)} tasks of iteration {number} are"
    raise TaskError(
        f"{count} not in {regrader.reference}: {shown}; give the run's tasks, or leave these "
        "rollouts out with --skip-missing"
    )


def _to_grade(sample: Sample) -> bool:
    """Return whether there is anything to grade: not after a failed request or rollout, nor for an
    unfinished sample.
    """
    ended = sample.error is None or sample.error.startswith("GraderError")
    at_limit = (
        sample.error is not None
        and sample.error.startswith("RolloutLimitError")
        and bool(sample.turns)
    )
    return not is_unfinished(sample) and (ended or at_limit)


def _write(folder: RunFolder, number: int, results: TaskResults, facts: RolloutsFacts) -> None:
    """Write new grades; remove training on older grades."""
    iteration = folder.iteration(number)
    before = iteration.files("rollouts")
    write_jsonl(iteration.path / "rollouts.jsonl", results.to_jsonl_rows())
    if before and before["rollouts.jsonl"] != digest(iteration.path / "rollouts.jsonl"):
        _forget_training(folder)
    iteration.unmark("rollouts")
    facts = facts.replace(sync_seconds=0.0, sync=None, stats=results.stats)
    iteration.mark(facts, ["rollouts.jsonl"])


def _forget_training(folder: RunFolder) -> None:
    for phase in ("train", "pack"):  # markers first: files without a marker do not count
        for marker in folder.path.glob(f"iterations/*/done/{phase}.json"):
            marker.unlink()
    made = [
        path
        for path in folder.path.glob("iterations/*/*")
        if path.name not in ("done", "rollouts.jsonl")
    ]
    for path in (
        *made,
        *(folder.path / name for name in ("metrics.jsonl", "report.html", "config.yaml")),
    ):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
