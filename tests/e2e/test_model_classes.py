"""Transformers' own classes over two processes and with a real server.

A hybrid of attention, Mamba 2 and experts, sharded by FSDP2, does what one process does, and writes
the same checkpoint. A mixture is trained with the experts that vLLM chose.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import check_models
import pytest
import torch
from support import parallel_worker
from support.tiny_models import random_samples

from ttrl import Task, get_task_results
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.data.tokenization import TaskResultTokenizer
from ttrl.rollouts.client.wire import EXPERTS
from ttrl.server.vllm import VLLMServer
from ttrl.training.models.weights import iter_stored

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SETTINGS = {
    "lr": 1e-3,
    "max_grad_norm": None,
    "rows_per_microbatch": 100,
    "decoder": "transformers",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("classes")
    folder = check_models.write_model("granite_hybrid_moe", root / "model")
    samples = random_samples(3, prompts=(3, 5, 8, 9, 4))
    packed_tensors_from_tokenized_results(samples, seq_len=40, pad_id=0).save(
        root / "packed.safetensors"
    )
    kept = {"activation_checkpointing": True, "checkpoint_keeps": "products"}
    jobs = [
        {
            "name": name,
            "processes": processes,
            "model": str(folder),
            "packed": str(root / "packed.safetensors"),
            "output_dir": str(root / name),
            "settings": {**SETTINGS, **settings},
            "steps": 2,
            "checkpoint": True,
        }
        for name, processes, settings in (("one", 1, {}), ("two", 2, kept))
    ]
    (root / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, parallel_worker.__file__, str(root / "jobs.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    for job in jobs:
        error = Path(job["output_dir"], "error.txt")
        assert not error.exists(), error.read_text()[-3000:]
    return {
        job["name"]: torch.load(Path(job["output_dir"], "result.pt"))
        | {"folder": Path(job["output_dir"])}
        for job in jobs
    }


def test_two_processes_do_what_one_does(results):
    """Proves sharded experts and scans; packed rows by one process are in tests/training/models."""
    one, two = results["one"], results["two"]
    assert one["ranks"][1] == 1 and two["ranks"][1] == 2
    assert torch.allclose(one["logprobs"], two["logprobs"], atol=1e-5)
    for name, gradient in one["gradients"].items():
        assert (two["gradients"][name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name
    for name, weight in one["weights"].items():
        assert torch.allclose(weight, two["weights"][name], atol=2e-5), name
    alone, shared = (
        {name: t for _, name, t in iter_stored(part["folder"] / "checkpoint")}
        for part in (one, two)
    )
    assert alone.keys() == shared.keys()
    assert all(torch.allclose(alone[name], shared[name], atol=2e-5) for name in alone)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A server that returns the experts that it chose, and the policy of the same folder."""
    root = tmp_path_factory.mktemp("mixture")
    folder = check_models.write_model("qwen3_moe", root / "model")
    how = {
        "dtype": "float32",
        "max_model_len": 512,
        "extra_args": {"enable_return_routed_experts": True},
    }
    with VLLMServer(folder, served_model_name="m", log_path=root / "server.log", **how) as server:
        yield server, check_models.loaded(folder)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_experts_that_vllm_returns_are_those_of_their_tokens(mixture, streamed):
    """Only a real server shows which token each row of experts belongs to: in float32 the trainer
    would choose the same ones.

    Replay itself is tested in tests/training/models/test_routing.py.
    """
    server, policy = mixture
    tasks = [
        Task([{"role": "user", "content": f"say {'some ' * number}words"}], lambda choice: 1.0)
        for number in range(4)
    ]
    asked = {"max_tokens": 24, "ignore_eos": True, "seed": 1, EXPERTS: 0}
    seen = (lambda chunk, completion: None) if streamed else None
    results = asyncio.run(
        get_task_results(
            tasks, server.endpoint(), "m", n=3, params=asked, on_chunk=seen, pbar=False
        )
    )
    tokenize = TaskResultTokenizer()
    sequences = [sequence for group in results for sequence in tokenize(group, [1.0] * 3)]
    assert len(sequences) == 12
    pack = packed_tensors_from_tokenized_results(sequences, seq_len=256, pad_id=0)
    with torch.no_grad():
        policy.decoder.routing.forget()
        logprobs = policy(*check_models.policy_rows(pack), experts_BTLK=pack.experts).logprobs
    routing = policy.decoder.routing.take(lambda total: total)
    # Of a sequence's tokens, all but the last were computed by the server, and that one is stored
    # nowhere.
    assert all(one.replayed == 1 and one.differing < 0.01 for one in routing)
    assert float((logprobs - pack.logprobs[pack.labels >= 0]).abs().max()) < 1e-4
    others = pack.experts.roll(1, dims=1)
    with torch.no_grad():
        policy(*check_models.policy_rows(pack), experts_BTLK=others)
    assert all(one.differing > 0.2 for one in policy.decoder.routing.take(lambda total: total))
