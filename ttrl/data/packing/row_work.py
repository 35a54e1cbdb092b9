"""What a packed row costs to train on."""

from collections.abc import Sequence

from torch import Tensor

from ttrl.data.packing.masks import subtree_ends

WIDTH = 1024
_CHUNK = 1 << 20
"""Positions whose attention area is counted at a time."""


def work(positions: Sequence[int], pairs: Sequence[int], width: int = WIDTH) -> list[float]:
    """Of each row, in positions: what it stores, and its attention area (pairs of positions where the later sees the earlier).

    A layer of `width` d takes about 12·d² multiplications per position and 2·d per pair (Kaplan et al., arXiv 2001.08361,
    table 1), so a pair is worth 1/(6·d) of a position.
    """
    return [p + a / (6 * width) for p, a in zip(positions, pairs, strict=True)]


def row_work(group_ids: Tensor, parent_ids: Tensor, width: int = WIDTH) -> list[float]:
    """`work` of packed rows; both int64 [B, T], -1 in padding, which costs nothing as rows are trimmed."""
    step = max(1, _CHUNK // group_ids.shape[1])
    pairs: list[int] = []
    for groups, parents in zip(group_ids.split(step), parent_ids.split(step), strict=True):
        seen_by = subtree_ends(groups, parents)
        seen_by -= seen_by.new_tensor(range(groups.shape[1]))  # the position itself included
        pairs += seen_by.mul_(groups >= 0).sum(dim=1).tolist()
    return work((group_ids >= 0).sum(dim=1).tolist(), pairs, width)
