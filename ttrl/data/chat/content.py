"""Reproduce a server's form of message content for a chat template: one text, or a list of parts.

vLLM decides by the template's source (`--chat-template-content-format auto`): lists for a template
looping over a message's content, texts for all others. Training must see the same prompt, and
applies the same rule; a test compares it with vLLM's.

    text     parts are joined by newlines; no content is ""
    parts    a text is one part; no content is []

The content of a tool's message is always one text.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError

from ttrl.data.chat.template_sandbox import parsed
from ttrl.messages import TEXT_FIELDS, JsonObject, text_of


def server_content(message: Mapping[str, Any], *, as_parts: bool) -> str | list[JsonObject]:
    """Return a message's content in the form expected by a template."""
    content = message.get("content")
    if not as_parts or message.get("role") == "tool":
        return text_of(content)
    if isinstance(content, str):
        return [_text_part(content)]
    parts = [part if isinstance(part, Mapping) else _text_part(part) for part in content or ()]
    return [_as_text_part(part) for part in parts if _text(part) is not None]


def _text_part(text: str) -> JsonObject:
    return {"type": "text", "text": text}


def _text(part: Mapping[str, Any]) -> Any:
    return part.get(TEXT_FIELDS[part["type"]])


def _as_text_part(part: Mapping[str, Any]) -> JsonObject:
    """Return a part of type "text" as it is, and a part of another type as a plain text part."""
    if part["type"] == "text":
        return dict(part)
    return _text_part(_text(part))


@functools.lru_cache(maxsize=64)
def reads_parts(source: str) -> bool:
    """Tell whether vLLM passes lists of parts to the chat template `source`."""
    try:
        return _Reading(parsed(source)).loops_over_content()
    except (TemplateError, _UnknownTargetError, RecursionError):
        return False


class _UnknownTargetError(Exception):
    """Messages are assigned to something other than a name: vLLM then hands over texts."""


class _Reading:
    """Follows a conversation's messages through a template, by the names bound to them."""

    def __init__(self, tree: nodes.Template) -> None:
        self.tree = tree
        self.messages = self._names_of_messages()
        """Names of a single message: targets of loops over a list of messages."""

    def loops_over_content(self) -> bool:
        """Tell whether a loop goes through the content of a message."""
        parameters, inside = self._macros()
        for loop in self.tree.find_all(nodes.For):
            iterated = loop.iter
            found = self._is_content(iterated)
            if isinstance(iterated, nodes.Name) and not found:
                found = iterated.name in parameters.get(id(loop), ())
                found |= iterated.name == "content" and id(loop) not in inside
            if found:
                _target(loop.target)
                return True
        return False

    def _names_of_messages(self) -> set[str]:
        lists = {"messages"}
        size = 0
        while size < len(lists):
            size = len(lists)
            for assign in self.tree.find_all(nodes.Assign):
                if _name(_core(assign.node)) in lists:
                    lists.add(_target(assign.target))
        loops = self.tree.find_all(nodes.For)
        return {_target(loop.target) for loop in loops if _name(_core(loop.iter)) in lists}

    def _is_content(self, node: nodes.Node | None) -> bool:
        """Tell whether an expression is the content of a message, with filters or as a slice."""
        node = _core(node)
        if isinstance(node, nodes.Getattr):
            return node.attr == "content" and _name(node.node) in self.messages
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            return node.arg.value == "content" and _name(node.node) in self.messages
        return False

    def _macros(self) -> tuple[dict[int, set[str]], set[int]]:
        """Return, for the loops within macros, the parameters given a content by any call; and all
        loops within macros."""
        parameters: dict[int, set[str]] = {}
        inside: set[int] = set()
        for macro in self.tree.find_all(nodes.Macro):
            given = set(self._parameters_with_content(macro))
            for loop in macro.find_all(nodes.For):
                inside.add(id(loop))
                if given:
                    parameters[id(loop)] = given
        return parameters, inside

    def _parameters_with_content(self, macro: nodes.Macro) -> Iterator[str]:
        names = [argument.name for argument in macro.args]
        for call in self.tree.find_all(nodes.Call):
            if _name(call.node) != macro.name:
                continue
            for name, argument in zip(names, call.args, strict=False):
                if self._is_content(argument):
                    yield name
            for keyword in call.kwargs:
                if keyword.key in names and self._is_content(keyword.value):
                    yield keyword.key


def _core(node: nodes.Node | None) -> nodes.Node | None:
    """Return an expression without the filters, tests and slices around it."""
    while isinstance(node, nodes.Filter | nodes.Test | nodes.Getitem):
        if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
            break
        node = node.node
    return node


def _name(node: nodes.Node | None) -> str | None:
    """Return the name of a variable; None for any other expression."""
    if isinstance(node, nodes.Name):
        return node.name
    return None


def _target(node: nodes.Node) -> str:
    if not isinstance(node, nodes.Name):
        raise _UnknownTargetError
    return node.name
