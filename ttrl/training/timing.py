"""Measure a recipe's times: a stopwatch by part, the profiler's traces, and the speed of the
largest matrix product.
"""

import contextlib
import functools
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers.pytorch_utils import Conv1D

from ttrl.system.processor import best_product, cpu_name
from ttrl.training.parallel.distributed import Ranks


class Stopwatch:
    """Sums seconds by part until read. On CUDA, events on the stream measure a part, and `take`
    waits for them; the CPU's clock measures CPU parts, without touching the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def part(self, name: str, on_cpu: bool = False) -> Iterator[None]:
        """Add the time of the block to `name`. on_cpu: the block ends with the CPU's work, and
        begins with the device idle.
        """
        if self._on_cuda and not on_cpu:
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            began = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - began

    def take(self) -> dict[str, float]:
        if self._events:
            torch.cuda.synchronize()
        for name, begin, end in self._events:
            self._seconds[name] += begin.elapsed_time(end) / 1000
        taken = dict(self._seconds)
        self._seconds.clear()
        self._events.clear()
        return taken


def memory_peaks(device: torch.device) -> dict[str, int]:
    """Return bytes: "host" is this process's largest resident size so far, "cuda" PyTorch's largest
    allocation.
    """
    peaks = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if device.type == "cuda":
        peaks["cuda"] = torch.cuda.max_memory_allocated(device)
    return peaks


class Profiler:
    """Traces the first `steps` optimizer steps; each rank writes output_dir/profile/rank-N.json
    after the last of them.
    """

    def __init__(self, output_dir: str | Path, steps: int, ranks: Ranks) -> None:
        self._left = steps
        self._path = Path(output_dir, "profile", f"rank-{ranks.rank}.json")
        activities = [ProfilerActivity.CPU] + (
            [ProfilerActivity.CUDA] if ranks.device.type == "cuda" else []
        )
        self._profile = (
            profile(activities=activities, record_shapes=True, profile_memory=True)
            if steps
            else None
        )
        if self._profile is not None:
            self._profile.start()

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        if self._profile is None:
            yield
            return
        with record_function(name):
            yield
        self._left -= 1
        if not self._left:
            self.close()

    def close(self) -> None:
        """Write the file, even if fewer steps were taken than asked for."""
        if self._profile is not None:
            self._profile.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._path))
            self._profile = None


SECONDS = 0.05
"""How long to measure, for at least three products: enough for a fast machine to warm up."""
_CPU_OPERATIONS = 2e9  # of one product: some ten milliseconds on a core


def largest_product(model: nn.Module, device: torch.device) -> tuple[int, int, int]:
    """Return (tokens, width in, width out) of the largest matrix product of the layers, without
    embedding and head.
    """
    products = []
    for name, module in model.named_modules():
        if ".layers." not in f".{name}":
            continue
        if isinstance(module, nn.Linear):
            products.append((module.in_features, module.out_features))
        elif isinstance(module, Conv1D):  # transformers' GPT-2: a product, despite its name
            products.append((module.nx, module.nf))
    k, n = max(products, key=lambda widths: widths[0] * widths[1])
    if device.type == "cuda":
        tokens = 4096
    else:
        tokens = int(max(16, min(2048, _CPU_OPERATIONS / (2 * k * n))))
    return tokens, k, n


@functools.cache
def matmul_peak(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOP/s of the fastest of several products [tokens, k] x [k, n], a multiplication
    and an addition counted as one each, in this process or an earlier one of this user (see
    `best_product`). Measured once in a process.
    """
    tokens, k, n = shape
    x = torch.ones(tokens, k, dtype=dtype, device=device)
    w = torch.ones(n, k, dtype=dtype, device=device)
    seconds = _fastest(lambda: torch.mm(x, w.T), device)
    cpu = (
        f"{cpu_name()} {torch.get_num_threads()} threads {torch.backends.cpu.get_cpu_capability()}"
    )
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = cpu
    return best_product(shape, str(dtype), name, 2.0 * tokens * k * n / seconds)


def _fastest(compute: Callable[[], object], device: torch.device) -> float:
    fastest = float("inf")
    taken = 0.0
    rounds = 0
    while taken < SECONDS or rounds < 3:
        _wait(device)
        began = time.perf_counter()
        compute()
        _wait(device)
        elapsed = time.perf_counter() - began
        fastest = min(fastest, elapsed)
        taken = taken + elapsed
        rounds = rounds + 1
    return fastest


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
