"""Spread parameters over processes: FSDP2 over the data ranks, tensor parallelism over the
processes sharing a layer, or both.

Tensor parallelism (Megatron-LM, arXiv 1909.08053) splits the columns of q, k, v, w1, w3 (whole
heads: attention itself needs no communication), the rows of the output projections, and the
vocabulary of embeddings and head. Every process computes all norms; q/k norms see only the local
heads: their gradients are summed. Adapters are split with their layers: the matrix on the split
side is split, the other, of low rank, is on all.

Shapes: B rows, T tokens, H heads, E dimension of a head, D width, V vocabulary. Has run on CPU over
gloo, and on one GPU with CPU offload; several GPUs: never run.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from ttrl.configs import TrainingConfig
from ttrl.training.parallel.distributed import DATA, TENSOR, Ranks


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a possibly sharded tensor; a collective if it is sharded."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


@torch.no_grad()
def gather_whole(tensor: Tensor, here: Ranks) -> Tensor | None:
    """Return the whole tensor on the first process, on the device of its parts; None on the others.

    The others send their parts and receive nothing. A collective of all processes, if it is
    sharded.
    """
    part = local_part(tensor).detach()
    if (
        not isinstance(tensor, DTensor)
        or here.processes == 1
        or all(how.is_replicate() for how in tensor.placements)
    ):
        if here.is_first:
            return part
        return None
    assert tensor.device_mesh.size() == here.processes
    places = _places_of_parts(tensor)
    sizes = [part.element_size() * math.prod(_lengths(place)) for place in places]
    sent = _padded_bytes(part, max(sizes))
    if part.device.type == "cpu":
        group = here.host_group
    else:
        group = None
    if not here.is_first:
        distributed.gather(sent, dst=0, group=group)
        return None
    received = sent.new_empty(len(places), max(sizes))
    distributed.gather(sent, list(received), dst=0, group=group)
    if _follow_each_other(places, tensor.shape):
        return received.view(-1)[: sum(sizes)].view(part.dtype).view(tensor.shape)
    whole = part.new_empty(tensor.shape)
    for place, size, row in zip(places, sizes, received, strict=True):
        whole[place] = row[:size].view(part.dtype).view(_lengths(place))
    return whole


def _places_of_parts(tensor: DTensor) -> list[tuple[slice, ...]]:
    """Return the place of each process's part in the whole tensor, in the order of processes."""
    mesh = tensor.device_mesh
    places = []
    for rank in range(mesh.size()):
        [coordinates] = (mesh.mesh == rank).nonzero().tolist()
        found = _compute_local_shape_and_global_offset(
            tensor.shape, mesh.shape, coordinates, tensor.placements
        )
        places.append(_as_slices(*found, tensor.shape))
    return places


def _lengths(place: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in place)


def _padded_bytes(part: Tensor, size: int) -> Tensor:
    """Return the bytes of a tensor, and as many behind them as are missing to `size`; a copy only
    if there are any, or gaps.
    """
    flat = part.contiguous().view(-1).view(torch.uint8)
    if len(flat) == size:
        return flat
    padded = flat.new_zeros(size)
    padded[: len(flat)] = flat
    return padded


def _follow_each_other(places: Sequence[tuple[slice, ...]], shape: torch.Size) -> bool:
    """Tell whether parts are consecutive whole rows, with only the last ones shorter than the
    first.
    """
    most = places[0][0].stop
    starts = [min(number * most, shape[0]) for number in range(len(places))]
    in_order = [place[0].start for place in places] == starts
    return in_order and all(_lengths(place)[1:] == tuple(shape[1:]) for place in places)


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a possibly sharded tensor; the gradient flows through."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def place_of_part(like: Tensor) -> tuple[slice, ...]:
    """Return the place of this process's part in the whole of `like`."""
    if not isinstance(like, DTensor):
        return tuple(slice(0, length) for length in like.shape)
    found = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return _as_slices(*found, like.shape)


def _as_slices(
    lengths: Sequence[int], offsets: Sequence[int], whole: Sequence[int]
) -> tuple[slice, ...]:
    starts = [min(offset, size) for offset, size in zip(offsets, whole, strict=True)]
    return tuple(
        slice(start, start + length) for start, length in zip(starts, lengths, strict=True)
    )


def part_to_write(tensor: Tensor, here: Ranks) -> tuple[Tensor, list[int]] | None:
    """Return this process's part of a tensor and its offset in the whole; None if it is empty, or
    another process's to write: the first of several with the same part writes it."""
    copies = [here.rank, here.tensor_rank]
    if isinstance(tensor, DTensor):
        coordinates = tensor.device_mesh.get_coordinate()
        assert coordinates is not None
        copies = [
            where
            for where, how in zip(coordinates, tensor.placements, strict=True)
            if how.is_replicate()
        ]
    part = local_part(tensor.detach())
    if any(copies) or not part.numel():
        return None
    return (part, [own.start for own in place_of_part(tensor)])


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return the part of `whole` matching this process's part of `like`: a view, to read nothing
    else from a file.
    """
    if isinstance(like, DTensor):
        return whole[place_of_part(like)]
    return whole


@torch.no_grad()
def copy_whole(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into a possibly sharded one, converting dtype and device."""
    local_part(target).copy_(part_of(whole, target))


def materialise(module: nn.Module, device: torch.device, but: Iterable[Tensor] = ()) -> None:
    """Give every parameter on the meta device memory on `device`, unset; buffers, and those in
    `but`, stay as they are.
    """
    left = {id(tensor) for tensor in but}

    def give(tensor: Tensor) -> Tensor:
        wanted = tensor.is_meta and isinstance(tensor, nn.Parameter) and id(tensor) not in left
        if wanted:
            return torch.empty_like(tensor, device=device)
        return tensor

    module._apply(give)


class _SameEverywhere(ParallelStyle):
    """A module with whole parameters on every process, for an input equal on all (or, with `shard`,
    split along that dimension: the parameters' gradients are then partial sums).
    """

    def __init__(self, shard: int | None = None) -> None:
        super().__init__()
        self.placement = Replicate() if shard is None else Shard(shard)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            first, *rest = inputs
            return (DTensor.from_local(first, mesh, (self.placement,), run_check=False), *rest)

        def leave(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, input_fn=enter, output_fn=leave)


class Share(NamedTuple):
    """A split linear layer's exchanges with the other processes of a mesh. With `rows`, it takes
    parts of the input and sums the outputs; else the input is whole, and each process has a part of
    the output.
    """

    mesh: DeviceMesh
    rows: bool
    gathered: bool = False
    """Whether the output is put together."""

    def entered(self, x: Tensor) -> Tensor:
        """Return the input, with its gradient summed if each process knows a part of it."""
        if self.rows:
            return x
        return DTensor.from_local(x, self.mesh, (Replicate(),), run_check=False).to_local(
            grad_placements=(Partial(),)
        )

    def summed(self, y: Tensor) -> Tensor:
        if self.rows:
            return self._whole(y, Partial(), y.shape[-1])
        return y

    def left(self, y: Tensor, width: int) -> Tensor:
        """Return the output, `width` wide in all, as others want it."""
        if self.gathered:
            return self._whole(y, Shard(y.ndim - 1), width)
        return y

    def _whole(self, y: Tensor, placement: Placement, width: int) -> Tensor:
        shape = torch.Size((*y.shape[:-1], width))
        stride = torch.empty(shape, device="meta").stride()
        spread = DTensor.from_local(
            y, self.mesh, (placement,), run_check=False, shape=shape, stride=stride
        )
        return local_part(spread.redistribute(placements=(Replicate(),)))

    def lengths(self, lengths: Tensor) -> Tensor:
        """Return the lengths of split vectors, from those of their parts; without a gradient."""
        if not self.rows:
            return lengths
        squares = lengths.square()
        distributed.all_reduce(squares, group=self.mesh.get_group())
        return squares.sqrt()


def with_partial_gradient(parameter: Tensor) -> Tensor:
    """Return this process's part of a parameter; it will know one summand of its gradient."""
    if isinstance(parameter, DTensor):
        return parameter.to_local(grad_placements=(Partial(),))
    return parameter


class _WithAdapter(ParallelStyle):
    """A layer with adapters (`ttrl.training.policy.lora`); it exchanges by itself, as its `share`
    says.
    """

    def __init__(self, rows: bool = False, gathered: bool = False) -> None:
        super().__init__()
        self.rows = rows
        self.gathered = gathered

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        whole = Replicate()
        dealt = Shard(1 if self.rows else 0)
        alike = ("bias", "lora_b", "magnitude") if self.rows else ("lora_a",)
        for name, parameter in list(module.named_parameters(recurse=False)):
            spread = distribute_tensor(
                parameter.detach(), device_mesh, (whole if name in alike else dealt,)
            )
            setattr(module, name, nn.Parameter(spread, requires_grad=parameter.requires_grad))
        module.share = Share(device_mesh, self.rows, self.gathered)  # type: ignore[assignment]
        return module


class TiedHead:
    """The output projection with vocabulary-sharded embeddings: h [..., D], the same on all →
    logits [..., V], whole.
    """

    def __init__(self, whole: Any, mesh: DeviceMesh) -> None:
        """Spread the head of a decoder in one process, `whole`."""
        self.tied_module = whole.tied_module
        self._whole = whole
        self._mesh = mesh

    def __call__(self, h: Tensor) -> Tensor:
        spread = DTensor.from_local(h, self._mesh, (Replicate(),), run_check=False)
        logits = self._whole(spread)
        assert isinstance(logits, DTensor)
        return local_part(logits.redistribute(placements=(Replicate(),)))


_COLUMNS = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.w1", "mlp.w3")
_ROWS = ("attn.output_proj", "mlp.w2")
_OVER_HEADS = ("attn.q_norm", "attn.k_norm")  # on [B, T, H, E] with this process's heads


def tensor_parallel_plan(decoder: nn.Module) -> dict[str, ParallelStyle]:
    """Return the parallel style of each decoder module with its own parameters, by name."""
    plan: dict[str, ParallelStyle] = {}
    for name, module in decoder.named_modules():
        if not list(module.parameters(recurse=False)):
            continue
        if hasattr(module, "lora_a"):
            plan[name] = _WithAdapter(name.endswith(_ROWS), gathered=name == "output")
        elif name == "tok_embeddings":
            plan[name] = RowwiseParallel(input_layouts=Replicate())
        elif name == "output":
            plan[name] = ColwiseParallel(output_layouts=Replicate())
        elif name.endswith(_COLUMNS):
            plan[name] = ColwiseParallel()
        elif name.endswith(_ROWS):
            plan[name] = RowwiseParallel()
        else:
            plan[name] = _SameEverywhere(2 if name.endswith(_OVER_HEADS) else None)
    return plan


def apply_tensor_parallel(decoder: Any, mesh: DeviceMesh) -> None:
    """Spread a decoder over the processes of a one-dimensional mesh; its hidden states and logits
    stay whole on each.
    """
    parallelize_module(decoder, mesh, tensor_parallel_plan(decoder))
    if hasattr(decoder.output, "tied_module"):
        decoder.output = TiedHead(decoder.output, mesh)


def gathered_precision(config: TrainingConfig, device: torch.device) -> MixedPrecisionPolicy:
    """Choose the dtypes of gathering and reducing. On CUDA with bf16, parameters are gathered in
    bf16 and gradients reduced in fp32, and the stream between layers stays fp32; else all are
    gathered as held, and autocast converts as without FSDP. DoRA's are also gathered as held:
    rounding a magnitude or a row's length to bf16 (0.4%) would hide its training, and checkpoints
    are merged from unrounded ones.
    """
    mixed = config.dtype == "bf16" and device.type == "cuda" and config.lora_kind != "dora"
    if not mixed:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)


def apply_fsdp(
    policy: nn.Module,
    layers: Any,
    config: TrainingConfig,
    here: Ranks,
    precision: MixedPrecisionPolicy | None = None,
) -> None:
    """Shard each layer, and the root's remaining parameters, over the data ranks (FSDP2).

    precision: default `gathered_precision`.
    """
    assert here.mesh is not None
    shard = functools.partial(
        fully_shard,
        mesh=here.mesh[DATA],
        mp_policy=precision or gathered_precision(config, here.device),
        offload_policy=CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy(),
    )
    for layer in layers:
        shard(layer, reshard_after_forward=config.reshard_after_forward)
    shard(policy)


def fsdp_parameters(policy: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's record of each parameter (PyTorch's FSDPParam); nothing without FSDP2."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            group = getattr(state, "_fsdp_param_group", None)
            if group is not None:
                before_2_13 = [group]
            else:
                before_2_13 = []
            for group in getattr(state, "_fsdp_param_groups", before_2_13):
                yield from group.fsdp_params


def reset_shards(policy: nn.Module) -> None:
    """Make FSDP find its shards again, after their data was replaced."""
    for parameter in fsdp_parameters(policy):
        parameter.reset_sharded_param()


def shard(
    policy: Any, config: TrainingConfig, here: Ranks, between: Callable[[], None] = lambda: None
) -> None:
    """Spread a policy, also on the meta device. `between` wraps layers after tensor parallelism and
    before FSDP.
    """
    if here.tensor_ranks > 1:
        assert here.mesh is not None
        apply_tensor_parallel(policy.decoder, here.mesh[TENSOR])
        policy.vocab_group = here.tensor_group
    between()
    if here.world_size > 1 and here.tensor_ranks > 1:
        # It warns at every gather of a tensor sharded in two dimensions; there is no other way to
        # gather one.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if here.world_size > 1 or config.cpu_offload:
        apply_fsdp(policy, policy.decoder.layers, config, here)
