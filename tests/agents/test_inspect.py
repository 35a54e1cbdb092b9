"""Tasks of inspect_ai, run by inspect itself: scores, tools, choices, and what fails.

TTRL_TEST_INSPECT_PYTHON names a Python that has inspect_ai.
"""

import json
import os
import sys
from pathlib import Path

import pytest
from support.agent_sessions import Kit, server

from ttrl import TrainConfig
from ttrl.agents.inspect import get_inspect_tasks
from ttrl.errors import ConfigError, TaskError
from ttrl.evaluation.families import TaskSpec
from ttrl.loop.checks import checked

PYTHON = os.environ.get("TTRL_TEST_INSPECT_PYTHON")
EVALS = str(Path(__file__).parents[1] / "support" / "inspect_evals.py")
needs_inspect = pytest.mark.skipif(PYTHON is None, reason="needs TTRL_TEST_INSPECT_PYTHON")


@pytest.fixture(autouse=True)
def python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTRL_INSPECT_AI_PYTHON", PYTHON or sys.executable)


def play(answer, tasks, seen=None):
    return [result.samples[0] for result in Kit.run(server(answer, seen), tasks)[0]]


@needs_inspect
def test_scores_by_name() -> None:
    spec = TaskSpec.parse(f"inspect_ai:{EVALS}:sums").with_option("largest", 2)
    tasks, seen = spec.tasks(None), []
    assert [task.id for task in tasks] == ["inspect_ai/sums/sum-1", "inspect_ai/sums/sum-2"]
    assert tasks[1].messages == [{"role": "user", "content": "What is 2 + 2?"}]
    one, two = play(lambda body: "It is 4.", tasks, seen)
    assert (one.error, one.reward, two.error, two.reward) == (None, 0.0, None, 1.0)
    assert two.metrics == {"includes": 1.0, "stopped": 0.0}
    assert {body["messages"][0]["content"] for body in seen} == {"Answer with a number."}


@needs_inspect
def test_tools_and_several_scores() -> None:
    def answer(body):
        if body["messages"][-1]["role"] == "tool":
            return f"It is {body['messages'][-1]['content']}."
        call = {
            "id": "c1",
            "type": "function",
            "function": {"name": "number_of", "arguments": json.dumps({"person": "Ada"})},
        }
        return "call", {
            "message": {"content": None, "tool_calls": [call]},
            "finish_reason": "tool_calls",
        }

    (sample,) = play(answer, get_inspect_tasks(f"{EVALS}:lookup"))
    assert (sample.error, sample.reward, len(sample.turns), sample.text) == (
        None,
        1.0,
        2,
        "It is 1815.",
    )
    assert sample.metrics == {"two_scores/right": 1.0, "two_scores/short": 0.0, "stopped": 0.0}


@needs_inspect
def test_choices() -> None:
    (sample,) = play(lambda body: "ANSWER: B", get_inspect_tasks(f"{EVALS}:choices", n=1))
    assert (sample.error, sample.reward) == (None, 1.0)
    assert "B) wren" in sample.sent(0)[-1]["content"]


@needs_inspect
def test_what_fails_there_fails_the_sample() -> None:
    (sample,) = play(lambda body: "ok", get_inspect_tasks(f"{EVALS}:broken"))
    assert sample.reward is None and "the scales are broken" in sample.error
    with pytest.raises(TaskError, match="nothing_like_it"):
        get_inspect_tasks(f"{EVALS}:nothing_like_it")


def test_training_refuses_them(tmp_path: Path) -> None:
    # The worker in its own Python, which lists two tasks.
    python = tmp_path / "python"
    rows = [{"idx": k, "name": "sums", "prompt": f"What is 1 + {k}?"} for k in (1, 2)]
    lines = "\n".join(json.dumps(row) for row in rows)
    python.write_text(f"#!/bin/sh\ncat << END\n{lines}\nEND\n")
    python.chmod(0o755)
    tasks, config = (
        get_inspect_tasks("package/sums", python=str(python)),
        TrainConfig(run="r", model="tiny", iterations=1, tasks_per_iteration=2),
    )
    with pytest.raises(
        ConfigError,
        match=r"2 of 2 tasks \(such as 'inspect_ai/sums/1'\) are for evaluation only: a scorer of",
    ):
        checked(config, tasks, [], model=False)


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TTRL_INSPECT_AI_PYTHON", str(tmp_path / "python"))
    with pytest.raises(TaskError, match="No such file"):
        get_inspect_tasks("package/task")
    with pytest.raises(TaskError, match="split"):
        get_inspect_tasks("package/task", "train")
