"""Check an agent's request parameters: none may change the sampled distribution."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from ttrl.errors import UserError
from ttrl.messages import JsonObject, Message, Tool
from ttrl.text import present, short

MODEL = "policy"
# Free parameters leave the distribution unchanged, or are read elsewhere. The run sets the seed:
# with an agent's own, all samples of a task would be equal.
# fmt: off
FREE = frozenset([
    "model", "tools", "stop", "max_tokens", "stream", "stream_options", "logprobs", "seed", "user",
    "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention",
    "safety_identifier", "return_token_ids",
])
# fmt: on
NEUTRAL: JsonObject = {
    "n": 1,
    "temperature": 1,
    "top_p": 1,
    "min_p": 0,
    "top_logprobs": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
}


@dataclass(frozen=True)
class Asked:
    """A parsed request of any of the APIs."""

    messages: list[Message]
    tools: list[Tool] | None = None
    stop: Any = None
    max_tokens: list[Any] = field(default_factory=list)
    """The given limits, unparsed."""


def check_parameters(
    body: Mapping[str, Any],
    own: Mapping[str, Any],
    ignore: Collection[str],
    free: Collection[str],
    neutral: Mapping[str, Any],
    names: Sequence[str] = (MODEL,),
) -> None:
    """Raise UserError for parameters that would change the trained distribution.

    own: the run's sampling parameters.
    free, neutral: names read by the API itself, and values without effect there.
    names: names of the policy.
    """
    if body.get("model", MODEL) not in names:
        known = " or ".join(repr(name) for name in names)
        asked = short(body["model"], 60)
        raise UserError(
            f"model is {asked}, but this session's is {known}; ask other models at their own "
            "addresses"
        )
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"tools is {short(tools, 60)}; give a list of objects")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise UserError(f"stream_options is {short(body['stream_options'], 60)}; give an object")
    for name, value in body.items():
        if (
            name in FREE
            or name in free
            or name in ignore
            or value is None
            or (name == "tool_choice" and value == "none")
        ):
            continue
        if name in neutral:
            default = neutral[name]
        else:
            default = NEUTRAL.get(name)
        sampled = own.get(name, default)
        if value != sampled:
            if sampled is None:
                shown = "does not set it"
            else:
                shown = f"samples with {short(sampled, 60)}"
            raise UserError(
                f"{name} is {short(value, 60)}, but the run {shown}, and training needs the same "
                f"distribution; leave it out, set it for the run, or ignore it: ignore=[{name!r}]"
            )


def least_tokens(given: Collection[Any], own: Mapping[str, Any]) -> int | None:
    """Return the least of the agent's limits and the run's; None if the agent gave none. Raises
    UserError.
    """
    for value in given:
        if type(value) is not int or value < 1:
            raise UserError(f"max_tokens is {short(value, 60)}; give a whole number of at least 1")
    limits = present((own.get("max_completion_tokens"), own.get("max_tokens")))
    return min([*given, *limits[:1]]) if given else None


def tools_of(body: Mapping[str, Any]) -> list[Tool] | None:
    """Return the tools offered to the model; None for none."""
    if body.get("tool_choice") != "none":
        return body.get("tools") or None
    return None


async def read_json(request: web.Request) -> Mapping[str, Any]:
    """Return the object of a request's body. Raises UserError."""
    try:
        body = json.loads(await request.read() or b"{}")
    except (ValueError, RecursionError) as error:
        raise UserError(f"the request's body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise UserError(f"the request's body is {short(body, 60)}; send an object")
    return body


def refusal(status: int, message: str, code: str) -> web.Response:
    """Return an error in the API's format, with OpenAI's clients kept from retrying."""
    error = {
        "message": message,
        "type": "invalid_request_error" if status < 500 else "server_error",
        "param": None,
        "code": code,
    }
    return web.json_response({"error": error}, status=status, headers={"x-should-retry": "false"})


def events(
    objects: Collection[Any], *, named: bool = False, end: str = "data: [DONE]\n\n"
) -> web.Response:
    """Return a complete stream. named: each event is preceded by its type."""
    lines = [
        (f"event: {one['type']}\n" if named else "") + f"data: {json.dumps(one)}\n\n"
        for one in objects
    ]
    return web.Response(text="".join([*lines, end]), content_type="text/event-stream")
