"""Streams over plain HTTP/1.1 to a server at a numeric address, handed on from within the loop's read callback.

Where every token is a chunk, what a stream costs is not JSON but the way of a chunk through futures and tasks: asyncio's bare
protocol takes half of what a stream reader on top of it takes. Everything out of the ordinary (redirects, compressed answers) is
left to aiohttp: NotPlain says so before anything was handed on.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias
from urllib.parse import urlsplit

Sink: TypeAlias = Callable[[bytes], bool]
"""Takes bytes of the body as they come (perhaps none: something was heard); True when no more are wanted."""

_LONGEST_HEAD = 2**16
_LONGEST_SIZE_LINE = 1024


class NotPlain(Exception):  # noqa: N818 - not a failure
    """This answer is for a whole HTTP client."""


class BadHTTPError(ValueError):
    """What the server said is no HTTP."""


class Refused(Exception):  # noqa: N818 - it becomes a RequestError
    """An answer with another status than 2xx, whole."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        super().__init__(status)
        self.status, self.headers, self.body = status, headers, body


def address_of(base_url: str) -> tuple[str, int] | None:
    """Where to connect to, for http URLs with a numeric address or localhost; None for all others."""
    parts = urlsplit(base_url)
    if parts.scheme != "http" or not parts.hostname:
        return None
    if parts.hostname != "localhost":
        try:
            ipaddress.ip_address(parts.hostname)
        except ValueError:
            return None
    return parts.hostname, parts.port or 80


class Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, options: list[tuple[tuple[int, int], int]]) -> None:
        self._options = options
        self.has_answered = False
        self.sink_error: Exception | None = None
        """What the sink has raised, which is no failure of the connection."""
        self.free_since = 0.0
        self._sink: Sink | None = None
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport: asyncio.Transport = transport  # or uvloop's, which is none by its type
        sock: socket.socket | None = transport.get_extra_info("socket")
        for name, value in self._options if sock is not None else ():
            try:
                sock.setsockopt(*name, value)  # type: ignore[union-attr]
            except OSError:  # a convenience only
                break

    async def request(self, data: bytes, sink: Sink) -> bool:
        """Sends a request and hands the body on; True where the connection can be used again.

        Raises NotPlain, Refused, BadHTTPError, ConnectionError, and whatever the sink raises.
        """
        assert self._done is None
        self.has_answered = False
        if self.transport.is_closing():
            raise ConnectionResetError("the server closed the connection")
        self._done = asyncio.get_running_loop().create_future()
        self._sink, self._rest = sink, b""
        self._take: Callable[[bytes], None] = self._head
        self._refusal: tuple[int, dict[str, str], list[bytes]] | None = None
        self._keeps = False
        self._ends_with_connection = False
        self._left = 0
        self.transport.write(data)
        try:
            await self._done
        finally:
            self._done = self._sink = None
        return self._keeps and not self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self.transport.abort()  # nobody asked
            return
        self.has_answered = True
        try:
            self._take(self._rest + data if self._rest else data)
        except Exception as error:  # noqa: BLE001 - the sink's, too: they belong to the one who waits
            self._end(error)

    def connection_lost(self, error: Exception | None) -> None:
        if self._ends_with_connection_now() and error is None:
            self._finish()
        elif error is None or not isinstance(error, OSError):
            self._end(ConnectionResetError("the server closed the connection before the end of its answer"))
        else:
            self._end(error)

    def _ends_with_connection_now(self) -> bool:
        return self._done is not None and self._ends_with_connection

    def _end(self, error: Exception | None = None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._keeps = False
            self._done.set_exception(error)

    def _finish(self) -> None:
        if self._refusal is None:
            self._end()
        else:
            status, headers, body = self._refusal
            keeps = self._keeps
            self._end(Refused(status, headers, b"".join(body)))
            self._keeps = keeps

    def _hand_on(self, data: bytes) -> None:
        if self._refusal is not None:
            self._refusal[2].append(data)
            return
        assert self._sink is not None
        try:
            is_enough = self._sink(data)
        except Exception as error:
            self.sink_error = error
            raise
        if is_enough:
            self._keeps = False
            self._end()

    # The answer

    def _head(self, data: bytes) -> None:
        head, found, rest = data.partition(b"\r\n\r\n")
        if not found:
            if len(data) > _LONGEST_HEAD:
                raise BadHTTPError("its head has no end")
            self._rest = data
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        protocol, _, words = first.partition(" ")
        status = words[:3]
        if not protocol.startswith("HTTP/1.") or not (status.isascii() and status.isdigit() and len(status) == 3):
            raise BadHTTPError(f"it begins with {first[:80]!r}")
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower().strip()] = value.strip()
        self._rest = b""
        code = int(status)
        if code < 200:
            if rest:
                self._head(rest)
            return
        if 300 <= code < 400 or headers.get("content-encoding", "identity").lower() != "identity":
            raise NotPlain
        if code >= 400:
            self._refusal = (code, headers, [])
        self._keeps = protocol == "HTTP/1.1" and "close" not in headers.get("connection", "").lower()
        if "chunked" in headers.get("transfer-encoding", "").lower():
            self._take = self._chunks
        elif "content-length" in headers:
            self._left, self._take = _size(headers["content-length"], 10), self._sized
        else:
            self._take, self._ends_with_connection, self._keeps = self._hand_on, True, False
        if rest or self._take == self._sized:
            self._take(rest)

    def _sized(self, data: bytes) -> None:
        more, self._left = data[: self._left], max(0, self._left - len(data))
        self._hand_on(more)
        if not self._left:
            self._finish()

    def _chunks(self, data: bytes) -> None:
        parts, at = [], 0
        while True:
            end = data.find(b"\r\n", at)
            if end < 0:
                if len(data) - at > _LONGEST_SIZE_LINE:
                    raise BadHTTPError("a chunk without a size")
                break
            size = _size(data[at:end].partition(b";")[0].decode("latin-1"), 16)
            if size == 0:
                if data.startswith(b"\r\n", end + 2) or data.find(b"\r\n\r\n", end) >= 0:
                    if parts:
                        self._hand_on(b"".join(parts))
                    self._finish()
                    return
                break
            start, stop = end + 2, end + 2 + size
            if len(data) < stop + 2:
                break
            if not data.startswith(b"\r\n", stop):
                raise BadHTTPError("a chunk is longer than it says")
            parts.append(data[start:stop])
            at = stop + 2
        self._rest = data[at:]
        self._hand_on(parts[0] if len(parts) == 1 else b"".join(parts))


def _size(text: str, base: int) -> int:
    text = text.strip()
    if not text.isalnum():
        raise BadHTTPError(f"a size is {text[:40]!r}")
    try:
        return int(text, base)
    except ValueError:
        raise BadHTTPError(f"a size is {text[:40]!r}") from None
