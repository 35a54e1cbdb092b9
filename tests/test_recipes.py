"""The scripts in recipes/: their options, tasks and settings. What they do with a model is tried by
hand (--tiny) and in e2e/.
"""

import asyncio
import json
import math
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest

from ttrl import Task, TrainConfig
from ttrl.cli.recipe_script import (
    recipe_config,
    run_recipe,
    script_arguments,
    with_plain_template,
)
from ttrl.cli.sweep import read_sweep
from ttrl.configs.experiments import EXPERIMENTS
from ttrl.costs.parameters import adapter_parameters, decoder_parameters
from ttrl.errors import ConfigError
from ttrl.loop.checks import checked
from ttrl.plans.open_choices import choose
from ttrl.system.files import write_jsonl
from ttrl.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[1]
MODELS = json.loads((ROOT / "ttrl" / "costs" / "architectures.json").read_text())
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py"))


def gsm8k(folder: Path) -> None:
    rows = [
        {"question": f"What is {n} and {n}?", "answer": f"They are {2 * n}.\n#### {2 * n}"}
        for n in range(2600)
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))


def math_problems(folder: Path) -> None:
    rows = [
        {"problem": f"What is {n} + π?", "level": "Level 1", "solution": f"\\boxed{{{n}+\\pi}}"}
        for n in range(100)
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))


def temporal_clue(folder: Path) -> None:
    rows = [
        {"prompt": f"Puzzle {n}", "solution": {"A": "Miss Violet"}, "num_clues": 1}
        for n in range(70)
    ]
    for name in ("train", "val"):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def nyt_connections(folder: Path) -> None:
    rows = [
        {"answers": [{"members": [f"W{n} {g}{w}" for w in range(4)]} for g in range(4)]}
        for n in range(60)
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))


def arc_agi(folder: Path) -> None:
    pairs = [{"input": [[n // 8, n % 8]], "output": [[n % 8, n // 8]]} for n in range(60)]
    rows = [{"id": f"{n:08x}", "train": [pair], "test": [pair]} for n, pair in enumerate(pairs)]
    (folder / "training.jsonl").write_text("\n".join(map(json.dumps, rows)))


def chess_moves(folder: Path) -> None:
    ranks = ["p7", *(f"{n}p{7 - n}" for n in range(1, 7)), "7p"]
    fens = [f"4k3/8/{one}/{other}/8/8/4P3/4K3 w - - 0 1" for one in ranks for other in ranks]
    rows = [{"fen": fen, "best_move_uci": "e2e4"} for fen in fens]
    for name in ("train", "validation"):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def multiple_choice(folder: Path) -> None:
    rows = [
        {"question": f"Which is {n}?", "choices": [str(n), "x", "y", "z"], "answer": 0}
        for n in range(20)
    ]
    for name in ("train", "validation"):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


MAKERS = (
    gsm8k,
    math_problems,
    temporal_clue,
    nyt_connections,
    arc_agi,
    chess_moves,
    multiple_choice,
)
DATA = {maker.__name__: maker for maker in MAKERS}


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [f"recipes/{name}.py", *arguments])
    runpy.run_path(str(ROOT / "recipes" / f"{name}.py"), run_name="__main__")


Trained = list[tuple[TrainConfig, list[Task], list[Task]]]
"""By run: its config, its tasks and the held-out ones."""


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Trained:
    """Record what recipes would train. Each run has two iterations without any progress."""
    seen: Trained = []

    def train(
        config: TrainConfig, *, tasks: list[Task], validation_tasks: list[Task]
    ) -> types.SimpleNamespace:
        seen.append((config, tasks, validation_tasks))
        rewarded = config.validation_metric == "reward"
        metrics = {"answered": 1.0} if rewarded else {config.validation_metric: 0.25}
        rows = [
            {"iteration": number, "validation_reward": 0.25, "validation": metrics}
            for number in range(2)
        ]
        if not validation_tasks:
            rows = [{"iteration": number} for number in range(2)]
        run = tmp_path / "trained"
        run.mkdir(exist_ok=True)
        write_jsonl(run / "metrics.jsonl", [*rows, {"iteration": 2}])
        return types.SimpleNamespace(run=run, report="report.html", checkpoint="checkpoint")

    monkeypatch.setattr("ttrl.cli.recipe_script.train", train)
    return seen


Checked = list[tuple[TrainConfig, list[Task]]]


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> Checked:
    """Record what recipes check; with --check they do no more."""
    seen: Checked = []

    def checked(
        config: TrainConfig,
        tasks: list[Task],
        held_out: list[Task],
        *,
        problems: list[str],
        **more: object,
    ) -> tuple[TrainConfig, list[Task], list[Task]]:
        assert not problems
        seen.append((config, tasks))
        return config, tasks, held_out

    monkeypatch.setattr("ttrl.cli.recipe_script.checked", checked)
    return seen


SLOW = ("countdown", "reasoning_puzzles", "zebra_grid")  # to make their tasks
SOME = [pytest.param(name, marks=[pytest.mark.long] * (name in SLOW)) for name in RECIPES]


@pytest.mark.parametrize("name", SOME)
def test_tasks_and_settings(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Long for three: making their tasks takes seconds, and each only shows that its own command
    works.
    """
    arguments = [
        "--check",
        "--run",
        str(tmp_path / "run"),
        "--seed",
        "3",
        "--iterations",
        "2",
        "--set",
        "tasks_per_iteration=2",
    ]
    if name in DATA:
        if name == "chess_moves":
            pytest.importorskip("chess")
        (tmp_path / "data").mkdir()
        DATA[name](tmp_path / "data")
        arguments += ["--data", str(tmp_path / "data")]
    text = (ROOT / "recipes" / f"{name}.py").read_text()
    has_model = re.search(r'\bmodel=(MODEL|"\w)', text) is not None
    if has_model:
        arguments += ["--model", "tiny"]  # the recipe's own one cannot be reached everywhere
    run(name, monkeypatch, *arguments)
    text = capsys.readouterr().out
    assert "held out; the settings are right" in text
    assert not (tmp_path / "run").exists()
    if has_model:
        if name not in ("spelling", "gsm8k"):
            return  # two of them are enough
        run(name, monkeypatch, *arguments[:-2], "--tiny")
        assert capsys.readouterr().out.startswith("2 tasks")


@pytest.mark.parametrize("name", SOME)
def test_it_fits_the_machine_that_it_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked_at: Checked
) -> None:
    """By what is chosen for its GPUs; without any, its model is a tiny one.

    Long for two recipes that take seconds: only this sees whether theirs fit.
    """
    numbers = {"one": 1, "eight": 8}
    said = re.search(
        r"for\s+(\w+)\s+GPUs?\s+with (\d+) GB", (ROOT / "recipes" / f"{name}.py").read_text()
    )
    if said is None:
        assert "Qwen" not in (ROOT / "recipes" / f"{name}.py").read_text()
        return
    arguments = ["--check", "--run", str(tmp_path / "run")]  # few tasks
    if name in DATA:
        if name == "chess_moves":
            pytest.importorskip("chess")
        DATA[name](tmp_path)
        arguments += ["--data", str(tmp_path)]
    run(name, monkeypatch, *arguments)
    ((config, tasks),) = looked_at
    assert name in DATA or len(tasks) >= config.tasks_per_iteration  # --check refuses fewer
    model = config.model.removeprefix("Qwen/").removesuffix("-Instruct").lower().replace("-", "_")
    made = choose(MODELS[model], config, [1e9 * int(said[2])] * numbers[said[1]])
    assert made.problem is None and not made.is_tight, made


@pytest.mark.parametrize("name", ["multiple_choice", "spelling"])
def test_a_try_out_trains_and_says_what_came_of_it(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    trained: Trained,
) -> None:
    """Of a random model's rewards, all 0, nothing is trained: here every reply has another one.
    Held-out tasks keep theirs.
    """
    arguments = ["--tiny", "--run", str(tmp_path / "run")]
    if name in DATA:
        DATA[name](tmp_path)
        arguments += ["--data", str(tmp_path)]
    run(name, monkeypatch, *arguments)
    assert ": 0.250 before, 0.250 after 2 iterations" in capsys.readouterr().out

    def choice(content: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(message=types.SimpleNamespace(content=content))

    ((config, tasks, validation_tasks),) = trained
    assert (
        config.model == str(tmp_path / "run" / "tiny_model")
        and len(tasks) == len(validation_tasks) == 2
    )
    grades = [asyncio.run(tasks[0].grader(choice(text))) for text in ("x", "y", "y", "\ud800")]
    rewards = [grade.reward for grade in grades]
    assert (
        len(set(rewards)) == 3
        and rewards[1] == rewards[2]
        and all(0 <= reward < 1 for reward in rewards)
    )
    assert validation_tasks[0].grader(choice(validation_tasks[0].grader.reference()))[0] == 1.0


def test_a_recipe_without_held_out_tasks_says_so(tmp_path: Path, trained: Trained) -> None:
    tasks = [Task([{"role": "user", "content": str(n)}], float) for n in range(4)]
    options = {"run": str(tmp_path), "iterations": 2, "model": "tiny"}
    said = {}
    for argv in ([], ["--check"]):
        arguments = script_arguments("Sums.", **options, argv=argv)
        config = recipe_config(arguments, max_tokens=8, tasks_per_iteration=2)
        said[len(argv)] = run_recipe(arguments, config, tasks, [], "right sums")
    assert said[0] == "right sums: not measured, without held-out tasks, in 2 iterations"
    assert "4 tasks" in said[1] and "no held-out tasks, so nothing will measure" in said[1]


@pytest.mark.parametrize("model", [["--model", "m"], ["--set", "model=m"]])
def test_a_try_out_takes_no_model(model: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--tiny makes a model of its own; leave it out, or"):
        run("spelling", monkeypatch, "--tiny", *model)


def test_options_prevail_over_a_try_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Trained
) -> None:
    """Also with the recipe's own number of iterations."""
    arguments = ["--tiny", "--run", str(tmp_path)]
    usual = re.search(r"iterations=(\d+)", (ROOT / "recipes" / "spelling.py").read_text())[1]
    run("spelling", monkeypatch, *arguments)
    run("spelling", monkeypatch, *arguments, "--iterations", usual, "--nproc-per-node", "2")
    run("spelling", monkeypatch, *arguments, "--overfit", "5", "--set", "validate_every=3")
    (plain, *_), (longer, *_), (overfit, tasks, _) = trained
    assert (plain.iterations, plain.nproc_per_node, plain.tasks_per_iteration) == (1, 1, 2)
    assert (longer.iterations, longer.nproc_per_node) == (int(usual), 2)
    assert (overfit.overfit, overfit.tasks_per_iteration, len(tasks)) == (5, 5, 5)
    assert overfit.validate_every == 3


def test_wrong_settings_are_found_by_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = ["--nproc-per-node", "0", "--overfit", "0", "--set", "lr", "epochs=3", "max_num_seqs=8"]
    with pytest.raises(ConfigError) as caught:
        run("spelling", monkeypatch, "--check", "--run", str(tmp_path), *wrong)
    for text in (
        "nproc_per_node is 0",
        "lr has no value",
        "overfit is 0",
        "mean 'iterations'?",
        "{'max_num_seqs': …}",
    ):
        assert sum(text in problem for problem in caught.value.problems) == 1, str(caught.value)


@pytest.mark.parametrize("name", [*DATA, "rl_vs_sft"])
def test_absent_data_are_named_with_the_other_mistakes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "chess_moves":
        pytest.importorskip("chess")
    wrong = ["--data", "/not/there", "--model", "/nor/this", "--set", "max_token=9", "lr=-1"]
    with pytest.raises(ConfigError) as caught:
        run(name, monkeypatch, "--run", str(tmp_path / "run"), *wrong)
    said = [
        "/not/there is neither a file",
        "/nor/this does not exist",
        "did you mean 'max_tokens'?",
        "lr is -1",
    ]
    assert [sum(text in problem for problem in caught.value.problems) for text in said] == [
        1,
        1,
        1,
        1,
    ], str(caught.value)
    assert len(caught.value.problems) == 4 and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("gsm8k", ["--data", "/not/there"], ["/not/there is neither a file"]),
        (
            "spelling",
            ["--model", "/not/there", "--set", "max_token=9", "tasks_per_iteration=10000"],
            [
                "did you mean 'max_tokens'?",
                "there are only 4,096 tasks",
                "model folder /not/there does not exist",
            ],
        ),
    ],
)
@pytest.mark.parametrize("check", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_is_absent_is_said_in_sentences(
    name: str, arguments: list[str], said: list[str], check: bool, tmp_path: Path
) -> None:
    """… and before torch is loaded, which takes longer than a person waits.

    Long for --check: only this sees that it loads no more. What it says: the test above.
    """
    command = [
        sys.executable,
        "-X",
        "importtime",
        str(ROOT / "recipes" / f"{name}.py"),
        "--run",
        str(tmp_path / "run"),
        *arguments,
    ]
    done = subprocess.run(
        [*command, "--check"] if check else command, capture_output=True, text=True, check=False
    )
    assert (
        done.returncode == 1 and "Traceback" not in done.stderr and "| torch\n" not in done.stderr
    )
    assert all(text in done.stderr for text in said) and not (tmp_path / "run").exists()


def test_the_judges_examples_have_the_grader_s_marks(tmp_path: Path) -> None:
    names = runpy.run_path(str(ROOT / "recipes" / "json_judge.py"))
    tasks = names["get_structured_output_tasks"]("train", n=200)
    marks = set()
    kinds = set()
    right = 0
    for task, one in zip(tasks, names["marked"](tasks, 0), strict=True):
        assert one.name == task.id and task.messages[-1]["content"] in one.prompt
        reply = one.prompt.split("<reply-", 1)[1].split("\n", 1)[1].rsplit("\n</reply-", 1)[0]
        message = types.SimpleNamespace(content=reply)
        reward, metrics = task.grader(types.SimpleNamespace(message=message))
        assert one.answer == f"Score: {round(10 * reward)}"
        assert (one.answer == "Score: 10") == (metrics["exact"] == 1) == (one.kind == "right")
        marks.add(one.answer)
        kinds.add(one.kind)
        right += one.answer == "Score: 10"
    assert 70 < right < 130 and len(marks) >= 5 and len(kinds) == 17, (marks, kinds)
    assert list(names["marked"](tasks, 0)) != list(names["marked"](tasks, 1))


def test_a_judge_is_not_trained_for_wrong_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = ["--model", "tiny", "--run", str(tmp_path / "run"), "--set", "lr=-1"]
    with pytest.raises(ConfigError, match="lr is -1"):
        run("json_judge", monkeypatch, *wrong)
    assert not (tmp_path / "run").exists()


def test_data_without_a_default_must_be_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run("arc_agi", monkeypatch, "--check")
    assert "--data" in capsys.readouterr().err


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            number, marks=[pytest.mark.long] * (number not in ("010", "015", "041", "044", "048"))
        )
        for number in EXPERIMENTS
    ],
)
def test_an_experiment_of_the_report(
    number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It passes its check, tiny too, and is planned on its hardware without the hub.

    Long for most: three commands each, and only this runs them. Settings and hardware of all:
    tests/configs/test_experiments.py.
    """
    one = EXPERIMENTS[number]
    arguments = ["--preset", number, "--run", str(tmp_path / "run")]
    if one.recipe in DATA:
        DATA[one.recipe](tmp_path)
        arguments += ["--data", str(tmp_path)]
    run(one.recipe, monkeypatch, "--check", *arguments, "--model", "tiny")
    assert "held out; the settings are right" in capsys.readouterr().out
    run(one.recipe, monkeypatch, "--check", "--tiny", *arguments)
    assert capsys.readouterr().out.startswith("2 tasks")
    plan = json.dumps({"gpu": f"{one.its_gpus}xH100"})
    run(one.recipe, monkeypatch, *arguments, "--plan", plan)
    text = capsys.readouterr().out
    assert one.its_model in text and "does not fit" not in text, text


def test_options_prevail_over_a_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Trained
) -> None:
    temporal_clue(tmp_path)
    arguments = ["--run", str(tmp_path / "run"), "--data", str(tmp_path), "--preset", "044"]
    run("temporal_clue", monkeypatch, *arguments)
    own = ["--iterations", "7", "--model", "tiny", "--set", "lr=1e-5", "max_tokens=64"]
    run("temporal_clue", monkeypatch, *arguments, *own)
    (config, *_), (changed, *_) = trained
    assert (config.model, config.iterations) == ("Qwen/Qwen2.5-14B-Instruct", 1000)
    assert (config.max_tokens, config.recipe_settings["lr"]) == (8192, 6e-6)
    assert config.early_stop == {"alpha": 0.992, "threshold": -2.5}
    assert (changed.model, changed.iterations) == ("tiny", 7)
    assert (changed.max_tokens, changed.recipe_settings["lr"]) == (64, 1e-5)
    assert changed.early_stop == config.early_stop


@pytest.mark.parametrize("name", ["temporal_clue", "zebra_grid", "arc_agi"])
def test_an_experiment_of_another_recipe_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(name, monkeypatch, "--check", "--data", str(tmp_path), "--preset", "042")
    assert "042" in capsys.readouterr().err


@pytest.mark.parametrize(("overfit", "same"), [(["--overfit", "4"], True), ([], False)])
def test_seeds_overfit_the_same_tasks(
    overfit: list[str],
    same: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    looked_at: Checked,
) -> None:
    """Else a sweep over seeds has no task to compare them on."""
    for seed in ("0", "1"):
        arguments = ["--check", "--model", "tiny", "--run", str(tmp_path / seed), "--seed", seed]
        run("structured_output", monkeypatch, *arguments, *overfit)
    first, second = ([task.id for task in tasks[:4]] for _, tasks in looked_at)
    assert (first == second) == same
    assert [config.seed for config, _ in looked_at] == [0, 1]


def test_overfit_takes_the_same_tasks_for_training_and_for_greedy_validation(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    trained: Trained,
) -> None:
    """So does a tiny model's warm start: legal moves of other positions tell it nothing about
    these.
    """
    pytest.importorskip("chess")
    chess_moves(tmp_path)
    monkeypatch.setattr("ttrl.cli.recipe_script.tune", lambda *given, **named: None)
    arguments = [
        "--run",
        str(tmp_path / "run"),
        "--data",
        str(tmp_path),
        "--model",
        "",
        "--overfit",
        "5",
    ]
    run(
        "chess_moves",
        monkeypatch,
        *arguments,
        "--preset",
        "rookworld",
        "--set",
        "tasks_per_iteration=5",
    )
    ((config, *given),) = trained
    config, tasks, validation_tasks = checked(config, *given, model=False)
    assert len(tasks) == 5 == config.tasks_per_iteration and tasks == validation_tasks
    assert (config.validation_temperature, config.validation_samples, config.stop_at) == (
        0.0,
        1,
        None,
    )
    assert config.validate_every == 1
    examples = map(
        json.loads, (tmp_path / "run/warm_start/examples.jsonl").read_text().splitlines()
    )
    assert {one["messages"][0]["content"] for one in examples} == {
        task.messages[0]["content"] for task in tasks
    }
    assert "held-out" not in (out := capsys.readouterr().out) and "on the 5 training tasks" in out
    for count, said in (("0", "overfit is 0"), ("5000", "overfit is 5000, and there are 4,096")):
        with pytest.raises(ConfigError, match=said):
            run("sort_letters", monkeypatch, "--check", "--run", "r", "--overfit", count)


def test_overfit_is_a_setting_with_a_shortcut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Trained
) -> None:
    """`--set overfit=32`, as a sweep says it, is `--overfit 32`; other settings prevail over what
    both mean.
    """
    smaller = ["tasks_per_iteration=8", "stop_at=0.9", "validate_every=2"]
    arguments = ["--run", str(tmp_path / "run"), "--model", "tiny"]
    run("spelling", monkeypatch, *arguments, "--overfit", "32")
    run("spelling", monkeypatch, *arguments, "--set", "overfit=32", *smaller)
    (one, *_), (other, *_) = trained
    shown = ("tasks_per_iteration", "stop_at", "validate_every", "validation_samples", "overfit")
    assert [getattr(one, name) for name in shown] == [32, None, 1, 1, 32]
    assert [getattr(other, name) for name in shown] == [8, 0.9, 2, 1, 32]
    both = [*arguments, "--overfit", "5", "--set"]
    with pytest.raises(
        ConfigError, match="--overfit is 5, but --set sets overfit=6; leave one out"
    ):
        run("spelling", monkeypatch, *both, "overfit=6", "lrr=1")
    with pytest.raises(ConfigError, match="overfit is 'many'; it must be a whole number"):
        run("spelling", monkeypatch, "--check", *arguments, "--set", "overfit=many")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("option", "setting", "said"),
    [
        (
            ["--iterations", "9"],
            "iterations=8",
            "--iterations is 9, but --set sets iterations=8; leave one out",
        ),
        (
            ["--cluster", "auto"],
            "cluster=h:1",
            "--cluster is auto, but --set sets cluster=h:1; leave one out",
        ),
        (
            ["--weight-sync", "auto"],
            "weight_sync=reload",
            "--weight-sync is auto, but --set sets weight_sync=reload; leave one out",
        ),
        ([], "seed=3", "--set seed=3: write --seed instead, because the recipe uses it, too"),
        (["--model", "tiny"], "model=m", "--model is tiny, but --set sets model=m; leave one out"),
        ([], "model=tiny", None),
        ([], "run=r", "--set run=r: write --run instead, because the recipe uses it, too"),
        (["--seed", "3"], "seed=3", None),
        ([], "iterations=8", None),
    ],
)
def test_a_setting_that_an_option_contradicts_is_refused(
    option: list[str],
    setting: str,
    said: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ["--check", "--run", str(tmp_path), *option, "--set", setting]
    if said is None:
        own = ["--model", "tiny"] * ("model" not in setting)
        run("spelling", monkeypatch, *arguments, *own)
        return
    with pytest.raises(ConfigError) as caught:
        run("spelling", monkeypatch, *arguments)
    assert caught.value.problems == [said]


@pytest.mark.long(but=["letter_counting"])
@pytest.mark.parametrize("name", ["letter_counting", "countdown"])
def test_a_model_that_is_set_is_the_recipes(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trained: Trained,
) -> None:
    """As with --model, also where the recipe would make one of its own, and settings follow it.

    Long for a second recipe: it only shows that the first is no exception.
    """
    for given in (["--model", "tiny"], ["--set", "model=tiny"]):
        run(name, monkeypatch, "--run", str(tmp_path), *given)
    (one, _, _), (other, _, _) = trained
    assert one == other
    assert one.model == "tiny"


def test_a_chat_model_is_warmed_up_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Trained
) -> None:
    """The warm start begins with the model that is set, and sees none of the held-out words."""
    started: list[dict[str, object]] = []
    monkeypatch.setattr(
        "ttrl.cli.recipe_script.tune", lambda config, *given, **named: started.append(config)
    )
    model = make_tiny_model(tmp_path / "model")
    run("sort_letters", monkeypatch, "--run", str(tmp_path / "run"), "--model", str(model))
    ((config, _, held_out),) = trained
    assert started[0]["model"] == str(model)
    assert config.model == str(tmp_path / "run/warm_start/checkpoint")
    lines = (tmp_path / "run/warm_start/examples.jsonl").read_text().splitlines()
    asked = {json.loads(line)["messages"][0]["content"] for line in lines}
    assert len(lines) == started[0]["steps"] * started[0]["batch_size"]
    assert max(map(len, asked)) == len("sort: abcd")
    assert not asked & {task.messages[0]["content"] for task in held_out}


@pytest.mark.parametrize("name", ["sort_letters", "letter_counting", "guess_number"])
def test_a_wrong_setting_is_refused_before_a_warm_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Trained
) -> None:
    """Also one that only a check of all settings finds."""
    started: list[object] = []
    monkeypatch.setattr(
        "ttrl.cli.recipe_script.tune", lambda config, *given, **named: started.append(config)
    )
    wrong = ("--set", "entropy_coefficient=0.01", "entropy_schedule=linear")
    with pytest.raises(ConfigError, match="without entropy_until_step"):
        run(name, monkeypatch, "--run", str(tmp_path / "run"), *wrong)
    assert not started and not trained and not (tmp_path / "run").exists()
    run(name, monkeypatch, "--run", str(tmp_path / "run"))
    ((config, _, _),) = trained
    assert len(started) == 1
    assert config.model == str(tmp_path / "run/warm_start/checkpoint")


def test_levels_of_puzzles(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trained: Trained,
) -> None:
    """Overfitting on the first tasks, and trying out on the shortest, mix levels and know none."""

    def puzzles(name, split, n, seed, *, level):
        return [
            Task([{"role": "user", "content": f"{name} {split} {seed} {level} {k}"}], float)
            for k in range(n)
        ]

    monkeypatch.setattr("ttrl.agents.reasoning_gym.get_reasoning_gym_tasks", puzzles)
    arguments = [
        "--run",
        str(tmp_path),
        "--families",
        "number_sorting",
        "--level",
        "0",
        "2",
    ]
    levels_up = ["--set", "level_up_at=0.5", "curriculum=true"]
    for more in (levels_up, ["--overfit", "2060"], ["--tiny", *levels_up]):
        run("reasoning_puzzles", monkeypatch, *arguments, *more)
    made = [checked(*one, model=False) for one in trained]
    (whole, *_), (overfit, *_), _ = made
    levels, none, tiny = ([task.level for task in tasks] for _, tasks, _ in made)
    assert (whole.curriculum, whole.level_up_at, levels.count(0), levels.count(1)) == (
        True,
        0.5,
        2048,
        2048,
    )
    assert (overfit.curriculum, set(none), len(none), tiny) == (False, {0}, 2060, [0, 0])


def test_rl_against_sft_on_gsm8k_as_the_question_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 samples of up to 256 tokens, 1 or 0, minus the mean of the group, no KL, no clipping of
    the ratio.
    """
    seen: list[object] = []

    def run_arms(
        arguments: object, config: TrainConfig, tasks: list[object], *others: object, **more: object
    ) -> str:
        seen.extend((arguments, config, tasks, more))
        return ""

    gsm8k(tmp_path)
    monkeypatch.setattr("ttrl.cli.arms.run_arms", run_arms)
    arguments = [
        "--check",
        "--run",
        str(tmp_path / "run"),
        "--model",
        "tiny",
        "--data",
        str(tmp_path),
    ]
    run("rl_vs_sft", monkeypatch, *arguments)
    _, config, tasks, more = seen
    assert (config.samples_per_task, config.max_tokens, config.advantages) == (16, 256, "mean")
    recipe = config.recipe_config({"packed": "p", "output_dir": "o"})
    assert (recipe.objective, recipe.kl_coefficient, recipe.updates_per_iteration) == (
        "reinforce",
        0.0,
        1,
    )
    assert (more["start"].metric, more["start"].stop_at) == ("format", 0.95)

    def choice(content: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(message=types.SimpleNamespace(content=content))

    right = tasks[0].grader.reference()
    assert [tasks[0].grader(choice(text))[0] for text in (right, right + "1", "####")] == [
        1.0,
        0.0,
        0.0,
    ]
    monkeypatch.undo()
    run("rl_vs_sft", monkeypatch, *arguments)
    assert (
        "held out; the settings are right" in capsys.readouterr().out
        and not (tmp_path / "run").exists()
    )


@pytest.mark.long(but=["chess_moves-rookworld-settings0-P"])
@pytest.mark.parametrize(
    ("name", "preset", "settings", "style"),
    [
        (
            *("chess_moves", "rookworld"),
            {
                **{
                    "tasks_per_iteration": 8,
                    "samples_per_task": 12,
                    "lr": 2e-6,
                    "max_grad_norm": 1.0,
                },
                **{
                    "advantages": "std",
                    "advantage_std_floor": 0.05,
                    "advantage_clip": 2.0,
                    "watch_kl": True,
                },
                **{
                    "kl_coefficient": 0.005,
                    "kl_estimator": "full",
                    "kl_after_steps": 20,
                    "entropy_coefficient": 0.005,
                    "validation_metric": "reward",
                },
            },
            "P",
        ),
        (
            *("gsm8k", "entropy-study"),
            {
                **{
                    "tasks_per_iteration": 32,
                    "samples_per_task": 8,
                    "lr": 2e-6,
                    "updates_per_iteration": 1,
                },
                **{
                    "advantages": "mean",
                    "aggregation": "constant",
                    "gradient_noise": True,
                    "validation_samples": 8,
                },
                **{"validate_every": 8, "keep_checkpoints": 65, "lora_rank": 78},
            },
            "r1",
        ),
        (
            "gsm8k",
            "small",
            {"tasks_per_iteration": 8, "samples_per_task": 8, "lr": 2e-5, "seq_len": 3072},
            "plain",
        ),
    ],
)
def test_logs_by_their_names(
    name: str,
    preset: str,
    settings: dict[str, object],
    style: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    looked_at: Checked,
) -> None:
    """What REQUIREMENTS.md says of them, and none of it is refused; a setting of its own prevails.

    Long for GSM8K's: only these compare the presets of that log.
    """
    if name == "chess_moves":
        pytest.importorskip("chess")
    DATA[name](tmp_path)
    arguments = [
        "--check",
        "--run",
        str(tmp_path / "run"),
        "--data",
        str(tmp_path),
        "--preset",
        preset,
    ]
    run(name, monkeypatch, *arguments)
    run(name, monkeypatch, *arguments, "--set", "lr=1e-4")
    (config, tasks), (changed, _) = looked_at
    values = {**config.recipe_settings, **config.to_dict()}
    assert {key: values[key] for key in settings} == settings and config.problems() == []
    assert tasks[0].grader.style == style and changed.recipe_settings["lr"] == 1e-4


def test_the_adapter_of_the_entropy_study_has_90_million_parameters() -> None:
    """Of Qwen2.5-1.5B; counted from the shapes of its matrices, and by the planner."""
    preset = runpy.run_path(str(ROOT / "recipes" / "gsm8k.py"))["PRESETS"]["entropy-study"]
    width, feed_forward, keys, layers = 1536, 8960, 2 * 128, 28
    attention = 2 * (width + width) + 2 * (width + keys)
    by_hand = layers * (attention + 3 * (width + feed_forward)) * preset["lora_rank"]
    settings = {"lora_rank": preset["lora_rank"], "lora_alpha": preset["lora_alpha"]}
    config = TrainConfig(run="r", model="m", iterations=1, training=settings).recipe_config({})
    counted = adapter_parameters(decoder_parameters(MODELS["qwen2.5_1.5b"]), config)
    assert counted == by_hand == 90_015_744


@pytest.mark.parametrize("name", ["chess_batch", "chess_samples"])
def test_the_ab_tests_of_the_chess_log_have_equal_compute(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Trained
) -> None:
    """A file for each; both arms are right runs on the same 32 positions, judged by their reward,
    with as many samples in all.
    """
    pytest.importorskip("chess")
    chess_moves(tmp_path)
    sweep = read_sweep(ROOT / "recipes" / "sweeps" / f"{name}.yaml", ["--data", str(tmp_path)])
    for command in sweep.commands().values():
        if "--seed 0" in " ".join(command):
            run("chess_moves", monkeypatch, *command[1:], "--model", "tiny")
    made = [checked(*one, model=False) for one in trained]
    assert len(made) == 2 and sweep.by == "flops"
    (one, *asked_one), (other, *asked_other) = made
    assert asked_one[0] == asked_one[1] == asked_other[1] and len(asked_one[0]) == 32
    sizes = ("tasks_per_iteration", "samples_per_task", "iterations")
    shapes = [[getattr(config, size) for size in sizes] for config in (one, other)]
    assert shapes[0] != shapes[1] and math.prod(shapes[0]) == math.prod(shapes[1])
    for config in (one, other):
        assert config.validation_metric == "reward" and config.validate_every == 1
        assert config.resolved_validation_temperature == 0


def test_a_base_model_is_asked_in_plain_text(tmp_path: Path) -> None:
    """Its template adds nothing to a question, and its own end to an answer; a chat model keeps its
    own.
    """
    from transformers import AutoTokenizer

    from ttrl.data.chat.templates import tokenize_chat

    model = make_tiny_model(tmp_path / "model", layers=1, width=16, heads=1)
    assert with_plain_template(str(model), tmp_path / "start") == model
    (model / "chat_template.jinja").unlink()
    start = with_plain_template(str(model), tmp_path / "start")
    assert start == with_plain_template(str(model), start) == tmp_path / "start"
    assert (start / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(start)
    asked = [{"role": "user", "content": "P: 8/8 "}]
    assert (
        tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        == "P: 8/8 "
    )
    chat = tokenize_chat(tokenizer, [*asked, {"role": "assistant", "content": "M: e2e4"}])
    trained = [
        token
        for token, is_trained in zip(chat.token_ids, chat.assistant_mask, strict=True)
        if is_trained
    ]
    assert tokenizer.decode(trained) == "M: e2e4" + tokenizer.eos_token
