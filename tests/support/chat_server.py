"""Small real HTTP servers on the loopback: one answers as vLLM does, or misbehaves as it is told;
`threaded` serves callers that have no event loop."""

import asyncio
import contextlib
import json
import math
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

from openai import AsyncOpenAI

PROMPT_IDS = [7, 8, 9]


@dataclass
class Reply:
    """What to answer: a status and a body (JSON, or bytes as they are), a broken connection, or
    nothing for a while.
    """

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    reset: bool = False
    declared_length: int | None = None


def choice(index: int, text: str | None, **changes: Any) -> dict[str, Any]:
    """A choice with one token id and logprob per character and an end-of-turn token, as vLLM 0.32
    writes it.
    """
    letters = text or ""
    token_ids = [ord(letter) for letter in letters] + [0]
    content = [
        {"token": chr(i), "logprob": -(k + 1) / 8, "bytes": [i % 256], "top_logprobs": []}
        for k, i in enumerate(token_ids)
    ]
    return {
        "index": index,
        "message": {"role": "assistant", "content": text, "reasoning": None},
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": token_ids,
        **changes,
    }


def expected_logprobs(text: str) -> list[float]:
    return [-(k + 1) / 8 for k in range(len(text) + 1)]


def completion(choices: list[dict[str, Any]], **changes: Any) -> Reply:
    sampled = sum(len(c.get("token_ids") or ()) for c in choices)
    usage = {
        "prompt_tokens": len(PROMPT_IDS),
        "completion_tokens": sampled,
        "total_tokens": sampled + len(PROMPT_IDS),
    }
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": choices,
        "usage": usage,
        "prompt_logprobs": None,
        "prompt_token_ids": PROMPT_IDS,
    }
    return Reply({**body, **changes})


def error(status: int, message: str = "as told") -> Reply:
    return Reply(
        {"error": {"message": message, "type": "T", "param": None, "code": status}}, status=status
    )


Behaviour = Callable[[dict[str, Any], int], Reply | Awaitable[Reply]]


class Server:
    """`behaviour(request body, attempt)`: attempts of the same prompt count from 1."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.requests: list[dict[str, Any]] = []
        self.attempts: Counter[str] = Counter()
        self.in_flight = self.most_in_flight = self.answered = 0
        self.port = 0
        self.open: set[asyncio.StreamWriter] = set()

    def client(self, **kwargs: Any) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="key", **kwargs)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.add(writer)
        with contextlib.suppress(
            asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError
        ):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                # /models, to see whether it is there; it has no /metrics.
                if head.startswith("get "):
                    status = "200 OK" if head.startswith("get /v1/models ") else "404 Not Found"
                    writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 2\r\n\r\n{{}}".encode())
                    continue
                length = int(head.split("content-length:")[1].split("\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                if not await self.answer(body, writer):
                    break
        writer.close()

    async def answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        prompt = json.dumps(body.get("messages", body.get("prompt")))
        self.requests.append(body)
        self.attempts[prompt] += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            reply = self.behaviour(body, self.attempts[prompt])
            if not isinstance(reply, Reply):
                reply = await reply
        finally:
            self.in_flight -= 1
        if reply.reset:
            writer.transport.abort()
            return False
        data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        headers = {"content-type": "application/json", **reply.headers}
        lines = [
            f"HTTP/1.1 {reply.status} X",
            f"content-length: {reply.declared_length or len(data)}",
        ]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        await writer.drain()
        self.answered += 1
        return reply.declared_length is None


@contextlib.asynccontextmanager
async def serving(behaviour: Behaviour) -> AsyncIterator[Server]:
    server = Server(behaviour)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        for writer in server.open:
            writer.transport.abort()


class ChatHandler(BaseHTTPRequestHandler):
    """Answers with what `reply` says of a request: (text, finish reason), (message, "error"), or
    (events, "stream").
    """

    models: tuple[str, ...] = ("m",)

    def reply(self, body: dict[str, Any]) -> tuple[str, str]:
        raise NotImplementedError

    def do_GET(self) -> None:
        names = self.models if self.path.endswith("/v1/models") else ()
        self.send({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text, reason = self.reply(body)
        if reason == "error":
            return self.send({"error": {"message": text}}, status=400)
        if reason == "stream":
            return self.send(text, kind="text/event-stream")
        message = {"role": "assistant", "content": text}
        choices = [
            {"index": i, "finish_reason": reason, "message": message}
            for i in range(body.get("n") or 1)
        ]
        usage = {
            "prompt_tokens": 10,
            "completion_tokens": 2 * len(choices),
            "total_tokens": 10 + 2 * len(choices),
        }
        return self.send(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 1,
                "model": "m",
                "choices": choices,
                "usage": usage,
            }
        )

    def send(
        self,
        body: Any,
        *,
        status: int = 200,
        kind: str = "application/json",
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        """Not to the terminal."""


class _Threaded(ThreadingHTTPServer):
    # The sixth connection of a moment is dropped by default, and TCP tries again after a second.
    request_queue_size = 128


@contextlib.contextmanager
def threaded(handler: type[ChatHandler]) -> Iterator[str]:
    """Serve from a thread; yields the address."""
    with _Threaded(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


class Kit:
    """What the tests of this folder build answers from (test files cannot import this file)."""

    prompt_ids = PROMPT_IDS
    Reply, choice, completion, error = (
        Reply,
        staticmethod(choice),
        staticmethod(completion),
        staticmethod(error),
    )
    expected_logprobs, serving = staticmethod(expected_logprobs), staticmethod(serving)

    @staticmethod
    def echo(body: dict[str, Any], attempt: int = 1) -> Reply:
        """n choices `PROMPT#0`, `PROMPT#1`, …"""
        prompt = body["messages"][-1]["content"]
        return completion([choice(k, f"{prompt}#{k}") for k in range(body["n"])])

    @staticmethod
    def run(
        behaviour: Behaviour, tasks: Any, *, client: dict[str, Any] | None = None, **kwargs: Any
    ) -> tuple[Any, Server]:
        """get_task_results against a server of this behaviour: (results, server)."""
        from ttrl.rollouts.task_results import get_task_results

        async def main() -> tuple[Any, Server]:
            async with (
                serving(behaviour) as server,
                server.client(**(client or {})) as openai_client,
            ):
                return await get_task_results(
                    tasks, openai_client, "m", pbar=False, **kwargs
                ), server

        return asyncio.run(main())

    @staticmethod
    def same(a: float, b: float) -> bool:
        return a == b or (math.isnan(a) and math.isnan(b))
