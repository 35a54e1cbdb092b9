"""What nvidia-smi says of this machine's GPUs, and whether their driver can run CUDA builds.

Only the standard library, since tools/install.py asks before anything is installed.

A driver runs what was built for the major version of CUDA that it came with, and for earlier ones:
CUDA 12 needs driver 525, CUDA 13 needs 580. NVIDIA's cuda-compat package gives an older driver of a
data-center GPU the libraries of a newer one; nvidia-smi then reports the newer CUDA.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass

CUDA = (13, 0)
"""What the tested vLLM and torch are built with: vLLM requires nvidia-cutlass-dsl[cu13]."""
_DRIVERS = {12: 525, 13: 580}
"""By major version of CUDA: the oldest driver."""
_CAPABILITY = 7.5
"""Of the oldest GPUs that vLLM and CUDA 13 support."""
_SECONDS = 60.0
_DRIVER = re.compile(r"(?:Driver|KMD) Version\s*:\s*(\d[\d.]*)")
_CUDA = re.compile(r"CUDA(?: UMD)? Version\s*:\s*(\d+)\.(\d+)")


@dataclass(frozen=True)
class Gpus:
    """The GPUs of this machine, as their driver describes them."""

    names: list[str]
    driver: str
    """Such as "550.54.15"; "" where it is unknown."""
    cuda: tuple[int, int] | None
    """The newest version of CUDA that the driver supports; None where nvidia-smi does not say."""
    capability: float | None = None
    """The lowest compute capability of these GPUs; None where nvidia-smi does not say."""


def gpu_names() -> list[str]:
    """Return what GPUs there are; none where no NVIDIA driver answers."""
    return re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", _nvidia_smi("-L"), re.MULTILINE)


def find_gpus() -> Gpus | None:
    """Return the GPUs of this machine and their driver; None where there are none."""
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
    """Return why these GPUs cannot run packages built with `cuda`, and the way out, or ""."""
    if gpus.capability is not None and gpus.capability < _CAPABILITY:
        return (
            f"{gpus.names[0]} has compute capability {gpus.capability}, and vLLM's packages are "
            f"built for {_CAPABILITY} (T4, RTX 20) and newer: use another GPU"
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
        f"the NVIDIA driver {gpus.driver} {supports}, and the packages are built with CUDA "
        f"{cuda[0]}.{cuda[1]}, which needs {newer}: update the driver; on a data-center GPU "
        f"NVIDIA's package cuda-compat-{cuda[0]}-{cuda[1]} does as well"
    )


def _nvidia_smi(*options: str) -> str:
    """Return what nvidia-smi prints; "" where there is none, or it fails."""
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
