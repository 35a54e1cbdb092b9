"""Where prompt groups go: best-fit decreasing over whole groups, so that a prompt is stored once for all of its completions.

A group that does not fit in one row is split into as few parts as best-fit finds, at the price of its prompt once more per part.
Everything is decided by sizes and by the order of the input: the same samples always give the same rows.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Completions of one prompt group that lie in one row. `group` and `members` are indices into the placer's input."""

    group: int
    members: list[int]


def best_fit(sizes: Sequence[int], capacity: int) -> list[int]:
    """The bin (0, 1, …) of each item: largest items first, each into the fullest bin that still has room for it.

    Of two bins that it returns, the contents always add up to more than `capacity`. Sizes above `capacity` are the caller's
    mistake.
    """
    assert all(0 < size <= capacity for size in sizes), f"sizes must lie in 1..{capacity}"
    bins = [0] * len(sizes)
    room: list[tuple[int, int]] = []  # (free, bin), sorted: the first entry with enough room is the best fit
    opened = 0
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        found = bisect_left(room, (sizes[item], -1))
        if found < len(room):
            free, chosen = room.pop(found)
        else:
            free, chosen = capacity, opened
            opened += 1
        bins[item] = chosen
        if free > sizes[item]:
            insort(room, (free - sizes[item], chosen))
    return bins


def place_groups(prompt_sizes: Sequence[int], member_sizes: Sequence[Sequence[int]], seq_len: int) -> list[list[Part]]:
    """Rows of parts. Group g costs `prompt_sizes[g]` tokens in every row that holds some of its members.

    Parts of a row stand in the order of their groups, members in the order given. Two parts of one group never share a row:
    their members alone would overfill it, by what `best_fit` guarantees.
    """
    parts: list[Part] = []
    sizes: list[int] = []
    for group, (prompt, members) in enumerate(zip(prompt_sizes, member_sizes, strict=True)):
        total = prompt + sum(members)
        if total <= seq_len:
            parts.append(Part(group, list(range(len(members)))))
            sizes.append(total)
            continue
        bins = best_fit(members, seq_len - prompt)
        split: list[list[int]] = [[] for _ in range(max(bins) + 1)]
        for member, chosen in enumerate(bins):
            split[chosen].append(member)
        for chosen_members in split:
            parts.append(Part(group, chosen_members))
            sizes.append(prompt + sum(members[member] for member in chosen_members))
    row_of = best_fit(sizes, seq_len)
    rows: list[list[Part]] = [[] for _ in range(max(row_of, default=-1) + 1)]
    for part, row in zip(parts, row_of, strict=True):
        rows[row].append(part)
    return rows
