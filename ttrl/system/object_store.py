"""Open a cache's object stores from addresses, with limits to keep a dead one from delaying
anything.

Nothing shown or logged carries a credential: addresses and messages go through `redact`.
"""

import asyncio
import atexit
import contextlib
import functools
import logging
import math
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import obstore
from obstore import exceptions
from obstore.store import LocalStore, MemoryStore, ObjectStore, from_url

from ttrl.errors import UserError
from ttrl.text import harmless

log = logging.getLogger(__name__)

CLOUD_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "https", "http")
KNOWN = (
    "a folder's path, file:///folder, memory://, s3://bucket/folder, gs://bucket/folder, "
    "az://container/folder"
)

FILE_THREADS = 8
FAILURES_BEFORE_PAUSE = 3

_SHOWN_OPTIONS = {
    "endpoint",
    "region",
    "allow_http",
    "virtual_hosted_style_request",
    "skip_signature",
    "account_name",
}
_CREDENTIALS = {
    "s3": (
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and, outside Amazon, AWS_ENDPOINT_URL"
    ),
    "gs": "GOOGLE_SERVICE_ACCOUNT (the path of a key file)",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_NO_CONDITIONS = (
    "501 Not Implemented",
    "<Code>NotImplemented<",
    "Version required for conditional update",
)
"""The last is Google's, for an object read before: it wants the version, but obstore tells it only
to writers.
"""
T = TypeVar("T")
_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()

# A name and password, or a token for http; the container of az://CONTAINER@ACCOUNT is neither.
_USERINFO = re.compile(r"(?<=://)[^\s/@:]*:[^\s/@]*@|(?<=http://)[^\s/@]+@|(?<=https://)[^\s/@]+@")
_OPTION = re.compile(r"([?&])([^\s=&#\"')]+)=([^\s&#\"')]*)")


def redact(text: str) -> str:
    """Return a text with the names, passwords and query values of its addresses removed."""
    text = _USERINFO.sub("***@", text)
    return _OPTION.sub(lambda m: f"{m[1]}{m[2]}={m[3] if m[2] in _SHOWN_OPTIONS else '***'}", text)


def reason(error: BaseException) -> str:
    """Return the first line of obstore's message, or the code of its XML, without secrets and of
    bounded length.
    """
    text = str(error).strip()
    line = text.partition("\n")[0].partition(": <?xml")[0]
    code = re.search(r"<Code>(\w+)</Code>", text)
    line += f" ({code[1]})" if code else ""
    if line:
        return harmless(redact(line)[:400])
    return type(error).__name__


class Unavailable(Exception):  # noqa: N818 - it never leaves the cache
    """A store could not be read or written; `skipped` is True if it was not even tried."""

    def __init__(self, message: str, skipped: bool = False) -> None:
        super().__init__(message)
        self.skipped = skipped


class TooLarge(Exception):  # noqa: N818 - it never leaves the cache
    """An object exceeds its reader's limit; the message says by how much."""


class Limits(NamedTuple):
    """Limits of a store in seconds."""

    connect: float = 3.0
    request: float = 10.0
    """Of one request; in a mirror it moves a part of a large object."""
    total: float = 20.0
    """Of an operation, with its retries."""
    retries: int = 2
    """Number of retries after transient failures."""
    pause: float = 30.0
    """Without any attempt, after failures in a row."""


class _Health:
    """Failures in a row, and the end of the pause."""

    def __init__(self, pause_seconds: float) -> None:
        self._pause_seconds = pause_seconds
        self.failures = 0
        self.paused_until = 0.0

    def pause(self) -> None:
        self.paused_until = time.monotonic() + self._pause_seconds

    def failed(self) -> None:
        self.failures += 1
        self.pause()


DEFAULT_LIMITS = Limits()


class Store:
    """Read and write whole objects in one store, with a pause after repeated failures. shown: its
    address without credentials.
    """

    def __init__(
        self,
        address: str | os.PathLike[str],
        *,
        what: str = "a cache",
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """Raises UserError for an impossible address. The first write makes a folder, not this.

        what: the things kept there, in words.
        """
        self._what = what
        self._limits = limits
        self.folder: Path | None = None
        self._store: ObjectStore | None = None
        text = os.fspath(address)
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{what}'s address is empty or not text; give {KNOWN}")
        self.shown = redact(text)
        scheme, separator, rest = text.partition("://")
        if separator:
            try:
                urlsplit(text)
            except ValueError as error:
                raise UserError(
                    f"{what} cannot be at {self.shown!r}: {error}; use {KNOWN}"
                ) from error
        if isinstance(address, os.PathLike) or (
            not separator and text.partition(":")[0] not in (*CLOUD_SCHEMES, "memory")
        ):
            self._open_folder(Path(text))
        elif scheme == "memory":
            with _memory_lock:
                self._store = _memory.setdefault(rest.strip("/"), MemoryStore())
        elif scheme == "file":
            parts = urlsplit(text)
            if parts.netloc not in ("", "localhost"):
                raise UserError(
                    f"{self.shown} names another machine; a folder of this one has three "
                    "slashes: file:///folder"
                )
            self._open_folder(Path(unquote(parts.path)))
        elif separator and scheme in CLOUD_SCHEMES:
            self._open_cloud(scheme, text)
        else:
            raise UserError(f"{self._what} cannot be at {self.shown!r}; use {KNOWN}")
        # Separate, since a read-only store must still be read after a failed write.
        self._reading, self._writing = _Health(limits.pause), _Health(limits.pause)

    def _open_folder(self, folder: Path) -> None:
        self.folder = folder.expanduser().absolute()
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"{self._what} cannot be at {self.shown!r}, a file; give a folder")

    def _open_cloud(self, scheme: str, text: str) -> None:
        _grace_at_exit()
        parts = urlsplit(text)
        kind = {"s": "s3", "g": "gs", "h": "http"}.get(scheme[0], "az")
        if parts.password is not None:
            if kind in _CREDENTIALS:
                hint = f"; set {_CREDENTIALS[kind]}"
            else:
                hint = ""
            raise UserError(
                f"{self.shown}: ttrl uses no name and password in {self._what}'s address{hint}"
            )
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        # A plain http endpoint is a deliberate choice.
        endpoint = (
            options.get("endpoint")
            or os.environ.get("AWS_ENDPOINT_URL_S3")
            or os.environ.get("AWS_ENDPOINT_URL")
            or ""
        )
        client: dict[str, object] = {
            "connect_timeout": timedelta(seconds=self._limits.connect),
            "timeout": timedelta(seconds=self._limits.request),
        }
        plain = endpoint.startswith("http://") or scheme == "http"
        asked = options.pop("allow_http", "").strip().lower() in ("1", "true", "yes", "on")
        if asked or (kind in ("s3", "http") and plain):
            client["allow_http"] = True
        retry: Any = {
            "max_retries": self._limits.retries,
            "retry_timeout": timedelta(seconds=self._limits.total),
            "backoff": {
                "init_backoff": timedelta(milliseconds=200),
                "max_backoff": timedelta(seconds=2),
                "base": 2,
            },
        }
        bare = parts._replace(query="", fragment="").geturl()
        try:
            # obstore has one overload per kind of store.
            self._store = from_url(  # type: ignore[call-overload]
                bare, client_options=client, retry_config=retry, **options
            )
        except (exceptions.BaseError, ValueError, TypeError, OSError) as error:
            if kind in _CREDENTIALS:
                hint = f"; put credentials into {_CREDENTIALS[kind]}"
            else:
                hint = ""
            raise UserError(
                f"{self._what} cannot be at {self.shown!r}: {self._reason(error, options)}{hint}"
            ) from None

    @staticmethod
    def _reason(error: BaseException, options: dict[str, str]) -> str:
        message = reason(error)
        for name, value in options.items():
            if value and name not in _SHOWN_OPTIONS:
                message = message.replace(value, "***")
        return message

    def __repr__(self) -> str:
        return f"Store({self.shown!r})"

    @property
    def in_memory(self) -> bool:
        return isinstance(self._store, MemoryStore)

    def open(self, *, make: bool = False) -> ObjectStore | None:
        """Return the obstore store; None for a missing folder, not to be made."""
        if self._store is None:
            assert self.folder is not None
            if not make and not self.folder.is_dir():
                return None
            self._store = LocalStore(self.folder, mkdir=make, automatic_cleanup=True)
        return self._store

    @contextlib.asynccontextmanager
    async def _trying(self, health: "_Health") -> AsyncIterator[None]:
        """Count failures. After three in a row, skip the store for a while; then one attempt shows
        whether it is back.
        """
        if health.failures >= FAILURES_BEFORE_PAUSE:
            if time.monotonic() < health.paused_until:
                raise Unavailable(
                    f"{self.shown} is paused for {self._limits.pause:.0f} s after failures",
                    skipped=True,
                )
            health.pause()  # others wait for this attempt's result
        try:
            async with asyncio.timeout(self._limits.total):
                yield
        except TimeoutError as error:
            health.failed()
            raise Unavailable(f"no answer within {self._limits.total:.0f} s") from error
        except (exceptions.BaseError, OSError, ValueError, NotImplementedError) as error:
            health.failed()
            raise Unavailable(reason(error)) from error
        health.failures = 0

    async def read(self, key: str, most: float = math.inf) -> bytes | None:
        """Return an object's bytes; None without one. Raises Unavailable, and TooLarge for more
        than `most` bytes.
        """
        async with self._trying(self._reading):
            store = self.open()
            if store is None:
                return None
            try:
                if isinstance(store, MemoryStore):
                    return get_bytes(store, key, most)
                if isinstance(store, LocalStore):
                    return await _in_thread(partial(get_bytes, store, key, most))
                found = await obstore.get_async(store, key)
                _check_size(key, found.meta["size"], most)
                return bytes(await found.bytes_async())
            except FileNotFoundError:
                return None

    async def create(self, key: str, data: bytes) -> bool:
        """Write an object unless there is one; return False if there is one already. Raises
        Unavailable. A store without conditional writes (some S3 look-alikes, file systems without
        hard links) overwrites instead.
        """
        async with self._trying(self._writing):
            store = self.open(make=True)
            assert store is not None
            try:
                await self._put(store, key, data, "create")
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                return False
            except (exceptions.BaseError, OSError, NotImplementedError) as error:
                if not self.refuses_conditions(error):
                    raise
                await self._put(store, key, data, "overwrite")
            return True

    async def _put(
        self, store: ObjectStore, key: str, data: bytes, mode: Literal["create", "overwrite"]
    ) -> None:
        put = partial(obstore.put, store, key, data, mode=mode, use_multipart=False)
        if isinstance(store, MemoryStore):
            put()
        elif isinstance(store, LocalStore):
            await _in_thread(put)
        else:
            await obstore.put_async(store, key, data, mode=mode, use_multipart=False)

    def refuses_conditions(self, error: BaseException) -> bool:
        """Tell whether an error means a store without conditional writes."""
        if self.folder is not None:
            return not isinstance(error, PermissionError)
        unsupported = isinstance(error, exceptions.NotSupportedError | NotImplementedError)
        return unsupported or any(words in str(error) for words in _NO_CONDITIONS)

    async def overwrite(self, key: str, data: bytes) -> None:
        """Write an object, replacing any existing one. Raises Unavailable."""
        async with self._trying(self._writing):
            store = self.open(make=True)
            assert store is not None
            await self._put(store, key, data, "overwrite")


def get_bytes(store: ObjectStore, key: str, most: float) -> bytes:
    """Return an object's bytes. Raises TooLarge for more than `most`, and obstore's errors."""
    found = obstore.get(store, key)
    _check_size(key, found.meta["size"], most)
    return bytes(found.bytes())


def _check_size(key: str, size: int, most: float) -> None:
    if size > most:
        raise TooLarge(f"{key} has {size:,} bytes; ttrl reads at most {most:,}")


async def _in_thread(work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(_file_threads(), work)


@functools.cache
def _file_threads() -> ThreadPoolExecutor:
    """Return threads for folders. They take half the CPU time of obstore's asynchronous calls, and
    no obstore thread waits for Python.
    """
    return ThreadPoolExecutor(FILE_THREADS, "ttrl-cache")


@functools.cache
def _grace_at_exit() -> None:
    """Make a process wait at exit after using a bucket: obstore's thread calls into Python last, or
    aborts.
    """
    atexit.register(time.sleep, 0.1)
