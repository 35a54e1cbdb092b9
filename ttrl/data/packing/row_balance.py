"""Equal work for data-parallel ranks: which rank takes which row, and how long they wait for each other."""

import heapq
from collections.abc import Sequence

from torch import Tensor

from ttrl.data.packing.masks import subtree_ends

WIDTH = 1024
_CHUNK = 1 << 20
"""Positions whose attention area is counted at a time."""


def work(positions: Sequence[int], pairs: Sequence[int], width: int = WIDTH) -> list[float]:
    """Return the work of each row, in positions: what it stores, and its attention area (pairs of positions where the later sees
    the earlier).

    A layer of `width` d takes about 12·d² multiplications per position and 2·d per pair (Kaplan et al., arXiv 2001.08361,
    table 1), so a pair is worth 1/(6·d) of a position.
    """
    return [p + a / (6 * width) for p, a in zip(positions, pairs, strict=True)]


def row_work(group_ids: Tensor, parent_ids: Tensor, width: int = WIDTH) -> list[float]:
    """Return the `work` of packed rows; both int64 [B, T], -1 in padding, which costs nothing as rows are trimmed."""
    step = max(1, _CHUNK // group_ids.shape[1])
    pairs: list[int] = []
    for groups, parents in zip(group_ids.split(step), parent_ids.split(step), strict=True):
        seen_by = subtree_ends(groups, parents)
        seen_by -= seen_by.new_tensor(range(groups.shape[1]))  # the position itself included
        pairs += seen_by.mul_(groups >= 0).sum(dim=1).tolist()
    return work((group_ids >= 0).sum(dim=1).tolist(), pairs, width)


def balance(work: Sequence[float], ranks: int) -> list[int]:
    """Return an order of rows in which rank r of `ranks` takes rows r, r + ranks, r + 2·ranks, … with nearly equal work.

    Both in every step of `ranks` rows, so that none waits for the largest row of another, and in sum. Rows stand by falling
    work, which makes the sum of what each step's largest row costs as small as it can be; and in each step the largest goes to
    the rank with the least so far. A step that is not full is last, and those with the least so far take part in it.
    """
    assert ranks >= 1
    order = sorted(range(len(work)), key=lambda row: (-work[row], row))
    load = [(0.0, rank) for rank in range(ranks)]
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for start in range(0, len(order), ranks):
        taken = []
        for row in order[start : start + ranks]:
            so_far, rank = heapq.heappop(load)
            dealt[rank].append(row)
            taken.append((so_far + work[row], rank))
        load += taken
        heapq.heapify(load)
    dealt.sort(key=len, reverse=True)  # whoever has a row of the last step takes it as one of the first ranks
    return [dealt[place % ranks][place // ranks] for place in range(len(work))]


def deal(work: Sequence[float], ranks: int) -> list[list[int]]:
    """Return the rows of each rank, in the order in which they are trained on: `balance`, rank by rank. Where the rows do not
    divide evenly, the first ranks have one more; the others need a row without weight there."""
    order = balance(work, ranks)
    return [order[rank::ranks] for rank in range(ranks)]


def waiting(work: Sequence[float], ranks: Sequence[Sequence[int]], microbatch: int = 1) -> float:
    """Return the share of all ranks' time spent waiting, where all wait for each other after every `microbatch` rows.

    ranks: the rows of each, as `deal` has them.
    """
    assert microbatch >= 1
    longest = max(map(len, ranks))
    spent = sum(
        max(sum(work[row] for row in rows[start : start + microbatch]) for rows in ranks)
        for start in range(0, longest, microbatch)
    )
    useful = sum(work[row] for rows in ranks for row in rows)
    return 1 - useful / (len(ranks) * spent) if spent else 0.0
