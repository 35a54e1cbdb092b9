"""Define norms, attention and layers of decoders, missing or different in torchtune 0.6.1.

- q/k norms come before RoPE, as in Qwen3 and Gemma 3 (torchtune applies them after, as nanochat
  does);
- windows are counted in positions, scores can be capped, and rows may be longer than the model's
  context.

Shapes: B rows, T tokens, D width, H query heads, K key/value heads, E dimension of a head.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchtune.modules import FeedForward, TransformerSelfAttentionLayer

from ttrl.training.kernels.attention import AttentionPlan, attend
from ttrl.training.kernels.widening import LayerNorm, Linear
from ttrl.training.models.architecture import Architecture
from ttrl.training.models.rope import Rotary, rotate


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv 1910.07467), in fp32 or wider. `plus_one`: the weight is an
    offset from 1 (Gemma). `bare`: there is none (nanochat)."""

    def __init__(self, dim: int, eps: float, plus_one: bool = False, bare: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.plus_one = plus_one
        self.scale = (
            None if bare else nn.Parameter(torch.zeros(dim) if plus_one else torch.ones(dim))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., dim]; same shape and dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.scale is None:
            scale = x.new_ones(x.shape[-1], dtype=wide)
        else:
            scale = self.scale.to(wide)
        scale = scale + 1.0 if self.plus_one else scale
        return F.rms_norm(x.to(wide), (x.shape[-1],), scale, self.eps).to(x.dtype)


def norm(shape: Architecture, dim: int) -> nn.Module:
    if shape.norm == "layer":
        return LayerNorm(dim, shape.norm_eps)
    return RMSNorm(
        dim, shape.norm_eps, plus_one=shape.norm == "rms_plus_one", bare=shape.norm == "rms_bare"
    )


class SquaredReLU(nn.Module):
    """max(x, 0)² (arXiv 2109.08668)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


def activation(name: str) -> nn.Module:
    """Make an activation by its Hugging Face name, one of ACTIVATIONS in `architecture`."""
    kinds: dict[str, type[nn.Module]] = {
        "silu": nn.SiLU,
        "relu": nn.ReLU,
        "relu2": SquaredReLU,
        "gelu": nn.GELU,
    }
    if name in kinds:
        return kinds[name]()
    return nn.GELU(approximate="tanh")


def for_products(x: Tensor) -> Tensor:
    """Return x in the dtype of matrix products: autocast would make, and keep, a copy for each of
    them.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return x.to(torch.get_autocast_dtype(device))
    return x


class GatedFeedForward(FeedForward):
    """torchtune's, with one input of both products under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, T, D] → [B, T, D]."""
        x = for_products(x)
        out: Tensor = self.w2(self.activation(self.w1(x)) * self.w3(x))
        return out


class SelfAttention(nn.Module):
    """Grouped-query self-attention, in the place of torchtune's MultiHeadAttention."""

    def __init__(self, shape: Architecture, layer: int) -> None:
        super().__init__()
        dim = shape.hidden_size
        self.head_dim = shape.head_dim
        self.q_proj = Linear(dim, shape.num_attention_heads * self.head_dim, bias=shape.qkv_bias)
        self.k_proj = Linear(dim, shape.num_key_value_heads * self.head_dim, bias=shape.qkv_bias)
        self.v_proj = Linear(dim, shape.num_key_value_heads * self.head_dim, bias=shape.qkv_bias)
        self.output_proj = Linear(
            shape.num_attention_heads * self.head_dim, dim, bias=shape.output_bias
        )
        self.q_norm = norm(shape, self.head_dim) if shape.qk_norm else None
        self.k_norm = norm(shape, self.head_dim) if shape.qk_norm else None
        self.norms_last = shape.norm == "rms_bare"
        self.kind, self.window = shape.rope_kinds[layer], shape.windows[layer]
        self.scale = shape.attention_scale
        self.soft_cap = shape.attention_soft_cap

    def forward(self, x: Tensor, y: Tensor, *, mask: AttentionPlan, input_pos: Rotary) -> Tensor:
        """Map x [B, T, D] (y, torchtune's second input, is the same tensor) → [B, T, D]. torchtune
        passes `mask` and `input_pos` through its layers to the attention: here the plan of
        attention, and RotaryEmbedding's output.
        """
        B, T, _ = x.shape
        x = for_products(x)
        rotary = None if self.kind is None else input_pos[self.kind]
        q, k, v = (
            projection(x).view(B, T, -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (q, k) if self.norms_last else self._normed(q, k)
        if rotary is not None:
            q = rotate(q, rotary)
            k = rotate(k, rotary)
        q, k = self._normed(q, k) if self.norms_last else (q, k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        attended = attend(
            q, k, v, mask, scale=self.scale, soft_cap=self.soft_cap, window=self.window
        )
        out: Tensor = self.output_proj(attended.transpose(1, 2).reshape(B, T, -1))
        return out

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return (q, k)
        return (self.q_norm(q), self.k_norm(k))


class ParallelLayer(TransformerSelfAttentionLayer):
    """Attention and feed-forward layer in parallel over one norm (Phi-1, Phi-2)."""

    def forward(self, x: Tensor, *, mask: AttentionPlan, input_pos: Rotary) -> Tensor:
        """Map x [B, T, D] → [B, T, D]."""
        h = self.sa_norm(x)
        out: Tensor = x + self.attn(h, h, mask=mask, input_pos=input_pos) + self.mlp(h)
        return out


def layer(shape: Architecture, number: int) -> TransformerSelfAttentionLayer:
    """Make the layer with a number, counted from 0."""
    dim = shape.hidden_size
    width = shape.intermediate_size
    bias = shape.mlp_bias
    feed_forward = (GatedFeedForward if shape.gated_mlp else FeedForward)(
        gate_proj=Linear(dim, width, bias=bias),
        down_proj=Linear(width, dim, bias=bias),
        up_proj=Linear(dim, width, bias=bias) if shape.gated_mlp else None,
        activation=activation(shape.activation),
    )
    return (ParallelLayer if shape.parallel else TransformerSelfAttentionLayer)(
        attn=SelfAttention(shape, number),
        mlp=feed_forward,
        sa_norm=norm(shape, dim),
        mlp_norm=None if shape.parallel else norm(shape, dim),
        sa_scale=norm(shape, dim) if shape.post_norms else None,
        mlp_scale=norm(shape, dim) if shape.post_norms else None,
    )
