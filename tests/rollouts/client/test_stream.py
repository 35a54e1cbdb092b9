"""Streams give what an answer that is not streamed gives, however they are cut; and they end in
every way that streams end.
"""

import asyncio
import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionChunk

from ttrl.errors import RequestError
from ttrl.rollouts.client.stream import Events, consume_chat_completion_stream, stream_answers

ENTRY = {
    "token": "é",
    "logprob": -0.1234567890123,
    "bytes": [195, 169],
    "top_logprobs": [],
    "more": "é",
}


def spoken(k, text, finish="stop"):
    """A choice with one token per character and an end token."""
    entries = [{**ENTRY, "token": c, "logprob": -(i + k) / 7} for i, c in enumerate([*text, ""])]
    ids = [ord(c) for c in text] + [0]
    return {"index": k, "text": text, "entries": entries, "ids": ids, "finish": finish}


def events_of(choices, interval=1, usage=True, done=True):
    """What vLLM streams for these choices, in turns."""

    def event(parts, **more):
        return {
            "id": "c",
            "object": "chat.completion.chunk",
            "created": 5,
            "model": "m",
            "choices": parts,
            **more,
        }

    out = [
        event(
            [{"index": c["index"], "delta": {"role": "assistant", "content": ""}}],
            prompt_token_ids=[1, 2],
        )
        for c in choices
    ]
    longest = max(len(c["ids"]) for c in choices)
    for start in range(0, longest, interval):
        for c in choices:
            ids = c["ids"][start : start + interval]
            if not ids:
                continue
            end = c["finish"] if start + interval >= len(c["ids"]) else None
            part = {
                "index": c["index"],
                "delta": {"content": c["text"][start : start + interval]},
                "token_ids": ids,
            }
            part |= {
                "logprobs": {"content": c["entries"][start : start + interval]},
                "finish_reason": end,
            }
            out.append(event([part]))
    if usage:
        counts = {"prompt_tokens": 2, "completion_tokens": sum(len(c["ids"]) for c in choices)}
        out.append(event([], usage={**counts, "prompt_tokens_details": {"cached_tokens": 1}}))
    return [json.dumps(e, ensure_ascii=False) for e in out] + (["[DONE]"] if done else [])


def as_bytes(events, newline="\n", space=" "):
    return b"".join(f"data:{space}{event}{newline}{newline}".encode() for event in events)


class Fake:
    """A transport whose stream has these parts; an exception among them is raised, a number is a
    pause.
    """

    base_url = "http://fake/v1"
    read_timeout = 5.0

    def __init__(self, *parts, turns_to_close=0):
        self.parts, self.closed, self.given = parts, False, 0
        self.turns_to_close = turns_to_close

    @contextlib.asynccontextmanager
    async def stream(self, path, body):
        async def read():
            for part in self.parts:
                if isinstance(part, Exception):
                    raise part
                if isinstance(part, int | float):
                    await asyncio.sleep(part)
                    continue
                self.given += 1
                yield part

        try:
            async with contextlib.aclosing(read()) as parts:
                yield parts
        finally:
            self.closed = True
            for _ in range(self.turns_to_close):
                await asyncio.sleep(0)


def run(*parts, n=1, **arguments):
    transport = Fake(*parts)

    async def main():
        try:
            return await stream_answers(transport, {}, n, **{"stall_timeout": 5.0, **arguments})
        finally:
            assert asyncio.all_tasks() == {asyncio.current_task()} or not await asyncio.sleep(0)
            assert asyncio.all_tasks() == {asyncio.current_task()}

    answers = asyncio.run(main())
    assert transport.closed
    return answers


def said(answer):
    choice = json.loads(answer.choice)
    return (
        choice["message"]["content"],
        choice["token_ids"],
        choice["logprobs"]["content"],
        choice["finish_reason"],
    )


texts = st.text(st.sampled_from('ab é\u2028\x85🙂\r\n"\\{}'), max_size=6)


@settings(max_examples=40, deadline=None)
@given(
    said_by=st.lists(texts, min_size=1, max_size=4),
    interval=st.integers(1, 3),
    newline=st.sampled_from(["\n", "\r\n", "\r"]),
    space=st.sampled_from(["", " "]),
    size=st.integers(1, 50),
    done=st.booleans(),
    comment=st.booleans(),
)
def test_property_streams_cut_anywhere_are_exact(
    said_by, interval, newline, space, size, done, comment
):
    choices = [spoken(k, text, "length" if k % 2 else "stop") for k, text in enumerate(said_by)]
    data = as_bytes(events_of(choices, interval, done=done), newline, space)
    if comment:
        data = f": ping{newline}{newline}event: x{newline}".encode() + data
    counted = []
    answers = run(
        *(data[i : i + size] for i in range(0, len(data), size)),
        n=len(choices),
        on_tokens=counted.append,
    )
    for c, answer in zip(choices, answers, strict=True):
        assert said(answer) == (c["text"], c["ids"], c["entries"], c["finish"])
        assert (answer.completion_id, answer.created, answer.model) == ("c", 5, "m")
        assert (answer.prompt_token_ids, answer.prompt_tokens, answer.cached_tokens) == (
            [1, 2],
            2,
            1,
        )
        assert answer.completion_tokens == len(c["ids"])
    assert sum(counted) == sum(len(c["ids"]) for c in choices)


def test_events():
    events = Events()
    assert events.feed(b"\xef\xbb\xbfdata: 1\r") == []
    assert events.feed(b"\n\r") == []
    assert events.feed(b"\ndata:2\ndata: 3\n\n: hi\n\nid: 4\n\ndata\n\ndata: 5") == [b"1", b"2\n3"]
    assert events.end() == (b"5", b"data: 5")


def test_a_long_event_is_joined_once(monkeypatch):
    """A server may send what it likes within the limit; the lead has one loop for all servers."""
    events, part = Events(), b"x" * 2**16
    assert events.feed(b"data: ") == [] and not any(events.feed(part) for _ in range(2**10))
    assert len(events._parts) == 2**10 + 1
    assert [len(one) for one in events.feed(b"\n\ndata")] == [2**26] and events.end() == (
        b"",
        b"data",
    )


def test_choices_late_out_of_order_and_wrongly_numbered():
    late = events_of([spoken(1, "b")], usage=False, done=False) + events_of([spoken(0, "a")])
    assert [said(a)[0] for a in run(as_bytes(late), n=2)] == ["a", "b"]
    wrong = events_of([spoken(6, "b"), spoken(5, "a")])
    assert [said(a)[0] for a in run(as_bytes(wrong), n=2)] == ["a", "b"]
    fewer = run(as_bytes(events_of([spoken(1, "b")])), n=3)
    assert [a and said(a)[0] for a in fewer] == [None, "b", None]


def test_no_done_and_no_usage():
    [answer] = run(as_bytes(events_of([spoken(0, "ab")], usage=False, done=False)))
    assert (said(answer)[0], answer.prompt_tokens, answer.cached_tokens) == ("ab", 2, None)
    # The last empty line is missing.
    [answer] = run(as_bytes(events_of([spoken(0, "ab")], done=False))[:-2])
    assert answer.cached_tokens == 1


def test_broken_ends():
    data = as_bytes(events_of([spoken(0, "abc")]))
    gone = RequestError("gone", "connection")
    for parts in [(data[:300],), (data[:300], gone), (b"",), (gone,)]:
        with pytest.raises(RequestError) as caught:
            run(*parts)
        assert caught.value.kind == "connection"
    finished = as_bytes(events_of([spoken(0, "abc")], usage=False, done=False))
    assert said(run(finished, gone)[0])[0] == "abc"
    with pytest.raises(RequestError, match="gone"):  # the second choice might still have come
        run(finished, gone, n=2)
    half = as_bytes(events_of([spoken(0, "abc", None)], usage=False))
    # [DONE] ends the stream, but no completion that was not at its end.
    for parts in [(half,), (half, gone), (half, 30)]:
        with pytest.raises(RequestError) as caught:
            run(*parts)
        assert caught.value.kind == "connection"


def test_malformed_chunks_errors_and_other_answers(kit):
    good = as_bytes(events_of([spoken(0, "abc")])[:2])
    with pytest.raises(RequestError, match="cannot be read") as caught:
        run(good, b"data: {nonsense\n\n")
    assert caught.value.kind == "malformed"
    with pytest.raises(RequestError, match="engine died") as caught:
        run(good, b'data: {"error": {"message": "engine died", "code": 500}}\n\ndata: [DONE]\n\n')
    assert caught.value.status == 500
    with pytest.raises(RequestError, match=r"<html>.*not a chat completion"):
        run(b"<html>hello</html>")
    whole = json.dumps(kit.completion([kit.choice(0, "ab")]).body).encode()
    counted = []
    # A server that does not stream.
    [answer] = run(whole[:50], whole[50:], on_tokens=counted.append)
    assert (json.loads(answer.choice), sum(counted)) == (kit.choice(0, "ab"), 3)


def test_stalls_and_silence():
    data = as_bytes(events_of([spoken(0, "abc")]))
    with pytest.raises(RequestError, match=r"the stream stalled for 0.05 s") as caught:
        run(data[:300], 30, stall_timeout=0.05)
    assert caught.value.kind == "stall"
    transport = Fake(30)
    transport.read_timeout = 0.05
    with pytest.raises(
        RequestError, match=r"no answer within the client's timeout of 0.05 s"
    ) as caught:
        asyncio.run(stream_answers(transport, {}, 1, stall_timeout=5))
    assert caught.value.kind == "timeout"
    assert said(run(data, 30)[0])[0] == "abc"  # the connection stays open after [DONE]
    assert (
        said(run(as_bytes(events_of([spoken(0, "abc")], done=False)), 30, stall_timeout=0.05)[0])[0]
        == "abc"
    )


def test_cut():
    events = [
        as_bytes([event])
        for event in events_of([spoken(0, "a"), spoken(1, "abcdef"), spoken(2, "xyz")])
    ]

    async def main(after, pause):
        cut = asyncio.Event()
        count = 0

        def on_tokens(tokens):
            nonlocal count
            count += tokens
            if count >= after:
                cut.set()

        if after == 0:
            asyncio.get_running_loop().call_later(0.02, cut.set)
        transport = Fake(*events[:3], pause, *events[3:])
        return await stream_answers(
            transport, {}, 3, stall_timeout=9, on_tokens=on_tokens, cut=cut
        ), transport

    answers, transport = asyncio.run(main(6, 0))
    assert [said(a)[::3] for a in answers] == [("a", "stop"), ("ab", None), ("xy", None)]
    assert transport.closed and transport.given < len(events)
    answers, _ = asyncio.run(main(0, 30))  # while nothing comes
    assert answers == [None, None, None]

    async def before():
        cut = asyncio.Event()
        cut.set()
        return await stream_answers(Fake(RuntimeError("asked")), {}, 2, stall_timeout=9, cut=cut)

    assert asyncio.run(before()) == [None, None]


@pytest.mark.parametrize("turns", range(5))
def test_a_cut_during_the_end_of_a_stream_is_too_late(turns):
    """Whatever the turns of the event loop between the cut, the closing and the watch's end."""
    complaints = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
        cut = asyncio.Event()
        transport = Fake(as_bytes(events_of([spoken(0, "a")])), turns_to_close=turns)
        return await stream_answers(
            transport, {}, 1, stall_timeout=9, on_tokens=lambda tokens: cut.set(), cut=cut
        )

    (answer,) = asyncio.run(main())
    assert said(answer)[::3] == ("a", "stop")
    assert not complaints


def test_on_chunk_sees_everything_and_may_end_choices():
    choices = [spoken(0, "abcd"), spoken(1, "efgh")]
    events = [as_bytes([event]) for event in events_of(choices)]
    seen = []

    def watch(chunk, completion):
        for part in chunk.choices:
            for entry in part.logprobs.content if part.logprobs else ():
                seen.append((part.index, entry.token, entry.logprob))
        assert [c.index for c in completion.choices] == sorted(c.index for c in completion.choices)
        for c in completion.choices:
            assert len(c.token_ids or ()) == (len(c.logprobs.content) if c.logprobs else 0)
            assert len(c.message.content or "") in (
                len(c.token_ids or ()),
                len(c.token_ids or ()) - 1,
            )

    run(*events, n=2, on_chunk=watch)
    assert [s[1:] for s in seen if s[0] == 1] == [
        (e["token"], e["logprob"]) for e in choices[1]["entries"]
    ]

    def stop_first(chunk, completion):
        if any(part.index == 0 and part.delta.content == "b" for part in chunk.choices):
            raise StopIteration
        assert not any(
            part.index == 0 and part.delta.content in ("c", "d") for part in chunk.choices
        )

    first, second = run(*events, n=2, on_chunk=stop_first)
    assert said(first) == ("ab", choices[0]["ids"][:2], choices[0]["entries"][:2], "stopped_early")
    assert said(second)[::3] == ("efgh", "stop")

    def stop_both(chunk, completion):
        if chunk.choices and chunk.choices[0].delta.content in ("b", "f"):
            completion.choices[chunk.choices[0].index].stopped_early = True
            raise StopIteration

    transport = Fake(*events)
    answers = asyncio.run(stream_answers(transport, {}, 2, stall_timeout=9, on_chunk=stop_both))
    assert [said(a)[::3] for a in answers] == [("ab", "stopped_early"), ("ef", "stopped_early")]
    assert transport.closed and transport.given == 6


def test_whatever_on_chunk_raises_comes_through():
    def broken(chunk, completion):
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        run(as_bytes(events_of([spoken(0, "ab")])), on_chunk=broken)


def test_tool_calls_reasoning_and_refusals():
    def event(delta, **more):
        return json.dumps({"id": "c", "choices": [{"index": 0, "delta": delta, **more}]})

    function = {"name": "add", "arguments": ""}
    events = [
        event({"role": "assistant", "content": "", "reasoning": "hm"}),
        event({"reasoning": "m", "reasoning_content": "x"}),
        event({"tool_calls": [{"index": 0, "id": "t0", "type": "function", "function": function}]}),
        event({"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}),
        event(
            {
                "tool_calls": [
                    {
                        "index": 1,
                        "id": "t1",
                        "type": "function",
                        "function": {"name": "sub", "arguments": "{}"},
                    }
                ]
            }
        ),
        event({"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}], "refusal": "no"}),
        event({}, finish_reason="tool_calls"),
    ]
    [answer] = run(as_bytes(events))
    assert json.loads(answer.choice)["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning": "hmm",
        "reasoning_content": "x",
        "refusal": "no",
        "tool_calls": [
            {"id": "t0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
            {"id": "t1", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
        ],
    }
    assert answer.completion_tokens is None


def test_halves_of_a_surrogate_pair_over_two_chunks():
    parts = [
        r'data: {"choices":[{"index":0,"delta":{"content":"\ud83d"}}]}',
        r'data: {"choices":[{"index":0,"delta":{"content":"\ude42"},"finish_reason":"stop"}]}',
    ]
    [answer] = run("\n\n".join([*parts, ""]).encode())
    assert json.loads(answer.choice)["message"]["content"] == "🙂"


def test_public_function():
    choices = [spoken(0, "abé"), spoken(1, "c")]
    chunks = [json.loads(event) for event in events_of(choices)[:-1]]

    async def stream(items):
        for item in items:
            yield item

    seen = []
    for items in (chunks, [ChatCompletionChunk.construct(**chunk) for chunk in chunks]):
        completion = asyncio.run(
            consume_chat_completion_stream(stream(items), lambda chunk, _: seen.append(chunk), n=2)
        )
        assert [c.message.content for c in completion.choices] == ["abé", "c"]
        assert [c.token_ids for c in completion.choices] == [c["ids"] for c in choices]
        assert [e.logprob for e in completion.choices[0].logprobs.content] == [
            e["logprob"] for e in choices[0]["entries"]
        ]
        assert (
            completion.usage.prompt_tokens,
            completion.usage.completion_tokens,
            completion.id,
        ) == (2, 6, "c")
        assert completion.prompt_token_ids == [1, 2]
        assert seen == items
        seen.clear()
    with pytest.raises(RequestError, match="in the middle"):
        asyncio.run(consume_chat_completion_stream(stream(chunks[:4])))

    def stop(chunk, completion):
        if len(completion.choices[0].message.content) == 1:
            raise StopIteration

    completion = asyncio.run(consume_chat_completion_stream(stream(chunks), stop))
    assert (completion.choices[0].message.content, completion.choices[0].finish_reason) == (
        "a",
        "stopped_early",
    )
