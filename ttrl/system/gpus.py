"""Read the GPUs this process may use, without a CUDA context in it.

A context takes half a gigabyte of a GPU. The process behind a run needs no GPU itself, and its
servers and trainers need the memory free. So NVML, the driver's own library, names the GPUs. In
three cases NVML and CUDA may disagree: a GPU in MIG mode, GPUs of several kinds (CUDA puts the
fastest first), and GPUs without NVML (AMD's). Then a child process asks PyTorch.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pynvml

from ttrl.errors import UserError

_ASK_PYTORCH = """
import json
from torch import cuda
found = [cuda.get_device_properties(number) for number in range(cuda.device_count())]
print(json.dumps([[gpu.name, gpu.total_memory] for gpu in found]))
"""
_WAY_OUT = "`ttrl doctor` looks for the cause"
_SECONDS = 120  # a cold import of PyTorch from a slow disk


@dataclass(frozen=True)
class Gpu:
    """A GPU, or an instance of one in MIG mode."""

    name: str
    memory: float
    """Bytes a program can have: without the driver's own."""


def visible_gpus() -> list[Gpu]:
    """Return the GPUs in CUDA's order. Raises UserError if PyTorch is asked and fails."""
    with visible_handles() as handles:
        found = [_read(handle) for handle in handles]
        if found and not any(map(_is_divided, handles)):
            is_ordered = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
            if is_ordered or len({gpu.name for gpu in found}) == 1:
                return found
    return [Gpu(name, float(memory)) for name, memory in json.loads(in_child(_ASK_PYTORCH))]


def visible_devices() -> list[str]:
    """Return the names of this process's GPUs, in the form of CUDA_VISIBLE_DEVICES."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return given.split(",")
    return [str(number) for number in range(len(visible_gpus()))]


@contextlib.contextmanager
def visible_handles() -> Iterator[list[Any]]:
    """Give NVML's handles of the GPUs in CUDA_VISIBLE_DEVICES, or of all.

    There are none without NVIDIA's driver.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield []
        return
    try:
        yield _handles(os.environ.get("CUDA_VISIBLE_DEVICES"))
    finally:
        pynvml.nvmlShutdown()


@functools.cache
def in_child(program: str, *arguments: str, seconds: float = _SECONDS) -> str:
    """Run Python code in a child process, once, and return its last line of output.

    Raises UserError if it fails or takes longer than `seconds`.
    """
    command = [sys.executable, "-c", program, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        raise UserError(f"PyTorch cannot use the GPU: {last}; {_WAY_OUT}") from error
    except subprocess.TimeoutExpired as error:
        late = f"PyTorch did not report the GPU within {seconds:g} s"
        raise UserError(f"{late}; {_WAY_OUT}") from error
    return (done.stdout.strip().splitlines() or [""])[-1]


def _handles(visible: str | None) -> list[Any]:
    """Return handles in the given order. Like CUDA, stop at the first unknown name."""
    if visible is None:
        names = [str(number) for number in range(pynvml.nvmlDeviceGetCount())]
    else:
        names = [name.strip() for name in visible.split(",")]
    found: list[Any] = []
    for name in names:
        try:
            if name.isdecimal():
                found.append(pynvml.nvmlDeviceGetHandleByIndex(int(name)))
            else:
                found.append(pynvml.nvmlDeviceGetHandleByUUID(name))
        except pynvml.NVMLError:
            break
    return found


def _read(handle: Any) -> Gpu:
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        usable = memory.total - memory.reserved
    except pynvml.NVMLError:  # a driver older than 510
        usable = pynvml.nvmlDeviceGetMemoryInfo(handle).total
    return Gpu(pynvml.nvmlDeviceGetName(handle), float(usable))


def _is_divided(handle: Any) -> bool:
    """Return whether a GPU is in MIG mode: CUDA then sees its instances in its place."""
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:  # not supported by the GPU, or the handle is an instance's
        return False
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)
