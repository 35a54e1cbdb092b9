"""Name the processor, and remember its fastest measured matrix products."""

import contextlib
import platform
from pathlib import Path

from ttrl.system.files import keep_figure


def cpu_name() -> str:
    """Return the processor's name, or its architecture's if the system does not say."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def best_product(shape: tuple[int, int, int], dtype: str, processor: str, speed: float) -> float:
    """Return the best measured FLOP/s of a product [tokens, k] x [k, n] on a processor, `speed`
    included. Kept in `peaks.json` of the user's cache: next to a busy or starting server, a product
    takes several times as long.

    processor: its name; of a CPU, with the number of threads and PyTorch's use of it.
    """
    tokens, k, n = shape
    return keep_figure(
        "peaks.json", f"{processor} {dtype} {tokens}x{k}x{n}", lambda best: max(speed, best or 0.0)
    )
