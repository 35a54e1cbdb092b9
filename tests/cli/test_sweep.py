"""`ttrl sweep`: which runs a file means, that finished ones are not run again, and the comparison
at the end.
"""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from support.compared_runs import make_run

from ttrl import cli
from ttrl.cli.sweep import read_sweep
from ttrl.errors import UserError

RECIPE = """
    import os, pathlib, shutil, sys
    here, run = pathlib.Path(__file__).parent, pathlib.Path(sys.argv[sys.argv.index("--run") + 1])
    with open(here / "calls", "a") as calls:
        calls.write(run.name + "\\n")
    if run.name == os.environ.get("FAILS"):
        sys.exit(1)
    shutil.copytree(here / "made" / run.name, run)
"""


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.py").write_text(textwrap.dedent(RECIPE))

    def write(**values):
        path = tmp_path / "sweep.yaml"
        path.write_text(
            yaml.safe_dump({"recipe": "recipe.py", "runs": "runs/shape"} | values, sort_keys=False)
        )
        return path

    return write


def calls(folder):
    return (folder / "calls").read_text().split() if (folder / "calls").exists() else []


ARMS = {"wide": {"tasks_per_iteration": 32}, "deep": {"tasks_per_iteration": 8}}


def test_every_arm_with_every_combination_and_seed(sweep, capsys):
    path = sweep(
        arms=ARMS,
        grid={"training.lr": [1e-4, 0.5], "objective": ["ppo"]},
        seeds=[0, 3],
        arguments=["--iterations", 5],
    )
    commands = read_sweep(path).commands()
    assert len(commands) == 2 * 2 * 2
    assert list(commands)[:3] == [
        "wide,lr=0.0001,objective=ppo,seed=0", "wide,lr=0.0001,objective=ppo,seed=3",
        "wide,lr=0.5,objective=ppo,seed=0"
    ]  # fmt: skip
    assert commands["deep,lr=0.5,objective=ppo,seed=3"] == [
        *[
            "recipe.py",
            "--run",
            "runs/shape/deep,lr=0.5,objective=ppo,seed=3",
            "--seed",
            "3",
            "--iterations",
            "5",
        ],
        *["--set", "tasks_per_iteration=8", "training.lr=0.5", 'objective="ppo"'],
    ]
    assert cli.main(["sweep", str(path), "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 8 and not Path("runs").exists()


@pytest.mark.long
def test_a_recipe_by_its_name_over_models(sweep, capsys):
    """Each run has its model, in a folder of its own, and its command is one that the recipe takes.

    Long: only this runs the commands of a sweep over a built-in recipe.
    """
    path = sweep(
        recipe="letter_counting", grid={"model": ["tiny", "models/other"]}, arguments=["--check"]
    )
    commands = read_sweep(path).commands()
    assert list(commands) == ["model=tiny,seed=0", "model=models_other,seed=0"]
    for name, code, said in (
        ("tiny", 0, "the settings are right"),
        ("models_other", 1, "models/other"),
    ):
        command = [sys.executable, *commands[f"model={name},seed=0"]]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == code
        assert said in ended.stdout + ended.stderr


def test_what_is_finished_is_not_run_again_and_what_failed_is(sweep, tmp_path, capsys, monkeypatch):
    path = sweep(arms=ARMS, seeds=[0, 1], by="flops")
    for arm, settings in ARMS.items():
        for seed in (0, 1):
            make_run(tmp_path / "made" / f"{arm},seed={seed}", seed=seed, iterations=2, **settings)
    monkeypatch.setenv("FAILS", "wide,seed=1")
    assert cli.main(["sweep", str(path)]) == 2
    said = capsys.readouterr()
    assert "1 of 4 runs failed" in said.err and "\nwide  1 " in said.out
    assert calls(tmp_path) == ["wide,seed=0", "wide,seed=1", "deep,seed=0", "deep,seed=1"]
    monkeypatch.delenv("FAILS")
    assert cli.main(["sweep", str(path)]) == 0
    assert calls(tmp_path)[4:] == ["wide,seed=1"]
    said = capsys.readouterr().out
    assert "3 TFLOP" in said and "tasks_per_iteration" in said and "\nwide  2      2 2 " in said
    assert (tmp_path / "runs/shape/compare.html").is_file()
    assert cli.main(["sweep", str(path)]) == 0 and len(calls(tmp_path)) == 5
    names = {"wide,seed=0", "wide,seed=1", "deep,seed=0", "deep,seed=1"}
    path_of_finished = tmp_path / "runs/shape/sweep.json"
    finished = json.loads(path_of_finished.read_text())
    assert finished.keys() == names
    # As an older version wrote it.
    path_of_finished.write_text(json.dumps(read_sweep(path).commands()))
    assert cli.main(["sweep", str(path)]) == 0 and len(calls(tmp_path)) == 5


def test_what_is_finished_names_no_secret(sweep, tmp_path, monkeypatch):
    path = sweep(seeds=[0, 1], arguments=["-k", "sesame"])
    (tmp_path / "recipe.py").write_text("")
    monkeypatch.setattr(
        "ttrl.report.compared_runs.compare_runs",
        lambda *_, **__: (_ for _ in ()).throw(UserError("no runs")),
    )
    assert cli.main(["sweep", str(path)]) == 2
    text = (tmp_path / "runs/shape/sweep.json").read_text()
    assert "seed=1" in text and "sesame" not in text


def test_a_file_with_mistakes_is_refused_with_all_of_them(sweep):
    path = sweep(grids={}, seeds=["a"], by="hours", arms={"a": 3}, recipe=5)
    with pytest.raises(UserError, match=r"unknown key 'grids'(.|\n)*recipe is 5; it must be a str"):
        read_sweep(path)
    path = sweep(seeds=["a"], by="hours", arms={"a": 3}, grid={"lr": 1}, recipe="none.py")
    with pytest.raises(
        UserError,
        match=r"grid: lr(.|\n)*arms: a(.|\n)*seeds: 'a'(.|\n)*no recipe is called none.py(.|\n)*by "
        r"is 'hours'",
    ):
        read_sweep(path)
    with pytest.raises(UserError, match="defines a single run"):
        read_sweep(sweep())
    with pytest.raises(UserError, match="cannot be read"):
        read_sweep(path.with_name("nothing"))
