"""Read chat messages of the OpenAI API: text in parts, and fields without a value.

Two habits of data sets meet here. Multimodal ones write a text as a list of parts,
`[{"type": "text", "text": "Hi"}]`. Files in Arrow's types (parquet, `datasets`) give each object
the fields of all others in its column and fill them with null, as deep as objects go.

A null therefore counts as a missing field, with three exceptions:

- the `content` of a message: an assistant with only tool calls says `"content": null`;
- elements of lists, such as `"enum": ["a", null]`, because Arrow adds none;
- `default` and `const` in a JSON schema, if its own type allows null.

Arguments of a tool call lose their nulls too, as an intended null looks like one of Arrow's. To
keep one, write the arguments as JSON text, as the API does.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ttrl.text import short

Message: TypeAlias = dict[str, Any]
"""A chat message as the OpenAI API has it: "role", "content", "tool_calls" and other fields for a
chat template.
"""
Tool: TypeAlias = dict[str, Any]
"""A tool as the OpenAI API has it: {"type": "function", "function": …}."""

JsonObject: TypeAlias = Mapping[str, object]
"""A JSON object, passed on without a look inside."""

TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""The types of parts vLLM reads as text, and the field of the text."""


def without_nulls(value: Any) -> Any:
    """Return a copy of a JSON value without its null fields, except those described above."""
    if isinstance(value, Mapping):
        meant: tuple[str, ...] = ()
        if _allows_null(value):
            meant = ("default", "const")
        return {k: without_nulls(v) for k, v in value.items() if v is not None or k in meant}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value


def _allows_null(schema: Mapping[Any, Any]) -> bool:
    """Tell whether a JSON schema allows a null value."""
    kind = schema.get("type")
    if kind == "null" or schema.get("nullable") is True:
        return True
    if isinstance(kind, list | tuple) and "null" in kind:
        return True
    choices = [schema.get(name) for name in ("anyOf", "oneOf")]
    kinds = [kind for choice in choices if isinstance(choice, list | tuple) for kind in choice]
    return any(isinstance(kind, Mapping) and _allows_null(kind) for kind in kinds)


def messages_without_nulls(messages: Sequence[Any]) -> list[Any]:
    """Return copies of chat messages without their null fields; `content` may stay null. Anything
    other than a message stays as it is."""
    cleaned: list[Any] = []
    for message in messages:
        if isinstance(message, Mapping):
            kept = {k: v for k, v in message.items() if v is not None or k == "content"}
            message = {name: without_nulls(value) for name, value in kept.items()}
        cleaned.append(message)
    return cleaned


def request_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages as a server takes them: without nulls, arguments of tool calls as JSON text.
    Raises TypeError or ValueError for arguments without a JSON text."""
    made = messages_without_nulls(messages)
    for message in made:
        if isinstance(message, dict) and isinstance(message.get("tool_calls"), list):
            calls = message["tool_calls"]
            message["tool_calls"] = [_with_argument_text(call) for call in calls]
    return made


def _with_argument_text(call: Any) -> Any:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = call["function"]
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        return call
    text = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def part_that_is_no_text(content: Any) -> str | None:
    """Describe the first part of a message's content other than text; None if all of it is text."""
    if content is None or isinstance(content, str):
        return None
    if not isinstance(content, list | tuple):
        return f"content of type {type(content).__name__}"
    for part in content:
        if isinstance(part, str):
            continue
        if not isinstance(part, Mapping) or part.get("type") is None:
            return f"a part without a type ({short(part, 60)})"
        kind = part["type"]
        if kind not in TEXT_FIELDS:
            return f"a part of type {kind!r}"
        text = part.get(TEXT_FIELDS[kind])
        if text is not None and not isinstance(text, str):
            return f"a part of type {kind!r} whose text is of type {type(text).__name__}"
    return None


def texts_of(content: Any) -> list[str]:
    """Return the texts of a message's content, one for each part with text."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list | tuple):
        return []
    found = []
    for part in content:
        if isinstance(part, Mapping):
            part = part.get(TEXT_FIELDS.get(str(part.get("type")), "text"))
        if isinstance(part, str):
            found.append(part)
    return found


def text_of(content: Any) -> str:
    """Return a message's content as one text. Newlines join the parts, as in vLLM for chat
    templates without parts."""
    return "\n".join(texts_of(content))


def with_text_added(message: Mapping[str, Any], text: str) -> Message:
    """Return a message with another text at the end of its content: a part of its own after
    parts."""
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": text}]}
    return {**message, "content": (content or "") + text}
