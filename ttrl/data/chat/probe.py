"""Probe a template: replace a message's texts by marks, to see the template's changes and
additions.

A template keeps a message unchanged if putting the texts back in place of their marks gives its
output for the message itself. Blanks at the ends of a text stay around its mark: trimming is no
change. Tags such as `<think>` stay too, because templates split texts at them.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ttrl.data.chat.rendering import REASONING_KEYS, is_function_call, with_arguments
from ttrl.messages import Message

# Tags templates look for in texts: <think>, </think>, <|channel|>, [TOOL_CALLS]. They stay in a
# probe as they are.
_TAG = re.compile(r"(</?[^<>\s]{1,40}>|\[/?[A-Z_]{2,40}\])")

# How a text may stand in the rendered arguments of a tool call.
_WAYS: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
    lambda text: repr(text)[1:-1],
)


@dataclass
class Probe:
    """`message` with marks in it; `texts` gives each mark's text, `parts` its part ("text",
    "reasoning", …).
    """

    message: Message
    texts: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)

    def missing(self, rendered: str) -> str | None:
        """Return the first part with its mark missing in `rendered`, left out by the template; None
        if all are there.
        """
        return next((part for mark, part in self.parts.items() if mark not in rendered), None)

    def restores(self, rendered: str, original: str) -> bool:
        """Tell whether `rendered`, with the texts put back, is `original`."""
        if not self.texts:
            return rendered == original
        marks = re.compile("|".join(map(re.escape, self.texts)))

        def put_back(way: Callable[[str], str]) -> str:
            def text(mark: re.Match[str]) -> str:
                return (way if self.parts[mark[0]] == "tool call" else _WAYS[0])(
                    self.texts[mark[0]]
                )

            return marks.sub(text, rendered)

        if "tool call" in self.parts.values():
            ways = _WAYS
        else:
            ways = _WAYS[:1]
        return any(put_back(way) == original for way in ways)

    def first_mark(self, rendered: str) -> int:
        """Return the start of the first mark; -1 without marks."""
        return min((at for mark in self.texts if (at := rendered.find(mark)) >= 0), default=-1)

    def after_last_mark(self, rendered: str) -> int | None:
        """Return the start of the text after the last mark; None without marks."""
        return max(
            (at + len(mark) for mark in self.texts if (at := rendered.rfind(mark)) >= 0),
            default=None,
        )


def make_probe(message: Mapping[str, Any], unused: str) -> Probe:
    """Make a probe of an assistant's message; one without any text gets a mark for its (empty)
    content. `unused` is a word absent from the conversation and template."""
    probe = Probe(dict(message))

    def mark(part: str, text: str) -> str:
        name = f"Qx{len(probe.texts)}{unused}xQ"
        probe.texts[name], probe.parts[name] = text, part
        return name

    def marked(part: str, text: str) -> str:
        pieces = []
        is_marked = True
        for piece in _TAG.split(text):
            if _TAG.fullmatch(piece):
                is_marked = False
            core = piece.strip()
            if core and not _TAG.fullmatch(piece):
                before = piece[: len(piece) - len(piece.lstrip())]
                piece = before + mark(part, core) + piece[len(before) + len(core) :]
                is_marked = True
            pieces.append(piece)
        # It ends with a tag: an empty mark keeps the tag from counting as the template's.
        if not is_marked:
            end = len("".join(pieces).rstrip())
            return "".join(pieces)[:end] + mark(part, "") + "".join(pieces)[end:]
        return "".join(pieces)

    def leaves(value: Any) -> Any:
        if isinstance(value, str):
            if value:
                return mark("tool call", value)
            return value
        if isinstance(value, Mapping):
            return {key: leaves(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [leaves(inner) for inner in value]
        return value

    def marked_arguments(arguments: Any) -> Any:
        if isinstance(arguments, str):  # JSON text, for templates accepting nothing else
            return json.dumps(leaves(json.loads(arguments)), ensure_ascii=False)
        return leaves(arguments)

    thoughts: dict[str, str] = {}
    for key in REASONING_KEYS:
        text = message.get(key)
        if isinstance(text, str):
            if text not in thoughts:  # two names of one text
                thoughts[text] = marked("reasoning", text)
            probe.message[key] = thoughts[text]
    content = message.get("content")
    if isinstance(content, str):
        probe.message["content"] = marked("text", content)
    elif isinstance(content, list):
        probe.message["content"] = [
            part | {"text": marked("text", part["text"])} if _has_text(part) else part
            for part in content
        ]
    calls = message.get("tool_calls")
    if calls:
        probe.message["tool_calls"] = [with_arguments(call, marked_arguments) for call in calls]
    if not probe.texts and not calls:
        if isinstance(content, str):
            probe.message["content"] = content + mark("text", "")
        elif content and len(content) == 1 and _has_text(content[0]):
            probe.message["content"] = [
                content[0] | {"text": content[0]["text"] + mark("text", "")}
            ]
    return probe


def ending_probe(probe: Probe, unused: str) -> Probe:
    """Return `probe` with one more argument, a mark, in its last tool call, as other arguments need
    not be texts to mark.
    """
    calls = probe.message.get("tool_calls")
    if not calls or not is_function_call(calls[-1]):
        return probe
    arguments = calls[-1]["function"].get("arguments")
    if not isinstance(arguments, (dict, str)):
        return probe
    mark = f"QxE{unused}xQ"

    def longer(arguments: Any) -> Any:
        if isinstance(arguments, str):
            return json.dumps(json.loads(arguments) | {unused: mark}, ensure_ascii=False)
        return arguments | {unused: mark}

    message = probe.message | {"tool_calls": [*calls[:-1], with_arguments(calls[-1], longer)]}
    return Probe(message, probe.texts | {mark: ""}, probe.parts | {mark: "tool call"})


def _has_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)
