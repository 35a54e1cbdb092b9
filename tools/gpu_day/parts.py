"""Cut what must travel into parts of at most so many bytes, and put it together on the other side.

A bundle is one file, such as the archive of packages. A part is a folder with slices of bundles and
`part.json`, which names each slice's place and SHA-256 and the bundle's own. Parts may arrive in
any order: `join` makes a bundle as soon as all of its slices are there.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ABOUT = "part.json"
FACTS = "facts.json"
OVERHEAD = 20_000
"""Bytes that `part.json` may take."""
_BUFFER = 2**20


class PartsError(Exception):
    """Say what is wrong with a part, and which one to send again."""


@dataclass(frozen=True)
class Bundle:
    """Name a file that travels. `bundles` come in the order in which they are of use."""

    name: str
    path: Path


@dataclass(frozen=True)
class Slice:
    """Name a stretch of a bundle."""

    bundle: str
    start: int
    length: int


def plan(sizes: Sequence[tuple[str, int]], limit: int) -> list[list[Slice]]:
    """Return the slices of each part, in the given order of bundles, none above `limit` bytes.

    A bundle above the limit is cut into as few slices of equal length as fit.
    """
    if limit < 1:
        raise PartsError(f"a part has room for {limit} bytes; it needs at least one")
    parts: list[list[Slice]] = []
    room = 0
    for name, size in sizes:
        count = max(1, -(-size // limit))
        length = -(-size // count)
        for number in range(count):
            start = number * length
            piece = Slice(name, start, min(length, size - start))
            if piece.length > room:
                parts.append([])
                room = limit
            parts[-1].append(piece)
            room -= piece.length
    return parts


def write(
    bundles: Sequence[Bundle],
    limit: int,
    folder: Path,
    facts: dict[str, str | bool],
) -> list[Path]:
    """Write the parts as `folder`/part-1, part-2, …, and return their folders.

    facts: what the other side should know, such as the commit.
    """
    sizes = [(bundle.name, bundle.path.stat().st_size) for bundle in bundles]
    paths = {bundle.name: bundle.path for bundle in bundles}
    whole = {name: {"size": size, "sha256": digest(paths[name])} for name, size in sizes}
    for old in folder.glob("part-*"):
        shutil.rmtree(old)
    folders = []
    for number, slices in enumerate(plan(sizes, limit), start=1):
        part = folder / f"part-{number}"
        part.mkdir(parents=True)
        listed = []
        for piece in slices:
            file = part / f"{piece.bundle}.{piece.start}"
            _copy(paths[piece.bundle], piece, file)
            listed.append(asdict(piece) | {"file": file.name, "sha256": digest(file)})
        of_bundles = {piece.bundle: whole[piece.bundle] for piece in slices}
        about = {"facts": facts, "slices": listed, "bundles": of_bundles}
        (part / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
        folders.append(part)
    return folders


def take(part: Path, store: Path) -> None:
    """Copy a part's slices into `store`, where they wait for the others of their bundles.

    Raises PartsError for a part that is not there, incomplete or damaged.
    """
    try:
        about = json.loads((part / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PartsError(f"{part}: {ABOUT} cannot be read ({error}); send the part again") from None
    store.mkdir(parents=True, exist_ok=True)
    for piece in about["slices"]:
        source = part / piece["file"]
        if not source.is_file():
            raise PartsError(f"{source} is missing; send the part again")
        found = digest(source)
        if found != piece["sha256"]:
            wrong = f"{source} has the SHA-256 {found}, not {piece['sha256']}"
            raise PartsError(f"{wrong}; send the part again")
        shutil.copyfile(source, store / piece["file"])
    (store / FACTS).write_text(json.dumps(about["facts"]), encoding="utf-8")
    for name, whole in about["bundles"].items():
        (store / f"{name}.json").write_text(json.dumps(whole), encoding="utf-8")


def join(name: str, store: Path) -> Path | None:
    """Return the bundle put together from its slices; None while some are missing.

    Raises PartsError if the bundle is not the one that was cut.
    """
    described = store / f"{name}.json"
    if not described.is_file():
        return None
    whole = json.loads(described.read_text(encoding="utf-8"))
    joined = store / f"{name}.whole"
    if joined.is_file() and joined.stat().st_size == whole["size"]:
        return joined
    slices = sorted(_slices(name, store), key=lambda path: int(path.suffix[1:]))
    if sum(path.stat().st_size for path in slices) < whole["size"]:
        return None
    temporary = store / f"{name}.joining"
    with temporary.open("wb") as out:
        for path in slices:
            with path.open("rb") as file:
                shutil.copyfileobj(file, out, _BUFFER)
    found = digest(temporary)
    if found != whole["sha256"]:
        wrong = f"{name}, joined from {len(slices)} slices, has the SHA-256 {found}"
        raise PartsError(f"{wrong}, not {whole['sha256']}; send its parts again")
    temporary.rename(joined)
    return joined


def _slices(name: str, store: Path) -> Iterable[Path]:
    return (path for path in store.glob(f"{name}.*") if path.suffix[1:].isdecimal())


def _copy(source: Path, piece: Slice, target: Path) -> None:
    with source.open("rb") as file, target.open("wb") as out:
        file.seek(piece.start)
        left = piece.length
        while left:
            block = file.read(min(left, _BUFFER))
            assert block, f"{source} became shorter while it was read"
            out.write(block)
            left -= len(block)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
