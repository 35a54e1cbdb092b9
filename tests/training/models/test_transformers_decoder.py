"""Transformers' own classes on packed rows: the rows of tools/check_models.py."""

import json

import check_models
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ttrl.configs.recipe import TrainingConfig
from ttrl.errors import ConfigError, ModelFolderError
from ttrl.training.checkpoints import save_checkpoint
from ttrl.training.models.architecture import read_config, uses_transformers
from ttrl.training.models.weights import iter_weights
from ttrl.training.policy.policy import fill_parameters

REFUSED = ("llama4", "jamba")
SHOWN = {
    "qwen3_5": "a gated delta rule between attention layers",
    "granite_hybrid_moe": "Mamba 2 and experts",
    "nemotron_h": "Mamba 2 whose time has a lower limit",
    "gpt_oss": "sinks, windows and experts with biases",
    "deepseek_v3": "latent attention, a router with a buffer in its checkpoint",
    "kimi_linear": "KDA",
    "lfm2": "short convolutions",
    "gemma4": "embeddings of each layer, scaled",
    "cohere2": "scaled logits, layers in parallel",
    "gpt2": "another base model's names",
}
OTHERS = [name for name in check_models.MODELS if name not in (*SHOWN, *REFUSED)]


@pytest.mark.parametrize(
    "name", [*SHOWN, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]
)
def test_packed_rows_are_samples_one_by_one(name, folder_of, one_thread):
    """Long for classes that have no kind of layer of their own: only this proves their packed rows.
    One class of each kind of layer stays.
    """
    limit = 1e-9 if name == "gemma3n" else check_models.LIMIT  # whose tiny gradients nearly cancel
    assert check_models.check_packed(folder_of(name)) <= limit


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "deepseek_v3", "gpt_oss", "granite_hybrid"])
def test_a_checkpoint_is_the_folder_that_it_was_loaded_from(name, folder_of, tmp_path, one_thread):
    assert check_models.check_files(folder_of(name), tmp_path / "checkpoint") > 20


def test_a_model_with_towers_keeps_them_and_the_tied_head_follows_the_embeddings(
    tmp_path, one_thread
):
    """The text part lies under a prefix of its own; another part has embeddings, too."""
    folder = check_models.write_model("qwen3_5", tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    head = tensors.pop("lm_head.weight")
    stored = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in tensors.items()
    }
    stored["lm_head.weight"] = stored["model.language_model.embed_tokens.weight"].clone()
    stored |= {
        "model.audio.embed_tokens.weight": torch.ones(2, 2),
        "model.visual.proj.weight": torch.ones(3),
    }
    assert head.shape == stored["lm_head.weight"].shape
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    outer = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(
        json.dumps({**outer, "text_config": values, "vocab_size": values["vocab_size"]})
    )
    policy = check_models.loaded(folder)
    with torch.no_grad():
        policy.decoder.tok_embeddings.weight += 1.0
    save_checkpoint(tmp_path / "out", policy, folder, check_models.HERE)
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == stored.keys()
    moved = stored["model.language_model.embed_tokens.weight"] + 1.0
    for name, tensor in stored.items():
        is_embedding = name in ("lm_head.weight", "model.language_model.embed_tokens.weight")
        assert torch.equal(after[name], moved if is_embedding else tensor), name


@pytest.mark.parametrize("name", ["qwen3_5", "deepseek_v3", "phi3"])
def test_adapters_are_merged_into_what_transformers_computes(name, folder_of, tmp_path, one_thread):
    assert check_models.check_adapters(folder_of(name), tmp_path / "merged") < 1e-5


@pytest.mark.parametrize("name", ["qwen3_5", "granite_hybrid_moe"])
def test_a_frozen_base_in_16_bits_is_computed_in_32(name, folder_of, tmp_path, one_thread):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    samples = check_models.samples(model.config.vocab_size)
    held = [
        check_models.loaded(tmp_path, lora_rank=2, lora_base_dtype=dtype)
        for dtype in ("auto", "fp32")
    ]
    narrow, wide = (sum(p.nbytes for p in policy.parameters()) for policy in held)
    assert narrow < 0.9 * wide
    found, wanted = (check_models.packed(policy, samples).logprobs for policy in held)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.long(but=["nothing-gpt_oss", "products-gpt_oss"])
@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
@pytest.mark.parametrize("keeps", ["nothing", "products"])
def test_layers_that_are_computed_again_see_the_rows_of_their_pass(
    name, keeps, folder_of, one_thread
):
    """Another pass between a forward pass and its backward pass must not lend it its rows.

    Long for Qwen 3.5: only that computes a scan again.
    """
    policies = [check_models.loaded(folder_of(name))]
    policies.append(
        check_models.loaded(folder_of(name), activation_checkpointing=True, checkpoint_keeps=keeps)
    )
    vocabulary = policies[0].decoder.config.vocab_size
    rows, others = (
        check_models.packed_rows(check_models.samples(vocabulary, seed)) for seed in (0, 1)
    )
    gradients = []
    for policy, between in zip(policies, (False, True), strict=True):
        out = policy(*rows).logprobs
        if between:
            policy(*others)
        out.sum().backward()
        named = policy.decoder.named_parameters()
        gradients.append(
            {
                name.replace("_checkpoint_wrapped_module.", ""): p.grad
                for name, p in named
                if p.grad is not None
            }
        )
    plain, again = gradients
    assert plain.keys() == again.keys()
    assert all(torch.equal(again[name], gradient) for name, gradient in plain.items())


def test_the_family_that_is_known_keeps_its_own_decoder(folder_of):
    folder = folder_of("qwen2")
    assert not uses_transformers(read_config(folder))
    assert uses_transformers(read_config(folder, "transformers"))
    assert uses_transformers(read_config(folder_of("olmo3")))


@pytest.mark.parametrize(("name", "why"), [("llama4", "chunk"), ("jamba", "Mamba 1")])
def test_what_has_no_function_for_packed_rows_is_refused_by_name(name, why, folder_of):
    with pytest.raises(ModelFolderError, match=why):
        read_config(folder_of(name))


def test_a_model_type_that_nobody_knows_is_named(tmp_path, folder_of):
    config = transformers.T5Config().to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelFolderError,
        match=r"'t5' .neither ttrl nor transformers has a text decoder",
    ):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("settings", "what"),
    [({"tensor_parallel": 2}, "tensor_parallel is 2"), ({"compile": True}, "compile is true")],
)
def test_settings_that_only_the_other_decoder_has_are_refused(settings, what, folder_of):
    with pytest.raises(ConfigError, match=what):
        check_models.loaded(folder_of("olmo3"), **settings)


def test_a_tensor_that_is_missing_or_has_no_place_is_named(tmp_path, folder_of):
    folder = check_models.write_model("qwen3_moe", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    taken = tensors.pop("model.layers.0.mlp.experts.2.up_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFolderError, match=r"missing \['layers.0.mlp.experts.gate_up_proj'\]"):
        fill_parameters(
            dict(check_models.loaded(folder_of("qwen3_moe")).decoder.named_parameters()), folder
        )
    tensors["model.layers.0.mlp.experts.2.up_proj.weight"] = taken
    tensors["model.layers.0.mlp.experts.4.up_proj.weight"] = taken.clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ModelFolderError, match=r"its model class has no parameter '.*experts\.4\.up_proj\.weight'"
    ):
        dict(iter_weights(folder))
    del tensors["model.layers.0.mlp.experts.4.up_proj.weight"]
    tensors["model.layers.0.mlp.experts.2.up_proj.weight"] = taken[:4].clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFolderError, match=r"config\.json says"):
        dict(iter_weights(folder))


def test_another_configuration_is_another_architecture(tmp_path, folder_of):
    policy = check_models.loaded(folder_of("olmo3"))
    folder = check_models.write_model("olmo3", tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "sliding_window": 7}))
    with pytest.raises(ModelFolderError, match="sliding_window is 7 instead of 5"):
        policy.load_folder(folder)


def test_the_setting_is_one_of_three():
    with pytest.raises(ConfigError, match="decoder"):
        TrainingConfig.parse({"model": "m", "output_dir": "o", "decoder": "vllm"}, "test")
