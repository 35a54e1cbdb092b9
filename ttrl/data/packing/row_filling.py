"""Filling one row: which of some sizes together come closest to the room that there is.

Sums are bits of one large integer (bit b is set where some of the sizes add up to b), so a subset sum over 48 candidates and
16,384 positions takes microseconds. With more candidates than that, large ones are taken greedily until the last few decide.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

_CANDIDATES = 48


def best_subset(sizes: Sequence[int], room: int) -> list[int]:
    """Indices, ascending, of the sizes (all positive) with the largest sum up to `room`; of equal sums, one of early indices."""
    mask = (1 << (room + 1)) - 1
    reachable = [sums := 1]
    for size in sizes:
        sums |= (sums << size) & mask
        reachable.append(sums)
        if sums >> room:
            break
    best = sums.bit_length() - 1
    taken = []
    for index in range(len(reachable) - 2, -1, -1):
        if not reachable[index] >> best & 1:  # `best` cannot be had without this one
            taken.append(index)
            best -= sizes[index]
    return taken[::-1]


def fill(sizes: Sequence[int], room: int) -> list[int]:
    """Indices, ascending, of sizes that fill `room` as far as a short search finds; `sizes` must be sorted, smallest first.

    Large ones first: small ones are worth more later, when little room is left.
    """
    taken = []
    end = bisect_right(sizes, room)
    while end > _CANDIDATES and room > 6 * sizes[end - 1]:
        end -= 1
        room -= sizes[end]
        taken.append(end)
    end = bisect_right(sizes, room, 0, end)
    if end > _CANDIDATES:  # the largest, and others evenly from all that fit
        largest = _CANDIDATES // 2
        step = (end - largest) / (_CANDIDATES - largest)
        spread = [int(end - largest - 1 - k * step) for k in range(_CANDIDATES - largest)]
        candidates = [*range(end - 1, end - 1 - largest, -1), *spread]
    else:
        candidates = list(range(end - 1, -1, -1))
    taken += [candidates[index] for index in best_subset([sizes[c] for c in candidates], room)]
    return sorted(taken)


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices: largest sizes first, each into the fullest bin that still has room for it.

    Of two bins that it returns, the contents always add up to more than `capacity`.
    """
    assert all(0 < size <= capacity for size in sizes), f"sizes must lie in 1..{capacity}"
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free, bin), sorted: the first entry with enough room is the best fit
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        found = bisect_left(room, (sizes[item], -1))
        if found < len(room):
            free, chosen = room.pop(found)
            bins[chosen].append(item)
        else:
            free, chosen = capacity, len(bins)
            bins.append([item])
        if free > sizes[item]:
            insort(room, (free - sizes[item], chosen))
    return bins


def filled_bins(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices: the largest size that is left opens a bin, and what `fill` finds for the rest of it goes along."""
    assert all(0 < size <= capacity for size in sizes), f"sizes must lie in 1..{capacity}"
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i], -i))
    left = [sizes[i] for i in order]
    bins = []
    while left:
        room = capacity - left.pop()
        chosen = [order.pop()]
        for index in reversed(fill(left, room)):
            chosen.append(order.pop(index))
            left.pop(index)
        bins.append(chosen)
    return bins
