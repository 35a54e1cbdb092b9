"""Decode messages between ttrl and a server: only needed parts, and nothing twice.

Choices and log-probabilities stay as the server's bytes until first use. msgspec reads standard
JSON; servers also write NaN, Infinity and halves of surrogate pairs, so Python's json is always the
second try.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ttrl.errors import RequestError
from ttrl.facts import Facts, read_facts
from ttrl.text import one_line

_NO_RAW = msgspec.Raw()
_NOTHING = (b"", b"null")
_TEXT_PARTS = ("text", "output_text", "refusal", "reasoning_text", "summary_text")
# Of a token in its own chunk, and of a log-probability; vLLM writes 400 and 130.
_TOKEN_BYTES = 2048
_SHOWN_BYTES = 512
_UNREADABLE = (ValueError, RecursionError)  # of JSON: the second for too deep nesting
_MORE_CHOICES = 64  # than requested
_LONGEST = 2**17  # tokens, if a request does not say
EXPERTS = "routed_experts_prompt_start"
"""A field of vLLM's requests. Ours set it to 0, to get the experts of each token."""
_EXPERT_BYTES = 4096  # of a token: 96 layers with 32 choices, in base64


TEXTS = ("content", "refusal", "reasoning", "reasoning_content")
"""Text fields of a message."""


class Answer(msgspec.Struct):
    """One choice of a chat completion, with its part of the response."""

    choice: bytes
    """JSON of the choice, from the server or assembled from chunks; finish_reason is null if we cut
    the stream.
    """
    completion_id: str = ""
    created: int = 0
    model: str = ""
    """The server's name of it."""
    prompt_token_ids: list[int] | None = None
    prompt_tokens: int | None = None
    """The server's count; None if it did not say."""
    cached_tokens: int | None = None
    """Prompt tokens in the server's prefix cache."""
    completion_tokens: int | None = None
    """Of this choice only; None if unknown."""
    prompt_text: str | None = None
    """The prompt rendered by the server, until `ttrl.rollouts.client.opening` has read it. It is
    not cached.
    """


# Chunks of a stream: the names are those of openai's ChatCompletionChunk.


class TopLogprob(msgspec.Struct):
    token: str = ""
    logprob: float | None = None
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] | None = None


class Logprobs(msgspec.Struct):
    content: list[TokenLogprob] | None = None
    refusal: list[TokenLogprob] | None = None


class FunctionDelta(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: FunctionDelta | None = None
    type: str | None = None


class Delta(msgspec.Struct):
    content: str | None = None
    role: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    function_call: FunctionDelta | None = None


class ChunkChoice(msgspec.Struct):
    """`logprobs` is decoded on first access."""

    index: int = 0
    delta: Delta | None = None
    raw_logprobs: msgspec.Raw = msgspec.field(name="logprobs", default=_NO_RAW)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: str | None = None
    # Never in JSON.
    decoded_logprobs: Logprobs | None = msgspec.field(name=" decoded", default=None)

    @property
    def logprobs(self) -> Logprobs | None:
        if self.decoded_logprobs is None and (raw := bytes(self.raw_logprobs)) not in _NOTHING:
            self.decoded_logprobs = decoded_logprobs(raw)
        return self.decoded_logprobs


class PromptDetails(Facts):
    cached_tokens: int | None = None


class Usage(Facts):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        if self.prompt_tokens_details is None:
            return None
        return self.prompt_tokens_details.cached_tokens


class Chunk(msgspec.Struct):
    choices: list[ChunkChoice] | None = None
    id: str | None = None
    created: int | None = None
    model: str | None = None
    object: str | None = None
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    error: msgspec.Raw = _NO_RAW


_logprobs_decoder = msgspec.json.Decoder(Logprobs)
_chunk_decoder = msgspec.json.Decoder(Chunk)


def decoded_logprobs(raw: bytes) -> Logprobs:
    """Decode log-probabilities. Raises RequestError if unreadable."""
    try:
        return _logprobs_decoder.decode(raw)
    except _UNREADABLE:
        pass
    try:
        return msgspec.convert(json.loads(raw), Logprobs, strict=False)
    except _UNREADABLE as error:
        raise RequestError(
            f"the log-probabilities in a chunk cannot be read: {error}", "malformed"
        ) from error


def decoded_chunk(data: bytes, place: str) -> Chunk:
    """Decode one event of a stream. Raises RequestError if it is unreadable or reports a
    failure.
    """
    try:
        if not data.isascii():
            data.decode()  # the decoder does not check raw parts
        chunk = _chunk_decoder.decode(data)
    except _UNREADABLE:
        chunk = _leniently(data, place)
    if chunk.error is not _NO_RAW and (error := bytes(chunk.error)) not in _NOTHING:
        raise failure(loads(error), place)
    return chunk


def text_of(content: Any) -> Any:
    """Return the text of content in parts, [{"type": "text", "text": …}]; other content unchanged.

    Parts of an answer are joined without separators.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if isinstance(part, dict) and part.get("type", "text") in _TEXT_PARTS:
            part = part.get("text")
        if isinstance(part, str):
            texts.append(part)
    return "".join(texts)


def as_texts(message: Any) -> None:
    """Join the texts of a message sent in parts, as LiteLLM and Mistral do."""
    if isinstance(message, dict):
        message.update({name: text_of(message[name]) for name in TEXTS if name in message})


def _leniently(data: bytes, place: str) -> Chunk:
    try:
        obj = json.loads(data)
        if not isinstance(obj, dict):
            raise ValueError(f"{type(obj).__name__} instead of an object")
        error = obj.pop("error", None)
        choices = obj.get("choices") or []
        for choice in choices:
            as_texts(choice.get("delta"))
        raws = [dumped(choice.pop("logprobs", None)) for choice in choices]
        chunk = msgspec.convert(obj, Chunk, strict=False)
        for choice, raw in zip(chunk.choices or (), raws, strict=True):
            choice.raw_logprobs = msgspec.Raw(raw)
        chunk.error = msgspec.Raw(dumped(error))
        return chunk
    except (ValueError, TypeError, AttributeError, RecursionError) as problem:
        shown = one_line(data.decode(errors="replace"))
        raise RequestError(
            f"{place}: a chunk of the stream cannot be read: {problem}: {shown}", "malformed"
        ) from problem


# A whole response.


class _Response(Facts):
    choices: list[msgspec.Raw] | None = None
    id: str | None = None
    created: float | None = None
    model: str | None = None
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    error: Any = None


class _Counted(msgspec.Struct):
    """The place and length of a choice."""

    index: Any = None
    token_ids: list[int] | None = None
    logprobs: msgspec.Raw = _NO_RAW


class _RawEntries(msgspec.Struct):
    content: list[msgspec.Raw] | None = None


_response_decoder = msgspec.json.Decoder(_Response)
_counted_decoder = msgspec.json.Decoder(_Counted)
_entries_decoder = msgspec.json.Decoder(_RawEntries)


def read_answers(data: bytes, n: int, place: str) -> list[Answer | None]:
    """Return the choices of a whole response, by their numbers; None for missing ones. Raises
    RequestError.
    """
    response = _response(data, place)
    if response.error is not None and not response.choices:
        raise failure(response.error, place)
    if response.choices is None:
        raise RequestError(
            f"{place}: the server's answer has no choices: "
            f"{one_line(data.decode(errors='replace'))}",
            "malformed",
        )
    # Reading each would take seconds for a million of them.
    if len(response.choices) > n + _MORE_CHOICES:
        raise RequestError(
            f"{place}: the server returned {len(response.choices)} choices instead of {n}",
            "malformed",
        )
    usage = response.usage or Usage()
    prompt = response.prompt_token_ids
    prompt_tokens = usage.prompt_tokens
    if prompt_tokens is None and prompt is not None:
        prompt_tokens = len(prompt)
    raws = [raw for raw in map(bytes, response.choices) if raw != b"null"]
    counted = _fill_in([_count(raw) for raw in raws], usage.completion_tokens)
    answers = []
    for raw, (_, tokens) in zip(raws, counted, strict=True):
        answers.append(
            Answer(
                raw,
                completion_id=response.id or "",
                created=int(response.created or 0),
                model=response.model or "",
                prompt_token_ids=prompt,
                prompt_tokens=prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=tokens,
                prompt_text=response.prompt_text,
            )
        )
    return in_order(answers, [index for index, _ in counted], n)


def _fill_in(
    counted: list[tuple[Any, int | None]], total: int | None
) -> list[tuple[Any, int | None]]:
    """Split the usage's remaining tokens among the choices without a count; the sum is then
    right.
    """
    unknown = sum(tokens is None for _, tokens in counted)
    if unknown == 0 or total is None or total < 0:
        return counted
    left = max(total - sum(tokens or 0 for _, tokens in counted), 0)
    shares = iter([left // unknown + (k < left % unknown) for k in range(unknown)])
    return [(index, next(shares) if tokens is None else tokens) for index, tokens in counted]


def _response(data: bytes, place: str) -> _Response:
    try:
        if not data.isascii():
            data.decode()
        return _response_decoder.decode(data)
    except _UNREADABLE:
        pass
    try:
        obj = json.loads(data)
    except _UNREADABLE as error:
        shown = data.decode(errors="replace").strip()
        if not shown.startswith(("{", "[")):
            raise RequestError(
                f"{place}: the server answered {one_line(shown) or 'nothing'}, not a chat "
                "completion",
                "malformed",
            ) from error
        raise RequestError(
            f"{place}: the server's answer cannot be read: {error}: {one_line(shown)}", "malformed"
        ) from error
    if not isinstance(obj, dict):
        raise RequestError(
            f"{place}: the server answered {one_line(obj)}, not a chat completion",
            "malformed",
        )
    choices = obj.pop("choices", None)
    response = read_facts(_Response, obj)
    if isinstance(choices, list):
        return response.replace(choices=[msgspec.Raw(dumped(choice)) for choice in choices])
    return response


def _count(raw: bytes) -> tuple[Any, int | None]:
    """Return (index, tokens) of a choice."""
    try:
        counted = _counted_decoder.decode(raw)
    except _UNREADABLE:
        choice = object_of(loads(raw))
        ids = choice.get("token_ids")
        raw_logprobs = msgspec.Raw(dumped(choice.get("logprobs")))
        counted = _Counted(
            choice.get("index"), ids if isinstance(ids, list) else None, raw_logprobs
        )
    if counted.token_ids is None:
        tokens = count_entries(bytes(counted.logprobs))
    else:
        tokens = len(counted.token_ids)
    return counted.index, tokens


def count_entries(raw_logprobs: bytes) -> int | None:
    """Return the number of tokens with log-probabilities; None if there are none at all."""
    if raw_logprobs in _NOTHING:
        return None
    try:
        content = _entries_decoder.decode(raw_logprobs).content
    except _UNREADABLE:
        content = object_of(loads(raw_logprobs)).get("content")
    if isinstance(content, list):
        return len(content)
    return None


def in_order(answers: Sequence[Answer], indexes: Sequence[Any], n: int) -> list[Answer | None]:
    """Return n entries by their index, in any order of arrival; by position if a server numbers
    them wrongly.
    """
    if all(type(index) is int for index in indexes):
        numbered = dict(zip(indexes, answers, strict=True))
    else:
        numbered = {}
    if len(numbered) == len(answers) and all(0 <= index < n for index in numbered):
        return [numbered.get(k) for k in range(n)]
    return [answers[k] if k < len(answers) else None for k in range(n)]


def failure(error: Any, place: str) -> RequestError:
    """Return the error reported in an answer of status 200."""
    code = object_of(error).get("code")
    message = object_of(error).get("message") or error
    text = f"{place}: the server failed: {one_line(message)}"
    if type(code) is int and 400 <= code < 600:
        return RequestError(f"{text} (code {code})", "status", status=code)
    return RequestError(text, "malformed")


def most_bytes(body: Mapping[str, Any] | None) -> int:
    """Return the size limit of an answer: several times any server's output for the requested
    tokens.
    """
    asked = body or {}
    tokens = asked.get("max_completion_tokens") or asked.get("max_tokens") or _LONGEST
    tokens = asked.get("n", 1) * tokens + (
        _LONGEST if asked.get("echo") or asked.get("prompt_logprobs") is not None else 0
    )
    shown = max(
        (int(asked.get(name) or 0) for name in ("top_logprobs", "logprobs", "prompt_logprobs")),
        key=abs,
    )
    shown = shown if shown >= 0 else _LONGEST  # -1: of the whole vocabulary
    if EXPERTS in asked:
        experts = (tokens + asked.get("n", 1) * _LONGEST) * _EXPERT_BYTES
    else:
        experts = 0
    return 2**22 + int(tokens) * (_TOKEN_BYTES + _SHOWN_BYTES * shown) + int(experts)


def encoded(value: Any) -> bytes:
    """Encode JSON in UTF-8; halves of surrogate pairs, not valid in UTF-8, become escapes."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value)).encode()


def dumped(value: Any) -> bytes:
    """Encode JSON as Python writes it, including NaN."""
    return json.dumps(value).encode()


def loads(data: bytes | str) -> Any:
    """Decode any JSON as Python reads it; return None if invalid."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def object_of(value: Any) -> Mapping[str, Any]:
    """Return a JSON object; an empty one for any other value."""
    if isinstance(value, dict):
        return value
    return {}


def is_ids(ids: object) -> bool:
    return isinstance(ids, list) and all(type(i) is int for i in ids)
