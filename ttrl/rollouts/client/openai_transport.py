"""The caller's OpenAI client: what aiohttp needs to know to stand in for it, and requests through it where it cannot."""

import contextlib
import sys
import types
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import openai
from openai import AsyncOpenAI
from openai._base_client import AsyncHttpxClientWrapper

from ttrl.errors import RequestError
from ttrl.rollouts.client.http_errors import connection_error, root_of, status_error, timeout_error
from ttrl.rollouts.client.wire import short

_RAW = "X-Stainless-Raw-Response"
"""The header with which the openai client marks requests whose answers it is not to parse."""
_DEFAULT_HEADERS = frozenset({"accept", "accept-encoding", "connection", "user-agent"})


def address_of(client: AsyncOpenAI) -> tuple[str, dict[str, str]]:
    """(base URL without a slash at its end, identity)."""
    base_url = str(client.base_url).rstrip("/")
    identity = {"base_url": base_url}
    for name in ("organization", "project"):
        if getattr(client, name, None):
            identity[name] = getattr(client, name)
    return base_url, identity


def plain_settings(client: AsyncOpenAI) -> dict[str, Any] | None:
    """What HTTPTransport must know to send exactly what this client would; None where that cannot be told.

    Everything must be known to be the default: types exactly, no hooks, no credentials but a fixed key, no proxy for this server.
    Whatever a later version of openai or httpx names differently ends here, too, and costs nothing but speed.
    """
    try:
        return _plain_settings(client)
    except Exception:  # noqa: BLE001 - internals of another version: the client itself knows them
        return None


def _plain_settings(client: AsyncOpenAI) -> dict[str, Any] | None:
    http = client._client
    if type(client) is not AsyncOpenAI or client.custom_auth is not None:
        return None
    if any(getattr(client, name, None) is not None for name in ("_provider", "_provider_runtime", "workload_identity")):
        return None
    if getattr(client, "_api_key_provider", None) is not None or not client.api_key:
        return None
    transport = http._transport_for_url(client.base_url)
    library = sys.modules[type(transport).__module__.split(".")[0]]
    known = (AsyncHttpxClientWrapper, openai.DefaultAsyncHttpxClient, library.AsyncClient)
    if library.__name__ not in ("httpx", "httpx2") or type(http) not in known:
        return None
    if any(http.event_hooks.values()) or http.auth is not None or len(http.cookies.jar) or http.params:
        return None
    if not set(http.headers) <= _DEFAULT_HEADERS or not http.follow_redirects:
        return None
    base_url, identity = address_of(client)
    if transport is not http._transport or type(transport) is not library.AsyncHTTPTransport:  # a proxy, a mount, a mock
        return None
    handle = type(transport).handle_async_request
    if not isinstance(handle, types.FunctionType) or handle.__module__.split(".")[0] != library.__name__:  # patched by a mock
        return None
    pool = transport._pool
    if type(pool).__name__ != "AsyncConnectionPool" or pool._uds or pool._local_address or pool._socket_options:
        return None
    if pool._retries or pool._http2:
        return None
    headers = {name: value for name, value in client.default_headers.items() if isinstance(value, str)}
    has_own_key = any(name.lower() == "authorization" for name in client._custom_headers)
    if not has_own_key:
        headers |= client.auth_headers
    timeout = client.timeout
    return {
        "base_url": base_url,
        "headers": {name: value for name, value in headers.items() if not name.lower().startswith("x-stainless-")},
        "identity": identity,
        "query": client.qs.stringify(client.default_query) if client.default_query else "",
        "connect_timeout": getattr(timeout, "connect", timeout),
        "read_timeout": getattr(timeout, "read", timeout),
        "ssl_context": pool._ssl_context if base_url.startswith("https:") else None,
    }


class ClientTransport:
    """Requests through an openai client as it is; only the parsing of answers, and the retries, are ours."""

    read_timeout: float | None = None  # the client's own timeouts hold

    def __init__(self, client: AsyncOpenAI) -> None:
        self._client = client
        self.base_url, self.identity = address_of(client)

    def __repr__(self) -> str:
        return f"ClientTransport(base_url={self.base_url!r})"

    def _options(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"headers": {_RAW: kind}, "max_retries": 0, **more}

    async def post(self, path: str, body: Mapping[str, Any], *, root: bool = False) -> bytes:
        with self._explaining():
            url = root_of(self.base_url) + path if root else path
            response: Any = await self._client.post(url, cast_to=object, body=dict(body), options=self._options("true"))
            return response.content

    async def get(self, path: str, *, root: bool = False, timeout: float = 10.0) -> bytes:
        with self._explaining(timeout):
            url = root_of(self.base_url) + path if root else path
            response: Any = await self._client.get(url, cast_to=object, options=self._options("true", timeout=timeout))
            return response.content

    @contextlib.asynccontextmanager
    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[AsyncIterator[bytes]]:
        with self._explaining():
            response: Any = await self._client.post(path, cast_to=object, body=dict(body), options=self._options("stream"))
        try:
            async with contextlib.aclosing(self._parts(response)) as parts:
                yield parts
        finally:
            await response.http_response.aclose()

    async def _parts(self, response: Any) -> AsyncGenerator[bytes, None]:
        with self._explaining():
            async for part in response.http_response.aiter_bytes():
                yield part

    async def close(self) -> None:
        """Nothing: the client belongs to the caller."""

    @contextlib.contextmanager
    def _explaining(self, timeout: float | None = None) -> Any:
        place = self.base_url
        try:
            yield
        except openai.APIStatusError as error:
            key = self._client.api_key if isinstance(self._client.api_key, str) else ""
            raise status_error(place, error.status_code, error.response.content, error.response.headers, key) from error
        except openai.APITimeoutError as error:
            raise timeout_error(place, timeout if timeout is not None else self._seconds()) from error
        except openai.APIConnectionError as error:
            raise connection_error(place, error.__cause__ or error.message) from error
        except openai.OpenAIError as error:  # no key, no credentials: the client gave up before it sent anything
            raise RequestError(f"{place}: the client could not send the request: {error}", "status") from error
        except _http_errors() as error:
            if "Timeout" in type(error).__name__:
                raise timeout_error(place, timeout if timeout is not None else self._seconds()) from error
            if "Decoding" in type(error).__name__:
                raise RequestError(f"{place}: the server's answer cannot be read: {error}", "malformed") from error
            why = f"{type(error).__name__}: {error}"
            raise RequestError(f"{place}: the connection broke: {short(why)}", "connection") from error

    def _seconds(self) -> float | None:
        timeout = self._client.timeout
        seconds = getattr(timeout, "read", timeout)
        return seconds if isinstance(seconds, int | float) else None


def _http_errors() -> tuple[type[Exception], ...]:
    """Of whichever HTTP library the openai client has loaded."""
    modules = (sys.modules.get("httpx"), sys.modules.get("httpx2"))
    return tuple(module.RequestError for module in modules if module is not None)
