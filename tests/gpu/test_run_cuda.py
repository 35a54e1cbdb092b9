"""vLLM and the trainer on one GPU: a server computes what transformers does, sleeps, and takes
weights; whole runs in every way to bring them there."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
from support.training_steps import start_and_moved
from transformers import AutoModelForCausalLM

from ttrl import Task, TrainConfig, train
from ttrl.errors import ModelFolderError, WeightSyncError
from ttrl.ready_models import ready_model
from ttrl.records import Canary, Handover
from ttrl.server.vllm import VLLMServer
from ttrl.system.files import read_jsonl
from ttrl.training.checkpoints import hand_over
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.parallel.weight_memory import WeightMemory
from ttrl.weights.canary import check_canary
from ttrl.weights.sync import sleep, sync_weights

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]
HERE = Ranks(0, 1, torch.device("cuda", 0))
SMALL = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**31, "max_num_seqs": 64}
"""So that several servers fit beside each other."""
EAGER = SMALL | {"enforce_eager": True}


@pytest.fixture(scope="module")
def model():
    """A real one, where it can be had."""
    try:
        return ready_model("smollm2-135m")
    except ModelFolderError as error:
        if "download" not in str(error):
            raise
        return ready_model("tiny")


# A server


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def checkpoints(model, folder):
    """The model, the same with noise, and that out of memory."""
    start, moved, policy = start_and_moved(model, folder, HERE)
    memory = WeightMemory(HERE)
    parts = hand_over(memory, policy, moved, "fp32")
    handover = Handover(memory.path, parts, Canary.load(moved))
    yield (
        start,
        moved,
        handover,
    )
    memory.close()


@pytest.fixture(scope="module", params=["eager", "graphs"])
def server(request, folder, checkpoints):
    here = str(Path(__file__).parents[1])
    settings = EAGER if request.param == "eager" else SMALL
    with VLLMServer(
        checkpoints[0],
        served_model_name="policy",
        log_path=folder / f"{request.param}.log",
        dtype="bfloat16",
        max_model_len=512,
        extra_args=settings
        | {
            "enable_sleep_mode": True,
            "worker_extension_cls": "support.faulty_worker.FaultyWeightSync",
        },
        env={
            "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])),
            "TTRL_TEST_FAULT": str(folder / "fault.json"),
        },
    ) as server:
        yield server


def logprobs_of(folder, ids, temperature, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda().eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids], device="cuda")).logits[0].double() / temperature
    return (
        logits.log_softmax(-1)[:-1]
        .gather(1, torch.tensor(ids[1:], device="cuda")[:, None])[:, 0]
        .cpu()
    )


def test_what_it_samples_is_as_likely_as_transformers_says(server, checkpoints, record_property):
    sync_weights(server, checkpoints[0])
    request = {
        "model": "policy",
        "messages": [{"role": "user", "content": "Write three sentences about Japan."}],
    }
    request |= {
        "max_tokens": 128,
        "n": 4,
        "temperature": 0.7,
        "return_token_ids": True,
        "seed": 1,
        "logprobs": True,
    }
    answer = server.request("POST", "/v1/chat/completions", request)
    prompt, ours, theirs = answer["prompt_token_ids"], [], []
    for choice in answer["choices"]:
        ids = prompt + choice["token_ids"]
        served = torch.tensor(
            [entry["logprob"] for entry in choice["logprobs"]["content"]], dtype=torch.float64
        )
        exact, rounded = (
            logprobs_of(checkpoints[0], ids, 0.7, dtype)[len(prompt) - 1 :]
            for dtype in (torch.float32, torch.bfloat16)
        )
        assert len(served) == len(exact) > 0
        ours.append((served - exact).abs())
        theirs.append((rounded - exact).abs())
    mean, limit = torch.cat(ours).mean().item(), 1.5 * torch.cat(theirs).mean().item()
    record_property("nats", f"{mean:.4f}, transformers in bf16 {limit / 1.5:.4f}")
    assert 0 < mean < limit


def test_weights_come_from_files_and_from_memory_awake_and_asleep(
    server, checkpoints, record_property
):
    start, moved, handover = checkpoints
    ways = [
        (start, None, False),
        (moved, handover, False),
        (start, None, True),
        (moved, handover, True),
        (start, None, False),
    ]
    for checkpoint, source, asleep in ways:
        before = torch.cuda.mem_get_info()[0]
        if asleep:
            sleep(server)
        freed = torch.cuda.mem_get_info()[0] - before
        report = sync_weights(server, checkpoint, asleep=asleep, handover=source)
        record_property(
            f"{checkpoint.parent.name} {report.mode} {asleep}",
            f"{report.seconds:.2f} s, {freed / 1e9:.2f} GB freed",
        )
        assert (report.mode, report.fell_back, report.files_because) == (
            "reload" if source is None else "memory",
            None,
            None,
        )
        assert report.proof.unchecked == 0 and report.proof.compared and report.proof.exact
        assert report.proof.canary_max_difference > 0  # or bf16 would not have been compared
        assert not asleep or freed > 2**31  # the cache alone is as large
        server.open_to("these")


@pytest.mark.parametrize(
    "fault",
    [
        {"old": True},
        {"tensor": "model.layers.1.mlp.down_proj.weight", "index": [3, 5], "add": 0.5},
        {"zero": "model.layers.1.self_attn.v_proj.weight"},
        {"swap": ["model.layers.0.", "model.layers.1."]},
    ],
    ids=["old weights", "one weight", "values of a layer", "two layers"],
)
def test_other_weights_are_noticed(server, checkpoints, folder, fault, monkeypatch):
    monkeypatch.setattr("ttrl.weights.sync._restart", lambda *_: pytest.fail("as expected"))
    sync_weights(server, checkpoints[0])
    (folder / "fault.json").write_text(json.dumps(fault))
    try:
        with pytest.raises(pytest.fail.Exception, match="as expected"):
            sync_weights(server, checkpoints[1])
    except WeightSyncError as error:
        assert "differs" in str(error)
    finally:
        (folder / "fault.json").unlink()
    canary = check_canary(server, Canary.load(checkpoints[1]))
    assert "tensor" in fault or not canary.passed


# Runs

WAYS = {  # name: (settings, how weights come to the server)
    "nothing chosen": ({}, "memory"),
    "graphs, sleep": ({"weight_sync": "sleep", "server": SMALL}, "reload"),
    "sleep": ({"weight_sync": "sleep", "server": EAGER}, "reload"),
    "memory": ({"weight_sync": "memory", "server": EAGER}, "memory"),
    "reload": ({"weight_sync": "reload", "server": EAGER}, "reload"),
    "restart": ({"weight_sync": "restart", "server": EAGER}, "restart"),
    "a trainer for each iteration": ({"trainer": "once", "server": EAGER}, "reload"),
    "off policy": ({"off_policy_steps": 1, "server": EAGER, "trainer_memory": "keep"}, "memory"),
    "LoRA": ({"training": {"lora_rank": 8, "lr": 1e-3}, "server": EAGER}, "adapter"),
    "LoRA, merged": (
        {"training": {"lora_rank": 8, "lr": 1e-3}, "adapters": "merged", "server": EAGER},
        "reload",
    ),
    "fp32": ({"dtype": "fp32", "server": EAGER}, "memory"),
}


def share_of_e(choice):
    """Any model has a signal in it."""
    answer = choice.message.content or ""
    return answer.count("e") / max(1, len(answer))


@pytest.mark.parametrize("way", WAYS)
def test_a_run(way, model, tmp_path, record_property):
    changes, mode = WAYS[way]
    settings = {
        "run": str(tmp_path / "run"),
        "model": str(model),
        "iterations": 2,
        "tasks_per_iteration": 4,
    }
    settings |= {"samples_per_task": 16, "max_tokens": 48, "seq_len": 512, "device": "cuda"}
    settings |= changes | {
        "training": {"lr": 2e-5, "updates_per_iteration": 2} | changes.get("training", {})
    }
    result = train(
        TrainConfig(**settings),
        [
            Task([{"role": "user", "content": f"Say {word}."}], share_of_e)
            for word in ("tree", "sea", "bee", "hello", "one", "yes")
        ],
        [Task([{"role": "user", "content": "Say three."}], share_of_e)],
        quiet=True,
    )
    rows = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        sync, drift, seconds = row["sync"], row["sampler_trainer"], row["seconds"]
        record_property(
            f"iteration {row['iteration']}",
            json.dumps({"sync": sync, "drift": drift, "seconds": seconds}),
        )
        assert (sync["mode"], sync["fell_back"]) == (mode, None)
        assert row["samples"] == 64 and drift["unknown"] == drift["not_finite"] == 0
        assert 0 < drift["mean"] < (2e-3 if settings.get("dtype") == "fp32" else 0.06)
        assert "unchanged" not in row["train"]
    assert (result.checkpoint / "config.json").is_file()
