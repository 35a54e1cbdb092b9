"""Who may attend to whom in a packed row, from group ids alone.

The rule: a token attends to earlier tokens of its row, and itself, in its own group and in its group's ancestors. Padding attends
to itself, so that no row of a softmax is empty. Any depth of groups; parents have smaller ids than their children.

Shapes: B rows, T positions, G groups of the row with the most, N blocks of a row.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

DEFAULT_BLOCK_SIZE = 128


def ancestor_table(group_ids: Tensor, parent_ids: Tensor) -> Tensor:
    """bool [B, G, G]: entry [b, g, h] says that group h of row b is g itself or one of its ancestors.

    group_ids, parent_ids: int64 [B, T], -1 in padding. Groups that a row does not have are their own only ancestors. G >= 1.
    """
    num_groups = max(int(group_ids.max()) + 1, 1)
    rows = group_ids.shape[0]
    own = torch.arange(num_groups, device=group_ids.device).expand(rows, -1)
    # Padding writes into a spare last column that is cut off again.
    parent = torch.cat([own, own[:, :1]], dim=1).contiguous()
    parent.scatter_(1, torch.where(group_ids < 0, num_groups, group_ids), parent_ids)
    parent = parent[:, :-1]
    table = torch.zeros(rows, num_groups, num_groups, dtype=torch.bool, device=group_ids.device)
    current = own
    while True:  # one step up the tree at a time: as often as the tree is deep
        table.scatter_(2, current.unsqueeze(2), True)
        above = parent.gather(1, current)
        if torch.equal(above, current):
            return table
        current = above


def dense_mask(group_ids: Tensor, parent_ids: Tensor) -> Tensor:
    """bool [B, T, T], True where the token of the row may attend to the token of the column: the reference for all other ways.

    Takes memory quadratic in T: for tests, and for short rows.
    """
    table = ancestor_table(group_ids, parent_ids)
    seq_len = group_ids.shape[1]
    real, groups = group_ids >= 0, group_ids.clamp(min=0)
    by_group = table.gather(1, groups.unsqueeze(2).expand(-1, -1, table.shape[2]))  # [B, T, G]
    allowed = by_group.gather(2, groups.unsqueeze(1).expand(-1, seq_len, -1))  # [B, T, T]
    causal = torch.ones(seq_len, seq_len, dtype=torch.bool, device=group_ids.device).tril()
    allowed &= causal & real.unsqueeze(1) & real.unsqueeze(2)
    return allowed | torch.eye(seq_len, dtype=torch.bool, device=group_ids.device)


def block_mask(group_ids: Tensor, parent_ids: Tensor, block_size: int = DEFAULT_BLOCK_SIZE) -> BlockMask:
    """The same rule as a FlexAttention BlockMask, for all heads. On CUDA: never run on a GPU so far; tested on CPU (forward).

    Which blocks are empty, mixed or full follows from which groups occur in each block, so neither time nor memory is quadratic
    in T (create_block_mask evaluates, and without compilation stores, all T × T entries). Groups are runs in the order of their
    ids, as packing leaves them; the mixed blocks are decided entry by entry inside the kernel.
    """
    batch, seq_len = group_ids.shape
    table = ancestor_table(group_ids, parent_ids)
    num_groups = table.shape[1]
    num_blocks = -(-seq_len // block_size)

    # occurs [B, N, G]: the group has a token in the block. unclean [B, N]: the block holds padding or reaches over the row's end.
    padded = torch.full((batch, num_blocks * block_size), -1, dtype=group_ids.dtype, device=group_ids.device)
    padded[:, :seq_len] = group_ids
    slots = torch.where(padded < 0, num_groups, padded).view(batch, num_blocks, block_size)
    occurs = torch.zeros(batch, num_blocks, num_groups + 1, device=group_ids.device).scatter_(2, slots, 1.0)
    unclean = occurs[:, :, -1] > 0
    occurs = occurs[:, :, :-1]
    seen = occurs @ table.float()  # [B, N, G]: how many of the block's groups may see that group
    some = (seen @ occurs.transpose(1, 2)) > 0  # [B, N, N]
    forbidden = occurs @ (~table).float() @ occurs.transpose(1, 2)
    before = torch.ones(num_blocks, num_blocks, dtype=torch.bool, device=group_ids.device).tril(-1)
    full = before & (forbidden == 0) & ~unclean.unsqueeze(1) & ~unclean.unsqueeze(2)
    # A block on the diagonal is always mixed: every token sees itself.
    mixed = (before & some & ~full) | torch.eye(num_blocks, dtype=torch.bool, device=group_ids.device)

    real, groups = group_ids >= 0, group_ids.clamp(min=0)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        allowed = (k <= q) & real[b, q] & real[b, k] & table[b, groups[b, q], groups[b, k]]
        return allowed | (q == k)

    return BlockMask.from_kv_blocks(
        *_block_lists(mixed),
        *_block_lists(full),
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod,
        seq_lengths=(seq_len, seq_len),
    )


def _block_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """From bool [B, N, N] to how many blocks each row of blocks visits [B, 1, N] and which come first [B, 1, N, N], int32."""
    counts = blocks.sum(dim=-1, dtype=torch.int32)
    order = torch.argsort((~blocks).to(torch.int8), dim=-1, stable=True).to(torch.int32)
    return counts.unsqueeze(1), order.unsqueeze(1).contiguous()
