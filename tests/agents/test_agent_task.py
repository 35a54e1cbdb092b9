"""Agents that know nothing of ttrl: what they ask the model over HTTP becomes a sample with the
server's own ids; what goes wrong costs one sample."""

import asyncio
import contextlib
import json
import os
import sys

import aiohttp
import pytest
from openai import AsyncOpenAI
from support.agent_sessions import (
    ASK,
    EOS,
    Kit,
    of_server,
    post,
    rendered,
    run,
    said,
    server,
    trained,
)

import ttrl
from ttrl.errors import TaskError
from ttrl.tasks.task import RolloutLimits


@pytest.mark.parametrize("stream", [False, True])
def test_a_plain_openai_client_with_a_tool(stream):
    call = {
        "id": "call-1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1}'},
    }
    tool = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
    seen = []

    def answer(body):
        if body["messages"][-1]["role"] == "tool":
            return "two"
        return "call", {
            "message": {"content": None, "tool_calls": [call]},
            "finish_reason": "tool_calls",
        }

    async def agent(session):
        assert session.messages == ASK
        messages = list(session.messages)
        async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            assert [model.id async for model in client.models.list()] == [session.model]
            while True:
                options = (
                    {"stream": True, "stream_options": {"include_usage": True}}
                    if stream
                    else {"logprobs": True}
                )
                got = await client.chat.completions.create(
                    model=session.model,
                    messages=messages,
                    tools=[tool],
                    max_tokens=50,
                    temperature=0.5,
                    **options,
                )
                if stream:
                    chunks = [chunk async for chunk in got]
                    assert chunks[-2].choices[0].finish_reason in ("tool_calls", "stop")
                    message, usage = chunks[0].choices[0].delta, chunks[-1].usage
                else:
                    message, usage = got.choices[0].message, got.usage
                    assert [
                        entry.logprob for entry in got.choices[0].logprobs.content
                    ] == Kit.expected_logprobs("two!")[: usage.completion_tokens]
                assert usage.prompt_tokens == len(rendered(seen[-1]["messages"]))
                if not message.tool_calls:
                    return float(message.content == "two"), {"asked": len(seen)}
                assert message.tool_calls[0].function.arguments == '{"a": 1}'
                messages.append(message.model_dump())
                messages.append(
                    {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"}
                )

    results = run(
        agent,
        behaviour=server(answer, seen),
        params={"temperature": 0.5, "max_tokens": 40},
        weights_version=7,
    )
    (sample,) = results.samples
    assert (sample.error, sample.reward, sample.metrics) == (None, 1.0, {"asked": 2.0})
    assert sample.token_ids == [*map(ord, "call"), EOS, *map(ord, "two"), EOS]
    assert [token for sequence in trained(results) for token in sequence] == of_server(
        "call", "two"
    )
    assert [turn.weights_version for turn in sample.turns] == [7, 7]
    assert [body["tools"] for body in seen] == [[tool], [tool]] and {
        body["max_tokens"] for body in seen
    } == {40}


def test_branches_parallel_calls_repeated_requests_and_rewritten_history_are_each_trained_once():
    async def agent(session):
        assert await said(session, "a") == "A"
        assert sorted(
            await asyncio.gather(said(session, "a", "A", "b"), said(session, "a", "A", "c"))
        ) == ["B", "C"]
        await said(session, "a", "A", "b", "B", "d")
        await said(session, "a", "A", "b", "B", "d")  # asked again, as after a lost connection
        await said(session, "a", "rewritten", "e")
        return 1.0

    results = run(agent)
    (sample,) = results.samples
    assert sample.error is None and len(sample.turns) == 6
    replies = [turn.reply["content"] for turn in sample.turns]
    b = replies.index("B")  # the server may have been asked for C first
    assert replies[3:] == ["D", "D", "E"]
    assert [turn.continues for turn in sample.turns] == [None, 0, 0, b, b, None]
    sequences = (
        [["A", "B", "D"], ["C"], ["D"], ["E"]] if b == 1 else [["A", "C"], ["B", "D"], ["D"], ["E"]]
    )
    assert trained(results) == [of_server(*texts) for texts in sequences]


def test_an_answer_that_nobody_waits_for_is_not_sampled_to_its_end_nor_trained():
    begun = asyncio.Event()

    def behaviour(body, attempt):
        if body["messages"][-1]["content"] != "never":
            return server()(body, attempt)

        async def never():
            begun.set()
            await asyncio.Event().wait()

        return never()

    async def agent(session):
        asking = asyncio.create_task(said(session, "never"))
        await begun.wait()
        asking.cancel()
        await asyncio.wait([asking])
        await said(session, "a")
        begun.clear()
        left.append(asyncio.create_task(said(session, "never")))
        await begun.wait()
        return 1.0

    async def main():
        async with Kit.serving(behaviour) as one, one.client() as client:
            results = await ttrl.get_task_results(
                [ttrl.agent_task(agent, messages=ASK)], client, "m", pbar=False
            )
            with pytest.raises(aiohttp.ClientError):  # it ended with the session
                await left[0]
            return results

    left = []
    results = asyncio.run(main())
    assert results.samples[0].error is None and trained(results) == [of_server("A")]


def test_only_its_own_keys_open_a_session():
    async def agent(session):
        wrong = [
            await post(session, key=key, messages=ASK)
            for key in ("key", session.reward_key, session.api_key + "é")
        ]
        wrong.append(await post(session, url=session.reward_url, reward=1.0))
        assert [status for status, _ in wrong] == [401] * 4 and wrong[0][1]["error"][
            "code"
        ] == "invalid_api_key"
        assert "127.0.0.1" in session.base_url and session.api_key != session.reward_key
        status, body = await post(session, "/embeddings", input="hi")
        assert status == 404 and "/v1/chat/completions" in body["error"]["message"]
        return float(await said(session, "a") == "A")

    assert run(agent).samples[0].reward == 1.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": 0.2}, "temperature is 0.2, but the run samples with 0.5"),
        ({"top_p": 0.9}, "top_p is 0.9, but the run samples with 1"),
        ({"n": 2}, "n is 2"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"guided_regex": "a"}, "guided_regex is 'a', but the run does not set it"),
        ({"model": "gpt"}, "model is 'gpt'"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"tools": "all"}, "tools is 'all'"),
        ({"messages": []}, "messages is []"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "type 'image_url'",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_would_sample_another_distribution_is_refused_and_costs_the_sample(changes, words):
    async def agent(session):
        status, body = await post(session, **{"messages": ASK, **changes})
        assert status == 400 and words in body["error"]["message"]
        await said(session, "a")
        return 1.0  # as agents do that catch everything

    (sample,) = run(agent, params={"temperature": 0.5}).samples
    assert (
        sample.reward is None and sample.error.startswith("RolloutError") and words in sample.error
    )


def test_what_is_to_be_ignored_does_not_reach_the_server():
    seen = []

    async def agent(session):
        await said(
            session, "a", temperature=0.2, seed=1, tool_choice="none", tools=[{"type": "function"}]
        )
        return 1.0

    (sample,) = run(
        agent, behaviour=server(seen=seen), ignore=["temperature"], params={"temperature": 0.5}
    ).samples
    assert (
        sample.reward == 1.0
        and seen[0]["temperature"] == 0.5
        and not {"seed", "tools", "tool_choice"} & seen[0].keys()
    )


def test_the_reward_is_returned_or_posted_or_else_the_graders():
    def rewarding(body, output):
        async def agent(session):
            await said(session, "a")
            if body is not None:
                status, answer = await post(
                    session, url=session.reward_url, key=session.reward_key, **body
                )
                statuses.append((status, answer))
            return output

        return agent

    def grader(choice):
        return (
            0.25
            if [message["role"] for message in choice.messages] == ["user", "assistant"]
            else 0.0
        )

    statuses, good = [], {"reward": 0.5, "metrics": {"m": 2}}
    samples = [
        run(rewarding(*case), grader).samples[0]
        for case in [(good, 0.75), (good, None), ({"reward": "x"}, None)]
    ]
    assert [(sample.reward, sample.metrics) for sample in samples] == [
        (0.75, {}),
        (0.5, {"m": 2.0}),
        (0.25, {}),
    ]
    assert [status for status, _ in statuses] == [200, 200, 400] and "finite number" in statuses[
        -1
    ][1]["error"]["message"]


def test_a_grader_sees_all_branches():
    async def agent(session):
        await asyncio.gather(said(session, "a"), said(session, "b"))
        await said(session, "c")

    def grader(choice):
        shown.extend([message["content"] for message in turn["messages"]] for turn in choice.turns)
        return 1.0

    shown = []
    assert run(agent, grader).samples[0].reward == 1.0
    assert sorted(shown) == [["a", "A"], ["b", "B"], ["c", "C"]]


def test_limits_end_an_agent_as_they_end_a_rollout():
    async def agent(session):
        for _ in range(3):
            await said(session, "a")

    (sample,) = run(agent, lambda choice: 0.5, limits=RolloutLimits(turns=2)).samples
    assert (sample.reward, sample.finish_reason, len(sample.turns)) == (0.5, "max_turns", 2)


def test_a_reward_posted_before_a_limit_counts():
    async def agent(session):
        for _ in range(2):
            await said(session, "a")
            await post(session, url=session.reward_url, key=session.reward_key, reward=0.75)

    sample = run(agent, limits=RolloutLimits(turns=1)).samples[0]
    assert (sample.error, sample.reward) == (None, 0.75)


def test_a_fault_of_the_endpoint_itself_costs_the_sample(monkeypatch):
    async def agent(session):
        await said(session, "a")
        with monkeypatch.context() as patch, contextlib.suppress(aiohttp.ClientError):
            patch.setattr("ttrl.agents.chat_endpoint.answer", lambda *given: 1 / 0)
            await post(session, messages=ASK)
        return 1.0

    sample = run(agent).samples[0]
    assert sample.reward is None and "division by zero" in sample.error


def test_a_server_that_refuses_costs_the_sample_whatever_the_agent_returns():
    async def agent(session):
        status, body = await post(session, messages=ASK)
        assert (status, body["error"]["code"]) == (400, "policy_failed")
        return 0.0

    (sample,) = run(agent, behaviour=server(lambda body: Kit.error(422, "no such thing"))).samples
    assert sample.reward is None and "no such thing" in sample.error and "key" not in sample.error


def test_agents_that_crash_hang_or_ask_nothing_cost_one_sample_and_leave_nothing_listening():
    async def agent(session):
        sessions.append(session)
        if session.sample == 0:
            return 1.0
        await said(session, "a")
        if session.sample == 1:
            raise KeyError("its own fault")
        return 1.0

    async def hanging(session):
        sessions.append(session)
        await asyncio.Event().wait()

    async def closed(session):
        with contextlib.suppress(aiohttp.ClientError):
            status, _ = await post(session, messages=ASK)
            return status != 200
        return True

    sessions = []
    samples = run(agent, n=3).samples
    assert [sample.reward for sample in samples] == [None, None, 1.0]
    assert "without asking the model" in samples[0].error and "its own fault" in samples[1].error
    assert (
        "for more than 0.05 s" in run(hanging, limits=RolloutLimits(seconds=0.05)).samples[0].error
    )
    assert len(sessions) == 4
    assert all(asyncio.run(closed(session)) for session in sessions)


PROGRAM = r"""
import json, os, sys, time, urllib.request
task = json.load(open(os.environ["TTRL_AGENT_TASK"]))
body = {"model": os.environ["OPENAI_MODEL"], "messages": task["messages"]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers)).read()
path = sys.argv[1] + "/%d" % task["sample"]
open(path + "x", "w").write(json.dumps([os.getpid(), [k for k in os.environ if "SECRET" in k]]))
os.rename(path + "x", path)
if "reward_key" in task:
    headers["Authorization"] = "Bearer " + task["reward_key"]
    urllib.request.urlopen(urllib.request.Request(task["reward_url"], b'{"reward": 0.25}', headers)).read()
if task["sample"] == 1:
    sys.exit("it broke")
if task["sample"] == 2:
    time.sleep(600)
"""


def test_a_program_in_any_language_is_trained_and_costs_its_sample_where_it_fails(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("MY_SECRET", "x")
    samples = run(
        [sys.executable, "-S", "-c", PROGRAM, str(tmp_path)], lambda choice: 0.5, n=2
    ).samples
    assert [sample.reward for sample in samples] == [0.5, None]
    assert samples[0].token_ids == [*map(ord, "BEGIN"), EOS]
    assert "ended with status 1" in samples[1].error and "it broke" in samples[1].error
    assert json.loads((tmp_path / "0").read_text())[1] == []


def test_programs_take_turns_and_their_wait_is_not_counted(tmp_path):
    """Each notes how many there are; alone, six of half a second are longer than the limit."""
    program = (
        PROGRAM
        + f"""
busy = os.path.join({str(tmp_path)!r}, "busy")
os.makedirs(busy, exist_ok=True)
mine = os.path.join(busy, str(task["sample"]))
open(mine, "w").close()
assert len(os.listdir(busy)) == 1
time.sleep(0.5)
os.remove(mine)
"""
    )
    command = [
        sys.executable,
        "-S",
        "-c",
        program.replace("== 1:", "== 101:").replace("== 2:", "== 102:"),
        str(tmp_path),
    ]
    samples = run(
        command, lambda choice: 0.5, n=6, at_once=1, limits=RolloutLimits(seconds=2.5)
    ).samples
    assert [(sample.reward, sample.error) for sample in samples] == [(0.5, None)] * 6
    with pytest.raises(TaskError, match="at_once is 0"):
        ttrl.agent_task(command, messages=ASK, at_once=0)


def test_a_program_without_a_grader_posts_its_reward(tmp_path):
    (sample,) = run([sys.executable, "-S", "-c", PROGRAM, str(tmp_path)]).samples
    assert (sample.error, sample.reward) == (None, 0.25)


def test_a_program_ends_when_its_session_is_cancelled(tmp_path):
    command = [sys.executable, "-S", "-c", PROGRAM.replace("== 2", "== 0"), str(tmp_path)]
    task = ttrl.agent_task(command, lambda choice: 0.5, messages=ASK)

    async def main():
        async with Kit.serving(server()) as one, one.client() as client:
            sampling = asyncio.create_task(ttrl.get_task_results([task], client, "m", pbar=False))
            while not (tmp_path / "0").exists() and not sampling.done():
                await asyncio.sleep(0.01)
            sampling.cancel()
            await asyncio.wait([sampling])
            assert sampling.cancelled()

    asyncio.run(main())
    with pytest.raises(ProcessLookupError):
        os.kill(json.loads((tmp_path / "0").read_text())[0], 0)


def test_64_sessions_at_once_keep_their_tokens_apart():
    async def agent(session):
        first = await said(session, f"q{session.sample}")
        if session.sample % 16 == 5:
            raise RuntimeError("crashed")
        return float(await said(session, f"q{session.sample}", first, "more") == "MORE")

    results = run(agent, n=64, concurrency=64)
    for sample in results.samples:
        question = f"Q{sample.sample}"
        crashed = sample.sample % 16 == 5
        assert sample.reward == (None if crashed else 1.0)
        said_by_it = [question] if crashed else [question, "MORE"]
        assert sample.token_ids == [
            token for text in said_by_it for token in (*map(ord, text), EOS)
        ]
        assert sample.turns[-1].continues == (None if crashed else 0)


def test_an_agent_is_a_function_or_a_command_with_a_grader():
    for agent, grader, words in [
        ("python a.py", None, "give async def"),
        ([], None, "give async"),
    ]:
        with pytest.raises(TaskError, match=words):
            ttrl.agent_task(agent, grader, messages="do it")
    with pytest.raises(TaskError, match="give a list of names"):
        ttrl.agent_task(
            test_limits_end_an_agent_as_they_end_a_rollout, messages="do it", ignore="n"
        )
    sample = run(lambda session: 1.0).samples[0]
    assert "is not a coroutine function" in sample.error
