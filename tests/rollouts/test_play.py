"""Tasks with a rollout: several replies become one sample, with the server's own ids; what goes
wrong costs one sample.
"""

import asyncio
import json
import math
import re
from pathlib import Path

import pytest

from ttrl.data.tokenization import TaskResultTokenizer
from ttrl.errors import (
    GraderError,
    RequestError,
    RolloutError,
    RolloutLimitError,
    ServerError,
    TaskError,
)
from ttrl.records import Sample
from ttrl.rollouts.client.attempts import room_left
from ttrl.rollouts.client.chat_completions import ChatRequest
from ttrl.rollouts.client.choices import choice_of_sample
from ttrl.rollouts.graders.worker_wire import choice_from_json, choice_to_json
from ttrl.rollouts.sample_logs import sample_text
from ttrl.rollouts.task_results import TaskResults, get_task_results
from ttrl.tasks.task import RolloutLimits, Task

SYSTEM = [{"role": "system", "content": "You count."}]
EOS = 0


def rendered(messages, *, keep=True):
    """A chat template over characters: what each message says, its end, and for the assistant a
    header; ids from 1000 on are headers. keep=False leaves what stands in <> out of earlier
    answers, as templates of thinking models do.
    """
    ids = []
    for message in messages:
        text = message.get("content") or ""
        if message["role"] == "assistant" and not keep and ">" in text:
            text = text.split(">", 1)[1]
        ids += [1000 + len(message["role"]), *map(ord, text), EOS]
    return [*ids, 1000 + len("assistant")]


def talking(answer, *, keep=True, kit=None, seen=None):
    """A server that answers with answer(body), with prompt ids as a template would make them."""

    def behaviour(body, attempt):
        if seen is not None:
            seen.append(body)
        text = answer(body)
        if not isinstance(text, str):
            return text
        prompt = rendered(body["messages"], keep=keep)
        choice = kit.choice(0, text)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(text) + 1,
            "total_tokens": len(prompt) + len(text) + 1,
        }
        return kit.completion([choice], prompt_token_ids=prompt, usage=usage)

    return behaviour


def replies(body):
    """one, two, three …: how many answers there are already."""
    return ["one", "two", "three", "four"][sum(m["role"] == "assistant" for m in body["messages"])]


async def two_turns(chat):
    first = await chat("begin")
    second = await chat(f"after {first.message.content}")
    return float(len(second.message.content)), {"turns": 2}


def test_two_turns_are_one_sample(kit):
    seen = []
    results, _ = kit.run(
        talking(replies, kit=kit, seen=seen),
        [Task(SYSTEM, rollout=two_turns, id="t")],
        n=2,
        weights_version=3,
    )
    assert [body["n"] for body in seen] == [1] * 4
    for sample in results.samples:
        assert (sample.reward, sample.metrics, sample.error) == (3.0, {"turns": 2.0}, None)
        assert (sample.text, sample.finish_reason, sample.weights_version) == ("two", "stop", 3)
        assert sample.prompt_token_ids == rendered([*SYSTEM, {"role": "user", "content": "begin"}])
        assert sample.token_ids == [*map(ord, "one"), EOS, *map(ord, "two"), EOS]
        assert sample.logprobs == kit.expected_logprobs("one") + kit.expected_logprobs("two")
        assert [
            (turn.follows, turn.continues, turn.num_tokens, turn.finish_reason)
            for turn in sample.turns
        ] == [
            (-1, None, 4, "stop"),
            (0, 0, 4, "stop"),
        ]
        assert [turn.messages for turn in sample.turns] == [
            [{"role": "user", "content": "begin"}],
            [{"role": "user", "content": "after one"}],
        ]
        assert sample.turns[1].prompt_token_ids == [1004, *map(ord, "after one"), EOS, 1009]
        assert sample.sent(1) == seen[-1]["messages"]
        assert [m["role"] for m in sample.conversation] == [
            "system",
            "user",
            "assistant",
            "user",
            "assistant",
        ]
        assert Sample.from_json(sample.to_json()) == sample
    stats = results.stats
    assert (stats.num_graded, stats.num_turns, stats.num_breaks, stats.completion_tokens) == (
        2,
        4,
        0,
        16,
    )
    assert stats.new_prompt_tokens == 2 * sum(
        len(rendered(body["messages"])) for body in (seen[0], seen[-1])
    )
    assert stats.finish_reasons == {"stop": 2}
    read = TaskResults.from_samples(
        [Sample.from_json(sample.to_json()) for sample in results.samples]
    ).stats
    for name in (
        "prompt_tokens",
        "completion_tokens",
        "new_prompt_tokens",
        "new_completion_tokens",
        "num_turns",
    ):
        assert getattr(read, name) == getattr(stats, name), name


def test_they_are_one_sequence_whose_every_reply_is_trained(kit):
    results, _ = kit.run(talking(replies, kit=kit), [Task(SYSTEM, rollout=two_turns, id="t")])
    (sample,) = results.samples
    tokenize = TaskResultTokenizer()
    (one,) = tokenize(results[0], [0.5])
    given = rendered([*SYSTEM, {"role": "user", "content": "begin"}])
    between = [1004, *map(ord, "after one"), EOS, 1009]
    assert one.token_ids == [*given, *map(ord, "one"), EOS, *between, *map(ord, "two"), EOS]
    mask = [False] * len(given) + [True] * 4 + [False] * len(between) + [True] * 4
    assert one.assistant_mask == mask and one.prompt_length == len(given)
    assert [i for i, kept in zip(one.token_ids, mask, strict=True) if kept] == sample.token_ids
    assert [
        logprob for logprob, kept in zip(one.logprobs, mask, strict=True) if kept
    ] == sample.logprobs
    assert all(
        math.isnan(logprob) for logprob, kept in zip(one.logprobs, mask, strict=True) if not kept
    )
    assert (one.advantage, one.reward, one.share, one.token_versions) == (0.5, 3.0, 1.0, None)
    assert (tokenize.counts.sequences, tokenize.counts.turns) == (1, 2)


def test_a_template_that_strips_earlier_thinking_makes_two_sequences(kit):
    def answer(body):
        return "<hm>" + replies(body)

    results, _ = kit.run(
        talking(answer, keep=False, kit=kit), [Task(SYSTEM, rollout=two_turns, id="t")]
    )
    (sample,) = results.samples
    assert [turn.continues for turn in sample.turns] == [
        None,
        None,
    ] and results.stats.num_breaks == 1
    # The messages go on; the tokens do not.
    assert [turn.follows for turn in sample.turns] == [-1, 0]
    tokenize = TaskResultTokenizer()
    first, second = tokenize(results[0], [0.5])
    conversation = sample.sent(1)
    assert first.token_ids == [*rendered(conversation[:2]), *map(ord, "<hm>one"), EOS]
    assert second.token_ids == [*rendered(conversation, keep=False), *map(ord, "<hm>two"), EOS]
    for one, text in ((first, "<hm>one"), (second, "<hm>two")):
        kept = [i for i, trained in zip(one.token_ids, one.assistant_mask, strict=True) if trained]
        assert kept == [*map(ord, text), EOS] and one.logprobs[
            one.prompt_length :
        ] == kit.expected_logprobs(text)
    assert (first.share, second.share, first.sample, second.sample) == (0.5, 0.5, 0, 0)
    assert tokenize.counts.sequences == 2


def test_branches_of_one_conversation_train_the_common_turn_once(kit):
    async def branching(chat):
        await chat("begin")
        other = chat.copy()
        await asyncio.gather(chat("left"), other("right"))
        await other("on")
        return 1.0

    def answer(body):
        return body["messages"][-1]["content"].upper()

    results, _ = kit.run(talking(answer, kit=kit), [Task(SYSTEM, rollout=branching, id="t")])
    (sample,) = results.samples
    assert [(turn.follows, turn.continues) for turn in sample.turns] == [
        (-1, None),
        (0, 0),
        (0, 0),
        (2, 2),
    ]
    assert sample.sent(3) == [
        *SYSTEM,
        *[
            {"role": role, "content": text}
            for role, text in zip(
                ["user", "assistant"] * 3, ["begin", "BEGIN", "right", "RIGHT", "on"], strict=False
            )
        ],
    ]
    left, right = TaskResultTokenizer()(results[0], [1.0])

    def trained(one):
        return "".join(
            chr(i) for i, kept in zip(one.token_ids, one.assistant_mask, strict=True) if kept
        )

    assert [trained(left), trained(right)] == ["BEGIN\0LEFT\0", "RIGHT\0ON\0"]
    assert (
        left.share + right.share == pytest.approx(1)
        and left.token_ids[: right.prompt_length][:15] == right.token_ids[:15]
    )


def test_other_conversations_of_the_same_sample(kit):
    async def with_helper(chat):
        await chat("begin")
        helper = chat.copy([{"role": "user", "content": "help"}])
        reply = await helper()
        await chat(reply.message.content)
        chat.messages[:] = [*SYSTEM, {"role": "user", "content": "forget it"}]
        await chat()

    seen = []

    def grader(choice):
        seen.append(choice)
        return 0.5

    results, _ = kit.run(
        talking(replies, kit=kit), [Task(SYSTEM, grader, rollout=with_helper, id="t")]
    )
    (sample,) = results.samples
    assert [turn.follows for turn in sample.turns] == [-1, None, 0, -1]
    assert [turn.continues for turn in sample.turns] == [None, None, 0, None]
    assert sample.reward == 0.5 and [m["content"] for m in seen[0].messages] == [
        "You count.",
        "forget it",
        "one",
    ]
    text = sample_text(sample)
    assert (
        "turn 1: another conversation" in text
        and text.count("help") == 1
        and "turn 2: answer (stop, 4 tokens)" in text
    )


def test_the_grader_is_given_the_last_choice_and_the_conversation(kit):
    given = []

    def grader(choice):
        given.append(choice)
        return float(choice.messages[-1]["content"] == choice.message.content == "two")

    async def quiet(chat):
        await two_turns(chat)

    results, _ = kit.run(talking(replies, kit=kit), [Task(SYSTEM, grader, rollout=quiet, id="t")])
    (sample,) = results.samples
    assert sample.reward == 1.0 and [m["role"] for m in given[0].messages][-2:] == [
        "user",
        "assistant",
    ]
    again = choice_of_sample(Sample.from_json(sample.to_json()))
    for choice in (given[0], again):
        assert choice.token_ids == [*map(ord, "two"), EOS] and choice.finish_reason == "stop"
        assert [entry.logprob for entry in choice.logprobs.content] == kit.expected_logprobs("two")
        assert choice.messages == given[0].messages
        assert [len(turn["messages"]) for turn in choice.turns] == [3, 5] and choice.turns[-1][
            "messages"
        ] == choice.messages
        assert choice.turns[0] == {
            "messages": choice.messages[:3],
            "tools": None,
            "finish_reason": "stop",
        }
    # As graders in processes of their own are given it.
    sent = choice_from_json(choice_to_json(given[0]))
    assert (sent.messages, sent.turns) == (
        given[0].messages,
        given[0].turns,
    ) and sent.message.content == "two"


def grade_messages(choice):
    return len(choice.messages)


def test_tools_are_called_and_their_results_are_not_trained(kit):
    tool = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
    }
    seen = []

    def behaviour(body, attempt):
        seen.append(body)
        prompt = rendered(body["messages"])
        if len(seen) == 1:
            message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [call],
                "reasoning": "I add",
            }
            choice = kit.choice(0, "call", message=message, finish_reason="tool_calls")
        else:
            choice = kit.choice(0, "3")
        return kit.completion([choice], prompt_token_ids=prompt)

    async def use(chat):
        choice = await chat("1 + 2?", tools=[tool])
        (asked,) = choice.message.tool_calls
        assert asked.function.name == "add"
        choice = await chat({"role": "tool", "tool_call_id": asked.id, "content": "3"})
        return float(choice.message.content)

    results, _ = kit.run(behaviour, [Task(SYSTEM, rollout=use, id="t")])
    (sample,) = results.samples
    assert sample.reward == 3.0 and [turn.finish_reason for turn in sample.turns] == [
        "tool_calls",
        "stop",
    ]
    assert seen[0]["tools"] == seen[1]["tools"] == [tool] == sample.turns[1].tools
    reply = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "I add"}
    assert seen[1]["messages"][2] == reply == sample.turns[0].reply
    assert (
        seen[1]["messages"][3]
        == {"role": "tool", "tool_call_id": "c1", "content": "3"}
        == sample.turns[1].messages[0]
    )
    assert "add" in sample_text(sample) and "I add" in sample_text(sample)


def test_nulls_are_sent_to_no_server(kit):
    """Such as `message.model_dump()`, or rows of a data set, hold."""
    function = {"name": "add", "arguments": '{"a": null}'}
    call = {"id": "c1", "type": "function", "function": function}

    def tool(**nulls):
        properties = {"a": {"type": "number", **nulls}, **nulls}
        described = {"name": "add", "parameters": {"type": "object", "properties": properties}}
        return {"type": "function", "function": {**described, **nulls}}

    filled = tool(b=None, default=None)
    told = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"}]}
    seen = []

    def behaviour(body, attempt):
        seen.append(body)
        message = {"role": "assistant", "content": None, "tool_calls": [{**call, "index": None}]}
        choice = kit.choice(0, "call", message=message) if len(seen) == 1 else kit.choice(0, "3")
        return kit.completion([choice], prompt_token_ids=[len(seen)])

    async def use(chat):
        choice = await chat("1 + 2?", tools=[filled])
        chat.messages[-1] = choice.message.model_dump()
        assert chat.messages[-1]["refusal"] is None
        await chat({**told, "content": [{**told["content"][0], "image_url": None}], "name": None})
        return 1.0

    messages = [{**SYSTEM[0], "name": None}]
    params = {"tools": [filled], "temperature": None}
    results, _ = kit.run(behaviour, [Task(messages, rollout=use, id="t")], params=params)
    (sample,) = results.samples
    assert sample.error is None
    assert [body["tools"] for body in seen] == [[tool()]] * 2
    asked = {"role": "user", "content": "1 + 2?"}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert seen[0]["messages"] == [*SYSTEM, asked]
    assert seen[1]["messages"] == [*SYSTEM, asked, said, told]
    # What is compared and kept is what was sent: the second turn follows the first.
    assert [turn.follows for turn in sample.turns] == [-1, 0] and sample.turns[0].reply == said


def test_parts_that_are_no_text_cost_the_sample(kit):
    async def show(chat):
        picture = {"type": "image_url", "image_url": {"url": "x"}}
        await chat({"role": "user", "content": [{"type": "text", "text": "Look"}, picture]})

    results, _ = kit.run(talking(replies, kit=kit), [Task(SYSTEM, rollout=show, id="t")])
    (sample,) = results.samples
    assert (
        "message 1 holds a part of type 'image_url'; send text only: the policy trains"
        in sample.error
    )


def test_what_a_rollout_does_to_its_messages_changes_no_earlier_turn(kit):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    seen = []

    def behaviour(body, attempt):
        seen.append(body)
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = kit.choice(0, "call", message=message) if len(seen) == 1 else kit.choice(0, "3")
        return kit.completion([choice], prompt_token_ids=rendered(body["messages"]))

    async def rewriting(chat):
        await chat("1 + 2?")
        chat.messages[-1]["tool_calls"][0]["function"]["arguments"] = "{}"
        await chat({"role": "tool", "tool_call_id": "c1", "content": "3"})
        return 1.0

    results, _ = kit.run(behaviour, [Task(SYSTEM, rollout=rewriting, id="t")])
    (sample,) = results.samples
    assert sample.turns[0].reply["tool_calls"] == [call] and sample.turns[1].follows == -1
    assert (
        sample.sent(1) == seen[1]["messages"]
        and seen[1]["messages"][2]["tool_calls"][0]["function"]["arguments"] == "{}"
    )


@pytest.mark.parametrize("arguments", [{}, {"params": {"seed": 1}}])
def test_a_chat_is_numbered_as_its_sample(kit, arguments):
    """Also where other tasks have the same messages: by these numbers a game can be played again
    from what was kept.
    """
    seen = []

    async def numbered(chat):
        await chat("begin")
        seen.append((chat.task_id, chat.sample))
        return 1.0

    tasks = [Task(SYSTEM, rollout=numbered, id=name) for name in "ab"]
    results, _ = kit.run(talking(replies, kit=kit), tasks, n=2, **arguments)
    assert sorted(seen) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert [(sample.task_id, sample.sample) for sample in results.samples] == sorted(seen)


def test_the_examples_of_the_guide(kit):
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "conversations.md").read_text()
    game, tool, *_ = (block.split("```")[0] for block in guide.split("```python\n")[1:])
    names = {}
    exec(game, names)

    def guessing(body):
        """5, then one step in the direction of the hint."""
        told = [message["content"] for message in body["messages"][1:] if message["role"] == "user"]
        return str(5 + sum({"higher": 1, "lower": -1}[hint] for hint in told))

    results, _ = kit.run(talking(guessing, kit=kit), names["tasks"])
    expected = [(1.0, abs(n - 5) + 1) if abs(n - 5) < 4 else (0.0, 4) for n in range(10)]
    assert [(sample.reward, len(sample.turns)) for sample in results.samples] == expected

    def behaviour(body, attempt):
        call = {
            "id": "c1",
            "type": "function",
            "function": {"name": "multiply", "arguments": '{"a": 20, "b": 31}'},
        }
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = kit.choice(
            0,
            "It is 620.",
            **({"message": message} if body["messages"][-1]["role"] == "user" else {}),
        )
        return kit.completion([choice], prompt_token_ids=rendered(body["messages"]))

    names = {}
    exec(tool, names)  # it needs nothing of the first
    results, _ = kit.run(behaviour, names["tasks"][:2])
    assert [sample.reward for sample in results.samples] == [0.0, 1.0]
    assert results.samples[0].turns[1].messages == [
        {"role": "tool", "tool_call_id": "c1", "content": "620"}
    ]
    assert names["run"]("none").startswith("error: ")


# What goes wrong


async def raising(chat):
    await chat("begin")
    raise KeyError("move")


async def silent(chat):
    return 1.0


async def no_number(chat):
    await chat("begin")
    return "good"


async def no_reward(chat):
    await chat("begin")


async def no_answer(chat):
    await chat("no answer")


async def slow(chat):
    await chat("begin")
    await asyncio.sleep(60)


class OwnError(BaseException):
    """As some libraries have for what `except Exception` must not catch."""


async def beyond_exceptions(chat):
    await chat("begin")
    raise OwnError("stop")


async def beyond_floats(chat):
    await chat("begin")
    return 10**400


async def beyond_words(chat):
    await chat("begin")
    return 1.0, {"digits": 10**5000}


async def both_at_once(chat):
    await asyncio.gather(chat("a"), chat("b"))


async def cancelled(chat):
    await chat("begin")
    raise asyncio.CancelledError


def no_coroutine(chat):
    return 1.0


async def nothing_to_answer(chat):
    chat.messages.clear()
    await chat()


def test_rollouts_that_fail_cost_their_samples_alone(kit):
    cases = [
        (raising, r"RolloutError: PLACE: the rollout raised KeyError: 'move'\n.*in raising", 1),
        (silent, "RolloutError: PLACE: the rollout ended without asking the model", 0),
        (
            no_number,
            "GraderError: PLACE: the rollout returned 'good'; a rollout must return a finite number",
            1,
        ),
        (
            no_reward,
            "GraderError: PLACE: the rollout returned no reward, and the task has no grader",
            1,
        ),
        (beyond_exceptions, "RolloutError: PLACE: the rollout raised .*OwnError: stop", 1),
        (
            beyond_floats,
            "GraderError: PLACE: the rollout returned 1000.*; a rollout must return a finite number",
            1,
        ),
        (
            beyond_words,
            "GraderError: PLACE: the rollout's metric 'digits' is a value of type int; it must "
            "be a finite number",
            1,
        ),
        (
            both_at_once,
            "RolloutError: this chat is waiting for a reply; for requests at the same time, use a "
            "copy",
            0,
        ),
        (cancelled, "RolloutError: PLACE: the rollout raised .*CancelledError", 1),
        (
            no_coroutine,
            "RolloutError: PLACE: the rollout is not a coroutine function; write it as async def",
            0,
        ),
        (nothing_to_answer, "RolloutError: PLACE: there are no messages to answer", 0),
    ]
    tasks = [
        Task(SYSTEM, rollout=rollout, id=rollout.__name__)
        for rollout in (two_turns, *(case[0] for case in cases))
    ]
    results, _ = kit.run(talking(replies, kit=kit), tasks)
    good, *bad = results.samples
    assert good.reward == 3.0
    for sample, (rollout, message, turns) in zip(bad, cases, strict=True):
        pattern = message.replace("PLACE", f"task '{rollout.__name__}', sample 0")
        assert re.match(pattern, sample.error, re.DOTALL), sample.error
        assert sample.reward is None and len(sample.turns) == turns
        assert Sample.from_json(sample.to_json()).turns == sample.turns
    assert results.stats.num_failed == len(cases) == sum(results.stats.exceptions.values())
    results.raise_if_all_failed()


@pytest.mark.parametrize(
    ("rollouts", "kind", "message"),
    [
        (
            [no_number, no_reward],
            GraderError,
            "all 2 samples of 2 tasks failed, 1 of them with: GraderError: ",
        ),
        (
            [no_number, raising, raising],
            RolloutError,
            "all 3 samples of 3 tasks failed, 2 of them with: RolloutError: .*in raising",
        ),
        (
            [raising, no_answer],
            ServerError,
            "all 2 samples of 2 tasks failed, 1 of them with: RolloutError: ",
        ),
    ],
)
def test_where_all_fail_it_is_said_whose_fault_it_is(kit, rollouts, kind, message):
    def answer(body):
        return kit.error(422, "no") if body["messages"][-1]["content"] == "no answer" else "one"

    tasks = [
        Task(SYSTEM, rollout=rollout, id=str(number)) for number, rollout in enumerate(rollouts)
    ]
    results, _ = kit.run(talking(answer, kit=kit), tasks)
    with pytest.raises(kind, match=re.compile(message, re.DOTALL)):
        results.raise_if_all_failed()


def test_graders_that_fail_cost_their_samples_alone(kit):
    async def aborting(choice):
        raise OwnError("stop")

    async def quiet(chat):
        await two_turns(chat)

    tasks = [
        Task(SYSTEM, grader, rollout=quiet, id=name)
        for name, grader in (("a", aborting), ("b", lambda choice: 10**400))
    ]
    tasks += [Task(SYSTEM, aborting, id="single"), Task(SYSTEM, rollout=two_turns, id="good")]
    results, _ = kit.run(talking(replies, kit=kit), tasks)
    aborted, huge, single, good = results.samples
    assert (
        aborted.error.startswith("GraderError: task 'a', sample 0: the grader raised")
        and "OwnError: stop" in aborted.error
    )
    assert huge.error.startswith("GraderError: task 'b', sample 0: the grader returned 1000")
    assert single.error.startswith("GraderError: task 'single'") and good.reward == 3.0


def test_a_rollout_that_hangs(kit):
    tasks = [
        Task(SYSTEM, rollout=slow, id="t", limits=RolloutLimits(seconds=0.2)),
        Task(SYSTEM, rollout=two_turns, id="good"),
    ]
    results, _ = kit.run(talking(replies, kit=kit), tasks)
    bad, good = results.samples
    assert bad.error.startswith(
        "RolloutError: task 't', sample 0: the rollout worked for more than 0.2 s between two "
        "requests"
    )
    assert good.reward == 3.0


def test_the_models_time_is_not_the_rollouts(kit):
    chats, limits = [], []

    async def watched(chat):
        chats.append(chat)
        limits.append(chat._ask.__self__._clock.when())
        await chat("begin")
        limits.append(chat._ask.__self__._clock.when())
        return 1.0

    def answer(body):
        limits.append(chats[0]._ask.__self__._clock.when())
        return "one"

    kit.run(talking(answer, kit=kit), [Task(SYSTEM, rollout=watched, id="t")])
    before, during, after = limits
    assert during is None and after >= before


def test_a_server_that_fails_for_good_costs_the_sample_unless_it_is_caught(kit):
    def answer(body):
        return kit.error(422, "no") if len(body["messages"]) > 2 else "one"

    async def careful(chat):
        await chat("begin")
        try:
            await chat("more")
        except RequestError as error:
            return float(error.status)

    results, _ = kit.run(
        talking(answer, kit=kit),
        [Task(SYSTEM, rollout=two_turns, id="t"), Task(SYSTEM, rollout=careful, id="careful")],
    )
    bad, caught = results.samples
    assert (
        bad.error.startswith("RequestError")
        and "no" in bad.error
        and bad.finish_reason is None
        and len(bad.turns) == 1
    )
    assert caught.reward == 422.0 and caught.error is None and len(caught.turns) == 1


def test_a_request_is_tried_again_as_any_other(kit):
    def behaviour(body, attempt):
        return kit.error(503) if attempt == 1 else talking(replies, kit=kit)(body, attempt)

    results, server = kit.run(behaviour, [Task(SYSTEM, rollout=two_turns, id="t")])
    assert results.samples[0].reward == 3.0 and len(server.requests) == 4


async def endless(chat):
    while True:
        await chat("more")


async def stubborn(chat):
    while True:
        try:
            await chat("more")
        except Exception:  # noqa: BLE001 - as people write it
            continue


@pytest.mark.timeout(30)
def test_a_rollout_that_asks_on_at_its_limit_holds_up_nobody(kit):
    tasks = [Task(SYSTEM, rollout=stubborn, id="t", limits=RolloutLimits(turns=1, seconds=0.2))]
    results, _ = kit.run(
        talking(replies, kit=kit), [*tasks, Task(SYSTEM, rollout=two_turns, id="good")]
    )
    bad, good = results.samples
    assert bad.error.startswith(
        "RolloutError: task 't', sample 0: the rollout worked for more than 0.2 s"
    )
    assert good.reward == 3.0


@pytest.mark.parametrize(
    ("limits", "turns", "finish_reason", "said"),
    [
        (RolloutLimits(turns=2), 2, "max_turns", "its limit of 2 turns"),
        (RolloutLimits(tokens=7), 2, "length", "its limit of 7 tokens"),
    ],
)
def test_limits_end_a_rollout_which_is_graded_as_it_is(kit, limits, turns, finish_reason, said):
    seen = []
    tasks = [
        Task(
            SYSTEM, lambda choice: len(choice.messages), rollout=endless, id="graded", limits=limits
        ),
        Task(SYSTEM, rollout=endless, id="not", limits=limits),
    ]
    results, _ = kit.run(talking(replies, kit=kit, seen=seen), tasks, params={"max_tokens": 5})
    graded, without = results.samples
    assert (
        graded.reward == 1 + 2 * turns
        and graded.finish_reason == finish_reason
        and len(graded.turns) == turns
    )
    assert graded.turns[-1].finish_reason == "stop"
    assert without.reward is None and without.error.startswith(
        "RolloutLimitError: task 'not', sample 0: the rollout reached its limit"
    )
    assert said in without.error and len(without.turns) == turns
    if limits.tokens:
        assert {body["max_tokens"] for body in seen} == {5, 3}


@pytest.mark.parametrize("hangs", ["model", "tool"])
def test_seconds_of_the_whole_rollout_end_it_wherever_it_is(kit, hangs):
    async def rollout(chat):
        await chat("begin")
        if hangs == "tool":
            await asyncio.Event().wait()
        await chat("more")

    async def never():
        await asyncio.Event().wait()

    def behaviour(body, attempt):
        return never() if len(body["messages"]) > 2 else talking(replies, kit=kit)(body, attempt)

    limits = RolloutLimits(total_seconds=0.3)
    tasks = [
        Task(SYSTEM, len_of_turns, rollout=rollout, id="graded", limits=limits),
        Task(SYSTEM, rollout=rollout, id="not", limits=limits),
    ]
    graded, without = kit.run(behaviour, tasks)[0].samples
    assert (graded.error, graded.reward, graded.finish_reason) == (None, 1.0, "max_seconds")
    assert (
        without.error
        == "RolloutLimitError: task 'not', sample 0: the rollout reached its limit of 0.3 s"
    )
    with pytest.raises(TaskError, match="total_seconds is 0"):
        RolloutLimits(total_seconds=0)


def len_of_turns(choice):
    return float(len(choice.turns))


def test_a_limit_can_be_caught(kit):
    async def careful(chat):
        try:
            await endless(chat)
        except RolloutLimitError as limit:
            return 1.0, {limit.limit: 1.0}

    results, _ = kit.run(
        talking(replies, kit=kit),
        [Task(SYSTEM, rollout=careful, id="t", limits=RolloutLimits(turns=1))],
    )
    assert (
        results.samples[0].metrics == {"turns": 1.0} and results.samples[0].finish_reason == "stop"
    )


TOO_LONG = "This model's maximum context length is 40 tokens. However, you requested 50 tokens"


def test_a_full_context_ends_it(kit):
    """The fake server knows no /tokenize: it is told where there is room."""

    def answer(body):
        return kit.error(400, TOO_LONG) if len(body["messages"]) > 2 else "one"

    tasks = [
        Task(SYSTEM, lambda choice: 0.25, rollout=two_turns, id="t"),
        Task(SYSTEM, rollout=two_turns, id="not"),
    ]
    results, _ = kit.run(talking(answer, kit=kit), tasks)
    graded, without = results.samples
    assert (graded.reward, graded.finish_reason, len(graded.turns)) == (0.25, "length", 1)
    assert without.error.startswith(
        "RolloutLimitError: task 'not', sample 0: the conversation fills the model's context: "
    )
    full, _ = kit.run(talking(lambda body: kit.error(400, TOO_LONG), kit=kit), tasks)
    assert {sample.error.split(":")[0] for sample in full.samples} == {"RolloutLimitError"}


EXACT_FIT = "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"


def test_a_prompt_that_fills_the_context_exactly_ends_it(kit):
    def answer(body):
        if "stream" not in body:  # /tokenize
            return kit.Reply({"count": 40, "max_model_len": 40})
        return kit.error(400, EXACT_FIT) if len(body["messages"]) > 2 else "one"

    tasks = [Task(SYSTEM, lambda choice: 0.25, rollout=two_turns, id="t")]
    (sample,) = kit.run(talking(answer, kit=kit), tasks)[0].samples
    assert (sample.error, sample.reward, sample.finish_reason) == (None, 0.25, "length")


def test_the_user_s_own_max_tokens_of_0_is_no_full_context(kit):
    tasks = [Task(SYSTEM, lambda choice: 0.25, rollout=two_turns, id="t")]
    refuse = talking(lambda body: kit.error(400, EXACT_FIT), kit=kit)
    params = {"extra_body": {"max_tokens": 0}}
    (sample,) = kit.run(refuse, tasks, params=params)[0].samples
    assert sample.error.startswith("RequestError") and "at least 1, got 0" in sample.error


def test_a_shorter_answer_is_asked_for_where_there_is_room(kit):
    seen = []

    def answer(body):
        if "max_tokens" not in body:  # /tokenize
            return kit.Reply({"count": 31, "max_model_len": 40})
        return kit.error(400, TOO_LONG) if body["max_tokens"] > 9 else replies(body)

    tasks = [Task(SYSTEM, rollout=two_turns, id="t")]
    results, _ = kit.run(talking(answer, kit=kit, seen=seen), tasks, params={"max_tokens": 50})
    assert (
        results.samples[0].reward == 3.0
        and [body.get("max_tokens") for body in seen] == [50, None, 9] * 2
    )


@pytest.mark.parametrize(
    ("status", "said", "tokenized", "room"),
    [
        (400, TOO_LONG, {"count": 31, "max_model_len": 40}, 9),
        (
            400,
            "the request exceeds the available context size",
            {"count": 41, "max_model_len": 40},
            0,
        ),
        (400, "max_tokens must be at least 1, got 0.", {"count": 40, "max_model_len": 40}, 0),
        (400, TOO_LONG, {"count": "31"}, 0),
        (400, TOO_LONG, [31, 40], 0),
        (413, TOO_LONG, None, 0),
        (400, "no such model", {"count": 31, "max_model_len": 40}, None),
        (500, TOO_LONG, {"count": 31, "max_model_len": 40}, None),
    ],
)
def test_how_much_room_a_conversation_leaves(status, said, tokenized, room):
    asked = []

    class Fake:
        async def post(self, path, body, *, root):
            asked.append((path, body, root))
            if tokenized is None:
                raise RequestError("no such page", "status", status=404)
            return json.dumps(tokenized).encode()

    request = ChatRequest.of(
        "m", params={"tools": [{"type": "function"}], "top_p": 0.9}, token_ids=True
    )
    found = asyncio.run(
        room_left(RequestError(said, "status", status=status), Fake(), request, SYSTEM)
    )
    assert found == room
    if room is not None:
        assert asked == [
            ("/tokenize", {"tools": [{"type": "function"}], "model": "m", "messages": SYSTEM}, True)
        ]


def test_requests_that_a_rollout_leaves_behind_are_ended(kit, tmp_path):
    left, seen, log = [], [], tmp_path / "requests.jsonl"

    async def careless(chat):
        await chat("begin")
        left.append(asyncio.create_task(chat.copy()("more")))
        await asyncio.sleep(0.05)
        return 1.0

    async def answer(body):
        if len(body["messages"]) > 2:
            await asyncio.sleep(30)
        return talking(replies, kit=kit)(body, 1)

    def on_task_done(result):
        seen.append(left[0].done() or left[0].cancelling() > 0)

    tasks = [Task(SYSTEM, rollout=careless, id="t")]
    results, _ = kit.run(
        lambda body, attempt: answer(body), tasks, on_task_done=on_task_done, requests_log=log
    )
    assert (
        results.samples[0].reward == 1.0 and len(results.samples[0].turns) == 1 and seen == [True]
    )
    # As if nobody had asked for what nobody waited for.
    (row,) = map(json.loads, log.read_text().splitlines())
    assert row["completion_tokens"] == 4 and row["error"] is None


def test_cancelling_the_call_cancels_its_rollouts(kit):
    cleaned = []

    async def waiting(chat):
        try:
            await chat("begin")
            await asyncio.Event().wait()
        finally:
            cleaned.append(chat.sample)

    async def main():
        async with kit.serving(talking(replies, kit=kit)) as server, server.client() as client:
            tasks = [Task(SYSTEM, rollout=waiting, id="t")]
            call = asyncio.create_task(get_task_results(tasks, client, "m", n=3, pbar=False))
            while server.answered < 3:
                await asyncio.sleep(0.005)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    asyncio.run(main())
    assert sorted(cleaned) == [0, 1, 2]


def test_a_token_budget_is_refused(kit):
    with pytest.raises(
        TaskError, match="task 't' has a rollout, and a token budget cannot cut off a rollout"
    ):
        kit.run(
            talking(replies, kit=kit), [Task(SYSTEM, rollout=two_turns, id="t")], token_budget=100
        )


# Cache, logs, seeds


def test_every_turn_of_every_sample_has_a_cache_entry_of_its_own(kit, tmp_path):
    arguments = {
        "n": 2,
        "cache": tmp_path / "cache",
        "weights_digest": "w",
        "requests_log": tmp_path / "requests.jsonl",
    }

    async def twice_the_same(chat):
        await two_turns(chat)
        await chat.copy([{"role": "user", "content": "again"}])()
        await chat.copy([{"role": "user", "content": "again"}])()
        return 1.0

    tasks = [Task(SYSTEM, rollout=twice_the_same, id="t")]
    first, server = kit.run(talking(replies, kit=kit), tasks, **arguments)
    assert len(server.requests) == 8 and first.stats.new_completion_tokens == 32
    again, server = kit.run(talking(replies, kit=kit), tasks, **arguments)
    assert (
        server.requests == []
        and again.stats.num_cached == 2
        and again.stats.new_completion_tokens == 0
    )
    assert again.stats.completion_tokens == 32 and again.stats.new_prompt_tokens == 0
    for a, b in zip(first.samples, again.samples, strict=True):
        assert (a.token_ids, a.logprobs, a.reward) == (b.token_ids, b.logprobs, b.reward)
        assert all(turn.cached for turn in b.turns)
    more, server = kit.run(talking(replies, kit=kit), tasks, **{**arguments, "n": 3})
    assert len(server.requests) == 4 and more.stats.num_cached == 2
    lines = (tmp_path / "requests.jsonl").read_text().splitlines()
    assert len(lines) == 8 + 8 + 12
    rows = [json.loads(line) for line in lines[:8]]
    assert len({(row["digest"], *row["samples"]) for row in rows}) == 8 and not any(
        row["hit"] for row in rows
    )


def test_seeds_differ_between_turns_and_samples(kit):
    seen = []

    async def begins_as_given(chat):
        await chat()
        return await two_turns(chat)

    kit.run(
        talking(replies, kit=kit, seen=seen),
        [Task(SYSTEM, rollout=begins_as_given, id="t")],
        n=3,
        params={"seed": 5},
    )
    seeds = [body["seed"] for body in seen]
    assert len(set(seeds)) == 9 and all(0 <= seed < 2**63 for seed in seeds)
    # As without a rollout.
    assert {body["seed"] for body in seen if body["messages"] == SYSTEM} == {5, 6, 7}


def test_servers_without_ids(kit):
    results, _ = kit.run(
        talking(replies, kit=kit), [Task(SYSTEM, rollout=two_turns, id="t")], token_ids=False
    )
    (sample,) = results.samples
    assert sample.token_ids is None and sample.logprobs == kit.expected_logprobs(
        "one"
    ) + kit.expected_logprobs("two")
    # Not known.
    assert [turn.num_tokens for turn in sample.turns] == [4, 4] and results.stats.num_breaks == 0
    assert sample.logprob_tokens == [*"one", "\0", *"two", "\0"]
    assert Sample.from_json(sample.to_json()) == sample


def test_tokens_of_logprobs_are_kept_where_all_turns_have_them(kit):
    """Otherwise one turn's would be read as another's."""

    def behaviour(body, attempt):
        reply = talking(replies, kit=kit)(body, attempt)
        if len(body["messages"]) == 2:
            for entry in reply.body["choices"][0]["logprobs"]["content"]:
                del entry["token"], entry["bytes"]
        return reply

    results, _ = kit.run(behaviour, [Task(SYSTEM, rollout=two_turns, id="t")], token_ids=False)
    (sample,) = results.samples
    assert len(sample.logprobs) == 8 and sample.logprob_tokens is None


def test_one_sample_is_kept_with_its_tokens_strings(kit):
    """To be checked against its ids, as of tasks without a rollout."""
    tasks = [Task(SYSTEM, rollout=two_turns, id=name) for name in "ab"]
    results, _ = kit.run(talking(replies, kit=kit), tasks, n=2)
    assert [sample.logprob_tokens for sample in results.samples] == [
        [*"one", "\0", *"two", "\0"],
        None,
        None,
        None,
    ]


def test_a_conversation_goes_before_those_that_are_not_begun(kit):
    """One request at a time: the second turn of the first sample is asked before the first turn of
    the third.
    """
    order = []

    def answer(body):
        order.append(sum(m["role"] == "assistant" for m in body["messages"]))
        return replies(body)

    kit.run(talking(answer, kit=kit), [Task(SYSTEM, rollout=two_turns, id="t")], n=4, concurrency=1)
    assert sorted(order) == [0] * 4 + [1] * 4 and order.index(1) <= 2, order


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": 3}, "rollout is 3; give a coroutine function"),
        ({"grader": None, "rollout": None}, "grader is None; give a function"),
        ({"limits": 3}, "limits is 3; give RolloutLimits"),
    ],
)
def test_tasks_that_cannot_be_sampled(changes, message):
    with pytest.raises(TaskError, match=message):
        Task(**{"messages": SYSTEM, "grader": grade_messages, "rollout": two_turns, **changes})


@pytest.mark.parametrize(
    "wrong",
    [
        {"turns": 0},
        {"turns": None},
        {"tokens": 0},
        {"turns": True},
        {"seconds": 0},
        {"seconds": math.inf},
    ],
)
def test_limits_that_are_none(wrong):
    (name,) = wrong
    with pytest.raises(TaskError, match=f"rollout limits: {name} is"):
        RolloutLimits(**wrong)
