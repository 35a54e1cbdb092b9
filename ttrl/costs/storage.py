"""Count the bytes that an iteration leaves on disk and that the server holds of a model, from its config.json."""

from collections.abc import Mapping
from typing import Any

from ttrl.configs import TrainingConfig
from ttrl.costs.parameters import DecoderParameters, adapter_parameters, decoder_parameters, trained_parameters

BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of a number, by dtype."""
STATE_BYTES = {"adamw": 8.0, "adamw_8bit": 2.0 * (1 + 4 / 256), "sgd": 0.0}
"""Bytes of an optimizer's state for each trained parameter; 8-bit moments have a scale for every 256."""
PACKED_POSITION_BYTES = 65
"""Bytes of a position in the packed tensors, all of them together."""


def state_bytes(decoder: DecoderParameters, config: TrainingConfig) -> float:
    """Return the bytes of the optimizer's state on disk."""
    return trained_parameters(decoder, config) * STATE_BYTES[config.optimizer]


def model_bytes(decoder: DecoderParameters, config: TrainingConfig) -> float:
    """Return the bytes of the whole model in a checkpoint; 0 where only adapters are written."""
    whole = config.lora_rank is None or config.lora_merge
    return float(decoder.stored * BYTES[config.checkpoint_dtype] * whole)


def iteration_bytes(model: Mapping[str, Any], config: TrainingConfig) -> dict[str, float]:
    """Return the bytes of an iteration's "checkpoint" and optimizer "state"; packed rows and rollouts are small next to them.

    With adapters the checkpoint is the merged model (unless `lora_merge` is false) and the adapter next to it, and the state is
    the adapter's. model: values of config.json.
    """
    decoder = decoder_parameters(model)
    adapters = adapter_parameters(decoder, config) * BYTES["fp32"]
    return {"checkpoint": model_bytes(decoder, config) + adapters, "state": state_bytes(decoder, config)}


def token_cache_bytes(model: Mapping[str, Any], dtype: str = "bf16") -> int:
    """Return the bytes of one token's keys and values in the server's KV cache, over all layers.

    Layers with a sliding window need them only for the window's tokens; they are counted in full.
    """
    decoder = decoder_parameters(model)
    return 2 * decoder.shape.layers * decoder.keys * BYTES[dtype]


def server_memory(
    model: Mapping[str, Any], tokens: int, *, dtype: str = "bf16", tensor_parallel: int = 1, step_tokens: int = 8192
) -> dict[str, float]:
    """Return the bytes that one of the server's processes needs to hold `tokens` in its KV cache at the same time, by part.

    Parts: weights (a tied head once), cache, and the widest activations of a step of `step_tokens`. vLLM takes as much more
    cache as it is allowed to. Where there are fewer key/value heads than processes, several hold the same ones. On CUDA never
    measured.
    """
    decoder = decoder_parameters(model)
    size, shape = BYTES[dtype], decoder.shape
    copies = max(1.0, tensor_parallel / shape.key_value_heads)
    return {
        "weights": decoder.total * size / tensor_parallel,
        "cache": tokens * token_cache_bytes(model, dtype) * copies / tensor_parallel,
        "activations": step_tokens * (2 * shape.feed_forward_width / tensor_parallel + 4 * shape.width) * float(size),
    }
