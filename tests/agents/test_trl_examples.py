"""The examples of TRL's documentation (GRPOTrainer, rewards, OpenEnv; 1.16), in words of our own:
docs/how-to/trl.md has the table.

Those with reward functions alone are in test_trl.py. https://huggingface.co/docs/trl/grpo_trainer,
/rewards, /openenv
"""

import asyncio
import json
import random
import re
import types

import pytest
from support.chat_server import Kit

from ttrl.agents.trl import trl_tasks
from ttrl.errors import TaskError

ROWS = [{"prompt": [{"role": "user", "content": "Count to 3."}], "target": 3}]
SUM = [{"prompt": [{"role": "user", "content": "2 + 3?"}]}]


class Counter:
    """An environment that may be given its target, or draws it."""

    def reset(self, target=None, **kwargs) -> str | None:
        self.counter = 0
        self.target = random.randint(1, 6) if target is None else target
        return f"Count to {self.target}." if target is None else None

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Count on.

        Args:
            step: By how much.

        Returns:
            Where the counter is then.
        """
        self.counter += step
        return self.counter


def call(name, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "tool_calls": [{"id": f"{name}-1", "type": "function", "function": function}],
        "content": None,
    }


def sampled(tasks, answer, n=1):
    """The samples of each task, of a model that says `answer(messages)`: a text, or a message that
    calls a tool.
    """

    def behaviour(body, attempt):
        choices = []
        for k in range(body.get("n") or 1):
            said = answer(body["messages"])
            choices.append(Kit.choice(k, said if isinstance(said, str) else ""))
            if not isinstance(said, str):
                choices[-1]["message"].update(said)
                choices[-1]["finish_reason"] = "tool_calls"
        return Kit.completion(choices)

    return [result.samples for result in Kit.run(behaviour, tasks, token_ids=False, n=n)[0]]


def counts(messages):
    """Counts to what it was told in one step, and says so."""
    if messages[-1]["role"] == "tool":
        return "There."
    return call("increment", step=int(re.search(r"to (\d)", messages[0]["content"])[1]))


def test_an_environment_that_makes_its_own_tasks():
    tasks = trl_tasks(None, environment_factory=Counter, n=5)
    assert len({task.id for task in tasks}) == 5
    samples = [sample for some in sampled(tasks, counts, n=2) for sample in some]
    assert [sample.reward for sample in samples] == [1.0] * 10
    # Each rollout draws its own, as with TRL.
    assert len({sample.conversation[0]["content"] for sample in samples}) > 1
    for arguments in ({"n": 3, "reward_funcs": len}, {"environment_factory": Counter}):
        with pytest.raises(TaskError, match="no train_dataset; give one"):
            trl_tasks(None, **arguments)
    with pytest.raises(TaskError, match="no train_dataset; give one"):
        trl_tasks(None, environment_factory={"a": Counter}, n=3)


def test_a_data_set_for_an_environment():
    (samples,) = sampled(trl_tasks(ROWS, environment_factory=Counter), counts)
    assert samples[0].reward == 1.0

    class AsPrinted:
        def reset(self, target, **kwargs) -> None:
            self.counter = target

        def increment(self, step: int) -> int:
            return step

    # Transformers refuses it, too.
    with pytest.raises(TaskError, match="tool increment has no docstring"):
        trl_tasks(ROWS, lambda **kwargs: [1.0], environment_factory=AsPrinted)


def test_rewards_of_functions_and_of_the_environment_are_added():
    def polite(completions, **kwargs):
        return [float(one[-1]["content"].endswith(".")) for one in completions]

    tasks = trl_tasks(ROWS, polite, reward_weights=[0.5], environment_factory=Counter)
    ((sample,),) = sampled(tasks, counts)
    assert sample.reward == 1.5 and sample.metrics == {
        "polite": 1.0,
        "Counter": 1.0,
        "tool_calls": 1.0,
        "tool_failures": 0.0,
    }
    ((sample,),) = sampled(tasks, lambda messages: "I would rather not.")
    assert sample.reward == 0.5


def test_several_environments_and_only_the_tools_of_one():
    class Coding:
        def reset(self):  # `environment` is not handed on, and there is no other column
            return "Print 1."

        def run_code(self, code: str) -> str:
            """Run code.

            Args:
                code: Python.
            """
            self.ran = code
            return "1"

    class Game(Coding):
        run_code = None

        def reset(self):
            return "Go up."

        def move(self, action: str) -> str:
            """Move.

            Args:
                action: One of "up", "down".
            """
            self.ran = action
            return "moved"

    def done(environments, environment, **kwargs):
        return [
            float(one.ran == {"coding": "print(1)", "game": "up"}[name])
            for one, name in zip(environments, environment)
        ]

    def answer(messages):
        if messages[-1]["role"] == "tool":
            return messages[-1]["content"]
        return (
            call("run_code", code="print(1)")
            if "Print" in messages[0]["content"]
            else call("move", action="up")
        )

    rows = [{"environment": name} for name in ("coding", "game")]
    tasks = trl_tasks(rows, done, environment_factory={"coding": Coding, "game": Game})
    assert [samples[0].reward for samples in sampled(tasks, answer)] == [1.0, 1.0]
    assert [samples[0].metrics["tool_failures"] for samples in sampled(tasks, answer)] == [0.0, 0.0]


def test_one_environment_of_two_games_whose_functions_return_none():
    class Both(Counter):
        def reset(self, env, **kwargs):
            self.active, self.reward = env, 0.25

        def get_reward(self):
            return None

    def of_words(environments, **kwargs):
        return [one.reward if one.active == "words" else None for one in environments]

    def of_catch(environments, **kwargs):
        return [one.reward * 2 if one.active == "catch" else None for one in environments]

    rows = [
        {"prompt": [{"role": "user", "content": "Play."}], "env": env} for env in ("words", "catch")
    ]
    tasks = trl_tasks(rows, [of_words, of_catch], environment_factory=Both)
    first, second = sampled(tasks, lambda messages: "No.")
    assert (first[0].reward, second[0].reward) == (0.25, 0.5)
    assert "of_catch" not in first[0].metrics and "of_words" not in second[0].metrics


async def async_add(a: int, b: int) -> int:
    """
    Add two whole numbers.

    Args:
        a: One.
        b: The other.
    """
    await asyncio.sleep(0)
    return a + b


def test_rewards_that_read_the_calls_of_a_conversation():
    """As in the example of an agent with a database: arguments are a dict, and tools' answers have
    a name.
    """
    seen = []

    def careful(completions, **kwargs):
        (messages,) = completions
        seen.extend(messages)
        called = [
            one["function"]["arguments"]
            for message in messages
            for one in message.get("tool_calls") or ()
        ]
        named = [message["name"] for message in messages if message["role"] == "tool"]
        return [float(called[0].get("a", 0) == 2 and named == ["async_add"])]

    def answer(messages):
        return (
            messages[-1]["content"]
            if messages[-1]["role"] == "tool"
            else call("async_add", a=2, b=3)
        )

    ((sample,),) = sampled(trl_tasks(SUM, careful, tools=[async_add]), answer)
    assert sample.error is None and sample.reward == 1.0 and seen[-1]["content"] == "5"
    ((sample,),) = sampled(
        trl_tasks(SUM, lambda completions, **kwargs: [len(completions[0])], tools=[async_add]),
        lambda messages: (
            "?" if messages[-1]["role"] == "tool" else {**call("async_add"), **broken_call()}
        ),
    )
    assert sample.reward == 3.0  # arguments that are no JSON stay a text, and are told to the model


def broken_call():
    made = call("async_add")
    made["tool_calls"][0]["function"]["arguments"] = "{"
    return made


def graded(task, text, **fields):
    return task.grader(types.SimpleNamespace(message=types.SimpleNamespace(content=text), **fields))


class OverlongPunishment:
    """An object with a name, as `get_soft_overlong_punishment` makes one."""

    __name__ = "overlong"

    def __init__(self, most, soft):
        self.most, self.soft = most, soft

    def __call__(self, completion_ids, **kwargs):
        return [
            max(-1.0, min(0.0, (self.most - self.soft - len(ids)) / self.soft))
            for ids in completion_ids
        ]


def test_objects_that_count_tokens():
    (task,) = trl_tasks([{"prompt": "Say"}], OverlongPunishment(100, 20))
    assert graded(task, "x", token_ids=[1] * 90) == (-0.5, {"overlong": -0.5})
    assert [graded(task, "x", token_ids=[1] * count)[0] for count in (80, 200)] == [0.0, -1.0]


def test_extra_columns_and_metrics():
    def boxed(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
        found = [re.search(r"\\boxed\{(.*?)\}", one) for one in completions]
        rewards = [
            float(one is not None and one[1] == right) for one, right in zip(found, ground_truth)
        ]
        log_extra("golden_answer", list(ground_truth))
        log_metric("accuracy", sum(rewards) / len(rewards))
        return rewards

    (task,) = trl_tasks([{"prompt": "2x + 3 = 7?", "ground_truth": "2"}], boxed)
    assert graded(task, r"It is \boxed{2}.") == (1.0, {"accuracy": 1.0, "boxed": 1.0})
