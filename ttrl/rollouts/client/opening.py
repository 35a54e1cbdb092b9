"""Find the opening of a reply: the part of the model's turn missing in its content, but held by the
prompt or the server.

A chat template may write `<think>` itself, and a request may ask to continue a started message. A
server with a reasoning parser removes the thinking and its tags from the content. A grader of a
reply's form needs both. They become the choice's field `opening`; `opening + content` is the
model's turn from its start.

Tags count only if known to be there. vLLM returns the rendered prompt (`return_prompt_text`). The
log-probabilities name the first token, and it shows whether the model itself opened the thinking
removed by a parser. Other servers give neither: their report of thinking is believed.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ttrl.rollouts.client.wire import Answer, encoded

START = "<think>"
END = "</think>"
# Thinking opened, or opened and closed, at the end of a prompt.
_AT_THE_END = re.compile(rf"{START}\s*(?:[^<]*{END}\s*)?(?:<answer>\s*)?$")
_EMPTY = re.compile(rf"\s*{START}\s*{END}\s*")
_LOOKED_AT = 4000
"""Characters at the end of a prompt."""
_FIRST_TOKENS = 3


class _Entry(msgspec.Struct):
    token: str = ""


class _Entries(msgspec.Struct):
    content: list[_Entry] | None = None


class _Message(msgspec.Struct):
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    logprobs: _Entries | None = None


_decoder = msgspec.json.Decoder(_Choice)


def with_opening(
    answer: Answer, messages: Sequence[Mapping[str, Any]], parameters: Mapping[str, Any]
) -> Answer:
    """Return the answer with its opening in the choice's JSON, if it has one.

    messages, parameters: of the request.
    """
    begun = None
    if answer.prompt_text is not None:
        begun = prefilled(answer.prompt_text, _continued(messages, parameters))
    opening = _of_choice(answer.choice, begun)
    choice = answer.choice
    if opening and choice.endswith(b"}") and choice != b"{}":
        choice = choice[:-1] + b',"opening":' + encoded(opening) + b"}"
    return msgspec.structs.replace(answer, choice=choice, prompt_text=None)


def prefilled(prompt: str, continued: str = "") -> str:
    """Return the end of a rendered prompt belonging to the reply. continued: the started message to
    continue.

    Templates switch thinking off by an empty block at the end. It is no part of the reply.
    """
    if continued and prompt.endswith(continued):
        return prefilled(prompt.removesuffix(continued)) + continued
    match = _AT_THE_END.search(prompt, max(0, len(prompt) - _LOOKED_AT))
    if match is None or _EMPTY.fullmatch(match[0]):
        return ""
    return match[0]


def _continued(messages: Sequence[Mapping[str, Any]], parameters: Mapping[str, Any]) -> str:
    if not parameters.get("continue_final_message") or not messages:
        return ""
    content = messages[-1].get("content")
    if isinstance(content, str):
        return content
    return ""


def _of_choice(choice: bytes, begun: str | None) -> str:
    """Return the opening of one choice. begun: the end of the prompt; None if the server did not
    tell.
    """
    if b'"reasoning' not in choice:
        return begun or ""
    try:
        read = _decoder.decode(choice)
    except ValueError:
        return begun or ""
    message = read.message or _Message()
    thoughts = message.reasoning or message.reasoning_content
    if not isinstance(thoughts, str) or not thoughts:
        return begun or ""
    if not message.content:
        return START + thoughts  # it never ended
    if begun is None:
        return START + thoughts + END
    if not begun.rstrip().endswith(START) and _opens_thinking(read.logprobs):
        begun += START
    return begun + thoughts + END


def _opens_thinking(logprobs: _Entries | None) -> bool:
    """Return whether the model began with the tag removed by the parser. Without tokens, the
    parser's report counts.
    """
    if logprobs is None or not logprobs.content:
        return True
    first = "".join(entry.token for entry in logprobs.content[:_FIRST_TOKENS])
    return first.lstrip().startswith(START)
