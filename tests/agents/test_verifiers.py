"""Tasksets of verifiers, played by verifiers itself: rewards, metrics, tools, stages, stop
conditions, and what fails.

TTRL_TEST_VERIFIERS_PYTHON names a Python that has verifiers: it and ttrl cannot share an
environment.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from support.agent_sessions import EOS, Kit, server, trained

from ttrl.agents.verifiers import get_verifiers_tasks
from ttrl.errors import TaskError
from ttrl.evaluation.families import TaskSpec

PYTHON = os.environ.get("TTRL_TEST_VERIFIERS_PYTHON")
needs_verifiers = pytest.mark.skipif(PYTHON is None, reason="needs TTRL_TEST_VERIFIERS_PYTHON")


@pytest.fixture(autouse=True)
def tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they were installed there."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support" / "tasksets"))
    monkeypatch.setenv("TTRL_VERIFIERS_PYTHON", PYTHON or sys.executable)
    monkeypatch.setenv("SOME_API_KEY", "secret")


def play(answer, tasks, n=1, seen=None):
    return Kit.run(server(answer, seen), tasks, n=n)[0]


@needs_verifiers
def test_a_single_turn() -> None:
    """An endless taskset with an option, a weight, a system prompt and rewards by name."""
    tasks = get_verifiers_tasks("sums-v1", "train", 2, largest=5)
    assert [task.messages[0]["content"] for task in tasks] == ["Answer with a number."] * 2
    asked = [list(map(int, re.findall(r"\d+", task.messages[1]["content"]))) for task in tasks]
    assert all(len(pair) == 2 and pair[0] < 5 for pair in asked)
    sums, seen = {tasks[k].messages[1]["content"]: str(sum(asked[k])) for k in range(2)}, []
    results = play(lambda body: sums[body["messages"][-1]["content"]], tasks, n=2, seen=seen)
    for task, result in zip(tasks, results, strict=True):
        for sample in result.samples:
            text = sums[task.messages[1]["content"]]
            assert sample.error is None and sample.reward == 2.0 + 0.5
            assert sample.metrics == {
                "right": 1.0,
                "short": 1.0,
                "polite": 0.0,
                "length": float(len(text)),
                "stopped": 0.0,
            }
            assert sample.token_ids == [*map(ord, text), EOS]
    assert all(
        body["messages"][0] == {"role": "system", "content": "Answer with a number."}
        for body in seen
    )
    assert [token for token, _ in trained(results)[0]] == results[0].samples[0].token_ids


@needs_verifiers
def test_several_turns_of_an_environment_of_its_own() -> None:
    def searching(body):
        low, high, guess = 0, 7, 0
        for message in body["messages"]:
            if message["role"] == "assistant":
                guess = int(message["content"])
            elif message["content"] == "Higher.":
                low = guess + 1
            elif message["content"] == "Lower.":
                high = guess - 1
        return str((low + high) // 2)

    tasks = get_verifiers_tasks("someone/guessing-v1", "all", None)
    assert len(tasks) == 8 and tasks[0].id.startswith("verifiers/guessing-v1/")
    (sample,) = play(searching, tasks[5:6])[0].samples
    assert (sample.error, sample.reward, sample.metrics) == (
        None,
        1.0,
        {"found": 1.0, "guesses": 2.0, "stopped": 0.0},
    )
    assert [turn.reply["content"] for turn in sample.turns] == ["3", "5"]
    (sample,) = play(lambda body: "I give up", tasks[5:6])[0].samples  # a stop condition
    assert (sample.error, sample.reward, sample.metrics) == (
        None,
        0.0,
        {"found": 0.0, "guesses": 1.0, "stopped": 1.0},
    )


@needs_verifiers
def test_tools_of_a_taskset() -> None:
    seen = []

    def answer(body):
        if body["messages"][-1]["role"] == "tool":
            return f"It is {body['messages'][-1]['content']}."
        (name,) = (tool["function"]["name"] for tool in body["tools"])
        person = re.search("has (.*)[?]", body["messages"][-1]["content"])[1]
        call = {
            "id": "c1",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps({"person": person})},
        }
        return "call", {
            "message": {"content": None, "tool_calls": [call]},
            "finish_reason": "tool_calls",
        }

    results = play(answer, get_verifiers_tasks("lookup-v1", "all"), seen=seen)
    assert [result.samples[0].error for result in results] == [None, None]
    assert [(result.samples[0].reward, len(result.samples[0].turns)) for result in results] == [
        (1.0, 2),
        (1.0, 2),
    ]
    assert {result.samples[0].text for result in results} == {"It is 1815.", "It is 1912."}


@needs_verifiers
def test_tools_whose_state_the_reward_reads() -> None:
    def taking(body):
        told = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        if len(told) == 3:
            return f"{told[1]}, {told[2]}" if "there is none" not in told[2] else "?"
        thing = ["milk", "moon", "eggs"][len(told)]
        (name,) = (tool["function"]["name"] for tool in body["tools"])
        call = {
            "id": f"c{len(told)}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps({"thing": thing})},
        }
        return f"call {thing}", {
            "message": {"content": None, "tool_calls": [call]},
            "finish_reason": "tool_calls",
        }

    # Each with a server, and a state, of its own.
    results = play(taking, get_verifiers_tasks("basket-v1", "all"), n=2)
    assert [(sample.error, sample.reward) for sample in results[0].samples] == [(None, 1.0)] * 2
    assert all(
        sample.text.endswith("2 taken") and len(sample.turns) == 4 for sample in results[0].samples
    )


@needs_verifiers
def test_stages_and_files_of_the_runtime() -> None:
    results = play(lambda body: "so it is", get_verifiers_tasks("files-v1", "all", 1))
    (sample,) = results[0].samples
    assert (sample.error, sample.reward) == (None, 1.0)
    assert sample.metrics == {"kept": 1.0, "stopped": 0.0}
    assert [message["role"] for message in sample.sent(0)] == ["user", "assistant", "user"]


@needs_verifiers
def test_what_fails_there_fails_the_sample() -> None:
    results = play(lambda body: "ok", get_verifiers_tasks("broken-v1", "all"))
    errors = {
        result.samples[0].messages[0]["content"]: result.samples[0].error for result in results
    }
    assert all(result.samples[0].reward is None for result in results)
    assert "the scales are broken" in errors["raises"] and "ended with status 7" in errors["dies"]


@needs_verifiers
def test_splits_and_names() -> None:
    train, held_out = (
        TaskSpec.parse(f"verifiers:sums-v1@{split}").tasks(30, seed=3)
        for split in ("train", "validation")
    )
    assert len(train) == len(held_out) == 30 and not {task.id for task in train} & {
        task.id for task in held_out
    }
    assert [task.id for task in TaskSpec.parse("verifiers:sums-v1").tasks(30, seed=4)] == [
        task.id for task in held_out
    ]
    with pytest.raises(TaskError, match=r"no.such.taskset"):
        get_verifiers_tasks("no-such-taskset")
    with pytest.raises(TaskError, match="largest_number"):
        get_verifiers_tasks("sums-v1", largest_number=3)


def test_without_verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTRL_VERIFIERS_PYTHON", sys.executable)
    with pytest.raises(TaskError, match="set TTRL_VERIFIERS_PYTHON to a Python with it"):
        get_verifiers_tasks("sums-v1")
    with pytest.raises(TaskError, match="split"):
        get_verifiers_tasks("sums-v1", "test")
