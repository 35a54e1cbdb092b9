"""Read an iteration's groups from disk: all of them (rollouts.jsonl), those finished before a kill
(rollouts.partial.jsonl), or those left by a token budget (unfinished.jsonl).

`tokens_per_iteration` limits an iteration's new completion tokens. Unfinished groups then wait in
unfinished.jsonl, and the next iteration continues them before it takes new tasks. An older policy
sampled their first tokens: staleness is the number of iterations between it and the current policy.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from ttrl.facts import RolloutsFacts, Staleness, Unfinished
from ttrl.messages import Message
from ttrl.records import Sample, TaskResult
from ttrl.rollouts.results import TaskResults, is_unfinished
from ttrl.run_folder.folder import IterationFolder
from ttrl.system.files import read_jsonl
from ttrl.tasks.task import Task

UNFINISHED_FILE = "unfinished.jsonl"


def task_key(task_id: str, messages: list[Message]) -> str:
    """Return a task's key: the same id may have other messages."""
    return json.dumps([task_id, messages], sort_keys=True)


def is_open(group: TaskResult) -> bool:
    """Return whether a sample of the group is not finished."""
    return any(map(is_unfinished, group.samples))


def num_tokens(group: TaskResult) -> int:
    """Return the completion tokens of all samples."""
    return sum(len(sample.token_ids or ()) for sample in group.samples)


def groups_of(iteration: IterationFolder, name: str = "rollouts.jsonl") -> list[TaskResult]:
    """Return an iteration's groups from its file. Raises RunFolderError if it was changed or is
    gone.
    """
    iteration.verify("rollouts")
    return list(
        TaskResults.from_samples(Sample.from_json(row) for row in read_jsonl(iteration.path / name))
    )


def carried_groups(previous: IterationFolder) -> list[TaskResult]:
    """Return an iteration's unfinished groups, in its order. Raises RunFolderError if the file was
    changed or is gone.
    """
    marker = previous.marker(RolloutsFacts)
    if marker is None or marker.unfinished is None:
        return []
    return groups_of(previous, UNFINISHED_FILE)


def oldest_version(group: TaskResult, version: int) -> int:
    """Return the oldest weights version of the group's tokens; `version` if it has none yet."""
    tokens = [sample for sample in group.samples if sample.token_ids]
    return min(
        (min(sample.token_versions or [sample.weights_version]) for sample in tokens),
        default=version,
    )


def ready_to_continue(group: TaskResult, version: int) -> TaskResult:
    """Prepare a group for sampling by `version`: samples without tokens belong to this version
    only.
    """
    for sample in group.samples:
        if is_unfinished(sample) and not sample.token_ids:
            sample.weights_version = version
            sample.token_versions = None
    return group


def staleness(groups: Iterable[TaskResult], version: int) -> Staleness:
    """Return the mean and maximum age of the tokens, in iterations before `version`."""
    total = weighted = oldest = 0
    for sample in (sample for group in groups for sample in group.samples):
        count = len(sample.token_ids or ())
        if not count:
            continue
        ages = [version - v for v in sample.token_versions or [sample.weights_version] * count]
        total += count
        weighted += sum(ages)
        oldest = max(oldest, *ages)
    return Staleness(mean=weighted / total if total else 0.0, max=oldest)


def kept_groups(
    partial: Path, tasks: Sequence[Task], n: int, version: int, carried: Sequence[TaskResult]
) -> dict[int, TaskResult]:
    """Return an earlier process's finished groups, by place in `tasks`; leave out other tasks and
    other policies.

    The first `len(carried)` tasks belong to continued groups.
    """
    kept = {}
    for row in read_jsonl(partial, key="position"):
        position = row["position"]
        samples = [Sample.from_json(sample) for sample in row["samples"]]
        if position >= len(tasks) or len(samples) != n:
            continue
        key = task_key(tasks[position].id, tasks[position].messages)
        versions = {sample.weights_version for sample in samples}
        group = TaskResult(
            task_id=tasks[position].id, messages=tasks[position].messages, samples=samples
        )
        if position < len(carried):
            same_policy = max(versions) == version and continues(group, carried[position])
        else:
            same_policy = versions == {version} and not any(
                sample.token_versions for sample in samples
            )
        if same_policy and all(
            task_key(sample.task_id, sample.messages) == key for sample in samples
        ):
            kept[position] = group
    return kept


def continues(group: TaskResult, carried: TaskResult) -> bool:
    """Return whether every sample begins with the tokens of its sample in `carried`."""
    pairs = zip(group.samples, carried.samples, strict=False)
    return all(
        (after.token_ids or [])[: len(before.token_ids or ())] == (before.token_ids or [])
        for after, before in pairs
    )


def left_unfinished(groups: Sequence[TaskResult]) -> Unfinished:
    """Count the groups, samples and tokens left by a token budget."""
    left = [group for group in groups if is_open(group)]
    return Unfinished(
        groups=len(left),
        samples=sum(is_unfinished(sample) for group in left for sample in group.samples),
        tokens=sum(map(num_tokens, left)),
    )
