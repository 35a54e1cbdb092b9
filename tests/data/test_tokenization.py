"""Samples become sequences by the server's own ids; whatever is missing is named."""

import logging
import math

import pytest
import torch

from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.data.tokenization import TaskResultTokenizer, as_arrays
from ttrl.errors import TokenizationError
from ttrl.records import Prepared, Sample, TaskResult


def task(*samples: Sample) -> TaskResult:
    return TaskResult(task_id="gsm8k/17", messages=[], samples=list(samples))


def sample(number: int = 0, **changes) -> Sample:
    values = dict(
        task_id="gsm8k/17",
        sample=number,
        messages=[],
        text="hi",
        prompt_token_ids=[1, 2, 3],
        token_ids=[7, 8],
        logprobs=[-0.5, 0.0],
        finish_reason="stop",
        reward=1.0,
        weights_version=4,
    )
    return Sample(**(values | changes))


def test_ids_and_logprobs_are_the_servers_own():
    failed = sample(1, reward=None, error="timeout", token_ids=None)
    results = TaskResultTokenizer()(
        task(sample(0), failed, sample(2, reward=0.25, logprobs=None)), [0.5, -0.5]
    )
    assert [one.sample for one in results] == [0, 2]
    first, second = results
    assert first.token_ids == [1, 2, 3, 7, 8] and first.tokens is None
    assert first.assistant_mask == [False, False, False, True, True] and first.prompt_length == 3
    assert list(first.input_pos) == [0, 1, 2, 3, 4]
    assert all(map(math.isnan, first.logprobs[:3])) and first.logprobs[3:] == [-0.5, 0.0]
    assert (first.reward, first.advantage, first.weights_version, first.finish_reason) == (
        1.0,
        0.5,
        4,
        "stop",
    )
    assert all(map(math.isnan, second.logprobs)) and (second.reward, second.advantage) == (
        0.25,
        -0.5,
    )


def test_versions_of_the_tokens_of_a_continued_sample():
    (one,) = TaskResultTokenizer()(task(sample(0, token_versions=[3, 4])), [0.5])
    assert (one.token_versions, one.weights_version) == ([3, 4], 4)
    (one,) = TaskResultTokenizer()(task(sample(0)), [0.5])
    assert one.token_versions is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_versions": [4]}, "2 token ids but 1 token_versions"),
        ({"token_ids": None}, "no token ids; sample with"),
        ({"prompt_token_ids": None}, "no token ids; sample with"),
        ({"prompt_token_ids": []}, "the prompt has no tokens"),
        (
            {"logprobs": [-1.0]},
            "2 token ids but 1 logprobs; request return_token_ids and logprobs together",
        ),
    ],
)
def test_what_is_missing_is_named(changes, message):
    with pytest.raises(TokenizationError, match=rf"^task 'gsm8k/17', sample 3: .*{message}"):
        TaskResultTokenizer()(task(sample(3, **changes)), [1.0])


def test_one_advantage_for_each_graded_sample():
    with pytest.raises(TokenizationError, match="1 advantages for 2 graded samples"):
        TaskResultTokenizer()(task(sample(0), sample(1)), [1.0])


def test_text_is_compared_with_what_the_ids_decode_to(tokenizer, caplog):
    end = tokenizer.eos_token_id
    ids = tokenizer("wörd", add_special_tokens=False)["input_ids"]
    tokenize = TaskResultTokenizer(tokenizer)
    with caplog.at_level(logging.WARNING):
        cases = [
            # The special token is no part of the text.
            sample(0, text="wörd", token_ids=[*ids, end], logprobs=None),
            sample(1, text="wö", token_ids=ids, logprobs=None),  # cut by a stop string
            sample(2, text=" wörd ", token_ids=ids, logprobs=None),  # whitespace
        ]
        (first, *_) = tokenize(task(*cases), [0.0] * 3)
        assert tokenize.mismatches == 0 and not caplog.records
        wrong = [sample(i, text="other", token_ids=ids, logprobs=None) for i in (3, 4)]
        assert len(tokenize(task(*wrong), [0.0] * 2)) == 2  # the ids are used all the same
    assert tokenize.mismatches == 2
    assert [record.getMessage() for record in caplog.records] == [
        "task 'gsm8k/17', sample 3: its ids decode to 'wörd', but its text is 'other'; "
        "training uses the ids"
    ]
    assert (
        first.tokens[-1] == "<|im_end|>"
        and first.tokens[3] == "w"
        and len(first.tokens) == len(first.token_ids)
    )


def test_what_a_worker_tokenized_is_packed_as_if_it_had_been_done_here():
    """It sees no advantages, and carries arrays instead of lists."""
    long = sample(
        3, token_ids=[9, 10, 11], logprobs=[-1.25, math.nan, -0.1], token_versions=[3, 3, 4]
    )
    group = task(
        sample(0),
        sample(1, reward=None, error="timeout"),
        sample(2, reward=0.25, finish_reason="length"),
        long,
    )
    own, there = TaskResultTokenizer(), TaskResultTokenizer()
    expected = own(group, [0.5, -0.5, 1.5])
    arrays = [as_arrays(sequence) for sequence in there(group, [0.0] * 3)]
    group.prepared = Prepared(lines=[], sequences=arrays, counts=dict(vars(there.counts)))
    here = TaskResultTokenizer()
    got = here(group, [0.5, -0.5, 1.5])
    assert here.counts == own.counts and here.counts.samples == 3
    assert [one.advantage for one in got] == [0.5, -0.5, 1.5]
    packs = [
        packed_tensors_from_tokenized_results(some, seq_len=16, pad_id=0)
        for some in (expected, got)
    ]
    for name in (
        "tokens",
        "labels",
        "logprobs",
        "advantages",
        "weights",
        "weights_version",
        "input_pos",
        "group_ids",
    ):
        first, second = (getattr(pack, name) for pack in packs)
        assert torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0)), name
    assert packs[0].samples == packs[1].samples
    with pytest.raises(TokenizationError, match="2 advantages for 3 graded samples"):
        here(group, [0.5, 0.5])
