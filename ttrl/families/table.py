"""List the model families: one entry for each model_type.

An entry holds the construction of the layers, their code, and the peculiarities of its files and of
vLLM. Adding a family is an entry here and its line in tools/check_models.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ttrl.families.described import (
    FUSED,
    attends,
    bamba,
    dense,
    ernie_moe,
    falcon_h1_mixer,
    gemma3n,
    gemma4,
    glm4_moe,
    granite_hybrid_half,
    hunyuan_mixture,
    kimi,
    latent,
    lfm2,
    lfm2_mixer,
    lfm2_mixture,
    mamba_or_attention,
    mixture,
    nanochat,
    nemotron_h,
    olmo_hybrid,
    phimoe,
    qwen_hybrid,
    qwen_mixture,
    stablelm,
    stack,
    with_shared,
)
from ttrl.families.layers import Kinds
from ttrl.families.own import (
    GEMMA2,
    GPT2,
    LLAMA,
    NANOCHAT,
    PHI,
    PHI3,
    SOFT_CAPS,
    Names,
    OwnDecoder,
    but_every_sixth,
    every_second,
    the_last_ones,
)
from ttrl.families.values import Values, model_settings


@dataclass(frozen=True)
class Family:
    """An entry of the table."""

    layers: Callable[[Values], Kinds]
    """Describes each layer of a config.json. Raises ModelFolderError for a missing number."""
    own: OwnDecoder | None = None
    """For ttrl's own decoder; None: transformers' class is trained."""
    tied: bool = False
    """Whether the head is the embeddings' matrix if config.json does not say."""
    vllm_adapters: bool = True
    """Whether vLLM serves adapters."""


def _own(names: Names, *, tied: bool = False, vllm_adapters: bool = True, **traits: Any) -> Family:
    """Return the entry of a family of ttrl's own decoder."""
    decoder = OwnDecoder(names, **traits)
    return Family(decoder.layers, decoder, tied, vllm_adapters)


_BIASES: Mapping[str, Any] = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
"""One setting for both."""

FAMILIES: dict[str, Family] = {
    # Dense families of ttrl's own decoder
    "llama": _own(LLAMA, **_BIASES, mlp_bias="mlp_bias"),
    "mistral": _own(LLAMA, windows="every_layer"),
    "ministral": _own(LLAMA, windows="by_layer_types"),
    "qwen2": _own(LLAMA, qkv_bias=True, windows="by_layer_types", slides=the_last_ones),
    "qwen3": _own(
        LLAMA,
        qk_norm=True,
        **_BIASES,
        windows="by_layer_types",
        slides=the_last_ones,
    ),
    "gemma": _own(
        LLAMA,
        tied=True,
        norm="rms_plus_one",
        **_BIASES,
        scaled_embeddings=True,
    ),
    "gemma2": _own(
        GEMMA2,
        tied=True,
        norm="rms_plus_one",
        **_BIASES,
        post_norms=True,
        scaled_embeddings=True,
        query_scale=True,
        soft_caps=SOFT_CAPS,
        slides=every_second,
        tied_head_in_files=False,
        windows="by_layer_types",
    ),
    "gemma3_text": _own(
        GEMMA2,
        tied=True,
        norm="rms_plus_one",
        qk_norm=True,
        **_BIASES,
        post_norms=True,
        scaled_embeddings=True,
        query_scale=True,
        soft_caps=SOFT_CAPS[1:],
        slides=but_every_sixth,
        windows="by_layer_types",
    ),
    "phi3": _own(PHI3, windows="every_layer"),
    "phi": _own(
        PHI,
        norm="layer",
        norm_eps="layer_norm_eps",
        qk_norm="qk_layernorm",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
        gated_mlp=False,
        parallel=True,
    ),
    "gpt2": _own(
        GPT2,
        tied=True,
        vllm_adapters=False,
        norm="layer",
        norm_eps="layer_norm_epsilon",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        learned_positions=True,
        inner_widths=4,
        fixed={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "add_cross_attention": False,
        },
        transposed=("c_attn", "c_proj", "c_fc"),
        prefix="transformer.",
        tied_head_in_files=False,
    ),
    "nanochat": _own(
        NANOCHAT,
        norm="rms_bare",
        qk_norm=True,
        **_BIASES,
        gated_mlp=False,
        embedding_norm=True,
        turns_backwards=True,
        soft_caps=SOFT_CAPS[1:],
    ),
    # Families of transformers' own classes
    "qwen2_moe": Family(stack(attends(bias="qkv_bias", biased=True, output_bias=""), qwen_mixture)),
    "qwen3_moe": Family(stack(attends(query_key_norms="head"), qwen_mixture)),
    "qwen3_next": Family(stack(qwen_hybrid, qwen_mixture, every=4, others="linear_attention")),
    "qwen3_5_text": Family(stack(qwen_hybrid, dense(), every=4, others="linear_attention")),
    "qwen3_5_moe_text": Family(
        stack(qwen_hybrid, qwen_mixture, every=4, others="linear_attention")
    ),
    "gemma3n_text": Family(gemma3n, tied=True),
    "gemma4_text": Family(gemma4, tied=True),
    "ministral3": Family(stack(attends(every_layer=True), dense())),
    "mixtral": Family(stack(attends(every_layer=True), mixture())),
    "phimoe": Family(phimoe),
    "gpt_oss": Family(stack(attends(biased=True, more=1), mixture(bias=True), every=2)),
    "glm4": Family(stack(attends(4, biased=True, output_bias=""), dense(FUSED))),
    "glm4_moe": Family(glm4_moe),
    "deepseek_v2": Family(stack(latent, with_shared(0, 2))),
    "deepseek_v3": Family(stack(latent, with_shared(3))),
    "granite": Family(stack(attends(), dense())),
    "granitemoe": Family(stack(attends(), mixture())),
    "granitemoehybrid": Family(stack(mamba_or_attention, granite_hybrid_half)),
    "lfm2": Family(lfm2, tied=True),
    "lfm2_moe": Family(stack(lfm2_mixer, lfm2_mixture), tied=True),
    "olmo2": Family(stack(attends(query_key_norms="width"), dense())),
    "olmo3": Family(stack(attends(query_key_norms="width"), dense(), every=4)),
    "olmoe": Family(stack(attends(query_key_norms="width"), mixture())),
    "olmo_hybrid": Family(stack(olmo_hybrid, dense(), every=4, others="linear_attention")),
    "smollm3": Family(stack(attends(), dense()), tied=True),
    "falcon_h1": Family(stack(falcon_h1_mixer, dense())),
    "nemotron_h": Family(nemotron_h),
    "bamba": Family(bamba),
    "seed_oss": Family(stack(attends(biased=True, output_bias="attention_out_bias"), dense())),
    "ernie4_5": Family(stack(attends(bias="use_bias"), dense(bias="use_bias")), tied=True),
    "ernie4_5_moe": Family(ernie_moe, tied=True),
    "hunyuan_v1_dense": Family(stack(attends(query_key_norms="head"), dense())),
    "hunyuan_v1_moe": Family(stack(attends(query_key_norms="head"), hunyuan_mixture)),
    "minimax_m2": Family(stack(attends(query_key_norms="width"), mixture())),
    "kimi_linear": Family(kimi),
    "cohere2": Family(stack(attends(1), dense(), every=4), tied=True),
    "exaone4": Family(stack(attends(query_key_norms="head"), dense(), every=4)),
    "stablelm": Family(stablelm),
    "arcee": Family(stack(attends(), dense(("up_proj", "down_proj")))),
    "helium": Family(stack(attends(), dense())),
    "nanochat_2026": Family(nanochat),
}

OWN_DECODERS = {name: family.own for name, family in FAMILIES.items() if family.own is not None}
"""The traits of the families computed by ttrl's own decoder."""
UNKNOWN = _own(
    LLAMA,
    **_BIASES,
    windows="by_layer_types",
)
"""The stand-in for a model_type without an entry: a plain dense decoder."""


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the entry of a config.json's text part, or UNKNOWN."""
    return FAMILIES.get(str(model_settings(config).get("model_type")), UNKNOWN)


@dataclass(frozen=True)
class Composite:
    """A model with more than text: only the text part (a family of its own) is trained; checkpoints
    keep the rest.
    """

    layouts: tuple[Mapping[str, str], ...]
    """Prefixes of the text part's parameters, by the beginning of their plain names, as versions of
    transformers write them.
    """
    frozen: tuple[str, ...]
    """The beginning of all other parameters' names."""


COMPOSITES = {
    "gemma3": Composite(
        layouts=(
            {"model.": "model.language_model.", "lm_head.": "lm_head."},
            {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
        ),
        frozen=(
            "vision_tower.",
            "multi_modal_projector.",
            "model.vision_tower.",
            "model.multi_modal_projector.",
        ),
    ),
}
