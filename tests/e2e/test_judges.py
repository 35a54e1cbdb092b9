"""Judges on real vLLM servers: rewards as transformers computes them, verdicts that are read, kept
or missing, dead servers.

Only real servers have reward models, grammars and engines that die.
"""

import asyncio
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.chat_server import Kit
from support.network_hosts import held_port
from support.tiny_models import make_byte_model
from transformers import AutoConfig, AutoTokenizer, Qwen2ForSequenceClassification

from ttrl import Task
from ttrl.errors import ModelFolderError
from ttrl.judges.judge import Judge
from ttrl.judges.relative import Pairwise, Ranking
from ttrl.judges.reward_model import RewardModel
from ttrl.ready_models import ready_model
from ttrl.server.vllm import VLLMServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.usefixtures("one_thread")]

ASK = {"role": "user", "content": "Which city is the capital of Japan?"}
REPLIES = ["It is Tōkyō (東京) 🗼.", "Bananas.", "", "Tokyo, " * 30]
FORM = {"temperature": 0.0, "max_tokens": 48}


def samples(replies: list[str], grader: Any = None, group_grader: Any = None) -> list[Any]:
    """Return the samples of a policy that said this, graded."""

    def say(body: dict[str, Any], attempt: int) -> Any:
        return Kit.completion([Kit.choice(k, reply) for k, reply in enumerate(replies)])

    task = Task([ASK], grader, group_grader=group_grader)
    return list(
        Kit.run(say, [task], n=len(replies), samples_per_request=len(replies))[0][0].samples
    )


def asked_at(server: VLLMServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("JUDGE_KEY", server.api_key)
    return {
        "model": server.served_model_name,
        "base_url": server.base_url,
        "key_variable": "JUDGE_KEY",
        "retries": 1,
    }


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = make_byte_model(tmp_path_factory.mktemp("judges") / "reward", seed=1)
    config = AutoConfig.from_pretrained(folder)
    config.num_labels = 1
    torch.manual_seed(2)
    model = Qwen2ForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def transformers_rewards(folder: Path, replies: list[str]) -> list[float]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen2ForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    chats = [[ASK, {"role": "assistant", "content": reply}] for reply in replies]
    with torch.no_grad():
        return [
            model(
                tokenizer.apply_chat_template(chat, return_tensors="pt")["input_ids"]
            ).logits.item()
            for chat in chats
        ]


@pytest.mark.long
def test_a_reward_model(
    reward_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rewards; a reply that is too long; and its engine's end while samples are graded, of
    which two are done.

    Long: only this asks vLLM's pooling server. Reward models against a server made up here:
    tests/judges.
    """
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 512,
        "extra_args": {"runner": "pooling"},
    }
    with VLLMServer(
        reward_folder, served_model_name="rm", log_path=tmp_path / "server.log", **settings
    ) as server:
        model = RewardModel(messages=(ASK,), **asked_at(server, monkeypatch))
        expected = transformers_rewards(reward_folder, REPLIES)
        found = samples([*REPLIES, "x" * 512], model)
        assert max(expected) - min(expected) > 0.1 and min(expected) < 0
        assert [sample.reward for sample in found[:-1]] == pytest.approx(expected, abs=1e-3)
        assert (
            found[-1].reward is None and "maximum context length is 512 tokens" in found[-1].error
        )
        params = {"use_activation": True}
        sigmoid = RewardModel(messages=(ASK,), params=params, **asked_at(server, monkeypatch))
        assert samples(REPLIES[:1], sigmoid)[0].reward == pytest.approx(
            1 / (1 + math.exp(-expected[0])), abs=1e-3
        )

        done: list[float] = []

        async def until_it_ends(choice: Any) -> float:
            if choice.index >= 2:
                while len(done) < 2:
                    await asyncio.sleep(0.01)
                for process in psutil.Process(server._child.pid).children(recursive=True):  # type: ignore[union-attr]
                    os.kill(process.pid, signal.SIGKILL)
            reward, _ = await model(choice)
            done.append(reward)
            return reward

        found = samples(REPLIES, until_it_ends)
        assert [sample.reward for sample in found[:2]] == pytest.approx(expected[:2], abs=1e-3)
        assert all(
            sample.reward is None and "the judge rm at" in sample.error for sample in found[2:]
        )


@pytest.fixture(params=["tiny", pytest.param("smollm2-135m", marks=pytest.mark.long)])
def chat_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VLLMServer]:
    """Long for SmolLM2, which has a server of its own: only that reads the question in words."""
    if request.param == "tiny":
        yield request.getfixturevalue("tiny_server")
        return
    try:
        model = ready_model("smollm2-135m")
    except ModelFolderError as error:
        if "download" not in str(error):
            raise
        pytest.skip(str(error))
    assert model is not None
    log = tmp_path_factory.mktemp("chat") / "server.log"
    with VLLMServer(
        model, served_model_name="j", log_path=log, dtype="float32", max_model_len=1024
    ) as server:
        yield server


def answered(server: VLLMServer) -> float:
    """Return how many requests a server has answered."""
    lines = [
        line
        for line in server.request("GET", "/metrics").splitlines()
        if line.startswith("vllm:request_success_total")
    ]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_a_chat_model_judges(
    chat_model: VLLMServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In vLLM's structured outputs. It knows nothing of quality, so only the form of what it says
    is asserted.
    """
    asked = {
        **asked_at(chat_model, monkeypatch),
        "rubric": "Is it right?",
        "task": ASK["content"],
        "cache": tmp_path / "kept",
    }

    def bound(**form: Any) -> dict[str, Any]:
        return {**asked, "params": {**FORM, "structured_outputs": form}}

    tenth = r"(0\.[0-9]|1\.0)"
    judge = Judge(**bound(regex="Score: ([0-9]|10)"), prices=(1.0, 1.0))
    pairwise = Pairwise(**bound(choice=["Better: 1", "Better: 2", "Better: tie"]))
    ranking = Ranking(**bound(regex=rf'\{{"scores": \[{tenth}, {tenth}, {tenth}\]\}}'))
    first = samples(REPLIES, judge)
    assert all(sample.reward * 10 == pytest.approx(round(sample.reward * 10)) for sample in first)
    assert all(
        sample.metrics["judge_dollars"] > 1e-4 and sample.metrics["judge_cached"] == 0
        for sample in first
    )
    compared = samples(REPLIES[:3], group_grader=pairwise)
    assert sum(sample.reward for sample in compared) == pytest.approx(1.5)
    assert all(
        abs(sample.metrics["position_bias"]) <= 1 >= sample.metrics["order_agreement"] >= 0
        for sample in compared
    )
    ranked = samples(REPLIES[:3], group_grader=ranking)
    assert all(
        0 <= sample.reward <= 1 and 0 <= sample.metrics["order_spread"] <= 1 for sample in ranked
    )

    mute = {**asked, "params": {"temperature": 0.0, "max_tokens": 2}}  # "Score: 5" takes more
    for sample in samples(REPLIES, Judge(**mute)) + samples(
        REPLIES[:3], group_grader=Pairwise(**mute)
    ):
        name = chat_model.served_model_name
        assert (
            sample.reward is None and f"the judge {name} did not end with one line" in sample.error
        )

    before_that = answered(chat_model)
    for grading, before in (({"grader": judge}, first), ({"group_grader": pairwise}, compared)):
        again = samples(REPLIES[: len(before)], **grading)
        assert [sample.reward for sample in again] == [sample.reward for sample in before]
        assert all(
            (sample.metrics["judge_cached"], sample.metrics["judge_dollars"]) == (1, 0)
            for sample in again
        )
    assert answered(chat_model) == before_that > 0
    with held_port() as port:
        gone = Judge(
            **bound(regex="Score: ([0-9]|10)") | {"base_url": f"http://127.0.0.1:{port}/v1"}
        )
        (sample,) = samples(["Kyōto."], gone)
    assert sample.reward is None and "Connection error" in sample.error
