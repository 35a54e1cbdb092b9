"""Completions while they are streamed: what has come of them so far, under the names of openai's ChatCompletion.

Text, ids and log-probabilities are collected in pieces and joined when somebody looks, so that a token of a long completion costs
no more than one of a short one; the log-probabilities' JSON is kept as the server wrote it.
"""

from typing import Any

import msgspec

from ttrl.rollouts.client.wire import (
    Answer,
    Chunk,
    ChunkChoice,
    Delta,
    FunctionDelta,
    Logprobs,
    TokenLogprob,
    ToolCallDelta,
    Usage,
    count_entries,
    decoded_logprobs,
    dumped,
    encoded,
    in_order,
    loads,
)

STOPPED_EARLY = "stopped_early"
"""The finish_reason of choices that `on_chunk` ended."""


class _RawLogprobs(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw()
    refusal: msgspec.Raw = msgspec.Raw()


_raw_decoder = msgspec.json.Decoder(list[_RawLogprobs])


class _Text:
    """A string that grows at its end."""

    __slots__ = ("_text", "parts")

    def __init__(self) -> None:
        self._text: str | None = None
        self.parts: list[str] = []

    def add(self, part: str) -> None:
        self.parts.append(part)

    @property
    def text(self) -> str | None:
        """None where nothing has come, not even an empty string."""
        if self.parts:
            self._text = "".join((self._text or "", *self.parts))
            self.parts.clear()
        return self._text


class LiveLogprobs:
    """The log-probabilities of a choice so far; decoded when looked at, each token once."""

    def __init__(self) -> None:
        self._raws: list[bytes] = []
        """Of each chunk that has any, the JSON of its logprobs."""
        self._num_decoded = 0
        self._decoded = Logprobs([], [])

    def add(self, raw: bytes) -> None:
        """Take in the JSON of a chunk's logprobs, an object."""
        self._raws.append(raw)

    def _decode(self) -> Logprobs:
        done = self._decoded
        for raw in self._raws[self._num_decoded :]:
            new = decoded_logprobs(raw)
            done.content = (done.content or []) if not new.content else _grown(done.content, new.content)
            done.refusal = (done.refusal or []) if not new.refusal else _grown(done.refusal, new.refusal)
        self._num_decoded = len(self._raws)
        return done

    @property
    def content(self) -> list[TokenLogprob]:
        return self._decode().content or []

    @property
    def refusal(self) -> list[TokenLogprob] | None:
        return self._decode().refusal or None

    def __len__(self) -> int:
        return sum(count_entries(raw) or 0 for raw in self._raws)

    def json(self) -> bytes:
        """Return all of it, entries as the server wrote them."""
        try:
            parts = _raw_decoder.decode(b"[%b]" % b",".join(self._raws))
        except ValueError:  # NaN and the like
            objects = [loads(raw) for raw in self._raws]
            parts = [_RawLogprobs(*(msgspec.Raw(dumped(obj.get(name))) for name in ("content", "refusal"))) for obj in objects]
        content = _joined([part.content for part in parts])
        refusal = _joined([part.refusal for part in parts])
        return b'{"content":[%b]%b}' % (content, b',"refusal":[%b]' % refusal if refusal else b"")


def _grown(known: list[TokenLogprob] | None, new: list[TokenLogprob]) -> list[TokenLogprob]:
    known = [] if known is None else known
    known += new
    return known


def _joined(lists: list[msgspec.Raw]) -> bytes:
    """Join JSON lists to the inside of one."""
    insides = (bytes(raw)[1:-1].strip() for raw in lists if bytes(raw)[:1] == b"[")
    return b",".join(inside for inside in insides if inside)


class LiveMessage:
    """What the model has said so far."""

    def __init__(self) -> None:
        self.role = "assistant"
        self._texts: dict[str, _Text] = {"content": _Text()}
        self._content_parts = self._texts["content"].parts
        self.tool_calls: list[ToolCallDelta] | None = None
        self.function_call: FunctionDelta | None = None

    def add(self, delta: Delta) -> None:
        if delta.content is not None:
            self._content_parts.append(delta.content)
        if delta.role:
            self.role = delta.role
        if delta.refusal is not None:
            self._texts.setdefault("refusal", _Text()).add(delta.refusal)
        if delta.reasoning is not None:
            self._texts.setdefault("reasoning", _Text()).add(delta.reasoning)
        if delta.reasoning_content is not None:
            self._texts.setdefault("reasoning_content", _Text()).add(delta.reasoning_content)
        if delta.tool_calls:
            for part in delta.tool_calls:
                self._add_tool_call(part)
        if delta.function_call is not None:
            if self.function_call is None:
                self.function_call = FunctionDelta("", "")
            _extend(self.function_call, delta.function_call)

    def _add_tool_call(self, part: ToolCallDelta) -> None:
        """Add a part to its call: parts share its index; where a server gives none, a part with an id begins a new one."""
        calls = self.tool_calls = self.tool_calls or []
        if part.index is not None:
            known = next((call for call in calls if call.index == part.index), None)
        else:
            known = calls[-1] if calls and part.id in (None, "", calls[-1].id) else None
        if known is None:
            index = part.index if part.index is not None else len(calls)
            known = ToolCallDelta(index=index, function=FunctionDelta("", ""), type="function")
            calls.append(known)
            calls.sort(key=lambda call: call.index or 0)
        known.id, known.type = known.id or part.id, part.type or known.type
        if part.function is not None and known.function is not None:
            _extend(known.function, part.function)

    @property
    def content(self) -> str | None:
        return self._texts["content"].text

    def __getattr__(self, name: str) -> Any:
        texts = self.__dict__.get("_texts", {})
        if name in texts:
            return texts[name].text
        if name in ("refusal", "reasoning", "reasoning_content"):
            return None
        raise AttributeError(name)

    def json(self) -> dict[str, Any]:
        """Return it as a server that does not stream would have sent it."""
        message: dict[str, Any] = {"role": self.role}
        message |= {name: text.text for name, text in self._texts.items()}
        if self.tool_calls:
            calls = sorted(self.tool_calls, key=lambda call: call.index or 0)
            message["tool_calls"] = [{"id": c.id, "type": c.type, "function": msgspec.to_builtins(c.function)} for c in calls]
        if self.function_call is not None:
            message["function_call"] = msgspec.to_builtins(self.function_call)
        if not message["content"] and (self.tool_calls or self.function_call):
            message["content"] = None
        return message


def _extend(function: FunctionDelta, part: FunctionDelta) -> None:
    function.name = (function.name or "") + (part.name or "")
    function.arguments = (function.arguments or "") + (part.arguments or "")


class LiveChoice:
    """One choice so far. `stopped_early` and `finish_reason` may be set by `on_chunk`."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.message = LiveMessage()
        self.logprobs: LiveLogprobs | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.token_ids: list[int] | None = None
        self.stopped_early = False
        self.has_ended_here = False
        """Its end by `on_chunk` is known; further chunks of it are ignored."""
        self.tokens = 0
        """That have come, where chunks can be counted; otherwise chunks with text."""

    def add(self, part: ChunkChoice) -> int:
        """Add a chunk's part and return how many tokens have come."""
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
        if part.stop_reason is not None:
            self.stop_reason = part.stop_reason
        self.tokens += new
        return new

    def json(self) -> bytes:
        """Return the choice as a server that does not stream would have sent it."""
        fields = {"index": self.index, "message": self.message.json(), "finish_reason": self.finish_reason}
        fields["stop_reason"] = self.stop_reason
        if self.token_ids is not None:
            fields["token_ids"] = self.token_ids
        logprobs = b"null" if self.logprobs is None else self.logprobs.json()
        return encoded(fields)[:-1] + b',"logprobs":' + logprobs + b"}"


def has_text(delta: Any) -> bool:
    """Return False for a chunk without a token: the first with the role, the last with the finish_reason."""
    return any(getattr(delta, name, None) for name in ("content", "tool_calls", "reasoning", "reasoning_content", "refusal"))


class LiveCompletion:
    """A completion so far: `choices` in the order of their indexes, as many as have begun."""

    object = "chat.completion"

    def __init__(self, n: int = 1) -> None:
        self.id = ""
        self.created = 0
        self.model = ""
        self.choices: list[LiveChoice] = []
        self.usage: Usage | None = None
        self.prompt_token_ids: list[int] | None = None
        self._n = n
        self._by_index: dict[int, LiveChoice] = {}
        self._any_stopped = False

    def add(self, chunk: Chunk) -> int:
        """Add a chunk and return how many tokens it brought. Parts of choices that were ended here are taken out of it."""
        if not self.id and chunk.id:
            self.id, self.created, self.model = chunk.id, chunk.created or 0, chunk.model or ""
        if chunk.prompt_token_ids is not None:
            self.prompt_token_ids = chunk.prompt_token_ids
        if chunk.usage is not None:
            self.usage = chunk.usage
        parts = chunk.choices
        if not parts:
            return 0
        if self._any_stopped:
            parts = chunk.choices = [part for part in parts if not self._has_ended_here(part.index)]
        tokens = 0
        for part in parts:
            choice = self._by_index.get(part.index)
            tokens += (choice or self._begin(part.index)).add(part)
        return tokens

    def _has_ended_here(self, index: int) -> bool:
        choice = self._by_index.get(index)
        return choice is not None and choice.has_ended_here

    def _begin(self, index: int) -> LiveChoice:
        choice = self._by_index[index] = LiveChoice(index)
        self.choices.append(choice)
        self.choices.sort(key=lambda choice: choice.index)
        return choice

    def stop(self, indexes: list[int]) -> None:
        """End the choices that `on_chunk` has marked since; where it has marked none, those of these indexes."""
        marked = [choice for choice in self.choices if choice.stopped_early and not choice.has_ended_here]
        for choice in marked or [self._by_index[index] for index in indexes if index in self._by_index]:
            choice.stopped_early = choice.has_ended_here = self._any_stopped = True
            choice.finish_reason = STOPPED_EARLY

    @property
    def is_finished(self) -> bool:
        """Every choice that has begun has ended, and at least one has begun."""
        return bool(self.choices) and all(choice.finish_reason is not None for choice in self.choices)

    @property
    def is_complete(self) -> bool:
        """All n choices have ended."""
        return len(self.choices) >= self._n and self.is_finished

    def answers(self, n: int | None = None) -> list[Answer | None]:
        """Return n entries (as many as were asked for); None for choices of which no token has come."""
        usage = self.usage or Usage()
        prompt = self.prompt_token_ids
        answers, indexes = [], []
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
                    prompt_tokens=len(prompt) if usage.prompt_tokens is None and prompt is not None else usage.prompt_tokens,
                    cached_tokens=usage.cached_tokens,
                    completion_tokens=self._tokens_of(choice, usage),
                )
            )
        return in_order(answers, indexes, self._n if n is None else n)

    def _tokens_of(self, choice: LiveChoice, usage: Usage) -> int | None:
        if choice.token_ids is not None:
            return len(choice.token_ids)
        if len(self.choices) == 1 and usage.completion_tokens is not None and choice.finish_reason != STOPPED_EARLY:
            return usage.completion_tokens
        return choice.tokens if choice.logprobs is not None else None
