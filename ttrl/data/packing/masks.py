"""Compute packed rows' attention masks from group ids only.

The rule: a token attends to earlier tokens of its row, and itself, in its own group and in its
group's ancestors. Padding attends to itself: no softmax row is empty.

Groups stand depth first: a group's continuations follow it without a gap, at any depth. A token is
therefore visible from itself to the end of its group's subtree, and one number per token suffices:
query q sees key k if k <= q < end[k]. No mask grows with the depth of the tree or with the square
of the number of groups.

Shapes: B rows, T positions, G groups of the row with the most, N blocks of a row.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

DEFAULT_BLOCK_SIZE = 128


def free_to_look(device: torch.device) -> bool:
    """Tell whether a tensor's values can be read without waiting for queued device work."""
    return device.type == "cpu"


def subtree_ends(group_ids: Tensor, parent_ids: Tensor) -> Tensor:
    """Return int64 [B, T]: one past the last position of the row with attention to this one.

    group_ids, parent_ids: int64 [B, T], -1 in padding; groups are runs and stand depth first, as
        `PackedTensors.check` demands.
    """
    rows, seq_len = group_ids.shape
    device = group_ids.device
    position = torch.arange(seq_len, device=device).expand(rows, -1)
    look = free_to_look(device)
    # A row of T tokens has at most T groups.
    if look:
        num_groups = max(int(group_ids.max()) + 1, 1)
    else:
        num_groups = seq_len
    # Padding goes into a spare last column.
    slot = torch.where(group_ids < 0, num_groups, group_ids)

    def column(fill: int) -> Tensor:
        return torch.full((rows, num_groups + 1), fill, dtype=torch.int64, device=device)

    first = column(seq_len).scatter_reduce_(1, slot, position, "amin")
    stop = column(0).scatter_reduce_(1, slot, position + 1, "amax")
    length = column(0).scatter_add_(1, slot, torch.ones_like(position))
    own = torch.arange(num_groups + 1, device=device).expand(rows, -1)
    parent = own.clone().scatter_(1, slot, torch.where(group_ids < 0, num_groups, parent_ids))
    # The sizes of a group and its descendants are added to its ancestors. After the k-th step, a
    # group has the sum of the 2^k - 1 generations below it, and `above` is its ancestor 2^k
    # generations up; the spare column is above roots.
    end = stop
    held = length
    above = torch.where(parent == own, num_groups, parent)
    for _ in range(num_groups.bit_length()):
        if look and bool((above == num_groups).all()):
            break
        end = end.scatter_reduce(1, above, end, "amax")
        held = held.scatter_add(1, above, held)
        above = above.gather(1, above)
    depth_first = ((held == end - first)[:, :-1] | (length == 0)[:, :-1]).all()
    if look:
        assert bool(depth_first), "groups of a packed row do not stand depth first"
    else:
        torch._assert_async(depth_first, "groups of a packed row do not stand depth first")
    return torch.where(group_ids < 0, position + 1, end.gather(1, slot))


def dense_mask(group_ids: Tensor, parent_ids: Tensor) -> Tensor:
    """Return bool [B, T, T], True if the row's token may attend to the column's token: the
    reference for all other ways. Takes memory quadratic in T: for tests, and for short rows."""
    position = torch.arange(group_ids.shape[1], device=group_ids.device)
    ends = subtree_ends(group_ids, parent_ids)
    return (position <= position.unsqueeze(1)) & (position.unsqueeze(1) < ends.unsqueeze(1))


def mask_rule(
    ends: Tensor, near: tuple[Tensor, Tensor] | None = None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the rule as FlexAttention's mask_mod. ends: `subtree_ends`. near: positions in the
    unpacked sequences, and each query's lower bound on visible keys, int64 [B, T] each; as tensors,
    they let compiled code serve windows of all sizes.
    """
    if near is None:
        return lambda b, h, q, k: (k <= q) & (q < ends[b, k])
    positions, above = near
    return lambda b, h, q, k: (k <= q) & (q < ends[b, k]) & (positions[b, k] > above[b, q])


def block_mask(
    ends: Tensor, near: tuple[Tensor, Tensor] | None = None, block_size: int = DEFAULT_BLOCK_SIZE
) -> BlockMask:
    """Return `mask_rule` as a FlexAttention BlockMask, for all heads.

    The first and the last end in each block of keys decide whether a block is empty, mixed or full:
    neither time nor memory is quadratic in T (create_block_mask evaluates, and without compilation
    stores, all T × T entries). The mixed blocks are decided entry by entry inside the kernel.
    """
    batch, seq_len = ends.shape
    device = ends.device
    num_blocks = -(-seq_len // block_size)

    def by_block(values: Tensor, behind: Tensor) -> Tensor:
        """Return [B, N, block_size], filled up behind the row's end."""
        padded = behind.expand(batch, -1).clone()
        padded[:, :seq_len] = values
        return padded.view(batch, num_blocks, block_size)

    # Behind the row's end nothing is seen by others, as in padding.
    own = by_block(ends, torch.arange(1, num_blocks * block_size + 1, device=device)).unsqueeze(1)
    # Of each block of queries, [N, 1].
    begin = (torch.arange(num_blocks, device=device) * block_size).unsqueeze(1)
    before = begin > begin.T
    some = before & (own.amax(dim=-1) > begin)  # [B, N, N]
    full = before & (own.amin(dim=-1) >= begin + block_size)
    if near is not None:
        nowhere = torch.zeros(num_blocks * block_size, dtype=torch.int64, device=device)
        positions, above = (by_block(values, nowhere) for values in near)
        # Some key may be near enough.
        some &= positions.amax(dim=-1).unsqueeze(1) > above.amin(dim=-1).unsqueeze(2)
        # Every one is.
        full &= positions.amin(dim=-1).unsqueeze(1) > above.amax(dim=-1).unsqueeze(2)
    # A block on the diagonal is always mixed: every token sees itself.
    mixed = (some & ~full) | torch.eye(num_blocks, dtype=torch.bool, device=device)

    return BlockMask.from_kv_blocks(
        *_block_lists(mixed),
        *_block_lists(full),
        BLOCK_SIZE=block_size,
        mask_mod=mask_rule(ends, near),
        seq_lengths=(seq_len, seq_len),
    )


def _block_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row of bool [B, N, N] visits [B, 1, N], and their numbers, first
    ones first [B, 1, N, N], int32.
    """
    counts = blocks.sum(dim=-1, dtype=torch.int32)
    order = torch.argsort((~blocks).to(torch.int8), dim=-1, stable=True).to(torch.int32)
    return counts.unsqueeze(1), order.unsqueeze(1).contiguous()
