"""Describe a dense family to ttrl's own decoder: a model_type's meaning beyond the numbers in its
config.json.

Parameters go by two names: theirs (Hugging Face) and ours (torchtune's, for its tools). "{}" stands
for the layer.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ttrl.families.layers import Kinds, Layer, attention, feed_forward, norms
from ttrl.families.values import Values

SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")

Names = Mapping[str, str | tuple[str, ...]]


def _names(*, gated: bool = True) -> dict[str, str | tuple[str, ...]]:
    """Return the names of nearly all families: embeddings, head, q/k/v and, if gated, feed-forward
    layers.
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


LLAMA: Names = {
    **_names(),
    "model.norm.weight": "norm.scale",
    "model.layers.{}.input_layernorm.weight": "layers.{}.sa_norm.scale",
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.mlp_norm.scale",
    "model.layers.{}.self_attn.q_norm.weight": "layers.{}.attn.q_norm.scale",
    "model.layers.{}.self_attn.k_norm.weight": "layers.{}.attn.k_norm.scale",
    "model.layers.{}.self_attn.o_proj.weight": "layers.{}.attn.output_proj.weight",
    "model.layers.{}.self_attn.o_proj.bias": "layers.{}.attn.output_proj.bias",
}

GEMMA2: Names = {
    **LLAMA,
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.sa_scale.scale",
    "model.layers.{}.pre_feedforward_layernorm.weight": "layers.{}.mlp_norm.scale",
    "model.layers.{}.post_feedforward_layernorm.weight": "layers.{}.mlp_scale.scale",
}

PHI3: Names = {
    **{
        theirs: ours
        for theirs, ours in LLAMA.items()
        if not any(p in theirs for p in ("q_", "k_", "v_", "gate_", "up_"))
    },
    "model.layers.{}.self_attn.qkv_proj.weight": tuple(
        f"layers.{{}}.attn.{part}_proj.weight" for part in "qkv"
    ),
    "model.layers.{}.mlp.gate_up_proj.weight": tuple(
        f"layers.{{}}.mlp.{part}.weight" for part in ("w1", "w3")
    ),
}

PHI: Names = {
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

GPT2: Names = {
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

NANOCHAT: Names = {
    **{
        theirs: ours
        for theirs, ours in LLAMA.items()
        if "norm" not in theirs and ".mlp." not in theirs
    },
    "model.layers.{}.mlp.fc1.weight": "layers.{}.mlp.w1.weight",
    "model.layers.{}.mlp.fc2.weight": "layers.{}.mlp.w2.weight",
}


@dataclass(frozen=True)
class OwnDecoder:
    """The traits of a family. A string instead of a bool names the deciding field of
    config.json.
    """

    names: Names
    norm: Literal["rms", "rms_plus_one", "rms_bare", "layer"] = "rms"
    """RMSNorm; RMSNorm with its weight as an offset from 1; RMSNorm without a weight; LayerNorm."""
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
    """The family's subset of the config's SOFT_CAPS."""
    fixed: Mapping[str, bool] = field(default_factory=dict)
    """Fields of config.json with the one value supported by ttrl and vLLM."""
    transposed: tuple[str, ...] = ()
    """Modules with matrices stored as [in, out], and fused ones side by side."""
    prefix: str = ""
    """The beginning of names missing in older files."""
    tied_head_in_files: bool = True
    """Checkpoints with tied embeddings hold them again, as lm_head.weight: most of vLLM's classes
    need it to reload in place on CPU, and transformers accepts it; vLLM's Gemma 2 refuses it, and
    GPT-2 does without.
    """
    windows: Literal["none", "every_layer", "by_layer_types"] = "none"
    """The layers under the config's sliding_window."""
    slides: Callable[[Values, int], bool] = lambda values, number: True
    """Tells whether the layer of a number has the window in older files, without layer_types."""
    inner_widths: int | None = None
    """The feed-forward width in widths of the stream, if config.json does not say."""

    @property
    def norm_vectors(self) -> int:
        """Return a norm's vectors: 0, 1 (a weight) or 2 (and a bias)."""
        return {"rms_bare": 0, "layer": 2}.get(self.norm, 1)

    @property
    def fused(self) -> int:
        """Return how many of our matrices the files hold in one, at the most."""
        return max(1 if isinstance(ours, str) else len(ours) for ours in self.names.values())

    def caps_scores(self, values: Values) -> bool:
        """Tell whether attention scores are capped."""
        name = SOFT_CAPS[0]
        return name in self.soft_caps and values.get(name) is not None

    def inner_width(self, values: Values) -> int:
        """Return the width of the feed-forward layer."""
        default = None
        if self.inner_widths is not None:
            default = self.inner_widths * values.width
        return values.number("intermediate_size", default=default, least=1)

    def windows_of(self, values: Values) -> tuple[int | None, ...]:
        """Return how many positions each layer looks back, its own included; None: all."""
        window = values.get("sliding_window")
        if self.windows == "none" or values.get("use_sliding_window") is False:
            window = None
        if window is None or self.windows == "every_layer":
            return (window,) * values.layers
        kinds = values.get("layer_types")
        if kinds is None:
            slides = [self.slides(values, number) for number in range(values.layers)]
        else:
            slides = [kind == "sliding_attention" for kind in kinds]
        return tuple(window if one else None for one in slides)

    def layers(self, values: Values) -> Kinds:
        """Describe each layer, with our names of its matrices."""
        vectors = self.norm_vectors
        if self.parallel:
            count = 1
        else:
            count = 4 if self.post_norms else 2
        names = ("w1", "w3", "w2") if self.gated_mlp else ("w1", "w2")
        layer = attention(
            values,
            bias=values.says(self.qkv_bias),
            output_bias=values.says(self.output_bias),
            output="output_proj",
        )
        layer += Layer(vectors=2 * values.head_dim * vectors * values.says(self.qk_norm))
        layer += norms(values, count, vectors)
        layer += feed_forward(
            values, self.inner_width(values), names=names, bias=values.says(self.mlp_bias)
        )
        positions = 0
        if self.learned_positions:
            positions = values.number("max_position_embeddings", default=1024)
        return Kinds(
            tuple(dataclasses.replace(layer, window=window) for window in self.windows_of(values)),
            looked_up=positions * values.width,
            norm_vectors=vectors,
            head_bias=self.head_bias,
        )


def every_second(values: Values, number: int) -> bool:
    """Tell whether a layer of Gemma 2 has the window."""
    return number % 2 == 0


def but_every_sixth(values: Values, number: int) -> bool:
    """Tell whether a layer of Gemma 3 has the window."""
    return (number + 1) % values.number("sliding_window_pattern", default=6) != 0


def the_last_ones(values: Values, number: int) -> bool:
    """Tell whether a layer of Qwen has the window."""
    used = bool(values.get("use_sliding_window"))
    return used and number >= values.number("max_window_layers", default=0)
