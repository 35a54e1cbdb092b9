"""Lay out rows of sample numbers as tensors: each position's token and its values.

A row is cut into segments: a shared node, one sample's own tokens, and the padding at its end. They
follow each other depth first: a node's continuations follow it without a gap.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ttrl.data.packing.flat_samples import FlatSamples
from ttrl.data.packing.packed_format import OPTIONAL, TENSOR_DTYPES, padding_value
from ttrl.data.packing.prefix_tree import PrefixTree

_NUMPY_DTYPES = {
    name: torch.empty(0, dtype=dtype).numpy().dtype
    for name, dtype in TENSOR_DTYPES.items()
    if name not in OPTIONAL
}
_OF_LABELS = ("labels", "assistant_mask", "logprobs", "advantages", "weights", "weights_version")
"""Tensors about a position's predicted token; padding values at untrained positions."""


@dataclass
class RowSegments:
    """K segments covering all rows without a gap, padding included; int64 [K]."""

    row: np.ndarray
    length: np.ndarray
    source: np.ndarray
    """The first token, counted in FlatSamples; 0 for padding."""
    position: np.ndarray
    """The first token's position in its sample."""
    group: np.ndarray
    """Number within the row; -1 for padding."""
    parent: np.ndarray
    sample: np.ndarray
    """Row of the sample table; -1 for shared nodes and padding."""


def lay_out(
    rows: Sequence[Sequence[int]],
    tree: PrefixTree,
    start: Sequence[int],
    end: Sequence[int],
    seq_len: int,
) -> tuple[RowSegments, list[tuple[int, list[int]]]]:
    """Return the segments of all rows, and for each sample its row and its path of groups, from the
    root to its own.

    start: the first token of each sample, counted in FlatSamples. end: one past its last trained
        token, counted from there.
    """
    values: list[int] = []  # seven for each segment
    places: list[tuple[int, list[int]]] = [(-1, [])] * len(start)
    for row, members in enumerate(rows):
        paths: list[list[int]] = []  # of each group of the row
        used = 0
        for node, sample, begin, stop, parent in _depth_first(members, tree, end):
            group = len(paths)
            paths.append([*paths[parent], group] if parent >= 0 else [group])
            values += (
                row,
                stop - begin,
                start[sample] + begin,
                begin,
                group,
                parent if parent >= 0 else group,
            )
            values.append(-1 if node else sample)
            if not node:
                places[sample] = (row, paths[group])
            used += stop - begin
        assert used <= seq_len, f"row {row} holds {used} positions of {seq_len}"
        if used < seq_len:
            values += (row, seq_len - used, 0, 0, -1, -1, -1)
    columns = np.array(values, dtype=np.int64).reshape(-1, 7).T
    return RowSegments(*columns), places


def _depth_first(
    members: Sequence[int], tree: PrefixTree, end: Sequence[int]
) -> Iterator[tuple[bool, int, int, int, int]]:
    """Yield the groups of a row in order: whether it is a shared node; a sample with its tokens;
    first position, one past the last; its parent. Branches follow each other by their first sample;
    nodes with one child here are left to it.
    """
    parent_of = tree.parent
    node_of = tree.node_of
    # Of the nodes, and of no node (-1); a sample s stands there as -2 - s.
    children: dict[int, list[int]] = {-1: []}
    for sample in sorted(members):
        child = -2 - sample
        node = node_of[sample]
        while node not in children:
            children[node] = [child]
            child = node
            node = parent_of[node]
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
    flat: FlatSamples,
    segments: RowSegments,
    kept: np.ndarray,
    weights: np.ndarray,
    shape: tuple[int, int],
    pad_id: int,
) -> dict[str, torch.Tensor]:
    """Return the tensors of all rows, [B, T] as `shape` says. kept: the number in `flat` of each
    line of the sample table; weights: of one token of it.

    Position k of a segment holds token `source + k` and predicts token `source + k + 1`, never past
    the end of its sample: a sample's last trained token is not stored as an input.
    """
    # By numpy: it asks the system for large pages. With torch.empty, allocation takes longer than
    # all else here.
    tensors = {
        name: torch.from_numpy(np.empty(shape, dtype)) for name, dtype in _NUMPY_DTYPES.items()
    }
    to = {name: tensor.numpy().reshape(-1) for name, tensor in tensors.items()}
    if flat.experts is not None:
        tensors["experts"] = torch.from_numpy(np.empty((*shape, *flat.experts.shape[1:]), np.int16))
        to["experts"] = tensors["experts"].numpy().reshape(-1, *flat.experts.shape[1:])
    padding = {name: padding_value(name, pad_id) for name in to}
    counting = np.arange(shape[1])
    first = flat.first.tolist()
    end = flat.end.tolist()
    num_trained = flat.num_trained.tolist()
    numbers = kept.tolist()
    weight_of = weights.tolist()
    stop = 0
    for _, length, source, position, group, parent, sample in zip(
        *(values.tolist() for values in vars(segments).values())
    ):
        begin = stop
        stop = stop + length
        if group < 0:
            for name, values in to.items():
                values[begin:stop] = padding[name]
            continue
        to["tokens"][begin:stop] = flat.tokens[source : source + length]
        if flat.experts is not None:
            to["experts"][begin:stop] = flat.experts[source : source + length]
        to["group_ids"][begin:stop] = group
        to["parent_ids"][begin:stop] = parent
        to["input_pos"][begin:stop] = counting[position : position + length]
        to["sample_ids"][begin:stop] = sample
        number = numbers[sample] if sample >= 0 else -1
        # Positions at the beginning without a trained label: all of a shared node, the given part
        # of a single sample.
        if sample >= 0:
            silent = min(max(first[number] - position - 1, 0), length)
        else:
            silent = length
        if silent:
            for name in _OF_LABELS:
                to[name][begin : begin + silent] = padding[name]
            begin += silent
        if begin == stop:
            continue
        after = slice(source + silent + 1, source + length + 1)
        labels: dict[str, np.ndarray | float | int] = {
            "labels": flat.tokens[after],
            "assistant_mask": True,
            "logprobs": flat.logprobs[after],
            "advantages": flat.advantages[number]
            if flat.token_advantages is None
            else flat.token_advantages[after],
            "weights": weight_of[sample],
            "weights_version": flat.version[number]
            if flat.versions is None
            else flat.versions[after],
        }
        if num_trained[number] == end[number] - first[number]:
            for name, found in labels.items():
                to[name][begin:stop] = found
        else:  # several turns
            trained = flat.trained[after]
            for name, found in labels.items():
                to[name][begin:stop] = np.where(trained, found, padding[name])
    assert stop == shape[0] * shape[1]
    return tensors
