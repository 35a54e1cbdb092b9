"""Every fault of the misbehaving server, one by one and all together: what can be mended is, what
cannot has its reason.

Samples are seeded, so the server answers sample k of a task with one and the same text in every
run; results with faults are compared with those without, sample by sample.
"""

import asyncio
import contextlib
import functools
import gc
import warnings
import zlib
from collections import Counter
from unittest import mock

import openai
import pytest
from support import bad_server

from ttrl.rollouts.client import http_transport
from ttrl.rollouts.task_results import get_task_results, iter_task_results
from ttrl.tasks import Task

N = 3
REASONS = {
    "http_400": "HTTP 400: http_400 on purpose",
    "http_404": "HTTP 404: http_404 on purpose",
    "http_422": "HTTP 422: http_422 on purpose",
    "missing_logprobs": "token ids but no logprobs",
    "missing_ids": "returned no token_ids",
}


def reward_of(text):
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) / 2**32


def make_tasks(count, grades=None, prefix="task"):
    def task(name):
        def grader(choice):
            if grades is not None:
                grades[name, choice.message.content] += 1
            return reward_of(choice.message.content)

        return Task([{"role": "user", "content": name}], grader, id=name)

    return [task(f"{prefix} {number}") for number in range(count)]


def seen(results):
    return [
        (
            s.task_id,
            s.sample,
            s.text,
            s.token_ids,
            s.prompt_token_ids,
            s.logprobs,
            s.finish_reason,
            s.reward,
        )
        for s in results.samples
    ]


def ignore(chunk, completion):
    """Somebody who listens, so that completions are streamed."""


@contextlib.asynccontextmanager
async def nothing_left(server):
    """Fails where the call inside leaves tasks, connections, requests at the server, warnings or
    errors of the event loop.
    """
    loop, complaints = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    before = asyncio.all_tasks() - server.tasks
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield
        left = asyncio.all_tasks() - server.tasks - before
        assert not {task for task in left if not task.done()}
        del left
        for _ in range(6000):  # the server notices closed connections a little later
            if not server.connections:
                break
            await asyncio.sleep(0.01)
        assert (len(server.connections), server.in_flight) == (0, 0)
        gc.collect()
        await asyncio.sleep(0)
    assert complaints == []
    assert [
        str(w.message) for w in warned if issubclass(w.category, ResourceWarning | RuntimeWarning)
    ] == []


def call(plan="", *, tasks=6, stream=False, settings=None, timeout=100.0, **arguments):
    """One call of get_task_results against a server of its own: (results, its stats, what graders
    saw).

    Nobody runs out of time on a busy machine, unless a test says so: a request would be sent once
    more than expected.
    """
    grades = Counter()
    arguments = {"n": N, "params": {"seed": 3}, "stall_timeout": 100.0, "pbar": False, **arguments}
    if stream:
        arguments = {"on_chunk": ignore, "samples_per_request": arguments["n"], **arguments}

    async def main():
        async with bad_server.serving(
            plan, refused_for=0.1, retry_after=0.2, **(settings or {})
        ) as server:
            reading = functools.partial(http_transport.HTTPTransport, read_timeout=timeout)
            with mock.patch("ttrl.rollouts.client.transport.HTTPTransport", reading):
                async with nothing_left(server):
                    return await get_task_results(
                        make_tasks(tasks, grades), server.url, "m", **arguments
                    ), server.stats()

    results, stats = asyncio.run(main())
    assert grades == Counter((s.task_id, s.text) for s in results.samples if s.reward is not None)
    assert all((s.reward is None) != (s.error is None) for s in results.samples)
    stats_of_call = results.stats
    assert (
        stats_of_call.num_graded + stats_of_call.num_failed
        == len(results.samples)
        == tasks * arguments["n"]
    )
    assert sum(stats_of_call.exceptions.values()) == stats_of_call.num_failed
    return results, stats, grades


SILENT = ("silence", "stall")  # only a time limit ends them
IMPATIENT = {"timeout": 1.0, "stall_timeout": 0.7}


def faults_of(stream, silent):
    """Those that only a time limit ends, or all others."""
    other = "plain" if stream else "stream"
    return [
        fault
        for fault, (_, where) in bad_server.FAULTS.items()
        if where != other and (fault in SILENT) == silent
    ]


def by_task(results):
    return {r.task_id: r for r in results}


@pytest.fixture(scope="module")
def clean():
    """Without faults, streamed and not: the same."""
    plain, stats, _ = call(tasks=80)
    streamed, _, _ = call(tasks=80, stream=True)
    assert seen(plain) == seen(streamed)
    assert stats["requests"] == 80
    assert plain.stats.num_graded == 80 * N
    return by_task(plain)


def content(result):
    return [
        (s.text, s.token_ids, s.prompt_token_ids, s.logprobs, s.finish_reason, s.reward)
        for s in result.samples
    ]


@pytest.mark.long(but=["False-True"])
@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_each_fault_once(clean, stream, silent):
    """Two tasks meet each fault, in their first request.

    Long for the other ways to ask: only these have each fault in them. All at once: below.
    """
    faults = faults_of(stream, silent)

    def plan(ask):
        number = int(ask.prompt.split()[-1])
        return faults[number // 2] if ask.attempt == 1 and ask.n == N else None

    limits = IMPATIENT if silent else {}
    results, stats, _ = call(plan, tasks=2 * len(faults), stream=stream, max_retries=20, **limits)
    assert stats["faults"].keys() == set(faults)
    for number, result in enumerate(results):
        fault = faults[number // 2]
        kind, _ = bad_server.FAULTS[fault]
        asked = stats["asked"][result.task_id]
        errors = [s.error for s in result.samples if s.error is not None]
        if kind == "final":
            assert len(errors) == (N if fault.startswith("http") else 1), (fault, errors)
            assert all(REASONS[fault] in error for error in errors), (fault, errors)
            assert asked == 1, fault
        else:
            assert errors == [], fault
        for k, sample in enumerate(result.samples):
            if sample.error is None:
                assert content(result)[k] == content(clean[result.task_id])[k], fault
        if kind == "retried":
            assert asked >= 2, fault
        elif fault == "fewer_choices":
            assert asked == 2  # the one in the middle is asked for alone


@pytest.mark.long(but=["False-True"])
@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_each_fault_for_ever_costs_one_task_and_not_the_others(clean, stream, silent):
    """Every second task meets a fault, whenever it is asked for.

    Long for the other ways to ask: only these have each fault in them.
    """
    faults = faults_of(stream, silent)

    def plan(ask):
        number = int(ask.prompt.split()[-1])
        return faults[number // 2] if number % 2 == 0 else None

    limits = IMPATIENT if silent else {}
    results, stats, _ = call(
        plan, tasks=2 * len(faults), stream=stream, max_retries=1, max_downtime=60.0, **limits
    )
    for number, result in enumerate(results):
        fault = faults[number // 2]
        kind, _ = bad_server.FAULTS[fault]
        errors = [s.error for s in result.samples if s.error is not None]
        if number % 2 or kind == "harmless":
            assert errors == [], (fault, errors)
            assert content(result) == content(clean[result.task_id]), fault
        elif kind == "final":
            assert len(errors) == (N if fault.startswith("http") else 1), (fault, errors)
            assert all(REASONS[fault] in error for error in errors), (fault, errors)
            assert stats["asked"][result.task_id] == 1, fault
        else:
            assert len(errors) == (1 if fault in ("abort", "error") else N), (fault, errors)
            assert len(set(errors)) == 1, (fault, errors)
            assert errors[0].startswith(
                ("RequestError: http://127.0.0.1:", "ServerError: http://127.0.0.1:")
            ), errors[0]
            assert "attempts)" in errors[0], (fault, errors[0])
            assert 2 <= stats["asked"][result.task_id] <= 20, fault  # moves are bounded, too


def test_a_restart_in_mid_run_costs_nothing():
    for stream in (False, True):
        clean, _, _ = call(tasks=60, stream=stream)
        results, stats, _ = call(
            tasks=60,
            stream=stream,
            concurrency=20,
            settings={"restart_after": 60, "downtime": 0.4, "latency": 0.02},
        )
        assert stats["restarts"] == 1
        assert seen(results) == seen(clean)
        assert results.stats.num_failed == 0


def test_unusual_answers_are_graded_as_they_are():
    model = bad_server.Model((8, 64), {"empty": 0.25, "null": 0.25, "length": 0.25, "long": 0.02})
    plain, _, _ = call(tasks=25, n=4, settings={"model": model})
    streamed, _, _ = call(tasks=25, n=4, settings={"model": model}, stream=True)
    assert seen(plain) == seen(streamed)
    assert plain.stats.num_graded == 100
    assert {s.finish_reason for s in plain.samples} == {"stop", "length"}
    assert sum(s.text == "" for s in plain.samples) > 20
    assert max(len(s.text) for s in plain.samples) == 100_000
    assert all(len(s.token_ids) == len(s.logprobs) >= 1 for s in plain.samples)


def test_choices_that_a_server_leaves_out_again_and_again():
    """It gives every other one of those asked for, so 5 samples take several requests; each is
    sampled once.
    """
    results, stats, _ = call(lambda ask: "fewer_choices", tasks=4, n=5)
    whole, _, _ = call(tasks=4, n=5)
    assert seen(results) == seen(whole)
    for numbers in stats["delivered"].values():
        assert sorted(numbers) == [3, 4, 5, 6, 7]


def test_two_servers_of_which_one_dies_and_one_lies():
    async def main():
        async with (
            bad_server.serving("all=0.5", seed=4, refused_for=0.1, retry_after=0.2) as lies,
            bad_server.serving(latency=0.01) as dies,
            bad_server.serving(latency=0.01) as good,
        ):
            grades = Counter()

            async def later():
                await asyncio.sleep(0.1)
                dies.close()

            dying = asyncio.create_task(later())
            clients = [
                openai.AsyncOpenAI(base_url=s.url, api_key="k", timeout=1.0)
                for s in (lies, dies, good)
            ]
            results = await get_task_results(
                make_tasks(60, grades),
                clients,
                "m",
                n=N,
                params={"seed": 3},
                concurrency=12,
                pbar=False,
                stall_timeout=0.7,
            )
            await dying
            for client in clients:
                await client.close()
            return results, grades

    results, grades = asyncio.run(main())
    assert grades == Counter((s.task_id, s.text) for s in results.samples if s.reward is not None)
    for sample in results.samples:  # what failed is what cannot be mended
        assert sample.error is None or any(words in sample.error for words in REASONS.values()), (
            sample.error
        )


@pytest.fixture
def many_files():
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (resource.RLIM_INFINITY,) and hard < 6000:
        pytest.skip(f"a process may only have {hard} open files here")
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("count", "stream"),
    [(500, False), pytest.param(5000, True, marks=[pytest.mark.e2e, pytest.mark.long])],
)
def test_hundreds_of_concurrent_requests_and_thousands(many_files, count, stream):
    """All of them wait at the server at the same time; then all are answered. The server is a
    process of its own.

    Long for 5,000 streams: only this has more connections than most limits of a shell allow.
    """
    grades = Counter()
    with bad_server.process("--tokens", "4", "--gate", str(count)) as server:
        results = asyncio.run(
            get_task_results(
                make_tasks(count, grades),
                server.url,
                "m",
                params={"seed": 3},
                concurrency=count,
                on_chunk=ignore if stream else None,
                pbar=False,
            )
        )
        stats = server.stats()
    assert results.stats.num_graded == count == len(grades)
    assert set(grades.values()) == {1}
    assert stats["in_flight"] == 0
    assert stats["requests"] == count
    assert stats["most_in_flight"] == count


# Cancellation


@pytest.mark.long(but=["False"])
@pytest.mark.parametrize("stream", [False, True])
def test_cancelled_in_the_middle(tmp_path, stream):
    """What was finished is in the exception, in the cache, and was handed to the callback; nothing
    else is left anywhere.

    Long for streams: only these are cut between two chunks.
    """
    done = []

    async def main():
        async with bad_server.serving(latency=0.05, token_delay=0.002) as server:
            arguments = {
                "n": 2,
                "params": {"seed": 3},
                "concurrency": 4,
                "cache": tmp_path / "cache",
                "weights_digest": "w",
                "pbar": False,
                "on_chunk": ignore if stream else None,
            }
            async with nothing_left(server):
                sampling = asyncio.create_task(
                    get_task_results(
                        make_tasks(30), server.url, "m", on_task_done=done.append, **arguments
                    )
                )
                while len(done) < 5 or not server.in_flight:
                    await asyncio.sleep(0.001)
                sampling.cancel()
                with pytest.raises(asyncio.CancelledError) as caught:
                    await sampling
                assert server.aborted  # requests that were under way were ended, not waited for
                del sampling
            results = caught.value.results
            finished = {result.task_id for result in results}
            assert finished >= {result.task_id for result in done[:5]}
            assert len(finished) == len(done) < 30
            assert all(s.reward == reward_of(s.text) for s in results.samples)
            again = await get_task_results(make_tasks(30), server.url, "m", **arguments)
        assert {s.task_id for s in again.samples if s.cached} >= finished
        assert again.stats.num_graded == 60

    asyncio.run(main())


def test_leaving_an_iteration_ends_everything():
    async def main():
        async with bad_server.serving(latency=0.02) as server, nothing_left(server):
            begun = []

            def endless():
                number = 0
                while True:
                    begun.append(number)
                    yield from make_tasks(1, prefix=f"task {number}")
                    number += 1

            results = []
            async with contextlib.aclosing(
                iter_task_results(endless(), server.url, "m", n=2, concurrency=8, pbar=False)
            ) as stream:
                async for result in stream:
                    results.append(result)
                    if len(results) == 20:
                        break
            assert len({result.task_id for result in results}) == 20
            assert all(len(result.rewards) == 2 for result in results)

    asyncio.run(main())


def test_a_callback_of_chunks_that_raises_costs_its_samples():
    def on_chunk(chunk, completion):
        raise KeyError("mine")

    results, stats, _ = call(tasks=3, stream=True, on_chunk=on_chunk)
    assert results.stats.num_failed == 9
    assert all("KeyError" in s.error for s in results.samples)
    assert stats["requests"] == 3  # not worth a retry


# All together


@pytest.fixture(scope="module")
def bench():
    import bench_faults

    return bench_faults


@pytest.mark.parametrize(("streamed", "per_request"), [(False, 8), (True, 1)])
def test_every_fault_at_once(bench, streamed, per_request):
    check(
        bench,
        bench.run(completions=240, share=0.3, seed=1, ways=[bench.Way(streamed, per_request)]),
        240,
    )


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_fault_at_once_in_all_ways(bench):
    """Long: only this mixes all faults in the four ways of asking. Two of them are tried above,
    with fewer completions.
    """
    check(bench, bench.run(completions=480, share=0.2, seed=2), 480)


def check(bench, ways, completions):
    for way in ways:
        assert way.problems == [], bench.table(ways)
        assert way.graded + way.failed.total() == completions
        assert way.faults.total() >= 0.1 * completions / way.per_request
