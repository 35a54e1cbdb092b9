"""Build the tree of beginnings stored once, over the tokens before each sample's first trained one.

A node is a beginning shared by several samples: a system prompt or few-shot examples, below it a
question, below it the given part of a conversation, to any depth. It holds positions from its
parent's `cut` up to its own: a node of t tokens is stored without its last one, and each of its
continuations repeats this token at its own beginning (to predict the first label of each sample
from a position of its own). Its cut is therefore t - 1, and a beginning of one token is no node.

Storing a beginning once never takes more positions than storing it several times, but a short one
saves next to nothing and still ties its samples together in one tree: `shortest` is the minimum
number of positions for different prompts. Samples with the same prompt always share it.

Generated tokens are never compared: they belong to one sample, even if others have the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ttrl.configs.data import Share


@dataclass
class PrefixTree:
    """Nodes, parents first; lists with one entry per node or per sample."""

    cut: list[int]
    """Positions of a sample in this node or in its ancestors; at least 1, and more than the
    parent's.
    """
    parent: list[int]
    """-1 for roots."""
    example: list[int]
    """A sample beginning with the tokens of the node."""
    node_of: list[int]
    """For each sample: its deepest node, or -1."""


def prefix_tree(
    tokens: np.ndarray, start: np.ndarray, length: np.ndarray, share: Share, shortest: int
) -> PrefixTree:
    """Return the tree over the beginnings tokens[start[i] : start[i] + length[i]], one per sample
    i.

    tokens: int32, none negative; length: at least 1 each. share: "tree", or "prompt" for one level
    (the same beginning as a whole or nothing), or "none".
    """
    if share == "none":
        return PrefixTree([], [], [], [-1] * len(start))
    # As bytes, hashed and compared by memcmp; very often, this beginning equals the previous
    # sample's.
    number_of: dict[bytes, int] = {}  # distinct beginnings, in order of their first sample
    beginning_of: list[int] = []
    first: list[int] = []
    members: list[int] = []
    before = b""
    number = -1
    for sample, (begin, count) in enumerate(zip(start.tolist(), length.tolist(), strict=True)):
        text = tokens[begin : begin + count].tobytes()
        if text != before:
            before = text
            number = number_of.setdefault(text, len(number_of))
            if number == len(first):
                first.append(sample)
                members.append(0)
        members[number] += 1
        beginning_of.append(number)
    if share == "prompt":
        nodes = _Nodes(
            [int(length[sample]) for sample in first], [-1] * len(first), list(range(len(first)))
        )
    else:
        # Big-endian, to let memcmp sort them in the order of their tokens.
        nodes = _radix_tree(
            [np.frombuffer(text, tokens.dtype).astype(">u4").tobytes() for text in number_of]
        )
    return _worth_keeping(nodes, first, members, beginning_of, shortest)


@dataclass
class _Nodes:
    """The whole radix tree. The first nodes are the beginnings themselves, in their order."""

    depth: list[int]
    """Tokens."""
    parent: list[int]
    example: list[int]
    """One of the beginnings below, or its own."""


def _radix_tree(beginnings: Sequence[bytes]) -> _Nodes:
    """Sort the beginnings, all different, 4 bytes per token; then neighbours show the branches."""
    nodes = _Nodes(
        [len(text) // 4 for text in beginnings],
        [-1] * len(beginnings),
        list(range(len(beginnings))),
    )
    path: list[int] = []  # from the root to the beginning before
    for leaf in sorted(range(len(beginnings)), key=beginnings.__getitem__):
        if path:
            common = _common_tokens(beginnings[path[-1]], beginnings[leaf])
        else:
            common = 0
        below = -1
        while path and nodes.depth[path[-1]] > common:
            below = path.pop()
        # They part in the middle of an edge.
        if common and not (path and nodes.depth[path[-1]] == common):
            nodes.depth.append(common)
            nodes.parent.append(path[-1] if path else -1)
            nodes.example.append(leaf)
            nodes.parent[below] = len(nodes.depth) - 1
            path.append(nodes.parent[below])
        nodes.parent[leaf] = path[-1] if path else -1
        path.append(leaf)
    return nodes


def _common_tokens(a: bytes, b: bytes) -> int:
    count = min(len(a), len(b)) // 4
    differ = np.frombuffer(a, np.uint32, count) != np.frombuffer(b, np.uint32, count)
    place = int(differ.argmax())
    if differ[place]:
        return place
    return count


def _worth_keeping(
    nodes: _Nodes, first: list[int], members: list[int], beginning_of: list[int], shortest: int
) -> PrefixTree:
    """Return the nodes to store once, renumbered with parents first."""
    has_children = [False] * len(nodes.depth)
    for parent in nodes.parent:
        if parent >= 0:
            has_children[parent] = True
    tree = PrefixTree([], [], [], [])
    # The kept node for a node: itself or its next ancestor.
    kept_at = [-1] * len(nodes.depth)
    for node in sorted(range(len(nodes.depth)), key=nodes.depth.__getitem__):
        if nodes.parent[node] >= 0:
            above = kept_at[nodes.parent[node]]
        else:
            above = -1
        cut = nodes.depth[node] - 1
        # By each sample or branch but the first.
        saved = cut - (tree.cut[above] if above >= 0 else 0)
        same_prompt = node < len(first) and members[node] > 1
        if saved and (same_prompt or (has_children[node] and saved >= shortest)):
            kept_at[node] = len(tree.cut)
            tree.cut.append(cut)
            tree.parent.append(above)
            tree.example.append(first[nodes.example[node]])
        else:
            kept_at[node] = above
    tree.node_of = [kept_at[beginning] for beginning in beginning_of]
    return tree
