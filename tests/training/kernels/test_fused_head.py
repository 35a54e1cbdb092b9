"""The head's kernels for GPUs, by Triton's interpreter, which has to be asked for before anything
imports Triton.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[3]


def test_by_the_interpreter():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "tests/support/fused_head_checks.py",
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 and "19 passed" in done.stdout, done.stdout[-6000:]


def test_they_compile_for_gpus_that_are_not_there():
    """The oldest and the newest of those that tools/check_kernels.py knows."""
    command = [
        sys.executable,
        str(ROOT / "tools" / "check_kernels.py"),
        "--gpus",
        "80",
        "120",
        "--head-dims",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        [gpu, kernel]
        for gpu in ("sm_80", "sm_120")
        for kernel in ("measure_kernel", "gradient_kernel")
    ]
