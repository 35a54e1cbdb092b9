"""Packing against an independent unpacking, and the faults that it must not have again."""

import dataclasses
import math
import re
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrl.data.packing.masks import dense_mask
from ttrl.data.packing.pack import PackedTensors, packed_tensors_from_tokenized_results
from ttrl.data.packing.pack import unpack as unpack_samples
from ttrl.errors import PackError
from ttrl.records import TokenizedResult


def result(
    task: str, sample: int, prompt: list[int], completion: list[int], **changes
) -> TokenizedResult:
    length = len(prompt) + len(completion)
    values = dict(
        task_id=task,
        sample=sample,
        token_ids=prompt + completion,
        assistant_mask=[False] * len(prompt) + [True] * len(completion),
        input_pos=list(range(length)),
        logprobs=[math.nan] * len(prompt) + [-0.125 * (i + 1) for i in range(len(completion))],
        prompt_length=len(prompt),
        reward=0.5,
        advantage=1.5,
        weights_version=3,
        finish_reason="stop",
    )
    return TokenizedResult(**(values | changes))


def pack(results, seq_len=16, **kwargs) -> PackedTensors:
    return packed_tensors_from_tokenized_results(results, seq_len=seq_len, pad_id=0, **kwargs)


def same_float(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or float(np.float32(a)) == b


def unpack(packed: PackedTensors) -> list[TokenizedResult]:
    """Every sample read back out of the tensors: the tokens that its last position may attend to,
    and its last label.
    """
    allowed = dense_mask(packed.group_ids, packed.parent_ids)
    out = []
    for number, sample in enumerate(packed.samples):
        own = (packed.sample_ids[sample.row] == number).nonzero().flatten().tolist()
        seen = allowed[sample.row, own[-1]].nonzero().flatten().tolist()
        assert packed.input_pos[sample.row, seen].tolist() == list(range(len(seen)))
        ids, labels, *columns = (
            tensor[sample.row, seen].tolist()
            for tensor in (
                packed.tokens,
                packed.labels,
                packed.assistant_mask,
                packed.logprobs,
                packed.weights_version,
                packed.advantages,
            )
        )
        mask, logprobs, versions, advantages = (
            [first, *column] for first, column in zip([False, math.nan, -1, 0.0], columns)
        )
        advantages = [
            value if trained else math.nan for value, trained in zip(advantages, mask, strict=True)
        ]
        # What stands at a position speaks of the token after it.
        assert mask[1:] == [label != -100 for label in labels]
        assert all(label in (-100, token) for label, token in zip(labels, ids[1:]))
        ids.append(labels[-1])
        out.append(
            TokenizedResult(
                task_id=sample.task_id,
                sample=sample.sample,
                token_ids=ids,
                assistant_mask=mask,
                input_pos=list(range(len(ids))),
                logprobs=logprobs,
                prompt_length=sample.prompt_length,
                reward=sample.reward,
                advantage=sample.advantage,
                token_advantages=advantages[sample.prompt_length :],
                weights_version=versions[-1],
                token_versions=versions[sample.prompt_length :],
                finish_reason=sample.finish_reason,
            )
        )
    return out


def assert_same(got: TokenizedResult, expected: TokenizedResult) -> None:
    """Equal up to the last trained token: what follows it is not stored."""
    end = max(i for i, trained in enumerate(expected.assistant_mask) if trained) + 1
    cut = {
        name: getattr(expected, name)[:end]
        for name in ("token_ids", "assistant_mask", "input_pos", "logprobs")
    }
    for name, values in cut.items():
        if name == "logprobs":
            for token, (a, b) in enumerate(zip(values, got.logprobs, strict=True)):
                known = a if expected.assistant_mask[token] else math.nan
                assert same_float(known, b), (token, a, b)
        else:
            assert getattr(got, name) == values, name
    for name in ("task_id", "sample", "prompt_length", "reward", "finish_reason"):
        assert getattr(got, name) == getattr(expected, name), name
    completion = slice(expected.prompt_length, end)
    each = expected.token_versions or [expected.weights_version] * len(expected.token_ids)
    for mask, a, b in zip(
        expected.assistant_mask[completion], each, got.token_versions, strict=False
    ):
        assert b == (a if mask else -1)
    assert len(got.token_versions) == end - expected.prompt_length
    assert expected.advantage == got.advantage
    one_each = expected.token_advantages or [expected.advantage] * len(expected.token_ids)
    for trained, a, b in zip(
        cut["assistant_mask"][completion], one_each, got.token_advantages, strict=False
    ):
        assert same_float(a if trained else math.nan, b)
    assert len(got.token_advantages) == end - expected.prompt_length


# Few, so that prompts and completions are prefixes and copies of each other.
tokens = st.integers(0, 6)


@st.composite
def sample_lists(draw) -> list[TokenizedResult]:
    prompts = draw(st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=1, max_size=4))
    out = []
    for number in range(draw(st.integers(1, 14))):
        prompt = list(draw(st.sampled_from(prompts)))
        completion = draw(st.lists(tokens, max_size=8))
        trained = [draw(st.integers(0, 5)) > 0 for _ in completion]
        one = result(f"t{number}", number, prompt, completion)
        one.assistant_mask[len(prompt) :] = trained
        one.logprobs[len(prompt) :] = [
            draw(st.sampled_from([0.0, -0.5, -3.25, math.nan])) for _ in completion
        ]
        one.advantage = draw(st.sampled_from([-1.5, 0.0, 0.3, 2.0]))
        one.weights_version = draw(st.integers(-1, 4))
        if draw(st.booleans()):  # continued under other weights
            one.token_versions = sorted(draw(st.integers(-1, 4)) for _ in completion)
        if draw(st.integers(0, 2)) == 0:  # of a token that is not trained, anything
            some = st.sampled_from([-0.7, 0.0, 1.1])
            one.token_advantages = [
                draw(some) if is_trained else math.nan for is_trained in trained
            ]
        out.append(one)
    return out


@given(sample_lists(), st.integers(3, 24), st.sampled_from(["token", "sequence", "constant"]))
@settings(deadline=None, max_examples=80)
def test_unpacking_gives_back_every_sample_that_fits(results, seq_len, aggregation):
    ends = [
        max((i for i, trained in enumerate(r.assistant_mask) if trained), default=None)
        for r in results
    ]
    fits = [r for r, end in zip(results, ends) if end is not None and end <= seq_len]
    dropped = {
        "too_long": sum(e is not None and e > seq_len for e in ends),
        "no_trained_token": ends.count(None),
    }
    options = {
        "aggregation": aggregation,
        "constant_length": 10 if aggregation == "constant" else None,
    }
    if not fits:
        with pytest.raises(PackError, match="nothing to pack"):
            pack(results, seq_len, **options)
        return
    packed = pack(results, seq_len, **options)
    assert packed.dropped == dropped
    for got, expected in zip(unpack(packed), fits, strict=True):
        assert_same(got, expected)
    # every trained token exactly once, with its weight
    assert packed.num_trained == sum(sum(r.assistant_mask) for r in fits)
    for number, (sample, expected) in enumerate(zip(packed.samples, fits, strict=True)):
        at = (packed.sample_ids == number) & packed.assistant_mask
        assert int(at.sum()) == sample.num_trained == sum(expected.assistant_mask)
        weight = 1 / sample.num_trained if aggregation == "sequence" else 1.0
        assert torch.equal(packed.weights[at], torch.full((sample.num_trained,), weight))
        assert sample.completion_length == len(expected.token_ids) - sample.prompt_length
    # no row is empty, and no row's tokens see a token of another prompt or of a sibling
    assert (packed.group_ids >= 0).any(dim=1).all()
    owners = packed.sample_ids
    allowed = dense_mask(packed.group_ids, packed.parent_ids)
    for row in range(packed.num_rows):
        query, key = allowed[row].nonzero().T
        assert (
            torch.isin(owners[row, key], torch.tensor(-1))
            .logical_or(owners[row, key] == owners[row, query])
            .all()
        )


def test_every_token_can_have_an_advantage_of_its_own():
    packed = pack(
        [
            result("t", 0, [1, 2], [3, 4, 5], token_advantages=[0.5, -1.0, 2.0]),
            result("t", 1, [1, 2], [6, 7]),
        ]
    )
    assert packed.advantages[0, :7].tolist() == [0, 0.5, -1.0, 2.0, 1.5, 1.5, 0]
    assert [sample.advantage for sample in packed.samples] == [1.5, 1.5]
    mine, other = unpack_samples(packed)
    assert mine.token_advantages == [0.5, -1.0, 2.0] and other.token_advantages is None
    again = pack([mine, other])
    assert all(
        torch.equal(again.tensors()[name], packed.tensors()[name])
        for name in ("advantages", "labels", "tokens")
    )
    turns = result("t", 0, [1, 2], [3, 4, 5], token_advantages=[0.5, math.nan, 2.0])
    turns.assistant_mask[3] = False
    (back,) = unpack_samples(pack([turns]))
    assert back.token_advantages[::2] == [0.5, 2.0] and math.isnan(back.token_advantages[1])


def test_every_token_has_the_version_of_the_weights_that_sampled_it():
    packed = pack(
        [
            result("t", 0, [1, 2], [3, 4, 5], token_versions=[0, 0, 2]),
            result("t", 1, [1, 2], [6, 7]),
        ]
    )
    # At the positions that predict; -1 for the prompt.
    assert packed.weights_version[0, :6].tolist() == [-1, 0, 0, 2, 3, 3]
    with pytest.raises(
        PackError, match=r"task 't', sample 0: 2 token_versions for 3 completion tokens"
    ):
        pack([result("t", 0, [1, 2], [3, 4, 5], token_versions=[0, 0])])


@given(sample_lists(), st.integers(8, 24), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_the_order_of_results_moves_no_token_between_samples(results, seq_len, random):
    shuffled = results[:]
    random.shuffle(shuffled)
    try:
        packed, again = pack(results, seq_len), pack(shuffled, seq_len)
    except PackError:
        return
    by_task = {one.task_id: one for one in unpack(again)}
    for one in unpack(packed):
        assert_same(by_task[one.task_id], dataclasses.replace(one))
    # Splitting may repeat other prompts.
    assert packed.num_tokens == again.num_tokens or packed.num_rows > 1


@given(sample_lists(), st.integers(8, 24))
@settings(deadline=None, max_examples=60)
def test_rows_and_padding_keep_the_contract(results, seq_len):
    try:
        packed = pack(results, seq_len)
    except PackError:
        return
    parts = [packed.rows(slice(row, row + 1)) for row in range(packed.num_rows)]
    for part in parts:
        part.check()
        part.trim().check()
        assert part.tokens.shape == (1, seq_len)
    assert sorted(s.task_id for part in parts for s in part.samples) == sorted(
        s.task_id for s in packed.samples
    )
    expected = {one.task_id: one for one in unpack(packed)}
    for one in (one for part in parts for one in unpack(part.trim())):
        assert_same(one, expected[one.task_id])
    padded = packed.pad_rows_to_multiple(4)
    padded.check()
    assert padded.num_rows % 4 == 0 and padded.num_rows - packed.num_rows < 4
    assert padded.num_trained == packed.num_trained and float(padded.weights.sum()) == float(
        packed.weights.sum()
    )
    reversed_rows = packed.rows(list(range(packed.num_rows))[::-1])
    reversed_rows.check()
    assert torch.equal(reversed_rows.tokens, packed.tokens.flip(0))


def test_the_layout_drawn_by_hand():
    packed = pack(
        [
            result("a", 0, [1, 2, 3], [4, 5]),
            result("b", 0, [7], [8, 9]),
            result("a", 1, [1, 2, 3], [6]),
        ],
        seq_len=10,
    )
    n, nan = -100, math.nan
    assert packed.tokens.tolist() == [[1, 2, 3, 4, 3, 7, 8, 0, 0, 0]]
    assert packed.labels.tolist() == [[n, n, 4, 5, 6, 8, 9, n, n, n]]
    assert packed.group_ids.tolist() == [[0, 0, 1, 1, 2, 3, 3, -1, -1, -1]]
    assert packed.parent_ids.tolist() == [[0, 0, 0, 0, 0, 3, 3, -1, -1, -1]]
    assert packed.input_pos.tolist() == [[0, 1, 2, 3, 2, 0, 1, 0, 0, 0]]
    assert packed.sample_ids.tolist() == [[-1, -1, 0, 0, 2, 1, 1, -1, -1, -1]]
    assert packed.advantages.tolist() == [[0, 0, 1.5, 1.5, 1.5, 1.5, 1.5, 0, 0, 0]]
    assert packed.weights_version.tolist() == [[-1, -1, 3, 3, 3, 3, 3, -1, -1, -1]]
    expected = torch.tensor([[nan, nan, -0.125, -0.25, -0.125, -0.125, -0.25, nan, nan, nan]])
    torch.testing.assert_close(packed.logprobs, expected, equal_nan=True, rtol=0, atol=0)
    assert [sample.groups for sample in packed.samples] == [[0, 1], [3], [0, 2]]


def test_the_first_token_of_a_later_sibling_is_predicted_from_its_own_copy_of_the_prompts_last_token():
    # The predecessor predicted it from the last position of the sibling before.
    packed = pack([result("a", i, [1, 2, 3], [10 + i, 20 + i]) for i in range(3)])
    allowed = dense_mask(packed.group_ids, packed.parent_ids)[0]
    for i in range(3):
        (at,) = (packed.labels[0] == 10 + i).nonzero().flatten().tolist()
        assert packed.tokens[0, at] == 3 and packed.input_pos[0, at] == 2
        assert packed.tokens[0, allowed[at]].tolist() == [1, 2, 3]


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_a_sampled_end_of_turn_token_keeps_its_advantage_and_nothing_is_added_to_a_cut_one(
    aggregation,
):
    # The predecessor zeroed the advantage of the last token.
    end = 99
    packed = pack(
        [
            result("a", 0, [1, 2], [5, end]),
            result("a", 1, [1, 2], [5, 6, 7], finish_reason="length", advantage=-1.0),
        ],
        aggregation=aggregation,
    )
    at = packed.labels == end
    assert int(at.sum()) == 1
    assert packed.advantages[at].tolist() == [1.5]
    assert packed.weights[at].item() > 0 and not packed.logprobs[at].isnan().any()
    assert packed.labels[packed.sample_ids == 1].tolist() == [5, 6, 7]
    assert packed.advantages[packed.sample_ids == 1].tolist() == [-1.0] * 3


def test_a_one_row_pack_keeps_its_batch_axis(tmp_path):
    packed = pack([result("a", 0, [1, 2], [5, 6])])
    packed.save(tmp_path / "packed.safetensors")
    loaded = PackedTensors.load(tmp_path / "packed.safetensors")
    assert loaded.tokens.shape == (1, 16)
    assert loaded.rows(slice(0, 1)).tokens.shape == loaded.rows([0]).tokens.shape == (1, 16)


def test_a_first_sample_longer_than_a_row_leaves_no_row_of_padding():
    packed = pack([result("long", 0, [1, 2], [5] * 20), result("a", 0, [1, 2], [5, 6])], seq_len=8)
    assert packed.num_rows == 1 and packed.dropped == {"too_long": 1, "no_trained_token": 0}
    assert [sample.task_id for sample in packed.samples] == ["a"]
    with pytest.raises(
        PackError,
        match=r"task 'long', sample 0 takes 21 positions .* seq_len is 8; 1 of 2 .* at least 21",
    ):
        pack(
            [result("long", 0, [1, 2], [5] * 20), result("a", 0, [1, 2], [5, 6])],
            seq_len=8,
            too_long="error",
        )


def test_a_sample_that_exactly_fills_the_row():
    packed = pack([result("a", 0, [1, 2, 3], [4] * 6)], seq_len=8)
    assert (packed.group_ids == 0).all() and packed.num_rows == 1
    assert_same(unpack(packed)[0], result("a", 0, [1, 2, 3], [4] * 6))
    with pytest.raises(PackError, match=r"1 too_long"):
        pack([result("a", 0, [1, 2, 3], [4] * 6)], seq_len=7)


def test_identical_samples_are_stored_and_trained_each():
    packed = pack([result("a", i, [1, 2, 3], [4, 5]) for i in range(4)])
    assert packed.num_tokens == 2 + 4 * 2 and packed.num_trained == 8
    assert len({tuple(sample.groups) for sample in packed.samples}) == 4


def test_one_token_prompts_leave_no_group():
    packed = pack([result("a", i, [1], [4, 5 + i]) for i in range(2)])
    assert packed.tokens[0, :4].tolist() == [1, 4, 1, 4]
    assert packed.parent_ids[0, :4].tolist() == packed.group_ids[0, :4].tolist() == [0, 0, 1, 1]


def test_a_group_larger_than_a_row_pays_for_its_prompt_once_per_row():
    packed = pack([result("a", i, [1, 2, 3, 4, 5], [6, 7, 8]) for i in range(6)], seq_len=10)
    assert packed.num_rows == 3  # 4 shared + 2 × 3 in each
    assert (packed.group_ids >= 0).all()
    assert sorted(sample.row for sample in packed.samples) == [0, 0, 1, 1, 2, 2]


def test_equal_input_gives_equal_bytes(tmp_path):
    results = [result(f"t{i % 5}", i, [1, 2, 3 + i % 5], [4] * (1 + i % 7)) for i in range(40)]
    for name in ("one", "two"):
        pack(results, 24).save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"logprobs": [math.nan, -1.0]},
            "task 'a', sample 3: 4 token ids, but 4 assistant_mask, 4 input_pos and 2 logprobs",
        ),
        ({"prompt_length": 0}, "prompt_length 0 of 4 tokens; a sample needs a prompt"),
        ({"prompt_length": 5}, "prompt_length 5 of 4"),
        ({"assistant_mask": [True] * 4}, "token 0: a trained first token"),
        ({"input_pos": [0, 1, 2, 2]}, "token 3: input_pos"),
        ({"advantage": math.nan}, "its advantage is not finite"),
        ({"logprobs": [math.nan, math.nan, -math.inf, -1.0]}, "token 2: an infinite logprob"),
        ({"token_ids": [1, 2, -7, 3]}, "token 2: a negative token id"),
    ],
)
def test_lists_that_do_not_belong_together_are_named(changes, message):
    with pytest.raises(PackError, match=message):
        pack([result("ok", 0, [1], [2]), result("a", 3, [1, 2], [3, 4], **changes)])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"aggregation": "mean"}, "choose one of token, sequence, constant"),
        ({"aggregation": "constant"}, "needs a constant_length"),
        ({"constant_length": 5}, "the others take none"),
        ({"too_long": "cut"}, "choose one of drop, error, truncate, extend"),
        ({"seq_len": 0}, "at least 1 position"),
    ],
)
def test_wrong_options_are_named(kwargs, message):
    with pytest.raises(PackError, match=message):
        pack([result("a", 0, [1], [2])], **kwargs)


def test_nothing_to_pack_says_why():
    with pytest.raises(PackError, match="no samples were given"):
        pack([])
    with pytest.raises(PackError, match=r"all 1 samples were dropped \(1 no_trained_token\)"):
        pack([result("a", 0, [1, 2], [])])


KINDS = {
    "array": lambda code, values: array(code, values),
    "numpy": lambda code, values: np.array(
        values, dtype={"i": np.int32, "q": np.int64, "b": np.bool_}.get(code, np.float64)
    ),
}


def with_arrays(one: TokenizedResult, kind: str) -> TokenizedResult:
    make = KINDS[kind]
    per_token = {
        "token_ids": make("q", one.token_ids),
        "assistant_mask": make("b", one.assistant_mask),
        "input_pos": range(len(one.token_ids)) if kind == "array" else make("i", one.input_pos),
        "logprobs": make("d", one.logprobs),
        "token_versions": None if one.token_versions is None else make("i", one.token_versions),
        "token_advantages": None
        if one.token_advantages is None
        else make("f", one.token_advantages),
    }
    return dataclasses.replace(one, **per_token)


@given(sample_lists(), st.integers(3, 24), st.sampled_from(list(KINDS)))
@settings(deadline=None, max_examples=60)
def test_arrays_are_packed_like_lists(results, seq_len, kind):
    try:
        packed = pack(results, seq_len)
    except PackError as error:
        with pytest.raises(PackError, match=re.escape(str(error))):
            pack([with_arrays(one, kind) for one in results], seq_len)
        return
    again = pack([with_arrays(one, kind) for one in results], seq_len)
    for name, tensor in packed.tensors().items():
        torch.testing.assert_close(again.tensors()[name], tensor, equal_nan=True, rtol=0, atol=0)
    assert again.samples == packed.samples


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [1, 2, 2**31]}, "token_ids must be whole numbers of at most 32 bits"),
        (
            {"token_ids": np.array([1, 2, 2**31])},
            "token_ids must be whole numbers of at most 32 bits",
        ),
        ({"token_ids": [1, 2, 3.5]}, "token_ids must be whole numbers"),
        (
            {"token_ids": np.array([1.0, 2.0, 3.0])},
            "token_ids must be whole numbers of at most 32 bits .an array of float64",
        ),
        ({"logprobs": [math.nan, math.nan, None]}, "logprobs must be numbers, NaN where unknown"),
        ({"logprobs": [math.nan, math.nan, -1e300]}, "token 2: an infinite logprob"),
        ({"logprobs": np.array([math.nan, math.nan, -1e300])}, "token 2: an infinite logprob"),
        ({"input_pos": range(1, 4)}, "token 0: input_pos must be 0, 1, 2"),
        ({"input_pos": np.array([0, 1, 3])}, "token 2: input_pos must be 0, 1, 2"),
        ({"token_advantages": [1.0, 2.0]}, "2 token_advantages for 1 completion tokens"),
        ({"token_advantages": [math.inf]}, "token 2: a non-finite token_advantage"),
        ({"token_advantages": ["high"]}, "token_advantages must be numbers"),
        ({"token_versions": [2**40]}, "token_versions must be whole numbers"),
    ],
)
def test_values_of_the_wrong_kind_are_named(changes, message):
    with pytest.raises(PackError, match=f"task 'a', sample 3.*{message}"):
        pack([result("ok", 0, [1], [2]), result("a", 3, [1, 2], [3], **changes)])
