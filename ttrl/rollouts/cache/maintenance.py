"""Inspect, export and clear a cache. Behind `ttrl cache stats|export|prune`.

All functions read entry by entry, in memory independent of the cache's size.
"""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import obstore
from obstore import exceptions
from obstore.store import ObjectStore

from ttrl.errors import UserError
from ttrl.rollouts.cache.entries import MOST_BYTES, DamagedEntry, Entry, decode_entry, split_key
from ttrl.rollouts.client.wire import loads, object_of, text_of
from ttrl.system.files import atomic_file
from ttrl.system.object_store import Store, TooLarge, get_bytes, reason

READS_AT_ONCE = 32
LISTED_AT_ONCE = 500


@dataclass
class Totals:
    """The contents of a store. Times are UTC; tokens are those of the completions, as far as the
    server counted them.
    """

    address: str
    entries: int = 0
    requests: int = 0
    bytes: int = 0
    """Of whole entries and of unreadable ones, as stored (compressed)."""
    tokens: int = 0
    oldest: datetime | None = None
    newest: datetime | None = None
    models: Counter[str] = field(default_factory=Counter)
    unreadable: Counter[str] = field(default_factory=Counter)
    """Unusable objects with an entry's name, by kind: damaged, foreign, misplaced, newer."""
    others: int = 0
    """Objects below v1/ foreign to the cache."""

    def as_table(self) -> str:
        """Return aligned lines for a terminal."""
        rows = [
            ("address", self.address),
            ("entries", f"{self.entries:,}"),
            ("requests", f"{self.requests:,}"),
            ("bytes", f"{self.bytes:,}"),
            ("completion tokens", f"{self.tokens:,}"),
            ("oldest", _minutes(self.oldest)),
            ("newest", _minutes(self.newest)),
            (
                "not readable",
                ", ".join(f"{count:,} {kind}" for kind, count in self.unreadable.most_common())
                or "0",
            ),
            ("other objects", f"{self.others:,}"),
        ]
        rows += [
            (f"model {model or '(no name)'}", f"{count:,}")
            for model, count in self.models.most_common()
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


@dataclass
class Pruned:
    """The entries removed by `prune`, or to be removed in a dry run."""

    address: str
    entries: int
    bytes: int
    kept: int
    dry_run: bool

    def __str__(self) -> str:
        if self.dry_run:
            verb = "would remove"
        else:
            verb = "removed"
        if self.entries == 1:
            noun = "entry"
        else:
            noun = "entries"
        return (
            f"{self.address}: {verb} {self.entries:,} {noun} ({self.bytes / 1e6:.2f} MB), "
            f"{self.kept:,} kept"
        )


def _minutes(moment: datetime | None) -> str:
    if moment is None:
        return "-"
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


def stats(address: str | os.PathLike[str]) -> Totals:
    """Read every entry. Raises UserError for a missing or unreadable store, or one without
    entries.
    """
    store, opened = _open(address)
    totals = Totals(store.shown)
    digests: set[bytes] = set()
    for name, size, _, entry in _entries(store, opened):
        split = split_key(name)
        if split is None:
            totals.others += 1
        if split is None or entry is None:
            continue
        totals.bytes += size
        if isinstance(entry, DamagedEntry):
            totals.unreadable[entry.kind] += 1
            continue
        # The only growing part: about 80 bytes per request.
        digests.add(bytes.fromhex(split[0])[:12])
        totals.entries += 1
        totals.tokens += entry.about.completion_tokens or 0
        totals.models[entry.about.model] += 1
        written = entry.about.written
        totals.oldest = min(totals.oldest or written, written)
        totals.newest = max(totals.newest or written, written)
    totals.requests = len(digests)
    if not totals.entries and not totals.unreadable:
        raise _nothing(store, totals.others)
    return totals


def export(address: str | os.PathLike[str], path: str | os.PathLike[str]) -> int:
    """Write one JSON line per entry: request, text, token ids, logprobs and the rest; atomically.
    Return the number of lines.

    Unreadable entries are left out; `stats` counts them. Raises UserError as `stats` does.
    """
    store, opened = _open(address)
    lines = others = unreadable = 0
    with atomic_file(path) as temporary, open(temporary, "wb") as file:
        for name, _, _, entry in _entries(store, opened):
            if isinstance(entry, Entry):
                file.write(_line(name, entry))
                lines += 1
            else:
                others += split_key(name) is None
                unreadable += entry is not None
        if not lines and not unreadable:
            raise _nothing(store, others)
    return lines


def prune(
    address: str | os.PathLike[str],
    *,
    older_than: timedelta | None = None,
    damaged_only: bool = False,
    dry_run: bool = False,
) -> Pruned:
    """Remove entries: those stored longer than `older_than` ago, the damaged ones, or with neither
    all of them.

    Only objects with the name of an entry are touched. Entries of a later ttrl are not damaged.
    Raises UserError as `stats` does.
    """
    if older_than is not None and (damaged_only or older_than < timedelta(0)):
        raise UserError(
            "prune takes one of: older than a non-negative time, only damaged entries, or neither "
            "for all"
        )
    store, opened = _open(address)
    if older_than is None:
        before = None
    else:
        before = datetime.now(UTC) - older_than

    result = Pruned(store.shown, 0, 0, 0, dry_run)
    others = 0
    doomed = []
    for name, size, written, entry in _entries(store, opened, read=damaged_only):
        if split_key(name) is None:
            others += 1
            continue
        damaged = isinstance(entry, DamagedEntry) and entry.kind != "newer"
        if damaged_only:
            chosen = damaged
        else:
            chosen = before is None or written < before
        result.kept += not chosen
        if chosen:
            result.entries += 1
            result.bytes += size
            doomed.append(name)
        if len(doomed) >= LISTED_AT_ONCE:
            _delete(store, opened, doomed, dry_run)
            doomed = []
    _delete(store, opened, doomed, dry_run)
    if not result.entries and not result.kept:
        raise _nothing(store, others)
    return result


def _open(address: str | os.PathLike[str]) -> tuple[Store, ObjectStore]:
    store = Store(address)
    opened = store.open()
    if opened is None:
        raise UserError(
            f"no cache: the folder {store.shown} does not exist; ttrl creates it with the first "
            "entry"
        )
    return store, opened


def _nothing(store: Store, others: int) -> UserError:
    if others:
        beside = f" (it has {others:,} objects of other programs)"
    else:
        beside = ""
    if store.in_memory:
        return UserError(
            f"{store.shown} is empty: it exists only in the process that fills it; give a folder "
            "or a bucket"
        )
    return UserError(
        f"{store.shown} holds no cache entry{beside}; give the address of the run's cache"
    )


def _entries(
    store: Store, opened: ObjectStore, *, read: bool = True
) -> Iterator[tuple[str, int, datetime, Entry | DamagedEntry | None]]:
    """Yield (name, bytes, time of writing, content) of all objects below v1/; content is None if
    foreign or not read.
    """

    def look(name: str) -> Entry | DamagedEntry | None:
        if not read or split_key(name) is None:
            return None
        try:
            return decode_entry(name, get_bytes(opened, name, MOST_BYTES))
        except DamagedEntry as error:
            return error
        except TooLarge as error:
            return DamagedEntry("damaged", str(error))
        except FileNotFoundError:  # removed since it was listed
            return None

    try:
        with ThreadPoolExecutor(READS_AT_ONCE) as pool:
            for listed in obstore.list(opened, "v1", chunk_size=LISTED_AT_ONCE):
                # No more of them in memory at once.
                for first in range(0, len(listed), READS_AT_ONCE):
                    some = listed[first : first + READS_AT_ONCE]
                    for item, entry in zip(some, pool.map(look, [item["path"] for item in some])):
                        yield item["path"], item["size"], item["last_modified"], entry
    except (exceptions.BaseError, OSError) as error:
        raise UserError(f"{store.shown} cannot be read: {reason(error)}") from error


def _delete(store: Store, opened: ObjectStore, names: list[str], dry_run: bool) -> None:
    if not names or dry_run:
        return
    try:
        obstore.delete(opened, names)
    except FileNotFoundError:  # another process removed one of them; the others, one at a time
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(opened, name)
    except (exceptions.BaseError, OSError) as error:
        raise UserError(f"{store.shown}: entries cannot be removed: {reason(error)}") from error


def _line(name: str, entry: Entry) -> bytes:
    about = entry.about
    split = split_key(name)
    assert split is not None
    choice = object_of(loads(entry.choice))
    message = choice.get("message") or {}
    logprobs = choice.get("logprobs") or {}
    row = {
        "digest": split[0],
        "sample": split[1],
        "written": about.written.isoformat(),
        "model": about.model,
        "request": loads(entry.request),
        "text": text_of(message.get("content")),
        "tool_calls": message.get("tool_calls") or None,
        "finish_reason": choice.get("finish_reason"),
        "prompt_token_ids": about.prompt_token_ids,
        "token_ids": choice.get("token_ids"),
        "logprobs": [item.get("logprob") for item in logprobs["content"]]
        if logprobs.get("content")
        else None,
        "prompt_tokens": about.prompt_tokens,
        "completion_tokens": about.completion_tokens,
    }
    try:
        return (json.dumps(row, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # lone surrogates
        return (json.dumps(row) + "\n").encode()
