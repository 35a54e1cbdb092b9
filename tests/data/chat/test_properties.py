"""Random conversations, against other ways to find the same mask: transformers' own, and looking
for unique words.
"""

import datetime
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrl.data.chat.rendering import ChatTemplate
from ttrl.data.chat.templates import tokenize_chat, tokenize_chat_turns
from ttrl.errors import TokenizationError

NOW = datetime.datetime(2024, 7, 26)
WRITTEN = [
    "plain",
    "trims",
    "instructs",
    "ends of text",
    "always asks",
    "two ends",
    "blanks",
    "dated",
    "tagged",
    "tagged too far",
]
OTHERS = ["thinks", "skips", "macros", "spaced", "text arguments", "parts"]

texts = st.text(
    alphabet=st.sampled_from("ab Z\n\t{}%#\"'\\<>|/[]=\u00e9\u4e16\u200d\U0001f600_"), max_size=12
) | st.sampled_from(
    [
        "",
        " ",
        "\n\n",
        "{{ x }}",
        "{% endfor %}",
        "<think>",
        "</think>",
        "<|im_end|>",
        "[/INST]",
        "</s>",
        "<tool_call>",
        '{"a": 1}',
    ]
)


@st.composite
def conversations(draw, *, tools):
    """Messages in any order that begins with no assistant; each assistant's has a word of its
    own.
    """
    messages = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": f"{draw(texts)}u{turn}u{draw(texts)}"})
        if tools and draw(st.booleans()):
            call = {
                "name": "f",
                "arguments": {"x": f"w{turn}c" + draw(texts), "n": draw(st.integers(0, 9))},
            }
            messages.append(
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"type": "function", "function": call}],
                }
            )
            messages.append({"role": "tool", "content": draw(texts)})
        messages.append({"role": "assistant", "content": f"{draw(texts)}w{turn}w{draw(texts)}"})
    return messages


def checked(tokenizer, messages, trained):
    """Everything that must hold for any template; the sequences."""
    template = ChatTemplate(tokenizer, None, NOW)
    prepared = template.prepared(messages)
    try:
        chats = tokenize_chat_turns(tokenizer, messages, now=NOW)
    except TokenizationError as error:
        assert re.search("the chat template of the tokenizer", str(error))
        return []
    seen = []
    for chat in chats:
        found = trained(tokenizer, chat)
        seen += found
        assert (
            chat.token_ids == tokenizer(chat.text, add_special_tokens=False)["input_ids"]
            or chat.splits
        )
        for message, text in found.items():
            # it begins where the prompt that a server is sent ends, and ends with the only
            # end-of-turn token in it
            prompt = template.render(prepared[:message], answer_next=True)
            start = next(turn.start for turn in chat.turns if turn.message == message)
            assert tokenizer.decode(chat.token_ids[:start]) == prompt
            end = next(
                token for token in ("<|im_end|>", "<|final|>", "</s>") if text.endswith(token)
            )
            assert text.count(end) == 1
            words = re.findall(r"w\dw|w\dc", json.dumps(messages[message]))
            assert re.findall(r"w\dw|w\dc", text) == words and not re.search(r"u\du", text)
        if chat.tagged_template is not None:
            upto = prepared[: chat.turns[-1].message + 1]
            assert template.render(upto, answer_next=False).startswith(chat.text)
            if len(found) == len(chat.turns) and not chat.splits:
                theirs = tokenizer.apply_chat_template(
                    upto,
                    chat_template=chat.tagged_template,
                    return_assistant_tokens_mask=True,
                    return_dict=True,
                    strftime_now=NOW.strftime,
                )
                size = len(chat.token_ids)
                assert theirs["input_ids"][:size] == chat.token_ids
                assert theirs["assistant_masks"][:size] == [
                    int(mark) for mark in chat.assistant_mask
                ]
                assert not any(theirs["assistant_masks"][size:])
    assert len(seen) == len(set(seen))  # each turn once
    return chats


@pytest.mark.parametrize("template", [*WRITTEN, *OTHERS])
@settings(max_examples=25)
@given(data=st.data())
def test_random_conversations(tokenizer_of, trained, template, data):
    messages = data.draw(conversations(tools=template in ("instructs", "macros", "text arguments")))
    checked(tokenizer_of(template), messages, trained)


@pytest.mark.parametrize("template", WRITTEN)
def test_nothing_is_lost_where_nothing_stands_in_the_way(tokenizer_of, trained, template):
    """Plain conversations are trained whole, so that the properties above are not about nothing."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": '{% x %} "é\n\nw1w'},
    ] * 3
    (chat,) = checked(tokenizer_of(template), messages, trained)
    assert len(trained(tokenizer_of(template), chat)) == 3


@settings(max_examples=40)
@given(data=st.data())
def test_merged_tokens(tokenizer_of, trained, data):
    """With a tokenizer that merges across every border, prompts keep the ids that they have
    alone.
    """
    tokenizer = tokenizer_of(
        "blanks", merges=["]a", "\nw", " w", "w0", "]w", "] ", "  ", "u ", "t\n"]
    )
    messages = data.draw(conversations(tools=False))
    try:
        chat = tokenize_chat(tokenizer, messages)
    except TokenizationError:
        return
    assert tokenizer.decode(chat.token_ids) == chat.text
    first = next(turn for turn in chat.turns if turn.reason is None)
    template = ChatTemplate(tokenizer)
    prompt = template.render(template.prepared(messages)[: first.message], answer_next=True)
    assert chat.token_ids[: first.start] == tokenizer(prompt, add_special_tokens=False)["input_ids"]
    trained(tokenizer, chat)


@settings(max_examples=40)
@given(text=texts, before=texts)
def test_the_last_turn_alone(tokenizer_of, trained, text, before):
    tokenizer = tokenizer_of("plain")
    messages = [{"role": "user", "content": before}, {"role": "assistant", "content": text}]
    if "<|im_end|>" in text:
        with pytest.raises(TokenizationError, match="it also contains the end-of-turn token"):
            tokenize_chat(tokenizer, messages, turns="last")
        return
    assert trained(tokenizer, tokenize_chat(tokenizer, messages, turns="last")) == {
        1: text + "<|im_end|>"
    }
