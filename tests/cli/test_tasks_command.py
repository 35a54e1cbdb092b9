"""`ttrl tasks new` and `ttrl tasks try`: the template runs at once; prompts, replies, grades and
every mistake are shown.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.chat_server import ChatHandler, threaded

from ttrl import cli
from ttrl.cli.new.script import Script
from ttrl.cli.try_tasks import try_tasks
from ttrl.errors import ServerError, TaskError, UserError
from ttrl.tasks.reference import load_tasks
from ttrl.tasks.task import Task


@pytest.fixture
def template(tmp_path: Path) -> Iterator[Path]:
    yield Script("my_first_task").write(tmp_path / "my_first_task.py")
    sys.modules.pop("my_first_task", None)
    sys.path[:] = [place for place in sys.path if place != str(tmp_path)]


def shown(tasks: list[Task], **options) -> tuple[bool, str]:
    lines: list[str] = []
    fine = try_tasks(tasks, lines.append, **options)
    return fine, "\n".join(lines)


def test_the_template_runs_at_once_and_grades(template: Path) -> None:
    tasks = load_tasks(str(template), 3)
    assert [task.id for task in tasks] == [f"my_first_task/train/0/{number}" for number in range(3)]
    answers = [sum(map(int, re.findall(r"\d+", task.messages[0]["content"]))) for task in tasks]
    fine, text = shown(tasks, replies=[f"The answer is {answers[0]}.", "no idea", "9" * 5000])
    assert fine
    assert tasks[0].messages[0]["content"] in text
    grades = re.findall(r"^  reward (.+)$", text, re.M)
    assert grades[:3] == [
        "1, right 1, has_number 1",
        "0, right 0, has_number 0",
        "0.1, right 0, has_number 1",
    ]
    assert len(grades) == 9
    get_tasks = sys.modules["my_first_task"].get_tasks
    train, validation = (
        {task.messages[0]["content"] for task in get_tasks(split, 2000)}
        for split in ("train", "validation")
    )
    assert train and validation and not train & validation


def test_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From nothing to grades, as a person does it; the file needs no other argument."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["tasks", "new", "sums_of_two.py"]) == 0
    assert capsys.readouterr().out.startswith("sums_of_two.py\nNext: ttrl tasks try sums_of_two.py")
    assert cli.main(["tasks", "try", "sums_of_two.py", "--n", "2", "--reply", "x"]) == 0
    text = capsys.readouterr().out
    assert text.count("reward 0, right 0, has_number 0") == 2
    assert "task 2 of 2: sums_of_two/train/0/1" in text
    del sys.modules["sums_of_two"]


def test_a_file_may_call_its_list_tasks_and_runs_once(tmp_path: Path) -> None:
    path = tmp_path / "listed_tasks.py"
    path.write_text(
        "from ttrl import Task\nwith open(__file__ + '.runs', 'a') as file:\n    file.write('x')\n"
        "tasks = [Task([{'role': 'user', 'content': 'q'}], lambda choice: 1.0, id='one')]\n"
    )
    try:
        assert [task.id for task in load_tasks(str(path), 3)] == ["one"]
        assert Path(f"{path}.runs").read_text() == "x"
    finally:
        sys.modules.pop("listed_tasks", None)
        sys.path[:] = [place for place in sys.path if place != str(tmp_path)]


def test_without_replies_the_prompts_are_shown(
    template: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tasks", "try", str(template), "--n", "1"]) == 0
    text = capsys.readouterr().out
    assert (
        "End your reply with the number." in text
        and "--reply TEXT" in text
        and "reward" not in text
    )


def test_prompts_in_parts_are_shown_as_texts() -> None:
    parts = [{"type": "text", "text": "Look here"}, {"type": "text", "text": "and there"}]
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "nothing"},
    ]
    fine, text = shown([Task(messages, lambda choice: 1.0)])
    assert fine and "user:\n    Look here\n    and there\n" in text and "'type': 'text'" not in text
    assert "'name': 'look'" in text and "tool:\n    nothing" in text


def test_a_file_is_not_written_over(
    template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tasks", "new", str(template)]) == 2
    assert "exists already" in capsys.readouterr().err
    for name in ("my-task.py", "my_task", "1.py"):
        with pytest.raises(UserError, match="is not a Python module name"):
            Script((tmp_path / name).stem).write(tmp_path / name)
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("content", "reference", "message"),
    [
        ("get_tasks = 3", "", "get_tasks is of type int; give a list of Task"),
        ("def get_tasks(): return []", "", "get_tasks is empty; give at least one task"),
        ("tasks = []", "", "file.py:tasks is empty; give at least one task"),
        ("def get_tasks(): return ['a']", "", "1 of 1 are not Tasks, the first is of type str"),
        ("def get_tasks(): 1 / 0", "", "calling it failed: ZeroDivisionError: division by zero"),
        (
            "from ttrl.errors import UserError\ndef get_tasks(): raise UserError('no data here')",
            "",
            "no data here",
        ),
        ("def get_tasks(:", "", "failed: SyntaxError"),
        ("def other(): pass", "", "has no 'get_tasks'"),
        ("import nothing_of_that_name", "", "nothing_of_that_name"),
        ("def get_tasks(): pass", ":others", "did you mean 'get_tasks'|has no 'others'"),
    ],
)
def test_files_without_tasks(tmp_path: Path, content: str, reference: str, message: str) -> None:
    path = tmp_path / "faulty_task_file.py"
    path.write_text(content, encoding="utf-8")
    try:
        with pytest.raises(UserError) as caught:
            load_tasks(f"{path}{reference}", 3)
        assert any(part in str(caught.value) for part in message.split("|"))
    finally:
        sys.modules.pop("faulty_task_file", None)
        sys.path[:] = [place for place in sys.path if place != str(tmp_path)]


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a file"):
        load_tasks(str(tmp_path / "none.py"), 3)
    with pytest.raises(UserError, match="--n is 0"):
        load_tasks("anything.py", 0)
    task = Task(messages=[{"role": "user", "content": "?"}], grader=lambda choice: 1.0)
    with pytest.raises(UserError, match="a model or replies, not both"):
        shown([task], model="http://127.0.0.1:1/v1", replies=["x"])
    with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:1/v1: Connection error"):
        shown([task], model="http://127.0.0.1:1/v1")
    with pytest.raises(UserError, match=r"config\.json"):
        shown([task], model=str(tmp_path))


def test_graders_of_every_kind_and_their_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    async def later(choice) -> float:
        return float(choice.message.content == "yes")

    def broken(choice) -> float:
        raise KeyError("answer")

    async def play(chat) -> float:
        return 1.0

    question = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "parts"}]},
    ]
    tasks = [
        Task(messages=question, grader=grader, id=grader.__name__) for grader in (later, broken)
    ]
    tasks.append(Task(messages=question, grader=lambda choice: "much", id="no number"))
    tasks.append(Task(messages=question, rollout=play, id="play"))
    fine, text = shown(tasks, replies=["yes"])
    assert not fine
    parts = text.split("━━ task ")[1:]
    assert "reward 1" in parts[0] and "parts" in parts[0]
    assert re.search(r"no grade: test_tasks_command\.py, line \d+: KeyError: 'answer'", parts[1])
    assert "no grade: GraderError" in parts[2] and "returned 'much'" in parts[2]
    assert "which need a model: --model" in parts[3]


class _Server(ChatHandler):
    models = ("small",)

    def reply(self, body: dict) -> tuple[str, str]:
        assert body["model"] == "small" and body["max_tokens"] == 9
        return "It is 12.", "length"


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    with threaded(_Server) as address:
        yield address


def test_a_server_is_asked(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    def only_twelve(choice) -> float:
        assert choice.message.content == "It is 12.", "another reply"
        return 1.0

    def broken(choice) -> float:
        raise TaskError("this one is broken")

    tasks = [
        Task(messages=[{"role": "user", "content": "6 + 6?"}], grader=grader)
        for grader in (only_twelve, only_twelve)
    ]
    fine, text = shown(tasks, model=address, samples=2, max_tokens=9)
    assert fine
    assert text.count("It is 12. [ended: length]") == text.count("reward 1") == 4
    fine, text = shown(
        [Task(messages=tasks[0].messages, grader=broken)], model=address, max_tokens=9
    )
    assert not fine and "this one is broken" in text


def test_words_of_a_model_and_of_a_grader_do_not_act_on_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)  # put back afterwards, as the command adds to it
    file = tmp_path / "words_of_a_model.py"
    file.write_text(
        "from ttrl import Task\n\n\ndef grader(choice):\n    raise "
        "KeyboardError(choice.message.content)\n\n\n"
        "class KeyboardError(Exception):\n    pass\n\n\ntasks = [Task([{'role': 'user', "
        "'content': '\\x1b[31mred'}], grader)]\n"
    )
    assert cli.main(["tasks", "try", str(file), "--reply", "\x1b[2Jgone"]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out and out.count("\\x1b[2Jgone") == 2 and "\\x1b[31mred" in out
