"""Tags around what the model wrote, in any template; and all templates that are at hand."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from ttrl.data.chat.generation_tags import has_generation_tags, with_generation_tags
from ttrl.data.chat.templates import tokenize_chat
from ttrl.errors import TokenizationError

MESSAGES = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "First."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Second."},
]


def rendered(source, messages, **variables):
    texts, regions = render_jinja_template(
        conversations=[messages],
        chat_template=source,
        return_assistant_tokens_mask=True,
        bos_token="<s>",
        eos_token="</s>",
        **variables,
    )
    return texts[0], [texts[0][start:end] for start, end in regions[0]]


@pytest.mark.parametrize("asked", [False, True])
def test_every_template_writes_the_same_with_tags(templates, asked):
    for name, source in templates.items():
        messages = (
            MESSAGES
            if name != "parts"
            else [m | {"content": [{"type": "text", "text": m["content"]}]} for m in MESSAGES]
        )
        variables = {"add_generation_prompt": asked, "strftime_now": lambda form: "now"}
        text, marked = rendered(
            with_generation_tags(source, ["<|im_end|>", "</s>", "<|final|>"]), messages, **variables
        )
        assert text == rendered(source, messages, **variables)[0], name
        expected = {
            # </s> comes behind the end of turn, so it must not be given for this one.
            "ends of text": None,
            "spaced": [],
            "opens": [],
            "skips": [],
            "open ends": [],
            "thinks": ["<think>\n\n</think>\n\nSecond.<|im_end|>"],
            "macros": ["Second.<|final|>"],
            "instructs": ["First.</s>", "Second.</s>"],
            "blanks": [" First. </s>", " Second. </s>"],
            "two ends": ["<|say|>First.<|said|><|im_end|>", "<|say|>Second.<|said|><|im_end|>"],
            "never asks": [
                "<|im_start|>assistant\nFirst.<|im_end|>",
                "<|im_start|>assistant\nSecond.<|im_end|>",
            ],
        }.get(name, ["First.<|im_end|>", "Second.<|im_end|>"])
        assert expected is None or marked == expected, name


def test_own_tags_are_kept_where_they_are_right(tokenizer_of, templates):
    assert has_generation_tags(templates["tagged"]) and not has_generation_tags(templates["plain"])
    assert tokenize_chat(tokenizer_of("tagged"), MESSAGES).tagged_template == templates["tagged"]
    corrected = tokenize_chat(tokenizer_of("tagged too far"), MESSAGES).tagged_template
    assert corrected != templates["tagged too far"] and "{%- if true -%}" in corrected


def test_a_template_that_no_tags_can_be_put_into(tokenizer_of, templates):
    """`varargs` means something else inside a macro."""
    tokenizer = tokenizer_of("{{ varargs is defined }}" + templates["plain"])
    with pytest.raises(
        TokenizationError, match=r"with \{% generation %} tags, it writes another text and marks"
    ):
        tokenize_chat(tokenizer, MESSAGES)


def test_the_table(table, tmp_path, templates, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "plain.jinja").write_text(templates["plain"])
    (tmp_path / "open ends.jinja").write_text(templates["open ends"])
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "rag", "template": "{{ raise_exception(1) }}"}]}'
    )
    assert table.main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "| a/plain.jinja | handled | 1/1 | 1/1 | 3/3 |" in said
    assert (
        "| open ends.jinja | refused | ! |" in said and "no special token of the tokenizer" in said
    )
    assert "| tokenizer_config.json:rag | refused | - |" in said


def test_all_shared_templates(table, shared_templates):
    """Every one is handled; where a turn is not, the reason is the template's."""
    for name, source in table.templates_in(shared_templates):
        cells, reasons, faults = table.check(name, source)
        assert not faults, (name, faults)
        assert cells["plain"] == "1/1", (name, reasons)
        assert {
            cells[title] for title in ("system", "turns", "blanks", "specials", "no think")
        } <= {*("1/1", "2/2", "3/3", "1/3 (3)", "1/2 (2)", "-")}, (name, cells)
        for reason in reasons:
            assert any(
                known in reason
                for known in (
                    "leaves out its",
                    "once the conversation continues",
                    "must alternate",
                    "System role not supported",
                    "before a reply, but the answered conversation",
                )
            ), (name, reason)
