"""Write files completely or not at all, and logs able to survive a torn last line.

A file or folder is written next to its final name, fsynced, and renamed. Its parent folder is
fsynced too, and so is the parent of each new folder. After a power loss the name points at the new
content or at the old one, never at half of it. Folders also disappear in one step: before emptying,
they are renamed to a name outside all reads.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from ttrl.errors import ModelFolderError, StorageError
from ttrl.text import si_spaced

_FULL_BYTES = 2**16  # less than this is a full disk: some pages may be left, usable by no file
# A killed process may leave these behind; never read, removed on resume.
TEMPORARY_PREFIX = ".partial-"
_STALE = (errno.ESTALE, errno.EIO)
_PAUSES = (0.05, 0.1, 0.2, 0.4)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
T = TypeVar("T")


def again(work: Callable[[], T]) -> T:
    """Return the result of `work`, with four more tries on ESTALE or EIO. A network file system
    loses sight of a file just replaced by another machine; the next look finds it. Raises the last
    try's error.
    """
    for pause in _PAUSES:
        try:
            return work()
        except (OSError, SafetensorError) as error:
            refused = _as_os_error(error)
            if refused is None or refused.errno not in _STALE:
                raise
        time.sleep(pause)
    return work()


def _as_os_error(error: OSError | SafetensorError) -> OSError | None:
    """Return the operating system's error; safetensors gives it only in its text: "… (os error
    28)".
    """
    if isinstance(error, OSError):
        return error
    number = re.search(r"\(os error (\d+)\)", str(error))
    if number:
        return OSError(int(number[1]), os.strerror(int(number[1])))
    return None


def _storage_error(error: OSError, path: Path, needed: int | None = None) -> StorageError:
    """Return an error with the path, the reason, and the free and `needed` bytes (None if no longer
    known).
    """
    way_out = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        if needed is None:
            needs = ""
        else:
            needs = f"{si_spaced(needed)}B needed, "
        room = f"{needs}{si_spaced(free_bytes(path) or 0)}B free there"
        way_out = (
            f" ({room}); make room and start the same command again: it continues at this phase"
        )
    return StorageError(
        error.errno or 0, f"could not write {path}: {error.strerror or error}{way_out}"
    )


def free_bytes(path: str | os.PathLike[str]) -> int | None:
    """Return the bytes free for us at the present or future `path`; None if the file system does
    not say. Ignores quotas.
    """
    path = Path(path).absolute()
    try:
        usage = shutil.disk_usage(next(place for place in [path, *path.parents] if place.exists()))
    except OSError:
        return None
    if usage.total:
        return usage.free
    return None


def full_disk(path: str | os.PathLike[str]) -> StorageError | None:
    """Return the error to raise if no room is left after a process writing to `path` failed
    silently; else None.
    """
    free = free_bytes(path)
    full = free is not None and free < _FULL_BYTES
    if full:
        return _storage_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), Path(path))
    return None


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all existing files below a folder; links count nothing."""
    files = path.rglob("*") if path.is_dir() else [path]
    total = 0
    for file in files:
        with contextlib.suppress(OSError):
            if file.is_file() and not file.is_symlink():
                total += file.stat().st_size
    return total


def make_folders(folder: str | os.PathLike[str]) -> None:
    """Make a folder and its parents, durably: even an fsynced file is lost with its folder's
    name.
    """
    folder = Path(folder)
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for made in reversed(missing):
        made.mkdir(exist_ok=True)  # raises if a file has the name
        fsync_folder(made.parent)


def fsync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable, if the file system supports this."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # From some network file systems, for every folder.
        if error.errno not in (errno.EBADF, errno.EINVAL):
            raise
    finally:
        os.close(descriptor)


def fsync_tree(root: Path) -> None:
    """Sync `root` and every file and folder below it concurrently: a disk's journal takes many at
    once.
    """
    found = [(Path(folder), names) for folder, _, names in os.walk(root)]
    with ThreadPoolExecutor(8) as threads:
        for step in (
            threads.map(_fsync_file, [folder / name for folder, names in found for name in names]),
            threads.map(fsync_folder, [folder for folder, _ in found]),
        ):
            list(step)  # raises the first error


def _fsync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def _writing(path: Path, size: int | None) -> Iterator[None]:
    """Raise StorageError for the block's operating system errors. If the disk lacks room for `size`
    bytes, raise it at once, not after minutes of writing.
    """
    if size is not None and (free := free_bytes(path)) is not None and free < size:
        raise _storage_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), path, size)
    try:
        make_folders(path.parent)
        yield
    except (OSError, SafetensorError) as error:
        refused = _as_os_error(error)
        if refused is None:
            raise
        raise _storage_error(refused, path, size) from error


@contextlib.contextmanager
def atomic_file(
    path: str | os.PathLike[str], size: int | None = None, *, durable: bool = True
) -> Iterator[Path]:
    """Yield a temporary path to write to. Rename it to `path` at the end of the block, or remove it
    if the block raises.

    size: bytes to write, if known; a disk without room for them is then found at once, and the
    error gives the needed bytes. durable: False for files not needed after a power loss. Raises
    StorageError for errors of the operating system (disk full, no permission).
    """
    path = Path(path)
    with _writing(path, size):
        descriptor, name = tempfile.mkstemp(
            prefix=TEMPORARY_PREFIX, suffix="-" + path.name, dir=path.parent
        )
        os.close(descriptor)
        temporary = Path(name)
        try:
            yield temporary
            if durable:
                _fsync_file(temporary)
            temporary.chmod(0o644)
            os.replace(temporary, path)
            if durable:
                fsync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str], size: int | None = None) -> Iterator[Path]:
    """Write a whole folder as `atomic_file` writes a file. Replaces an existing folder at `path` as
    a whole.
    """
    path = Path(path)
    with _writing(path, size):
        temporary = Path(
            tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, suffix="-" + path.name, dir=path.parent)
        )
        try:
            temporary.chmod(0o755)
            yield temporary
            fsync_tree(temporary)
            if path.exists():
                old = Path(
                    tempfile.mkdtemp(
                        prefix=TEMPORARY_PREFIX, suffix=f"-old-{path.name}", dir=path.parent
                    )
                )
                os.replace(path, old)  # a rename may replace an empty folder
                os.replace(temporary, path)
                shutil.rmtree(old)
            else:
                os.replace(temporary, path)
            fsync_folder(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def remove_leftovers(folder: Path, name: str = "") -> list[Path]:
    """Remove the half-written files of killed processes, `folder` itself or below it; return the
    removed paths. name: only this file or folder directly in `folder`, if others may be writing
    there.
    """
    if folder.name.startswith(TEMPORARY_PREFIX):
        leftovers = [folder]
    elif name:
        leftovers = list(folder.glob(f"{TEMPORARY_PREFIX}*-{name}"))
    # os.walk skips a folder removed before its visit; Path.rglob does not.
    else:
        below = [
            Path(place, one)
            for place, folders, files in os.walk(folder)
            for one in [*folders, *files]
        ]
        leftovers = [path for path in below if path.name.startswith(TEMPORARY_PREFIX)]
    for path in leftovers:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return leftovers


def remove_folder(folder: str | os.PathLike[str]) -> None:
    """Remove a folder in one step for any reader: half of it is never seen under its name. Harmless
    without a folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return
    try:
        # Needs no new folder as a target: a full disk, the main reason to remove things, has no
        # room for one.
        place = folder.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(4)}-removed-{folder.name}")
        os.replace(folder, place)
        fsync_folder(folder.parent)
        shutil.rmtree(place)
    except OSError as error:
        raise StorageError(
            error.errno or 0, f"could not remove {folder}: {error.strerror or error}"
        ) from error


def write_text(path: str | os.PathLike[str], text: str, *, durable: bool = True) -> None:
    """Write a text file atomically. durable: see `atomic_file`."""
    _write_bytes(path, text.encode(), durable=durable)


def _write_bytes(path: str | os.PathLike[str], data: bytes, *, durable: bool = True) -> None:
    def write() -> None:
        with atomic_file(path, len(data), durable=durable) as temporary:
            temporary.write_bytes(data)

    again(write)


def create_text(path: Path, text: str, place: Path | None = None) -> bool:
    """Write a text file durably unless there is one; return whether it now exists with this text.
    Raises StorageError.

    place: the folder for the file before its naming. If another process removes that folder first,
    the file never appears, however late this process continues: a link needs its source. On a file
    system without links, a check replaces this.
    """
    data = text.encode()
    try:
        with _writing(path, len(data)):
            descriptor, name = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=place or path.parent)
            try:
                with open(descriptor, "wb") as file:
                    file.write(data)
                    os.fchmod(descriptor, 0o644)
                    file.flush()
                    os.fsync(descriptor)
                _name(name, path)
            except FileExistsError:
                if path.read_bytes() != data:
                    return False
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(name)
            fsync_folder(path.parent)
    except StorageError as error:
        if error.errno != errno.EXDEV or place is None:
            raise
        return create_text(path, text)  # iterations/ is a link to another disk
    return True


def _name(temporary: str, path: Path) -> None:
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        os.rename(temporary, path)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write indented JSON atomically. NaN is refused: it is not JSON."""
    write_text(path, json_text(value))


def read_object(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Read a JSON object. Raises OSError, and ValueError for anything else."""
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__} instead of a JSON object")
    return found


def json_text(value: Any) -> str:
    """Return the text written by `write_json`, for files in an atomically written folder."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def json_line(row: Mapping[str, Any]) -> bytes:
    """Return a row as one line of a jsonl file, without the line end. NaN is refused: it is not
    JSON.
    """
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode()


def write_jsonl(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any] | bytes]) -> None:
    """Write one JSON object per line, atomically. Rows of bytes are JSON already (`json_line`)."""
    _write_bytes(path, _lines(rows))


def append_jsonl(
    path: str | os.PathLike[str], *rows: Mapping[str, Any] | bytes, durable: bool = True
) -> None:
    """Append a line for each row, after cutting off a torn last line. fsync them unless a later
    call will (not `durable`).
    """
    path = Path(path)
    data = _lines(rows)
    try:
        make_folders(path.parent)
        is_new = not path.exists()
        with open(path, "a+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(end - 1)
                if file.read(1) != b"\n":
                    file.seek(0)
                    whole = file.readall()
                    begin = whole.rfind(b"\n") + 1
                    try:
                        json.loads(whole[begin:])
                        # A whole line without its newline: `read_jsonl` counts it, so it stays.
                        data = b"\n" + data
                    except ValueError:
                        end = begin
                        file.truncate(end)
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) or 0 :]
                if durable:
                    os.fsync(file.fileno())
            except OSError:
                file.truncate(end)  # a half line would only take room
                raise
        if is_new and durable:
            fsync_folder(path.parent)
    except OSError as error:
        raise _storage_error(error, path, len(data)) from error


def _lines(rows: Iterable[Mapping[str, Any] | bytes]) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json_line(row)) + b"\n" for row in rows)


def read_jsonl(
    path: str | os.PathLike[str],
    key: str | None = None,
    *,
    appended: bool = True,
) -> list[Mapping[str, Any]]:
    """Read JSON lines. With `key`, a later line replaces an earlier one of the same value.

    appended: drop a damaged last line without a newline, left by an interrupted append; False for
    foreign files.

    Raises ValueError with the number of any other damaged line.
    """
    try:
        lines = again(Path(path).read_bytes).split(b"\n")
    except (FileNotFoundError, NotADirectoryError):  # also if another thread has just removed it
        return []
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if appended and number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
    if key is None:
        return rows
    return list({row[key]: row for row in rows}.values())


def read_private(path: str | os.PathLike[str]) -> str:
    """Read a text file with a key. Raises PermissionError if others than its owner may read or
    change it.
    """
    with open(path, encoding="utf-8") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise PermissionError(
                f"others can read it: mode {mode:o}; make it private: chmod 600 {path}"
            )
        return file.read()


def user_cache() -> Path:
    """Return the folder for files made once per user, and make it if missing. Raises OSError if
    there can be none, or if its files are unsafe to use.
    """
    # expanduser leaves ~ unchanged without a home.
    parent = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(parent):
        raise FileNotFoundError(f"{parent} is not an absolute path; set XDG_CACHE_HOME or HOME")
    folder = Path(parent, "ttrl")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
        raise PermissionError(
            f"{folder} belongs to another user, or others can write to it; chown it, and chmod go-w"
        )
    return folder


def compile_cache(otherwise: Path) -> dict[str, str]:
    """Return the variable for PyTorch's compile cache, in the user's cache or in `otherwise`; none
    if already set.

    PyTorch's default is /tmp/torchinductor_USER: another user can make that folder first and plant
    code to be loaded.
    """
    variable = "TORCHINDUCTOR_CACHE_DIR"
    if variable in os.environ:
        return {}
    with contextlib.suppress(OSError):
        otherwise = user_cache()
    return {variable: str(otherwise / "inductor")}


WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".npz",
    ".index.json",
)


def model_files(folder: Path) -> list[Path]:
    """Return a model folder's files for copying into each checkpoint, in order, without weights and
    hidden ones.

    Links may lead within the folder, into the hub's cache, or to a file of another model folder.
    Any other may lead to someone's key and publish it with the next checkpoint: raises
    ModelFolderError.
    """
    templates = folder / "additional_chat_templates"
    found = [
        *sorted(folder.iterdir()),
        *(sorted(templates.glob("*.jinja")) if templates.is_dir() else []),
    ]
    for path in [*found, templates]:
        real = path.resolve()
        home = real.parent
        cache = real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")
        weights = path.name.endswith(WEIGHT_SUFFIXES) and _is_weights(real)  # stored by a mirror
        if path.is_symlink() and not (
            weights or cache or real.is_relative_to(folder.resolve()) or _is_model(home)
        ):
            raise ModelFolderError(
                f"{path} is a link to {real}, not a file of a model, and would be copied into each "
                "checkpoint: put the file itself there, or remove the link"
            )
    return [
        path
        for path in found
        if path.is_file() and path.name[0] != "." and not path.name.endswith(WEIGHT_SUFFIXES)
    ]


def _is_weights(path: Path) -> bool:
    """Return whether a file is named like weights, or begins like safetensors: with the length of a
    JSON header.
    """
    if path.name.endswith(WEIGHT_SUFFIXES):
        return True
    with contextlib.suppress(OSError), open(path, "rb") as file:
        start = file.read(9)
        return start[8:] == b"{" and int.from_bytes(start[:8], "little") < path.stat().st_size
    return False


def _is_model(folder: Path) -> bool:
    try:
        return "model_type" in read_object(folder / "config.json")
    except (OSError, ValueError, TypeError):
        return False


def digest(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""

    def read() -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return again(read)


def keep_figure(file: str, name: str, figure: Callable[[float | None], float]) -> float:
    """Return `figure(kept value of `name` in this JSON file of the user's cache, or None)`. Keep
    the result there if it is new and the cache is usable.
    """
    kept: Mapping[str, Any] = {}
    before = None
    # None yet, damaged, or no cache.
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        kept = read_object(Path(user_cache(), file))
        before = float(kept[name]) if name in kept else None
    found = figure(before)
    if found != before:
        with contextlib.suppress(OSError, StorageError):
            write_json(Path(user_cache(), file), {**kept, name: found})
    return found
