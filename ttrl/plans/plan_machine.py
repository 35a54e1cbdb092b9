"""Describe the machine of a plan: this one, measured in a moment, or a GPU by its data sheet."""

import functools
import json
import os
import time
from dataclasses import dataclass

import psutil

from ttrl.configs.run import TrainConfig
from ttrl.errors import UserError
from ttrl.plans.gpu_sheets import sheet_of, sheets_named
from ttrl.system.gpus import Gpu, in_child, visible_gpus
from ttrl.system.memory_limit import memory_bytes
from ttrl.system.processor import best_product, cpu_name

_SECONDS = 0.05  # of measuring a product, as `ttrl.training.timing` does
_ROUNDS = 8  # at least: other programs may be running too
_OPERATIONS = 2e9  # of one product
_MEASURE = """
import json, sys
from ttrl.plans.plan_machine import matmul_speed
product, dtype = json.loads(sys.argv[1])
print(matmul_speed(tuple(product), "cuda", dtype, None))
"""


@dataclass(frozen=True)
class Machine:
    """Describe the hardware under trainer and server."""

    name: str
    cuda: bool
    memory: float
    """Bytes: of one GPU; on CPU, of the machine."""
    matmul: float
    """FLOP/s of a trainer process's device in its largest products: the best ever measured."""
    bandwidth: float
    """Bytes/s of a device's memory."""
    source: str
    """"measured" or "data sheet"."""
    gpus: int = 1
    """GPUs of this kind in the machine."""
    host: float | None = None
    """Bytes of the machine's own memory, if its GPUs are here."""


_CPU_BANDWIDTH = 20e9  # of two channels in use; assumed


def gpu_named(name: str) -> Machine:
    """Return a GPU by its data sheet, or several: "8xH100". Raises UserError for an unknown one."""
    count, sheet = sheets_named(name)
    figures = (sheet.memory, sheet.flops, sheet.bandwidth)
    return Machine(sheet.name, True, *figures, "data sheet", count)


def devices_here() -> list[Gpu]:
    """Return this machine's GPUs, in CUDA's order; [] if PyTorch has no use for them.

    Raises UserError for a driver unusable by PyTorch.
    """
    import torch

    if not torch.cuda.is_available():  # asks the driver for their number: no context
        return []
    return visible_gpus()


def gpus_here() -> list[float]:
    """Return the bytes of each GPU of this machine."""
    return [gpu.memory for gpu in devices_here()]


def host_here() -> float:
    """Return the bytes of memory available to processes on this machine or in the container."""
    return memory_bytes()[0]


def this_machine(config: TrainConfig, product: tuple[int, int]) -> Machine:
    """Measure the run's device, or look up the data sheet of the first GPU.

    product: (width in, width out) of the model's largest matrix product. Raises UserError if the
    config wants a GPU, and there is none.
    """
    if config.device == "cuda":
        return _gpu_here(config.dtype, product)
    threads = config.num_threads or os.cpu_count() or 1
    speed = matmul_speed(product, "cpu", config.dtype, threads)
    memory = float(psutil.virtual_memory().total)
    return Machine(f"{os.cpu_count()} CPU cores", False, memory, speed, _CPU_BANDWIDTH, "measured")


def _gpu_here(dtype: str, product: tuple[int, int]) -> Machine:
    gpus = devices_here()
    if not gpus:
        raise UserError(
            "device is cuda, but this machine has no GPU; choose one to plan for (--gpu H100)"
        )
    first = gpus[0]
    sheet = sheet_of(first.name)
    # A run plans while its servers start; a measurement would take GPU memory from them.
    if sheet is None:
        speed = float(in_child(_MEASURE, json.dumps([product, dtype])))
        bandwidth = speed / 250
        source = "measured"
    else:
        speed = sheet.flops
        bandwidth = sheet.bandwidth
        source = "data sheet"
    memory = min(gpu.memory for gpu in gpus)
    return Machine(first.name, True, memory, speed, bandwidth, source, len(gpus), host_here())


@functools.cache
def matmul_speed(product: tuple[int, int], device: str, dtype: str, threads: int | None) -> float:
    """Return the FLOP/s of the fastest of several products, now or ever: see `best_product`.

    On "cuda" this creates a context, so call it in a child process.
    """
    import torch

    k, n = product
    if dtype == "bf16":
        kind = torch.bfloat16
    else:
        kind = torch.float32
    if device == "cuda":
        tokens = 4096
        where = torch.cuda.get_device_name()
    else:
        tokens = int(max(16, min(2048, _OPERATIONS / (2 * k * n))))
        where = f"{cpu_name()} {threads} threads {torch.backends.cpu.get_cpu_capability()}"
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    fastest = float("inf")
    taken = 0.0
    rounds = 0
    try:
        x = torch.ones(tokens, k, dtype=kind, device=device)
        w = torch.ones(k, n, dtype=kind, device=device)
        while taken < _SECONDS or rounds < _ROUNDS:
            began = time.perf_counter()
            torch.mm(x, w)
            if device == "cuda":
                torch.cuda.synchronize()
            elapsed = time.perf_counter() - began
            fastest = min(fastest, elapsed)
            taken += elapsed
            rounds += 1
    finally:
        torch.set_num_threads(before)
    return best_product((tokens, k, n), str(kind), where, 2.0 * tokens * k * n / fastest)
