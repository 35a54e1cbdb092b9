"""Two OpenEnv servers that are really started, by the package where it is installed: a game, and an
environment with tools.

TTRL_TEST_OPENENV_PYTHON names a Python that has openenv-core; by default it is this one.
"""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.chat_server import Kit

from ttrl.agents.gym import NoAction
from ttrl.agents.openenv import get_openenv_tasks, observation_text, read_action
from ttrl.errors import TaskError
from ttrl.evaluation.families import TaskSpec
from ttrl.tasks.task import RolloutLimits

PYTHON = os.environ.get("TTRL_TEST_OPENENV_PYTHON", sys.executable)
SUPPORT = Path(__file__).parents[1] / "support"
there = (
    subprocess.run(
        [PYTHON, "-c", "import importlib.util as u; exit(u.find_spec('openenv') is None)"]
    ).returncode
    == 0
)
needs_package = pytest.mark.skipif(not there, reason="needs openenv-core")


def command(app):
    return [
        PYTHON,
        "-m",
        "uvicorn",
        "--app-dir",
        str(SUPPORT),
        f"openenv_servers:{app}",
        "--port",
        "{port}",
    ]


def searching(body, attempt):
    """A model that halves what is left of 0 to 5; first it says what is no number, and one that is
    too large.
    """
    low, high, guess, replies = 0, 5, 0, 0
    for message in body["messages"][1:]:
        if message["role"] == "assistant":
            replies += 1
            guess = int(message["content"]) if message["content"].isdecimal() else 99
        elif message["content"] == "Higher.":
            low = guess + 1
        elif message["content"] == "Lower.":
            high = guess - 1
    return Kit.completion(
        [Kit.choice(0, ["three", "9"][replies] if replies < 2 else str((low + high) // 2))]
    )


@needs_package
def test_a_game_against_the_number_of_halvings() -> None:
    tasks = get_openenv_tasks(command("game"), n=4, options={"numbers": 6})
    assert tasks[0].messages[0]["content"] == (
        "Guess the number.\n\nEnd each reply with number (a number from 0 to 7), in <answer> "
        "</answer> tags."
    )
    # Of one session at a time: the others wait.
    results = Kit.run(searching, tasks, n=2, token_ids=False)[0]
    for task, result in zip(tasks, results, strict=True):
        secret, low, high, guesses = (
            random.Random(int(task.id.rpartition("/")[2])).randrange(6),
            0,
            5,
            1,
        )
        while (guess := (low + high) // 2) != secret:
            low, high, guesses = (
                (guess + 1, high, guesses + 1) if guess < secret else (low, guess - 1, guesses + 1)
            )
        for sample in result.samples:
            assert sample.error is None and sample.reward == pytest.approx(
                1.0 - 0.25 * (guesses - 1)
            )
            assert sample.metrics == {"steps": guesses, "invalid": 2.0, "ended": 1.0}
            assert sample.sent(0)[0]["content"].endswith("tags.\n\nYou have not guessed yet.")
            assert "less than or equal to 7" in sample.sent(2)[-1]["content"]


@needs_package
@pytest.mark.parametrize(
    ("number", "limits", "message"),
    [
        ("7", None, "failed: the dice fell off the table"),
        ("6", RolloutLimits(seconds=1), "worked for more than 1 s"),
    ],
)
def test_what_fails_in_the_environment_fails_the_sample(
    number: str, limits: RolloutLimits | None, message: str
) -> None:
    tasks = get_openenv_tasks(command("game"), n=1, limits=limits)
    ((result,), _) = Kit.run(
        lambda body, attempt: Kit.completion([Kit.choice(0, number)]), tasks, token_ids=False
    )
    assert result.samples[0].reward is None and re.search(message, result.samples[0].error)


@needs_package
def test_an_environment_with_tools() -> None:
    def buying(body, attempt):
        told = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        wanted = body["messages"][0]["content"].rpartition("Buy ")[2].rstrip(".")
        calls = [
            ("put", {"item": "moon"}),
            ("put", {"thing": 1}),
            ("put", {"item": wanted}),
            ("pay", {}),
        ]
        name, arguments = calls[len(told)]
        call = {
            "id": f"c{len(told)}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return Kit.completion([Kit.choice(0, "call", message=message, finish_reason="tool_calls")])

    tasks = get_openenv_tasks(command("shop"), n=2)
    results, server = Kit.run(buying, tasks, n=2, token_ids=False)
    for sample in (sample for result in results for sample in result.samples):
        assert sample.error is None and sample.reward == 1.0
        assert (
            sample.metrics == {"steps": 2.0, "invalid": 2.0, "ended": 1.0}
            and len(sample.turns) == 4
        )
        told = [
            message["content"]
            for turn in sample.turns
            for message in turn.messages
            if message["role"] == "tool"
        ]
        assert (
            "too large" in told[0]
            and "Missing required argument" in told[1]
            and told[2] == "1 in the basket"
        )
    (put,) = (
        tool["function"]
        for tool in server.requests[0]["tools"]
        if tool["function"]["name"] == "put"
    )
    assert put["parameters"]["required"] == ["item"] and "Put something" in put["description"]

    (result,), _ = Kit.run(
        lambda body, attempt: Kit.completion([Kit.choice(0, "no")]), tasks[:1], token_ids=False
    )
    assert (result.samples[0].reward, result.samples[0].metrics["ended"]) == (0.0, 0.0)


@needs_package
def test_by_its_address() -> None:
    address = get_openenv_tasks(command("shop"), n=1)[0].rollout.address
    tasks = TaskSpec.parse(f"openenv:{address}@train").tasks(3, seed=1)
    assert len({task.id for task in tasks}) == 3 and tasks[0].id.startswith("openenv/Shop/")
    assert [task.id for task in TaskSpec.parse(f"openenv:{address}@train").tasks(2, seed=1)] == [
        task.id for task in tasks[:2]
    ]
    held_out = [
        TaskSpec.parse(f"openenv:{address}@validation").tasks(2, seed=seed) for seed in (1, 2)
    ]
    assert (
        [task.id for task in held_out[0]]
        == [task.id for task in held_out[1]]
        != [task.id for task in tasks[:2]]
    )


def test_actions_of_replies() -> None:
    text = {"properties": {"message": {"type": "string"}, "metadata": {}}, "required": ["message"]}
    both = {
        "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
        "required": ["x", "y"],
    }
    assert read_action("So:\n<answer>hi there</answer>", text) == {"message": "hi there"}
    assert read_action('<think>{}</think>\n{"x": 1, "y": 2}', both) == {"x": 1, "y": 2}
    for wrong in ("none", "[1, 2]", ""):
        with pytest.raises(ValueError):
            read_action(wrong, both)
    assert issubclass(NoAction, ValueError)


def test_texts_of_observations() -> None:
    assert observation_text({"text": "hi", "board": None}) == "hi"
    assert observation_text({"a": 1, "b": "é"}) == '{"a": 1, "b": "é"}'
    assert observation_text("x" * 30_000).endswith("[10000 characters more are left out]")


def test_what_is_refused() -> None:
    with pytest.raises(TaskError, match="cannot be read"):
        get_openenv_tasks("http://127.0.0.1:9")
    with pytest.raises(TaskError, match="give its address"):
        get_openenv_tasks("file:///etc")
    with pytest.raises(TaskError, match=r"\{port\}"):
        get_openenv_tasks([sys.executable, "-c", ""])
    with pytest.raises(TaskError, match=r"(?s)did not start:.*no server here"):
        get_openenv_tasks([sys.executable, "-c", "exit('no server here {port}')"])
