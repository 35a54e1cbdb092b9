"""What a vLLM server says of its load at /metrics."""

import math
import re
from dataclasses import dataclass

_LINE = re.compile(
    r"^vllm:(cache_config_info|num_requests_running|num_requests_waiting|kv_cache_usage_perc|num_preemptions_total|"
    r"generation_tokens_total)(?:\{(.*)\})? (\S+)",
    re.MULTILINE,
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Metrics:
    """What a vLLM server says of itself, summed over its engines. A sample of a request with n > 1 counts as a request there."""

    capacity: float
    """Tokens that fit into the KV cache."""
    block_size: float
    running: float
    waiting: float
    usage: float
    """Share of the KV cache in use, 0 to 1."""
    preemptions: float
    generated: float
    """Completion tokens since it started."""


def read_metrics(text: str) -> Metrics | None:
    """Reads Prometheus text as vLLM 0.32 writes it; None where the size of a KV cache is not in it."""
    sums: dict[str, float] = {}
    capacity = block_size = blocks = 0.0
    usages: list[float] = []
    for name, labels, number in _LINE.findall(text):
        try:
            value = float(number)
            if name == "cache_config_info":
                config = dict(_LABEL.findall(labels))
                block_size = float(config["block_size"])
                blocks = max(blocks, float(config["num_gpu_blocks"]))
                capacity += float(config["kv_cache_size_tokens"])
            elif name == "kv_cache_usage_perc":
                usages.append(value)
            else:
                sums[name] = sums.get(name, 0.0) + value
        except (KeyError, ValueError):  # "None" while it starts, or another program's metric
            continue
    # The tokens are each engine's own, and right also where layers keep different numbers of them; older versions do not have
    # them. The blocks of every line are those of all engines.
    capacity = capacity or blocks * block_size
    if capacity <= 0 or not math.isfinite(capacity):
        return None
    return Metrics(
        capacity=capacity,
        block_size=block_size,
        running=sums.get("num_requests_running", 0.0),
        waiting=sums.get("num_requests_waiting", 0.0),
        usage=sum(usages) / len(usages) if usages else 0.0,
        preemptions=sums.get("num_preemptions_total", 0.0),
        generated=sums.get("generation_tokens_total", 0.0),
    )
