"""Measure the machine's use while a run samples and trains: CPU, memory, and NVIDIA's counters of
each GPU (NVML).

One look a second covers the whole machine, with all its users, and the GPUs visible to this
process.
"""

import contextlib
import math
import statistics
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import pynvml

from ttrl.facts import GpuUse, MachineUse, PhaseUse
from ttrl.loop.timeline import Timeline
from ttrl.system.console import clock
from ttrl.system.gpus import visible_handles
from ttrl.text import present

SECONDS = 1.0
"""Time between two looks."""
_GIVEN_UP_BY = 5.0


@dataclass(frozen=True)
class Look:
    """One look at the machine. Shares cover the time since the previous look."""

    moment: float
    """By `clock`, in the middle of the covered time."""
    cpu: float
    """Busy share of all cores."""
    memory: float
    """Bytes in use."""
    gpus: tuple[GpuUse, ...] = ()


class MachineWatch:
    """Look at the machine in a separate thread."""

    def __init__(self, seconds: float = SECONDS) -> None:
        """seconds: between two looks."""
        self._seconds = seconds
        self._lock = threading.Lock()
        self._looks: list[Look] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="machine use", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join(_GIVEN_UP_BY)  # a hanging driver must not keep a run from ending

    def take(self, timeline: Timeline, until: float) -> MachineUse:
        """Return the means of all looks up to a moment, by the run's activity, and forget the
        looks."""
        with self._lock:
            looks = [look for look in self._looks if look.moment <= until]
            self._looks = self._looks[len(looks) :]
        kinds: dict[str, list[Look]] = {}
        for look in looks:
            at = timeline.at(look.moment)
            kind = "both" if len(at) == 2 else next(iter(at), "other")
            kinds.setdefault(kind, []).append(look)
        return MachineUse(**{kind: _means(some) for kind, some in kinds.items()})

    def _watch(self) -> None:
        with visible_handles() as gpus:
            psutil.cpu_percent()  # the first call begins the measurement
            before = clock()
            while not self._over.wait(self._seconds):
                now = clock()
                seen = (
                    psutil.cpu_percent() / 100,
                    float(psutil.virtual_memory().used),
                    tuple(map(_look_at_gpu, gpus)),
                )
                with self._lock:
                    self._looks.append(Look((before + now) / 2, *seen))
                before = now


def _means(looks: Sequence[Look]) -> PhaseUse:
    gpus = [_gpu_means(of_one) for of_one in zip(*(look.gpus for look in looks), strict=True)]
    watts = [gpu.watts for gpu in gpus if gpu.watts is not None]
    return PhaseUse(
        seconds=len(looks) * SECONDS,
        cpu=statistics.fmean(look.cpu for look in looks),
        memory=max(look.memory for look in looks),
        gpu_busy=_mean(gpu.busy for gpu in gpus),
        watts=math.fsum(watts) if watts else None,
        gpus=gpus or None,
    )


def _gpu_means(looks: Sequence[GpuUse]) -> GpuUse:
    memory = [look.memory for look in looks if look.memory is not None]
    return GpuUse(
        busy=_mean(look.busy for look in looks),
        watts=_mean(look.watts for look in looks),
        memory=max(memory, default=None),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values."""
    known = present(values)
    if known:
        return statistics.fmean(known)
    return None


def _look_at_gpu(handle: Any) -> GpuUse:
    """Return one GPU's own figures, without those it does not support."""
    busy = watts = memory = None
    with contextlib.suppress(pynvml.NVMLError):
        busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    with contextlib.suppress(pynvml.NVMLError):
        watts = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000  # it counts in milliwatts
    with contextlib.suppress(pynvml.NVMLError):
        memory = float(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    return GpuUse(busy=busy, watts=watts, memory=memory)
