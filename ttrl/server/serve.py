"""Run `ttrl serve`: a vLLM server on another host for runs to join (`joined_servers` in their
config).

It starts with any model of the right shape, and answers for no weights until a run has synced it.
The run names checkpoint folders by their paths, so this host must find the run folder at the same
path, on a shared file system. Alternatively it starts with the run's own model, and fetches
adapters to it from the run's mirror (`ttrl.server.sites`).

With the key, a client can make the server load any folder within its reach, and more: vLLM's
development endpoints run methods of the worker. So every path but /health asks for the key, the
key's file is readable only by its owner, and other hosts reach the server only at an explicit
address. It speaks plain HTTP: use a trusted network, or a tunnel.
"""

import contextlib
import ipaddress
import json
import logging
import os
import secrets
import shlex
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ttrl.errors import ServerDiedError, ServerStartError, TtrlError, UserError
from ttrl.server.connection import ADAPTER_NAME
from ttrl.server.model_folder import check_model_folder, weights_digest
from ttrl.server.sites import check_store
from ttrl.server.vllm import HOST, OTHER_MACHINES, VLLMServer
from ttrl.system.files import read_private

logger = logging.getLogger(__name__)

SERVED_MODEL_NAME = "policy"
_LORA_RANK = 64
"""Rank of the largest adapter a server takes, unless vLLM's max_lora_rank is given: vLLM sets
memory aside for it.
"""
_RESTARTS_WITHIN = 3600.0
"""Seconds; a server with more than `most_restarts` deaths within them will not be fixed by another
start.
"""


def read_or_make_key(path: Path) -> str:
    """Return the key in `path`. A missing file is made with a random key, readable by its owner
    only.

    Raises UserError for a file readable by others, or without a key.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        try:
            words = read_private(path).split()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the key file {path} cannot be used ({error})") from None
        if len(words) != 1 or len(words[0]) < 16:
            raise UserError(
                f"{path} does not hold a key (one word of at least 16 characters); remove it, and "
                "ttrl makes a new one"
            ) from None
        return words[0]
    except OSError as error:
        raise UserError(f"the key file {path} cannot be made: {error.strerror}") from error
    key = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(key + "\n")
    return key


def vllm_arguments(given: list[str]) -> Mapping[str, Any]:
    """Parse ["tensor_parallel_size=2", "enforce_eager=true"] into names and values, as JSON or else
    text. Raises UserError.
    """
    arguments = {}
    for item in given:
        name, separator, value = item.partition("=")
        if not name or not separator:
            raise UserError(f"--vllm {item}: write NAME=VALUE, such as tensor_parallel_size=2")
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return arguments


def serve(
    model: str,
    *,
    name: str | None = None,
    host: str = HOST,
    port: int | None = None,
    key_file: Path,
    log_path: Path,
    dtype: str = "auto",
    max_model_len: int | None = None,
    arguments: Mapping[str, Any] | None = None,
    adapters_from: str | None = None,
    say: Callable[[str], None],
    make_server: Callable[..., VLLMServer] = VLLMServer,
    look_seconds: float = 2.0,
    most_restarts: int = 5,
) -> None:
    """Serve until interrupted. A dead server restarts at the same address, and again answers for no
    weights.

    name: another name for clients; runs call the model "policy"; by default `model`.

    Raises UserError, ServerStartError, and ServerDiedError for a server with repeated deaths.
    """
    check_model_folder(model)
    if adapters_from is not None:
        check_store(adapters_from)
        for argument, value in (arguments or {}).items():
            if argument.replace("_", "-") in OTHER_MACHINES and value not in ("mp", "uni", 1, None):
                raise UserError(
                    "--adapters works only for servers on one machine, because they are fetched "
                    f"to it; leave out {argument}={value}"
                )
        arguments = {"max_lora_rank": _LORA_RANK, **(arguments or {})}
    server = make_server(
        model,
        served_model_name=SERVED_MODEL_NAME,
        other_names=[name or model],
        log_path=log_path,
        dtype=dtype,
        max_model_len=max_model_len,
        extra_args=arguments,
        host=host,
        port=port,
        api_key=read_or_make_key(key_file),
        adapters_from=adapters_from,
    )
    say(f"starting vLLM with {name or model}; its log is {log_path}")
    with server:
        if host not in ("0.0.0.0", "::"):
            address = server.root_url
        else:
            address = f"http://{socket.gethostname()}:{server.port}"
        names = " and ".join(repr(known) for known in (SERVED_MODEL_NAME, *server.other_names))
        say(f"serving at {address}/v1; the model's name is {names}")
        say(f"it computes in {server.dtype}; a run on it needs the same dtype")
        if adapters_from is not None:
            say(f"this is the model without an adapter; a run's adapter is called {ADAPTER_NAME!r}")
        say(
            f"the key is in {key_file}; for clients: export OPENAI_API_KEY=$(cat "
            f"{shlex.quote(str(key_file))})"
        )
        say(server.parsers.said)
        if not _is_loopback(host):
            say(
                f"other hosts can reach it at {host} over plain HTTP: anyone with access to the "
                "traffic sees the key and the text"
            )
        # In a thread: it reads all weights.
        threading.Thread(target=_say_digest, args=(model, server.dtype, say), daemon=True).start()
        settings = f'joined_servers=["{address}"]' + (
            ', adapters="mirror"' if adapters_from is not None else ""
        )
        say(f"a run joins it with {settings} and that key in TTRL_SERVER_KEY")
        keep_serving(
            server, say, address=address, look_seconds=look_seconds, most_restarts=most_restarts
        )


def keep_serving(
    server: VLLMServer,
    say: Callable[[str], None] = logger.warning,
    *,
    address: str | None = None,
    look_seconds: float = 2.0,
    most_restarts: int = 5,
) -> None:
    """Restart a started server after each death. Raises ServerDiedError after too many."""
    deaths: list[float] = []
    while True:
        time.sleep(look_seconds)
        try:
            server.check()
        except ServerDiedError as error:
            now = time.monotonic()
            deaths = [*(then for then in deaths if now - then < _RESTARTS_WITHIN), now]
            if len(deaths) > most_restarts:
                raise
            logger.warning("%s", error)
            say(f"the server died (see {server.log_path}); starting it again")
            try:
                server.restart()
            except ServerStartError as start_error:
                say(f"it did not start: {str(start_error).splitlines()[0]}")
            else:
                say(f"serving again at {address or server.root_url}")


def _say_digest(model: str, dtype: str, say: Callable[[str], None]) -> None:
    with contextlib.suppress(TtrlError, OSError):
        say(
            "its weights, for caches (until a run updates them): --weights-digest "
            f"{weights_digest(model)}/{dtype}"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
