"""Build first rows for groups of items with a shared setup (their prompt), in three ways;
row_search.py improves them and chooses.

A `Part` is some items of one group in one row. A row costs its items, plus each contained group's
setup once. So splitting a group pays only if the extra setup goes into otherwise useless room.
"""

import random
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

_CANDIDATES = 48


def best_subset(sizes: Sequence[int], room: int) -> list[int]:
    """Return the ascending indices of the sizes (all positive) with the largest sum up to `room`;
    of equal sums, early ones.
    """
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
    """Return indices, ascending, of sizes filling `room` as well as a short search can; `sizes`
    must be sorted, smallest first.

    Large ones first: small ones are worth more later, in little remaining room.
    """
    taken = []
    end = bisect_right(sizes, room)
    while end > _CANDIDATES and room > 6 * sizes[end - 1]:
        end -= 1
        room -= sizes[end]
        taken.append(end)
    end = bisect_right(sizes, room, 0, end)
    if end > _CANDIDATES:  # the largest, and others evenly from all fitting ones
        largest = _CANDIDATES // 2
        step = (end - largest) / (_CANDIDATES - largest)
        spread = [int(end - largest - 1 - k * step) for k in range(_CANDIDATES - largest)]
        candidates = [*range(end - 1, end - 1 - largest, -1), *spread]
    else:
        candidates = list(range(end - 1, -1, -1))
    taken += [candidates[index] for index in best_subset([sizes[c] for c in candidates], room)]
    return sorted(taken)


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Return bins of indices: largest sizes first, each into the fullest bin with room for it. The
    contents of two bins always add up to more than `capacity`."""
    assert all(0 < size <= capacity for size in sizes), f"sizes must lie in 1..{capacity}"
    bins: list[list[int]] = []
    # (free, bin), sorted: the first entry with enough room is the best fit.
    room: list[tuple[int, int]] = []
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        found = bisect_left(room, (sizes[item], -1))
        if found < len(room):
            free, chosen = room.pop(found)
            bins[chosen].append(item)
        else:
            free = capacity
            chosen = len(bins)
            bins.append([item])
        if free > sizes[item]:
            insort(room, (free - sizes[item], chosen))
    return bins


def filled_bins(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Return bins of indices: the largest remaining size opens a bin, and `fill`
    chooses the rest.
    """
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


class Item(NamedTuple):
    size: int
    number: int
    """Decides between equal sizes."""
    content: Any


class Part:
    """Items of the group `key`, smallest first. `cost` includes the setup."""

    __slots__ = ("cost", "items", "key", "setup")

    def __init__(self, key: int, setup: int, items: Sequence[Item]):
        self.key = key
        self.setup = setup
        self.items = items
        self.cost = setup + sum(item.size for item in items)

    def cut(self, room: int) -> tuple["Part", "Part"]:
        """Return (items filling `room`, without the setup; the others). Either may be empty."""
        taken = set(fill([item.size for item in self.items], room))
        chosen: list[list[Item]] = [[], []]
        for index, item in enumerate(self.items):
            chosen[index not in taken].append(item)
        return Part(self.key, self.setup, chosen[0]), Part(self.key, self.setup, chosen[1])


Row = list[Part]


def row_cost(row: Iterable[Part]) -> int:
    setups = {part.key: part.setup for part in row}
    return sum(part.cost - part.setup for part in row) + sum(setups.values())


def split(key: int, setup: int, items: Sequence[Item], capacity: int) -> list[Part]:
    """Split a group into parts, each small enough for a row: the fewest of two ways of packing,
    then with the smallest rest.
    """
    if setup + sum(item.size for item in items) <= capacity:
        return [Part(key, setup, sorted(items))]
    sizes = [item.size for item in items]

    def rank(bins: list[list[int]]) -> tuple[int, int]:
        return len(bins), -sum(sum(sizes[i] for i in chosen) ** 2 for chosen in bins)

    bins = min((way(sizes, capacity - setup) for way in (filled_bins, best_fit)), key=rank)
    return [Part(key, setup, sorted(items[i] for i in chosen)) for chosen in bins]


def by_cost(parts: Iterable[Part]) -> list[Part]:
    """Sort parts, the smallest first; those of equal cost by their contents, to be independent of
    the input's order.
    """
    return sorted(parts, key=lambda part: (part.cost, [item.size for item in part.items]))


def join(parts: Sequence[Part], capacity: int, worth_split: int | None) -> list[Row]:
    """Build rows one after another: the largest remaining part, and whole parts to fill the row.
    With `worth_split` or more positions left, a part is cut to fill them best with a piece and its
    own setup.
    """
    pool = by_cost(parts)
    costs = [part.cost for part in pool]
    rows = []
    while pool:
        row = [pool.pop()]
        room = capacity - costs.pop()
        for index in reversed(fill(costs, room)):
            row.append(pool.pop(index))
            room -= costs.pop(index)
        if worth_split is not None and room >= worth_split and pool:
            last = len(pool) - 1
            best: tuple[int, int, Part, Part] | None = None
            for index in sorted(
                {last, max(last - 1, 0), last * 3 // 4, last // 2, last // 4, 0}, reverse=True
            ):
                part = pool[index]
                if part.setup + part.items[0].size <= room:
                    piece, rest = part.cut(room - part.setup)
                    if best is None or piece.cost - piece.setup > best[0]:
                        best = (piece.cost - piece.setup, index, piece, rest)
            if best is not None:
                _, index, piece, rest = best
                row.append(piece)
                del pool[index], costs[index]
                if rest.items:
                    at = bisect_left(costs, rest.cost)
                    pool.insert(at, rest)
                    costs.insert(at, rest.cost)
        rows.append(row)
    return rows


def best_fit_items(groups: Sequence[tuple[int, Sequence[Item]]], capacity: int) -> list[Row]:
    """Place single items, the largest first, each into the row with the least room left over,
    counting an extra setup as left over: better than `join` for few items per row, as a group's
    items then seldom fill rows by themselves.
    """
    order = sorted(
        (-item.size, key, item.number, item)
        for key, (_, items) in enumerate(groups)
        for item in items
    )
    smallest = [min((item.size for item in items), default=0) for _, items in groups]
    rows: list[dict[int, list[Item]]] = []
    free: list[int] = []
    gaps: list[tuple[int, int]] = []  # (free, row), sorted
    homes: list[list[int]] = [[] for _ in groups]  # rows with some of a group
    for _, key, _, item in order:
        setup = groups[key][0]
        best: tuple[int, int] | None = None  # (left over, row)
        still = []
        for row in homes[key]:
            left = free[row] - item.size
            if free[row] >= smallest[key]:
                still.append(row)
            if left >= 0 and (best is None or (left, row) < best):
                best = (left, row)
        homes[key] = still
        at = bisect_left(gaps, (item.size + setup, -1))
        # A home gap has more room than this: it needs no setup. It is also among the homes, with
        # its true room.
        if at < len(gaps) and (best is None or gaps[at][0] - item.size < best[0]):
            best = (gaps[at][0] - item.size, gaps[at][1])
        if best is None:
            rows.append({key: [item]})
            free.append(capacity - setup - item.size)
            homes[key].append(len(rows) - 1)
            insort(gaps, (free[-1], len(rows) - 1))
            continue
        row = best[1]
        del gaps[bisect_left(gaps, (free[row], row))]
        if key not in rows[row]:
            homes[key].append(row)
            free[row] -= setup
        free[row] -= item.size
        rows[row].setdefault(key, []).append(item)
        insort(gaps, (free[row], row))
    return [[Part(key, groups[key][0], items[::-1]) for key, items in row.items()] for row in rows]


def join_at_random(parts: Sequence[Part], capacity: int, rng: random.Random) -> list[Row]:
    """Build rows at random: each of a random part, others among the next few, and mostly a piece of
    the following part.
    """
    pool = by_cost(parts)
    rng.shuffle(pool)
    window = rng.randint(1, len(pool))
    rows = []
    while pool:
        row = [pool.pop()]
        room = capacity - row[0].cost
        near = sorted(range(max(0, len(pool) - window), len(pool)), key=lambda i: pool[i].cost)
        for index in sorted(
            (near[j] for j in fill([pool[i].cost for i in near], room)), reverse=True
        ):
            room -= pool[index].cost
            row.append(pool.pop(index))
        if pool and pool[-1].setup + pool[-1].items[0].size <= room and rng.random() < 0.8:
            following = pool.pop()
            piece, rest = following.cut(room - following.setup)
            row.append(piece)
            if rest.items:
                pool.append(rest)
        rows.append(row)
    return rows
