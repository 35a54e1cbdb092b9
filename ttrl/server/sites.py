"""Transfer adapters to servers at other sites, without a shared file system: through the run's
mirror in an object store.

The run stores an iteration's adapter in its mirror, and tells the server the keys, sizes and
SHA-256. The server's host, started with the mirror's address (`ttrl serve MODEL --adapters
ADDRESS`), fetches it into a folder of its own, for vLLM to read. So the run sends an adapter once
for any number of servers. The base is compared with the run's file by file.
"""

import asyncio
import functools
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from ttrl.errors import ServerDiedError, ServerError, UserError, WeightSyncError
from ttrl.server.auth import Receive, Scope, Send, answer
from ttrl.server.connection import ServerConnection
from ttrl.server.model_folder import weight_files
from ttrl.system.files import TEMPORARY_PREFIX, digest, read_object
from ttrl.system.mirror_store import MirrorStore
from ttrl.system.object_store import redact
from ttrl.text import gib

ADAPTERS_PATH = "/ttrl/adapter"
"""GET returns {"base": `base_digests` of the server's model}; POST of {KEY in the store: [bytes,
SHA-256]} returns {"folder": their local folder}, or {"error": the reason}."""
ADAPTERS_VARIABLE = "TTRL_ADAPTERS"
"""Input of `FetchAdapters`: JSON of [address of the store, folder for fetched files, folder of the
model].
"""
_NAME = re.compile(r"\w[\w.-]*\.(safetensors|json)")  # read by vLLM without unpickling
_OF_BASE = re.compile(
    r"(config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|merges|"
    r"chat_template|tekken)\..+"
)
_MOST_BYTES = 2**34  # of an adapter
_FETCH_SECONDS, _SLOWEST = 120.0, 1e6  # plus a second for each of so many bytes
_BASE_SECONDS = 1800.0
# A quarter of a minute if the store refuses at once; the run waits for the answer.
_PATIENT_TRIES = 6

Files = Mapping[str, tuple[int, str]]
"""Key in the store → (bytes, SHA-256)."""


@contextmanager
def bring_adapter(
    server: ServerConnection,
    checkpoint: Path,
    *,
    publish: Callable[[Path], Files],
    base: Path,
) -> Iterator[list[Path]]:
    """Transfer a checkpoint's adapter, if any, to such a server; yield the server's folder of it.

    publish: stores a folder of the run in its mirror, and returns its files' keys; raises OSError.
    base: the run's starting model. Raises WeightSyncError for a server with another base,
    ServerDiedError.
    """
    problem = base_problem(server, base)
    if problem is not None:
        raise WeightSyncError(f"the server at {server.base_url} cannot serve the run: {problem}")
    adapter = server.reads(checkpoint)
    if adapter == checkpoint:
        yield [checkpoint]
        return
    try:
        stored = publish(adapter)
    except OSError as error:
        raise ServerDiedError(
            f"{server.base_url} cannot get the adapter in {checkpoint}: {error}"
        ) from error
    files = {
        key: found for key, found in stored.items() if _NAME.fullmatch(PurePosixPath(key).name)
    }
    seconds = _FETCH_SECONDS + sum(size for size, _ in files.values()) / _SLOWEST
    yield [Path(_ask(server, "POST", files, seconds)["folder"])]


def base_problem(server: ServerConnection, base: Path) -> str | None:
    """Return the problem with a server's base under adapters. Raises ServerError."""
    there = _ask(server, "GET", None, _BASE_SECONDS)["base"]
    try:
        here = base_digests(base)
    except OSError as error:
        return f"the run's starting model can no longer be read ({error})"
    different = sorted(
        name for name in there.keys() | here.keys() if there.get(name) != here.get(name)
    )
    if not different:
        return None
    names = ", ".join(different[:5])
    return (
        f"its model differs from the run's starting model, {base}: {names} differ; copy the folder"
    )


def _ask(server: ServerConnection, method: str, body: Any, seconds: float) -> Any:
    try:
        return server.request(method, ADAPTERS_PATH, body, seconds)
    except ServerDiedError:
        raise
    except ServerError as error:
        if " answered 404" in str(error):
            raise WeightSyncError(
                f"{server.base_url} was not started with `ttrl serve MODEL --adapters ADDRESS`"
            ) from error
        # A fault of its store, or of the network: it may recover.
        raise ServerDiedError(str(error)) from error


_digesting = threading.Lock()


def base_digests(folder: Path) -> dict[str, str]:
    """Return SHA-256 by name of a model's files for computing: weights, config, tokenizer and chat
    template. Read once. Raises OSError."""
    with _digesting:
        return _base_digests(folder)


@functools.cache
def _base_digests(folder: Path) -> dict[str, str]:
    files = [
        *weight_files(folder),
        *(file for file in folder.iterdir() if file.is_file() and _OF_BASE.fullmatch(file.name)),
    ]
    found = {file.name: digest(file) for file in files}
    with suppress(OSError, ValueError):  # its saving version does not matter
        config = dict(read_object(folder / "config.json"))
        config.pop("transformers_version", None)
        found["config.json"] = hashlib.sha256(
            json.dumps(config, sort_keys=True).encode()
        ).hexdigest()
    return found


def check_store(address: str) -> None:
    """Raise UserError if adapters cannot be read from this address; it may still be empty."""
    if redact(address) != address:
        raise UserError(
            f"--adapters {redact(address)} contains credentials, readable by all users; put them "
            "into the environment"
        )
    try:
        MirrorStore(address).keys()
    except OSError as error:
        raise UserError(f"{error}; credentials come from the environment") from error


class FetchAdapters:
    """Fetch adapters for such a server: ASGI middleware inside `RequireKey` and its key check."""

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Any],
        store_class: type[MirrorStore] = MirrorStore,
    ) -> None:
        address, folder, model = json.loads(os.environ[ADAPTERS_VARIABLE])
        self._app, self._folder, self._model, self._store = (
            app,
            Path(folder),
            Path(model),
            store_class(address),
        )
        self._fetching = threading.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") != ADAPTERS_PATH or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            if scope["method"] == "GET":
                found: dict[str, object] = {
                    "base": await asyncio.to_thread(base_digests, self._model)
                }
            else:
                files = _checked(json.loads(await _body(receive)))
                found = {"folder": str(await asyncio.to_thread(self._fetch, files))}
        except (OSError, ValueError) as error:
            return await answer(send, 400, {"error": str(error)})
        await answer(send, 200, found)

    def _fetch(self, files: Files) -> Path:
        """Return a folder with these files of the store. Raises OSError."""
        target = (
            self._folder / hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
        )
        with self._fetching:
            if not target.is_dir():
                self._folder.mkdir(exist_ok=True)
                with TemporaryDirectory(
                    dir=self._folder, prefix=TEMPORARY_PREFIX, ignore_cleanup_errors=True
                ) as made:
                    for key, (size, sha256) in files.items():
                        self._take(key, size, sha256, Path(made, PurePosixPath(key).name))
                    os.rename(made, target)
            os.utime(target)
            kept = [
                path
                for path in self._folder.iterdir()
                if not path.name.startswith(TEMPORARY_PREFIX)
            ]
            # The previous one may still be in use.
            for other in sorted(kept, key=lambda path: path.stat().st_mtime)[:-2]:
                shutil.rmtree(other, ignore_errors=True)
        return target

    def _take(self, key: str, size: int, sha256: str, target: Path) -> None:
        self._store.patiently(lambda: self._store.fetch(key, size, target), _PATIENT_TRIES)
        if not target.exists() or digest(target) != sha256:
            raise OSError(
                f"{self._store.shown}: {key} differs from the run's own; check that this is the "
                "run's mirror"
            )


async def _body(receive: Receive) -> bytes:
    found = b""
    more = True
    while more:
        message = await receive()
        found += message.get("body", b"")
        more = message.get("more_body", False)
        if len(found) > 2**20:
            raise ValueError("the request is larger than 1 MiB")
    return found


def _checked(given: Any) -> Files:
    """Return the files of a run's request. Raises ValueError."""
    with suppress(AttributeError, TypeError, ValueError, OverflowError):
        files = {str(key): (int(size), str(sha256)) for key, (size, sha256) in given.items()}
        paths = [PurePosixPath(key) for key in files]
        if all(
            _NAME.fullmatch(path.name) and not path.is_absolute() and ".." not in path.parts
            for path in paths
        ):
            sizes = [size for size, _ in files.values()]
            if (
                len({path.name for path in paths}) == len(sizes) > 0 <= min(sizes)
                and sum(sizes) <= _MOST_BYTES
            ):
                return files
    raise ValueError(
        f"these are not the files of an adapter of up to {gib(_MOST_BYTES)}: {given!r:.500}"
    )
