"""Decoders for the recipes, built from a Hugging Face folder's config.json and nothing else.

The skeleton is torchtune's (TransformerDecoder, its layers and feed-forward, so that its tools for checkpointing, sharding and
LoRA apply); attention, RoPE and the norm are ours:

- q/k norms come before RoPE, as in Qwen3 (torchtune 0.6.1 applies them after);
- RoPE frequencies are computed by transformers from the config itself, whatever the scaling type, so that they can't differ;
- attention takes its mask as it is, and rows may be longer than the model's context (positions start anew in each sample).

Shapes: B rows, T tokens, D width, H query heads, K key/value heads, E dimension of a head.
Left out for now: sliding windows, soft caps, Gemma's and Phi's blocks; a config that asks for them is refused.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torchtune.modules import FeedForward, TiedLinear, TransformerDecoder, TransformerSelfAttentionLayer
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ttrl.errors import ModelFolderError
from ttrl.training.attention import Mask, attend

_TUNE_NAMES = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.scale",
    "lm_head.weight": "output.weight",
    "model.layers.{}.input_layernorm.weight": "layers.{}.sa_norm.scale",
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.mlp_norm.scale",
    "model.layers.{}.self_attn.q_norm.weight": "layers.{}.attn.q_norm.scale",
    "model.layers.{}.self_attn.k_norm.weight": "layers.{}.attn.k_norm.scale",
    "model.layers.{}.self_attn.o_proj.weight": "layers.{}.attn.output_proj.weight",
    "model.layers.{}.self_attn.o_proj.bias": "layers.{}.attn.output_proj.bias",
    **{
        f"model.layers.{{}}.self_attn.{p}_proj.{kind}": f"layers.{{}}.attn.{p}_proj.{kind}"
        for p in "qkv"
        for kind in ("weight", "bias")
    },
    **{
        f"model.layers.{{}}.mlp.{theirs}_proj.weight": f"layers.{{}}.mlp.{ours}.weight"
        for theirs, ours in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
    },
}
_HF_NAMES = {ours: theirs for theirs, ours in _TUNE_NAMES.items()}

_ARCHITECTURE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "attention_bias",
    "tie_word_embeddings",
)
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def _renamed(name: str, names: dict[str, str]) -> str | None:
    layer = re.search(r"\.(\d+)\.", name)
    new = names.get(name.replace(layer[0], ".{}.", 1) if layer else name)
    return new.format(layer[1]) if new and layer else new


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv 1910.07467), computed in fp32 or wider."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., dim] → the same shape and dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), (x.shape[-1],), self.scale.to(wide), self.eps).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions (RoPE, arXiv 2104.09864, in the half-rotation form of Hugging Face checkpoints)."""

    inverse_frequencies: Tensor

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        parameters = config.rope_parameters
        kind = parameters.get("rope_type", "default")
        if kind == "default":
            dim = _head_dim(config)
            inverse = 1.0 / parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
            self.scaling = 1.0
        else:
            inverse, self.scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        self.register_buffer("inverse_frequencies", inverse, persistent=False)

    @torch.no_grad()
    def forward(self, positions_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [B, T] → cosines and sines, each [B, 1, T, E]. Angles are computed in fp32 whatever `dtype` is."""
        with torch.autocast(positions_BT.device.type, enabled=False):
            angles = positions_BT.float().unsqueeze(-1) * self.inverse_frequencies.float()
            angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
            return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


def _rotate(x_BHTE: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (part.to(x_BHTE.dtype) for part in rotary)
    first, second = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos + torch.cat([-second, first], dim=-1) * sin


class SelfAttention(nn.Module):
    """Grouped-query self-attention with optional biases and q/k norms, in the place of torchtune's MultiHeadAttention."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        family, dim, head_dim = config.model_type, config.hidden_size, _head_dim(config)
        biased = family == "qwen2" or bool(getattr(config, "attention_bias", False))
        self.head_dim = head_dim
        self.q_proj = nn.Linear(dim, config.num_attention_heads * head_dim, bias=biased)
        self.k_proj = nn.Linear(dim, config.num_key_value_heads * head_dim, bias=biased)
        self.v_proj = nn.Linear(dim, config.num_key_value_heads * head_dim, bias=biased)
        self.output_proj = nn.Linear(config.num_attention_heads * head_dim, dim, bias=biased and family != "qwen2")
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps) if family == "qwen3" else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps) if family == "qwen3" else None

    def forward(self, x: Tensor, y: Tensor, *, mask: Mask, input_pos: tuple[Tensor, Tensor]) -> Tensor:
        """x [B, T, D] (y, torchtune's second input, is the same tensor); `input_pos` are RotaryEmbedding's cosines and sines."""
        B, T, _ = x.shape
        q, k, v = (proj(x).view(B, T, -1, self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = attend(_rotate(q, input_pos), _rotate(k, input_pos), v, mask)
        return self.output_proj(out.transpose(1, 2).reshape(B, T, -1))


class Decoder(TransformerDecoder):
    """torchtune's decoder with one RoPE computation per pass, and hidden states as its output."""

    rope: RotaryEmbedding
    config: PretrainedConfig

    def hidden_states(self, tokens_BT: Tensor, positions_BT: Tensor, mask: Mask) -> Tensor:
        """Final hidden states [B, T, D], normed, not yet projected to the vocabulary."""
        h = self.tok_embeddings(tokens_BT)
        rotary = self.rope(positions_BT, h.dtype)
        for layer in self.layers:
            h = layer(h, mask=mask, input_pos=rotary)
        return self.norm(h)


def _head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def read_config(folder: str | Path) -> PretrainedConfig:
    """The config of a model folder. Raises ModelFolderError where it is missing, or asks for what our decoder lacks."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ModelFolderError(f"{folder}: no config.json there; give a model folder in Hugging Face layout")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError, StrictDataclassError) as error:
        raise ModelFolderError(f"{folder}/config.json cannot be read: {error}") from error
    if config.model_type not in _FAMILIES:
        raise ModelFolderError(
            f"{folder}: models of type {config.model_type!r} cannot be trained yet; the types that can: {', '.join(_FAMILIES)}"
        )
    wrong = []
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []) or (
        config.model_type == "mistral" and getattr(config, "sliding_window", None)
    ):
        wrong.append("sliding-window attention")
    if getattr(config, "mlp_bias", False):
        wrong.append("biases in the feed-forward layers")
    if config.hidden_act != "silu":
        wrong.append(f"the activation {config.hidden_act!r}")
    rope = config.rope_parameters
    if rope.get("rope_type", "default") not in ("default", "linear", "llama3", "yarn"):
        wrong.append(f"the RoPE type {rope['rope_type']!r}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        wrong.append("RoPE over a part of the head")
    if wrong:
        raise ModelFolderError(f"{folder}: its config asks for {' and '.join(wrong)}, which ttrl does not compute yet")
    return config


def build_decoder(config: PretrainedConfig) -> Decoder:
    """A decoder of the config's shape, on the current default device and dtype, with parameters of no use yet."""
    dim, eps = config.hidden_size, config.rms_norm_eps
    layers = nn.ModuleList(
        TransformerSelfAttentionLayer(
            attn=SelfAttention(config),  # type: ignore[arg-type]  # takes the place of torchtune's class
            mlp=FeedForward(
                gate_proj=nn.Linear(dim, config.intermediate_size, bias=False),
                down_proj=nn.Linear(config.intermediate_size, dim, bias=False),
                up_proj=nn.Linear(dim, config.intermediate_size, bias=False),
            ),
            sa_norm=RMSNorm(dim, eps),
            mlp_norm=RMSNorm(dim, eps),
        )
        for _ in range(config.num_hidden_layers)
    )
    embeddings = nn.Embedding(config.vocab_size, dim)
    decoder = Decoder(
        tok_embeddings=embeddings,
        layers=layers,
        max_seq_len=config.max_position_embeddings,
        num_heads=config.num_attention_heads,
        head_dim=_head_dim(config),
        norm=RMSNorm(dim, eps),
        output=TiedLinear(embeddings) if config.tie_word_embeddings else nn.Linear(dim, config.vocab_size, bias=False),
    )
    decoder.rope, decoder.config = RotaryEmbedding(config), config
    return decoder


def load_weights(folder: str | Path, tied: bool) -> dict[str, Tensor]:
    """The parameters of a model folder under torchtune's names, on the CPU, in the dtype of the files.

    Reads sharded and single safetensors; pickles are refused. Raises ModelFolderError naming what is missing or unknown.
    """
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelFolderError(f"{index} is damaged ({type(error).__name__}: {error}); copy or download it again") from error
    weights: dict[str, Tensor] = {}
    for file in files:
        if not (folder / file).is_file():
            raise ModelFolderError(
                f"{folder}: {file} is not there; save the model with save_pretrained (safetensors, not pickles)"
            )
        try:
            tensors = load_file(folder / file)
        except (SafetensorError, OSError) as error:
            raise ModelFolderError(f"{folder / file} cannot be read ({error}); copy or download it again") from error
        for theirs, tensor in tensors.items():
            if theirs.endswith("rotary_emb.inv_freq") or (tied and theirs == "lm_head.weight"):
                continue
            ours = _renamed(theirs, _TUNE_NAMES)
            if ours is None:
                raise ModelFolderError(f"{folder}/{file}: the parameter {theirs!r} has no place in our decoder")
            weights[ours] = tensor
    return weights


def to_hugging_face_names(weights: dict[str, Tensor], tied: bool) -> dict[str, Tensor]:
    """The inverse of `load_weights`. A tied head is written out as lm_head.weight too: vLLM's reload on CPU needs it, and
    transformers reads the same model from it."""
    renamed: dict[str, Tensor] = {}
    for ours, tensor in weights.items():
        theirs = _renamed(ours, _HF_NAMES)
        assert theirs is not None, f"no Hugging Face name for {ours}"
        renamed[theirs] = tensor
    if tied:
        renamed["lm_head.weight"] = renamed["model.embed_tokens.weight"].clone()
    return renamed


def check_same_architecture(config: PretrainedConfig, own: PretrainedConfig, folder: Any) -> None:
    """Raises ModelFolderError where a model of `config` would compute something else than one of `own` with the same weights."""
    different = [
        f"{name} is {getattr(config, name, None)!r} instead of {getattr(own, name, None)!r}"
        for name in _ARCHITECTURE
        if getattr(config, name, None) != getattr(own, name, None)
    ]
    if different:
        raise ModelFolderError(f"{folder}: not the architecture of the policy: {'; '.join(different)}")


def check_weights(own: Mapping[str, Tensor], weights: Mapping[str, Tensor], folder: Any) -> None:
    """Raises ModelFolderError where weights and parameters have other names or shapes (of sharded ones, the whole shape)."""
    missing, surplus = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    shapes = [
        f"{name} {tuple(weights[name].shape)} instead of {tuple(own[name].shape)}"
        for name in own.keys() & weights.keys()
        if own[name].shape != weights[name].shape
    ]
    if missing or surplus or shapes:
        raise ModelFolderError(
            f"{folder}: the weights do not fit its config.json: "
            f"missing {missing[:3] or 'none'}, not expected {surplus[:3] or 'none'}, other shapes {sorted(shapes)[:3] or 'none'}"
        )


def load_into(decoder: Decoder, weights: dict[str, Tensor], folder: Any) -> None:
    """Copies weights into a decoder, converting the dtype. Raises ModelFolderError with missing names and shapes that differ."""
    own = dict(decoder.named_parameters())
    check_weights(own, weights, folder)
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])
