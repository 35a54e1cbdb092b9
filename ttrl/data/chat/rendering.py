"""Render a tokenizer's chat template as a server does: the same choice of template, messages and
variables.

The clock is fixed: templates may write the date, and it must not differ between two renderings of
one conversation.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from ttrl.data.chat.content import reads_parts, server_content
from ttrl.data.chat.template_sandbox import TemplateSizeError, allowance, render
from ttrl.errors import ModelFolderError, TemplateRefusalError, TokenizationError
from ttrl.messages import (
    JsonObject,
    Message,
    Tool,
    messages_without_nulls,
    part_that_is_no_text,
    texts_of,
    without_nulls,
)
from ttrl.system.time_limit import time_limit

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
RENDER_SECONDS = 10.0
"""For one conversation. A template is a program out of a model's folder, and may never end; real
ones take milliseconds.
"""
_MOST_TOLD = 2000
"""Characters of an error: a template writes its own."""


def server_messages(
    messages: Sequence[Mapping[str, Any]],
    *,
    as_parts: bool = False,
) -> list[Message]:
    """Return the messages as vLLM passes them to a template, leaving the given ones unchanged.

    Null fields are gone, and the content is a text or, with `as_parts`, a list
    (`ttrl.data.chat.content`). Tool arguments in JSON text become objects (empty if the text is no
    object, see `unsayable`), empty lists of tool calls are gone, and reasoning goes by both of its
    names. Raises TokenizationError for a non-text part, such as a picture.
    """
    made: list[Message] = messages_without_nulls(messages)
    for number, message in enumerate(made):
        found = part_that_is_no_text(message.get("content"))
        if found is not None:
            raise TokenizationError(
                f"message {number} holds {found}; use text only: ttrl trains on text"
            )
        message["content"] = server_content(message, as_parts=as_parts)
        if message.get("role") == "assistant":
            if message.get("tool_calls"):
                message["tool_calls"] = [_server_call(call) for call in message["tool_calls"]]
            else:
                message.pop("tool_calls", None)
            for key, other in (
                ("reasoning", "reasoning_content"),
                ("reasoning_content", "reasoning"),
            ):
                if isinstance(message.get(key), str) and message.get(other) is None:
                    message[other] = message[key]
    return made


def unsayable(message: Mapping[str, Any]) -> str | None:
    """Say why no template could show an assistant's message as given; None if one might."""
    functions = [
        call["function"] for call in message.get("tool_calls") or [] if is_function_call(call)
    ]
    if any(_arguments(function.get("arguments")) is None for function in functions):
        return (
            "the arguments of a tool call are not a JSON object; a server shows the model {} "
            "instead"
        )
    if message.get("function_call"):
        return "function_call is the old form of tool_calls; templates do not show it"
    says_more = any(message.get(key) for key in ("tool_calls", *REASONING_KEYS))
    if not texts_of(message.get("content")) and not says_more:
        return "it is empty: neither content nor a tool call"
    return None


def _server_call(call: Any) -> Any:
    return with_arguments(call, lambda given: _arguments(given) or {})


def _with_text_arguments(message: Message) -> Message:
    text = functools.partial(json.dumps, ensure_ascii=False)
    if message.get("tool_calls"):
        return message | {
            "tool_calls": [with_arguments(call, text) for call in message["tool_calls"]]
        }
    return message


def _with_a_part(message: Message) -> Message:
    if message["content"] != []:
        return message
    return message | {"content": [{"type": "text", "text": ""}]}


def is_function_call(call: Any) -> bool:
    """Tell whether a tool call has the form of OpenAI's."""
    return isinstance(call, dict) and isinstance(call.get("function"), dict)


def with_arguments(call: Any, change: Callable[[Any], Any]) -> Any:
    """Return a tool call with its arguments changed; one of another form as it is."""
    if not is_function_call(call):
        return call
    function = call["function"]
    return call | {"function": function | {"arguments": change(function.get("arguments"))}}


def _arguments(given: Any) -> JsonObject | None:
    arguments = given or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if isinstance(arguments, dict):
        return arguments
    return None


class ChatTemplate:
    """`tokenizer`'s chat template for these tools, with its variables. `now` is the present time
    for templates writing the date; by default the real one. `seconds`: the limit of one rendering;
    RENDER_SECONDS by default. Raises ModelFolderError without a template.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: list[Tool] | None = None,
        now: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
        seconds: float | None = None,
    ) -> None:
        self._seconds = seconds or RENDER_SECONDS
        self.tokenizer = tokenizer
        self.tools: list[Tool] | None = without_nulls(tools)
        variables = dict(variables or {})
        name = variables.pop("chat_template", None)
        self.source, self.place = _choose(tokenizer, tools, name)
        if "strftime_now" in self.source and "strftime_now" not in variables:
            moment = now or datetime.now()
            variables["strftime_now"] = moment.strftime
        self.variables = variables

    def prepared(self, messages: Sequence[Message]) -> list[Message]:
        """Return `server_messages` in the form expected by this template.

        A template may refuse a server's form of a tool call: it then gets the arguments as JSON
        text, or an empty part for a missing content. Raises TemplateRefusalError if it refuses the
        conversation in any form, TokenizationError for a non-text part.
        """
        made = server_messages(messages, as_parts=self._wants_parts)
        if not any(message.get("tool_calls") for message in made):
            return made
        spelt = [_with_text_arguments(message) for message in made]
        forms = [made, spelt]
        forms += [[_with_a_part(message) for message in form] for form in (made, spelt)]
        for form in forms:
            try:
                self.render(form, answer_next=False)
            except TemplateRefusalError:
                continue
            return form
        return made

    def message(self, role: str, text: str) -> Message:
        """Return a plain message in the form expected by this template."""
        (message,) = server_messages([{"role": role, "content": text}], as_parts=self._wants_parts)
        return message

    @functools.cached_property
    def _wants_parts(self) -> bool:
        """Whether a server hands it lists of parts, or it shows nothing else."""
        if reads_parts(self.source):
            return True
        for content in ("kJw", [{"type": "text", "text": "kJw"}]):
            try:
                if "kJw" in self.render([{"role": "user", "content": content}], answer_next=True):
                    return content != "kJw"
            except TemplateRefusalError:
                continue
        return False

    def render(self, messages: list[Message], *, answer_next: bool) -> str:
        """Return the conversation as text; with `answer_next`, as a server gets it for answering.
        Raises TemplateRefusalError if the template does, ModelFolderError if it takes too long or
        too much memory.
        """
        with self._limited(""):
            return self._write(self.source, messages, answer_next=answer_next, times=1)[0]

    def render_tagged(
        self, source: str, messages: list[Message]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of the tagged template `source`, and its tags' starts and ends, in
        characters. Raises as `render`."""
        with self._limited(", with tags,"):
            return self._write(source, messages, answer_next=False, times=2)

    def _write(
        self,
        source: str,
        messages: list[Message],
        *,
        answer_next: bool,
        times: int,
    ) -> tuple[str, list[tuple[int, int]]]:
        variables = {
            "documents": None,
            **self.tokenizer.special_tokens_map,
            **self.variables,
            "messages": messages,
            "tools": self.tools,
            "add_generation_prompt": answer_next,
        }
        return render(source, variables, allowance(variables, times))

    @contextlib.contextmanager
    def _limited(self, how: str) -> Iterator[None]:
        try:
            with time_limit(self._seconds):
                yield
        except TimeoutError as error:
            raise ModelFolderError(
                f"{self.place} took more than {self._seconds:g} s for one conversation and may be "
                "in an endless loop: check it, or set another chat_template"
            ) from error
        except TemplateSizeError as error:
            way_out = "check it, or set another chat_template"
            raise ModelFolderError(
                f"{self.place} {error} for one conversation; {way_out}"
            ) from error
        except Exception as error:  # a template is a program, and may raise anything
            raise TemplateRefusalError(
                f"{self.place}{how} refuses the conversation: {_told(error)}"
            ) from error


def _told(error: Exception) -> str:
    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno} is not valid Jinja: {error.message}"
    if isinstance(error, TemplateError):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    return text[:_MOST_TOLD]


def _choose(tokenizer: Any, tools: Any, name: str | None) -> tuple[str, str]:
    """Return the template's text and a name for it. `name` is one of a list of named templates, or
    a template itself.
    """
    place = f"the chat template of {getattr(tokenizer, 'name_or_path', '') or 'the tokenizer'}"
    known = getattr(tokenizer, "chat_template", None)
    if isinstance(known, (list, tuple)):
        known = {row["name"]: row["template"] for row in known}
    if isinstance(known, Mapping):
        chosen = name or ("tool_use" if tools is not None and "tool_use" in known else "default")
        if chosen in known:
            return _text(known[chosen], f"{place} ({chosen!r})")
        if name is None:
            raise ModelFolderError(
                f"{place}: none of its templates is the default; choose chat_template from "
                f"{sorted(known)}"
            )
    if name is not None:
        return _text(name, "the given chat template")
    if known is None:
        raise ModelFolderError(
            "the tokenizer has no chat template; put a chat_template.jinja into the model's folder"
        )
    return _text(known, place)


def _text(source: Any, place: str) -> tuple[str, str]:
    """Return both. Raises ModelFolderError for anything but a text, and for an empty one."""
    if not isinstance(source, str) or not source.strip():
        raise ModelFolderError(
            f"{place} is {source!r:.80}, but must be a text: put a chat_template.jinja into the "
            "model's folder"
        )
    return source, place
