"""From rows of sample numbers to tensors: which tokens stand where, and everything that is known about them there.

A row is cut into segments: a shared node, what belongs to one sample, and the padding at its end. They follow each other depth
first, so that whatever continues a node stands behind it without a gap.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ttrl.data.flat_samples import FlatSamples
from ttrl.data.packed_format import IGNORE_LABEL, TENSOR_DTYPES
from ttrl.data.prefix_tree import PrefixTree

CHUNK = 1 << 17
"""Positions that are written at a time."""


@dataclass
class Segments:
    """K segments that cover all rows without a gap, padding included; int64 [K]."""

    row: np.ndarray
    length: np.ndarray
    """Positions."""
    source: np.ndarray
    """The first token, counted in FlatSamples; 0 for padding."""
    position: np.ndarray
    """Of the first token in its sample."""
    group: np.ndarray
    """Number within the row; -1 for padding."""
    parent: np.ndarray
    sample: np.ndarray
    """Row of the sample table; -1 for shared nodes and padding."""


def lay_out(
    rows: Sequence[Sequence[int]], tree: PrefixTree, start: Sequence[int], end: Sequence[int], seq_len: int
) -> tuple[Segments, list[tuple[int, list[int]]]]:
    """The segments of all rows, and for each sample its row and its path of groups, from the root to its own.

    start: the first token of each sample, counted in FlatSamples. end: one past its last trained token, counted from there.
    """
    values: list[int] = []  # seven for each segment
    places: list[tuple[int, list[int]]] = [(-1, [])] * len(start)
    for row, members in enumerate(rows):
        paths: list[list[int]] = []  # of each group of the row
        used = 0
        for node, sample, begin, stop, parent in _depth_first(members, tree, end):
            group = len(paths)
            paths.append([*paths[parent], group] if parent >= 0 else [group])
            values += (row, stop - begin, start[sample] + begin, begin, group, parent if parent >= 0 else group)
            values.append(-1 if node else sample)
            if not node:
                places[sample] = (row, paths[group])
            used += stop - begin
        assert used <= seq_len, f"row {row} holds {used} positions of {seq_len}"
        if used < seq_len:
            values += (row, seq_len - used, 0, 0, -1, -1, -1)
    columns = np.array(values, dtype=np.int64).reshape(-1, 7).T
    return Segments(*columns), places


def _depth_first(members: Sequence[int], tree: PrefixTree, end: Sequence[int]) -> Iterator[tuple[bool, int, int, int, int]]:
    """The groups of a row in order: is it a shared node; a sample with its tokens; first position, one past the last; its parent.

    Branches follow each other by their first sample. Nodes with one child among `members` are left to that child.
    """
    parent_of, node_of = tree.parent, tree.node_of
    children: dict[int, list[int]] = {-1: []}  # of the nodes, and of no node (-1); a sample s stands there as -2 - s
    for sample in sorted(members):
        child, node = -2 - sample, node_of[sample]
        while node not in children:
            children[node] = [child]
            child, node = node, parent_of[node]
        children[node].append(child)
    open_ones = [(child, -1, 0) for child in reversed(children[-1])]
    group = 0
    while open_ones:
        child, parent, begin = open_ones.pop()
        if child < -1:
            yield False, -2 - child, begin, end[-2 - child] - 1, parent
            group += 1
        elif len(children[child]) == 1:
            open_ones.append((children[child][0], parent, begin))
        else:
            cut = tree.cut[child]
            yield True, tree.example[child], begin, cut, parent
            open_ones.extend((below, group, cut) for below in reversed(children[child]))
            group += 1


def fill(
    flat: FlatSamples, segments: Segments, kept: np.ndarray, weights: np.ndarray, shape: tuple[int, int], pad_id: int
) -> dict[str, torch.Tensor]:
    """The tensors of all rows, [B, T] as `shape` says. kept: the number in `flat` of each line of the sample table; weights: of
    one token of it.
    """
    tensors = {name: torch.empty(shape, dtype=TENSOR_DTYPES[name]) for name in TENSOR_DTYPES if name != "reference_logprobs"}
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    # A few rows at a time: what lies between stays in the processor's cache, and takes no new memory.
    step = max(1, CHUNK // shape[1])
    borders = np.searchsorted(segments.row, np.arange(0, shape[0] + step, step))
    for first, (begin, stop) in zip(range(0, shape[0], step), itertools.pairwise(borders.tolist()), strict=True):
        part = Segments(*(values[begin:stop] for values in vars(segments).values()))
        for name, values in _filled(flat, part, kept, weights, pad_id).items():
            arrays[name][first : first + step] = values.reshape(-1, shape[1])
    return tensors


def _filled(flat: FlatSamples, segments: Segments, kept: np.ndarray, weights: np.ndarray, pad_id: int) -> dict[str, np.ndarray]:
    """What `fill` writes into the rows of some segments, end to end.

    Position k of a segment holds token `source + k`; what it predicts is token `source + k + 1`, never past the end of its
    sample, as a sample's last trained token is not stored as an input.
    """

    def spread(values: np.ndarray) -> np.ndarray:
        return np.repeat(values, segments.length)

    within = np.arange(int(segments.length.sum())) - spread(np.cumsum(segments.length) - segments.length)
    source = within + spread(segments.source)
    groups = spread(segments.group)
    padding = groups < 0

    def take(values: np.ndarray) -> np.ndarray:
        return values.take(source, mode="clip")  # padding runs past the end; what it finds is replaced

    owned = segments.sample >= 0
    number = np.where(owned, kept[segments.sample], 0)  # of the segment's sample in `flat`
    trained = take(flat.trained[1:])
    trained &= spread(owned)

    def predicted(values: np.ndarray, otherwise: float) -> np.ndarray:
        return np.where(trained, values, np.asarray(otherwise, values.dtype))

    return {
        "tokens": np.where(padding, pad_id, take(flat.tokens)),
        "labels": predicted(take(flat.tokens[1:]), IGNORE_LABEL),
        "group_ids": groups,
        "parent_ids": spread(segments.parent),
        "input_pos": np.where(padding, 0, within + spread(segments.position)),
        "sample_ids": spread(segments.sample),
        "assistant_mask": trained,
        "logprobs": predicted(take(flat.logprobs[1:]), np.nan),
        "advantages": predicted(spread(flat.advantages[number]), 0.0),
        "weights": predicted(spread(np.where(owned, weights[segments.sample], 0.0).astype(np.float32)), 0.0),
        "weights_version": predicted(spread(flat.version[number]) if flat.versions is None else take(flat.versions[1:]), -1),
    }
