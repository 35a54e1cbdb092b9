"""Parse requests to POST /v1/chat/completions; answer them whole or as a stream."""

import secrets
import time
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from ttrl.agents.request_parameters import MODEL, Asked, events, tools_of
from ttrl.errors import UserError
from ttrl.messages import JsonObject, Message, messages_without_nulls, part_that_is_no_text
from ttrl.text import present, short

FREE = frozenset({"messages", "max_completion_tokens"})
NEUTRAL: JsonObject = {}
_FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter")


def read(body: Mapping[str, Any]) -> Asked:
    """Parse a request. Drop null fields of messages: clients send replies back with them. Raises
    UserError.
    """
    given = body.get("messages")
    if (
        not isinstance(given, list)
        or not given
        or not all(isinstance(message, dict) for message in given)
    ):
        raise UserError(f"messages is {short(given, 60)}; give a non-empty list of objects")
    for number, message in enumerate(given):
        found = part_that_is_no_text(message.get("content"))
        if found is not None:
            raise UserError(
                f"messages[{number}] holds {found}; send text only: the policy trains on text"
            )
        if message.get("role") == "prompt":
            raise UserError(
                f"messages[{number}] has the role 'prompt'; send prompts to /v1/completions"
            )
    limits = present((body.get("max_completion_tokens"), body.get("max_tokens")))
    return Asked(messages_without_nulls(given), tools_of(body), body.get("stop"), limits)


def answer(body: Mapping[str, Any], message: Message, choice: Any) -> web.Response:
    """Return a completion or its stream, in the API's format."""
    reason = finish_reason(choice)
    if body.get("logprobs") and choice.logprobs is not None:
        logprobs = choice.logprobs.model_dump(mode="json")
    else:
        logprobs = None
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": MODEL}
    if not body.get("stream"):
        one = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": reason}
        if body.get("return_token_ids"):  # as in vLLM
            head = {**head, "prompt_token_ids": choice.prompt_token_ids}
            one = {**one, "token_ids": choice.token_ids}
        return web.json_response(
            {**head, "object": "chat.completion", "choices": [one], "usage": choice.usage}
        )
    delta = dict(message)
    calls = message.get("tool_calls")
    if calls:
        delta["tool_calls"] = [{**call, "index": number} for number, call in enumerate(calls)]
    chunks: list[JsonObject] = [
        {"choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": reason}]},
    ]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({"choices": [], "usage": choice.usage})
    return events([{**head, "object": "chat.completion.chunk", **chunk} for chunk in chunks])


def finish_reason(choice: Any) -> str:
    """Return the finish reason, in the API's terms."""
    return choice.finish_reason if choice.finish_reason in _FINISH_REASONS else "stop"
