"""Which drivers and GPUs can run CUDA builds, from what nvidia-smi prints."""

from pathlib import Path

import pytest
from support.nvidia_smi import HEADERS, pretend, pretend_failure

from ttrl.system import nvidia
from ttrl.system.nvidia import Gpus, find_gpus, gpu_problem


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [
        ("550.54.15", (12, 4)),
        ("570.86.15", (12, 8)),
        ("580.65.06", (13, 0)),
        ("610.57.04", (13, 3)),
    ],
)
def test_drivers_and_what_they_support_are_read(
    driver: str, cuda: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")
    pretend(tmp_path / "bin", monkeypatch, driver, names=names, capability="9.0; echo 8.0")
    assert find_gpus() == Gpus([*names], driver, cuda, 8.0)


@pytest.mark.parametrize("driver", ["550.54.15", "570.86.15"])
def test_a_driver_too_old_for_cuda_13_is_told_what_it_needs(
    driver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(tmp_path / "bin", monkeypatch, driver)
    gpus = find_gpus()
    assert gpus is not None
    supported = HEADERS[driver].split()[-1]
    said = gpu_problem(gpus)
    start = f"the NVIDIA driver {driver} supports CUDA up to {supported}, but the packages use "
    assert said.startswith(f"{start}CUDA 13.0, and that needs driver 580 or newer")
    assert "driver 580 or newer: update the driver" in said and "cuda-compat-13-0" in said
    # Any driver of CUDA 12 runs what was built with a later one.
    assert gpu_problem(gpus, (12, 9)) == ""


@pytest.mark.parametrize(
    ("driver", "header"),
    [
        ("580.65.06", ""),
        ("610.57.04", ""),
        ("580.65.06", "Driver Version: 580.65.06      CUDA Version: N/A"),
        ("550.54.15", "Driver Version: 550.54.15      CUDA Version: 13.0"),  # with cuda-compat
    ],
)
def test_drivers_that_will_do(
    driver: str, header: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(tmp_path / "bin", monkeypatch, driver, header)
    gpus = find_gpus()
    assert gpus is not None and gpu_problem(gpus) == ""


def test_where_the_table_does_not_say_the_drivers_number_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container without the driver's own libraries."""
    header = "Driver Version: 550.54.15      CUDA Version: N/A"
    pretend(tmp_path / "bin", monkeypatch, "550.54.15", header, capability="")
    gpus = find_gpus()
    assert gpus is not None and (gpus.cuda, gpus.capability) == (None, None)
    assert "driver 550.54.15 supports an older CUDA only" in gpu_problem(gpus)


def test_a_gpu_that_vllm_does_not_support_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(
        tmp_path / "bin",
        monkeypatch,
        "580.65.06",
        names=("Tesla V100-SXM2-16GB",),
        capability="7.0",
    )
    gpus = find_gpus()
    assert gpus is not None and gpu_problem(gpus).startswith(
        "Tesla V100-SXM2-16GB has compute capability 7.0"
    )


def test_without_a_driver_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_failure(tmp_path / "bin", monkeypatch)
    assert find_gpus() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpus() is None


def test_what_is_needed_is_what_the_tested_packages_are_built_with() -> None:
    """Only the CUDA build of vLLM names its CUDA; it is looked at where it is installed."""
    import importlib.metadata
    import re

    try:
        requirements = importlib.metadata.requires("vllm") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the CUDA build of vLLM is not installed here")
    named = {int(digits) for text in requirements for digits in re.findall(r"\[cu(\d\d)", text)}
    assert named == {nvidia.CUDA[0]}
