"""Read streams of chat completions: server-sent events into chunks, chunks into a completion, until
it ends, stalls or is ended.
"""

import asyncio
import inspect
import json
from collections.abc import AsyncIterable, Callable, Mapping
from typing import Any, Protocol

from openai import BaseModel
from openai.types.chat import ChatCompletion

from ttrl.errors import RequestError
from ttrl.rollouts.client.assembly import LiveCompletion, OnChunk
from ttrl.rollouts.client.choices import chat_completion
from ttrl.rollouts.client.http_errors import timeout_error, too_large
from ttrl.rollouts.client.transport import Transport
from ttrl.rollouts.client.wire import (
    Answer,
    Chunk,
    decoded_chunk,
    encoded,
    loads,
    most_bytes,
    read_answers,
)
from ttrl.text import present

LAST_BYTES = 0.25
"""Seconds to wait after [DONE] for the end of the HTTP body, to reuse the connection."""


class Events:
    """Splits a stream of bytes, cut anywhere, into the data of its server-sent events."""

    def __init__(self) -> None:
        # Of an incomplete event: many parts are joined only once.
        self._parts: list[bytes] = []
        self._held = b""
        self._is_first = True

    def feed(self, part: bytes) -> list[bytes]:
        """Return the data of the events complete by now."""
        part = self._held + part
        self._held = b""
        if self._is_first:
            if len(part) < 3:
                self._held = part
                return []
            part = part.removeprefix(b"\xef\xbb\xbf")
            self._is_first = False
        if b"\r" in part:  # escaped within JSON, so it only ends lines
            if part.endswith(b"\r"):  # perhaps half of a line end
                part = part[:-1]
                self._held = b"\r"
            part = part.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if self._parts:
            before = self._parts[-1][-1:]
        else:
            before = b""
        self._parts += [part] if part else []
        if b"\n\n" not in before + part:
            return []
        *blocks, rest = b"".join(self._parts).split(b"\n\n")
        self._parts = [rest] if rest else []
        return [data for block in blocks if (data := _data(block))]

    def end(self) -> tuple[bytes, bytes]:
        """Return (data of an event without its empty line, all remaining bytes)."""
        rest = b"".join([*self._parts, self._held])
        return _data(rest.replace(b"\r", b"\n")), rest


def _data(block: bytes) -> bytes:
    """Return the content of one event's `data` lines."""
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    lines = [
        line[5:] for line in block.split(b"\n") if line.startswith(b"data:") or line == b"data"
    ]
    return b"\n".join(line.removeprefix(b" ") for line in lines)


class _Watch:
    """Stops reading a silent stream, or when `cut` is set."""

    def __init__(self, first: float | None, later: float, cut: asyncio.Event | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit = first
        self._later = later
        self._cut = cut
        self.scope = asyncio.timeout(None)
        self.has_begun = False
        self._is_over = False
        self._last = self._loop.time()
        self._doubted = -1.0
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Task[bool] | None = None

    async def __aenter__(self) -> "_Watch":
        self._arm()
        if self._cut is not None:
            self._waiter = self._loop.create_task(self._cut.wait())
            self._waiter.add_done_callback(self._end)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._waiter is not None:
            self._waiter.cancel()
            await asyncio.gather(self._waiter, return_exceptions=True)

    def heard(self) -> None:
        """Record received bytes. Must be cheap: it is called for every part."""
        self._last = self._loop.time()
        if not self.has_begun:
            self.has_begun = True
            self.limit(self._later)

    def limit(self, seconds: float) -> None:
        """Set the limit on seconds of silence from now on."""
        self._limit = seconds
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._limit is None:
            self._timer = None
        else:
            self._timer = self._loop.call_at(self._last + self._limit, self._look)

    def _look(self) -> None:
        assert self._limit is not None
        if self._loop.time() < self._last + self._limit:
            self._arm()
        # Perhaps our side did not read: a busy loop runs timers first.
        elif self._doubted != self._last:
            self._doubted = self._last
            self._timer = self._loop.call_later(min(0.1, self._limit / 10), self._look)
        else:
            self._end()

    def _end(self, _: object = None) -> None:
        # The cut may come in the same turn of the event loop as the stream's end.
        if self._is_over or self.scope.expired():
            return
        if self._waiter is None or not self._waiter.cancelled():
            self.scope.reschedule(self._loop.time())


async def stream_answers(
    transport: Transport,
    body: Mapping[str, Any],
    n: int,
    *,
    stall_timeout: float,
    on_chunk: OnChunk | None = None,
    on_tokens: Callable[[int], None] | None = None,
    cut: asyncio.Event | None = None,
) -> list[Answer | None]:
    """Make one streamed request and return n entries in order, None for empty choices.

    on_chunk(chunk, completion): sees every chunk; the names are those of openai's
        ChatCompletionChunk and ChatCompletion. On StopIteration, the choices marked
        `stopped_early`, or else those of the chunk, end with the finish_reason "stopped_early".
        With the last of them the stream is closed, to stop the server. Other exceptions end the
        stream and pass through.
    on_tokens(k): k more tokens have arrived.
    cut: when set, the stream is closed; unfinished choices have the finish_reason null.
    stall_timeout: seconds without a byte, after the first one, before the stream counts as failed.

    Raises RequestError.
    """
    live = LiveCompletion(n, on_chunk, on_tokens)
    place = transport.base_url
    if cut is not None and cut.is_set():
        return live.answers()

    def take(data: bytes) -> bool:
        return live.take(decoded_chunk(data, place))

    events = await read_events(
        transport, "/chat/completions", body, take, live, stall_timeout=stall_timeout, cut=cut
    )
    if events is None:
        return live.answers()
    data, rest = events.end()
    # No stream at all: the server cannot stream, or this is a web page.
    if not live.choices and not data and rest.strip():
        answers = read_answers(rest, n, place)
        if on_tokens is not None:
            on_tokens(
                sum(answer.completion_tokens or 0 for answer in answers if answer is not None)
            )
        return answers
    # Otherwise it is half an event: the check below finds missing parts.
    if data != b"[DONE]" and loads(data) is not None:
        take(data)
    if not live.is_finished:
        raise broken_stream(place, bool(live.choices))
    return live.answers()


class Assembly(Protocol):
    """A result assembled from a stream."""

    @property
    def is_finished(self) -> bool: ...  # all started choices have ended

    @property
    def is_complete(self) -> bool: ...  # nothing more can come


async def read_events(
    transport: Transport,
    path: str,
    body: Mapping[str, Any],
    take: Callable[[bytes], bool],
    whole: Assembly,
    *,
    stall_timeout: float,
    cut: asyncio.Event | None,
) -> Events | None:
    """POST `body` and pass the data of each event to `take`, until it returns True.

    whole: the result built by `take`; a connection broken or silent after its end is no failure.

    Returns the rest of the stream at its end; None if it was ended, or broke with everything
    received. Raises RequestError, and the exceptions of `take`.
    """
    place = transport.base_url
    first = transport.read_timeout
    events = Events()
    done = False
    size = 0
    most = most_bytes(body)
    try:
        async with (
            _Watch(first, stall_timeout, cut) as watch,
            watch.scope,
            transport.stream(path, body) as parts,
        ):
            async for part in parts:
                watch.heard()
                size = size + len(part)
                if size > most:
                    raise too_large(place, most)
                for data in events.feed(part):
                    if done or data == b"[DONE]":
                        done = True
                    elif take(data):
                        return None
                if done:
                    watch.limit(LAST_BYTES)
                if cut is not None and cut.is_set():
                    return None
        return events
    except TimeoutError:
        if not watch.scope.expired():
            raise
        if cut is not None and cut.is_set():
            return None
        if not (done or whole.is_complete):
            if not watch.has_begun:
                raise timeout_error(place, first) from None
            raise RequestError(
                f"{place}: the stream stalled for {stall_timeout:g} s", "stall"
            ) from None
        if not whole.is_finished:  # [DONE] by itself ends no completion
            raise broken_stream(place, has_begun=True) from None
        return None
    except RequestError as error:
        if error.kind == "connection" and whole.is_finished and (done or whole.is_complete):
            return None
        raise


def broken_stream(place: str, has_begun: bool) -> RequestError:
    """Return the error of a stream with an early end."""
    if has_begun:
        what = "in the middle of a completion"
    else:
        what = "before the first chunk"
    return RequestError(f"{place}: the stream ended {what}", "connection")


async def consume_chat_completion_stream(
    stream: AsyncIterable[Any], on_chunk: OnChunk | None = None, *, n: int = 1
) -> ChatCompletion:
    """Assemble a stream of chat completion chunks, with token ids and log-probabilities.

        stream = await client.chat.completions.create(…, stream=True, logprobs=True)
        completion = await consume_chat_completion_stream(stream)

    stream: the openai client's AsyncStream, or any other async iterable of ChatCompletionChunk or
        of dicts like it. It is closed.
    on_chunk(chunk, completion): sees every chunk, and the completion so far. On StopIteration, the
        choices marked `stopped_early`, or else those of the chunk, end with the finish_reason
        "stopped_early".
    n: choices requested; once `on_chunk` has ended the last of them, no more is read.

    Raises RequestError if the stream ends before its completion, or holds anything but chunks;
    exceptions of the stream or `on_chunk` pass through.

    >>> async def chunks():
    ...     yield {"choices": [{"index": 0, "delta": {"content": "2 + 2"}}]}
    ...     yield {"choices": [{"index": 0, "delta": {"content": " = 4"}, "finish_reason": "stop"}]}
    >>> completion = asyncio.run(consume_chat_completion_stream(chunks()))
    >>> completion.choices[0].message.content
    '2 + 2 = 4'
    """
    live = LiveCompletion(n, on_chunk)
    try:
        async for item in stream:
            if isinstance(item, Chunk):
                chunk = item
            else:
                chunk = decoded_chunk(_chunk_json(item), "stream")
            if live.take(chunk, shown=item):
                break
    finally:
        close = getattr(stream, "close", None) or getattr(stream, "aclose", None)
        if close is not None:
            closing = close()
            if inspect.isawaitable(closing):
                await closing
    if not live.is_finished:
        raise broken_stream("stream", bool(live.choices))
    return chat_completion(present(live.answers(len(live.choices))))


def _chunk_json(item: Any) -> bytes:
    if not isinstance(item, BaseModel):
        return encoded(item)
    try:
        return item.model_dump_json(exclude_unset=True, warnings=False).encode()
    except ValueError:  # halves of surrogate pairs
        return json.dumps(item.model_dump(exclude_unset=True, warnings=False)).encode()
