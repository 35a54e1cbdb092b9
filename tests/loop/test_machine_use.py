"""What a run says of the machine: of the CPU for real, of GPUs with a stand-in for NVIDIA's
library.
"""

import time
from types import SimpleNamespace

import pynvml
import pytest

from ttrl.facts import GpuUse, MachineUse, Step
from ttrl.loop import machine_use
from ttrl.loop.machine_use import Look, MachineWatch
from ttrl.loop.timeline import Timeline
from ttrl.system.console import clock
from ttrl.system.gpus import visible_handles


def test_looks_are_sorted_by_what_the_run_did():
    timeline, use = Timeline(), MachineWatch()
    timeline.add_training(10.0, 20.0, [Step(seconds=10.0)])
    timeline._spans.append(("sample", 15.0, 30.0))

    def gpus(*pairs):
        return tuple(GpuUse(busy=busy, watts=watts, memory=1e9 * watts) for busy, watts in pairs)

    use._looks = [
        Look(5.0, 0.1, 1.0, gpus((0.0, 50.0), (0.0, 60.0))),
        Look(12.0, 0.5, 3.0, gpus((1.0, 300.0), (0.5, 200.0))),
        Look(14.0, 0.7, 2.0, gpus((0.8, 500.0), (0.7, 400.0))),
        Look(17.0, 1.0, 4.0, (GpuUse(busy=0.9), GpuUse())),
        Look(25.0, 0.3, 4.0),
        Look(31.0, 0.0, 4.0),
    ]
    found = use.take(timeline, 30.0).to_json()
    assert list(found) == ["sample", "train", "both", "other"]
    assert found["sample"] == {"seconds": 1.0, "cpu": 0.3, "memory": 4.0}
    train = found["train"]
    assert (train["seconds"], train["cpu"], train["memory"]) == (2.0, 0.6, 3.0)
    assert train["gpus"] == [
        {"busy": 0.9, "watts": 400.0, "memory": 500e9},
        {"busy": 0.6, "watts": 300.0, "memory": 400e9},
    ]
    assert (train["gpu_busy"], train["watts"]) == (pytest.approx(0.75), 700.0)
    assert found["both"]["gpus"] == [{"busy": 0.9}, {}] and "watts" not in found["both"]
    assert found["other"]["watts"] == 110.0
    assert use.take(timeline, 30.0) == MachineUse()
    assert list(use.take(timeline, 40.0).to_json()) == ["other"]


def test_this_machine():
    timeline, use = Timeline(), MachineWatch(seconds=0.01)
    use.begin()
    with timeline.span("sample"):
        while not use._looks:
            time.sleep(0.001)
        seen = clock()
    use.end()
    assert not use._thread.is_alive()
    found = use.take(timeline, seen).to_json()
    assert all(0 <= one["cpu"] <= 1 and one["memory"] > 1e6 for one in found.values()) and found


@pytest.mark.parametrize(
    "visible, expected",
    [
        (None, [0, 1]),
        ("1", [1]),
        ("1,0", [1, 0]),
        ("GPU-b, 0", ["GPU-b", 0]),
        ("0,7,1", [0]),
        ("", []),
        ("-1", []),
    ],
)
def test_gpus_that_this_process_may_see(monkeypatch, visible, expected):
    def by_name(known):
        def handle(name):
            if name not in known:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
            return name

        return handle

    def unsupported(_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    over = []
    fakes = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: over.append(1),
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": by_name([0, 1]),
        "nvmlDeviceGetHandleByUUID": by_name(["GPU-b"]),
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=37),
        "nvmlDeviceGetPowerUsage": unsupported,
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=5),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(pynvml, name, fake)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with visible_handles() as gpus:
        assert gpus == expected
        assert machine_use._look_at_gpu(0) == GpuUse(busy=0.37, memory=5.0)
    assert over == [1]
