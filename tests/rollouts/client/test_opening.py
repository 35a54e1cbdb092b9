"""What the prompt or the server holds of a reply reaches the grader: prefilled tags, thinking that
a parser took out.
"""

import asyncio
import gzip
import json

import pytest

from ttrl.records import Sample
from ttrl.rollouts.client.assembly import LiveCompletion
from ttrl.rollouts.client.choices import choice_of_sample, openai_choice, read_choice
from ttrl.rollouts.client.opening import prefilled, with_opening
from ttrl.rollouts.client.wire import Answer, decoded_chunk
from ttrl.rollouts.single import get_chat_completion
from ttrl.tasks import Task
from ttrl.tasks.gsm8k import GSM8KGrader
from ttrl.tasks.temporal_clue import TemporalClueGrader

CHATML = "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "continued", "expected"),
    [
        (CHATML, "", ""),
        (CHATML + "<think>", "", "<think>"),
        (CHATML + "<think>\n", "", "<think>\n"),
        ("<｜User｜>Hi<｜Assistant｜><think>\n", "", "<think>\n"),
        ("[INST] Hi [/INST] <think> ", "", "<think> "),
        (CHATML + "<think>\n\n</think>\n\n", "", ""),  # thinking switched off
        (CHATML + "<think>\nI am done.\n</think>\n\n", "", "<think>\nI am done.\n</think>\n\n"),
        (CHATML + "<think></think><answer>", "", "<think></think><answer>"),
        (CHATML + "<think>\nFirst,", "<think>\nFirst,", "<think>\nFirst,"),
        (CHATML + "<think>\nFirst,", "First,", "<think>\nFirst,"),
        (CHATML + "The answer", "The answer", "The answer"),
        ("Begin with <think>" + CHATML, "", ""),
        ("[INST] Write <think> or </think> [/INST]", "", ""),
        ("<think>old</think>no" + CHATML, "", ""),
        ("", "", ""),
    ],
)
def test_what_a_prompt_prefills(prompt, continued, expected):
    assert prefilled(prompt, continued) == expected


def opened(choice, prompt, parameters=None, messages=()):
    answer = Answer(json.dumps(choice).encode(), prompt_token_ids=[7], prompt_text=prompt)
    return with_opening(answer, messages, parameters or {})


def opening(choice, prompt, **request):
    return json.loads(opened(choice, prompt, **request).choice).get("opening")


def test_a_choice_says_how_its_turn_begins(kit):
    choice = kit.choice(0, "so</think>18")
    assert opening(choice, CHATML + "<think>\n") == "<think>\n"
    untouched = opened(choice, CHATML)
    assert untouched.choice == json.dumps(choice).encode() and untouched.prompt_text is None
    assert opening(choice, None) is None
    begun = {"role": "assistant", "content": "<think>Well"}
    request = {"parameters": {"continue_final_message": True}, "messages": [begun]}
    assert opening(choice, CHATML + "<think>Well", **request) == "<think>Well"


@pytest.mark.parametrize(
    ("prompt", "first", "content", "expected"),
    [
        (CHATML + "<think>\n", "so", "18", "<think>\nso</think>"),
        (CHATML, "<think>", "18", "<think>so</think>"),
        (CHATML, "so", "18", "so</think>"),  # a tag that nothing opened was closed
        (None, "so", "18", "<think>so</think>"),  # nothing is known but the server's word
        (CHATML, "so", "", "<think>so"),  # thinking without an end
        (CHATML, "so", None, "<think>so"),
    ],
)
@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_thinking_that_a_parser_took_out(kit, field, prompt, first, content, expected):
    choice = kit.choice(0, "x")
    choice["message"] |= {field: "so", "content": content}
    choice["logprobs"]["content"][0]["token"] = first
    assert opening(choice, prompt) == expected


def run(kit, content, prompt, grader, messages=None, *, streamed=False, **fields):
    """Sample one reply of a server that renders the prompt so; return its sample."""

    def behaviour(body, attempt):
        assert body["return_prompt_text"] is True
        choice = kit.choice(0, content)
        choice["message"] |= fields
        return kit.completion([choice], prompt_text=prompt)

    task = Task(messages or [{"role": "user", "content": "How many?"}], grader)
    watch = {"on_chunk": lambda chunk, completion: None} if streamed else {}
    results, _ = kit.run(behaviour, [task], n=1, **watch)
    return results[0].samples[0]


REPLY = "9 + 9</think>\n<answer>18</answer>"


@pytest.mark.parametrize("streamed", [False, True])
def test_format_counts_what_the_prompt_prefilled(kit, streamed):
    grader = GSM8KGrader(18, "r1", format_reward=0.5)
    sample = run(kit, REPLY, CHATML + "<think>\n", grader, streamed=streamed)
    assert (sample.error, sample.reward, sample.metrics["format"], sample.opening) == (
        None,
        1.0,
        1.0,
        "<think>\n",
    )
    again = Sample.from_json(json.loads(json.dumps(sample.to_json())))
    assert grader(choice_of_sample(again)) == (sample.reward, sample.metrics)


def test_a_tag_that_nothing_opened_earns_no_format(kit):
    grader = GSM8KGrader(18, "r1", format_reward=0.5)
    sample = run(kit, REPLY, CHATML, grader)
    assert (sample.reward, sample.metrics["format"], sample.opening) == (0.5, 0.0, "")
    assert "opening" not in sample.to_json()
    parsed = run(kit, "<answer>18</answer>", CHATML, grader, reasoning="9 + 9")
    assert (parsed.reward, parsed.metrics["format"]) == (0.5, 0.0)


def test_format_counts_thinking_that_the_server_took_out(kit):
    grader = GSM8KGrader(18, "r1", format_reward=0.5)
    sample = run(kit, "<answer>18</answer>", CHATML + "<think>\n", grader, reasoning="9 + 9")
    assert (sample.reward, sample.metrics["format"]) == (1.0, 1.0)
    again = Sample.from_json(json.loads(json.dumps(sample.to_json())))
    assert grader(choice_of_sample(again))[0] == 1.0


def test_thinking_that_the_prompt_opened_and_the_reply_never_ends_has_no_answer(kit):
    grader = GSM8KGrader(18, "r1", flexible=True)
    assert run(kit, "so <answer>18</answer>, or", CHATML + "<think>\n", grader).reward == 0.0
    assert run(kit, "so <answer>18</answer>, or", CHATML, grader).reward == 1.0


def test_the_end_of_the_answer_is_a_place_in_the_content(kit):
    grader = TemporalClueGrader({"A": "Bow"})
    for prompt in (CHATML, CHATML + "<think>\n"):
        sample = run(kit, "hm</think>\nA. Bow\nBye", prompt, grader)
        assert sample.text[: int(sample.metrics["answer_end"])] == "hm</think>\nA. Bow"


def test_a_prompt_that_is_no_chat(kit):
    def behaviour(body, attempt):
        choice = {"index": 0, "text": REPLY, "token_ids": [5], "finish_reason": "stop"}
        choice |= {"logprobs": {"tokens": ["x"], "token_logprobs": [-1.0]}, "prompt_token_ids": [7]}
        return kit.completion([choice])

    async def rollout(chat):
        await chat()

    grader = GSM8KGrader(18, "r1", format_reward=0.5)
    task = Task([{"role": "prompt", "content": "Assistant: <think>"}], grader, rollout=rollout)
    results, _ = kit.run(behaviour, [task], n=1)
    sample = results[0].samples[0]
    assert (sample.error, sample.reward, sample.opening) == (None, 1.0, "<think>")


def test_a_cache_keeps_the_opening_and_not_the_prompt(kit, tmp_path):
    def behaviour(body, attempt):
        return kit.completion([kit.choice(0, REPLY)], prompt_text=CHATML + "<think>\n")

    async def main():
        async with kit.serving(behaviour) as server:
            asked = {"token_ids": True, "cache": str(tmp_path), "weights_digest": "w"}
            url = f"http://127.0.0.1:{server.port}/v1"
            both = [
                await get_chat_completion(url, [{"role": "user", "content": "x"}], "m", **asked)
                for _ in range(2)
            ]
            return both, len(server.requests)

    both, asked = asyncio.run(main())
    assert asked == 1
    assert [completion.choices[0].opening for completion in both] == ["<think>\n"] * 2
    (entry,) = tmp_path.rglob("*.entry")
    stored = gzip.decompress(entry.read_bytes().partition(b"\n")[2])
    assert b"<think>" in stored and b"im_start" not in stored


def test_a_stream_renders_its_prompt_once():
    live = LiveCompletion()
    for part in (
        {"prompt_text": CHATML + "<think>", "delta": {"role": "assistant"}},
        {"delta": {"content": "a"}},
    ):
        chunk = {"choices": [{"index": 0, "delta": part.pop("delta"), "token_ids": [1]}], **part}
        live.take(decoded_chunk(json.dumps(chunk).encode(), "here"))
    (answer,) = live.answers()
    assert answer.prompt_text == CHATML + "<think>"
    assert openai_choice(with_opening(answer, (), {})).opening == "<think>"


def test_an_unreadable_choice_is_left_alone():
    for choice in (b"{}", b"null", b'{"message": {"reasoning": NaN}}', b'{"reasoning": 1'):
        answer = with_opening(Answer(choice, prompt_text=CHATML), (), {})
        assert answer.choice == choice
    read = Sample(task_id="t", sample=0, messages=[])
    good = opened({"message": {"content": "a"}, "token_ids": [1]}, CHATML + "<think>")
    read_choice(read, good, "there", token_ids=True, logprobs=False)
    assert read.opening == "<think>" == openai_choice(good).opening
