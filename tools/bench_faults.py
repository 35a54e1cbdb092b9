"""2,000 completions through a server that misbehaves: is every sample graded exactly once, or
counted with its reason?

    python tools/bench_faults.py [--completions 2000] [--share 0.2] [--seed 0]

Four kinds of requests (one sample or eight per request, streamed or not), each once without faults
and once with every kind of fault in equal parts. Samples are seeded, so sample k of a task is the
same answer in both runs, however often it was requested: text, token ids, logprobs and reward must
be equal wherever the sample finished. Exits with 1 if anything is wrong.
"""

import argparse
import asyncio
import logging
import sys
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from support import bad_server

ANSWERS = "empty=0.02,null=0.02,length=0.1,long=0.001"
REASONS = {
    "http_400": "HTTP 400",
    "http_404": "HTTP 404",
    "http_422": "HTTP 422",
    "missing_logprobs": "logprobs",
    "missing_ids": "no token_ids",
    "abort": "finish_reason 'abort'",
}
"""What the errors of samples say that fail because of a fault that no retry can mend."""


@dataclass
class Way:
    """One way of asking, and what came of it."""

    streamed: bool
    per_request: int
    seconds: float = 0.0
    requests: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    samples_failed: Counter[str] = field(default_factory=Counter)
    """By the server's account, of faults that no retry can mend."""
    graded: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """Samples by the reason in their errors: a fault's name, or "retries"."""
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{'streamed' if self.streamed else 'whole'}, {self.per_request} per request"


def reward_of(text: str) -> float:
    """A reward that another text does not get."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) / 2**32


async def sample(url: str, way: Way, tasks: int, n: int, grades: "Counter[tuple[str, str]]") -> Any:
    """One call; `grades` counts what graders saw, by task id and text."""
    import openai

    from ttrl import Task, get_task_results

    def task(number: int) -> Task:
        name = f"task {number}"

        def grader(choice: Any) -> float:
            grades[name, choice.message.content] += 1
            return reward_of(choice.message.content)

        return Task([{"role": "user", "content": name}], grader, id=name)

    # Longer than an answer takes on a busy machine: one that comes too late would be spoilt by the
    # server's account alone.
    async with openai.AsyncOpenAI(base_url=url, api_key="k", timeout=8.0) as client:
        return await get_task_results(
            [task(number) for number in range(tasks)],
            client,
            "m",
            n=n,
            params={"seed": 11},
            samples_per_request=way.per_request,
            on_chunk=(lambda chunk, completion: None) if way.streamed else None,
            stall_timeout=6.0,
            pbar=False,
        )


def compare(
    way: Way, clean: Any, results: Any, grades: "Counter[tuple[str, str]]", tasks: int, n: int
) -> None:
    """Fills in what became of the samples, and everything that should not be so."""
    wrong = way.problems.append
    if len(results.samples) != tasks * n or [r.task_id for r in results] != [
        r.task_id for r in clean
    ]:
        wrong(f"{len(results.samples)} samples of {len(results)} tasks")
    for good, seen in zip(clean.samples, results.samples, strict=True):
        place = f"{seen.task_id}, sample {seen.sample}"
        if (seen.reward is None) == (seen.error is None):
            wrong(f"{place}: reward {seen.reward}, error {seen.error}")
        elif seen.reward is not None:
            for name in (
                "reward",
                "text",
                "token_ids",
                "prompt_token_ids",
                "logprobs",
                "finish_reason",
            ):
                if getattr(seen, name) != getattr(good, name):
                    wrong(
                        f"{place}: {name} is {getattr(seen, name)!r:.80}, without faults "
                        f"{getattr(good, name)!r:.80}"
                    )
        else:
            error = seen.error.split("\n")[0]
            way.failed[
                next(
                    (name for name, words in REASONS.items() if words in error),
                    f"retries: {error}"[:100],
                )
            ] += 1
    expected = Counter((s.task_id, s.text) for s in results.samples if s.reward is not None)
    if grades != expected:
        wrong(
            f"graded {grades.total()} times, {expected.total()} samples have rewards; differing: "
            f"{(grades - expected)!r:.200}"
        )
    stats = results.stats
    way.graded = stats.num_graded
    if (
        stats.num_graded + stats.num_failed != tasks * n
        or sum(stats.exceptions.values()) != stats.num_failed
    ):
        wrong(
            f"{stats.num_graded} graded + {stats.num_failed} failed, "
            f"{sum(stats.exceptions.values())} with a reason"
        )
    for name, count in way.samples_failed.items():
        if way.failed[name] != count:
            wrong(
                f"{name}: the server spoilt {count} samples, {way.failed[name]} failed because "
                "of it"
            )


async def measure(server: Any, way: Way, *, faults: str, seed: int, tasks: int, n: int) -> Way:
    """Runs one way without and with faults against the same server process, and compares."""
    server.control(faults="")
    grades: Counter[tuple[str, str]] = Counter()
    clean = await sample(server.url, way, tasks, n, grades)
    if clean.stats.num_graded != tasks * n:
        way.problems.append(
            f"without faults {clean.stats.num_failed} samples failed: {clean.stats.failures()}"
        )
    before = server.stats()
    server.control(faults=faults, seed=seed)
    grades.clear()
    began = time.monotonic()
    results = await sample(server.url, way, tasks, n, grades)
    way.seconds = time.monotonic() - began
    server.control(faults="")
    while (after := server.stats())["in_flight"] and time.monotonic() < began + way.seconds + 60:
        await asyncio.sleep(0.1)  # it notices closed connections a little later
    way.requests = after["requests"] - before["requests"]
    way.faults = Counter(after["faults"]) - Counter(before["faults"])
    way.samples_failed = Counter(after["samples_failed"]) - Counter(before["samples_failed"])
    if after["in_flight"]:
        way.problems.append(f"{after['in_flight']} requests are still in flight at the server")
    compare(way, clean, results, grades, tasks, n)
    return way


def run(
    *, completions: int, share: float, seed: int, n: int = 8, ways: Sequence[Way] = ()
) -> list[Way]:
    """Every way in turn, against one server process."""
    ways = ways or [
        Way(streamed, per_request) for streamed in (False, True) for per_request in (n, 1)
    ]
    with bad_server.process("--answers", ANSWERS, "--seed", str(seed)) as server:
        for way in ways:
            asyncio.run(
                measure(server, way, faults=f"all={share}", seed=seed, tasks=completions // n, n=n)
            )
    return list(ways)


def table(ways: Sequence[Way]) -> str:
    """Faults made and samples failed, one column per way."""
    faults = sorted({name for way in ways for name in way.faults})
    failed = sorted({name for way in ways for name in way.failed})
    rows: list[tuple[str, list[object]]] = [
        ("requests", [way.requests for way in ways]),
        ("faults made", [way.faults.total() for way in ways]),
        *((f"  {name}", [way.faults[name] for way in ways]) for name in faults),
        ("samples graded", [way.graded for way in ways]),
        ("samples failed", [way.failed.total() for way in ways]),
        *((f"  {name}", [way.failed[name] for way in ways]) for name in failed),
        ("seconds", [f"{way.seconds:.1f}" for way in ways]),
        ("wrong", [len(way.problems) for way in ways]),
    ]
    width = max(len(label) for label, _ in rows)
    lines = [" " * width + "".join(f"  {way.name:>24}" for way in ways)]
    lines += [
        label.ljust(width) + "".join(f"  {value!s:>24}" for value in values)
        for label, values in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--completions", type=int, default=2000)
    parser.add_argument(
        "--share", type=float, default=0.2, help="share of the requests that meet a fault"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.getLogger("ttrl").setLevel(logging.ERROR)
    ways = run(completions=args.completions, share=args.share, seed=args.seed)
    print(table(ways))
    for way in ways:
        for problem in way.problems[:10]:
            print(f"WRONG ({way.name}): {problem}")
    sys.exit(any(way.problems for way in ways))


if __name__ == "__main__":
    main()
