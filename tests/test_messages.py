"""Chat messages as data sets write them: nulls for missing fields, texts in parts."""

import json

import pyarrow
import pytest

from ttrl.messages import (
    messages_without_nulls,
    part_that_is_no_text,
    request_messages,
    text_of,
    with_text_added,
    without_nulls,
)


def test_rows_that_went_through_arrow_are_what_they_were():
    """Arrow gives each object the fields of all others, as deep as objects go."""
    look = {"type": "function", "function": {"name": "look", "arguments": {"place": "hall"}}}
    add = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "deep": {"b": 2}}}}
    rows = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
        {
            "messages": [
                {"role": "user", "content": "Look, and add"},
                {"role": "assistant", "content": None, "tool_calls": [look, add]},
                {"role": "tool", "content": "3", "tool_call_id": "1"},
                {"role": "assistant", "content": "Three", "thinking": "Hm"},
            ]
        },
    ]
    there_and_back = pyarrow.Table.from_pylist(rows).to_pylist()
    filled = there_and_back[1]["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert filled == {"place": "hall", "a": None, "deep": None}
    assert there_and_back[0]["messages"][0]["thinking"] is None
    for row, original in zip(there_and_back, rows, strict=True):
        assert messages_without_nulls(row["messages"]) == original["messages"]


def test_tools_that_went_through_arrow_are_what_they_were():
    def tool(name, **properties):
        parameters = {"type": "object", "properties": properties, "required": [*properties]}
        function = {"name": name, "description": f"{name}s", "parameters": parameters}
        return {"type": "function", "function": function}

    tools = [
        tool("look", place={"type": "string", "enum": ["hall", None]}),
        tool("add", a={"type": "number", "default": 1}, b={"type": "number"}),
    ]
    (row,) = pyarrow.Table.from_pylist([{"tools": tools}]).to_pylist()
    filled = row["tools"][0]["function"]["parameters"]["properties"]
    assert filled == {"place": {"type": "string", "enum": ["hall", None]}, "a": None, "b": None}
    assert without_nulls(row["tools"]) == tools


TEXT = {"type": "string"}
MAYBE = {"anyOf": [TEXT, {"type": "null"}], "default": None}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"properties": {"a": TEXT, "b": None}}, {"properties": {"a": TEXT}}),
        (TEXT | {"default": None, "const": None}, TEXT),
        # A schema that allows null may mean it.
        ({"type": ["string", "null"], "default": None}, "the same"),
        ({"type": "null", "const": None}, "the same"),
        (TEXT | {"nullable": True, "default": None}, "the same"),
        (MAYBE, "the same"),
        (MAYBE | {"title": None}, MAYBE),
        ({"oneOf": [TEXT | {"enum": None}], "default": None}, {"oneOf": [TEXT]}),
        # A property of that name is no default.
        ({"properties": {"type": TEXT, "default": None}}, {"properties": {"type": TEXT}}),
        # Elements of lists stay, and so do empty objects.
        ({"enum": [None, "a"], "x": {"y": None}}, {"enum": [None, "a"], "x": {}}),
        ([{"a": None}, None, 1], [{}, None, 1]),
    ],
)
def test_which_nulls_stay(given, expected):
    before = json.dumps(given)
    assert without_nulls(given) == (given if expected == "the same" else expected)
    assert json.dumps(given) == before  # the original does not change


def test_messages_as_a_server_takes_them():
    def call(**function):
        return {"id": "1", "type": "function", "index": None, "function": {"name": "f", **function}}

    def sent(**function):
        return {"id": "1", "type": "function", "function": {"name": "f", **function}}

    part = {"type": "text", "text": "a"}
    messages = [
        {"role": "user", "content": [part | {"image_url": None}], "name": None},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                call(arguments={"a": 1, "b": None, "c": {"d": None, "e": "é"}}),
                call(arguments='{"a": null}'),
                call(arguments=None),
                call(),
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "x", "tool_calls": None},
    ]
    assert request_messages(messages) == [
        {"role": "user", "content": [part]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                sent(arguments='{"a": 1, "c": {"e": "é"}}'),
                sent(arguments='{"a": null}'),  # JSON text says what it says
                sent(arguments="{}"),
                sent(arguments="{}"),
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]
    assert request_messages(request_messages(messages)) == request_messages(messages)


A = {"type": "text", "text": "a"}
B = {"type": "input_text", "text": "b"}
C = {"type": "refusal", "refusal": "c"}
D = {"type": "thinking", "thinking": "d"}
PICTURE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("content", "text", "no_text"),
    [
        ("a", "a", None),
        (None, "", None),
        ([], "", None),
        ([A, A], "a\na", None),
        (["a", B, C, D], "a\nb\nc\nd", None),
        ([A, {"type": "text", "text": None}, A], "a\na", None),
        ([A, PICTURE], "a", "a part of type 'image_url'"),
        ([{"type": "image", "text": None}], "", "a part of type 'image'"),
        ([{"text": "a"}], "a", "a part without a type ({'text': 'a'})"),
        ([A | {"text": 3}], "", "a part of type 'text' whose text is of type int"),
        ([3], "", "a part without a type (3)"),
        (A, "", "content of type dict"),
        (3, "", "content of type int"),
    ],
)
def test_texts_of_a_content(content, text, no_text):
    assert text_of(content) == text
    assert part_that_is_no_text(content) == no_text


def test_a_text_is_added_to_texts_and_parts():
    message = {"role": "user", "content": "a"}
    assert with_text_added(message, "b") == {"role": "user", "content": "ab"}
    assert with_text_added({"content": None}, "b") == {"content": "b"}
    message = {"content": [A]}
    assert with_text_added(message, "b") == {"content": [A, {"type": "text", "text": "b"}]}
    assert message == {"content": [A]}
