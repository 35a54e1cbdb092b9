"""A model to ask, however it is given: the address of a server that runs, or a folder or hub name, for which one is started."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai

from ttrl.errors import ServerError, UserError
from ttrl.server.vllm import VLLMServer, is_cpu_build

KEY_VARIABLE = "OPENAI_API_KEY"
_OWN_NAME = "policy"


@dataclass(frozen=True)
class Served:
    """A server that answers."""

    connect: Callable[[], openai.AsyncOpenAI]
    """Makes a client; clients belong to the event loop in which they are made."""
    model: str
    """The name under which it serves the model."""
    is_ours: bool
    """True for a vLLM server that was started here: it gives token ids."""


def is_address(model: str) -> bool:
    """True for the address of a server, False for a folder or a hub name."""
    return model.startswith(("http://", "https://"))


def address_problem(model: str) -> str | None:
    """What is wrong with an address. A key in it would stand in every message and file that names the server."""
    try:
        parts = urlsplit(model)
    except ValueError as error:
        return f"the address of the server is none: {error}; give one such as http://127.0.0.1:8000/v1"
    if not parts.hostname:
        return "the address names no server; give one such as http://127.0.0.1:8000/v1"
    if parts.username or parts.password or parts.query or parts.fragment:
        return (
            f"the address of {parts.hostname} has a name, a key, a query or a fragment in it; give scheme, host, port and path "
            "alone, and the key in an environment variable"
        )
    return None


def default_dtype() -> str:
    """Of servers that are started for a model: float32 on CPU, where half precision is slow and coarse, else vLLM's choice."""
    return "float32" if is_cpu_build() else "auto"


@contextlib.contextmanager
def serving(
    model: str,
    *,
    name: str | None = None,
    key_variable: str = KEY_VARIABLE,
    dtype: str | None = None,
    max_model_len: int | None = None,
    server_args: Mapping[str, Any] | None = None,
    log_path: str | os.PathLike[str] | None = None,
    start_timeout: float = 600.0,
) -> Iterator[Served]:
    """The server of an address, whose key is in the environment; or a vLLM server for a model, which is stopped at the end.

    name: under which an address serves the model; None: the first that it lists.
    dtype: None: `default_dtype`.
    log_path: of the server that is started here; None: a file that is gone with it.
    Raises UserError for an address with a key in it; ServerError: nothing answers there, or it serves no model of that name; and
    what VLLMServer raises.
    """
    if is_address(model):
        if problem := address_problem(model):
            raise UserError(problem)
        # Servers at home want no key, but the client wants one.
        at = {"base_url": model, "api_key": os.environ.get(key_variable) or "none"}
        served = _served_model(at, name, key_variable)
        yield Served(lambda: openai.AsyncOpenAI(**at), served, False)
        return
    with contextlib.ExitStack() as stack:
        if log_path is None:
            log_path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ttrl-server-")), "server.log")
        server = VLLMServer(
            model,
            served_model_name=_OWN_NAME,
            log_path=log_path,
            dtype=dtype or default_dtype(),
            max_model_len=max_model_len,
            extra_args=server_args,
            start_timeout=start_timeout,
        )
        stack.enter_context(server)
        yield Served(server.client, _OWN_NAME, True)


def _served_model(at: Mapping[str, str], name: str | None, key_variable: str) -> str:
    """The name asked for, where the server lists it (or lists nothing that could be told); else the first one listed."""
    try:
        with openai.OpenAI(**at, max_retries=1, timeout=20.0) as client:
            listed = [model.id for model in client.models.list().data]
    except openai.OpenAIError as error:
        if name is not None and isinstance(error, openai.APIStatusError) and error.status_code in (404, 405):
            return name  # some providers list no models; a wrong name is then found by the first request
        raise ServerError(
            f"{at['base_url']}: {error} (the address ends in /v1 mostly; the key is taken from {key_variable})"
        ) from error
    if name is None and listed:
        return listed[0]
    if name is None:
        raise ServerError(f"{at['base_url']} serves no model")
    if listed and name not in listed:
        shown = ", ".join(listed[:10]) + (f" and {len(listed) - 10} more" if len(listed) > 10 else "")
        raise ServerError(f"{at['base_url']} serves no model {name!r}; it serves {shown}")
    return name
