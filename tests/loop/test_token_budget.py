"""Iterations with a token budget: what is unfinished goes on later, nothing is lost, repeated or
trained on half.
"""

import math

import pytest

from ttrl.data.packing.packed import PackedTensors
from ttrl.errors import ConfigError, RunFolderError
from ttrl.facts import RolloutsFacts, Staleness
from ttrl.loop import sampling_phase as sampling
from ttrl.loop.carried import carried_groups, staleness
from ttrl.loop.phases import Phases
from ttrl.records import Sample, TaskResult
from ttrl.rollouts.results import TaskResults
from ttrl.run_folder.folder import RunFolder
from ttrl.system.files import read_jsonl

A, END = 1, 2


class Sampler:
    """Stands in for sample_tasks: tokens one by one, sample after sample in turns, until the
    budget is spent.
    """

    def __init__(
        self, world, length=lambda task_id, k: 2 + 5 * int(task_id.split("/")[1]) % 13 + k % 2
    ):
        self.world, self.length = world, length
        self.calls = []
        """(ids of continued tasks, ids of new tasks, budget, weights version)."""
        self.interrupt_after = None
        self.reward = lambda task_id, k: float(k % 2)

    async def __call__(self, tasks, request):
        n, weights_version = request.n, request.weights_version
        on_task_done, token_budget = request.on_task_done, request.token_budget
        unfinished = request.unfinished
        if tasks[0].id.startswith("held-out"):
            return self.results(tasks, n, weights_version)
        ids = [task.id for task in tasks]
        self.calls.append(
            (ids[: len(unfinished)], ids[len(unfinished) :], token_budget, weights_version)
        )
        assert [(g.task_id, g.messages) for g in unfinished] == [
            (t.id, t.messages) for t in tasks[: len(unfinished)]
        ]
        groups = [
            TaskResult(task_id=g.task_id, messages=g.messages, samples=g.samples)
            for g in unfinished
        ]
        groups += self.results(tasks[len(unfinished) :], n, weights_version, empty=True)
        left = math.inf if token_budget is None else token_budget
        waiting = [s for g in groups for s in g.samples if s.finish_reason == "unfinished"]
        while waiting and left > 0:
            for sample in list(waiting):
                if left <= 0:
                    break
                left -= 1
                self.add_token(sample, weights_version)
                if sample.finish_reason == "stop":
                    waiting.remove(sample)
        for number, group in enumerate(groups):
            group.position = number
            on_task_done(group)
            if self.interrupt_after is not None and number + 1 == self.interrupt_after:
                raise KeyboardInterrupt
        return TaskResults(groups)

    def results(self, tasks, n, version, empty=False):
        groups = []
        for task in tasks:
            samples = [
                Sample(task_id=task.id, sample=k, messages=task.messages, weights_version=version)
                for k in range(n)
            ]
            for sample in samples:
                sample.finish_reason = "unfinished" if empty else "stop"
                sample.reward = None if empty else 1.0
            groups.append(TaskResult(task_id=task.id, messages=task.messages, samples=samples))
        return groups if empty else TaskResults(groups)

    def add_token(self, sample, version):
        sample.prompt_token_ids = [5, 6, 7]
        had = sample.token_ids or []
        versions = [*(sample.token_versions or [sample.weights_version] * len(had)), version]
        last = len(versions) == self.length(sample.task_id, sample.sample)
        sample.token_ids, sample.logprobs = [*had, END if last else A], [-0.5] * len(versions)
        sample.weights_version = version
        sample.token_versions = versions if len(set(versions)) > 1 else None
        if last:
            sample.finish_reason, sample.reward = "stop", self.reward(sample.task_id, sample.sample)


@pytest.fixture
def sampler(world, monkeypatch):
    made = Sampler(world)
    monkeypatch.setattr(sampling, "sample_tasks", made)
    return made


def groups_of(world, number, name="rollouts"):
    rows = read_jsonl(world.run / f"iterations/{number:04d}/{name}.jsonl")
    return list(TaskResults.from_samples(Sample.from_json(row) for row in rows))


def stream(world, count, tasks=6, **changes):
    """Ids of the first tasks of the stream."""
    made = Phases(
        world.config(**changes),
        RunFolder(world.run),
        world.model,
        tasks=world.tasks(tasks),
        server=None,
        console=None,
    )
    return [task.id for task in made.stream.tasks_from(0, count)]


BUDGET = {"iterations": 6, "tasks_per_iteration": 3, "tokens_per_iteration": 60, "validation": []}


def check_run(world, sampler, iterations, n=4):
    """Every group of the stream once, whole, in the order in which it was begun, by the versions
    that the files say.
    """
    finished = [
        (number, group) for number in range(1, iterations + 1) for group in groups_of(world, number)
    ]
    left = groups_of(world, iterations, "unfinished")
    taken = RunFolder(world.run).iteration(iterations).marker(RolloutsFacts).tasks_taken
    dropped = sum(row.get("dropped_groups", 0) for row in world.rows())
    assert len(finished) + len(left) + dropped == taken
    if not dropped:
        assert sorted([g.task_id for _, g in finished] + [g.task_id for g in left]) == sorted(
            stream(world, taken)
        )
    for number, group in finished:
        assert [sample.sample for sample in group.samples] == list(range(n))
        for sample in group.samples:
            assert sample.reward is not None and sample.finish_reason == "stop"
            assert len(sample.token_ids) == sampler.length(sample.task_id, sample.sample)
            versions = sample.token_versions or [sample.weights_version] * len(sample.token_ids)
            assert (
                versions == sorted(versions)
                and versions[-1] == sample.weights_version <= number - 1
            )
    return finished


def test_unfinished_groups_go_on_and_no_task_is_skipped_or_repeated(world, sampler):
    world.train(**BUDGET)
    finished = check_run(world, sampler, 6)
    new = [task_id for _, began, _, _ in sampler.calls for task_id in began]
    assert new == stream(world, len(new))
    assert len({number for number, _ in finished}) == 6  # something was trained on each time
    continued = [
        group for _, group in finished if any(sample.token_versions for sample in group.samples)
    ]
    assert continued
    for number in range(1, 6):
        left = groups_of(world, number, "unfinished")
        first = next(call for call in sampler.calls if call[3] == number)  # of the next iteration
        assert first[0] == [group.task_id for group in left]
        assert len(left) + len(first[1]) == 3
    for row in world.rows()[1:]:
        rounds = sum(call[3] == row["iteration"] - 1 for call in sampler.calls)
        assert row["new_completion_tokens"] <= 60 * rounds
        assert row["unfinished"]["groups"] == len(groups_of(world, row["iteration"], "unfinished"))
        expected = staleness(groups_of(world, row["iteration"]), row["iteration"] - 1)
        assert row["staleness"] == expected.to_json()
    assert max(row["staleness"]["max"] for row in world.rows()[1:]) >= 1


def test_packed_versions_are_those_of_the_tokens(world, sampler):
    world.train(**BUDGET)
    seen = set()
    for number in range(1, 7):
        samples = [sample for group in groups_of(world, number) for sample in group.samples]
        packed = PackedTensors.load(world.run / f"iterations/{number:04d}/packed.safetensors")
        for place, (entry, sample) in enumerate(zip(packed.samples, samples, strict=True)):
            assert (entry.task_id, entry.sample) == (sample.task_id, sample.sample)
            at = (packed.sample_ids == place) & packed.assistant_mask
            versions = sample.token_versions or [sample.weights_version] * len(sample.token_ids)
            assert packed.weights_version[at].tolist() == versions
            seen.add(len(set(versions)))
    assert len(seen) > 1


def test_without_a_budget_nothing_is_left(world, sampler):
    world.train(iterations=2, tasks_per_iteration=3, validation=[])
    assert [call[2] for call in sampler.calls] == [None, None]
    assert not list(world.run.rglob("unfinished.jsonl"))
    assert not world.rows()[1].keys() & {"unfinished", "staleness", "new_completion_tokens"}


def test_where_no_group_is_finished_another_budget_is_spent(world, sampler):
    sampler.length = lambda task_id, k: 9
    world.train(iterations=1, tasks_per_iteration=2, tokens_per_iteration=10, validation=[])
    budgets = [call[2] for call in sampler.calls]
    assert len(budgets) > 1 and set(budgets) == {10}
    assert check_run(world, sampler, 1)
    assert world.rows()[1]["new_completion_tokens"] == 10 * len(budgets)


def test_dynamic_sampling_takes_further_tasks_while_the_budget_lasts(world, sampler):
    sampler.length = lambda task_id, k: 3
    sampler.reward = lambda task_id, k: float(k % 2) if task_id == "task/0" else 0.0
    # 12 tokens a task: three tasks at first, two more end, and a sixth does not
    world.train(
        **BUDGET | {"tokens_per_iteration": 65, "dynamic_sampling": 2, "max_extra_tasks": 9}
    )
    check_run(world, sampler, 6)
    rows = world.rows()[1:]
    assert all(row["new_completion_tokens"] <= 65 for row in rows)
    assert any(row["extra_tasks"] for row in rows) and any(
        row["unfinished"]["groups"] for row in rows
    )
    began = [task_id for _, new, _, _ in sampler.calls for task_id in new]
    assert began == stream(world, len(began))


def test_interrupted_in_the_middle_finished_groups_are_kept_and_the_rest_of_the_budget_is_spent(
    world, sampler
):
    world.train(**BUDGET | {"iterations": 1})
    left = groups_of(world, 1, "unfinished")
    sampler.interrupt_after = 3
    with pytest.raises(KeyboardInterrupt):
        world.train(**BUDGET | {"iterations": 2})
    rows = read_jsonl(world.run / "iterations/0002/rollouts.partial.jsonl")
    assert 0 < len(rows) < 3
    sampler.interrupt_after = None
    world.train(**BUDGET | {"iterations": 2})
    first, again = sampler.calls[-2:]
    assert first[0] == [group.task_id for group in left]
    assert len(first[0]) + len(first[1]) == len(again[0]) + len(again[1]) + len(rows)
    had = {group.task_id: sum(len(s.token_ids or ()) for s in group.samples) for group in left}
    spent = sum(
        sum(len(s["token_ids"]) for s in row["samples"]) - had.get(row["samples"][0]["task_id"], 0)
        for row in rows
    )
    assert again[2] == max(1, 60 - spent)
    world.train(**BUDGET | {"iterations": 6})
    check_run(world, sampler, 6)


def test_groups_that_are_too_old_are_dropped_and_counted(world, sampler):
    sampler.length = lambda task_id, k: 400 if k == 0 and task_id == slow else 4
    slow = stream(world, 1)[0]
    world.train(**BUDGET | {"max_staleness": 1})
    check_run(world, sampler, 6)
    rows = world.rows()[1:]
    assert [row["dropped_groups"] for row in rows[:3]] == [0, 0, 1]
    assert all(row["staleness"]["max"] <= 1 for row in rows)


def test_unfinished_groups_that_were_changed_are_not_continued(world, sampler):
    world.train(**BUDGET | {"iterations": 1})
    path = world.run / "iterations/0001/unfinished.jsonl"
    path.write_text(path.read_text().replace('"sample":', '"sample" :', 1))
    with pytest.raises(RunFolderError, match=r"unfinished\.jsonl was changed after it was written"):
        world.train(**BUDGET | {"iterations": 2})


def test_unfinished_groups_of_tasks_that_are_gone_are_dropped(world, sampler):
    world.train(**BUDGET | {"iterations": 1})
    assert groups_of(world, 1, "unfinished")
    (world.run / "tasks.json").unlink()
    world.train(**BUDGET | {"iterations": 2}, tasks=world.tasks(6, "new"))
    assert world.rows()[2]["dropped_groups"] == len(groups_of(world, 1, "unfinished"))


def test_a_staleness_limit_needs_a_budget(world):
    with pytest.raises(ConfigError, match="max_staleness is set without tokens_per_iteration"):
        world.train(max_staleness=2)
    with pytest.raises(ConfigError, match="tokens_per_iteration"):
        world.train(tokens_per_iteration=0)


# The parts


def group(*token_ids, task_id="t/0", **changes):
    made = [
        Sample(
            task_id=task_id,
            sample=k,
            messages=[],
            token_ids=ids,
            finish_reason="unfinished",
            **changes,
        )
        for k, ids in enumerate(token_ids)
    ]
    return TaskResult(task_id=task_id, messages=[], samples=made)


def test_staleness():
    assert staleness([], 3) == Staleness(mean=0.0, max=0)
    old, none = group([1, 1, 1], weights_version=1), group([], None, weights_version=0)
    mixed = group([1, 1], weights_version=3, token_versions=[2, 3])
    assert staleness([old, none, mixed], 3) == Staleness(mean=(3 * 2 + 1) / 5, max=2)


def test_an_iteration_without_a_budget_before_leaves_nothing(world):
    assert carried_groups(RunFolder(world.run).iteration(0)) == []
