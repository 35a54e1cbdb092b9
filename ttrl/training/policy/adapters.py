"""Store adapters in the layout of peft, and load them with their base.

    checkpoint/                            the merged model, as any other checkpoint; or no weights
                                           (`ttrl.training.merge`)
    checkpoint/adapter/                    the form for peft, and for vLLM with --enable-lora
        adapter_config.json                rank, scale, targets, and the folder of the base, in
                                           peft's words
        adapter_model.safetensors          base_model.model.model.layers.0….q_proj.lora_A.weight, …,
                                           in fp32
        ttrl_adapter.json                  the same in ours

Training continues from base and adapter: merged weights are only served. If a family stores
matrices fused (Phi-3: q, k and v), peft sees one matrix: its A stacks ours, its B has ours along
the diagonal, and rank and alpha are multiplied by their number.
"""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ttrl.configs import GRPOConfig, TrainingConfig
from ttrl.errors import ConfigError, ModelFolderError
from ttrl.facts import parse
from ttrl.messages import JsonObject
from ttrl.records import ADAPTER_FOLDER, ADAPTER_SETTINGS
from ttrl.system.files import write_json
from ttrl.text import present
from ttrl.training.models.architecture import read_config
from ttrl.training.models.decoder import build_decoder
from ttrl.training.models.weights import (
    check_weights,
    composite_of,
    files_of,
    iter_weights,
    stored_as,
)
from ttrl.training.parallel.distributed import Ranks, derived_generator
from ttrl.training.parallel.sharding import copy_whole, full_tensor, gather_whole, materialise
from ttrl.training.policy.lora import (
    AdaptedLinear,
    adapted,
    apply_lora,
    is_adapter,
    merge,
    plain,
    without_adapters,
)
from ttrl.training.policy.policy import Policy, fill_parameters

PEFT_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of peft's wrappers
_THEIRS = {
    "lora_a": "lora_A.weight",
    "lora_b": "lora_B.weight",
    "magnitude": "lora_magnitude_vector",
}


# The base


@dataclasses.dataclass(frozen=True)
class AdapterSettings:
    """The base an adapter belongs to, and how: settings of TrainingConfig."""

    lora_base: str
    lora_rank: int
    lora_alpha: float
    lora_targets: list[str]
    lora_kind: str
    lora_base_dtype: str

    @classmethod
    def of(cls, config: TrainingConfig, base: str) -> "AdapterSettings":
        assert config.lora_rank is not None
        return cls(
            str(Path(base).absolute()),
            config.lora_rank,
            config.lora_alpha,
            sorted(config.lora_targets),
            config.lora_kind,
            config.lora_base_dtype,
        )

    @classmethod
    def read(cls, folder: Path) -> "AdapterSettings":
        """Read the settings in a folder of adapters. Raises ModelFolderError."""
        path = folder / ADAPTER_SETTINGS
        try:
            return parse(cls, path.read_bytes())
        except (OSError, ValueError) as error:
            raise ModelFolderError(
                f"{path} cannot be read ({error}); copy the checkpoint again"
            ) from error


def base_folder(config: TrainingConfig) -> str:
    """Return the folder with the frozen weights; `config.model` if there are no adapters. Raises
    ModelFolderError if `config.model` holds neither that base nor an adapter, ConfigError if the
    adapter is of another kind than the config's, or the config's reference is another model than
    the base.
    """
    if config.lora_rank is None:
        return config.model
    folder = Path(config.model, ADAPTER_FOLDER)
    base = config.lora_base or config.model
    if folder.is_dir():
        stored = AdapterSettings.read(folder)
        base = config.lora_base or stored.lora_base
        wanted = AdapterSettings.of(config, base)
        different = [
            f"{name} is {getattr(wanted, name)!r}, but {getattr(stored, name)!r} there"
            for name in ("lora_rank", "lora_alpha", "lora_targets", "lora_kind")
            if getattr(wanted, name) != getattr(stored, name)
        ]
        different += _other_numbers(config.lora_base_dtype, stored.lora_base_dtype, base)
        if different:
            raise ConfigError(
                "config", [f"{folder} holds another kind of adapter: {'; '.join(different)}"]
            )
        if not Path(base, "config.json").is_file():
            raise ModelFolderError(
                f"{folder} is an adapter to {base}, but that does not exist; give its new place "
                "with lora_base"
            )
    elif not _same_weights(config.model, base):
        raise ModelFolderError(
            f"{config.model} has no {ADAPTER_FOLDER}/, and its weights differ from lora_base, "
            f"{base}; leave lora_base out to begin an adapter to this model"
        )
    reference = getattr(config, "reference_model", None)
    if reference is not None and not _same_weights(reference, base):
        raise ConfigError(
            "config",
            [
                f"reference_model is {reference}, but the adapters' base is {base}, and with "
                "adapters the base is the reference: leave reference_model out, or store the "
                "other model's log-probabilities with the pack (python -m ttrl.training.prepass)"
            ],
        )
    return base


def _other_numbers(wanted: str, stored: str, base: str) -> list[str]:
    """Return an error, in a line, if bases held as `wanted` and as `stored` are not the same
    numbers. Those of "auto" and "fp32" are: a run can continue from one with the other."""
    exact = ("auto", "fp32")
    if wanted == stored or (wanted in exact and stored in exact):
        return []
    problem = f"lora_base_dtype is {wanted!r}, but {stored!r} there"
    if "nf4" in (wanted, stored):
        return [problem]
    rounded = [name for name, weight in iter_weights(base) if weight.dtype is not torch.bfloat16]
    if not rounded:
        return []
    return [f"{problem}: this would round {len(rounded)} tensors of {base}, such as {rounded[0]}"]


def _same_weights(one: str, other: str) -> bool:
    """Tell whether two folders hold the same weight files: one may link to the other's."""
    first = Path(one)
    second = Path(other)
    if not (first.is_dir() and second.is_dir()):
        return False
    if first.samefile(second):
        return True
    files = files_of(second)
    return files == files_of(first) and all(
        (first / name).samefile(second / name) for name in files
    )


# Loading


def fill_policy(policy: Policy, config: TrainingConfig, base: str) -> None:
    """Fill memory already allocated: the base's weights, frozen, and the adapter of `config.model`,
    or a new one. A collective if sharded. Raises ModelFolderError."""
    parameters = policy.parameters_by_name()
    layers = adapted(policy)
    device = next(p.device for name, p in parameters.items() if is_adapter(name))
    in_four_bits = {id(layer.weight): layer for layer in layers.values() if layer.weight.is_meta}

    def put(target: Tensor, whole: Tensor) -> None:
        if id(target) in in_four_bits:
            in_four_bits[id(target)].quantise(whole.to(device, torch.float32))
        else:
            copy_whole(target, whole)

    fill_parameters(
        {name: p for name, p in parameters.items() if not is_adapter(name)},
        base,
        put,
        config.decoder,
    )
    folder = Path(config.model, ADAPTER_FOLDER)
    if folder.is_dir():
        _load(folder, policy, base)
    else:
        begin_adapters(policy, config.seed)


def map_policy(config: TrainingConfig, base: str) -> Policy:
    """Return base and adapter on the CPU, for access to their weights: the base's stay in its
    memory-mapped files, in their dtype there. Raises ModelFolderError."""
    with torch.device("meta"):
        decoder = build_decoder(read_config(base, config.decoder))
        apply_lora(decoder, config)
    policy = Policy(decoder)
    frozen = {
        name: parameter
        for name, parameter in policy.parameters_by_name().items()
        if not is_adapter(name)
    }
    if config.lora_base_dtype == "nf4":
        layers = {id(layer.weight): layer for layer in adapted(policy).values()}
    else:
        layers = {}
    materialise(policy, torch.device("cpu"), but=frozen.values())

    def put(target: Tensor, whole: Tensor) -> None:
        if id(target) in layers:
            layers[id(target)].quantise(whole.float())
        else:
            if config.lora_base_dtype == "bf16":
                whole = whole.bfloat16()
            torch.utils.swap_tensors(target, nn.Parameter(whole, requires_grad=False))

    fill_parameters(frozen, base, put, config.decoder)
    _load(Path(config.model, ADAPTER_FOLDER), policy, base)
    return policy


@torch.no_grad()
def begin_adapters(policy: Policy, seed: int, label: str = "lora") -> None:
    """Start an adapter without effect: A uniform within ±1/√D, as peft's, B zero, magnitudes the
    rows' lengths. label: sets the draws of A apart from another adapter's.
    """
    for name, layer in adapted(policy).items():
        bound = 1 / math.sqrt(layer.in_features)
        a = (
            torch.rand(layer.lora_a.shape, generator=derived_generator(seed, label, name))
            * 2
            * bound
            - bound
        )
        copy_whole(layer.lora_a, a)
        layer.lora_b.zero_()
        if layer.magnitude is not None:
            copy_whole(
                layer.magnitude,
                torch.linalg.vector_norm(full_tensor(plain(layer.weight)).float(), dim=1),
            )


def _load(folder: Path, policy: Policy, base: str) -> None:
    try:
        tensors = {
            name: tensor.float() for name, tensor in load_file(folder / WEIGHTS_FILE).items()
        }
    except (SafetensorError, OSError) as error:
        raise ModelFolderError(
            f"{folder / WEIGHTS_FILE} cannot be read ({error}); copy the checkpoint again"
        ) from error
    fused = _fused(policy, base)
    wanted = {
        name: _together(one, part, _wholes(one, part, full_tensor))
        for one in fused
        for name, part in one.names()
    }
    check_weights(wanted, tensors, folder)
    for one in fused:
        for name, part in one.names():
            for layer, piece in zip(one.layers, _apart(one, part, tensors[name]), strict=True):
                if layer is not None and piece is not None:
                    copy_whole(getattr(layer, part), piece)
            if not torch.equal(
                tensors[name], _together(one, part, _wholes(one, part, full_tensor))
            ):
                raise ModelFolderError(
                    f"{folder}: {name} mixes matrices that ttrl separates; it cannot be continued"
                )


# A matrix as peft sees it


class _Fused(NamedTuple):
    """A checkpoint matrix with adapters, made of one or several matrices of ours."""

    name: str
    """Name of the module in peft."""
    layers: tuple[AdaptedLinear | None, ...]
    """None for parts without an adapter."""
    rows: tuple[int, ...]
    """Rows of each part."""
    transposed: bool = False
    """Whether it is stored as [in, out]; an adapter's tensors never are."""

    @property
    def adapted(self) -> list[AdaptedLinear]:
        return present(self.layers)

    def names(self) -> list[tuple[str, str]]:
        """Return the names of its tensors, theirs and ours."""
        return [
            (f"{_PREFIX}{self.name}.{theirs}", ours)
            for ours, theirs in _THEIRS.items()
            if getattr(self.adapted[0], ours) is not None
        ]


def _fused(policy: Policy, base: str | Path) -> list[_Fused]:
    layers = adapted(policy)
    composite = composite_of(base)
    shapes = {
        name: p.shape for name, p in policy.parameters_by_name().items() if not is_adapter(name)
    }
    found = []
    for stored in stored_as(shapes, policy.decoder.config):
        parts = tuple(layers.get(name.removesuffix(".weight")) for name in stored.parameters)
        if not stored.name.endswith(".weight") or not any(parts):
            continue
        name = stored.name.removesuffix(".weight")
        for plain_prefix, prefix in (composite.layouts[0] if composite is not None else {}).items():
            if name.startswith(plain_prefix):
                name = prefix + name.removeprefix(plain_prefix)
                break
        rows = tuple(shapes[parameter][0] for parameter in stored.parameters)
        found.append(_Fused(name, parts, rows, stored.transposed))
        if None in parts and found[-1].adapted[0].magnitude is not None:
            missing = stored.parameters[parts.index(None)].split(".")[-2]
            raise ConfigError(
                "config",
                [
                    f"lora_targets has no {missing}, but the model stores it in one matrix with "
                    "targets of yours; with lora_kind 'dora' (one length for each row of a "
                    f"matrix), add {missing}"
                ],
            )
    return found


@torch.no_grad()
def _wholes(
    one: _Fused, part: str, whole_of: Callable[[Tensor], Tensor | None]
) -> list[Tensor | None]:
    """Return the part of each layer's adapter, made whole by `whole_of`, on the CPU; None for a
    layer without one, and if `whole_of` returns None."""
    wholes = []
    for layer in one.layers:
        if layer is None:
            whole = None
        else:
            whole = whole_of(getattr(layer, part))
        wholes.append(None if whole is None else whole.detach().cpu())
    return wholes


def _together(one: _Fused, part: str, wholes: Sequence[Tensor | None]) -> Tensor:
    """Return a tensor of peft's from ours (`_wholes`)."""
    pieces = present(wholes)
    if part != "lora_b":
        return torch.cat(pieces)
    rank = pieces[0].shape[1]
    fused = pieces[0].new_zeros(sum(one.rows), rank * len(pieces))
    row = column = 0
    for piece, rows in zip(wholes, one.rows, strict=True):
        if piece is not None:
            fused[row : row + rows, column : column + rank] = piece
            column += rank
        row += rows
    return fused


def _apart(one: _Fused, part: str, fused: Tensor) -> list[Tensor | None]:
    """Undo `_together`."""
    if part == "magnitude":
        return list(fused.split(list(one.rows)))
    pieces: list[Tensor | None] = []
    row = column = 0
    for layer, rows in zip(one.layers, one.rows, strict=True):
        if layer is None:
            pieces.append(None)
        else:
            rank = layer.lora_a.shape[0]
            own = slice(column, column + rank)
            pieces.append(fused[own] if part == "lora_a" else fused[row : row + rows, own])
            column += rank
        row += rows
    return pieces


# Saving


class Adapter(NamedTuple):
    """The contents of a checkpoint's adapter/."""

    tensors: dict[str, Tensor]
    peft_config: JsonObject
    settings: AdapterSettings

    def write(self, folder: Path) -> None:
        folder.mkdir()
        save_file(self.tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        write_json(folder / PEFT_FILE, self.peft_config)
        write_json(folder / ADAPTER_SETTINGS, dataclasses.asdict(self.settings))


def gather_adapter(
    policy: Policy, config: TrainingConfig, base: str, here: Ranks
) -> Adapter | None:
    """Return the adapter whole on the first process, None on the others. A collective if the policy
    is sharded.
    """
    fused = _fused(policy, base)
    tensors: dict[str, Tensor] = {}
    for one in fused:
        for name, part in one.names():
            wholes = _wholes(one, part, functools.partial(gather_whole, here=here))
            if here.is_first:
                tensors[name] = _together(one, part, wholes).contiguous()
    if here.is_first:
        settings = AdapterSettings.of(config, base)
        return Adapter(tensors, _peft_config(fused, config, base), settings)
    return None


def _peft_config(fused: list[_Fused], config: TrainingConfig, base: str) -> JsonObject:
    assert config.lora_rank is not None
    alpha = int(config.lora_alpha) if config.lora_alpha.is_integer() else config.lora_alpha
    transposed = any(one.transposed for one in fused)

    # GPT-2 has a c_proj in attention and another one in the feed-forward layer.
    def module(one: _Fused) -> str:
        return ".".join(one.name.split(".")[-2 if transposed else -1 :])

    modules = sorted({module(one) for one in fused})
    several = {module(one): len(one.adapted) for one in fused if len(one.adapted) > 1}
    targets: str | list[str] = modules
    # A vision tower has modules of these names too.
    composite = composite_of(base)
    if composite is not None:
        beginnings = "|".join(re.escape(prefix) for prefix in composite.layouts[0].values())
        targets = rf"({beginnings}).*({'|'.join(modules)})"
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(base).absolute()),
        "r": config.lora_rank,
        "lora_alpha": alpha,
        "lora_dropout": config.lora_dropout,
        "target_modules": targets,
        "rank_pattern": {name: config.lora_rank * count for name, count in several.items()},
        "alpha_pattern": {name: alpha * count for name, count in several.items()},
        "use_dora": config.lora_kind == "dora",
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
    }


@torch.no_grad()
def merged_weight(parameter: Tensor, layer: AdaptedLinear | None, here: Ranks) -> Tensor | None:
    """Return a parameter of the base, with its adapter if it has one: whole and on its device on
    the first process, None on the others. A collective if sharded. A merged one is in fp32: 16-bit
    weights are widened before adding the adapter, to round only the sum."""
    whole = gather_whole(plain(parameter), here)
    if layer is None:
        return whole
    lora_a = gather_whole(layer.lora_a, here)
    lora_b = gather_whole(layer.lora_b, here)
    if layer.magnitude is None:
        magnitude = None
    else:
        magnitude = gather_whole(layer.magnitude, here)
    if whole is None or lora_a is None or lora_b is None:
        return None
    return merge(whole, lora_a, lora_b, magnitude, layer.scaling)


# The reference


@contextlib.contextmanager
def as_reference(policy: Policy, config: GRPOConfig) -> Iterator[None]:
    """Make the policy compute the reference model inside the block: the base, with adapters
    switched off, if there are any; else `config.reference_model`, with its weights swapped in. A
    collective if sharded.
    """
    if config.lora_rank is not None:
        with without_adapters(policy):
            yield
        return
    assert config.reference_model is not None, "the config's own check asks for it"
    with as_policy_of(policy, config, config.reference_model):
        yield


@contextlib.contextmanager
def as_policy_of(policy: Policy, config: GRPOConfig, folder: str) -> Iterator[None]:
    """Make the policy compute another folder of the same model inside the block: its weights, or
    its adapter, are swapped in, and afterwards its own again, from `config.model`, or from memory.
    A collective if sharded. Raises ModelFolderError."""
    if config.lora_rank is None:
        put_back = policy.set_aside(config.model if config.kept is None else None)
        policy.load_folder(folder)
        yield
        put_back()
        return
    theirs = Path(folder, ADAPTER_FOLDER)
    own = Path(config.model, ADAPTER_FOLDER)
    base = base_folder(config)
    # The base: before the first update there is no adapter.
    if not theirs.is_dir() or not own.is_dir():
        with without_adapters(policy) if not theirs.is_dir() else contextlib.nullcontext():
            yield
        return
    _load(theirs, policy, base)
    yield
    _load(own, policy, base)
