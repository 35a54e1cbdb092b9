"""Improve rows for groups with a shared setup by dispersing the emptiest of some first rows over
the others.
"""

import random
from bisect import bisect_left, insort
from collections.abc import Sequence

from ttrl.data.packing.row_building import (
    Item,
    Part,
    Row,
    best_fit_items,
    join,
    join_at_random,
    row_cost,
    split,
)

_SOURCES = 8
"""Vain dispersal attempts before the search ends."""
_PIECES = 64
"""A part is never dispersed into more pieces than this."""
_LARGE_GROUP = 2000
"""Items; for larger groups `best_fit_items` would take too long: it searches all rows of a group.
"""
_FEW_ROWS = 100
"""With fewer rows, one is more than 1%: random rows are tried too."""
_TRIALS = 6000
"""The most parts placed by all random trials together, with 64 trials at most."""
_MANY_PARTS = 20_000
"""With more parts than this, cutting them early has nothing to add, and costs as much time as the
rest.
"""


class _Dispersal:
    """Rows sorted by free room, to find the best place for a part at once."""

    def __init__(self, rows: Sequence[Row], capacity: int):
        self.rows = [list(row) for row in rows]
        self.free = [capacity - row_cost(row) for row in rows]
        self.gaps = sorted((free, row) for row, free in enumerate(self.free))
        self.homes: dict[int, set[int]] = {}
        for number, row in enumerate(rows):
            for part in row:
                self.homes.setdefault(part.key, set()).add(number)
        self.room = sum(self.free)
        self.capacity = capacity

    def _set_free(self, row: int, free: int) -> None:
        del self.gaps[bisect_left(self.gaps, (self.free[row], row))]
        self.room += free - self.free[row]
        self.free[row] = free
        insort(self.gaps, (free, row))

    def _place(self, part: Part, log: list[tuple[int, bool]]) -> bool:
        """Put the part into other rows, in pieces if necessary; the log gets each row, and whether
        it held the group before.
        """
        for _ in range(_PIECES):
            smallest = part.items[0].size
            bare = part.cost - part.setup
            # Here the setup is paid already.
            homes = [row for row in self.homes[part.key] if self.free[row] >= smallest]
            fitting = min(
                ((self.free[row], row) for row in homes if self.free[row] >= bare), default=None
            )
            if fitting is None:
                at = bisect_left(self.gaps, (part.cost, -1))
                if at < len(self.gaps):
                    fitting = self.gaps[at]
            if fitting is not None:
                self._add(fitting[1], part, log)
                return True
            emptiest = [
                (free - part.setup, row) for free, row in self.gaps[-1:] if row not in homes
            ]
            room, row = max([(self.free[row], row) for row in homes] + emptiest, default=(0, -1))
            if room < smallest:
                return False
            piece, part = part.cut(room)
            self._add(row, piece, log)
        return False

    def _add(self, row: int, part: Part, log: list[tuple[int, bool]]) -> None:
        known = row in self.homes[part.key]
        self.rows[row].append(part)
        self.homes[part.key].add(row)
        self._set_free(row, self.free[row] - (part.cost - part.setup if known else part.cost))
        log.append((row, known))

    def empty(self, source: int) -> bool:
        """Spread the row over the others, or leave everything as it was."""
        free = self.free[source]
        if self.room - free < self.capacity - free:
            return False
        del self.gaps[bisect_left(self.gaps, (free, source))]
        parts = self.rows[source]
        for part in parts:
            self.homes[part.key].discard(source)
        log: list[tuple[int, bool]] = []
        if all(self._place(part, log) for part in sorted(parts, key=lambda part: -part.cost)):
            self.rows[source] = []
            self.room -= free
            return True
        for row, known in reversed(log):
            part = self.rows[row].pop()
            self._set_free(row, self.free[row] + (part.cost - part.setup if known else part.cost))
            if not known:
                self.homes[part.key].discard(row)
        for part in parts:
            self.homes[part.key].add(source)
        insort(self.gaps, (free, source))
        return False


def disperse(rows: Sequence[Row], capacity: int, sources: int = _SOURCES) -> list[Row]:
    """Empty rows, the emptiest first, as long as their contents find room in the others."""
    state = _Dispersal(rows, capacity)
    vain: set[int] = set()
    while len(vain) < sources:
        source = next((row for _, row in reversed(state.gaps) if row not in vain), None)
        if source is None:
            break
        if state.empty(source):
            vain.clear()
        else:
            vain.add(source)
    return [row for row in state.rows if row]


def pack(groups: Sequence[tuple[int, Sequence[Item]]], capacity: int, seed: int = 0) -> list[Row]:
    """Build rows for groups (setup, items), each item small enough for a row with its setup; a
    part's key is its group's index. The best of a few ways: whole parts, parts cut to fill rows,
    single items; for few rows, random ones too, depending only on `seed`.
    """
    parts = [
        part
        for key, (setup, items) in enumerate(groups)
        for part in split(key, setup, items, capacity)
    ]
    if not parts:
        return []
    enough = -(-sum(part.cost for part in parts) // capacity)
    best = disperse(join(parts, capacity, None), capacity)
    if len(best) > enough and max(len(items) for _, items in groups) <= _LARGE_GROUP:
        best = min(best, disperse(best_fit_items(groups, capacity), capacity), key=len)
    if len(best) > enough and len(parts) <= _MANY_PARTS:
        best = min(best, disperse(join(parts, capacity, 1), capacity), key=len)
    rng = random.Random(seed)
    for _ in range(min(64, _TRIALS // len(parts)) if len(best) < _FEW_ROWS else 0):
        if len(best) <= enough:
            break
        best = min(best, disperse(join_at_random(parts, capacity, rng), capacity), key=len)
    return [_merge(row) for row in best]


def _merge(row: Row) -> Row:
    groups: dict[int, list[Part]] = {}
    for part in row:
        groups.setdefault(part.key, []).append(part)
    return [
        Part(key, parts[0].setup, sorted(item for part in parts for item in part.items))
        for key, parts in groups.items()
    ]
