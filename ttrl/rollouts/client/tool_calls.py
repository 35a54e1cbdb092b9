"""Tool calls of a message while they are streamed, also by servers that do so in their own way.

A part of a call carries an index, and the first one an id, a name and perhaps arguments; later ones
add arguments. Servers also number every call 0 (Ollama through LiteLLM), repeat the name in every
part (MiniMax, Kimi), and send the arguments again, whole or so far (DeepSeek, several gateways).
Whatever a server streams by the book is read as OpenAI's own client reads it.
"""

import itertools
import json
from collections.abc import Sequence
from typing import Any

from ttrl.rollouts.client.wire import FunctionDelta, ToolCallDelta


class LiveFunction:
    """The function of a call so far."""

    def __init__(self) -> None:
        self.name = ""
        self._pieces: list[str] = []
        self._joined = ""
        self._num_joined = 0

    @property
    def arguments(self) -> str:
        """The arguments so far, joined when somebody looks."""
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
        """Tell whether a name that comes with a part must be another function's."""
        return bool(name and self.name and self._pieces) and name != self.name

    def json(self) -> dict[str, str]:
        """Return it as a server that does not stream would have sent it."""
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

    def json(self) -> dict[str, Any]:
        """Return it as a server that does not stream would have sent it."""
        return {"id": self.id, "type": self.type, "function": self.function.json()}


def add_part(calls: list[LiveToolCall], part: ToolCallDelta) -> None:
    """Add a part to the call that it continues, or as the beginning of another one."""
    call = _continued(calls, part)
    if call is None:
        call = LiveToolCall(len(calls) if part.index is None else part.index)
        calls.append(call)
        calls.sort(key=lambda call: call.index)
    call.add(part)


def _continued(calls: Sequence[LiveToolCall], part: ToolCallDelta) -> LiveToolCall | None:
    """Return the call that a part continues; None if it begins one.

    Parts of a call share its index, or have none. Of calls with the same index, those with another
    id are others, unless the part has nothing but arguments: then the server makes up ids.
    """
    if part.function is None:
        name = None
    else:
        name = part.function.name
    if part.function is None:
        arguments = None
    else:
        arguments = part.function.arguments
    same_index = [call for call in calls if part.index in (None, call.index)]
    found = next((call for call in same_index if part.id and call.id == part.id), None)
    if found is None and same_index:
        last = same_index[-1]
        may_get_id = last.id is None and part.index is not None
        makes_up_ids = part.index is not None and bool(arguments) and not name
        if not part.id or may_get_id or makes_up_ids:
            found = last
    if found is None or found.function.is_other(name):
        return None
    return found


def whole_arguments(pieces: Sequence[str]) -> str:
    """Join the pieces of a call's arguments, a JSON object, as often as the server sent them.

    Pieces that give JSON are joined whatever they look like, and so is the beginning of JSON. Else
    the pieces may be the object in parts or in one, then the same object again in one; or each
    piece may be all of it so far.
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
    if grows and not is_beginning and _object_in(pieces[-1]) is not None:
        return pieces[-1]
    return text


def _before_repeats(text: str, pieces: Sequence[str]) -> str | None:
    """Return the object that ends with a piece if all further pieces are that object, else None."""
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
    if all(_object_in(piece) == first for piece in repeats):
        return text[:length]
    return None


def _object_in(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(found, dict):
        return found
    return None
