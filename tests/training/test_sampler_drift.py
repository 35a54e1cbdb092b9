"""Tokens of an older policy, compared under that policy's own weights: what moved since is no
difference then, all else is.
"""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import random_samples

from ttrl import grpo_recipe
from ttrl.configs import GRPOConfig
from ttrl.configs.recipe import PROGRESS_VARIABLE
from ttrl.data.packing.pack import PackedTensors, packed_tensors_from_tokenized_results
from ttrl.errors import ConfigError
from ttrl.system.files import read_jsonl
from ttrl.training import prepass
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.resident import Residence
from ttrl.training.sampler_drift import LOGPROBS_FILE

pytestmark = pytest.mark.usefixtures("short_canaries")
HERE = Ranks(0, 1, torch.device("cpu"))
LORA = {"lora_rank": 2, "lora_targets": ["q_proj", "v_proj", "w1", "w2"]}
OLD, OTHER = 5, 4  # weights versions in the pack


@pytest.fixture
def trials(model_folder, tmp_path):
    """`train(number, sampled_by, **settings)` trains an iteration from the newest checkpoint, on
    tokens of another one.
    """

    def pack(sampled_by):
        samples = random_samples(3, prompts=(1, 7), completions=3)
        samples = [
            dataclasses.replace(sample, reward=float(place % 2))
            for place, sample in enumerate(samples)
        ]
        packed = packed_tensors_from_tokenized_results(samples, seq_len=24, pad_id=0)
        config = GRPOConfig(model=str(sampled_by), packed="", output_dir="", device="cpu")
        packed.logprobs = prepass.store_reference_logprobs(config, HERE, packed).reference_logprobs
        trained = packed.labels != -100
        packed.weights_version[trained] = OLD
        packed.weights_version[0, trained[0].nonzero()[0]] = OTHER
        packed.save(tmp_path / "packed.safetensors")
        return packed

    def train(name, sampled_by, residence=None, **settings):
        pack(sampled_by)
        values = {
            "model": str(model_folder()),
            "packed": str(tmp_path / "packed.safetensors"),
            "state": None,
        }
        values |= {
            "output_dir": str(tmp_path / name),
            "device": "cpu",
            "lr": 0.01,
            "num_threads": 1,
            "measure_peak": False,
        }
        values |= {"updates_per_iteration": 2, "rows_per_microbatch": 1}
        if "lora_rank" in settings:
            values["lora_base"] = str(model_folder())
        grpo_recipe.train_iteration(GRPOConfig.parse(values | settings, "test"), HERE, residence)
        return tmp_path / name

    return train


def compared(folder):
    return read_jsonl(folder / "train.jsonl")[0]["sampler_trainer"]


def files(folder):
    return {path.name: path.read_bytes() for path in (folder / "checkpoint").rglob("*.safetensors")}


@pytest.mark.long(but=["dora"])
@pytest.mark.parametrize(
    "kind",
    [{}, {**LORA, "lora_kind": "dora"}, pytest.param(LORA, marks=pytest.mark.long)],
    ids=["whole", "dora", "lora"],
)
def test_under_its_own_weights_an_older_policy_does_not_differ(kind, trials, model_folder, loads):
    """Long for LoRA: only this has adapters without magnitudes. DoRA's are these and magnitudes.

    Long for whole models: only these keep an older policy without adapters.
    """
    residence = Residence(HERE)
    first = trials("one", model_folder(), residence, **kind)
    # The policy that is trained is the one that sampled.
    assert "own_weights" not in compared(first)
    chain, before = (
        [model_folder(), first / "checkpoint"],
        {"model": str(first / "checkpoint"), "state": str(first / "state")},
    )
    second = trials(
        "two",
        chain[0],
        residence,
        **kind,
        **before,
        sampler_model=str(chain[0]),
        sampler_version=OLD,
    )
    before = {"model": str(second / "checkpoint"), "state": str(second / "state")}
    asked = {"sampler_model": str(chain[1]), "sampler_version": OLD}
    third = trials("three", chain[1], residence, **kind, **before, **asked)
    assert len(loads) == 1  # the trainer stays warm
    for folder in (second, third):
        lag, own = compared(folder), compared(folder)["own_weights"]
        assert (
            lag["mean"] > 1e-3 and own["mean"] < 2e-6 and own["ess"] == pytest.approx(1, abs=1e-4)
        )
        assert (
            own["version"] == OLD
            and "by_version" not in own
            and 0 < own["tokens"] <= lag["by_version"][str(OLD)]["tokens"]
        )
        assert {one["version"] for one in own["worst"]} == {OLD}
    # What is trained is the same bit for bit, and so is what the report shows.
    without = trials("without", chain[1], None, **kind, **before)
    assert files(without) == files(third)
    assert (without / LOGPROBS_FILE).read_bytes() == (third / LOGPROBS_FILE).read_bytes()
    assert {
        name: value for name, value in compared(third).items() if name != "own_weights"
    } == compared(without)
    # Samples of other weights than those that they are said to be of.
    wrong = compared(trials("wrong", chain[0], None, **kind, **before, **asked))["own_weights"]
    assert wrong["mean"] > 1e-3


def test_so_many_rows_are_compared_those_with_the_most_tokens(trials, model_folder, tmp_path):
    tensors, other = load_file(model_folder() / "model.safetensors"), tmp_path / "other"
    other.mkdir()
    save_file(
        {name: tensor * 1.02 for name, tensor in tensors.items()},
        other / "model.safetensors",
        {"format": "pt"},
    )
    (other / "config.json").write_bytes((model_folder() / "config.json").read_bytes())
    asked = {"sampler_model": str(other), "sampler_version": OLD, "updates_per_iteration": 1}
    counts = {
        rows: compared(trials(f"rows{rows}", other, **asked, sampler_rows=rows)).get("own_weights")
        for rows in (0, 1, 99)
    }
    packed = PackedTensors.load(tmp_path / "packed.safetensors")
    by_row = (packed.weights_version == OLD).sum(dim=1)
    assert counts[0] is None
    assert (counts[1]["rows"], counts[1]["tokens"]) == (1, int(by_row.max()))
    assert (counts[99]["rows"], counts[99]["tokens"]) == (packed.num_rows, int(by_row.sum()))
    assert counts[99]["mean"] < 2e-6
    with pytest.raises(ConfigError, match="sampler_model and sampler_version go together"):
        trials("half", other, sampler_model=str(other))


def test_the_recipe_alone_warns_of_another_temperature(
    trials, model_folder, monkeypatch, tmp_path, caplog
):
    monkeypatch.delenv(PROGRESS_VARIABLE, raising=False)
    with caplog.at_level("WARNING", "ttrl"):
        trials("same", model_folder())
        assert "log-probabilities" not in caplog.text
        other = trials("other", model_folder(), temperature=0.5)
        (warning,) = [one for one in caplog.messages if "log-probabilities" in one]
        version = compared(other)["by_version"][str(OLD)]
        assert f"{version['mean']:.3g} (limit 0.0002)" in warning
        assert f"over {version['tokens']} tokens of policy {OLD}" in warning
        assert "the recipe's is 0.5" in warning
        # In a run, `ttrl.monitoring.drift` judges it.
        caplog.clear()
        monkeypatch.setenv(PROGRESS_VARIABLE, str(tmp_path / "progress"))
        trials("run", model_folder(), temperature=0.5)
        assert "log-probabilities" not in caplog.text
