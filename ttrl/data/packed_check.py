"""Do packed tensors keep their contract? Every rule of the format, tested on whole arrays.

Run after packing and on loading, so that a trainer never sees arrays that do not belong together.
"""

from collections.abc import Mapping, Sequence
from typing import get_args

import torch
from torch import Tensor

from ttrl.data.packed_format import IGNORE_LABEL, TENSOR_DTYPES, Aggregation, PackedSample, padding_value
from ttrl.errors import PackError


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
    _check_padding(tensors, pad_id, where)
    _check_groups(tensors, where)
    _check_labels(tensors, len(samples), where)
    _check_samples(tensors, samples, where)


def _refuse(where: str, wrong: Tensor, rule: str) -> None:
    """Raises for the first True of `wrong` [B, T]."""
    if wrong.any():
        row, column = (int(i) for i in wrong.nonzero()[0])
        raise PackError(
            f"{where}: row {row}, position {column}: {rule} ({int(wrong.sum())} such positions); pack the samples again"
        )


def _check_shapes(tensors: Mapping[str, Tensor], where: str) -> None:
    shape = tensors["tokens"].shape
    if len(shape) != 2 or 0 in shape:
        raise PackError(f"{where}: tokens have shape {list(shape)}; expected [rows, positions] with at least one of each")
    for name, tensor in tensors.items():
        if tensor.dtype != TENSOR_DTYPES[name]:
            raise PackError(f"{where}: {name} is {tensor.dtype}; expected {TENSOR_DTYPES[name]}")
        if tensor.shape != shape:
            raise PackError(f"{where}: {name} has shape {list(tensor.shape)}, tokens have {list(shape)}")


def _check_padding(tensors: Mapping[str, Tensor], pad_id: int, where: str) -> None:
    padding = tensors["group_ids"] < 0
    for name, tensor in tensors.items():
        expected = padding_value(name, pad_id)
        same = tensor.isnan() if expected != expected else tensor == expected
        _refuse(where, padding & ~same, f"{name} is set in padding")


def _check_groups(tensors: Mapping[str, Tensor], where: str) -> None:
    """Groups are runs numbered 0, 1, 2…, padding comes last, parents come first, positions run on from parent to child."""
    tokens, groups, parents = tensors["tokens"], tensors["group_ids"], tensors["parent_ids"]
    samples, pos = tensors["sample_ids"], tensors["input_pos"]
    padding = groups < 0
    first, later = groups[:, :1], groups[:, 1:]
    _refuse(where, first > 0, "the first group of a row is not 0")
    step = later - groups[:, :-1]
    follows = (later >= 0) & ~padding[:, :-1]
    _refuse(where, (later >= 0) & padding[:, :-1], "a token follows padding")
    _refuse(where, tokens < 0, "a token id is negative")
    _refuse(where, follows & (step != 0) & (step != 1), "group_ids are not runs numbered 0, 1, 2…")
    _refuse(where, ~padding & ((parents < 0) | (parents > groups)), "a parent does not come before its child")
    inside = follows & (step == 0)
    _refuse(where, inside & (parents[:, 1:] != parents[:, :-1]), "parent_ids change within a group")
    _refuse(where, inside & (samples[:, 1:] != samples[:, :-1]), "sample_ids change within a group")
    _refuse(where, inside & (pos[:, 1:] != pos[:, :-1] + 1), "input_pos does not count up within a group")

    starts = ~padding
    starts[:, 1:] &= ~inside
    _refuse(where, starts & (parents == groups) & (pos != 0), "input_pos of a root group does not begin at 0")
    # The last position and the owner of each group, by its id; a child's first position must be one more than its parent's last.
    last = torch.full_like(pos, -1).scatter_reduce_(1, groups.clamp(min=0), torch.where(padding, -1, pos), "amax")
    owner = torch.full_like(samples, -1).scatter_reduce_(1, groups.clamp(min=0), samples, "amax")
    child = starts & (parents != groups)
    up = parents.clamp(min=0)
    _refuse(where, child & (pos != last.gather(1, up) + 1), "input_pos of a group does not continue its parent's")
    _refuse(where, child & (owner.gather(1, up) >= 0), "a group continues a group that belongs to one sample")
    # All children begin with their own copy of the token that their parent was stored without: the same one for all.
    token = torch.where(child, tokens, -1)
    biggest = torch.full_like(token, -1).scatter_reduce_(1, up, token, "amax")
    _refuse(where, child & (token != biggest.gather(1, up)), "siblings do not begin with the same token")


def _check_labels(tensors: Mapping[str, Tensor], num_samples: int, where: str) -> None:
    """Labels are the next tokens of their samples, and what speaks of labels is there exactly where they are."""
    labels, samples, groups = tensors["labels"], tensors["sample_ids"], tensors["group_ids"]
    trained = labels != IGNORE_LABEL
    _refuse(where, (samples < -1) | (samples >= num_samples), f"sample_ids outside of the sample table of {num_samples}")
    _refuse(where, trained & (labels < 0), "a label is negative")
    _refuse(where, trained & (samples < 0), "a shared token or padding has a label")
    inside = groups[:, 1:] == groups[:, :-1]
    wrong = trained[:, :-1] & inside & (labels[:, :-1] != tensors["tokens"][:, 1:])
    _refuse(where, wrong, "the label is not the next token of its group")
    ends = groups >= 0
    ends[:, :-1] &= ~inside
    _refuse(where, ends & (samples >= 0) & ~trained, "the last position of a sample has no label")
    _refuse(where, tensors["assistant_mask"] != trained, "assistant_mask and labels disagree")
    _refuse(where, ~trained & ~tensors["logprobs"].isnan(), "a logprob without a label")
    _refuse(where, tensors["logprobs"].isinf(), "a logprob is infinite")
    if "reference_logprobs" in tensors:
        _refuse(where, ~trained & ~tensors["reference_logprobs"].isnan(), "a reference_logprob without a label")
    for name in ("advantages", "weights"):
        values = tensors[name]
        _refuse(where, ~values.isfinite(), f"{name} is not finite")
        _refuse(where, ~trained & (values != 0), f"{name} is set where nothing is trained")
    _refuse(where, tensors["weights"] < 0, "a weight is negative")
    _refuse(where, ~trained & (tensors["weights_version"] != -1), "a weights_version without a label")


def _check_samples(tensors: Mapping[str, Tensor], samples: Sequence[PackedSample], where: str) -> None:
    """The sample table and the tensors tell the same."""
    groups, ids = tensors["group_ids"], tensors["sample_ids"]
    counts = torch.bincount(ids[tensors["labels"] != IGNORE_LABEL], minlength=len(samples)).tolist()
    starts = ids >= 0
    starts[:, 1:] &= groups[:, 1:] != groups[:, :-1]
    found: dict[int, tuple[int, list[int]]] = {}
    places = starts.nonzero().tolist()
    parent_of = {(r, g): p for r, g, p in _group_parents(tensors)}
    for (row, _), sample, group in zip(places, ids[starts].tolist(), groups[starts].tolist(), strict=True):
        if sample in found:
            raise PackError(f"{where}: sample {sample} owns two groups, {found[sample][1][-1]} and {group} of row {row}")
        path = [group]
        while parent_of[row, path[0]] != path[0]:
            path.insert(0, parent_of[row, path[0]])
        found[sample] = (row, path)
    for number, sample in enumerate(samples):
        told = (sample.row, sample.groups, sample.num_trained)
        seen = (*found.get(number, (-1, [])), counts[number])
        if told != seen:
            raise PackError(
                f"{where}: sample {number} (task {sample.task_id!r}, sample {sample.sample}) is in the table with (row, groups, "
                f"trained tokens) {told}, but the tensors hold {seen}; pack the samples again"
            )


def _group_parents(tensors: Mapping[str, Tensor]) -> list[list[int]]:
    """[row, group, parent] of every group."""
    starts = tensors["group_ids"] >= 0
    starts[:, 1:] &= tensors["group_ids"][:, 1:] != tensors["group_ids"][:, :-1]
    rows = starts.nonzero()[:, 0]
    return torch.stack([rows, tensors["group_ids"][starts], tensors["parent_ids"][starts]], dim=1).tolist()
