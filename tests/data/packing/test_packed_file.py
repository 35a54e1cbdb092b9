"""Packed tensors on disk, and the check that stands between a damaged pack and a trainer."""

import dataclasses
import json
import math
import os

import pytest
import safetensors.torch
import torch

from ttrl.data.packing import packed_check
from ttrl.data.packing.pack import PackedTensors, packed_tensors_from_tokenized_results
from ttrl.data.packing.packed_file import HEADER_KEY
from ttrl.errors import PackError
from ttrl.records import TokenizedResult


@pytest.fixture
def packed() -> PackedTensors:
    """Row 0: a prompt 1 2 (3) with completions [3] 4 5 6 and [3] 7 8, a single sample, and
    padding.
    """

    def sample(task: str, number: int, prompt: list[int], completion: list[int]) -> TokenizedResult:
        length = len(prompt) + len(completion)
        return TokenizedResult(
            task_id=task,
            sample=number,
            token_ids=prompt + completion,
            assistant_mask=[False] * len(prompt) + [True] * len(completion),
            input_pos=list(range(length)),
            logprobs=[math.nan] * len(prompt) + [-0.5] * len(completion),
            prompt_length=len(prompt),
            reward=1.0,
            advantage=0.5,
            weights_version=0,
            finish_reason="stop",
        )

    results = [
        sample("a", 0, [1, 2, 3], [4, 5, 6]),
        sample("a", 1, [1, 2, 3], [7, 8]),
        sample("ü", 0, [9, 10], [11]),
    ]
    return packed_tensors_from_tokenized_results(
        results, seq_len=12, pad_id=0, aggregation="sequence"
    )


def test_what_is_saved_is_loaded(packed, tmp_path):
    packed.metadata["model"] = "tiny"
    packed.reference_logprobs = torch.where(packed.labels >= 0, -1.0, math.nan)
    path = tmp_path / "folder" / "packed.safetensors"
    packed.save(path)
    loaded = PackedTensors.load(path)
    for name, tensor in packed.tensors().items():
        torch.testing.assert_close(loaded.tensors()[name], tensor, equal_nan=True, rtol=0, atol=0)
    for field in dataclasses.fields(PackedTensors):
        value = getattr(packed, field.name)
        if not isinstance(value, torch.Tensor):
            assert getattr(loaded, field.name) == value, field.name


def test_reference_logprobs_go_with_their_rows(packed, tmp_path):
    packed.reference_logprobs = torch.where(
        packed.labels >= 0, -packed.labels.float() / 8, math.nan
    )
    padded = packed.pad_rows_to_multiple(3)
    padded.check()
    assert padded.num_rows == 3 and padded.reference_logprobs[1:].isnan().all()
    for part in (padded.rows([2, 0]), padded.rows([0]).trim(), padded.trim()):
        part.check()
        at = part.labels >= 0
        assert torch.equal(part.reference_logprobs[at], -part.labels[at].float() / 8)
        assert (
            part.reference_logprobs.shape == part.labels.shape
            and part.reference_logprobs[~at].isnan().all()
        )
        part.save(tmp_path / "part")
        assert torch.equal(
            PackedTensors.load(tmp_path / "part").reference_logprobs[at],
            part.reference_logprobs[at],
        )
    without = dataclasses.replace(packed, reference_logprobs=None)
    without.save(tmp_path / "without")
    assert PackedTensors.load(tmp_path / "without").reference_logprobs is None
    assert "reference_logprobs" not in without.pad_rows_to_multiple(3).trim().tensors()


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (0, -1.0, "position 0: a reference_logprob without a label"),
        (11, -1.0, "position 11: reference_logprobs is set in padding"),
        (3, -math.inf, "position 3: a reference_logprob is infinite"),
        (3, math.nan, None),
    ],
)
def test_reference_logprobs_are_checked(packed, column, value, message):
    packed.reference_logprobs = torch.where(packed.labels >= 0, -1.0, math.nan)
    packed.reference_logprobs[0, column] = value
    if message is None:
        packed.check("here")
        return
    with pytest.raises(PackError, match=message):
        packed.check("here")


def test_reference_logprobs_have_the_shape_and_dtype_of_the_others(packed):
    for wrong, message in (
        (packed.logprobs[:, :-1], "has shape"),
        (packed.logprobs.double(), "expected torch.float32"),
    ):
        with pytest.raises(PackError, match=f"reference_logprobs .*{message}"):
            dataclasses.replace(packed, reference_logprobs=wrong).check()


def test_a_truncated_file_is_refused_at_any_length(packed, tmp_path):
    path = tmp_path / "packed.safetensors"
    packed.save(path)
    data = path.read_bytes()
    for length in [0, 4, 8, 100, len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(PackError, match=r"packed\.safetensors .*(damaged|incomplete)"):
            PackedTensors.load(path)


def test_foreign_and_missing_files_are_refused(packed, tmp_path):
    path = tmp_path / "other.safetensors"
    with pytest.raises(PackError, match="does not exist"):
        PackedTensors.load(path)
    safetensors.torch.save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(PackError, match="not of packed tensors"):
        PackedTensors.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, header: tensors.pop("weights"), r"missing tensors: \['weights'\]"),
        (
            lambda tensors, header: tensors.update(other=torch.zeros(1)),
            r"unknown tensors: \['other'\]",
        ),
        (
            lambda tensors, header: header.update(schema=99),
            "format 99, and this version reads format 1",
        ),
        (lambda tensors, header: header.pop("samples"), "header is damaged"),
        (lambda tensors, header: header["samples"].pop(), "outside of the sample table of 2"),
        (
            lambda tensors, header: header["samples"][0].update(row=1),
            r"sample 0 .* the tensors hold",
        ),
        (lambda tensors, header: header["samples"][0].update(unknown=1), "header is damaged"),
        (lambda tensors, header: header.update(aggregation="mean"), "aggregation 'mean'"),
    ],
)
def test_a_changed_file_is_refused(packed, tmp_path, change, message):
    path = tmp_path / "packed.safetensors"
    packed.save(path)
    with safetensors.safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()[HEADER_KEY])
    tensors = safetensors.torch.load_file(path)
    change(tensors, header)
    safetensors.torch.save_file(tensors, path, {HEADER_KEY: json.dumps(header)})
    with pytest.raises(PackError, match=message):
        PackedTensors.load(path)


def set_at(name: str, column: int, value: float):
    def change(packed: PackedTensors) -> None:
        getattr(packed, name)[0, column] = value

    return change


def set_tensor(name: str, value):
    def change(packed: PackedTensors) -> None:
        vars(packed)[name] = value(getattr(packed, name))

    return change


# columns: 0 1 the prompt | 2 3 4 sample 0 | 5 6 sample 1 | 7 8 sample 2 | 9 10 11 padding
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_tensor("tokens", lambda t: t[0]), r"shape \[12\]; expected \[rows, positions\]"),
        (
            set_tensor("labels", lambda t: t[:, :-1]),
            r"labels has shape \[1, 11\], tokens have \[1, 12\]",
        ),
        (
            set_tensor("weights", lambda t: t.double()),
            "weights is torch.float64; expected torch.float32",
        ),
        (set_tensor("labels", lambda t: t.roll(1, 1)), "row 0, position"),
        (set_tensor("logprobs", lambda t: t.roll(1, 1)), "position 9: logprobs is set in padding"),
        (
            set_tensor("advantages", lambda t: t.roll(1, 1)),
            "position 9: advantages is set in padding",
        ),
        (set_tensor("logprobs", lambda t: t.roll(-1, 1)), "logprob without a label"),
        (
            set_tensor("advantages", lambda t: t.roll(-1, 1)),
            "advantages is set at an untrained position",
        ),
        (set_tensor("weights", lambda t: t.roll(-1, 1)), "weights is set at an untrained position"),
        (set_tensor("assistant_mask", lambda t: ~t), "assistant_mask is set in padding"),
        (set_at("tokens", 10, 5), "position 10: tokens is set in padding"),
        (set_at("group_ids", 4, 2), "parent_ids|sample_ids|input_pos"),
        (set_at("group_ids", 1, 5), "not runs numbered"),
        (set_at("parent_ids", 2, 4), "parent does not come before"),
        (set_at("parent_ids", 3, 1), "parent_ids change within a group"),
        (set_at("input_pos", 0, 1), "input_pos"),
        (set_at("sample_ids", 3, 1), "sample_ids change within a group"),
        (set_at("labels", 2, 5), "position 2: the label is not the next token"),
        (set_at("labels", 0, 2), "shared token or padding has a label"),
        (set_at("labels", 4, -5), "a label is negative"),
        (set_at("labels", 4, -100), "the last position of a sample has no label"),
        (set_at("tokens", 5, 4), "siblings do not begin with the same token"),
        (set_at("logprobs", 3, -math.inf), "a logprob is infinite"),
        (set_at("advantages", 3, math.nan), "advantages is not finite"),
        (set_at("weights", 3, -1.0), "a weight is negative"),
        (set_at("weights_version", 1, 0), "a weights_version without a label"),
    ],
)
def test_every_broken_rule_is_found(packed, change, message):
    packed.check()
    change(packed)
    with pytest.raises(PackError, match=f"^here: .*({message})"):
        packed.check("here")


def test_a_shift_of_all_input_positions_of_a_completion_is_found(packed):
    packed.input_pos[0, 2:5] += 1
    with pytest.raises(
        PackError, match="position 2: input_pos of a group does not continue its parent's"
    ):
        packed.check()


@pytest.fixture
def tree() -> PackedTensors:
    """Row 0: 0 is a system prompt (columns 0 1), 1 a question (2 3) with samples 0 and 1 (4 | 5), 2
    another (6 7) with 2, 3 and 4 (8 | 9 | 10); 11 padding."""

    def sample(number: int, prompt: list[int], completion: int) -> TokenizedResult:
        length = len(prompt) + 1
        return TokenizedResult(
            task_id=f"t{number // 2}",
            sample=number % 2,
            token_ids=[*prompt, completion],
            assistant_mask=[False] * len(prompt) + [True],
            input_pos=list(range(length)),
            logprobs=[math.nan] * len(prompt) + [-0.5],
            prompt_length=len(prompt),
            reward=1.0,
            advantage=0.5,
        )

    results = [sample(i, [1, 2, 3, 4 if i < 2 else 5, 6], 7 + i) for i in range(5)]
    return packed_tensors_from_tokenized_results(results, seq_len=12, pad_id=0, shortest_shared=1)


def set_columns(name: str, columns: list[int], value: int):
    def change(packed: PackedTensors) -> None:
        getattr(packed, name)[0, columns] = value

    return change


def in_table(number: int, **changes):
    def change(packed: PackedTensors) -> None:
        packed.samples[number] = dataclasses.replace(packed.samples[number], **changes)

    return change


def test_the_tree_of_these_tests(tree):
    assert tree.group_ids.tolist() == [[0, 0, 1, 1, 2, 3, 4, 4, 5, 6, 7, -1]]
    assert tree.parent_ids.tolist() == [[0, 0, 0, 0, 1, 1, 0, 0, 4, 4, 4, -1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_columns("parent_ids", [8], 1), "position 8: groups are not in depth-first order"),
        (set_columns("parent_ids", [8, 9], 1), "position 6: a shared group with a single child"),
        (
            set_columns("parent_ids", [5], 0),
            "position 5: input_pos of a group does not continue its parent's",
        ),
        (
            set_columns("parent_ids", [6, 7], 6),
            "position 6: a parent does not come before its child",
        ),
        (
            set_columns("parent_ids", [6, 7], 4),
            "position 6: input_pos of a root group does not begin at 0",
        ),
        (set_columns("tokens", [6], 4), "position 2: siblings do not begin with the same token"),
        (set_columns("tokens", [9], 5), "position 9: siblings do not begin with the same token"),
        (
            set_columns("sample_ids", [2, 3], 0),
            "position 4: a group continues a group of a single sample",
        ),
        (
            set_columns("sample_ids", [5], -1),
            "shared token or padding has a label|a shared group without children",
        ),
        (
            in_table(2, groups=[0, 5]),
            r"sample 2 .* \(0, \[0, 5\], 1\), but the tensors hold \(0, \[0, 4, 5\], 1\)",
        ),
        (
            in_table(3, prompt_length=4, completion_length=2),
            "sample 3 .* shares 4 positions and has 6 tokens",
        ),
        (in_table(3, prompt_length=6), None),
        (
            in_table(1, prompt_length=5, completion_length=0),
            "sample 1 .* shares 4 positions and has 6 tokens",
        ),
    ],
)
def test_every_broken_rule_of_trees_is_found(tree, change, message):
    tree.check()
    change(tree)
    if message is None:
        tree.check("here")
        return
    with pytest.raises(PackError, match=f"^here: .*({message})"):
        tree.check("here")


def test_a_shared_group_with_one_child_is_refused(tree):
    # Without samples 3 and 4, their question has one child left.
    for tensor in tree.tensors().values():
        tensor[0, 9:11] = tensor[0, 11]
    del tree.samples[3:]
    with pytest.raises(
        PackError,
        match="row 0, position 6: a shared group with a single child; the two should be one group",
    ):
        tree.check()


def test_places_are_right_beyond_the_rows_that_are_checked_at_a_time(tree):
    rows = packed_check.CHUNK // tree.seq_len + 2
    padded = tree.pad_rows_to_multiple(rows)
    padded.check()
    padded.tokens[rows - 1, 5] = 1
    with pytest.raises(PackError, match=f"row {rows - 1}, position 5: tokens is set in padding"):
        padded.check()


@pytest.mark.skipif(
    not os.path.exists("/proc/self/maps"), reason="needs Linux's list of what is mapped"
)
def test_a_loaded_file_is_mapped_into_memory(packed, tmp_path):
    path = tmp_path / "packed.safetensors"
    packed.save(path)
    loaded = PackedTensors.load(path)
    with open("/proc/self/maps") as maps:
        assert str(path) in maps.read()
    loaded.tokens[0, 0] = 77  # its own copy of that page
    assert int(PackedTensors.load(path).tokens[0, 0]) == int(packed.tokens[0, 0])
