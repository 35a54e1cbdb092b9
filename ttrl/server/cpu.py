"""Configure a vLLM server on a CPU: detection, memory, cores and step sizes."""

import os
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from ttrl.system.files import read_object

CPU_CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
HEAP_VARIABLES = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**28)}
"""Keep the heap from returning its pages after each step."""
SHORT_WAITS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
"""OpenMP's threads poll for work a thousand times (microseconds), then sleep: libgomp's default
with more threads than cores. Longer spinning holds up all others when another process occupies a
core; threads sleeping at once are woken for each of a step's thousand products. 135M parameters, 64
sequences, two cores, tokens/s: 173 with immediate sleep, 241 with these settings, 251 with 20,000
polls; next to another busy process 145, 154 and 87. A training step: 8.1 s and 6.3.
"""
_GIB = 2**30
_SMALL_LOGITS = 64 * 2**20  # bytes, in float32, for each of the sequences of a step
_SMALL_BATCH = {"max-num-seqs": 512, "max-num-batched-tokens": 8192}


_RECURRENT = (
    *("mamba_n_heads", "mamba_num_heads", "mamba_d_state", "ssm_state_size", "mamba_d_ssm"),
    *("linear_num_value_heads", "linear_key_head_dim", "linear_attn_config", "conv_L_cache"),
)
"""Fields of config.json found only in models with recurrent layers."""


def cpu_arguments(
    model: str | os.PathLike[str] | Mapping[str, Any], given: Iterable[str] = ()
) -> Mapping[str, Any]:
    """Return arguments for a server on a CPU: `cpu_batch`, plus no prefix cache for models with
    recurrent layers (vLLM 0.32 cannot keep their states there) or with returned experts
    (`ttrl.vllm_worker.routing`)."""
    given = list(given)
    config = _config(model)
    text = config.get("text_config", config)
    recurrent = isinstance(text, Mapping) and any(text.get(name) is not None for name in _RECURRENT)
    arguments = cpu_batch(model, given)
    if recurrent or "enable-return-routed-experts" in given:
        arguments["enable-prefix-caching"] = False
    return arguments


def _config(model: str | os.PathLike[str] | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a model's config.json; empty for a model on the hub, or a damaged file, reported
    elsewhere.
    """
    if isinstance(model, Mapping):
        return model
    try:
        return read_object(Path(model, "config.json"))
    except (OSError, ValueError):
        return {}


def cpu_batch(
    model: str | os.PathLike[str] | Mapping[str, Any], given: Iterable[str] = ()
) -> dict[str, int]:
    """Return arguments for a server on a CPU, from a model's folder or config.json. Small models
    take larger steps than vLLM's (128 sequences, 2048 tokens): a step costs milliseconds whatever
    is in it. Empty for other models, whose logits would take gigabytes, without a config.json, and
    if `given` includes one of these arguments: vLLM refuses steps of fewer tokens than sequences,
    or, without chunked prefill, than the longest sequence.
    """
    if not {"max-num-seqs", "max-num-batched-tokens", "enable-chunked-prefill"}.isdisjoint(
        n.replace("_", "-") for n in given
    ):
        return {}
    config = _config(model)
    vocabulary, width = (config.get(name) for name in ("vocab_size", "hidden_size"))
    if not isinstance(vocabulary, int) or not isinstance(width, int) or width > 1024:
        return {}
    if 4 * vocabulary * _SMALL_BATCH["max-num-seqs"] <= _SMALL_LOGITS:
        return dict(_SMALL_BATCH)
    return {}


def is_cpu_build() -> bool:
    """Tell whether the installed vLLM is built for CPUs. Reads package metadata: importing vLLM
    takes seconds, and loads torch."""
    for package in ("vllm-cpu", "vllm"):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        return package == "vllm-cpu" or "+cpu" in version
    return False


def cpu_cache_bytes() -> float:
    """Return the size of a server's KV cache on a CPU, unless its arguments set one: from the
    environment, or 1 to 4 GiB by free memory."""
    given = os.environ.get(CPU_CACHE_VARIABLE)
    if given:
        return float(given) * _GIB
    return float(max(1, min(4, psutil.virtual_memory().available // _GIB // 8))) * _GIB


def thread_variables(servers: int = 1) -> dict[str, str]:
    """Return OpenMP's variables for each of several servers on this machine's CPU: its share of the
    cores, and SHORT_WAITS.
    """
    return {"OMP_NUM_THREADS": str(max(1, usable_cores() // servers))} | SHORT_WAITS


def usable_cores() -> int:
    """Return the number of physical cores usable by this process."""
    physical = psutil.cpu_count(logical=False) or 1
    if hasattr(os, "sched_getaffinity"):
        return min(physical, len(os.sched_getaffinity(0)))
    return physical
