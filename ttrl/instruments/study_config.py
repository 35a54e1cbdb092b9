"""Turn the config of an iteration into that of its study: one process, on this machine.

Settings of memory and speed change no result, so a study leaves them out: shards of a layer or of
the optimizer's state, the CPU's memory, compiled code, an optimizer in the backward pass. Files of
any number of processes hold whole weights, and the state is read from its parts. So a run of
several GPUs is studied by one process, and one of a GPU on a CPU, with enough memory. A run folder
may be copied to another place: files inside of it are found there.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from omegaconf import OmegaConf

from ttrl.configs import GRPOConfig
from ttrl.errors import ConfigError, RunFolderError

StudyDevice = Literal["cpu", "cuda"]

_PATHS = ("model", "packed", "state", "sampler_model", "reference_model", "lora_base")
_WANTED = ("model", "packed", "state")
_OUTSIDE = {
    "tensor_parallel": 1,
    "cpu_offload": False,
    "compile": False,
    "optimizer_in_backward": False,
    "optimizer_on_cpu": False,
    "sampler_rows": 0,
    "follow": None,
    "hand_over": False,
    "free_memory": False,
}
"""Settings without an effect on results, and their values in a study."""


def study_config(
    checkpoint: Path, scratch: str, device: StudyDevice | None, number: int = 0
) -> GRPOConfig:
    """Return the config for the study of update `number`, from 0, of the iteration that made
    `checkpoint`. device: None takes the run's. Raises RunFolderError if a file of the start is
    gone, ConfigError for a missing device or compiler.
    """
    path = checkpoint.parent / "grpo.yaml"
    if not path.is_file():
        raise RunFolderError(
            f"no checkpoint {path}; give a trained iteration's, such as "
            "runs/NAME/iterations/0007/checkpoint"
        )
    values: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    config = GRPOConfig.parse(values, str(path))
    if config.kept is not None:
        raise RunFolderError(
            f"{path}: the iteration started from weights in the trainer's memory, those of "
            f"iteration {config.kept}, and no file has them (save_every): study an iteration "
            "after a written checkpoint, or run with save_every 1"
        )
    run = checkpoint.parent.parent.parent
    places = {name: _found(getattr(config, name), run) for name in _PATHS}
    for name in _WANTED:
        place = places[name]
        if place is not None and not Path(place).exists():
            raise RunFolderError(
                f"{name} of {path} is gone: {place}; a run keeps the states of its last two "
                "iterations and keep_checkpoints checkpoints. Study one of those, and start in "
                "the run's working directory, or study a copy of the run's whole folder"
            )
    where = _device(config, device, path)
    own: dict[str, Any] = {"output_dir": scratch, "device": where, **places, **_OUTSIDE}
    if where != config.device:
        own["num_threads"] = None
    if where == "cpu":
        own["activation_offloading"] = False
    if number and config.optimizer == "adamw_8bit" and where == "cpu" and not _has_compiler():
        raise ConfigError(
            str(path),
            [
                f"update {number + 1} follows steps of 'adamw_8bit', to be repeated with a C++ "
                "compiler on the CPU, and there is none: install g++, or study update 1"
            ],
        )
    return dataclasses.replace(config, **own)


def _device(config: GRPOConfig, device: StudyDevice | None, path: Path) -> StudyDevice:
    """Return the device of the study. Raises ConfigError if it is not there."""
    has_gpu = torch.cuda.is_available()
    wanted = device or config.device
    if wanted == "auto":
        return "cuda" if has_gpu else "cpu"
    if wanted == "cuda" and not has_gpu:
        if device is None:
            whose = "that of the run"
        else:
            whose = "--device"
        what = f"the device is 'cuda' ({whose}), and PyTorch sees no GPU here"
        raise ConfigError(str(path), [f"{what}; --device cpu studies the run on the CPU"])
    return wanted


def _found(place: str | None, run: Path) -> str | None:
    """Return a path of the config; if it is gone, its place in a copy of the run's folder."""
    if place is None or Path(place).exists():
        return place
    parts = Path(place).parts
    if "iterations" in parts:
        copied = run.joinpath(*parts[parts.index("iterations") :])
        if copied.exists():
            return str(copied)
    return place


def _has_compiler() -> bool:
    return any(shutil.which(name) for name in ("c++", "g++", "clang++"))
