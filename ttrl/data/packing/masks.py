"""Who may attend to whom in a packed row, from group ids alone.

The rule: a token attends to earlier tokens of its row, and itself, in its own group and in its group's ancestors. Padding attends
to itself, so that no row of a softmax is empty.

Groups stand depth first: whatever continues a group, at any depth, follows it without a gap. A token is therefore seen from
itself up to where the subtree of its group ends, and one number per token says it all: query q sees key k where k <= q < end[k].
No mask grows with the depth of the tree or with the square of the number of groups.

Shapes: B rows, T positions, G groups of the row with the most, N blocks of a row.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

DEFAULT_BLOCK_SIZE = 128


def subtree_ends(group_ids: Tensor, parent_ids: Tensor) -> Tensor:
    """Return int64 [B, T]: one past the last position of the row that may attend to this one.

    group_ids, parent_ids: int64 [B, T], -1 in padding; groups are runs and stand depth first, as `PackedTensors.check` demands.
    """
    rows, seq_len = group_ids.shape
    device = group_ids.device
    position = torch.arange(seq_len, device=device).expand(rows, -1)
    num_groups = max(int(group_ids.max()) + 1, 1)
    slot = torch.where(group_ids < 0, num_groups, group_ids)  # padding goes into a spare last column

    def column(fill: int) -> Tensor:
        return torch.full((rows, num_groups + 1), fill, dtype=torch.int64, device=device)

    first = column(seq_len).scatter_reduce_(1, slot, position, "amin")
    stop = column(0).scatter_reduce_(1, slot, position + 1, "amax")
    length = column(0).scatter_add_(1, slot, torch.ones_like(position))
    own = torch.arange(num_groups + 1, device=device).expand(rows, -1)
    parent = own.clone().scatter_(1, slot, torch.where(group_ids < 0, num_groups, parent_ids))
    # What a group and its descendants hold is added to each of its ancestors, one step up the tree at a time.
    end, held, current = stop.clone(), length.clone(), own
    while True:
        above = parent.gather(1, current)
        rising = above != current
        if not rising.any():
            break
        above_or_spare = torch.where(rising, above, num_groups)
        end.scatter_reduce_(1, above_or_spare, stop, "amax")
        held.scatter_add_(1, above_or_spare, length)
        current = above
    depth_first = (held == end - first)[:, :-1] | (length == 0)[:, :-1]
    assert bool(depth_first.all()), "groups of a packed row do not stand depth first"
    return torch.where(group_ids < 0, position + 1, end.gather(1, slot))


def dense_mask(group_ids: Tensor, parent_ids: Tensor) -> Tensor:
    """Return bool [B, T, T], True where the token of the row may attend to the token of the column: the reference for all other
    ways. Takes memory quadratic in T: for tests, and for short rows."""
    position = torch.arange(group_ids.shape[1], device=group_ids.device)
    ends = subtree_ends(group_ids, parent_ids)
    return (position <= position.unsqueeze(1)) & (position.unsqueeze(1) < ends.unsqueeze(1))


def block_mask(
    group_ids: Tensor,
    parent_ids: Tensor,
    block_size: int = DEFAULT_BLOCK_SIZE,
    *,
    input_pos: Tensor | None = None,
    window: int | None = None,
) -> BlockMask:
    """Return the same rule as a FlexAttention BlockMask, for all heads. On CUDA: never run on a GPU so far; tested on CPU
    (forward).

    With `window`, a query at position p of `input_pos` (int64 [B, T]) sees only keys at positions above p - window.

    Which blocks are empty, mixed or full follows from the first and the last end in each block of keys, so neither time nor
    memory is quadratic in T (create_block_mask evaluates, and without compilation stores, all T × T entries). The mixed blocks
    are decided entry by entry inside the kernel.
    """
    batch, seq_len = group_ids.shape
    device = group_ids.device
    ends = subtree_ends(group_ids, parent_ids)
    num_blocks = -(-seq_len // block_size)
    # Behind the row's end nothing is seen by others, as in padding.
    padded = torch.arange(1, num_blocks * block_size + 1, device=device).repeat(batch, 1)
    padded[:, :seq_len] = ends
    by_block = padded.view(batch, 1, num_blocks, block_size)
    begin = (torch.arange(num_blocks, device=device) * block_size).unsqueeze(1)  # of each block of queries, [N, 1]
    before = begin > begin.T
    some = before & (by_block.amax(dim=-1) > begin)  # [B, N, N]
    full = before & (by_block.amin(dim=-1) >= begin + block_size)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < ends[b, k])

    if window is not None:
        assert input_pos is not None, "a window is counted in positions"
        positions, whole_tree = input_pos, mask_mod
        in_blocks = torch.zeros_like(padded)
        in_blocks[:, :seq_len] = positions
        in_blocks = in_blocks.view(batch, num_blocks, block_size)
        first, last = in_blocks.amin(dim=-1), in_blocks.amax(dim=-1)  # [B, N]
        some &= last.unsqueeze(1) > first.unsqueeze(2) - window  # of keys against queries; some entry may be near enough
        full &= first.unsqueeze(1) > last.unsqueeze(2) - window  # every one is

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return whole_tree(b, h, q, k) & (positions[b, k] > positions[b, q] - window)

    # A block on the diagonal is always mixed: every token sees itself.
    mixed = (some & ~full) | torch.eye(num_blocks, dtype=torch.bool, device=device)

    return BlockMask.from_kv_blocks(
        *_block_lists(mixed),
        *_block_lists(full),
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod,
        seq_lengths=(seq_len, seq_len),
    )


def _block_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row of bool [B, N, N] visits [B, 1, N], and which come first [B, 1, N, N], int32."""
    counts = blocks.sum(dim=-1, dtype=torch.int32)
    order = torch.argsort((~blocks).to(torch.int8), dim=-1, stable=True).to(torch.int32)
    return counts.unsqueeze(1), order.unsqueeze(1).contiguous()
