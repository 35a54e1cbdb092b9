"""Agents are trained on a real vLLM server by a real trainer: every trained id and log-probability
is one that the server sent."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import check_agents
import pytest
from openai import AsyncOpenAI
from support import killed_sessions
from support.killed_run import kill_all, wait_for
from support.training_steps import check_adapters

import ttrl
from ttrl.data.packing.packed import PackedTensors
from ttrl.evaluation.evaluate import evaluate
from ttrl.replays.replay import replay
from ttrl.system.files import read_jsonl
from ttrl.tasks.task import RolloutLimits
from ttrl.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

CLIENT = Path(check_agents.__file__).with_name("agents") / "openai_client.py"
TOOL = {
    "type": "function",
    "function": {"name": "count_letters", "parameters": {"type": "object", "properties": {}}},
}


async def agent(session: Any) -> None:
    """A loop over tools; then the same by the other APIs, and one branch."""
    messages: list[Any] = list(session.messages)
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        while True:
            completion = await client.chat.completions.create(
                model=session.model, messages=messages, tools=[TOOL]
            )
            messages.append(completion.choices[0].message.to_dict())
            calls = completion.choices[0].message.tool_calls or []
            if not calls or len(messages) > 6:
                break
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": "some"} for call in calls
            ]
        extra = {"return_token_ids": True}
        text = await client.completions.create(
            model=session.model, prompt="abc", max_tokens=4, extra_body=extra
        )
        choice: Any = text.choices[0]
        await client.completions.create(
            model=session.model, prompt=[*choice.prompt_token_ids, *choice.token_ids, 65, 66]
        )
        response = await client.responses.create(
            model=session.model, input="hi", instructions="Write.", max_output_tokens=5
        )
        await client.responses.create(
            model=session.model, input="on", previous_response_id=response.id
        )
        await client.chat.completions.create(model=session.model, messages=session.messages)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["function", "command"])
def test_every_trained_token_is_the_servers(tmp_path: Path, kind: str) -> None:
    """Agents that are functions, with tools and all APIs, and with adapters; and commands.

    Only this shows it of real servers' and trainers' numbers, and trains an adapter that vLLM
    serves.

    Long: only this trains agents on vLLM. On a fake server: tests/agents/test_agent_task.py; tokens
    of several turns: tests/e2e/test_multi_turn.py.
    """
    given = agent if kind == "function" else [sys.executable, str(CLIENT)]
    settings = {"max_tokens": 6, "sampling": {}}
    if kind == "function":
        settings["training"] = {
            "lora_rank": 4,
            "lr": 1e-2,
            "kl_coefficient": 0.1,
            "rows_per_microbatch": 1,
        }
    found = check_agents.check(tmp_path, given, (), iterations=2, tasks=3, samples=4, **settings)
    assert found.problems == [] and (found.samples, found.failed) == (24, 0)
    assert found.trained > 100 and found.replies > (24 * 5 if kind == "function" else 24)
    samples = read_jsonl(tmp_path / "run/iterations/0002/rollouts.jsonl")
    assert {turn["weights_version"] for sample in samples for turn in sample["turns"]} == {1}
    assert any(turn["reply"].get("tool_calls") for sample in samples for turn in sample["turns"])
    # Of the right contexts, or the trainer would say others.
    for row in read_jsonl(tmp_path / "run/metrics.jsonl")[1:]:
        assert row["sampler_trainer"]["unknown"] == 0 and row["sampler_trainer"]["max"] < 1e-3
    if kind == "function":
        check_adapters(tmp_path / "run", tmp_path / "model")
        for sample in samples:
            turns = sample["turns"]
            prompts = [
                number
                for number, turn in enumerate(turns)
                if any(m["role"] == "prompt" for m in turn["messages"])
            ]
            assert (
                turns[prompts[1]]["continues"] == prompts[0]
                and turns[prompts[0]]["continues"] is None
            )
            assert turns[prompts[1]]["prompt_token_ids"] == [65, 66]


@pytest.mark.long
def test_agents_are_evaluated(tmp_path: Path) -> None:
    """Long: only this evaluates on vLLM agents that are given an address. They are trained on one
    above; rollouts with tools are evaluated on one in test_tools.py.
    """
    arguments = check_agents.write_calling_model(tmp_path, layers=2, width=64, heads=2)
    limits = RolloutLimits(turns=3)
    tasks = [
        ttrl.agent_task(agent, check_agents.letters, messages=f"Number {n}.", limits=limits)
        for n in range(3)
    ]
    settings = {
        "n": 3,
        "samples_per_task": 2,
        "max_tokens": 6,
        "samples_file": tmp_path / "samples.jsonl",
    }
    result = evaluate(
        str(tmp_path / "model"), {"letters": tasks}, server_args=arguments, **settings
    )
    one = result.to_json()["sets"]["letters"]
    assert (one["num_samples"], one["num_failed"]) == (6, 0)
    assert {len(row["turns"]) for row in read_jsonl(tmp_path / "samples.jsonl")} == {3}


@pytest.mark.long
def test_64_sessions_killed_in_the_middle_go_on_and_5_percent_crash_and_hang(
    tmp_path: Path,
) -> None:
    """Those that crash or hang are counted as failed, no others; finished groups stay as they were;
    nothing is trained twice.

    Long: only this kills a run amid sessions of agents. 64 sessions at once, crashes and hangs with
    a fake server: tests/agents/test_agent_task.py; killed runs: test_crash.py.
    """
    arguments = check_agents.write_calling_model(tmp_path, layers=2, width=64, heads=2)
    log, hold, partial = (
        tmp_path / "log.txt",
        tmp_path / "hold",
        tmp_path / "run/iterations/0001/rollouts.partial.jsonl",
    )
    paths = [*sys.path, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, killed_sessions.__file__, str(tmp_path), json.dumps(arguments)]

    def start() -> "subprocess.Popen[bytes]":
        with open(log, "ab") as output:
            return subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    hold.touch()
    process = start()
    wait_for(lambda: partial.exists() and partial.read_bytes().count(b"\n") >= 1, process, log)
    kill_all(process)
    kept = {row["samples"][0]["task_id"]: row["samples"] for row in read_jsonl(partial)}
    assert 0 < len(kept) <= 4  # sessions of the other tasks had replies and were not over
    hold.unlink()
    assert start().wait(600) == 0, log.read_text()[-5000:]
    found = check_agents.compare(tmp_path / "run")
    failing = {
        number
        for number in range(64)
        if number % 20 in (killed_sessions.CRASHES, killed_sessions.HANGS)
    }
    rows = read_jsonl(tmp_path / "run/iterations/0001/rollouts.jsonl")
    failed = {
        int(row["task_id"].split("/")[1]) * 8 + row["sample"]
        for row in rows
        if row["error"] is not None
    }
    assert (len(rows), found.samples, found.failed, failed) == (64, 64, len(failing), failing)
    assert [
        problem for problem in found.problems if "task 's/" not in problem
    ] == [] and found.trained > 200
    for task_id, samples in kept.items():
        assert [row for row in rows if row["task_id"] == task_id] == samples


@pytest.mark.long
def test_ttrl_proxy_collects_what_replay_trains_on(tmp_path: Path) -> None:
    """A model folder is served; Ctrl-C ends the proxy; the sessions become an iteration, which is
    graded and trained on.

    Long: only this joins proxy, vLLM and trainer. The proxy, and replay of its sessions, on a fake
    server: tests/agents/test_proxy.py; replay with a real trainer: test_run.py.
    """
    model, run, log = (
        make_tiny_model(tmp_path / "model", layers=2, width=64, heads=2),
        tmp_path / "run",
        tmp_path / "log.txt",
    )
    command = [
        sys.executable,
        "-m",
        "ttrl.cli",
        "proxy",
        str(model),
        "--output",
        str(run),
        "--max-tokens",
        "6",
    ]
    command += ["--key-file", str(tmp_path / "key")]
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_for(lambda: "open sessions at" in log.read_text(), process, log)
        address = log.read_text().split("open sessions at ")[1].split()[0]
        key = (tmp_path / "key").read_text().strip()

        async def use() -> None:
            async with aiohttp.ClientSession() as http:

                async def post(url: str, key: str, **body: Any) -> Any:
                    async with http.post(
                        url, json=body, headers={"Authorization": f"Bearer {key}"}
                    ) as answer:
                        assert answer.status == 200, await answer.text()
                        return await answer.json()

                for number in range(8):
                    session = await post(address, key, id=f"t/{number // 4}")
                    messages = [{"role": "user", "content": f"Say {number // 4}."}]
                    chat = {"model": session["model"], "messages": messages}
                    await post(
                        session["base_url"] + "/chat/completions", session["api_key"], **chat
                    )
                    await post(session["reward_url"], session["reward_key"], reward=number % 2)

        asyncio.run(use())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, log.read_text()
    finally:
        if process.poll() is None:
            kill_all(process)
    assert all(key.encode() not in path.read_bytes() for path in run.rglob("*") if path.is_file())
    result = replay(run, grader=lambda choice: check_agents.letters(choice), train=True, quiet=True)
    assert result.checkpoint is not None and result.total.rollouts == 8
    packed = PackedTensors.load(result.folder / "iterations/0001/packed.safetensors")
    assert packed.num_trained == sum(
        len(row["token_ids"]) for row in read_jsonl(run / "sessions.jsonl")
    )
