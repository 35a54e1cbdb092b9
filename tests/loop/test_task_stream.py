"""Further tasks until enough groups have a signal: the stream of tasks stays whole, and interrupted
runs go on as they would.
"""

import pytest

from ttrl.facts import RolloutsFacts
from ttrl.loop.phases import Phases
from ttrl.loop.task_stream import further_tasks
from ttrl.records import Sample, TaskResult
from ttrl.run_folder.folder import RunFolder
from ttrl.system.files import read_jsonl

RUN = {
    "iterations": 4,
    "tasks_per_iteration": 2,
    "dynamic_sampling": 2,
    "max_extra_tasks": 6,
    "validation": [],
}


@pytest.fixture
def rare(world):
    """A world in which the tasks with a number that 4 divides have a signal, and all others are
    always wrong.
    """
    world.answer = lambda prompt, k, version: (
        "yes" if int(prompt.split()[1]) % 4 == 0 and k == 0 else "no"
    )
    return world


def tasks_of(world, number):
    rows = read_jsonl(world.run / f"iterations/{number:04d}/rollouts.jsonl")
    return [row["task_id"] for row in rows if row["sample"] == 0]


def stream(world, tasks, count):
    made = Phases(
        world.config(), RunFolder(world.run), world.model, tasks=tasks, server=None, console=None
    )
    return [task.id for task in made.stream.tasks_from(0, count)]


def with_signal(task_ids):
    return sum(int(task_id.split("/")[1]) % 4 == 0 for task_id in task_ids)


def test_further_tasks_until_there_are_enough(rare):
    tasks = rare.tasks(12)
    rare.train(tasks, **RUN)
    sampled, extras = [], []
    for number, row in enumerate(rare.rows()[1:], 1):
        ids = tasks_of(rare, number)
        sampled += ids
        extras.append(row["extra_tasks"])
        assert len(ids) == 2 + row["extra_tasks"] == row["groups"]["total"]
        assert row["groups"]["kept"] == with_signal(ids)
        assert row["groups"]["kept"] >= 2 or row["extra_tasks"] == 6
        assert RunFolder(rare.run).iteration(number).marker(RolloutsFacts).tasks_taken == len(
            sampled
        )
        assert row["samples"] == 4 * len(ids) and row["tokens_per_second"] > 0
    # Epochs of all tasks, none skipped or begun twice.
    assert sampled == stream(rare, tasks, len(sampled))
    assert len(rare.requests) == len(sampled)
    assert any(extras)


def test_the_limit_ends_it(rare):
    rare.answer = lambda prompt, k, version: "no"
    rare.train(rare.tasks(12), **RUN | {"iterations": 2, "max_extra_tasks": None})
    for row in rare.rows()[1:]:
        assert (
            row["extra_tasks"],
            row["groups"]["total"],
            row["groups"]["no_signal"],
            row["trained"],
        ) == (4, 6, 6, False)
        assert row["groups"]["no_signal_share"] == 1.0


def test_nothing_more_is_sampled_where_there_is_enough(world):
    world.train(**RUN)
    assert [row["extra_tasks"] for row in world.rows()[1:]] == [0, 0, 0, 0]
    assert [row["groups"]["kept"] for row in world.rows()[1:]] == [2, 2, 2, 2]
    assert "extra_tasks" not in world.rows()[0]


def test_without_it_no_marker_speaks_of_it(world):
    world.train(iterations=1)
    assert "extra_tasks" not in world.rows()[1]
    assert RunFolder(world.run).iteration(1).marker(RolloutsFacts).extra_tasks is None


@pytest.mark.long(but=["5"])
@pytest.mark.parametrize(
    "after", [1, 5, *(pytest.param(after, marks=pytest.mark.long) for after in (2, 3))]
)
def test_interrupted_it_goes_on_as_it_would_have(rare, tmp_path, after):
    """Long for two of four places: only these lie in the middle. First and last stay.

    Long for one epoch: only that ends with its last task.
    """
    tasks, run = rare.tasks(12), RUN | {"iterations": 3}
    rare.train(tasks, **run)
    whole = [tasks_of(rare, number) for number in (1, 2, 3)]
    assert len(whole[0]) > 2
    rare.run = tmp_path / "again"
    rare.requests.clear()
    with rare.interrupted_after(after), pytest.raises(KeyboardInterrupt):
        rare.train(tasks, **run)
    kept = read_jsonl(rare.run / "iterations/0001/rollouts.partial.jsonl")
    assert len(kept) == after
    rare.requests.clear()
    rare.train(tasks, **run)
    assert [tasks_of(rare, number) for number in (1, 2, 3)] == whole
    assert len(rare.requests) == sum(map(len, whole)) - after
    assert rare.rows()[1]["tokens_per_second"] is None  # a process that is gone sampled a part
    assert rare.rows()[1].get("grading_seconds") is None
    assert rare.rows()[2]["tokens_per_second"] > 0 and rare.rows()[2]["grading_seconds"] > 0


# The rule alone


def group(*rewards, finish="stop", logprob=-1.0):
    samples = [
        Sample(
            task_id="t",
            sample=k,
            messages=[],
            reward=r,
            finish_reason=finish,
            logprobs=[logprob * (k + 1)],
        )
        for k, r in enumerate(rewards)
    ]
    return TaskResult(task_id="t", messages=[], samples=samples)


def more(world, groups, extra=0, new_tokens=0, **changes):
    config = world.config(
        **{"tasks_per_iteration": 8, "dynamic_sampling": 4, "max_extra_tasks": 30} | changes
    )
    return further_tasks(groups, config, extra, new_tokens, lambda: world.tokenizer)


def test_how_many(world):
    some, none = group(0.0, 1.0), group(0.0, 0.0)
    assert more(world, [some] * 4 + [none] * 4) == 0
    # One missing, (3 + 1)/(8 + 2) of them bring it.
    assert more(world, [some] * 3 + [none] * 5) == 3
    assert more(world, [some] * 1 + [none] * 7) == 8  # 15, but never more than there were
    assert more(world, [some] * 1 + [none] * 31) == 30  # the limit
    assert more(world, [some] * 1 + [none] * 31, extra=24) == 6
    assert more(world, [none] * 8, extra=30) == 0
    assert more(world, [none] * 8, dynamic_sampling=None, max_extra_tasks=None) == 0
    assert more(world, [group(None, None), group(1.0, None)] * 4) == 8  # failed ones have none


def test_a_budget_of_tokens_is_kept_to(world):
    none, unfinished = group(0.0, 0.0), group(None, None, finish="unfinished")
    assert more(world, [none] * 8, new_tokens=99, tokens_per_iteration=100) == 8
    assert more(world, [none] * 8, new_tokens=100, tokens_per_iteration=100) == 0
    assert more(world, [none] * 7 + [unfinished], new_tokens=50, tokens_per_iteration=100) == 0


def test_signal_is_that_of_the_shaped_rewards(world):
    right = group(1.0, 1.0)  # that surprised differently
    assert more(world, [right] * 8) == 8
    assert more(world, [right] * 8, surprise_bonus=0.5) == 0
    assert more(world, [group(0.0, 0.0)] * 8, surprise_bonus=0.5) == 8
    assert more(world, [group(0.0, 1e-4)] * 8) == 0
    assert more(world, [group(0.0, 1e-4)] * 8, reward_power=6.0) == 8
