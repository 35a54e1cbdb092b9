"""Switches that compile C++ on the CPU: torch.compile layer by layer, and torchao's 8-bit AdamW."""

import functools

import pytest
import torch
from support.training_steps import ALONE, distance, gradients_with, packed_rows, tensors_of, trained
from transformers import Qwen2Config, Qwen2ForCausalLM

from ttrl.training.optimizer.state import save_state

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def packed():
    return packed_rows()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_layers_give_the_same_gradient(model_folder, packed, backend, monkeypatch):
    """Long for inductor, as C++ is compiled: only this runs what it makes of layers. The graphs are
    those that PyTorch's own operations run.
    """
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        functools.partialmethod(torch.nn.Module.compile, backend=backend),
    )
    settings = {"row_length_multiple": 40, "activation_checkpointing": True}
    plain = gradients_with(model_folder("qwen3"), packed, **settings)
    compiled = gradients_with(model_folder("qwen3"), packed, compile=True, **settings)
    assert distance(compiled, plain) < 1e-5


@pytest.mark.long
def test_moments_of_eight_bits(packed, tmp_path):
    """Close to AdamW; a fp32 state can be continued in 8 bits, and what is saved comes back.

    Long, as C++ is compiled: only this takes torchao's steps. Their state:
    tests/training/optimizer/test_state.py.
    """
    torch.manual_seed(0)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    Qwen2ForCausalLM(Qwen2Config(vocab_size=97, num_key_value_heads=2, **shape)).save_pretrained(
        tmp_path / "model"
    )
    policy, optimizer = trained(tmp_path / "model", packed, 2)
    eight_policy, eight = trained(tmp_path / "model", packed, 2, optimizer="adamw_8bit")
    kinds = {type(state["exp_avg"]).__name__ for state in eight.state.values()}
    assert kinds == {"OptimState8bit", "Tensor"}  # torchao keeps small tensors as they are
    plain, rounded = tensors_of(policy, optimizer), tensors_of(eight_policy, eight)
    assert all(type(tensor) is torch.Tensor for tensor in rounded.values())
    for moment, tolerance in (("exp_avg", 0.05), ("exp_avg_sq", 0.05)):
        one, other = (
            {n: t for n, t in s.items() if n.endswith("." + moment)} for s in (rounded, plain)
        )
        assert 0 < distance(one, other) < tolerance
    for state_format in ("whole", "sharded"):
        save_state(tmp_path / state_format, eight_policy, eight, 2, ALONE, state_format)
        again_policy, again = trained(
            tmp_path / "model", packed, 0, state=tmp_path / state_format, optimizer="adamw_8bit"
        )
        found = tensors_of(again_policy, again)
        assert all(torch.equal(found[name], rounded[name]) for name in rounded)
    save_state(tmp_path / "fp32", policy, optimizer, 2, ALONE)
    further, _ = trained(
        tmp_path / "model", packed, 1, state=tmp_path / "fp32", optimizer="adamw_8bit"
    )
    start, _ = trained(tmp_path / "model", packed, 0)
    assert distance(further.full_weights(), start.full_weights()) > 1e-6
