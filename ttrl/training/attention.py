"""Attention over packed rows. Needs torch alone, so that it can be measured on machines without torchtune.

Shapes: B rows, T tokens of a row, H query heads, K key/value heads, E dimension of a head.

Rows hold every prompt once for all of its completions, so which tokens may see which is no plain causal mask: a token attends to
earlier tokens of its own group and of its group's ancestors (`ttrl.data.masks`). Two ways compute it:

    CUDA   FlexAttention with a block mask built straight from the group ids; never run on a GPU yet
    CPU    scaled_dot_product_attention with a dense mask (FlexAttention has no backward pass there in torch 2.13)

Left out for now: the split-and-merge way on CPU, sliding windows, soft caps.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ttrl.data.masks import block_mask, dense_mask

Mask = Tensor | BlockMask


def attention_mask(group_ids_BT: Tensor, parent_ids_BT: Tensor, dtype: torch.dtype) -> Mask:
    """The mask that `attend` wants on this device: a BlockMask on CUDA, else a tensor [B, 1, T, T] of the queries' dtype, 0 where
    a token may attend and -inf elsewhere."""
    if group_ids_BT.is_cuda:
        return block_mask(group_ids_BT, parent_ids_BT)
    allowed_BTT = dense_mask(group_ids_BT, parent_ids_BT)
    # As numbers to be added: a bool mask would be turned into such, and kept for the backward pass, once per layer.
    return torch.zeros(allowed_BTT.shape, dtype=dtype).masked_fill_(~allowed_BTT, -torch.inf).unsqueeze(1)


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)


def attend(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, mask: Mask) -> Tensor:
    """Softmax attention with grouped queries; scores are scaled by 1/√E. Returns [B, H, T, E]."""
    if isinstance(mask, BlockMask):
        return _compiled_flex_attention()(q_BHTE, k_BKTE, v_BKTE, block_mask=mask, enable_gqa=True)
    groups = q_BHTE.shape[1] // k_BKTE.shape[1]
    if groups > 1:  # enable_gqa leaves the fused CPU kernel
        k_BKTE, v_BKTE = k_BKTE.repeat_interleave(groups, dim=1), v_BKTE.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, attn_mask=mask)
