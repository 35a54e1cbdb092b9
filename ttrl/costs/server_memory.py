"""Estimate the memory of a vLLM server, serving and asleep.

On a GPU, `gpu_memory_utilization` is a budget for weights, cache, activations, sampler and CUDA
graphs. A context and NCCL's buffers come on top: vLLM first looks at the memory with them there.
All this was read in the source of vLLM 0.32. The figures of others' reports wait for a GPU of ours.

    weights       a tied head once
    activations   the widest of a step of max_num_batched_tokens
    sampler       for each of max_num_seqs: counts of the whole vocabulary, ready for penalties, and
                  a step's logits with a copy in fp32; the same in each process of several
    CUDA graphs   for each captured size of a step, in each layer

Sleep at level 2 frees weights, sampler and cache. Level 1 (adapters) moves weights and sampler into
the machine's memory. Both leave the context, the CUDA graphs and NCCL's buffers on the GPU, most of
the last not with enable_nccl_comm_suspend.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ttrl.costs.memory import CUDA_CONTEXT, NCCL_BUFFERS, Parts
from ttrl.costs.parameters import decoder_parameters
from ttrl.costs.storage import BYTES

_FP32 = 4
_COUNTS = 4 + 1 / 8  # bytes for each token of the vocabulary: how often it came, and whether
_GRAPH_OF_LAYER = 0.3e6
"""Bytes of a captured graph for each layer. Reported: 0.16 MB (models of 4B and 14B; 1.2 and 1.4 GB
in all), 0.29 MB (vLLM issue 47654), 0.4 MB (vLLM pull request 11349)."""
_LARGEST_GRAPH = 512  # tokens of a step; 1,024 on B200 and B300 with their memory
_NCCL_ASLEEP = {True: 0.6e9, False: 6.9e9}
"""Bytes of NCCL during sleep, with and without enable_nccl_comm_suspend. With it: the communicator
of PyTorch itself (576 MiB, sglang pull request 30908). Without: the most reported, 7,392 MiB at
tensor_parallel_size 2 against 774 MiB at 1 (NVIDIA-NeMo/RL issue 223)."""


@dataclass(frozen=True)
class Serving:
    """How a server computes, as far as its memory depends on it."""

    dtype: str = "bf16"
    tensor_parallel: int = 1
    stages: int = 1
    """pipeline_parallel_size."""
    step_tokens: int = 8192
    """max_num_batched_tokens."""
    sequences: int = 256
    """max_num_seqs."""
    adapters: bool = False
    """Whether it serves adapters next to its model."""
    eager: bool = False
    """Whether it captures no CUDA graphs."""
    suspends: bool = False
    """Whether it frees NCCL's buffers to sleep."""

    @property
    def is_spread(self) -> bool:
        """Return whether it works on several GPUs."""
        return self.tensor_parallel * self.stages > 1


def server_memory(model: Mapping[str, Any], serving: Serving, *, cuda: bool = True) -> Parts:
    """Return the bytes of one of a server's processes besides its cache, by part.

    "states" are those of recurrences, one for each of max_num_seqs; vLLM keeps them in its cache.

    On CUDA `gpu_memory_utilization` covers these and the cache. model: values of config.json.
    """
    shape = decoder_parameters(model).shape
    size = BYTES[serving.dtype]
    widest = 2 * shape.feed_forward_width / serving.tensor_parallel + 4 * shape.width
    parts = {
        "weights": decoder_parameters(model).total * size / serving.tensor_parallel,
        "activations": serving.step_tokens * widest * float(size),
    }
    states = serving.sequences * state_cache_bytes(model, serving)
    if states:
        parts["states"] = states
    if cuda:
        logits = serving.sequences * shape.vocabulary * (size + _FP32)
        parts["sampler"] = sampler_bytes(model, serving) + logits
        parts["CUDA graphs"] = _graphs(model, serving)
    return parts


def token_cache_bytes(model: Mapping[str, Any], serving: Serving) -> float:
    """Return the bytes of a token's keys and values in one of a server's processes, in all layers.

    Layers with a sliding window count in full, although they need the window's tokens only. With
    fewer key/value heads than processes, several hold the same ones. Layers without attention have
    none; latent attention has its latent vector, whole in each process.
    """
    shape = decoder_parameters(model).shape
    copies = max(1.0, serving.tensor_parallel / shape.key_value_heads)
    numbers = 0.0
    for layer in shape.kinds:
        latent = any(one.name == "kv_b_proj" for one in layer.matrices)
        numbers += layer.cache if latent else layer.cache * copies / serving.tensor_parallel
    return numbers * BYTES[serving.dtype]


def state_cache_bytes(model: Mapping[str, Any], serving: Serving) -> float:
    """Return the bytes of a sequence's states in one of a server's processes: of recurrences, in
    fp32, and of the last tokens for their convolutions. It does not grow with the sequence."""
    states = sum(one.state for one in decoder_parameters(model).shape.kinds)
    return states * _FP32 / serving.tensor_parallel


def sampler_bytes(model: Mapping[str, Any], serving: Serving) -> float:
    """Return the bytes of the sampler's counts, next to the weights on CUDA servers."""
    return serving.sequences * decoder_parameters(model).shape.vocabulary * _COUNTS


def beyond_budget(serving: Serving) -> Parts:
    """Return the bytes of a GPU on top of a server's `gpu_memory_utilization`, by part."""
    return {"context": CUDA_CONTEXT, "NCCL": NCCL_BUFFERS * serving.is_spread}


def left_asleep(model: Mapping[str, Any], serving: Serving) -> Parts:
    """Return the GPU bytes of a sleeping server, by part."""
    return {
        "context": CUDA_CONTEXT,
        "CUDA graphs": _graphs(model, serving),
        "NCCL": _NCCL_ASLEEP[serving.suspends] * serving.is_spread,
    }


def graph_sizes(serving: Serving) -> list[int]:
    """Return the step sizes of vLLM's CUDA graphs in tokens, ascending."""
    largest = min(2 * serving.sequences, _LARGEST_GRAPH, serving.step_tokens)
    grid = {1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)}
    sizes = grid | {serving.sequences, serving.step_tokens}
    return sorted(size for size in sizes if size <= largest)


def captured_graphs(serving: Serving) -> int:
    """Count the CUDA graphs of a server.

    Each size has one for steps with prompts, and one for steps with a token of each sequence if
    there can be so many. With adapters there are as many again, without an active one.
    """
    if serving.eager:
        return 0
    mixed = graph_sizes(serving)
    decoding = [size for size in mixed if size <= serving.sequences]
    each = 2 if serving.adapters else 1
    return (len(mixed) + len(decoding)) * each


def _graphs(model: Mapping[str, Any], serving: Serving) -> float:
    layers = decoder_parameters(model).shape.layers / serving.stages
    return captured_graphs(serving) * layers * _GRAPH_OF_LAYER
