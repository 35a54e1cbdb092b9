"""`ttrl proxy`: sessions that are opened over HTTP become rollouts that replay and training
read.
"""

import asyncio
import contextlib
import errno
import json
import signal
import subprocess
import sys
import urllib.request

import aiohttp
import pytest
from support import os_calls
from support.agent_sessions import ASK, Kit, of_server, server, trained
from support.chat_server import ChatHandler, threaded

from ttrl import cli
from ttrl.agents.proxy import Proxy
from ttrl.errors import UserError
from ttrl.loop.carried import groups_of
from ttrl.replays.replay import replay
from ttrl.rollouts.request import SamplingRequest
from ttrl.run_folder.folder import RunFolder
from ttrl.system.files import append_jsonl, read_jsonl
from ttrl.tasks.task import RolloutLimits


def collected(run, use, **options):
    """Let `use(opened, asked, address)` work at a proxy, and end it."""

    async def main():
        async with Kit.serving(server()) as one, aiohttp.ClientSession() as http:
            told = asyncio.Queue()
            request = SamplingRequest(
                client=f"http://127.0.0.1:{one.port}/v1",
                model="m",
                params={},
                weights_version=0,
                pbar=False,
            )
            proxy = Proxy(request, run, **options)
            serving = asyncio.create_task(proxy.serve(told.put_nowait))
            address = (await told.get()).split()[-1]

            async def post(url, key, **body):
                async with http.post(
                    url, json=body, headers={"Authorization": f"Bearer {key}"}
                ) as response:
                    return response.status, await response.json()

            async def opened(**body):
                status, session = await post(address, proxy.key, **body)
                assert status == 200, session
                return session

            try:
                await use(opened, post, address)
            finally:
                serving.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await serving

    asyncio.run(main())
    return groups_of(RunFolder(run).iteration(1))


def test_sessions_become_an_iteration_that_replay_grades(tmp_path):
    run = tmp_path / "run"

    async def use(opened, post, address):
        sessions = [
            await opened(id="a", messages=ASK),
            await opened(id="a", messages=ASK),
            await opened(),
        ]
        assert (
            len({session["base_url"] for session in sessions}) == 1
            and len({s["api_key"] for s in sessions}) == 3
        )
        for number, session in enumerate(sessions):
            chat = session["base_url"] + "/chat/completions"
            asked = [{"role": "user", "content": f"begin {number}"}]
            status, answer = await post(chat, session["api_key"], model="policy", messages=asked)
            assert (status, answer["choices"][0]["message"]["content"]) == (200, f"BEGIN {number}")
        assert (await post(sessions[0]["reward_url"], sessions[1]["reward_key"], reward=1.0))[
            0
        ] == 401
        assert (await post(sessions[0]["reward_url"], sessions[0]["api_key"], reward=1.0))[0] == 401
        assert (await post(address, sessions[0]["api_key"]))[0] == 401
        assert (await post(address, "key", id=7))[0] == 401
        for reward, session in zip((0.5, 1.0, 0.0), sessions, strict=True):
            assert (
                await post(
                    session["reward_url"], session["reward_key"], reward=reward, metrics={"m": 1}
                )
            )[0] == 200
            # Written before it is answered.
            assert read_jsonl(run / "sessions.jsonl")[-1]["reward"] == reward
            assert (
                await post(
                    session["base_url"] + "/chat/completions", session["api_key"], messages=asked
                )
            )[0] == 401
        await opened(id="open")  # goes on when the proxy ends

    groups = collected(run, use)
    assert [(group.task_id, group.rewards) for group in groups] == [
        ("a", [0.5, 1.0]),
        ("session", [0.0]),
    ]
    first, second = groups[0].samples
    assert (first.sample, second.sample, first.metrics, first.weights_version) == (
        0,
        1,
        {"m": 1.0},
        0,
    )
    assert trained(groups) == [of_server("BEGIN 0")]
    unnamed = groups[1].samples[0]
    assert (
        unnamed.messages == [{"role": "user", "content": "begin 2"}]
        and unnamed.sent(0) == unnamed.messages
    )
    result = replay(
        run, grader=lambda choice: float(choice.message.content.endswith("0")), quiet=True
    )
    again = groups_of(RunFolder(result.folder).iteration(1))
    assert [group.rewards for group in again] == [[1.0, 0.0], [0.0]]


def test_an_agent_may_use_the_name_that_was_typed(tmp_path):
    async def use(opened, post, address):
        session = await opened(id="a", messages=ASK)
        statuses = []
        for name in ("policy", "org/typed", "other"):
            chat = session["base_url"] + "/chat/completions"
            status, answer = await post(chat, session["api_key"], model=name, messages=ASK)
            statuses.append(status)
        assert statuses == [200, 200, 400]
        assert "this session's is 'policy' or 'org/typed'" in answer["error"]["message"]
        headers = {"Authorization": f"Bearer {session['api_key']}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            listed = await (await http.get(session["base_url"] + "/models")).json()
        assert [one["id"] for one in listed["data"]] == ["policy", "org/typed"]
        await post(session["reward_url"], session["reward_key"], reward=1.0)

    collected(tmp_path / "run", use, names=["org/typed"])


def test_a_session_that_cannot_be_written_is_said_to_whoever_rewards_it(tmp_path):
    async def use(opened, post, address):
        session = await opened(id="a", messages=ASK)
        await post(session["base_url"] + "/chat/completions", session["api_key"], messages=ASK)
        with os_calls.refused("open", errno.ENOSPC, "sessions.jsonl"):
            status, answer = await post(session["reward_url"], session["reward_key"], reward=1.0)
        assert status == 502 and "No space left" in answer["error"]["message"]
        session = await opened(id="b", messages=ASK)
        await post(session["base_url"] + "/chat/completions", session["api_key"], messages=ASK)
        assert (await post(session["reward_url"], session["reward_key"], reward=1.0))[0] == 200

    assert [group.task_id for group in collected(tmp_path / "run", use)] == ["b"]


def test_what_a_killed_proxy_had_written_is_collected_by_the_next(tmp_path):
    run = tmp_path / "run"

    async def use(opened, post, address):
        session = await opened(id="a", messages=ASK)
        await post(session["base_url"] + "/chat/completions", session["api_key"], messages=ASK)
        await post(session["reward_url"], session["reward_key"], reward=1.0)

    collected(run, use)
    (row,) = read_jsonl(run / "sessions.jsonl")
    append_jsonl(run / "sessions.jsonl", {**row, "task_id": "b"})  # and no marker
    with open(run / "sessions.jsonl", "a") as file:
        file.write('{"torn')
    assert len(collected(run, use)) == 1
    second, third = (groups_of(RunFolder(run).iteration(number)) for number in (2, 3))
    assert [group.task_id for group in second] == ["b"] and [group.task_id for group in third] == [
        "a"
    ]
    assert not (run / "iterations/0004").exists()


def test_a_session_in_which_nothing_is_asked_fails_and_ends(tmp_path):
    async def use(opened, post, address):
        session = await opened(id="a", messages=ASK)
        while not (tmp_path / "run/sessions.jsonl").exists():
            await asyncio.sleep(0.01)
        assert (await post(session["reward_url"], session["reward_key"], reward=1.0))[0] == 401

    (group,) = collected(tmp_path / "run", use, limits=RolloutLimits(seconds=0.1))
    assert group.samples[0].reward is None and "for more than 0.1 s" in group.samples[0].error


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_either_signal_ends_it_in_order(tmp_path, number, code):
    run, key_file = tmp_path / "run", tmp_path / "key"
    with threaded(ChatHandler) as address:
        command = [sys.executable, "-m", "ttrl.cli", "proxy", address]
        with subprocess.Popen(
            [*command, "--output", str(run), "--key-file", str(key_file)],
            stdout=subprocess.PIPE,
            text=True,
            # A shell starts background jobs, and so perhaps these tests, with SIGINT ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as proxy:
            try:
                opened = next(line for line in proxy.stdout if "open sessions at" in line)
                session = asked(opened.split()[-1], key_file.read_text().strip(), {"id": "a"})
                listed = asked(session["base_url"] + "/models", session["api_key"])
                assert "m" in [one["id"] for one in listed["data"]]  # what the address calls it
                proxy.send_signal(number)
                proxy.communicate(timeout=60)
            finally:
                proxy.kill()
    assert proxy.returncode == code
    assert not (run / "owner.json").exists()  # the folder is given back


def asked(address, key, body=None):
    """The JSON answer of a server."""
    request = urllib.request.Request(
        address,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_what_is_wrong_is_said_before_anything_listens(tmp_path, capsys):
    with pytest.raises(UserError, match="max_tokens"):
        Proxy(
            SamplingRequest(client="http://127.0.0.1:1/v1", model="m", params={"max_tokens": 0}),
            tmp_path,
        )
    command = ["proxy", "http://127.0.0.1:1/v1", "--name", "m", "--output", str(tmp_path / "run")]
    assert cli.main([*command, "--beside", "judge"]) == 2
    assert "write NAME=URL" in capsys.readouterr().err
    assert json.dumps(sorted(path.name for path in tmp_path.iterdir())) == "[]"
