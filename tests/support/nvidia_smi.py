"""A pretended nvidia-smi, with the tables that real ones print."""

import os
from pathlib import Path

import pytest

TABLE = """+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI {driver:<22} {header:<48} |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|=========================================+========================+======================|
|   0  {name:<22}         On  |   00000000:4E:00.0 Off |                    0 |
+-----------------------------------------+------------------------+----------------------+
"""
HEADERS = {
    "550.54.15": "Driver Version: 550.54.15      CUDA Version: 12.4",
    "570.86.15": "Driver Version: 570.86.15      CUDA Version: 12.8",
    "580.65.06": "Driver Version: 580.65.06      CUDA Version: 13.0",
    "610.57.04": "KMD Version: 610.57.04     CUDA UMD Version: 13.3",
}
"""By driver. Where cuda-compat lies on LD_LIBRARY_PATH, the same driver shows the newer CUDA."""


def pretend(
    folder: Path,
    patch: pytest.MonkeyPatch,
    driver: str,
    header: str = "",
    names: tuple[str, ...] = ("NVIDIA H100 80GB HBM3",),
    capability: str = "9.0",
) -> None:
    """Put an nvidia-smi in front of all others that speaks of this driver and these GPUs."""
    folder.mkdir(exist_ok=True)
    header = header or HEADERS[driver]
    (folder / "table").write_text(TABLE.format(driver=driver, header=header, name=names[0]))
    listed = [f"GPU {number}: {name} (UUID: GPU-{number})" for number, name in enumerate(names)]
    (folder / "list").write_text("\n".join(listed) + "\n")
    query = (
        f"echo {capability}"
        if capability
        else "echo 'Field is not a valid field to query.'; exit 2"
    )
    script = f"""#!/bin/sh
case "$1" in
  "") cat "{folder}/table";;
  -L) cat "{folder}/list";;
  --query-gpu=compute_cap) {query};;
  *) exit 6;;
esac
"""
    write_program(folder / "nvidia-smi", script)
    patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def pretend_failure(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Put an nvidia-smi in front of all others that reaches no driver."""
    folder.mkdir(exist_ok=True)
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    write_program(folder / "nvidia-smi", f'#!/bin/sh\necho "{said}"\nexit 9\n')
    patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
