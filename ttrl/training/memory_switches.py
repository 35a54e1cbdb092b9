"""Which setting would save how much memory: what a recipe says when there was not enough. By the model of `ttrl.costs.memory`."""

import dataclasses
import os

import torch

from ttrl.configs import TrainingConfig
from ttrl.costs.memory import Device, training_memory
from ttrl.costs.training_settings import HEAD_CHUNK, Settings, Workload
from ttrl.errors import ModelFolderError
from ttrl.training.distributed import model_shape

_LORA_RANK = 16  # of what is suggested


def savings(config: TrainingConfig, seq_len: int, *, cuda: bool = False, ranks: int = 1) -> dict[str, float]:
    """Bytes of a process's peak that a setting other than the one in use would save, by the setting, the largest first.

    seq_len: positions of a packed row. ranks: processes that train on different rows. Empty where the model's config.json does
    not say its shape.
    """
    settings, workload = dataclasses.asdict(config), Workload(row_length=seq_len)
    device: Device = "cuda" if cuda else "cpu"

    def peak(ranks: int = ranks, **changes: object) -> float:
        shape = model_shape(config.model)
        return training_memory(shape, settings | changes, workload, device=device, ranks=ranks).peak

    changes: dict[str, object] = {"dtype": "bf16", "activation_checkpointing": True}
    positions = config.rows_per_microbatch * seq_len
    chunk = Settings.of(settings).head_chunk(positions, device)
    # The head's own chunk where that is smaller; else four times as many chunks.
    changes["num_output_chunks"] = None if chunk > HEAD_CHUNK[device] else 4 * -(-positions // int(chunk))
    changes["rows_per_microbatch"] = max(1, config.rows_per_microbatch // 2)
    if cuda:
        changes |= {"cpu_offload": True, "activation_offloading": True, "optimizer": "adamw_8bit"}
    try:
        now = peak()
        found = {f"{name}: {value}": now - peak(**{name: value}) for name, value in changes.items()}
        if config.lora_rank is None and config.tensor_parallel == 1:
            found[f"lora_rank: {_LORA_RANK} (adapters alone are trained)"] = now - peak(lora_rank=_LORA_RANK)
        found[f"{2 * ranks} processes with different rows"] = now - peak(2 * ranks)
    except ModelFolderError:
        return {}
    worth = {name.replace("True", "true").replace("None", "null"): saved for name, saved in found.items() if saved > 0}
    return dict(sorted(worth.items(), key=lambda pair: -pair[1]))


def advice(config: TrainingConfig, seq_len: int) -> str:
    """The same in words, for an error message, on this machine and with as many processes as there are."""
    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    ranks = int(os.environ.get("WORLD_SIZE", "1")) // config.tensor_parallel
    found = savings(config, seq_len, cuda=cuda, ranks=max(1, ranks))
    parts = [f"{name} would save about {saved / 2**30:.2g} GiB" for name, saved in found.items()]
    return f"with rows of {seq_len} positions, " + (", ".join(parts) or "shorter rows would save most")
