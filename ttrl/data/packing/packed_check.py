"""Check every rule of the packed format on whole arrays.

Runs after packing and on loading, to keep inconsistent arrays from the trainer. Rules for single
positions are tested at every position; rules for whole groups once per run of equal group ids
(`_Runs`): there are few. Uses numpy: its calls cost less than torch's on short chunks within the
processor's cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, get_args

import numpy as np
from torch import Tensor

from ttrl.data.packing.packed_format import (
    IGNORE_LABEL,
    TENSOR_DTYPES,
    Aggregation,
    PackedSample,
    padding_value,
)
from ttrl.errors import PackError

CHUNK = 1 << 16
"""Positions checked at a time, few enough for their intermediate results to stay in the processor's
cache.
"""

Arrays: TypeAlias = Mapping[str, np.ndarray]
"""The tensors, by name; [rows, T], or [rows · T] if said to be flat."""


def check_packed(
    tensors: Mapping[str, Tensor],
    samples: Sequence[PackedSample],
    aggregation: str,
    constant_length: int | None,
    pad_id: int,
    where: str,
) -> None:
    """Raise PackError, naming `where`, the first broken rule and its place. `tensors` are [B, T],
    by their names.
    """
    _check_shapes(tensors, where)
    if aggregation not in get_args(Aggregation) or (aggregation == "constant") != (
        constant_length is not None
    ):
        raise PackError(
            f"{where}: aggregation {aggregation!r} with constant_length {constant_length}; pack "
            "again"
        )
    num_rows, seq_len = tensors["tokens"].shape
    arrays = {name: tensor.detach().contiguous().numpy() for name, tensor in tensors.items()}
    step = max(1, CHUNK // seq_len)
    owned: list[_Owned] = []
    for first in range(0, num_rows, step):
        part = {name: array[first : first + step] for name, array in arrays.items()}
        place = _Place(where, first, part["tokens"].shape[0], seq_len)
        flat = {name: array.reshape(-1) for name, array in part.items() if name != "experts"}
        _check_padding(part, pad_id, place)
        if flat["tokens"].min() < 0:
            place.refuse(flat["tokens"] < 0, "a token id is negative")
        ids = flat["sample_ids"]
        if ids.min() < -1 or ids.max() >= len(samples):
            place.refuse(
                (ids < -1) | (ids >= len(samples)),
                f"sample_ids outside of the sample table of {len(samples)}",
            )
        runs, inside = _check_groups(flat, place)
        paths = _check_trees(runs, place)
        _check_labels(flat, runs, inside, place)
        columns = (runs.sample, runs.row + first, runs.position, runs.start, runs.length)
        for sample, row, position, start, length, path in zip(
            *(values.tolist() for values in columns), paths, strict=True
        ):
            if sample >= 0:
                num_trained = int(np.count_nonzero(flat["assistant_mask"][start : start + length]))
                owned.append(_Owned(sample, row, position, length, num_trained, path))
    _check_samples(samples, owned, where)


@dataclass
class _Place:
    """The rows under test, for messages."""

    where: str
    first: int
    count: int
    seq_len: int

    def refuse(self, wrong: np.ndarray, rule: str, at: np.ndarray | None = None) -> None:
        """Raise PackError for the first True of `wrong`. at: the position of each entry, counted
        over all of these rows; None: one entry for each position.
        """
        if not wrong.any():
            return
        place = int(wrong.argmax())
        if at is not None:
            place = int(at[place])
        row, column = divmod(place, self.seq_len)
        raise PackError(
            f"{self.where}: row {self.first + row}, position {column}: {rule} "
            f"({int(np.count_nonzero(wrong))} such places in rows {self.first} to "
            f"{self.first + self.count - 1}); pack the samples again"
        )


@dataclass(slots=True)
class _Owned:
    """A group of one sample."""

    sample: int
    row: int
    position: int
    """The first token's position in the sample: everything before it is shared."""
    length: int
    num_trained: int
    path: list[int]


def _check_shapes(tensors: Mapping[str, Tensor], where: str) -> None:
    shape = tensors["tokens"].shape
    if len(shape) != 2 or 0 in shape:
        raise PackError(
            f"{where}: tokens have shape {list(shape)}; expected [rows, positions] with at least "
            "one of each"
        )
    for name, tensor in tensors.items():
        if tensor.dtype != TENSOR_DTYPES[name]:
            raise PackError(f"{where}: {name} is {tensor.dtype}; expected {TENSOR_DTYPES[name]}")
        if tensor.shape[:2] != shape or tensor.ndim != (4 if name == "experts" else 2):
            raise PackError(
                f"{where}: {name} has shape {list(tensor.shape)}, tokens have {list(shape)}"
            )


def _check_padding(arrays: Arrays, pad_id: int, place: _Place) -> None:
    """Check every tensor's values in padding against the format."""
    padding = np.flatnonzero(arrays["group_ids"].reshape(-1) < 0)
    if not len(padding):
        return
    for name, array in arrays.items():
        expected = padding_value(name, pad_id)
        found = array.reshape(-1, *array.shape[2:])[padding]
        # NaN differs from itself.
        wrong = ~np.isnan(found) if expected != expected else found != expected
        by_position = np.any(wrong.reshape(len(padding), -1), axis=1)
        place.refuse(np.asarray(by_position), f"{name} is set in padding", padding)


@dataclass
class _Runs:
    """Runs of equal group ids, padding left out; [K] in the order of the rows. The values are those
    of a run's first position.
    """

    row: np.ndarray
    length: np.ndarray
    group: np.ndarray
    parent: np.ndarray
    sample: np.ndarray
    position: np.ndarray
    token: np.ndarray

    start: np.ndarray
    """First position, counted over all rows."""


def _check_groups(flat: Arrays, place: _Place) -> tuple[_Runs, np.ndarray]:
    """Check that groups are runs numbered 0, 1, 2…, with padding last; along a run, parent and
    sample stay and positions count up.

    Returns the runs, and bool [rows · T]: is a position in the group of the one before it (padding
    included)?
    """
    groups = flat["group_ids"]
    inside = np.empty(len(groups), dtype=np.bool_)
    np.equal(groups[1:], groups[:-1], out=inside[1:])
    inside[:: place.seq_len] = False
    starts = np.flatnonzero(~inside)
    length = np.diff(starts, append=len(groups))
    parent, sample, position, token = (
        flat[name][starts] for name in ("parent_ids", "sample_ids", "input_pos", "tokens")
    )
    row, column = np.divmod(starts, place.seq_len)
    runs = _Runs(row, length, groups[starts], parent, sample, position, token, starts)

    before = np.where(column > 0, np.roll(runs.group, 1), -1)  # the group to the left
    real = runs.group >= 0
    for wrong, rule in (
        ((column == 0) & (runs.group > 0), "the first group of a row is not 0"),
        ((column > 0) & real & (before < 0), "a token follows padding"),
        (real & (runs.group != before + 1), "group_ids are not runs numbered 0, 1, 2…"),
        (
            real & ((runs.parent < 0) | (runs.parent > runs.group)),
            "a parent does not come before its child",
        ),
    ):
        place.refuse(wrong, rule, starts)
    for name, step, rule in (
        ("parent_ids", 0, "parent_ids change within a group"),
        ("sample_ids", 0, "sample_ids change within a group"),
        ("input_pos", 1, "input_pos does not count up within a group"),
    ):
        values = flat[name]
        wrong = inside.copy()
        wrong[1:] &= values[1:] != (values[:-1] + step if step else values[:-1])
        if wrong.any():
            place.refuse(wrong & (groups >= 0), rule)
    return _Runs(*(values[real] for values in vars(runs).values())), inside


def _check_trees(runs: _Runs, place: _Place) -> list[list[int]]:
    """Check that groups stand depth first, positions run on from parent to child, and only shared
    groups branch, all into copies of one token. Returns the path of each run's group, from the root
    to itself.
    """
    root = runs.parent == runs.group
    # Groups of a row are numbered without gaps.
    parent_run = np.arange(len(root)) - runs.group + runs.parent
    child = ~root
    follows = runs.position[parent_run] + runs.length[parent_run]
    children = np.bincount(parent_run[child], minlength=len(root))
    # All children begin with their own copy of their parent's omitted last token: the same for all.
    token = np.full(len(root), -1, dtype=np.int64)
    token[parent_run[child]] = runs.token[child]
    shared = runs.sample < 0
    for wrong, rule in (
        (root & (runs.position != 0), "input_pos of a root group does not begin at 0"),
        (child & (runs.position != follows), "input_pos of a group does not continue its parent's"),
        (child & (runs.sample[parent_run] >= 0), "a group continues a group of a single sample"),
        (child & (runs.token != token[parent_run]), "siblings do not begin with the same token"),
        (shared & (children == 0), "a shared group without children"),
        (
            shared & (children == 1),
            "a shared group with a single child; the two should be one group",
        ),
    ):
        place.refuse(wrong, rule, runs.start)

    paths: list[list[int]] = []
    path: list[int] = []
    for run, (group, parent) in enumerate(
        zip(runs.group.tolist(), runs.parent.tolist(), strict=True)
    ):
        if parent == group:
            path = [group]
        else:
            if parent not in path:  # neither the group to the left nor one of its ancestors
                place.refuse(
                    np.ones(1, np.bool_),
                    "groups are not in depth-first order",
                    runs.start[run : run + 1],
                )
            path = [*path[: path.index(parent) + 1], group]
        paths.append(path)
    return paths


def _check_labels(flat: Arrays, runs: _Runs, inside: np.ndarray, place: _Place) -> None:
    """Check that labels are the next tokens of their samples, and label tensors have values exactly
    at the labels.
    """
    labels = flat["labels"]
    samples = flat["sample_ids"]
    untrained = labels == IGNORE_LABEL
    trained = ~untrained
    place.refuse(trained & (labels < 0), "a label is negative")
    place.refuse(trained & (samples < 0), "a shared token or padding has a label")
    wrong = labels[:-1] != flat["tokens"][1:]
    wrong &= inside[1:]
    wrong &= trained[:-1]
    place.refuse(wrong, "the label is not the next token of its group")
    last = runs.start + runs.length - 1
    silent = (runs.sample >= 0) & untrained[last]
    place.refuse(silent, "the last position of a sample has no label", last)
    place.refuse(flat["assistant_mask"] != trained, "assistant_mask and labels disagree")
    for name in ("logprobs", "reference_logprobs"):
        if name in flat:
            known = flat[name] == flat[name]  # not NaN
            place.refuse(untrained & known, f"a {name[:-1]} without a label")
            place.refuse(np.isinf(flat[name]), f"a {name[:-1]} is infinite")
    for name in ("advantages", "weights"):
        values = flat[name]
        place.refuse(~np.isfinite(values), f"{name} is not finite")
        place.refuse(untrained & (values != 0), f"{name} is set at an untrained position")
    if flat["weights"].min() < 0:
        place.refuse(flat["weights"] < 0, "a weight is negative")
    place.refuse(untrained & (flat["weights_version"] != -1), "a weights_version without a label")


def _check_samples(samples: Sequence[PackedSample], owned: Sequence[_Owned], where: str) -> None:
    """Check that the sample table and the tensors agree, and nothing after a sample's prompt is
    shared.
    """
    found: dict[int, _Owned] = {}
    for one in owned:
        other = found.setdefault(one.sample, one)
        if other is not one:
            raise PackError(
                f"{where}: sample {one.sample} owns two groups, {other.path[-1]} of row "
                f"{other.row} and {one.path[-1]} of row "
                f"{one.row}; pack the samples again"
            )
    for number, sample in enumerate(samples):
        name = f"sample {number} (task {sample.task_id!r}, sample {sample.sample})"
        here = found.get(number, _Owned(number, -1, 0, 0, 0, []))
        told = (sample.row, sample.groups, sample.num_trained)
        seen = (here.row, here.path, here.num_trained)
        if told != seen:
            raise PackError(
                f"{where}: the table gives {name} (row, groups, trained tokens) {told}, but the "
                f"tensors hold {seen}; pack the samples again"
            )
        length = here.position + here.length + 1  # tokens, the last label included
        if (
            here.position >= sample.prompt_length
            or length > sample.prompt_length + sample.completion_length
        ):
            raise PackError(
                f"{where}: {name} shares {here.position} positions and has {length} tokens, but "
                f"its table entry has a prompt of {sample.prompt_length} and a completion of "
                f"{sample.completion_length} tokens; pack the samples again"
            )
