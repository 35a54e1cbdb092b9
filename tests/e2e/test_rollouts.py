"""get_task_results on a real vLLM server: streams, early stops, cache, prefix cache, restarts, with
real numbers.

Budgets: test_partial.py.
Only vLLM's own streams, seeds and prefix cache show that ttrl reads them rightly.
"""

import asyncio
import threading
import time

import openai
import pytest

from ttrl import InferenceEarlyStop, Task, get_chat_completion, get_task_results
from ttrl.errors import UserError
from ttrl.server.vllm import VLLMServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tiny_server: VLLMServer) -> VLLMServer:
    return tiny_server


def tasks(count: int, prompt: str = "say something about") -> list[Task]:
    return [
        Task(
            [{"role": "user", "content": f"{prompt} {number}"}],
            lambda choice: float(len(choice.message.content)),
            id=f"t{number}",
        )
        for number in range(count)
    ]


def sample(server: VLLMServer, given: list[Task], **arguments):
    async def main():
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key) as client:
            return await get_task_results(given, client, "m", pbar=False, **arguments)

    return asyncio.run(main())


def content(results) -> list[tuple]:
    return [
        (s.text, s.token_ids, s.prompt_token_ids, s.finish_reason, s.reward)
        for s in results.samples
    ]


def assert_drawn_alike(results, others):
    """The same samples. Batches round differently, so a draw just between two tokens may fall
    otherwise in one sample: rarely.
    """
    pairs = list(zip(results.samples, others.samples, strict=True))
    same = [(a, b) for a, b in pairs if a.token_ids == b.token_ids]
    assert len(same) >= len(pairs) - 1
    for a, b in same:
        assert (a.text, a.prompt_token_ids, a.finish_reason, a.reward) == (
            b.text,
            b.prompt_token_ids,
            b.finish_reason,
            b.reward,
        )
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_streamed_completions_are_those_that_are_not(server, tmp_path):
    params = {"temperature": 1.0, "seed": 7, "max_tokens": 48, "ignore_eos": True}
    whole = sample(server, tasks(6), n=3, params=params)
    seen: list[int] = []

    def on_chunk(chunk, completion):
        seen.extend(len(choice.logprobs.content) for choice in chunk.choices if choice.logprobs)

    streamed = sample(server, tasks(6), n=3, params=params, on_chunk=on_chunk)
    together = sample(
        server, tasks(6), n=3, params=params, on_chunk=on_chunk, samples_per_request=3
    )
    logged = sample(server, tasks(6), n=3, params=params, log_dir=tmp_path)
    assert whole.stats.num_graded == len(list(tmp_path.iterdir())) == 18
    assert_drawn_alike(whole, logged)
    assert_drawn_alike(whole, together)
    assert_drawn_alike(whole, streamed)
    assert sum(seen) == streamed.stats.completion_tokens + together.stats.completion_tokens
    # The samples of a seeded task differ.
    assert all(len({tuple(s.token_ids) for s in result.samples}) == 3 for result in whole)


def test_graders_see_what_the_prompt_prefilled(server):
    begun = {"role": "assistant", "content": "<think>\nSo"}
    seen = []
    task = Task(
        [{"role": "user", "content": "Why?"}, begun],
        lambda choice: seen.append(choice.opening) or 0.0,
    )
    params = {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 4}
    for watch in ({}, {"on_chunk": lambda chunk, completion: None}):
        results = sample(server, [task], n=2, params=params, **watch)
        assert [one.opening for one in results.samples] == ["<think>\nSo"] * 2
    assert seen == ["<think>\nSo"] * 4
    assert [
        one.opening for one in sample(server, tasks(1), n=2, params={"max_tokens": 4}).samples
    ] == ["", ""]


def test_early_stopping_ends_the_work_of_the_server(server):
    # A random model's tokens have a log-probability of about -5.6: the mean falls below -3 after (1
    # - 0.992^k) 5.6 > 3, k of 96.
    stop = InferenceEarlyStop()
    # Where a client is slow, vLLM puts several tokens into one chunk.
    chunks: dict[str, list[int]] = {}

    def on_chunk(chunk, completion):
        for part in chunk.choices:
            if part.logprobs:
                chunks.setdefault(completion.id, []).append(len(part.logprobs.content))
        stop(chunk, completion)

    results = sample(
        server,
        tasks(3),
        n=2,
        params={"max_tokens": 900, "ignore_eos": True},
        on_chunk=on_chunk,
        samples_per_request=1,
    )
    assert {s.finish_reason for s in results.samples} == {"stopped_early"}
    lengths = sorted((sum(sizes), sizes[-1]) for sizes in chunks.values())
    assert [length for length, _ in lengths] == sorted(len(s.logprobs) for s in results.samples)
    last_chunks = dict(lengths)
    for s in results.samples:
        mean, fell = 0.0, None
        for k, logprob in enumerate(s.logprobs, 1):
            mean = 0.992 * mean + 0.008 * logprob
            if mean < -3.0:
                fell = k
                break
        assert fell is not None and len(s.logprobs) - max(last_chunks.values()) < fell <= len(
            s.logprobs
        )
        assert s.reward == len(s.text) and len(s.token_ids) == len(s.logprobs) < 900
    deadline = time.monotonic() + 120
    while running := [
        line
        for line in server.request("GET", "/metrics").splitlines()
        if line.startswith("vllm:num_requests_running")
    ]:
        if all(line.endswith(" 0.0") for line in running):
            break
        assert time.monotonic() < deadline, running
        time.sleep(0.1)


def test_the_cache_serves_this_policy_and_no_other(server, tmp_path):
    params = {"temperature": 1.0, "max_tokens": 16}
    arguments = {
        "params": params,
        "cache": tmp_path / "cache",
        "weights_digest": server.weights_digest(),
    }
    first = sample(server, tasks(4), n=2, **arguments)
    again = sample(server, tasks(4), n=2, **arguments)
    assert (
        content(first) == content(again)
        and again.stats.num_cached == 8
        and again.stats.new_completion_tokens == 0
    )
    assert [s.logprobs for s in first.samples] == [s.logprobs for s in again.samples]
    more = sample(server, tasks(4), n=3, **arguments)
    assert more.stats.num_cached == 8 and more.stats.num_graded == 12
    other = sample(server, tasks(4), n=2, **{**arguments, "weights_digest": "other"})
    assert other.stats.num_cached == 0
    with pytest.raises(UserError, match="weights_digest"):
        sample(server, tasks(1), **{**arguments, "weights_digest": None})

    async def one():
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key) as client:
            return await get_chat_completion(
                client,
                tasks(1)[0].messages,
                "m",
                token_ids=True,
                sample=1,
                **{k: v for k, v in arguments.items()},
            )

    # The same entry.
    assert asyncio.run(one()).choices[0].message.content == first[0].samples[1].text


@pytest.mark.parametrize("per_request", [None, 1])
def test_the_prompt_of_a_task_is_computed_once(server, per_request):
    """vLLM's blocks are of 128 tokens on CPU: of a prompt of 600 tokens 4 blocks can be shared."""
    long = tasks(3, prompt=f"{time.time_ns()} " + "a long prompt that everybody shares " * 16)
    results = sample(
        server,
        long,
        n=4,
        params={"max_tokens": 4, "ignore_eos": True},
        samples_per_request=per_request,
    )
    stats = results.stats
    prompt = len(results.samples[0].prompt_token_ids)
    assert prompt > 550 and stats.prompt_tokens == sum(
        len(r.samples[0].prompt_token_ids) for r in results
    )
    if per_request == 1:
        assert stats.new_prompt_tokens == 4 * stats.prompt_tokens
        assert stats.prefix_cached_tokens >= 0.5 * 3 * 3 * (prompt - 128), stats


@pytest.mark.long
def test_a_server_that_is_started_again_in_mid_run_loses_nothing(server):
    """The process is ended while requests run, and another one listens at the same port 20 s later.

    Long: only this restarts vLLM under requests. A fake server is restarted in
    tests/rollouts/test_faults.py.
    """
    began = threading.Event()

    def restart() -> None:
        began.wait(60)
        server.restart()

    thread = threading.Thread(target=restart)
    thread.start()
    given = tasks(40)
    try:
        results = sample(
            server,
            given,
            n=2,
            params={"max_tokens": 200, "ignore_eos": True},
            concurrency=8,
            max_downtime=180.0,
            on_task_done=lambda result: began.set(),
        )
    finally:
        began.set()
        thread.join()
    stats = results.stats
    assert (stats.num_graded, stats.num_failed) == (80, 0), stats.failures()
    assert all(len(s.token_ids) == 200 for s in results.samples)
