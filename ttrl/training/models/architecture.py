"""Read a forward pass's settings from config.json; refuse unsupported ones, all at once.

Both spellings of RoPE are read: `rope_parameters` of transformers 5, and the older `rope_theta`
with `rope_scaling`.
"""

import dataclasses
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ttrl.errors import ModelFolderError
from ttrl.families.own import SOFT_CAPS
from ttrl.families.table import COMPOSITES, OWN_DECODERS
from ttrl.families.values import EXPERTS, Values, model_settings
from ttrl.nanochat import OWN_MODEL_TYPES
from ttrl.nanochat.modeling import register
from ttrl.training.models.rope import EVERY_LAYER, ROPE_TYPES

register()

Chosen = Literal["auto", "torchtune", "transformers"]
"""A model's decoder code: ours, transformers' own class, or ours if it knows the family."""

# Layer types of transformers' classes supported by the plugged in functions, or looking at one
# token at a time.
_PLUGGED_IN = frozenset(
    {
        "full_attention",
        "sliding_attention",
        "attention",
        "linear_attention",
        "mamba",
        "conv",
        "hybrid",
    }
)
_SINGLE_TOKENS = frozenset({"mlp", "moe"})
_NOT_PACKED = {
    "def mamba_selective_scan": "Mamba 1, because its scan has no initial state",
    "create_chunked_causal_mask(": "attention within chunks",
}
"""Source text of a class, and the unsupported computation it reveals for packed rows."""
ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu2")


@dataclass(frozen=True)
class Architecture:
    """A decoder's computation, without its weights. Fields also in config.json keep its names."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    activation: str
    gated_mlp: bool
    mlp_bias: bool
    norm: Literal["rms", "rms_plus_one", "rms_bare", "layer"]
    norm_eps: float
    post_norms: bool
    parallel: bool
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    head_bias: bool
    tie_word_embeddings: bool
    rope_parameters: Mapping[str, Any]
    rope_kinds: tuple[str | None, ...]
    """Each layer's kind among the config's RoPEs; None: none."""
    learned_positions: int
    """Rows of a table of embeddings of positions; 0: there is none."""
    windows: tuple[int | None, ...]
    """For each layer, how many positions it looks back, its own included."""
    attention_scale: float | None
    """None is 1/√head_dim."""
    attention_soft_cap: float | None
    output_soft_cap: float | None
    embedding_scale: float | None
    embedding_norm: bool
    """Embeddings pass through the final norm before the first layer."""


def _values(config: PretrainedConfig) -> Values:
    """Return the values of a config, defaults of its class among them."""
    return Values(model_settings(config.to_dict()))


def _ropes(config: PretrainedConfig) -> dict[str, Mapping[str, Any]]:
    """Return RoPE parameters by kind of layer: one kind, unless the config has them by layer type
    (Gemma 3).
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = any(isinstance(value, dict) for value in parameters.values())
    if nested:
        return {kind: parameters[kind] for kind in sorted(set(config.layer_types))}
    return {EVERY_LAYER: parameters}


def architecture(config: PretrainedConfig) -> Architecture:
    """Return the architecture of a config accepted by `read_config`."""
    family = OWN_DECODERS[config.model_type]
    values = _values(config)
    head_dim = values.head_dim
    ropes = _ropes(config)
    layers = values.layers
    if family.learned_positions:
        every_layer = None
    else:
        every_layer = EVERY_LAYER
    described = {kind: _described(rope, config) for kind, rope in ropes.items()}
    if family.query_scale:
        scale = config.query_pre_attn_scalar
    else:
        scale = head_dim
    attention_cap, output_cap = (
        getattr(config, name) if name in family.soft_caps else None for name in SOFT_CAPS
    )
    return Architecture(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=values.width,
        intermediate_size=family.inner_width(values),
        num_hidden_layers=layers,
        num_attention_heads=values.heads,
        num_key_value_heads=values.key_value_heads,
        head_dim=head_dim,
        activation=values.activation,
        gated_mlp=family.gated_mlp,
        mlp_bias=values.says(family.mlp_bias),
        norm=family.norm,
        norm_eps=getattr(config, family.norm_eps),
        post_norms=family.post_norms,
        parallel=family.parallel,
        qk_norm=values.says(family.qk_norm),
        qkv_bias=values.says(family.qkv_bias),
        output_bias=values.says(family.output_bias),
        head_bias=family.head_bias,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        rope_parameters=described.get(EVERY_LAYER, described),
        rope_kinds=(every_layer,) * layers if EVERY_LAYER in ropes else tuple(config.layer_types),
        learned_positions=config.max_position_embeddings if family.learned_positions else 0,
        windows=family.windows_of(values),
        attention_scale=None if scale == head_dim else scale**-0.5,
        attention_soft_cap=attention_cap,
        output_soft_cap=output_cap,
        embedding_scale=values.width**0.5 if family.scaled_embeddings else None,
        embedding_norm=family.embedding_norm,
    )


def _described(rope: Mapping[str, Any], config: PretrainedConfig) -> Mapping[str, Any]:
    """Return RoPE parameters in one form for either spelling, with everything else the frequencies
    depend on.
    """
    known = {
        name: value for name, value in sorted(rope.items()) if name != "type" and value is not None
    }
    if known.get("partial_rotary_factor") == 1.0:
        del known["partial_rotary_factor"]
    if known.get("rope_type") in ("dynamic", "longrope", "yarn"):
        known["max_position_embeddings"] = config.max_position_embeddings
    return known


def _problems(config: PretrainedConfig) -> list[str]:
    """Return all parts of a config unsupported by our decoder."""
    problems = []
    known = config.model_type in OWN_DECODERS
    if not known:
        problems.append(
            f"the model type {config.model_type!r} (supported: "
            f"{', '.join([*OWN_DECODERS, *COMPOSITES])})"
        )
    problems += _problems_of_any(config)
    experts = [name for name in EXPERTS if getattr(config, name, None)]
    if experts:
        problems.append(f"a mixture of experts ({experts[0]})")
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [r for r in rope.values() if isinstance(r, dict)] or [rope]
    if any(
        value is None
        for key, value in rope.items()
        if key in (getattr(config, "layer_types", None) or [])
    ):
        problems.append("layers without RoPE")
    for kind in sorted({str(one.get("rope_type", "default")) for one in ropes} - set(ROPE_TYPES)):
        problems.append(f"the RoPE type {kind!r} (supported: {', '.join(ROPE_TYPES)})")
    if any(one.get("rope_type") == "default" != one.get("type", "default") for one in ropes):
        # transformers 5 does so with Gemma 3's rope_scaling, and says nothing.
        problems.append(
            'a RoPE with a "type" overridden by the rope_type "default" (write rope_type in '
            "config.json)"
        )
    name = _values(config).activation
    if name not in ACTIVATIONS:
        problems.append(f"the activation {name!r} (supported: {', '.join(ACTIVATIONS)})")
    types = getattr(config, "layer_types", None) or []
    for kind in sorted(set(types) - {"full_attention", "sliding_attention"}):
        problems.append(f"layers of the type {kind!r}")
    if known:
        problems += _problems_of_family(config, types)
    return problems


def _problems_of_any(config: PretrainedConfig) -> list[str]:
    """Return the parts supported by neither decoder."""
    problems = []
    if getattr(config, "is_encoder_decoder", False):
        problems.append("an encoder in addition to the decoder")
    if getattr(config, "quantization_config", None):
        problems.append("quantised weights (train the unquantised model)")
    if getattr(config, "use_bidirectional_attention", False):
        problems.append("attention to later tokens (use_bidirectional_attention)")
    return problems


def uses_transformers(config: PretrainedConfig) -> bool:
    """Tell whether a config from `read_config` is for transformers' own class."""
    chosen: Chosen = getattr(config, "ttrl_decoder", "auto")
    return chosen == "transformers" or (chosen == "auto" and config.model_type not in OWN_DECODERS)


def _problems_with_transformers(config: PretrainedConfig) -> list[str]:
    """Return all obstacles to training transformers' own class on packed rows."""
    kind = config.model_type
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in OWN_MODEL_TYPES:
        return [
            f"the model type {kind!r} (neither ttrl nor transformers has a text decoder for it)"
        ]
    problems = _problems_of_any(config)
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [r for r in rope.values() if isinstance(r, dict)] or [rope]
    for one in sorted({str(one.get("rope_type")) for one in ropes} & {"dynamic", "longrope"}):
        problems.append(
            f"the RoPE type {one!r} (transformers computes it from the longest row of a batch)"
        )
    for name in sorted(
        set(getattr(config, "layer_types", None) or []) - _PLUGGED_IN - _SINGLE_TOKENS
    ):
        problems.append(f"layers of the type {name!r}")
    source = _source_of_class(config)
    problems += [f"{what} ({kind})" for sign, what in _NOT_PACKED.items() if sign in source]
    return problems


def _source_of_class(config: PretrainedConfig) -> str:
    package = type(config).__module__.rpartition(".")[0]
    spec = importlib.util.find_spec(f"{package}.modeling_{package.rpartition('.')[2]}")
    if spec is None or spec.origin is None:
        return ""
    return Path(spec.origin).read_text(encoding="utf-8")


def _problems_of_family(config: PretrainedConfig, types: list[str]) -> list[str]:
    problems = []
    family = OWN_DECODERS[config.model_type]
    heads = _values(config).key_value_heads
    window = getattr(config, "sliding_window", None)
    if types and family.windows != "by_layer_types" and "sliding_attention" in types:
        problems.append(f"layer_types (not for {config.model_type} models)")
    if family.windows == "by_layer_types" and len(types) != config.num_hidden_layers:
        problems.append(f"{len(types)} layer_types for {config.num_hidden_layers} layers")
    for name in SOFT_CAPS:
        if getattr(config, name, None) and name not in family.soft_caps:
            problems.append(
                f"{name} (neither transformers nor vLLM applies it to {config.model_type} models)"
            )
    if window is not None and window < 1:
        problems.append(f"a sliding window of {window} positions")
    if config.num_attention_heads % heads:
        problems.append(f"{heads} key/value heads for {config.num_attention_heads} query heads")
    if family.head_bias and config.tie_word_embeddings:
        problems.append("tied embeddings with a bias in the head")
    for name, value in family.fixed.items():
        if (given := getattr(config, name, value)) != value:
            problems.append(
                f"{name} {given!r} (ttrl and vLLM compute {config.model_type} models with "
                f"{value!r})"
            )
    plain = all(
        _described(rope, config).keys() <= {"rope_type", "rope_theta"}
        for rope in _ropes(config).values()
    )
    if family.turns_backwards and not plain:
        problems.append(f"a scaled or partial RoPE (not for {config.model_type} models)")
    return problems


def read_config(folder: str | Path, decoder: Chosen = "auto") -> PretrainedConfig:
    """Read the config of a model folder, or a config.json itself; for a model with a vision tower,
    its text part. `decoder`: the choice of decoder code.

    Raises ModelFolderError if it is missing or unreadable, or with everything in it unsupported by
    this decoder.
    """
    folder = Path(folder)
    if folder.is_dir():
        file = folder / "config.json"
    else:
        file = folder
    if not file.is_file():
        raise ModelFolderError(
            f"{folder} has no config.json; give a model folder in Hugging Face layout"
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            file, local_files_only=True, trust_remote_code=False
        )
    except (
        ValueError,
        OSError,
        KeyError,
        TypeError,
        AttributeError,
        StrictDataclassError,
    ) as error:
        raise ModelFolderError(f"{file} cannot be read: {error}") from error
    text = config.get_text_config()
    if text is not config:
        known = config.model_type in COMPOSITES
        text.tie_word_embeddings = config.tie_word_embeddings
        config = text
        if decoder == "auto" and not known:
            decoder = "transformers"
    config.ttrl_decoder = decoder
    if getattr(config, "rope_parameters", None):
        # transformers repeats this before computing frequencies.
        config.standardize_rope_params()
    if (
        problems := _problems_with_transformers(config)
        if uses_transformers(config)
        else _problems(config)
    ):
        raise ModelFolderError(f"{folder}: ttrl does not support this model: {'; '.join(problems)}")
    return config


def check_same_architecture(config: PretrainedConfig, own: PretrainedConfig, folder: Any) -> None:
    """Raise ModelFolderError if a model of `config` would compute something else than one of `own`
    with the same weights.
    """
    if uses_transformers(own):
        theirs = _computed(config)
        ours = _computed(own)
        different = [
            f"{name} is {theirs.get(name)!r} instead of {ours.get(name)!r}"
            for name in sorted(theirs.keys() | ours.keys())
            if theirs.get(name) != ours.get(name)
        ]
    else:
        different = _different_architecture(config, own)
    if different:
        raise ModelFolderError(
            f"{folder} has another architecture than the policy: {'; '.join(different)}"
        )


def _computed(config: PretrainedConfig) -> Mapping[str, Any]:
    """Return a config's fields describing the computation."""
    others = (
        "dtype",
        "transformers_version",
        "architectures",
        "use_cache",
        "_name_or_path",
        "ttrl_decoder",
        "model_type",
    )
    values = config.to_dict()
    return {
        name: value
        for name, value in values.items()
        if name not in others and not name.endswith("_token_id")
    }


def _different_architecture(config: PretrainedConfig, own: PretrainedConfig) -> list[str]:
    theirs = architecture(config)
    ours = architecture(own)
    return [
        f"{field.name} is {getattr(theirs, field.name)!r} instead of {getattr(ours, field.name)!r}"
        for field in dataclasses.fields(Architecture)
        if getattr(theirs, field.name) != getattr(ours, field.name)
    ]
