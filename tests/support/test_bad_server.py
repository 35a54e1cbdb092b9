"""The misbehaving server itself, seen by plain aiohttp and by the openai client: it does what the
other tests rely on.
"""

import asyncio
import contextlib
import json
import socket
from collections import defaultdict

import aiohttp
import openai
import pytest
from support import bad_server

BODY = {
    "model": "m",
    "n": 3,
    "seed": 5,
    "logprobs": True,
    "return_token_ids": True,
    "messages": [{"role": "user", "content": "hello"}],
}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


async def post(session, server, body, timeout=60.0):
    async with session.post(
        server.url + "/chat/completions", json=body, timeout=aiohttp.ClientTimeout(total=timeout)
    ) as response:
        return response.status, response.headers, await response.read()


def assembled(data: bytes):
    """(text, ids, logprobs, finish reason) of each choice of a stream, and its usage: by the letter
    of the SSE specification.
    """
    lines = data.replace(b"\r\n", b"\n").decode().split("\n")
    events, held = [], []
    for line in lines:
        if line == "":
            if held:
                events.append("\n".join(held))
            held = []
        elif line.startswith("data:"):
            held.append(line[5:].removeprefix(" "))
    parts = defaultdict(lambda: ["", [], [], None])
    usage = None
    for event in events:
        if event == "[DONE]":
            continue
        chunk = json.loads(event)
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            part = parts[choice["index"]]
            part[0] += choice["delta"].get("content") or ""
            part[1] += choice.get("token_ids") or []
            part[2] += [
                entry["logprob"] for entry in (choice["logprobs"] or {"content": []})["content"]
            ]
            part[3] = choice["finish_reason"] or part[3]
    return dict(parts), usage


def whole(data: bytes):
    body = json.loads(data)
    return {
        c["index"]: [
            c["message"]["content"] or "",
            c["token_ids"] or [],
            [entry["logprob"] for entry in (c["logprobs"] or {"content": []})["content"]],
            c["finish_reason"],
        ]
        for c in body["choices"]
    }, body["usage"]


def run(work, faults="", **settings):
    async def main():
        async with (
            bad_server.serving(faults, **settings) as server,
            aiohttp.ClientSession() as session,
        ):
            return await work(server, session)

    return asyncio.run(main())


def test_streamed_or_not_together_or_alone_a_sample_is_the_same():
    async def work(server, session):
        plain, usage = whole((await post(session, server, BODY))[2])
        for interval in (1, 4, 1000):
            streamed, its_usage = assembled(
                (await post(session, server, {**BODY, **STREAM, "stream_interval": interval}))[2]
            )
            assert streamed == plain
            assert its_usage == usage
        for k in range(3):
            alone, _ = whole((await post(session, server, {**BODY, "n": 1, "seed": 5 + k}))[2])
            assert alone[0] == plain[k]
        assert len({text for text, *_ in plain.values()}) == 3
        assert usage["completion_tokens"] == sum(len(ids) for _, ids, *_ in plain.values())
        for _, ids, logprobs, finish in plain.values():
            assert (len(ids), ids[-1], finish) == (len(logprobs), 0, "stop")
        other, _ = whole(
            (
                await post(
                    session, server, {**BODY, "messages": [{"role": "user", "content": "other"}]}
                )
            )[2]
        )
        assert other[0] != plain[0]
        short, _ = whole((await post(session, server, {**BODY, "max_tokens": 3}))[2])
        assert (short[0][1], short[0][3]) == (plain[0][1][:3], "length")
        stats = server.stats()
        assert stats["delivered"]["hello"] == [5, 6, 7] * 4 + [5, 6, 7] + [5, 6, 7]
        assert (stats["requests"], stats["completions"], stats["in_flight"]) == (9, 21, 0)

    run(work)


def test_the_openai_client_understands_it():
    async def work(server, session):
        async with openai.AsyncOpenAI(base_url=server.url, api_key="k") as client:
            assert [model.id async for model in client.models.list()] == ["m"]
            plain = await client.chat.completions.create(
                model="m",
                messages=BODY["messages"],
                n=2,
                seed=5,
                logprobs=True,
                extra_body={"return_token_ids": True},
            )
            assert plain.choices[0].token_ids[-1] == 0
            assert plain.choices[0].logprobs.content[0].logprob < 0
            text = ""
            async for chunk in await client.chat.completions.create(
                model="m", messages=BODY["messages"], n=1, seed=5, stream=True
            ):
                text += chunk.choices[0].delta.content or ""
            assert text == plain.choices[0].message.content

    run(work)


def test_without_a_seed_every_answer_is_new_unless_greedy():
    async def work(server, session):
        free = {key: value for key, value in BODY.items() if key != "seed"}
        texts = [
            c[0]
            for _ in range(2)
            for c in whole((await post(session, server, free))[2])[0].values()
        ]
        assert len(set(texts)) == 6
        greedy = whole((await post(session, server, {**free, "temperature": 0}))[2])[0]
        assert greedy[0] == greedy[1] == greedy[2]

    run(work)


def test_unusual_answers():
    async def answers(kind, body):
        async def work(server, session):
            return (await post(session, server, body))[2]

        model = bad_server.Model((8, 64), {kind: 1.0})
        async with bad_server.serving(model=model) as server, aiohttp.ClientSession() as session:
            return await work(server, session)

    for body, read in ((BODY, whole), ({**BODY, **STREAM}, assembled)):
        empty = read(asyncio.run(answers("empty", body)))[0]
        assert [choice[0] for choice in empty.values()] == ["", "", ""]
        assert all(
            choice[1] == [0] for choice in read(asyncio.run(answers("null", body)))[0].values()
        )
        assert all(
            choice[3] == "length" and choice[1][-1]
            for choice in read(asyncio.run(answers("length", body)))[0].values()
        )
    long = whole(asyncio.run(answers("long", {**BODY, "n": 1})))[0][0]
    assert (len(long[0]), len(long[1]), len(long[2])) == (100_000, 25_001, 25_001)
    assert b'"content":null' in asyncio.run(answers("null", BODY))


def expected_failure(fault):
    """What plain aiohttp or a strict reader meets."""
    if fault in ("silence", "stall"):
        return TimeoutError
    if fault in ("refuse", "drop", "reset"):
        return aiohttp.ClientConnectionError
    if fault in ("reset_in_middle", "length_lies"):
        return (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError)
    return None


@pytest.mark.parametrize("stream", [False, True])
def test_every_fault_is_what_its_name_says(stream):
    async def one(fault):
        body = {**BODY, **(STREAM if stream else {})}
        read = assembled if stream else whole
        async with (
            bad_server.serving(
                lambda ask: fault if ask.attempt == 1 else None, refused_for=3600
            ) as server,
            aiohttp.ClientSession() as session,
        ):
            failure = expected_failure(fault)
            if failure is not None:
                with pytest.raises(failure):
                    await post(
                        session, server, body, timeout=0.5 if failure is TimeoutError else 60.0
                    )
            # Aiohttp notices what is left over, at once or when it is read as the next answer.
            elif fault == "length_short":
                with (
                    contextlib.suppress(aiohttp.ClientResponseError),
                    pytest.raises(json.JSONDecodeError),
                ):
                    read((await post(session, server, body))[2])
                await session.close()
                session = aiohttp.ClientSession()
            else:
                status, headers, data = await post(session, server, body)
            if fault == "refuse":
                with pytest.raises(aiohttp.ClientConnectorError):
                    await post(session, server, body)
                await server.listen()  # the hour is over
            try:
                good = read((await post(session, server, body))[2])  # the next time all is well
            except aiohttp.ClientConnectionError:
                assert fault == "stale"
                good = read((await post(session, server, body))[2])
            finally:
                await session.close()
            assert sorted(good[0]) == [0, 1, 2]
            stats = server.stats()
            assert stats["faults"] == {fault: 1}
            assert stats["in_flight"] == 0
            if failure is not None or fault == "length_short":
                assert stats["delivered"]["hello"] == [5, 6, 7]
                return
            if fault.startswith("ht"):  # http_429_date, html_200
                assert str(status) == fault.split("_")[1]
                assert ("retry-after" in headers) == (status == 429)
                assert stats["samples_failed"] == (
                    {fault: 3} if bad_server.FAULTS[fault][0] == "final" else {}
                )
            elif fault in ("malformed_chunk", "truncated_json"):
                with pytest.raises(json.JSONDecodeError):
                    read(data)
            elif fault == "error_chunk":
                assert b'data: {"error":{"message":"error_chunk on purpose"' in data
            elif fault == "early_end":
                assert [choice[3] for choice in read(data)[0].values()] == [None] * 3
            elif fault == "missing_usage":
                assert (read(data)[0], read(data)[1]) == (good[0], None)
            elif fault == "missing_logprobs":
                assert sorted(len(choice[2]) == 0 for choice in read(data)[0].values()) == [
                    False,
                    False,
                    True,
                ]
            elif fault == "missing_ids":
                assert sorted(len(choice[1]) == 0 for choice in read(data)[0].values()) == [
                    False,
                    False,
                    True,
                ]
            elif fault in ("abort", "error"):
                assert sorted(choice[3] for choice in read(data)[0].values()) == [
                    fault,
                    "stop",
                    "stop",
                ]
            elif fault == "fewer_choices":
                assert sorted(read(data)[0]) == [0, 2]
            elif fault == "wrong_index":
                assert list(read(data)[0]) == ([5, 6, 7] if stream else [0])
            else:
                assert bad_server.FAULTS[fault][0] == "harmless"
                assert read(data) == good
                if fault == "shuffled":
                    assert sorted(read(data)[0]) == [0, 1, 2]
                if fault == "gzip":
                    assert headers["content-encoding"] == "gzip"
                if fault == "two_dones":
                    assert data.count(b"data: [DONE]") == 2
                if fault == "missing_done":
                    assert b"[DONE]" not in data

    async def main():
        kinds = [
            fault
            for fault, (_, where) in bad_server.FAULTS.items()
            if where != ("plain" if stream else "stream")
        ]
        await asyncio.gather(*map(one, kinds))

    asyncio.run(main())


def test_faults_are_drawn_as_often_as_told_and_the_same_each_time():
    async def work(server, session):
        async def one(i):
            try:
                status, _, _ = await post(
                    session, server, {**BODY, "messages": [{"role": "user", "content": str(i)}]}
                )
            except aiohttp.ClientError:
                status = "lost"
            return status

        return await asyncio.gather(*map(one, range(300))), server.stats()["faults"]

    outcomes = [run(work, "http_500=0.1,http_429=0.2,drop=0.1", seed=seed) for seed in (3, 3, 4)]
    statuses, faults = outcomes[0]
    assert outcomes[1] == outcomes[0] != outcomes[2]
    assert 80 <= sum(faults.values()) <= 160  # 120 expected, standard deviation 8.5
    assert statuses.count(500) == faults["http_500"] < statuses.count(429) == faults["http_429"]


def test_a_process_of_its_own_is_asked_and_told():
    async def main(server):
        async with aiohttp.ClientSession() as session:
            assert (await post(session, server, BODY))[0] == 200
            server.control(faults="http_500=1")
            assert (await post(session, server, BODY))[0] == 500
            async with session.get(server.root + "/metrics") as response:
                text = await response.text()
            assert 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"' in text
            server.control(faults="", restart=1.5)
        with pytest.raises(OSError):  # it is away soon
            for _ in range(6000):
                socket.create_connection(("127.0.0.1", int(server.root.rsplit(":", 1)[1]))).close()
                await asyncio.sleep(0.01)
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    assert (await post(session, server, BODY))[0] == 200
                    break
                except aiohttp.ClientConnectorError:
                    await asyncio.sleep(0.05)

    with bad_server.process("--kv-blocks", "100", "--tokens", "5") as server:
        asyncio.run(main(server))
        stats = server.stats()
    assert (stats["requests"], stats["completions"], stats["restarts"]) == (3, 6, 1)
    assert stats["faults"] == {"http_500": 1}
