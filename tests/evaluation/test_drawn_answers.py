"""Answers of an entropy batch from a server that writes down what it is asked."""

import json
from collections import Counter
from typing import ClassVar

import pytest
from support.chat_server import ChatHandler, threaded

from ttrl import Task
from ttrl.configs.run import TrainConfig
from ttrl.errors import ConfigError, ServerError, UserError
from ttrl.evaluation.drawn_answers import DrawnAnswers, tasks_of
from ttrl.tiny_model import make_tiny_model


class _Echo(ChatHandler):
    """Repeats the question, but fails for 3."""

    models = ("m",)
    bodies: ClassVar[list[dict]] = []

    def reply(self, body):
        self.bodies.append(body)
        text = body["messages"][-1]["content"]
        return text, "error" if text == "3" else "stop"


def config(**settings):
    return TrainConfig(run="r", model="smollm2-135m", iterations=1, max_tokens=9, **settings)


def grader(choice):
    raise AssertionError("nothing is graded")


TASKS = [Task([{"role": "user", "content": str(n)}], grader, id=f"t{n}") for n in range(3)]


def test_prompts_are_drawn_uniformly_with_replacement_and_answered_once_each():
    answers = DrawnAnswers(TASKS, 60, 5, config(sampling={"stop": ["."], "seed": 3}))
    _Echo.bodies.clear()
    with threaded(_Echo) as address:
        samples = answers(address, 0.7)
    counts = Counter(one.task_id for one in samples)
    assert set(counts) == {"t0", "t1", "t2"} and min(counts.values()) > 8
    assert [one.sample for one in samples] == list(range(60))
    assert all(one.text == one.task_id[1:] for one in samples)
    assert len(_Echo.bodies) == 60
    for body in _Echo.bodies:
        assert (body["temperature"], body["max_tokens"], body["stop"]) == (0.7, 9, ["."])
        assert body.get("n", 1) == 1 and "seed" not in body
    with threaded(_Echo) as address:
        assert [one.task_id for one in answers(address, 0.7)] == [one.task_id for one in samples]


def test_a_server_that_answers_nothing_is_an_error():
    task = Task([{"role": "user", "content": "3"}], grader)
    with threaded(_Echo) as address, pytest.raises(ServerError, match="all 2 samples"):
        DrawnAnswers([task], 2, 0, config())(address, 1.0)


def test_a_request_names_everything_but_the_policy():
    one = DrawnAnswers(TASKS, 60, 5, config()).request("tasks")
    assert one == DrawnAnswers(TASKS, 60, 5, config()).request("tasks")
    others = [
        DrawnAnswers(TASKS, 61, 5, config()),
        DrawnAnswers(TASKS, 60, 6, config()),
        DrawnAnswers(TASKS[1:], 60, 5, config()),
        DrawnAnswers(TASKS, 60, 5, config(sampling={"stop": ["x"]})),
    ]
    assert len({one, *(other.request("tasks") for other in others)}) == 5
    # A seed changes nothing: no request has one.
    assert one == DrawnAnswers(TASKS, 60, 5, config(sampling={"seed": 1})).request("tasks")


def row(task, **changes):
    messages = [{"role": "user", "content": task}]
    return {"task_id": task, "sample": 0, "messages": messages} | changes


def test_a_runs_own_tasks_are_those_of_its_newest_validation(tmp_path):
    assert tasks_of(tmp_path, None, config()) == []
    for number, names in ((1, ["old"]), (3, ["a", "b", "a"]), (4, [])):
        path = tmp_path / "iterations" / f"{number:04d}" / "validation.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(row(name)) + "\n" for name in names))
    tasks = tasks_of(tmp_path, None, config())
    assert [(one.id, one.messages[0]["content"]) for one in tasks] == [("a", "a"), ("b", "b")]
    path.write_text(json.dumps(row("c", turns=[{"messages": []}])) + "\n")
    assert tasks_of(tmp_path, None, config()) == []


def test_other_tasks_are_named_as_for_an_evaluation(tmp_path):
    model = make_tiny_model(tmp_path / "model", seed=1, layers=1, width=32, heads=2, context=64)
    own = TrainConfig(run="r", model=str(model), iterations=1)
    (tmp_path / "chat.py").write_text(
        "from ttrl import Task\n"
        "async def talk(chat):\n    return 1.0\n"
        "tasks = [Task([{'role': 'user', 'content': 'hi'}], rollout=talk)]\n"
    )
    with pytest.raises(ConfigError, match="have several answers"):
        tasks_of(tmp_path, str(tmp_path / "chat.py"), own)
    with pytest.raises(UserError, match="no tasks are called"):
        tasks_of(tmp_path, "no_such_family", own)
    tasks = tasks_of(tmp_path, "letter_counting", own)
    assert len(tasks) == 200 and all(one.rollout is None for one in tasks)
