"""Name a run's optional GPU settings, and read and write their values."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ttrl.configs import GRPOConfig
from ttrl.configs.base import Settings
from ttrl.configs.run import TrainConfig
from ttrl.plans.memory_plan import argument

LADDER = (
    "optimizer",
    "activation_checkpointing",
    "activation_offloading",
    "rows_per_microbatch",
)
"""The trainer's, the most costly first."""
CHOSEN = (
    "placement",
    "nproc_per_node",
    "servers",
    "weight_sync",
    *(f"training.{name}" for name in reversed(LADDER)),
    "server.tensor_parallel_size",
    "server.gpu_memory_utilization",
    "server.max_model_len",
    "server.max_num_seqs",
    "server.max_num_batched_tokens",
    "server.enable_nccl_comm_suspend",
)
"""All of them."""
CHOSEN_ON_CPU = ("training.rows_per_microbatch", "training.activation_checkpointing")
"""Those also chosen on a CPU."""
FULL = 0.9
"""Share of a GPU for trainer and server, by estimates good to about 10%."""
FULL_ON_CPU = 0.75
"""Share of a machine's memory for all trainers and servers: other programs need some, too."""


@dataclass(frozen=True)
class Choices:
    """Hold a config without gaps, the reasons for its choices, and its needs."""

    config: TrainConfig
    reasons: Mapping[str, str] = field(default_factory=dict)
    """By chosen setting, such as "training.rows_per_microbatch"."""
    trainer: float = 0.0
    """Peak of one GPU in bytes, while it trains full rows."""
    kept: float = 0.0
    """Bytes of one GPU kept by servers meanwhile: all of theirs, or the rest left by sleep."""
    server: float = 0.0
    """Least bytes of one GPU for a working server; it takes all of `gpu_memory_utilization`."""
    memory: float = 0.0
    """Bytes of one GPU."""
    problem: str | None = None
    """Why it cannot run, and a way out."""

    @property
    def is_tight(self) -> bool:
        """Return whether the trainer's estimate leaves little room for its error."""
        return self.trainer + self.kept > FULL * self.memory

    def summary(self) -> str:
        """Return the choices in a line; "" without any."""
        parts = []
        for name in CHOSEN:
            if name in self.reasons:
                value = str(value_of(self.config, name)).lower()
                parts.append(f"{name.rpartition('.')[2]} {value}")
        return ", ".join(parts)


def value_of(config: TrainConfig, name: str) -> Any:
    """Return a setting by its name in CHOSEN; None if left open."""
    group, _, key = name.rpartition(".")
    if group == "server":
        return argument(config, key, None)
    if group:
        return config.recipe_settings.get(key)
    value = getattr(config, key)
    if value == "auto":
        return None
    return value


def with_values(config: TrainConfig, values: Settings) -> TrainConfig:
    """Return a config with other values, by names such as "training.rows_per_microbatch"."""
    changes: dict[str, Any] = {}
    for name, value in values.items():
        group, _, key = name.rpartition(".")
        if group:
            changes[group] = {**changes.get(group, getattr(config, group)), key: value}
        else:
            changes[key] = value
    return dataclasses.replace(config, **changes)


def as_begun(
    config: TrainConfig, saved: Mapping[str, Any], names: Sequence[str] = CHOSEN
) -> TrainConfig:
    """Return the config of a continued run, with gaps among `names` filled from its config.yaml."""
    known = {name: value for name, value in saved.items() if name in vars(config)}
    before, _ = TrainConfig.examine(known)
    missing = {name: value_of(before, name) for name in names if value_of(config, name) is None}
    found = {name: value for name, value in missing.items() if value is not None}
    return with_values(config, found)


def recipe_of(config: TrainConfig) -> GRPOConfig:
    """Return the recipe's config for a GPU."""
    dtype = "bf16" if config.dtype == "auto" else config.dtype
    return config.recipe_config({"dtype": dtype})
