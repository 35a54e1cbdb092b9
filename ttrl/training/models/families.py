"""What a model_type means beyond the numbers in its config.json: one row of FAMILIES for each.

Parameters go by two names: theirs (Hugging Face) and ours (torchtune's, so that its tools find
them). "{}" stands for the layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")

Chosen = Literal["auto", "torchtune", "transformers"]
"""Whose code computes a model: ours, transformers' own class, or ours where it knows the family."""
Names = Mapping[str, str | tuple[str, ...]]


def _names(*, gated: bool = True) -> dict[str, str | tuple[str, ...]]:
    """Return the names that nearly all families share: embeddings, head, q/k/v and, if gated,
    feed-forward layers.
    """
    attention = {
        f"model.layers.{{}}.self_attn.{part}_proj.{kind}": f"layers.{{}}.attn.{part}_proj.{kind}"
        for part in "qkv"
        for kind in ("weight", "bias")
    }
    feed_forward = {
        f"model.layers.{{}}.mlp.{theirs}_proj.{kind}": f"layers.{{}}.mlp.{ours}.{kind}"
        for theirs, ours in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
        for kind in ("weight", "bias")
    }
    return {
        "model.embed_tokens.weight": "tok_embeddings.weight",
        "lm_head.weight": "output.weight",
        **attention,
        **(feed_forward if gated else {}),
    }


_LLAMA: Names = {
    **_names(),
    "model.norm.weight": "norm.scale",
    "model.layers.{}.input_layernorm.weight": "layers.{}.sa_norm.scale",
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.mlp_norm.scale",
    "model.layers.{}.self_attn.q_norm.weight": "layers.{}.attn.q_norm.scale",
    "model.layers.{}.self_attn.k_norm.weight": "layers.{}.attn.k_norm.scale",
    "model.layers.{}.self_attn.o_proj.weight": "layers.{}.attn.output_proj.weight",
    "model.layers.{}.self_attn.o_proj.bias": "layers.{}.attn.output_proj.bias",
}

_GEMMA2: Names = {
    **_LLAMA,
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.sa_scale.scale",
    "model.layers.{}.pre_feedforward_layernorm.weight": "layers.{}.mlp_norm.scale",
    "model.layers.{}.post_feedforward_layernorm.weight": "layers.{}.mlp_scale.scale",
}

_PHI3: Names = {
    **{
        theirs: ours
        for theirs, ours in _LLAMA.items()
        if not any(p in theirs for p in ("q_", "k_", "v_", "gate_", "up_"))
    },
    "model.layers.{}.self_attn.qkv_proj.weight": tuple(
        f"layers.{{}}.attn.{part}_proj.weight" for part in "qkv"
    ),
    "model.layers.{}.mlp.gate_up_proj.weight": tuple(
        f"layers.{{}}.mlp.{part}.weight" for part in ("w1", "w3")
    ),
}

_PHI: Names = {
    **_names(gated=False),
    **{
        f"{theirs}.{kind}": f"{ours}.{kind}"
        for kind in ("weight", "bias")
        for theirs, ours in (
            ("model.final_layernorm", "norm"),
            ("model.layers.{}.input_layernorm", "layers.{}.sa_norm"),
            ("model.layers.{}.self_attn.q_layernorm", "layers.{}.attn.q_norm"),
            ("model.layers.{}.self_attn.k_layernorm", "layers.{}.attn.k_norm"),
            ("model.layers.{}.self_attn.dense", "layers.{}.attn.output_proj"),
            ("model.layers.{}.mlp.fc1", "layers.{}.mlp.w1"),
            ("model.layers.{}.mlp.fc2", "layers.{}.mlp.w2"),
        )
    },
    "lm_head.bias": "output.bias",
}

_GPT2: Names = {
    "transformer.wte.weight": "tok_embeddings.weight",
    "transformer.wpe.weight": "pos_embeddings.weight",
    "lm_head.weight": "output.weight",
    **{
        f"transformer.{theirs}.{kind}": f"{ours}.{kind}"
        for kind in ("weight", "bias")
        for theirs, ours in (
            ("ln_f", "norm"),
            ("h.{}.ln_1", "layers.{}.sa_norm"),
            ("h.{}.ln_2", "layers.{}.mlp_norm"),
            ("h.{}.attn.c_proj", "layers.{}.attn.output_proj"),
            ("h.{}.mlp.c_fc", "layers.{}.mlp.w1"),
            ("h.{}.mlp.c_proj", "layers.{}.mlp.w2"),
        )
    },
    **{
        f"transformer.h.{{}}.attn.c_attn.{kind}": tuple(
            f"layers.{{}}.attn.{part}_proj.{kind}" for part in "qkv"
        )
        for kind in ("weight", "bias")
    },
}

_NANOCHAT: Names = {
    **{
        theirs: ours
        for theirs, ours in _LLAMA.items()
        if "norm" not in theirs and ".mlp." not in theirs
    },
    "model.layers.{}.mlp.fc1.weight": "layers.{}.mlp.w1.weight",
    "model.layers.{}.mlp.fc2.weight": "layers.{}.mlp.w2.weight",
}


@dataclass(frozen=True)
class ModelFamily:
    """A row of the table. A string in the place of a bool is the field of config.json that
    decides.
    """

    names: Names
    norm: Literal["rms", "rms_plus_one", "rms_bare", "layer"] = "rms"
    """RMSNorm; RMSNorm whose weight is an offset from 1; RMSNorm without a weight; LayerNorm."""
    norm_eps: str = "rms_norm_eps"
    qk_norm: bool | str = False
    """A norm over each head's query and key, before RoPE; a bare one comes after it."""
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    head_bias: bool = False
    gated_mlp: bool = True
    """down(act(gate(x)) · up(x)), or else down(act(up(x)))."""
    post_norms: bool = False
    """A second norm after attention and after the feed-forward layer, before each is added."""
    parallel: bool = False
    """Attention and feed-forward layer read the same normed input, and are added together."""
    scaled_embeddings: bool = False
    """Embeddings are multiplied by the square root of the width."""
    embedding_norm: bool = False
    """Embeddings pass through the final norm before the first layer."""
    learned_positions: bool = False
    """Embeddings of positions are added to those of tokens; no RoPE."""
    turns_backwards: bool = False
    """RoPE turns by the negative angle; there is none but the default type."""
    query_scale: bool = False
    """Attention scores are scaled by 1/√ of the config's query_pre_attn_scalar instead of the
    dimension of a head.
    """
    soft_caps: tuple[str, ...] = ()
    """Which of the config's SOFT_CAPS the family has."""
    fixed: Mapping[str, bool] = field(default_factory=dict)
    """Fields of config.json with the one value that ttrl and vLLM compute."""
    transposed: tuple[str, ...] = ()
    """Modules whose matrices are stored as [in, out], and fused ones side by side."""
    prefix: str = ""
    """What older files leave out at the beginning of names."""
    tied_head_in_files: bool = True
    """Checkpoints with tied embeddings hold them again, as lm_head.weight, which most of vLLM's
    classes need when they reload in place on CPU, and transformers accepts; vLLM's Gemma 2 refuses
    it, and GPT-2 does without.
    """
    windows: Literal["none", "every_layer", "by_layer_types"] = "none"
    """Which layers the config's sliding_window applies to."""


FAMILIES = {
    "llama": ModelFamily(
        _LLAMA, qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"
    ),
    "mistral": ModelFamily(_LLAMA, windows="every_layer"),
    "ministral": ModelFamily(_LLAMA, windows="by_layer_types"),
    "qwen2": ModelFamily(_LLAMA, qkv_bias=True, windows="by_layer_types"),
    "qwen3": ModelFamily(
        _LLAMA,
        qk_norm=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        windows="by_layer_types",
    ),
    "gemma": ModelFamily(
        _LLAMA,
        norm="rms_plus_one",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        scaled_embeddings=True,
    ),
    "gemma2": ModelFamily(
        _GEMMA2,
        norm="rms_plus_one",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        post_norms=True,
        scaled_embeddings=True,
        query_scale=True,
        soft_caps=SOFT_CAPS,
        tied_head_in_files=False,
        windows="by_layer_types",
    ),
    "gemma3_text": ModelFamily(
        _GEMMA2,
        norm="rms_plus_one",
        qk_norm=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        post_norms=True,
        scaled_embeddings=True,
        query_scale=True,
        soft_caps=SOFT_CAPS[1:],
        windows="by_layer_types",
    ),
    "phi3": ModelFamily(_PHI3, windows="every_layer"),
    "phi": ModelFamily(
        _PHI,
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
    "gpt2": ModelFamily(
        _GPT2,
        norm="layer",
        norm_eps="layer_norm_epsilon",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        learned_positions=True,
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
    "nanochat": ModelFamily(
        _NANOCHAT,
        norm="rms_bare",
        qk_norm=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        gated_mlp=False,
        embedding_norm=True,
        turns_backwards=True,
        soft_caps=SOFT_CAPS[1:],
    ),
}


@dataclass(frozen=True)
class Composite:
    """A model with more than text, of which only the text part (a family of its own) is trained;
    checkpoints keep the rest.
    """

    layouts: tuple[Mapping[str, str], ...]
    """Prefixes of the text part's parameters, by the beginning of their plain names, as versions of
    transformers write them.
    """
    frozen: tuple[str, ...]
    """What the names of all other parameters begin with."""


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
