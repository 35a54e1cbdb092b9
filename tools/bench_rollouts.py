"""What does `get_task_results` cost, compared with the least that any client must do? On one real vLLM server, alternating.

    python tools/bench_rollouts.py [--tasks 32] [--samples 16] [--tokens 64] [--rounds 5] [--url URL --model NAME]

Clients, each sampling tasks × samples completions of exactly `tokens` tokens with token ids and log-probabilities:

raw           a bare load generator: aiohttp posts the bodies and discards the answers unread
ttrl          get_task_results, n samples per request, not streamed: what training uses
ttrl stream   the same with on_chunk, which sees every token: one stream per sample
ttrl stream n the same with one stream for all samples of a task: samples_per_request=n
raw stream    a bare generator for one stream per sample: aiohttp reads the streams and discards them
openai        the plain openai client, n samples per request, not streamed, its answers read
openai stream the plain openai client, one stream per sample, its chunks read

Printed: tokens per second of wall clock, as a share of the raw client of the same kind, and the client's CPU time per token.
Client and server share the machine, so a cheap client leaves more of it to the server. The server's own limits apply to all.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai

from ttrl.rollouts.task_results import get_task_results
from ttrl.server.vllm import VLLMServer
from ttrl.tasks.task import Task
from ttrl.tiny_model import make_tiny_model

Way = Callable[[], Awaitable[int]]


class Ways:
    """All of them for one server and one load."""

    def __init__(self, base_url: str, api_key: str, model: str, options: argparse.Namespace) -> None:
        self.base_url, self.api_key, self.model, self.o = base_url, api_key, model, options
        self.round = 0

    def messages(self, task: int) -> list[dict[str, str]]:
        """New prompts in every round, so that no way profits from the server's memory of another."""
        return [{"role": "user", "content": f"{self.round} {task} " + "sort these letters please " * 4}]

    def body(self, task: int, **more: Any) -> dict[str, Any]:
        params = {"model": self.model, "messages": self.messages(task), "logprobs": True, "return_token_ids": True}
        return params | {"max_tokens": self.o.tokens, "temperature": 1.0, "ignore_eos": True} | more

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, timeout=600)

    def session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self.api_key}"}, connector=aiohttp.TCPConnector(limit=0), timeout=None
        )

    async def raw(self) -> int:
        async with self.session() as session:

            async def one(task: int) -> None:
                async with session.post(f"{self.base_url}/chat/completions", json=self.body(task, n=self.o.samples)) as answer:
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

            await asyncio.gather(*(one(task) for task in range(self.o.tasks) for _ in range(self.o.samples)))
        return self.o.tasks * self.o.samples * self.o.tokens

    async def ttrl(self, on_chunk: Any = None, samples_per_request: int | None = None) -> int:
        tasks = [Task(self.messages(task), lambda choice: float(len(choice.message.content))) for task in range(self.o.tasks)]
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

    async def openai(self) -> int:
        async with self.client() as client:

            async def one(task: int) -> int:
                body = self.body(task)
                extra = {"return_token_ids": True, "ignore_eos": body.pop("ignore_eos")}
                body.pop("return_token_ids")
                completion = await client.chat.completions.create(**body, n=self.o.samples, extra_body=extra)
                return sum(len([entry.logprob for entry in choice.logprobs.content]) for choice in completion.choices)

            return sum(await asyncio.gather(*(one(task) for task in range(self.o.tasks))))

    async def openai_stream(self) -> int:
        async with self.client() as client:

            async def one(task: int) -> int:
                body = self.body(task)
                extra = {"return_token_ids": True, "ignore_eos": body.pop("ignore_eos")}
                body.pop("return_token_ids")
                count = 0
                async for chunk in await client.chat.completions.create(**body, stream=True, extra_body=extra):
                    for choice in chunk.choices:
                        if choice.logprobs is not None:
                            count += len([entry.logprob for entry in choice.logprobs.content])
                return count

            return sum(await asyncio.gather(*(one(task) for task in range(self.o.tasks) for _ in range(self.o.samples))))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--url", help="a server that is already running; its key is taken from --key")
    parser.add_argument("--key", default="EMPTY")
    parser.add_argument("--model", default="m")
    options = parser.parse_args()
    if options.url:
        bench(Ways(options.url.rstrip("/"), options.key, options.model, options))
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
            bench(Ways(server.base_url, server.api_key, "m", options))


def bench(ways: Ways) -> None:
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
    seconds: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    tokens = 0
    for turn in range(ways.o.rounds + 1):
        order = list(names) if turn % 2 else list(reversed(names))
        for name in order:
            ways.round += 1
            began, cpu_began = time.perf_counter(), time.process_time()
            tokens = asyncio.run(names[name][0]())
            if turn:
                seconds[name].append(time.perf_counter() - began)
                cpu[name].append((time.process_time() - cpu_began) / tokens * 1e6)
    o = ways.o
    print(f"{o.tasks} tasks x {o.samples} samples x {o.tokens} tokens, {o.rounds} rounds, medians (least to most)")
    print(f"{'way':14} {'tokens/s':>24} {'share of its raw way':>22} {'client CPU us/token':>24}")
    for name, (_, base) in names.items():
        speeds = sorted(tokens / s for s in seconds[name])
        shares = sorted(b / s for s, b in zip(seconds[name], seconds[base], strict=True))  # pairs of the same round
        costs = sorted(cpu[name])
        print(
            f"{name:14} {statistics.median(speeds):8.0f} ({speeds[0]:.0f} to {speeds[-1]:.0f})".ljust(40)
            + f" {statistics.median(shares):7.2f} ({shares[0]:.2f} to {shares[-1]:.2f})".rjust(22)
            + f" {statistics.median(costs):7.1f} ({costs[0]:.1f} to {costs[-1]:.1f})".rjust(24)
        )


if __name__ == "__main__":
    main()
