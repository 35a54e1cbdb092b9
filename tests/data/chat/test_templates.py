"""Supervised examples: what is trained is what the assistant said, end-of-turn tokens included; a
template that breaks that is an error. (The method itself: tests/data/chat.)"""

import math

import pytest

from ttrl.data.chat.templates import tokenize_chat
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.errors import ModelFolderError, TokenizationError

MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Ünd hi!"},
]


def chat_tokens(tokenizer, messages, **keywords):
    return tokenize_chat(tokenizer, messages, **keywords).result("example")


def test_the_answer_and_its_end_of_turn_token_are_trained(tokenizer):
    result = chat_tokens(tokenizer, MESSAGES)
    trained = [
        token for token, is_trained in zip(result.token_ids, result.assistant_mask) if is_trained
    ]
    assert tokenizer.decode(trained) == "Ünd hi!<|im_end|>"
    prompt = [
        token
        for token, is_trained in zip(result.token_ids, result.assistant_mask)
        if not is_trained
    ]
    assert prompt == tokenizer.apply_chat_template(
        MESSAGES[:-1], add_generation_prompt=True, return_dict=False
    )
    assert result.prompt_length == len(prompt)
    # the whole is a beginning of what the template renders: only the newline behind the end of the
    # turn is missing
    whole = tokenizer.apply_chat_template(MESSAGES, return_dict=False)
    assert whole[: len(result.token_ids)] == result.token_ids
    assert tokenizer.decode(whole[len(result.token_ids) :]) == "\n"
    assert all(math.isnan(logprob) for logprob in result.logprobs) and result.advantage == 1.0
    packed = packed_tensors_from_tokenized_results([result], seq_len=256, pad_id=0)
    assert packed.labels[packed.labels >= 0].tolist() == trained


def test_all_turns_of_the_assistant_are_trained_or_the_last_alone(tokenizer):
    messages = [
        *MESSAGES,
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "ok"},
    ]
    result = chat_tokens(tokenizer, messages)
    trained = [
        token for token, mask in zip(result.token_ids, result.assistant_mask, strict=True) if mask
    ]
    assert tokenizer.decode(trained) == "Ünd hi!<|im_end|>ok<|im_end|>"
    packed = packed_tensors_from_tokenized_results([result], seq_len=256, pad_id=0)
    assert packed.labels[packed.labels >= 0].tolist() == trained
    last = chat_tokens(tokenizer, messages, turns="last")
    assert (
        tokenizer.decode(last.token_ids[last.prompt_length :]) == "ok<|im_end|>"
        and last.token_ids == result.token_ids
    )
    assert sum(last.assistant_mask) == len(last.token_ids) - last.prompt_length


def test_an_empty_answer_trains_the_end_of_turn_alone(tokenizer):
    result = chat_tokens(tokenizer, [*MESSAGES[:-1], {"role": "assistant", "content": ""}])
    assert sum(result.assistant_mask) == 1 and result.token_ids[-1] == tokenizer.eos_token_id


def test_no_template(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ModelFolderError, match="no chat template; put a chat_template"):
        chat_tokens(tokenizer, MESSAGES)


@pytest.mark.parametrize("template", ["", " \n", 5, {"default": ""}, {"default": None}])
def test_a_template_without_text(tokenizer, template):
    tokenizer.chat_template = template
    with pytest.raises(ModelFolderError, match="must be a text: put a chat_template"):
        chat_tokens(tokenizer, MESSAGES)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{%- if add_generation_prompt -%}", "{%- if false -%}", "ignores add_generation_prompt"),
        (
            "message['content']",
            "message['content'] | upper",
            "changes its text to 'ÜND HI!|leaves out its text: 'ÜND HI!",
        ),
        ("message['content']", "message['content'] | replace('Ünd ', '')", "changes its text"),
        (
            "'<|im_start|>assistant\\n'",
            "'<|im_start|>assistant\\n<think>'",
            "the answered conversation continues with",
        ),
        ("'<|im_end|>'", "''", "end-of-turn token"),
        (
            "{%- for message in messages -%}",
            "{{ raise_exception('no system here') }}{%- for message in messages -%}",
            "refuses",
        ),
    ],
)
def test_templates_that_would_give_a_wrong_mask_are_errors(tokenizer, old, new, message):
    assert old in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    with pytest.raises(TokenizationError, match=message):
        chat_tokens(tokenizer, MESSAGES)


def test_an_empty_answer_needs_a_generation_prompt(tokenizer):
    """Otherwise the header that the template puts before every answer would be taken for the end of
    the turn.
    """
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{%- if add_generation_prompt -%}", "{%- if false -%}"
    )
    with pytest.raises(TokenizationError, match="ignores add_generation_prompt"):
        chat_tokens(tokenizer, [*MESSAGES[:-1], {"role": "assistant", "content": ""}])


@pytest.mark.parametrize("messages", [[], MESSAGES[:-1]])
def test_a_conversation_needs_an_answer(tokenizer, messages):
    with pytest.raises(
        TokenizationError, match="no message of the conversation is the assistant's"
    ):
        chat_tokens(tokenizer, messages)


NEVER = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor "
    "%}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("where", ["always", "for an answer"])
def test_a_template_that_loops_for_ever_is_ended(where, monkeypatch, tokenizer_of):
    """Also one that does so for some conversations alone; and it is not tried again for each form
    of the messages.
    """
    monkeypatch.setattr("ttrl.data.chat.rendering.RENDER_SECONDS", 0.2)
    loops = (
        NEVER
        if where == "always"
        else "{% if messages[-1].role == 'assistant' %}" + NEVER + "{% endif %}"
    )
    tokenizer = tokenizer_of("plain")
    tokenizer.chat_template = loops + tokenizer.chat_template
    with pytest.raises(
        ModelFolderError, match=r"the chat template of .* took more than 0.2 s for one conversation"
    ):
        tokenize_chat(
            tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        )
