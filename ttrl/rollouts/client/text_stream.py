"""Request a text completion of token ids (POST /completions), whole or as a stoppable stream."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ttrl.errors import RequestError
from ttrl.messages import JsonObject
from ttrl.rollouts.client.attempts import STREAM_INTERVAL
from ttrl.rollouts.client.choices import UNKNOWN_LOGPROB
from ttrl.rollouts.client.stream import broken_stream, read_events
from ttrl.rollouts.client.transport import Transport
from ttrl.rollouts.client.wire import (
    Answer,
    Chunk,
    ChunkChoice,
    Delta,
    Usage,
    encoded,
    failure,
    loads,
)


class Piece(msgspec.Struct):
    """The result of one request."""

    text: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list)
    tokens: list[str] = msgspec.field(default_factory=list)
    logprobs: list[float] = msgspec.field(default_factory=list)
    finish_reason: str | None = None
    """None if we ended the stream."""
    stop_reason: int | str | None = None
    completion_id: str = ""
    created: int = 0
    model: str = ""
    cached_tokens: int | None = None
    prompt_token_ids: list[int] | None = None
    """If the server returns them."""

    @property
    def is_finished(self) -> bool:
        """The completion has ended."""
        return self.finish_reason is not None

    is_complete = is_finished


class _Logprobs(msgspec.Struct):
    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None


class _Answer(msgspec.Struct):
    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Answer)


async def ask(
    transport: Transport,
    body: Mapping[str, Any],
    *,
    on_tokens: Callable[[int], None],
    cut: asyncio.Event | None,
    stall_timeout: float,
    ends: Callable[[Piece], bool] | None = None,
) -> Piece:
    """Make one attempt; streamed only if it may be cut or ended. `body` asks for token ids, one
    choice.

    stall_timeout: seconds without news in a started stream. ends: sees the piece after each token,
    and tells whether to end it there. Raises RequestError, and the exceptions of `ends`.
    """
    piece = Piece()
    if cut is None and ends is None:
        _add(piece, await transport.post("/completions", body), transport, on_tokens)
        if piece.finish_reason is None:
            raise RequestError(
                f"{transport.base_url}: a completion without finish_reason", "malformed"
            )
        return piece
    streamed = {
        **body,
        "stream": True,
        "stream_options": {"include_usage": True},
        "stream_interval": STREAM_INTERVAL if ends is None else 1,
    }

    def take(data: bytes) -> bool:
        had = len(piece.token_ids)
        _add(piece, data, transport, on_tokens)
        return ends is not None and len(piece.token_ids) > had and ends(piece)

    events = await read_events(
        transport, "/completions", streamed, take, piece, stall_timeout=stall_timeout, cut=cut
    )
    if events is not None and not piece.is_finished:
        raise broken_stream(transport.base_url, bool(piece.token_ids))
    return piece


def chat_answer(piece: Piece, prompt_ids: list[int] | None, opening: str, logprobs: bool) -> Answer:
    """Return a text completion in the form of a chat completion."""
    entries = _entries(piece)
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": piece.text},
        "logprobs": {"content": entries} if logprobs else None,
        "finish_reason": piece.finish_reason,
        "stop_reason": piece.stop_reason,
        "token_ids": piece.token_ids,
    }
    if opening:
        choice["opening"] = opening
    return Answer(
        choice=encoded(choice),
        completion_id=piece.completion_id,
        created=piece.created,
        model=piece.model,
        prompt_token_ids=prompt_ids,
        prompt_tokens=None if prompt_ids is None else len(prompt_ids),
        cached_tokens=piece.cached_tokens,
        completion_tokens=len(piece.token_ids),
    )


def chat_chunk(piece: Piece, first: int, text: str, logprobs: bool) -> Chunk:
    """Return the tokens from `first` on, and their text, in the form of a chat stream's chunk."""
    part = ChunkChoice(delta=Delta(content=text), token_ids=piece.token_ids[first:])
    if logprobs:
        part.raw_logprobs = msgspec.Raw(encoded({"content": _entries(piece, first)}))
    return Chunk(choices=[part])


def _entries(piece: Piece, first: int = 0) -> list[JsonObject]:
    """Return the log-probabilities from the token `first` on in the form of chat completions."""
    return [
        {
            "token": token,
            "logprob": logprob if logprob == logprob else UNKNOWN_LOGPROB,  # JSON has no NaN
            "bytes": list(token.encode("utf-8", "replace")),
            "top_logprobs": [],
        }
        for token, logprob in zip(piece.tokens[first:], piece.logprobs[first:], strict=True)
    ]


def _add(piece: Piece, data: bytes, transport: Transport, on_tokens: Callable[[int], None]) -> None:
    try:
        answer = _decoder.decode(data)
    except ValueError:
        try:  # NaN and the like; only Python reads them
            answer = msgspec.convert(loads(data), _Answer, strict=False)
        except ValueError as error:
            raise RequestError(
                f"{transport.base_url}: the server's answer cannot be read: {error}", "malformed"
            ) from error
    if answer.error is not None:
        raise failure(answer.error, transport.base_url)
    piece.completion_id = answer.id or piece.completion_id
    piece.created = answer.created or piece.created
    piece.model = answer.model or piece.model
    if answer.usage is not None and answer.usage.cached_tokens is not None:
        piece.cached_tokens = answer.usage.cached_tokens
    for choice in answer.choices:
        if choice.token_ids is None:
            raise RequestError(
                f"{transport.base_url}: the server returned no token_ids; text completions need "
                "vLLM",
                "malformed",
            )
        piece.text += choice.text
        piece.token_ids += choice.token_ids
        if choice.logprobs is not None:
            piece.tokens += choice.logprobs.tokens
            piece.logprobs += [
                UNKNOWN_LOGPROB if value is None else value
                for value in choice.logprobs.token_logprobs
            ]
        piece.finish_reason = choice.finish_reason
        piece.stop_reason = choice.stop_reason
        piece.prompt_token_ids = choice.prompt_token_ids or piece.prompt_token_ids
        if choice.token_ids:
            on_tokens(len(choice.token_ids))
