"""Graders of whole groups: asked once, about the samples that are there; what they get wrong costs
that group alone.
"""

import asyncio
import time

import pytest
from support.chat_server import Kit

from ttrl.errors import GraderError, TaskError
from ttrl.rollouts.partial import TokenBudget
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
    assert [sample.metrics for sample in first] == [
        {"number": 0.0},
        {"number": 1.0},
        {"number": 2.0},
    ]
    assert [sample.reward for sample in second] == [0, 1, 2]


def test_its_rewards_are_added_to_the_graders() -> None:
    (samples,) = sampled(task(numbers, lambda choice: (10.0, {"own": 1.0})))
    assert [sample.reward for sample in samples] == [10, 11, 12] and samples[0].metrics == {
        "own": 1.0
    }


def test_failed_samples_are_left_out() -> None:
    def picky(choice):
        if choice.message.content.endswith("#1"):
            raise ValueError("not this one")
        return 0.0

    def count(choices):
        return [len(choices)] * len(choices)

    (samples,) = sampled(task(count, picky))
    assert [sample.reward for sample in samples] == [2.0, None, 2.0] and "not this one" in samples[
        1
    ].error
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
        (
            lambda choices: [1.0],
            "returned [1.0] for 3 choices; it must return one output per choice",
        ),
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
    (samples,) = sampled(
        task(lambda choices: [1.0, GraderError("no verdict"), 0.0], lambda choice: 1.0),
        isolated=False,
    )
    assert [sample.reward for sample in samples] == [2.0, None, 1.0] and samples[
        1
    ].error == "GraderError: no verdict"


def test_what_is_no_group_grader() -> None:
    with pytest.raises(TaskError, match="group_grader is 3; give a function of a list of choices"):
        Task(ASK, group_grader=3)
    with pytest.raises(TaskError, match="grader is None"):
        Task(ASK)


def test_with_a_token_budget_it_is_asked_once_when_the_group_is_whole() -> None:
    """A group is cut off, and continued by a later call: what was finished before keeps its own
    grade and waits.
    """
    scripts = [[*b"ab", 0], [*b"abcdefg", 0], [*b"uvwxyz", 0]]

    def say(body, attempt):
        if "tokens" in body:  # /detokenize
            return Kit.Reply({"prompt": "".join(chr(i) for i in body["tokens"] if i)})
        had = body["prompt"][len(Kit.prompt_ids) :] if "prompt" in body else []
        choices = []
        for k in (
            [next(k for k in (1, 2) if scripts[k][: len(had)] == had)] if had else range(body["n"])
        ):
            ids = scripts[k][len(had) :][: body["max_tokens"]]
            text = "".join(chr(i) for i in ids if i)
            more = {"token_ids": ids, "finish_reason": "stop" if ids[-1] == 0 else "length"}
            logprobs = {
                "tokens": [""] * len(ids),
                "token_logprobs": [-1.0] * len(ids),
                "top_logprobs": None,
            }
            choices.append(
                {"index": 0, "text": text, "logprobs": logprobs, **more}
                if had
                else Kit.choice(k, text, **more)
            )
            if not had:
                choices[-1]["logprobs"]["content"] = choices[-1]["logprobs"]["content"][: len(ids)]
        return Kit.completion(choices)

    asked, alone = [], []

    def longest(choices):
        asked.append([choice.message.content for choice in choices])
        return [
            (float(len(choice.message.content) == max(map(len, asked[-1]))), {"group": 1.0})
            for choice in choices
        ]

    def own(choice):
        alone.append(choice.message.content)
        return 0.25, {"own": 1.0}

    given = task(longest, own)
    budget = {"token_budget": TokenBudget(per_sample=4), "params": {"max_tokens": 20}}
    (first,) = Kit.run(say, [given], n=3, **budget)[0]
    assert [sample.finish_reason for sample in first.samples] == [
        "stop",
        "unfinished",
        "unfinished",
    ]
    assert first.samples[0].reward == 0.25 and asked == [] and alone == ["ab"]
    (second,) = Kit.run(say, [given], n=3, unfinished=[first], **budget)[0]
    assert [sample.text for sample in second.samples] == ["ab", "abcdefg", "uvwxyz"] == asked[
        0
    ] and len(asked) == 1
    assert [sample.reward for sample in second.samples] == [0.25, 1.25, 0.25] and sorted(alone) == [
        "ab",
        "abcdefg",
        "uvwxyz",
    ]
    assert all(sample.metrics == {"own": 1.0, "group": 1.0} for sample in second.samples)
