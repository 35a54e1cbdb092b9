"""Assemble streamed tool calls of a message, including nonstandard ones.

A part of a call has an index, and the first one an id, a name and perhaps arguments; later ones add
arguments. Servers also number every call 0 (Ollama through LiteLLM), repeat the name in every part
(MiniMax, Kimi), and send the arguments again, whole or so far (DeepSeek, several gateways).
Standard streams are read as by OpenAI's own client.
"""

import itertools
import json
from collections.abc import Sequence

from ttrl.messages import JsonObject
from ttrl.rollouts.client.wire import FunctionDelta, ToolCallDelta, loads


class LiveFunction:
    """The function of a call so far."""

    def __init__(self) -> None:
        self.name = ""
        self._pieces: list[str] = []
        self._joined = ""
        self._num_joined = 0

    @property
    def arguments(self) -> str:
        """The arguments so far, joined on access."""
        if self._num_joined < len(self._pieces):
            self._joined = whole_arguments(self._pieces)
            self._num_joined = len(self._pieces)
        return self._joined

    def add(self, part: FunctionDelta) -> None:
        """Add a part. A name may come in pieces until the arguments begin, not afterwards."""
        if part.name and part.name != self.name and not self._pieces:
            self.name += part.name
        if part.arguments:
            self._pieces.append(part.arguments)

    def is_other(self, name: str | None) -> bool:
        """Return whether a part's name must be another function's."""
        return bool(name and self.name and self._pieces) and name != self.name

    def json(self) -> dict[str, str]:
        """Return it in the form of an unstreamed answer."""
        return {"name": self.name, "arguments": self.arguments}


class LiveToolCall:
    """One call so far, under the names of openai's ChatCompletionMessageToolCall."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.id: str | None = None
        self.type = "function"
        self.function = LiveFunction()

    def add(self, part: ToolCallDelta) -> None:
        self.id = self.id or part.id
        self.type = part.type or self.type
        if part.function is not None:
            self.function.add(part.function)

    def json(self) -> JsonObject:
        """Return it in the form of an unstreamed answer."""
        return {"id": self.id, "type": self.type, "function": self.function.json()}


def add_part(calls: list[LiveToolCall], part: ToolCallDelta) -> None:
    """Add a part to its call, or begin another one."""
    call = _continued(calls, part)
    if call is None:
        call = LiveToolCall(len(calls) if part.index is None else part.index)
        calls.append(call)
        calls.sort(key=lambda call: call.index)
    call.add(part)


def _continued(calls: Sequence[LiveToolCall], part: ToolCallDelta) -> LiveToolCall | None:
    """Return the call a part continues; None if it begins one.

    Parts of a call share its index, or have none. Of calls with the same index, other ids mean
    other calls, unless the part has only arguments: then the server makes up ids.
    """
    function = part.function or FunctionDelta()
    same_index = [call for call in calls if part.index in (None, call.index)]
    found = next((call for call in same_index if part.id and call.id == part.id), None)
    if found is None and same_index:
        last = same_index[-1]
        may_get_id = last.id is None and part.index is not None
        makes_up_ids = part.index is not None and bool(function.arguments) and not function.name
        if not part.id or may_get_id or makes_up_ids:
            found = last
    if found is None or found.function.is_other(function.name):
        return None
    return found


def whole_arguments(pieces: Sequence[str]) -> str:
    """Join the pieces of a call's arguments, a JSON object, dropping repeats.

    Pieces forming JSON, or the beginning of JSON, are always joined. Otherwise the pieces may be
    the object in one or several parts, followed by the same object in one piece; or each piece may
    be all of it so far.
    """
    text = "".join(pieces)
    if len(pieces) < 2 or not text.lstrip().startswith("{"):
        return text
    try:
        json.loads(text)
        return text
    except json.JSONDecodeError as error:
        is_beginning = error.pos >= len(text) or error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        return text
    head = _before_repeats(text, pieces)
    if head is not None:
        return head
    grows = all(new.startswith(old) for old, new in itertools.pairwise(pieces))
    if grows and not is_beginning and isinstance(loads(pieces[-1]), dict):
        return pieces[-1]
    return text


def _before_repeats(text: str, pieces: Sequence[str]) -> str | None:
    """Return the object ending with a piece if all further pieces repeat it, else None."""
    try:
        first, end = json.JSONDecoder().raw_decode(text, len(text) - len(text.lstrip()))
    except (ValueError, RecursionError):
        return None
    length = count = 0
    while length < end:
        length += len(pieces[count])
        count += 1
    if text[end:length].strip():
        return None
    repeats = [piece for piece in pieces[count:] if piece.strip()]
    if all(loads(piece) == first for piece in repeats):
        return text[:length]
    return None
