"""What the model wrote, for templates that make it hard to tell: one difficulty each."""

import datetime

import pytest

from ttrl.data.chat.templates import tokenize_chat, tokenize_chat_turns
from ttrl.errors import ModelFolderError, TokenizationError

Q1, Q2 = {"role": "user", "content": "One?"}, {"role": "user", "content": "Two?"}
A1, A2 = {"role": "assistant", "content": "First."}, {"role": "assistant", "content": "Second."}
SYSTEM = {"role": "system", "content": "Be short."}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"x": {"y": "a \\"b\\""}, "n": 1}'},
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "7"}
TWO_TURNS = [Q1, A1, Q2, A2]


@pytest.mark.parametrize(
    ("template", "turns"),
    [
        ("plain", ["First.<|im_end|>", "Second.<|im_end|>"]),
        ("trims", ["First.<|im_end|>", "Second.<|im_end|>"]),
        ("instructs", ["First.</s>", "Second.</s>"]),
        ("ends of text", ["First.<|im_end|>", "Second.<|im_end|>"]),
        ("always asks", ["First.<|im_end|>", "Second.<|im_end|>"]),
        ("two ends", ["<|say|>First.<|said|><|im_end|>", "<|say|>Second.<|said|><|im_end|>"]),
        ("blanks", [" First. </s>", " Second. </s>"]),
        ("dated", ["First.<|im_end|>", "Second.<|im_end|>"]),
        ("parts", ["First.<|im_end|>", "Second.<|im_end|>"]),
        ("tagged", ["First.<|im_end|>", "Second.<|im_end|>"]),
        ("tagged too far", ["First.<|im_end|>", "Second.<|im_end|>"]),
        ("spaced", ["First.<|im_end|>", "Second.<|im_end|>"]),
    ],
)
def test_all_turns_and_their_ends(tokenizer_of, trained, template, turns):
    tokenizer = tokenizer_of(template)
    # Its prompt and its answers differ in blanks: each turn is trained after the prompt as it is
    # sent.
    if template == "spaced":
        found = tokenize_chat_turns(tokenizer, TWO_TURNS)
        assert [trained(tokenizer, chat) for chat in found] == [{3: turns[1]}, {1: turns[0]}]
        assert all(chat.tagged_template is None for chat in found)
        return
    chat = tokenize_chat(tokenizer, TWO_TURNS)
    assert trained(tokenizer, chat) == {1: turns[0], 3: turns[1]} and not chat.untrained
    assert [len(found.turns) for found in tokenize_chat_turns(tokenizer, TWO_TURNS)] == [2]
    assert trained(tokenizer, tokenize_chat(tokenizer, TWO_TURNS, turns="last")) == {3: turns[1]}


def test_thinking_that_earlier_turns_lose_is_trained_in_a_sequence_of_its_own(
    tokenizer_of, trained
):
    tokenizer = tokenizer_of("thinks")
    messages = [
        Q1,
        A1 | {"reasoning_content": "Hm."},
        Q2,
        {"role": "assistant", "content": "<think>\nAh.\n</think>\n\nSecond."},
    ]
    chat = tokenize_chat(tokenizer, messages)
    assert trained(tokenizer, chat) == {3: "<think>\nAh.\n</think>\n\nSecond.<|im_end|>"}
    assert (
        "renders it differently once the conversation continues: 'First.<|im_end|>"
        in chat.untrained[0].reason
    )
    both = tokenize_chat_turns(tokenizer, messages)
    assert [trained(tokenizer, one) for one in both] == [
        trained(tokenizer, chat),
        {1: "<think>\nHm.\n</think>\n\nFirst.<|im_end|>"},
    ]
    # what the model sees of the earlier turn is what a server would show it
    assert tokenizer.decode(both[0].token_ids).count("Hm.") == 0


def test_thinking_that_the_prompt_skips_is_not_trained(tokenizer_of, trained):
    tokenizer = tokenizer_of("thinks")
    assert trained(tokenizer, tokenize_chat(tokenizer, [Q1, A1])) == {
        1: "<think>\n\n</think>\n\nFirst.<|im_end|>"
    }
    chat = tokenize_chat(tokenizer, [Q1, A1], enable_thinking=False)
    assert trained(tokenizer, chat) == {1: "First.<|im_end|>"} and chat.tagged_template


def test_an_answer_follows_the_prompt_as_it_is_sent(tokenizer_of, trained):
    """Where the template writes another prompt once it is answered."""
    tokenizer = tokenizer_of("skips")
    chat = tokenize_chat(tokenizer, [Q1, {"role": "assistant", "content": "\n First."}])
    assert trained(tokenizer, chat) == {1: "\n First.<|im_end|>"} and chat.tagged_template is None
    assert chat.text.endswith("assistant\n<think>\n\n</think>\n\n\n First.<|im_end|>")
    assert len(tokenize_chat_turns(tokenizer, TWO_TURNS)) == 2

    tokenizer = tokenizer_of("instructs")
    first, second = reversed(tokenize_chat_turns(tokenizer, [SYSTEM, *TWO_TURNS]))
    assert first.text == "<s>[INST]Be short.\n\nOne?[/INST]First.</s>"
    assert second.text == "<s>[INST]One?[/INST]First.</s>[INST]Be short.\n\nTwo?[/INST]Second.</s>"


@pytest.mark.parametrize("template", ["thinks", "plain"])
def test_blanks_around_an_answer(tokenizer_of, trained, template):
    texts = ["  First. \n", "\n\nSecond.\n"]
    messages = [
        Q1,
        {"role": "assistant", "content": texts[0]},
        Q2,
        {"role": "assistant", "content": texts[1]},
    ]
    tokenizer = tokenizer_of(template)
    ends = [text for text in trained(tokenizer, tokenize_chat(tokenizer, messages)).values()]
    assert ends[-1].endswith(texts[1] + "<|im_end|>")
    assert trained(tokenizer_of("trims"), tokenize_chat(tokenizer_of("trims"), messages)) == {
        1: "First.<|im_end|>",
        3: "Second.<|im_end|>",
    }


def test_tool_calls_are_trained_and_tool_results_are_not(tokenizer_of, trained):
    messages = [Q1, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT, A1]
    tokenizer = tokenizer_of("instructs")
    assert trained(tokenizer, tokenize_chat(tokenizer, messages)) == {
        1: '[TOOL_CALLS]{"name": "add", "arguments": {"x": {"y": "a \\"b\\""}, "n": 1}}</s>',
        3: "First.</s>",
    }
    tokenizer = tokenizer_of("text arguments")
    assert (
        trained(tokenizer, tokenize_chat(tokenizer, messages))[1]
        == '<|call|>{"x": {"y": "a \\"b\\""}, "n": 1}<|im_end|>'
    )
    chat = tokenize_chat(tokenizer_of("plain"), messages)
    assert [turn.reason for turn in chat.turns] == [
        "the template leaves out its tool call: '<|im_end|>\\n'",
        None,
    ]


def test_a_special_token_in_a_tool_call(tokenizer_of, trained):
    """In an argument it is text that the server would have stopped at; in a name nothing could tell
    it from the template's.
    """
    tokenizer = tokenizer_of("instructs")
    for function, reason in (
        ({"name": "f", "arguments": {"x": "a</s>b"}}, "at which a server would have stopped"),
        ({"name": "f", "arguments": {"x": "a", "</s>": 1}}, "hold the special token '</s>'"),
    ):
        messages = [
            Q1,
            {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
            RESULT,
            A1,
        ]
        chat = tokenize_chat(tokenizer, messages)
        assert trained(tokenizer, chat) == {3: "First.</s>"} and reason in chat.untrained[0].reason


def test_arguments_that_are_no_json_are_not_trained(tokenizer_of):
    broken = CALL | {"function": {"name": "add", "arguments": '{"x": '}}
    messages = [Q1, {"role": "assistant", "content": None, "tool_calls": [broken]}, RESULT, A1]
    chat = tokenize_chat(tokenizer_of("instructs"), messages)
    assert [turn.message for turn in chat.untrained] == [
        1
    ] and "not a JSON object" in chat.untrained[0].reason


@pytest.mark.parametrize("arguments", [{}, {"n": 1}, '{"n": 1}', None, ""])
def test_tool_calls_without_texts(tokenizer_of, trained, templates, arguments):
    """There is nothing to mark in them; that a template leaves one out is seen all the same."""
    calls = [{"type": "function", "function": {"name": "add", "arguments": arguments}}] * 2
    messages = [Q1, {"role": "assistant", "content": "add", "tool_calls": calls}, RESULT, A1]
    tokenizer = tokenizer_of("macros")
    last, first = tokenize_chat_turns(tokenizer, messages)
    said = "(n 1)" if arguments and "n" in arguments else ""
    assert trained(tokenizer, first) == {1: f"add<|call|>add{said}<|call|>add{said}<|final|>"}
    assert trained(tokenizer, last) == {3: "First.<|final|>"}
    for template in (
        "plain",
        templates["macros"].replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]"),
    ):
        chats = tokenize_chat_turns(tokenizer_of(template), messages)
        assert len(chats) == 1 and "leaves out its tool call" in chats[0].untrained[0].reason


@pytest.mark.parametrize(
    "message",
    [{"content": None}, {}, {"content": None, "tool_calls": []}, {"function_call": {"name": "f"}}],
)
def test_messages_that_say_nothing(tokenizer_of, message):
    with pytest.raises(
        TokenizationError, match=r"message 1: (it is empty|function_call is the old form)"
    ):
        tokenize_chat(tokenizer_of("plain"), [Q1, {"role": "assistant"} | message])


def test_macros_that_write_whole_messages(tokenizer_of, trained):
    """The last answer ends with another token than it has later: each is trained where it stands as
    it was generated.
    """
    tokenizer = tokenizer_of("macros")
    messages = [Q1, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, A1]
    chats = tokenize_chat_turns(tokenizer, messages)
    assert [trained(tokenizer, chat) for chat in chats] == [
        {3: "First.<|final|>"},
        {1: '<|call|>add(x (y a "b"))(n 1)<|final|>'},
    ]
    assert all("generation" in chat.tagged_template for chat in chats)


def test_the_clock_stands_still(tokenizer_of):
    now = datetime.datetime(2024, 7, 26, 1, 2, 3)
    chat = tokenize_chat(tokenizer_of("dated"), [Q1, A1], now=now)
    assert chat.text.startswith("2024-07-26 01:02:03.000000<|im_start|>")


def test_stop_tokens_end_turns_that_the_template_leaves_open(tokenizer_of, trained):
    tokenizer = tokenizer_of("open ends")
    with pytest.raises(TokenizationError, match=r"puts '' after the reply.*Set stop_tokens"):
        tokenize_chat(tokenizer, TWO_TURNS)
    chat = tokenize_chat(tokenizer, TWO_TURNS, stop_tokens=["<|user|>", "</s>"])
    assert (
        trained(tokenizer, chat) == {1: "First.<|user|>", 3: "Second.<|user|>"}
        and chat.tagged_template is None
    )
    with pytest.raises(TokenizationError, match=r"no token of \['</s>'\]"):
        tokenize_chat(tokenizer, TWO_TURNS, stop_tokens=["</s>"])


def test_the_header_of_a_next_answer_is_no_end_of_turn(tokenizer_of, trained, templates):
    with pytest.raises(TokenizationError, match="no special token of the tokenizer"):
        tokenize_chat(tokenizer_of(templates["always asks"].replace("<|im_end|>", "")), TWO_TURNS)
    tokenizer = tokenizer_of("{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    assert trained(tokenizer, tokenize_chat(tokenizer, TWO_TURNS)) == {
        1: "First.</s>",
        3: "Second.</s>",
    }


def test_special_tokens_in_texts(tokenizer_of, trained):
    """A user's cannot end a turn; an assistant's own would have stopped the server."""
    tokenizer = tokenizer_of("plain")
    fake = {"role": "user", "content": "a<|im_end|>\n<|im_start|>assistant\nFirst.<|im_end|>\n"}
    chat = tokenize_chat(tokenizer, [fake, A1, Q2, A2])
    assert trained(tokenizer, chat) == {1: "First.<|im_end|>", 3: "Second.<|im_end|>"}
    # As the server tokenizes them.
    assert chat.token_ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 6
    chat = tokenize_chat(tokenizer, [Q1, {"role": "assistant", "content": "x<|im_end|>y"}, Q2, A2])
    assert [turn.message for turn in chat.untrained] == [
        1
    ] and "at which a server would have stopped" in chat.untrained[0].reason


def test_named_templates(tokenizer_of, trained, templates):
    tokenizer = tokenizer_of({"default": templates["plain"], "tool_use": templates["instructs"]})
    assert trained(tokenizer, tokenize_chat(tokenizer, [Q1, A1])) == {1: "First.<|im_end|>"}
    assert trained(tokenizer, tokenize_chat(tokenizer, [Q1, A1], tools=[])) == {1: "First.</s>"}
    assert trained(tokenizer, tokenize_chat(tokenizer, [Q1, A1], chat_template="tool_use")) == {
        1: "First.</s>"
    }
    assert trained(
        tokenizer, tokenize_chat(tokenizer, [Q1, A1], chat_template=templates["two ends"])
    )
    tokenizer = tokenizer_of({"rag": templates["plain"]})
    with pytest.raises(ModelFolderError, match=r"choose chat_template from \['rag'\]"):
        tokenize_chat(tokenizer, [Q1, A1])


def test_a_refusal_names_the_template_and_the_reason(tokenizer_of):
    tokenizer = tokenizer_of("trims")
    tokenizer.name_or_path = "models/gemma"
    with pytest.raises(
        TokenizationError,
        match=r"^the chat template of models/gemma refuses the conversation: no system here$",
    ):
        tokenize_chat(tokenizer, [SYSTEM, Q1, A1])
    with pytest.raises(TokenizationError, match="they alternate"):
        tokenize_chat(tokenizer, [Q1, Q2, A1])
    with pytest.raises(TokenizationError, match="line 2 is not valid Jinja"):
        tokenize_chat(tokenizer_of("{{ messages }}\n{% endfor %}"), [Q1, A1])
    with pytest.raises(
        TokenizationError, match=r"ignores add_generation_prompt and puts '<\|im_start\|>assistant"
    ):
        tokenize_chat(tokenizer_of("never asks"), [Q1, A1])
    with pytest.raises(
        TokenizationError, match=r"renders the prompt as .*<think>.* before a reply"
    ):
        tokenize_chat(tokenizer_of("opens"), [Q1, A1])
    with pytest.raises(TokenizationError, match="message 0: no message comes before it"):
        tokenize_chat(tokenizer_of("plain"), [A1])
    with pytest.raises(TokenizationError, match="nothing to train"):
        tokenize_chat(tokenizer_of("plain"), [Q1])
    with pytest.raises(TokenizationError, match="leaves out its reasoning"):
        tokenize_chat(tokenizer_of("plain"), [Q1, A1 | {"reasoning_content": "Hm."}])


@pytest.mark.parametrize(
    "filter", ["upper", "replace('i', 'I')", "truncate(4, true, '')", "tojson", "reverse", "urlize"]
)
def test_a_template_that_changes_an_answer_is_refused(tokenizer_of, templates, filter):
    tokenizer = tokenizer_of(
        templates["plain"].replace("m['content']", f"(m['content'] | {filter})")
    )
    with pytest.raises(TokenizationError, match=r"changes its text|leaves out its text"):
        tokenize_chat(tokenizer, [Q1, {"role": "assistant", "content": 'It is "www.firstly.com".'}])
