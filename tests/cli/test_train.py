"""`ttrl train`: a script, a recipe by its name, a file of settings; and the scaffold that it trains
with.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from ttrl import cli
from ttrl.cli.new.script import Script
from ttrl.cli.runs import run_train

SETTINGS = """
model: tiny
iterations: 3
tasks_per_iteration: 4
samples_per_task: 2
max_tokens: 8
seq_len: 64
training: {lr: 1.0e-4}
tasks: TASKS
validation_tasks: TASKS
"""
TASKS = """
from ttrl import Task

def get_tasks(split):
    return [Task([{"role": "user", "content": f"{split} {n}"}], len, id=f"{split}/{n}") for n in range(6)]
"""


def ttrl(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ttrl.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def trained_by(*arguments: str) -> list:
    """What `ttrl train` would train."""
    seen: list = []
    given = cli.make_parser().parse_args(["train", *arguments])
    assert run_train(given, lambda *given: seen.append(given)) == 0
    return seen


@pytest.mark.parametrize("asked", ["structured_output", "my_tasks.py"])
def test_a_file_of_settings_names_its_tasks(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_tasks.py").write_text(TASKS)
    (tmp_path / "mine.yaml").write_text(SETTINGS.replace("TASKS", asked))
    ((config, tasks, held_out),) = trained_by("mine.yaml", "--set", "lr=1e-3", "seed=2")
    assert (config.run, config.seed, config.iterations) == ("runs/mine", 2, 3)
    assert config.recipe_settings["lr"] == 1e-3
    if asked == "my_tasks.py":
        assert [task.id for task in tasks] == [f"train/{n}" for n in range(6)]
        assert [task.id for task in held_out] == [f"validation/{n}" for n in range(6)]
    else:
        assert (len(tasks), len(held_out)) == (1024, 200)
        assert not {task.id for task in tasks} & {task.id for task in held_out}


def test_a_function_in_a_file_is_asked_for_as_many_tasks_as_a_recipe_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its default, 32 in what `ttrl tasks new` writes, is for trying it."""
    monkeypatch.chdir(tmp_path)
    Script("my_task").write(tmp_path / "my_task.py")
    (tmp_path / "mine.yaml").write_text(SETTINGS.replace("TASKS", "my_task.py"))
    ((_, tasks, held_out),) = trained_by("mine.yaml")
    assert (len(tasks), len(held_out)) == (1024, 64)


def test_a_setting_without_a_value_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(SETTINGS.replace("TASKS", "structured_output"))
    assert cli.main(["train", str(tmp_path / "mine.yaml"), "--set", "lr", "2e-5"]) == 2
    said = capsys.readouterr().err
    assert "lr has no value; write --set lr=VALUE, without a blank" in said
    assert "'2e-5' is not a setting" in said


def test_every_mistake_of_a_file_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("model: tiny\niterations: 0\nlearning_rate: 1\n")
    assert cli.main(["train", "mine.yaml", "--set", "zzz=1"]) == 2
    said = capsys.readouterr().err
    for text in (
        "names no tasks",
        "iterations is 0",
        "write training={'lr': …}",
        "neither a run nor a recipe has a setting 'zzz'",
    ):
        assert text in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", [["train"], ["plan"], ["plan", "--tasks", "broken.py"]])
def test_faults_of_settings_and_of_tasks_come_together(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    own = "tasks: broken.py\nvalidation_tasks: 7\n"
    (tmp_path / "mine.yaml").write_text(f"model: tiny\niterations: 0\n{own}")
    assert cli.main([command[0], "mine.yaml", *command[1:], "--set", "zzz=1"]) == 2
    said = capsys.readouterr().err
    for text in ("iterations is 0", "a setting 'zzz'", "No module named 'nothing_of_this_name'"):
        assert said.count(text) == 1, said
    assert said.count("validation_tasks is 7") == ("--tasks" not in command)
    assert "there are no tasks" not in said


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("structured_outpt", "did you mean 'structured_output'?"),
        ("nothing.py", "nothing.py does not exist; `ttrl tasks new nothing.py` writes a script"),
        ("nothing.yaml", "nothing.yaml cannot be read as a config"),
        ("only_tasks.py", "only_tasks.py defines tasks and starts no training"),
        ("empty.py", "empty.py is empty; remove it, and `ttrl tasks new empty.py` writes a script"),
        ("empty.yaml", "empty.yaml names no tasks; write tasks: FILE.py"),
    ],
)
def test_what_cannot_be_trained(what: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "only_tasks.py").write_text(TASKS)
    (tmp_path / "empty.py").touch()
    (tmp_path / "empty.yaml").touch()
    ended = ttrl("train", what, cwd=tmp_path)
    assert ended.returncode == 2
    assert text in ended.stderr


def test_a_recipe_by_its_name_takes_its_own_options(tmp_path: Path) -> None:
    ended = ttrl("train", "sort-letters", "--check", "--set", "lr=1e-3", cwd=tmp_path)
    assert (ended.returncode, ended.stdout.count("the settings are right")) == (0, 1)
    ended = ttrl("train", "sort_letters", "--check", "--set", "learning=1", cwd=tmp_path)
    assert ended.returncode == 1
    assert "neither a run nor a recipe has a setting 'learning'" in ended.stderr


def test_the_scaffold_is_a_recipe(tmp_path: Path) -> None:
    Script("my_task").write(tmp_path / "my_task.py")
    ended = ttrl(
        "train",
        "my_task.py",
        "--model",
        "tiny",
        "--seed",
        "3",
        "--overfit",
        "4",
        "--check",
        cwd=tmp_path,
    )
    assert (ended.returncode, ended.stdout.count("the settings are right")) == (0, 1)
    assert ended.stdout.startswith("4 tasks")


def test_the_scaffold_can_be_swept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each run of a sweep is a command that the script understands."""
    script = Script("my_task").write(tmp_path / "my_task.py")
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(
        f"recipe: {script}\nruns: {tmp_path}/runs\nseeds: [0, 1]\ngrid: {{lr: [1.0e-4, 1.0e-5]}}\n"
    )
    assert cli.main(["sweep", str(sweep), "--list"]) == 0
    command = capsys.readouterr().out.splitlines()[-1].split()
    ended = subprocess.run(
        [sys.executable, *command, "--check"], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout.count("the settings are right")) == (0, 1)


def test_tasks_are_named_by_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(SETTINGS.replace("TASKS", "[gsm8k, math]"))
    for command in ("train", "plan"):
        assert cli.main([command, "mine.yaml"]) == 2
        said = capsys.readouterr().err
        assert "tasks is ['gsm8k', 'math']; name a family of `ttrl eval`, FILE.py" in said
        assert "validation_tasks is ['gsm8k', 'math']" in said


def test_a_value_that_is_no_yaml_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(SETTINGS.replace("TASKS", "structured_output"))
    assert cli.main(["train", "mine.yaml", "--set", "server_args={a: [1"]) == 2
    said = capsys.readouterr().err
    assert "'server_args={a: [1': '{a: [1' cannot be read" in said


def test_a_mistake_is_a_line_and_with_tracebacks_also_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "nothing.py"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("ttrl: error: nothing.py does not exist")
    monkeypatch.setenv("TTRL_TRACEBACK", "1")
    assert cli.main(["train", "nothing.py"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last)")
    assert said.endswith(line)
