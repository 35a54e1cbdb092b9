"""What an iteration leaves on disk, and what the server holds of a model. Needs nothing but Python."""

from collections.abc import Mapping
from typing import Any

from ttrl.costs.memory import adapter_parameters, moment_bytes
from ttrl.costs.parameters import decoder_parameters
from ttrl.costs.training_settings import Settings

_BYTES = {"fp32": 4, "bf16": 2}


def iteration_bytes(config: Mapping[str, Any], settings: Mapping[str, Any], checkpoint_dtype: str = "fp32") -> dict[str, float]:
    """Bytes of an iteration's checkpoint and of its optimizer state, by name; packed rows and rollouts are small beside them.

    8-bit moments are stored in fp32. With adapters the checkpoint is the merged model (unless `lora_merge` is false) and the
    adapter beside it, and the state is that of the adapter.
    """
    decoder, chosen = decoder_parameters(config), Settings.of(settings)
    adapters = adapter_parameters(decoder, chosen)
    trained = adapters if chosen.lora_rank is not None else decoder.total
    whole = chosen.lora_rank is None or chosen.lora_merge
    checkpoint = (decoder.stored if whole else 0) * _BYTES[checkpoint_dtype] + adapters * _BYTES["fp32"]
    state = trained * 2.0 * _BYTES["fp32"] if moment_bytes(chosen.optimizer) else 0.0
    return {"checkpoint": float(checkpoint), "state": state}


def token_cache_bytes(config: Mapping[str, Any], dtype: str = "bf16") -> int:
    """Bytes of the keys and values of one token in the server's cache, over all layers. Layers with a sliding window need them
    for the window's tokens alone; they are counted in full."""
    decoder = decoder_parameters(config)
    return 2 * decoder.shape.layers * decoder.keys * _BYTES[dtype]


def server_memory(
    config: Mapping[str, Any], tokens: int, *, dtype: str = "bf16", tensor_parallel: int = 1, step_tokens: int = 8192
) -> dict[str, float]:
    """Bytes that one of the server's processes needs to hold `tokens` in its cache at the same time, by part: weights (a tied
    head once), cache, and the widest activations of a step of `step_tokens`. vLLM takes as much more cache as it is allowed to.

    Fewer key/value heads than processes are held on several of them. On CUDA never measured.
    """
    decoder = decoder_parameters(config)
    size, shape = _BYTES[dtype], decoder.shape
    copies = max(1.0, tensor_parallel / shape.key_value_heads)
    return {
        "weights": decoder.total * size / tensor_parallel,
        "cache": tokens * token_cache_bytes(config, dtype) * copies / tensor_parallel,
        "activations": step_tokens * (2 * shape.feed_forward_width / tensor_parallel + 4 * shape.width) * float(size),
    }
