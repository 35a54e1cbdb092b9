"""Choose the transport to a server: aiohttp for an address, the cheapest for the client; an OpenAI
client unchanged.
"""

import os
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol
from urllib.parse import urlsplit

from openai import AsyncOpenAI, OpenAI

from ttrl.errors import UserError
from ttrl.records import Endpoint
from ttrl.rollouts.client.http_transport import HTTPTransport
from ttrl.rollouts.client.openai_transport import ClientTransport
from ttrl.version import __version__


class Transport(Protocol):
    """One server. All methods raise RequestError if the server cannot be reached or answers with an
    error.
    """

    base_url: str
    """"http://127.0.0.1:8000/v1", without a slash at its end."""
    identity: dict[str, str]
    """The server's identity: base_url, organization, project. Never the key."""
    read_timeout: float | None
    """Seconds to wait for the first byte of a stream; None: the transport decides, or no limit."""

    async def post(self, path: str, body: Mapping[str, Any], *, root: bool = False) -> bytes:
        """Return the whole body of a successful answer. root: the path is above /v1."""
        ...

    def stream(
        self, path: str, body: Mapping[str, Any]
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Yield the bytes of a successful answer as they arrive. Leaving it early closes the
        connection.
        """
        ...

    async def get(self, path: str, *, root: bool = False, timeout: float = 10.0) -> bytes:
        """Return the whole body of a successful answer."""
        ...

    async def close(self) -> None:
        """Close its connections, in the loop of their opening."""
        ...


def transport_for(client: AsyncOpenAI | str | Endpoint) -> Transport:
    """Return the transport to a server. Raises UserError for anything but an AsyncOpenAI client, an
    http(s) URL, or an Endpoint.
    """
    if isinstance(client, Endpoint):
        base_url = client.base_url.rstrip("/")
        uses_proxy = client.uses_proxy
        headers = {"Authorization": f"Bearer {client.api_key}", **client.headers}
    elif isinstance(client, str):
        base_url = _checked_url(client)
        uses_proxy = True
        headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY') or 'EMPTY'}"}
    elif isinstance(client, AsyncOpenAI):
        return ClientTransport(client)
    elif isinstance(client, OpenAI):
        raise UserError(
            f"client is a {type(client).__name__}, but sampling is concurrent: give an AsyncOpenAI "
            "client"
        )
    else:
        raise UserError(
            f"client is a {type(client).__name__}; give an AsyncOpenAI client, or a base URL"
        )
    if uses_proxy and not is_local(base_url):
        proxy = _proxy(base_url)
    else:
        proxy = None
    headers = {"User-Agent": f"ttrl/{__version__}", **headers}
    return HTTPTransport(
        base_url, headers, {"base_url": base_url}, proxy, is_address=isinstance(client, str)
    )


def _checked_url(client: str) -> str:
    try:
        parts = urlsplit(client.strip())
    except ValueError as error:
        raise UserError(
            f"client is {client!r}: {error}; give a base URL such as 'http://127.0.0.1:8000/v1'"
        ) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(
            f"client is {client!r}; give an AsyncOpenAI client, or a base URL such as "
            "'http://127.0.0.1:8000/v1'"
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        shown = f"{parts.scheme}://{parts.hostname}{parts.path}"
        raise UserError(
            f"client is the URL {shown} with credentials, a query or a fragment; give an "
            "AsyncOpenAI client with api_key=…, "
            "default_query=… instead"
        )
    return client.strip().rstrip("/")


def is_local(base_url: str) -> bool:
    """Return whether a URL names this machine."""
    host = (urlsplit(base_url).hostname or "").lower()
    return (
        host in ("localhost", "::1", "0.0.0.0")
        or host.startswith("127.")
        or host.endswith(".localhost")
    )


def answer_identity(
    transports: Sequence[Transport], weights_digest: str | None, *, has_cache: bool
) -> Any:
    """Return the identity for cache keys: the weights if known, else the servers.

    Raises UserError if a cache could not distinguish today's weights from tomorrow's.
    """
    if weights_digest is not None:
        if not isinstance(weights_digest, str) or not weights_digest:
            raise UserError(
                f"weights_digest is {weights_digest!r}; give a string as name of the weights"
            )
        return {"weights": weights_digest}
    local = next(
        (transport.base_url for transport in transports if is_local(transport.base_url)), None
    )
    if has_cache and local is not None:
        raise UserError(
            f"cache: {local} may later serve other weights, and the cache would return outdated "
            "replies. Set weights_digest to a name for these weights (VLLMServer.weights_digest() "
            "computes one)"
        )
    return sorted(
        (transport.identity for transport in transports),
        key=lambda identity: sorted(identity.items()),
    )


def _proxy(base_url: str) -> str | None:
    """Return the environment's proxy for this server."""
    parts = urlsplit(base_url)
    if urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(parts.scheme) or proxies.get("all")
