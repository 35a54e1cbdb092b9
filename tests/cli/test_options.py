"""Options of commands are called as the settings in Python are, and none is left out."""

import argparse
import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ttrl import TrainConfig, plan, replay
from ttrl.cli import eval_command as evaluate
from ttrl.cli import plan_command as plan_command
from ttrl.cli import recipe_script, runs
from ttrl.cli.commands import main
from ttrl.configs import GRPOConfig, SFTConfig
from ttrl.configs.settings_reference import settings_of
from ttrl.errors import ConfigError
from ttrl.evaluation.evaluate import EvalConfig
from ttrl.evaluation.evaluate import evaluate as evaluate_in_python
from ttrl.plans.expected_lengths import Assumptions
from ttrl.run_folder.folder import RunFolder

EVAL = {field.name for field in fields(EvalConfig)}
REPLAY, PLAN = set(inspect.signature(replay).parameters), set(inspect.signature(plan).parameters)


def options(add: Any) -> dict[str, str]:
    """Return the first spelling of each argument, by where its value goes."""
    parser = argparse.ArgumentParser()
    add(parser)
    return {
        one.dest: one.option_strings[0] if one.option_strings else one.dest
        for one in parser._actions
        if one.dest != "help"
    }


@pytest.mark.parametrize(
    ("add", "settings", "spelled", "python_only"),
    [
        (evaluate.add_eval, EVAL, {"option": "options"}, {"pbar"}),
        (runs.add_replay, REPLAY, {}, {"quiet"}),
        (
            plan_command.add_plan,
            PLAN | {field.name for field in fields(Assumptions)} | {"json", "set"},
            {},
            {"assumptions", "validation_tasks", "recipe_only", "run", "json", "set"},
        ),
    ],
    ids=["eval", "replay", "plan"],
)
def test_options_have_the_names_of_settings(add, settings, spelled, python_only):
    found = options(add)
    assert all(first.removeprefix("--").replace("-", "_") == dest for dest, first in found.items())
    assert {spelled.get(dest, dest) for dest in found} == settings - python_only | (
        {"json", "set"} & found.keys()
    )


def test_options_of_recipes_are_settings_of_the_run():
    recipe = {"run": "r", "iterations": 1, "model": "m", "data": "d"}
    given = vars(recipe_script.script_arguments(None, **recipe, argv=[]))
    assert given.keys() - {field.name for field in fields(TrainConfig)} == {
        "data",
        "tiny",
        "set",
        "given",  # the options on the command line
        "own_set",  # without a preset's
        "task_seed",
        "check",
        "plan",
    }


@pytest.mark.parametrize("own", [["--model", "own"], ["--set", "model=own"]])
def test_a_model_prevails_over_a_presets(own):
    recipe = {"run": "r", "iterations": 1, "model": "m", "presets": {"p": {"model": "its"}}}
    given = recipe_script.script_arguments(None, **recipe, argv=["--preset", "p", *own])
    assert given.model == "own"


def test_a_check_plans_without_a_run():
    """`--plan` alone measures in a short run, and `--check` promises none."""
    recipe = {"run": "r", "iterations": 1, "model": "m"}
    asked = recipe_script.script_arguments(None, **recipe, argv=["--plan"])
    assert asked.plan.probe and not asked.check
    asked = recipe_script.script_arguments(None, **recipe, argv=["--check", "--plan"])
    assert asked.check and not asked.plan.probe


def test_former_spellings_go_on_to_work():
    parser = argparse.ArgumentParser()
    evaluate.add_eval(parser)
    given = [
        "m",
        "--tasks",
        "x",
        "--samples",
        "4",
        "--system",
        "s",
        "--model",
        "n",
        "--api-key-env",
        "K",
    ]
    found = parser.parse_args(given)
    assert (found.samples_per_task, found.system_prompt, found.name, found.key_variable) == (
        4,
        "s",
        "n",
        "K",
    )


def test_a_near_miss_in_python_is_named():
    with pytest.raises(
        ConfigError, match="unknown key 'sample_per_task'; did you mean 'samples_per_task'"
    ):
        evaluate_in_python("m", "letter_counting", sample_per_task=4)
    # As the command had it.
    with pytest.raises(ConfigError, match="unknown key 'samples'; did you mean 'samples_per_task'"):
        evaluate_in_python("m", "letter_counting", samples=4)


@pytest.mark.parametrize("cls", [TrainConfig, GRPOConfig, SFTConfig, EvalConfig])
def test_every_setting_is_explained(cls):
    settings = settings_of(cls)
    assert {one.name for one in settings} == {field.name for field in fields(cls)}
    assert not [one.name for one in settings if len(one.meaning.split()) < 2]
    shown = inspect.getdoc(cls)
    assert shown is not None and all(one.text() in shown for one in settings)


def test_a_setting_is_explained_at_the_command_line(capsys):
    assert main(["config", "max_tokens"]) == 0
    assert (
        "max_tokens: int = 1024\n    The longest completion, in tokens." in capsys.readouterr().out
    )
    assert main(["config", "training.lr"]) == 0 and "lr: float = 1e-05" in capsys.readouterr().out
    assert (
        main(["config", "max_token"]) == 2 and "did you mean max_tokens" in capsys.readouterr().err
    )
    assert main(["config", "learning_rate"]) == 2 and "did you mean lr?" in capsys.readouterr().err


def test_a_recipes_settings_may_be_an_object():
    settings = {"run": "r", "model": "m", "iterations": 1}
    config = TrainConfig(**settings, training=GRPOConfig(lr=1e-6, beta2=0.95), off_policy_steps=1)
    assert config.training == {"lr": 1e-6, "beta2": 0.95} and config.problems() == []
    assert config.recipe_config({}).off_policy == "token"
    plain = TrainConfig(**settings, training=GRPOConfig(off_policy="none"), off_policy_steps=1)
    # What is given counts, also where it is the default.
    assert plain.recipe_config({}).off_policy == "none"
    with pytest.raises(ConfigError, match="packed is missing"):
        GRPOConfig.parse(GRPOConfig(lr=1e-6).given(), "grpo.yaml")


def test_a_study_needs_no_logger_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its packages may be missing on this machine; the next mistake is reported instead."""
    run = tmp_path / "run"
    config = TrainConfig(run=str(run), model="tiny", iterations=1).to_dict()
    RunFolder(run).remember_config({**config, "loggers": ["not_installed_here"]})
    (run / "metrics.jsonl").write_text("")
    assert main(["study", str(run), "--entropy-tasks", "no_such_family"]) == 2
    said = capsys.readouterr().err
    assert "no_such_family" in said and "not_installed_here" not in said


def test_a_study_names_all_wrong_options_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["--factors", "one", "--sequences", "1", "--kernel", "-1", "--update", "0"]
    assert main(["study", str(tmp_path), *wrong]) == 2
    said = capsys.readouterr().err
    for text in (
        "--factors is 'one'; it must be numbers, such as -1,1,2",
        "--sequences is 1; it must be at least 2",
        "--kernel is -1; it must be at least 0",
        "--update is 0; it must be at least 1",
    ):
        assert text in said


def test_a_cluster_of_a_recipe_is_a_setting_of_the_run():
    recipe = {"run": "r", "iterations": 1, "model": "m"}
    asked = recipe_script.script_arguments(None, **recipe, argv=["--cluster", "auto"])
    assert asked.set == ['cluster="auto"']
