"""Compute rotary positions (RoPE, arXiv 2104.09864), in the half-rotation form of Hugging Face
checkpoints.

transformers computes the frequencies from the config itself, for any scaling type: they cannot
differ.

Shapes: B rows, T tokens, H heads, E dimension of a head, R its rotated dimensions (the first ones).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ttrl.families.table import OWN_DECODERS

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
EVERY_LAYER = "every_layer"

Rotary = dict[str, tuple[Tensor, Tensor]]
"""Cosines and sines, each [B, T, 1, R/2], by kind of layer."""


def frequencies(config: PretrainedConfig, kind: str, context: int) -> tuple[Tensor, float]:
    """Return inverse frequencies [R/2] in fp32 on the CPU, negative in families with backward
    rotation, and the factor of cosines and sines, for layers of `kind`.

    "longrope" and "dynamic" depend on the sequence length in transformers: the longest of the
    current batch. vLLM decides once and for all, because keys in the cache are rotated already. So
    do we, to give a token the same keys in every packing: for longrope by `context`, the longest
    sequence to expect (its max_model_len); for dynamic by the model's own context, not the
    server's.
    """
    nested = kind != EVERY_LAYER
    if nested:
        parameters = config.rope_parameters[kind]
    else:
        parameters = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    with torch.device("cpu"):  # for any default device
        rope_type = parameters["rope_type"]
        if rope_type == "default":
            dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
            if OWN_DECODERS[config.model_type].turns_backwards:
                sign = -1.0
            else:
                sign = 1.0
            return sign / parameters["rope_theta"] ** (
                torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
            ), 1.0
        if rope_type == "dynamic":
            context = config.max_position_embeddings
        layer = {"layer_type": kind} if nested else {}
        return ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=context, **layer)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions, for each kind of layer, possibly none. Frequencies stay in
    fp32: they are recomputed after a move."""

    def __init__(self, config: PretrainedConfig, kinds: tuple[str, ...], context: int) -> None:
        super().__init__()
        self._computed = {kind: frequencies(config, kind, context) for kind in kinds}
        self.materialise(torch.get_default_device())

    def materialise(self, device: torch.device | str) -> None:
        for kind, (inverse, _) in self._computed.items():
            self.register_buffer(f"{kind}_frequencies", inverse.to(device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        apply: Callable[..., Any] = super()._apply
        apply(fn, recurse)
        if self._computed:
            self.materialise(next(self.buffers()).device)
        return self

    @torch.no_grad()
    def forward(self, positions_BT: Tensor, dtype: torch.dtype) -> Rotary:
        """Map positions [B, T] → cosines and sines in `dtype`; angles are always computed in
        fp32.
        """
        rotary = {}
        with torch.autocast(positions_BT.device.type, enabled=False):
            for kind, (_, factor) in self._computed.items():
                angles = positions_BT.float().unsqueeze(-1) * self.get_buffer(f"{kind}_frequencies")
                angles = angles.unsqueeze(2)
                rotary[kind] = (
                    (angles.cos() * factor).to(dtype),
                    (angles.sin() * factor).to(dtype),
                )
        return rotary


def rotate(x_BTHE: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate queries or keys by their positions; dimensions from R on pass through."""
    cos, sin = (part.to(x_BTHE.dtype) for part in rotary)
    half = cos.shape[-1]
    sizes = (half, half, x_BTHE.shape[-1] - 2 * half)
    first, second, rest = x_BTHE.split(sizes, dim=-1)
    parts = (
        # In 16 bits, the sum is rounded once.
        torch.addcmul(first * cos, second, sin, value=-1),
        torch.addcmul(second * cos, first, sin),
        rest,
    )
    return torch.cat(parts, dim=-1)
