"""What supervised training takes over from a run, and what is chosen for it."""

import json
from pathlib import Path

import pytest
import yaml

from ttrl import TrainConfig
from ttrl.plans.open_choices import IGNORE_VARIABLE
from ttrl.plans.supervised import ArmsPlan, Hardware, fit_supervised, sft_settings, start_settings

MODELS = json.loads(
    (Path(__file__).parents[2] / "ttrl" / "costs" / "architectures.json").read_text()
)
OWN = {"lr": 1e-5, "batch_size": 32, "seq_len": 4096, "rows_per_microbatch": 4}
CPU = Hardware([], 64e9)


@pytest.fixture
def model(tmp_path):
    def make(name):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MODELS[name]))
        return str(folder)

    return make


def config_of(model, **settings):
    return TrainConfig(run="r", model=model, iterations=1, **settings)


def test_on_a_cpu_a_start_computes_as_it_always_did(model):
    """A run in fp32 with one process: not a setting more, whatever the run says of its own
    training.
    """
    config = config_of(
        model("qwen2.5_0.5b"), training={"lr": 1e-6, "rows_per_microbatch": 8, "weight_decay": 0.1}
    )
    settings = start_settings(config, OWN, cuda=False)
    assert settings == {"model": config.model, "seed": 0, **OWN}
    fitted = fit_supervised(settings, config, CPU)
    assert (fitted.settings, fitted.processes) == (settings, 1)
    assert (
        str(fitted).startswith("1 process in fp32, each with up to")
        and fitted.choices.problem is None
    )


def test_on_a_cpu_a_start_takes_over_dtype_and_processes(model):
    config = config_of(
        model("qwen2.5_0.5b"),
        dtype="bf16",
        nproc_per_node=2,
        device="cpu",
        server={"max_model_len": 512},
    )
    settings = start_settings(config, OWN, cuda=False)
    threads = config.resolved(False).num_threads
    taken = {"device": "cpu", "dtype": "bf16", "context": 512, "num_threads": threads}
    assert settings == {"model": config.model, "seed": 0, **taken, **OWN}
    assert fit_supervised(settings, config, CPU).processes == 2


def test_a_cpu_without_room_is_refused_and_a_narrow_one_noted(model, monkeypatch):
    config = config_of(model("qwen2.5_7b"))
    settings = start_settings(config, OWN, cuda=False)
    expected = "start: does not fit: 1 process, each with up to"
    fitted = fit_supervised(settings, config, CPU)
    plan = ArmsPlan({}, {"start": fitted})
    assert plan.problems()[0].startswith(expected) and not plan.notes()
    assert plan.problems()[0].endswith("(TTRL_IGNORE_MEMORY=1 tries anyway: this is an estimate)")
    narrow = Hardware([], fitted.choices.trainer * 0.8)
    plan = ArmsPlan({}, {"start": fit_supervised(settings, config, narrow)})
    assert not plan.problems() and plan.notes()[0].startswith(expected)
    monkeypatch.setenv("TTRL_IGNORE_MEMORY", "1")
    assert not ArmsPlan({}, {"start": fitted}).problems()


@pytest.mark.parametrize(
    ("name", "gpus", "fits"),
    [("1.5b", 1, True), ("7b", 1, False), ("7b", 2, True), ("32b", 8, True)],
)
def test_gpus_are_used_as_a_run_uses_them(model, name, gpus, fits):
    config = config_of(model(f"qwen2.5_{name}"))
    hardware = Hardware([80e9] * gpus, 1e12)
    settings = start_settings(config, OWN, cuda=True)
    fitted = fit_supervised(settings, config, hardware)
    assert fitted.settings["dtype"] == "bf16" and fitted.processes == gpus
    assert (fitted.choices.problem is None) == fits and (fitted.choices.trainer < 80e9) == fits
    plan = ArmsPlan({}, {"start": fitted})
    assert bool(plan.problems()) != fits and f"start: {gpus} process" in str(plan)
    if not fits:
        assert "cpu_offload: true (slow); or 2 such GPUs" in plan.problems()[0]


def test_what_the_user_says_of_memory_holds_for_supervised_training(model, monkeypatch):
    config = config_of(
        model("qwen2.5_7b"),
        nproc_per_node=1,
        training={"cpu_offload": True, "activation_checkpointing": True},
    )
    settings = start_settings(config, OWN, cuda=True)
    fitted = fit_supervised(settings, config, Hardware([80e9, 80e9], 1e12))
    assert fitted.settings["cpu_offload"] and fitted.settings["activation_checkpointing"]
    assert fitted.processes == 1 and fitted.choices.problem is None
    whole = config_of(config.model)
    refused = ArmsPlan(
        {},
        {"x": fit_supervised(start_settings(whole, OWN, cuda=True), whole, Hardware([24e9], 1e12))},
    )
    assert refused.problems()
    monkeypatch.setenv(IGNORE_VARIABLE, "1")
    assert refused.problems() == []


def test_sft_is_trained_as_the_run_but_for_its_learning_rate(model):
    config = config_of(
        model("qwen2.5_0.5b"),
        training={"lr": 1e-6, "lora_rank": 8, "kl_coefficient": 0.1, "optimizer": "sgd"},
    )
    settings = sft_settings(config.resolved(True), OWN)
    assert settings["lora_rank"] == 8 and settings["optimizer"] == "sgd" and settings["lr"] == 1e-5
    assert (
        settings["dtype"] == "bf16"
        and settings["device"] == "cuda"
        and "kl_coefficient" not in settings
    )


def test_what_was_chosen_when_it_was_begun_stays(model, tmp_path):
    """On other GPUs as well, or another update would follow."""
    config = config_of(model("qwen2.5_1.5b"))
    settings = start_settings(config, OWN, cuda=True)
    begun = fit_supervised(settings, config, Hardware([24e9, 24e9], 1e12))
    saved = {"training": dict(begun.settings), "nproc_per_node": begun.processes}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
    other = Hardware([80e9] * 8, 1e12)
    again = fit_supervised(settings, config, other, tmp_path)
    assert (again.settings, again.processes) == (begun.settings, 2)
    assert fit_supervised(settings, config, other).processes == 8
