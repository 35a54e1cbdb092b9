"""A run of two processes that share each layer, studied by one: the study's vector leads to the
checkpoint that they wrote, from their state in parts.
"""

import dataclasses

import pytest
import yaml
from support.tiny_models import random_samples

from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.instruments.study import study
from ttrl.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop"])
def test_shards_of_two_processes_are_studied_by_one(optimizer, tmp_path, recipe_worker):
    """Two iterations, so that the second one starts from a state in parts."""
    model = make_tiny_model(tmp_path / "model", width=64, layers=2)
    state = None
    for number in (1, 2):
        folder = tmp_path / "iterations" / f"{number:04d}"
        folder.mkdir(parents=True)
        numbered = enumerate(random_samples(number, (3, 5, 8, 4), 6))
        samples = [
            dataclasses.replace(one, sample=k % 6, reward=float(k % 3 == 0)) for k, one in numbered
        ]
        pack = folder / "packed.safetensors"
        packed_tensors_from_tokenized_results(samples, seq_len=48, pad_id=0).save(pack)
        values = {"model": str(model), "packed": str(pack), "output_dir": str(folder)}
        values |= {"state": state, "device": "cpu", "lr": 1e-3, "iteration": number}
        values |= {"objective": "reinforce", "weight_decay": 0.1, "optimizer": optimizer}
        values |= {"tensor_parallel": 2, "state_format": "sharded", "num_threads": 1}
        (folder / "grpo.yaml").write_text(yaml.safe_dump(values))
        arguments = ["ttrl/grpo_recipe", "--config", str(folder / "grpo.yaml")]
        code = recipe_worker(arguments, folder / "log", 2)
        assert code == 0, (folder / "log").read_text()[-3000:]
        model = folder / "checkpoint"
        state = str(folder / "state")
    assert (tmp_path / "iterations" / "0001" / "state" / "00001.safetensors").is_file()
    found = study(model, sequences=24, factors=[0.02, 0.04], dtype="fp64")
    assert found["step"]["cosine"] == pytest.approx(1, abs=1e-9)
    assert found["step"]["checkpoint_distance"] < 1e-4
    errors = [abs(one["measured"] - one["first"]) for one in found["sweep"]]
    assert errors[1] / errors[0] == pytest.approx(4, rel=0.3)
