"""Exchange messages between ttrl and the processes of graders: frames of JSON and bytes, and
choices.

Answers of graders' processes are read only as JSON: a grader's objects are never unpickled here.
"""

import json
import struct
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from openai.types.chat.chat_completion import Choice

from ttrl.facts import parse
from ttrl.rollouts.client.choices import openai_choice, unbuilt_logprobs
from ttrl.rollouts.client.wire import Answer

MAX_ANSWER = 2**20
"""Bytes of one answer of a worker."""

_HEAD = struct.Struct(">I")


@dataclass
class Order:
    """An order to a worker; the pickled grader, if it is new, and the choice's JSON follow."""

    name: str
    grader: int
    """Its number."""
    where: str
    """The sample's place, for errors."""
    forget: list[int]
    """Graders the worker need not keep."""
    parts: list[int] = field(default_factory=list)
    """Lengths of the following parts."""


@dataclass
class Reply:
    """A worker's answer: `loaded` after a new grader, then a grade, an error or a refusal."""

    order: str
    """The name of the order."""
    loaded: bool = False
    reward: Any = None
    metrics: Any = None
    error: str | None = None
    refused: str | None = None
    """The whole message of a GraderError."""
    spoilt: bool = False
    """Whether the worker can take no further order."""
    parts: list[int] = field(default_factory=list)


Header = TypeVar("Header", Order, Reply)


def pack(header: Order | Reply, *parts: bytes) -> bytes:
    """Make one message: the length of the header, the header as JSON, the parts."""
    header.parts = [len(part) for part in parts]
    # Halves of surrogate pairs, not valid in UTF-8, become question marks.
    head = json.dumps(asdict(header), ensure_ascii=False).encode("utf-8", "replace")
    return b"".join((_HEAD.pack(len(head)), head, *parts))


def unpack(
    kind: type[Header], buffer: bytearray, limit: int | None = None
) -> tuple[Header, list[bytes]] | None:
    """Take one message off the front of `buffer`; return None if incomplete. Raises ValueError for
    anything else.
    """
    if len(buffer) < _HEAD.size:
        return None
    (length,) = _HEAD.unpack_from(buffer)
    if limit is not None and length > limit:
        raise ValueError(f"a header of {length} bytes")
    end = _HEAD.size + length
    if len(buffer) < end:
        return None
    try:
        header = parse(kind, bytes(buffer[_HEAD.size : end]))
    except RecursionError as error:
        raise ValueError("not a message") from error
    lengths = header.parts
    if limit is not None and lengths:
        raise ValueError("unexpected parts")
    if len(buffer) < end + sum(lengths):
        return None
    parts = []
    for length in lengths:
        parts.append(bytes(buffer[end : end + length]))
        end += length
    del buffer[:end]
    return header, parts


def choice_to_json(choice: Choice) -> bytes:
    """Write all fields of a choice visible to a grader, including those unknown to OpenAI."""
    logprobs = unbuilt_logprobs(choice)
    options: Any = {"exclude_unset": True, "by_alias": True, "warnings": False}
    if logprobs is not None:
        options["exclude"] = {"logprobs"}
    try:
        data = choice.model_dump_json(**options).encode()
    except ValueError:  # lone surrogates: invalid in UTF-8, but valid as JSON escapes
        data = json.dumps(choice.model_dump(**options)).encode()
    if logprobs is None:
        return data
    return b"".join((data[:-1], b"," if len(data) > 2 else b"", b'"logprobs":', logprobs, b"}"))


def choice_from_json(data: bytes) -> Choice:
    """Read such a choice; its logprobs are built on first access."""
    return openai_choice(Answer(choice=data))
