"""Files that are there whole or not at all, and logs that survive a torn last line.

A file or folder is written next to its final name, fsynced, and renamed; the folder that holds it
is fsynced too, and so is each folder in which a new one was made, so that after a power loss the
name points at the new content or at the old one, never at half of it. Folders disappear in one step
too: they are renamed to a name that is never read before they are emptied.
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

_FULL_BYTES = 2**16  # less than that is a full disk: some pages may be left that no file can have
# What a killed process may leave behind; never read, removed on resume.
TEMPORARY_PREFIX = ".partial-"
_STALE = (errno.ESTALE, errno.EIO)
_PAUSES = (0.05, 0.1, 0.2, 0.4)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
T = TypeVar("T")


def again(work: Callable[[], T]) -> T:
    """Return what `work` returns, tried four times more where the system says ESTALE or EIO: on a
    network file system, which loses sight of a file that another machine has just replaced, the
    next look finds it. Raises what the last try raised.
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
    """Return what the operating system refused; safetensors says it only in its text: "… (os error
    28)".
    """
    if isinstance(error, OSError):
        return error
    number = re.search(r"\(os error (\d+)\)", str(error))
    if number:
        return OSError(int(number[1]), os.strerror(int(number[1])))
    return None


def _storage_error(error: OSError, path: Path, needed: int | None = None) -> StorageError:
    """Say what could not be written, why, and how much room is free and `needed` (bytes; None where
    it is no longer known).
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
    """Return the bytes free for us where `path` is or would be; None where the file system does not
    say. Quotas are not seen.
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
    """Return the error to raise where a process that writes to `path` failed without a word and no
    room is left; else None.
    """
    free = free_bytes(path)
    full = free is not None and free < _FULL_BYTES
    if full:
        return _storage_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), Path(path))
    return None


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder, as far as they are there; links
    count nothing.
    """
    files = path.rglob("*") if path.is_dir() else [path]
    total = 0
    for file in files:
        with contextlib.suppress(OSError):
            if file.is_file() and not file.is_symlink():
                total += file.stat().st_size
    return total


def make_folders(folder: str | os.PathLike[str]) -> None:
    """Make a folder and those above it, durably: a file that was fsynced is lost all the same where
    its folder's name is.
    """
    folder = Path(folder)
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for made in reversed(missing):
        made.mkdir(exist_ok=True)  # raises where a file has the name
        fsync_folder(made.parent)


def fsync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable, as far as the file system knows such a thing."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Of some network file systems, for every folder.
        if error.errno not in (errno.EBADF, errno.EINVAL):
            raise
    finally:
        os.close(descriptor)


def fsync_tree(root: Path) -> None:
    """Sync every file and folder below `root`, and `root` itself, concurrently: a disk's journal
    takes many at once.
    """
    found = [(Path(folder), names) for folder, _, names in os.walk(root)]
    with ThreadPoolExecutor(8) as threads:
        for step in (
            threads.map(_fsync_file, [folder / name for folder, names in found for name in names]),
            threads.map(fsync_folder, [folder for folder, _ in found]),
        ):
            list(step)  # raises what one of them raised


def _fsync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def _writing(path: Path, size: int | None) -> Iterator[None]:
    """Raise StorageError for what the operating system refuses inside the block; for a disk without
    room for `size` bytes at once, not after minutes of writing."""
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
    """Yield a temporary path to write to; rename it to `path` at the end of the block, or remove it
    when the block raises.

    size: bytes that will be written, where that is known; a disk without room for them is then
    found at once, and the error says how many are needed. durable: False for what nobody needs
    after a power loss. Raises StorageError for what the operating system refuses (disk full, no
    permission).
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
    """Do what `atomic_file` does for a whole folder. A folder that is at `path` already is replaced
    as a whole.
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
                os.replace(path, old)  # an empty folder may be replaced by a rename
                os.replace(temporary, path)
                shutil.rmtree(old)
            else:
                os.replace(temporary, path)
            fsync_folder(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def remove_leftovers(folder: Path, name: str = "") -> list[Path]:
    """Remove what killed processes left half written: `folder` itself, or what is below it; return
    what it removed. name: only of the file or folder of that name right in `folder`, where others
    may be writing beside it.
    """
    if folder.name.startswith(TEMPORARY_PREFIX):
        leftovers = [folder]
    elif name:
        leftovers = list(folder.glob(f"{TEMPORARY_PREFIX}*-{name}"))
    # Os.walk passes over a folder that is gone by the time it comes to it, which Path.rglob does
    # not.
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
    """Remove a folder in one step for whoever looks: half of it is never seen under its name.
    Harmless where there is none.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return
    try:
        # No new folder to put it in: on a full disk, where removing things is the way out, none
        # could be made.
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
    """Write a text file durably unless there is one; return whether it is there now with this text.
    Raises StorageError.

    place: the folder in which it is written before it is given its name. Whoever removes that
    folder first has the file never appear, however late this process goes on: a link needs what it
    leads to. A file system without links has a check instead.
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


def json_text(value: Any) -> str:
    """Return what `write_json` writes; for files in a folder that appears as a whole anyway."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def json_line(row: Mapping[str, Any]) -> bytes:
    """Return a row as it stands in a jsonl file, without the end of the line. NaN is refused: it is
    not JSON.
    """
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode()


def write_jsonl(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any] | bytes]) -> None:
    """Write one JSON object per line, atomically. Rows of bytes are JSON already (`json_line`)."""
    _write_bytes(path, _lines(rows))


def append_jsonl(
    path: str | os.PathLike[str], *rows: Mapping[str, Any] | bytes, durable: bool = True
) -> None:
    """Append a line for each row, after cutting off a torn last line; fsync them, unless a later
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
                        # A whole line that lost only its newline: `read_jsonl` counts it, so it
                        # stays.
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
) -> list[dict[str, Any]]:
    """Read JSON lines. With `key`, a later line replaces an earlier one of the same value.

    appended: drop a damaged last line without a newline, as an append leaves it that was cut off;
        False for files that are somebody else's.

    Raises ValueError with the number of any other line that is damaged.
    """
    try:
        lines = again(Path(path).read_bytes).split(b"\n")
    except (FileNotFoundError, NotADirectoryError):  # also one that another thread has just removed
        return []
    rows: list[dict[str, Any]] = []
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
    """Read a text file that holds a key. Raises PermissionError where others than its owner may
    read or change it.
    """
    with open(path, encoding="utf-8") as file:
        if (mode := stat.S_IMODE(os.fstat(file.fileno()).st_mode)) & 0o077:
            raise PermissionError(
                f"others can read it: mode {mode:o}; make it yours alone: chmod 600 {path}"
            )
        return file.read()


def user_cache() -> Path:
    """Return the folder for what is made once per user, and make it if need be. Raises OSError
    where there can be none, or one whose files it would be unwise to use."""
    # Which stays as it is where there is no home.
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
    """Return the variable with which PyTorch keeps what it compiles in the user's cache, or in
    `otherwise`; none where it is set.

    By itself it takes /tmp/torchinductor_USER: whoever has made that folder first can put code
    there, which is loaded.
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
    """Return a model folder's files, in order, but for weights and hidden ones: what is copied into
    each checkpoint.

    Links may lead within the folder, into the hub's cache, or to a file of another model folder.
    Any other may lead to somebody's key, which would be published with the next checkpoint: raises
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
        weights = path.name.endswith(WEIGHT_SUFFIXES) and _is_weights(real)  # which a mirror stores
        if path.is_symlink() and not (
            weights or cache or real.is_relative_to(folder.resolve()) or _is_model(home)
        ):
            raise ModelFolderError(
                f"{path} is a link to {real}, which is no file of a model; it would be copied "
                "into each checkpoint: put the file "
                "itself there, or remove the link"
            )
    return [
        path
        for path in found
        if path.is_file() and path.name[0] != "." and not path.name.endswith(WEIGHT_SUFFIXES)
    ]


def _is_weights(path: Path) -> bool:
    """Return whether a file is called weights, or begins as safetensors do: with the length of a
    header in JSON.
    """
    if path.name.endswith(WEIGHT_SUFFIXES):
        return True
    with contextlib.suppress(OSError), open(path, "rb") as file:
        start = file.read(9)
        return start[8:] == b"{" and int.from_bytes(start[:8], "little") < path.stat().st_size
    return False


def _is_model(folder: Path) -> bool:
    try:
        return "model_type" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def digest(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""

    def read() -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return again(read)


def keep_figure(file: str, name: str, figure: Callable[[float | None], float]) -> float:
    """Return `figure(what is kept under `name` in this JSON file of the user's cache, or None)`,
    and keep it there if it is new and the cache can be used."""
    kept = {}
    before = None
    # None yet, damaged, or no cache.
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        kept = json.loads(Path(user_cache(), file).read_text(encoding="utf-8"))
        before = float(kept[name]) if name in kept else None
    found = figure(before)
    if found != before:
        with contextlib.suppress(OSError, StorageError):
            write_json(
                Path(user_cache(), file), (kept if isinstance(kept, dict) else {}) | {name: found}
            )
    return found
