"""A real vLLM server: it computes what transformers computes, also after new weights, and every way
to break that is seen.

The model is tiny and random. Canaries are computed by plain transformers, independently of ttrl's
trainer. Only this starts vLLM by hand, kills it, and asks each of its paths for the key.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import openai
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.fake_vllm import KeepsItsCache
from support.tiny_models import make_byte_model
from transformers import AutoModelForCausalLM

from ttrl.errors import ModelFolderError, ServerDiedError, ServerStartError, WeightSyncError
from ttrl.rollouts.scheduling.capacity import read_metrics
from ttrl.server.vllm import VLLMServer
from ttrl.system.processes import reap_leftovers
from ttrl.weights import sync
from ttrl.weights.canary import check_canary
from ttrl.weights.source import Files
from ttrl.weights.sync import sync_weights
from ttrl.weights.verify import verify_weights

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

KV_BLOCK = 128  # vLLM's on CPU


def write_model(folder: Path, seed: int, tied: bool = False) -> Path:
    write_canary(make_byte_model(folder, seed, tied))
    return folder


def reference_logprobs(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids), V] log-probabilities of the next token at every position, by transformers in
    float32.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)


def write_canary(folder: Path) -> None:
    tokens = torch.randint(
        0, 250, (2 * KV_BLOCK + 1,), generator=torch.Generator().manual_seed(7)
    ).tolist()
    logprobs = reference_logprobs(folder, tokens)
    canary = {
        "schema": 1,
        "dtype": "float32",
        "token_ids": tokens,
        "logprobs": [None] + [logprobs[i, token].item() for i, token in enumerate(tokens[1:])],
        "greedy_token_ids": [],
        "greedy_logprobs": [],
        "greedy_margins": [],
    }
    for _ in range(8):
        top = reference_logprobs(folder, tokens + canary["greedy_token_ids"])[-1].topk(2)
        canary["greedy_token_ids"].append(top.indices[0].item())
        canary["greedy_logprobs"].append(top.values[0].item())
        canary["greedy_margins"].append((top.values[0] - top.values[1]).item())
    (folder / "canary.json").write_text(json.dumps(canary))


@pytest.fixture(scope="module")
def folder(byte_model):
    return byte_model.parent


@pytest.fixture(scope="module")
def first(byte_model):
    write_canary(byte_model)
    return byte_model


@pytest.fixture(scope="module")
def second(folder):
    return write_model(folder / "second", seed=2)


@pytest.fixture(scope="module")
def server(byte_server, first):
    return byte_server


def status_without_key(server: VLLMServer, method: str, path: str, key: str | None = None) -> int:
    headers = {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )
    data = b'{"method": "reload_weights"}' if method == "POST" else None
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}", method=method, data=data, headers=headers
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=60
        ) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_chat_completion_equals_transformers(server, first):
    async def ask():
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key) as client:
            return await client.chat.completions.create(
                model="policy",
                messages=[{"role": "user", "content": "Sort: cab"}],
                n=2,
                max_tokens=20,
                temperature=0.7,
                seed=3,
                logprobs=True,
                extra_body={"return_token_ids": True},
            )

    completion = asyncio.run(ask())
    prompt = completion.prompt_token_ids
    for choice in completion.choices:
        tokens = choice.token_ids
        # Log-softmax differs from logits by a constant: no harm to a softmax.
        logits = reference_logprobs(first, prompt + tokens)
        expected = (
            (logits / 0.7)
            .log_softmax(-1)[len(prompt) - 1 : -1]
            .gather(1, torch.tensor(tokens)[:, None])[:, 0]
        )
        sampled = torch.tensor([entry.logprob for entry in choice.logprobs.content])
        assert len(sampled) == len(tokens) > 0
        assert (sampled - expected).abs().max() < 1e-3


def test_first_start_and_kv_capacity(server, first):
    proof = verify_weights(server, first, compare=False)
    assert proof.canary_max_difference < 1e-4
    # Its greedy generation has filled the prefix cache.
    tokens = sync.Canary.load(first).token_ids
    usage = server.request(
        "POST", "/v1/completions", {"model": "policy", "prompt": tokens, "max_tokens": 1}
    )["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * KV_BLOCK
    found = read_metrics(server.request("GET", "/metrics"))
    assert found is not None and found.capacity > 10_000 and found.capacity % KV_BLOCK == 0


def test_every_path_but_health_asks_for_the_key(server):
    schema = server.request("GET", "/openapi.json")
    assert {"/collective_rpc", "/reset_prefix_cache", "/v1/chat/completions"} <= schema[
        "paths"
    ].keys()
    paths = [
        (method.upper(), path) for path, methods in schema["paths"].items() for method in methods
    ]
    paths += [
        ("GET", "/metrics"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("OPTIONS", "/collective_rpc"),
        ("GET", "/nothing"),
    ]
    for method, path in paths:
        expected = 200 if path == "/health" else 401
        assert (path, status_without_key(server, method, path)) == (path, expected)
        assert (path, status_without_key(server, method, path, key="wrong")) == (path, expected)


def test_key_is_in_no_file_and_on_no_command_line(server, folder):
    child = psutil.Process(server._child.pid)
    for process in [child, *child.parents()[:1], *child.children(recursive=True)]:
        assert server.api_key not in " ".join(process.cmdline())
    for path in folder.rglob("*"):
        assert path.is_dir() or server.api_key.encode() not in path.read_bytes()


def test_reload_to_other_weights(server, first, second):
    pid = server._child.pid
    for target in (second, first, second):
        report = sync_weights(server, target)
        assert (report.mode, report.fell_back) == ("reload", None)
        assert report.proof.canary_max_difference < 1e-4
    assert server._child.pid == pid
    sync_weights(server, first)
    assert not check_canary(server, sync.Canary.load(second)).passed


@pytest.mark.long
def test_weights_corrupted_on_the_way_are_caught(server, first, second, folder):
    """One matrix is not what the trainer computed with: reload and restart both load it, and both
    are refused.

    Long: only this restarts vLLM with wrong weights. A fake one: tests/weights/test_sync.py;
    wrong weights in place: test_sync.py.
    """
    sync_weights(server, first)
    corrupted = Path(shutil.copytree(second, folder / "corrupted"))
    tensors = load_file(corrupted / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.05
    save_file(tensors, corrupted / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        WeightSyncError,
        match=r"restart \(the earlier reload failed.*position.*server -\d+\.\d+, trainer -\d+\.\d+",
    ):
        sync_weights(server, corrupted)


@pytest.mark.long
def test_old_weights_left_in_place_fall_back_to_a_restart(server, first, second, monkeypatch):
    """Long: only this mends vLLM by a restart. A fake one: tests/weights/test_sync.py; a restart:
    the dead engine's below.
    """
    sync_weights(server, first)
    pid, port, key = server._child.pid, server.port, server.api_key
    monkeypatch.setattr(sync, "load_weights", lambda server, folder: None)
    report = sync_weights(server, second)
    assert report.mode == "restart" and "the server's weights differ" in report.fell_back
    assert report.proof.canary_max_difference < 1e-4
    assert server._child.pid != pid and (server.port, server.api_key) == (port, key)


def test_stale_prefix_cache_is_caught(server, first, second):
    """New weights, but keys and values of the old ones: only the greedy generation sees it."""
    sync_weights(server, first)
    forgetful = KeepsItsCache(
        server.root_url, served_model_name="policy", dtype="float32", api_key=server.api_key
    )
    source = Files.of(second)
    proof = sync._load_in_place(forgetful, second, source, compare=True, asleep=False)
    assert "greedy token" in proof.problem
    sync.reset_prefix_cache(server)
    assert check_canary(server, source.canary).passed


@pytest.mark.long
def test_a_checkpoint_that_vllm_refuses(server, first, folder):
    """Reload and restart both fail, the error shows vLLM's own lines, and the server can be started
    again.

    Long: only this finds the cause in vLLM's own log. With a fake server:
    tests/weights/test_sync.py and test_vllm.py.
    """
    broken = Path(shutil.copytree(first, folder / "broken"))
    (broken / "model.safetensors").write_bytes(b"\0" * 1000)
    with pytest.raises(ServerStartError, match=r"(?s)exit code.*[Ss]afetensor"):
        sync_weights(server, broken)
    with pytest.raises(ServerDiedError, match="is not running"):
        server.check()
    assert sync_weights(server, first, mode="restart").mode == "restart"


def test_no_canary_no_sync(server, first, folder):
    without = Path(shutil.copytree(first, folder / "without"))
    (without / "canary.json").unlink()
    with pytest.raises(ModelFolderError, match=r"canary\.json does not exist"):
        sync_weights(server, without)


def test_a_dead_engine_is_noticed(server, first):
    """The engine's process is a child of the server's: when it alone is killed, the server must not
    look alive.
    """
    sync_weights(server, first)
    engine = next(
        p
        for p in psutil.Process(server._child.pid).children(recursive=True)
        if "EngineCore" in " ".join(p.cmdline())
    )
    os.kill(engine.pid, signal.SIGKILL)
    engine.wait(30)
    with pytest.raises(ServerDiedError, match=r"(?s)last lines of its log"):
        for _ in range(1200):
            server.check()
            psutil.wait_procs([psutil.Process(server._child.pid)], timeout=0.1)
    server.restart(first)
    verify_weights(server, first, compare=False)


@pytest.mark.long
def test_tied_embeddings(server, folder):
    """On CPU, vLLM keeps a packed copy of the head, which its own reload renews only if the
    checkpoint names lm_head.weight. So neither the first nor the last of these does, and the one
    between them does.

    Long: only this mixes both kinds of checkpoints. test_sync.py is about tied models whose files
    name no head.
    """
    checkpoints = [write_model(folder / f"tied-{seed}", seed, tied=True) for seed in (1, 2, 3)]
    tensors = load_file(checkpoints[1] / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, checkpoints[1] / "model.safetensors", metadata={"format": "pt"})
    server.restart(checkpoints[0])
    verify_weights(server, checkpoints[0], compare=False)
    for checkpoint in checkpoints[1:]:
        report = sync_weights(server, checkpoint)
        assert report.proof.canary_max_difference < 1e-4
        assert (report.mode, report.fell_back) == ("reload", None)


OWNER = """
import sys, time
from ttrl.server.vllm import VLLMServer
server = VLLMServer(sys.argv[1], served_model_name="m", log_path=sys.argv[2] + "/killed.log", dtype="float32", max_model_len=512)
server.start()
print(server._child._guard.pid, server._child.pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.long
def test_what_a_killed_run_leaves_behind_is_found(server, folder, first, tmp_path):
    """ttrl, guard and API server are killed at once, as by the kernel when memory runs out; vLLM's
    engine survives that.

    Long: only this shows that vLLM's engine keeps the mark. Other processes:
    tests/system/test_processes.py.
    """
    server.stop()  # one server at a time
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(first), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    guard, child = map(int, owner.stdout.readline().split())
    everyone = psutil.Process(child).children(recursive=True)
    engine = next(process for process in everyone if "EngineCore" in " ".join(process.cmdline()))
    os.kill(engine.pid, signal.SIGSTOP)  # or it may notice, and end by itself
    for pid in (owner.pid, guard, child):
        os.kill(pid, signal.SIGKILL)
    owner.communicate()
    assert engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE, (
        "this test needs an engine that survives"
    )

    record_path = tmp_path / "killed.log.pids.json"
    record = json.loads(record_path.read_text())
    assert [engine.pid] == [pid for pid, _ in record["processes"] if pid == engine.pid]
    # The mark in its environment suffices, although vLLM changes its title.
    record["processes"] = []
    record_path.write_text(json.dumps(record))
    assert engine.pid in reap_leftovers(tmp_path)
    assert psutil.wait_procs(everyone, timeout=30)[1] == [] and not record_path.exists()
