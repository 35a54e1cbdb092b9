"""Load the rows of a data set, from local files or the Hugging Face hub, and split them.

ttrl ships no data of others. A source is a file (`.jsonl`, `.json`, `.csv`, `.parquet`), a folder
with one file for each split (`train.jsonl`, `test.parquet`; or a split's parts,
`train-00000-of-00002.parquet`; or a folder of json files, one row each), or the id of a data set on
the hub. The package `datasets` (the `tasks` extra) loads it and keeps it in its own cache.
"""

import contextlib
import csv
import glob
import hashlib
import importlib
import itertools
import json
import logging
import os
import re
import socket
import urllib.request
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

from ttrl.errors import TaskError
from ttrl.tasks.words import in_validation
from ttrl.text import counted, is_number, one_line, short, spans

T = TypeVar("T")
Row: TypeAlias = dict[str, Any]
Source: TypeAlias = str | os.PathLike[str]

_log = logging.getLogger(__name__)
_LONGEST_FIELD = 2**31 - 1
"""Limit on the bytes of a CSV field; some prompts exceed Python's own limit, 131,072."""
_SHOWN_CONFLICTS = 5
MOST_EXPONENT = 100
MOST_TASKS = 10_000_000
"""A list of that many takes more than 10 GB."""
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)?")


class RowError(ValueError):
    """An error in one row; becomes a TaskError with file and row."""


class Rows(list[T]):
    """Parsed rows, and the place of each: "data/test.jsonl, line 51"."""

    def __init__(self, rows: Iterable[T], places: Iterable[str]) -> None:
        super().__init__(rows)
        self.places = list(places)
        assert len(self) == len(self.places)

    def where(self, belongs: Callable[[T], bool]) -> "Rows[T]":
        """Return the rows with a true `belongs`."""
        kept = [number for number, row in enumerate(self) if belongs(row)]
        return Rows([self[number] for number in kept], [self.places[number] for number in kept])


def load_rows(
    source: Source,
    parse: Callable[[Row], T],
    *,
    splits: Sequence[str] = (),
    config: str | None = None,
) -> Rows[T]:
    """Load every row, parsed by `parse` from the row's fields.

    splits: names of the split in folders and on the hub, tried in this order; a single file is read
        whole.
    config: the hub's configuration ("main"), in a folder one of its folders.
    `parse` raises RowError, without a place, for bad rows; the resulting TaskError names file and
    row.

    Raises TaskError: no such file, of an unsupported kind, damaged, without rows; no such split; no
    package for it.
    """
    where, rows = _open(source, splits, config)
    parsed = []
    places = []
    for place, row in rows:
        if not isinstance(row, dict):
            raise TaskError(f"{place}: {short(row, 120)}; a row is an object with named fields")
        try:
            parsed.append(parse(row))
        except RowError as error:
            raise TaskError(f"{place}: {error}") from None
        places.append(place)
    if not parsed:
        raise TaskError(f"{where}: no rows")
    return Rows(parsed, places)


def field(row: Row, *names: str) -> Any:
    """Return the first of these fields with a value. Raises RowError."""
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise RowError(
        f"no field {' or '.join(map(repr, names))}; it has {short(sorted(map(str, row)), 120)}"
    )


def text_field(row: Row, name: str) -> str:
    """Return a non-empty text. Raises RowError."""
    value = row[name] if name in row else field(row, name)  # null is not missing
    if not isinstance(value, str) or not value.strip():
        raise RowError(f"{name} is {short(value, 120)}; it must be a non-empty text")
    return value


def list_field(row: Row, name: str) -> list[Any]:
    """Return a list, decoded from JSON if necessary (csv). Raises RowError."""
    value = from_json(row[name] if name in row else field(row, name))
    if not isinstance(value, list):
        raise RowError(
            f"{name} is {short(value, 120)}; it must be a list; in csv, write it as JSON"
        )
    return value


def from_json(value: Any) -> Any:
    """Decode a JSON text (lists and objects in csv); return anything else unchanged."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _answer_of(row: Any) -> object:
    return getattr(row, "answer", row)


def select(
    rows: Sequence[T],
    key: Callable[[T], str],
    split: str,
    n: int | None,
    seed: int,
    what: str,
    *,
    held_out: bool,
    question: Callable[[T], Hashable] | None = None,
    answer: Callable[[T], object] = _answer_of,
) -> list[T]:
    """Return `n` rows of a split (None: all), no question twice: for "train" in an order given by
    the seed, else always the same. A larger `n` with the same split and seed begins with the same
    rows.

    key: names a row; its hash decides about split and order.
    held_out: train and validation are the same file; one row in ten of it is for validation.
    question, answer: see `without_repeats`; a row's question is its key unless given.

    Raises TaskError if there are not enough.
    """
    check_count(n, "one, or None for all", may_be_none=True)
    chosen = []
    for row in without_repeats(rows, question or key, answer, what):
        name = key(row)
        if not held_out or in_validation(f"{what} {name}") == (split == "validation"):
            chosen.append((name, row))
    order = f"{what} {split} {seed if split == 'train' else ''} "
    chosen.sort(
        key=lambda item: hashlib.sha256((order + item[0]).encode("utf-8", "surrogatepass")).digest()
    )
    if n is not None and len(chosen) < n:
        raise TaskError(
            f"{n} tasks of {what}, split {split}, but there are only {len(chosen)} rows; ask for "
            "fewer, or n=None for all"
        )
    return [row for _, row in chosen[:n]]


def without_repeats(
    rows: Sequence[T],
    question: Callable[[T], Hashable],
    answer: Callable[[T], object],
    what: str,
) -> Rows[T]:
    """Return the first row of each question, and log the number of repeats.

    A repeated question counts twice in a mean, and makes its interval too narrow. Rows with equal
    `question` values have the same question. If their answers differ, the warning names both rows
    and both answers.
    """
    named = rows
    if not isinstance(named, Rows):
        named = Rows(rows, [f"row {number}" for number in range(1, len(rows) + 1)])
    first: dict[Hashable, int] = {}
    conflicts = []

    def said(number: int) -> str:
        return f"{named.places[number]}: {one_line(str(answer(named[number])), 60)}"

    for number, row in enumerate(named):
        kept = first.setdefault(question(row), number)
        if kept == number:
            continue
        if answer(row) != answer(named[kept]):
            conflicts.append(f"{said(number)} against {said(kept)}")
    repeats = len(named) - len(first)
    if repeats:
        text = f"{what}: {counted(repeats, 'row')} left out, repeating an earlier question"
        if conflicts:
            more = len(conflicts) - _SHOWN_CONFLICTS
            text += f"; {len(conflicts)} of them with another answer; the first answer counts: "
            text += "; ".join(conflicts[:_SHOWN_CONFLICTS])
            text += f"; and {more} more" if more > 0 else ""
        _log.warning("%s", text)
    kept_rows = list(first.values())
    return Rows([named[number] for number in kept_rows], [named.places[n] for n in kept_rows])


def puzzle_seeds(split: str, n: int | None, seed: int) -> list[str]:
    """Return seeds for making `n` puzzles. Only for "train" do they depend on `seed`. Raises
    TaskError.
    """
    n = check_count(n, "one puzzle")
    if split == "train":
        name = f"train {seed}"
    else:
        name = "validation"
    return [f"{name} {number}" for number in range(n)]


def check_count(n: int | None, least: str = "one", *, may_be_none: bool = False) -> int:
    """Return the requested number of tasks, 0 for None. Raises TaskError unless it is a whole
    number above 0, and at most MOST_TASKS.
    """
    if n is None and may_be_none:
        return 0
    if type(n) is not int or not 1 <= n <= MOST_TASKS:
        raise TaskError(f"n is {n!r}; ask for at least {least}, at most {MOST_TASKS:,}")
    return n


def check_name(option: str, value: str, known: Iterable[str], what: str) -> None:
    """Raise TaskError for a split or a style unknown to `what`, with a list of the known ones."""
    known = list(known)
    if value not in known:
        raise TaskError(f"{option} is {value!r}; {what} has {', '.join(map(repr, known))}")


def check_share(option: str, value: float, *, below_one: bool = False) -> None:
    """Raise TaskError for a share of the reward outside 0 to 1."""
    if not is_number(value) or not 0.0 <= value <= 1.0 or (below_one and value == 1.0):
        raise TaskError(
            f"{option} is {short(value, 80)}; give a number from 0 to {'less than ' * below_one}1"
        )


def check_whole(option: str, value: int, least: int, most: int | None = None) -> None:
    """Raise TaskError unless an option is a whole number from `least` to `most`."""
    if type(value) is not int or value < least or (most is not None and value > most):
        if most is None:
            allowed = f"of at least {least}"
        else:
            allowed = f"from {least} to {most}"
        raise TaskError(f"{option} is {short(value, 80)}; give a whole number {allowed}")


def check_span(what: str, low: int, high: int, least: int, most: int) -> None:
    """Raise TaskError unless min_`what` and max_`what` are whole numbers, in order and from `least`
    to `most`.
    """
    if type(low) is not int or type(high) is not int or not least <= low <= high <= most:
        raise TaskError(
            f"min_{what} {short(low, 40)} and max_{what} {short(high, 40)}: "
            f"{least} <= min_{what} <= max_{what} <= {most}, in whole numbers"
        )


def check_exponent(option: str, value: float) -> None:
    """Raise TaskError for an exponent beyond ±MOST_EXPONENT: weights of words need finite
    powers.
    """
    if not is_number(value) or abs(value) > MOST_EXPONENT:
        raise TaskError(
            f"{option} is {short(value, 80)}; give a number from -{MOST_EXPONENT} to "
            f"{MOST_EXPONENT}"
        )


def check_choice(option: str, value: Collection[str] | Collection[int]) -> None:
    """Raise TaskError unless an option is a list of names or numbers."""
    if (
        isinstance(value, str | bytes)
        or not isinstance(value, Collection)
        or not all(isinstance(one, str | int) for one in value)
    ):
        raise TaskError(f"{option} is {short(value, 80)}; give a list of names or numbers")


def is_file(path: Source) -> bool:
    """Return whether a source is a single file; its splits are then parts of its rows."""
    return local_path(path).is_file()


def local_path(source: Source) -> Path:
    """Return a source as a path on this machine. Raises TaskError unless it is a text or a path."""
    if not isinstance(source, str | os.PathLike):
        raise TaskError(
            f"path is {short(source, 80)}; give a file, a folder, or a data set's name on the "
            "Hugging Face hub"
        )
    return Path(source).expanduser()


def _open(
    source: Source, splits: Sequence[str], config: str | None
) -> tuple[str, Iterable[tuple[str, Any]]]:
    """Return (name of the source, (place, row) of each row)."""
    path = local_path(source)
    parts = [path]
    if path.is_dir():
        parts = _in_folder(path, splits, config)
        path = parts[0]
        if path.is_dir():
            return str(path), _one_each(path)
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise TaskError(f"{path}: unknown file ending; use {', '.join(SUFFIXES)}")
        return str(path), itertools.chain.from_iterable(map(_READERS[path.suffix], parts))
    text = os.fspath(source)
    if (
        not isinstance(source, str)
        or path.suffix in SUFFIXES
        or text.startswith(("/", ".", "~"))
        or not _HUB_ID.fullmatch(text)
    ):
        raise TaskError(
            f"{path} is neither a file, a folder, nor a data set on the Hugging Face hub "
            "(owner/name)"
        )
    return _from_hub(text, splits, config)


def _in_folder(folder: Path, splits: Sequence[str], config: str | None) -> list[Path]:
    """Return the file, all parts or the folder of the first available split.

    Copies of a data set on the hub have them in the folder `data`, or in one for each
    configuration.
    """
    inner = ("", "data", config or "")
    for split in splits:
        for place in [folder / name for name in dict.fromkeys(inner)]:
            for suffix in SUFFIXES:
                if (place / (split + suffix)).is_file():
                    return [place / (split + suffix)]
            parts = _parts(place, split)
            if parts:
                return parts
        if (folder / split).is_dir():
            return [folder / split]
    if not splits and any(folder.glob("*.json")):
        return [folder]
    there = sorted(path.name for path in folder.iterdir())
    raise TaskError(
        f"{folder}: no file {' or '.join(split + '.jsonl' for split in splits) or '*.json'} (or "
        f"{', '.join(SUFFIXES[1:])}); there are {short(there, 120)}. Give the file itself, or "
        "rename it"
    )


def _parts(folder: Path, split: str) -> list[Path]:
    """Return the parts of a split, train-00000-of-00002.parquet, in order; [] if there are none.

    Raises TaskError if some are missing, or two sets of parts are mixed.
    """
    parts = []
    for path in sorted(folder.glob(f"{glob.escape(split)}-*-of-*")):
        match = _PART.fullmatch(path.name, len(split))
        if match is not None:
            parts.append((int(match[1]), int(match[2]), path))
    if not parts:
        return []
    parts.sort()
    counts = {count for _, count, _ in parts}
    numbers = [number for number, _, _ in parts]
    is_one_kind = len({path.suffix for *_, path in parts}) == 1
    if len(counts) > 1 or not is_one_kind or len(set(numbers)) < len(numbers):
        names = short([path.name for *_, path in parts], 160)
        raise TaskError(f"{folder}: it has parts of several sets: {names}; keep those of one")
    (count,) = counts
    if numbers != list(range(count)):
        all_parts = spans(range(count))
        raise TaskError(
            f"{folder}: {split} has the parts {spans(numbers)}; its names say {all_parts}"
        )
    return [path for *_, path in parts]


def read_text(path: Path) -> str:
    """Return the text of a file. Raises TaskError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # no text; or no file's name
        raise TaskError(f"{path!s:.200}: cannot be read: {error}") from None


def _loads(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{place}: not JSON: {error}") from None


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            yield f"{path}, line {number}", _loads(line, f"{path}, line {number}")


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    data = _loads(read_text(path), str(path))
    if isinstance(data, dict) and all(isinstance(value, dict) for value in data.values()):
        for name, row in data.items():
            yield f"{path}, {name!r}", {"id": name, **row}
    elif isinstance(data, list):
        yield from _numbered(str(path), data)
    else:
        raise TaskError(
            f"{path} holds {short(data, 120)}; it must hold a list of rows, or an object of "
            "objects by their ids"
        )


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(_LONGEST_FIELD)  # of the process; nothing relies on Python's lower one
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            # strict: else a missing closing quotation mark takes in the rest of the file
            for place, row in _numbered(str(path), csv.DictReader(file, strict=True)):
                if None in row or None in row.values():
                    raise TaskError(f"{place}: its number of columns differs from the first line's")
                yield place, row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TaskError(f"{path}: cannot be read: {error}") from None


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    parquet = optional_package("pyarrow.parquet", f"{path}: parquet files need")
    try:
        # In batches: DAPO's 1.8 million rows take gigabytes as objects.
        with parquet.ParquetFile(path) as file:
            yield from _numbered(
                str(path), (row for batch in file.iter_batches() for row in batch.to_pylist())
            )
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise TaskError(f"{path}: cannot be read: {error}") from None


def _numbered(where: str, rows: Iterable[T]) -> Iterator[tuple[str, T]]:
    return ((f"{where}, row {number}", row) for number, row in enumerate(rows, 1))


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
SUFFIXES = tuple(_READERS)
# train-00000-of-00002.parquet, or with a hash before the suffix, as older copies from the hub have.
_PART = re.compile(rf"-([0-9]+)-of-([0-9]+)(?:-[0-9a-f]+)?(?:{'|'.join(map(re.escape, SUFFIXES))})")


def _one_each(folder: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted(folder.rglob("*.json")):  # MATH has a folder for each subject
        row = _loads(read_text(path), str(path))
        name = path.relative_to(folder).with_suffix("").as_posix()
        yield str(path), {"id": name, **row} if isinstance(row, dict) else row


def optional_package(module: str, needs: str, package: str = "") -> Any:
    """Import a module of the `tasks` extra; `needs`: "parquet files need". Raises TaskError with
    the command to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = package or module.partition(".")[0]
        raise TaskError(
            f"{needs} the package {package}: pip install 'ttrl[tasks]' ({error})"
        ) from None


def _from_hub(
    name: str, splits: Sequence[str], config: str | None
) -> tuple[str, Iterator[tuple[str, Any]]]:
    datasets = optional_package("datasets", f"{name}: data sets of the Hugging Face hub need")
    where = f"{name} ({config})" if config else name
    _check_hub(where)
    try:
        there = list(datasets.get_dataset_split_names(name, config))
        split = next((split for split in splits if split in there), None)
        if split is None:
            raise TaskError(
                f"{where}: no split {' or '.join(map(repr, splits))}; there are {short(there, 120)}"
            )
        rows = datasets.load_dataset(name, config, split=split)
    except TaskError:
        raise
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise TaskError(
            f"{where}: cannot be loaded from the Hugging Face hub: {type(error).__name__}: "
            f"{first}. Without a network, download it elsewhere and give its path"
        ) from error
    return where, _numbered(f"{where}, {split}", map(dict, rows))


def _check_hub(where: str) -> None:
    """Raise TaskError at once for an unreachable hub; its client would try for half a minute."""
    offline = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("HF_DATASETS_OFFLINE")
    # Offline the cache serves; a proxy resolves the address itself.
    if offline or urllib.request.getproxies():
        return
    host = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname or ""
    try:
        socket.getaddrinfo(host, 443)
    except OSError as error:
        raise TaskError(
            f"{where}: the Hugging Face hub cannot be reached: {host}: {error}. Without a network, "
            "download it elsewhere and give its path; with HF_HUB_OFFLINE=1 in the environment, "
            "earlier downloads are found"
        ) from None
