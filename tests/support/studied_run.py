"""Short runs of a tiny model, for studies of their steps."""

import dataclasses

import yaml
from support.tiny_models import random_samples
from support.training_steps import ALONE

from ttrl import grpo_recipe
from ttrl.configs import GRPOConfig
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results


def samples_of(number):
    samples = random_samples(number, (3, 5, 8, 4), 6)
    numbered = enumerate(samples)
    return [dataclasses.replace(one, sample=k % 6, reward=float(k % 3 == 0)) for k, one in numbered]


def train(folder, number, model, state=None, samples=None, **settings):
    """Train an iteration, as a run does; return its checkpoint."""
    iteration = folder / f"{number:04d}"
    iteration.mkdir(parents=True)
    pack = iteration / "packed.safetensors"
    packed_tensors_from_tokenized_results(samples or samples_of(number), seq_len=48, pad_id=0).save(
        pack
    )
    values = {"model": str(model), "packed": str(pack), "output_dir": str(iteration)}
    values |= {"state": None if state is None else str(state), "device": "cpu", "lr": 1e-3}
    values |= {"iteration": number, **settings}
    (iteration / "grpo.yaml").write_text(yaml.safe_dump(values))
    grpo_recipe.train_iteration(GRPOConfig.parse(values, "test"), ALONE)
    return iteration / "checkpoint"


def two_iterations(folder, model, **settings):
    """Two iterations, each with its grpo.yaml; the checkpoint of the second."""
    settings = {"weight_decay": 0.1, "objective": "reinforce", **settings}
    first = train(folder, 1, model, **settings)
    return train(folder, 2, first, first.parent / "state", **settings)


def changed(checkpoint, folder, **settings):
    """The same iteration with other settings in its grpo.yaml."""
    values = yaml.safe_load((checkpoint.parent / "grpo.yaml").read_text()) | settings
    (folder / "grpo.yaml").write_text(yaml.safe_dump(values))
    (folder / "checkpoint").symlink_to(checkpoint)
    return folder / "checkpoint"
