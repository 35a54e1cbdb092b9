"""Configs: strict dataclasses that say everything that is wrong with them at once.

The recipes' configs live here, beside neither torch nor torchtune, so that the loop can check what it is going to write into a
recipe's YAML file before anything expensive starts.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from ttrl.errors import ConfigError


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(repr(value) for value in typing.get_args(kind))
    if isinstance(kind, types.UnionType):
        return " or ".join(_describe(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is dict:
        return "a mapping with names as keys"
    if typing.get_origin(kind) in (list, tuple):
        return "a list of which each is " + _describe(typing.get_args(kind)[0])
    return {type(None): "null", str: "a string", int: "a whole number", float: "a number", bool: "true or false"}.get(
        kind, str(kind)
    )


def _converted(value: Any, kind: Any) -> Any:
    """`value` as `kind`; raises TypeError where it is something else. Ints pass as floats, and so do strings such as 1e-4,
    which YAML 1.1 reads as text; nothing else is converted."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        if value in typing.get_args(kind) and not isinstance(value, bool):
            return value
    elif isinstance(kind, types.UnionType):
        for part in typing.get_args(kind):
            try:
                return _converted(value, part)
            except TypeError:
                continue
    elif origin is dict:
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return dict(value)
    elif origin in (list, tuple):
        if isinstance(value, list | tuple):
            part = typing.get_args(kind)[0]
            return origin(_converted(entry, part) for entry in value)
    elif kind is float:
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise TypeError from None
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif kind is str and isinstance(value, Path):
        return str(value)
    elif kind is Any or (isinstance(kind, type) and isinstance(value, kind)):
        return value
    raise TypeError


_STAND_INS = {str: "", int: 1, float: 1.0}  # for required values that are wrong, so that the others can be judged all the same


class Config:
    """Base of the config dataclasses. Subclasses list what else can be wrong in `problems`."""

    def problems(self) -> list[str]:
        """What is wrong with the values, one line each, beyond their types."""
        return []

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str) -> Self:
        """Makes a config from plain values. Raises ConfigError with every problem: unknown and missing keys, types, ranges."""
        fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        kinds = typing.get_type_hints(cls)
        found: list[str] = []
        for key in values:
            if key not in fields:
                near = difflib.get_close_matches(str(key), fields, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(fields)}"
                found.append(f"unknown key {key!r}{hint}")
        converted: dict[str, Any] = {}
        for name, field in fields.items():
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if name in values:
                try:
                    converted[name] = _converted(values[name], kinds[name])
                    continue
                except TypeError:
                    found.append(f"{name} is {values[name]!r}; it must be {_describe(kinds[name])}")
            elif required:
                found.append(f"{name} is missing; it must be {_describe(kinds[name])}")
            if required:
                converted[name] = _STAND_INS[kinds[name]]
        config = cls(**converted)
        found.extend(config.problems())
        if found:
            raise ConfigError(where, found)
        return config

    def check(self, where: str) -> Self:
        """Checks a config that was made in Python as `parse` would. Raises ConfigError."""
        return self.parse({field.name: getattr(self, field.name) for field in dataclasses.fields(self)}, where)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for YAML."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]


def at_least(minimum: float, **values: float | None) -> list[str]:
    """A problem for each value below `minimum`; None passes."""
    return [
        f"{name} is {value}; it must be at least {minimum}"
        for name, value in values.items()
        if value is not None and value < minimum
    ]


@dataclass(kw_only=True)
class TrainingConfig(Config):
    """What both recipes share."""

    model: str
    """Folder of the model to start from, in Hugging Face layout."""
    output_dir: str
    """Where checkpoint/, state/ and train.jsonl are written."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the computation. Parameters, optimizer state and checkpoints are fp32 either way."""
    num_threads: int | None = None
    """CPU threads of each process; None leaves it to PyTorch. Part of what makes a run repeatable bit for bit."""
    seed: int = 0
    lr: float = 1e-5
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly to `lr`."""
    total_steps: int | None = None
    """Where linear and cosine schedules reach zero, counted over the whole run."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    """Global norm to which gradients are clipped; None: not at all."""
    rows_per_microbatch: int = 4
    """Packed rows in one forward and backward pass on each rank. The update is the same for any value."""
    num_output_chunks: int = 4
    """Chunks in which the trained positions of a microbatch pass through the output projection: only one chunk's logits are ever
    held, three times in fp32 at the peak."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass."""

    def problems(self) -> list[str]:
        """See Config.problems."""
        found = at_least(1, rows_per_microbatch=self.rows_per_microbatch, num_output_chunks=self.num_output_chunks)
        found += at_least(1, num_threads=self.num_threads, total_steps=self.total_steps)
        found += at_least(0, lr=self.lr, warmup_steps=self.warmup_steps, weight_decay=self.weight_decay, seed=self.seed)
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            found.append(f"max_grad_norm is {self.max_grad_norm}; it must be above 0, or null for no clipping")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                found.append(f"{name} is {getattr(self, name)}; it must be in [0, 1)")
        if self.eps <= 0:
            found.append(f"eps is {self.eps}; it must be above 0")
        if self.lr_schedule != "constant" and self.total_steps is None:
            found.append(f"lr_schedule {self.lr_schedule!r} needs total_steps")
        if self.total_steps is not None and self.warmup_steps >= self.total_steps:
            found.append(f"warmup_steps ({self.warmup_steps}) must be below total_steps ({self.total_steps})")
        return found


@dataclass(kw_only=True)
class GRPOConfig(TrainingConfig):
    """One iteration of `tune run ttrl/grpo_recipe`."""

    packed: str
    """The packed.safetensors to train on."""
    state: str | None = None
    """Folder of the optimizer state to continue from; None starts afresh."""
    iteration: int = 1
    """Randomness is derived from (seed, iteration, rank)."""
    updates_per_iteration: int = 1
    """Optimizer steps over the packed rows; each row is used in one of them."""
    clip_low: float = 0.2
    """The probability ratio is clipped below at 1 - clip_low …"""
    clip_high: float = 0.2
    """… and above at 1 + clip_high."""
    temperature: float = 1.0
    """The sampler's: log-probabilities are computed of the distribution that it drew from."""
    kl_coefficient: float = 0.0
    """Weight of the k3 estimate of KL(policy ‖ reference) in the loss."""
    reference_model: str | None = None
    """Folder of the frozen reference; needed where kl_coefficient is above 0."""

    def problems(self) -> list[str]:
        """See Config.problems."""
        found = super().problems()
        found += at_least(1, iteration=self.iteration, updates_per_iteration=self.updates_per_iteration)
        found += at_least(0, clip_high=self.clip_high, kl_coefficient=self.kl_coefficient)
        if self.temperature <= 0:
            found.append(f"temperature is {self.temperature}; it must be above 0")
        if not 0 <= self.clip_low <= 1:
            found.append(f"clip_low is {self.clip_low}; it must be in [0, 1]")
        if self.kl_coefficient > 0 and self.reference_model is None:
            found.append("kl_coefficient is above 0 but reference_model is missing")
        return found


@dataclass(kw_only=True)
class SFTConfig(TrainingConfig):
    """One run of `tune run ttrl/sft_recipe`."""

    data: str
    """JSON lines, each {"messages": [...]} whose last message is the assistant's."""
    steps: int
    """Optimizer steps."""
    batch_size: int = 64
    """Conversations in one optimizer step, over all ranks."""
    seq_len: int = 512
    """Length of a packed row, in tokens."""

    def problems(self) -> list[str]:
        """See Config.problems."""
        return super().problems() + at_least(1, steps=self.steps, batch_size=self.batch_size, seq_len=self.seq_len)
