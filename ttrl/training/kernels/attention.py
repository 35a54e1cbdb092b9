"""Compute attention over packed rows. Needs only torch, to be measurable on machines without
torchtune.

Rows hold every prompt once for all of its completions, so the mask is not plainly causal: a token
attends to earlier tokens of its own group and of its group's ancestors (`ttrl.data.packing.masks`).
Results of the ids are computed once per microbatch, in an `AttentionPlan`; then the device and the
kind of scores choose the method:

    CUDA   FlexAttention with a block mask built straight from the ids, always compiled
    CUDA, float64   the exact fallback, a head at a time: FlexAttention adds up in fp32 at most
    CPU    split and merge (`ttrl.training.kernels.split_attention`): no mask at all
    CPU, soft cap or sliding window   the exact fallback: a dense mask, quadratic in T

On CPUs, a window longer than every sample changes nothing, and does not count as one.

A graph per length would mean a compilation per microbatch, up to PyTorch's limit and then attention
with all S × S scores. So compiled code sees the rows laid end to end, as one row with a dynamic
number of tokens; batch-dependent values come in tensors; uncompiled calls raise an error. A model
has one graph with gradients and one without, for layers with a window one more each.

Shapes: B rows, T tokens of a row, S = B·T rounded up, H query heads, K key/value heads, E dimension
of a head.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from ttrl.data.packing.masks import (
    DEFAULT_BLOCK_SIZE,
    block_mask,
    dense_mask,
    free_to_look,
    mask_rule,
    subtree_ends,
)
from ttrl.errors import UserError
from ttrl.training.kernels.split_attention import (
    SplitPlan,
    never_compiled,
    split_attend,
    split_plan,
)

_LISTS = [
    f"{full}{of}_{what}"
    for of in ("kv", "q")
    for full in ("", "full_")
    for what in ("num_blocks", "indices")
]
# Bytes of shared memory for a block, as sm_80 has; sm_86, sm_89 and sm_120 have 99 KiB.
_LARGE_TILES = 163 * 1024
_NARROWEST = 16  # The narrowest heads FlexAttention takes on GPUs; others are padded with zeros
# Of compiled attention in a process: far more than its models, dtypes and kinds of scores need.
_GRAPHS = 64


class FlexMask(NamedTuple):
    """A block mask over rows laid end to end, as tensors only; compiled code takes their lengths as
    dynamic.
    """

    ends: Tensor
    """int64 [1, S]"""
    near: tuple[Tensor, Tensor] | None
    """With a window: as `mask_rule` takes it."""
    lists: dict[str, Tensor]
    """Of blocks, by BlockMask's names."""

    @property
    def block_mask(self) -> BlockMask:
        """The mask itself."""
        S = self.ends.shape[1]
        lists: dict[str, Any] = self.lists
        return BlockMask(
            (S, S),
            **lists,
            BLOCK_SIZE=(DEFAULT_BLOCK_SIZE,) * 2,
            mask_mod=mask_rule(self.ends, self.near),
        )


@dataclass(eq=False)
class AttentionPlan:
    """Inputs of attention over these rows besides queries, keys and values; the same for all
    layers. Made by `attention_plan`.
    """

    group_ids: Tensor
    parent_ids: Tensor
    input_pos: Tensor
    dtype: torch.dtype
    longest: int
    """Positions of the longest sample; on other devices than CPUs, at least as many."""
    split: SplitPlan | None
    """For the CPU."""
    dense_masks: dict[int | None, Tensor] = field(default_factory=dict)
    flex_masks: dict[int | None, FlexMask] = field(default_factory=dict)
    """By window, as needed."""

    @never_compiled
    def dense(self, window: int | None) -> Tensor:
        """Return the mask [B, 1, T, T] in the plan's dtype: 0 for visible tokens and -inf
        elsewhere. Built once per window."""
        if window not in self.dense_masks:
            allowed_BTT = dense_mask(self.group_ids, self.parent_ids)
            if window is not None:
                allowed_BTT &= self.input_pos.unsqueeze(1) > self.input_pos.unsqueeze(2) - window
            # As numbers to be added: a bool mask would be turned into such, and kept for the
            # backward pass, once per layer.
            mask = torch.zeros(allowed_BTT.shape, dtype=self.dtype, device=allowed_BTT.device)
            self.dense_masks[window] = mask.masked_fill_(~allowed_BTT, -torch.inf).unsqueeze(1)
        return self.dense_masks[window]

    def flex(self, window: int | None) -> FlexMask:
        """Return the mask of FlexAttention over the rows laid end to end. Built once per window."""
        if window not in self.flex_masks:
            if self.flex_masks:
                ends = next(iter(self.flex_masks.values())).ends
            else:
                rows, T = self.group_ids.shape
                ends = subtree_ends(self.group_ids, self.parent_ids)
                ends = (ends + T * torch.arange(rows, device=ends.device).unsqueeze(1)).view(1, -1)
                behind = torch.arange(ends.shape[1], flex_length(rows * T), device=ends.device)
                ends = torch.cat([ends, behind.unsqueeze(0) + 1], dim=1)
            near = None
            if window is not None:
                positions = F.pad(
                    self.input_pos.reshape(1, -1), (0, ends.shape[1] - self.input_pos.numel())
                )
                near = positions, positions - window
            mask = block_mask(ends, near)
            lists = {name: getattr(mask, name) for name in _LISTS}
            for tensor in (ends, *(near or ())):
                torch._dynamo.mark_dynamic(tensor, 1)
            for tensor in lists.values():
                torch._dynamo.mark_dynamic(tensor, list(range(2, tensor.ndim)))
            self.flex_masks[window] = FlexMask(ends, near, lists)
        return self.flex_masks[window]


def flex_length(tokens: int) -> int:
    """Return S, a multiple of FlexAttention's blocks: its kernels then check no borders. Two blocks
    at least, since lists of one trigger another compilation."""
    return max(2, -(-tokens // DEFAULT_BLOCK_SIZE)) * DEFAULT_BLOCK_SIZE


def attention_plan(
    group_ids_BT: Tensor, parent_ids_BT: Tensor, input_pos_BT: Tensor, dtype: torch.dtype
) -> AttentionPlan:
    """Make the plan for packed rows and queries of `dtype`, once per microbatch, outside of the
    layers.

    group_ids, parent_ids: int64 [B, T], -1 in padding; input_pos: int64 [B, T], position in the
        unpacked sequence.
    """
    if free_to_look(group_ids_BT.device):
        longest = int(input_pos_BT.max()) + 1
        split = split_plan(group_ids_BT, parent_ids_BT)
    else:
        longest = sys.maxsize
        split = None
    return AttentionPlan(group_ids_BT, parent_ids_BT, input_pos_BT, dtype, longest, split)


def attend(
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute softmax attention with grouped queries. Returns [B, H, T, E]; values at padding are
    finite and meaningless.

    Scores are q·k × `scale` (1/√E unless given). With `soft_cap` c they become c·tanh(score/c)
    (Gemma 2, arXiv 2408.00118). With `window` w, a query at position p sees keys at positions above
    p - w, counted in the unpacked sequence. With `sinks`, each head has one more score, for a key
    of value zero (gpt-oss, arXiv 2508.10925); computed with a dense mask, head by head.
    """
    if scale is None:
        scale = q_BHTE.shape[-1] ** -0.5
    if window is None or window >= plan.longest:
        window = None
    device = q_BHTE.device.type
    if torch.is_autocast_enabled(device):  # as PyTorch's own attention does
        lower = torch.get_autocast_dtype(device)
        q_BHTE = q_BHTE.to(lower)
        k_BKTE = k_BKTE.to(lower)
        v_BKTE = v_BKTE.to(lower)
    if sinks_H is not None:
        return dense_attend_by_head(q_BHTE, k_BKTE, v_BKTE, plan, scale, soft_cap, window, sinks_H)
    if plan.split is None and q_BHTE.dtype is torch.float64:
        return dense_attend_by_head(q_BHTE, k_BKTE, v_BKTE, plan, scale, soft_cap, window)
    if plan.split is None:
        return flex_attend(q_BHTE, k_BKTE, v_BKTE, plan, scale, soft_cap, window)
    if soft_cap is None and window is None:
        return split_attend(q_BHTE, k_BKTE, v_BKTE, plan.split, scale)
    return dense_attend(q_BHTE, k_BKTE, v_BKTE, plan, scale, soft_cap, window)


def dense_attend(
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    plan: AttentionPlan,
    scale: float,
    soft_cap: float | None,
    window: int | None,
) -> Tensor:
    """Compute attention with a dense mask: the exact fallback, and the reference for testing the
    other ways. Memory is quadratic in T."""
    return _masked_attend(q_BHTE, k_BKTE, v_BKTE, plan.dense(window), scale, soft_cap)


@never_compiled
def dense_attend_by_head(
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    plan: AttentionPlan,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute the same for one row and key/value head at a time, and again in the backward pass:
    the peak is the mask and one head's scores."""
    mask = plan.dense(window)
    how = (scale, soft_cap)
    rows = []
    for row in range(len(q_BHTE)):
        queries = q_BHTE[row : row + 1].chunk(k_BKTE.shape[1], dim=1)
        keys = k_BKTE[row : row + 1].split(1, dim=1)
        values = v_BKTE[row : row + 1].split(1, dim=1)
        heads = []
        sinks = [None] * len(keys) if sinks_H is None else sinks_H.chunk(len(keys))
        for q, k, v, sink in zip(queries, keys, values, sinks, strict=True):
            inputs = (q, k, v, mask[row : row + 1], *how, sink)
            heads.append(checkpoint(_masked_attend, *inputs, use_reentrant=False))
        rows.append(torch.cat(heads, dim=1))
    return torch.cat(rows)


def _masked_attend(
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    mask_B1TT: Tensor,
    scale: float,
    soft_cap: float | None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    repeats = q_BHTE.shape[1] // k_BKTE.shape[1]
    if repeats > 1:  # enable_gqa leaves the fused CPU kernel
        k_BKTE = k_BKTE.repeat_interleave(repeats, dim=1)
        v_BKTE = v_BKTE.repeat_interleave(repeats, dim=1)
    mask = mask_B1TT.to(q_BHTE.dtype)
    if soft_cap is None and sinks_H is None:
        return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, attn_mask=mask, scale=scale)
    wide = torch.promote_types(q_BHTE.dtype, torch.float32)
    scores = (q_BHTE @ k_BKTE.transpose(-2, -1)).to(wide) * scale
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    scores = scores + mask
    if sinks_H is not None:
        column = sinks_H.to(wide).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    probabilities = torch.softmax(scores, dim=-1)[..., : v_BKTE.shape[-2]]
    return probabilities.to(v_BKTE.dtype) @ v_BKTE


def attend_trees(
    q_1HSE: Tensor,
    k_1KSE: Tensor,
    v_1KSE: Tensor,
    mask: FlexMask,
    scale: float,
    soft_cap: float | None,
    options: Any,
) -> Tensor:
    """Call FlexAttention on rows laid end to end: the compiled part. `options` are its kernels'."""

    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert soft_cap is not None
        return soft_cap * torch.tanh(score / soft_cap)

    out: Tensor = flex_attention(
        q_1HSE,
        k_1KSE,
        v_1KSE,
        score_mod=None if soft_cap is None else capped,
        block_mask=mask.block_mask,
        scale=scale,
        enable_gqa=True,
        kernel_options=options,
    )
    return out


def kernel_options(head_dim: int, dtype: torch.dtype, shared_memory: int) -> dict[str, int | bool]:
    """Return options of FlexAttention's kernels for a GPU with this much shared memory for a block,
    in bytes.

    With heads above 128, PyTorch's tiles need more than the 99 KiB of GPUs with 24 GB and of sm_120
    (pytorch issues 180278 and 198224; the backward pass's here are the fastest found there).
    `tools/check_kernels.py` compiles them all.
    """
    options: dict[str, int | bool] = {"IS_DIVISIBLE": True}
    if head_dim <= 128 or shared_memory >= _LARGE_TILES:
        return options
    if dtype is torch.float32:
        sizes = (64, 16, 2, 4)
    else:
        sizes = (64, 32, 2, 4)
    options |= zip(
        ("fwd_BLOCK_M", "fwd_BLOCK_N", "fwd_num_stages", "fwd_num_warps"), sizes, strict=True
    )
    if dtype is not torch.float32:  # PyTorch's are small for it
        options |= {f"bwd_BLOCK_{side}": 32 for side in ("M1", "N1", "M2", "N2")} | {
            "bwd_num_stages": 2,
            "bwd_num_warps": 4,
        }
    return options


@never_compiled
def flex_attend(
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    plan: AttentionPlan,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    kernel: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Compute attention with FlexAttention (arXiv 2412.05496): by `compiled_flex`, unless another
    `kernel` is given. Raises UserError if it would run uncompiled.

    Keys and values are laid out for each query head: grouped, the backward pass has too few
    programs, and takes half as long again (H100). Compared on the CPU; on a GPU in runs of
    tests/gpu with partly lost results.
    """
    # Here, hidden from any compiler of whole layers.
    kernel = compiled_flex() if kernel is None else kernel
    B, H, T, E = q_BHTE.shape
    mask = plan.flex(window)
    S = mask.ends.shape[1]
    narrow = max(0, _NARROWEST - E)

    def joined(x_BHTE: Tensor) -> Tensor:
        """Lay the rows end to end, repeating heads of keys and values for each of their query
        heads.
        """
        x_HSE = F.pad(
            x_BHTE.transpose(1, 2).flatten(0, 1), (0, narrow, 0, 0, 0, S - B * T)
        ).transpose(0, 1)
        times = H // x_HSE.shape[0]
        if times > 1:
            x_HSE = x_HSE.unsqueeze(1).expand(-1, times, -1, -1).flatten(0, 1)
        # A view if memory is [B, T, H, E], as after projections, and B·T a multiple of blocks.
        else:
            x_HSE = x_HSE.transpose(0, 1).contiguous().transpose(0, 1)
        x_1HSE = x_HSE.unsqueeze(0)
        torch._dynamo.mark_dynamic(x_1HSE, 2)
        return x_1HSE

    if q_BHTE.is_cuda:
        properties: Any = torch.cuda.get_device_properties(q_BHTE.device)
        shared = properties.shared_memory_per_block_optin
    else:
        shared = sys.maxsize
    options = kernel_options(E, q_BHTE.dtype, shared)
    try:
        out = kernel(joined(q_BHTE), joined(k_BKTE), joined(v_BKTE), mask, scale, soft_cap, options)
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        raise UserError(
            f"attention was compiled {_GRAPHS} times in this process, the limit; without "
            f"compiling, {S} tokens would need {S}×{S} scores. Set TORCH_LOGS=recompiles in the "
            "environment to see the reasons"
        ) from error
    out_BTHE: Tensor = out[0].transpose(0, 1)[: B * T, :, :E].unflatten(0, (B, T))
    return out_BTHE.transpose(1, 2)


def _attend_compiled(q_1HSE: Tensor, *arguments: Any) -> Tensor:
    if not torch.compiler.is_dynamo_compiling():  # compiled code does not come here
        S = q_1HSE.shape[2]
        raise UserError(
            f"torch.compile is switched off, and without it, attention over {S} tokens would need "
            f"{S}×{S} scores; remove TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE from the "
            "environment, and torch._dynamo's disable and suppress_errors from the code, or train "
            "on CPUs (device: cpu)"
        )
    return attend_trees(q_1HSE, *arguments)


@functools.cache
def compiled_flex(backend: str | Callable[..., Any] = "inductor") -> Callable[..., Tensor]:
    """Return `attend_trees` compiled, with lengths as dynamic as they are marked, and nothing
    else.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
    # Makes it visible to selective checkpointing.
    options: dict[str, str | int | bool | Callable[..., Any]] | None = None
    if backend == "inductor":
        options = {"wrap_inductor_compiled_regions": True}
    compiled: Callable[..., Tensor] = torch.compile(
        _attend_compiled, backend=backend, options=options, fullgraph=True, dynamic=False
    )
    return compiled
