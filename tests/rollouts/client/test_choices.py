"""Samples and openai's objects carry what the server said; the lazy logprobs are like openai's own
in every way.
"""

import copy
import json
import math
import pickle

import pytest
from openai._models import construct_type
from openai.types.chat.chat_completion import ChatCompletion, Choice, ChoiceLogprobs

from ttrl.errors import ServerError, TokenizationError
from ttrl.records import Sample
from ttrl.rollouts.client.choices import (
    chat_completion,
    choice_of_sample,
    openai_choice,
    read_choice,
)
from ttrl.rollouts.client.wire import Answer, read_answers


def answer(choice, **changes):
    return Answer(json.dumps(choice).encode(), **{"prompt_token_ids": [7, 8, 9], **changes})


def read(given, **flags):
    sample = Sample(task_id="t", sample=0, messages=[])
    read_choice(sample, given, "there", **{"token_ids": True, "logprobs": True, **flags})
    return sample


def openais(choice):
    return construct_type(type_=Choice, value=json.loads(json.dumps(choice)))


def test_a_sample_is_what_the_server_said(kit):
    sample = read(answer(kit.choice(0, "añ🙂", finish_reason="length")))
    assert (sample.text, sample.finish_reason) == ("añ🙂", "length")
    assert sample.token_ids == [ord("a"), ord("ñ"), ord("🙂"), 0]
    assert sample.logprobs == [-1 / 8, -2 / 8, -3 / 8, -4 / 8]
    assert sample.prompt_token_ids == [7, 8, 9]


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("0.0", 0.0),
        ("0", 0.0),
        ("-1e-300", -1e-300),
        ("-0.12345678901234567", -0.12345678901234567),
        ("-9998.5", -9998.5),
    ]
    + [
        (value, math.nan)
        for value in (
            "-9999.0",
            "-9999",
            "-1e9",
            "null",
            "NaN",
            "-Infinity",
            '"-1"',
            "true",
            "1e999",
        )
    ],
)
def test_every_logprob_is_exact_or_unknown(kit, sent, kept):
    choice = json.dumps(kit.choice(0, "a")).replace("-0.125", sent)
    sample = read(Answer(choice.encode(), prompt_token_ids=[1]))
    assert kit.same(sample.logprobs[0], kept)
    assert sample.logprobs[1] == -0.25
    assert sample.text == "a"


def test_lone_surrogates_cost_nothing(kit):
    choice = kit.choice(0, "ab")
    choice["message"]["content"] = "a\ud800b"
    assert read(answer(choice)).text == "a?b"
    assert read(answer(choice)).logprobs == kit.expected_logprobs("ab")
    assert openai_choice(answer(choice)).message.content == "a\ud800b"
    assert openai_choice(answer(choice)) == openais(choice)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"token_ids": None}, TokenizationError, "returned no token_ids; use a vLLM server"),
        ({"token_ids": ["a"]}, TokenizationError, "returned no token_ids"),
        ({"token_ids": [1.5]}, TokenizationError, "returned no token_ids"),
        ({"token_ids": [1]}, TokenizationError, "returned 1 token ids but 4 logprobs"),
        ({"logprobs": None}, TokenizationError, "returned 4 token ids but no logprobs"),
        ({"logprobs": {"content": None}}, TokenizationError, "returned 4 token ids but 0 logprobs"),
        ({"message": None}, ServerError, "a choice without a message"),
        ({"finish_reason": "abort"}, ServerError, "finish_reason 'abort'"),
        ({"finish_reason": "error"}, ServerError, "finish_reason 'error'"),
    ],
)
def test_what_is_missing_is_said(kit, change, error, words):
    with pytest.raises(error, match=f"^there: .*{words}"):
        read(answer(kit.choice(0, "abc", **change)))


def test_the_bytes_of_tokens(kit):
    """Half of a surrogate pair is lost bytes, and costs no other token its string."""
    choice = kit.choice(0, "a🙂🙂b")
    entries = choice["logprobs"]["content"][:5]
    choice["logprobs"]["content"] = entries
    given = ["a", "\ud83d", "\ude42", "\ufffd", "b"]
    for entry, token in zip(entries, given, strict=True):
        entry |= {"token": token, "bytes": None}
    entries[3]["bytes"] = [239, 191, 189]
    sample = read(answer(choice), token_ids=False)
    tokens = [token.encode("latin-1").decode() for token in sample.logprob_tokens]
    assert tokens == ["a", "\ufffd", "\ufffd", "\ufffd", "b"]


def test_without_ids(kit):
    given = answer(kit.choice(0, "abc", token_ids=None), prompt_token_ids=None)
    sample = read(given, token_ids=False)
    assert (sample.logprobs, sample.token_ids, sample.prompt_token_ids) == (
        kit.expected_logprobs("abc"),
        None,
        None,
    )
    with pytest.raises(TokenizationError, match="returned no prompt_token_ids"):
        read(answer(kit.choice(0, "abc"), prompt_token_ids=None))
    assert (
        read(
            answer(
                kit.choice(0, "abc", logprobs=None),
            ),
            logprobs=False,
        ).logprobs
        is None
    )


TOOL = {"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def choices(kit):
    yield kit.choice(0, "hello")
    yield kit.choice(3, "", finish_reason="abort", logprobs=None, token_ids=None)
    yield {"index": 1, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
    yield kit.choice(
        0,
        "x",
        message={"role": "assistant", "content": None, "tool_calls": [TOOL]},
        finish_reason="tool_calls",
    )
    yield kit.choice(
        0,
        "x",
        message={
            "role": "assistant",
            "content": "x",
            "annotations": [],
            "tool_calls": [],
            "odd": {"a": [1]},
        },
    )
    yield kit.choice(0, "x", routed={"a": 1}, logprobs={"content": [], "refusal": None, "more": 1})
    yield kit.choice(0, "x", logprobs={"content": None})


@pytest.mark.parametrize(
    "look",
    [
        lambda c: c.model_dump(),
        lambda c: c.model_dump_json(),
        lambda c: c.to_dict(),
        lambda c: c.to_json(),
        repr,
        str,
        lambda c: c,
        dict,
        lambda c: list(vars(c)),
        lambda c: c.model_fields_set,
        lambda c: c.model_extra,
        lambda c: pickle.loads(pickle.dumps(c)),
        copy.copy,
        copy.deepcopy,
        lambda c: c.model_copy(deep=True),
        lambda c: c.logprobs,
        lambda c: c.logprobs and c.logprobs.content,
        lambda c: c.logprobs and c.logprobs.model_dump(),
        lambda c: c.logprobs and c.logprobs.model_fields_set,
        lambda c: c.logprobs and c.logprobs.model_extra,
        lambda c: c.logprobs and vars(c.logprobs),
        lambda c: c.logprobs and list(c.logprobs),
        lambda c: c.logprobs and repr(c.logprobs),
        lambda c: c.logprobs and copy.deepcopy(c.logprobs),
        lambda c: c.logprobs and hasattr(c.logprobs, "nonsense"),
        lambda c: isinstance(c.logprobs, ChoiceLogprobs),
        lambda c: ChatCompletion.construct(
            id="x", choices=[c], created=1, model="m"
        ).model_dump_json(warnings=False),
    ],
)
def test_choices_are_openais(kit, look):
    for choice in choices(kit):
        theirs, ours = openais(choice), openai_choice(answer(choice))
        assert type(ours) is Choice
        assert look(ours) == look(theirs)
        assert look(openais(choice)) == look(openai_choice(answer(choice)))


def test_choices_can_be_changed(kit):
    choice = openai_choice(answer(kit.choice(0, "ab")))
    choice.logprobs.content[0].logprob = 1.0
    choice.logprobs.refusal = []
    assert (choice.logprobs.content[0].logprob, choice.logprobs.refusal) == (1.0, [])
    choice.logprobs = None
    assert choice.model_dump()["logprobs"] is None
    assert openai_choice(answer(kit.choice(5, "ab")), index=2).index == 2


def test_null_content_is_empty_where_no_tool_is_called(kit):
    assert openai_choice(answer(kit.choice(0, None))).message.content == ""
    with_tool = kit.choice(
        0, None, message={"role": "assistant", "content": None, "tool_calls": [TOOL]}
    )
    assert openai_choice(answer(with_tool)).message.content is None


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"text": "a"}, "b"], "ab"),
        ([{"type": "output_text", "text": "a"}], "a"),
        ([{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "a"}], "a"),
        ([{"type": "thinking", "text": "no"}, {"type": "text", "text": None}, None, 3], ""),
        ([], ""),
        ({"type": "text", "text": "a"}, ""),  # no list of parts
    ],
)
def test_content_in_parts(kit, content, text):
    given = answer(kit.choice(0, "ab", message={"role": "assistant", "content": content}))
    assert read(given).text == text
    if isinstance(content, list):
        assert openai_choice(given).message.content == text


def test_the_choice_of_a_sample(kit):
    sample = read(answer(kit.choice(2, "ab")))
    sample.sample, sample.logprobs = 2, [-0.5, math.nan, 0.0]
    choice = choice_of_sample(sample)
    assert (choice.index, choice.message.content, choice.message.role, choice.finish_reason) == (
        2,
        "ab",
        "assistant",
        "stop",
    )
    assert choice.token_ids == sample.token_ids
    assert [entry.logprob for entry in choice.logprobs.content] == [-0.5, -9999.0, 0.0]
    assert pickle.loads(pickle.dumps(choice)) == choice
    bare = choice_of_sample(Sample(task_id="t", sample=0, messages=[], text="x"))
    assert (bare.logprobs, hasattr(bare, "token_ids")) == (None, False)


def test_a_completion_for_people(kit):
    body = kit.completion([kit.choice(0, "ab"), kit.choice(1, "c")]).body
    completion = chat_completion(read_answers(json.dumps(body).encode(), 2, "x"))
    theirs = construct_type(type_=ChatCompletion, value=body)
    assert completion.choices == theirs.choices
    assert (completion.id, completion.model, completion.prompt_token_ids) == (
        theirs.id,
        theirs.model,
        theirs.prompt_token_ids,
    )
    assert completion.usage.model_dump(exclude_none=True) == theirs.usage.model_dump(
        exclude_none=True
    )
    assert json.loads(completion.model_dump_json())["choices"][1]["message"]["content"] == "c"
