"""Trees of shared beginnings: drawn by hand, and against definitions over the tokens themselves."""

import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrl.data.packing.masks import dense_mask
from ttrl.data.packing.pack import PackedTensors, packed_tensors_from_tokenized_results, unpack
from ttrl.data.packing.prefix_tree import prefix_tree
from ttrl.errors import PackError
from ttrl.records import TokenizedResult


def sample(
    number: int, prompt: list[int], completion: list[int], trained: list[bool] | None = None
) -> TokenizedResult:
    """A sample whose logprobs, reward and advantage tell it from all others."""
    trained = [True] * len(completion) if trained is None else trained
    length = len(prompt) + len(completion)
    return TokenizedResult(
        task_id=f"t{number}",
        sample=number,
        token_ids=prompt + completion,
        assistant_mask=[False] * len(prompt) + trained,
        input_pos=list(range(length)),
        logprobs=[math.nan] * len(prompt)
        + [-number - 0.125 * i if t else math.nan for i, t in enumerate(trained)],
        prompt_length=len(prompt),
        reward=float(number),
        advantage=number - 2.5,
        weights_version=number % 3,
        finish_reason="stop",
    )


def pack(results, seq_len=16, shortest_shared=1, **options) -> PackedTensors:
    return packed_tensors_from_tokenized_results(
        results, seq_len=seq_len, pad_id=0, shortest_shared=shortest_shared, **options
    )


def end_of(one: TokenizedResult) -> int:
    """One past its last trained token, 0 where there is none."""
    return max((i + 1 for i, trained in enumerate(one.assistant_mask) if trained), default=0)


def stored(one: TokenizedResult) -> TokenizedResult:
    """What packing keeps of it: all up to the last trained token."""
    end = end_of(one)
    cut = {
        name: getattr(one, name)[:end]
        for name in ("token_ids", "assistant_mask", "input_pos", "logprobs")
    }
    return dataclasses.replace(one, **cut)


def shareable(one: TokenizedResult) -> int:
    return min(one.prompt_length, one.assistant_mask.index(True))


def positions_by_definition(members: list[TokenizedResult], share: str) -> int:
    """What a row of these samples takes. Position i is common to the samples that have the tokens
    up to i and the next one in common, before anything that one of them generated."""
    found = set()
    for number, one in enumerate(members):
        for i in range(end_of(one) - 1):
            common = i + 2 <= shareable(one) and share != "none"
            beginning = (
                one.token_ids[: i + 2] if share == "tree" else one.token_ids[: shareable(one)]
            )
            found.add((i, tuple(beginning)) if common else (i, number))
    return len(found)


tokens = st.integers(0, 2)


@st.composite
def sample_trees(draw) -> list[TokenizedResult]:
    """Prompts that continue beginnings of each other, or are equal, or one token long; few
    different completions, so that some are equal or branch behind their first tokens; several
    turns.
    """
    prompts = [draw(st.lists(tokens, min_size=1, max_size=4))]
    for _ in range(draw(st.integers(0, 5))):
        base = draw(st.sampled_from(prompts))
        kept = base[: draw(st.integers(0, len(base)))]
        prompts.append(kept + draw(st.lists(tokens, min_size=0 if kept else 1, max_size=4)))
    completions = draw(st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=1, max_size=4))
    out = []
    for number in range(draw(st.integers(1, 12))):
        completion = draw(st.sampled_from(completions))
        trained = draw(st.sampled_from([None, "turns"]))
        if trained:
            trained = [draw(st.booleans()) for _ in completion]
        out.append(sample(number, draw(st.sampled_from(prompts)), completion, trained))
    return out


@given(
    sample_trees(),
    st.integers(6, 30),
    st.sampled_from(["tree", "tree", "prompt", "none"]),
    st.integers(1, 4),
)
@settings(deadline=None, max_examples=80)
def test_unpacking_gives_back_every_sample_and_rows_hold_what_the_definition_says(
    results, seq_len, share, shortest
):
    fits = [one for one in results if 0 < end_of(one) <= seq_len + 1]
    if not fits:
        return
    packed = pack(results, seq_len, share=share, shortest_shared=shortest)
    for got, expected in zip(unpack(packed), fits, strict=True):
        for field in dataclasses.fields(TokenizedResult):
            a, b = getattr(got, field.name), getattr(stored(expected), field.name)
            if field.name == "logprobs":
                torch.testing.assert_close(
                    torch.tensor(a), torch.tensor(b), equal_nan=True, rtol=0, atol=0
                )
            else:
                assert a == b, field.name
    for number, one in enumerate(fits):  # trained once per sample, whatever other samples say
        assert packed.labels[packed.sample_ids == number].ne(-100).sum() == sum(one.assistant_mask)
    for row in range(packed.num_rows):
        members = [one for one, place in zip(fits, packed.samples, strict=True) if place.row == row]
        used = int((packed.group_ids[row] >= 0).sum())
        least = positions_by_definition(members, share)
        assert used == least if share != "tree" or shortest == 1 else used >= least
        assert used <= positions_by_definition(members, "prompt" if share == "tree" else share)


@given(sample_trees(), st.integers(8, 30))
@settings(deadline=None, max_examples=80)
def test_every_token_sees_the_beginning_of_its_own_sample_and_nothing_else(results, seq_len):
    fits = [one for one in results if 0 < end_of(one) <= seq_len + 1]
    if not fits:
        return
    packed = pack(results, seq_len)
    allowed = dense_mask(packed.group_ids, packed.parent_ids)
    for number, place in enumerate(packed.samples):
        row, ids = place.row, fits[number].token_ids
        groups, owners, positions = (
            packed.group_ids[row],
            packed.sample_ids[row],
            packed.input_pos[row],
        )
        on_path = torch.isin(groups, torch.tensor(place.groups))
        for query in on_path.nonzero().flatten().tolist():
            seen = allowed[row, query].nonzero().flatten()
            assert positions[seen].tolist() == list(range(int(positions[query]) + 1))
            assert packed.tokens[row, seen].tolist() == ids[: len(seen)]
            assert set(owners[seen].tolist()) <= {-1, int(owners[query])}
            if owners[query] < 0:
                assert len(seen) < shareable(fits[number])
            else:
                assert owners[query] == number


def test_a_system_prompt_questions_and_the_given_part_of_a_conversation_drawn_by_hand():
    system, question = [1, 2, 3], [4, 5]
    conversation = [*system, *question, 6, 7]
    packed = pack(
        [
            sample(0, conversation, [20]),
            sample(1, [*system, *question], [21, 22]),
            sample(2, [*system, 8, 9], [23]),
            sample(3, conversation, [24]),
            sample(4, [*system, *question], [25]),
            sample(5, [*system, 8, 9], [26]),
        ],
        seq_len=20,
    )
    # 0: system | 1: question | 2: conversation, 3 4: its samples | 5 6: samples of the question |
    # 7: the other one, 8 9
    assert packed.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, 7, 5, 21, 5, 3, 8, 9, 9, 0, 0, 0, 0, 0]]
    assert packed.group_ids.tolist() == [[0, 0, 1, 1, 2, 2, 3, 4, 5, 5, 6, 7, 7, 8, 9, *[-1] * 5]]
    assert packed.parent_ids.tolist() == [[0, 0, 0, 0, 1, 1, 2, 2, 1, 1, 1, 0, 0, 7, 7, *[-1] * 5]]
    assert packed.input_pos.tolist() == [[0, 1, 2, 3, 4, 5, 6, 6, 4, 5, 4, 2, 3, 4, 4, *[0] * 5]]
    assert packed.sample_ids.tolist() == [[-1] * 6 + [0, 3, 1, 1, 4, -1, -1, 2, 5, *[-1] * 5]]
    assert packed.labels[0, :15].tolist() == [-100] * 6 + [20, 24, 21, 22, 25, -100, -100, 23, 26]
    assert [one.groups for one in packed.samples] == [
        [0, 1, 2, 3],
        [0, 1, 5],
        [0, 7, 8],
        [0, 1, 2, 4],
        [0, 1, 6],
        [0, 7, 9],
    ]


def test_what_was_generated_is_never_merged():
    # Turns of a conversation trained at once; the tool's answer (8, 9) follows what the model
    # wrote, so it is each sample's own.
    turns = [True, True, False, False, True]
    packed = pack([sample(i, [1, 2, 3], [5, 6, 8, 9, 7], turns) for i in range(3)], seq_len=32)
    assert packed.num_tokens == 2 + 3 * 5
    assert packed.labels[packed.sample_ids == 1].tolist() == [5, 6, -100, -100, 7]
    # Branches inside generated text
    packed = pack(
        [
            sample(0, [1, 2, 3], [5, 6, 7]),
            sample(1, [1, 2, 3], [5, 6, 8]),
            sample(2, [1, 2, 3], [5, 6, 7]),
        ]
    )
    assert packed.num_tokens == 2 + 3 * 3 and packed.num_trained == 9
    # A later turn's prompt holds the earlier turn, generated but given: it is shared with another
    # of the kind, not with the turn.
    packed = pack(
        [
            sample(0, [1, 2], [5, 6]),
            sample(1, [1, 2, 5, 6, 9], [7]),
            sample(2, [1, 2, 5, 6, 9], [8]),
        ]
    )
    assert packed.num_tokens == 1 + 2 + 3 + 1 + 1
    assert packed.tokens[packed.sample_ids == 0].tolist() == [2, 5]


def test_a_prompt_that_begins_like_the_other_is_its_node():
    packed = pack([sample(0, [1, 2, 3], [9]), sample(1, [1, 2, 3, 4], [9]), sample(2, [1], [9])])
    assert packed.tokens[0, :6].tolist() == [1, 2, 3, 3, 4, 1]
    assert packed.parent_ids[0, :6].tolist() == [0, 0, 0, 0, 0, 3]


def test_nodes_without_branches_in_their_row_are_merged():
    results = [sample(i, [1, 2, 3, 4, 5 + i // 2, 7, 7], [9] * (6 + i % 2)) for i in range(4)]
    packed = pack(results, seq_len=19)
    assert packed.num_rows == 2
    # The common 1 2 3 (4) is a part of each row's question.
    assert [len(one.groups) for one in packed.samples] == [2] * 4


def test_short_common_beginnings_of_different_prompts_make_no_node():
    results = [sample(i, [1, 2, 3, 10 + i // 2, 20, 30], [9]) for i in range(4)]
    assert [len(one.groups) for one in pack(results, 40, shortest_shared=3).samples] == [2] * 4
    assert [len(one.groups) for one in pack(results, 40, shortest_shared=2).samples] == [3] * 4
    assert (
        pack(results, 40, shortest_shared=3).num_tokens
        == pack(results, 40, share="prompt").num_tokens
    )


def test_the_modes_of_sharing_take_ever_more_positions():
    results = [sample(i, [1] * 20 + [2 + i // 4] * 5, [9, i]) for i in range(12)]
    taken = [
        pack(results, 512, share=share, shortest_shared=8).num_tokens
        for share in ("tree", "prompt", "none")
    ]
    assert taken == [19 + 3 * 5 + 12 * 2, 3 * 24 + 12 * 2, 12 * 26]


def long_samples() -> list[TokenizedResult]:
    return [
        sample(0, [1, 2], [5] * 20),
        sample(1, [1, 2], [5, 6]),
        sample(2, [3] * 12, [4]),
        sample(3, [1, 2], [7] * 6),
    ]


def test_too_long_samples_can_be_truncated():
    packed = pack(long_samples(), 8, too_long="truncate")
    # Of sample 2, nothing trained would be left.
    assert packed.dropped == {"too_long": 1, "no_trained_token": 0, "truncated": 1}
    back = unpack(packed)
    assert [one.task_id for one in back] == ["t0", "t1", "t3"]
    assert back[0].token_ids == [1, 2] + [5] * 7 and packed.samples[0].num_trained == 7
    assert packed.samples[0].completion_length == 20
    weights = pack(long_samples(), 8, too_long="truncate", aggregation="sequence").weights
    assert weights.sum().item() == pytest.approx(3.0)


def test_too_long_samples_can_have_longer_rows():
    packed = pack(long_samples(), 8, too_long="extend")
    assert packed.dropped == {"too_long": 0, "no_trained_token": 0, "extended": 2}
    assert packed.seq_len == 21 and [one.task_id for one in unpack(packed)] == [
        "t0",
        "t1",
        "t2",
        "t3",
    ]
    used = (packed.group_ids >= 0).sum(dim=1).tolist()
    long_rows = {packed.samples[0].row, packed.samples[2].row}
    assert all(length <= 8 for row, length in enumerate(used) if row not in long_rows)
    assert pack(long_samples()[1::2], 8, too_long="extend").seq_len == 8


def test_rows_come_in_a_multiple_of_the_ranks():
    packed = pack([sample(i, [1, 2], [3, i]) for i in range(9)], 8, multiple=4)
    assert packed.num_rows % 4 == 0 and packed.num_trained == 18
    assert len(unpack(packed.rows([packed.samples[0].row]))) >= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": "all"}, "choose one of tree, prompt, none"),
        ({"shortest_shared": 0}, "at least 1 position"),
        ({"multiple": 0}, "a multiple of 0"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(PackError, match=message):
        pack([sample(0, [1], [2])], **options)


def test_the_tree_of_many_long_prompts_is_that_of_its_pairs():
    draw = random.Random(0)
    prompts = [
        [1] * 300 + [draw.randrange(3) for _ in range(draw.randrange(1, 40))] for _ in range(300)
    ]
    results = [sample(i, prompt, [7]) for i, prompt in enumerate(prompts)]
    packed = pack(results, seq_len=1 << 15)
    assert packed.num_rows == 1
    assert packed.num_tokens == positions_by_definition(results, "tree")


def test_the_example_of_a_node_begins_with_its_tokens():
    import numpy as np

    prompts = [[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 4], [2**31 - 1, 2, 3]]
    flat = np.concatenate(prompts).astype(np.int32)
    lengths = np.array([len(prompt) for prompt in prompts])
    tree = prefix_tree(flat, np.cumsum(lengths) - lengths, lengths, "tree", 1)
    assert (tree.cut, tree.parent, tree.node_of) == ([1, 3], [-1, 0], [1, 0, 1, -1])
    assert [prompts[one][:2] for one in tree.example] == [[1, 2], [1, 2]] and tree.example[1] in (
        0,
        2,
    )
