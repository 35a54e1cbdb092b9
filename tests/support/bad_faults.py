"""What the server of bad_server.py does wrong: the table of faults, which request meets which, and
how each is done.
"""

import asyncio
import email.utils
import gzip
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from support.bad_answers import Frame, Spoken

if TYPE_CHECKING:
    from support.bad_server import Connection

# What a client must do about each fault, and where it can happen: "retried" (the samples are fine
# in the end), "final" (these samples fail, with a reason), "harmless" (the answer is good in spite
# of it). fmt: off
FAULTS: dict[str, tuple[str, str]] = {
    # nothing comes, or not all of it
    # Nobody listens for a moment, and this connection is reset.
    "refuse": ("retried", "both"),
    "drop": ("retried", "both"),  # closed without a word
    "reset": ("retried", "both"),  # reset without a word
    "reset_in_middle": ("retried", "both"),  # reset after half of the answer
    "silence": ("retried", "both"),  # no answer at all
    "stall": ("retried", "both"),  # half of the answer, then nothing
    "length_lies": ("retried", "plain"),  # content-length promises more than comes
    "length_short": ("retried", "plain"),  # content-length ends in the middle of the body
    "truncated_json": ("retried", "plain"),
    # The stream ends as if all were well, before its choices do.
    "early_end": ("retried", "stream"),
    "abort": ("retried", "both"),  # one choice is broken off, as by a server that is ended
    "error": ("retried", "both"),  # the server gives up on one choice
    # something else comes
    "http_408": ("retried", "both"),
    "http_429": ("retried", "both"),
    "http_429_date": ("retried", "both"),
    "http_500": ("retried", "both"),
    "http_502_html": ("retried", "both"),
    "http_503": ("retried", "both"),
    "html_200": ("retried", "both"),
    "malformed_chunk": ("retried", "stream"),
    "error_chunk": ("retried", "stream"),
    "http_400": ("final", "both"),
    "http_404": ("final", "both"),
    "http_422": ("final", "both"),
    # parts are missing: of one choice of the answer
    "missing_logprobs": ("final", "both"),
    "missing_ids": ("final", "both"),
    # unusual, and right
    "missing_usage": ("harmless", "both"),
    "missing_done": ("harmless", "stream"),
    "two_dones": ("harmless", "stream"),
    "fewer_choices": ("harmless", "both"),
    "shuffled": ("harmless", "both"),
    "wrong_index": ("harmless", "both"),
    "late_choice": ("harmless", "stream"),
    "dialect": ("harmless", "stream"),
    "halves": ("harmless", "both"),
    "trickle": ("harmless", "both"),
    "stale": ("harmless", "both"),
    "gzip": ("harmless", "plain"),
}
# fmt: on
STATUS = {
    "http_408": 408,
    "http_429": 429,
    "http_429_date": 429,
    "http_500": 500,
    "http_502_html": 502,
    "http_503": 503,
}
STATUS |= {"http_400": 400, "http_404": 404, "http_422": 422, "html_200": 200}
HTML = b"<!doctype html><html><body><h1>Something went wrong</h1></body></html>"


class Body(msgspec.Struct):
    messages: Any
    model: str = "m"
    n: int | None = 1
    stream: bool | None = False
    seed: int | None = None
    temperature: float | None = 1.0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    return_token_ids: bool | None = False
    logprobs: bool | None = False
    stream_options: dict[str, Any] | None = None
    stream_interval: int | None = None


@dataclass(slots=True)
class Ask:
    """One request for a chat completion. `attempt` counts from 1 for the same samples of the same
    prompt.
    """

    body: Body
    key: bytes
    prompt: str
    n: int
    first: int
    attempt: int
    gzip: bool

    @property
    def stream(self) -> bool:
        return bool(self.body.stream)


Plan = Callable[[Ask], str | None]


def parse_shares(spec: str) -> dict[str, float]:
    """ "all=0.2" or "reset=0.1,http_500=0.05"; "" for nothing."""
    return {
        name.strip(): float(share)
        for name, share in (part.split("=") for part in spec.split(",") if part)
    }


def drawn(spec: str, seed: int) -> Plan:
    """Faults by chance. "all=0.2" is 20 in 100 requests, with equal parts of all faults that such a
    request can meet.
    """
    shares = parse_shares(spec)
    total = sum(shares.values())
    names = list(FAULTS) if "all" in shares else list(shares)
    assert set(names) <= set(FAULTS), set(names) - set(FAULTS)
    possible = {
        True: [name for name in names if FAULTS[name][1] != "plain"],
        False: [name for name in names if FAULTS[name][1] != "stream"],
    }
    """By whether the request is streamed."""

    def plan(ask: Ask) -> str | None:
        draw = random.Random(f"{seed} {ask.key.hex()} {ask.first} {ask.n} {ask.attempt}")
        kinds = possible[ask.stream]
        if not kinds or draw.random() >= total:
            return None
        return (
            draw.choice(kinds)
            if "all" in shares
            else draw.choices(kinds, [shares[k] for k in kinds])[0]
        )

    return plan


def spoil(fault: str, ask: Ask, spoken: list[Spoken]) -> list[Spoken]:
    """The choices with what this fault does to them."""
    victim = spoken[ask.key[0] % len(spoken)]
    if fault == "missing_logprobs":
        victim.with_logprobs = False
    elif fault == "missing_ids":
        victim.with_ids = False
    elif fault in ("abort", "error"):
        victim.finish = fault
    elif fault == "fewer_choices":  # every other one is there: the gaps are no neighbours
        spoken = spoken[::2]
    elif fault == "shuffled":
        random.Random(ask.key).shuffle(spoken)
    elif fault == "wrong_index":
        for s in spoken:
            s.index = s.index + 5 if ask.stream or len(spoken) == 1 else 0
    return spoken


def interleaved(
    frame: Frame, spoken: list[Spoken], interval: int, *, late: Spoken | None = None
) -> Iterator[list[bytes]]:
    """A stream's events up to its usage, step by step; those of `late` after all others."""
    for group in ([s for s in spoken if s is not late], [late] if late is not None else []):
        if not group:
            continue
        yield [frame.head(s) for s in group]
        left = [frame.steps(s, interval) for s in group]
        while left:
            events = [next(steps, None) for steps in left]
            left = [steps for steps, event in zip(left, events, strict=True) if event is not None]
            if given := [event for event in events if event is not None]:
                yield given


def in_dialect(event: bytes) -> bytes:
    """The same event as other servers write it: other line ends, comments, fields besides data,
    data over two lines.
    """
    data = event[len(b"data: ") : -2]
    kind = data[-3] % 4
    if kind == 0:
        return b": keep-alive\r\n\r\ndata: " + data + b"\r\n\r\n"
    if kind == 1:
        return b"event: message\nid: 7\nretry: 10\ndata:" + data + b"\n\n"
    if kind == 2 and data.startswith(b'{"id"'):
        return b"data: {\ndata: " + data[1:] + b"\n\n"
    return b":\n\n" + event


def cut_in_characters(data: bytes, most: int = 40) -> list[bytes]:
    """Pieces that end in the middle of a character of several bytes, or between the CR and LF of a
    line end.
    """
    cuts = [i for i in range(1, len(data)) if 0x80 <= data[i] < 0xC0][:most]
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


class Misbehaviour:
    """One request's answer with its fault."""

    def __init__(self, connection: "Connection", ask: Ask, fault: str | None) -> None:
        self.connection, self.server, self.ask, self.fault = (
            connection,
            connection.server,
            ask,
            fault,
        )

    async def answer(self) -> list[Spoken]:
        """Writes the answer; returns the choices that were delivered completely."""
        connection, server, fault = self.connection, self.server, self.fault
        if fault == "refuse":
            connection.reset()
            server.spawn(server.away(server.refused_for, reset=False))
        elif fault == "drop":
            connection.transport.close()
        elif fault == "reset":
            connection.reset()
        elif fault == "silence":
            await asyncio.Event().wait()
        elif fault in STATUS:
            self._say_status(fault)
        else:
            spoken = server.answers(self.ask)
            if fault is not None:
                spoken = spoil(fault, self.ask, spoken)
            if not await (self._stream(spoken) if self.ask.stream else self._whole(spoken)):
                return []
            if FAULTS.get(fault or "", ("",))[0] == "final":
                server.samples_failed[fault or ""] += 1
            # A keep-alive connection that is closed just when it may be used again.
            if fault == "stale":
                asyncio.get_running_loop().call_later(
                    random.Random(self.ask.key).random() * 0.01, connection.transport.close
                )
            return spoken
        return []

    def _say_status(self, fault: str) -> None:
        status, more, wait = STATUS[fault], "", self.server.retry_after
        if fault == "http_429":
            more = f"retry-after: {wait:g}\r\n"
        elif fault == "http_429_date":
            more = f"retry-after: {email.utils.formatdate(time.time() + wait, usegmt=True)}\r\n"
        if fault in ("http_502_html", "html_200"):
            self.connection.write(self.connection.plain(status, HTML, "text/html", more=more))
            return
        error = {
            "message": f"{fault} on purpose",
            "type": "OnPurpose",
            "param": None,
            "code": status,
        }
        self.connection.write(
            self.connection.plain(status, msgspec.json.encode({"error": error}), more=more)
        )
        if FAULTS[fault][0] == "final":
            self.server.samples_failed[fault] += self.ask.n

    def _frame(self) -> Frame:
        frame = self.server.frame(self.ask)
        frame.usage = self.fault != "missing_usage"
        return frame

    async def _whole(self, spoken: list[Spoken]) -> bool:
        connection, fault = self.connection, self.fault
        body = self._frame().completion(spoken)
        half = len(body) // 2
        if fault == "truncated_json":
            connection.write(connection.plain(200, body[:half]))
            return False
        if fault == "length_short":
            connection.write(connection.plain(200, body, length=half))
            return False
        if fault in ("reset_in_middle", "stall", "length_lies"):
            connection.write(connection.plain(200, body[:half], length=len(body)))
            return await self._break()
        if fault == "gzip" and self.ask.gzip:
            connection.write(
                connection.plain(200, gzip.compress(body, 1), more="content-encoding: gzip\r\n")
            )
            return True
        head = connection.plain(200, b"", length=len(body))
        pieces = [head + body]
        if fault == "trickle":
            pieces = [
                *_bytes(head[:40]),
                head[40:],
                *_bytes(body[:100]),
                body[100:-20],
                *_bytes(body[-20:]),
            ]
        elif fault == "halves":
            pieces = [head, *cut_in_characters(body)]
        for piece in pieces:
            connection.write(piece)
            if len(pieces) > 1:
                await asyncio.sleep(0.0005)
        return True

    async def _break(self) -> bool:
        await asyncio.sleep(0.01)  # so that what was written has left
        if self.fault == "stall":
            await asyncio.Event().wait()
        elif self.fault == "reset_in_middle":
            self.connection.reset()
        else:
            self.connection.transport.close()
        return False

    async def _stream(self, spoken: list[Spoken]) -> bool:
        connection, fault = self.connection, self.fault
        kind = (
            "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        connection.write(f"HTTP/1.1 200 OK\r\nserver: bad\r\n{kind}".encode())
        steps = sum(len(s.ids) for s in spoken) // max(1, len(spoken))
        middle = (
            steps // 2
            if fault in ("reset_in_middle", "stall", "early_end", "malformed_chunk", "error_chunk")
            else -1
        )
        done = 0
        async for events in self._paced(spoken):
            if done >= middle >= 0:
                if fault in ("reset_in_middle", "stall"):
                    # In a chunk's middle.
                    connection.write(
                        b"%x\r\n%b" % (len(events[0]), events[0][: len(events[0]) // 2])
                    )
                    return await self._break()
                return self._spoil_stream(events)
            self._write_events(events)
            if fault in ("halves", "trickle"):
                await asyncio.sleep(0.0005)
            done += len(events) // max(1, len(spoken)) or 1
        if middle >= 0:  # too short to be broken in its middle: its end is missing instead
            if fault in ("reset_in_middle", "stall"):
                return await self._break()
            return self._spoil_stream([b"data: [DONE]\n\n"])
        self._write_events(self._last(spoken))
        connection.write(b"0\r\n\r\n")
        return True

    async def _paced(self, spoken: list[Spoken]) -> AsyncIterator[list[bytes]]:
        late = spoken[-1] if self.fault == "late_choice" else None
        for number, events in enumerate(
            interleaved(self._frame(), spoken, self.ask.body.stream_interval or 1, late=late)
        ):
            if self.server.token_delay and number:
                await asyncio.sleep(self.server.token_delay)
            elif number % 16 == 15:  # other connections have their turn
                await asyncio.sleep(0)
            yield events

    def _spoil_stream(self, events: list[bytes]) -> bool:
        if self.fault == "malformed_chunk":
            self._write_events(
                [events[0][: len(events[0]) // 2] + b"\n\n", *events[1:], b"data: [DONE]\n\n"]
            )
        elif self.fault == "error_chunk":
            error = {
                "message": "error_chunk on purpose",
                "type": "InternalServerError",
                "param": None,
                "code": 500,
            }
            self._write_events(
                [b"data: " + msgspec.json.encode({"error": error}) + b"\n\n", b"data: [DONE]\n\n"]
            )
        self.connection.write(b"0\r\n\r\n")
        return False

    def _last(self, spoken: list[Spoken]) -> list[bytes]:
        frame, options, events = self._frame(), self.ask.body.stream_options or {}, []
        if options.get("include_usage") and frame.usage:
            events.append(frame.event(b"", b',"usage":' + frame.usage_of(spoken)))
        if self.fault != "missing_done":
            events += [b"data: [DONE]\n\n"] * (2 if self.fault == "two_dones" else 1)
        return events

    def _write_events(self, events: list[bytes]) -> None:
        if self.fault == "dialect":
            events = [in_dialect(event) for event in events]
        elif self.fault in ("halves", "trickle"):
            data = b"".join(events)
            events = (
                cut_in_characters(data)
                if self.fault == "halves"
                else [data[:-2], *_bytes(data[-2:])]
            )
            if self.fault == "trickle":
                events = [*_bytes(data[:10]), data[10:-2], *_bytes(data[-2:])]
        # One chunk of the transfer encoding each; nothing is lost where an event is empty.
        self.connection.write(
            b"".join([b"%x\r\n%b\r\n" % (len(event), event) for event in events if event])
        )


def _bytes(data: bytes) -> Iterator[bytes]:
    return (data[i : i + 1] for i in range(len(data)))
