"""Count an iteration's bytes on disk, from the model's config.json."""

from collections.abc import Mapping
from typing import Any

from ttrl.configs import GRPOConfig, TrainingConfig
from ttrl.costs.parameters import (
    DecoderParameters,
    adapter_parameters,
    decoder_parameters,
    trained_parameters,
)

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number, by dtype."""
_STATE_BYTES = {"adamw": 8.0, "adamw_8bit": 2.0 * (1 + 4 / 256), "rmsprop": 4.0, "sgd": 0.0}
PACKED_POSITION_BYTES = 65
"""Bytes of a position in the packed tensors, all of them together."""


def state_bytes_each(config: TrainingConfig) -> float:
    """Return the bytes of the optimizer's state for each trained parameter. 8-bit moments have a
    scale for every 256 of them.
    """
    if config.momentum:
        return _STATE_BYTES[config.optimizer] + 4.0
    return _STATE_BYTES[config.optimizer]


def state_bytes(decoder: DecoderParameters, config: TrainingConfig) -> float:
    """Return the bytes of the optimizer's state on disk, and of the reward model there."""
    each = state_bytes_each(config)
    if isinstance(config, GRPOConfig) and config.token_rewards == "implicit":
        each += BYTES["fp32"] + state_bytes_each(config)
    return trained_parameters(decoder, config) * each


def model_bytes(decoder: DecoderParameters, config: TrainingConfig) -> float:
    """Return the bytes of the whole model in a checkpoint; 0 if only adapters are written."""
    whole = config.lora_rank is None or config.lora_merge
    return float(decoder.stored * BYTES[config.checkpoint_dtype] * whole)


def iteration_bytes(model: Mapping[str, Any], config: TrainingConfig) -> dict[str, float]:
    """Return the bytes of an iteration's "checkpoint" and optimizer "state".

    Packed rows and rollouts are small next to them. With adapters the checkpoint is the merged
    model (unless `lora_merge` is false) and the adapter next to it, and the state is the adapter's.
    model: values of config.json.
    """
    decoder = decoder_parameters(model)
    adapters = adapter_parameters(decoder, config) * BYTES["fp32"]
    checkpoint = model_bytes(decoder, config) + adapters
    return {"checkpoint": checkpoint, "state": state_bytes(decoder, config)}
