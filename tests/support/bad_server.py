"""A small fast HTTP server that answers as vLLM does and misbehaves on purpose, in this process or
in one of its own:

    python tests/support/bad_server.py --port 0 --faults all=0.2 --seed 1      prints its port

Which fault a request meets is drawn from (seed, request, how often it has been asked): equal runs
meet equal faults. The answers are those of bad_answers.py. GET /stats says what was done; POST
/control {"faults": …, "restart": seconds} changes it.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import urllib.request
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

sys.path.append(str(Path(__file__).parents[1]))  # it is started by its path, too
from support.bad_answers import Frame, Model, Spoken
from support.bad_faults import FAULTS, Ask, Body, Misbehaviour, Plan, drawn, parse_shares

WORDS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    408: "Request Timeout",
    422: "Unprocessable Entity",
}
WORDS |= {
    429: "Too Many Requests",
    500: "Internal Server Error",
    502: "Bad Gateway",
    503: "Service Unavailable",
}


@dataclass
class BadServer:
    """retry_after: seconds, what 429 asks for. latency: before an answer starts. token_delay:
    between a stream's steps.
    """

    plan: Plan = lambda ask: None
    model: Model = field(default_factory=Model)
    seed: int = 0
    latency: float = 0.0
    token_delay: float = 0.0
    retry_after: float = 1.0
    refused_for: float = 0.2
    restart_after: int = 0
    """Choices after which it restarts once, for `downtime` seconds; 0: never."""
    downtime: float = 1.0
    gate: int = 0
    """The first answers start when so many requests are there at once (or after a minute); 0: at
    once.
    """
    kv_blocks: int = 0
    """As /metrics says; 0: there is no /metrics."""
    port: int = 0

    def __post_init__(self) -> None:
        self.faults: Counter[str] = Counter()
        self.samples_failed: Counter[str] = Counter()
        """Of "final" faults: how many samples each cost."""
        self.delivered: defaultdict[str, list[int]] = defaultdict(list)
        """The numbers of the answers that each prompt was given completely."""
        self.asked: Counter[str] = Counter()
        """Requests by their prompt."""
        self.attempts: Counter[tuple[bytes, int, int]] = Counter()
        self.handed_out: Counter[bytes] = Counter()
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.asks: list[dict[str, Any]] = []
        """Of the first 1,000 requests: n, seed, stream and so on, as they came."""
        self.requests = self.completions = self.in_flight = self.most_in_flight = (
            self.most_connections
        ) = self.aborted = 0
        self.restarts = self.bytes_sent = self.running = 0
        self.listener: asyncio.Server | None = None
        self.opened = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def stats(self) -> dict[str, Any]:
        names = (
            "requests",
            "completions",
            "in_flight",
            "most_in_flight",
            "most_connections",
            "aborted",
            "restarts",
            "bytes_sent",
        )
        shown: dict[str, Any] = {name: getattr(self, name) for name in names}
        shown |= {
            "connections": len(self.connections),
            "faults": dict(self.faults),
            "samples_failed": dict(self.samples_failed),
        }
        return {
            **shown,
            "asked": dict(self.asked),
            "delivered": dict(self.delivered),
            "asks": self.asks,
        }

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        self.listener = await loop.create_server(
            lambda: Connection(self), "127.0.0.1", self.port, backlog=8192
        )
        self.port = self.listener.sockets[0].getsockname()[1]

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
            self.listener = None
        for connection in list(self.connections):
            connection.reset()
        for task in self.tasks:
            task.cancel()

    async def away(self, seconds: float, *, reset: bool) -> None:
        """Nobody listens for a while; with `reset` all connections go too, as when a server dies
        and is started again.
        """
        if self.listener is None:
            return
        self.listener.close()
        self.listener = None
        for connection in list(self.connections) if reset else ():
            connection.reset()
        self.restarts += reset
        await asyncio.sleep(seconds)
        await self.listen()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def count(self, completions: int) -> None:
        before, self.completions = self.completions, self.completions + completions
        if before < self.restart_after <= self.completions:
            self.spawn(self.away(self.downtime, reset=True))

    def get(self, path: str) -> tuple[int, bytes]:
        if path == "/health":
            return 200, b""
        if path == "/v1/models":
            card = {
                "id": "m",
                "object": "model",
                "created": 1,
                "owned_by": "vllm",
                "root": "m",
                "max_model_len": 32768,
            }
            return 200, json.dumps({"object": "list", "data": [card]}).encode()
        if path == "/stats":
            return 200, msgspec.json.encode(self.stats())
        if path == "/metrics" and self.kv_blocks:
            label = 'engine="0",model_name="m"'
            lines = [
                f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{self.kv_blocks}",engine="0"}} 1.0'
            ]
            lines += [
                f"vllm:num_requests_running{{{label}}} {float(self.running)}",
                f"vllm:num_requests_waiting{{{label}}} 0.0",
            ]
            usage = min(1.0, self.running * self.model.tokens[1] / 16 / self.kv_blocks)
            lines += [
                f"vllm:kv_cache_usage_perc{{{label}}} {usage}",
                f"vllm:num_preemptions_total{{{label}}} 0.0",
            ]
            return 200, "\n".join([*lines, ""]).encode()
        return 404, b'{"detail":"Not Found"}'

    def control(self, data: bytes) -> tuple[int, bytes]:
        told = json.loads(data)
        if "faults" in told:
            self.plan = drawn(told["faults"], told.get("seed", self.seed))
        if "restart" in told:
            self.spawn(self.away(told["restart"], reset=True))
        return 200, b"{}"

    def read(self, data: bytes, accepts_gzip: bool) -> Ask:
        body = msgspec.json.decode(data, type=Body)
        key = hashlib.blake2b(
            msgspec.json.encode([body.messages, body.temperature]), digest_size=16
        ).digest()
        n = body.n or 1
        if body.seed is not None:
            first = body.seed
        elif body.temperature == 0.0:
            first = 0
        else:
            first = self.handed_out[key]
            self.handed_out[key] += n
        identity = (key, first if body.seed is not None else -1, n)
        self.attempts[identity] += 1
        self.requests += 1
        if len(self.asks) < 1000:
            self.asks.append(
                {k: v for k, v in msgspec.to_builtins(body).items() if k != "messages"}
            )
        prompt = str(body.messages[-1].get("content", ""))
        self.asked[prompt] += 1
        return Ask(body, key, prompt, n, first, self.attempts[identity], accepts_gzip)

    def answers(self, ask: Ask) -> list[Spoken]:
        most = ask.body.max_completion_tokens or ask.body.max_tokens
        same = ask.body.temperature == 0.0
        spoken = [
            self.model.say(ask.key, 0 if same else ask.first + i, i, most) for i in range(ask.n)
        ]
        for s in spoken:
            s.with_logprobs = bool(ask.body.logprobs)
        return spoken

    def frame(self, ask: Ask) -> Frame:
        ids = [7, 8, 9, *ask.key[:5]]
        return Frame(
            f"chatcmpl-{self.requests}",
            msgspec.json.encode(ask.body.model),
            ids,
            bool(ask.body.return_token_ids),
        )


class Connection(asyncio.Protocol):
    def __init__(self, server: BadServer) -> None:
        self.server = server
        self.buffer = b""
        self.work: asyncio.Task[None] | None = None
        self.busy = False
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.server.connections.add(self)
        self.server.most_connections = max(
            self.server.most_connections, len(self.server.connections)
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        if self.work is not None:
            self.work.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer = self.buffer + data if self.buffer else data
        if not self.busy:
            self.next_request()

    def next_request(self) -> None:
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self.buffer[:end].lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(self.buffer) < end + 4 + length:
            return
        data, self.buffer = self.buffer[end + 4 : end + 4 + length], self.buffer[end + 4 + length :]
        path = self.first_line(head)
        if path != "/v1/chat/completions":
            status, body = (
                self.server.control(data) if path == "/control" else self.server.get(path)
            )
            self.write(
                self.plain(
                    status,
                    body,
                    "application/json" if path != "/metrics" else "text/plain; version=0.0.4",
                )
            )
            return
        server, self.busy = self.server, True
        ask = server.read(
            data, b"gzip" in head.partition(b"accept-encoding:")[2].split(b"\r\n", 1)[0]
        )
        server.in_flight += 1
        server.running += ask.n
        server.most_in_flight = max(server.most_in_flight, server.in_flight)
        if server.in_flight >= server.gate:
            server.opened.set()
        fault = server.plan(ask)
        if fault is None and not ask.stream and not server.latency and server.opened.is_set():
            self.answer_at_once(ask)
        else:
            self.work = server.spawn(self.answer(ask, fault))

    def first_line(self, head: bytes) -> str:
        return head.split(b" ", 2)[1].decode("latin-1").split("?")[0]

    def answer_at_once(self, ask: Ask) -> None:
        spoken = self.server.answers(ask)
        self.write(self.plain(200, self.server.frame(ask).completion(spoken)))
        self.over(ask, spoken)

    async def answer(self, ask: Ask, fault: str | None) -> None:
        delivered: list[Spoken] = []
        try:
            if fault is not None:
                assert FAULTS[fault][1] in ("both", "stream" if ask.stream else "plain"), (
                    fault,
                    ask.stream,
                )
                if fault != "gzip" or ask.gzip:
                    self.server.faults[fault] += 1
            if not self.server.opened.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.server.opened.wait(), 60.0)
            if self.server.latency:
                await asyncio.sleep(self.server.latency)
            delivered = await Misbehaviour(self, ask, fault).answer()
        except asyncio.CancelledError:  # the client went away, or the server does
            if fault not in ("silence", "stall"):
                self.server.aborted += 1
        finally:
            self.work = None
            self.over(ask, delivered)

    def over(self, ask: Ask, delivered: list[Spoken]) -> None:
        self.server.in_flight -= 1
        self.server.running -= ask.n
        self.busy = False
        self.server.delivered[ask.prompt].extend(s.number for s in delivered)
        self.server.count(len(delivered))
        if self.buffer and not self.transport.is_closing():
            self.next_request()

    def plain(
        self,
        status: int,
        body: bytes,
        kind: str = "application/json",
        length: int | None = None,
        more: str = "",
    ) -> bytes:
        head = f"HTTP/1.1 {status} {WORDS[status]}\r\nserver: bad\r\ncontent-type: {kind}\r\n{more}"
        return (
            f"{head}content-length: {len(body) if length is None else length}\r\n\r\n".encode()
            + body
        )

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.server.bytes_sent += len(data)
            self.transport.write(data)

    def reset(self) -> None:
        sock = self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError):  # closed by the other side already
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


@contextlib.asynccontextmanager
async def serving(
    faults: str | Plan = "", *, seed: int = 0, **settings: Any
) -> AsyncIterator[BadServer]:
    """In this process and loop. `faults`: a spec, or a function of the Ask that names the fault."""
    server = BadServer(
        drawn(faults, seed) if isinstance(faults, str) else faults, seed=seed, **settings
    )
    await server.listen()
    try:
        yield server
    finally:
        server.close()
        await asyncio.gather(*server.tasks, return_exceptions=True)


class Process:
    """The server in a process of its own."""

    def __init__(self, port: int, process: subprocess.Popen[str]) -> None:
        self.url, self.root, self.process = (
            f"http://127.0.0.1:{port}/v1",
            f"http://127.0.0.1:{port}",
            process,
        )

    def stats(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.root}/stats", timeout=60) as answer:
            return json.load(answer)

    def control(self, **told: Any) -> None:
        urllib.request.urlopen(
            f"{self.root}/control", data=json.dumps(told).encode(), timeout=60
        ).close()


@contextlib.contextmanager
def process(*options: str) -> Iterator[Process]:
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--parent",
        str(os.getpid()),
        *options,
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        yield Process(int(child.stdout.readline()), child)
    finally:
        child.terminate()
        child.wait(10)
        child.stdout.close()


async def main(args: argparse.Namespace) -> None:
    low, _, high = args.tokens.partition("-")
    model = Model((int(low), int(high or low)), parse_shares(args.answers))
    settings = {
        name: getattr(args, name)
        for name in (
            "latency",
            "token_delay",
            "retry_after",
            "restart_after",
            "downtime",
            "gate",
            "kv_blocks",
            "port",
        )
    }
    async with serving(args.faults, seed=args.seed, model=model, **settings) as server:
        sys.stdout.write(f"{server.port}\n")
        sys.stdout.flush()
        # Not left behind when the tests are killed.
        while args.parent == 0 or os.getppid() == args.parent:
            await asyncio.sleep(1.0)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument(
        "--faults", default="", help='such as "all=0.2" or "reset=0.1,http_500=0.05"'
    )
    parser.add_argument(
        "--answers",
        default="",
        help='unusual answers, such as "empty=0.02,null=0.01,length=0.1,long=0.001"',
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tokens", default="8-64", help="of an answer: one number, or fewest and most"
    )
    parser.add_argument(
        "--latency", type=float, default=0.0, help="seconds before an answer starts"
    )
    parser.add_argument(
        "--token-delay", type=float, default=0.0, help="seconds between the steps of a stream"
    )
    parser.add_argument("--retry-after", type=float, default=1.0, help="seconds, what 429 asks for")
    parser.add_argument(
        "--restart-after", type=int, default=0, help="choices after which it restarts once"
    )
    parser.add_argument("--downtime", type=float, default=1.0, help="seconds that a restart takes")
    parser.add_argument(
        "--gate",
        type=int,
        default=0,
        help="answer nobody before so many requests are there at once",
    )
    parser.add_argument(
        "--kv-blocks",
        type=int,
        default=0,
        help="blocks of 16 tokens, as /metrics says; 0: no /metrics",
    )
    parser.add_argument(
        "--parent", type=int, default=0, help="ends when this process, its parent, has ended"
    )
    return parser


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(make_parser().parse_args()))
