"""Completions that were cut off anywhere and continued are what they would have been uncut: against
a server in this process.

The server stands in for vLLM at the transport: it decodes as vLLM 0.32 does, faults included (see
Decoder), and says what its script says. The same is shown with a real server in
tests/e2e/test_partial.py.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ttrl.errors import RequestError, TokenizationError, UserError
from ttrl.records import Sample, TaskResult
from ttrl.rollouts.client.chat_completions import ChatRequest
from ttrl.rollouts.client.wire import Answer
from ttrl.rollouts.early_stop import InferenceEarlyStop
from ttrl.rollouts.partial import (
    ContinueAttempt,
    TokenBudget,
    check_continuable,
    extend,
    first_part,
)
from ttrl.rollouts.request import SamplingRequest
from ttrl.rollouts.results import TaskResults
from ttrl.rollouts.sampling import Sampling

EOS, START, NOTHING = 256, 257, 258
SPECIAL = {EOS: "<|end|>", START: "<|start|>"}
PROMPT = [START, *b"user\nSay </a>\n", START, *b"assistant\n"]


def decode(ids, skip_special):
    """One token per byte, two special ones, and one that means nothing."""
    data = b""
    for i in ids:
        data += bytes([i]) if i < 256 else b"" if skip_special else SPECIAL.get(i, "").encode()
    return data.decode("utf-8", "replace")


class Decoder:
    """What the tokenizers package's DecodeStream makes of a completion, primed with the prompt:
    where the prompt ends within a character, the first text that comes is the whole prompt's."""

    def __init__(self, prompt, skip_special):
        self.skip_special = skip_special
        self.ids, self.prefix, self.prefix_index = list(prompt), "", 0
        text = decode(self.ids, skip_special)
        if not text.endswith("\ufffd"):
            self.prefix, self.prefix_index = text, len(self.ids)

    def step(self, token):
        self.ids.append(token)
        text = decode(self.ids, self.skip_special)
        if len(text) <= len(self.prefix) or text.endswith("\ufffd"):
            return ""
        assert text.startswith(self.prefix)
        new = text[len(self.prefix) :]
        index = len(self.ids) - self.prefix_index
        self.ids = self.ids[self.prefix_index :]
        self.prefix, self.prefix_index = decode(self.ids, self.skip_special), index
        return new


class Server:
    """Says its script behind the prompt, whatever the weights."""

    def __init__(self, script, context=None, prompt=PROMPT, logprobs=None):
        self.base_url, self.read_timeout = "http://stand-in/v1", None
        self.script, self.context, self.prompt = list(script), context, list(prompt)
        self.bodies = []
        self.streams = 0
        self.own_logprobs = logprobs or [-k / 8 for k in range(len(self.script))]

    def complete(self, body):
        """(text, ids, finish_reason, stop_reason) after every token, as a stream would have
        them.
        """
        prompt, forced = body["prompt"], body.get("allowed_token_ids")
        if forced is None:
            assert prompt[: len(self.prompt)] == self.prompt
            assert prompt[len(self.prompt) :] == self.script[: len(prompt) - len(self.prompt)]
        script = forced or self.script[len(prompt) - len(self.prompt) :]
        stops = body.get("stop") or []
        include = body.get("include_stop_str_in_output", False)
        held = max((len(s) for s in stops), default=1) - 1 if not include else 0
        decoder = Decoder(prompt, body.get("skip_special_tokens", True))
        text, ids = "", []
        room = math.inf if self.context is None else self.context - len(prompt)
        for token in script:
            ids.append(token)
            ended = token == EOS and not body.get("ignore_eos")
            new = "" if ended and not include else decoder.step(token)
            text += new
            stop = None
            for string in stops:
                at = (
                    text.find(string, max(0, len(text) - len(new) - len(string) + 1)) if new else -1
                )
                if at >= 0 and (stop is None or at + len(string) < stop[0]):
                    stop = (at + len(string), at, string)
            if stop is not None:
                yield text[: stop[0] if include else stop[1]], list(ids), "stop", stop[2]
                return
            if ended or len(ids) >= min(body["max_tokens"], room):
                yield text, list(ids), "stop" if ended else "length", None
                return
            yield text[: max(0, len(text) - held)], list(ids), None, None
        raise AssertionError("the script is too short")

    def logprobs(self, body, first, count):
        had = len(body["prompt"]) - len(self.prompt)
        return {
            "tokens": [""] * count,
            "token_logprobs": self.own_logprobs[had + first : had + first + count],
            "top_logprobs": None,
        }

    async def post(self, path, body, *, root=False):
        await asyncio.sleep(0)
        body = json.loads(json.dumps(body))  # as it would travel
        if path == "/detokenize":
            assert root
            return json.dumps({"prompt": decode(body["tokens"], False)}).encode()
        assert path == "/completions" and body["return_token_ids"] is True
        self.bodies.append(body)
        *_, (text, ids, reason, stop) = self.complete(body)
        choice = {
            "index": 0,
            "text": text,
            "token_ids": ids,
            "finish_reason": reason,
            "stop_reason": stop,
        }
        choice["logprobs"] = self.logprobs(body, 0, len(ids)) if "logprobs" in body else None
        usage = {
            "prompt_tokens": len(body["prompt"]),
            "prompt_tokens_details": {"cached_tokens": 8},
        }
        return json.dumps(
            {"id": "c", "created": 7, "model": "m", "choices": [choice], "usage": usage}
        ).encode()

    @contextlib.asynccontextmanager
    async def stream(self, path, body):
        assert path == "/completions" and body["stream"] is True
        self.bodies.append(json.loads(json.dumps(body)))

        async def chunks():
            shown, count = "", 0
            for text, ids, reason, stop in self.complete(body):
                choice = {
                    "index": 0,
                    "text": text[len(shown) :],
                    "token_ids": ids[count:],
                    "finish_reason": reason,
                }
                choice |= {
                    "stop_reason": stop,
                    "logprobs": self.logprobs(body, count, len(ids) - count),
                }
                shown, count = text, len(ids)
                data = b"data: " + json.dumps({"id": "c", "choices": [choice]}).encode() + b"\n\n"
                for part in (data[:11], data[11:]):  # events are not what arrives together
                    yield part
                    await asyncio.sleep(0)
            yield b'data: {"id": "c", "choices": [], "usage": {"prompt_tokens_details": null}}\n\ndata: [DONE]\n\n'

        self.streams += 1
        try:
            yield chunks()
        finally:
            self.streams -= 1

    async def get(self, path, *, root=False, timeout=10.0):
        assert path == "/models"
        return json.dumps({"data": [{"id": "m", "max_model_len": self.context}]}).encode()


def request(**params):
    return ChatRequest.of("m", params=params, token_ids=True)


async def continue_answer(
    server, request, sample, *, max_tokens, on_tokens=None, cut=None, on_chunk=None
):
    attempt = ContinueAttempt(
        request=request,
        sample=sample,
        max_tokens=max_tokens,
        number=sample.sample,
        count=on_tokens,
        cut=cut,
        on_chunk=on_chunk,
    )
    return (await attempt(server))[0]


def uncut(server, params, max_tokens=None, cut_after=None):
    """What a chat completion of the prompt gives: as a sample, and its stop reason."""
    body = {"prompt": server.prompt, **params, "max_tokens": max_tokens or params["max_tokens"]}
    for text, ids, reason, stop in server.complete(body):  # noqa: B007 - the last one counts
        if cut_after is not None and len(ids) == cut_after:
            break
    logprobs = server.logprobs(body, 0, len(ids))["token_logprobs"]
    sample = Sample(
        task_id="t", sample=0, messages=[], prompt_token_ids=server.prompt, weights_version=0
    )
    sample.text, sample.token_ids, sample.logprobs, sample.finish_reason = (
        text,
        ids,
        logprobs,
        reason,
    )
    if reason is None or (reason == "length" and max_tokens and len(ids) < params["max_tokens"]):
        sample.finish_reason = "unfinished"
    return sample, stop


def run(server, sample, params, cuts, streamed=(), listener=lambda: None):
    """Continues with at most these many new tokens each time (the last one again and again).
    Returns the last answer's choice. listener: makes the `on_chunk` of each part.
    """
    choice, version, number = None, 0, 0
    while sample.finish_reason == "unfinished":
        version += 1
        step = cuts[min(number, len(cuts) - 1)]
        cut = asyncio.Event() if number in streamed else None
        number += 1
        arrived = []

        def on_tokens(count, arrived=arrived, cut=cut, step=step):
            arrived.append(count)
            if cut is not None and sum(arrived) >= step:
                cut.set()

        had = len(sample.token_ids)
        answer = asyncio.run(
            continue_answer(
                server,
                request(**params),
                sample,
                max_tokens=None if cut else step,
                on_tokens=on_tokens,
                cut=cut,
                on_chunk=listener(),
            )
        )
        assert server.streams == 0
        choice = json.loads(answer.choice)
        assert sum(arrived) >= answer.completion_tokens - had > 0
        assert (answer.completion_tokens, answer.prompt_tokens) == (
            len(choice["token_ids"]),
            len(server.prompt),
        )
        extend(sample, answer, version)
        versions = sample.token_versions
        assert (
            versions == sorted(versions)
            and versions.count(version) == answer.completion_tokens - had
        )
    return choice


def check(script, params, cuts, streamed=(), first_streamed=False):
    server = Server(script)
    expected, stop = uncut(server, params)
    first = (
        {"cut_after": cuts[0]}
        if first_streamed
        else {"max_tokens": min(cuts[0], params["max_tokens"])}
    )
    sample, _ = uncut(server, params, **first)
    choice = run(server, sample, params, cuts[1:] or cuts, streamed)
    assert (sample.token_ids, sample.text) == (expected.token_ids, expected.text)
    assert sample.finish_reason == expected.finish_reason
    assert sample.logprobs == expected.logprobs
    if choice is not None:
        assert choice["stop_reason"] == stop
        assert choice["message"] == {"role": "assistant", "content": expected.text}
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == expected.logprobs
    return server


TEXT = "Ü, 漢字 and 🙂🙂 </a> ok"


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7])
def test_characters_of_several_bytes_over_the_border(step):
    check([*TEXT.encode(), EOS], {"max_tokens": 100}, [step])


def test_bytes_that_are_no_character_and_special_tokens():
    script = [
        0xFF,
        0xC3,
        START,
        *b"a",
        0xC3,
        EOS,
        NOTHING,
        *"é".encode(),
        0xF0,
        0x9F,
        START,
        START,
        *b"<|start|>",
        0x80,
    ]
    for step in range(1, len(script)):
        check(script, {"max_tokens": len(script), "ignore_eos": True}, [step])
        check(
            script,
            {"max_tokens": len(script), "ignore_eos": True, "skip_special_tokens": False},
            [step],
        )


@pytest.mark.parametrize("step", range(1, 12))
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_the_border(step, include):
    params = {"max_tokens": 100, "stop": ["</b>", "</a>"], "include_stop_str_in_output": include}
    server = check([*b"one </", *"漢</a> two".encode(), EOS], params, [step])
    assert all(
        body["stop"] == ["</b>", "</a>"]
        for body in server.bodies
        if body["prompt"][-1] < 128 and "stop" in body
    )


def test_of_several_stop_strings_the_one_that_is_complete_first():
    for stops in (["cd", "bcd"], ["bcd", "cd"], ["d", "abcdx"], ["bc", "abcd"], ["abcd", "c"]):
        for step in (1, 2, 3, 4, 5):
            check([*b"xxabcdxyz", EOS], {"max_tokens": 50, "stop": stops}, [step])


token = st.one_of(
    st.sampled_from([*b"ab </>"]),
    st.sampled_from([*"é漢🙂".encode()]),
    st.integers(0, 255),
    st.sampled_from([START, NOTHING]),
)
words = st.sampled_from([[*b"</a>"], [*"漢字".encode()], [*"🙂".encode()], [*b"abab"]])
scripts = st.lists(
    st.one_of(st.lists(token, min_size=1, max_size=3), words), min_size=1, max_size=12
).map(lambda parts: [*itertools.chain(*parts)])


@given(
    scripts,
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.sampled_from([None, ["</a>"], ["ab", "bab"], ["字", "</"], ["a b", "🙂"]]),
    st.booleans(),
    st.sets(st.integers(0, 6)),
    st.booleans(),
    st.integers(0, 20),
)
@settings(max_examples=80)
@example([97, 98, 97, 98], [2], ["ab", "bab"], True, set(), False, 0)
@example([97, 195, 257, 169], [4], None, False, set(), False, 0)
def test_any_script_cut_anywhere_is_what_it_would_have_been(
    script, cuts, stop, include, streamed, first_streamed, spare
):
    script = [*script, EOS]
    params = {"max_tokens": max(1, len(script) - spare), "include_stop_str_in_output": include}
    check(script, params | ({"stop": stop} if stop else {}), cuts, streamed, first_streamed)


def ends_at(logprobs, alpha, threshold):
    """The number of tokens at whose end the mean has fallen below the threshold; None: never."""
    mean = 0.0
    for count, logprob in enumerate(logprobs, 1):
        if logprob is not None:
            mean = alpha * mean + (1 - alpha) * logprob
        if mean < threshold:
            return count
    return None


@settings(max_examples=200)
@given(
    logprobs=st.lists(st.floats(-20, 0) | st.none(), min_size=3, max_size=40),
    cuts=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    streamed=st.sets(st.integers(0, 5)),
    alpha=st.floats(0.01, 0.99),
    threshold=st.floats(-12, -0.1),
    stop=st.sampled_from([[], ["ok"]]),
)
def test_an_early_stop_ends_a_cut_completion_where_it_would_have_ended_it_uncut(
    logprobs, cuts, streamed, alpha, threshold, stop
):
    """Wherever it was cut, by lengths or in its stream; each part has an object of its own, as in
    another iteration.
    """
    script = [*TEXT.encode()[: len(logprobs) - 1], EOS]
    logprobs = logprobs[: len(script)]
    params = {"max_tokens": 100, "stop": stop}
    server = Server(script, logprobs=logprobs)
    whole, _ = uncut(server, params)
    end = ends_at(logprobs[: len(whole.token_ids)], alpha, threshold)
    sample, _ = uncut(server, params, cut_after=cuts[0])
    if end is not None and end <= len(sample.token_ids):
        return  # not cut: it ended before
    stops = []

    def listener():
        stops.append(InferenceEarlyStop(alpha, threshold))
        return stops[-1]

    run(server, sample, params, cuts[1:] or cuts, streamed, listener)
    assert [stop.num_stopped for stop in stops[:-1]] == [0] * (len(stops) - 1)
    streams = [body for body in server.bodies if body.get("stream")]
    assert {body["stream_interval"] for body in streams} <= {1}
    if end is None:
        assert (sample.token_ids, sample.finish_reason) == (whole.token_ids, whole.finish_reason)
    else:
        assert (sample.token_ids, sample.finish_reason) == (script[:end], "stopped_early")


def test_what_a_stream_that_was_cut_held_back_for_a_stop_string_is_put_right():
    script = [*b"0123456789</a>", EOS]
    sample, _ = uncut(Server(script), {"max_tokens": 50, "stop": ["</a>"]}, cut_after=12)
    assert sample.text == "012345678"  # three characters could have begun the stop string
    check(script, {"max_tokens": 50, "stop": ["</a>"]}, [12, 1], first_streamed=True)


def test_lengths_and_limits_are_counted_over_all_parts():
    script = [*b"abcdefghijklmnop", EOS]
    sample, _ = uncut(Server(script), {"max_tokens": 10}, max_tokens=4)
    server = Server(script)
    run(server, sample, {"max_tokens": 10, "min_tokens": 6}, [3])
    assert [
        (len(body["prompt"]) - len(PROMPT), body["max_tokens"], body["min_tokens"])
        for body in server.bodies
    ] == [
        (4, 3, 2),
        (7, 3, 0),
    ]
    assert sample.finish_reason == "length" and len(sample.token_ids) == 10


def test_the_models_context_is_a_length_too():
    script = [*b"abcdefghijklmnop", EOS]
    for first, params in ((4, {"max_tokens": 100}), (4, {}), (6, {"max_tokens": 100})):
        server = Server(script, context=len(PROMPT) + 6)
        sample, _ = uncut(server, {"max_tokens": 100}, max_tokens=first)
        sample.finish_reason = "unfinished"
        answer = asyncio.run(continue_answer(server, request(**params), sample, max_tokens=None))
        choice = json.loads(answer.choice)
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "abcdef")
    assert server.bodies == []  # where nothing is left, nothing is asked
    with pytest.raises(UserError, match="give max_tokens, because the server does not report"):
        asyncio.run(continue_answer(Server(script), request(), sample, max_tokens=None))


def test_each_part_has_a_seed_of_its_own():
    def seeds(number, seed=3):
        server = Server([*b"abcdefghij", EOS])
        sample, _ = uncut(server, {"max_tokens": 9}, max_tokens=3)
        sample.sample = number
        run(server, sample, {"max_tokens": 9, **({} if seed is None else {"seed": seed})}, [2])
        return [body.get("seed") for body in server.bodies]

    first = seeds(0)
    assert len(set(first)) == 3 and all(0 <= seed < 2**63 for seed in first)
    assert (
        seeds(0) == first
        and not set(seeds(1)) & set(first)
        and not set(seeds(0, seed=4)) & set(first)
    )
    assert seeds(0, seed=None) == [None] * 3


def test_parameters_travel_along():
    params = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "logit_bias": {"3": 1.0},
    }
    params |= {
        "stop_token_ids": [9],
        "ignore_eos": False,
        "max_tokens": 9,
        "chat_template_kwargs": {"thinking": True},
    }
    server = Server([*b"abcdefghij", EOS])
    sample, _ = uncut(server, {"max_tokens": 9}, max_tokens=3)
    run(server, sample, params, [20])
    (body,) = server.bodies
    known = {name: body.pop(name) for name in params if name in body}
    assert known == {
        name: value for name, value in params.items() if name != "chat_template_kwargs"
    } | {"max_tokens": 6}
    assert body == {
        "model": "m",
        "prompt": [*PROMPT, *b"abc"],
        "return_token_ids": True,
        "add_special_tokens": False,
        "logprobs": 0,
    }


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty.*no longer count the tokens"),
        ({"frequency_penalty": -0.5}, "frequency_penalty.*no longer count the tokens"),
        ({"bad_words": ["x"]}, "bad_words.*across the cut"),
        ({"top_logprobs": 2}, "top_logprobs.*stores no alternatives"),
        ({"response_format": {"type": "json_object"}}, "response_format.*start over"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.*start over"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.*cannot be read"),
        ({"thinking_token_budget": 5}, "thinking_token_budget.*start over"),
        (
            {"extra_body": {"repetition_detection": {"min_count": 3}}},
            "repetition_detection.*no longer see the tokens",
        ),
        ({"extra_body": {"brand_new": 1}}, "brand_new.*does not know"),
        ({"min_tokens": 3, "stop": ["x"]}, "min_tokens with stop"),
    ],
)
def test_what_cannot_be_continued_exactly_is_refused_before_anything_is_sent(params, message):
    with pytest.raises(UserError, match=message):
        check_continuable(request(**params))
    nobody = {"client": "http://127.0.0.1:9/v1", "model": "m"}
    with pytest.raises(UserError, match=message):
        Sampling(SamplingRequest(**nobody, params=params, token_budget=5))


def test_neutral_values_are_no_parameters():
    neutral = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "top_logprobs": 0,
        "bad_words": [],
        "min_tokens": 0,
    }
    check_continuable(request(**neutral, response_format={"type": "text"}, stop=["x"]))
    # A continuation brings none, and they count as unknown.
    check_continuable(request(routed_experts_prompt_start=0))


def test_samples_that_cannot_be_continued_are_named():
    server = Server([*b"abcdef", EOS])

    def attempt(**changes):
        sample, _ = uncut(server, {"max_tokens": 9}, max_tokens=2)
        sample = dataclasses.replace(sample, **changes)
        return asyncio.run(continue_answer(server, request(max_tokens=9), sample, max_tokens=None))

    for changes, message in (
        ({"token_ids": None}, "no token ids"),
        ({"prompt_token_ids": None}, "no token ids"),
        ({"logprobs": None}, "without logprobs"),
        ({"text": "other"}, r"ends with 'other', but the server decodes them to …'ab'"),
    ):
        with pytest.raises(TokenizationError, match=r"^task 't', sample 0: .*" + message):
            attempt(**changes)
    assert json.loads(attempt().choice)["message"]["content"] == "abcdef"


def test_a_stream_that_breaks_or_stalls_is_an_error_and_leaves_nothing_behind():
    class Broken(Server):
        @contextlib.asynccontextmanager
        async def stream(self, path, body):
            async def chunks():
                yield b'data: {"choices": [{"text": "c", "token_ids": [99], "logprobs": null, "finish_reason": null}]}\n\n'
                if self.how == "stall":
                    await asyncio.sleep(60)
                elif self.how == "error":
                    yield b'data: {"error": {"message": "out of memory"}}\n\n'
                elif self.how == "malformed":
                    yield b"data: {broken\n\n"
                elif self.how == "no ids":
                    yield b'data: {"choices": [{"text": "c", "finish_reason": null}]}\n\n'

            yield chunks()

    async def attempt(how):
        server = Broken([*b"abcdef", EOS])
        server.how = how
        sample, _ = uncut(server, {"max_tokens": 9}, max_tokens=2)
        before = sample.to_json()
        given = ChatRequest.of("m", params={"max_tokens": 9}, token_ids=True, stall_timeout=0.05)
        with pytest.raises(RequestError) as caught:
            await continue_answer(server, given, sample, max_tokens=None, cut=asyncio.Event())
        assert sample.to_json() == before and len(asyncio.all_tasks()) == 1
        return caught.value

    kinds = {
        "stall": "stall",
        "": "connection",
        "error": "malformed",
        "malformed": "malformed",
        "no ids": "malformed",
    }
    for how, kind in kinds.items():
        assert asyncio.run(attempt(how)).kind == kind


def test_a_budget_that_is_spent_already_asks_for_nothing():
    server = Server([*b"abcdef", EOS])
    sample, _ = uncut(server, {"max_tokens": 9}, max_tokens=2)

    async def attempt():
        cut = asyncio.Event()
        cut.set()
        return await continue_answer(
            server, request(max_tokens=9), sample, max_tokens=None, cut=cut
        )

    assert asyncio.run(attempt()) is None and server.bodies == []


def answer_of(sample, new, **changes):
    content = [
        {"token": "", "logprob": -1.0, "bytes": [], "top_logprobs": []}
        for _ in [*(sample.token_ids or []), *new]
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "text"},
        "logprobs": {"content": content},
    }
    choice |= {"finish_reason": "stop", "token_ids": [*(sample.token_ids or []), *new]} | changes
    return Answer(choice=json.dumps(choice).encode(), prompt_token_ids=sample.prompt_token_ids)


def test_versions_of_the_tokens():
    sample = Sample(
        task_id="t",
        sample=0,
        messages=[],
        prompt_token_ids=[1],
        token_ids=[2, 3],
        logprobs=[-1.0, math.nan],
    )
    sample.weights_version, sample.finish_reason = 4, "unfinished"
    extend(sample, answer_of(sample, [5], finish_reason=None), 4)
    assert (sample.token_versions, sample.weights_version, sample.finish_reason) == (
        None,
        4,
        "unfinished",
    )
    extend(sample, answer_of(sample, [], finish_reason=None), 6)
    assert (sample.token_versions, sample.weights_version) == (None, 4)  # nothing new came
    extend(sample, answer_of(sample, [6, 7], finish_reason=None), 6)
    assert (sample.token_versions, sample.weights_version) == ([4, 4, 4, 6, 6], 6)
    extend(sample, answer_of(sample, [8]), 7)
    assert (sample.token_versions, sample.weights_version, sample.finish_reason) == (
        [4, 4, 4, 6, 6, 7],
        7,
        "stop",
    )
    assert sample.text == "text" and sample.token_ids == [2, 3, 5, 6, 7, 8]
    before = sample.to_json()
    with pytest.raises(TokenizationError, match="does not begin with the 6 stored tokens"):
        extend(sample, answer_of(sample, [], token_ids=[2, 3, 5, 6, 7, 9]), 8)
    assert sample.to_json() == before


def test_budgets():
    assert TokenBudget.of(None) is None
    assert TokenBudget.of(7) == TokenBudget(total=7)
    assert TokenBudget.of(TokenBudget(per_sample=3)) == TokenBudget(per_sample=3)
    for wrong in (0, -1, True, 1.5, "9"):
        with pytest.raises(UserError, match="token_budget is"):
            TokenBudget.of(wrong)
        with pytest.raises(UserError, match=r"per_sample is"):
            TokenBudget(per_sample=wrong, total=5)
    with pytest.raises(UserError, match="neither per_sample nor total"):
        TokenBudget()


def test_what_the_first_part_is_asked_for_with():
    given = request(max_tokens=20, min_tokens=9)
    for budget in (None, TokenBudget(total=5), TokenBudget(per_sample=20)):
        assert first_part(given, budget) is given
    first = first_part(given, TokenBudget(per_sample=5))
    assert (first.max_tokens, first.parameters["min_tokens"], given.max_tokens) == (5, 5, 20)
    assert first_part(request(), TokenBudget(per_sample=5)).parameters["max_tokens"] == 5
    newer = first_part(request(max_completion_tokens=20), TokenBudget(per_sample=5)).parameters
    assert (newer["max_completion_tokens"], "max_tokens" in newer) == (5, False)


def test_unfinished_groups():
    def group(*reasons):
        return TaskResult(
            task_id="t",
            messages=[],
            samples=[
                Sample(task_id="t", sample=k, messages=[], finish_reason=reason)
                for k, reason in enumerate(reasons)
            ],
        )

    groups = [group("stop", "length"), group("stop", "unfinished"), group("unfinished")]
    assert TaskResults(groups).unfinished == groups[1:]
    groups[1].samples[1].error = "ServerError: gone"
    assert TaskResults(groups).unfinished == groups[2:]
