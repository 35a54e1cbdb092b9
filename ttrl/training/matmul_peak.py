"""What this machine can do at best: the speed of the model's own largest matrix product, measured where it trains."""

import functools
import time

import torch
from torch import nn

SECONDS = 0.05
"""How long is measured, at least three products; a fast machine is warm by then, a slow one is not kept."""
_CPU_OPERATIONS = 2e9  # of one product: some ten milliseconds on a core


def largest_product(model: nn.Module, device: torch.device) -> tuple[int, int, int]:
    """(tokens, width in, width out) of the layers' largest matrix product; the embedding and the head are left out, whose width
    is the vocabulary's."""
    linears = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in f".{name}"]
    largest = max(linears, key=lambda m: m.in_features * m.out_features)
    k, n = largest.in_features, largest.out_features
    tokens = 4096 if device.type == "cuda" else int(max(16, min(2048, _CPU_OPERATIONS / (2 * k * n))))
    return tokens, k, n


@functools.cache
def matmul_peak(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the fastest of several products [tokens, k] x [k, n], a multiplication and an addition each counted as one.

    Measured once in a process. On CUDA with a synchronisation around each product; never run on a GPU.
    """
    tokens, k, n = shape
    x, w = torch.ones(tokens, k, dtype=dtype, device=device), torch.ones(k, n, dtype=dtype, device=device)
    fastest, taken, rounds = float("inf"), 0.0, 0
    while taken < SECONDS or rounds < 3:
        _wait(device)
        began = time.perf_counter()
        torch.mm(x, w)
        _wait(device)
        elapsed = time.perf_counter() - began
        fastest, taken, rounds = min(fastest, elapsed), taken + elapsed, rounds + 1
    return 2.0 * tokens * k * n / fastest


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
