"""Name the processor, and remember the fastest matrix products that it was seen to compute."""

import contextlib
import platform
from pathlib import Path

from ttrl.system.files import keep_figure


def cpu_name() -> str:
    """Return the processor's name, or its architecture's where the system does not say."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def best_product(shape: tuple[int, int, int], dtype: str, processor: str, speed: float) -> float:
    """Return the best FLOP/s at which a product [tokens, k] x [k, n] was ever measured on a
    processor, `speed` among them. Kept in `peaks.json` of the user's cache: beside a server that is
    busy, or starts, a product takes several times as long.

    processor: its name; of a CPU, with the number of threads and what PyTorch uses of it.
    """
    tokens, k, n = shape
    return keep_figure(
        "peaks.json", f"{processor} {dtype} {tokens}x{k}x{n}", lambda best: max(speed, best or 0.0)
    )
