"""`ttrl new`: six questions, and a script that plans, checks and trains."""

import argparse
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ttrl import cli
from ttrl.cli.new.command import add_new, run_new
from ttrl.cli.new.script import Script
from ttrl.errors import UserError
from ttrl.registries import FAMILIES
from ttrl.tasks.reference import load_tasks

TRAINED = [name for name in FAMILIES.names() if not FAMILIES[name].example]


def asked(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_new(parser)
    return parser.parse_args(words)


class Plans:
    """Plans without a process: an iteration takes 10 s, the start 100 s."""

    def __init__(self, *, fits: bool = True) -> None:
        self.scripts: list[Script] = []
        self.gpus: list[str | None] = []
        self.fits = fits

    def __call__(self, script: Script, how: Any) -> str:
        self.scripts.append(script)
        self.gpus.append(how["gpu"])
        warnings = [] if self.fits or script.changes else ["does not fit: 99 GiB of 80"]
        seconds = {"iteration": 10.0, "run": 110.0}
        if how.get("json"):
            return json.dumps({"seconds": seconds, "warnings": warnings})
        return f"Plan: {script.iterations} iterations"


def started(name: str, *options: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, name, *options], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_script_is_written_with_its_plan_and_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan is the script's own, by `--plan`."""
    monkeypatch.chdir(tmp_path)
    options = ["--model", "tiny", "--duration", "90 s", "--held-out", "20", "--goal", "0.9"]
    assert cli.main(["new", "sums.py", *options, "--yes"]) == 0
    said = capsys.readouterr().out
    text = (tmp_path / "sums.py").read_text()
    assert "Plan: tiny" in said and "#  Plan: tiny" in text and "stop_at=0.9" in text
    assert "1024 tasks" in started("sums.py", "--check", cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["sums.py"]


def test_what_is_written_trains(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tasks and its settings, through the loop on fake parts and a tiny model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    script = Path("written_by_new.py")
    assert run_new(asked(str(script), "--model", "tiny", "--yes"), plan=Plans()) == 0
    try:
        tasks = load_tasks(str(script), 6, split="train")
        held_out = load_tasks(str(script), 2, split="validation")
    finally:
        sys.modules.pop("written_by_new", None)
    answers = [sum(map(int, _numbers(task.messages[0]["content"]))) for task in tasks]
    assert len(set(answers)) > 1
    world.answer = lambda prompt, k, version: str(sum(map(int, _numbers(prompt))) + k % 2)
    world.train(tasks, held_out, iterations=1, validation_metric="right", max_tokens=64)
    assert world.rows()[-1]["validation"]["right"] == 1.0 and world.rows()[-1]["trained"]


def _numbers(text: str) -> list[str]:
    return [word.rstrip("?") for word in text.split() if word.rstrip("?").isdigit()]


def test_a_person_is_asked_until_the_answer_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter(
        [
            "countdwn",
            "countdown",
            "no such model",
            "tiny",
            "H1000",
            "8xH100",
            "soon",
            "0 h",
            "2h",
            "-1",
            "",
            "2",
            "0.75",
        ]
    )
    questions: list[str] = []

    def ask(question: str) -> str:
        questions.append(question)
        return next(answers)

    plans = Plans()
    assert run_new(asked(str(tmp_path / "mine.py")), ask, plans) == 0
    assert next(answers, None) is None
    assert questions[0].endswith("[own]: ") and len(questions) == 13
    said = capsys.readouterr().err
    for words in ("there is no task 'countdwn'", "no model 'no such model'", "gpu 'H1000' is unknown",
                  "'soon' is no duration", "'-1' is no number of tasks", "'2' is no goal"):  # fmt: skip
        assert words in said
    script = plans.scripts[-1]
    assert (script.task, script.model, script.held_out) == ("countdown", "tiny", 64)
    assert (script.goal, script.on_gpu, set(plans.gpus)) == (0.75, True, {"8xH100"})
    assert script.iterations == (7200 - 100) // 10


def test_the_duration_gives_at_least_one_iteration_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, given, count in (("a", "5 s", 1), ("b", "130 s", 3), ("c", "9 d", 1000)):
        file = tmp_path / f"{name}.py"
        assert run_new(asked(str(file), "--duration", given, "--yes"), plan=Plans()) == 0
        assert f"iterations={count}," in file.read_text()
    assert capsys.readouterr().out.count("longer than asked for") == 1


def test_a_model_that_does_not_fit_is_trained_by_adapters(tmp_path: Path) -> None:
    file = tmp_path / "large.py"
    options = ("--model", "Qwen/Qwen2.5-7B-Instruct", "--machine", "H100", "--yes")
    assert run_new(asked(str(file), *options), plan=Plans(fits=False)) == 0
    assert '"lora_rank": 32' in file.read_text()


def test_the_script_of_a_persons_own_task_fits_a_page() -> None:
    assert all(len(line) <= 100 for line in Script("my_task").text().splitlines())


@pytest.mark.parametrize("family", TRAINED)
def test_the_function_of_a_family_takes_what_the_script_gives(family: str) -> None:
    source = "=data" if FAMILIES[family].data == "" else ""
    text = Script("mine", task=family + source).text()
    compile(text, "mine.py", "exec")
    assert all(len(line) <= 100 for line in text.splitlines())
    names = {"n": 1, "seed": 0, **FAMILIES[family].options}
    if FAMILIES[family].data is not None:
        names["path"] = "data"
        assert "path=arguments.data" in text and "        data=" in text
    inspect.signature(FAMILIES.load(family, FAMILIES[family].tasks)).bind("train", **names)


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "there.py"
    file.write_text("mine")
    assert cli.main(["new", str(file), "--yes"]) == 2
    assert "exists already" in capsys.readouterr().err and file.read_text() == "mine"
    new = str(tmp_path / "new.py")
    for options, words in (
        (["--task", "chess", "--yes"], "chess needs data"),
        (["--task", "openenv", "--yes"], "stands for many environments"),
        (["--goal", "2", "--yes"], "--goal: '2' is no goal"),
        (["--goal", "high", "--yes"], "--goal: 'high' is no goal; write a number above 0"),
        (["--model", "x'y", "--yes"], "is no model"),
        (["--task", "gsm8k"], "nobody can answer here"),
    ):
        assert cli.main(["new", new, *options]) == 2
        assert words in capsys.readouterr().err
    assert cli.main(["new", str(tmp_path / "my-task.py"), "--yes"]) == 2
    assert "is not a Python module name" in capsys.readouterr().err
    assert not Path(new).exists()

    def nobody(question: str) -> str:
        raise EOFError

    with pytest.raises(UserError, match="nobody answers"):
        run_new(asked(new), nobody, Plans())


def test_a_run_that_cannot_be_planned_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "nothing.jsonl"
    new = tmp_path / "new.py"
    assert cli.main(["new", str(new), "--task", f"gsm8k={data}", "--model", "tiny", "--yes"]) == 2
    said = capsys.readouterr().err
    assert "nothing is written" in said and "nothing.jsonl" in said and "Traceback" not in said
    assert not new.exists()
