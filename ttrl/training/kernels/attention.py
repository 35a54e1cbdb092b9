"""Attention over packed rows. Needs torch alone, so that it can be measured on machines without torchtune.

Rows hold every prompt once for all of its completions, so the mask is not plainly causal: a token attends to earlier tokens of
its own group and of its group's ancestors (`ttrl.data.packing.masks`). What follows from the ids alone is computed once per
microbatch, in an `AttentionPlan`; then the device and the kind of scores decide how attention is computed:

    CUDA   FlexAttention with a block mask built straight from the ids; never run on a GPU yet
    CPU    split and merge (`ttrl.training.kernels.split_attention`): no mask at all; by our own kernel where it can be compiled
           (`ttrl.training.kernels.native_attention`)
    CPU, soft cap or sliding window   the exact fallback: a dense mask, quadratic in T

A window that is longer than every sample changes nothing, and does not count as one.

Shapes: B rows, T tokens of a row, H query heads, K key/value heads, E dimension of a head.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ttrl.data.packing.masks import block_mask, dense_mask
from ttrl.training.kernels.split_attention import SplitPlan, never_compiled, split_attend, split_plan


@dataclass(eq=False)
class AttentionPlan:
    """What attention over these rows needs beyond queries, keys and values; the same for all layers. Made by `attention_plan`."""

    group_ids: Tensor
    parent_ids: Tensor
    input_pos: Tensor
    dtype: torch.dtype
    longest: int
    """Positions of the longest sample."""
    split: SplitPlan | None
    """For the CPU."""
    dense_masks: dict[int | None, Tensor] = field(default_factory=dict)
    block_masks: dict[int | None, BlockMask] = field(default_factory=dict)
    """By window, as needed."""

    @never_compiled
    def dense(self, window: int | None) -> Tensor:
        """Return the mask [B, 1, T, T] in the plan's dtype: 0 where a token may attend and -inf elsewhere. Built once per
        window."""
        if window not in self.dense_masks:
            allowed_BTT = dense_mask(self.group_ids, self.parent_ids)
            if window is not None:
                allowed_BTT &= self.input_pos.unsqueeze(1) > self.input_pos.unsqueeze(2) - window
            # As numbers to be added: a bool mask would be turned into such, and kept for the backward pass, once per layer.
            mask = torch.zeros(allowed_BTT.shape, dtype=self.dtype, device=allowed_BTT.device)
            self.dense_masks[window] = mask.masked_fill_(~allowed_BTT, -torch.inf).unsqueeze(1)
        return self.dense_masks[window]

    @never_compiled
    def blocks(self, window: int | None) -> BlockMask:
        """Return FlexAttention's block mask. Built once per window."""
        if window not in self.block_masks:
            self.block_masks[window] = block_mask(self.group_ids, self.parent_ids, input_pos=self.input_pos, window=window)
        return self.block_masks[window]


def attention_plan(group_ids_BT: Tensor, parent_ids_BT: Tensor, input_pos_BT: Tensor, dtype: torch.dtype) -> AttentionPlan:
    """Make the plan for packed rows and queries of `dtype`, once per microbatch, outside of the layers.

    group_ids, parent_ids: int64 [B, T], -1 in padding; input_pos: int64 [B, T], position in the unpacked sequence.
    """
    longest = int(input_pos_BT.max()) + 1
    on_cpu = group_ids_BT.device.type == "cpu"
    plan = AttentionPlan(
        group_ids_BT, parent_ids_BT, input_pos_BT, dtype, longest, split_plan(group_ids_BT, parent_ids_BT) if on_cpu else None
    )
    if not on_cpu:
        plan.blocks(None)
    return plan


def attend(
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute softmax attention with grouped queries. Returns [B, H, T, E]; values at padding are finite and meaningless.

    Scores are q·k × `scale` (1/√E unless given). With `soft_cap` c they become c·tanh(score/c) (Gemma 2, arXiv 2408.00118). With
    `window` w, a query at position p sees keys at positions above p - w, counted in the unpacked sequence.
    """
    scale = q_BHTE.shape[-1] ** -0.5 if scale is None else scale
    window = None if window is None or window >= plan.longest else window
    device = q_BHTE.device.type
    if torch.is_autocast_enabled(device):  # as PyTorch's own attention does
        lower = torch.get_autocast_dtype(device)
        q_BHTE, k_BKTE, v_BKTE = q_BHTE.to(lower), k_BKTE.to(lower), v_BKTE.to(lower)
    if plan.split is None:
        return flex_attend(q_BHTE, k_BKTE, v_BKTE, plan, scale, soft_cap, window, _compiled_flex_attention())
    if soft_cap is None and window is None:
        return split_attend(q_BHTE, k_BKTE, v_BKTE, plan.split, scale)
    return dense_attend(q_BHTE, k_BKTE, v_BKTE, plan, scale, soft_cap, window)


def dense_attend(
    q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, plan: AttentionPlan, scale: float, soft_cap: float | None, window: int | None
) -> Tensor:
    """Compute attention with a dense mask: the exact fallback, against which the other ways are tested. Memory is quadratic in
    T."""
    repeats = q_BHTE.shape[1] // k_BKTE.shape[1]
    if repeats > 1:  # enable_gqa leaves the fused CPU kernel
        k_BKTE, v_BKTE = k_BKTE.repeat_interleave(repeats, dim=1), v_BKTE.repeat_interleave(repeats, dim=1)
    mask = plan.dense(window).to(q_BHTE.dtype)
    if soft_cap is None:
        return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, attn_mask=mask, scale=scale)
    wide = torch.promote_types(q_BHTE.dtype, torch.float32)
    scores = (q_BHTE @ k_BKTE.transpose(-2, -1)).to(wide) * scale
    probabilities = torch.softmax(torch.tanh(scores / soft_cap) * soft_cap + mask, dim=-1)
    return probabilities.to(v_BKTE.dtype) @ v_BKTE


def flex_attend(
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    plan: AttentionPlan,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    kernel: Callable[..., Tensor] = flex_attention,
) -> Tensor:
    """Compute attention with FlexAttention (arXiv 2412.05496). Never run on a GPU; its masks and scores are tested on the CPU
    with the kernel's uncompiled form, which has no backward pass there."""
    ready = plan.block_masks.get(window)
    return kernel(
        q_BHTE,
        k_BKTE,
        v_BKTE,
        score_mod=None if soft_cap is None else _capped(soft_cap),
        block_mask=plan.blocks(window) if ready is None else ready,
        scale=scale,
        enable_gqa=True,
    )


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)


@functools.cache
def _capped(soft_cap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return soft_cap * torch.tanh(score / soft_cap)

    return score_mod
