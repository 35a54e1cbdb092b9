"""Answer POST /v1/responses as a chat: text, function tools and their results, earlier responses of
the session.

Items become chat messages, and the reply becomes items. A reply sent back becomes the same message
again. Other parts of the API (pictures, files, tools of the provider, structured text, background)
are refused.
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aiohttp import web

from ttrl.agents.request_parameters import MODEL, Asked, events, tools_of
from ttrl.errors import UserError
from ttrl.messages import JsonObject, Message, Tool
from ttrl.tasks.task import question
from ttrl.text import present, short

# fmt: off
FREE = frozenset([
    "input", "instructions", "previous_response_id", "max_output_tokens", "include", "truncation",
    "max_tool_calls",
])
# fmt: on
NEUTRAL: JsonObject = {
    "background": False,
    "text": {"format": {"type": "text"}},
    "reasoning": {},
    "verbosity": "medium",
}
_TEXT = ("input_text", "output_text", "text", "refusal")


def read(body: Mapping[str, Any], earlier: Mapping[str, list[Message]]) -> Asked:
    """Parse a request. earlier: the conversations of the session's responses, by their ids. Raises
    UserError.
    """
    previous = body.get("previous_response_id")
    given = body.get("input")
    instructions = body.get("instructions")
    if previous is not None and previous not in earlier:
        raise UserError(
            f"previous_response_id is {short(previous, 60)}, but this session has no such response"
        )
    items = question(given) if isinstance(given, str) else given
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise UserError(f"input is {short(given, 60)}; give a text or a list of items")
    messages = [*earlier.get(previous or "", []), *_messages(items)]
    if instructions:
        messages = [{"role": "system", "content": instructions}, *messages]
    if not messages:
        raise UserError("input is empty; give a text or a list of items")
    tools = [_tool(tool) for tool in tools_of(body) or ()]
    limits = present([body.get("max_output_tokens")])
    return Asked(messages, tools or None, body.get("stop"), limits)


def _messages(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    messages: list[Message] = []
    reply: Message | None = None  # assistant message the next item may extend
    for number, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message" and item.get("role") != "assistant":
            role = "system" if item.get("role") == "developer" else item.get("role")
            messages.append({"role": role, "content": _text(item.get("content"), number)})
            reply = None
        elif kind == "function_call_output":
            content = _text(item.get("output"), number)
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
            )
            reply = None
        elif kind in ("message", "function_call", "reasoning"):
            has_text = reply is not None and (reply["content"] is not None or "tool_calls" in reply)
            if reply is None or kind == "reasoning" or (kind == "message" and has_text):
                reply = {"role": "assistant", "content": None}
                messages.append(reply)
            if kind == "message":
                reply["content"] = _text(item.get("content"), number)
            elif kind == "reasoning":
                reply["reasoning"] = _text(item.get("content") or item.get("summary") or "", number)
            else:
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                reply.setdefault("tool_calls", []).append(
                    {"id": item.get("call_id"), "type": "function", "function": function}
                )
        else:
            raise UserError(
                f"input[{number}] is of type {short(kind, 60)}; a session accepts messages, "
                "reasoning and function calls"
            )
    return messages


def _text(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = content
    else:
        parts = [content]
    texts = []
    for part in parts:
        if isinstance(part, dict):
            kind = part.get("type")
        else:
            kind = type(part).__name__
        if kind not in (*_TEXT, "reasoning_text", "summary_text"):
            raise UserError(
                f"input[{number}] has a part of type {short(kind, 60)}; send text only: the policy "
                "trains on text"
            )
        texts.append(part.get("text") or part.get("refusal") or "")
    return "".join(texts)


def _tool(tool: Mapping[str, Any]) -> Tool:
    """Return a function in the format of chat completions."""
    if tool.get("type") != "function":
        raise UserError(
            f"tools has one of type {short(tool.get('type'), 60)}; a session accepts only functions"
        )
    kept = {
        name: tool[name]
        for name in ("name", "description", "parameters")
        if tool.get(name) is not None
    }
    return {"type": "function", "function": kept}


# Answers


def answer(
    body: Mapping[str, Any], message: Message, choice: Any, response_id: str
) -> tuple[JsonObject, web.Response]:
    """Return a response in the API's format, and the HTTP answer: the response or its stream."""
    output = _items(message)
    is_cut = choice.finish_reason == "length"
    usage = choice.usage
    begun = {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": MODEL,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "text": {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "truncation": "disabled",
        "usage": None,
    }
    whole = {
        **begun,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }
    if not body.get("stream"):
        return whole, web.json_response(whole)
    told = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        *(event for index, item in enumerate(output) for event in _events(index, item)),
        {"type": "response.incomplete" if is_cut else "response.completed", "response": whole},
    ]
    return whole, events(
        [{**event, "sequence_number": number} for number, event in enumerate(told)],
        named=True,
        end="",
    )


def _items(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    items: list[Mapping[str, Any]] = []
    content = message.get("content")
    calls = message.get("tool_calls") or []
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if reasoning:
        items.append(
            {
                "type": "reasoning",
                "id": _id("rs"),
                "status": "completed",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": reasoning}],
            }
        )
    if content or not calls:
        items.append(
            {
                "type": "message",
                "id": _id("msg"),
                "status": "completed",
                "role": "assistant",
                "content": [
                    {
                        "type": "output_text",
                        "text": content or "",
                        "annotations": [],
                        "logprobs": [],
                    }
                ],
            }
        )
    for call in calls:
        function = call["function"]
        items.append(
            {
                "type": "function_call",
                "id": _id("fc"),
                "status": "completed",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": function["arguments"],
            }
        )
    return items


def _events(index: int, item: Mapping[str, Any]) -> Iterator[JsonObject]:
    """Yield the events of a complete item."""
    place = {"item_id": item["id"], "output_index": index}
    if item["type"] == "function_call":
        yield {
            "type": "response.output_item.added",
            "output_index": index,
            "item": {**item, "status": "in_progress", "arguments": ""},
        }
        yield {
            "type": "response.function_call_arguments.delta",
            **place,
            "delta": item["arguments"],
        }
        yield {
            "type": "response.function_call_arguments.done",
            **place,
            "name": item["name"],
            "arguments": item["arguments"],
        }
    else:
        yield {
            "type": "response.output_item.added",
            "output_index": index,
            "item": {**item, "status": "in_progress", "content": []},
        }
        kind = "response.output_text"
        more: dict[str, list[object]] = {"logprobs": []}
        if item["type"] == "reasoning":
            kind = "response.reasoning_text"
            more = {}
        for number, part in enumerate(item["content"]):
            here = {**place, "content_index": number}
            yield {"type": "response.content_part.added", **here, "part": {**part, "text": ""}}
            yield {"type": f"{kind}.delta", **here, "delta": part["text"], **more}
            yield {"type": f"{kind}.done", **here, "text": part["text"], **more}
            yield {"type": "response.content_part.done", **here, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
