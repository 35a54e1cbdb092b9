"""Map ttrl's decoders to llama.cpp's: the architecture's name, its settings, names of tensors.

llama.cpp computes each architecture in one way, with few choices. `layout_of` compares it with
the checkpoint's own architecture and refuses every difference: a file must give the model's own
answers, or not exist.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from ttrl.errors import ModelFolderError
from ttrl.training.models.architecture import Architecture, architecture
from ttrl.training.models.rope import EVERY_LAYER

_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""llama.cpp scales the scores of the 27B models by 1/√(width / heads), by their layers."""


@dataclass(frozen=True)
class Target:
    """An architecture of llama.cpp."""

    name: str
    biases: tuple[str, ...] = ()
    """The parts of the decoder with optional biases: "qkv", "output", "mlp"."""
    activations: tuple[str, ...] = ("silu",)
    turns_pairs: bool = False
    """RoPE turns neighbours (0, 1), (2, 3), …, not the halves of a head: rows move."""
    pattern: Callable[[int], bool] | None = None
    """Tells by its number whether a layer has the window, if the file does not say; None: no layer
    has windows."""
    tied_only: bool = False
    fused_attention: bool = False
    """Queries, keys and values are one matrix."""


_LLAMA = Target("llama", biases=("qkv", "output", "mlp"), turns_pairs=True)
_TARGETS = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "ministral": _LLAMA,
    "phi3": _LLAMA,
    "qwen2": Target("qwen2", biases=("qkv",)),
    "qwen3": Target("qwen3", biases=("qkv",)),
    "gemma": Target("gemma", biases=("qkv",), activations=_TANH, tied_only=True),
    "gemma2": Target(
        "gemma2",
        biases=("qkv",),
        activations=_TANH,
        pattern=lambda number: number % 2 == 0,
        tied_only=True,
    ),
    "gemma3_text": Target(
        "gemma3", biases=("qkv",), activations=_TANH, pattern=lambda number: number % 6 < 5
    ),
    "gpt2": Target(
        "gpt2", biases=("qkv", "output", "mlp"), activations=_TANH, fused_attention=True
    ),
}
EXPORTED = tuple(_TARGETS)
"""The model types with an architecture of llama.cpp."""


@dataclass(frozen=True)
class Layout:
    """A checkpoint, as llama.cpp reads it."""

    target: Target
    shape: Architecture
    context: int
    """The longest sequence with the checkpoint's own answers."""
    window: int | None
    windowed: tuple[bool, ...] | None
    """The layers with the window, if they differ from llama.cpp's own pattern."""

    def name_of(self, ours: str) -> str:
        """Return llama.cpp's name of a parameter."""
        name, kind = ours.rsplit(".", 1)
        if kind == "scale":
            kind = "weight"
        if not name.startswith("layers."):
            return f"{_OUTSIDE[name]}.{kind}"
        _, number, part = name.split(".", 2)
        if self.shape.gated_mlp:
            names = _INSIDE | _GATED
        else:
            names = _INSIDE | _PLAIN
        return f"blk.{number}.{names[part]}.{kind}"


_OUTSIDE = {
    "tok_embeddings": "token_embd",
    "pos_embeddings": "position_embd",
    "norm": "output_norm",
    "output": "output",
}
_INSIDE = {
    "sa_norm": "attn_norm",
    "attn.q_proj": "attn_q",
    "attn.k_proj": "attn_k",
    "attn.v_proj": "attn_v",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn.output_proj": "attn_output",
    "sa_scale": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_scale": "post_ffw_norm",
}
_GATED = {"mlp.w1": "ffn_gate", "mlp.w2": "ffn_down", "mlp.w3": "ffn_up"}
_PLAIN = {"mlp.w1": "ffn_up", "mlp.w2": "ffn_down"}


def ropes(shape: Architecture) -> Mapping[str, Mapping[str, Any]]:
    """Return the parameters of RoPE, by kind of layer."""
    kinds = {kind for kind in shape.rope_kinds if kind is not None}
    if kinds == {EVERY_LAYER}:
        return {EVERY_LAYER: shape.rope_parameters}
    return {kind: shape.rope_parameters[kind] for kind in kinds}


def layout_of(config: PretrainedConfig) -> Layout:
    """Return llama.cpp's layout of a config from `read_config`. Raises ModelFolderError with every
    part computed in another way by llama.cpp.
    """
    target = _TARGETS.get(config.model_type)
    if target is None:
        raise ModelFolderError(
            f"llama.cpp's files hold no {config.model_type!r} models from ttrl; exported are: "
            f"{', '.join(EXPORTED)}. The checkpoint itself works with transformers and vLLM"
        )
    shape = architecture(config)
    problems = [*_problems(shape, target), *_problems_of_rope(shape, target)]
    if problems:
        raise ModelFolderError(
            f"llama.cpp's architecture {target.name!r} does not compute this "
            f"{config.model_type} model:\n" + "\n".join(f"  - {problem}" for problem in problems)
        )
    windows = {window for window in shape.windows if window is not None}
    context = int(config.max_position_embeddings)
    if target.pattern is None:
        return Layout(target, shape, min([context, *windows]), None, None)
    windowed: tuple[bool, ...] | None = tuple(window is not None for window in shape.windows)
    if windowed == tuple(map(target.pattern, range(len(shape.windows)))):
        windowed = None
    return Layout(target, shape, context, max(windows, default=None), windowed)


def _problems(shape: Architecture, target: Target) -> list[str]:
    """Return the parts without an equal in llama.cpp, except for RoPE."""
    biases = {"qkv": shape.qkv_bias, "output": shape.output_bias, "mlp": shape.mlp_bias}
    problems = [
        f"biases of {part}" for part, has in biases.items() if has and part not in target.biases
    ]
    if shape.activation not in target.activations:
        problems.append(f"the activation {shape.activation!r}")
    if target.tied_only and not shape.tie_word_embeddings:
        problems.append("an output head of its own")
    if target.name == "gemma2" and not (shape.attention_soft_cap and shape.output_soft_cap):
        problems.append("logits without a soft cap")
    scale = shape.attention_scale or shape.head_dim**-0.5
    theirs = shape.head_dim
    if shape.num_hidden_layers == _LAYERS_OF_27B.get(target.name):
        theirs = shape.hidden_size // shape.num_attention_heads
    if not math.isclose(scale, theirs**-0.5):
        problems.append(
            f"scores scaled by {scale:.4g} (query_pre_attn_scalar), not {theirs**-0.5:.4g}"
        )
    return problems


def _problems_of_rope(shape: Architecture, target: Target) -> list[str]:
    problems = []
    for kind, rope in ropes(shape).items():
        name = str(rope.get("rope_type", "default"))
        if kind == "sliding_attention" and name != "default":
            problems.append(f"a RoPE of the type {name!r} in windows")
        allowed = {"default", "linear", "yarn"}
        if target is _LLAMA:
            allowed.add("llama3")
        if name not in allowed:
            problems.append(f"a RoPE of the type {name!r}")
        if rope.get("partial_rotary_factor") is not None:
            problems.append("a partial RoPE")
        special = {"attention_factor", "mscale", "mscale_all_dim", "truncate"} & rope.keys()
        problems += [f"{one} of a RoPE" for one in sorted(special)]
    return problems
