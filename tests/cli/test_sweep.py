"""`ttrl sweep`: which runs a file means, that finished ones are not run again, and the comparison
at the end.
"""

import argparse
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from support.compared_runs import make_run

from ttrl import cli
from ttrl.cli import sweep as sweep_command
from ttrl.cli.sweep import read_sweep
from ttrl.errors import ConfigError, UserError

RECIPE = """
    import os, pathlib, shutil, sys
    def train(run):
        here = pathlib.Path(__file__).parent
        with open(here / "calls", "a") as calls:
            calls.write(run.name + "\\n")
        if run.name == os.environ.get("FAILS"):
            sys.exit(1)
        shutil.copytree(here / "made" / run.name, run)
    train(pathlib.Path(sys.argv[sys.argv.index("--run") + 1]))
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


@pytest.mark.parametrize("option", ["--check", "--plan"])
def test_a_look_without_runs_compares_none_and_finishes_none(sweep, tmp_path, option):
    (tmp_path / "recipe.py").write_text("train = print\ntrain('the settings are right')\n")
    path = sweep(arms=ARMS)
    assert cli.main(["sweep", str(path), option]) == 0
    assert not list((tmp_path / "runs/shape").iterdir())


def test_what_is_finished_names_no_secret(sweep, tmp_path):
    path = sweep(seeds=[0, 1], arguments=["-k", "sesame"])
    (tmp_path / "recipe.py").write_text("train = print\ntrain()\n")
    assert cli.main(["sweep", str(path)]) == 2
    text = (tmp_path / "runs/shape/sweep.json").read_text()
    assert "seed=1" in text and "sesame" not in text


def test_a_file_with_mistakes_is_refused_with_all_of_them(sweep):
    path = sweep(grids={}, seeds=["a"], by="hours", arms={"a": 3}, recipe=5)
    with pytest.raises(UserError, match=r"unknown key 'grids'(.|\n)*recipe is 5; it must be a str"):
        read_sweep(path)
    path = sweep(seeds=["a"], by="hours", arms={"a": 3}, grid={"lr": 1}, recipe="none.py")
    with pytest.raises(ConfigError) as caught:
        read_sweep(path)
    for text in (
        "grid: lr",
        "arms: a",
        "seeds is ['a']",
        "none.py does not exist",
        "by is 'hours'",
    ):
        assert sum(text in problem for problem in caught.value.problems) == 1
    with pytest.raises(UserError, match="defines a single run"):
        read_sweep(sweep())
    for text, said in (("", "empty; remove it, and"), ("tasks = []", "starts no training")):
        path.with_name("recipe.py").write_text(text)
        with pytest.raises(UserError, match=f"recipe: recipe.py .*{said}"):
            read_sweep(sweep(seeds=[0, 1]))
    path.write_text("")
    needed = r"it needs recipe, runs, and arms(.|\n)*recipe is missing(.|\n)*runs is missing"
    with pytest.raises(UserError, match=needed):
        read_sweep(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_sweep(path.with_name("nothing"))
    with pytest.raises(UserError, match="gpus is 0; it must be at least 1"):
        read_sweep(sweep(seeds=[0, 1], gpus=0))
    path.write_text("- recipe\n- runs\n")
    with pytest.raises(
        UserError, match="is not a mapping; it needs recipe, runs, and arms, grid or"
    ):
        read_sweep(path)


def test_a_damaged_record_of_what_is_finished_is_told(sweep, tmp_path, capsys):
    """Nothing is run again for it: the runs may be finished."""
    path = sweep(seeds=[0, 1])
    record = tmp_path / "runs/shape/sweep.json"
    record.parent.mkdir(parents=True)
    record.write_text("{")
    assert cli.main(["sweep", str(path)]) == 2
    said = capsys.readouterr().err
    assert "sweep.json is damaged" in said and "remove it" in said
    assert not calls(tmp_path)


def test_runs_with_gpus_of_their_own_go_side_by_side(sweep, tmp_path, monkeypatch, capsys):
    """Each waits for the other three, so they can only end together; then the last one runs."""
    (tmp_path / "recipe.py").write_text(
        textwrap.dedent(
            """
            import os, pathlib, sys, time
            def train(here, name):
                (here / f"saw{name}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
                print("run", name)
                deadline = time.monotonic() + 60
                while len(list(here.glob("saw*"))) < 4:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
                sys.exit(1 if name == "2" else 0)
            train(pathlib.Path(__file__).parent, sys.argv[2].rpartition("=")[2])
            """
        )
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3,5,6,7,8,9,10,11")
    path = sweep(seeds=[0, 1, 2, 3, 4], gpus=2)
    with pytest.raises(UserError):  # the scripts left no runs to compare
        sweep_command.run_sweep(argparse.Namespace(file=path, list=False, others=[]))
    saw = [(tmp_path / f"saw{seed}").read_text() for seed in range(5)]
    assert saw[:4] == ["0,3", "5,6", "7,8", "9,10"] and saw[4] in saw[:4]
    assert (tmp_path / "runs/shape/seed=3.log").read_text() == "run 3\n"
    finished = json.loads((tmp_path / "runs/shape/sweep.json").read_text())
    assert sorted(finished) == ["seed=0", "seed=1", "seed=3", "seed=4"]
    assert "run 5 of 5: seed=4; its output is in runs/shape/seed=4.log" in capsys.readouterr().err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match="gpus is 2, and there are 1 GPUs"):
        sweep_command.run_sweep(argparse.Namespace(file=path, list=False, others=[]))


def test_further_options_go_to_every_run(sweep, capsys):
    path = sweep(arms=ARMS, arguments=["--preset", "x"])
    assert cli.main(["sweep", str(path), "--list", "--data", "a b", "--overfit", "8"]) == 0
    for line in capsys.readouterr().out.splitlines():
        assert "--seed 0 --preset x --data 'a b' --overfit 8 --set tasks_per_iteration=" in line
