"""What is tried again and what is not, and how failures read."""

import asyncio
import socket

import pytest

from ttrl.errors import UserError
from ttrl.rollouts import chat_completions
from ttrl.rollouts.chat_completions import request_kwargs
from ttrl.rollouts.task_results import get_task_results
from ttrl.tasks import Task


def task(text="x"):
    return Task(messages=[{"role": "user", "content": text}], grader=lambda choice: 1.0)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
def test_retried_until_good(kit, status):
    def behaviour(body, attempt):
        return kit.error(status) if attempt < 3 else kit.echo(body)

    results, server = kit.run(behaviour, [task()], n=2)
    assert results[0].rewards == [1.0, 1.0]
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422])
def test_other_refusals_are_final(kit, status):
    results, server = kit.run(lambda body, attempt: kit.error(status, "too long: 9 > 8"), [task()], n=2)
    assert [s.error.split("/v1/: ")[1] for s in results.samples] == [f"HTTP {status}: too long: 9 > 8"] * 2
    assert len(server.requests) == 1


def test_even_when_the_server_asks_for_a_retry(kit):
    def behaviour(body, attempt):
        return kit.Reply({"error": {"message": "no"}}, status=400, headers={"x-should-retry": "true"})

    assert len(kit.run(behaviour, [task()])[1].requests) == 1


def test_retries_end(kit):
    results, server = kit.run(lambda body, attempt: kit.error(500, "engine died"), [task()], max_retries=2)
    assert len(server.requests) == 3
    assert results.samples[0].error.endswith("HTTP 500 (3 attempts): engine died")
    assert len(kit.run(lambda body, attempt: kit.error(500), [task()], max_retries=0)[1].requests) == 1


def test_broken_connections_are_retried(kit):
    def reset(body, attempt):
        return kit.Reply(reset=True) if attempt < 3 else kit.echo(body)

    def cut_short(body, attempt):
        return kit.Reply(b'{"id": ', declared_length=1000) if attempt < 3 else kit.echo(body)

    for behaviour in (reset, cut_short):
        results, server = kit.run(behaviour, [task()])
        assert (results[0].rewards, len(server.requests)) == ([1.0], 3)


def test_timeouts_are_retried_and_named(kit):
    async def slow_at_first(body, attempt):
        await asyncio.sleep(30 if attempt == 1 else 0)
        return kit.echo(body)

    async def slow(body, attempt):
        await asyncio.sleep(30)

    assert kit.run(slow_at_first, [task()], client={"timeout": 0.3})[0][0].rewards == [1.0]
    results, _ = kit.run(slow, [task()], client={"timeout": 0.2}, max_retries=1)
    assert results.samples[0].error.endswith("no answer within the client's timeout of 0.2 s (2 attempts)")


def test_nobody_listens():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]

        async def main():
            import openai

            async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k") as client:
                return await get_task_results([task("a"), task("b")], client, "m", n=2, max_retries=1, pbar=False)

        results = asyncio.run(main())
    assert results.stats.num_failed == 4
    [(reason, count)] = results.stats.exceptions.items()
    assert count == 4
    assert reason.startswith(f"ServerError: http://127.0.0.1:{port}/v1/: no connection (2 attempts): ")
    assert reason.endswith("is the server running?")


def test_pauses_grow_are_bounded_and_obey_the_server(kit, monkeypatch):
    monkeypatch.setattr(chat_completions, "FIRST_DELAY", 0.5)
    slept = []

    async def remember(seconds):
        slept.append(seconds)

    def behaviour(body, attempt):
        if body["messages"][0]["content"] == "told":
            headers = {"retry-after": "3" if attempt == 1 else "soon" if attempt == 2 else "100000"}
            return kit.Reply({"error": {"message": "later"}}, status=429, headers=headers)
        return kit.error(503)

    monkeypatch.setattr(chat_completions.asyncio, "sleep", remember)
    kit.run(behaviour, [task("x")], max_retries=6)
    for seconds, full in zip(slept, [0.5, 1, 2, 4, 8, 8], strict=True):
        assert 0.75 * full <= seconds <= full
    slept.clear()
    kit.run(behaviour, [task("told")], max_retries=3)
    assert slept[0] == 3.0
    assert 0.75 <= slept[1] <= 1.0  # not a number of seconds
    assert 1.5 <= slept[2] <= 2.0  # longer than we are willing to wait


def test_a_slot_is_free_again_after_a_failure(kit):
    def behaviour(body, attempt):
        return kit.error(400) if body["messages"][0]["content"] == "bad" else kit.echo(body)

    results, _ = kit.run(behaviour, [task("bad"), task("bad"), task("good")], concurrency=1)
    assert [r.rewards for r in results] == [[], [], [1.0]]


def test_the_clients_own_retries_do_not_multiply_ours(kit):
    _, server = kit.run(lambda body, attempt: kit.error(500), [task()], client={"max_retries": 7}, max_retries=1)
    assert len(server.requests) == 2


def test_where_parameters_go():
    params = {"temperature": 1, "top_k": 5, "extra_body": {"seed_of_mine": 1}, "max_tokens": None, "stop": ["\n"]}
    assert request_kwargs(params) == {"temperature": 1, "stop": ["\n"], "extra_body": {"seed_of_mine": 1, "top_k": 5}}
    assert params["extra_body"] == {"seed_of_mine": 1}  # the caller's dict is left alone
    assert request_kwargs(None) == {}
    with pytest.raises(UserError, match="extra_body"):
        request_kwargs({"something_else_entirely": 1})


def test_vllm_knows_the_parameters_that_we_send_it():
    """Read from the installed source, so that no import of vLLM (and torch) is needed."""
    import importlib.util
    import pathlib

    spec = importlib.util.find_spec("vllm")
    if spec is None:
        pytest.skip("vLLM is not installed")
    folder = pathlib.Path(spec.submodule_search_locations[0], "entrypoints/openai/chat_completion")
    source = (folder / "protocol.py").read_text()
    for name in [*chat_completions.VLLM_PARAMS, "return_token_ids"]:
        assert f"\n    {name}: " in source, name
