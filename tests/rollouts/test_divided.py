"""Sampling that is divided among workers: what one process would return, whatever becomes of
workers and servers meanwhile.

Workers are in this process; what passes between them and the lead is pickled, as between processes.
"""

import asyncio
import contextlib
import dataclasses
import json
import pickle
import time
import zlib
from collections import Counter

import cloudpickle
import numpy as np
import pytest
from support import bad_server

from ttrl.data.tokenization import TaskResultTokenizer, as_arrays
from ttrl.errors import ServerDiedError, TokenizationError, UserError
from ttrl.records import Endpoint
from ttrl.rollouts.divided import divided_servers, get_divided_results
from ttrl.rollouts.request import SamplingRequest
from ttrl.rollouts.task_results import get_task_results
from ttrl.rollouts.worker import WorkerCall
from ttrl.tasks import Task

N = 3
ARGUMENTS = {"n": N, "params": {"seed": 3}, "stall_timeout": 100.0, "pbar": False}


class Here:
    """A worker in this process, which can be killed, and is back when it is asked again unless it
    is `gone`.
    """

    def __init__(self, name, dies_with=None, dies_after=None, tokenize=None, **settings):
        """settings: of its calls."""
        self.settings = settings
        self.name, self.dies_with, self.dies_after, self.tokenize = (
            name,
            dies_with,
            dies_after,
            tokenize,
        )
        self.calls, self.deaths, self.given, self.gone, self.memory = {}, 0, [], False, []

    async def open(self, call, request):
        self.check()
        if call in self.calls:
            await self.calls.pop(call).close()
        given = cloudpickle.loads(cloudpickle.dumps(request))
        self.calls[call] = WorkerCall(given, self.tokenize, **self.settings)
        await self.calls[call].start()

    async def work(self, call, jobs, more):
        self.check()
        self.given += [job.task.id for job in jobs]
        if self.dies_with in self.given:
            await self.die()
        jobs = cloudpickle.loads(cloudpickle.dumps(jobs))
        for buffer in self.memory:  # what came before is somebody else's by now
            buffer[:] = bytes(len(buffer))
        report = await self.calls[call].work(jobs, more=more, patience=0.2)
        if report.groups and self.dies_after is not None:
            self.dies_after -= len(report.groups)
            if self.dies_after < 0:  # with what has just been finished
                self.dies_after = None
                await self.die()
        buffers = []
        data = pickle.dumps(report, 5, buffer_callback=buffers.append)
        self.memory = [bytearray(buffer.raw()) for buffer in buffers]  # as of an object store
        return pickle.loads(data, buffers=self.memory)

    async def close(self, call):
        if call in self.calls:
            await self.calls.pop(call).close()

    def check(self):
        if self.gone:
            raise ServerDiedError(f"{self.name} is gone")

    async def die(self):
        self.deaths, self.given = self.deaths + 1, []
        for call in list(self.calls):
            await self.close(call)
        raise ServerDiedError(f"{self.name} is gone")


def make_tasks(count):
    def grader(choice):
        return zlib.crc32(choice.message.content.encode("utf-8", "surrogatepass")) / 2**32

    return [
        Task([{"role": "user", "content": f"task {k}"}], grader, id=f"task {k}")
        for k in range(count)
    ]


def seen(results):
    return [dataclasses.asdict(sample) for sample in results.samples]


@contextlib.asynccontextmanager
async def servers(count, **settings):
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(bad_server.serving(**settings)) for _ in range(count)
        ]


def call(tasks, workers, *, each=1, down=(), done=None, **arguments):
    """One divided call with `each` servers for every worker: (results, seconds)."""

    async def main():
        async with servers(each * len(workers)) as there:
            for number in down:
                there[number].close()
            urls = [server.url for server in there]
            shares = [(one, urls[k * each : (k + 1) * each]) for k, one in enumerate(workers)]
            given = SamplingRequest(
                client=urls, model="m", on_task_done=done, **ARGUMENTS | arguments
            )
            began = time.monotonic()
            results = await get_divided_results(tasks, shares, given, pause_seconds=0.05)
            return results, time.monotonic() - began

    return asyncio.run(main())


@pytest.fixture(scope="module")
def alone():
    """What one process returns."""

    async def main():
        async with servers(1) as there:
            return await get_task_results(make_tasks(40), there[0].url, "m", **ARGUMENTS)

    return asyncio.run(main())


def test_workers_return_what_one_process_would(alone):
    done = []
    workers = [Here("a"), Here("b"), Here("c")]
    results, _ = call(make_tasks(40), workers, each=2, done=done.append)
    assert seen(results) == seen(alone)
    before, now = alone.stats, results.stats
    changing = {"seconds": 0, "tokens_per_second": 0, "grading_seconds": 0}
    assert now.replace(**changing) == before.replace(**changing)
    assert now.grading_seconds > 0
    assert all(len(one.given) >= 8 for one in workers)  # each has its part
    assert sorted(group.task_id for group in done) == sorted(task.id for task in make_tasks(40))
    # The lines that workers write are those that the run's process would.
    assert [json.loads(line) for line in results.to_jsonl_lines()] == alone.to_jsonl_rows()
    assert list(results.to_jsonl_lines()) == list(alone.to_jsonl_lines())


def test_the_tasks_of_a_worker_that_dies_go_to_others_and_nothing_that_came_is_sampled_again(alone):
    workers = [Here("a", dies_after=5), Here("b"), Here("c", dies_after=3)]
    done = []
    results, _ = call(make_tasks(40), workers, done=done.append)
    assert seen(results) == seen(alone)
    assert [one.deaths for one in workers] == [1, 0, 1]
    # None twice.
    assert Counter(group.task_id for group in done) == Counter(task.id for task in make_tasks(40))


def test_a_worker_that_never_comes_is_named_once_and_the_others_do_all(alone, caplog):
    workers = [Here("a"), Here("b")]
    workers[1].gone = True
    results, _ = call(make_tasks(40), workers, each=2)
    assert seen(results) == seen(alone)
    assert [r.message for r in caplog.records if "b is gone" in r.message] == [
        "b is gone; its 2 servers are idle meanwhile"
    ]


def test_a_worker_without_servers_leaves_its_tasks_to_others(alone):
    workers = [Here(name, away_seconds=0.3) for name in "ab"]
    results, _ = call(make_tasks(40), workers, down=[0], max_downtime=30.0)
    assert seen(results) == seen(alone)


def test_when_all_are_gone_it_ends_after_a_while():
    workers = [Here("a"), Here("b")]
    for one in workers:
        one.gone = True
    with pytest.raises(
        ServerDiedError,
        match=r"no sampling worker has worked for \d s; the last error: .* is gone",
    ):
        call(make_tasks(4), workers, max_downtime=0.5)


def test_a_task_that_kills_workers_fails_alone(alone):
    workers = [Here("a", dies_with="task 7"), Here("b", dies_with="task 7")]
    results, _ = call(make_tasks(8), workers)
    killer = results[7]
    assert all(
        "5 sampling workers died" in sample.error and sample.reward is None
        for sample in killer.samples
    )
    assert workers[0].deaths + workers[1].deaths == 5
    assert results.stats.num_failed == N
    kept = [sample for sample in seen(results) if sample["task_id"] != "task 7"]
    assert kept == [sample for sample in seen(alone) if int(sample["task_id"][5:]) < 7]


def test_workers_tokenize_and_nothing_stays_in_the_memory_in_which_it_came():
    def tokenize(result):
        if result.task_id == "task 3":
            raise TokenizationError("on purpose")
        tokenizing = TaskResultTokenizer()
        return [as_arrays(sequence) for sequence in tokenizing(result, [0.0] * N)], vars(
            tokenizing.counts
        )

    results, _ = call(make_tasks(20), [Here("a", tokenize=tokenize), Here("b", tokenize=tokenize)])
    assert [k for k, group in enumerate(results) if group.prepared.sequences is None] == [3]
    for group in results:
        here = TaskResultTokenizer()(dataclasses.replace(group, prepared=None), [0.5, 0.0, -0.5])
        there = TaskResultTokenizer()(group, [0.5, 0.0, -0.5])
        for one, other in zip(here, there, strict=True):
            assert list(one.token_ids) == list(other.token_ids) and list(
                one.assistant_mask
            ) == list(other.assistant_mask)
            assert np.array_equal(
                np.array(one.logprobs, np.float32),
                np.array(other.logprobs, np.float32),
                equal_nan=True,
            )
            names = (
                "task_id",
                "sample",
                "reward",
                "advantage",
                "prompt_length",
                "weights_version",
                "finish_reason",
                "share",
            )
            assert all(getattr(one, name) == getattr(other, name) for name in names)


def test_each_worker_logs_its_requests_in_a_file_of_its_own(tmp_path):
    call(make_tasks(12), [Here("a"), Here("b")], requests_log=tmp_path / "requests.jsonl")
    logs = sorted(tmp_path.iterdir())
    assert [path.name for path in logs] == ["requests.0.jsonl", "requests.1.jsonl"]
    assert sum(len(path.read_text().splitlines()) for path in logs) == 12


def test_equal_tasks_are_sampled_with_numbers_of_their_own():
    """They go to different workers, and share neither seeds nor cache entries."""
    same = [
        Task([{"role": "user", "content": "same"}], lambda choice: 1.0, id="same") for _ in range(6)
    ]

    async def main():
        async with servers(1) as there:
            return await get_task_results(same, there[0].url, "m", **ARGUMENTS)

    results, _ = call(same, [Here("a"), Here("b")])
    assert seen(results) == seen(asyncio.run(main()))
    assert len({tuple(sample.token_ids) for sample in results.samples}) > N


def test_what_is_wrong_with_the_settings_is_raised():
    with pytest.raises(UserError, match="max_downtime"):
        call(make_tasks(2), [Here("a")], max_downtime=-1.0)


def test_each_worker_gets_the_servers_of_its_machine_first():
    def named(*urls):
        return [Endpoint(f"http://{url}/v1", "key") for url in urls]

    servers = named(
        "10.0.0.1:1", "10.0.0.1:2", "10.0.0.2:1", "10.0.0.2:2", "10.0.0.3:1", "[fd00::7]:1"
    )
    shares = divided_servers(servers, ["10.0.0.2", "10.0.0.1", None])
    assert shares[0] == servers[2:4] and shares[1] == servers[:2] and shares[2] == servers[4:]
    assert divided_servers(servers[-1:], ["10.0.0.1", "fd00::7"]) == [[], servers[-1:]]
    many = named(*(f"10.0.0.{k % 4}:{k}" for k in range(21)))
    sizes = [len(share) for share in divided_servers(many, ["10.0.0.0", "10.0.0.0", None])]
    assert sum(sizes) == 21 and max(sizes) <= 8
