"""Counts of mixtures of experts and hybrids, against transformers' own classes of every model that
ttrl checks.
"""

import json
import sys

import check_cuda_memory
import check_models
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from ttrl.configs import GRPOConfig
from ttrl.costs.activations import Computation, layer_bytes
from ttrl.costs.flops import forward_flops, forward_only_flops, pass_flops, recomputed_flops
from ttrl.costs.memory import Workload, training_memory
from ttrl.costs.parameters import adapted_shapes, adapter_parameters, decoder_parameters, is_known
from ttrl.costs.server_memory import Serving, server_memory, state_cache_bytes, token_cache_bytes
from ttrl.families.table import OWN_DECODERS
from ttrl.training.models.layouts import layout_of_class
from ttrl.training.models.transformers_decoder import TransformersDecoder
from ttrl.training.policy.lora import apply_lora, is_adapter
from ttrl.training.policy.policy import Policy

NOT_TRAINED = {"llama4", "jamba"}
"""Models that `read_config` refuses."""
MODELS = [name for name in check_models.MODELS if name not in NOT_TRAINED]


def tiny_config(name, **changes):
    """Return the config that check_models writes for a model, without a tokenizer."""
    model = check_models.MODELS[name]
    settings = {
        **model.sizes,
        "vocab_size": 512,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    settings |= {**model.settings, **changes}
    if name.startswith(("gemma3n", "gemma4")):
        settings["vocab_size_per_layer_input"] = 512
    return check_models.config_class(model)(**settings)


def built(config):
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def numbers(module):
    return sum(parameter.numel() for parameter in module.parameters())


VARIANTS = {
    "qwen3_moe": [{"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}, {"attention_bias": True}],
    "qwen3_next": [{"num_hidden_layers": 5, "layer_types": None, "attention_bias": True}],
    "deepseek_v3": [{"q_lora_rank": None}, {"attention_bias": True, "n_shared_experts": 3}],
    "deepseek_v2": [{"first_k_dense_replace": 0}],
    "glm4_moe": [{"use_qk_norm": True, "attention_bias": True}],
    "gpt_oss": [{"num_hidden_layers": 4, "layer_types": None}],
    "gemma3n": [
        {"num_hidden_layers": 7, "layer_types": None, "num_kv_shared_layers": 2}
        | {"intermediate_size": [128] * 6 + [64], "activation_sparsity_pattern": [0.0] * 7},
    ],
    "gemma4": [
        {
            "num_hidden_layers": 6,
            "layer_types": None,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
        {
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ],
    "nemotron_h": [
        {
            "layers_block_type": ["mamba", "moe", "attention"],
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
        },
        {
            "layers_block_type": ["moe"] * 3,
            "moe_intermediate_size": 32,
            "moe_latent_size": 24,
            "mlp_bias": True,
            "use_bias": True,
        },
    ],
    "falcon_h1": [{"mamba_rms_norm": True, "mamba_proj_bias": True, "projectors_bias": True}],
    "stablelm": [{"qk_layernorm": True, "use_qkv_bias": True}, {"use_parallel_residual": True}],
    "phimoe": [{"lm_head_bias": True, "attention_bias": True}],
    "ernie4_5_moe": [
        {"use_bias": True},
        {"num_hidden_layers": 6, "moe_layer_interval": 2, "moe_layer_end_index": 3},
    ],
    "lfm2": [{"conv_bias": True, "block_auto_adjust_ff_dim": False}],
    "seed_oss": [{"attention_out_bias": True, "mlp_bias": True}],
    "olmo_hybrid": [{"num_hidden_layers": 5, "layer_types": None}],
    "cohere2": [{"attention_bias": True, "num_hidden_layers": 5, "layer_types": None}],
}
CASES = [(name, {}) for name in MODELS] + [
    (name, one) for name, several in VARIANTS.items() for one in several
]


@pytest.mark.parametrize(
    ("name", "changes"), CASES, ids=[f"{name}{number}" for number, (name, _) in enumerate(CASES)]
)
def test_parameters_are_those_of_the_class(name, changes):
    config = tiny_config(name, **changes)
    counted = decoder_parameters(json.loads(config.to_json_string()))
    assert counted.total == numbers(built(config))
    assert 0 < counted.active <= counted.total
    assert is_known(config.to_dict())


@pytest.mark.parametrize("name", ["lfm2", "smollm3", "seed_oss", "qwen3_moe"])
def test_checkpoints_hold_what_is_counted(name):
    _, stored = layout_of_class(tiny_config(name))
    assert decoder_parameters(tiny_config(name).to_dict()).stored == sum(
        one.numel() for one in stored.values()
    )


DESCRIBED = [name for name in MODELS if tiny_config(name).model_type not in OWN_DECODERS]


# Published sizes, in billions: in all, and active for a token


_QWEN_HYBRID = {
    **{
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "full_attention_interval": 4,
    },
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
}
PUBLISHED = {
    "Qwen3-30B-A3B": (
        30.5,
        3.35,
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "head_dim": 128,
        }
        | {
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        }
        | {"intermediate_size": 6144, "vocab_size": 151_936},
    ),
    "gpt-oss-20b": (
        20.9,
        4.19,
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "head_dim": 64,
        }
        | {
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "intermediate_size": 2880,
        }
        | {"vocab_size": 201_088, "sliding_window": 128},
    ),
    "Qwen3-Next-80B-A3B": (
        79.7,
        3.87,
        {
            "model_type": "qwen3_next",
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            **_QWEN_HYBRID,
        }
        | {
            "num_key_value_heads": 2,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
        }
        | {
            "shared_expert_intermediate_size": 512,
            "intermediate_size": 5120,
            "vocab_size": 151_936,
        },
    ),
    "DeepSeek-V3": (
        671.0,
        37.6,
        {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
        }
        | {
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
        }
        | {
            "intermediate_size": 18_432,
            "first_k_dense_replace": 3,
            "q_lora_rank": 1536,
            "vocab_size": 129_280,
        },
    ),
    "Qwen3.5-9B": (
        8.95,
        8.95,
        {
            "model_type": "qwen3_5_text",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            **_QWEN_HYBRID,
        }
        | {"num_key_value_heads": 4, "intermediate_size": 12_288, "vocab_size": 248_320},
    ),
    "Qwen3.5-27B": (
        26.9,
        26.9,
        {
            "model_type": "qwen3_5_text",
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            **_QWEN_HYBRID,
        }
        | {
            "num_key_value_heads": 4,
            "intermediate_size": 17_408,
            "vocab_size": 248_320,
            "linear_num_value_heads": 48,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_sizes(name):
    total, active, config = PUBLISHED[name]
    counted = decoder_parameters(config)
    assert (counted.total / 1e9, counted.active / 1e9) == (
        pytest.approx(total, rel=2e-3),
        pytest.approx(active, rel=2e-3),
    )


def test_openai_counts_active_parameters_without_embeddings():
    counted = decoder_parameters(PUBLISHED["gpt-oss-20b"][2])
    assert (counted.active - counted.vocabulary_matrix) / 1e9 == pytest.approx(3.61, rel=1e-3)


def test_active_parameters_by_hand():
    def idle(name):
        counted = decoder_parameters(tiny_config(name).to_dict())
        return counted.total - counted.active

    # Layers, experts that a token does not pass, matrices.
    assert idle("qwen3_moe") == 2 * 2 * 3 * 64 * 32
    assert idle("deepseek_v3") == 1 * 2 * 3 * 64 * 32  # the first layer is dense
    assert idle("gpt_oss") == 2 * 2 * (3 * 64 * 64 + 2 * 64 + 64)  # with the experts' biases
    assert idle("qwen3_5") == idle("granite_hybrid") == 0


# Adapters


@pytest.mark.parametrize(
    "settings",
    [{"lora_rank": 4}, {"lora_rank": 3, "lora_kind": "dora", "lora_targets": ["k_proj", "w2"]}],
)
@pytest.mark.parametrize("name", DESCRIBED)
def test_adapters_are_those_of_the_class(name, settings):
    config, how = tiny_config(name), {"model": "m", "packed": "p", "output_dir": "o", **settings}
    with torch.device("meta"):
        decoder = TransformersDecoder(config)
        apply_lora(decoder, GRPOConfig(**how))
    made = sum(one.numel() for name, one in decoder.named_parameters() if is_adapter(name))
    counted = decoder_parameters(config.to_dict())
    assert adapter_parameters(counted, GRPOConfig(**how)) == made
    assert not adapted_shapes(
        counted, GRPOConfig(**(how | {"lora_rank": None, "lora_kind": "lora"}))
    )


# FLOPs


def delta_rule_by_token(query, key, value, g, beta, *others, **named):
    """The recurrence as matrix products, which PyTorch counts."""
    state = query.new_zeros(*query[:, 0].shape, value.shape[-1])
    out = []
    for t in range(query.shape[1]):
        decay = g[:, t].exp()
        state = state * (decay[..., None, None] if decay.ndim == 2 else decay[..., None])
        seen = key[:, t].unsqueeze(-2) @ state
        error = beta[:, t, :, None, None] * (value[:, t].unsqueeze(-2) - seen)
        state = state + key[:, t].unsqueeze(-1) @ error
        out.append(query[:, t].unsqueeze(-2) @ state)
    return torch.cat(out, -2).transpose(1, 2), None


def mamba_by_token(hidden_states, dt, A, B, C, *others, **named):
    batch, length, heads, width = hidden_states.shape
    B, C = (one.repeat_interleave(heads // one.shape[2], 2) for one in (B, C))
    state = hidden_states.new_zeros(batch, heads, B.shape[-1], width)
    out = []
    for t in range(length):
        state = state + B[:, t].unsqueeze(-1) @ hidden_states[:, t].unsqueeze(-2)
        out.append(C[:, t].unsqueeze(-2) @ state)
    return torch.stack(out, 1)[..., 0, :]


BY_TOKEN = {
    "torch_chunk_gated_delta_rule": delta_rule_by_token,
    "chunk_kimi_delta_attention": delta_rule_by_token,
    "mamba2_chunk_scan": mamba_by_token,
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_flops_are_those_that_pytorch_counts(name, monkeypatch):
    """Attention over all pairs and each expert's tokens, as plain products; recurrences token by
    token. Convolutions compute a few positions more than there are tokens, and Gemma 3n has
    products with its four streams, 2% of a tiny one.
    """
    T, config = 70, tiny_config(name)
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(config, **how).eval()
    for function, ours in BY_TOKEN.items():
        if hasattr(sys.modules[type(model).__module__], function):
            monkeypatch.setattr(sys.modules[type(model).__module__], function, ours)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(T).unsqueeze(0), use_cache=False)
    shape = decoder_parameters(config.to_dict()).shape
    counted = forward_flops(shape, T, dict.fromkeys(shape.layers_by_window, T * T), T)
    exact = name != "gemma3n" and not any(layer.state for layer in shape.kinds)
    assert counted.total == pytest.approx(counter.get_total_flops(), rel=0 if exact else 0.02)
    assert (counted.attention > 0) == any(layer.pair for layer in shape.kinds)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "granite_hybrid", "qwen3_5_moe"])
def test_with_adapters_frozen_matrices_cost_two_products(name):
    """The numbers of a training step, from those of a forward pass."""
    decoder = decoder_parameters(tiny_config(name).to_dict())
    given = {"model": "m", "packed": "p", "output_dir": "o"}
    whole, adapted = GRPOConfig(**given), GRPOConfig(**given, lora_rank=4)
    work = (10, dict.fromkeys(decoder.shape.layers_by_window, 55), 6)
    forward = forward_flops(decoder.shape, *work)
    assert pass_flops(decoder, whole, *work) == forward * 3
    found, extra = pass_flops(decoder, adapted, *work), forward_only_flops(decoder, adapted, *work)
    adapters = 2 * 10 * adapter_parameters(decoder, adapted)
    scans = 2 * 10 * sum(layer.scan for layer in decoder.shape.kinds)
    assert extra.layers == forward.layers + adapters
    assert found.layers == 2 * (forward.layers - scans) + 3 * scans + 3 * adapters
    assert (found.attention, found.head) == (3 * forward.attention, 2 * forward.head)
    checkpointed = GRPOConfig(**given, activation_checkpointing=True)
    assert (
        recomputed_flops(decoder, checkpointed, *work, fused_attention=False).total
        == forward.layers + forward.attention
    )


# Memory


def saved_per_token(config, length):
    """Bytes that autograd really keeps of each layer, besides its parameters."""
    torch.manual_seed(0)
    policy = Policy(TransformersDecoder(config), num_output_chunks=1, compute_dtype=torch.float32)
    weights = {one.untyped_storage().data_ptr() for one in policy.parameters()}
    kept = []

    def watch(layer):
        inner, found = layer.forward, {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                found[storage.data_ptr()] = storage  # held, so that no address comes again
            return tensor

        def forward(*given, **named):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                return inner(*given, **named)

        layer.forward = forward
        kept.append(found)

    for layer in policy.decoder.layers:
        watch(layer)
    tokens, positions = torch.arange(2, length + 2).unsqueeze(0), torch.arange(length).unsqueeze(0)
    policy(tokens, tokens, torch.zeros_like(tokens), torch.zeros_like(tokens), positions)
    return [sum(storage.nbytes() for storage in found.values()) / length for found in kept]


WIDER = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
KEPT = {
    "qwen3_moe": [{}, WIDER | {"num_experts_per_tok": 3}],
    "qwen3_5": [{}, WIDER | {"linear_num_value_heads": 4, "linear_num_key_heads": 2}],
    "deepseek_v3": [{}, WIDER | {"num_key_value_heads": 4}],
    "granite_hybrid": [{}, WIDER | {"mamba_n_heads": 8, "mamba_chunk_size": 128}],
    "kimi_linear": [{}, WIDER | {"linear_num_heads": 4, "num_key_value_heads": 4}],
    "gpt_oss": [{}, WIDER],
    "lfm2": [{}],
}


@pytest.mark.parametrize(
    ("name", "changes"), [(name, one) for name, several in KEPT.items() for one in several]
)
def test_activations_are_what_autograd_keeps(name, changes):
    """Each layer, and all together, which the errors of single parts leave nearer."""
    config = tiny_config(name, **changes)
    real = saved_per_token(config, 256)
    counted = [one.kept for one in layer_bytes(decoder_parameters(config.to_dict()), Computation())]
    assert counted == pytest.approx(real, rel=0.2)


FOUR_LAYERS = WIDER | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
HELD = {
    "qwen3_moe": {"moe_intermediate_size": 128, "num_experts": 8},
    "qwen3_5": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_value_heads": 4,
    },
    "deepseek_v3": {"num_key_value_heads": 4, "moe_intermediate_size": 128, "n_routed_experts": 8},
    "granite_hybrid": {"layer_types": ["mamba"] * 3 + ["attention"], "mamba_n_heads": 16},
    "smollm3": {},
}


@pytest.mark.long(but=["smollm3"])
@pytest.mark.parametrize("name", HELD)
def test_gradients_on_the_cpu_hold_what_is_estimated(name):
    """All storages that live at the same time while two microbatches are computed.

    Long for mixtures and hybrids: only these add up all their layers. Each layer alone: the test
    above.
    """
    config, length = tiny_config(name, **(FOUR_LAYERS | HELD[name])), 512
    policy = Policy(TransformersDecoder(config), compute_dtype=torch.float32)
    tokens, positions = (
        torch.arange(length).unsqueeze(0) % 500 + 2,
        torch.arange(length).unsqueeze(0),
    )
    one_group, storages = torch.zeros_like(tokens), check_cuda_memory.Storages()
    with storages:
        storages.count(*policy.parameters())
        for _ in range(2):
            policy(tokens, tokens, one_group, one_group, positions).logprobs.sum().backward()
    settings = GRPOConfig(
        model="m", packed="p", output_dir="o", activation_checkpointing=False, rows_per_microbatch=1
    )
    parts = training_memory(config.to_dict(), settings, Workload(length, continued=False)).moments[
        "gradient"
    ]
    others = parts["rows"] + parts["runtime"]
    assert sum(parts.values()) - others == pytest.approx(storages.peak, rel=0.1)


def test_training_holds_all_experts_and_computes_some():
    config = PUBLISHED["Qwen3-30B-A3B"][2]
    settings = GRPOConfig(model="m", packed="p", output_dir="o", dtype="bf16")
    parts = training_memory(config, settings, Workload(4096), device="cuda").moments["gradient"]
    decoder = decoder_parameters(config)
    assert parts["parameters"] == parts["gradients"] == 4 * decoder.total
    assert parts["optimizer state"] == 8 * decoder.total
    whole = {**config, "num_experts_per_tok": 128}
    all_chosen = training_memory(whole, settings, Workload(4096), device="cuda").moments["gradient"]
    assert all_chosen["activations"] > 4 * parts["activations"]
    assert all_chosen["parameters"] == parts["parameters"]


def test_a_server_caches_what_attends():
    serving = Serving()
    hybrid = PUBLISHED["Qwen3.5-9B"][2]
    # Layers that attend, keys and values, heads, width.
    assert token_cache_bytes(hybrid, serving) == 8 * 2 * 4 * 256 * 2
    # Of a layer: the rule's, and its convolution's last three tokens.
    state = 32 * 128 * 128 + (2 * 16 + 32) * 128 * 3
    assert state_cache_bytes(hybrid, serving) == 24 * state * 4
    assert server_memory(hybrid, serving)["states"] == 256 * 24 * state * 4
    latent = PUBLISHED["DeepSeek-V3"][2]
    assert (
        token_cache_bytes(latent, serving)
        == token_cache_bytes(latent, Serving(tensor_parallel=8))
        == 61 * (512 + 64) * 2
    )
    mixture = PUBLISHED["Qwen3-30B-A3B"][2]
    assert token_cache_bytes(mixture, serving) == 48 * 2 * 4 * 128 * 2
    assert state_cache_bytes(mixture, serving) == 0
    assert "states" not in server_memory(mixture, serving)
