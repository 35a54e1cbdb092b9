"""What the machine was used for: CPU, memory, and NVIDIA's counters of each GPU (NVML), while a run
sampled and trained.

The whole machine is looked at once a second, whoever uses it; of GPUs those that this process may
see.
"""

import contextlib
import math
import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import pynvml

from ttrl.loop.timeline import Timeline
from ttrl.system.console import clock
from ttrl.system.gpus import visible_handles

SECONDS = 1.0
"""Between two looks."""
_GIVEN_UP_BY = 5.0


@dataclass(frozen=True)
class Look:
    """What one look saw. Shares are of the time since the look before."""

    moment: float
    """By `clock`, in the middle of that time."""
    cpu: float
    """Share of all cores that worked."""
    memory: float
    """Bytes in use."""
    gpus: tuple[dict[str, float], ...] = ()
    """Of each GPU "busy" (the share of the time in which any kernel ran), "watts" and "memory" in
    bytes, where it says so.
    """


class MachineUse:
    """Looks at the machine in a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looks: list[Look] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="machine use", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join(_GIVEN_UP_BY)  # a driver that hangs must not keep a run from ending

    def take(self, timeline: Timeline, until: float) -> dict[str, dict[str, Any]]:
        """Return the means of all looks up to a moment, by what the run did, and forget them.

        "sample", "train", "both", or "other" for neither; each with "seconds", "cpu", "memory" (the
        most that was seen), and "gpus" where there are any: "busy", "watts" and "memory" of each,
        "gpu_busy" their mean, "watts" their sum.
        """
        with self._lock:
            looks = [look for look in self._looks if look.moment <= until]
            self._looks = self._looks[len(looks) :]
        kinds: dict[str, list[Look]] = {}
        for look in looks:
            kinds.setdefault(
                "both" if len(at := timeline.at(look.moment)) == 2 else next(iter(at), "other"), []
            ).append(look)
        return {
            kind: _means(kinds[kind])
            for kind in ("sample", "train", "both", "other")
            if kind in kinds
        }

    def _watch(self) -> None:
        with visible_handles() as gpus:
            psutil.cpu_percent()  # the first call begins the measurement
            before = clock()
            while not self._over.wait(SECONDS):
                now = clock()
                seen = (
                    psutil.cpu_percent() / 100,
                    float(psutil.virtual_memory().used),
                    tuple(map(_look_at_gpu, gpus)),
                )
                with self._lock:
                    self._looks.append(Look((before + now) / 2, *seen))
                before = now


def _means(looks: Sequence[Look]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "seconds": len(looks) * SECONDS,
        "cpu": statistics.fmean(look.cpu for look in looks),
    }
    found["memory"] = max(look.memory for look in looks)
    gpus = []
    for of_one in zip(*(look.gpus for look in looks), strict=True):
        one = {
            name: [look[name] for look in of_one if name in look]
            for name in ("busy", "watts", "memory")
        }
        gpus.append(
            {
                name: (max if name == "memory" else statistics.fmean)(values)
                for name, values in one.items()
                if values
            }
        )
    busy = [gpu["busy"] for gpu in gpus if "busy" in gpu]
    if busy:
        found["gpu_busy"] = statistics.fmean(busy)
    watts = [gpu["watts"] for gpu in gpus if "watts" in gpu]
    if watts:
        found["watts"] = math.fsum(watts)
    return found | ({"gpus": gpus} if gpus else {})


def _look_at_gpu(handle: Any) -> dict[str, float]:
    """Return what one GPU says of itself; what it does not support is left out."""
    seen: dict[str, float] = {}
    with contextlib.suppress(pynvml.NVMLError):
        seen["busy"] = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    with contextlib.suppress(pynvml.NVMLError):
        seen["watts"] = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000  # it counts in milliwatts
    with contextlib.suppress(pynvml.NVMLError):
        seen["memory"] = float(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    return seen
