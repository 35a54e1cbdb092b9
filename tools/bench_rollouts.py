"""What does `get_task_results` cost, compared with the least that any client must do? On one real
vLLM server, alternating.

    python tools/bench_rollouts.py [--tasks 32] [--samples 16] [--tokens 64] [--rounds 5]
        [--url URL --model NAME]
    python tools/bench_rollouts.py --agents | --fake [--sessions 64] [--turns 8] [--tokens 64]

Clients, each sampling tasks × samples completions of exactly `tokens` tokens with token ids and
log-probabilities:

raw           a bare load generator: aiohttp posts the bodies and discards the answers unread
ttrl          get_task_results, n samples per request, not streamed: what training uses
ttrl stream   the same with on_chunk, which sees every token: one stream per sample
ttrl stream n the same with one stream for all samples of a task: samples_per_request=n
raw stream    a bare generator for one stream per sample: aiohttp reads the streams and discards
              them
openai        the plain openai client, n samples per request, not streamed, its answers read
openai stream the plain openai client, one stream per sample, its chunks read

And for agents, --sessions at once, each of which makes --turns requests of one sample, one after
another:

raw turns     aiohttp asks the server directly and discards the answers unread
chat turns    tasks with a rollout: the same requests by `await chat(…)`
agent turns   ttrl.agent_task: aiohttp asks the session's endpoint. What the proxy costs a request
              is the time beyond that of chat turns, divided by the requests, as all share one
              process; of CPU, without that of raw turns, the agent's own

Printed: tokens per second of wall clock, as a share of the raw client of the same kind, and the
client's CPU time per token. Client and server share the machine, so a cheap client leaves more of
it to the server. The server's own limits apply to all.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import openai
from aiohttp import web

from ttrl.agents.agent_task import agent_task
from ttrl.agents.session import Session
from ttrl.records import Endpoint
from ttrl.rollouts.task_results import get_task_results
from ttrl.server.vllm import VLLMServer
from ttrl.tasks.task import Chat, Task
from ttrl.tiny_model import make_tiny_model

Way = Callable[[], Awaitable[int]]


class Ways:
    """All of them for one server and one load."""

    def __init__(
        self, base_url: str, api_key: str, model: str, options: argparse.Namespace
    ) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self.model = model
        self.o = options
        self.round = 0

    def messages(self, task: int) -> list[dict[str, str]]:
        """New prompts in every round, so that no way profits from the server's memory of
        another.
        """
        return [
            {"role": "user", "content": f"{self.round} {task} " + "sort these letters please " * 4}
        ]

    def body(self, task: int, **more: Any) -> dict[str, Any]:
        params = {
            "model": self.model,
            "messages": self.messages(task),
            "logprobs": True,
            "return_token_ids": True,
        }
        return params | {"max_tokens": self.o.tokens, "temperature": 1.0, "ignore_eos": True} | more

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, timeout=600)

    def session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self.api_key}"},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=None,
        )

    async def raw(self) -> int:
        async with self.session() as session:

            async def one(task: int) -> None:
                async with session.post(
                    f"{self.base_url}/chat/completions", json=self.body(task, n=self.o.samples)
                ) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()

            await asyncio.gather(*(one(task) for task in range(self.o.tasks)))
        return self.o.tasks * self.o.samples * self.o.tokens

    async def raw_stream(self) -> int:
        async with self.session() as session:

            async def one(task: int) -> None:
                body = self.body(task, stream=True, stream_options={"include_usage": True})
                async with session.post(f"{self.base_url}/chat/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    async for _ in answer.content.iter_any():
                        pass

            await asyncio.gather(
                *(one(task) for task in range(self.o.tasks) for _ in range(self.o.samples))
            )
        return self.o.tasks * self.o.samples * self.o.tokens

    async def ttrl(self, on_chunk: Any = None, samples_per_request: int | None = None) -> int:
        tasks = [
            Task(self.messages(task), lambda choice: float(len(choice.message.content)))
            for task in range(self.o.tasks)
        ]
        params = {"max_tokens": self.o.tokens, "temperature": 1.0, "ignore_eos": True}
        async with self.client() as client:
            results = await get_task_results(
                tasks,
                client,
                self.model,
                n=self.o.samples,
                params=params,
                on_chunk=on_chunk,
                samples_per_request=samples_per_request,
                pbar=False,
            )
        stats = results.stats
        assert stats.num_failed == 0, stats.failures()
        return stats.completion_tokens

    async def ttrl_stream_n(self) -> int:
        return await self.ttrl_stream(self.o.samples)

    async def ttrl_stream(self, samples_per_request: int = 1) -> int:
        seen = 0

        def on_chunk(chunk: Any, completion: Any) -> None:
            nonlocal seen
            for choice in chunk.choices:
                if choice.logprobs is not None:
                    seen += len(choice.logprobs.content)

        tokens = await self.ttrl(on_chunk, samples_per_request)
        assert seen == tokens, (seen, tokens)
        return tokens

    # Sessions

    def turns(self, number: int) -> Iterator[list[dict[str, str]]]:
        """Yield the conversation of each request of a session."""
        messages = self.messages(number)
        for turn in range(self.o.turns):
            yield messages
            messages = [
                *messages,
                {"role": "assistant", "content": "x" * 16},
                {"role": "user", "content": f"more {turn}"},
            ]

    async def raw_turns(self) -> int:
        async with self.session() as session:

            async def one(number: int) -> None:
                for messages in self.turns(number):
                    async with session.post(
                        f"{self.base_url}/chat/completions", json=self.body(0, messages=messages)
                    ) as answer:
                        assert answer.status == 200, await answer.text()
                        await answer.read()

            await asyncio.gather(*(one(number) for number in range(self.o.sessions)))
        return self.o.sessions * self.o.turns * self.o.tokens

    async def chat_turns(self) -> int:
        async def rollout(chat: Chat, number: int) -> float:
            for messages in self.turns(number):
                await chat.copy(messages)()
            return 1.0

        numbers = range(self.o.sessions)
        return await self.sampled(
            [Task(self.messages(n), rollout=functools.partial(rollout, number=n)) for n in numbers]
        )

    async def agent_turns(self) -> int:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

            async def agent(session: Session, number: int) -> float:
                url = f"{session.base_url}/chat/completions"
                headers = {"Authorization": f"Bearer {session.api_key}"}
                for messages in self.turns(number):
                    async with http.post(
                        url, json={"messages": messages}, headers=headers
                    ) as answer:
                        assert answer.status == 200, await answer.text()
                        await answer.read()
                return 1.0

            numbers = range(self.o.sessions)
            return await self.sampled(
                [
                    agent_task(functools.partial(agent, number=n), messages=self.messages(n))
                    for n in numbers
                ]
            )

    async def sampled(self, tasks: list[Task]) -> int:
        params = {"max_tokens": self.o.tokens, "temperature": 1.0, "ignore_eos": True}
        client = Endpoint(self.base_url, self.api_key)
        results = await get_task_results(
            tasks, client, self.model, params=params, concurrency=self.o.sessions, pbar=False
        )
        stats = results.stats
        assert stats.num_failed == 0, stats.failures()
        return stats.completion_tokens

    # The openai client

    async def openai(self) -> int:
        async with self.client() as client:

            async def one(task: int) -> int:
                body = self.body(task)
                extra = {"return_token_ids": True, "ignore_eos": body.pop("ignore_eos")}
                body.pop("return_token_ids")
                completion = await client.chat.completions.create(
                    **body, n=self.o.samples, extra_body=extra
                )
                return sum(
                    len([entry.logprob for entry in choice.logprobs.content])
                    for choice in completion.choices
                )

            return sum(await asyncio.gather(*(one(task) for task in range(self.o.tasks))))

    async def openai_stream(self) -> int:
        async with self.client() as client:

            async def one(task: int) -> int:
                body = self.body(task)
                extra = {"return_token_ids": True, "ignore_eos": body.pop("ignore_eos")}
                body.pop("return_token_ids")
                count = 0
                async for chunk in await client.chat.completions.create(
                    **body, stream=True, extra_body=extra
                ):
                    for choice in chunk.choices:
                        if choice.logprobs is not None:
                            count += len([entry.logprob for entry in choice.logprobs.content])
                return count

            return sum(
                await asyncio.gather(
                    *(one(task) for task in range(self.o.tasks) for _ in range(self.o.samples))
                )
            )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument(
        "--fake",
        action="store_true",
        help="agents alone, in front of a server that answers at once",
    )
    parser.add_argument("--agents", action="store_true", help="agents alone, in front of vLLM")
    parser.add_argument(
        "--url", help="a server that is already running; its key is taken from --key"
    )
    parser.add_argument("--key", default="EMPTY")
    parser.add_argument("--model", default="m")
    options = parser.parse_args()
    if options.url:
        bench(Ways(options.url.rstrip("/"), options.key, options.model, options))
        return
    if options.fake:
        with fake_server(options.tokens) as url:
            bench(Ways(url, "EMPTY", "m", options), agents_only=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder, "model"))
        with VLLMServer(
            Path(folder, "model"),
            served_model_name="m",
            log_path=Path(folder, "server.log"),
            dtype="float32",
            extra_args={"max_num_seqs": 512},
        ) as server:
            bench(Ways(server.base_url, server.api_key, "m", options), agents_only=options.agents)


@contextlib.contextmanager
def fake_server(tokens: int) -> Iterator[str]:
    """Serve answers of so many tokens from a process of its own; yields the address."""
    entries = [{"token": "x", "logprob": -1.0, "bytes": [120], "top_logprobs": []}] * tokens
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "x" * tokens},
        "logprobs": {"content": entries},
    }
    choice |= {"finish_reason": "length", "token_ids": [5] * tokens}
    usage = {"prompt_tokens": 100, "completion_tokens": tokens, "total_tokens": 100 + tokens}
    whole = {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": usage,
    }
    answer = json.dumps({**whole, "prompt_token_ids": [7] * 100}).encode()

    async def reply(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answer, content_type="application/json")

    def serve(pipe: Connection) -> None:
        async def main() -> None:
            app = web.Application()
            app.router.add_post("/v1/chat/completions", reply)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            pipe.send(runner.addresses[0][1])
            await asyncio.Event().wait()

        asyncio.run(main())

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}/v1"
    finally:
        process.kill()
        process.join()


def bench(ways: Ways, agents_only: bool = False) -> None:
    """Runs all ways in alternation, after a round that is not counted."""
    names: dict[str, tuple[Way, str]] = {
        "raw": (ways.raw, "raw"),
        "ttrl": (ways.ttrl, "raw"),
        "openai": (ways.openai, "raw"),
        "raw stream": (ways.raw_stream, "raw stream"),
        "ttrl stream": (ways.ttrl_stream, "raw stream"),
        "ttrl stream n": (ways.ttrl_stream_n, "raw stream"),
        "openai stream": (ways.openai_stream, "raw stream"),
    }
    agents: dict[str, tuple[Way, str]] = {
        "raw turns": (ways.raw_turns, "raw turns"),
        "chat turns": (ways.chat_turns, "raw turns"),
        "agent turns": (ways.agent_turns, "raw turns"),
    }
    names = agents if agents_only else names | agents
    seconds: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    tokens: dict[str, int] = {}
    for turn in range(ways.o.rounds + 1):
        order = list(names) if turn % 2 else list(reversed(names))
        for name in order:
            ways.round += 1
            began = time.perf_counter()
            cpu_began = time.process_time()
            tokens[name] = asyncio.run(names[name][0]())
            if turn:
                seconds[name].append(time.perf_counter() - began)
                cpu[name].append((time.process_time() - cpu_began) / tokens[name] * 1e6)
    o = ways.o
    print(
        f"{o.tasks} tasks x {o.samples} samples x {o.tokens} tokens, {o.rounds} rounds, medians "
        "(least to most)"
    )
    print(f"{'way':14} {'tokens/s':>24} {'share of its raw way':>22} {'client CPU us/token':>24}")
    for name, (_, base) in names.items():
        speeds = sorted(tokens[name] / s for s in seconds[name])
        # Pairs of the same round.
        shares = sorted(b / s for s, b in zip(seconds[name], seconds[base], strict=True))
        costs = sorted(cpu[name])
        speed = f"{statistics.median(speeds):8.0f} ({speeds[0]:.0f} to {speeds[-1]:.0f})"
        print(
            f"{name:14} {speed}".ljust(40)
            + f" {statistics.median(shares):7.2f} ({shares[0]:.2f} to {shares[-1]:.2f})".rjust(22)
            + f" {statistics.median(costs):7.1f} ({costs[0]:.1f} to {costs[-1]:.1f})".rjust(24)
        )
    pairs = list(zip(seconds["agent turns"], seconds["chat turns"], strict=True))
    milliseconds = sorted((agent - chat) / (o.sessions * o.turns) * 1e3 for agent, chat in pairs)
    spent = zip(cpu["agent turns"], cpu["chat turns"], cpu["raw turns"], strict=True)
    cpu_ms = sorted((agent - chat - raw) * o.tokens / 1e3 for agent, chat, raw in spent)
    slower = sorted(1 - chat / agent for agent, chat in pairs)
    print(
        f"{o.sessions} sessions x {o.turns} turns: the proxy costs "
        f"{statistics.median(milliseconds):.2f} ms a request "
        f"({milliseconds[0]:.2f} to {milliseconds[-1]:.2f}), {statistics.median(slower):.1%} of "
        "the tokens per second "
        f"({slower[0]:.1%} to {slower[-1]:.1%}); {statistics.median(cpu_ms):.2f} ms of CPU "
        f"({cpu_ms[0]:.2f} to {cpu_ms[-1]:.2f})"
    )


if __name__ == "__main__":
    main()
