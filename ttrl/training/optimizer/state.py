"""The optimizer's state on disk, by parameter name: written by any number of ranks, read by any other.

    whole     optimizer.safetensors: each tensor gathered, one at a time, and held and written by the first rank
    sharded   torch.distributed.checkpoint: each rank writes the parts that it has, for models whose state no one rank can hold

Both hold "NAME.exp_avg", "NAME.exp_avg_sq" and "NAME.step" in fp32, next to state.json. So do 8-bit moments, which are rounded
once more when they are loaded: the largest of a block can come back smaller by 0.7%."""

import contextlib
import json
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit, CPUOffloadOptimizer

from ttrl.errors import RunFolderError, StorageError
from ttrl.system.files import atomic_folder, json_text
from ttrl.training.models.weights import write_tensors
from ttrl.training.optimizer.optimizer import Optimizer, OptimizerInBackward
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.parallel.sharding import copy_whole, full_tensor, local_part
from ttrl.training.policy.policy import Policy

_MOMENTS = ("exp_avg", "exp_avg_sq")
_DAMAGE = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError),
    *(pickle.UnpicklingError, EOFError, IndexError, ImportError),  # of torch.distributed.checkpoint's .metadata
)
WHOLE_STATE_LIMIT = 8e9
"""Bytes of state up to which "auto" stores it whole."""


def _optimizer_of(optimizer: Optimizer, parameter: nn.Parameter) -> tuple[torch.optim.Optimizer, Any]:
    """Return the optimizer that has a parameter's state, and the key under which it has it."""
    if isinstance(optimizer, OptimizerInBackward):
        return optimizer.by_parameter[parameter], parameter
    if isinstance(optimizer, CPUOffloadOptimizer):  # never run on a GPU
        if parameter in optimizer.optim_dict:
            return optimizer.optim_dict[parameter], optimizer.param_d2h_map[parameter]
        return optimizer.d_opt, parameter
    return optimizer, parameter


def _moments(optimizer: Optimizer) -> tuple[str, ...]:
    one = next(iter(optimizer.by_parameter.values())) if isinstance(optimizer, OptimizerInBackward) else optimizer
    return () if isinstance(one, torch.optim.SGD) else _MOMENTS


def _plain(moment: Tensor) -> Tensor:
    """Return 8-bit moments as fp32, sharded as they are; others unchanged."""
    local = local_part(moment)
    if not hasattr(local, "dequantize") or type(local) is Tensor:
        return moment
    local = local.dequantize()
    if not isinstance(moment, DTensor):
        return local
    return DTensor.from_local(
        local, moment.device_mesh, moment.placements, run_check=False, shape=moment.shape, stride=moment.stride()
    )


def state_tensors(policy: Policy, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield ("NAME.PART", tensor) of all trained parameters, sharded as the parameters are. Zeros if no step was taken yet."""
    moments = _moments(optimizer)
    for name, parameter in policy.parameters_by_name().items():
        if not (parameter.requires_grad and moments):
            continue
        owner, key = _optimizer_of(optimizer, parameter)
        state = owner.state[key] or {}
        for moment in moments:
            yield f"{name}.{moment}", _plain(state[moment]) if moment in state else torch.zeros_like(parameter)
        step = full_tensor(state["step"]) if "step" in state else torch.zeros(())
        yield f"{name}.step", step.cpu().reshape(1).clone()


def save_state(
    folder: str | Path,
    policy: Policy,
    optimizer: Optimizer,
    global_step: int,
    ranks: Ranks,
    state_format: str = "auto",
    beside: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write the state and state.json, atomically as one folder. A collective. state_format: as in TrainingConfig. beside: writes
    what else belongs in the folder; called on the first rank. Raises StorageError."""
    size = sum(2 * 4 * parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    if state_format == "sharded" or (state_format == "auto" and ranks.processes > 1 and size > WHOLE_STATE_LIMIT):
        _save_sharded(Path(folder), dict(state_tensors(policy, optimizer)), global_step, ranks, beside)
        return
    tensors: dict[str, Tensor] = {}
    for name, tensor in state_tensors(policy, optimizer):
        whole = full_tensor(tensor)
        if ranks.is_first:
            tensors[name] = whole.cpu().contiguous()
    if ranks.is_first:
        with atomic_folder(folder, sum(tensor.nbytes for tensor in tensors.values())) as temporary:
            files = {"optimizer.safetensors": write_tensors(temporary / "optimizer.safetensors", tensors)}
            beside(temporary)
            header = json_text({"schema": 1, "global_step": global_step, "files": files})
            (temporary / "state.json").write_text(header, encoding="utf-8")
    ranks.barrier()


@contextlib.contextmanager
def _without_warning() -> Iterator[None]:
    """Hide the warning about running in a single process, which is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _save_sharded(
    folder: Path, tensors: dict[str, Tensor], global_step: int, ranks: Ranks, beside: Callable[[Path], None]
) -> None:
    with contextlib.ExitStack() as stack:
        place: list[Any] = [stack.enter_context(atomic_folder(folder)) if ranks.is_first else None]
        if ranks.processes > 1:
            distributed.broadcast_object_list(place, device=ranks.device)
        writer = FileSystemWriter(place[0], sync_files=False)  # atomic_folder syncs them all
        try:
            with _without_warning():
                save(tensors, storage_writer=writer, no_dist=ranks.processes == 1)
        except (CheckpointException, OSError) as error:
            raise StorageError(0, f"could not write {folder}: {error}; make room, or look at the permissions") from error
        if ranks.is_first:
            beside(place[0])
            header = json_text({"schema": 1, "global_step": global_step, "format": "sharded"})
            (place[0] / "state.json").write_text(header, encoding="utf-8")
    ranks.barrier()


def load_state(folder: str | Path, policy: Policy, optimizer: Optimizer) -> int:
    """Restore what `save_state` wrote, in either format, whatever the number of ranks was; returns the global step. Raises
    RunFolderError where the state is missing, damaged, or of another model or optimizer."""
    folder = Path(folder)
    try:
        header = json.loads((folder / "state.json").read_text())
        global_step = int(header["global_step"])
        if header.get("format") == "sharded":
            _load_sharded(folder, policy, optimizer)
        else:
            with safe_open(folder / "optimizer.safetensors", framework="pt") as stored:
                names = stored.keys()
                _check(folder, policy, optimizer, {name: tuple(stored.get_slice(name).get_shape()) for name in names})
                parameters = policy.parameters_by_name()
                for name in names:
                    _restore(parameters, optimizer, name, stored.get_tensor(name))
    except RunFolderError:
        raise
    except _DAMAGE as error:
        raise RunFolderError(
            f"{folder}: the optimizer state cannot be read: {error}; copy it again, or leave state out to start afresh"
        ) from error
    return global_step


def _load_sharded(folder: Path, policy: Policy, optimizer: Optimizer) -> None:
    reader = FileSystemReader(folder)
    try:
        stored = reader.read_metadata().state_dict_metadata
        shapes = {name: tuple(entry.size) for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}
        _check(folder, policy, optimizer, shapes)
        tensors = {name: torch.zeros_like(tensor) for name, tensor in state_tensors(policy, optimizer)}
        with _without_warning():
            load(tensors, storage_reader=reader, no_dist=not distributed.is_initialized())
    except CheckpointException as error:
        raise RunFolderError(f"{folder}: the optimizer state cannot be read: {error}") from error
    parameters = policy.parameters_by_name()
    for name, tensor in tensors.items():
        _restore(parameters, optimizer, name, tensor)


def _check(folder: Path, policy: Policy, optimizer: Optimizer, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise RunFolderError if the stored names and shapes are not those of this policy and optimizer."""
    wanted: dict[str, tuple[int, ...]] = {}
    for name, parameter in policy.parameters_by_name().items():
        if parameter.requires_grad and _moments(optimizer):
            wanted |= {f"{name}.{moment}": tuple(parameter.shape) for moment in _moments(optimizer)} | {f"{name}.step": (1,)}
    if wanted.keys() != shapes.keys():
        odd = sorted(wanted.keys() ^ shapes.keys())
        raise RunFolderError(
            f"{folder}: the optimizer state is of another model or optimizer: {len(odd)} names differ, the first is {odd[0]!r}"
        )
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise RunFolderError(
                f"{folder}: the optimizer state is of another model: {name.rpartition('.')[0]} is {shapes[name]} there "
                f"and {shape} in the model"
            )


@torch.no_grad()
def _restore(parameters: Mapping[str, nn.Parameter], optimizer: Optimizer, entry: str, value: Tensor) -> None:
    """Put one tensor, whole or sharded as its parameter, into the optimizer's state."""
    name, _, part = entry.rpartition(".")
    parameter = parameters[name]
    owner, key = _optimizer_of(optimizer, parameter)
    state = owner.state[key]
    if part == "step":
        eight_bit = isinstance(owner, AdamW8bit)
        state["step"] = value.reshape(()).to("cpu" if eight_bit else key.device, copy=True)
        return
    state[part] = owner._new_buffer(key, part == "exp_avg") if isinstance(owner, AdamW8bit) else torch.zeros_like(key)
    if isinstance(value, DTensor):
        local_part(state[part]).copy_(local_part(value))
    else:
        copy_whole(state[part], value)
