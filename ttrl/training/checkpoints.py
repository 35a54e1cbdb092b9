"""Write checkpoints in Hugging Face layout; transformers and vLLM load them unchanged.

Config, tokenizer and chat template are copied from the starting folder. Weights are sharded
safetensors, in fp32 by default. canary.json holds the outputs expected from them
(`ttrl.training.trainer_canary`). The first process gathers and writes one shard at a time; the
others send it their parts, tensor by tensor, and receive nothing.
"""

import functools
import hashlib
import math
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ttrl.configs import TrainingConfig
from ttrl.data.packing.packed_file import read_tensor
from ttrl.errors import StorageError
from ttrl.facts import dumped
from ttrl.records import ADAPTER_FOLDER, CANARY_FILE, Canary, WeightPart
from ttrl.system.files import atomic_folder, json_text, model_files, read_object
from ttrl.training.models.architecture import uses_transformers
from ttrl.training.models.layouts import EMBEDDINGS, HEAD, layout_of_class
from ttrl.training.models.weights import (
    Stored,
    bytes_of,
    composite_of,
    iter_stored,
    layout_of,
    names_in,
    stored_as,
    stored_names,
    write_tensors,
)
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.parallel.weight_memory import Held, WeightMemory
from ttrl.training.policy.adapters import base_folder, gather_adapter, merged_weight
from ttrl.training.policy.lora import adapted, is_adapter
from ttrl.training.policy.policy import Policy
from ttrl.training.trainer_canary import compute_canary

MAX_SHARD_BYTES = 5 * 10**9
_HASHING_THREADS = 4
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

CheckpointDtype = Literal["fp32", "bf16"]


class CheckpointTensor(NamedTuple):
    """A tensor to write: its size in bytes, a function to gather it on the first process (a
    collective for sharded parameters), and its parameters, concatenated along its rows (if
    transposed, its columns); none for other tensors."""

    name: str
    size: int
    gather: Callable[[], Tensor | None]
    parameters: tuple[Tensor, ...] = ()
    transposed: bool = False
    within: bool = False
    """Whether it is a part of a sharded parameter, such as one of a layer's experts."""


def copy_model_files(source: Path, target: Path, dtype: str = "float32") -> None:
    """Copy a model folder's files, except weights, and set `dtype` in its config. Raises
    ModelFolderError as `model_files`."""
    for path in model_files(source):
        if path.name != CANARY_FILE:
            place = target / path.relative_to(source)
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, place)
    config = dict(read_object(target / "config.json"))
    for part in [
        config,
        *(
            part
            for name in ("text_config", "vision_config")
            if isinstance(part := config.get(name), dict)
        ),
    ]:
        if part is config or "dtype" in part or "torch_dtype" in part:
            part.pop("torch_dtype", None)  # the older name
            part["dtype"] = dtype
    (target / "config.json").write_text(json_text(config), encoding="utf-8")


def _entries(policy: Policy, dtype: torch.dtype, here: Ranks) -> Iterator[CheckpointTensor]:
    """Yield the parameters under their Hugging Face names, fused if the family stores them so, with
    their adapters merged in.
    """
    parameters = {
        name: parameter
        for name, parameter in policy.parameters_by_name().items()
        if not is_adapter(name)
    }
    layers = {f"{name}.weight": layer for name, layer in adapted(policy).items()}
    last: dict[str, Tensor | None] = {}
    """The last gathered parameter: a layer's experts are one parameter but many stored tensors."""

    def gathered(name: str) -> Tensor | None:
        if name not in last:
            last.clear()
            last[name] = merged_weight(parameters[name], layers.get(name), here)
        return last[name]

    for stored in stored_as(parameters, policy.decoder.config):

        def gather(stored: Stored = stored) -> Tensor | None:
            wholes = []
            for name in stored.parameters:
                whole = gathered(name)
                if whole is not None:
                    wholes.append(whole.to(device="cpu", dtype=dtype))
            if wholes:
                return stored.joined(wholes)
            return None

        own: tuple[Tensor, ...] = tuple(parameters[name] for name in stored.parameters)
        within = False
        if stored.layout is not None:
            shape = stored.joined([torch.empty(own[0].shape, device="meta")]).shape
            within = isinstance(own[0], DTensor) and shape != own[0].shape
            size = math.prod(shape) * dtype.itemsize
            own = own if within else (stored.joined(own),)
        else:
            size = sum(part.numel() for part in own) * dtype.itemsize
        yield CheckpointTensor(stored.name, size, gather, own, stored.transposed, within)


def _entries_as_in(
    folder: Path, policy: Policy, entries: list[CheckpointTensor]
) -> list[CheckpointTensor]:
    """Rename the entries as in `folder`, and add its other tensors, such as image towers,
    unchanged."""
    config = policy.decoder.config
    if not uses_transformers(config):
        return _entries_beside_text(folder, entries)
    places = names_in(folder, config)
    tied = config.tie_word_embeddings
    renamed = [entry._replace(name=places[entry.name][1]) for entry in entries]
    own = {entry.name for entry in renamed}
    others = []
    for file, name, tensor in iter_stored(folder):
        if name not in own and not (tied and name.endswith(HEAD)):
            others.append(
                CheckpointTensor(
                    name, tensor.nbytes, functools.partial(read_tensor, folder / file, name)
                )
            )
    heads = []
    if tied:
        (embeddings,) = layout_of_class(config)[0].views(f"{EMBEDDINGS}.weight", torch.empty(0))
        source = next(entry for entry in renamed if entry.name == places[embeddings][1])
        heads = [_copied(source, name) for name in stored_names(folder) if name.endswith(HEAD)]
    return renamed + others + heads


def _copied(entry: CheckpointTensor, name: str) -> CheckpointTensor:
    """Return an entry once more under another name, such as the embeddings as a tied head."""

    def gather() -> Tensor | None:
        whole = entry.gather()
        if whole is None:
            return None
        return whole.clone()

    return entry._replace(name=name, gather=gather)


def _entries_beside_text(folder: Path, entries: list[CheckpointTensor]) -> list[CheckpointTensor]:
    """Rename the entries for a multimodal model, and add its other parameters unchanged."""
    composite = composite_of(folder)
    if composite is None:
        return entries
    others = []
    layout = composite.layouts[0]
    for file, name, tensor in iter_stored(folder):
        if name.startswith(composite.frozen):
            others.append(
                CheckpointTensor(
                    name, tensor.nbytes, functools.partial(read_tensor, folder / file, name)
                )
            )
        elif (found := layout_of(name, composite)) is not None and not name.startswith("lm_head."):
            layout, _ = found
    renamed = []
    for entry in entries:
        plain = next(plain for plain in layout if entry.name.startswith(plain))
        renamed.append(entry._replace(name=layout[plain] + entry.name.removeprefix(plain)))
    return renamed + others


def _shards(entries: list[CheckpointTensor], max_bytes: int) -> list[list[CheckpointTensor]]:
    """Divide entries into shards, in order, as many to a shard as fit; a tensor above the limit
    gets a shard of its own.
    """
    shards: list[list[CheckpointTensor]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.size > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.size
    return shards


def _send_weights(entries: list[CheckpointTensor], max_bytes: int, here: Ranks) -> None:
    """Send this process's parts to the first one, during its `_write_weights`."""
    for shard in _shards(entries, max_bytes):
        here.barrier()
        for entry in shard:
            if entry.parameters:
                entry.gather()


def _write_weights(
    folder: Path, entries: list[CheckpointTensor], max_bytes: int, here: Ranks
) -> tuple[dict[str, str], dict[str, str]]:
    """Write shards, and an index for several shards; on the first process only. Returns `weights`
    and `files` of the canary, hashed from memory.
    """
    shards = _shards(entries, max_bytes)
    weight_map: dict[str, str] = {}
    files: dict[str, str] = {}
    digests: dict[str, Future[str]] = {}
    # Digests are computed during gathering and writing: SHA-256 is slower than most disks.
    with ThreadPoolExecutor(_HASHING_THREADS) as hashing:
        for number, shard in enumerate(shards, 1):
            if len(shards) == 1:
                file = "model.safetensors"
            else:
                file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            tensors: dict[str, Tensor] = {}
            # The others wait here, and not in a GPU's queue, while a shard is written.
            here.barrier()
            for entry in shard:
                tensor = entry.gather()
                assert tensor is not None
                tensors[entry.name] = tensor.contiguous()
                digests[entry.name] = hashing.submit(_digest, tensors[entry.name])
                weight_map[entry.name] = file
            files[file] = write_tensors(folder / file, tensors, {"format": "pt"})
            wait(digests.values())  # frees their tensors for the next shard
    if len(shards) > 1:
        metadata = {"total_size": sum(entry.size for entry in entries)}
        index = json_text({"metadata": metadata, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    return {name: digest.result() for name, digest in digests.items()}, files


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def hand_over(
    memory: WeightMemory,
    policy: Policy,
    start_folder: str | Path,
    checkpoint_dtype: CheckpointDtype,
) -> list[WeightPart]:
    """Offer the policy to servers in memory, with the checkpoint's tensors in the policy's compute
    dtype. A collective. Returns the parts written by all ranks; raises StorageError. Not for
    adapters: servers get them as files.
    """
    assert not adapted(policy)
    if torch.bfloat16 in (policy.compute_dtype, _DTYPES[checkpoint_dtype]):
        dtype = torch.bfloat16
    else:
        dtype = torch.float32
    # The worker makes its head from the embeddings.
    tied = policy.decoder.config.tie_word_embeddings
    own = list(_entries(policy, dtype, memory.here))
    if any(entry.within for entry in own):
        raise StorageError(
            "ttrl does not share distributed experts in memory; servers read the checkpoint's files"
        )
    entries = [
        entry
        for entry in _entries_as_in(Path(start_folder), policy, own)
        if not (tied and entry.name.endswith(HEAD))
    ]
    held = []
    for entry in entries:
        blocks = entry.parameters
        if not blocks:  # it is read from a file
            tensor = entry.gather()
            assert tensor is not None
            blocks = (tensor,)
        if entry.transposed:
            turned = tuple(block.detach().T for block in blocks)
        else:
            turned = blocks
        held.append(Held(entry.name, turned, dim=int(entry.transposed)))
    return memory.write(held, dtype)


def write_merged(
    folder: Path,
    policy: Policy,
    base: Path,
    checkpoint_dtype: CheckpointDtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write only the merged weights of base and adapter; for one process with all of them."""
    here = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    entries = _entries_as_in(base, policy, list(_entries(policy, _DTYPES[checkpoint_dtype], here)))
    _write_weights(folder, entries, max_shard_bytes, here)


def canary_of(
    policy: Policy, start_folder: str | Path, ranks: Ranks, checkpoint_dtype: CheckpointDtype
) -> Canary:
    """Return the canary of a checkpoint of the policy. A collective."""
    canary = compute_canary(policy, ranks.device, Path(start_folder))
    if checkpoint_dtype == "fp32":
        return canary
    return replace(canary, dtype="bfloat16")


def save_checkpoint(
    folder: str | Path,
    policy: Policy,
    start_folder: str | Path,
    ranks: Ranks,
    *,
    checkpoint_dtype: CheckpointDtype = "fp32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config: TrainingConfig | None = None,
    canary: Canary | None = None,
) -> None:
    """Write the policy as a model folder, atomically. A collective; rank 0 writes. `config`: the
    training config, for its adapter settings; without it adapters are merged, and not written
    separately. `canary`: the result of `canary_of`, if known.

    With checkpoint_dtype "bf16" the parameters are rounded, and the canary needs the tolerance of
    bfloat16. Training continues from the rounded weights and loses small updates.
    """
    if canary is None:
        canary = canary_of(policy, start_folder, ranks, checkpoint_dtype)
    dtype = _DTYPES[checkpoint_dtype]
    adapter = None
    is_merged = True
    if config is not None and config.lora_rank is not None:
        start_folder = base_folder(config)
        adapter = gather_adapter(policy, config, start_folder, ranks)
        is_merged = config.lora_merge
    entries = []
    if is_merged:
        entries = _entries_as_in(Path(start_folder), policy, list(_entries(policy, dtype, ranks)))
    if ranks.is_first:
        with atomic_folder(folder, sum(entry.size for entry in entries)) as temporary:
            copy_model_files(
                Path(start_folder),
                temporary,
                "float32" if checkpoint_dtype == "fp32" else "bfloat16",
            )
            if is_merged:
                weights, files = _write_weights(temporary, entries, max_shard_bytes, ranks)
                canary = replace(canary, weights=weights, files=files)
            if adapter is not None:
                adapter.write(temporary / ADAPTER_FOLDER)
            (temporary / CANARY_FILE).write_text(dumped(canary), encoding="utf-8")
    elif is_merged:
        _send_weights(entries, max_shard_bytes, ranks)
    ranks.barrier()
