"""Switches that compile C++ on the CPU: torch.compile layer by layer, and torchao's 8-bit AdamW."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

TRAINING_TESTS = Path(__file__).parents[1] / "training"
pytestmark = pytest.mark.e2e


def _load(name):
    spec = importlib.util.spec_from_file_location(f"training_{name}", TRAINING_TESTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


helpers, switches, states = _load("conftest"), _load("test_switches"), _load("test_optimizer_state")
model_folder, one_thread, packed = helpers.model_folder, helpers.one_thread, switches.packed


def test_compiled_layers_give_the_same_gradient(model_folder, packed):
    settings = {"row_length_multiple": 40, "activation_checkpointing": True}
    plain = switches.gradients_with(model_folder("qwen3"), packed, **settings)
    compiled = switches.gradients_with(model_folder("qwen3"), packed, compile=True, **settings)
    assert switches.distance(compiled, plain) < 1e-5


def test_moments_of_eight_bits(packed, tmp_path):
    """Close to AdamW; a fp32 state can be continued in 8 bits, and what is saved comes back but for rounding once more."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=97, num_key_value_heads=2, **shape)).save_pretrained(tmp_path / "model")
    policy, optimizer = states.trained(tmp_path / "model", packed, 2)
    eight_policy, eight = states.trained(tmp_path / "model", packed, 2, optimizer="adamw_8bit")
    kinds = {type(state["exp_avg"]).__name__ for state in eight.state.values()}
    assert kinds == {"OptimState8bit", "Tensor"}  # torchao keeps small tensors as they are
    plain, rounded = states.tensors_of(policy, optimizer), states.tensors_of(eight_policy, eight)
    assert all(type(tensor) is torch.Tensor for tensor in rounded.values())
    for moment, tolerance in (("exp_avg", 0.05), ("exp_avg_sq", 0.05)):
        one, other = ({n: t for n, t in s.items() if n.endswith("." + moment)} for s in (rounded, plain))
        assert 0 < switches.distance(one, other) < tolerance
    for state_format in ("whole", "sharded"):
        states.save_state(tmp_path / state_format, eight_policy, eight, 2, states.ALONE, state_format)
        again_policy, again = states.trained(tmp_path / "model", packed, 0, state=tmp_path / state_format, optimizer="adamw_8bit")
        found = states.tensors_of(again_policy, again)
        assert switches.distance(found, rounded) < 0.01
    states.save_state(tmp_path / "fp32", policy, optimizer, 2, states.ALONE)
    further, _ = states.trained(tmp_path / "model", packed, 1, state=tmp_path / "fp32", optimizer="adamw_8bit")
    start, _ = states.trained(tmp_path / "model", packed, 0)
    assert switches.distance(further.full_weights(), start.full_weights()) > 1e-6
