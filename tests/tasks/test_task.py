"""Tasks and grades: what is accepted, and what the refusals say."""

import subprocess
import sys
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from ttrl.errors import GraderError, TaskError
from ttrl.tasks import Grade, Task

MESSAGES = [{"role": "user", "content": "hello"}]


def grader(choice):
    return 1.0


LARGE = {"a": 0.0, "b": 2.0, "c": 3.0, "d": 1e18}


@pytest.mark.parametrize(
    ("output", "reward", "metrics"),
    [
        (1, 1.0, {}),
        (-0.5, -0.5, {}),
        (True, 1.0, {}),
        (Fraction(1, 4), 0.25, {}),
        (np.float32(0.5), 0.5, {}),
        (np.int64(3), 3.0, {}),
        (np.float64(0.5), 0.5, {}),
        (np.bool_(True), 1.0, {}),
        (np.array(0.5), 0.5, {}),
        (np.array(True), 1.0, {}),
        (Decimal("0.5"), 0.5, {}),
        (torch.tensor(0.5), 0.5, {}),
        (torch.tensor(0.5, requires_grad=True), 0.5, {}),
        (torch.tensor(True), 1.0, {}),
        (1e12, 1e12, {}),
        (
            (np.array(1), {"a": np.bool_(False), "b": Decimal(2), "c": torch.tensor(3), "d": 1e18}),
            1.0,
            LARGE,
        ),
        ((0.5, {}), 0.5, {}),
        ((0.5, {"a": 1, "b": np.float32(0.25), "c": False}), 0.5, {"a": 1.0, "b": 0.25, "c": 0.0}),
        (Grade(2, {"a": 3}), 2.0, {"a": 3.0}),
    ],
)
def test_grades(output, reward, metrics):
    grade = Grade.of(output, "here")
    assert grade == Grade(reward, metrics)
    assert type(grade.reward) is float
    assert all(type(value) is float for value in grade.metrics.values())


@pytest.mark.parametrize(
    "output",
    [
        None, "1", "", [1.0], {}, (), (1.0,), (1.0, {}, 3), float("nan"), float("inf"),
        -float("inf"), 1j, np.nan, np.array([1.0]), (float("nan"), {}), (None, {}), (1.0, None), (1.0, [("a", 1)]), (1.0, {"a": "b"}), (1.0, {"a": None}),
        (1.0, {"a": float("nan")}), (1.0, {1: 1.0}), Grade(float("nan")), object(),
        1e300, -1e300, 1.1e12, 10**400, Grade(1e300), np.array(1e300), (1.0, {"a": 1e300}), (1.0,
        {"a": float("inf")}), Decimal("NaN"), Decimal("sNaN"), Decimal("Infinity"), Decimal("1e400"), np.array("1"), np.array(1j), np.bool_,
        np.array([True]), torch.tensor([0.5]), torch.tensor(float("nan")), torch.tensor(1e300,
        dtype=torch.float64),
    ],
)  # fmt: skip
def test_no_grades(output):
    with pytest.raises(GraderError, match=r"^task 'x', sample 3: the grader"):
        Grade.of(output, "task 'x', sample 3")


def test_too_large_a_reward_says_what_to_do():
    with pytest.raises(
        GraderError,
        match=r"^here: the grader returned the reward -1e\+300, beyond ±1e\+12, .* clip it",
    ):
        Grade.of(-1e300, "here")


def test_long_outputs_are_cut():
    with pytest.raises(GraderError) as caught:
        Grade.of("x" * 10_000, "here")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "non-empty list"),
        (None, "non-empty list"),
        ("hello", "non-empty list"),
        ({"role": "user", "content": "x"}, "non-empty list"),
        (["hello"], "message 0 is 'hello'"),
        ([{"content": "x"}], "message 0"),
        ([*MESSAGES, {"role": 3, "content": "x"}], "message 1"),
        (
            [*MESSAGES, {"role": "assistant"}],
            r"message 1 \(role 'assistant'\) has neither content nor tool_calls",
        ),
        ([*MESSAGES, {"role": "assistant", "content": None}], "message 1"),
    ],
)
def test_bad_messages(messages, words):
    with pytest.raises(TaskError, match=words):
        Task(messages=messages, grader=grader)
    with pytest.raises(TaskError, match=r"^task 'mine': "):
        Task(messages=messages, grader=grader, id="mine")
    assert issubclass(TaskError, ValueError)


def test_good_messages():
    Task([{"role": "user", "content": ""}], grader)  # an empty prompt is a prompt
    Task([{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}], grader)
    Task([{"role": "user", "content": [{"type": "text", "text": "x"}]}], grader)


def test_messages_are_those_that_a_server_takes():
    """Without nulls, and with arguments of tool calls as JSON text."""
    function = {"name": "add", "arguments": {"a": 1, "b": None}}
    call = {"id": "1", "type": "function", "function": function}
    part = {"type": "text", "text": "x"}
    given = [
        {"role": "user", "content": [part | {"image_url": None}], "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "thinking": None},
        {"role": "tool", "tool_call_id": "1", "content": "3", "name": None},
    ]
    sent = call | {"function": {"name": "add", "arguments": '{"a": 1}'}}
    task = Task(given, grader)
    assert task.messages == [
        {"role": "user", "content": [part]},
        {"role": "assistant", "content": None, "tool_calls": [sent]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    assert given[0]["tool_calls"] is None and function["arguments"] == {"a": 1, "b": None}
    assert Task(task.messages, grader).id == task.id
    function["arguments"] = {"a": object()}
    with pytest.raises(TaskError, match="the arguments of a tool call have no JSON text"):
        Task(given, grader)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "a part of type 'image_url'"),
        ([{"type": "image", "text": None}], "a part of type 'image'"),
        ([{"text": "x"}], "a part without a type"),
        ({"type": "text", "text": "x"}, "content of type dict"),
    ],
)
def test_parts_that_are_no_text_are_refused_by_name(content, words):
    with pytest.raises(TaskError, match=f"task 'mine': message 1 holds {words}.*trains on text"):
        Task([*MESSAGES, {"role": "user", "content": content}], grader, id="mine")


def test_a_prompt_of_token_ids_is_no_list_of_parts():
    messages = [{"role": "prompt", "content": [1, 2, 3]}]
    assert Task(messages, grader).messages == messages


@pytest.mark.parametrize("bad", [None, "grader", 1.0])
def test_graders_must_be_callable(bad):
    with pytest.raises(TaskError, match="grader is"):
        Task(MESSAGES, bad)


def test_ids_follow_the_messages_in_every_process():
    assert Task(MESSAGES, grader, id="mine").id == "mine"
    first, other = (
        Task(MESSAGES, grader).id,
        Task([{"role": "user", "content": "hallo"}], grader).id,
    )
    assert first == Task([{"content": "hello", "role": "user"}], lambda choice: 0.0).id != other
    code = f"from ttrl.tasks import Task; print(Task({MESSAGES!r}, print).id)"
    env = {"PYTHONHASHSEED": "7"}
    again = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    ).stdout.strip()
    assert again == first
