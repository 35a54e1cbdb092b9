"""Every family against transformers: forward and gradient, one by one and packed with shared
beginnings.
"""

import json
from pathlib import Path

import check_parity
import pytest
import torch

from ttrl.configs import TrainingConfig
from ttrl.training.models.architecture import architecture, read_config
from ttrl.training.models.decoder import build_decoder
from ttrl.training.models.rope import frequencies
from ttrl.training.models.weights import iter_weights
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.policy.loading import load_policy
from ttrl.training.trainer_canary import compute_canary

check_parity = check_parity


@pytest.mark.parametrize("name", check_parity.VARIANTS)
def test_every_family_in_float64(name, model_folder):
    """Only the order of additions may differ."""
    found = check_parity.parity(model_folder(name), torch.float64)
    assert found.largest_logit > 1  # or nothing would be compared
    assert found.logits < 1e-10 and found.logprobs_packed < 1e-10
    assert found.gradient_unpacked < 1e-10 and found.gradient_packed < 1e-10


@pytest.mark.long(but=["gpt2", "phi"])
@pytest.mark.parametrize(
    "name", ["qwen3", "gemma2", "gemma3", "phi3-longrope", "phi", "gpt2", "nanochat"]
)
def test_families_in_fp32(name, model_folder):
    """Long for the other families: only these show their rounding in fp32; float64 proves their
    formulas.
    """
    found = check_parity.parity(model_folder(name), torch.float32)
    assert found.logits < 1e-3 and found.logprobs_packed < 1e-3
    assert found.gradient_unpacked < 1e-4 and found.gradient_packed < 1e-4


ROTARY = [name for name in check_parity.VARIANTS if not name.startswith("gpt2")]


def older_spelling(config: dict) -> dict:
    """config.json as transformers 4 wrote it."""
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    older = "rope_type" if config["model_type"] == "gemma3_text" else "type"
    config["rope_scaling"] = None if kind == "default" else {older: kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    return config


@pytest.mark.parametrize("name", ROTARY)
def test_both_spellings_of_a_config_are_read_alike(name, model_folder, tmp_path):
    new = read_config(model_folder(name))
    content = older_spelling(json.loads((model_folder(name) / "config.json").read_text()))
    assert "rope_parameters" not in content
    (tmp_path / "config.json").write_text(json.dumps(content))
    old = read_config(tmp_path)
    assert architecture(old) == architecture(new)
    for kind in set(architecture(new).rope_kinds):
        for context in (3, 1000):
            (one, factor), (other, other_factor) = (
                frequencies(config, kind, context) for config in (old, new)
            )
            assert torch.equal(one, other) and factor == other_factor


def test_the_first_name_of_longrope(model_folder, tmp_path):
    """The first Phi-3 folders call it "su"."""
    content = older_spelling(
        json.loads((model_folder("phi3-longrope") / "config.json").read_text())
    )
    content["rope_scaling"]["type"] = "su"
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert architecture(read_config(tmp_path)) == architecture(
        read_config(model_folder("phi3-longrope"))
    )


@pytest.mark.parametrize(
    ("name", "context", "reference_length"), [("phi3-longrope", 4, 4), ("phi3-longrope", None, 5)]
)
def test_the_context_decides_between_short_and_long_factors(
    name, context, reference_length, model_folder
):
    """transformers decides by the batch; a batch of the length that we were told must give the
    same.
    """
    folder = model_folder(name)
    config = read_config(folder)
    reference = check_parity.reference_model(folder, torch.float32).model.rotary_emb
    positions = torch.arange(reference_length).unsqueeze(0)
    cos, sin = reference(torch.zeros(1), positions)
    ours = build_decoder(config, context).rope(positions, torch.float32)["every_layer"]
    cos, sin = (table.chunk(2, dim=-1)[0] for table in (cos, sin))  # both halves are the same
    assert torch.equal(ours[0][:, :, 0], cos) and torch.equal(ours[1][:, :, 0], sin)
    other = build_decoder(config, None if context else 4).rope(positions, torch.float32)[
        "every_layer"
    ]
    assert not torch.allclose(other[0][:, :, 0], cos)


def test_the_recipes_context_reaches_the_rope(model_folder):
    settings = {"model": str(model_folder("phi3-longrope")), "output_dir": "", "device": "cpu"}
    positions = torch.arange(4).unsqueeze(0)
    for context in (4, None):
        policy = load_policy(
            TrainingConfig(**settings, context=context), Ranks(0, 1, torch.device("cpu"))
        )
        expected = build_decoder(policy.decoder.config, context).rope(positions, torch.float32)[
            "every_layer"
        ]
        ours = policy.decoder.rope(positions, torch.float32)["every_layer"]
        assert (
            torch.equal(ours[0], expected[0])
            and compute_canary(policy, torch.device("cpu"), Path(settings["model"])).context
            == context
        )


def test_dynamic_rope_is_that_of_the_models_context_whatever_the_servers(model_folder):
    """As in vLLM (DynamicNTKScalingRotaryEmbedding), whose base is that of
    max_position_embeddings.
    """
    folder = model_folder("llama-dynamic")
    reference = check_parity.reference_model(folder, torch.float32).model.rotary_emb
    positions = torch.arange(256).unsqueeze(0)  # what the model was made for
    cos, _ = reference(torch.zeros(1), positions)
    for context in (100, None, 400):
        ours = build_decoder(read_config(folder), context).rope(positions, torch.float32)[
            "every_layer"
        ]
        torch.testing.assert_close(ours[0][:, :, 0], cos.chunk(2, dim=-1)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["qwen2-yarn", "gemma3", "phi3-longrope", "phi", "nanochat", "gpt2"]
)
def test_a_decoder_built_on_the_meta_device_computes_the_same(name, model_folder):
    config, weights = read_config(model_folder(name)), dict(iter_weights(model_folder(name)))
    plain = build_decoder(config)
    with torch.device("meta"):
        empty = build_decoder(config)
    assert (
        {p.device.type for p in empty.parameters()}
        == {"meta"}
        >= {p.device.type for p in empty.buffers()}
    )
    assert {n: p.shape for n, p in empty.named_parameters()} == {
        n: t.shape for n, t in weights.items()
    }
    empty.load_state_dict(weights, assign=True)
    empty.materialise_buffers("cpu")
    moved = plain.to(torch.bfloat16)
    for (label, one), (_, other) in zip(empty.named_buffers(), moved.named_buffers(), strict=True):
        assert one.dtype == torch.float32 and torch.equal(one, other), label
    with torch.device("meta"):
        emptied = build_decoder(config).to_empty(device="cpu")
    assert all(
        torch.equal(one, other)
        for one, other in zip(emptied.buffers(), moved.buffers(), strict=True)
    )


def test_embeddings_are_scaled_in_the_dtype_of_the_computation(model_folder):
    """√32 is 5.6569; the original, transformers and vLLM multiply by its bf16 value, 5.65625, when
    they compute in bf16.
    """
    decoder = build_decoder(read_config(model_folder("gemma")))
    decoder.layers, decoder.norm = torch.nn.ModuleList(), torch.nn.Identity()
    tokens = torch.arange(1, 5).unsqueeze(0)
    embedded = decoder.tok_embeddings(tokens)
    torch.testing.assert_close(decoder.hidden_states(tokens, tokens, None), embedded * 32**0.5)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(decoder.hidden_states(tokens, tokens, None), embedded * 5.65625)
