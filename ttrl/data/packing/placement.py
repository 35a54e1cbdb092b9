"""Assign samples to rows: samples hang from a forest of shared beginnings, and a row stores each of
its beginnings once.

From the leaves up: a node's subtree is one part if it fits into a row together with all of the
node's ancestors; otherwise it is packed into as few parts as possible (row_search.py). The parts of
the roots are the rows. Never more rows than taking the samples in the order given. Sizes decide
everything; the order of the input only breaks ties.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from ttrl.data.packing.row_building import Item, row_cost
from ttrl.data.packing.row_search import pack


@dataclass(frozen=True)
class Forest:
    """Shared nodes, and the samples hanging from them. A node's parent stands before it; -1 is the
    parent of a root.
    """

    node_size: Sequence[int]
    """Positions taken by a node in every row with any sample below it; may be 0."""
    node_parent: Sequence[int]
    sample_node: Sequence[int]
    """A sample's node; -1: none."""
    sample_size: Sequence[int]
    """Positions of the sample's own part, at least 1."""

    def ancestors(self, node: int) -> list[int]:
        """Return the node and all above it, the root last."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.node_parent[node]
        return path

    def cost(self, samples: Sequence[int]) -> int:
        """Count the positions of the samples in one row."""
        nodes = {
            node
            for attached in {self.sample_node[s] for s in samples}
            for node in self.ancestors(attached)
        }
        return sum(self.sample_size[s] for s in samples) + sum(
            self.node_size[node] for node in nodes
        )

    def above(self) -> list[int]:
        """Return, for each node, the positions of it and of all its ancestors."""
        total: list[int] = []
        for size, parent in zip(self.node_size, self.node_parent, strict=True):
            assert parent < len(total), "a node's parent stands before it"
            total.append(size + (total[parent] if parent >= 0 else 0))
        return total


def place(forest: Forest, seq_len: int, *, multiple: int = 1, seed: int = 0) -> list[list[int]]:
    """Return rows of sample numbers, each ascending; `Forest.cost` of a row is at most `seq_len`,
    and every sample is in one row.

    With `multiple` > 1 (data-parallel ranks) the number of rows is a multiple of it: to fill up,
    the least full rows are spread evenly over more (storing their prompts once more); rows without
    samples are empty and last. Rows are then in the order of `balance`. `seed` decides the random
    trials for few rows.

    Every sample must fit into a row by itself, with its ancestors.
    """
    assert multiple >= 1
    above = forest.above()
    for node, size in zip(forest.sample_node, forest.sample_size, strict=True):
        path = above[node] if node >= 0 else 0
        assert size >= 1 and path + size <= seq_len, (
            f"a sample of {size} positions below {path} does not fit into {seq_len}"
        )
    rows = _pack(forest, above, seq_len, seed)
    plain = in_order(forest, seq_len)
    if len(plain) < len(rows):
        rows = plain
    if multiple == 1:
        return rows
    rows = _even(forest, rows, seq_len, multiple)
    order = balance([forest.cost(row) for row in rows], multiple)
    rows = [rows[row] for row in order]
    return rows + [[] for _ in range(-len(rows) % multiple)]


def in_order(forest: Forest, seq_len: int) -> list[list[int]]:
    """Place samples in the order given, each into the last row if there is room: the baseline for
    `place`.
    """
    rows: list[list[int]] = []
    present: set[int] = set()
    room = -1
    for sample, (node, size) in enumerate(zip(forest.sample_node, forest.sample_size, strict=True)):
        need = size
        new = []
        while node >= 0 and node not in present:
            new.append(node)
            need += forest.node_size[node]
            node = forest.node_parent[node]
        if need > room:
            rows.append([])
            room = seq_len
            new = forest.ancestors(forest.sample_node[sample])
            need = size + sum(forest.node_size[n] for n in new)
            present = set()
        room -= need
        present.update(new)
        rows[-1].append(sample)
    return rows


def _pack(forest: Forest, above: Sequence[int], seq_len: int, seed: int) -> list[list[int]]:
    """Pack node by node, children before their parents. An item's content is a list of samples."""
    nodes = len(forest.node_size)
    # A node's subtree items, each small enough for one row.
    items: list[list[Item]] = [[] for _ in range(nodes)]
    # Groups (setup, items) to pack below a node.
    parts: list[list[tuple[int, list[Item]]]] = [[] for _ in range(nodes + 1)]
    for sample, (node, size) in enumerate(zip(forest.sample_node, forest.sample_size, strict=True)):
        item = Item(size, sample, [sample])
        if node >= 0:
            items[node].append(item)
        else:
            parts[node].append((0, [item]))
    for node in range(nodes - 1, -1, -1):
        size = forest.node_size[node]
        parent = forest.node_parent[node]
        own = items[node]
        below = parts[node]
        total = sum(item.size for item in own) + sum(
            setup + sum(item.size for item in group) for setup, group in below
        )
        if not total:
            continue
        if not below:
            parts[parent].append((size, own))  # split there, together with its siblings
            continue
        if above[node] + total <= seq_len:
            rows = [[(0, own), *below]]
        else:
            singles = [(0, [item]) for item in own]
            packed = pack([*below, *singles], seq_len - above[node], seed)
            rows = [[(part.setup, list(part.items)) for part in row] for row in packed]
        for row in rows:
            bundles = []
            for setup, group in row:
                if setup:
                    contents = [sample for item in group for sample in item.content]
                    bundles.append(
                        Item(setup + sum(item.size for item in group), contents[0], contents)
                    )
                else:
                    bundles += group
            parts[parent].append((size, bundles))
    whole = pack(parts[-1], seq_len, seed)
    assert all(row_cost(row) <= seq_len for row in whole)
    return [
        sorted(sample for part in row for item in part.items for sample in item.content)
        for row in whole
    ]


def _even(forest: Forest, rows: list[list[int]], seq_len: int, multiple: int) -> list[list[int]]:
    """Spread the smallest len(rows) % multiple rows over `multiple` rows, if none of these gets
    longer than those were.
    """
    count = len(rows) % multiple
    if not count:
        return rows
    by_cost = sorted(rows, key=forest.cost)
    smallest = by_cost[:count]
    others = by_cost[count:]
    # Runs of samples in the order of the tree, to keep a node's samples together.
    paths = {
        node: forest.ancestors(node)[::-1]
        for node in {forest.sample_node[s] for row in smallest for s in row}
    }
    samples = sorted(
        (s for row in smallest for s in row), key=lambda s: (paths[forest.sample_node[s]], s)
    )
    per_run = sum(forest.sample_size[s] for s in samples) / multiple
    runs: list[list[int]] = [[]]
    filled = 0.0
    for sample in samples:
        size = forest.sample_size[sample]
        if runs[-1] and filled + size / 2 > per_run * len(runs) and len(runs) < multiple:
            runs.append([])
        runs[-1].append(sample)
        filled += size
    longest = max(forest.cost(row) for row in smallest)
    runs = [sorted(run) for run in runs]
    return others + (runs if max(forest.cost(run) for run in runs) <= longest else smallest)


def balance(work: Sequence[float], ranks: int) -> list[int]:
    """Return an order of rows with nearly equal work for ranks: rank r of `ranks` takes rows r, r +
    ranks, r + 2·ranks, …

    Work is nearly equal in every step of `ranks` rows, to keep ranks from waiting for another's
    largest row, and in sum. Rows stand by falling work: this minimises the sum over steps of the
    largest row's cost. In each step the largest goes to the rank with the least so far. An
    incomplete step is last, and goes to the ranks with the least so far.
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
    # Ranks with a row in the last step come first.
    dealt.sort(key=len, reverse=True)
    return [dealt[place % ranks][place // ranks] for place in range(len(work))]
