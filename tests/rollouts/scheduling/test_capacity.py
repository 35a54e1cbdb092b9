"""How much a server is sent at once: what it says of itself is read as vLLM writes it, and
simulated servers are kept busy.
"""

import asyncio
import dataclasses
import math
from typing import Any

import bench_scheduling as bench
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttrl.rollouts.scheduling.capacity import FIRST_LIMIT, Load, Metrics, ServerRoom, read_metrics
from ttrl.rollouts.scheduling.lengths import Lengths
from ttrl.rollouts.scheduling.servers import Servers, Size

# Of vLLM 0.32 under load, trimmed to these metrics and their neighbours.
REAL = """\
# HELP python_info Python platform information
# TYPE python_info gauge
python_info{implementation="CPython",major="3",minor="11",patchlevel="7",version="3.11.7"} 1.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 32.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 117.0
# HELP vllm:num_requests_waiting_by_reason Number of waiting requests by reason.
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 117.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 0.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0036623329060612164
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
# HELP vllm:num_preemptions_created Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7952636377517571e+09
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 27070.0
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{_block_size_resolved="True",block_size="128",cache_dtype="auto",cache_hit_alignment_tokens="None",\
effective_attention_block_size="128",enable_prefix_caching="True",engine="0",gpu_memory_utilization="0.92",\
kv_cache_dtype_skip_layers="[]",kv_cache_max_concurrency="4096.0",kv_cache_memory_bytes="2147483648",\
kv_cache_size_tokens="2097152",num_cpu_blocks="None",num_gpu_blocks="16384",num_gpu_blocks_override="None",\
prefix_caching_hash_algo="sha256",sliding_window="None"} 1.0
"""


def metrics(**changes: float) -> Metrics:
    given = {
        "capacity": 10_000,
        "block_size": 16,
        "running": 0,
        "waiting": 0,
        "usage": 0,
        "preemptions": 0,
        "generated": 0,
    }
    return Metrics(**{**given, **changes})


# What a server says


def test_reads_what_a_real_server_writes() -> None:
    assert read_metrics(REAL) == Metrics(
        capacity=2097152,
        block_size=128,
        running=32,
        waiting=117,
        usage=0.0036623329060612164,
        preemptions=3,
        generated=27070,
    )


def test_engines_are_summed() -> None:
    """Tokens are each engine's own; blocks are those of all engines, in every line."""
    second = (
        REAL.replace('engine="0"', 'engine="1"')
        .replace("_perc{engine", "_perc{x")
        .replace(" 32.0\n", " 8.0\n")
    )
    both = read_metrics(REAL + second)
    assert both is not None
    assert (both.capacity, both.running, both.waiting, both.preemptions) == (
        2 * 2097152,
        40,
        234,
        6,
    )
    assert both.usage == pytest.approx(0.0036623329060612164)
    older = (REAL + second).replace('kv_cache_size_tokens="2097152",', "")
    assert read_metrics(older).capacity == 16384 * 128  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>",
        "python_info 1.0\n",
        REAL.replace('"2097152"', '"None"').replace('"16384"', '"None"'),
        "vllm:cache_config_info{} x",
    ],
    ids=["nothing", "html", "another program", "starting", "no number"],
)
def test_a_server_that_says_nothing_of_its_cache(text: str) -> None:
    assert read_metrics(text) is None


@given(st.text(max_size=200))
def test_any_text_can_be_read(text: str) -> None:
    assert read_metrics("vllm:cache_config_info{" + text) is None


# Lengths


def test_prompts_are_measured_by_what_servers_count() -> None:
    lengths = Lengths()
    assert lengths.known().expected(300, 0, None) == 100
    lengths.observe(1000, 250, [10])
    assert lengths.known().expected(300, 0, None) == 75
    lengths.observe(1000, None, [10])
    assert lengths.known().expected(300, 0, None) == 75


def test_the_mean_follows_what_finishes() -> None:
    lengths = Lengths()
    assert lengths.known().expected(0, 1, 1000) == 500
    lengths.observe(10, 5, [100] * 10)
    assert lengths.known().expected(0, 1, 1000) == 100
    lengths.observe(10, 5, [900] * 2000)
    assert lengths.known().expected(0, 1, 1000) == pytest.approx(900, rel=0.01)


# ServerRoom at one server


def fill(room: ServerRoom, load: Load, now: float) -> int:
    """Sends such requests until no more are admitted."""
    count = 0
    while room.admits(load, room.lengths.known()):
        load = Load(load.chars, load.n, load.max_tokens)
        room.add(load, now)
        count += 1
        assert count < 100_000
    return count


def test_a_first_request_is_always_admitted() -> None:
    room = ServerRoom(Lengths())
    room.update(metrics(capacity=100), 0.0)
    assert room.admits(Load(10**6, 64, 10**6), room.lengths.known())
    assert fill(room, Load(10**6, 64, 10**6), 0.0) == 1


def test_a_server_that_says_nothing_gets_a_fixed_number_at_first() -> None:
    room = ServerRoom(Lengths())
    assert fill(room, Load(30, 1, 100), 0.0) == FIRST_LIMIT


def test_what_is_admitted_fits_into_the_cache() -> None:
    lengths = Lengths()
    lengths.observe(300, 100, [200] * 1000)
    room = ServerRoom(lengths)
    room.update(metrics(capacity=60_000), 0.0)
    count = fill(room, Load(300, 1, 400), 0.0)
    assert count == 60_000 // (100 + 200 + 16)


def test_a_prompt_is_counted_once_for_all_its_samples() -> None:
    lengths = Lengths()
    lengths.observe(3000, 1000, [50] * 1000)
    one, many = ServerRoom(lengths), ServerRoom(lengths)
    for room in (one, many):
        room.update(metrics(capacity=20_000), 0.0)
    alone, together = fill(one, Load(3000, 1, 100), 0.0), 16 * fill(many, Load(3000, 16, 100), 0.0)
    assert 14 <= alone <= 18
    assert together > 5 * alone


def full_room(capacity: float = 30_000) -> ServerRoom:
    """A room with as many requests of 100 + 200 tokens as it takes at first."""
    lengths = Lengths()
    lengths.observe(300, 100, [200] * 1000)
    room = ServerRoom(lengths)
    room.update(metrics(capacity=capacity), 0.0)
    fill(room, Load(300, 1, 400), 0.0)
    return room


def test_preemptions_lower_what_is_in_flight_once_per_effect() -> None:
    """Another user of the server, or longer completions than before, fill the cache."""
    room = full_room()
    full = len(room.loads)
    for second in (1, 2, 3):
        room.update(
            metrics(capacity=30_000, running=full, usage=1, preemptions=50 * second), second
        )
    assert room.factor == pytest.approx(0.9)
    for load in list(room.loads)[: full // 4]:
        room.remove(load)
    assert fill(room, Load(300, 1, 400), 3.0) < full // 4
    assert len(room.loads) == pytest.approx(0.9 * full, abs=1)
    room.update(metrics(capacity=30_000, running=len(room.loads), usage=1, preemptions=200), 4.0)
    assert room.factor == pytest.approx(0.81)


def test_a_server_full_of_other_clients_gets_few_requests() -> None:
    room = full_room()
    first = len(room.loads)
    for second in range(1, 60):
        running = len(room.loads)
        room.update(
            metrics(capacity=30_000, running=running, usage=1, preemptions=running * second),
            float(second),
        )
        while len(room.loads) > max(1, room.factor * first):
            room.remove(next(iter(room.loads)))
    assert len(room.loads) < 0.1 * first


def test_space_in_the_cache_is_used() -> None:
    """Completions of one length are half done on average: twice as many fit."""
    room = full_room()
    first = len(room.loads)
    for second in range(1, 40):
        usage = 0.5 * len(room.loads) / first
        room.update(
            metrics(
                capacity=30_000, running=len(room.loads), usage=usage, generated=90 * 200 * second
            ),
            float(second),
        )
        fill(room, Load(300, 1, 400), float(second))
    assert 1.7 * first < len(room.loads) < 1.95 * first


def test_an_idle_client_does_not_raise_the_factor() -> None:
    room = full_room()
    for load in list(room.loads)[1:]:
        room.remove(load)
    for second in range(1, 20):
        room.update(metrics(capacity=30_000, running=1, usage=0.01), float(second))
    assert room.factor == 1.0


def test_requests_that_wait_at_the_server_hold_back_more() -> None:
    room = ServerRoom(Lengths())
    room.update(metrics(capacity=10**9), 0.0)
    room.add(Load(30, 1, 100), 0.0)
    room.update(metrics(capacity=10**9, running=64, waiting=100), 1.0)
    assert fill(room, Load(30, 1, 100), 1.0) == 0
    room.update(metrics(capacity=10**9, running=64, waiting=3), 2.0)
    assert fill(room, Load(30, 1, 100), 2.0) == 13  # up to 16


def test_everything_returns_to_zero() -> None:
    room = ServerRoom(Lengths())
    room.update(metrics(), 0.0)
    loads = [Load(chars, n, 100) for chars in (0, 7, 1000) for n in (1, 16)]
    for load in loads:
        room.add(load, 0.0)
    room.update(metrics(running=20), 1.0)
    assert room.expected(room.lengths.known()) > 0
    for load in loads:
        room.remove(load)
    assert (room.samples, room.expected(room.lengths.known()), len(room.loads)) == (0, 0.0, 0)


def test_a_restart_of_the_server_starts_its_counters_again() -> None:
    room = ServerRoom(Lengths())
    room.add(Load(30, 1, 100), 0.0)
    room.update(metrics(running=1, generated=10**6, preemptions=500), 0.0)
    room.update(metrics(running=1, generated=10), 1.0)
    assert room.factor == 1.0
    room.update(metrics(running=1, generated=60), 2.0)
    assert room._rate == 50.0


# Simulated servers, on a clock that jumps


def workload(name: str) -> Any:
    """Half as much as in the benchmark, on a server of half the size: the same, in half the
    time.
    """
    whole = next(workload for workload in bench.WORKLOADS if workload.name == name)
    server = {key: value // 2 for key, value in whole.server.items()}
    return dataclasses.replace(whole, tasks=whole.tasks // 2, server=server)


@pytest.mark.long(but=["150, then 1500 tokens-0.7-1.0"])
@pytest.mark.parametrize(
    ("name", "least_usage", "most_preemptions"),
    [  # per request
        ("short, 64 tokens", 0.5, 0.3),
        ("constant, 800 tokens", 0.5, 0.5),
        ("lognormal, mean 600", 0.65, 0.3),
        ("150, then 1500 tokens", 0.7, 1.0),
        ("lognormal, mean 600, n=16", 0.55, 16 * 0.3),
    ],
)
def test_servers_are_busy_without_storms_of_preemptions(
    name: str, least_usage: float, most_preemptions: float
) -> None:
    """The mean over the whole run, with its beginning, and with its end, where nothing is left to
    send.

    Long for the other lengths: only these need no change of the factor in mid-run.
    """
    work = workload(name)
    outcome = bench.simulate(work, None)
    assert outcome.usage > least_usage
    assert outcome.preemptions < most_preemptions * work.tasks
    assert outcome.recomputed < 0.2


@pytest.mark.long
def test_as_fast_as_everything_at_once_with_a_fraction_of_the_preemptions() -> None:
    """Long: only this compares with other rules. That servers are busy without storms of
    preemptions: below.
    """
    work = next(workload for workload in bench.WORKLOADS if workload.name == "lognormal, mean 600")
    ours, everything, few = (bench.simulate(work, concurrency) for concurrency in (None, 10**6, 32))
    assert ours.rate > 0.95 * everything.rate
    assert ours.preemptions < 0.2 * everything.preemptions
    assert ours.rate > 1.8 * few.rate


def test_a_limit_on_what_runs_at_once_is_found() -> None:
    work = workload("lognormal, 64 seqs at most")
    outcome = bench.simulate(work, None)
    assert outcome.running > 0.85 * work.server["max_num_seqs"]
    assert outcome.most_in_flight < work.tasks / 2


@pytest.mark.parametrize(("n", "mean", "most"), [(1, 600, 4096), (8, 300, 1000), (4, 200, 200)])
def test_what_is_in_flight_is_counted_about_as_the_server_does(
    n: int, mean: int, most: int
) -> None:
    """Answers come whole; in between, what they will be is known from how fast the server is."""
    server = bench.SimulatedVLLM(kv_tokens=80_000, step_seconds=0.05)
    drawn = np.random.default_rng(n).lognormal(math.log(mean) - 0.5, 1.0, (240 // n, n))
    finished, seen = 0, []

    async def main() -> None:
        async with Servers([server], concurrency=None) as servers:  # type: ignore[list-item]

            async def send(lengths: list[int]) -> None:
                nonlocal finished
                await servers.send(
                    lambda _: server.complete(200, lengths), size=Size(800, n, most), max_retries=0
                )
                finished += sum(lengths)

            async def watch() -> None:
                while True:
                    await asyncio.sleep(1.7)
                    seen.append((finished + servers.tokens_in_flight(finished), server.generated))

            watching = asyncio.ensure_future(watch())
            await asyncio.gather(
                *(send(np.clip(row, 1, most).astype(int).tolist()) for row in drawn)
            )
            watching.cancel()
            assert servers.tokens_in_flight(finished) == 0

    bench.run_virtual(main())
    assert len(seen) > 5
    for ours, true in seen[2:]:  # at first, the rate is that of fewer samples
        assert ours == pytest.approx(true, rel=0.15), seen


def test_a_server_without_metrics_is_served_too() -> None:
    outcome = bench.simulate(workload("lognormal, 64 seqs at most"), None, says_metrics=False)
    assert FIRST_LIMIT <= outcome.most_in_flight < FIRST_LIMIT + 5


def test_what_was_learned_serves_the_next_call() -> None:
    server = bench.SimulatedVLLM(kv_tokens=60_000)
    lengths = Lengths()
    first: list[int] = []

    async def main() -> None:
        for _ in range(2):
            async with Servers([server], concurrency=None, lengths=lengths) as pool:

                async def attempt(transport: object) -> list[object]:
                    return await server.complete(100, [50])

                size = Size(prompt=400, n=1, max_tokens=4000)
                sends = [
                    asyncio.create_task(pool.send(attempt, size=size, max_retries=0))
                    for _ in range(1000)
                ]  # type: ignore[arg-type]
                await asyncio.sleep(0.001)
                first.append(len(pool.servers[0].leases))
                await asyncio.gather(*sends)

    bench.run_virtual(main())
    assert first[0] < 40  # half of max_tokens each
    assert first[1] > 200


def test_two_servers_of_different_size_share_by_their_room() -> None:
    large, small = bench.SimulatedVLLM(kv_tokens=200_000), bench.SimulatedVLLM(kv_tokens=40_000)
    served = {id(large): 0, id(small): 0}

    async def main() -> None:
        async with Servers([small, large], concurrency=None) as pool:

            async def attempt(transport: object) -> list[object]:
                served[id(transport)] += 1
                return await transport.complete(200, [400])  # type: ignore[attr-defined]

            size = Size(prompt=800, n=1, max_tokens=1000)
            await asyncio.gather(
                *(pool.send(attempt, size=size, max_retries=0) for _ in range(3000))
            )  # type: ignore[arg-type]

    bench.run_virtual(main())
    assert served[id(large)] > 2 * served[id(small)] > 0
    assert small.preemptions < 500
