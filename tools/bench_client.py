"""What does a sampled token cost the client? CPU time of this process per token, against a server
that costs it nothing.

    python tools/bench_client.py [--tokens 64] [--rounds 2] [--uvloop]

The server is a process of its own on the loopback: it answers as vLLM does (token ids,
log-probabilities), from memory. Streams get their tokens one step at a time, all streams in step,
as from a real engine. Clients, alternating:

openai   the openai client: completions.create, with every choice (or chunk) read
ttrl     ChatAttempt, read_choice, openai_choice, as in get_task_results; streams with an on_chunk
         that reads every token

Printed: the median CPU µs per token over the rounds, and how many times cheaper ttrl is.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import openai

from ttrl.records import Sample
from ttrl.rollouts.client.attempts import ChatAttempt
from ttrl.rollouts.client.chat_completions import ChatRequest
from ttrl.rollouts.client.choices import openai_choice, read_choice
from ttrl.rollouts.client.transport import transport_for

STEP = 0.04
"""Seconds between two steps of the server."""
# name, samples per request, requests at once, streamed, tokens per chunk
CASES = [
    ("n=16, not streamed", 16, 32, False, 1),
    ("n=1, not streamed", 1, 128, False, 1),
    ("n=1, streamed, every token", 1, 96, True, 1),
    ("n=16, streamed, every token", 16, 6, True, 1),
    ("n=1, streamed, stream_interval 8", 1, 96, True, 8),
]


# The server


def _entry(i: int) -> dict[str, Any]:
    return {
        "token": f" word{i % 10}",
        "logprob": -0.001234567 * (i + 1),
        "bytes": list(f" word{i % 10}".encode()),
        "top_logprobs": [],
    }


def _answer(n: int, tokens: int) -> bytes:
    message = {
        "role": "assistant",
        "content": "".join(_entry(i)["token"] for i in range(tokens)),
        "reasoning": None,
    }
    choice = {
        "message": message,
        "logprobs": {"content": [_entry(i) for i in range(tokens)]},
        "finish_reason": "stop",
    }
    choices = [
        {"index": k, **choice, "stop_reason": None, "token_ids": list(range(1000, 1000 + tokens))}
        for k in range(n)
    ]
    usage = {"prompt_tokens": 64, "completion_tokens": n * tokens, "total_tokens": 64 + n * tokens}
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": choices,
        "usage": usage,
    }
    return json.dumps(body | {"prompt_token_ids": list(range(64))}, separators=(",", ":")).encode()


def _event(choices: list[Any], **more: Any) -> bytes:
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": choices,
        **more,
    }
    data = b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def _steps(n: int, tokens: int, interval: int) -> list[list[bytes]]:
    """What is written at each step: one chunk per choice."""
    role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    steps = [[_event([{"index": k, **role}], prompt_token_ids=list(range(64))) for k in range(n)]]
    for start in range(0, tokens, interval):
        ids = list(range(start, min(start + interval, tokens)))
        entries = [_entry(i) for i in ids]
        end = "stop" if ids[-1] == tokens - 1 else None
        part = {
            "delta": {"content": "".join(e["token"] for e in entries)},
            "logprobs": {"content": entries},
            "finish_reason": end,
        }
        steps.append([_event([{"index": k, **part, "token_ids": ids}]) for k in range(n)])
    usage = {"prompt_tokens": 64, "completion_tokens": n * tokens, "total_tokens": 64 + n * tokens}
    done = b"data: [DONE]\n\n"
    steps[-1] += [_event([], usage=usage), b"%x\r\n%b\r\n0\r\n\r\n" % (len(done), done)]
    return steps


class _Connection(asyncio.Protocol):
    live: "set[_Connection]" = set()  # noqa: RUF012 - of the one server of this process
    known: "dict[Any, Any]" = {}  # noqa: RUF012

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.data = b""
        self.left: list[list[bytes]] = []

    def connection_lost(self, error: Exception | None) -> None:
        self.live.discard(self)

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, found, rest = self.data.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]) if found else 0
        if not found or len(rest) < length:
            return
        self.data = rest[length:]
        body = json.loads(rest[:length])
        key = (
            body["n"],
            body["max_tokens"],
            body.get("stream", False),
            body.get("stream_interval", 1),
        )
        if key not in self.known:
            self.known[key] = _steps(key[0], key[1], key[3]) if key[2] else _answer(key[0], key[1])
        answer = self.known[key]
        if key[2]:
            head = b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked"
            self.transport.write(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n" % head)
            self.left = list(reversed(answer))
            self.live.add(self)
        else:
            head = b"content-type: application/json\r\ncontent-length: %d" % len(answer)
            self.transport.write(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n%b" % (head, answer))


async def serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Connection, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    gone = loop.run_in_executor(None, sys.stdin.read)  # ends with its parent
    while not gone.done():
        await asyncio.sleep(STEP)
        for connection in list(_Connection.live):
            for event in connection.left.pop():
                connection.transport.write(event)
            if not connection.left:
                _Connection.live.discard(connection)


# The ways


def _params(tokens: int, interval: int) -> dict[str, Any]:
    extra = {"extra_body": {"stream_interval": interval}} if interval > 1 else {}
    return {"max_tokens": tokens, "temperature": 1.0, "logprobs": True, **extra}


MESSAGES = [{"role": "user", "content": "sort these letters please " * 8}]


async def with_ttrl(
    url: str, n: int, requests: int, streamed: bool, interval: int, tokens: int
) -> int:
    transport = transport_for(url)
    request = ChatRequest.of("m", params=_params(tokens, interval), token_ids=True)
    seen = 0

    def on_chunk(chunk: Any, completion: Any) -> None:
        nonlocal seen
        for part in chunk.choices:
            if part.logprobs is not None:
                for entry in part.logprobs.content:
                    seen += entry.logprob < 0

    async def one() -> int:
        count = 0
        attempt = ChatAttempt(
            request=request, messages=MESSAGES, n=n, on_chunk=on_chunk if streamed else None
        )
        for answer in await attempt(transport):
            assert answer is not None
            sample = Sample(task_id="t", sample=0, messages=MESSAGES)
            read_choice(sample, answer, "t", token_ids=True, logprobs=True)
            assert openai_choice(answer).message.content
            count += len(sample.logprobs or ())
        return count

    try:
        count = sum(await asyncio.gather(*(one() for _ in range(requests))))
        assert not streamed or seen == count
        return count
    finally:
        await transport.close()


async def with_openai(
    url: str, n: int, requests: int, streamed: bool, interval: int, tokens: int
) -> int:
    client = openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0)
    params = _params(tokens, interval)
    params["extra_body"] = {**params.get("extra_body", {}), "return_token_ids": True}

    async def whole() -> int:
        completion: Any = await client.chat.completions.create(
            model="m", messages=MESSAGES, n=n, **params
        )
        values = [
            [e.logprob for e in c.logprobs.content]
            for c in completion.choices
            if c.message.content and c.token_ids
        ]
        return sum(map(len, values))

    async def stream() -> int:
        options = {"include_usage": True}
        chunks: Any = await client.chat.completions.create(
            model="m", messages=MESSAGES, n=n, stream=True, stream_options=options, **params
        )
        text = []
        ids = []
        values = []
        async for chunk in chunks:
            for part in chunk.choices:
                text.append(part.delta.content)
                if part.logprobs is not None:
                    values += [entry.logprob for entry in part.logprobs.content]
                    ids += part.token_ids
        return len(values)

    async with client:
        return sum(
            await asyncio.gather(*((stream if streamed else whole)() for _ in range(requests)))
        )


WAYS: dict[str, Callable[..., Awaitable[int]]] = {"openai": with_openai, "ttrl": with_ttrl}


async def measure(url: str, tokens: int, rounds: int) -> None:
    print(f"{'CPU µs per token':34}" + "".join(f"{name:>10}" for name in WAYS) + f"{'ratio':>10}")
    for name, *case in CASES:
        seen: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds + 1):
            for way, run in WAYS.items():
                start = time.process_time()
                count = await run(url, *case, tokens)
                seen[way].append((time.process_time() - start) / count * 1e6)
                assert count == case[0] * case[1] * tokens, (way, name, count)
        # The first round imports and warms up.
        medians = [statistics.median(values[1:]) for values in seen.values()]
        print(
            f"{name:34}"
            + "".join(f"{value:10.1f}" for value in medians)
            + f"{medians[0] / medians[1]:10.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each completion")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--uvloop", action="store_true", help="run the client on uvloop (install it first)"
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
        return
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None and server.stdin is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
        try:
            work = measure(url, options.tokens, options.rounds)
            if options.uvloop:
                import uvloop

                uvloop.run(work)
            else:
                asyncio.run(work)
        finally:
            server.stdin.close()


if __name__ == "__main__":
    main()
