"""Requests over aiohttp, which costs the client least."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from ttrl.errors import RequestError
from ttrl.rollouts.client.direct_stream import BadHTTPError, Connection, NotPlain, Refused, Sink, address_of
from ttrl.rollouts.client.http_errors import connection_error, root_of, status_error, timeout_error
from ttrl.rollouts.client.wire import encoded, short

READ_TIMEOUT = 3600.0
"""Seconds without a byte, for servers given as a base URL: a long answer that is not streamed takes as long as it takes."""
CONNECT_TIMEOUT = 30.0
KEEP_ALIVE = 4.0
"""Seconds; uvicorn closes after 5: a request must not be sent into a connection that the server is just closing."""


@dataclass(eq=False)
class HTTPTransport:
    """aiohttp: one session, made in the loop that first needs it, without a limit of its own on connections."""

    base_url: str
    headers: dict[str, str] = field(repr=False)
    identity: dict[str, str]
    query: str = field(default="", repr=False)
    """Appended to every URL, encoded already."""
    connect_timeout: float | None = CONNECT_TIMEOUT
    read_timeout: float | None = READ_TIMEOUT
    proxy: str | None = field(default=None, repr=False)  # it may hold a password
    ssl_context: ssl.SSLContext | None = field(default=None, repr=False)
    _session: aiohttp.ClientSession | None = field(default=None, init=False, repr=False)
    _address: tuple[str, int] | None = field(default=None, init=False, repr=False)
    _idle: list[Connection] = field(default_factory=list, init=False, repr=False)
    """Connections for streams that no stream uses."""

    def __post_init__(self) -> None:
        self.headers = {"Content-Type": "application/json", "Accept": "application/json", **self.headers}
        self._address = address_of(self.base_url) if self.proxy is None else None

    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=KEEP_ALIVE,
                ssl=self.ssl_context if self.ssl_context is not None else True,
                socket_factory=_keep_alive_socket,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=self.headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.connect_timeout, sock_read=self.read_timeout),
                auto_decompress=True,
                read_bufsize=2**18,
            )
        return self._session

    def _url(self, path: str, root: bool = False) -> str:
        url = (root_of(self.base_url) if root else self.base_url) + path
        return f"{url}?{self.query}" if self.query else url

    async def post(self, path: str, body: Mapping[str, Any], *, root: bool = False) -> bytes:
        return await self._whole(lambda: self.session().post(self._url(path, root), data=encoded(body), proxy=self.proxy))

    async def get(self, path: str, *, root: bool = False, timeout: float = 10.0) -> bytes:
        limits = aiohttp.ClientTimeout(total=timeout)
        return await self._whole(lambda: self.session().get(self._url(path, root), timeout=limits, proxy=self.proxy), timeout)

    async def _whole(self, send: Callable[[], Any], timeout: float | None = None) -> bytes:
        try:
            async with send() as response:
                data = await response.read()
                if not 200 <= response.status < 300:
                    raise self._refusal(response.status, data, response.headers)
                return data
        except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
            raise self.explained(error, timeout) from error

    async def feed(self, path: str, body: Mapping[str, Any], sink: Sink) -> None:
        """Hands the bytes of a successful answer to `sink` as they come, until it returns True. Raises what it raises."""
        if self._address is not None:
            try:
                await self._feed_directly(self._request(path, body), sink)
                return
            except NotPlain:
                self._address = None
            except Refused as refused:
                raise self._refusal(refused.status, refused.body, refused.headers) from None
            except BadHTTPError as error:
                raise RequestError(f"{self.base_url}: the server's answer is no HTTP: {error}", "malformed") from error
        async with self.stream(path, body) as parts:
            async for part in parts:
                if sink(part):
                    return

    def _request(self, path: str, body: Mapping[str, Any]) -> bytes:
        """A whole HTTP request."""
        data, url = encoded(body), urlsplit(self._url(path))
        target = f"{url.path}?{url.query}" if url.query else url.path
        headers = {**self.headers, "Host": url.netloc, "Accept": "text/event-stream, application/json"}
        headers |= {"Accept-Encoding": "identity", "Content-Length": str(len(data))}
        lines = [f"POST {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        assert not any("\r" in line or "\n" in line for line in lines), "a header with a line end"
        return "\r\n".join([*lines, "\r\n"]).encode() + data

    async def _feed_directly(self, request: bytes, sink: Sink) -> None:
        while True:
            connection, is_new = await self._connection()
            try:
                keep = await connection.request(request, sink)
            except Refused:
                connection.transport.close()
                raise
            except OSError as error:
                connection.transport.abort()
                if error is connection.sink_error:
                    raise
                if not is_new and not connection.has_answered:
                    continue  # the server closed it while it was idle
                raise self.explained(error) from error
            except BaseException:
                connection.transport.abort()
                raise
            if keep:
                connection.free_since = asyncio.get_running_loop().time()
                self._idle.append(connection)
            else:
                connection.transport.abort()
            return

    async def _connection(self) -> tuple[Connection, bool]:
        """(an idle one or a new one, whether it is new)."""
        loop = asyncio.get_running_loop()
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing() and loop.time() - connection.free_since < KEEP_ALIVE:
                return connection, False
            connection.transport.abort()
        if self._address is None:  # found out by another stream, while this one had an idle connection that was closed
            raise NotPlain
        try:
            async with asyncio.timeout(self.connect_timeout):
                _, made = await loop.create_connection(lambda: Connection(_KEEP_ALIVE_OPTIONS), *self._address)
        except TimeoutError as error:  # ours, or the kernel's own
            limit = self.connect_timeout
            raise connection_error(self.base_url, error if limit is None else f"none within {limit:g} s") from error
        except OSError as error:
            raise connection_error(self.base_url, error) from error
        return made, True

    @contextlib.asynccontextmanager
    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[AsyncIterator[bytes]]:
        # aiohttp would set a new timer for every read; the reader of the stream watches it at a fraction of that cost.
        limits = aiohttp.ClientTimeout(total=None, sock_connect=self.connect_timeout)
        headers = {"Accept": "text/event-stream, application/json"}
        opening = self.session().post(self._url(path), data=encoded(body), headers=headers, timeout=limits, proxy=self.proxy)
        async with contextlib.AsyncExitStack() as stack:
            try:
                response = await stack.enter_async_context(opening)
                if not 200 <= response.status < 300:
                    async with asyncio.timeout(self.read_timeout):
                        raise self._refusal(response.status, await response.read(), response.headers)
            except (aiohttp.ClientError, OSError, ValueError) as error:
                raise self.explained(error) from error
            yield _Parts(self, response.content)

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().transport.abort()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _refusal(self, status: int, data: bytes, headers: Mapping[str, str]) -> RequestError:
        key = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return status_error(self.base_url, status, data, headers, key)

    def explained(self, error: Exception, timeout: float | None = None) -> RequestError:
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return connection_error(self.base_url, f"none within {self.connect_timeout:g} s")
        if isinstance(error, TimeoutError):
            return timeout_error(self.base_url, timeout if timeout is not None else self.read_timeout)
        if isinstance(error, aiohttp.ClientConnectorError):
            inner = error.os_error if error.os_error is not None else error
            return connection_error(self.base_url, inner)
        if isinstance(error, aiohttp.ClientResponseError):
            return RequestError(f"{self.base_url}: the server's answer is no HTTP: {short(str(error))}", "malformed")
        if isinstance(error, aiohttp.ClientPayloadError) and isinstance(error.__cause__, aiohttp.ContentTypeError | ValueError):
            return RequestError(f"{self.base_url}: the server's answer cannot be read: {short(str(error))}", "malformed")
        why = f"{type(error).__name__}: {error}"
        return RequestError(f"{self.base_url}: the connection broke: {short(why)}", "connection")


class _Parts:
    """The bytes of a stream as they come. No generator: one that is left early would be closed by a task of its own."""

    __slots__ = ("_read", "_transport")

    def __init__(self, transport: HTTPTransport, content: aiohttp.StreamReader) -> None:
        self._transport, self._read = transport, content.readany

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
    """A machine that is gone closes no connection: the kernel finds it out, and the request fails after two minutes."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    with contextlib.suppress(OSError):  # a convenience only
        for name, value in _KEEP_ALIVE_OPTIONS:
            made.setsockopt(*name, value)
    return made
