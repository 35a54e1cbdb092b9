"""Which setting would save how much memory: what a recipe says when there was not enough. By the model of `ttrl.costs.memory`."""

import dataclasses
import os

import torch

from ttrl.configs import TrainingConfig
from ttrl.costs.memory import Device
from ttrl.costs.savings import savings as savings_by_setting
from ttrl.costs.training_settings import Workload
from ttrl.errors import ModelFolderError
from ttrl.training.parallel.distributed import model_shape


def savings(config: TrainingConfig, seq_len: int, *, cuda: bool = False, ranks: int = 1) -> dict[str, float]:
    """Bytes of a process's peak that a setting other than the one in use would save, by the setting, the largest first.

    seq_len: positions of a packed row. ranks: processes that train on different rows. Empty where the model's config.json does
    not say its shape.
    """
    device: Device = "cuda" if cuda else "cpu"
    try:
        shape, workload = model_shape(config.model), Workload(row_length=seq_len)
        return savings_by_setting(shape, dataclasses.asdict(config), workload, device=device, ranks=ranks)
    except ModelFolderError:
        return {}


def advice(config: TrainingConfig, seq_len: int) -> str:
    """The same in words, for an error message, on this machine and with as many processes as there are."""
    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    ranks = int(os.environ.get("WORLD_SIZE", "1")) // config.tensor_parallel
    found = savings(config, seq_len, cuda=cuda, ranks=max(1, ranks))
    parts = [f"{name} would save about {saved / 2**30:.2g} GiB" for name, saved in found.items()]
    return f"with rows of {seq_len} positions, " + (", ".join(parts) or "shorter rows would save most")
