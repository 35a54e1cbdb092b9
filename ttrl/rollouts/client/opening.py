"""The opening of a reply: the part of the model's turn that its content lacks, as the prompt or the
server holds it.

A chat template may write `<think>` itself, and a request may ask to go on with a message that is
begun. A server with a reasoning parser takes the thinking out of the content, and its tags away. A
grader that judges a reply's form needs both. They become the choice's field `opening`, so that
`opening + content` is what the model's turn looks like from its start.

Tags count only where they are known to be there. vLLM says how it rendered the prompt
(`return_prompt_text`), and the log-probabilities name the first token, which tells whether the
model itself opened the thinking that a parser took out. Other servers say neither: their word that
there was thinking is believed.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ttrl.rollouts.client.wire import Answer, encoded

START = "<think>"
END = "</think>"
# Thinking that the end of a prompt opens, or opens and closes.
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
    """Return the end of a rendered prompt that belongs to the reply. continued: the begun message
    to go on with.

    An empty block of thinking at the end is how templates switch thinking off. It is no part of the
    reply.
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
    """Return whether the model began with the tag that the parser took off. Without tokens, the
    parser's word counts.
    """
    if logprobs is None or not logprobs.content:
        return True
    first = "".join(entry.token for entry in logprobs.content[:_FIRST_TOKENS])
    return first.lstrip().startswith(START)
