"""Store the optimizer's state on disk, by parameter name: written and read by any number of ranks.

    whole     optimizer.safetensors: the first rank gathers each tensor, one at a time, holds and
              writes them
    sharded   RANK.safetensors and RANK.json: each rank writes its parts and their offsets in the
              whole, for models with a state too large for one rank; no pickle, unlike
              torch.distributed.checkpoint: pickles can run code

Both hold the optimizer's tensors, next to state.json: of AdamW "NAME.exp_avg", "NAME.exp_avg_sq"
and "NAME.step"; of RMSprop "NAME.square_avg" and "NAME.step"; with momentum, RMSprop and SGD also
"NAME.momentum_buffer"; on request "NAME.value", the parameter itself. They are in fp32, or moments
of 8 bits as they are, with "NAME.exp_avg_scale", a number for each block of 256. If parts of
several processes end inside of blocks, moments of 8 bits are written in fp32, and rounded once more
when loaded: the largest of a block can come back smaller by 0.7%.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torchao.optim import AdamW8bit, CPUOffloadOptimizer
from torchao.optim.subclass_8bit import OptimState8bit

from ttrl.errors import RunFolderError, StorageError
from ttrl.facts import Facts, parse
from ttrl.system.files import atomic_folder, json_text, read_object
from ttrl.training.models.weights import DTYPES, FILE_DTYPES, write_tensors
from ttrl.training.optimizer.optimizer import Optimizer, OptimizerInBackward
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.parallel.sharding import (
    copy_whole,
    full_tensor,
    gather_whole,
    local_part,
    part_of,
    part_to_write,
    place_of_part,
)
from ttrl.training.policy.policy import Policy

_ADAM = ("exp_avg", "exp_avg_sq")
_MOMENTUM = "momentum_buffer"
_STEP = "step"
_VALUE = "value"
_SCALE = "_scale"  # behind a moment's name
# torchao's block: numbers with one scale, in a part held in 8 bits.
_BLOCK = 256
_SMALLEST = 4096
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)
WHOLE_STATE_LIMIT = 8e9
"""The most bytes of state stored whole by "auto"."""


def _optimizer_of(
    optimizer: Optimizer, parameter: nn.Parameter
) -> tuple[torch.optim.Optimizer, Any]:
    """Return the optimizer with a parameter's state, and its key there."""
    if isinstance(optimizer, OptimizerInBackward):
        return optimizer.by_parameter[parameter], parameter
    if isinstance(optimizer, CPUOffloadOptimizer):
        if parameter in optimizer.optim_dict:
            return optimizer.optim_dict[parameter], optimizer.param_d2h_map[parameter]
        return optimizer.d_opt, parameter
    return optimizer, parameter


def _one_of(optimizer: Optimizer) -> torch.optim.Optimizer:
    if isinstance(optimizer, OptimizerInBackward):
        return next(iter(optimizer.by_parameter.values()))
    return optimizer


def _moments(optimizer: Optimizer) -> tuple[str, ...]:
    """Return the names of the tensors of a parameter's shape in the optimizer's state."""
    one = _one_of(optimizer)
    if not isinstance(one, torch.optim.SGD | torch.optim.RMSprop):
        return _ADAM
    found = ("square_avg",) if isinstance(one, torch.optim.RMSprop) else ()
    if one.defaults["momentum"]:
        return (*found, _MOMENTUM)
    return found


def _counts_steps(optimizer: Optimizer) -> bool:
    return not isinstance(_one_of(optimizer), torch.optim.SGD)


def _plain(moment: Tensor) -> Tensor:
    """Return 8-bit moments as fp32, sharded as they are; others unchanged."""
    local = local_part(moment)
    if isinstance(local, OptimState8bit):
        return _sharded_as(moment, local.dequantize())
    return moment


def rounded_to_8_bits(moment: Tensor, signed: bool) -> Tensor:
    """Return a moment as `adamw_8bit` would hold it: small tensors stay in fp32."""
    if moment.numel() < _SMALLEST or moment.numel() % _BLOCK:
        return moment.float()
    codes = OptimState8bit.zeros(moment.shape, signed, _BLOCK, moment.device)
    codes.copy_(moment.float())
    rounded: Tensor = codes.dequantize()
    return rounded


def _sharded_as(like: Tensor, local: Tensor) -> Tensor:
    """Return this process's part as a tensor sharded like `like`, with as many rows; of its shape
    if the part has the shape of `like`'s."""
    if not isinstance(like, DTensor):
        return local
    if local.shape == local_part(like).shape:
        shape = like.shape
    else:
        shape = torch.Size((like.shape[0], *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )


def _whole_blocks(moment: Tensor) -> bool:
    """Tell whether every process's part of an 8-bit moment is in 8 bits, with blocks ending at row
    ends.
    """
    if not isinstance(moment, DTensor):
        return True
    parts = moment.device_mesh.size()
    rows = [len(rows) for rows in torch.arange(moment.shape[0]).chunk(parts)]
    width = math.prod(moment.shape[1:])
    return (
        moment.placements == (Shard(0),)
        and len(rows) == parts
        and width % _BLOCK == 0
        and rows[-1] * width >= _SMALLEST
    )


def _as_stored(name: str, moment: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a moment under its name in the files: in fp32, or codes and scales, the latter by rows
    if blocks end with them.
    """
    local = local_part(moment)
    if not _whole_blocks(moment):
        yield name, _plain(moment)
    elif isinstance(local, OptimState8bit):
        by_rows = math.prod(local.shape[1:]) % _BLOCK == 0
        yield name, _sharded_as(moment, local.codes)
        yield (
            name + _SCALE,
            _sharded_as(moment, local.scale.view(local.shape[0], -1)) if by_rows else local.scale,
        )
    else:
        yield name, moment


def state_tensors(
    policy: Policy, optimizer: Optimizer, as_stored: bool = False, weights: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield ("NAME.PART", tensor) of all trained parameters, sharded as the parameters are: in
    fp32, or as they are stored. Zeros if no step was taken yet. weights: the parameters, too."""
    moments = _moments(optimizer)
    for name, parameter in policy.parameters_by_name().items():
        if parameter.requires_grad and weights:
            yield f"{name}.{_VALUE}", parameter.detach()
        if not (parameter.requires_grad and moments):
            continue
        owner, key = _optimizer_of(optimizer, parameter)
        state = owner.state[key] or {}
        for moment in moments:
            if moment in state:
                value = state[moment]
            else:
                value = torch.zeros_like(parameter)
            yield from (
                _as_stored(f"{name}.{moment}", value)
                if as_stored
                else [(f"{name}.{moment}", _plain(value))]
            )
        if not _counts_steps(optimizer):
            continue
        if _STEP in state:
            step = full_tensor(state[_STEP])
        else:
            step = torch.zeros(())
        yield f"{name}.{_STEP}", step.cpu().reshape(1).clone()


def save_state(
    folder: str | Path,
    policy: Policy,
    optimizer: Optimizer,
    global_step: int,
    ranks: Ranks,
    state_format: str = "auto",
    beside: Callable[[Path], None] = lambda _: None,
    *,
    weights: bool = False,
) -> None:
    """Write the state and state.json, atomically as one folder. A collective. state_format: as in
    TrainingConfig. beside: writes the folder's other files; called on the first rank. weights: with
    the trained parameters. Raises StorageError.
    """
    bytes_of_moment = 1 if isinstance(_one_of(optimizer), AdamW8bit) else 4
    each = len(_moments(optimizer)) * bytes_of_moment + 4 * weights
    size = sum(
        each * parameter.numel() for parameter in policy.parameters() if parameter.requires_grad
    )
    if state_format == "sharded" or (
        state_format == "auto" and ranks.processes > 1 and size > WHOLE_STATE_LIMIT
    ):
        _save_sharded(
            Path(folder),
            state_tensors(policy, optimizer, as_stored=True, weights=weights),
            global_step,
            ranks,
            beside,
        )
        return
    tensors: dict[str, Tensor] = {}
    for name, tensor in state_tensors(policy, optimizer, as_stored=True, weights=weights):
        whole = gather_whole(tensor, ranks)
        if whole is not None:
            tensors[name] = whole.cpu().contiguous()
    if ranks.is_first:
        with atomic_folder(folder, sum(tensor.nbytes for tensor in tensors.values())) as temporary:
            files = {
                "optimizer.safetensors": write_tensors(temporary / "optimizer.safetensors", tensors)
            }
            beside(temporary)
            header = json_text({"schema": 1, "global_step": global_step, "files": files})
            (temporary / "state.json").write_text(header, encoding="utf-8")
    ranks.barrier()


def _save_sharded(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    global_step: int,
    ranks: Ranks,
    beside: Callable[[Path], None],
) -> None:
    with contextlib.ExitStack() as stack:
        if ranks.is_first:
            own = stack.enter_context(atomic_folder(folder))
        else:
            own = None
        place = Path(ranks.texts_of_each(str(own or ""))[0])
        problem = ""
        try:
            _write_parts(place, ranks, tensors)
        except OSError as error:
            problem = str(error)
        # All are written when it returns.
        found = [one for one in ranks.texts_of_each(problem) if one]
        if found:
            raise StorageError(
                0, f"could not write {folder}: {found[0]}; make room, or check the permissions"
            )
        if own is not None:
            beside(own)
            header = {
                "schema": 1,
                "global_step": global_step,
                "format": "sharded",
                "ranks": ranks.processes,
            }
            (own / "state.json").write_text(json_text(header), encoding="utf-8")
    ranks.barrier()


def _write_parts(folder: Path, ranks: Ranks, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write this process's parts (`part_to_write`). Raises OSError."""
    parts = {}
    table = {}
    for name, tensor in tensors:
        found = part_to_write(tensor, ranks)
        if found is not None:
            part, starts = found
            parts[name] = part.cpu().contiguous()
            table[name] = {
                "dtype": FILE_DTYPES[part.dtype],
                "shape": list(tensor.shape),
                "start": starts,
            }
    stem = f"{ranks.rank * ranks.tensor_ranks + ranks.tensor_rank:05}"
    write_tensors(folder / f"{stem}.safetensors", parts)
    (folder / f"{stem}.json").write_text(json_text(table), encoding="utf-8")


def load_state(
    folder: str | Path, policy: Policy, optimizer: Optimizer, *, weights: bool = False
) -> int:
    """Restore a state of `save_state`, in either format, from any number of ranks; returns the
    global step. weights: it holds the trained parameters. Raises RunFolderError if the state is
    missing, damaged, or of another model or optimizer.
    """
    folder = Path(folder)
    try:
        header = parse(_Header, (folder / "state.json").read_bytes())
        if header.format == "sharded":
            if header.ranks is None:
                raise RunFolderError(
                    f"{folder}: an earlier ttrl wrote this state as a pickle, and reading pickles "
                    "can run code; leave state out to start the optimizer from zero, or train one "
                    "more iteration with that ttrl and state_format 'whole'"
                )
            _load_sharded(folder, header.ranks, policy, optimizer, weights)
        else:
            with safe_open(folder / "optimizer.safetensors", framework="pt") as stored:
                shapes = {
                    name: tuple(stored.get_slice(name).get_shape())
                    for name in stored.keys()  # noqa: SIM118  # not a dict
                }
                _check(folder, policy, optimizer, shapes, weights)
                _restore_all(policy, optimizer, shapes, stored.get_tensor)
    except RunFolderError:
        raise
    except _DAMAGE as error:
        raise RunFolderError(
            f"{folder}: the optimizer state cannot be read: {error}; copy it again, or leave state "
            "out to start from zero"
        ) from error
    return header.global_step


class _Header(Facts):
    """What is read of state.json."""

    global_step: int
    format: str | None = None
    ranks: int | None = None


class _Stored(NamedTuple):
    """A tensor of a sharded state, and the places of its parts."""

    dtype: torch.dtype
    shape: torch.Size
    parts: list[tuple[Any, list[int]]]
    """The open file, and its part's offset in the whole."""


def _load_sharded(
    folder: Path, ranks: int, policy: Policy, optimizer: Optimizer, weights: bool
) -> None:
    stored: dict[str, _Stored] = {}
    with contextlib.ExitStack() as stack:
        for rank in range(ranks):
            table = read_object(folder / f"{rank:05}.json")
            file = stack.enter_context(safe_open(folder / f"{rank:05}.safetensors", framework="pt"))
            for name, part in table.items():
                one = stored.setdefault(
                    name, _Stored(DTYPES[part["dtype"]], torch.Size(part["shape"]), [])
                )
                one.parts.append((file, part["start"]))
        shapes = {name: tuple(one.shape) for name, one in stored.items()}
        _check(folder, policy, optimizer, shapes, weights)
        parameters = policy.parameters_by_name()
        _restore_all(policy, optimizer, stored, lambda name: _read(name, stored, parameters))


@torch.no_grad()
def _read(
    name: str, stored: Mapping[str, _Stored], parameters: Mapping[str, nn.Parameter]
) -> Tensor:
    """Return a tensor, or this process's part of it, from the overlapping stored parts. Raises
    ValueError if some of it is missing."""
    room = _room_for(name, stored, parameters)
    own = local_part(room)
    wanted = place_of_part(room)
    left = own.numel()
    for file, starts in stored[name].parts:
        part = file.get_slice(name)
        ends = [start + length for start, length in zip(starts, part.get_shape(), strict=True)]
        common = [
            (max(w.start, s), min(w.stop, e)) for w, s, e in zip(wanted, starts, ends, strict=True)
        ]
        if all(begin < end for begin, end in common):
            here = tuple(
                slice(begin - w.start, end - w.start)
                for (begin, end), w in zip(common, wanted, strict=True)
            )
            there = tuple(
                slice(begin - start, end - start)
                for (begin, end), start in zip(common, starts, strict=True)
            )
            own[here].copy_(part[there])
            left -= own[here].numel()
    if left:
        raise ValueError(f"{name}: no file has {left} of its numbers")
    return room


def _room_for(
    name: str, stored: Mapping[str, _Stored], parameters: Mapping[str, nn.Parameter]
) -> Tensor:
    """Return a tensor for reading an entry: sharded as its parameter; whole, and on the CPU, for
    the step count, and for 8-bit moments with blocks not ending at this parameter's parts.
    """
    base, _, part = name.rpartition(".")
    entry = stored[name]
    parameter = parameters[base]
    scale = stored.get(name.removesuffix(_SCALE) + _SCALE)
    parts_fit = scale is None or (
        len(scale.shape) == 2 and getattr(parameter, "placements", None) == (Shard(0),)
    )
    if entry.shape.numel() > max(1, parameter.numel()):
        raise ValueError(
            f"{name} has {entry.shape.numel()} numbers, but its parameter {parameter.numel()}"
        )
    if part == _STEP or not isinstance(parameter, DTensor) or not parts_fit:
        return torch.zeros(entry.shape, dtype=entry.dtype)
    if entry.shape == parameter.shape:
        return torch.zeros_like(parameter, dtype=entry.dtype, requires_grad=False)
    local = local_part(parameter)
    return _sharded_as(
        parameter, local.new_zeros((local.shape[0], *entry.shape[1:]), dtype=entry.dtype)
    )


def _check(
    folder: Path,
    policy: Policy,
    optimizer: Optimizer,
    shapes: Mapping[str, tuple[int, ...]],
    weights: bool,
) -> None:
    """Raise RunFolderError if the stored names and shapes are not those of this policy and
    optimizer.
    """
    shapes = {name: shape for name, shape in shapes.items() if not name.endswith(_SCALE)}
    wanted: dict[str, tuple[int, ...]] = {}
    for name, parameter in policy.parameters_by_name().items():
        if parameter.requires_grad and weights:
            wanted[f"{name}.{_VALUE}"] = tuple(parameter.shape)
        if parameter.requires_grad and _moments(optimizer):
            wanted |= {f"{name}.{moment}": tuple(parameter.shape) for moment in _moments(optimizer)}
            wanted |= {f"{name}.{_STEP}": (1,)} if _counts_steps(optimizer) else {}
    if wanted.keys() != shapes.keys():
        odd = sorted(wanted.keys() ^ shapes.keys())
        raise RunFolderError(
            f"{folder}: the optimizer state belongs to another model or optimizer: {len(odd)} "
            f"names differ, the first is {odd[0]!r}"
        )
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise RunFolderError(
                f"{folder}: the optimizer state belongs to another model: "
                f"{name.rpartition('.')[0]} is {shapes[name]} there and {shape} in the model"
            )


def _restore_all(
    policy: Policy, optimizer: Optimizer, names: Collection[str], read: Callable[[str], Tensor]
) -> None:
    """Put the tensors of these names into the optimizer's state; `read` returns one."""
    parameters = policy.parameters_by_name()
    for name in names:
        if not name.endswith(_SCALE):
            scale = None
            if name + _SCALE in names:
                scale = read(name + _SCALE)
            _restore(parameters, optimizer, name, read(name), scale)


@torch.no_grad()
def _restore(
    parameters: Mapping[str, nn.Parameter],
    optimizer: Optimizer,
    entry: str,
    value: Tensor,
    scale: Tensor | None,
) -> None:
    """Put one tensor, whole or sharded as its parameter, into the optimizer's state. `scale`: of
    codes of 8 bits.
    """
    name, _, part = entry.rpartition(".")
    parameter = parameters[name]
    if part == _VALUE:
        if isinstance(value, DTensor):
            local_part(parameter).copy_(local_part(value))
        else:
            copy_whole(parameter, value)
        return
    owner, key = _optimizer_of(optimizer, parameter)
    state = owner.state[key]
    if part == _STEP:
        # Only fused optimizers count on the device.
        place = key.device if owner.defaults.get("fused") else "cpu"
        state[_STEP] = value.reshape(()).to(place, copy=True)
        return
    signed = part == "exp_avg"
    state[part] = (
        owner._new_buffer(key, signed) if isinstance(owner, AdamW8bit) else torch.zeros_like(key)
    )
    local = local_part(state[part])
    if scale is not None:
        if _copy_codes(local, state[part], value, scale):
            return
        codes = local_part(value)
        scales = local_part(scale).reshape(-1)
        qmap = OptimState8bit.zeros((_BLOCK,), signed, _BLOCK, codes.device).qmap
        value = _sharded_as(value, OptimState8bit(codes, scales, qmap, signed).dequantize())
    if isinstance(value, DTensor):
        local.copy_(local_part(value))
    else:
        copy_whole(state[part], value)


def _copy_codes(local: Tensor, moment: Tensor, codes: Tensor, scale: Tensor) -> bool:
    """Copy codes and scales into this process's part of a moment, and return True, if both have the
    same blocks.
    """
    if not isinstance(local, OptimState8bit) or not _whole_blocks(moment):
        return False
    if isinstance(moment, DTensor) and not isinstance(codes, DTensor):
        if scale.ndim == 1:
            return False
        first = torch.arange(codes.shape[0]).view(-1, 1).expand(codes.shape)
        rows = part_of(first, moment)[:, 0]
        codes = codes[rows]
        scale = scale[rows]
    local.codes.copy_(local_part(codes))
    local.scale.copy_(local_part(scale).reshape(-1))
    return True
