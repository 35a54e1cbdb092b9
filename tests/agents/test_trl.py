"""TRL's shapes: functions and environments with the signatures of TRL's documentation (GRPO,
OpenEnv), in words of our own.
"""

import asyncio
import json
import re
import types

import pytest
from support.chat_server import Kit

from ttrl.agents.tools import Tools, describe_tool
from ttrl.agents.trl import trl_tasks
from ttrl.errors import TaskError
from ttrl.tasks.task import RolloutLimits

CHAT = [{"role": "user", "content": "What is (1 + 2) * 4?"}]


def graded(task, text, **fields):
    choice = types.SimpleNamespace(message=types.SimpleNamespace(content=text), **fields)
    output = task.grader(choice)
    return asyncio.run(_awaited(output)) if asyncio.iscoroutine(output) else output


async def _awaited(output):
    return await output


# As in the documentation: lists of strings, lists of messages, columns, None, coroutines, tools,
# environments


def longer_by_tokens(completions_ids, **kwargs):
    return [float(len(ids)) for ids in completions_ids]


def longer_by_characters(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def format_reward_func(completions, **kwargs):
    said = [completion[0]["content"] for completion in completions]
    return [
        float(re.fullmatch("<think>.*</think><answer>.*</answer>", text) is not None)
        for text in said
    ]


def boxed_reward(completions, ground_truth, **kwargs):
    return [float(rf"\boxed{{{right}}}" in text) for text, right in zip(completions, ground_truth)]


def math_reward_func(prompts, completions, task, **kwargs):
    return [
        (1.0 if "4" in c else -1.0) if t == "math" else None
        for p, c, t in zip(prompts, completions, task)
    ]


def coding_reward_func(prompts, completions, task, **kwargs):
    return [
        (1.0 if "def" in c else -1.0) if t == "code" else None
        for p, c, t in zip(prompts, completions, task)
    ]


async def async_reward_func(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if completion else 0.0 for completion in completions]


def multiply(a: int, b: int) -> int:
    """
    Say what two whole numbers
    make together.

    Args:
        a: One factor.
        b (int): The other factor,
            which may be 0.

    Returns:
        Their product.
    """
    return a * b


class EchoEnv:
    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0

    def echo(self, message: str) -> str:
        """
        Send a message and hear it again.

        Args:
            message: Any text.
        """
        self.reward += 0.1 * len(message)
        return message


def reward_from_env(environments, **kwargs):
    return [env.reward for env in environments]


class WordEnv:
    def reset(self, secret, **kwargs) -> str | None:
        self.secret, self.done, self.reward = secret, False, 0.0
        return f" The word has {len(secret)} letters."

    def guess(self, guess: str) -> str:
        """
        Make a guess.

        Args:
            guess: The guessed word
        """
        if self.done:
            raise ValueError("Game over.")
        self.done, self.reward = True, float(guess == self.secret)
        return "right" if self.reward else "wrong"

    async def get_reward(self) -> float:
        return self.reward


def call(name, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }
    return {"message": message, "finish_reason": "tool_calls"}


def playing(script):
    """A model that answers by the number of replies that it has given in this conversation."""

    def behaviour(body, attempt):
        told = script[sum(message["role"] == "assistant" for message in body["messages"])]
        choice = Kit.choice(0, told if isinstance(told, str) else "")
        if not isinstance(told, str):
            choice["message"].update(told["message"])
            choice["finish_reason"] = told["finish_reason"]
        return Kit.completion([choice])

    return behaviour


def sampled(script, tasks):
    """Return the samples of one task."""
    return Kit.run(playing(script), tasks, token_ids=False)[0][0].samples


def test_functions_of_the_documentation() -> None:
    rows = [
        {"prompt": "Solve $2x + 3 = 7$.", "ground_truth": "2"},
        {"prompt": "Solve $3x - 5 = 10$.", "ground_truth": "5"},
    ]
    first, second = trl_tasks(rows, boxed_reward)
    assert first.messages == [{"role": "user", "content": "Solve $2x + 3 = 7$."}]
    assert graded(first, r" The solution is \boxed{2}.") == (1.0, {"boxed_reward": 1.0})
    assert graded(second, r" The solution is \boxed{6}.")[0] == 0.0
    (chat,) = trl_tasks([{"prompt": CHAT}], format_reward_func)
    assert (
        graded(chat, "<think>12</think><answer>12</answer>")[0] == 1.0
        and graded(chat, "12")[0] == 0.0
    )
    (both,) = trl_tasks(
        rows[:1],
        [longer_by_characters, longer_by_tokens, async_reward_func],
        reward_weights=[0.5, 10, 100],
    )
    reward, metrics = graded(both, " blue.", token_ids=[6303, 13])
    assert reward == 0.5 * 6 + 10 * 2 + 100
    assert metrics == {
        "longer_by_characters": 6.0,
        "longer_by_tokens": 2.0,
        "async_reward_func": 1.0,
    }


def test_none_leaves_a_function_out() -> None:
    rows = [
        {"prompt": "What is 2+2?", "task": "math"},
        {"prompt": "Write a sum.", "task": "code"},
        {"prompt": "?", "task": "none"},
    ]
    maths, code, neither = trl_tasks(rows, [math_reward_func, coding_reward_func])
    assert graded(maths, "It is 4") == (1.0, {"math_reward_func": 1.0})
    assert graded(code, "It is 4") == (-1.0, {"coding_reward_func": -1.0})
    (sample,) = sampled(["4"], [neither])
    assert (
        sample.reward is None
        and "none of math_reward_func, coding_reward_func applies" in sample.error
    )


def test_rows_from_files(tmp_path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": CHAT, "answer": 12}, {"prompt": CHAT, "answer": 13}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")

    def right(completions, answer, **kwargs):
        return [float(str(a) in c[0]["content"]) for c, a in zip(completions, answer)]

    for place in (tmp_path, str(tmp_path / "train.parquet"), rows, iter(rows)):
        tasks = trl_tasks(place, right)
        assert [graded(task, "12")[0] for task in tasks] == [1.0, 0.0] and tasks[0].messages == CHAT
        assert len({task.id for task in tasks}) == 2
    assert (
        len(trl_tasks(rows * 3, right)) == 6
        and len({task.id for task in trl_tasks(rows * 3, right)}) == 6
    )
    assert len(trl_tasks(iter(rows), right, n=1)) == 1


def test_rows_that_went_through_arrow(tmp_path) -> None:
    """Parquet fills in what only other rows have; functions see the columns as they are."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    functions = [
        {"name": "add", "arguments": {"a": 1, "b": 2}},
        {"name": "look", "arguments": {"place": "hall"}},
    ]
    calls = [{"id": str(n), "type": "function", "function": f} for n, f in enumerate(functions)]
    sent = []
    for made, function in zip(calls, functions, strict=True):
        text = json.dumps(function["arguments"])
        sent.append({**made, "function": {**function, "arguments": text}})
    asked = {"role": "user", "content": [{"type": "text", "text": "Add"}]}
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    result = {"role": "tool", "content": asked["content"]}
    results = [result | {"tool_call_id": str(n)} for n in range(2)]
    rows = [{"prompt": [asked, said, *results], "hint": None}, {"prompt": [asked], "hint": "x"}]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "train.parquet")
    filled = table.to_pylist()[0]["prompt"]
    assert filled[0]["tool_calls"] is None
    assert filled[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": 2, "place": None}
    seen = []

    def curious(prompts, completions, hint, **kwargs):
        seen.append((prompts[0], hint[0]))
        return [1.0]

    for place in (tmp_path, table.to_pylist()):
        first, second = trl_tasks(place, curious)
        assert first.messages == [asked, {**said, "tool_calls": sent}, *results]
        assert second.messages == [asked]
        assert graded(first, "3")[0] == 1.0 and seen.pop() == (rows[0]["prompt"], None)


def test_an_environment_adds_to_parts() -> None:
    prompt = [{"role": "user", "content": [{"type": "text", "text": "Guess."}]}]
    (task,) = trl_tasks([{"prompt": prompt, "secret": "crane"}], environment_factory=WordEnv)
    (sample,) = sampled([call("guess", guess="crane"), "done"], [task])
    assert sample.error is None and sample.reward == 1.0
    added = {"type": "text", "text": " The word has 5 letters."}
    assert sample.conversation[0]["content"] == [*prompt[0]["content"], added]


def test_metrics_and_columns_are_handed_over() -> None:
    seen = {}

    def curious(prompts, completions, log_metric, log_extra, level, trainer_state=None, **kwargs):
        log_metric("length", len(completions[0]))
        log_extra("what", completions)
        seen.update(kwargs, prompts=prompts, level=level)
        return [1]

    def narrow(completions):
        return [2.0]

    (task,) = trl_tasks([{"prompt": "Say", "level": 3, "other": None}], [curious, narrow])
    assert graded(task, "four", token_ids=[1, 2]) == (
        3.0,
        {"length": 4, "curious": 1.0, "narrow": 2.0},
    )
    assert seen == {"prompts": ["Say"], "level": [3], "other": [None], "completion_ids": [[1, 2]]}


def test_tools() -> None:
    seen = []

    def product(completions, **kwargs):
        seen.append(completions[0])
        return [float("56" in completions[0][-1]["content"])]

    (task,) = trl_tasks([{"prompt": CHAT}], product, tools=[multiply])
    script = [call("multiply", a=7, b=8), "It is 56."]
    (sample,) = sampled(script, [task])
    assert sample.error is None and sample.reward == 1.0
    assert [message["role"] for message in seen[0]] == ["assistant", "tool", "assistant"] and seen[
        0
    ][1]["content"] == "56"


def test_an_environment_for_each_rollout() -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "Guess."}], "secret": "crane"},
        {"prompt": "Guess.", "secret": "slate"},
    ]
    tasks = trl_tasks(rows, environment_factory=WordEnv)
    script = [call("guess", guess="slate"), call("guess", guess="crane"), "done"]
    results = Kit.run(playing(script), tasks, token_ids=False, n=2)[0]
    assert [[sample.reward for sample in result.samples] for result in results] == [
        [0.0, 0.0],
        [1.0, 1.0],
    ]
    sample = results[1].samples[0]
    assert sample.metrics == {"WordEnv": 1.0, "tool_calls": 2.0, "tool_failures": 1.0}
    said = [message.get("content") for message in sample.conversation]
    assert (
        "Guess. The word has 5 letters." in said
        and "right" in said
        and '{"error": "Game over."}' in said
    )
    echo = trl_tasks(
        [{"prompt": CHAT, "environment": "echo"}],
        reward_from_env,
        environment_factory={"echo": EchoEnv},
    )
    (sample,) = sampled([call("echo", message="Hello"), "ok"], echo)
    assert sample.reward == pytest.approx(0.5)


def test_an_environment_that_fails_costs_its_sample() -> None:
    class Broken(WordEnv):
        def reset(self, **kwargs):
            raise OSError("no connection")

    (task,) = trl_tasks([{"prompt": CHAT}], environment_factory=Broken)
    (sample,) = sampled(["x"], [task])
    assert sample.reward is None and "no connection" in sample.error
    endless = trl_tasks(
        [{"prompt": CHAT, "secret": "a"}],
        environment_factory=WordEnv,
        limits=RolloutLimits(turns=3),
    )
    (sample,) = sampled([call("guess", guess="b")] * 9, endless)
    assert sample.reward is None and "3 turns" in sample.error


def test_what_the_model_is_told_of_a_tool() -> None:
    assert describe_tool(multiply)["function"] == {
        "name": "multiply",
        "description": "Say what two whole numbers make together.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "One factor."},
                "b": {"type": "integer", "description": "The other factor, which may be 0."},
            },
            "required": ["a", "b"],
        },
    }


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("multiply", '{"a": 2, "b": 3}', "6"),
        ("multiply", '{"a": 2}', "missing a required argument: 'b'"),
        ("multiply", '{"a": 2, "b": 3, "c": 4}', "unexpected keyword argument 'c'"),
        ("multiply", "[2, 3]", "arguments must be a JSON object"),
        ("multiply", "{", "Expecting property name"),
        ("divide", "{}", "there is no tool divide; there are multiply"),
        ("__class__", "{}", "there is no tool __class__"),
    ],
)
def test_calls_that_do_not_fit_are_told_so(name: str, arguments: str, told: str) -> None:
    function = types.SimpleNamespace(name=name, arguments=arguments)
    message = types.SimpleNamespace(tool_calls=[types.SimpleNamespace(id="c", function=function)])
    (answer,) = asyncio.run(Tools([multiply]).answer(types.SimpleNamespace(message=message)))
    assert told in answer["content"] and answer["tool_call_id"] == "c"


def untyped(a) -> int:
    """Do something."""
    return 1


def no_docstring(a: int) -> int:
    return a


def strange(a: types.ModuleType) -> int:
    """Do something."""
    return 1


def wants_state(completions, trainer_state, **kwargs):
    return [trainer_state.global_step]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward_funcs": "Qwen/RewardModel"}, "is a model"),
        ({"reward_funcs": []}, "no reward_funcs"),
        ({"reward_funcs": wants_state}, "wants_state needs TRL's trainer_state"),
        (
            {"reward_funcs": [boxed_reward], "reward_weights": [1, 2]},
            "2 reward_weights for 1 reward_funcs",
        ),
        ({"train_dataset": []}, "no rows"),
        (
            {"train_dataset": [{"question": "x"}]},
            r"row 0: its prompt is None; give a string, .*\(the columns are question\)",
        ),
        ({"train_dataset": ["x"]}, "row 0 is 'x'; a row is a dict"),
        ({"train_dataset": "nowhere.parquet"}, "nowhere.parquet is neither a file"),
        ({"tools": [no_docstring]}, "no_docstring has no docstring"),
        ({"tools": [untyped]}, "argument a has no type hint"),
        ({"tools": [strange]}, "JSON has no type"),
        ({"tools": [multiply, multiply]}, "two tools are named multiply"),
        ({"environment_factory": dict}, "dict has no method reset"),
        ({"environment_factory": {"a": EchoEnv}}, "its environment is None; choose one of 'a'"),
    ],
)
def test_what_is_refused(arguments, message: str) -> None:
    given = {"train_dataset": [{"prompt": "x"}], "reward_funcs": boxed_reward, **arguments}
    with pytest.raises(TaskError, match=message):
        trl_tasks(**given)


@pytest.mark.parametrize("returned", [1.0, [1.0, 2.0], None, "x", {"a": 1}, [True and "x"]])
def test_what_a_function_may_not_return(returned) -> None:
    (task,) = trl_tasks([{"prompt": "x"}], lambda **kwargs: returned)
    (sample,) = sampled(["x"], [task])
    assert sample.reward is None and sample.error
