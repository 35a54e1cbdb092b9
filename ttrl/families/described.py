"""Describe the layers of the families computed by transformers' own classes.

Sizes, names and defaults are those of transformers' configs and classes, and
tests/costs/test_families.py compares every one.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from ttrl.families.layers import (
    GATED,
    Kinds,
    Layer,
    Matrix,
    attention,
    delta_rule,
    experts,
    feed_forward,
    kimi_delta_attention,
    latent_attention,
    mamba2,
    norms,
    short_convolution,
)
from ttrl.families.values import Values

_FULL = ("full_attention", "attention", "hybrid")
_SLIDING = "sliding_attention"
FUSED = ("gate_up_proj", "down_proj")
_LFM2 = ("w1", "w3", "w2")


# The kind of each layer


def layer_types(values: Values, every: int = 0, others: str = _SLIDING) -> list[str]:
    """Return each layer's type. every: the period of full attention if config.json does not say; 0:
    always."""
    count = values.layers
    given = values.get("layer_types", "layers_block_type")
    if given is not None:
        return list(given)
    every = values.get("full_attention_interval", "sliding_window_pattern", default=every)
    if not isinstance(every, int) or not every:
        return ["full_attention"] * count
    return [others if (number + 1) % every else "full_attention" for number in range(count)]


def window_of(values: Values, kind: str) -> int | None:
    window: int | None = values.get("sliding_window")
    if kind == _SLIDING:
        return window
    return None


def _is_sparse(values: Values, number: int) -> bool:
    """Tell whether one of Qwen's layers has experts."""
    if number in values.get("mlp_only_layers", default=()):
        return False
    return not (number + 1) % values.number("decoder_sparse_step", default=1)


def _is_behind_dense(values: Values, number: int, first: int) -> bool:
    """Tell whether a layer has experts, after dense first layers."""
    given = values.get("mlp_layer_types")
    if given is not None:
        return bool(given[number] == "sparse")
    return number >= values.number("first_k_dense_replace", default=first)


# Families with attention in every layer


_Halves = Callable[[Values, int, str], Layer]
"""A part of the layer of a number and a type."""


def stack(
    mixer: _Halves, half: _Halves, *, every: int = 0, others: str = _SLIDING, **of_model: Any
) -> Callable[[Values], Kinds]:
    """Stack layers: each is its mixer and its feed-forward half, with their norms."""

    def made(values: Values) -> Kinds:
        types = layer_types(values, every, others)
        layers = tuple(
            mixer(values, n, kind) + half(values, n, kind) for n, kind in enumerate(types)
        )
        return Kinds(layers, **of_model)

    return made


def attends(
    count: int = 2,
    *,
    vectors: int = 1,
    bias: str = "attention_bias",
    biased: bool = False,
    output_bias: str | None = None,
    every_layer: bool = False,
    more: int = 0,
    **how: Any,
) -> _Halves:
    """Return attention with all the norms of its layer.

    count: of norms. bias: the setting for biases, output_bias for the output's own; biased: the
    first one's default. every_layer: whether all have the window. more: vectors of H entries.
    """

    def mixer(values: Values, number: int, kind: str) -> Layer:
        of_output = None
        if output_bias is not None:
            of_output = bool(values.get(output_bias))
        window = window_of(values, _SLIDING if every_layer else kind)
        own = bool(values.get(bias, default=biased))
        part = attention(values, bias=own, output_bias=of_output, window=window, **how)
        return part + norms(values, count, vectors) + Layer(vectors=more * values.heads)

    return mixer


def dense(names: tuple[str, ...] = GATED, bias: str = "mlp_bias") -> _Halves:
    def half(values: Values, number: int, kind: str) -> Layer:
        width = values.number("intermediate_size")
        return feed_forward(values, width, names=names, bias=bool(values.get(bias)))

    return half


def mixture(**how: Any) -> _Halves:
    """Return experts in every layer, as wide as a dense layer would be."""
    return lambda values, number, kind: experts(values, values.number("intermediate_size"), **how)


def qwen_mixture(values: Values, number: int, kind: str) -> Layer:
    if not _is_sparse(values, number):
        return feed_forward(values, values.number("intermediate_size"))
    found = experts(values, values.number("moe_intermediate_size"))
    shared = values.get("shared_expert_intermediate_size")
    if shared:
        found += feed_forward(values, shared) + Layer(
            (Matrix("shared_expert_gate", values.width, 1),)
        )
    return found


def with_shared(first: int, shared: int = 1) -> _Halves:
    """Return the mixture of DeepSeek and others. first: dense layers, shared: such experts, if
    config.json does not say."""

    def half(values: Values, number: int, kind: str) -> Layer:
        if not _is_behind_dense(values, number, first):
            return feed_forward(
                values, values.number("intermediate_size"), bias=bool(values.get("mlp_bias"))
            )
        width = values.number("moe_intermediate_size")
        always = values.number("n_shared_experts", "num_shared_experts", default=shared)
        return experts(values, width) + feed_forward(values, always * width)

    return half


def _ernie_mixture(values: Values, number: int, kind: str) -> Layer:
    last = values.get("moe_layer_end_index", default=-1)
    if last == -1:
        last = values.layers - 1
    every = values.number("moe_layer_interval", default=1)
    bias = bool(values.get("use_bias"))
    inside = values.number("moe_layer_start_index", default=1) <= number <= last
    if not inside or (number + 1) % every:
        return feed_forward(values, values.number("intermediate_size"), bias=bias)
    width = values.number("moe_intermediate_size")
    always = values.number("moe_num_shared_experts", default=2)
    count = values.number("moe_num_experts")  # a balancing bias for each
    return (
        experts(values, width)
        + feed_forward(values, always * width, bias=bias)
        + Layer(vectors=count)
    )


def hunyuan_mixture(values: Values, number: int, kind: str) -> Layer:
    width = values.number("intermediate_size")
    return experts(values, width) + feed_forward(values, width)


def latent(values: Values, number: int, kind: str) -> Layer:
    return latent_attention(values) + norms(values, 2)


# Families with recurrences


def qwen_hybrid(values: Values, number: int, kind: str) -> Layer:
    if kind == "linear_attention":
        return delta_rule(values) + norms(values, 2)
    bias = bool(values.get("attention_bias"))
    head_dim = values.number("head_dim", default=256)
    own = attention(values, query_key_norms="head", bias=bias, gated=True, head_dim=head_dim)
    return own + norms(values, 2)


def olmo_hybrid(values: Values, number: int, kind: str) -> Layer:
    if kind == "linear_attention":
        names = ("q_proj", "k_proj", "v_proj")
        return delta_rule(values, names=names, output="o_proj") + norms(values, 2)
    return attends(query_key_norms="width")(values, number, kind)


def kimi(values: Values) -> Kinds:
    """Count Kimi Linear; its published config.json has settings of its own for the recurrence."""
    config = dict(values.config)
    own = values.get("linear_attn_config", default={})
    if own:
        config |= {"linear_num_heads": own["num_heads"], "linear_head_dim": own["head_dim"]}
        config["linear_conv_kernel_dim"] = own.get("short_conv_kernel_size", 4)
        full = {number - 1 for number in own.get("full_attn_layers", ())}
        count = values.layers
        kinds = ["full_attention" if n in full else "linear_attention" for n in range(count)]
        config.setdefault("layer_types", kinds)

    def mixer(values: Values, number: int, kind: str) -> Layer:
        if kind in _FULL:
            own = latent_attention(values)
        else:
            own = kimi_delta_attention(values)
        return own + norms(values, 2)

    return stack(mixer, with_shared(1))(Values(config))


def mamba_or_attention(values: Values, number: int, kind: str) -> Layer:
    if kind in _FULL and number not in values.get("mamba_layers", default=()):
        return attends()(values, number, kind)
    return mamba2(values, bias=bool(values.get("mamba_proj_bias"))) + norms(values, 2)


def granite_hybrid_half(values: Values, number: int, kind: str) -> Layer:
    shared = values.number("shared_intermediate_size")
    found = feed_forward(values, shared, names=("input_linear", "output_linear"))
    if values.get("num_local_experts"):
        found += experts(values, values.number("intermediate_size"))
    return found


def bamba(values: Values) -> Kinds:
    attending = values.get("attn_layer_indices", default=())
    count = values.layers
    kinds = ["attention" if number in attending else "mamba" for number in range(count)]
    given = Values({**values.config, "layer_types": kinds})
    return stack(mamba_or_attention, dense())(given)


def falcon_h1_mixer(values: Values, number: int, kind: str) -> Layer:
    """Count attention and a recurrence side by side."""
    bias = bool(values.get("mamba_proj_bias"))
    output = bool(values.get("projectors_bias"))
    normed = bool(values.get("mamba_rms_norm"))
    scan = mamba2(values, normed=normed, bias=bias, output_bias=output)
    return scan + attends()(values, number, kind)


_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def nemotron_h(values: Values) -> Kinds:
    """Count Nemotron-H: a layer is one of four things."""
    kinds = values.get("layers_block_type", "layer_types")
    if kinds is None:
        kinds = [
            _NEMOTRON_LETTERS[one] for one in values.get("hybrid_override_pattern", default="")
        ]
    return Kinds(tuple(_nemotron_layer(values, kind) + norms(values, 1) for kind in kinds))


def _nemotron_layer(values: Values, kind: str) -> Layer:
    names = ("up_proj", "down_proj")
    bias = bool(values.get("mlp_bias"))
    if kind in _FULL:
        return attention(
            values,
            bias=bool(values.get("attention_bias")),
            head_dim=values.number("head_dim", default=128),
        )
    if kind == "mlp":
        return feed_forward(values, values.number("intermediate_size"), names=names, bias=bias)
    if kind != "moe":
        return mamba2(values, bias=bool(values.get("use_bias")))
    latent = values.get("moe_latent_size")
    shared = values.number("moe_shared_expert_intermediate_size", default=7688)
    found = experts(values, values.number("moe_intermediate_size"), gated=False, outer=latent)
    found += feed_forward(values, shared, names=names, bias=bias)
    if latent:
        around = (
            Matrix("fc1_latent_proj", values.width, latent),
            Matrix("fc2_latent_proj", latent, values.width),
        )
        found += Layer(around, vectors=(latent + values.width) * bias)
    return found


def lfm2_mixer(values: Values, number: int, kind: str) -> Layer:
    if kind == "conv":
        return short_convolution(values) + norms(values, 2)
    return attention(values, query_key_norms="head", output="out_proj") + norms(values, 2)


def lfm2(values: Values) -> Kinds:
    attending = values.get("full_attn_idxs")
    if attending is not None and values.get("layer_types") is None:
        count = values.layers
        kinds = ["full_attention" if number in attending else "conv" for number in range(count)]
        values = Values({**values.config, "layer_types": kinds})
    width = values.number("block_ff_dim", "intermediate_size")
    if values.get("block_auto_adjust_ff_dim", default=True):
        width = int(values.get("block_ffn_dim_multiplier", default=1.0) * int(2 * width / 3))
        multiple = values.number("block_multiple_of", default=256)
        width = multiple * -(-width // multiple)
    return stack(lfm2_mixer, lambda values, number, kind: feed_forward(values, width, names=_LFM2))(
        values
    )


def lfm2_mixture(values: Values, number: int, kind: str) -> Layer:
    if number < values.number("num_dense_layers", default=2):
        return feed_forward(values, values.number("intermediate_size"), names=_LFM2)
    return experts(values, values.number("moe_intermediate_size"))


# Gemma


def _per_layer_inputs(values: Values) -> tuple[Layer, Layer, int]:
    """Return each layer's and the model's parts for inputs of each layer, and the entries of their
    table."""
    width = values.get("hidden_size_per_layer_input", default=256)
    if not width:
        return Layer(), Layer(), 0
    all_layers = values.layers * width
    gates = (
        Matrix("per_layer_input_gate", values.width, width),
        Matrix("per_layer_projection", width, values.width),
    )
    outside = Layer(
        (Matrix("per_layer_model_projection", values.width, all_layers),), vectors=width
    )
    table = values.number("vocab_size_per_layer_input", default=262_144) * all_layers
    return Layer(gates, kept=3 * width) + norms(values, 1), outside, table


def gemma3n(values: Values) -> Kinds:
    width = values.width
    streams = values.number("altup_num_inputs", default=4)
    rank = values.number("laurel_rank", default=64)
    each, outside, table = _per_layer_inputs(values)
    small = (
        Matrix("laurel", width, rank),
        Matrix("laurel", rank, width),
        Matrix("modality_router", width, streams),
    )
    each += Layer(small, vectors=width + streams**2 + streams**3, kept=2 * streams * width) + norms(
        values, 6
    )
    widths = values.get("intermediate_size")
    kinds = layer_types(values, 5)
    layers = []
    shared = len(kinds) - values.number("num_kv_shared_layers", default=15)
    for number, kind in enumerate(kinds):
        if isinstance(widths, list | tuple):
            own = widths[number]
        else:
            own = values.number("intermediate_size")
        part = attention(values, query_key_norms="head", window=window_of(values, kind))
        if 0 < shared <= number:
            part = _without_keys(part, values.head_dim)
        layers.append(part + feed_forward(values, own) + each)
    around = Matrix("altup_projections", (2 * streams - 2) * width, width)
    return Kinds(tuple(layers), outside + Layer((around,)), table)


def gemma4(values: Values) -> Kinds:
    each, outside, table = _per_layer_inputs(values)
    each += norms(values, 4)
    if values.get("enable_moe_block"):
        count = values.number("num_experts")
        each += experts(values, values.number("moe_intermediate_size")) + norms(values, 3)
        each += Layer(vectors=values.width + count)
    kinds = layer_types(values, 6)
    layers = []
    shared = len(kinds) - values.number("num_kv_shared_layers", default=0)
    for number, kind in enumerate(kinds):
        reused = 0 < shared <= number
        part = _gemma4_attention(values, kind, reused)
        if reused and values.get("use_double_wide_mlp"):
            double = 2
        else:
            double = 1
        layers.append(
            part + feed_forward(values, double * values.number("intermediate_size")) + each
        )
    return Kinds(tuple(layers), outside, table)


def _gemma4_attention(values: Values, kind: str, reused: bool) -> Layer:
    dim = values.number("head_dim", default=256)
    heads = values.key_value_heads
    as_keys = False
    if kind != _SLIDING:
        dim = values.number("global_head_dim", default=512)
        as_keys = bool(values.get("attention_k_eq_v"))
        if as_keys:
            heads = values.number("num_global_key_value_heads", default=heads)
    bias = bool(values.get("attention_bias"))
    part = attention(
        values,
        query_key_norms="head",
        bias=bias,
        window=window_of(values, kind),
        head_dim=dim,
        key_value_heads=heads,
    )
    if reused:
        return _without_keys(part, dim)
    if as_keys:
        return _without(part, ("v_proj",))
    return part


def _without(part: Layer, names: tuple[str, ...]) -> Layer:
    """Return attention without some of its matrices."""
    left = tuple(one for one in part.matrices if one.name not in names)
    return dataclasses.replace(part, matrices=left)


def _without_keys(part: Layer, head_dim: int) -> Layer:
    """Return attention on the keys and values of an earlier layer."""
    left = _without(part, ("k_proj", "v_proj"))
    return dataclasses.replace(left, vectors=left.vectors - head_dim, cache=0)


# nanochat


def nanochat(values: Values) -> Kinds:
    """Return nanochat of 2026: the first layer attends only to the previous token
    (`ttrl.nanochat.modeling`).
    """
    width = values.width
    tables = values.get("value_layers", default=())
    windows = values.get("attention_windows")
    smear = Layer(
        (Matrix("gate", 24, 1),),
        vectors=1,
        pair=2 * width,
        window=windows[0],
        cache=2 * width,
        kept=4 * width,
    )
    layers = [smear]
    for number, window in enumerate(windows[1:], start=1):
        part = attention(values, query_key_norms="", window=window)
        part += feed_forward(
            values, values.number("intermediate_size"), names=("up_proj", "down_proj")
        )
        part += norms(values, 2, 0) + Layer(vectors=2, kept=8 * width)
        if number in tables:
            part += Layer((Matrix("value_gate", 12, values.heads),), kept=2 * width)
        layers.append(part)
    looked_up = len(tables) * values.number("vocab_size") * width
    return Kinds(tuple(layers), Layer(vectors=1, kept=2 * width), looked_up, norm_vectors=0)


# By model_type


def stablelm(values: Values) -> Kinds:
    count = 1 if values.get("use_parallel_residual") else 2
    per_head = "heads" if values.get("qk_layernorm") else ""
    mixer = attends(count, vectors=2, bias="use_qkv_bias", output_bias="", query_key_norms=per_head)
    return stack(mixer, dense(bias=""), norm_vectors=2)(values)


def phimoe(values: Values) -> Kinds:
    mixer = attends(vectors=2, every_layer=True)
    head = bool(values.get("lm_head_bias"))
    return stack(mixer, mixture(), norm_vectors=2, head_bias=head)(values)


def ernie_moe(values: Values) -> Kinds:
    mixer = attends(bias="use_bias")
    return stack(mixer, _ernie_mixture, head_bias=bool(values.get("use_bias")))(values)


def glm4_moe(values: Values) -> Kinds:
    per_head = "head" if values.get("use_qk_norm") else ""
    return stack(attends(output_bias="", query_key_norms=per_head), with_shared(1))(values)
