"""Send requests through the caller's own OpenAI client, with its settings, hooks, proxies and
credentials.
"""

import contextlib
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import openai
from openai import AsyncOpenAI

from ttrl.errors import RequestError
from ttrl.rollouts.client.http_errors import (
    collected,
    connection_error,
    root_of,
    status_error,
    timeout_error,
)
from ttrl.rollouts.client.wire import most_bytes
from ttrl.text import one_line

_RAW = "X-Stainless-Raw-Response"
"""The openai client's header for requests with unparsed answers."""


class ClientTransport:
    """Sends requests through an unchanged openai client; only parsing and retries are ours."""

    read_timeout: float | None = None  # the client's own timeouts hold

    def __init__(self, client: AsyncOpenAI) -> None:
        self._client: Any = client
        self.base_url = str(client.base_url).rstrip("/")
        given = {
            name: getattr(client, name)
            for name in ("organization", "project")
            if getattr(client, name)
        }
        self.identity: dict[str, str] = {"base_url": self.base_url, **given}

    def __repr__(self) -> str:
        return f"ClientTransport(base_url={self.base_url!r})"

    def _options(self, **more: Any) -> dict[str, Any]:
        return {"headers": {_RAW: "stream"}, "max_retries": 0, **more}

    def _url(self, path: str, root: bool) -> str:
        """Return the whole address above /v1; below it, the path, for the client to complete."""
        if root:
            return root_of(self.base_url) + path
        return path

    async def _whole(self, response: Any, most: int) -> bytes:
        try:
            return await collected(response.http_response.aiter_bytes(), most, self.base_url)
        finally:
            await response.http_response.aclose()

    async def post(self, path: str, body: Mapping[str, Any], *, root: bool = False) -> bytes:
        with self._explaining():
            response: Any = await self._client.post(
                self._url(path, root), cast_to=object, body=dict(body), options=self._options()
            )
            return await self._whole(response, most_bytes(body))

    async def get(self, path: str, *, root: bool = False, timeout: float = 10.0) -> bytes:
        with self._explaining(timeout):
            response: Any = await self._client.get(
                self._url(path, root), cast_to=object, options=self._options(timeout=timeout)
            )
            return await self._whole(response, most_bytes(None))

    @contextlib.asynccontextmanager
    async def stream(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        with self._explaining():
            response: Any = await self._client.post(
                path, cast_to=object, body=dict(body), options=self._options()
            )
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
        """Do nothing: the client belongs to the caller."""

    @contextlib.contextmanager
    def _explaining(self, timeout: float | None = None) -> Any:
        place = self.base_url
        try:
            yield
        except openai.APIStatusError as error:
            if isinstance(self._client.api_key, str):
                key = self._client.api_key
            else:
                key = ""
            raise status_error(
                place, error.status_code, error.response.content, error.response.headers, key
            ) from error
        except openai.APITimeoutError as error:
            raise timeout_error(
                place, timeout if timeout is not None else self._seconds()
            ) from error
        except openai.APIConnectionError as error:
            raise connection_error(place, _root_cause(error)) from error
        # No key, no credentials: the client failed before sending anything.
        except openai.OpenAIError as error:
            raise RequestError(
                f"{place}: the client could not send the request: {one_line(str(error))}", "status"
            ) from error
        except _http_errors() as error:
            if "Timeout" in type(error).__name__:
                raise timeout_error(
                    place, timeout if timeout is not None else self._seconds()
                ) from error
            if "Decoding" in type(error).__name__:
                raise RequestError(
                    f"{place}: the server's answer cannot be read: {one_line(str(error))}",
                    "malformed",
                ) from error
            why = f"{type(error).__name__}: {error}"
            raise RequestError(
                f"{place}: the connection broke: {one_line(why)}", "connection"
            ) from error

    def _seconds(self) -> float | None:
        timeout = self._client.timeout
        seconds = getattr(timeout, "read", timeout)
        if isinstance(seconds, int | float):
            return seconds
        return None


def _root_cause(error: BaseException) -> BaseException:
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return error


def _http_errors() -> tuple[type[Exception], ...]:
    """Return the errors of the HTTP library loaded by the openai client."""
    modules = (sys.modules.get("httpx"), sys.modules.get("httpx2"))
    return tuple(module.RequestError for module in modules if module is not None)
