"""One request for a text completion of token ids (POST /completions), whole or as a stream that can be ended."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec

from ttrl.errors import RequestError
from ttrl.rollouts.client.choices import UNKNOWN_LOGPROB
from ttrl.rollouts.client.http_errors import timeout_error
from ttrl.rollouts.client.transport import Transport
from ttrl.rollouts.client.wire import failure, loads

STREAM_INTERVAL = 8
"""Tokens per chunk of a stream: each chunk costs the client, and only their number is looked at."""


class Piece(msgspec.Struct):
    """What one request brought."""

    text: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list)
    tokens: list[str] = msgspec.field(default_factory=list)
    logprobs: list[float] = msgspec.field(default_factory=list)
    finish_reason: str | None = None
    """None where the stream was ended by us."""
    stop_reason: int | str | None = None
    completion_id: str = ""
    created: int = 0
    model: str = ""
    cached_tokens: int | None = None


class _Logprobs(msgspec.Struct):
    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Answer)


async def ask(
    transport: Transport,
    body: Mapping[str, Any],
    *,
    on_tokens: Callable[[int], None] | None,
    cut: asyncio.Event | None,
    stall_timeout: float,
) -> Piece:
    """One attempt; streamed only where it may be cut. `body` asks for token ids, one choice.

    stall_timeout: seconds without anything new in a stream that has begun. Raises RequestError.
    """
    piece = Piece()
    if cut is None:
        _add(piece, await transport.post("/completions", body), transport, on_tokens)
        if piece.finish_reason is None:
            raise RequestError(f"{transport.base_url}: a completion without finish_reason", "malformed")
        return piece
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}, "stream_interval": STREAM_INTERVAL}
    async with transport.stream("/completions", streamed) as chunks, _until(chunks, cut, stall_timeout, transport) as parts:
        rest = b""
        async for part in parts:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                if data == b"[DONE]":
                    break
                if data:
                    _add(piece, data, transport, on_tokens)
    if piece.finish_reason is None and not cut.is_set():
        raise RequestError(f"{transport.base_url}: the stream ended in its middle", "connection")
    return piece


def _add(piece: Piece, data: bytes, transport: Transport, on_tokens: Callable[[int], None] | None) -> None:
    try:
        answer = _decoder.decode(data)
    except ValueError:
        try:  # NaN and the like, which only Python reads
            answer = msgspec.convert(loads(data), _Answer, strict=False)
        except ValueError as error:
            raise RequestError(f"{transport.base_url}: the server's answer cannot be read: {error}", "malformed") from error
    if answer.error is not None:
        raise failure(answer.error, transport.base_url)
    piece.completion_id, piece.created = answer.id or piece.completion_id, answer.created or piece.created
    piece.model = answer.model or piece.model
    if answer.usage is not None and answer.usage.prompt_tokens_details is not None:
        piece.cached_tokens = answer.usage.prompt_tokens_details.cached_tokens
    for choice in answer.choices:
        if choice.token_ids is None:
            raise RequestError(f"{transport.base_url}: the server returned no token_ids; partial rollouts need vLLM", "malformed")
        piece.text += choice.text
        piece.token_ids += choice.token_ids
        if choice.logprobs is not None:
            piece.tokens += choice.logprobs.tokens
            piece.logprobs += [UNKNOWN_LOGPROB if value is None else value for value in choice.logprobs.token_logprobs]
        piece.finish_reason, piece.stop_reason = choice.finish_reason, choice.stop_reason
        if on_tokens is not None and choice.token_ids:
            on_tokens(len(choice.token_ids))


@contextlib.asynccontextmanager
async def _until(
    chunks: AsyncIterator[bytes], cut: asyncio.Event, stall_timeout: float, transport: Transport
) -> AsyncIterator[AsyncIterator[bytes]]:
    """The chunks as they come, until `cut` is set. Nothing is left running behind it."""
    stopped = asyncio.ensure_future(cut.wait())
    pending: set[asyncio.Future[Any]] = {stopped}

    async def read() -> AsyncIterator[bytes]:
        begun = False
        while not cut.is_set():
            coming = asyncio.ensure_future(anext(chunks, None))
            pending.add(coming)
            patience = stall_timeout if begun else transport.read_timeout
            await asyncio.wait({coming, stopped}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                if cut.is_set():
                    return
                if not begun:
                    raise timeout_error(transport.base_url, patience)
                raise RequestError(f"{transport.base_url}: the stream stalled for {stall_timeout:g} s", "stall")
            pending.discard(coming)
            part = coming.result()
            if part is None:
                return
            begun = True
            yield part

    try:
        yield read()
    finally:
        for future in pending:
            future.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
