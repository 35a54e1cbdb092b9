"""What `ttrl.costs.flops` says that a server computed, against PyTorch's counter inside vLLM's
worker.

Long: only this counts what vLLM computes. tests/costs/test_flops.py counts the same model in
transformers and in ttrl.
"""

import asyncio
import dataclasses
import json
import os
from pathlib import Path

import openai
import pytest

from ttrl import Task, get_task_results
from ttrl.costs.flops import sampling_flops
from ttrl.costs.parameters import model_shape
from ttrl.loop.rollout_facts import sampled_reads
from ttrl.server.vllm import VLLMServer
from ttrl.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

PROMPTS = [
    "sort cab",
    "sort zebra",
    "a longer one: " + "sort these letters please " * 12,
    "count: 1 2 3 4 5 6 7 8",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("counted")
    model = make_tiny_model(folder / "model", seed=3, layers=3, width=64, heads=2, context=1024)
    here = str(Path(__file__).parents[1])
    with VLLMServer(
        model,
        served_model_name="m",
        log_path=folder / "server.log",
        dtype="float32",
        extra_args={"worker_extension_cls": "support.counting_worker.Counting"},
        env={"PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))},
    ) as server:
        yield server


def counted(server):
    [found] = server.request("POST", "/collective_rpc", {"method": "counted_flops"})["results"]
    assert set(found) <= {
        "_C.onednn_mm",
        "_C.weight_packed_linear",
        "aten.mm",
        "vllm.unified_attention_with_output",
    }
    return sum(found.values())


def sample(server, n, max_tokens):
    async def main():
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key) as client:
            tasks = [
                Task([{"role": "user", "content": prompt}], lambda choice: 0.0)
                for prompt in PROMPTS
            ]
            params = {"temperature": 1.0, "max_tokens": max_tokens}
            return await get_task_results(tasks, client, "m", pbar=False, n=n, params=params)

    return asyncio.run(main())


@pytest.mark.parametrize(("n", "max_tokens"), [(1, 40), (8, 24)])
def test_answers_cost_what_the_workers_own_counter_says(server, n, max_tokens):
    """To the last operation, once the rows that vLLM adds to the vocabulary are counted, which make
    it a multiple of 64.
    """
    shape = model_shape(json.loads((Path(server.model_folder) / "config.json").read_text()))
    served = dataclasses.replace(shape, vocabulary=-(-shape.vocabulary // 64) * 64)
    server.request("POST", "/reset_prefix_cache")
    counted(server)
    first = sample(server, n, max_tokens)
    assert sum(sampling_flops(served, sampled_reads(list(first)))) == counted(server)
    again = sample(server, n, max_tokens)
    reads, known = sampled_reads(list(again)), [group.samples[0].prefix_cached for group in again]
    assert any(known)
    # What the first of a group found in the cache, nobody says: it is counted as having read all of
    # its prompt.
    if n > 1:
        for place, cached in enumerate(known):
            assert reads[place * n][1] == 0
            reads[place * n] = reads[place * n][0], cached, reads[place * n][2]
    assert sum(sampling_flops(served, reads)) == counted(server)
