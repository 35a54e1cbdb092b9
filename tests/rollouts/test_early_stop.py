"""InferenceEarlyStop against its formula, over any cutting of the tokens into chunks, streams and
choices.
"""

import asyncio
import gc
import logging
import math
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion

from ttrl.errors import UserError
from ttrl.rollouts.client.stream import consume_chat_completion_stream
from ttrl.rollouts.early_stop import InferenceEarlyStop


class Completion:
    def __init__(self, indices=(0,)):
        self.choices = [types.SimpleNamespace(index=index, finish_reason=None) for index in indices]


def part(logprobs, index=0, content="x"):
    entries = (
        None if logprobs is None else [types.SimpleNamespace(logprob=value) for value in logprobs]
    )
    delta = types.SimpleNamespace(content=content, tool_calls=None, role="assistant")
    given_logprobs = None if entries is None else types.SimpleNamespace(content=entries)
    return types.SimpleNamespace(
        index=index, delta=delta, logprobs=given_logprobs, finish_reason=None
    )


def chunk(*parts):
    return types.SimpleNamespace(choices=list(parts))


def stops(stop, completion, *parts):
    try:
        stop(chunk(*parts), completion)
    except StopIteration:
        return True
    return False


def reference(logprobs, alpha, threshold):
    """(index of the token that ends it or None, the mean after it), as the formula says."""
    mean = 0.0
    for k, logprob in enumerate(logprobs):
        if logprob is None or logprob == -9999.0:
            continue
        mean = alpha * mean + (1 - alpha) * logprob
        if math.isnan(mean) or mean < threshold:
            return k, mean
    return None, mean


LOGPROB = st.one_of(
    st.floats(-40, 0), st.just(-9999.0), st.none(), st.just(math.nan), st.just(-math.inf)
)


@given(
    logprobs=st.lists(LOGPROB, max_size=80),
    sizes=st.lists(st.integers(1, 7), min_size=1),
    alpha=st.floats(0.01, 0.999),
    threshold=st.floats(-30, -0.01),
)
def test_any_stream_in_any_chunks(logprobs, sizes, alpha, threshold):
    stop, completion = InferenceEarlyStop(alpha, threshold), Completion()
    expected, mean = reference(logprobs, alpha, threshold)
    start, ended, turn = 0, None, 0
    while start < len(logprobs) and ended is None:
        size = sizes[turn % len(sizes)]
        if stops(stop, completion, part(logprobs[start : start + size])):
            ended = start // 1
        start, turn = start + size, turn + 1
    assert (ended is None) == (expected is None)
    if expected is not None:
        assert ended <= expected < start
        assert (
            completion.choices[0].stopped_early is True
            and completion.choices[0].finish_reason == "stopped_early"
        )
    found = stop.mean(completion)
    assert found == mean or (math.isnan(found) and math.isnan(mean))


@pytest.mark.parametrize(("logprob", "tokens"), [(-20.0, 21), (-4.0, 173), (-3.0, None)])
def test_how_many_tokens_it_takes(logprob, tokens):
    stop, completion = InferenceEarlyStop(), Completion()
    needed = next((k for k in range(1, 10_000) if stops(stop, completion, part([logprob]))), None)
    assert needed == tokens


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.floats(-30, 0)), max_size=60))
def test_streams_and_choices_do_not_mix(tokens):
    stop = InferenceEarlyStop(0.5, -1e6)
    completions = [Completion(range(3)) for _ in range(3)]
    for stream, index, logprob in tokens:
        stop(chunk(part([logprob], index)), completions[stream])
    for stream in range(3):
        for index in range(3):
            own = [logprob for s, i, logprob in tokens if (s, i) == (stream, index)]
            assert stop.mean(completions[stream], index) == reference(own, 0.5, -1e6)[1]


def test_only_the_choices_that_fell_are_marked():
    stop, completion = InferenceEarlyStop(0.5, -3.0), Completion([2, 0, 1])
    assert stops(stop, completion, part([-1.0], 0), part([-20.0], 1), part([math.nan], 2))
    marked = {
        choice.index: getattr(choice, "stopped_early", False) for choice in completion.choices
    }
    assert marked == {0: False, 1: True, 2: True}
    assert [choice.finish_reason for choice in completion.choices] == [
        "stopped_early",
        None,
        "stopped_early",
    ]
    assert stop.num_stopped == 2


def test_openai_objects_are_marked_too():
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": None}
    completion = ChatCompletion.construct(
        id="1", choices=[choice], created=1, model="m", object="chat.completion"
    )
    stop = InferenceEarlyStop(0.5, -3.0)
    assert stops(stop, completion, part([-20.0]))
    assert completion.choices[0].finish_reason == "stopped_early"
    assert completion.choices[0].model_dump()["stopped_early"] is True


def test_missing_logprobs_are_passed_over_and_told_once(caplog):
    stop, completion = InferenceEarlyStop(), Completion()
    with caplog.at_level(logging.WARNING):
        stop(chunk(), completion)
        stop(types.SimpleNamespace(choices=None), completion)
        # The role, or the finish_reason: no token.
        stop(chunk(part(None, content=None)), completion)
        assert caplog.text == "" and stop.num_unknown == 0
        for _ in range(3):
            stop(chunk(part(None)), completion)
            stop(chunk(part([-9999.0, None])), completion)
    assert stop.num_unknown == 9
    assert caplog.text.count("early stop skips tokens") == 1
    assert stop.mean(completion) == 0.0


def test_means_go_with_their_completions():
    stop = InferenceEarlyStop()
    for _ in range(1000):
        completion = Completion()
        stop(chunk(part([-1.0])), completion)
    del completion
    gc.collect()
    assert stop._streams == {}


@given(st.lists(st.floats(-9, 0) | st.just(math.nan), max_size=60))
def test_where_it_would_have_ended_an_earlier_sample(logprobs):
    stop, completion = InferenceEarlyStop(0.8, -2.0), Completion()
    ended = None
    for count, logprob in enumerate(logprobs, 1):
        try:
            stop(chunk(part([None if math.isnan(logprob) else logprob])), completion)
        except StopIteration:
            ended = count
            break
    assert stop.ends_at(logprobs) == ended


def test_cache_key_is_what_it_does():
    keys = {
        InferenceEarlyStop(*arguments).cache_key
        for arguments in ((), (0.992, -3.0), (0.9, -3.0), (0.992, -4))
    }
    assert len(keys) == 3
    assert repr(InferenceEarlyStop()) == "InferenceEarlyStop(alpha=0.992, threshold=-3.0)"


@pytest.mark.parametrize("alpha", [0, 1, -0.5, 2, math.nan, "0.9", None, True])
def test_alpha_out_of_range(alpha):
    with pytest.raises(UserError, match=r"alpha is .*; give a number between 0 and 1"):
        InferenceEarlyStop(alpha=alpha)


@pytest.mark.parametrize("threshold", [0, 1.0, math.nan, -math.inf, "-3", None])
def test_threshold_out_of_range(threshold):
    with pytest.raises(UserError, match=r"threshold is .*; give a finite number below 0"):
        InferenceEarlyStop(threshold=threshold)


def test_with_the_stream_reader():
    """Two choices in one stream of plain JSON: the one that babbles ends, the other goes on."""

    async def chunks():
        for k in range(60):
            for index, logprob in ((0, -0.1), (1, -20.0)):
                logprobs = {
                    "content": [
                        {"token": "x", "logprob": logprob, "bytes": None, "top_logprobs": []}
                    ]
                }
                end = "stop" if k == 59 else None
                choice = {
                    "index": index,
                    "delta": {"content": "x"},
                    "logprobs": logprobs,
                    "finish_reason": end,
                }
                yield {
                    "id": "1",
                    "object": "chat.completion.chunk",
                    "created": 1,
                    "model": "m",
                    "choices": [choice],
                }

    stop = InferenceEarlyStop()
    completion = asyncio.run(consume_chat_completion_stream(chunks(), stop))
    assert [(len(c.message.content), c.finish_reason) for c in completion.choices] == [
        (60, "stop"),
        (21, "stopped_early"),
    ]
    del completion
    gc.collect()
    assert stop._streams == {}
