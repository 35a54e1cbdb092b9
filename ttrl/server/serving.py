"""Serve a model: by the address of a running server, or by a folder or hub name, with a server
started for it."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai

from ttrl.errors import ServerError, UserError
from ttrl.records import Endpoint
from ttrl.server.chat_template import templated
from ttrl.server.cpu import is_cpu_build
from ttrl.server.vllm import VLLMServer

KEY_VARIABLE = "OPENAI_API_KEY"
_OWN_NAME = "policy"
_ACCOUNT = {"OpenAI-Organization": "OPENAI_ORG_ID", "OpenAI-Project": "OPENAI_PROJECT_ID"}
"""Headers and variables of the paying account, as in OpenAI's own client."""


@dataclass(frozen=True)
class ServedModel:
    """Hold a model and its endpoint."""

    endpoint: Endpoint
    model: str
    """Its served name."""
    is_ours: bool
    """True for a vLLM server started here: it returns token ids."""
    parsers: str = ""
    """Its parsers, in a line; only for a server started here."""


def is_address(model: str) -> bool:
    """Tell whether `model` is the address of a server, not a folder or a hub name."""
    return model.startswith(("http://", "https://"))


def address_problem(model: str) -> str | None:
    """Return the problem with an address, or None. A key in it would appear in every message and
    file naming the server.
    """
    try:
        parts = urlsplit(model)
    except ValueError as error:
        return (
            f"the address of the server is not valid: {error}; give one such as "
            "http://127.0.0.1:8000/v1"
        )
    if not parts.hostname:
        return "the address names no server; give one such as http://127.0.0.1:8000/v1"
    if parts.username or parts.password or parts.query or parts.fragment:
        return (
            f"the address of {parts.hostname} has a name, a key, a query or a fragment in it; "
            "give scheme, host, port and path "
            "alone, and the key in an environment variable"
        )
    return None


def default_dtype() -> str:
    """Return the dtype of servers started for a model: float32 on CPU, where half precision is slow
    and coarse, else vLLM's choice."""
    if is_cpu_build():
        return "float32"
    return "auto"


@contextlib.contextmanager
def serving(
    model: str,
    *,
    name: str | None = None,
    key_variable: str = KEY_VARIABLE,
    dtype: str | None = None,
    max_model_len: int | None = None,
    server_args: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    log_path: str | os.PathLike[str] | None = None,
    start_timeout: float | None = None,
) -> Iterator[ServedModel]:
    """Yield the server of an address, with its key in the environment; or start a vLLM server for a
    model, and stop it at the end.

    name: the address's name for the model; None: the first it lists. dtype: None: `default_dtype`.
    chat_template: a file or text instead of the model's own, for a server started here. log_path:
    the log of a server started here; None: a file deleted with it. Raises UserError for an address
    with a key in it; ServerError if nothing answers there, or the name is not served; and the
    errors of VLLMServer.
    """
    if is_address(model):
        problem = address_problem(model)
        if problem:
            raise UserError(problem)
        if chat_template is not None:
            raise UserError(
                f"{model} already runs, with a chat template of its own; leave chat_template "
                "out, or give the model's folder"
            )
        # Local servers need no key, but the client insists on one.
        key = os.environ.get(key_variable) or "none"
        served = _served_name(model, key, name, key_variable)
        headers = {
            name: os.environ[variable]
            for name, variable in _ACCOUNT.items()
            if os.environ.get(variable)
        }
        yield ServedModel(Endpoint(model, key, headers, uses_proxy=True), served, False)
        return
    with contextlib.ExitStack() as stack:
        if log_path is None:
            log_path = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="ttrl-server-")),
                "server.log",
            )
        model = stack.enter_context(templated(model, chat_template))
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
        yield ServedModel(server.endpoint(), _OWN_NAME, True, server.parsers.said)


def _served_name(address: str, key: str, name: str | None, key_variable: str) -> str:
    """Return `name` if the server lists it (or cannot list any), or the first listed if `name` is
    None.
    """
    try:
        with openai.OpenAI(base_url=address, api_key=key, max_retries=1, timeout=20.0) as client:
            listed = [model.id for model in client.models.list().data]
    except openai.OpenAIError as error:
        if (
            name is not None
            and isinstance(error, openai.APIStatusError)
            and error.status_code in (404, 405)
        ):
            # Some providers list no models; the first request then reports a wrong name.
            return name
        # `ttrl serve` says it itself.
        known = key_variable in str(error) or "ends in /v1" in str(error)
        if known:
            hint = ""
        else:
            hint = f" (most addresses end in /v1; the key is taken from {key_variable})"
        raise ServerError(f"{address}: {error}{hint}") from error
    if name is None and listed:
        return listed[0]
    if name is None:
        raise ServerError(f"{address} serves no model")
    if listed and name not in listed:
        shown = ", ".join(listed[:10]) + (
            f" and {len(listed) - 10} more" if len(listed) > 10 else ""
        )
        raise ServerError(f"{address} serves no model {name!r}; it serves {shown}")
    return name
