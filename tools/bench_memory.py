"""Does a sampling process's memory stay flat? 50,000 completions of 64 tokens with logprobs, 16 per
request.

    python tools/bench_memory.py [--completions 50000] [--n 16] [--tokens 64] [--streamed]
        [--cache FOLDER]

First through `iter_task_results`, which keeps nothing, printing the resident memory after every
tenth of them. Then a twentieth as many through `get_task_results`, which keeps every sample,
printing bytes per sample. The server is the one from the tests, in its own process.
"""

import argparse
import asyncio
import contextlib
import gc
import resource
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from support import bad_server

from ttrl import Task, get_task_results
from ttrl.rollouts.task_results import iter_task_results


def resident() -> float:
    """MiB."""
    return psutil.Process().memory_info().rss / 2**20


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def tasks(count: int, start: int = 0) -> Iterator[Task]:
    """Made as they are asked for."""
    for number in range(start, start + count):
        yield Task(
            [{"role": "user", "content": f"task {number}"}],
            lambda choice: float(len(choice.message.content)),
        )


def ignore(chunk: Any, completion: Any) -> None:
    """Somebody who listens, so that completions are streamed."""


async def iterate(
    url: str, completions: int, n: int, arguments: dict[str, Any]
) -> list[tuple[int, float]]:
    """(completions so far, MiB) after every tenth."""
    rows = [(0, resident())]
    done = failed = 0
    async with contextlib.aclosing(
        iter_task_results(tasks(completions // n), url, "m", n=n, pbar=False, **arguments)
    ) as stream:
        async for result in stream:
            done += len(result.samples)
            failed += len(result.samples) - len(result.graded)
            if done >= len(rows) * completions / 10:
                rows.append((done, resident()))
    assert (done, failed) == (completions // n * n, 0), (done, failed)
    gc.collect()
    rows.append((done, resident()))
    return rows


async def keep(url: str, samples: int, n: int, arguments: dict[str, Any]) -> float:
    """Bytes per sample that is kept, as Python's allocator counts them."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        results = await get_task_results(
            tasks(samples // n, start=10**6), url, "m", n=n, pbar=False, **arguments
        )
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert results.stats.num_graded == samples // n * n
    return (after - before) / len(results.samples)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--completions", type=int, default=50_000)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--streamed", action="store_true")
    parser.add_argument("--cache", help="a folder, to see what the cache costs")
    args = parser.parse_args()
    arguments: dict[str, Any] = {"concurrency": 128}
    if args.streamed:
        arguments |= {"on_chunk": ignore, "samples_per_request": args.n}
    if args.cache:
        arguments |= {"cache": args.cache, "weights_digest": "none"}
    with bad_server.process("--tokens", str(args.tokens)) as server:
        began = time.monotonic()
        cpu = cpu_seconds()
        rows = asyncio.run(iterate(server.url, args.completions, args.n, arguments))
        seconds = time.monotonic() - began
        cpu = cpu_seconds() - cpu
        print(f"{'completions':>12}  {'resident MiB':>12}")
        for done, size in rows:
            print(f"{done:>12,}  {size:>12.1f}")
        print(f"from the first tenth to the end: {rows[-1][1] - rows[1][1]:+.1f} MiB")
        tokens = args.completions * (args.tokens + 1)
        speed = f"{args.completions / seconds:.0f} completions/s"
        print(f"{seconds:.1f} s, {speed}, {cpu / tokens * 1e6:.2f} µs of client CPU per token")
        per_sample = asyncio.run(
            keep(server.url, max(args.n, args.completions // 20), args.n, arguments)
        )
        print(f"get_task_results keeps {per_sample:,.0f} bytes per sample")


if __name__ == "__main__":
    main()
