"""`ttrl plan` of whatever a person names: a model, a recipe, a script, a file of settings."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ttrl import cli
from ttrl.cli.new.script import Script
from ttrl.cli.plan_command import PlanOptions
from ttrl.cli.recipe_script import script_arguments
from ttrl.costs.parameters import decoder_parameters
from ttrl.plans.planner import check_trainable, published_config

QWEN = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
TASKS = """
from ttrl import Task

def get_tasks(split):
    return [Task([{"role": "user", "content": f"{split} {n}"}], len, id=f"{split}/{n}") for n in range(32)]
"""


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_hub: None) -> None:
    """Plan from a folder of its own, without a network."""
    monkeypatch.chdir(tmp_path)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert cli.main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_model_by_its_name_fits_its_context(capsys: pytest.CaptureFixture[str]) -> None:
    made = planned(capsys, "tiny")
    assert (made["model"], made["iterations"]) == ("tiny", 1)
    assert made["work"]["seq_len"] == 512
    assert not [line for line in made["warnings"] if "longest prompt" in line]


@pytest.mark.parametrize("named", ["model", "./model", "model/config.json"])
def test_a_model_folder(named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its config.json is enough, without weights or a tokenizer."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN))
    made = planned(capsys, named, "--gpu", "1x24GB", "--set", "samples_per_task=4", "lr=1e-4")
    assert made["parameters"] == decoder_parameters(QWEN).total
    assert made["work"]["samples"] == 32 * 4
    assert made["machine"]["memory"] == 24e9


def test_a_name_on_the_hub_without_a_network(capsys: pytest.CaptureFixture[str]) -> None:
    """Known models are planned with their published figures; of others, all that helps is said."""
    assert cli.main(["plan", "Qwen/Qwen3-4B", "--gpu", "1x24GB"]) == 0
    said = capsys.readouterr()
    assert "Plan: Qwen/Qwen3-4B\n  model             4.02 G parameters" in said.out
    assert "what would fit: " in said.out
    assert "could not be fetched from the hub; planning with its published figures" in said.err
    assert cli.main(["plan", "qwen/not-there"]) == 2
    said = capsys.readouterr()
    assert not said.out
    for text in (
        "no network?",
        "for a plan, its config.json is enough",
        "Qwen/Qwen3-4B",
        "tiny",
    ):
        assert text in said.err


def test_what_the_hub_gave_prevails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own, as huggingface_hub reads the variable once."""
    cached = tmp_path / "hub" / "models--Qwen--Qwen3-4B"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "snapshots" / "abc" / "config.json").write_text(json.dumps(QWEN))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    ended = run_plan("Qwen/Qwen3-4B", "--json", cwd=tmp_path)
    assert (
        json.loads(ended.stdout)["parameters"]
        < 1e6
        < published_config("Qwen/Qwen3-4B")["parameters"]
    )


def test_published_figures_are_of_models_that_are_trained() -> None:
    check_trainable("Qwen/Qwen3-4B")
    assert published_config("Qwen/Qwen2.5-7B-Instruct")["parameters"] == 7_615_616_512
    assert published_config("Qwen/unknown") is None


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("smollm2-135", "did you mean 'smollm2-135m'?"),
        ("structured-outptu", "did you mean 'structured_output'?"),
        ("zzz", "nothing is called 'zzz'; give a run folder"),
        ("nothing.py", "nothing.py does not exist; `ttrl tasks new nothing.py` writes a script"),
        ("nothing.yaml", "nothing.yaml cannot be read as a config"),
    ],
)
def test_what_cannot_be_planned(what: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", what]) == 2
    assert text in capsys.readouterr().err


def test_an_option_that_nothing_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "tiny", "--seed", "1"]) == 2
    assert (
        "`ttrl plan` has no such option unless you plan a script: --seed 1"
        in capsys.readouterr().err
    )
    # Not read as a short form of --tasks: a script may have a --task of its own.
    assert cli.main(["plan", "tiny", "--task", "x"]) == 2
    assert "unless you plan a script: --task x" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["models", "--zzz"])
    assert "unrecognized arguments: --zzz" in capsys.readouterr().err


def test_a_file_of_settings_as_it_would_be_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tasks that it names, whose prompts are counted."""
    (tmp_path / "my_tasks.py").write_text(TASKS)
    settings = (
        "model: tiny\niterations: 3\nmax_tokens: 8\nseq_len: 64\ntasks: "
        "my_tasks.py\nvalidation_tasks: my_tasks.py\n"
    )
    (tmp_path / "mine.yaml").write_text(settings)
    made = planned(capsys, "mine.yaml", "--set", "tasks_per_iteration=16")
    assert (made["iterations"], made["prompts_from"]) == (3, "tasks")
    # One token per byte, and one for each role and the end.
    assert made["work"]["prompt_max"] == len("train 10") + 3
    assert made["work"]["validation_samples"] == 32
    (tmp_path / "other.py").write_text(TASKS.replace("{split} {n}", "{split} longer {n}"))
    made = planned(capsys, "mine.yaml", "--tasks", "other.py:get_tasks")
    assert made["work"]["prompt_max"] == len("train longer 10") + 3


def run_plan(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ttrl.cli", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def test_a_recipe_by_its_name_with_its_own_options(tmp_path: Path) -> None:
    """Nothing is run, nor the model made that the recipe would train first."""
    options = [
        "--gpu",
        "1x24GB",
        "--seed",
        "3",
        "--iterations",
        "9",
        "--set",
        "samples_per_task=8",
        "--json",
    ]
    made = json.loads(run_plan("sort-letters", *options, cwd=tmp_path).stdout)
    assert (made["iterations"], made["work"]["samples"]) == (9, 32 * 8)
    assert (made["prompts_from"], made["machine"]["memory"]) == ("tasks", 24e9)
    assert made["model"] == str(tmp_path / "runs/sort_letters/warm_start")
    assert not (tmp_path / "runs").exists()


def test_a_script_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Script("my_task").write(tmp_path / "my_task.py")
    ended = run_plan("my_task.py", "--model", "tiny", "--gpu", "4090", cwd=tmp_path)
    assert "Plan: tiny\n" in ended.stdout
    assert "RTX4090" in ended.stdout
    ended = run_plan("my_task.py", "--model", "tiny", "--set", "lrr=1", cwd=tmp_path)
    assert ended.returncode == 1
    assert "did you mean 'lr'?" in ended.stderr
    # A published model is planned from its name, so a mistake is all that is wrong.
    wrong = ("--model", "Qwen/Qwen3-4B", "--gpu", "8xH100", "--set", "lrr=1")
    ended = run_plan("my_task.py", *wrong, cwd=tmp_path)
    assert ended.returncode == 1
    assert "1 problem" in ended.stderr and "did you mean 'lr'?" in ended.stderr
    assert cli.main(["plan", "my_task.py", "--tasks", "x.py"]) == 2
    assert "my_task.py has tasks of its own" in capsys.readouterr().err


def test_a_script_that_would_train_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "from ttrl import train\nprint('training')\ntrain(None, [])\n"
    )
    assert cli.main(["plan", "mine.py"]) == 2
    said = capsys.readouterr()
    assert not said.out and "mine.py reads no options, and would start training" in said.err


def test_what_a_script_is_asked_is_read() -> None:
    asked = PlanOptions(gpu="4090", price_per_hour=2.0)
    assert PlanOptions.parse('{"gpu": "4090", "price_per_hour": 2.0}') == asked


def test_a_script_s_own_plan_takes_no_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("4090", '{"gpus": "4090"}'):
        with pytest.raises(SystemExit):
            script_arguments(None, run="r", iterations=1, model="tiny", argv=["--plan", text])
        said = capsys.readouterr().err
        assert f"{text!r}: --plan takes no value; `ttrl plan SCRIPT` has other ways" in said
