"""The report's experiments: their data, their table, and whether they fit the hardware they name.
What a recipe makes of them: tests/test_recipes.py; with real parts: tests/e2e/.
"""

import json
from pathlib import Path

import pytest
import torch
from support.tiny_models import random_samples

from ttrl import TrainConfig, grpo_recipe
from ttrl.cli.settings import with_settings
from ttrl.configs import GRPOConfig
from ttrl.configs.experiments import EXPERIMENTS, GPU_GB, presets_of, table
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.plans.open_choices import choose
from ttrl.plans.planner import published_config
from ttrl.system.files import read_jsonl
from ttrl.training.parallel.distributed import Ranks

ROOT = Path(__file__).parents[2]
OF_THE_REPORT = [10, *range(12, 17), 18, *range(22, 32), *range(34, 50)]
"""As it names them, without 017, 019 to 021, 032 and 033: these trained nothing, or are not there."""
EACH = pytest.mark.parametrize("number", EXPERIMENTS)
LARGE = {"compile": False, "cpu_offload": False, "row_length_multiple": 1}


def config_of(number: str, **changes: object) -> TrainConfig:
    """The run of an experiment, without what its recipe adds."""
    settings = EXPERIMENTS[number].settings()
    settings.pop("overfit", None)
    start = TrainConfig(run="run", model=str(settings.pop("model")), iterations=1)
    written = [f"{name}={json.dumps(value)}" for name, value in (settings | changes).items()]
    config, problems = with_settings(start, written)
    assert problems == [] and config.problems() == []
    return config


def test_all_of_the_report_in_order():
    assert list(EXPERIMENTS) == [f"{number:03}" for number in OF_THE_REPORT]
    assert {one.recipe for one in EXPERIMENTS.values()} == {
        "temporal_clue",
        "zebra_grid",
        "nyt_connections",
    }
    assert sum(len(presets_of(path.stem)) for path in (ROOT / "recipes").glob("*.py")) == len(
        EXPERIMENTS
    )


@EACH
def test_what_an_entry_says_is_a_difference(number):
    """To an earlier one; and a value is the report's or ours."""
    one = EXPERIMENTS[number]
    own = {**one.reported, **one.ours}
    assert len(own) == len(one.reported) + len(one.ours) and one.changed and one.why
    if one.after is None:
        return
    before = EXPERIMENTS[one.after]
    assert before.number < one.number
    same = {name for name, value in own.items() if before.settings().get(name) == value}
    assert same <= {"beta1"}  # the report gives both together
    assert one.model != before.its_model and one.gpus in {0, *range(before.its_gpus + 1, 9)}


@EACH
def test_it_fits_the_hardware_that_it_names(number):
    one = EXPERIMENTS[number]
    model = published_config(one.its_model)
    assert model is not None
    made = choose(model, config_of(number), [1e9 * GPU_GB] * one.its_gpus)
    assert made.problem is None and not made.is_tight, made


def test_the_table_of_the_docs():
    """Write it by `python -c "from ttrl.configs.experiments import table; print(table())"`."""
    text = (ROOT / "docs" / "reference" / "experiments.md").read_text(encoding="utf-8")
    assert table() in text
    starred = table().count("\\*")
    assert starred == sum(len(one.ours) for one in EXPERIMENTS.values()) > 10


@pytest.mark.long(but=["010", "012", "022", "026", "036", "044", "048"])
@EACH
def test_a_run_with_its_settings_on_fake_parts(number, world):
    """Sampled in streams where it stops early, graded, packed, and handed to a trainer that takes
    the settings.

    Long for experiments like others that stay: only this runs each of them.
    """
    own = {
        name: value
        for name, value in EXPERIMENTS[number].settings().items()
        if name in TrainConfig.names()
    }
    small = {"model", "iterations", "tasks_per_iteration", "samples_per_task", "max_tokens"}
    training = {**config_of(number).recipe_settings, **LARGE}
    world.logprob = lambda k, place: -400.0 if k == 3 and place else -1.0
    if "surprise_until" in own:
        world.grade = lambda choice: (float(choice.message.content == "yes"), {"answer_end": 1.0})
    settings = {name: value for name, value in own.items() if name not in small | {"seq_len"}}
    result = world.train(iterations=1, training=training, **settings)
    row = result.metrics[-1]
    assert row["trained"] and row["failed"] == 0
    stops = "early_stop" in own
    assert row["rollouts"].get("stopped_early") == (0.25 if stops else None)
    recipe = world.recipes[-1]
    assert {name: recipe[name] for name in training} == training
    references = recipe["kl_coefficient"] > 0 or recipe["token_rewards"] == "implicit"
    assert (recipe["reference_model"] is not None) == references


@pytest.mark.usefixtures("one_thread", "short_canaries")
@pytest.mark.parametrize("number", ["010", "012", "022", "026", "038", "044", "048"])
def test_a_step_with_its_settings(number, model_folder, tmp_path):
    """One experiment for each kind of objective, schedule and optimizer."""
    packed = packed_tensors_from_tokenized_results(
        random_samples(5, prompts=(1, 7, 5)), seq_len=40, pad_id=0
    )
    packed.save(tmp_path / "packed.safetensors")
    values = {
        **config_of(number).recipe_config({}).to_dict(),
        **LARGE,
        "model": str(model_folder()),
        "reference_model": str(model_folder()),
        "packed": str(tmp_path / "packed.safetensors"),
        "output_dir": str(tmp_path),
        "device": "cpu",
        "measure_peak": False,
    }
    grpo_recipe.train_iteration(GRPOConfig.parse(values, "test"), Ranks(0, 1, torch.device("cpu")))
    rows = read_jsonl(tmp_path / "train.jsonl")
    assert len(rows) == min(values["updates_per_iteration"], packed.num_rows)
    assert all(row["grad_norm"] > 0 and "skipped" not in row for row in rows)
    assert all(("reward_model_loss" in row) == (number == "048") for row in rows)
    assert all(("kl_loss" in row) == (number == "012") for row in rows)
