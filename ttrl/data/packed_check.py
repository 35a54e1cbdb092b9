"""Do packed tensors keep their contract? Every rule of the format, tested on whole arrays.

Run after packing and on loading, so that a trainer never sees arrays that do not belong together. What must hold at every
position is tested there; what is the same all along a group is read once per run of equal group ids (`_Runs`), which are few.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from ttrl.data.packed_format import IGNORE_LABEL, TENSOR_DTYPES, Aggregation, PackedSample, padding_value
from ttrl.errors import PackError

CHUNK = 1 << 18
"""Positions that are checked at a time, so that what lies between stays in the processor's cache."""


def check_packed(
    tensors: Mapping[str, Tensor],
    samples: Sequence[PackedSample],
    aggregation: str,
    constant_length: int | None,
    pad_id: int,
    where: str,
) -> None:
    """Raises PackError, naming `where`, the first broken rule and its place. `tensors` are [B, T], by their names."""
    _check_shapes(tensors, where)
    if aggregation not in get_args(Aggregation) or (aggregation == "constant") != (constant_length is not None):
        raise PackError(f"{where}: aggregation {aggregation!r} with constant_length {constant_length}; pack again")
    num_rows, seq_len = tensors["tokens"].shape
    step = max(1, CHUNK // seq_len)
    owned: list[_Owned] = []
    for first in range(0, num_rows, step):
        part = {name: tensor[first : first + step] for name, tensor in tensors.items()}
        place = _Place(where, first, part["tokens"].shape[0])
        _check_padding(part, pad_id, place)
        place.refuse(part["tokens"] < 0, "a token id is negative")
        ids = part["sample_ids"]
        place.refuse((ids < -1) | (ids >= len(samples)), f"sample_ids outside of the sample table of {len(samples)}")
        runs = _check_groups(part, place)
        paths = _check_trees(runs, place)
        _check_labels(part, runs, place)
        labels = torch.diff(torch.searchsorted(_places(part["assistant_mask"]), runs.borders()))[::2]
        values = (t.tolist() for t in (runs.sample, runs.row + first, runs.position, runs.length, labels))
        owned += [_Owned(*one) for one in zip(*values, paths, strict=True) if one[0] >= 0]
    _check_samples(samples, owned, where)


@dataclass
class _Place:
    """Which rows are being checked, for messages."""

    where: str
    first: int
    count: int

    def refuse(self, wrong: Tensor, rule: str) -> None:
        """Raises for the first True of `wrong` [rows, T]."""
        if wrong.any():
            row, column = (int(i) for i in wrong.nonzero()[0])
            self.fail(row, column, rule, int(wrong.sum()))

    def fail(self, row: int, column: int, rule: str, count: int) -> None:
        """Raises; `row` counts from the first of these rows."""
        raise PackError(
            f"{self.where}: row {self.first + row}, position {column}: {rule} ({count} such places in rows {self.first} to "
            f"{self.first + self.count - 1}); pack the samples again"
        )


@dataclass(slots=True)
class _Owned:
    """A group that belongs to one sample."""

    sample: int
    row: int
    position: int
    """Of its first token in the sample: what lies before is shared."""
    length: int
    num_trained: int
    path: list[int]


def _places(which: Tensor) -> Tensor:
    """int64: where `which` is True, counted over all of it (many times as fast as torch's nonzero)."""
    return torch.from_numpy(np.flatnonzero(which.numpy()))


def _check_shapes(tensors: Mapping[str, Tensor], where: str) -> None:
    shape = tensors["tokens"].shape
    if len(shape) != 2 or 0 in shape:
        raise PackError(f"{where}: tokens have shape {list(shape)}; expected [rows, positions] with at least one of each")
    for name, tensor in tensors.items():
        if tensor.dtype != TENSOR_DTYPES[name]:
            raise PackError(f"{where}: {name} is {tensor.dtype}; expected {TENSOR_DTYPES[name]}")
        if tensor.shape != shape:
            raise PackError(f"{where}: {name} has shape {list(tensor.shape)}, tokens have {list(shape)}")


def _check_padding(tensors: Mapping[str, Tensor], pad_id: int, place: _Place) -> None:
    seq_len = tensors["group_ids"].shape[1]
    padding = _places(tensors["group_ids"] < 0)
    for name, tensor in tensors.items():
        expected = padding_value(name, pad_id)
        found = tensor.reshape(-1)[padding]
        wrong = ~found.isnan() if expected != expected else found != expected
        if wrong.any():
            row, column = divmod(int(padding[int(wrong.nonzero()[0])]), seq_len)
            place.fail(row, column, f"{name} is set in padding", int(wrong.sum()))


@dataclass
class _Runs:
    """Runs of equal group ids, padding left out; [K] in the order of the rows. The values are those of a run's first position."""

    row: Tensor
    column: Tensor
    length: Tensor
    group: Tensor
    parent: Tensor
    sample: Tensor
    position: Tensor
    token: Tensor

    start: Tensor
    """Of the run, counted over all rows."""

    def borders(self) -> Tensor:
        """[2 K]: where each run begins and ends, counted over all rows."""
        return torch.stack([self.start, self.start + self.length], dim=1).flatten()

    def refuse(self, place: _Place, wrong: Tensor, rule: str) -> None:
        """Raises for the first True of `wrong` [K]."""
        if wrong.any():
            run = int(wrong.nonzero()[0])
            place.fail(int(self.row[run]), int(self.column[run]), rule, int(wrong.sum()))


def _check_groups(tensors: Mapping[str, Tensor], place: _Place) -> _Runs:
    """Groups are runs numbered 0, 1, 2…, padding comes last, and along a run parent and sample stay and positions count up."""
    groups, seq_len = tensors["group_ids"], tensors["group_ids"].shape[1]
    inside = torch.zeros_like(groups, dtype=torch.bool)  # in the group of the position before
    inside[:, 1:] = groups[:, 1:] == groups[:, :-1]
    starts = _places(~inside)
    length = torch.diff(starts, append=torch.tensor([groups.numel()]))
    first = {name: tensors[name].flatten()[starts] for name in ("parent_ids", "sample_ids", "input_pos", "tokens")}
    group, column = groups.flatten()[starts], starts % seq_len
    runs = _Runs(starts // seq_len, column, length, group, *first.values(), starts)

    before = torch.where(column > 0, group.roll(1), -1)  # the group to the left
    runs.refuse(place, (column == 0) & (group > 0), "the first group of a row is not 0")
    runs.refuse(place, (column > 0) & (group >= 0) & (before < 0), "a token follows padding")
    runs.refuse(place, (group >= 0) & (group != before + 1), "group_ids are not runs numbered 0, 1, 2…")
    runs.refuse(place, (group >= 0) & ((runs.parent < 0) | (runs.parent > group)), "a parent does not come before its child")
    inside &= groups >= 0
    for name, step, rule in (
        ("parent_ids", 0, "parent_ids change within a group"),
        ("sample_ids", 0, "sample_ids change within a group"),
        ("input_pos", 1, "input_pos does not count up within a group"),
    ):
        values, wrong = tensors[name], inside.clone()
        wrong[:, 1:] &= values[:, 1:] != (values[:, :-1] + step if step else values[:, :-1])
        place.refuse(wrong, rule)
    real = group >= 0
    return _Runs(*(values[real] for values in vars(runs).values()))


def _check_trees(runs: _Runs, place: _Place) -> list[list[int]]:
    """Groups stand depth first, positions run on from parent to child, only shared groups branch, all into copies of one token.

    Returns the path of each run's group, from the root to itself.
    """
    root = runs.parent == runs.group
    runs.refuse(place, root & (runs.position != 0), "input_pos of a root group does not begin at 0")
    parent_run = torch.arange(len(root)) - runs.group + runs.parent  # groups of a row are numbered without gaps
    child = ~root
    follows = runs.position[parent_run] + runs.length[parent_run]
    runs.refuse(place, child & (runs.position != follows), "input_pos of a group does not continue its parent's")
    runs.refuse(place, child & (runs.sample[parent_run] >= 0), "a group continues a group that belongs to one sample")
    children = torch.zeros_like(runs.group).index_add_(0, parent_run[child], torch.ones_like(parent_run[child]))
    # All children begin with their own copy of the token that their parent was stored without: the same one for all.
    token = torch.full_like(runs.token, -1).scatter_reduce_(0, parent_run[child], runs.token[child], "amax")
    runs.refuse(place, child & (runs.token != token[parent_run]), "siblings do not begin with the same token")
    shared = runs.sample < 0
    runs.refuse(place, shared & (children == 0), "a shared group that nothing continues")
    runs.refuse(place, shared & (children == 1), "a shared group with one child, which should be one with it")

    paths: list[list[int]] = []
    path: list[int] = []
    for run, (group, parent) in enumerate(zip(runs.group.tolist(), runs.parent.tolist(), strict=True)):
        if parent == group:
            path = [group]
        else:
            if parent not in path:  # so not the group to the left, nor one that it continues
                place.fail(int(runs.row[run]), int(runs.column[run]), "groups do not stand depth first", 1)
            path = [*path[: path.index(parent) + 1], group]
        paths.append(path)
    return paths


def _check_labels(tensors: Mapping[str, Tensor], runs: _Runs, place: _Place) -> None:
    """Labels are the next tokens of their samples, and what speaks of labels is there exactly where they are."""
    labels, samples, groups = tensors["labels"], tensors["sample_ids"], tensors["group_ids"]
    trained = labels != IGNORE_LABEL
    place.refuse(trained & (labels < 0), "a label is negative")
    place.refuse(trained & (samples < 0), "a shared token or padding has a label")
    wrong = trained[:, :-1] & (groups[:, 1:] == groups[:, :-1]) & (labels[:, :-1] != tensors["tokens"][:, 1:])
    place.refuse(wrong, "the label is not the next token of its group")
    last = runs.column + runs.length - 1
    silent = (runs.sample >= 0) & ~trained[runs.row, last]
    if silent.any():
        run = int(silent.nonzero()[0])
        rule = "the last position of a sample has no label"
        place.fail(int(runs.row[run]), int(last[run]), rule, int(silent.sum()))
    place.refuse(tensors["assistant_mask"] != trained, "assistant_mask and labels disagree")
    untrained = ~trained
    place.refuse(untrained & ~tensors["logprobs"].isnan(), "a logprob without a label")
    place.refuse(tensors["logprobs"].isinf(), "a logprob is infinite")
    if "reference_logprobs" in tensors:
        place.refuse(untrained & ~tensors["reference_logprobs"].isnan(), "a reference_logprob without a label")
    for name in ("advantages", "weights"):
        values = tensors[name]
        place.refuse(~values.isfinite(), f"{name} is not finite")
        place.refuse(untrained & (values != 0), f"{name} is set where nothing is trained")
    place.refuse(tensors["weights"] < 0, "a weight is negative")
    place.refuse(untrained & (tensors["weights_version"] != -1), "a weights_version without a label")


def _check_samples(samples: Sequence[PackedSample], owned: Sequence[_Owned], where: str) -> None:
    """The sample table and the tensors tell the same, and nothing behind a sample's prompt is shared."""
    found: dict[int, _Owned] = {}
    for one in owned:
        other = found.setdefault(one.sample, one)
        if other is not one:
            raise PackError(
                f"{where}: sample {one.sample} owns two groups, {other.path[-1]} of row {other.row} and {one.path[-1]} of row "
                f"{one.row}; pack the samples again"
            )
    for number, sample in enumerate(samples):
        name = f"sample {number} (task {sample.task_id!r}, sample {sample.sample})"
        here = found.get(number, _Owned(number, -1, 0, 0, 0, []))
        told, seen = (sample.row, sample.groups, sample.num_trained), (here.row, here.path, here.num_trained)
        if told != seen:
            raise PackError(
                f"{where}: {name} is in the table with (row, groups, trained tokens) {told}, but the tensors hold {seen}; "
                "pack the samples again"
            )
        length = here.position + here.length + 1  # tokens, the last label included
        if here.position >= sample.prompt_length or length > sample.prompt_length + sample.completion_length:
            raise PackError(
                f"{where}: {name} shares {here.position} positions and has {length} tokens, but the table gives it a prompt of "
                f"{sample.prompt_length} and a completion of {sample.completion_length} tokens; pack the samples again"
            )
