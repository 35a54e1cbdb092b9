"""Cache completions: store answers by request, in one or several object stores.

    cache = Cache.of(["./answers", "s3://bucket/answers"])
    key = sample_key(request_digest(identity, body), sample)
    if (answer := await cache.get(key)) is None:
        answer = ...
        await cache.put(key, answer, body)

A cache never costs a sample: a failing store is counted, reported once and skipped, and a damaged
entry is a miss.
"""

import asyncio
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ttrl.errors import UserError
from ttrl.rollouts.cache.entries import (
    MOST_BYTES,
    DamagedEntry,
    decode_entry,
    encode_entry,
    request_digest,
    sample_key,
)
from ttrl.rollouts.client.wire import Answer
from ttrl.system.object_store import KNOWN, Store, TooLarge, Unavailable
from ttrl.text import gib

__all__ = ["Cache", "CacheStats", "request_digest", "sample_key"]

log = logging.getLogger(__name__)

CONCURRENCY = 64
"""Operations on stores at once, per event loop."""


@dataclass
class CacheStats:
    """A cache's counts since its opening, of samples or of operations on a store."""

    hits: int = 0
    misses: int = 0
    writes: int = 0
    """Entries written by `put`: one per store."""
    back_filled: int = 0
    """Entries copied from a later store into an earlier one."""
    damaged: int = 0
    """Reads of anything but a whole entry of this key."""
    failed_reads: int = 0
    """Reads failed by a store, or skipped because it had just failed."""
    failed_writes: int = 0


@dataclass(eq=False)
class Cache:
    """Stores answers by key, in object stores read in order. Made by `Cache.of`; usable in several
    event loops.

    >>> cache = Cache.of(["/tmp/completions", "memory://examples"])
    >>> cache.describe()
    '/tmp/completions, memory://examples'
    """

    stores: tuple[Store, ...]
    stats: CacheStats = field(default_factory=CacheStats)

    def __post_init__(self) -> None:
        assert self.stores, "a cache needs a store"
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self._reported: set[tuple[str, str]] = set()

    @classmethod
    def of(
        cls, cache: "Cache | str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None"
    ) -> "Cache | None":
        """Return a cache over an address, or over several, read in order and back-filled. None and
        a Cache are returned unchanged.

        The first write makes a folder (path, Path or file:///folder). "memory://NAME" is one store
        per name for the whole process: two caches of "memory://" share their entries until the
        process ends. s3://, gs:// and az:// take their credentials from the environment; options of
        obstore may follow as a query: s3://bucket/folder?endpoint=http://host:9000.

        Raises UserError for anything else. A store is first reached on use.
        """
        if cache is None or isinstance(cache, Cache):
            return cache
        if isinstance(cache, str | os.PathLike):
            return cls((Store(cache),))
        if not isinstance(cache, Sequence) or isinstance(cache, bytes | bytearray):
            raise UserError(f"cache is a {type(cache).__name__}; give {KNOWN}, or a list of these")
        for address in cache:
            if not isinstance(address, str | os.PathLike):
                raise UserError(
                    f"cache holds a {type(address).__name__}; every item must be one of {KNOWN}"
                )
        if not cache:
            raise UserError(f"cache is an empty list; give {KNOWN}, or None for no cache")
        return cls(tuple(Store(address) for address in cache))

    def describe(self) -> str:
        """Return the stores' addresses in order, without credentials."""
        return ", ".join(store.shown for store in self.stores)

    def __repr__(self) -> str:
        return f"Cache({self.describe()!r})"

    async def get(self, key: str) -> Answer | None:
        """Return the answer under `key`, or None. A hit in a later store is first copied to the
        earlier ones.
        """
        for number, store in enumerate(self.stores):
            try:
                data = await self._read(store, key)
                if data is None:
                    continue
                answer = decode_entry(key, data).answer()
            except (DamagedEntry, TooLarge) as error:
                self.stats.damaged += 1
                if isinstance(error, TooLarge):
                    kind = "damaged"
                else:
                    kind = error.kind
                self._warn_once(
                    store, kind, f"the cache ignores entry {key}: {error}. It counts as a miss"
                )
                continue
            self.stats.hits += 1
            for earlier in self.stores[:number]:
                written = await self._write(earlier, key, data)
                # Not in one line: += takes its left side before it waits.
                self.stats.back_filled += written
            return answer
        self.stats.misses += 1
        return None

    async def put(self, key: str, answer: Answer, request: Mapping[str, Any]) -> None:
        """Write an answer into every store. The first writer wins, except over damaged entries.

        request: as in `request_digest`; it is stored for people to read.
        """
        data = encode_entry(key, answer, request, datetime.now(UTC))
        if data is None:
            self.stats.failed_writes += len(self.stores)
            log.warning("the cache does not store an answer of more than %s", gib(MOST_BYTES))
            return
        written = await asyncio.gather(*(self._write(store, key, data) for store in self.stores))
        self.stats.writes += sum(written)

    def _slot(self) -> asyncio.Semaphore:
        """Return the running loop's semaphore: a cache may serve several loops."""
        loop = asyncio.get_running_loop()
        slot = self._slots.get(loop)
        if slot is None:
            slot = self._slots[loop] = asyncio.Semaphore(CONCURRENCY)
        return slot

    async def _read(self, store: Store, key: str) -> bytes | None:
        async with self._slot():
            try:
                return await store.read(key, MOST_BYTES)
            except Unavailable as error:
                self.stats.failed_reads += 1
                self._failed(store, "read", error)
                return None

    async def _write(self, store: Store, key: str, data: bytes) -> bool:
        async with self._slot():
            try:
                if await store.create(key, data):
                    return True
                try:
                    there = await store.read(key, MOST_BYTES)
                    if there is not None:
                        decode_entry(key, there)
                        return False
                except TooLarge:
                    pass
                except DamagedEntry as error:
                    if error.kind == "newer":  # a later ttrl can read it
                        return False
                await store.overwrite(key, data)
                return True
            except Unavailable as error:
                self.stats.failed_writes += 1
                self._failed(store, "written", error)
                return False

    def _failed(self, store: Store, what: str, error: Unavailable) -> None:
        if not error.skipped:
            self._warn_once(
                store, what, f"it cannot be {what}: {error}. The run continues without it"
            )

    def _warn_once(self, store: Store, kind: str, text: str) -> None:
        """Report a store's first failure of each kind."""
        if (store.shown, kind) not in self._reported:
            self._reported.add((store.shown, kind))
            log.warning(
                "cache %s: %s; ttrl counts more of this kind without reporting them.",
                store.shown,
                text,
            )
