"""Measurements that several steps share: seconds, products, memory, shares of a peak."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator

import torch

DATASHEET = 989e12
"""Dense bf16 FLOP/s of an H100 (SXM), by its data sheet."""


def wait(device: str) -> None:
    """Wait until a device has computed what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(compute: Callable[[], object], device: str, *, least: float = 0.3) -> float:
    """Return the median seconds of a computation, repeated for `least` seconds after a warm-up."""
    compute()
    wait(device)
    found: list[float] = []
    while len(found) < 3 or sum(found) < least:
        began = time.perf_counter()
        compute()
        wait(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def best_product(device: str) -> tuple[float, str]:
    """Return the FLOP/s of the fastest of several products, and its shape; bf16 on a GPU."""
    shapes = [(256, 256, 256), (1024, 1024, 1024)]
    dtype = torch.float32
    if device == "cuda":
        dtype = torch.bfloat16
        shapes = [(4096, 4096, 4096), (8192, 8192, 8192), (16384, 8192, 8192), (8192, 1536, 8960)]
    best = 0.0
    name = ""
    for m, k, n in shapes:
        one = torch.randn(m, k, device=device).to(dtype)
        other = torch.randn(k, n, device=device).to(dtype)
        speed = 2 * m * k * n / seconds_of(lambda a=one, b=other: a @ b, device, least=0.2)
        if speed > best:
            best = speed
            name = f"{m}×{k}×{n}"
    return best, name


@contextlib.contextmanager
def gpu_handle() -> Iterator[object | None]:
    """Give NVML's handle of the first GPU; None without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml.nvmlDeviceGetHandleByIndex(0)
    finally:
        pynvml.nvmlShutdown()


def gpu_memory_used() -> float | None:
    """Return the GPU's memory in use, in bytes, of all processes together; None without a GPU."""
    import pynvml

    with gpu_handle() as handle:
        return None if handle is None else float(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def shares(flops_per_second: float, best: float) -> list[float]:
    """Return the share of the data sheet's peak, and of the card's own best product."""
    return [flops_per_second / DATASHEET, flops_per_second / best]
