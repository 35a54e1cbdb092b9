"""Describe what a plan is made for: this machine, measured in a moment, or a GPU by its data sheet."""

import functools
import os
import re
import time
from dataclasses import dataclass

import psutil

from ttrl.configs.run import TrainConfig
from ttrl.errors import UserError
from ttrl.system.memory import memory_bytes
from ttrl.system.native_code import best_product, cpu_name

_SECONDS = 0.05  # that a product is measured, as `ttrl.training.timing` does
_ROUNDS = 8  # at least: other programs may be running too
_OPERATIONS = 2e9  # of one product


@dataclass(frozen=True)
class Machine:
    """The hardware that trainer and server run on."""

    name: str
    cuda: bool
    memory: float
    """Bytes: of one GPU; on CPU, of the machine."""
    matmul: float
    """FLOP/s of one trainer process's device in its largest matrix products: the best that was ever measured here."""
    bandwidth: float
    """Bytes/s of a device's memory."""
    source: str
    """"measured" or "data sheet"."""
    gpus: int = 1
    """GPUs of this kind that the machine has."""
    host: float | None = None
    """Bytes of the machine's own memory, where its GPUs are here."""


# Dense bf16 FLOP/s, bytes of memory, bytes/s: the makers' data sheets. Nothing reaches the first number; see plans/seconds.py.
GPUS = {
    "a10g": (70e12, 24e9, 600e9),
    "a100-40gb": (312e12, 40e9, 1555e9),
    "a100-80gb": (312e12, 80e9, 2039e9),
    "b200": (2250e12, 192e9, 8000e9),
    "h100": (989e12, 80e9, 3350e9),
    "h200": (989e12, 141e9, 4800e9),
    "l4": (121e12, 24e9, 300e9),
    "l40s": (362e12, 48e9, 864e9),
    "rtx3090": (71e12, 24e9, 936e9),
    "rtx4090": (165e12, 24e9, 1008e9),
    "rtx5090": (209e12, 32e9, 1792e9),
}
_CPU_BANDWIDTH = 20e9  # of two channels in use; assumed


def gpu_named(name: str) -> Machine:
    """Return a GPU by its data sheet, or several: "8xH100". Raises UserError for one that is not in the table."""
    key = name.lower().replace(" ", "").replace("_", "-")
    count = re.match(r"([1-9]\d*)x", key)
    key = key[count.end() :] if count else key
    if key not in GPUS:
        raise UserError(f"gpu {name!r} is not known; known are {', '.join(GPUS)}")
    flops, memory, bandwidth = GPUS[key]
    return Machine(key.upper(), True, memory, flops, bandwidth, "data sheet", int(count[1]) if count else 1)


def gpus_here() -> list[float]:
    """Return the bytes of each GPU of this machine."""
    import torch

    if not torch.cuda.is_available():
        return []
    return [float(torch.cuda.get_device_properties(number).total_memory) for number in range(torch.cuda.device_count())]


def host_here() -> float:
    """Return the bytes of memory that this machine, or the container, has for its processes."""
    return memory_bytes()[0]


def this_machine(config: TrainConfig, product: tuple[int, int]) -> Machine:
    """Measure where the run will run, by its `device`; product: (width in, width out) of the model's largest matrix product.

    For CUDA the first GPU, by its data sheet where that is known. Raises UserError where the config wants a
    GPU that is not here.
    """
    import torch

    if config.device == "cuda":
        if not torch.cuda.is_available():
            raise UserError("the config's device is cuda, and this machine has none; name the GPU that it is for (--gpu H100)")
        properties = torch.cuda.get_device_properties(0)
        short = properties.name.lower().replace("nvidia", "").replace("geforce", "").replace(" ", "")
        near = next((sheet for name, sheet in GPUS.items() if name.replace("-", "") in short.replace("-", "")), None)
        gpus = gpus_here()
        if near:  # a run plans beside servers that are starting: what it took of a GPU itself, they would miss
            return Machine(properties.name, True, min(gpus), near[0], near[2], "data sheet", len(gpus), host_here())
        matmul = _matmul(product, "cuda", config.dtype, None)
        return Machine(properties.name, True, min(gpus), matmul, matmul / 250, "measured", len(gpus), host_here())
    threads = config.num_threads or os.cpu_count() or 1
    matmul = _matmul(product, "cpu", config.dtype, threads)
    return Machine(f"{os.cpu_count()} CPU cores", False, float(psutil.virtual_memory().total), matmul, _CPU_BANDWIDTH, "measured")


@functools.cache
def _matmul(product: tuple[int, int], device: str, dtype: str, threads: int | None) -> float:
    """Return the FLOP/s of the fastest of several products, now or ever: see `best_product`."""
    import torch

    k, n = product
    tokens = 4096 if device == "cuda" else int(max(16, min(2048, _OPERATIONS / (2 * k * n))))
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        kind = torch.bfloat16 if dtype == "bf16" else torch.float32
        x, w = torch.ones(tokens, k, dtype=kind, device=device), torch.ones(k, n, dtype=kind, device=device)
        fastest, taken, rounds = float("inf"), 0.0, 0
        while taken < _SECONDS or rounds < _ROUNDS:
            began = time.perf_counter()
            torch.mm(x, w)
            if device == "cuda":
                torch.cuda.synchronize()
            elapsed = time.perf_counter() - began
            fastest, taken, rounds = min(fastest, elapsed), taken + elapsed, rounds + 1
    finally:
        torch.set_num_threads(before)
    cpu = f"{cpu_name()} {threads} threads {torch.backends.cpu.get_cpu_capability()}"
    where = torch.cuda.get_device_name() if device == "cuda" else cpu
    return best_product((tokens, k, n), str(kind), where, 2.0 * tokens * k * n / fastest)
