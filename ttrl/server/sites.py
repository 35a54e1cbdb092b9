"""Bring adapters to servers at other sites, which share no file system with the run: through the run's mirror in an object store.

The run stores an iteration's adapter in its mirror, and tells the server what lies where, with sizes and SHA-256. The server's
host, which named the mirror itself (`ttrl serve MODEL --adapters ADDRESS`), takes it from there into a folder of its own, where
vLLM reads it. So the run sends an adapter once, however many servers there are. The base is held to the run's by its digest.
"""

import asyncio
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from ttrl.errors import ServerDiedError, ServerError, UserError
from ttrl.records import ADAPTER_FOLDER
from ttrl.server.auth import Receive, Scope, Send, answer
from ttrl.server.connection import JoinedServer
from ttrl.server.model_folder import weights_digest
from ttrl.system.files import TEMPORARY_PREFIX, digest
from ttrl.system.mirror_store import MirrorStore
from ttrl.text import gib

ADAPTERS_PATH = "/ttrl/adapter"
"""GET returns {"base": the digest of the server's model}; POST of {KEY in the store: [bytes, SHA-256]} {"folder": where they are
now}, or {"error": why they are not}."""
ADAPTERS_VARIABLE = "TTRL_ADAPTERS"
"""What `FetchAdapters` is given: JSON of [address of the store, folder for what comes from there, folder of the model]."""
_NAME = re.compile(r"\w[\w.-]*\.(safetensors|json)")  # what vLLM reads without unpickling anything
_MOST_BYTES = 2**34  # of an adapter
_FETCH_SECONDS = 1800.0

Files = Mapping[str, tuple[int, str]]
"""By key in the store: bytes, SHA-256."""


class SiteServer(JoinedServer):
    """The run's side of such a server.

    publish: stores a folder of the run in its mirror, and says what lies where; raises OSError. base: gives the digest of the
    run's starting model (`weights_digest`).
    """

    serves_adapters = True

    def __init__(self, root_url: str, *, publish: Callable[[Path], Files], base: Callable[[], str], **settings: Any) -> None:
        super().__init__(root_url, **settings)
        self._publish, self._base = publish, base

    def adapter(self, checkpoint: Path) -> Path:
        try:
            files = self._publish(checkpoint / ADAPTER_FOLDER)
            return Path(self.request("POST", ADAPTERS_PATH, dict(files), _FETCH_SECONDS)["folder"])
        except (OSError, ServerError) as error:
            raise ServerDiedError(f"{self.base_url} cannot be given the adapter in {checkpoint}: {error}") from error

    def base_problem(self) -> str | None:
        try:
            found = self.request("GET", ADAPTERS_PATH, timeout=_FETCH_SECONDS)["base"]
        except ServerDiedError:
            raise
        except ServerError as error:
            return f'adapters="mirror" is for servers that were started with `ttrl serve MODEL --adapters ADDRESS` ({error})'
        if found == self._base():
            return None
        return (
            "its model is not the one that the run began with: weights, config, tokenizer or chat template differ (digests: "
            f"{found}, and here {self._base()}); copy the folder"
        )


def check_store(address: str) -> None:
    """Raise UserError where adapters cannot be read from this address; they need not be there yet."""
    try:
        MirrorStore(address).keys()
    except OSError as error:
        raise UserError(f"{error}; credentials come from the environment") from error


class FetchAdapters:
    """ASGI middleware of such a server, inside `RequireKey`, which asks for the key."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Any]) -> None:
        address, folder, self._model = json.loads(os.environ[ADAPTERS_VARIABLE])
        self._app, self._folder = app, Path(folder)
        self._store = MirrorStore(address)
        self._base: asyncio.Task[str] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") != ADAPTERS_PATH or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            if scope["method"] == "GET":
                if self._base is None or (self._base.done() and self._base.exception() is not None):
                    self._base = asyncio.create_task(asyncio.to_thread(weights_digest, self._model))
                return await answer(send, 200, {"base": await asyncio.shield(self._base)})
            folder = await asyncio.to_thread(self._fetch, _checked(json.loads(await _body(receive))))
        except (OSError, ValueError) as error:
            return await answer(send, 400, {"error": str(error)})
        await answer(send, 200, {"folder": str(folder)})

    def _fetch(self, files: Files) -> Path:
        """Return a folder with these files of the store. Raises OSError."""
        target = self._folder / hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
        if not target.is_dir():
            self._folder.mkdir(exist_ok=True)
            with TemporaryDirectory(dir=self._folder, prefix=TEMPORARY_PREFIX, ignore_cleanup_errors=True) as made:
                for key, (size, sha256) in files.items():
                    self._store.fetch(key, size, file := Path(made, PurePosixPath(key).name))
                    if not file.exists() or digest(file) != sha256:
                        raise OSError(f"{self._store.shown}: {key} is not what the run wrote; is it the mirror of this run?")
                os.rename(made, target)
        os.utime(target)
        kept = [path for path in self._folder.iterdir() if not path.name.startswith(TEMPORARY_PREFIX)]
        for other in sorted(kept, key=lambda path: path.stat().st_mtime)[:-2]:  # the one before may still be in use
            shutil.rmtree(other, ignore_errors=True)
        return target


async def _body(receive: Receive) -> bytes:
    found, more = b"", True
    while more:
        message = await receive()
        found += message.get("body", b"")
        more = message.get("more_body", False)
        if len(found) > 2**20:
            raise ValueError("the request is larger than 1 MiB")
    return found


def _checked(given: Any) -> Files:
    """Return what a run asks for. Raises ValueError."""
    with suppress(AttributeError, TypeError, ValueError):
        files = {str(key): (int(size), str(sha256)) for key, (size, sha256) in given.items()}
        paths = [PurePosixPath(key) for key in files]
        if all(_NAME.fullmatch(path.name) and not path.is_absolute() and ".." not in path.parts for path in paths):
            sizes = [size for size, _ in files.values()]
            if len({path.name for path in paths}) == len(sizes) > 0 <= min(sizes) and sum(sizes) <= _MOST_BYTES:
                return files
    raise ValueError(f"these are not the files of an adapter of up to {gib(_MOST_BYTES)}: {given!r:.500}")
