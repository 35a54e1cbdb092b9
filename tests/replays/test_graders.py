"""Graders and tasks by their names, and everything that is refused before anything is graded."""

import re

import pytest
from support.chat_server import ChatHandler, threaded

from ttrl import Task
from ttrl.errors import GraderError, RunFolderError, TaskError, UserError
from ttrl.replays.replay import replay


def inverse(choice):
    return float(choice.message.content == "no"), {"length": len(choice.message.content)}


def tasks_of(run, *numbers):
    def grader(choice):
        return float(choice.message.content == "no")

    return [Task(run.sample(1, task, 0).messages, grader, id=f"task/{task}") for task in numbers]


def test_graders_of_tasks(run):
    result = run.replay(tasks=[*tasks_of(run, 1, 0), *tasks_of(run, 1)])
    assert result.total.changed == 24 and result.total.mean_after == 0.5


def test_rollouts_without_a_task(run):
    other = Task([{"role": "user", "content": "another question"}], inverse, id="task/0")
    with pytest.raises(
        TaskError,
        match=r"1 task of iteration 1 is not in .*'task/0' \(some ids match",
    ) as raised:
        run.replay(tasks=[*tasks_of(run, 1), other])
    assert "--skip-missing" in str(raised.value)
    assert not (run.folder.path / "replays").exists() or not list(
        (run.folder.path / "replays").iterdir()
    )
    result = run.replay(tasks=[*tasks_of(run, 1), other], skip_missing=True)
    assert (
        result.total.rollouts,
        result.total.left_out,
        result.total.compared,
        result.total.groups,
    ) == (24, 12, 12, 3)
    assert {row["task_id"] for number in (1, 2, 3) for row in run.rows(result, number)} == {
        "task/1"
    }
    with pytest.raises(TaskError, match=r"no rollout of .* has a task"):
        run.replay(tasks=[other], skip_missing=True)


# What is refused


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("graders", "give module:name or path/to/file.py:name"),
        ("nowhere_at_all:f", "no module 'nowhere_at_all'"),
        ("nowhere.py:f", "nowhere.py is not a file"),
        (
            "broken:f",
            r"importing broken failed: ModuleNotFoundError: No module named 'nowhere_at_all' "
            r"\(broken.py, line 1\)",
        ),
        (
            "broken.py:f",
            r"importing broken.py failed: ModuleNotFoundError: .* \(broken.py, line 1\)",
        ),
        ("exits.py:f", r"importing exits.py failed: SystemExit: 3"),
        ("graders:strct", "did you mean 'strict'"),
        ("graders:number", "cannot be called"),
        ("graders:Class", "is a class; give an instance"),
        (
            "graders:three",
            r"takes \(a, b, c\); a grader must take \(choice\) or \(choice, sample\)",
        ),
        ("graders:named", r"takes \(choice, key\)"),
    ],
)
def test_references_that_lead_nowhere(run, place, reference, said):
    place("broken", "import nowhere_at_all")
    place("exits", "import sys; sys.exit(3)")
    place(
        "graders",
        """
        number = 3
        class Class: pass
        def strict(choice): return 1
        def three(a, b, c): return 1
        def named(choice, *, key): return 1
        """,
    )
    with pytest.raises(UserError, match=said):
        run.replay(reference)
    assert not (run.folder.path / "replays").exists()


def test_tasks_that_are_none(run, place):
    place("mine", "tasks = [1]\ndef fails(): raise KeyError('x')\nnothing = []")
    for name, said in (
        ("tasks", "1 of 1 are not Tasks"),
        ("fails", "failed: KeyError: 'x'"),
        ("nothing", "is empty; give at least one task"),
    ):
        with pytest.raises(UserError, match=said):
            run.replay(tasks=f"mine:{name}")


def test_grader_or_tasks(run):
    for arguments in ({}, {"grader": inverse, "tasks": tasks_of(run, 0)}):
        with pytest.raises(UserError, match="but not both"):
            run.replay(**arguments)


def test_runs_that_are_none(run, tmp_path):
    with pytest.raises(RunFolderError, match=r"does not exist; .*there are: run"):
        replay(tmp_path / "rnu", grader=inverse)
    (tmp_path / "empty/iterations/0001").mkdir(parents=True)
    with pytest.raises(RunFolderError, match="has no rollouts yet"):
        replay(tmp_path / "empty", grader=inverse)


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [("2", [2]), ("1-3", [1, 2, 3]), ("3, 1", [1, 3]), ([3, 2, 3], [2, 3]), ("1-2,3", [1, 2, 3])],
)
def test_chosen_iterations(run, wanted, numbers):
    assert [one.iteration for one in run.replay(inverse, iterations=wanted).iterations] == numbers


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("4", "iterations 4 have no rollouts .* choose from 1 to 3"),
        ("3-1", "give numbers"),
        ("x", "give numbers"),
    ],
)
def test_wrong_iterations(run, wanted, said):
    with pytest.raises(UserError, match=said):
        run.replay(inverse, iterations=wanted)


def test_a_grader_that_always_fails_ends_it_and_leaves_nothing(run):
    def grader(choice):
        raise KeyError("answer")

    with pytest.raises(
        GraderError,
        match=r"iteration 1: all 8 samples of 2 tasks failed, 8 of them with: (?s:.*)KeyError: "
        r"'answer'",
    ):
        run.replay(grader)
    assert list((run.folder.path / "replays").iterdir()) == []


def test_changed_rollouts_are_refused(run):
    path = run.folder.iteration(2).path / "rollouts.jsonl"
    path.write_text(path.read_text().replace("yes", "yea"))
    with pytest.raises(RunFolderError, match="was changed after it was written"):
        run.replay(inverse)


def test_folders_that_are_something_else(run, tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/a.txt").write_text("a")
    for output in (tmp_path / "letters", run.folder.path):
        with pytest.raises(RunFolderError, match="is not a replay; give another --output"):
            run.replay(inverse, output=output)


# Of groups


def shortest(choices):
    """1 for the replies that no other one is shorter than."""
    least = min(len(choice.message.content) for choice in choices)
    return [
        (float(len(choice.message.content) == least), {"of": float(len(choices))})
        for choice in choices
    ]


def test_a_grader_of_groups_by_the_name_of_its_argument(run, place):
    place(
        "groups",
        "def shortest(choices):\n    return [float(len(c.message.content) == 2) for c in choices]",
    )
    for grader in (shortest, "groups:shortest"):
        result = run.replay(grader)
        assert [row["reward"] for row in run.rows(result, 2)] == [0.0, 1.0, 1.0, 1.0] * 2
        assert result.total.rollouts == 24 and result.total.mean_after == 0.5
    again = run.replay("groups:shortest")
    assert again.folder == result.folder and again.total == result.total


def test_graders_of_groups_of_tasks_are_added_to_their_own(run):
    def own(choice):
        if choice.message.content == "yes":
            raise ValueError("not this one")
        return 0.25

    messages = [run.sample(1, task, 0).messages for task in (0, 1)]
    tasks = [
        Task(messages[0], own, id="task/0", group_grader=shortest),
        Task(messages[1], id="task/1", group_grader=shortest),
    ]
    result = run.replay(tasks=tasks)
    rows = run.rows(result, 1)
    assert [row["reward"] for row in rows] == [None, None, 1.25, 1.25, 0.0, 0.0, 1.0, 1.0]
    # Without those that failed.
    assert [row["metrics"].get("of") for row in rows] == [None, None, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0]
    assert rows[0]["error"].startswith("GraderError") and "not this one" in rows[0]["error"]


def test_what_a_grader_of_groups_gets_wrong_costs_its_group(run):
    def picky(choices):
        if choices[0].message.content == "maybe":
            raise KeyError("first")
        return [1.0, GraderError("no verdict"), 0.0, 0.0]

    run.change(3, 4, text="maybe")
    rows = run.rows(run.replay(picky), 3)
    assert [row["reward"] for row in rows] == [1.0, None, 0.0, 0.0] + [None] * 4
    assert rows[1]["error"] == "GraderError: no verdict" and all(
        "KeyError: 'first'" in row["error"] for row in rows[4:]
    )


def test_a_judge_that_compares_replies(run, place):
    class Prefers(ChatHandler):
        """The reply that says no, in whatever order it is shown."""

        def reply(self, body):
            first, second = re.findall(
                r"Reply \d:\s*<[^>]*>\s*(\w+)", body["messages"][0]["content"]
            )
            return f"Better: {'tie' if first == second else 1 if first == 'no' else 2}", "stop"

    with threaded(Prefers) as url:
        place(
            "judged",
            f"""
            from ttrl.judges.relative import Pairwise
            judge = Pairwise(model="m", base_url="{url}", rubric="Does it say no?")
            """,
        )
        result = run.replay("judged:judge", iterations=[1])
    rows = run.rows(result, 1)
    assert [row["reward"] for row in rows] == pytest.approx([1 / 6, 1 / 6, 5 / 6, 5 / 6] * 2)
    assert all(row["metrics"]["position_bias"] == 0.0 for row in rows)
