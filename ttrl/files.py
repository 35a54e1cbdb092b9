"""Files that are there whole or not at all, and logs that survive a torn last line.

A file or folder is written beside its final name, fsynced, and renamed; the folder that holds it is fsynced too, so that after a
power loss the name points at the new content or at the old one, never at half of it.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ttrl.errors import StorageError

TEMPORARY_PREFIX = ".partial-"  # what a killed process may leave behind; never read, removed on resume


def _as_os_error(error: OSError | SafetensorError) -> OSError | None:
    """safetensors reports what the operating system refused as text alone: "… (os error 28)"."""
    if isinstance(error, OSError):
        return error
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None


def _storage_error(error: OSError, path: Path) -> StorageError:
    """Says what could not be written, why, and how much room there is."""
    way_out = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(next(p for p in [path, *path.parents] if p.exists())).free
        way_out = f" ({free / 1e6:.1f} MB free there); make room and start the same command again: it continues at this phase"
    return StorageError(error.errno or 0, f"could not write {path}: {error.strerror or error}{way_out}")


def fsync_folder(folder: Path) -> None:
    """Makes renames inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(root: Path) -> None:
    """fsyncs every file and folder below `root`, and `root` itself."""
    for folder, _, names in os.walk(root):
        for name in names:
            with open(Path(folder, name), "rb") as file:
                os.fsync(file.fileno())
        fsync_folder(Path(folder))


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path to write to; renames it to `path` at the end of the block, or removes it when the block raises.

    Raises StorageError for what the operating system refuses (disk full, no permission).
    """
    path = Path(path)
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, suffix="-" + path.name, dir=path.parent)
        os.close(descriptor)
        temporary = Path(name)
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        os.replace(temporary, path)
        fsync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        if (refused := _as_os_error(error)) is None:
            raise
        raise _storage_error(refused, path) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Like `atomic_file` for a whole folder. A folder that stands at `path` already is replaced as a whole."""
    path = Path(path)
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, suffix="-" + path.name, dir=path.parent))
        temporary.chmod(0o755)
        yield temporary
        fsync_tree(temporary)
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, suffix="-old", dir=path.parent))
            os.replace(path, old)  # an empty folder may be replaced by a rename
            os.replace(temporary, path)
            shutil.rmtree(old)
        else:
            os.replace(temporary, path)
        fsync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        if (refused := _as_os_error(error)) is None:
            raise
        raise _storage_error(refused, path) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def remove_leftovers(folder: Path) -> list[Path]:
    """Removes what killed processes left half written below `folder`; returns what it removed."""
    leftovers = [path for path in folder.rglob(TEMPORARY_PREFIX + "*")]
    for path in leftovers:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return leftovers


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes indented JSON atomically. NaN is refused: it is no JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_jsonl(path: str | os.PathLike[str], rows: list[dict[str, Any]]) -> None:
    """Writes one JSON object per line, atomically."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows))


def append_jsonl(path: str | os.PathLike[str], row: dict[str, Any]) -> None:
    """Appends one line and fsyncs it. A torn last line that a killed process left is cut off first."""
    path = Path(path)
    data = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b") as file:
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(end - 1)
                if file.read(1) != b"\n":
                    file.seek(0)
                    whole = file.read()
                    begin = whole.rfind(b"\n") + 1
                    try:
                        json.loads(whole[begin:])
                        data = b"\n" + data  # a whole line that lost its newline alone: `read_jsonl` counts it, so it stays
                    except ValueError:
                        file.truncate(begin)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _storage_error(error, path) from error


def read_jsonl(path: str | os.PathLike[str], key: str | None = None) -> list[dict[str, Any]]:
    """Reads JSON lines. A torn last line is dropped; with `key`, a later line replaces an earlier one of the same value.

    A line that is damaged anywhere else raises ValueError with its number: that is no torn append.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):  # no newline after it: an append that was cut off
                break
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
    if key is None:
        return rows
    return list({row[key]: row for row in rows}.values())


def digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
