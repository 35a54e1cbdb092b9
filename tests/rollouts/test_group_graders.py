"""Graders of whole groups: asked once, about the samples that are there; what they get wrong costs that group alone."""

import asyncio
import time

import pytest
from support.chat_server import Kit

from ttrl.errors import GraderError, TaskError
from ttrl.tasks.task import Grade, Task

ASK = [{"role": "user", "content": "P"}]


def task(group_grader, grader=None, **fields):
    return Task(ASK, grader, group_grader=group_grader, **fields)


def sampled(*tasks, behaviour=Kit.echo, n=3, **kwargs):
    return [result.samples for result in Kit.run(behaviour, list(tasks), n=n, **kwargs)[0]]


def numbers(choices):
    """The number that Kit.echo gives each choice: P#2 is 2."""
    return [float(choice.message.content.partition("#")[2]) for choice in choices]


def test_it_is_asked_once_with_all_choices() -> None:
    asked = []

    def best(choices):
        asked.append(len(choices))
        most = max(numbers(choices))
        return [(float(number == most), {"number": number}) for number in numbers(choices)]

    async def later(choices):
        await asyncio.sleep(0.01)
        return [Grade(number) for number in numbers(choices)]

    first, second = sampled(task(best), task(later, id="other"))
    assert [sample.reward for sample in first] == [0, 0, 1] and asked == [3]
    assert [sample.metrics for sample in first] == [{"number": 0.0}, {"number": 1.0}, {"number": 2.0}]
    assert [sample.reward for sample in second] == [0, 1, 2]


def test_its_rewards_are_added_to_the_graders() -> None:
    (samples,) = sampled(task(numbers, lambda choice: (10.0, {"own": 1.0})))
    assert [sample.reward for sample in samples] == [10, 11, 12] and samples[0].metrics == {"own": 1.0}


def test_failed_samples_are_left_out() -> None:
    def picky(choice):
        if choice.message.content.endswith("#1"):
            raise ValueError("not this one")
        return 0.0

    def count(choices):
        return [len(choices)] * len(choices)

    (samples,) = sampled(task(count, picky))
    assert [sample.reward for sample in samples] == [2.0, None, 2.0] and "not this one" in samples[1].error
    (samples,) = sampled(task(count, lambda choice: 1 / 0))
    assert all("ZeroDivisionError" in sample.error for sample in samples)


def test_rollouts_are_graded_together_too() -> None:
    async def twice(chat):
        await chat()
        await chat("again")

    seen = []

    def lengths(choices):
        seen.extend(choice.messages for choice in choices)
        return [len(choice.messages) for choice in choices]

    (samples,) = sampled(task(lengths, rollout=twice), token_ids=False)
    assert [sample.reward for sample in samples] == [4.0] * 3
    assert seen[0][:1] == ASK and seen[0][2] == {"role": "user", "content": "again"}


@pytest.mark.parametrize(
    ("grader", "message"),
    [
        (lambda choices: [1.0], "returned [1.0] for 3 choices; it returns as many"),
        (lambda choices: 1.0, "returned 1.0 for 3 choices"),
        (lambda choices: "abc", "returned 'abc'"),
        (lambda choices: [1.0, 2.0, float("nan")], "the group_grader returned nan"),
        (lambda choices: 1 / 0, "the group_grader raised ZeroDivisionError"),
        (lambda choices: time.sleep(9), "took longer than 0.3 s for 3 choices"),
        (lambda choices: asyncio.sleep(9), "took longer than 0.3 s for 3 choices"),
    ],
)
def test_a_failure_costs_its_group(grader, message: str) -> None:
    broken, whole = sampled(task(grader), task(numbers, id="whole"), grader_timeout=0.1)
    assert all(sample.reward is None and message in sample.error for sample in broken)
    assert [sample.reward for sample in whole] == [0, 1, 2]


def test_single_samples_may_fail() -> None:
    (samples,) = sampled(task(lambda choices: [1.0, GraderError("no verdict"), 0.0], lambda choice: 1.0), isolated=False)
    assert [sample.reward for sample in samples] == [2.0, None, 1.0] and samples[1].error == "GraderError: no verdict"


def test_what_is_no_group_grader() -> None:
    with pytest.raises(TaskError, match="group_grader is 3; give a function of a list of choices"):
        Task(ASK, group_grader=3)
    with pytest.raises(TaskError, match="grader is None"):
        Task(ASK)
