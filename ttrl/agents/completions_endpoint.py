"""Answer POST /v1/completions: continue a prompt of text or token ids, without a chat template."""

import secrets
import time
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from ttrl.agents.chat_endpoint import finish_reason
from ttrl.agents.request_parameters import MODEL, Asked, events
from ttrl.errors import UserError
from ttrl.messages import JsonObject, Message
from ttrl.records import PROMPT
from ttrl.rollouts.client.wire import is_ids
from ttrl.text import present, short

FREE = frozenset({"prompt"})
NEUTRAL: JsonObject = {"best_of": 1, "echo": False, "suffix": ""}


def read(body: Mapping[str, Any]) -> Asked:
    """Parse a request. Raises UserError for several prompts: send one request for each."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if not prompt or not (isinstance(prompt, str) or is_ids(prompt)):
        raise UserError(
            f"prompt is {short(prompt, 60)}; give one prompt: a text or a list of token ids"
        )
    logprobs = body.get("logprobs")
    if logprobs is not None and (type(logprobs) is not int or not 0 <= logprobs <= 1):
        raise UserError(
            f"logprobs is {short(logprobs, 60)}; set it to 0 or 1: a session returns only those of "
            "the generated tokens"
        )
    limits = present([body.get("max_tokens")])
    return Asked([{"role": PROMPT, "content": prompt}], None, body.get("stop"), limits)


def answer(body: Mapping[str, Any], message: Message, choice: Any) -> web.Response:
    """Return a completion or its stream, in the API's format."""
    head = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": MODEL,
    }
    logprobs: dict[str, list[Any]] | None = None
    if body.get("logprobs") is not None and choice.logprobs is not None:
        entries = choice.logprobs.content
        logprobs = {
            "tokens": [entry.token for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [],
            "text_offset": [],
        }
    one = {
        "index": 0,
        "text": message["content"],
        "logprobs": logprobs,
        "finish_reason": finish_reason(choice),
    }
    if body.get("return_token_ids"):  # as in vLLM
        one |= {"prompt_token_ids": choice.prompt_token_ids, "token_ids": choice.token_ids}
    if not body.get("stream"):
        return web.json_response({**head, "choices": [one], "usage": choice.usage})
    if (body.get("stream_options") or {}).get("include_usage"):
        usage = [{**head, "choices": [], "usage": choice.usage}]
    else:
        usage = []
    return events([{**head, "choices": [one]}, *usage])
