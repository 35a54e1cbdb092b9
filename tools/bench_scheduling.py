"""How good is scheduling by a server's KV-cache capacity, compared with a fixed number of requests
in flight?

    python tools/bench_scheduling.py [--only WORD]

A pure simulation (no server, no sockets, no waiting: the clock jumps to the next event), in which
the real `ttrl.rollouts.scheduling.servers` sends to a simulated vLLM: blocks of KV cache, prompts
shared by the samples of a task, first come first served, chunked prefill, max_num_seqs, and
preemption of the newest request when the cache is full, which is then recomputed from the start. A
step takes a constant time, plus a time per token in it, plus a time per cached token that it reads:
roughly a 7B model on one large GPU.

Left out: blocks of finished requests that stay in the prefix cache, CPU time of server and client,
the network except for a constant 5 ms, other variations in step time, other users of the server.
Fixed numbers in flight are at their best here because the client's work costs nothing.
"""

import argparse
import asyncio
import math
import selectors
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ttrl.errors import RequestError
from ttrl.rollouts.client.wire import Answer
from ttrl.rollouts.scheduling.servers import Servers, Size

T = TypeVar("T")
NETWORK_SECONDS = 0.005


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps over every wait."""

    def __init__(self) -> None:
        self.now = 0.0
        loop = self

        class Selector(selectors.DefaultSelector):  # type: ignore[valid-type, misc]
            def select(self, timeout: float | None = None) -> Any:
                ready = super().select(0)
                if not ready and timeout is None:
                    raise RuntimeError("nothing will ever happen again: every task waits")
                if not ready:
                    loop.now += timeout or 0.0
                return ready

        super().__init__(Selector())

    def time(self) -> float:
        return self.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on a clock that jumps."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


@dataclass(eq=False)
class Sequence:
    """One sample within the server."""

    prompt: int
    length: int
    """Tokens that it will have."""
    group: list[int]
    """How many samples of its request occupy the cache (a shared counter)."""
    done: "asyncio.Future[None]"
    made: int = 0
    todo: int = 0
    """Tokens of prompt and, after a preemption, completion that are still to be computed."""
    blocks: int = 0


@dataclass
class SimulatedVLLM:
    """One server; also a Transport, as far as `Servers` needs one."""

    kv_tokens: int = 400_000
    max_num_seqs: int = 1024
    block: int = 16
    step_tokens: int = 8192
    step_seconds: float = 0.008
    token_seconds: float = 10e-6
    prefill_seconds: float = 20e-6
    kv_seconds: float = 0.025e-6
    says_metrics: bool = True
    base_url: str = "http://simulated/v1"
    running: list[Sequence] = field(default_factory=list)
    waiting: deque[Sequence] = field(default_factory=deque)
    used: int = 0
    preemptions: int = 0
    generated: int = 0
    recomputed: int = 0
    busy: float = 0.0
    usage_seconds: float = 0.0
    running_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.blocks = self.kv_tokens // self.block
        self._engine: asyncio.Task[None] | None = None

    # As a transport

    async def get(self, path: str, *, root: bool = False, timeout: float = 10.0) -> bytes:
        if path != "/metrics":
            return b"{}"
        if not self.says_metrics:
            raise RequestError("no /metrics", "status", status=404)
        return (
            f'vllm:cache_config_info{{block_size="{self.block}",'
            f'num_gpu_blocks="{self.blocks}",engine="0"}} 1.0\n'
            f'vllm:num_requests_running{{engine="0"}} {len(self.running)}\n'
            f'vllm:num_requests_waiting{{engine="0"}} {len(self.waiting)}\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} {self.used / self.blocks}\n'
            f'vllm:num_preemptions_total{{engine="0"}} {self.preemptions}\n'
            f'vllm:generation_tokens_total{{engine="0"}} {self.generated}\n'
        ).encode()

    async def complete(self, prompt: int, lengths: list[int]) -> list[Answer | None]:
        """One request."""
        await asyncio.sleep(NETWORK_SECONDS)
        loop = asyncio.get_running_loop()
        group = [0]
        samples = [Sequence(prompt, length, group, loop.create_future()) for length in lengths]
        self.waiting.extend(samples)
        if self._engine is None or self._engine.done():
            self._engine = loop.create_task(self._run())
        await asyncio.gather(*(sample.done for sample in samples))
        return [Answer(b"{}", prompt_tokens=prompt, completion_tokens=length) for length in lengths]

    # The engine

    async def _run(self) -> None:
        while self.running or self.waiting:
            seconds = self._step()
            await asyncio.sleep(seconds)
            self.busy += seconds
            self.usage_seconds += seconds * self.used / self.blocks
            self.running_seconds += seconds * len(self.running)

    def _step(self) -> float:
        budget = self.step_tokens
        prefill = 0
        decoded = 0
        preempted = False
        kv = 0
        number = 0
        while number < len(self.running):
            sample = self.running[number]
            need = (
                math.ceil((sample.prompt + sample.made + 1) / self.block)
                - sample.prompt // self.block
                - sample.blocks
            )
            while need > self.blocks - self.used:
                preempted = True
                self._preempt(self.running.pop())
                if number >= len(self.running):
                    break
            if number >= len(self.running):
                break
            if need > 0:
                sample.blocks += need
                self.used += need
            if sample.todo:
                part = min(sample.todo, budget)
                sample.todo -= part
                budget -= part
                prefill += part
            if not sample.todo and budget > 0:
                budget -= 1
                decoded += 1
                sample.made += 1
                kv += sample.prompt + sample.made
            number += 1
        while (
            self.waiting and not preempted and budget > 0 and len(self.running) < self.max_num_seqs
        ):
            sample = self.waiting[0]
            shared = sample.prompt // self.block if not sample.group[0] else 0
            own = (
                math.ceil((sample.prompt + sample.made + 1) / self.block)
                - sample.prompt // self.block
            )
            if shared + own > self.blocks - self.used:
                break
            self.waiting.popleft()
            sample.todo = sample.made + (
                sample.prompt if shared or not sample.group[0] else sample.prompt % self.block
            )
            self.recomputed += sample.made
            sample.group[0] += 1
            sample.blocks = own
            self.used += shared + own
            part = min(sample.todo, budget)
            sample.todo -= part
            budget -= part
            prefill += part
            self.running.append(sample)
        left = []
        for sample in self.running:
            if sample.made >= sample.length:
                self._free(sample)
                if not sample.done.done():
                    sample.done.set_result(None)
            else:
                left.append(sample)
        self.running = left
        self.generated += decoded
        return (
            self.step_seconds
            + decoded * self.token_seconds
            + prefill * self.prefill_seconds
            + kv * self.kv_seconds
        )

    def _free(self, sample: Sequence) -> None:
        self.used -= sample.blocks
        sample.blocks = 0
        sample.group[0] -= 1
        if not sample.group[0]:
            self.used -= sample.prompt // self.block

    def _preempt(self, sample: Sequence) -> None:
        self.preemptions += 1
        self._free(sample)
        self.waiting.appendleft(sample)


@dataclass(frozen=True)
class Workload:
    """What is asked for: `lengths(generator, number of the task)` tokens of the n samples."""

    name: str
    tasks: int
    n: int
    prompt: int
    max_tokens: int
    lengths: Callable[[np.random.Generator, int], np.ndarray]
    server: dict[str, Any] = field(default_factory=dict)


def _constant(tokens: int, n: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda generator, task: np.full(n, tokens)


def _lognormal(
    mean: float, sigma: float, n: int
) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda generator, task: generator.lognormal(math.log(mean) - sigma**2 / 2, sigma, n)


def _changing(tasks: int, n: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    short = _lognormal(150, 0.5, n)
    long = _lognormal(1500, 0.5, n)
    return lambda generator, task: (short if task < tasks // 2 else long)(generator, task)


WORKLOADS = [
    Workload("short, 64 tokens", 4000, 1, 100, 512, _constant(64, 1), {"kv_tokens": 60_000}),
    Workload("constant, 800 tokens", 1500, 1, 200, 1024, _constant(800, 1), {"kv_tokens": 120_000}),
    Workload(
        "lognormal, mean 600", 2000, 1, 300, 4096, _lognormal(600, 1.0, 1), {"kv_tokens": 120_000}
    ),
    Workload(
        "lognormal, mean 600, n=16",
        125,
        16,
        1000,
        4096,
        _lognormal(600, 1.0, 16),
        {"kv_tokens": 120_000},
    ),
    Workload(
        "150, then 1500 tokens", 2000, 1, 200, 4096, _changing(2000, 1), {"kv_tokens": 120_000}
    ),
    Workload(
        "lognormal, 64 seqs at most",
        1500,
        1,
        200,
        2048,
        _lognormal(300, 0.7, 1),
        {"max_num_seqs": 64},
    ),
]


@dataclass(frozen=True)
class Outcome:
    """What became of a workload."""

    seconds: float
    tokens: int
    preemptions: int
    recomputed: float
    """Tokens computed again, as a share of all."""
    usage: float
    """Of the KV cache, mean over time."""
    running: float
    most_in_flight: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def simulate(
    workload: Workload, concurrency: int | None, *, seed: int = 0, most: int = 10**6, **changes: Any
) -> Outcome:
    """`concurrency` requests in flight at once (the server's capacity is not looked at then), None
    for what ttrl does.
    """
    generator = np.random.default_rng(seed)
    lengths = [
        np.clip(workload.lengths(generator, task), 1, workload.max_tokens).astype(int).tolist()
        for task in range(workload.tasks)
    ]
    server = SimulatedVLLM(**{**workload.server, **changes})
    in_flight = most_in_flight = 0

    async def request(own: list[int]) -> list[Answer | None]:
        nonlocal in_flight, most_in_flight
        in_flight += 1
        most_in_flight = max(most_in_flight, in_flight)
        try:
            return await server.complete(workload.prompt, own)
        finally:
            in_flight -= 1

    async def main() -> float:
        loop = asyncio.get_running_loop()
        if concurrency is not None:
            semaphore = asyncio.Semaphore(concurrency)

            async def one(own: list[int]) -> None:
                async with semaphore:
                    await request(own)

            await asyncio.gather(*map(one, lengths))
            return loop.time()
        size = Size(prompt=4 * workload.prompt, n=workload.n, max_tokens=workload.max_tokens)
        async with Servers([server], concurrency=None) as servers:  # type: ignore[list-item]

            async def send(own: list[int]) -> None:
                async def attempt(_: object) -> list[Answer | None]:
                    return await request(own)

                await servers.send(attempt, size=size, max_retries=0)

            await asyncio.gather(*map(send, lengths))
            return loop.time()

    seconds = run_virtual(main())
    tokens = sum(map(sum, lengths))
    return Outcome(
        seconds=seconds,
        tokens=tokens,
        preemptions=server.preemptions,
        recomputed=server.recomputed / tokens,
        usage=server.usage_seconds / seconds,
        running=server.running_seconds / seconds,
        most_in_flight=most_in_flight,
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="only workloads whose names contain this")
    only = parser.parse_args().only
    start = time.perf_counter()
    print(
        f"{'workload':28}{'in flight':>12}{'tokens/s':>10}{'KV used':>9}"
        f"{'running':>9}{'preempted':>11}{'again':>7}{'most':>7}"
    )
    for workload in WORKLOADS:
        if only and only not in workload.name:
            continue
        for name, concurrency in (("32", 32), ("512", 512), ("everything", 10**6), ("ttrl", None)):
            o = simulate(workload, concurrency)
            print(
                f"{workload.name:28}{name:>12}{o.rate:10.0f}{o.usage:9.0%}{o.running:9.0f}{o.preemptions:11d}"
                f"{o.recomputed:7.0%}{o.most_in_flight:7d}",
                flush=True,
            )
    print(f"{time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
