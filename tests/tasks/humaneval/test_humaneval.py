"""HumanEval: which code of a reply is run, and the published problems."""

import concurrent.futures
import json
import sys

import pytest

from ttrl.errors import TaskError
from ttrl.tasks.humaneval import sandbox
from ttrl.tasks.humaneval.code_blocks import read_code
from ttrl.tasks.humaneval.tasks import (
    HumanEvalGrader,
    HumanEvalProblem,
    get_humaneval_tasks,
    parse_row,
)

WHY_NOT = sandbox.why_not()
needs_sandbox = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

PROMPT = (
    "from typing import List\n\n\ndef helper(x):\n    return x\n\n\ndef add(a: int, b: int) -> "
    'int:\n    """Sum."""\n'
)
TEST = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n"
PROBLEM = HumanEvalProblem("x/1", PROMPT, "add", TEST, "    return a + b\n")
FUNCTION = "def add(a, b):\n    return a + b"


def run_here(source, limits):
    """Run a program without a sandbox: these are ours."""
    try:
        exec(source, {"__name__": "__main__"})
    except (Exception, SystemExit) as error:  # noqa: BLE001 - of any program
        return sandbox.SandboxOutcome(False, type(error).__name__)
    return sandbox.SandboxOutcome(True)


@pytest.mark.parametrize(
    ("content", "right"),
    [
        (f"```python\n{FUNCTION}\n```", True),
        (f"```py\n{FUNCTION}\n```", True),
        (f"```\n{FUNCTION}\n```", True),
        (f"```Python3\r\n{FUNCTION}\n```", True),
        (FUNCTION, True),
        (f"Here it is:\n\n```python\n{FUNCTION}\n```\n\nIt adds.", True),
        (f"Voilà :\n```python\n{FUNCTION}\n```", True),
        (f"```python\n{FUNCTION}", True),  # cut off behind its end
        (f"```python\nimport math\n\n{FUNCTION}\n```", True),
        (f"```python\n{PROMPT}    return a + b\n```", True),
        ("```python\n    return a + b\n```", True),
        ("    return a + b", True),
        ("    return helper(a) + b", True),
        ("```python\ndef add(a, b):\n    return helper(a) + b\n```", True),
        (f"```python\n{FUNCTION}\n```\nUse it so:\n```python\nprint(add(1, 2))\n```", True),
        (f"```python\ndef add(a, b): return 0\n```\nBetter:\n```python\n{FUNCTION}\n```", True),
        (
            f"<think>```python\ndef add(a, b): return 0\n```</think>\n```python\n{FUNCTION}\n```",
            True,
        ),
        (f"```python\n{FUNCTION}\n\ndef other(): pass\n```", True),
        (f"```python\n# Größe ٣\n{FUNCTION}\n```", True),
        # Behind the prompt, whose docstring is a body.
        ("```python\nadd = lambda a, b: a + b\n```", True),
        (f"```python\n{FUNCTION}\n```\n```python\ndef add(a, b): return 0\n```", False),
        ("```python\ndef add(a, b):\n    return a - b\n```", False),
        ("```python\ndef plus(a, b):\n    return a + b\n```", False),
        ("```python\ndef add(a, b)\n    return a + b\n```", False),
        ("```python\nclass add:\n    pass\n```", False),
        ("```python\ndef add(a, b):\n    raise SystemExit(0)\n```", False),
        ("```python\ndef add(a, b):\n    exit()\n```", False),
        (f"<think>```python\n{FUNCTION}\n```", False),
        (f"<think>{FUNCTION}</think>", False),
        ("The answer is a + b.", False),
        ("```", False),
        ("``````", False),
        ("    pass", False),
        ("", False),
        (None, False),
        ("    return a + b\n" + "#" * 200_000, False),
    ],
)
def test_grader(reply, content, right):
    assert HumanEvalGrader(PROBLEM, run=run_here)(reply(content))[0] == float(right)


def test_long_replies(grade_long_replies):
    grader = HumanEvalGrader(
        PROBLEM, run=lambda source, limits: sandbox.SandboxOutcome(False, "ended")
    )
    grade_long_replies(grader, "def add", "\ndef add", "```\ndef add(\n", "\ndef ")
    assert read_code("x```python\ny\n```z", "add") == "y\n"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"entry_point": "sub"}, "'sub' is not defined in the prompt"),
        ({"test": "x"}, "no function check"),
        ({"prompt": ""}, "prompt is ''"),
    ],
)
def test_bad_rows(tmp_path, changes, words):
    row = {
        "task_id": "x/1",
        "prompt": PROMPT,
        "entry_point": "add",
        "test": TEST,
        "canonical_solution": "    pass",
    }
    (tmp_path / "x.jsonl").write_text(json.dumps({**row, **changes}))
    with pytest.raises(TaskError, match=r"x\.jsonl, line 1: .*" + words):
        get_humaneval_tasks(path=tmp_path / "x.jsonl")
    with pytest.raises(TaskError, match="humaneval has 'test'"):
        get_humaneval_tasks("train", path=tmp_path / "x.jsonl")


def test_no_tasks_without_a_sandbox(tmp_path, monkeypatch):
    row = {
        "task_id": "x/1",
        "prompt": PROMPT,
        "entry_point": "add",
        "test": TEST,
        "canonical_solution": "    pass",
    }
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(TaskError, match="sandbox: darwin has no namespaces"):
        get_humaneval_tasks(path=tmp_path / "x.jsonl")


@needs_sandbox
def test_in_the_sandbox(reply):
    grader = HumanEvalGrader(PROBLEM)
    assert grader(reply(grader.reference())) == (1.0, {"ran": 1.0})
    assert grader(reply("    return a - b")) == (0.0, {"ran": 1.0})
    assert grader(reply("    import os; os._exit(0)")) == (0.0, {"ran": 0.0})


@needs_sandbox
def test_some_published_problems(shared, reply):
    for task in get_humaneval_tasks(n=3, path=shared / "humaneval" / "HumanEval.jsonl"):
        assert task.grader(reply(task.grader.reference()))[0] == 1.0


@needs_sandbox
@pytest.mark.e2e
@pytest.mark.long
def test_all_published_problems(shared, reply):
    """Every solution passes; with the next problem's solution, none does.

    Long: only this runs all 164 in processes of their own. Some of them, with hostile replies:
    above.
    """
    tasks = get_humaneval_tasks(path=shared / "humaneval" / "HumanEval.jsonl")
    assert len(tasks) == 164
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert (
            list(pool.map(lambda t: t.grader(reply(t.grader.reference()))[0], tasks)) == [1.0] * 164
        )
        others = [tasks[i - 1].grader.reference() for i in range(164)]
        assert (
            list(pool.map(lambda t, text: t.grader(reply(text))[0], tasks, others)) == [0.0] * 164
        )


def test_rows(shared):
    lines = (shared / "humaneval" / "HumanEval.jsonl").read_text(encoding="utf-8").splitlines()
    assert len({parse_row(json.loads(line)).id for line in lines}) == 164
