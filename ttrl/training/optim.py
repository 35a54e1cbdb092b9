"""The optimizer, its learning rate as a function of the global step, and its state by parameter name."""

import json
import math
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ttrl.configs import TrainingConfig
from ttrl.errors import DivergedError, RunFolderError
from ttrl.files import atomic_folder, write_json
from ttrl.training.distributed import Ranks
from ttrl.training.policy import Policy, copy_whole, full_tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(config: TrainingConfig, step: int) -> float:
    """The learning rate of global step `step` (from 0): linear warm-up, then constant, or falling to 0 at `total_steps`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    assert config.total_steps is not None
    done = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    return config.lr * ((1 - done) if config.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)


def make_optimizer(policy: Policy, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101); weight decay on matrices alone, not on norms and biases."""
    parameters = policy.parameters_by_name()
    groups = [
        {"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def clip_and_step(policy: Policy, optimizer: torch.optim.Optimizer, config: TrainingConfig, global_step: int) -> float:
    """One clip, one step at the learning rate of `global_step`, one zero_grad. Returns the global gradient norm before clipping.

    Raises DivergedError before the step where the gradient is not finite.
    """
    limit = config.max_grad_norm if config.max_grad_norm is not None else math.inf
    norm = float(full_tensor(torch.nn.utils.clip_grad_norm_(policy.parameters(), limit)))
    if not math.isfinite(norm):
        raise DivergedError(
            f"optimizer step {global_step + 1}: the gradient norm is {norm}, so the step was not taken and nothing was saved; "
            "lower lr or max_grad_norm, and check the start model for NaN weights"
        )
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, global_step)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def save_state(folder: str | Path, policy: Policy, optimizer: torch.optim.Optimizer, global_step: int, ranks: Ranks) -> None:
    """Writes optimizer.safetensors (moments under "NAME.exp_avg", whole, whatever the number of ranks) and state.json, atomically
    as one folder. A collective: all ranks must call it."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in policy.parameters_by_name().items():
        state = optimizer.state[parameter]
        for moment in _MOMENTS:
            tensors[f"{name}.{moment}"] = full_tensor(state[moment]).cpu().contiguous()
        tensors[f"{name}.step"] = full_tensor(state["step"]).cpu().reshape(1).clone()
    if ranks.is_first:
        with atomic_folder(folder) as temporary:
            save_file(tensors, temporary / "optimizer.safetensors")
            write_json(temporary / "state.json", {"schema": 1, "global_step": global_step})
    ranks.barrier()


def load_state(folder: str | Path, policy: Policy, optimizer: torch.optim.Optimizer) -> int:
    """Restores what `save_state` wrote, whatever the number of ranks was; returns the global step.

    Raises RunFolderError where the state is missing or of another model.
    """
    folder = Path(folder)
    try:
        global_step = int(json.loads((folder / "state.json").read_text())["global_step"])
        tensors = load_file(folder / "optimizer.safetensors")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise RunFolderError(f"{folder}: the optimizer state cannot be read: {error}") from error
    parameters = policy.parameters_by_name()
    wanted = {f"{name}.{part}" for name in parameters for part in (*_MOMENTS, "step")}
    if wanted != tensors.keys():
        odd = sorted(wanted ^ tensors.keys())
        raise RunFolderError(
            f"{folder}: the optimizer state is of another model: {len(odd)} names differ, the first is {odd[0]!r}"
        )
    for name, parameter in parameters.items():
        for moment in _MOMENTS:
            shape = tensors[f"{name}.{moment}"].shape
            if shape != parameter.shape:
                raise RunFolderError(
                    f"{folder}: the optimizer state is of another model: {name} is {tuple(shape)} there "
                    f"and {tuple(parameter.shape)} in the model"
                )
    with torch.no_grad():
        for name, parameter in parameters.items():
            state = optimizer.state[parameter]
            state["step"] = tensors[f"{name}.step"].reshape(()).to(parameter.device)
            for moment in _MOMENTS:
                state[moment] = torch.zeros_like(parameter)
                copy_whole(state[moment], tensors[f"{name}.{moment}"])
    return global_step
