"""What the server of bad_server.py says: answers that follow from (messages, temperature, number),
written as by vLLM 0.32.

The number of an answer is `seed + i` for choice i of a seeded request, as vLLM seeds its choices:
the same sample of the same call is the same answer however often, in which order and with which
others it was asked for. Without a seed each is a new one.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

END = 0
LEVELS = 32
LONG = 25_000
"""Tokens of an answer of the kind "long": 100,000 characters."""
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
# What breaks parsers: line ends of Unicode (not of SSE), quotes, escapes, characters of two to four
# bytes, nothing at all.
_TRAPS = [
    "\u2028",
    "\u2029",
    "\x85",
    "\x0c",
    "\n",
    "\n\n",
    "\r\n",
    '"',
    "\\",
    "\x01",
    " data: ",
    "[DONE]",
]
_TRAPS += ["é", "ß", "日本", "한", "∑", "", "{", "}"]
_HALVES = ["🙂", "👩‍👩‍👧", "𝄞", "🇪🇺"]
VOCAB = [
    "<|im_end|>",
    *(f"{a}{b}{c}{d}" for a in _CONSONANTS for b in _VOWELS for c in "nrs" for d in "ei"),
][: 256 - 24]
VOCAB += [*_TRAPS, *_HALVES]
HALF = frozenset(range(256 - len(_HALVES), 256))
"""Tokens that are the first half of a character: their text comes with the next token, as from a
detokenizer.
"""
_NONZERO = bytes([1, *range(1, 256)])
_TO_LEVEL = bytes([i % LEVELS for i in range(256)])
_IDS = [str(i).encode() for i in range(256)]


def logprob(level: int) -> float:
    return -(level + 1) / 16


def _fragment(token: int, level: int) -> bytes:
    shown = "\ufffd" if token in HALF else VOCAB[token]
    entry = {
        "token": shown,
        "logprob": logprob(level),
        "bytes": list(shown.encode()),
        "top_logprobs": [],
    }
    return msgspec.json.encode(entry)


_FRAGMENTS = [[_fragment(token, level) for level in range(LEVELS)] for token in range(256)]


@dataclass(slots=True)
class Spoken:
    """One choice: what the model said, and what of it the server leaves out."""

    index: int
    number: int
    ids: bytes
    """Token ids, one byte each, with the end token where the model ended by itself."""
    levels: bytes
    finish: str = "stop"
    null_content: bool = False
    with_logprobs: bool = True
    with_ids: bool = True

    def deltas(self) -> list[str]:
        """The text that each token adds; nothing for the end token."""
        held, deltas = "", []
        for token in self.ids:
            text = VOCAB[token] if token != END else ""
            if token in HALF:
                held += text
                deltas.append("")
            else:
                deltas.append(held + text)
                held = ""
        if held and deltas:
            deltas[-1] += held
        return deltas

    @property
    def text(self) -> str:
        return "".join(self.deltas())

    def logprobs(self, start: int = 0, stop: int | None = None) -> bytes:
        if not self.with_logprobs:
            return b"null"
        entries = [
            _FRAGMENTS[t][v]
            for t, v in zip(self.ids[start:stop], self.levels[start:stop], strict=True)
        ]
        return b'{"content":[' + b",".join(entries) + b"]}"

    def written_ids(self, start: int = 0, stop: int | None = None) -> bytes:
        return b"[" + b",".join([_IDS[t] for t in self.ids[start:stop]]) + b"]"


@dataclass
class Model:
    """tokens: fewest and most of an answer. kinds: shares of answers that are unusual but no fault
    of anybody: "empty", "null" (content null), "length" (no end token), "long"."""

    tokens: tuple[int, int] = (8, 64)
    kinds: dict[str, float] = field(default_factory=dict)

    def say(self, key: bytes, number: int, index: int, most: int | None) -> Spoken:
        seed = key + number.to_bytes(12, "big", signed=True)
        low, high = self.tokens
        bits = hashlib.shake_128(seed).digest(8 + 2 * high + 2)
        length = low + int.from_bytes(bits[4:8], "big") % (high - low + 1)
        kind = self._kind(int.from_bytes(bits[:4], "big") / 2**32)
        if kind == "long":
            length = LONG
            bits = hashlib.shake_128(seed).digest(8 + 2 * LONG + 2)
        elif kind in ("empty", "null"):
            length = 0
        body, levels = (
            bits[8 : 8 + length].translate(_NONZERO),
            bits[8 + length : 9 + 2 * length].translate(_TO_LEVEL),
        )
        if kind == "long":  # plain letters of four bytes each
            body = bytes([1 + b % 200 for b in body])
        if kind == "length" and length:
            return Spoken(index, number, body[:most], levels[: len(body[:most])], "length")
        ids = body + bytes([END])
        if most is not None and len(ids) > most:
            return Spoken(index, number, ids[:most], levels[:most], "length")
        return Spoken(index, number, ids, levels, null_content=kind == "null")

    def _kind(self, draw: float) -> str | None:
        for kind, share in self.kinds.items():
            draw -= share
            if draw < 0:
                return kind
        return None


@dataclass(slots=True)
class Frame:
    """What all parts of one response share."""

    id: str
    model: bytes
    prompt_ids: list[int]
    wants_ids: bool
    usage: bool = True
    """False: the server forgets it."""

    def usage_of(self, spoken: list[Spoken]) -> bytes:
        prompt, sampled = len(self.prompt_ids), sum(len(s.ids) for s in spoken)
        return b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}' % (
            prompt, prompt + sampled, sampled, prompt // 2,
        )  # fmt: skip

    def completion(self, spoken: list[Spoken]) -> bytes:
        """The body of an answer that is not streamed."""
        choices = []
        for s in spoken:
            content = b"null" if s.null_content else msgspec.json.encode(s.text)
            ids = s.written_ids() if self.wants_ids and s.with_ids else b"null"
            choices.append(
                b'{"index":%d,"message":{"role":"assistant","content":%b,"refusal":null,"annotations":null,"audio":null,'
                b'"function_call":null,"tool_calls":[],"reasoning":null},"logprobs":%b,"finish_reason":"%b","stop_reason":null,'
                b'"token_ids":%b,"routed_experts":null}'
                % (s.index, content, s.logprobs(), s.finish.encode(), ids)
            )
        usage = self.usage_of(spoken) if self.usage else b"null"
        return (
            b'{"id":"%b","object":"chat.completion","created":1700000000,"model":%b,"choices":[%b],"service_tier":null,'
            b'"system_fingerprint":null,"usage":%b,"prompt_logprobs":null,"prompt_token_ids":%b,"kv_transfer_params":null}'
        ) % (
            self.id.encode(), self.model, b",".join(choices), usage,
            msgspec.json.encode(self.prompt_ids) if self.wants_ids else b"null",
        )  # fmt: skip

    def event(self, choices: bytes, rest: bytes = b"") -> bytes:
        return b'data: {"id":"%b","object":"chat.completion.chunk","created":1700000000,"model":%b,"choices":[%b]%b}\n\n' % (
            self.id.encode(), self.model, choices, rest,
        )  # fmt: skip

    def head(self, s: Spoken) -> bytes:
        """A choice's first event: its role."""
        ids = (
            b',"prompt_token_ids":' + msgspec.json.encode(self.prompt_ids)
            if self.wants_ids
            else b""
        )
        delta = (
            b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            % s.index
        )
        return self.event(delta, ids)

    def steps(self, s: Spoken, interval: int) -> Iterator[bytes]:
        """A choice's further events: the first token alone, then `interval` tokens at a time."""
        deltas, start = s.deltas(), 0
        while start < len(s.ids):
            stop = min(start + (interval if start else 1), len(s.ids))
            content = (
                b""
                if s.null_content
                else b'"content":' + msgspec.json.encode("".join(deltas[start:stop]))
            )
            end = b"null" if stop < len(s.ids) else b'"%b","stop_reason":null' % s.finish.encode()
            ids = (
                b',"token_ids":' + s.written_ids(start, stop)
                if self.wants_ids and s.with_ids
                else b""
            )
            yield self.event(
                b'{"index":%d,"delta":{%b},"logprobs":%b,"finish_reason":%b%b}'
                % (s.index, content, s.logprobs(start, stop), end, ids)
            )
            start = stop
