"""What is checked before a request, what is sent, what is tried again and what is not, and how
failures read.
"""

import asyncio
import json
import socket

import openai
import pytest

from ttrl.errors import RequestError, ServerError, TokenizationError, UserError
from ttrl.rollouts.client import chat_completions
from ttrl.rollouts.client.attempts import ChatAttempt
from ttrl.rollouts.client.chat_completions import ChatRequest, checked_parameters
from ttrl.rollouts.client.transport import transport_for
from ttrl.rollouts.request import SamplingRequest
from ttrl.rollouts.sampling import Sampling
from ttrl.rollouts.single import get_chat_completion
from ttrl.rollouts.task_results import get_task_results
from ttrl.tasks import Task

MESSAGES = [{"role": "user", "content": "x"}]


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
    results, server = kit.run(
        lambda body, attempt: kit.error(status, "too long: 9 > 8"), [task()], n=2
    )
    assert [s.error.split("/v1: ")[1] for s in results.samples] == [
        f"HTTP {status}: too long: 9 > 8"
    ] * 2
    assert len(server.requests) == 1


def test_even_when_the_server_asks_for_a_retry(kit):
    def behaviour(body, attempt):
        return kit.Reply(
            {"error": {"message": "no"}}, status=400, headers={"x-should-retry": "true"}
        )

    assert len(kit.run(behaviour, [task()])[1].requests) == 1


def test_null_fields_are_not_sent(kit):
    parts = [{"type": "text", "text": "x", "image_url": None}]
    messages = [{"role": "user", "content": parts, "tool_calls": None, "name": None}]
    function = {"name": "f", "parameters": {"properties": {"a": None}}}
    tool = {"type": "function", "function": function}
    seen = []

    def behaviour(body, attempt):
        seen.append(body)
        return kit.completion([kit.choice(0, "y")])

    async def main():
        async with kit.serving(behaviour) as server, server.client() as client:
            params = {"tools": [tool]}
            return await get_chat_completion(client, messages, "m", params=params, token_ids=False)

    assert asyncio.run(main()).choices[0].message.content == "y"
    (body,) = seen
    assert body["messages"] == [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    assert body["tools"][0]["function"] == {"name": "f", "parameters": {"properties": {}}}


def test_retries_end(kit):
    results, server = kit.run(
        lambda body, attempt: kit.error(500, "engine died"), [task()], max_retries=2
    )
    assert len(server.requests) == 3
    assert results.samples[0].error.endswith("HTTP 500: engine died (3 attempts)")
    assert (
        len(kit.run(lambda body, attempt: kit.error(500), [task()], max_retries=0)[1].requests) == 1
    )


def test_timeouts_are_retried_and_named(kit):
    async def slow_at_first(body, attempt):
        await asyncio.sleep(30 if attempt == 1 else 0)
        return kit.echo(body)

    async def slow(body, attempt):
        await asyncio.sleep(30)

    assert kit.run(slow_at_first, [task()], client={"timeout": 0.3})[0][0].rewards == [1.0]
    results, _ = kit.run(slow, [task()], client={"timeout": 0.2}, max_retries=1)
    assert results.samples[0].error.endswith(
        "no answer within the client's timeout of 0.2 s (2 attempts)"
    )


def test_a_slot_is_free_again_after_a_failure(kit):
    def behaviour(body, attempt):
        return kit.error(400) if body["messages"][0]["content"] == "bad" else kit.echo(body)

    results, _ = kit.run(behaviour, [task("bad"), task("bad"), task("good")], concurrency=1)
    assert [r.rewards for r in results] == [[], [], [1.0]]


def test_the_clients_own_retries_do_not_multiply_ours(kit):
    _, server = kit.run(
        lambda body, attempt: kit.error(500), [task()], client={"max_retries": 7}, max_retries=1
    )
    assert len(server.requests) == 2


# Parameters


def test_where_parameters_go():
    params = {
        "temperature": 1,
        "top_k": 5,
        "extra_body": {"seed_of_mine": 1},
        "max_tokens": None,
        "stop": ["\n"],
    }
    assert checked_parameters(params) == {
        "temperature": 1,
        "top_k": 5,
        "stop": ["\n"],
        "seed_of_mine": 1,
    }
    assert params["extra_body"] == {"seed_of_mine": 1}  # the caller's dict is left alone
    assert checked_parameters(None) == {}
    assert checked_parameters({"stop": openai.NOT_GIVEN}) == {}
    with pytest.raises(UserError, match="extra_body"):
        checked_parameters({"something_else_entirely": 1})


class Schema(openai.BaseModel):
    a: int


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"n": 2}, "give it as get_task_results"),
        ({"stream": True}, "on_chunk"),
        ({"extra_body": {"n": 2}}, "extra_body.*'n'.*cannot be set"),
        ({"extra_headers": {"a": "b"}}, "default_headers"),
        ({"timeout": 3}, "AsyncOpenAI\\(timeout="),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"temperature": float("nan")}, "temperature"),
        ({"presence_penalty": float("inf")}, "JSON cannot represent"),
        ({"seed": 1.5}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"stop": {"a"}}, r"params\['stop'\] is a set, not JSON"),
        ({"extra_body": {"a": [object()]}}, r"\['a'\]\[0\] is a object"),
        ({"response_format": Schema}, "is the class Schema; give .*json_schema"),
        ("hot", "give a dict"),
    ],
)
def test_wrong_parameters(params, words):
    with pytest.raises(UserError, match=words):
        ChatRequest.of("m", params=params, token_ids=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": ""},
        {"n": 0},
        {"n": True},
        {"max_retries": -1},
        {"stall_timeout": 0},
        {"stall_timeout": "1"},
    ],
)
def test_wrong_arguments(changes):
    with pytest.raises(UserError):
        Sampling(SamplingRequest(**{"client": "http://127.0.0.1:9/v1", "model": "m", **changes}))


def test_what_is_sent():
    params = {
        "seed": 10,
        "top_k": 3,
        "extra_body": {"mine": {"a": (1, 2)}},
        "response_format": Schema(a=1),
        "max_tokens": 5,
    }
    request = ChatRequest.of("m", params=params, token_ids=True)
    known = {
        "model": "m",
        "messages": MESSAGES,
        "seed": 10,
        "top_k": 3,
        "mine": {"a": [1, 2]},
        "max_tokens": 5,
    }
    known |= {"response_format": {"a": 1}, "logprobs": True, "return_token_ids": True}
    assert request.cache_body(MESSAGES) == known
    assert request.body(MESSAGES, 4) == {
        **known,
        "n": 4,
        "stream": False,
        "return_prompt_text": True,
    }
    streamed = {
        **known,
        "return_prompt_text": True,
        "n": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 13,
    }
    assert request.body(MESSAGES, 1, seed_offset=3, stream=True) == streamed
    assert request.body(MESSAGES, 1, seed_offset=3, stream=True, interval=8) == {
        **streamed,
        "stream_interval": 8,
    }
    assert (request.seed, request.max_tokens, request.wants_logprobs, request.token_ids) == (
        10,
        5,
        True,
        True,
    )
    own = ChatRequest.of(
        "m",
        params={"extra_body": {"stream_interval": 2}, "logprobs": False},
        token_ids=False,
    )
    assert own.cache_body(MESSAGES) == {"model": "m", "messages": MESSAGES, "logprobs": False}
    assert own.body(MESSAGES, 1, stream=True, interval=8)["stream_interval"] == 2
    assert (own.seed, own.max_tokens, own.wants_logprobs) == (None, None, False)


def test_streamed_only_where_somebody_listens(kit):
    async def main():
        async with kit.serving(lambda body, attempt: kit.echo(body)) as server:
            transport = transport_for(f"http://127.0.0.1:{server.port}/v1")
            for token_ids in (True, False):
                request = ChatRequest.of("m", params=None, token_ids=token_ids)
                for listening in (
                    {},
                    {"cut": asyncio.Event()},
                    {"on_chunk": lambda chunk, completion: None},
                ):
                    answers = await ChatAttempt(
                        request=request, messages=MESSAGES, n=2, **listening
                    )(transport)
                    assert [json.loads(a.choice)["message"]["content"] for a in answers] == [
                        "x#0",
                        "x#1",
                    ]
            await transport.close()
            return [(body["stream"], body.get("stream_interval")) for body in server.requests]

    assert asyncio.run(main()) == [
        (False, None),
        (True, 8),
        (True, None),
        (False, None),
        (True, None),
        (True, None),
    ]


def test_vllm_knows_the_parameters_that_we_send_it():
    """Read from the installed source, so that no import of vLLM (and torch) is needed."""
    import importlib.util
    import pathlib

    spec = importlib.util.find_spec("vllm")
    if spec is None:
        pytest.skip("vLLM is not installed")
    folder = pathlib.Path(spec.submodule_search_locations[0], "entrypoints/openai/chat_completion")
    source = (folder / "protocol.py").read_text()
    for name in [
        *chat_completions.VLLM_PARAMS,
        "return_token_ids",
        "return_prompt_text",
        "stream_interval",
        "stream_options",
    ]:
        assert f"\n    {name}: " in source, name


# get_chat_completion


def one(kit, behaviour, *calls, **arguments):
    """(results of the calls, server): each call is a dict of arguments; exceptions are results."""

    async def main():
        async with kit.serving(behaviour) as server:
            url = f"http://127.0.0.1:{server.port}/v1"
            results = []
            for call in calls or ({},):
                try:
                    results.append(
                        await get_chat_completion(url, MESSAGES, "m", **{**arguments, **call})
                    )
                except (UserError, ServerError) as error:
                    results.append(error)
            return results, server

    return asyncio.run(main())


def test_one_completion(kit, tmp_path):
    log, requests = tmp_path / "conversation.txt", tmp_path / "requests.jsonl"

    def behaviour(body, attempt):
        return kit.error(500) if attempt == 1 else kit.echo(body)

    [completion], server = one(
        kit,
        behaviour,
        token_ids=True,
        sample=3,
        params={"seed": 5},
        log_path=log,
        requests_log=requests,
    )
    assert completion.choices[0].message.content == "x#0"
    assert completion.choices[0].token_ids == [*map(ord, "x#0"), 0]
    assert completion.choices[0].logprobs.content[0].logprob == -1 / 8
    assert (completion.usage.completion_tokens, completion.prompt_token_ids) == (4, kit.prompt_ids)
    assert [body["seed"] for body in server.requests] == [8, 8]
    assert "x#0" in log.read_text() and "user" in log.read_text()
    [row] = map(json.loads, requests.read_text().splitlines())
    assert (row["samples"], row["hit"], row["completion_tokens"], row["error"]) == (
        [3],
        False,
        4,
        None,
    )


def test_one_completion_from_the_cache(kit, tmp_path):
    count = iter(range(100))

    def behaviour(body, attempt):
        return kit.completion([kit.choice(0, f"answer {next(count)}", logprobs=None)])

    cached = {
        "cache": tmp_path / "cache",
        "weights_digest": "w1",
        "params": {"logprobs": False},
        "token_ids": True,
    }
    results, server = one(
        kit,
        behaviour,
        {},
        {},
        {"sample": 1},
        {"weights_digest": "w2"},
        {"params": {"temperature": 0.5, "logprobs": False}},
        **cached,
    )
    assert [r.choices[0].message.content for r in results] == [
        "answer 0",
        "answer 0",
        "answer 1",
        "answer 2",
        "answer 3",
    ]
    assert len(server.requests) == 4


def test_one_completion_that_fails(kit, tmp_path):
    [error], server = one(
        kit, lambda body, attempt: kit.error(400, "no"), requests_log=tmp_path / "requests.jsonl"
    )
    assert (
        isinstance(error, RequestError)
        and str(error).endswith("/v1: HTTP 400: no")
        and len(server.requests) == 1
    )
    assert "HTTP 400: no" in json.loads((tmp_path / "requests.jsonl").read_text())["error"]
    [error], _ = one(kit, lambda body, attempt: kit.completion([]))
    assert "returned 0 choices" in str(error)
    [error], _ = one(kit, kit.echo, cache="memory://")
    assert isinstance(error, UserError) and "weights_digest" in str(error)
    broken = lambda body, attempt: kit.completion([kit.choice(0, "x", token_ids=[1])])  # noqa: E731
    [error], _ = one(kit, broken, token_ids=True)
    assert isinstance(error, TokenizationError)


@pytest.mark.parametrize(
    "changes",
    [
        {"sample": -1},
        {"sample": 1.0},
        {"on_chunk": 3},
        {"weights_digest": ""},
        {"params": {"n": 2}},
        {"cache": "ftp://x"},
    ],
)
def test_wrong_arguments_for_one_completion(changes):
    with pytest.raises(UserError):
        asyncio.run(get_chat_completion("http://127.0.0.1:9/v1", MESSAGES, "m", **changes))
    for messages in ("hello", {}, [], None, [{"role": {"a"}}]):
        with pytest.raises(UserError, match="messages"):
            asyncio.run(get_chat_completion("http://127.0.0.1:9/v1", messages, "m"))


def test_nobody_listens():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]

        async def main():
            async with openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{port}/v1", api_key="k"
            ) as client:
                return await get_task_results(
                    [task("a"), task("b")],
                    client,
                    "m",
                    n=2,
                    max_retries=1,
                    max_downtime=0.2,
                    pbar=False,
                )

        results = asyncio.run(main())
    assert results.stats.num_failed == 4
    [(reason, count)] = results.stats.exceptions.items()
    assert count == 4
    assert reason.startswith("RequestError: ")
    assert "no connection: ConnectionRefusedError" in reason
