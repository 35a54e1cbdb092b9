"""Servers: every send ends once, with a result or an error, whatever the servers do; and no server
idles or drowns meanwhile.

Pauses are checked on a clock that jumps (tools/bench_scheduling.py), connections on real sockets.
"""

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

import bench_scheduling as bench
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ttrl.errors import RequestError, UserError
from ttrl.rollouts.client.wire import Answer
from ttrl.rollouts.scheduling import open_files, server_state, servers
from ttrl.rollouts.scheduling.server_state import Pauses
from ttrl.rollouts.scheduling.servers import Servers, Size

SIZE = Size(prompt=30, n=1, max_tokens=100)
RESET = RequestError("connection reset", "connection")


@pytest.fixture(autouse=True)
def short_pauses() -> None:
    """Those of the code: on a clock that jumps they cost nothing."""


def virtual(main: Coroutine[Any, Any, Any]) -> Any:
    return bench.run_virtual(main)


def status(code: int, retry_after: float | None = None) -> RequestError:
    return RequestError(f"HTTP {code}", "status", status=code, retry_after=retry_after)


class Fake:
    """A server on the virtual clock. `behaviour(number of the request)` gives an error to raise, or
    seconds until the answer.
    """

    def __init__(
        self, behaviour: Callable[[int], Exception | float] = lambda number: 1.0, name: str = "a"
    ) -> None:
        self.base_url = f"http://{name}/v1"
        self.behaviour = behaviour
        self.alive = True
        self.requests = self.probes = self.in_flight = self.most = 0
        self.sent_at: list[float] = []
        self.keys: Counter[Any] = Counter()

    async def get(self, path: str, *, root: bool = False, timeout: float = 10.0) -> bytes:
        if path == "/metrics" and self.alive:
            raise status(404)
        self.probes += path != "/metrics"
        if not self.alive:
            raise RequestError("connection refused", "connection")
        return b"{}"

    async def answer(self, key: Any = None) -> list[Answer | None]:
        self.requests += 1
        self.keys[key] += 1
        self.sent_at.append(asyncio.get_running_loop().time())
        if not self.alive:
            raise RequestError("connection refused", "connection")
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            outcome = self.behaviour(self.requests)
            if isinstance(outcome, Exception):
                raise outcome
            await asyncio.sleep(outcome)
        finally:
            self.in_flight -= 1
        return [Answer(b"{}", prompt_tokens=10, completion_tokens=20)]


async def to_its_transport(transport: Any) -> list[Answer | None]:
    return await transport.answer()


def send(pool: Servers, *, max_retries: int = 4, **kwargs: Any) -> Awaitable[list[Answer | None]]:
    return pool.send(to_its_transport, size=SIZE, max_retries=max_retries, **kwargs)


def at_rest(pool: Servers) -> bool:
    """No lease is left, nothing is counted as in flight, nobody waits."""
    return (
        all(not server.leases and server.room.samples == 0 for server in pool.servers)
        and pool._in_flight == 0
        and not [waiter for _, waiter in pool._queue if not waiter.lease.done()]
    )


async def nothing_left() -> bool:
    await asyncio.sleep(0)
    return asyncio.all_tasks() == {asyncio.current_task()}


def in_turn(*outcomes: Exception | float) -> Callable[[int], Exception | float]:
    return lambda number: outcomes[min(number, len(outcomes)) - 1]


# One server


@pytest.mark.parametrize(
    "fault",
    [
        status(500),
        status(503),
        status(429),
        status(408),
        RESET,
        RequestError("slow", "timeout"),
        RequestError("stalled", "stall"),
        RequestError("no JSON", "malformed"),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.status}",
)
def test_faults_are_tried_again_with_growing_pauses(fault: RequestError) -> None:
    fake = Fake(in_turn(fault, fault, fault, fault, 1.0))

    async def main() -> None:
        async with Servers([fake], concurrency=None) as pool:
            assert len(await send(pool)) == 1
            assert at_rest(pool)
        assert await nothing_left()

    virtual(main())
    pauses = [
        later - earlier for earlier, later in zip(fake.sent_at, fake.sent_at[1:], strict=False)
    ]
    assert len(pauses) == 4
    for pause, most in zip(pauses, [0.5, 1, 2, 4], strict=True):
        assert 0.75 * most <= pause <= most


def test_the_last_fault_is_raised_with_the_number_of_attempts() -> None:
    fake = Fake(in_turn(status(500)))

    async def main() -> None:
        async with Servers([fake], concurrency=None) as pool:
            with pytest.raises(RequestError, match=r"HTTP 500 \(3 attempts\)") as caught:
                await send(pool, max_retries=2)
            assert caught.value.status == 500
            with pytest.raises(RequestError, match=r"^HTTP 500$"):
                await send(pool, max_retries=0)
            assert at_rest(pool)

    virtual(main())
    assert fake.requests == 4


@pytest.mark.parametrize("code", [400, 401, 403, 404, 409, 413, 422])
def test_mistakes_are_never_tried_again(code: int) -> None:
    fake = Fake(in_turn(status(code)))

    async def main() -> None:
        async with Servers([fake], concurrency=None) as pool:
            with pytest.raises(RequestError, match=f"^HTTP {code}$"):
                await send(pool)
            assert at_rest(pool)

    virtual(main())
    assert fake.requests == 1


def test_a_server_says_how_long_to_wait_and_new_requests_wait_too() -> None:
    fake = Fake(in_turn(status(429, retry_after=30.0), 1.0))

    async def main() -> None:
        async with Servers([fake], concurrency=None) as pool:
            first = asyncio.create_task(send(pool))
            await asyncio.sleep(1)
            await asyncio.gather(first, *(send(pool) for _ in range(5)))
            (server,) = pool.servers
            assert server.room.limit == 7  # from 1: the server may have meant it
            assert at_rest(pool)

    virtual(main())
    assert fake.sent_at == [0.0, 30.0, 31.0, 31.0, 32.0, 32.0, 32.0]


def test_a_pause_that_a_server_asks_for_has_a_limit() -> None:
    fake = Fake(in_turn(status(503, retry_after=1e9), 1.0))

    async def main() -> None:
        async with Servers([fake], concurrency=None) as pool:
            await send(pool)

    virtual(main())
    assert fake.sent_at == [0.0, server_state.LONGEST_RETRY_AFTER]


def test_a_429_halves_what_is_in_flight_and_successes_bring_it_back() -> None:
    fake = Fake(lambda number: status(429) if number == 512 else 1.0)

    async def main() -> None:
        async with Servers([fake], concurrency=None) as pool:
            await asyncio.gather(*(send(pool) for _ in range(3000)))
            (server,) = pool.servers
            assert 256 < server.room.limit < 300
            assert at_rest(pool)

    virtual(main())
    assert fake.most == 512


def test_an_exception_of_the_attempt_comes_through() -> None:
    async def broken(_: Any) -> list[Answer | None]:
        raise ZeroDivisionError

    async def times_out(_: Any) -> list[Answer | None]:
        raise TimeoutError("its own")

    async def main() -> None:
        async with Servers([Fake()], concurrency=None) as pool:
            with pytest.raises(ZeroDivisionError):
                await pool.send(broken, size=SIZE, max_retries=4)
            with pytest.raises(TimeoutError, match="its own"):
                await pool.send(times_out, size=SIZE, max_retries=4)
            assert at_rest(pool)

    virtual(main())


# Servers that are gone


def test_a_restart_costs_no_attempt() -> None:
    fake = Fake()

    async def main() -> None:
        async with Servers([fake], concurrency=None) as pool:
            await send(pool)
            fake.alive = False
            waiting = [asyncio.create_task(send(pool, max_retries=0)) for _ in range(20)]
            await asyncio.sleep(30)
            assert not pool.servers[0].up
            waiting += [asyncio.create_task(send(pool, max_retries=0)) for _ in range(20)]
            await asyncio.sleep(15)
            fake.alive = True
            await asyncio.gather(*waiting)
            assert at_rest(pool) and pool.servers[0].up
        assert await nothing_left()

    virtual(main())
    assert fake.probes < 20


def test_going_out_and_coming_back_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        test_a_restart_costs_no_attempt()
    assert [record.message.split(" is ")[0] for record in caplog.records] == [
        "http://a/v1",
        "http://a/v1",
    ]
    assert "connection refused" in caplog.records[0].message
    assert "is back" in caplog.records[1].message


def test_a_server_that_stays_away_is_given_up() -> None:
    fake = Fake()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with Servers([fake], concurrency=None, max_downtime=20.0) as pool:
            await send(pool)
            fake.alive = False
            began = loop.time()
            outcomes = await asyncio.gather(
                *(send(pool) for _ in range(10)), return_exceptions=True
            )
            assert loop.time() - began == pytest.approx(20.0)
            for outcome in outcomes:
                assert isinstance(outcome, RequestError)
                assert "not answered for 20 s; check that it is running" in str(
                    outcome
                ) and "connection refused" in str(outcome)
            with pytest.raises(
                RequestError, match="check that it is running"
            ):  # at once, from now on
                await send(pool)
            assert loop.time() - began == pytest.approx(20.0)
            fake.alive = True
            await asyncio.sleep(6)
            await send(pool)
            assert at_rest(pool)

    virtual(main())


def test_an_address_that_never_answered_is_given_up_sooner() -> None:
    fake = Fake()
    fake.alive = False

    async def main() -> float:
        loop = asyncio.get_running_loop()
        async with Servers([fake], concurrency=None) as pool:
            outcomes = await asyncio.gather(
                *(send(pool) for _ in range(100)), return_exceptions=True
            )
            assert all(isinstance(outcome, RequestError) for outcome in outcomes)
            assert at_rest(pool)
        return loop.time()

    assert virtual(main()) == pytest.approx(Pauses().patience, abs=0.5)


def test_a_single_reset_takes_no_server_out() -> None:
    fake = Fake(lambda number: RESET if number == 50 else 1.0)

    async def main() -> None:
        async with Servers([fake], concurrency=None) as pool:
            sends = [asyncio.create_task(send(pool)) for _ in range(100)]
            await asyncio.sleep(0.1)
            assert pool.servers[0].up
            await asyncio.gather(*sends)

    virtual(main())
    assert (fake.requests, fake.probes) == (101, 1)


def test_a_request_that_is_always_reset_uses_up_its_attempts() -> None:
    fake = Fake(in_turn(RESET))

    async def main() -> None:
        async with Servers([fake], concurrency=None) as pool:
            with pytest.raises(RequestError, match=r"reset \(5 attempts\)"):
                await send(pool)

    virtual(main())
    assert fake.requests == 5


def test_a_request_that_kills_its_server_is_not_sent_for_ever() -> None:
    fake = Fake()

    def die(number: int) -> Exception:
        fake.alive = False
        asyncio.get_running_loop().call_later(10, revive)
        return RESET

    def revive() -> None:
        fake.alive = True

    fake.behaviour = die

    async def main() -> None:
        async with Servers([fake], concurrency=None) as pool:
            with pytest.raises(RequestError, match="attempts"):
                await send(pool)
            assert at_rest(pool)

    virtual(main())
    assert fake.requests == servers._MOST_MOVES + 5


def test_requests_move_from_a_machine_that_vanishes_without_a_word() -> None:
    """Its connections stay open for ever."""
    gone, other = Fake(lambda number: 1e6, "gone"), Fake(name="other")

    async def main() -> None:
        async with Servers([gone, other], concurrency=None) as pool:
            sends = [asyncio.create_task(send(pool, max_retries=0)) for _ in range(20)]
            await asyncio.sleep(0.5)
            assert gone.in_flight == 10
            gone.alive = False
            gone.behaviour = in_turn(RequestError("no route", "connection"))
            sends += [asyncio.create_task(send(pool, max_retries=0)) for _ in range(20)]
            await asyncio.gather(*sends)
            assert at_rest(pool)
        assert gone.in_flight == 0
        assert await nothing_left()

    virtual(main())


def test_requests_move_from_a_machine_that_is_cut_off() -> None:
    """What is sent to it gets no answer, not even a refusal, and its connections stay open; nothing
    new is sent.
    """

    class CutOff(Fake):
        is_cut = False

        async def get(self, path: str, *, root: bool = False, timeout: float = 10.0) -> bytes:
            if self.is_cut:
                await asyncio.sleep(timeout)
                raise RequestError("no answer", "timeout")
            return b'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="65536",num_gpu_blocks="4096"} 1.0\n'

    gone, other = CutOff(lambda number: 1e6, "gone"), Fake(name="other")

    async def main() -> float:
        loop = asyncio.get_running_loop()
        async with Servers([gone, other], concurrency=None) as pool:
            sends = [asyncio.create_task(send(pool, max_retries=0)) for _ in range(20)]
            await asyncio.sleep(0.5)
            assert gone.in_flight > 0
            gone.is_cut, began = True, loop.time()
            await asyncio.gather(*sends)
            return loop.time() - began

    look = Pauses().poll + server_state.PROBE_TIMEOUT
    detection = server_state.UNANSWERED_IN_A_ROW * look + server_state.PROBE_TIMEOUT
    assert virtual(main()) < detection + server_state.ABANDON_AFTER + 15


class PoolTimeout(Exception):  # noqa: N818
    """As httpx calls it."""


@pytest.mark.parametrize(
    "pool", [True, False], ids=["no free connection", "now and then no answer"]
)
def test_a_server_that_is_slow_to_say_its_load_keeps_its_requests(pool: bool) -> None:
    class Slow(Fake):
        looks = 0

        async def get(self, path: str, *, root: bool = False, timeout: float = 10.0) -> bytes:
            self.looks += 1
            if self.looks > 1 and (pool or self.looks % 2):
                await asyncio.sleep(timeout)
                raise RequestError("no answer", "timeout") from (PoolTimeout() if pool else None)
            return b'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="65536",num_gpu_blocks="4096"} 1.0\n'

    slow = Slow(lambda number: 1000.0)

    async def main() -> None:
        async with Servers([slow], concurrency=None) as pool:
            await asyncio.gather(*(send(pool, max_retries=0) for _ in range(5)))
            assert pool.servers[0].up

    virtual(main())
    assert slow.requests == 5 and slow.looks > 100


# Several servers


def test_the_requests_of_a_dead_server_move_at_once_and_return_with_it() -> None:
    a, b = Fake(name="a"), Fake(name="b")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with Servers([a, b], concurrency=None) as pool:
            await asyncio.gather(*(send(pool, max_retries=0) for _ in range(20)))
            assert a.requests == b.requests == 10
            a.alive = False
            began = loop.time()
            await asyncio.gather(*(send(pool, max_retries=0) for _ in range(20)))
            assert loop.time() - began == pytest.approx(1.0)  # no pause
            assert b.requests == 30
            a.alive = True
            await asyncio.sleep(6)
            before = a.requests
            await asyncio.gather(*(send(pool, max_retries=0) for _ in range(20)))
            assert a.requests - before == 10
            assert at_rest(pool)

    virtual(main())


def test_a_server_that_answers_probes_but_fails_requests_rests() -> None:
    bad, good = Fake(in_turn(status(500)), "bad"), Fake(name="good")

    async def main() -> None:
        async with Servers([bad, good], concurrency=None) as pool:
            for _ in range(60):
                await send(pool)
            assert at_rest(pool)

    virtual(main())
    assert good.requests == 60
    assert bad.requests < 60


def test_what_a_server_broke_off_goes_to_another_one_next() -> None:
    """With the same affinity too: who breaks every second request off is emptier than the others,
    and answers probes.
    """

    async def main() -> None:
        bad, good = (
            Fake(lambda number: RESET if number % 2 else 5.0, "bad"),
            Fake(lambda number: 5.0, "good"),
        )
        async with Servers([bad, good], concurrency=None) as pool:
            for affinity in range(20):
                before = good.requests
                failed = bad.requests % 2 == 0  # where the next one would be broken off
                await send(pool, affinity=affinity, max_retries=1)
                assert good.requests == before + 1 or not failed
        assert bad.requests and good.requests

    virtual(main())


def test_a_server_that_asks_for_a_pause_does_not_hold_up_the_other() -> None:
    busy, free = Fake(in_turn(status(429, retry_after=100.0)), "busy"), Fake(name="free")

    async def main() -> float:
        async with Servers([busy, free], concurrency=None) as pool:
            await asyncio.gather(*(send(pool) for _ in range(10)))
            return asyncio.get_running_loop().time()

    assert virtual(main()) < 3.0
    assert free.requests == 10


def test_work_follows_speed() -> None:
    fast, slow = Fake(lambda number: 0.1, "fast"), Fake(lambda number: 1.0, "slow")

    async def main() -> float:
        async with Servers([slow, fast], concurrency=40) as pool:
            await asyncio.gather(*(send(pool) for _ in range(2000)))
            assert at_rest(pool)
            return asyncio.get_running_loop().time()

    seconds = virtual(main())
    assert 6 < fast.requests / slow.requests < 12
    assert seconds < 1.2 * 2000 / (20 / 0.1 + 20 / 1.0)


def test_the_samples_of_a_task_stay_with_its_server() -> None:
    a, b = Fake(name="a"), Fake(name="b")

    async def one(pool: Servers, task: int) -> None:
        async def attempt(transport: Any) -> list[Answer | None]:
            return await transport.answer(task)

        await pool.send(attempt, size=SIZE, max_retries=0, affinity=task)

    async def main() -> None:
        async with Servers([a, b], concurrency=None) as pool:
            for _ in range(5):
                await asyncio.gather(*(one(pool, task) for task in range(30)))
            a.alive = False
            await asyncio.gather(*(one(pool, task) for task in range(30)))
            assert at_rest(pool)

    virtual(main())
    b_only = Counter({task: count for task, count in b.keys.items() if task not in a.keys})
    assert set(b_only.values()) == {6}
    # Those that failed on it first, and moved, are 6.
    assert all(a.keys[task] in (5, 6) and b.keys[task] == 1 for task in a.keys)
    assert len(a.keys) == 15


def test_affinity_gives_way_where_it_would_fill_one_server() -> None:
    a, b = Fake(name="a"), Fake(name="b")

    async def main() -> None:
        async with Servers([a, b], concurrency=None) as pool:
            await asyncio.gather(*(send(pool, affinity="all the same") for _ in range(1000)))

    virtual(main())
    assert min(a.requests, b.requests) > 400


# How many at once


def test_concurrency_is_a_hard_limit_over_all_servers() -> None:
    a, b = Fake(name="a"), Fake(name="b")

    async def main() -> float:
        async with Servers([a, b], concurrency=7) as pool:
            most = 0

            async def watch() -> None:
                nonlocal most
                while True:
                    most = max(most, a.in_flight + b.in_flight)
                    await asyncio.sleep(0.1)

            watcher = asyncio.create_task(watch())
            await asyncio.gather(*(send(pool) for _ in range(70)))
            watcher.cancel()
            assert most == 7
            return asyncio.get_running_loop().time()

    assert virtual(main()) == pytest.approx(10.0, abs=0.2)


def test_a_semaphore_is_held_in_flight_and_not_in_pauses() -> None:
    fake = Fake(in_turn(status(500), *[1.0] * 100))

    async def main() -> None:
        semaphore = asyncio.Semaphore(3)
        async with Servers([fake], concurrency=semaphore) as pool:
            failing = asyncio.create_task(send(pool))
            await asyncio.sleep(0.1)  # it pauses now
            assert not semaphore.locked() and semaphore._value == 3
            others = [asyncio.create_task(send(pool)) for _ in range(9)]
            await asyncio.sleep(0.1)
            assert semaphore.locked() and fake.in_flight == 3
            await asyncio.gather(failing, *others)
            assert semaphore._value == 3

    virtual(main())
    assert fake.most == 3


@pytest.mark.parametrize("concurrency", [0, -1, 1.5, "8", True])
def test_a_wrong_concurrency_is_refused(concurrency: Any) -> None:
    with pytest.raises(UserError, match="concurrency is"):
        Servers([Fake()], concurrency=concurrency)


def test_wrong_downtimes_are_refused() -> None:
    for seconds in (-1, float("inf"), "long", True):
        with pytest.raises(UserError, match="max_downtime"):
            Servers([Fake()], concurrency=None, max_downtime=seconds)  # type: ignore[arg-type]


def test_first_come_first_served() -> None:
    fake = Fake()
    order: list[int] = []

    async def one(pool: Servers, number: int) -> None:
        async def attempt(transport: Any) -> list[Answer | None]:
            order.append(number)
            return await transport.answer()

        await pool.send(attempt, size=SIZE, max_retries=0)

    async def main() -> None:
        async with Servers([fake], concurrency=3) as pool:
            await asyncio.gather(*(one(pool, number) for number in range(50)))

    virtual(main())
    assert order == list(range(50))


def test_a_limit_of_open_files_limits_what_is_in_flight(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = Fake()

    async def main() -> None:
        files = open_files.OpenFiles(lambda wanted: open_files.RESERVE + 10)
        async with Servers([fake], concurrency=None, files=files) as pool:
            await asyncio.gather(*(send(pool) for _ in range(50)))

    with caplog.at_level(logging.WARNING):
        virtual(main())
    assert fake.most == 10
    assert [
        record.message for record in caplog.records if "this process may open" in record.message
    ] == [caplog.records[0].message]


def test_the_limit_of_open_files_is_raised() -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        low = 300
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, before[1]))
        files = open_files.OpenFiles()
        assert files.allows(10)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == low
        if before[1] in (resource.RLIM_INFINITY,) or before[1] >= 800:
            assert files.allows(500)
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 500 + open_files.RESERVE
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# Cancellation


def test_cancellation_leaves_nothing_behind() -> None:
    fake = Fake(lambda number: 1000.0)

    async def main() -> None:
        async with Servers([fake], concurrency=5) as pool:
            sends = [asyncio.create_task(send(pool)) for _ in range(50)]
            await asyncio.sleep(1)
            for task in sends[::2]:  # of those in flight and those that wait
                task.cancel()
            await asyncio.sleep(1)
            assert fake.in_flight == 5
            for task in sends:
                task.cancel()
            outcomes = await asyncio.gather(*sends, return_exceptions=True)
            assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
            assert at_rest(pool) and fake.in_flight == 0
            fake.behaviour = lambda number: 1.0
            await send(pool)
        assert await nothing_left()

    virtual(main())


def test_cancelled_in_the_moment_of_admission() -> None:
    fake = Fake()

    async def main() -> None:
        async with Servers([fake], concurrency=1) as pool:
            first, second = asyncio.create_task(send(pool)), asyncio.create_task(send(pool))
            await first  # the second has its lease by now, and has not run yet
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            assert at_rest(pool)
            await send(pool)

    virtual(main())


def test_cancelled_while_the_server_is_away() -> None:
    fake = Fake()
    fake.alive = False

    async def main() -> None:
        async with Servers([fake], concurrency=None) as pool:
            task = asyncio.create_task(send(pool))
            await asyncio.sleep(2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert at_rest(pool)
        assert await nothing_left()

    virtual(main())


# Everything at once


@settings(max_examples=40)
# A timer a hair before its time.
@example(seed=108, count=1, fault_share=0.6, concurrency=1, cancelled=False, restarts=False)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 3),
    fault_share=st.sampled_from([0.0, 0.05, 0.2, 0.6]),
    concurrency=st.sampled_from([None, 1, 5, "semaphore"]),
    cancelled=st.booleans(),
    restarts=st.booleans(),
)
def test_every_send_ends_once(
    seed: int, count: int, fault_share: float, concurrency: Any, cancelled: bool, restarts: bool
) -> None:
    dice = random.Random(seed)
    faults = [
        status(500), status(503, 2.0), status(429), status(429, 5.0), status(400), RESET,
        RequestError("slow", "timeout"), RequestError("stalled", "stall"), RequestError("no JSON",
        "malformed"),
    ]  # fmt: skip

    def behaviour(_: int) -> Exception | float:
        return dice.choice(faults) if dice.random() < fault_share else dice.random() * 3

    fakes = [Fake(behaviour, f"server{number}") for number in range(count)]

    async def main() -> None:
        limit = asyncio.Semaphore(4) if concurrency == "semaphore" else concurrency
        async with Servers(fakes, concurrency=limit, max_downtime=30.0) as pool:

            async def restart() -> None:
                while True:
                    await asyncio.sleep(6 + dice.random() * 10)  # a probe comes every 5 s
                    fake = dice.choice(fakes)
                    fake.alive = False
                    await asyncio.sleep(dice.random() * 20)
                    fake.alive = True

            restarter = asyncio.create_task(restart()) if restarts else None
            sends = [asyncio.create_task(send(pool, affinity=number // 4)) for number in range(60)]
            if cancelled:
                await asyncio.sleep(dice.random() * 5)
                for task in dice.sample(sends, 20):
                    task.cancel()
            outcomes = await asyncio.gather(*sends, return_exceptions=True)
            if restarter is not None:
                restarter.cancel()
                await asyncio.gather(restarter, return_exceptions=True)
            for outcome in outcomes:
                assert isinstance(outcome, list | RequestError | asyncio.CancelledError), outcome
            if not cancelled and not fault_share:
                assert all(isinstance(outcome, list) for outcome in outcomes)
            assert at_rest(pool)
            if isinstance(limit, asyncio.Semaphore):
                assert limit._value == 4
        assert sum(fake.in_flight for fake in fakes) == 0
        assert await nothing_left()

    virtual(main())


def test_five_thousand_at_once() -> None:
    fake = Fake(lambda number: status(500) if number % 7 == 0 else 0.5)

    async def main() -> None:
        async with Servers([fake], concurrency=5000) as pool:
            outcomes = await asyncio.gather(*(send(pool, max_retries=20) for _ in range(5000)))
            assert len(outcomes) == 5000
            assert at_rest(pool)

    virtual(main())


# Real sockets


class Wire:
    """A plain HTTP client: a connection per request."""

    def __init__(self, port: int) -> None:
        self.base_url = f"http://127.0.0.1:{port}/v1"
        self.port = port

    async def get(self, path: str, *, root: bool = False, timeout: float = 10.0) -> bytes:
        return await self.request("GET", path if root else "/v1" + path)

    async def answer(self) -> list[Answer | None]:
        await self.request("POST", "/v1/chat/completions")
        return [Answer(b"{}", prompt_tokens=10, completion_tokens=20)]

    async def request(self, method: str, path: str) -> bytes:
        writer = None
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(f"{method} {path} HTTP/1.1\r\nconnection: close\r\n\r\n".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            body = await reader.readexactly(int(head.split("content-length:")[1].split("\r\n")[0]))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise RequestError(
                f"{self.base_url}: {type(error).__name__}: {error}", "connection"
            ) from error
        finally:
            if writer is not None:
                writer.close()
        code = int(head.split()[1])
        if code != 200:
            raise RequestError(f"{self.base_url}: HTTP {code}", "status", status=code)
        return body


class Listener:
    """An HTTP server that can be stopped hard and started again at the same port."""

    def __init__(self) -> None:
        self.port = 0
        self.completions = 0
        self.faults: Callable[[int], int | None] = lambda number: None
        """A status to answer, 0 for a reset in the middle of the answer."""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=1000)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            path = (await reader.readuntil(b"\r\n\r\n")).decode().split()[1]
            code: int | None = 404 if path == "/metrics" else None
            if path.endswith("/completions"):
                self.completions += 1
                code = self.faults(self.completions)
                await asyncio.sleep(0.01)
            if code == 0:
                writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 10\r\n\r\n12345")
                await writer.drain()
                writer.transport.abort()
            else:
                writer.write(f"HTTP/1.1 {code or 200} X\r\ncontent-length: 2\r\n\r\n{{}}".encode())
                await writer.drain()
        self._writers.discard(writer)
        writer.close()


@contextlib.asynccontextmanager
async def listening(count: int = 1) -> AsyncIterator[Sequence[Listener]]:
    listeners = [Listener() for _ in range(count)]
    for listener in listeners:
        await listener.start()
    try:
        yield listeners
    finally:
        for listener in listeners:
            listener.stop()


QUICK = Pauses(first_retry=0.01, probes=(0.02, 0.05))
"""For real sockets, whose clock does not jump."""


def test_refused_then_back_over_sockets() -> None:
    async def main() -> None:
        async with listening() as (listener,):
            listener.stop()
            async with Servers([Wire(listener.port)], concurrency=None, pauses=QUICK) as pool:
                sends = [asyncio.create_task(send(pool, max_retries=0)) for _ in range(50)]
                async with asyncio.timeout(60):
                    while pool.servers[0].up:
                        await asyncio.sleep(0.01)
                await listener.start()
                await asyncio.gather(*sends)
                assert listener.completions == 50
                assert at_rest(pool)

    asyncio.run(main())


def test_resets_and_bursts_of_errors_over_sockets() -> None:
    async def main() -> None:
        async with listening() as (listener,):
            listener.faults = lambda number: (0, 500, 503, 429, 0, None, None, None, None, None)[
                number % 10
            ]
            async with Servers([Wire(listener.port)], concurrency=None, pauses=QUICK) as pool:
                await asyncio.gather(*(send(pool, max_retries=30) for _ in range(200)))
                assert at_rest(pool)

    asyncio.run(main())


def test_one_of_two_servers_is_killed_and_returns_over_sockets() -> None:
    async def main() -> None:
        async with (
            listening(2) as (a, b),
            Servers([Wire(a.port), Wire(b.port)], concurrency=20, pauses=QUICK) as pool,
        ):
            sends = [asyncio.create_task(send(pool, max_retries=0)) for _ in range(1000)]
            while a.completions < 50:
                await asyncio.sleep(0.01)
            a.stop()
            while b.completions < 300:
                await asyncio.sleep(0.01)
            at_its_death = a.completions
            await a.start()
            await asyncio.gather(*sends)
            assert a.completions > at_its_death
            assert at_rest(pool)

    asyncio.run(main())
