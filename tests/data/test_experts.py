"""The sampler's experts on their way from an answer to packed rows: each token keeps those that it
was computed with.
"""

import base64
import dataclasses
import io
import json

import numpy as np
import pytest
import torch

from ttrl.data.packing.pack import PackedTensors, packed_tensors_from_tokenized_results, unpack
from ttrl.data.tokenization import TaskResultTokenizer, as_arrays
from ttrl.errors import PackError, TokenizationError
from ttrl.records import Sample, TaskResult, Turn
from ttrl.rollouts.client.assembly import LiveCompletion
from ttrl.rollouts.client.choices import openai_choice, read_choice
from ttrl.rollouts.client.wire import EXPERTS, decoded_chunk, most_bytes, read_answers

LAYERS, CHOICES = 3, 2


def experts_of(ids):
    """Return what tells every token apart: its id, its layer and its place among the choices."""
    ids = np.array(ids)[:, None, None]
    layer = np.arange(LAYERS)[None, :, None]
    return (ids * 10 + layer * 3 + np.arange(CHOICES)) % 250


def told(ids, dtype=np.uint8):
    """Return them as vLLM writes them: of all tokens but the last."""
    file = io.BytesIO()
    np.save(file, experts_of(ids[:-1]).astype(dtype))
    return base64.b64encode(file.getvalue()).decode()


def sample(number, prompt, completion, **changes):
    values = dict(
        task_id="t",
        sample=number,
        messages=[],
        prompt_token_ids=prompt,
        token_ids=completion,
        logprobs=[-1.0] * len(completion),
        finish_reason="stop",
        reward=float(number),
        routed_experts=told(prompt + completion),
    )
    return Sample(**(values | changes))


def sequences(*samples):
    group = TaskResult(task_id="t", messages=[], samples=list(samples))
    return TaskResultTokenizer()(group, [1.0] * len(samples))


def test_packed_rows_hold_the_experts_of_their_tokens(tmp_path):
    prompt = list(range(1, 13))
    made = sequences(
        sample(0, prompt, [20, 21, 22]),
        sample(1, prompt, [23]),
        sample(2, [30, 31], [24, 25], routed_experts=None),  # its completion was cut off
        sample(3, prompt, [20, 26], routed_experts=told([*prompt, 20, 26], np.int32)),
    )
    made = [as_arrays(one) for one in made]
    packed = packed_tensors_from_tokenized_results(made, seq_len=32, pad_id=0)
    assert packed.experts.dtype == torch.int16 and packed.experts.shape == (
        *packed.tokens.shape,
        LAYERS,
        CHOICES,
    )
    expected = torch.from_numpy(experts_of(packed.tokens.flatten().tolist())).view_as(
        packed.experts
    )
    unknown = (packed.group_ids < 0) | (packed.tokens >= 30) | (packed.tokens == 24)
    assert (packed.experts[unknown] == -1).all()
    assert torch.equal(packed.experts[~unknown].long(), expected[~unknown])
    packed.save(tmp_path / "packed.safetensors")
    read = PackedTensors.load(tmp_path / "packed.safetensors")
    assert torch.equal(read.experts, packed.experts)
    wider = read.pad_rows_to_multiple(4)
    assert (wider.experts[packed.num_rows :] == -1).all()
    assert torch.equal(wider.rows([0]).trim().experts[0], packed.trim().experts[0])
    for one, before in zip(unpack(packed), made, strict=True):
        if before.experts is not None:
            assert np.array_equal(one.experts, before.experts)


def test_turns_keep_the_experts_they_were_sampled_with():
    """The second turn's prompt is computed again; of what the first turn computed, its own experts
    hold.
    """
    first, told_between, second = [5, 6], [7], [8, 9]
    later = experts_of([1, 2, *first, *told_between, *second][:-1])
    later[:3] += 1  # rounding: another choice, the second time
    file = io.BytesIO()
    np.save(file, later.astype(np.uint8))
    turns = [
        Turn(
            messages=[],
            follows=-1,
            prompt_token_ids=[1, 2],
            num_tokens=2,
            routed_experts=told([1, 2, *first]),
        ),
        Turn(
            messages=[],
            follows=0,
            prompt_token_ids=told_between,
            continues=0,
            num_tokens=2,
            routed_experts=base64.b64encode(file.getvalue()).decode(),
        ),
    ]
    whole = sample(
        0, [1, 2], [*first, *second], logprobs=[-1.0] * 4, turns=turns, routed_experts=None
    )
    (one,) = sequences(whole)
    assert one.token_ids == [1, 2, 5, 6, 7, 8, 9]
    assert np.array_equal(one.experts[:-1], experts_of(one.token_ids[:-1]))
    assert (one.experts[-1] == -1).all()
    assert Sample.from_json(json.loads(json.dumps(whole.to_json()))) == whole
    turns[1].routed_experts = None
    (one,) = sequences(whole)
    assert np.array_equal(one.experts[:3], experts_of([1, 2, 5])) and (one.experts[3:] == -1).all()


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (
            told([1, 2, 3]),
            r"uint8 \[2, 3, 2\] for 4 tokens; expected whole numbers \[3, layers, experts\]",
        ),
        (told([1, 2, 5, 6], np.float32), "float32"),
        (base64.b64encode(b"no array").decode(), "cannot be read"),
        ("!", "cannot be read"),
    ],
)
def test_experts_that_are_none_are_refused(experts, message):
    with pytest.raises(
        TokenizationError, match=f"task 't', sample 0: the server's routed_experts .*{message}"
    ):
        sequences(sample(0, [1, 2], [5, 6], routed_experts=experts))


def test_experts_are_never_unpickled():
    file = io.BytesIO()
    np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(TokenizationError, match="cannot be read"):
        sequences(
            sample(0, [1, 2], [5, 6], routed_experts=base64.b64encode(file.getvalue()).decode())
        )


def test_experts_that_do_not_go_together_are_refused_by_name():
    one, other = sequences(sample(0, [1, 2], [5, 6])) + sequences(sample(1, [1, 2], [5, 6]))
    fewer = dataclasses.replace(other, experts=other.experts[:, :2])
    shorter = dataclasses.replace(other, experts=other.experts[:3])
    with pytest.raises(PackError, match=r"different shapes.*\(2, 2\), \(3, 2\)"):
        packed_tensors_from_tokenized_results([one, fewer], seq_len=8, pad_id=0)
    with pytest.raises(PackError, match="task 't', sample 1: 4 token ids, but experts of 3 tokens"):
        packed_tensors_from_tokenized_results([one, shorter], seq_len=8, pad_id=0)


@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_brings_its_experts_and_graders_do_not_see_them(streamed):
    experts = told([1, 2, 5, 6])
    choice = {"index": 0, "finish_reason": "stop", "token_ids": [5, 6], "routed_experts": experts}
    if streamed:
        live = LiveCompletion()
        parts = [
            {"index": 0, "delta": {"content": "a"}, "token_ids": [5]},
            {**choice, "delta": {"content": "b"}, "token_ids": [6]},
        ]
        for part in parts:
            live.take(
                decoded_chunk(
                    json.dumps({"choices": [part], "prompt_token_ids": [1, 2]}).encode(), "there"
                )
            )
        (answer,) = live.answers()
    else:
        whole = {"choices": [{**choice, "message": {"content": "ab"}}], "prompt_token_ids": [1, 2]}
        (answer,) = read_answers(json.dumps(whole).encode(), 1, "there")
    read = Sample(task_id="t", sample=0, messages=[])
    read_choice(read, answer, "there", token_ids=True, logprobs=False)
    assert read.routed_experts == experts and read.token_ids == [5, 6]
    assert not hasattr(openai_choice(answer), "routed_experts")


def test_an_answer_with_experts_may_be_larger():
    asked = {"n": 2, "max_tokens": 1000}
    assert most_bytes({**asked, EXPERTS: 0}) > most_bytes(asked) + 2 * 1000 * 1000
