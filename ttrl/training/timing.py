"""Where the time and the memory of a training step go."""

import contextlib
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator

import torch


class Stopwatch:
    """Seconds by part, added up until they are read.

    On CUDA, where kernels run behind Python's back, a part is measured by events on the stream, which are waited for only in
    `take`; never run on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds what happens inside to `name`."""
        if self._on_cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            began = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """Seconds by part since the last call."""
        if self._events:
            torch.cuda.synchronize()
        for name, begin, end in self._events:
            self._seconds[name] += begin.elapsed_time(end) / 1000
        taken = dict(self._seconds)
        self._seconds.clear()
        self._events.clear()
        return taken


def memory_peaks(device: torch.device) -> dict[str, int]:
    """Bytes: "host" is the largest resident size of this process so far, "cuda" the largest amount that PyTorch had allocated."""
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) counts KiB, on macOS bytes
    peaks = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if device.type == "cuda":
        peaks["cuda"] = torch.cuda.max_memory_allocated(device)
    return peaks
