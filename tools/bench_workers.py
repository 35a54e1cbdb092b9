"""What do lead and sampling workers spend on a request and on a token, with 1,000 servers of which
5% fail?

    python tools/bench_workers.py [--servers 1000] [--workers 63] [--processes 4] [--tasks 4000]
        [--alone]

The servers are made up: one process that listens on a port for each, and answers as vLLM does after
about `--seconds`. Of each 20 one fails: it goes away for good in the middle, answers half of the
requests with HTTP 500, or breaks half of the connections. A process with workers is killed in the
middle, too. The workers are those of ttrl.cluster.workers on a real Ray node, several of them in
each of `--processes` processes, so that a small machine has room for them: what passes between lead
and worker, and what it costs the lead, is the same as with a process for each.

Every task has to come back once with all of its samples graded. Printed is CPU time of the
processes, so that a busy machine makes the measurement longer but not much larger: two loads with
short and with long answers, whose difference is the cost of a token. `--alone`: also the same work
of one process without workers, with as many servers. Needs ttrl[cluster].
"""

import argparse
import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from aiohttp import web
from transformers import AutoTokenizer

try:
    from ttrl.cluster import workers as cluster_workers  # before ray: it turns tokens on

    import ray  # isort: skip
except ModuleNotFoundError as error:
    print(f"{error}: this needs ttrl[cluster]")
    sys.exit(0)

from ttrl.configs.data import AdvantageConfig
from ttrl.data.advantages import advantages_of
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.data.tokenization import TaskResultTokenizer
from ttrl.loop.sampling import FinishedGroups
from ttrl.records import Endpoint, TaskResult
from ttrl.rollouts.divided import Worker, divided_servers, get_divided_results
from ttrl.rollouts.request import SamplingRequest
from ttrl.rollouts.sampling import Job
from ttrl.rollouts.task_results import TaskResults, get_task_results
from ttrl.rollouts.worker import Report
from ttrl.system.files import write_jsonl
from ttrl.tasks.task import Task
from ttrl.tiny_model import make_tiny_model

PROMPT = 200


class FakeServers:
    """Answers like vLLM servers with room for some requests, each at a port of its own."""

    def __init__(self, seconds: float, token: int) -> None:
        """token: the id of "x", of which all answers consist."""
        self.seconds, self.token, self.answers = seconds, token, dict[tuple[int, int], bytes]()
        self.served: dict[int, int] = {}
        self.sites: dict[int, web.TCPSite] = {}
        self.faults = self.looks = 0
        self.blocks = 8000

    def answer(self, n: int, tokens: int) -> bytes:
        """Return an answer of n choices, made once; as many bytes a token as vLLM writes."""
        if (n, tokens) not in self.answers:
            generator = random.Random(tokens)
            choices = []
            for index in range(n):
                ids = [self.token] * tokens
                entries = [
                    {
                        "token": "x",
                        "logprob": -generator.random(),
                        "bytes": [120],
                        "top_logprobs": [],
                    }
                    for _ in ids
                ]
                message = {"role": "assistant", "content": "x" * tokens}
                one = {
                    "index": index,
                    "message": message,
                    "logprobs": {"content": entries},
                    "token_ids": ids,
                }
                choices.append({**one, "finish_reason": "length"})
            usage = {
                "prompt_tokens": PROMPT,
                "completion_tokens": n * tokens,
                "total_tokens": PROMPT + n * tokens,
            }
            whole = {
                "id": "1",
                "object": "chat.completion",
                "created": 1,
                "model": "m",
                "choices": choices,
                "usage": usage,
            }
            self.answers[n, tokens] = json.dumps(
                {**whole, "prompt_token_ids": [7] * PROMPT}
            ).encode()
        return self.answers[n, tokens]

    async def post(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = request.app["number"]
        self.served[number] = served = self.served.get(number, 0) + 1
        await asyncio.sleep(self.seconds * random.uniform(0.5, 1.5))
        fault = (number // 20) % 3 if number % 20 == 7 else None
        if fault == 0 and served == 3:
            self.faults += 1
            await self.sites[number].stop()
        if fault == 0 and served >= 3:
            assert request.transport is not None
            request.transport.abort()
        elif fault is not None and served % 2:
            self.faults += 1
            if fault == 1:
                return web.Response(status=500, text="on purpose")
            assert request.transport is not None
            request.transport.abort()
        return web.Response(
            body=self.answer(body["n"], body["max_tokens"]), content_type="application/json"
        )

    async def get(self, request: web.Request) -> web.Response:
        if request.path != "/metrics":
            return web.json_response({"object": "list", "data": []})
        self.looks += 1
        room = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{self.blocks}"}} 1.0\n'
        return web.Response(
            text=f"{room}vllm:num_requests_running 0\nvllm:generation_tokens_total 0\n"
        )

    async def start(self, number: int) -> int:
        app = web.Application()
        app["number"] = number
        app.router.add_post("/v1/chat/completions", self.post)
        app.router.add_get("/{path:.*}", self.get)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        self.sites[number] = web.TCPSite(runner, "127.0.0.1", 0, backlog=128)
        await self.sites[number].start()
        return int(runner.addresses[0][1])


@contextlib.contextmanager
def fake_servers(
    count: int, seconds: float, token: int
) -> Iterator[tuple[list[Endpoint], Callable[[int], tuple[int, int]]]]:
    """Serve from a process of its own; yields the addresses, and what tells them how large their
    caches are; it returns how many faults and looks there were."""

    def serve(pipe: Connection) -> None:
        async def main() -> None:
            fakes = FakeServers(seconds, token)
            pipe.send([await fakes.start(number) for number in range(count)])
            while True:
                fakes.blocks = await asyncio.to_thread(pipe.recv)
                pipe.send((fakes.faults, fakes.looks))

        asyncio.run(main())

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=serve, args=(theirs,), daemon=True)
    process.start()

    def tell(blocks: int) -> tuple[int, int]:
        ours.send(blocks)
        faults, looks = ours.recv()
        return faults, looks

    try:
        yield [Endpoint(f"http://127.0.0.1:{port}/v1", "key") for port in ours.recv()], tell
    finally:
        process.kill()
        process.join()


class Host:
    """A process with several workers."""

    def __init__(self, model: Path, count: int) -> None:
        self._workers = [cluster_workers.SamplingWorker(model) for _ in range(count)]

    async def open(self, number: int, *arguments: Any) -> Any:
        return await self._workers[number].open(*arguments)

    async def turn(self, number: int, *arguments: Any) -> Any:
        return await self._workers[number].turn(*arguments)

    async def close(self, number: int, *arguments: Any) -> None:
        await self._workers[number].close(*arguments)

    def seconds(self) -> tuple[int, float]:
        """Return its process and the CPU time of that."""
        return os.getpid(), time.process_time()


def seconds_of(hosts: Sequence[Any]) -> dict[int, float]:
    """Return the CPU time of each process with workers, also of one that is being started again."""
    while True:
        try:
            return dict(ray.get([host.seconds.remote() for host in hosts]))
        except ray.exceptions.ActorUnavailableError:
            time.sleep(0.5)


class Counted(cluster_workers.WorkerActor):
    """Counts its turns."""

    turns = 0

    async def work(self, call: str, jobs: Sequence[Job], more: bool) -> Report:
        """Count one."""
        Counted.turns += 1
        return await super().work(call, jobs, more)


class _Method:
    def __init__(self, method: Any, number: int) -> None:
        self._method = method
        self._number = number

    def remote(self, *arguments: Any) -> Any:
        return self._method.remote(self._number, *arguments)


class _Place:
    """One worker of a host, as the handle of an actor looks."""

    def __init__(self, host: Any, number: int) -> None:
        self.open, self.work, self.close = (
            _Method(method, number) for method in (host.open, host.work, host.close)
        )


@dataclass
class Spent:
    """CPU seconds of one load."""

    lead: float
    workers: float
    files: float
    """Of the lead, for rollouts.jsonl."""
    pack: float
    """Of the lead, from groups to rows."""
    tokens: int
    wall: float
    turns: int


def grade(choice: Any) -> tuple[float, dict[str, float]]:
    """Return a reward that differs within a group."""
    return random.random(), {"length": float(len(choice.message.content))}


class Bench:
    """All loads on one set of servers."""

    def __init__(
        self,
        options: argparse.Namespace,
        endpoints: Sequence[Endpoint],
        tell: Any,
        tokenizer: Any,
        folder: Path,
    ) -> None:
        self.o = options
        self.endpoints = endpoints
        self.tell = tell
        self.tokenizer = tokenizer
        self.folder = folder
        self.loads = 0

    def load(self, tokens: int, hosts: Sequence[Any], *, kill: bool = False) -> Spent:
        """Sample, write and pack all tasks once; by one process where there are no hosts. Asserts
        that nothing is lost.
        """
        self.loads += 1
        o = self.o
        self.tell(int(1.1 * o.room * (PROMPT + o.samples * tokens) / 16))
        tasks = [
            Task(
                [{"role": "user", "content": f"{self.loads} {k} " + "sort these letters " * 20}],
                grade,
                id=f"task/{k}",
            )
            for k in range(o.tasks)
        ]
        settings: dict[str, Any] = {
            "model": "m",
            "n": o.samples,
            "params": {"max_tokens": tokens},
            "pbar": False,
        }
        settings |= {"client": self.endpoints, "weights_version": 1}
        came: list[str] = []
        before = seconds_of(hosts)
        began = time.perf_counter()
        lead = time.process_time()
        Counted.turns = 0
        partial = self.folder / f"partial{self.loads}.jsonl"
        with FinishedGroups(partial, range(len(tasks))) as finished:

            def done(group: TaskResult) -> None:
                came.append(group.task_id)
                finished.add(group)
                if kill and len(came) == o.tasks // 2:
                    os.kill(next(iter(before)), signal.SIGKILL)

            if hosts:
                each = -(-o.workers // len(hosts))
                places = [(host, number) for number in range(each) for host in hosts][: o.workers]
                workers: list[Worker] = [
                    Counted(k, _Place(*place)) for k, place in enumerate(places)
                ]
                shares = list(
                    zip(workers, divided_servers(self.endpoints, [None] * o.workers), strict=True)
                )
                results = asyncio.run(
                    get_divided_results(
                        tasks, shares, SamplingRequest(**settings, on_task_done=done)
                    )
                )
            else:
                results = asyncio.run(get_task_results(tasks, **settings, on_task_done=done))
        lead = time.process_time() - lead
        wall = time.perf_counter() - began
        after = seconds_of(hosts)
        in_workers = sum(spent - before.get(pid, 0.0) for pid, spent in after.items())
        assert sorted(came) == sorted(task.id for task in tasks), "a task was lost, or came twice"
        assert results.stats.num_graded == o.tasks * o.samples, results.stats.failures()
        began = time.process_time()
        write_jsonl(self.folder / "rollouts.jsonl", results.to_jsonl_lines())
        files = time.process_time() - began
        return Spent(
            lead,
            in_workers,
            files,
            self.pack(results),
            results.stats.completion_tokens,
            wall,
            Counted.turns,
        )

    def turn(self, host: Any, count: int = 300) -> float:
        """Return the seconds of CPU that a turn costs the lead in which nothing happens."""
        worker = Counted(0, _Place(host, 0))

        async def turns() -> float:
            await worker.open("idle", SamplingRequest(client=self.endpoints[:1], model="m"))
            began = time.process_time()
            for _ in range(count):
                await worker.work("idle", [], True)  # there is room for more, so it returns at once
            spent = time.process_time() - began
            await worker.close("idle")
            return spent / count

        return asyncio.run(turns())

    def pack(self, results: TaskResults) -> float:
        """Return the seconds from groups to rows."""
        began = time.process_time()
        advantages = advantages_of(list(results), AdvantageConfig(), self.tokenizer)
        tokenize = TaskResultTokenizer(self.tokenizer)
        pairs = zip(advantages.kept, advantages.values, strict=True)
        sequences = [sequence for group, values in pairs for sequence in tokenize(group, values)]
        packed_tensors_from_tokenized_results(sequences, seq_len=8192, pad_id=0)
        return time.process_time() - began


def table(name: str, loads: Sequence[Spent], requests: int, *, has_workers: bool) -> None:
    """Prints µs per request and per token, of loads with short and long answers."""
    short, long = loads
    more = long.tokens - short.tokens
    for what in ("lead", "workers", "files", "pack") if has_workers else ("lead", "files", "pack"):
        spent = getattr(short, what), getattr(long, what)
        token = (spent[1] - spent[0]) / more
        request = (spent[0] - token * short.tokens) / requests
        print(
            f"{name + ': ' + what:26}{request * 1e6:14.0f}{token * 1e6:14.3f}"
            f"{spent[0]:12.2f}{spent[1]:12.2f}",
            flush=True,
        )
    print(f"{name + ': seconds':26}{'':28}{short.wall:12.1f}{long.wall:12.1f}", flush=True)
    if has_workers:
        print(f"{name + ': turns':26}{'':28}{short.turns:12d}{long.turns:12d}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=63)
    parser.add_argument("--processes", type=int, default=4, help="that the workers are in (4)")
    parser.add_argument("--tasks", type=int, default=4000, help="requests of one load (4000)")
    parser.add_argument("--samples", type=int, default=8, help="of each (8)")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs=2,
        default=(16, 128),
        help="of a sample, in the two loads (16 128)",
    )
    parser.add_argument("--room", type=int, default=2, help="of each server, in requests (2)")
    parser.add_argument("--seconds", type=float, default=2.0, help="that an answer takes (2)")
    parser.add_argument("--alone", action="store_true", help="also one process without workers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = make_tiny_model(Path(folder, "model"), layers=1, width=64, heads=2)
        tokenizer = AutoTokenizer.from_pretrained(model)
        (token,) = tokenizer.encode("x", add_special_tokens=False)
        endpoints, tell = stack.enter_context(fake_servers(options.servers, options.seconds, token))
        bench = Bench(options, endpoints, tell, tokenizer, Path(folder))
        each = -(-options.workers // options.processes)
        # What servers and workers are made to suffer is known.
        logging.getLogger("ttrl").setLevel(logging.ERROR)
        ray.init(
            num_cpus=options.processes,
            object_store_memory=2**29,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
        actor = ray.remote(Host).options(num_cpus=1, max_restarts=-1, max_task_retries=0)
        hosts = [actor.remote(model, each) for _ in range(options.processes)]
        # What is loaded at first is not counted; servers that go away do so now.
        bench.load(options.tokens[0], hosts)
        loads = [bench.load(tokens, hosts) for tokens in options.tokens]
        print(
            f"{options.tasks} requests x {options.samples} samples x {options.tokens[0]} and "
            f"{options.tokens[1]} tokens"
        )
        print(
            f"{options.servers} servers, {options.workers} workers in {options.processes} processes"
        )
        print(f"{'':26}{'µs a request':>14}{'µs a token':>14}{'s, short':>12}{'s, long':>12}")
        table("divided", loads, options.tasks, has_workers=True)
        print(
            f"a turn in which nothing happens costs the lead {bench.turn(hosts[0]) * 1e6:.0f} µs",
            flush=True,
        )
        killed = bench.load(options.tokens[0], hosts, kill=True)
        print(
            f"with {each} workers killed in the middle: nothing lost, {killed.wall:.1f} s, lead "
            f"{killed.lead:.2f} s of CPU"
        )
        if options.alone:
            alone = [bench.load(tokens, ()) for tokens in options.tokens]
            table("one process", alone, options.tasks, has_workers=False)
        faults, looks = tell(0)
        print(f"faults of servers: {faults}; looks at /metrics: {looks}")
        ray.shutdown()


if __name__ == "__main__":
    main()
