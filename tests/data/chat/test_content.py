"""Content in parts, and nulls: what a template is handed is what vLLM would hand it.

(tests/e2e/test_chat_requests.py compares with vLLM itself.)
"""

import pytest

from ttrl.data.chat.content import reads_parts
from ttrl.data.chat.rendering import ChatTemplate, server_messages
from ttrl.data.chat.templates import tokenize_chat, tokenize_completion
from ttrl.errors import TokenizationError

LISTS = {"gemma3.jinja"}
"""Of the shared templates, those that loop over a content; Gemma's puts nothing between parts."""

BEGIN = "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}"
END = "{{ '<|im_end|>' }}{%- endfor -%}"
ASK = "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"

# Each in the way of a family, shortened.
MADE_UP = {
    "as Llama 4": BEGIN
    + """
        {%- if m['content'] is string -%}{{ m['content'] }}
        {%- else -%}
            {%- for c in m['content'] -%}
                {%- if c['type'] == 'image' -%}{{ '<|image|>' }}
                {%- elif c['type'] == 'text' -%}{{ c['text'] }}
                {%- endif -%}
            {%- endfor -%}
        {%- endif -%}"""
    + END,
    "as Qwen3-VL, by a macro": """
        {%- macro written(content) -%}
            {%- if content is string -%}{{ content }}
            {%- else -%}
                {%- for item in content -%}{{ item.text }}{%- endfor -%}
            {%- endif -%}
        {%- endmacro -%}"""
    + BEGIN
    + "{{- written(m.content) -}}"
    + END,
    "by a keyword of a macro": """
        {%- macro written(x) -%}
            {%- for item in x -%}{{ item.text }}{%- endfor -%}
        {%- endmacro -%}"""
    + BEGIN.replace("messages", "messages[:]")
    + "{{- written(x=m.content) -}}"
    + END,
    "by other names of the messages": """
        {%- set loop_messages = messages -%}
        {%- set all_of_them = loop_messages[0:] -%}"""
    + BEGIN.replace("messages", "all_of_them")
    + "{%- for part in m.content -%}{{ part.text }}{%- endfor -%}"
    + END,
    "by the name content": BEGIN
    + """
        {%- set content = m.content -%}
        {%- for part in content -%}{{ part.text }}{%- endfor -%}"""
    + END,
}

TEXTS = {
    "no loop over it": "{% for m in messages %}{% set c = m.content %}{{ c }}{% endfor %}",
    "of another name": """
        {% for m in messages %}
            {% set c = m.content %}
            {% for p in c %}{{ p.text }}{% endfor %}
        {% endfor %}""",
    "letters of the role": """
        {% for m in messages %}{% for l in m.role %}{{ l }}{% endfor %}{% endfor %}""",
    "in a macro that gets none": """
        {% macro x(content) %}{% for p in content %}{% endfor %}{% endmacro %}
        {% for m in messages %}{{ x(m.name) }}{{ m.content }}{% endfor %}""",
    "assigned to an attribute": """
        {% set ns = namespace() %}
        {% set ns.all = messages %}
        {% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}""",
    "no template": "{% for m in messages %}",
}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def one_turn(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def test_which_templates_read_parts(shared_templates):
    for path in sorted(shared_templates.rglob("*.jinja")):
        assert reads_parts(path.read_text(encoding="utf-8")) == (path.name in LISTS), path.name
    for name, source in MADE_UP.items():
        assert reads_parts(source), name
    for name, source in TEXTS.items():
        assert not reads_parts(source), name
    # Tags of generation and loop controls are read over.
    assert reads_parts(
        "{% for m in messages %}{% if m.x %}{% continue %}{% endif %}{% generation %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endgeneration %}{% endfor %}"
    )


def test_parts_are_joined_for_each_shared_template(shared_templates, table):
    """User or assistant: the same tokens as of the text that vLLM makes of the parts."""
    for path in sorted(shared_templates.rglob("*.jinja")):
        tokenizer = table.make_tokenizer(path.read_text(encoding="utf-8"), path.name)
        between = "" if path.name in LISTS else "\n"
        plain = one_turn(f"uuOne{between}uuTwo", f"wxHi{between}wxHo")
        listed = one_turn(parts("uuOne", "uuTwo"), parts("wxHi", "wxHo"))
        expected = tokenize_chat(tokenizer, plain, now=table.NOW)
        found = tokenize_chat(tokenizer, listed, now=table.NOW)
        assert (found.text, found.token_ids) == (expected.text, expected.token_ids), path.name
        assert found.assistant_mask == expected.assistant_mask, path.name
        (turn,) = found.turns
        trained = tokenizer.decode(found.token_ids[turn.start : turn.end])
        assert f"wxHi{between}wxHo" in trained and "uuOne" not in trained, path.name
        assert f"uuOne{between}uuTwo" in found.text and "'type'" not in found.text, path.name
        # Answered by a server without ids: the same prompt.
        again = tokenize_completion(tokenizer, listed[:1], "wxHi", ended=True, now=table.NOW)
        wanted = tokenize_completion(tokenizer, plain[:1], "wxHi", ended=True, now=table.NOW)
        assert again.token_ids == wanted.token_ids, path.name


@pytest.mark.parametrize("name", MADE_UP)
def test_templates_of_parts_keep_them(name, tokenizer_of, trained):
    tokenizer = tokenizer_of(MADE_UP[name] + ASK)
    listed = one_turn(parts("uuOne", "uuTwo"), parts("wxHi", "wxHo"))
    chat = tokenize_chat(tokenizer, listed)
    asked = "<|im_start|>user\nuuOneuuTwo<|im_end|><|im_start|>assistant\n"
    assert chat.text == f"{asked}wxHiwxHo<|im_end|>"
    assert trained(tokenizer, chat) == {1: "wxHiwxHo<|im_end|>"}
    assert tokenize_chat(tokenizer, one_turn("uuOneuuTwo", "wxHiwxHo")).token_ids == chat.token_ids


def test_what_a_template_is_handed():
    thought = {"type": "thinking", "thinking": "f"}
    messages = [
        {"role": "system", "content": ["a", {"type": "input_text", "text": "b"}]},
        {"role": "user", "content": [{"type": "text", "text": "c", "cache_control": {"x": 1}}]},
        {"role": "assistant", "content": None, "name": None},
        {"role": "tool", "content": parts("d", "e"), "tool_call_id": None},
        {"role": "user", "content": [{"type": "text", "text": None}, thought]},
    ]
    texts = server_messages(messages)
    assert [message["content"] for message in texts] == ["a\nb", "c", "", "d\ne", "f"]
    assert [sorted(message) for message in texts] == [["content", "role"]] * 5
    listed = server_messages(messages, as_parts=True)
    assert [message["content"] for message in listed] == [
        parts("a", "b"),
        [{"type": "text", "text": "c", "cache_control": {"x": 1}}],
        [],
        "d\ne",
        parts("f"),
    ]
    assert messages[2] == {"role": "assistant", "content": None, "name": None}  # as it was


@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize("template", ["plain", "parts"])
def test_parts_that_are_no_text_are_refused_by_name(role, template, tokenizer_of):
    picture = {"type": "image_url", "image_url": {"url": "data:…"}}
    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "wxThat"}]
    number = 0 if role == "user" else 1
    messages[number] = {"role": role, "content": [*parts("Look"), picture]}
    said = f"message {number} holds a part of type 'image_url'"
    with pytest.raises(TokenizationError, match=said):
        tokenize_chat(tokenizer_of(template), messages)


def test_an_assistant_that_says_nothing_in_parts_is_not_trained(tokenizer_of):
    for content in (None, [], [{"type": "text", "text": None}]):
        with pytest.raises(TokenizationError, match="it is empty"):
            tokenize_chat(tokenizer_of("plain"), one_turn("What?", content))


def test_a_call_without_content_in_a_template_of_parts(tokenizer_of, trained):
    """vLLM hands it an empty list, which some templates index into: these get an empty part."""
    body = """
        {%- for part in m.content -%}{{ part.text }}{%- endfor -%}
        {%- for call in m.tool_calls or [] -%}{{ '<|call|>' + call.function.name }}{%- endfor -%}"""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {}}}
    messages = [
        {"role": "user", "content": "uuAdd"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    for first in ("", "{{ m.content[0].text[:0] }}"):
        tokenizer = tokenizer_of(BEGIN + first + body + END + ASK)
        prepared = ChatTemplate(tokenizer).prepared(messages)
        assert prepared[1]["content"] == (parts("") if first else [])
        chat = tokenize_chat(tokenizer, messages)
        assert trained(tokenizer, chat) == {1: "<|call|>add<|im_end|>"}


# Nulls


def test_rows_with_nulls_are_tokenized_as_rows_without_them(tokenizer_of):
    """A template that looks whether a key is there finds none of a null."""
    body = """
        {%- if 'thinking' in m -%}{{ '<think>' + m.thinking + '</think>' }}{%- endif -%}
        {{ m.content }}
        {%- for call in m.tool_calls or [] -%}
            {{ '<|call|>' + call.function | tojson }}
        {%- endfor -%}"""
    tools_first = "{%- for tool in tools or [] -%}{{ tool | tojson }}{%- endfor -%}"
    tokenizer = tokenizer_of(tools_first + BEGIN + body + END + ASK)

    def row(null):
        call = {"name": "add", "arguments": {"a": 1, **null}}
        properties = {"a": {"type": "number", **null}, **null}
        tool = {"name": "add", "parameters": {"properties": properties}}
        asked = {"role": "user", "content": "uuAdd", **null}
        calls = [{"function": call, **null}]
        said = {"role": "assistant", "content": None, "tool_calls": calls, **null}
        messages = [asked, said, asked, {"role": "assistant", "content": "wxHi", **null}]
        return messages, [{"type": "function", "function": tool, **null}]

    nulls = {name: None for name in ("b", "thinking", "reasoning_content", "name")}
    expected = tokenize_chat(tokenizer, *row({}))
    assert '{"name": "add", "arguments": {"a": 1}}' in expected.text
    found = tokenize_chat(tokenizer, *row(nulls))
    assert found.text == expected.text and found.token_ids == expected.token_ids
    # In JSON text, a null is what the model wrote.
    messages, tools = row({})
    messages[1]["tool_calls"][0]["function"]["arguments"] = '{"a": null}'
    assert '"arguments": {"a": null}' in tokenize_chat(tokenizer, messages, tools).text


# The first token of a text


def test_there_is_one_beginning_of_text(tokenizer_of):
    """The template writes it, and the tokenizer would add one to any text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tokenizer_of("{{ bos_token }}" + MADE_UP["as Llama 4"] + ASK)
    begin = tokenizer.bos_token_id
    processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    tokenizer.backend_tokenizer.post_processor = processor
    assert tokenizer("a")["input_ids"][0] == begin
    messages = one_turn("uuOne", "wxHi")
    for chat in (
        tokenize_chat(tokenizer, messages),
        tokenize_completion(tokenizer, messages[:1], "wxHi", ended=True),
    ):
        assert chat.token_ids.count(begin) == 1 and chat.token_ids[0] == begin
