"""Packages of other people, which register entries with ttrl: laid out as pip would, without pip."""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "register.md"


def install(
    folder: Path, name: str, entry_points: Mapping[str, Mapping[str, str]], **modules: str
) -> None:
    """Put modules, and the metadata of a package, into a folder for sys.path."""
    # As pip does: importlib.metadata takes the first dash of this name for the end of the package's.
    information = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for group, entries in entry_points.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (information / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for module, code in modules.items():
        (folder / f"{module}.py").write_text(code)


def without(folder: Path, package: str) -> dict[str, str]:
    """Return the environment of a process to which a package is not installed."""
    error = f"No module named {package!r}"
    (folder / f"{package}.py").write_text(
        f"raise ModuleNotFoundError({error!r}, name={package!r})\n"
    )
    return {**os.environ, "PYTHONPATH": str(folder)}


def block(language: str) -> str:
    """Return the only example of the page in a language."""
    (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return text


def install_from_the_page(folder: Path) -> None:
    """Put the package of docs/how-to/register.md into a folder for sys.path."""
    project = tomllib.loads(block("toml"))["project"]
    install(folder, project["name"], project["entry-points"])
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        path = folder / code.partition("\n")[0].removeprefix("# ")
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
