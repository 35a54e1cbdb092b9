"""Our C code: compiled once per user, kept in a cache, loaded with ctypes. Needs only the standard
library.

There is one source, attention on CPUs (`ttrl.training.kernels.native_attention`). Where it cannot
be had, PyTorch's kernel is taken, whose results differ by rounding; so the log, `ttrl doctor` and
environment.json say which one it is and why.

The cache is `ttrl` in XDG_CACHE_HOME, else in ~/.cache. A file's name holds what it was made of,
and its last bytes the digest of those before: a truncated library would end the process that runs
it. A folder that other users can write to is not used. Where there is no usable cache, each process
compiles for itself, which takes a second or two.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ttrl.system.files import keep_figure, user_cache

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).parent.parent / "training" / "kernels" / "native_attention.c"
_FLAGS = ("-O3", "-mavx512f", "-mavx512dq", "-mfma", "-fno-math-errno", "-shared", "-fPIC")
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_SECONDS = 120
_LAST_LINES = 3  # of a compiler's output


@dataclass(frozen=True)
class Kernel:
    """The kernel of attention that this machine takes where shapes allow."""

    library: ctypes.CDLL | None
    """None: PyTorch's."""
    why: str
    trouble: Literal["", "no compiler", "failed"] = ""
    """Why ours is not there although it could be."""

    @property
    def name(self) -> str:
        """Return the name for environment.json, without paths."""
        if self.library is None:
            return "PyTorch's kernel"
        return "ttrl's kernel (AVX-512)"

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


@functools.cache
def attention_kernel() -> Kernel:
    """Return the kernel, compiled if need be, and log what was found. Never raises."""
    found = _find()
    logger.log(
        logging.WARNING if found.trouble == "failed" else logging.INFO,
        "attention on CPUs by %s",
        found,
    )
    return found


def _find() -> Kernel:
    if os.environ.get("TTRL_NATIVE") == "0":
        return Kernel(None, "TTRL_NATIVE is 0")
    if os.environ.get("ATEN_CPU_CAPABILITY", "avx512").lower() != "avx512":
        return Kernel(None, "ATEN_CPU_CAPABILITY forbids AVX-512")
    if not {"avx512f", "avx512dq", "fma"} <= {*_cpu_line("flags").split()}:
        return Kernel(None, "no Linux on a CPU with AVX-512")
    compiler = next(
        (
            path
            for name in (os.environ.get("CC", "cc"), *_COMPILERS)
            if (path := shutil.which(name))
        ),
        None,
    )
    if compiler is None:
        return Kernel(None, f"no C compiler ({', '.join(_COMPILERS)})", "no compiler")
    try:
        return Kernel(_load(compiler), f"compiled by {compiler}")
    except subprocess.CalledProcessError as error:
        last = " / ".join(error.stderr.decode(errors="replace").strip().splitlines()[-_LAST_LINES:])
        return Kernel(
            None,
            f"{compiler} failed with exit code {error.returncode}: {last or 'no output'}",
            "failed",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Kernel(None, f"could not be compiled by {compiler} and loaded: {error}", "failed")


def cpu_name() -> str:
    """Return the processor's name, or its architecture's where the system does not say."""
    return _cpu_line("model name") or platform.machine()


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


def _cpu_line(name: str) -> str:
    """Return what the system says of the first CPU; "" where it does not."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
    return ""


def _load(compiler: str) -> ctypes.CDLL:
    # A home may be shared by different systems.
    made_of = [compiler, *_FLAGS, platform.machine(), *platform.libc_ver()]
    digest = hashlib.sha256(" ".join(made_of).encode() + _SOURCE.read_bytes()).hexdigest()
    name = f"attention-{digest[:16]}.so"
    try:
        file = user_cache() / name
        if not _is_whole(file):
            _compile(compiler, file)
        return ctypes.CDLL(os.fspath(file))
    except OSError as error:
        logger.warning("compiled for this process alone, since there is no usable cache: %s", error)
    with tempfile.TemporaryDirectory() as folder:  # what is loaded stays when its file goes
        return ctypes.CDLL(os.fspath(_compile(compiler, Path(folder, name))))


def _is_whole(file: Path) -> bool:
    content = file.read_bytes() if file.exists() else b""
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _compile(compiler: str, file: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        new = Path(folder, file.name)
        command = [compiler, *_FLAGS, "-o", str(new), str(_SOURCE), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_SECONDS)
        content = new.read_bytes()
        # Loaders do not read behind the last section.
        new.write_bytes(content + hashlib.sha256(content).digest())
        new.replace(file)  # whole, or not at all: other processes may compile at the same time
    return file
