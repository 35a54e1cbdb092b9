"""Assemble streamed completions, under the names of openai's ChatCompletion.

Text, ids and log-probabilities are collected in pieces and joined on access, so a token of a long
completion costs no more than one of a short one. The log-probabilities' JSON stays as the server
wrote it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from ttrl.messages import Message
from ttrl.rollouts.client.tool_calls import LiveFunction, LiveToolCall, add_part
from ttrl.rollouts.client.wire import (
    TEXTS,
    Answer,
    Chunk,
    ChunkChoice,
    Delta,
    TokenLogprob,
    Usage,
    count_entries,
    decoded_logprobs,
    dumped,
    encoded,
    in_order,
    loads,
)

OnChunk: TypeAlias = Callable[[Any, Any], object]
"""on_chunk(chunk, completion): the new chunk, and the completion including it. StopIteration ends
the chunk's choices.
"""
STOPPED_EARLY = "stopped_early"
"""The finish_reason of choices ended by `on_chunk`."""


class _RawLogprobs(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw()
    refusal: msgspec.Raw = msgspec.Raw()


_raw_decoder = msgspec.json.Decoder(list[_RawLogprobs])


class LiveLogprobs:
    """The log-probabilities of a choice so far; decoded on access, each token once."""

    def __init__(self) -> None:
        self._raws: list[bytes] = []
        """The logprobs' JSON of each chunk with any."""
        self._num_decoded = 0
        self._content: list[TokenLogprob] = []
        self._refusal: list[TokenLogprob] = []

    def add(self, raw: bytes) -> None:
        """Add the JSON of a chunk's logprobs, an object."""
        self._raws.append(raw)

    def _entries(self) -> tuple[list[TokenLogprob], list[TokenLogprob]]:
        """Return those of the content and of a refusal."""
        for raw in self._raws[self._num_decoded :]:
            new = decoded_logprobs(raw)
            self._content += new.content or ()
            self._refusal += new.refusal or ()
        self._num_decoded = len(self._raws)
        return self._content, self._refusal

    @property
    def content(self) -> list[TokenLogprob]:
        return self._entries()[0]

    @property
    def refusal(self) -> list[TokenLogprob] | None:
        return self._entries()[1] or None

    def __len__(self) -> int:
        return sum(count_entries(raw) or 0 for raw in self._raws)

    def json(self) -> bytes:
        """Return all of it, with entries as the server wrote them."""
        try:
            parts = _raw_decoder.decode(b"[%b]" % b",".join(self._raws))
        except ValueError:  # NaN and the like
            objects = [loads(raw) for raw in self._raws]
            parts = [
                _RawLogprobs(
                    *(msgspec.Raw(dumped(obj.get(name))) for name in ("content", "refusal"))
                )
                for obj in objects
            ]
        content = _joined([part.content for part in parts])
        refusal = _joined([part.refusal for part in parts])
        return b'{"content":[%b]%b}' % (content, b',"refusal":[%b]' % refusal if refusal else b"")


def _joined(lists: list[msgspec.Raw]) -> bytes:
    """Join JSON lists to the inside of one."""
    insides = (bytes(raw)[1:-1].strip() for raw in lists if bytes(raw)[:1] == b"[")
    return b",".join(inside for inside in insides if inside)


class LiveMessage:
    """The model's message so far, under the names of openai's ChatCompletionMessage."""

    def __init__(self) -> None:
        self.role = "assistant"
        self._content: list[str] = []
        self._texts: dict[str, list[str]] = {"content": self._content}
        """Pieces of the started texts; each text's pieces are joined on access."""
        self.tool_calls: list[LiveToolCall] | None = None
        self.function_call: LiveFunction | None = None

    def add(self, delta: Delta) -> None:
        if delta.content is not None:
            self._content.append(delta.content)
        if delta.role:
            self.role = delta.role
        if delta.refusal is not None:
            self._texts.setdefault("refusal", []).append(delta.refusal)
        if delta.reasoning is not None:
            self._texts.setdefault("reasoning", []).append(delta.reasoning)
        if delta.reasoning_content is not None:
            self._texts.setdefault("reasoning_content", []).append(delta.reasoning_content)
        if delta.tool_calls:
            self.tool_calls = self.tool_calls or []
            for part in delta.tool_calls:
                add_part(self.tool_calls, part)
        if delta.function_call is not None:
            self.function_call = self.function_call or LiveFunction()
            self.function_call.add(delta.function_call)

    def __getattr__(self, name: str) -> str | None:
        """Return one of the texts; None before its first piece, even an empty one."""
        if name not in TEXTS:
            raise AttributeError(name)
        pieces = self._texts.get(name)
        if not pieces:
            return None
        if len(pieces) > 1:
            pieces[:] = ["".join(pieces)]
        return pieces[0]

    def json(self) -> Message:
        """Return it in the form of an unstreamed answer."""
        message: Message = {
            "role": self.role,
            **{name: getattr(self, name) for name in self._texts},
        }
        if self.tool_calls:
            message["tool_calls"] = [call.json() for call in self.tool_calls]
        if self.function_call is not None:
            message["function_call"] = self.function_call.json()
        if not message["content"] and (self.tool_calls or self.function_call):
            message["content"] = None
        return message


@dataclass(eq=False)
class LiveChoice:
    """One choice so far. `stopped_early` and `finish_reason` may be set by `on_chunk`."""

    index: int
    message: LiveMessage = field(default_factory=LiveMessage)
    logprobs: LiveLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: str | None = None
    """Of all its tokens; it comes with the last chunk."""
    stopped_early: bool = False
    tokens: int = 0
    """Tokens received, if chunks can be counted; otherwise chunks with text."""

    def add(self, part: ChunkChoice) -> int:
        """Add a chunk's part and return its number of tokens."""
        delta = part.delta
        if delta is not None:
            self.message.add(delta)
        new = 0
        raw_logprobs = bytes(part.raw_logprobs)
        if raw_logprobs[:1] == b"{":
            if self.logprobs is None:
                self.logprobs = LiveLogprobs()
            self.logprobs.add(raw_logprobs)
        if part.token_ids is not None:
            if self.token_ids is None:
                self.token_ids = []
            self.token_ids += part.token_ids
            new = len(part.token_ids)
        elif self.token_ids is None:
            new = count_entries(raw_logprobs) or (delta is not None and has_text(delta))
        if part.finish_reason:
            self.finish_reason = part.finish_reason
        if part.routed_experts is not None:
            self.routed_experts = part.routed_experts
        if part.stop_reason is not None:
            self.stop_reason = part.stop_reason
        self.tokens += new
        return new

    def json(self) -> bytes:
        """Return the choice in the form of an unstreamed answer."""
        fields: dict[str, object] = {
            "index": self.index,
            "message": self.message.json(),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }
        if self.token_ids is not None:
            fields["token_ids"] = self.token_ids
        if self.routed_experts is not None:
            fields["routed_experts"] = self.routed_experts
        if self.logprobs is None:
            logprobs = b"null"
        else:
            logprobs = self.logprobs.json()
        return encoded(fields)[:-1] + b',"logprobs":' + logprobs + b"}"


def has_text(delta: Any) -> bool:
    """Return False for a chunk without a token: the first with the role, the last with the
    finish_reason.
    """
    return any(
        getattr(delta, name, None)
        for name in ("content", "tool_calls", "reasoning", "reasoning_content", "refusal")
    )


class LiveCompletion:
    """A completion so far: the started `choices` in index order."""

    object = "chat.completion"

    def __init__(
        self,
        n: int = 1,
        on_chunk: OnChunk | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> None:
        self._n = n
        self._on_chunk = on_chunk
        self._on_tokens = on_tokens
        self.id = ""
        self.created = 0
        self.model = ""
        self.choices: list[LiveChoice] = []
        self.usage: Usage | None = None
        self.prompt_token_ids: list[int] | None = None
        self.prompt_text: str | None = None
        self._by_index: dict[int, LiveChoice] = {}
        self._ended_here: set[int] = set()
        """Choices known to be ended by `on_chunk`; their further chunks are ignored."""

    def take(self, chunk: Chunk, shown: Any = None) -> bool:
        """Add a chunk; return True if everything has ended, partly here. shown: replaces the chunk
        for `on_chunk`.
        """
        had_choices = bool(chunk.choices)
        tokens = self._add(chunk)
        if tokens and self._on_tokens is not None:
            self._on_tokens(tokens)
        if self._on_chunk is None or (had_choices and not chunk.choices):
            return False
        try:
            self._on_chunk(chunk if shown is None else shown, self)
        except StopIteration:
            self._stop([part.index for part in chunk.choices or ()])
            return self.is_complete
        return False

    def _add(self, chunk: Chunk) -> int:
        """Add a chunk and return its number of tokens. Removes the parts of choices already ended
        here.
        """
        if not self.id and chunk.id:
            self.id = chunk.id
            self.created = chunk.created or 0
            self.model = chunk.model or ""
        if chunk.prompt_token_ids is not None:
            self.prompt_token_ids = chunk.prompt_token_ids
        if chunk.prompt_text is not None:
            self.prompt_text = chunk.prompt_text
        if chunk.usage is not None:
            self.usage = chunk.usage
        parts = chunk.choices
        if not parts:
            return 0
        if self._ended_here:
            parts = chunk.choices = [part for part in parts if part.index not in self._ended_here]
        tokens = 0
        for part in parts:
            choice = self._by_index.get(part.index)
            tokens += (choice or self._begin(part.index)).add(part)
        return tokens

    def _begin(self, index: int) -> LiveChoice:
        choice = self._by_index[index] = LiveChoice(index)
        self.choices.append(choice)
        self.choices.sort(key=lambda choice: choice.index)
        return choice

    def _stop(self, indexes: list[int]) -> None:
        """End the choices newly marked by `on_chunk`; if none, those of these indexes."""
        marked = [
            choice
            for choice in self.choices
            if choice.stopped_early and choice.index not in self._ended_here
        ]
        for choice in marked or [
            self._by_index[index] for index in indexes if index in self._by_index
        ]:
            choice.stopped_early = True
            choice.finish_reason = STOPPED_EARLY
            self._ended_here.add(choice.index)

    @property
    def is_finished(self) -> bool:
        """True if every started choice has ended, and at least one has started."""
        return bool(self.choices) and all(
            choice.finish_reason is not None for choice in self.choices
        )

    @property
    def is_complete(self) -> bool:
        """True if all n choices have ended."""
        return len(self.choices) >= self._n and self.is_finished

    def answers(self, n: int | None = None) -> list[Answer | None]:
        """Return n entries (as many as requested); None for choices without a token."""
        usage = self.usage or Usage()
        prompt = self.prompt_token_ids
        prompt_tokens = usage.prompt_tokens
        if prompt_tokens is None and prompt is not None:
            prompt_tokens = len(prompt)
        answers = []
        indexes = []
        for choice in self.choices:
            if choice.finish_reason is None and not choice.tokens:
                continue
            indexes.append(choice.index)
            answers.append(
                Answer(
                    choice.json(),
                    completion_id=self.id,
                    created=self.created,
                    model=self.model,
                    prompt_token_ids=prompt,
                    prompt_tokens=prompt_tokens,
                    cached_tokens=usage.cached_tokens,
                    completion_tokens=self._tokens_of(choice, usage),
                    prompt_text=self.prompt_text,
                )
            )
        return in_order(answers, indexes, self._n if n is None else n)

    def _tokens_of(self, choice: LiveChoice, usage: Usage) -> int | None:
        if choice.token_ids is not None:
            return len(choice.token_ids)
        if (
            len(self.choices) == 1
            and usage.completion_tokens is not None
            and choice.finish_reason != STOPPED_EARLY
        ):
            return usage.completion_tokens
        if choice.logprobs is not None:
            return choice.tokens
        return None
