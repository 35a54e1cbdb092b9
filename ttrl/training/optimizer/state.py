"""The optimizer's state on disk, by parameter name: written by any number of ranks, read by any other.

    whole     optimizer.safetensors: each tensor gathered, one at a time, and held and written by the first rank
    sharded   torch.distributed.checkpoint: each rank writes the parts that it has, for models whose state no one rank can hold

Both hold "NAME.exp_avg", "NAME.exp_avg_sq" and "NAME.step", next to state.json: in fp32, or moments of 8 bits as they are, with
"NAME.exp_avg_scale", which has a number for each block of 256. Where parts of several processes end inside of blocks, moments of
8 bits are written in fp32, and rounded once more when they are loaded: the largest of a block can come back smaller by 0.7%."""

import contextlib
import json
import math
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
from torch.distributed.tensor import DTensor, Shard
from torchao.optim import AdamW8bit, CPUOffloadOptimizer
from torchao.optim.subclass_8bit import OptimState8bit

from ttrl.errors import RunFolderError, StorageError
from ttrl.system.files import atomic_folder, json_text
from ttrl.training.models.weights import write_tensors
from ttrl.training.optimizer.optimizer import Optimizer, OptimizerInBackward
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.parallel.sharding import copy_whole, full_tensor, local_part, part_of
from ttrl.training.policy.policy import Policy

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALE = "_scale"  # behind a moment's name
_BLOCK, _SMALLEST = 256, 4096  # torchao's: numbers that share a scale, and of a part that is held in 8 bits
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
    return _sharded_as(moment, local.dequantize()) if isinstance(local, OptimState8bit) else moment


def _sharded_as(like: Tensor, local: Tensor) -> Tensor:
    """Return this process's part as a tensor that is sharded as `like` is, with as many rows; of its shape where the part has
    that of `like`'s."""
    if not isinstance(like, DTensor):
        return local
    shape = like.shape if local.shape == local_part(like).shape else torch.Size((like.shape[0], *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)


def _whole_blocks(moment: Tensor) -> bool:
    """Tell whether every process's part of a moment of 8 bits is in 8 bits, and blocks end where rows do."""
    if not isinstance(moment, DTensor):
        return True
    parts = moment.device_mesh.size()
    rows = [len(rows) for rows in torch.arange(moment.shape[0]).chunk(parts)]
    width = math.prod(moment.shape[1:])
    return moment.placements == (Shard(0),) and len(rows) == parts and width % _BLOCK == 0 and rows[-1] * width >= _SMALLEST


def _as_stored(name: str, moment: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a moment under its name in the files: in fp32, or codes and scales, the latter by rows if blocks end with them."""
    local = local_part(moment)
    if not _whole_blocks(moment):
        yield name, _plain(moment)
    elif isinstance(local, OptimState8bit):
        by_rows = math.prod(local.shape[1:]) % _BLOCK == 0
        yield name, _sharded_as(moment, local.codes)
        yield name + _SCALE, _sharded_as(moment, local.scale.view(local.shape[0], -1)) if by_rows else local.scale
    else:
        yield name, moment


def state_tensors(policy: Policy, optimizer: Optimizer, as_stored: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield ("NAME.PART", tensor) of all trained parameters, sharded as the parameters are: in fp32, or as they are stored. Zeros
    if no step was taken yet."""
    moments = _moments(optimizer)
    for name, parameter in policy.parameters_by_name().items():
        if not (parameter.requires_grad and moments):
            continue
        owner, key = _optimizer_of(optimizer, parameter)
        state = owner.state[key] or {}
        for moment in moments:
            value = state[moment] if moment in state else torch.zeros_like(parameter)
            yield from _as_stored(f"{name}.{moment}", value) if as_stored else [(f"{name}.{moment}", _plain(value))]
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
    one = next(iter(optimizer.by_parameter.values())) if isinstance(optimizer, OptimizerInBackward) else optimizer
    each = 2 * (1 if isinstance(one, AdamW8bit) else 4)
    size = sum(each * parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    if state_format == "sharded" or (state_format == "auto" and ranks.processes > 1 and size > WHOLE_STATE_LIMIT):
        _save_sharded(Path(folder), dict(state_tensors(policy, optimizer, as_stored=True)), global_step, ranks, beside)
        return
    tensors: dict[str, Tensor] = {}
    for name, tensor in state_tensors(policy, optimizer, as_stored=True):
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
                for name in (name for name in names if not name.endswith(_SCALE)):
                    scale = stored.get_tensor(name + _SCALE) if name + _SCALE in names else None
                    _restore(parameters, optimizer, name, stored.get_tensor(name), scale)
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
        entries = {name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}
        _check(folder, policy, optimizer, {name: tuple(entry.size) for name, entry in entries.items()})
        parameters = policy.parameters_by_name()
        tensors = {name: _room_for(name, entries, parameters) for name in entries}
        with _without_warning():
            load(tensors, storage_reader=reader, no_dist=not distributed.is_initialized())
    except CheckpointException as error:
        raise RunFolderError(f"{folder}: the optimizer state cannot be read: {error}") from error
    for name, tensor in tensors.items():
        if not name.endswith(_SCALE):
            _restore(parameters, optimizer, name, tensor, tensors.get(name + _SCALE))


def _room_for(name: str, entries: Mapping[str, TensorStorageMetadata], parameters: Mapping[str, nn.Parameter]) -> Tensor:
    """Return a tensor into which an entry can be read: sharded as its parameter; whole, and on the CPU, the step count, and
    moments of 8 bits whose blocks do not end with this parameter's parts."""
    base, _, part = name.rpartition(".")
    entry, parameter = entries[name], parameters[base]
    scale = entries.get(name.removesuffix(_SCALE) + _SCALE)
    parts_fit = scale is None or (len(scale.size) == 2 and getattr(parameter, "placements", None) == (Shard(0),))
    if part == "step" or not isinstance(parameter, DTensor) or not parts_fit:
        return torch.zeros(entry.size, dtype=entry.properties.dtype)
    if entry.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
    local = local_part(parameter)
    return _sharded_as(parameter, local.new_zeros((local.shape[0], *entry.size[1:]), dtype=entry.properties.dtype))


def _check(folder: Path, policy: Policy, optimizer: Optimizer, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise RunFolderError if the stored names and shapes are not those of this policy and optimizer."""
    shapes = {name: shape for name, shape in shapes.items() if not name.endswith(_SCALE)}
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
def _restore(
    parameters: Mapping[str, nn.Parameter], optimizer: Optimizer, entry: str, value: Tensor, scale: Tensor | None
) -> None:
    """Put one tensor, whole or sharded as its parameter, into the optimizer's state. `scale`: of codes of 8 bits."""
    name, _, part = entry.rpartition(".")
    parameter = parameters[name]
    owner, key = _optimizer_of(optimizer, parameter)
    state = owner.state[key]
    if part == "step":
        eight_bit = isinstance(owner, AdamW8bit)
        state["step"] = value.reshape(()).to("cpu" if eight_bit else key.device, copy=True)
        return
    signed = part == "exp_avg"
    state[part] = owner._new_buffer(key, signed) if isinstance(owner, AdamW8bit) else torch.zeros_like(key)
    local = local_part(state[part])
    if scale is not None:
        if _copy_codes(local, state[part], value, scale):
            return
        codes, scales = local_part(value), local_part(scale).reshape(-1)
        qmap = OptimState8bit.zeros((_BLOCK,), signed, _BLOCK, codes.device).qmap
        value = _sharded_as(value, OptimState8bit(codes, scales, qmap, signed).dequantize())
    if isinstance(value, DTensor):
        local.copy_(local_part(value))
    else:
        copy_whole(state[part], value)


def _copy_codes(local: Tensor, moment: Tensor, codes: Tensor, scale: Tensor) -> bool:
    """Copy codes and scales into this process's part of a moment, and return True, where both have the same blocks."""
    if not isinstance(local, OptimState8bit) or not _whole_blocks(moment):
        return False
    if isinstance(moment, DTensor) and not isinstance(codes, DTensor):
        if scale.ndim == 1:
            return False
        first = torch.arange(codes.shape[0]).view(-1, 1).expand(codes.shape)
        rows = part_of(first, moment)[:, 0]
        codes, scale = codes[rows], scale[rows]
    local.codes.copy_(local_part(codes))
    local.scale.copy_(local_part(scale).reshape(-1))
    return True
