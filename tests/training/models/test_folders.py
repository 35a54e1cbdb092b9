"""Model folders: what is refused and how, and weights in and out."""

import json
import re
import shutil

import check_parity
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import native_layout

from ttrl.errors import ModelFolderError
from ttrl.families.table import OWN_DECODERS
from ttrl.training.models.architecture import architecture, check_same_architecture, read_config
from ttrl.training.models.decoder import build_decoder
from ttrl.training.models.weights import iter_weights, to_hugging_face_names
from ttrl.training.policy.policy import fill_parameters


@pytest.fixture
def changed(model_folder, tmp_path):
    """A copy of a model folder with another config.json."""

    def change(family="qwen2", **settings):
        shutil.copytree(model_folder(family), tmp_path / "changed")
        path = tmp_path / "changed" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
        return path.parent

    return change


@pytest.mark.parametrize(
    ("family", "settings", "problem"),
    [
        ("qwen2", {"hidden_act": "tanh"}, r"the activation 'tanh' \(supported: silu, relu"),
        (
            "qwen2",
            {"layer_types": ["chunked_attention", "full_attention"]},
            "layers of the type 'chunked_attention'",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "proportional", "rope_theta": 5.0}},
            "the RoPE type 'proportional'",
        ),
        ("llama", {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised weights"),
        ("llama", {"num_key_value_heads": 3}, "3 key/value heads for 4 query heads"),
        ("mistral", {"sliding_window": 0}, "a sliding window of 0 positions"),
        (
            "phi3",
            {"layer_types": ["sliding_attention", "full_attention"]},
            r"layer_types \(not for phi3 models\)",
        ),
        ("gemma2", {"use_bidirectional_attention": True}, "attention to later tokens"),
        ("llama", {"is_encoder_decoder": True}, "an encoder in addition to the decoder"),
        (
            "llama",
            {"final_logit_softcapping": 5.0},
            "final_logit_softcapping .neither transformers nor vLLM",
        ),
        (
            "gemma3",
            {"attn_logit_softcapping": 5.0},
            "attn_logit_softcapping .neither transformers nor vLLM",
        ),
        (
            "gemma3",
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 8.0}},
            'a RoPE with a "type" overridden by the rope_type "default"',
        ),
        ("phi", {"tie_word_embeddings": True}, "tied embeddings with a bias in the head"),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            r"scale_attn_by_inverse_layer_idx True \(ttrl and vLLM compute",
        ),
        ("gpt2", {"add_cross_attention": True, "n_layer": 1}, "add_cross_attention True"),
        (
            "nanochat",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 9.0, "factor": 2.0}},
            "a scaled or partial RoPE",
        ),
        ("qwen2", {"model_type": "llama4_text"}, "attention within chunks"),
        (
            "qwen2",
            {"model_type": "t5"},
            "the model type 't5' .neither ttrl nor transformers has a text decoder",
        ),
    ],
)
def test_what_we_do_not_compute_is_refused(family, settings, problem, changed):
    with pytest.raises(ModelFolderError, match=f"ttrl does not support this model: .*{problem}"):
        read_config(changed(family, **settings))


def test_every_problem_is_named_at_once(changed):
    folder = changed(
        "qwen2",
        hidden_act="tanh",
        num_key_value_heads=3,
        quantization_config={"quant_method": "gptq"},
    )
    with pytest.raises(
        ModelFolderError, match=r"quantised weights.*; the activation 'tanh'.*; 3 key/value heads"
    ):
        read_config(folder)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"model_type": "no_such_model"}',
        '{"model_type": "no_such_model", "auto_map": {"AutoConfig": "configuration_x.X"}}',
        '{"model_type": "qwen2", "hidden_size": "x"}',
    ],
)
def test_configs_that_cannot_be_read(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelFolderError, match=r"config\.json cannot be read"):
        read_config(tmp_path)


def test_a_folder_without_config(tmp_path):
    with pytest.raises(ModelFolderError, match=r"has no config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("family", "settings", "field"),
    [
        ("gemma2", {"final_logit_softcapping": 7.0}, "output_soft_cap is 7.0 instead of 30.0"),
        ("gemma2", {"query_pre_attn_scalar": 16}, "attention_scale is None instead of 0.2"),
        ("gemma3", {"sliding_window": 9}, r"windows is \(9, None, 9\) instead of \(5, None, 5\)"),
        ("phi3-longrope", {"max_position_embeddings": 512}, "rope_parameters is "),
        ("llama", {"max_position_embeddings": 512}, None),
    ],
)
def test_the_same_weights_under_another_config(family, settings, field, changed, model_folder):
    own, other = read_config(model_folder(family)), read_config(changed(family, **settings))
    if field is None:
        check_same_architecture(other, own, "FOLDER")
    else:
        with pytest.raises(
            ModelFolderError, match=f"^FOLDER has another architecture than the policy: {field}"
        ):
            check_same_architecture(other, own, "FOLDER")


@pytest.mark.parametrize("family", check_parity.VARIANTS)
def test_weights_go_in_and_out_bit_for_bit(family, model_folder):
    stored = load_file(model_folder(family) / "model.safetensors")
    config = read_config(model_folder(family))
    decoder = build_decoder(config)
    fill_parameters(dict(decoder.named_parameters()), model_folder(family))
    out = to_hugging_face_names(dict(decoder.named_parameters()), config)
    assert ("lm_head.weight" in stored) != config.tie_word_embeddings
    if config.tie_word_embeddings and OWN_DECODERS[config.model_type].tied_head_in_files:
        head = out.pop("lm_head.weight")
        assert torch.equal(head, stored["model.embed_tokens.weight"])
        assert head.data_ptr() != out["model.embed_tokens.weight"].data_ptr()
    assert out.keys() == stored.keys()
    assert all(torch.equal(out[name], tensor) for name, tensor in stored.items())


def test_files_of_gpt2_that_are_older(changed):
    """Without the prefix, with tables of the causal mask and a tied head of its own; what is
    written has the names of today.
    """
    folder = changed("gpt2")
    new = load_file(folder / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in new.items()}
    old |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(
        old | {"lm_head.weight": old["wte.weight"].clone()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    out = to_hugging_face_names(dict(iter_weights(folder)), read_config(folder))
    assert out.keys() == new.keys() and all(
        torch.equal(out[name], tensor) for name, tensor in new.items()
    )


@pytest.mark.parametrize("family", ["qwen2-tied", "gemma2", "gemma3", "gpt2", "nanochat-biased"])
def test_a_head_that_is_not_the_tied_embeddings_is_refused(family, changed):
    folder = changed(family)
    stored = load_file(folder / "model.safetensors")
    (name,) = (n for n in stored if n.endswith(("embed_tokens.weight", "wte.weight")))
    head = "lm_head.weight"
    rewrite(folder, lambda tensors: tensors.update({head: tensors[name].clone()}))
    same = dict(iter_weights(folder))
    assert torch.equal(same["tok_embeddings.weight"], stored[name])
    rewrite(folder, lambda tensors: tensors[head][1].mul_(1.001))
    said = rf"lm_head\.weight in model\.safetensors differs from {re.escape(name)} in model\.safetensors"
    with pytest.raises(ModelFolderError, match=said):
        next(iter_weights(folder))


def test_sharded_files_are_read(model_folder, tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(model_folder("phi3")).save_pretrained(
        tmp_path, max_shard_size="20KB"
    )
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    sharded, whole = dict(iter_weights(tmp_path)), dict(iter_weights(model_folder("phi3")))
    assert sharded.keys() == whole.keys() and all(
        torch.equal(sharded[name], whole[name]) for name in whole
    )


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda t: t.update({"model.layers.0.extra": torch.zeros(1)}),
            "ttrl's decoder has no parameter 'model.layers.0.extra'",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}),
            "model.norm.weight is torch.int8",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.gate_up_proj.weight": torch.zeros(90, 32)}),
            "has 90 rows, but config.json says 96",
        ),
    ],
)
def test_weights_without_a_place(change, problem, changed):
    folder = changed("phi3")
    rewrite(folder, change)
    with pytest.raises(ModelFolderError, match=problem):
        dict(iter_weights(folder))


def test_weights_that_are_missing_or_have_other_shapes(changed):
    folder = changed("qwen2")

    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["lm_head.weight"] = torch.zeros(98, 32)

    rewrite(folder, change)
    with pytest.raises(
        ModelFolderError,
        match=r"missing \['norm.scale'\], .*output.weight \(98, 32\) instead of \(97, 32\)",
    ):
        fill_parameters(dict(build_decoder(read_config(folder)).named_parameters()), folder)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (
            lambda f: (f / "model.safetensors").unlink(),
            "has no model.safetensors; save the model with save_pretrained",
        ),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"nothing"),
            "model.safetensors cannot be read",
        ),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), "index.json is damaged"),
        (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "index.json is damaged"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "b.safetensors"}}'
            ),
            "has no b.safetensors",
        ),
    ],
)
def test_files_that_cannot_be_read(spoil, problem, changed):
    folder = changed("qwen2")
    spoil(folder)
    with pytest.raises(ModelFolderError, match=problem):
        dict(iter_weights(folder))


def test_rope_tables_of_old_files_are_passed_over(changed):
    folder = changed("llama")
    rewrite(
        folder,
        lambda tensors: tensors.update(
            {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
        ),
    )
    assert not [name for name, _ in iter_weights(folder) if "inv_freq" in name]


@pytest.mark.parametrize("native", [False, True])
def test_the_text_part_of_a_model_with_a_vision_tower(native, with_vision_tower, tmp_path):
    from transformers import Gemma3ForConditionalGeneration

    folder = native_layout(with_vision_tower, tmp_path / "native") if native else with_vision_tower
    config = read_config(folder)
    assert architecture(config).windows == (5, 5) and config.tie_word_embeddings
    decoder = build_decoder(config)
    fill_parameters(dict(decoder.named_parameters()), folder)
    tokens = torch.arange(1, 20).unsqueeze(0)
    reference = Gemma3ForConditionalGeneration.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        zeros = torch.zeros_like(tokens)
        plan = check_parity.attention_plan(zeros, zeros, tokens - 1, torch.float32)
        ours = decoder.logits(decoder.hidden_states(tokens, tokens - 1, plan))
        torch.testing.assert_close(ours, reference(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"model_type": "olmo2"}, r"the model type 'olmo2' \(supported: "),
        ({"model_type": "qwen2_moe"}, r"a mixture of experts \("),
    ],
)
def test_what_only_transformers_computes_is_refused_by_our_decoder(settings, problem, changed):
    with pytest.raises(ModelFolderError, match=problem):
        read_config(changed("qwen2", **settings), decoder="torchtune")


def test_a_rope_by_the_longest_row_is_refused_by_transformers_own_class(changed):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ModelFolderError, match=r"the RoPE type 'dynamic' \(transformers computes"):
        read_config(changed("llama", rope_parameters=rope), decoder="transformers")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}),
            "model.norm.weight is torch.int8; ttrl trains from float weights of 16 bits or more",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(9)}),
            r"model.norm.weight is \(9,\), but config.json says \(32,\)",
        ),
    ],
)
def test_weights_that_do_not_fit_transformers_own_class(change, problem, changed):
    folder = changed("qwen2")
    rewrite(folder, change)
    with pytest.raises(ModelFolderError, match=problem):
        dict(iter_weights(folder, "transformers"))
