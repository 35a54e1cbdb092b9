"""Equal work for data-parallel ranks: the order of rows, and what a row costs to train on."""

import heapq
from collections.abc import Sequence

POSITIONS_PER_PAIR = 1 / 6144
"""Work of one pair (position, earlier position that it attends to) as a share of one position's work in the matrices. A layer of
width d takes about 12·d² multiplications per position and 2·d per pair, so 1/(6·d): this is d = 1024."""


def work(positions: Sequence[int], pairs: Sequence[int]) -> list[float]:
    """Of each row, in positions: what it stores, and its attention area (pairs of positions where the later sees the earlier)."""
    return [p + a * POSITIONS_PER_PAIR for p, a in zip(positions, pairs, strict=True)]


def balance(work: Sequence[float], ranks: int) -> list[int]:
    """An order of rows in which rank r of `ranks` takes rows r, r + ranks, r + 2·ranks, … with nearly equal work.

    Both in every step of `ranks` rows, so that none waits for the largest row of another, and in sum: rows stand by falling work,
    and in each block the largest goes to the rank with the least so far. A block that is not full is last.
    """
    assert ranks >= 1
    order = sorted(range(len(work)), key=lambda row: (-work[row], row))
    load = [(0.0, rank) for rank in range(ranks)]
    result: list[int] = []
    for start in range(0, len(order), ranks):
        block = order[start : start + ranks]
        if len(block) < ranks:  # these go to the first ranks, as the dealing has it
            load = sorted(load, key=lambda entry: entry[1])[: len(block)]
            heapq.heapify(load)
        dealt = [0] * len(block)
        taken = []
        for row in block:
            so_far, rank = heapq.heappop(load)
            dealt[rank] = row
            taken.append((so_far + work[row], rank))
        load = taken
        heapq.heapify(load)
        result += dealt
    return result
