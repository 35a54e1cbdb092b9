"""The other APIs of a session: text completions, whose ids are exact, and responses as openai's
client reads them.
"""

import asyncio

import openai
import pytest
from openai import AsyncOpenAI, BadRequestError
from support.agent_sessions import ASK, EOS, Kit, of_server, post, run, sampled, server, trained

from ttrl.records import Sample
from ttrl.rollouts.client.choices import choice_of_sample

CALL = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
BOS = 1
TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {}},
}


def client_of(session):
    return AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)


def text_ids(text, *, begin):
    """A text's ids are its characters', "<s>" is 1; `begin` puts that before it."""
    ids = []
    for number, piece in enumerate(text.split("<s>")):
        ids += [BOS] * (number > 0) + [*map(ord, piece)]
    return [BOS, *ids] if begin else ids


def text_server(texts, seen, *, adds=False, asked=None):
    """Answers text completions as vLLM does. adds: its tokenizer begins texts with "<s>"."""

    def behaviour(body, attempt):
        is_tokenize = "add_special_tokens" in body and "return_token_ids" not in body
        if is_tokenize or "tokens" in body:
            if asked is not None:
                asked.append(body)
            if is_tokenize:
                begin = adds and body["add_special_tokens"]
                return Kit.Reply({"tokens": text_ids(body["prompt"], begin=begin)})
            text = "".join("<s>" if token == BOS else chr(token) for token in body["tokens"])
            return Kit.Reply({"prompt": text})
        seen.append(body)
        prompt, text = body["prompt"], texts[len(seen) - 1]
        ids = [*map(ord, text), EOS]
        values = Kit.expected_logprobs(text)
        choice = {
            "index": 0,
            "text": text,
            "logprobs": {"tokens": [chr(token) for token in ids], "token_logprobs": values},
            "finish_reason": "stop",
            "token_ids": ids,
            "prompt_token_ids": prompt
            if isinstance(prompt, list)
            else text_ids(prompt, begin=adds and body.get("add_special_tokens", True)),
        }
        return Kit.Reply({"id": "cmpl-1", "created": 1, "model": "m", "choices": [choice]})

    return behaviour


def test_a_prompt_of_text_or_ids_is_trained_with_its_exact_ids():
    seen = []

    async def agent(session):
        async with client_of(session) as client:
            ask = client.completions.create
            one = await ask(
                model=session.model,
                prompt="ab",
                logprobs=1,
                extra_body={"return_token_ids": True},
                max_tokens=9,
            )
            choice = one.choices[0]
            assert (choice.text, choice.finish_reason) == ("one", "stop")
            assert choice.logprobs.token_logprobs == Kit.expected_logprobs("one")
            ids = [*choice.prompt_token_ids, *choice.token_ids, 5, 6]
            chunks = [
                chunk async for chunk in await ask(model=session.model, prompt=ids, stream=True)
            ]
            assert chunks[0].choices[0].text == "two"
            await ask(model=session.model, prompt=[[7, 8]], stop="x")
        return 1.0

    params = {"temperature": 0.5, "max_tokens": 40, "chat_template_kwargs": {"a": 1}}
    results = run(agent, behaviour=text_server(["one", "two", "three"], seen), params=params)
    (sample,) = results.samples
    assert sample.error is None
    assert trained(results) == [of_server("one", "two"), of_server("three")]
    ids = [*map(ord, "abone"), EOS, 5, 6]
    assert [(body["prompt"], body["max_tokens"], body.get("stop")) for body in seen] == [
        ("ab", 9, None),
        (ids, 40, None),
        ([7, 8], 40, "x"),
    ]
    assert {body["temperature"] for body in seen} == {0.5} and not {
        "chat_template_kwargs",
        "messages",
    } & seen[0].keys()
    assert [turn.continues for turn in sample.turns] == [None, 0, None]
    assert sample.turns[1].messages == [{"role": "prompt", "content": ids}]
    again = choice_of_sample(Sample.from_json(sample.to_json()))
    assert (
        again.messages[0] == {"role": "prompt", "content": [7, 8]}
        and again.message.content == "three"
    )


@pytest.mark.parametrize(
    ("prompt", "adds", "expected"),
    [
        ("<s>ab", True, [BOS, 97, 98]),
        ("ab", True, [BOS, 97, 98]),
        ("a<s>b", True, [BOS, 97, BOS, 98]),
        ("<s><s>ab", True, [BOS, BOS, 97, 98]),  # as the agent wrote it
        ("<s>", True, [BOS]),
        ("<s>ab", False, [BOS, 97, 98]),
        ("ab", False, [97, 98]),
        ([BOS, 97, 98], True, [BOS, 97, 98]),
    ],
)
def test_a_prompt_begins_with_the_tokenizers_own_token_once(prompt, adds, expected):
    seen, asked = [], []

    async def agent(session):
        for _ in range(2):
            status, answer = await post(session, "/completions", prompt=prompt)
            assert status == 200, answer
        return 1.0

    results = run(agent, behaviour=text_server(["one", "two"], seen, adds=adds, asked=asked))
    (sample,) = results.samples
    assert sample.error is None and sample.prompt_token_ids == expected
    assert len(seen) == 2 and len(asked) <= 3  # the server is asked once


def test_a_run_that_says_itself_what_texts_begin_with_is_obeyed():
    seen, asked = [], []

    async def agent(session):
        await post(session, "/completions", prompt="<s>a")
        return 1.0

    params = {"extra_body": {"add_special_tokens": True}}
    behaviour = text_server(["one"], seen, adds=True, asked=asked)
    results = run(agent, behaviour=behaviour, params=params)
    assert results.samples[0].prompt_token_ids == [BOS, BOS, 97] and not asked


def test_a_server_that_does_not_say_what_it_adds_is_warned_about(caplog):
    async def agent(session):
        await post(session, "/completions", prompt="<s>a")
        return 1.0

    own = text_server(["one"], [], adds=True)

    def behaviour(body, attempt):
        is_tokenize = "add_special_tokens" in body and "return_token_ids" not in body
        return Kit.error(404, "no such page") if is_tokenize else own(body, attempt)

    results = run(agent, behaviour=behaviour)
    assert results.samples[0].error is None
    assert "does not report its tokens before prompts" in caplog.text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": ["a", "b"]}, "give one prompt"),
        ({"prompt": []}, "give one prompt"),
        ({"prompt": "a", "echo": True}, "echo is True"),
        ({"prompt": "a", "logprobs": 5}, "logprobs is 5"),
        ({"prompt": "a", "n": 2}, "n is 2"),
    ],
)
def test_a_text_completion_that_is_no_single_prompt_is_refused(body, words):
    async def agent(session):
        status, answer = await post(session, "/completions", **body)
        assert status == 400 and words in answer["error"]["message"]

    assert words in run(agent).samples[0].error


def chat_server(seen):
    def answer(body):
        last = body["messages"][-1]
        if last["role"] == "tool" or "tools" not in body:
            return "two", {"message": {"content": "two", "reasoning": "hm"}}
        return "call", {
            "message": {"content": None, "tool_calls": [CALL]},
            "finish_reason": "tool_calls",
        }

    return server(answer, seen)


@pytest.mark.long(but=["True-False", "True-True"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
def test_responses_with_a_function_by_items_or_by_the_previous_response(stream, by_id):
    """Long for whole responses: only these come without a stream."""
    seen, shown = [], []

    async def agent(session):
        async with client_of(session) as client:

            async def ask(given, **more):
                options = {"model": session.model, "instructions": "Add.", "tools": [TOOL], **more}
                if not stream:
                    return await client.responses.create(input=given, **options)
                async with client.responses.stream(input=given, **options) as events:
                    told = [event async for event in events]
                assert [event.sequence_number for event in told] == list(range(len(told)))
                shown.append([event.type for event in told])
                return told[-1].response

            first = await ask("begin", temperature=0.5, max_output_tokens=30)
            (call,) = first.output
            assert (call.type, call.name, call.arguments, first.status) == (
                "function_call",
                "add",
                '{"a": 1}',
                "completed",
            )
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
            if by_id:
                second = await ask([result], previous_response_id=first.id)
            else:
                user = {"role": "user", "content": [{"type": "input_text", "text": "begin"}]}
                second = await ask([user, *[item.to_dict() for item in first.output], result])
            assert [item.type for item in second.output] == ["reasoning", "message"]
            items = [
                {"role": "user", "content": "begin"},
                *[item.to_dict() for item in first.output],
                result,
            ]
            items += [item.to_dict() for item in second.output]
            third = await ask([*items, {"role": "user", "content": "and?"}], tool_choice="none")
            again = await client.responses.retrieve(first.id)
            assert (again.id, again.status, again.usage) == (first.id, first.status, first.usage)
            assert [(item.id, item.arguments) for item in again.output] == [
                (item.id, item.arguments) for item in first.output
            ]
            with pytest.raises(
                openai.NotFoundError,
                match=r"this session has no response 'resp_1'|no such response",
            ):
                await client.responses.retrieve("resp_1")
            assert third.usage.input_tokens > second.usage.input_tokens > first.usage.input_tokens
            return float(second.output_text == "two")

    results = run(agent, behaviour=chat_server(seen), params={"temperature": 0.5})
    (sample,) = results.samples
    assert (sample.error, sample.reward) == (None, 1.0)
    tool = {
        "type": "function",
        "function": {name: TOOL[name] for name in ("name", "description", "parameters")},
    }
    assert [body.get("tools") for body in seen] == [[tool], [tool], None] and seen[0][
        "max_tokens"
    ] == 30
    assert seen[0]["messages"] == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "begin"},
    ]
    told = {"role": "tool", "tool_call_id": "call-1", "content": "2"}
    reply = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert seen[1]["messages"] == [*seen[0]["messages"], reply, told]
    last = {"role": "assistant", "content": "two", "reasoning": "hm"}
    assert seen[2]["messages"] == [*seen[1]["messages"], last, {"role": "user", "content": "and?"}]
    assert [turn.follows for turn in sample.turns] == [None, 0, 1]
    trained_ids = [token for sequence in trained(results) for token, _ in sequence]
    assert trained_ids == [*map(ord, "call"), EOS, *map(ord, "two"), EOS, *map(ord, "two"), EOS]
    if stream:
        assert (
            "response.function_call_arguments.delta" in shown[0]
            and shown[0][-1] == "response.completed"
        )
        assert (
            "response.reasoning_text.delta" in shown[1] and "response.output_text.delta" in shown[1]
        )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "type 'input_image'",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "type 'item_reference'"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "type 'web_search'"),
        ({"input": "a", "previous_response_id": "resp_0"}, "this session has no such response"),
        ({"input": "a", "text": {"format": {"type": "json_object"}}}, "text is"),
        ({"input": "a", "background": True}, "background is True"),
        ({"input": "a", "reasoning": {"effort": "low"}}, "reasoning is"),
        ({"input": []}, "input is empty"),
        ({}, "input is None"),
    ],
)
def test_what_a_chat_cannot_say_is_refused(body, words):
    async def agent(session):
        async with client_of(session) as client:
            try:
                await client.responses.create(
                    model=session.model, **body
                ) if "input" in body else await client.post(
                    "/responses", body={"model": session.model}, cast_to=object
                )
            except BadRequestError as error:
                assert words in str(error)

    assert words in run(agent).samples[0].error


def test_a_response_that_was_cut_off_is_incomplete():
    async def agent(session):
        async with client_of(session) as client:
            got = await client.responses.create(model=session.model, input="begin")
            assert (got.status, got.incomplete_details.reason) == (
                "incomplete",
                "max_output_tokens",
            )
        return 1.0

    assert (
        run(agent, behaviour=server(lambda body: ("two", {"finish_reason": "length"})))
        .samples[0]
        .error
        is None
    )


def test_another_model_beside_the_policy_is_asked_with_its_own_key_and_not_trained():
    asked = []

    def judge(body, attempt):
        asked.append(body)
        return Kit.completion([Kit.choice(0, "good")])

    async def main():
        async with Kit.serving(judge) as other:
            address = f"http://127.0.0.1:{other.port}/v1"

            async def agent(session):
                async with client_of(session) as client:
                    assert [one.id async for one in client.models.list()] == ["policy", "judge"]
                    await client.chat.completions.create(model="policy", messages=ASK)
                    verdict = await client.chat.completions.create(
                        model="judge", messages=ASK, temperature=0.1
                    )
                return float(verdict.choices[0].message.content == "good")

            return await sampled(agent, server(), beside={"judge": address})

    results = asyncio.run(main())
    assert (results.samples[0].error, results.samples[0].reward) == (None, 1.0)
    assert trained(results) == [of_server("BEGIN")] and asked[0]["temperature"] == 0.1
