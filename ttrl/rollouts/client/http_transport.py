"""Send requests over aiohttp, to servers given by address.

Client CPU per token, 64 tokens a completion (tools/bench_client.py): 2.2 µs for 16 samples of one
request, 12 µs for one; streamed with 8 tokens a chunk 6 and 19 µs. An openai client takes three to
six times as much. Our own protocol instead of aiohttp's reader saves streams 15 to 40 %, not worth
its 300 lines.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ttrl.errors import RequestError
from ttrl.rollouts.client.http_errors import (
    collected,
    connection_error,
    root_of,
    status_error,
    timeout_error,
)
from ttrl.rollouts.client.wire import encoded, most_bytes
from ttrl.system.tracing import trace_headers
from ttrl.text import one_line

READ_TIMEOUT = 3600.0
"""Seconds without a byte, for servers given as a base URL: a long answer without streaming may take
any time.
"""
CONNECT_TIMEOUT = 30.0
KEEP_ALIVE = 4.0
"""Seconds; uvicorn closes after 5: no request must go into a connection the server is just
closing.
"""
_REFUSAL_BYTES = 2**20


@dataclass(eq=False)
class HTTPTransport:
    """One server by its address: one aiohttp session, made in the first loop using it, without a
    limit on connections.
    """

    base_url: str
    headers: dict[str, str] = field(repr=False)
    identity: dict[str, str]
    proxy: str | None = field(default=None, repr=False)  # it may hold a password
    read_timeout: float | None = READ_TIMEOUT
    is_address: bool = False
    """Only an address was given; its key is OPENAI_API_KEY's."""
    _session: aiohttp.ClientSession | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            **self.headers,
        }

    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEEP_ALIVE, socket_factory=_keep_alive_socket
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=self.headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=True,
                read_bufsize=2**18,
            )
        return self._session

    def _url(self, path: str, root: bool = False) -> str:
        return (root_of(self.base_url) if root else self.base_url) + path

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        root: bool = False,
        timeout: float | None = None,
    ) -> bytes:
        """Make a request as specified by `Transport.post`; body: None for a GET."""
        method, data = ("GET", None) if body is None else ("POST", encoded(body))
        limits = aiohttp.ClientTimeout(
            total=timeout, sock_connect=CONNECT_TIMEOUT, sock_read=self.read_timeout
        )
        url = self._url(path, root)
        try:
            async with self.session().request(
                method,
                url,
                data=data,
                headers=trace_headers(),
                timeout=limits,
                proxy=self.proxy,
            ) as response:
                if not 200 <= response.status < 300:
                    raise await self._refusal(response)
                return await collected(response.content.iter_any(), most_bytes(body), self.base_url)
        except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
            raise self.explained(error, timeout) from error

    async def get(self, path: str, *, root: bool = False, timeout: float = 10.0) -> bytes:
        return await self.post(path, None, root=root, timeout=timeout)

    @contextlib.asynccontextmanager
    async def stream(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        # aiohttp would set a new timer for every read; the stream's reader watches time at a
        # fraction of the cost.
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
        headers = {"Accept": "text/event-stream, application/json", **trace_headers()}
        opening = self.session().post(
            self._url(path), data=encoded(body), headers=headers, timeout=limits, proxy=self.proxy
        )
        async with contextlib.AsyncExitStack() as stack:
            try:
                response = await stack.enter_async_context(opening)
                if not 200 <= response.status < 300:
                    async with asyncio.timeout(self.read_timeout):
                        raise await self._refusal(response)
            except (aiohttp.ClientError, OSError, ValueError) as error:
                raise self.explained(error) from error
            yield _Parts(self, response.content)

    async def close(self) -> None:
        session = self._session
        self._session = None
        if session is not None:
            await session.close()

    async def _refusal(self, response: aiohttp.ClientResponse) -> RequestError:
        key = self.headers.get("Authorization", "").removeprefix("Bearer ")
        data = b""
        with contextlib.suppress(RequestError):  # no refusal is this long
            data = await collected(response.content.iter_any(), _REFUSAL_BYTES, self.base_url)
        return status_error(
            self.base_url, response.status, data, response.headers, key, address=self.is_address
        )

    def explained(self, error: Exception, timeout: float | None = None) -> RequestError:
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return connection_error(self.base_url, f"none within {CONNECT_TIMEOUT:g} s")
        if isinstance(error, TimeoutError):
            return timeout_error(
                self.base_url, timeout if timeout is not None else self.read_timeout
            )
        if isinstance(error, aiohttp.ClientConnectorError):
            return connection_error(self.base_url, error.os_error or error)
        if isinstance(error, aiohttp.ClientResponseError):
            return RequestError(
                f"{self.base_url}: the server's answer is not HTTP: {one_line(str(error))}",
                "malformed",
            )
        if isinstance(error, aiohttp.ClientPayloadError) and isinstance(
            error.__cause__, aiohttp.ContentTypeError | ValueError
        ):
            return RequestError(
                f"{self.base_url}: the server's answer cannot be read: {one_line(str(error))}",
                "malformed",
            )
        why = f"{type(error).__name__}: {error}"
        return RequestError(f"{self.base_url}: the connection broke: {one_line(why)}", "connection")


class _Parts:
    """The bytes of a stream as they arrive. Not a generator: leaving one early would close it in a
    separate task.
    """

    __slots__ = ("_read", "_transport")

    def __init__(self, transport: HTTPTransport, content: aiohttp.StreamReader) -> None:
        self._transport = transport
        self._read = content.readany

    def __aiter__(self) -> "_Parts":
        return self

    async def __anext__(self) -> bytes:
        try:
            part = await self._read()
        except (aiohttp.ClientError, OSError) as error:
            raise self._transport.explained(error) from error
        if not part:
            raise StopAsyncIteration
        return part


_KEEP_ALIVE_OPTIONS = [((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1)]
_KEEP_ALIVE_OPTIONS += [
    ((socket.IPPROTO_TCP, getattr(socket, name)), seconds)
    for name, seconds in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
    if hasattr(socket, name)
]


def _keep_alive_socket(address: Any) -> socket.socket:
    """Make a socket with keep-alive: a dead machine closes no connection, but its requests then
    fail after two minutes.
    """
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    with contextlib.suppress(OSError):  # a convenience only
        for name, value in _KEEP_ALIVE_OPTIONS:
            made.setsockopt(*name, value)
    return made
