"""Read this machine's GPUs from nvidia-smi, and check their driver for CUDA builds.

Uses only the standard library, since tools/install.py asks before anything is installed.

A driver runs builds for its own major version of CUDA, and for earlier ones: CUDA 12 needs driver
525, CUDA 13 needs 580. NVIDIA's cuda-compat package gives an older driver of a data-center GPU the
libraries of a newer one; nvidia-smi then reports the newer CUDA.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass

CUDA = (13, 0)
"""The CUDA of the tested vLLM and torch builds: vLLM requires nvidia-cutlass-dsl[cu13]."""
_DRIVERS = {12: 525, 13: 580}
"""The oldest driver, by major version of CUDA."""
_CAPABILITY = 7.5
"""Of the oldest GPUs supported by vLLM and CUDA 13."""
_SECONDS = 60.0
_DRIVER = re.compile(r"(?:Driver|KMD) Version\s*:\s*(\d[\d.]*)")
_CUDA = re.compile(r"CUDA(?: UMD)? Version\s*:\s*(\d+)\.(\d+)")


@dataclass(frozen=True)
class Gpus:
    """The GPUs of this machine, as described by their driver."""

    names: list[str]
    driver: str
    """Such as "550.54.15"; "" if unknown."""
    cuda: tuple[int, int] | None
    """The newest version of CUDA supported by the driver; None if nvidia-smi does not say."""
    capability: float | None = None
    """The lowest compute capability of these GPUs; None if nvidia-smi does not say."""


def gpu_names() -> list[str]:
    """Return the names of the GPUs; none without an answer from an NVIDIA driver."""
    return re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", _nvidia_smi("-L"), re.MULTILINE)


def find_gpus() -> Gpus | None:
    """Return the GPUs of this machine and their driver; None without any."""
    names = gpu_names()
    if not names:
        return None
    table = _nvidia_smi()
    driver = _DRIVER.search(table)
    cuda = _CUDA.search(table)
    listed = _nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader")
    capabilities = [float(line) for line in re.findall(r"^\d+\.\d+$", listed, re.MULTILINE)]
    return Gpus(
        names=names,
        driver=driver[1] if driver else "",
        cuda=(int(cuda[1]), int(cuda[2])) if cuda else None,
        capability=min(capabilities, default=None),
    )


def gpu_problem(gpus: Gpus, cuda: tuple[int, int] = CUDA) -> str:
    """Return the reason against running packages built with `cuda` on these GPUs, and the way out,
    or "".
    """
    if gpus.capability is not None and gpus.capability < _CAPABILITY:
        return (
            f"{gpus.names[0]} has compute capability {gpus.capability}, but vLLM's packages need "
            f"{_CAPABILITY} (T4, RTX 20) or newer: use another GPU"
        )
    needed = _DRIVERS.get(cuda[0])
    major = int(gpus.driver.partition(".")[0] or 0)
    if gpus.cuda is not None:
        is_too_old = gpus.cuda[0] < cuda[0]
        supports = f"supports CUDA up to {gpus.cuda[0]}.{gpus.cuda[1]}"
    else:
        is_too_old = needed is not None and 0 < major < needed
        supports = "supports an older CUDA only"
    if not is_too_old:
        return ""
    if needed:
        newer = f"driver {needed} or newer"
    else:
        newer = "a newer driver"
    return (
        f"the NVIDIA driver {gpus.driver} {supports}, but the packages use CUDA "
        f"{cuda[0]}.{cuda[1]}, and that needs {newer}: update the driver; on a data-center GPU, "
        f"NVIDIA's package cuda-compat-{cuda[0]}-{cuda[1]} is enough"
    )


def _nvidia_smi(*options: str) -> str:
    """Return the output of nvidia-smi; "" if it is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        done = subprocess.run(
            ["nvidia-smi", *options],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode == 0:
        return done.stdout
    return ""
