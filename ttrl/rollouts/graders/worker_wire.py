"""Exchange messages between ttrl and the processes of graders: frames of JSON and bytes, and
choices.

Answers of graders' processes are read only as JSON: a grader's objects are never unpickled here.
"""

import json
import struct
from typing import Any

from openai.types.chat.chat_completion import Choice

from ttrl.rollouts.client.choices import openai_choice, unbuilt_logprobs
from ttrl.rollouts.client.wire import Answer

MAX_ANSWER = 2**20
"""Bytes of one answer of a worker."""

_HEAD = struct.Struct(">I")


def pack(header: dict[str, Any], *parts: bytes) -> bytes:
    """Make one message: the length of the header, the header as JSON, the parts."""
    head = json.dumps({**header, "parts": [len(part) for part in parts]}).encode()
    return b"".join((_HEAD.pack(len(head)), head, *parts))


def unpack(
    buffer: bytearray, limit: int | None = None
) -> tuple[dict[str, Any], list[bytes]] | None:
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
        header = json.loads(buffer[_HEAD.size : end])
        lengths = header["parts"]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError("not a message") from error
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
