"""Whole responses: choices by their numbers, counts, and what is no chat completion."""

import json

import pytest

from ttrl.errors import RequestError
from ttrl.rollouts.client.wire import Chunk, decoded_chunk, read_answers
from ttrl.text import one_line


def response(kit, *texts, **changes):
    return json.dumps(
        kit.completion([kit.choice(k, text) for k, text in enumerate(texts)], **changes).body
    ).encode()


def test_each_choice_with_what_belongs_to_it(kit):
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    first, second = read_answers(response(kit, "ab", "cde", usage=usage), 2, "here")
    assert json.loads(first.choice) == kit.choice(0, "ab")
    assert json.loads(second.choice) == kit.choice(1, "cde")
    assert (first.completion_tokens, second.completion_tokens) == (3, 4)
    for answer in (first, second):
        assert (answer.completion_id, answer.created, answer.model) == ("chatcmpl-1", 1, "m")
        assert (answer.prompt_token_ids, answer.prompt_tokens, answer.cached_tokens) == (
            kit.prompt_ids,
            3,
            2,
        )


@pytest.mark.parametrize(
    ("indexes", "expected"),
    [
        ([0, 1, 2], ["a", "b", "c"]),
        ([2, 0, 1], ["b", "c", "a"]),
        ([0, 0, 0], ["a", "b", "c"]),
        ([5, 6, 7], ["a", "b", "c"]),
        ([None, None, None], ["a", "b", "c"]),
        (["0", "1", "2"], ["a", "b", "c"]),
        ([0, 2], ["a", None, "b"]),
        ([True, False, 2], ["a", "b", "c"]),
    ],
)
def test_order(kit, indexes, expected):
    choices = [kit.choice(index, text) for index, text in zip(indexes, "abc", strict=False)]
    answers = read_answers(json.dumps(kit.completion(choices).body).encode(), 3, "here")
    assert [a and json.loads(a.choice)["message"]["content"] for a in answers] == expected


def test_counts_where_the_server_says_less(kit):
    choice = kit.choice(0, "abc", token_ids=None)
    [answer] = read_answers(
        json.dumps(kit.completion([choice], usage=None).body).encode(), 1, "here"
    )
    # Of logprobs; of prompt ids.
    assert (answer.completion_tokens, answer.prompt_tokens, answer.cached_tokens) == (4, 3, None)
    choice["logprobs"] = None
    body = kit.completion(
        [choice], usage={"prompt_tokens": 9, "completion_tokens": 5}, prompt_token_ids=None
    ).body
    [answer] = read_answers(json.dumps(body).encode(), 1, "here")
    assert (answer.completion_tokens, answer.prompt_tokens, answer.prompt_token_ids) == (5, 9, None)
    body["usage"] = {"prompt_tokens": "9", "completion_tokens": -5, "prompt_tokens_details": 3}
    [answer] = read_answers(json.dumps(body).encode(), 1, "here")
    assert (answer.completion_tokens, answer.prompt_tokens) == (None, None)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            b"<html>  hello\n</html>",
            "the server answered <html> hello </html>, not a chat completion",
        ),
        (b"", "the server answered nothing, not a chat completion"),
        (b"null", "the server answered None, not a chat completion"),
        (b"[1, 2]", r"the server answered \[1, 2\], not a chat completion"),
        (b'{"choices": [', "the server's answer cannot be read"),
        (b'{"choices": null}', "the server's answer has no choices"),
        (b'{"choices": {"0": 1}}', "the server's answer has no choices"),
        (b"{}", "the server's answer has no choices"),
        (b'{"choices":[{"message":{"content":"\xff"}}]}', "the server's answer cannot be read"),
        (b'{"error": {"message": "out of luck"}}', "the server failed: out of luck"),
        (b'{"error": "out of luck", "choices": []}', "the server failed: out of luck"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"choices": [{"message": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}", "cannot be read"),
        (
            b'{"choices": [' + b"{}," * 999_999 + b"{}]}",
            "the server returned 1000000 choices instead of 1",
        ),
    ],
)
def test_no_chat_completion(data, words):
    with pytest.raises(RequestError, match="^here: .*" + words) as caught:
        read_answers(data, 1, "here")
    assert (caught.value.kind, caught.value.worth_retry) == ("malformed", True)


@pytest.mark.parametrize(("code", "worth_retry"), [(400, False), (429, True), (500, True)])
def test_errors_with_a_status_of_their_own(code, worth_retry):
    with pytest.raises(RequestError, match="as told") as caught:
        read_answers(
            json.dumps({"error": {"message": "as told", "code": code}}).encode(), 1, "here"
        )
    assert (caught.value.kind, caught.value.status, caught.value.worth_retry) == (
        "status",
        code,
        worth_retry,
    )


def test_json_that_only_python_reads():
    data = b'{"id":"x","choices":[{"index":0,"message":{"content":"\\ud800"},"logprobs":{"content":[{"logprob":NaN}]}}]}'
    [answer] = read_answers(data, 1, "here")
    assert json.loads(answer.choice)["message"]["content"] == "\ud800"
    assert answer.completion_tokens == 1


def test_empty_answers(kit):
    assert read_answers(response(kit), 2, "here") == [None, None]
    assert read_answers(
        response(kit).replace(b'"choices": []', b'"choices": [null, null]'), 2, "here"
    ) == [None, None]


def test_chunks():
    logprobs = b'"logprobs":{"content":[{"token":"a","logprob":-0.5}]}'
    data = (
        b'{"id":"c","choices":[{"index":1,"delta":{"content":"\xc3\xa9"},%b,"token_ids":[7]}]}'
        % logprobs
    )
    chunk = decoded_chunk(data, "here")
    [part] = chunk.choices
    assert (part.index, part.delta.content, part.token_ids, part.finish_reason) == (
        1,
        "é",
        [7],
        None,
    )
    assert (part.logprobs.content[0].token, part.logprobs.content[0].logprob) == ("a", -0.5)
    assert decoded_chunk(b'{"choices":[]}', "here") == Chunk(choices=[])
    lenient = decoded_chunk(
        b'{"created":"12","choices":[{"index":"1","delta":{"content":"\\ud800"},"logprobs":{"content":[{"logprob":-Infinity}]}}]}',
        "x",
    )
    assert (lenient.created, lenient.choices[0].index, lenient.choices[0].delta.content) == (
        12,
        1,
        "\ud800",
    )
    assert lenient.choices[0].logprobs.content[0].logprob == float("-inf")


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b"<html>",
        b'{"choices":[3]}',
        b'{"choices":[{"delta":{"content":"\xff"}}]}',
        b'{"choices":7}',
    ],
)
def test_broken_chunks(data):
    with pytest.raises(
        RequestError, match=r"^here: a chunk of the stream cannot be read"
    ) as caught:
        decoded_chunk(data, "here")
    assert caught.value.kind == "malformed"


def test_an_error_within_a_stream():
    with pytest.raises(RequestError, match="engine died") as caught:
        decoded_chunk(
            b'{"error":{"message":"engine died","type":"X","param":null,"code":500}}', "here"
        )
    assert (caught.value.kind, caught.value.status) == ("status", 500)
    assert decoded_chunk(b'{"choices":[],"error":null}', "here").choices == []


def test_one_line():
    assert one_line("a  b\n c") == "a b c"
    assert len(one_line("x" * 1000)) == 400
