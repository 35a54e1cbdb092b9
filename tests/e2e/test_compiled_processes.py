"""Compare the update of two processes with that of one, with switches that compile C++.

Long: each process compiles for a minute or two. Only this compiles sharded layers and 8-bit
moments; test_compiled.py does both in one process, and test_parallel.py and test_lora.py run
several processes without a compiler.
"""

import math

import pytest
import torch
from support import parallel_worker
from support.tiny_models import random_samples
from transformers import Qwen3Config, Qwen3ForCausalLM

from ttrl.data.packing.pack import packed_tensors_from_tokenized_results

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]


EIGHT_BIT = {"optimizer": "adamw_8bit"}
IN_BACKWARD = {"optimizer_in_backward": True, "max_grad_norm": None}
COMPILED = {"compile": True, "row_length_multiple": 40}
JOBS = {
    "plain": (1, {}),
    "compiled fsdp, recomputed, in backward": (
        2,
        {**COMPILED, **IN_BACKWARD, "activation_checkpointing": True},
    ),
    "8 bits": (1, EIGHT_BIT),
    "8 bits tp": (2, {**EIGHT_BIT, "tensor_parallel": 2}),
    "8 bits fsdp, in backward": (2, {**EIGHT_BIT, **IN_BACKWARD}),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """name → what its first process left."""
    root = tmp_path_factory.mktemp("compiled")
    torch.manual_seed(0)
    # One shape for all matrices, as each is compiled anew.
    shape = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 32,
    }
    Qwen3ForCausalLM(Qwen3Config(vocab_size=128, num_key_value_heads=4, **shape)).save_pretrained(
        root / "model"
    )
    packed = packed_tensors_from_tokenized_results(
        random_samples(3, prompts=(3, 5, 8, 9, 4)), seq_len=40, pad_id=0
    )
    packed.save(root / "packed.safetensors")
    common = {"lr": 1e-3, "max_grad_norm": 1e9, "rows_per_microbatch": 100}
    files = {"model": str(root / "model"), "packed": str(root / "packed.safetensors")}
    todo = [
        {
            "name": name,
            "processes": n,
            "output_dir": str(root / name),
            "settings": {**common, **more},
            "steps": 2,
            **files,
        }
        for name, (n, more) in JOBS.items()
    ]
    return parallel_worker.finished(root, todo)


def distance(one, other):
    """‖one - other‖ / ‖other‖ over all tensors of a name."""
    assert one.keys() == other.keys()
    square = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    return math.sqrt(square / sum(float(value.double().square().sum()) for value in other.values()))


@pytest.mark.parametrize("name", [name for name in JOBS if name not in ("plain", "8 bits")])
def test_two_processes_take_the_steps_of_one(name, results):
    alone, found = results["8 bits" if "8 bits" in name else "plain"], results[name]
    assert found["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    assert ("in backward" in name) == (not found["gradients"])
    if found["gradients"]:
        assert distance(found["gradients"], alone["gradients"]) < 1e-5
    if (
        "8 bits" in name
        # Parts of matrices have other blocks of 256 numbers that share a scale: other rounding, but
        # no more of it.
    ):
        rounding = distance(alone["weights"], results["plain"]["weights"])
        assert 1e-5 < rounding < 1e-3
        assert distance(found["weights"], results["plain"]["weights"]) < 1.5 * rounding
    else:
        assert distance(found["weights"], alone["weights"]) < 1e-5
