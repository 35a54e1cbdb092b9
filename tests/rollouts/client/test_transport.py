"""Both ways to a server, over real sockets: the same answers, the same errors, nothing left
open.
"""

import asyncio
import contextlib
import gc
import gzip
import json
import socket
import warnings
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

from ttrl.errors import RequestError, UserError
from ttrl.records import Endpoint
from ttrl.rollouts.client.http_errors import retry_after, status_error
from ttrl.rollouts.client.http_transport import HTTPTransport
from ttrl.rollouts.client.openai_transport import ClientTransport
from ttrl.rollouts.client.stream import stream_answers
from ttrl.rollouts.client.transport import transport_for
from ttrl.rollouts.client.wire import most_bytes

BODY = {"messages": [{"role": "user", "content": "hé"}], "n": 1}
KINDS = ("url", "endpoint", "client", "hooked")


async def nothing(_):
    pass


@contextlib.asynccontextmanager
async def transport_of(kind, url, **options):
    """To a server at `url`: from a base URL, an Endpoint, a plain client, or a client with a hook
    of its own.
    """
    client = None
    if kind == "hooked":
        timeout = options.get("timeout", 60)
        options["http_client"] = httpx.AsyncClient(
            event_hooks={"request": [nothing]}, follow_redirects=True, timeout=timeout
        )
    if kind in ("client", "hooked"):
        client = AsyncOpenAI(base_url=url, api_key="secret-key-123", **options)
    transport = transport_for(
        client or (Endpoint(url, "secret-key-123") if kind == "endpoint" else url)
    )
    assert type(transport) is (HTTPTransport if client is None else ClientTransport)
    try:
        yield transport
    finally:
        await transport.close()
        if client is not None:
            await client.close()


def run(kit, kind, behaviour, act, **options):
    async def main():
        async with kit.serving(behaviour) as server:
            async with transport_of(
                kind, f"http://127.0.0.1:{server.port}/v1", **options
            ) as transport:
                result = await act(transport)
            return result, server

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        result = asyncio.run(main())
        gc.collect()
    return result


def post(transport):
    return transport.post("/chat/completions", BODY)


async def streamed(transport):
    async with transport.stream("/chat/completions", BODY) as parts:
        return b"".join([part async for part in parts])


@pytest.mark.long(but=["hooked-streamed"])
@pytest.mark.parametrize("act", [post, streamed])
@pytest.mark.parametrize("kind", KINDS)
def test_bodies(kit, kind, act):
    """Long for the other ways to make a client: only these show that each sends the same body."""

    def zipped(body, attempt):
        return kit.Reply(gzip.compress(b"hello " * 100), headers={"content-encoding": "gzip"})

    data, server = run(kit, kind, lambda body, attempt: kit.Reply(b'{"a": "\xc3\xa9"}'), act)
    assert (data, server.requests) == (b'{"a": "\xc3\xa9"}', [BODY])
    assert run(kit, kind, zipped, act)[0] == b"hello " * 100
    assert run(kit, kind, lambda body, attempt: kit.Reply(b""), act)[0] == b""


@pytest.mark.parametrize("act", [post, streamed])
@pytest.mark.parametrize("kind", KINDS)
def test_refusals(kit, kind, act, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key-123")

    def expect(reply, words, status, wait=None):
        with pytest.raises(RequestError, match=words) as caught:
            run(kit, kind, lambda body, attempt: reply, act)
        assert (caught.value.kind, caught.value.status, caught.value.retry_after) == (
            "status",
            status,
            wait,
        )
        assert "secret-key-123" not in str(caught.value)

    expect(
        kit.error(400, "too long: 9 > 8"),
        r"^http://127.0.0.1:\d+/v1: HTTP 400: too long: 9 > 8$",
        400,
    )
    expect(
        kit.Reply(b"<html>bad\n gateway</html>", status=502),
        "HTTP 502: <html>bad gateway</html>$",
        502,
    )
    expect(kit.Reply({"detail": "Not Found"}, status=404), "HTTP 404: Not Found$", 404)
    expect(kit.Reply({"error": "plain"}, status=422), "HTTP 422: plain$", 422)
    expect(kit.Reply({"error": "\x1b]0;a\x07"}, status=422), r"HTTP 422: \\x1b\]0;a\\x07$", 422)
    expect(kit.Reply(b"", status=503), "HTTP 503: no words$", 503)
    expect(kit.Reply({"error": {"message": "no secret-key-123"}}, status=401), "HTTP 401: no ", 401)
    expect(kit.Reply({}, status=429, headers={"retry-after": "2.5"}), "HTTP 429", 429, 2.5)


@pytest.mark.parametrize(("status", "hint"), [(401, "OPENAI_API_KEY"), (404, None), (400, None)])
def test_what_is_likely_wrong_with_an_address(kit, status, hint):
    """Of a client object nothing is said: its key comes from where its owner took it, and this
    address ends in /v1.
    """
    for kind in KINDS:
        with pytest.raises(RequestError) as caught:
            run(kit, kind, lambda body, attempt: kit.error(status, "no"), post)
        assert ("OPENAI_API_KEY" in str(caught.value)) == (hint is not None and kind == "url")
        assert "most addresses" not in str(caught.value)
    said = [
        str(status_error(place, 404, b"{}", {}, address=True))
        for place in ("http://h:1", "http://h:1/v1")
    ]
    assert said[0].endswith("(most addresses end in /v1)") and not said[1].endswith(")")


def test_retry_after():
    assert retry_after({"retry-after": "3"}) == 3.0
    past = "Sun, 06 Nov 1994 08:49:37 -0000"  # without a zone: UTC
    assert retry_after({"retry-after": past}) == 0.0
    assert retry_after({"retry-after": "3", "retry-after-ms": "1500"}) == 1.5
    soon = retry_after(
        {"retry-after": format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)}
    )
    assert 50 < soon <= 60
    assert retry_after({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0.0
    for nonsense in ("soon", "-1", "nan", "inf", ""):
        assert retry_after({"retry-after": nonsense}) is None
    assert retry_after({}) is None


@pytest.mark.parametrize("act", [post, streamed])
@pytest.mark.parametrize("kind", KINDS)
def test_broken_connections_and_timeouts(kit, kind, act):
    async def slow(body, attempt):
        await asyncio.sleep(30)

    for reply in (kit.Reply(reset=True), kit.Reply(b'{"id": ', declared_length=1000)):
        with pytest.raises(RequestError) as caught:
            run(kit, kind, lambda body, attempt, reply=reply: reply, act)
        assert caught.value.kind == "connection"
    if kind in ("client", "hooked"):  # elsewhere the reader of the stream keeps the time
        with pytest.raises(
            RequestError, match=r"no answer within the client's timeout of 0.5 s$"
        ) as caught:
            run(kit, kind, slow, act, timeout=0.5)
        assert caught.value.kind == "timeout"


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_listens(kind):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"

        async def main(act):
            async with transport_of(kind, url) as transport:
                await act(transport)

        for act in (post, streamed, lambda transport: transport.get("/models")):
            with pytest.raises(
                RequestError, match=f"^{url}: no connection: .*; check that the server is running$"
            ) as caught:
                asyncio.run(main(act))
            assert caught.value.kind == "connection"


@contextlib.asynccontextmanager
async def listening(answer):
    """A server that reads a request's head and hands the connection to `answer(head, reader,
    writer)`.
    """
    seen = []

    async def serve(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            seen.append(head.decode())
            await answer(head.decode(), reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", seen
    finally:
        server.close()


async def ok(head, reader, writer):
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
    await writer.drain()


@pytest.mark.parametrize("kind", KINDS)
def test_paths_above_v1(kind):
    async def main():
        async with listening(ok) as (url, seen), transport_of(kind, url) as transport:
            await transport.get("/models")
            await transport.get("/metrics", root=True)
            await transport.post("/detokenize", {}, root=True)
            return [head.split(" HTTP")[0] for head in seen]

    assert asyncio.run(main()) == ["GET /v1/models", "GET /metrics", "POST /detokenize"]


def test_settings_of_the_client_are_honoured():
    async def main():
        async with listening(ok) as (url, seen):
            client = AsyncOpenAI(
                base_url=url + "/",
                api_key="secret-key-123",
                organization="org",
                project="proj",
                default_headers={"X-Mine": "yes"},
                default_query={"version": "a b"},
                timeout=7.0,
            )
            transport = transport_for(client)
            await transport.post("/chat/completions", {})
            await transport.close()
            await client.close()
            return transport, url, seen[0].lower()

    transport, url, head = asyncio.run(main())
    assert (
        head.startswith("post /v1/chat/completions?version=a+b http/1.1") or "version=a%20b" in head
    )
    for line in (
        "authorization: bearer secret-key-123",
        "x-mine: yes",
        "openai-organization: org",
        "openai-project: proj",
    ):
        assert line in head
    assert transport.identity == {"base_url": url, "organization": "org", "project": "proj"}
    assert "secret" not in repr(transport)


def test_the_key_for_a_base_url(monkeypatch):
    def head(**env):
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)

        async def main():
            async with listening(ok) as (url, seen), transport_of("url", url) as transport:
                await transport.get("/models")
                return seen[0]

        return asyncio.run(main())

    assert "Authorization: Bearer EMPTY" in head()
    assert "Authorization: Bearer mine" in head(OPENAI_API_KEY="mine")
    # No proxy for ourselves.
    assert "GET /v1/models" in head(
        http_proxy="http://127.0.0.1:9", HTTP_PROXY="http://127.0.0.1:9"
    )


def test_cancelling_closes_the_connection_and_leaves_nothing():
    async def main(kind, act):
        closed = asyncio.Event()

        async def hang(head, reader, writer):
            if "chunked" in act.__name__:
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
            while await reader.read(1000):
                pass
            closed.set()

        async with listening(hang) as (url, seen), transport_of(kind, url) as transport:
            task = asyncio.create_task(act(transport))
            while not seen:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(closed.wait(), 60)
            async with asyncio.timeout(60):
                while [
                    t
                    for t in asyncio.all_tasks() - {asyncio.current_task()}
                    if "serve" not in repr(t)
                ]:
                    await asyncio.sleep(0.01)

    async def chunked(transport):
        return await streamed(transport)

    for kind in KINDS:
        for act in (post, streamed, chunked):
            asyncio.run(main(kind, act))


@pytest.mark.parametrize("kind", KINDS)
def test_leaving_a_stream_closes_its_connection(kind):
    async def main():
        closed = asyncio.Event()

        async def talk(head, reader, writer):
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                while not reader.at_eof():
                    writer.write(b"3\r\nabc\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.005)
            closed.set()

        async with listening(talk) as (url, _), transport_of(kind, url) as transport:
            async with transport.stream("/chat/completions", {}) as parts:
                async for part in parts:
                    assert part.startswith(b"abc")
                    break
            await asyncio.wait_for(closed.wait(), 60)

    asyncio.run(main())


def test_one_endpoint_in_several_loops(kit):
    async def main():
        async with kit.serving(lambda body, attempt: kit.Reply(b"{}")) as server:
            transport = transport_for(Endpoint(f"http://127.0.0.1:{server.port}/v1", "k"))
            try:
                return await post(transport)
            finally:
                await transport.close()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [asyncio.run(main()) for _ in range(2)] == [b"{}", b"{}"]
        gc.collect()


@pytest.mark.parametrize(
    ("client", "words"),
    [
        (OpenAI(api_key="k"), "give an AsyncOpenAI client"),
        ("localhost:8000", "base URL such as"),
        ("ftp://x/v1", "base URL such as"),
        ("", "base URL such as"),
        ("http://[", "base URL such as"),
        ("http://user:password@host/v1", "credentials"),
        ("http://host/v1?key=password", "credentials"),
        (None, "a NoneType"),
        (7, "an AsyncOpenAI client, or a base URL"),
    ],
)
def test_wrong_clients(client, words):
    with pytest.raises(UserError, match=words) as caught:
        transport_for(client)
    assert "password" not in str(caught.value)


def test_the_same_json_whatever_the_way(kit):
    body = {
        "messages": [{"role": "user", "content": "a\u2028é\ud800"}],
        "temperature": 0.1,
        "n": 1,
        "stop": None,
    }

    async def act(transport):
        await transport.post("/chat/completions", body)

    seen = [
        run(kit, kind, lambda b, attempt: kit.Reply(b"{}"), act)[1].requests[0]
        for kind in ("url", "endpoint")
    ]
    assert seen == [json.loads(json.dumps(body))] * 2


@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    ],
)
def test_what_is_no_http(answer):
    async def say(head, reader, writer):
        writer.write(answer)
        await writer.drain()

    async def main():
        async with listening(say) as (url, _), transport_of("url", url) as transport:
            await streamed(transport)

    with pytest.raises(RequestError, match="is not HTTP") as caught:
        asyncio.run(main())
    assert caught.value.kind == "malformed"


SMALL = {**BODY, "max_tokens": 64}


def streamed_answers(transport):
    return stream_answers(transport, SMALL, 1, stall_timeout=5.0)


@pytest.mark.parametrize(
    "act", [lambda transport: transport.post("/chat/completions", SMALL), streamed_answers]
)
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_without_end_is_left(kind, act):
    """It sends 64 MB, and would go on."""
    sent = 0

    async def endless(head, reader, writer):
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: ")
        for _ in range(1000):
            writer.write(b"x" * 64_000)
            await writer.drain()
            sent += 64_000

    async def main():
        async with listening(endless) as (url, _), transport_of(kind, url) as transport:
            with pytest.raises(
                RequestError, match="the server's answer is larger than 4 MiB"
            ) as caught:
                await act(transport)
            return caught.value.kind

    assert asyncio.run(main()) == "malformed"
    assert sent < 40 * 10**6  # the system's buffers take some


def test_how_large_an_answer_may_be():
    """A token with 20 alternatives, as vLLM writes them, in a chunk of its own; and what asks for
    more gets more.
    """
    entry = {"token": "€" * 8, "logprob": -12.345678901234567, "bytes": [226, 130, 172] * 8}
    chunk = {
        "id": "chatcmpl-" + "0" * 32,
        "object": "chat.completion.chunk",
        "created": 1767225600,
        "model": "m" * 100,
    }
    delta = {
        "index": 0,
        "delta": {"content": "€" * 8},
        "token_ids": [123456],
        "finish_reason": None,
        "stop_reason": None,
    }
    for alternatives in (0, 20):
        logprobs = {"content": [{**entry, "top_logprobs": [entry] * alternatives}]}
        size = len(
            f"data: {json.dumps({**chunk, 'choices': [{**delta, 'logprobs': logprobs}]})}\n\n"
        )
        asked = {"n": 8, "max_tokens": 1000, "logprobs": True, "top_logprobs": alternatives}
        assert 8 * 1000 * size < most_bytes(asked) < 8 * 1000 * size * 4 + 2**22
    assert (
        most_bytes({"max_tokens": 1, "prompt_logprobs": 1}) > most_bytes({"max_tokens": 1})
        and most_bytes(None) > 10**8
    )
    assert most_bytes({"max_completion_tokens": 1, "top_logprobs": -1}) > 2**17 * 512


@pytest.mark.parametrize(
    "words",
    [
        '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
        'tool_choice="required" requires --tool-call-parser to be set',
        'tool_choice=function "look" requires --tool-call-parser to be set',
    ],
)
def test_a_server_without_a_parser_of_calls_is_told_what_to_set(words: str) -> None:
    body = json.dumps({"error": {"message": words}}).encode()
    said = str(status_error("http://h:1/v1", 400, body, {}))
    assert 'server={"tool_call_parser": "hermes"} in a run, server_args (--server-args)' in said
    assert "--vllm tool_call_parser=hermes for `ttrl serve`" in said and words in said
