"""Compute nanochat's model of 2026 (github.com/karpathy/nanochat, gpt.py at 92d63d4).

Neither transformers nor vLLM has it: value embeddings, scalars for each layer, alternating windows,
each token's embedding mixed with the one before it ("smear"), and half-way states taken off at the
end ("backout"). This class serves both sides: the trainer as any class of transformers, vLLM by its
backend for such classes (`register`).

The smear is an attention layer in its own right, the first. It has a window of two tokens and equal
scores, so it returns the mean of a token's embedding and the one before. A server therefore keeps
the previous embedding as it keeps keys and values, and packed rows find it in the prompt's group.

Shapes: B rows, T tokens, D width, H heads, E dimension of a head. Has never run on a GPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import create_causal_mask, sliding_window_overlay
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ttrl.nanochat import MODEL_TYPE

ARCHITECTURE = "Nanochat2026ForCausalLM"
_SMEAR_CHANNELS = 24
_GATE_CHANNELS = 12
_SHARPNESS = 1.2
"""Of queries, and of keys."""


class NanochatConfig(PretrainedConfig):
    """Configure a nanochat model. `num_hidden_layers` counts the smear, which is layer 0.

    attention_windows: of each layer, the tokens it looks back, its own included; None: all.
    value_layers: the layers with value embeddings.
    """

    model_type = MODEL_TYPE

    def __init__(
        self,
        vocab_size: int = 32768,
        hidden_size: int = 768,
        num_hidden_layers: int = 13,
        num_attention_heads: int = 6,
        max_position_embeddings: int = 2048,
        attention_windows: list[int | None] | None = None,
        value_layers: list[int] | None = None,
        rope_theta: float = 100_000.0,
        final_logit_softcapping: float = 15.0,
        initializer_range: float = 0.02,
        tie_word_embeddings: bool = False,
        **others: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = 4 * hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads
        self.head_dim = hidden_size // num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.attention_windows = attention_windows or [2] + [None] * (num_hidden_layers - 1)
        self.value_layers = value_layers or []
        # Not "rope_theta": transformers would take it for its own RoPE.
        self.rope_base = rope_theta
        self.final_logit_softcapping = final_logit_softcapping
        self.initializer_range = initializer_range
        others["tie_word_embeddings"] = tie_word_embeddings
        super().__init__(**others)


def _norm(x: Tensor) -> Tensor:
    """Return vectors [..., D] of mean square 1, computed in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(wide, (x.shape[-1],), eps=torch.finfo(torch.float32).eps).to(x.dtype)


class _Attention(nn.Module):
    """The attention interface's view of a layer."""

    is_causal = True

    def __init__(self, config: NanochatConfig, number: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = number
        self.head_dim = config.head_dim
        self.num_key_value_groups = 1
        self.attention_dropout = 0.0
        self.scaling = config.head_dim**-0.5
        self.window = config.attention_windows[number]

    def heads(self, x_BTD: Tensor) -> Tensor:
        """Return [B, H, T, E]."""
        x_BTHE: Tensor = x_BTD.unflatten(-1, (-1, self.head_dim))
        return x_BTHE.transpose(1, 2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, **others: Any) -> Tensor:
        """Return [B, T, D]. query, key, value: [B, H, T, E]."""
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, _eager_attention
        )
        out, _ = attend(
            self,
            query,
            key,
            value,
            mask,
            dropout=0.0,
            scaling=self.scaling,
            sliding_window=self.window,
            **others,
        )
        # vLLM's has no dimension of rows.
        return out.reshape(query.shape[0], query.shape[2], -1)  # type: ignore[no-any-return]


class SmearAttention(_Attention):
    """Returns the mean of each token's embedding and the one before it."""

    def forward(self, x_BTD: Tensor, mask: Any, **others: Any) -> Tensor:
        nothing = self.heads(torch.zeros_like(x_BTD))
        return self.attend(nothing, nothing, self.heads(x_BTD), mask, **others)


class Smear(GradientCheckpointingLayer):
    """Adds to each embedding a part of the one before it."""

    def __init__(self, config: NanochatConfig) -> None:
        super().__init__()
        self.attn = SmearAttention(config, 0)
        self.gate = nn.Linear(_SMEAR_CHANNELS, 1, bias=False)
        self.amount = nn.Parameter(torch.zeros(1))

    def forward(self, x_BTD: Tensor, positions_BT: Tensor, mask: Any, **others: Any) -> Tensor:
        """Map embeddings [B, T, D] to the input of the layers."""
        before_BTD = 2 * self.attn(x_BTD, mask, **others) - x_BTD
        gate_BT1 = self.amount.to(x_BTD.dtype) * torch.sigmoid(
            self.gate(x_BTD[..., :_SMEAR_CHANNELS])
        )
        has_before_BT1 = (positions_BT > 0).unsqueeze(-1)
        return x_BTD + torch.where(has_before_BT1, gate_BT1 * before_BTD, 0.0)


class BlockAttention(_Attention):
    """Attention with norms of queries and keys, and a gated value embedding in some layers."""

    def __init__(self, config: NanochatConfig, number: int) -> None:
        super().__init__(config, number)
        width = config.hidden_size
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        has_values = number in config.value_layers
        self.value_gate = (
            nn.Linear(_GATE_CHANNELS, config.num_attention_heads, bias=False)
            if has_values
            else None
        )

    def forward(
        self,
        x_BTD: Tensor,
        values_BTD: Tensor | None,
        rotation: tuple[Tensor, Tensor],
        mask: Any,
        **others: Any,
    ) -> Tensor:
        query, key, value = (
            self.heads(one(x_BTD)) for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        if values_BTD is not None and self.value_gate is not None:
            gate_BTH = 3 * torch.sigmoid(self.value_gate(x_BTD[..., :_GATE_CHANNELS]))
            value = value + gate_BTH.transpose(1, 2).unsqueeze(-1) * self.heads(values_BTD)
        query = _norm(_rotated(query, rotation)) * _SHARPNESS
        key = _norm(_rotated(key, rotation)) * _SHARPNESS
        out_BTD = self.attend(query, key, value, mask, **others)
        return self.o_proj(out_BTD)  # type: ignore[no-any-return]


def _rotated(x_BHTE: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn pairs of channels by minus their angles, as nanochat does."""
    cos, sin = (part.unsqueeze(1).to(x_BHTE.dtype) for part in rotation)
    first, second = x_BHTE.chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


class Feedforward(nn.Module):
    """Two matrices with relu² between them."""

    def __init__(self, config: NanochatConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x_BTD)).square())  # type: ignore[no-any-return]


class Block(GradientCheckpointingLayer):
    """A layer. It scales its input, and adds a part of the first layer's input."""

    def __init__(self, config: NanochatConfig, number: int) -> None:
        super().__init__()
        self.attn = BlockAttention(config, number)
        self.mlp = Feedforward(config)
        self.residual_scale = nn.Parameter(torch.ones(1))
        self.start_scale = nn.Parameter(torch.zeros(1))

    def forward(
        self,
        x_BTD: Tensor,
        start_BTD: Tensor,
        values_BTD: Tensor | None,
        rotation: tuple[Tensor, Tensor],
        mask: Any,
        **others: Any,
    ) -> Tensor:
        """Map hidden states [B, T, D]. start_BTD: the smear's output. values_BTD: value
        embeddings.
        """
        x_BTD = (
            self.residual_scale.to(x_BTD.dtype) * x_BTD
            + self.start_scale.to(x_BTD.dtype) * start_BTD
        )
        x_BTD = x_BTD + self.attn(_norm(x_BTD), values_BTD, rotation, mask, **others)
        return x_BTD + self.mlp(_norm(x_BTD))  # type: ignore[no-any-return]


class Backout(nn.Module):
    """Takes a part of the half-way states off the last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.amount = nn.Parameter(torch.zeros(1))

    def forward(self, x_BTD: Tensor, halfway_BTD: Tensor) -> Tensor:
        return _norm(x_BTD - self.amount.to(x_BTD.dtype) * halfway_BTD)


class NanochatPreTrainedModel(PreTrainedModel):
    config_class = NanochatConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block", "Smear"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True


class NanochatModel(NanochatPreTrainedModel):
    """Tokens to hidden states. It keeps no cache of its own: vLLM does, and training needs none."""

    def __init__(self, config: NanochatConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        blocks = [Block(config, number) for number in range(1, config.num_hidden_layers)]
        self.layers = nn.ModuleList([Smear(config), *blocks])
        tables = {
            str(number): nn.Embedding(config.vocab_size, config.hidden_size)
            for number in config.value_layers
        }
        self.value_embeds = nn.ModuleDict(tables)
        self.backout = Backout()
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast | tuple[Tensor]:
        """Return hidden states [B, T, D]. Needs the token ids: value embeddings are looked up by
        them.
        """
        if input_ids is None:
            raise ValueError("nanochat looks up its value embeddings by token ids; give input_ids")
        embedded = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        masks = self._masks(embedded, attention_mask, position_ids)
        rotation = self._rotation(position_ids)
        x = start = self.layers[0](_norm(embedded), position_ids, masks[0], **others)
        halfway = x
        for number, layer in enumerate(self.layers[1:], start=1):
            values = (
                self.value_embeds[str(number)](input_ids).to(x.dtype)
                if number in self.config.value_layers
                else None
            )
            x = layer(x, start, values, rotation, masks[number], **others)
            if number == (self.config.num_hidden_layers - 1) // 2 + 1:
                halfway = x
        x = self.backout(x, halfway)
        if return_dict is False:
            return (x,)
        return BaseModelOutputWithPast(last_hidden_state=x)

    def _masks(
        self, embedded: Tensor, attention_mask: Tensor | None, position_ids: Tensor
    ) -> list[Any]:
        """Return the mask of each layer, None if the attention interface needs none."""
        found: dict[int | None, Any] = {}
        for window in set(self.config.attention_windows):
            overlay = None if window is None else sliding_window_overlay(window)
            found[window] = create_causal_mask(
                config=self.config,
                inputs_embeds=embedded,
                attention_mask=attention_mask,
                past_key_values=None,
                position_ids=position_ids,
                and_mask_function=overlay,
            )
        return [found[window] for window in self.config.attention_windows]

    def _rotation(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [B, T, E / 2]."""
        dim = self.config.head_dim
        channels = torch.arange(0, dim, 2, dtype=torch.float32, device=position_ids.device)
        angles = position_ids.unsqueeze(-1).float() * self.config.rope_base ** (-channels / dim)
        return angles.cos(), angles.sin()


def _eager_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Attend step by step, for comparisons."""
    scores = query @ key.transpose(2, 3) * scaling
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(
        query.dtype
    )
    return (weights @ value).transpose(1, 2).contiguous(), weights


class Nanochat2026ForCausalLM(NanochatPreTrainedModel, GenerationMixin):
    """The model with its head and capped logits."""

    def __init__(self, config: NanochatConfig) -> None:
        super().__init__(config)
        self.model = NanochatModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, input_ids: Tensor | None = None, **others: Any) -> CausalLMOutputWithPast:
        """Return logits [B, T, V] in float32 or wider."""
        others.pop("return_dict", None)
        hidden = self.model(input_ids=input_ids, **others).last_hidden_state
        logits = self.lm_head(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        cap = self.config.final_logit_softcapping
        return CausalLMOutputWithPast(logits=cap * torch.tanh(logits / cap))


def register() -> None:
    """Let transformers' Auto classes make these models from a config.json."""
    AutoConfig.register(MODEL_TYPE, NanochatConfig, exist_ok=True)
    AutoModel.register(NanochatConfig, NanochatModel, exist_ok=True)
    AutoModelForCausalLM.register(NanochatConfig, Nanochat2026ForCausalLM, exist_ok=True)
