"""Tools of MCP servers that are really started: what the model calls, what it is told, and what
becomes of servers that fail.
"""

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.chat_server import Kit

from ttrl.agents.mcp import McpRollout, McpServer, mcp_tools
from ttrl.errors import TaskError
from ttrl.rollouts.task_results import get_task_results
from ttrl.system.process_guard import process_id
from ttrl.tasks.task import Task

pytest.importorskip("mcp")
SERVER = [sys.executable, str(Path(__file__).parents[1] / "support" / "mcp_server.py")]


def calling(*calls):
    """A model that makes these calls, (name, arguments), one after the other, and then says what it
    was told last.
    """

    def behaviour(body, attempt):
        told = [message for message in body["messages"] if message["role"] == "tool"]
        if len(told) == len(calls):
            return Kit.completion([Kit.choice(0, told[-1]["content"] if told else "done")])
        name, arguments = calls[len(told)]
        call = {
            "id": f"c{len(told)}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return Kit.completion([Kit.choice(0, "call", message=message, finish_reason="tool_calls")])

    return behaviour


def said(choice):
    return float(len(choice.message.content))


def play(*calls, servers=None, n=1):
    rollout = McpRollout(*(servers or [McpServer(SERVER)]))
    task = Task([{"role": "user", "content": "Go on."}], said, rollout=rollout)
    results, server = Kit.run(calling(*calls), [task], n=n, token_ids=False)
    return results[0].samples, server.requests


def told(sample):
    return [
        message["content"]
        for turn in sample.turns
        for message in turn.messages
        if message["role"] == "tool"
    ]


def test_each_rollout_has_a_server_of_its_own() -> None:
    samples, requests = play(("notes_add", {"text": "milk"}), ("notes_add", {"text": "eggs"}), n=2)
    for sample in samples:
        assert sample.error is None and told(sample) == ["1 in all", "2 in all"]
        assert sample.reward == len("2 in all") and sample.text == "2 in all"
    described = {tool["function"]["name"]: tool["function"] for tool in requests[0]["tools"]}
    assert described["product"]["description"] == "Multiply two whole numbers."
    assert described["product"]["parameters"]["required"] == ["a", "b"]


def test_what_the_model_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("SOMETHING", "else")
    calls = [
        ("product", {"a": 6, "b": 7}),
        ("fail", {}),
        ("product", {"a": "x"}),
        ("gone", {}),
        ("picture", {}),
        ("variables", {}),
    ]
    server = McpServer(SERVER, env={"NOTES_FILE": "n.txt"})
    ((sample,), _) = play(*calls, ("long", {"length": 30_000}), servers=[server])
    assert sample.error is None
    product, fail, wrong, gone, picture, variables, long = told(sample)
    assert product == "42" and picture == "Here:\n[image image/png]"
    assert (
        "out of ink" in json.loads(fail)["error"]
        and "validation error" in json.loads(wrong)["error"]
    )
    assert "there is no tool gone" in json.loads(gone)["error"]
    assert {"PATH", "NOTES_FILE"} <= set(variables.split()) and not {
        "OPENAI_API_KEY",
        "SOMETHING",
    } & set(variables.split())
    assert long == "x" * 20_000 + "\n[10000 characters more are left out]"


@pytest.mark.long
def test_two_servers() -> None:
    """Long: only this plays with tools of both. That two tools may not have one name:
    test_what_is_refused.
    """
    servers = [
        McpServer(SERVER, only=["product"], prefix="one_"),
        McpServer(SERVER, only=["product", "notes.add"]),
    ]
    ((sample,), requests) = play(
        ("one_product", {"a": 2, "b": 3}), ("notes_add", {"text": "x"}), servers=servers
    )
    assert told(sample) == ["6", "1 in all"]
    assert sorted(tool["function"]["name"] for tool in requests[0]["tools"]) == [
        "notes_add",
        "one_product",
        "product",
    ]


def test_a_server_at_an_address() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    with subprocess.Popen([*SERVER, "--port", str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(300):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.1)
            server = McpServer(f"http://127.0.0.1:{port}/mcp")
            (samples, _) = play(("product", {"a": 6, "b": 7}), ("fail", {}), servers=[server], n=2)
            assert [sample.error for sample in samples] == [None, None]
            assert all(
                told(sample)[0] == "42" and "out of ink" in told(sample)[1] for sample in samples
            )
        finally:
            process.terminate()
    ((sample,), _) = play(("product", {"a": 6, "b": 7}), servers=[server])
    assert sample.reward is None and "cannot be reached" in sample.error


@pytest.mark.parametrize(
    ("calls", "server", "message"),
    [
        ([("die", {})], McpServer(SERVER), "(?s)failed in its tool die: .*the ink caught fire"),
        ([], McpServer(["/nowhere/server"]), "cannot be reached: cannot start '/nowhere/server'"),
        (
            [],
            McpServer([sys.executable, "-c", "import sys; sys.exit('no such notes')"]),
            "(?s)cannot be reached: .*no such notes",
        ),
        ([("long", {"length": 5 * 2**20})], McpServer(SERVER), "failed in its tool long"),
    ],
)
def test_a_server_that_fails_costs_its_sample(calls, server: McpServer, message: str) -> None:
    ((sample,), _) = play(*calls, servers=[server])
    assert sample.reward is None
    assert re.search(message, sample.error), sample.error


async def _gone(marks: Path) -> None:
    pids = [int(pid) for pid in marks.read_text().split()]
    for _ in range(200):
        if not any(map(process_id, pids)):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"still there: {pids}")


@pytest.mark.long(but=["cancelled"])
@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_a_rollout_that_ends_early_leaves_no_process(how: str, tmp_path: Path) -> None:
    """The server has started a program that left its session and its process group. What is late is
    cancelled, too.

    Long for one that fails: only that ends through the tool's own error.
    """
    marks = tmp_path / "marks"

    async def rollout(chat):
        async with mcp_tools(chat, McpServer(SERVER)) as tools:
            await chat()
            hanging = asyncio.create_task(tools.functions["hang"](marks=str(marks)))
            while not (marks.exists() and " " in marks.read_text()):
                assert not hanging.done()
                await asyncio.sleep(0.02)
            if how == "failed":
                raise RuntimeError("it broke")
            running.cancel()
            await hanging

    async def main() -> None:
        nonlocal running
        task = Task([{"role": "user", "content": "x"}], said, rollout=rollout)
        async with Kit.serving(calling()) as server, server.client() as client:
            running = asyncio.create_task(
                get_task_results([task], client, "m", token_ids=False, pbar=False)
            )
            await asyncio.wait([running])
            await _gone(marks)
            assert (
                running.cancelled()
                if how == "cancelled"
                else "it broke" in running.result()[0].samples[0].error
            )

    running: asyncio.Task
    asyncio.run(main())


def test_a_killed_run_leaves_no_process(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    program = (
        "import asyncio, sys\n"
        "from ttrl.agents.mcp import McpServer, mcp_tools\n"
        "from ttrl.tasks.task import Chat\n"
        "async def main():\n"
        "    async with mcp_tools(Chat(None, [], 't', 0), McpServer(sys.argv[2:])) as tools:\n"
        "        await tools.functions['hang'](marks=sys.argv[1])\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(marks), *SERVER]) as process:
        while not (marks.exists() and " " in marks.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
    asyncio.run(_gone(marks))


def test_tools_in_a_rollout_of_ones_own() -> None:
    async def rollout(chat):
        async with mcp_tools(chat, McpServer(SERVER)) as tools:
            await tools.talk(chat)
            return float(await tools.functions["notes_add"](text="the end") == "2 in all"), {
                "calls": tools.calls
            }

    task = Task([{"role": "user", "content": "x"}], rollout=rollout)
    results, _ = Kit.run(calling(("notes_add", {"text": "a"})), [task], token_ids=False)
    assert (results[0].samples[0].reward, results[0].samples[0].metrics) == (1.0, {"calls": 1.0})


def test_what_is_refused() -> None:
    for wrong in ("python server.py", [], [1]):
        with pytest.raises(TaskError, match="give its address"):
            McpServer(wrong)
    with pytest.raises(TaskError, match=r"\['product'\]"):
        McpServer(SERVER, only="product")
    ((sample,), _) = play(servers=[McpServer(SERVER, only=["sum"])])
    assert "has no tool sum; it has notes.add, product" in sample.error
    ((sample,), _) = play(servers=[McpServer(SERVER), McpServer(SERVER)])
    assert "two tools are named notes_add" in sample.error
