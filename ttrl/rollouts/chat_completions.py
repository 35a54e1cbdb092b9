"""One request for chat completions: checked before anything is sent; its failures told apart, retried or explained.

All n samples of a task come from one request that is not streamed: the client's cost is then a few microseconds per token, where
streaming or n requests of one sample cost several times as much.

The client's own retries are switched off in favour of the few lines here, because it also repeats other refusals (409), and
because a failure should say how often it was tried. Streams and the cache have no place here yet.
"""

import asyncio
import difflib
import functools
import inspect
import logging
import math
import numbers
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import openai
from openai import AsyncOpenAI
from openai.resources.chat.completions import AsyncCompletions
from openai.types.chat import ChatCompletion

from ttrl.errors import ServerError, UserError

logger = logging.getLogger(__name__)

FIRST_DELAY = 0.5
"""Seconds before the first retry; doubled each time, with up to a quarter taken off at random."""
LONGEST_DELAY = 8.0
LONGEST_RETRY_AFTER = 120.0
"""A server's Retry-After is obeyed up to this many seconds."""

# Sampling parameters of vLLM's chat completions that the OpenAI API does not have; they travel in the request's body.
# fmt: off
VLLM_PARAMS = frozenset([
    "top_k", "min_p", "repetition_penalty", "length_penalty", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "min_tokens", "bad_words", "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens",
    "allowed_token_ids", "structured_outputs", "priority", "chat_template", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "thinking_token_budget", "include_reasoning",
])
# fmt: on
_OURS = {
    "messages": "they come from the tasks",
    "model": "give it as get_task_results(model=…)",
    "n": "give it as get_task_results(n=…)",
    "stream": "completions are not streamed",
    "stream_options": "completions are not streamed",
}


@functools.cache
def _openai_params() -> frozenset[str]:
    return frozenset(inspect.signature(AsyncCompletions.create).parameters) - {"self"}


@dataclass(frozen=True)
class ChatRequest:
    """What all requests of one call have in common. Make it with `ChatRequest.of`, which checks everything."""

    client: AsyncOpenAI
    """With its own retries switched off."""
    kwargs: dict[str, Any]
    """Arguments of `client.chat.completions.create`, all but the messages."""
    max_retries: int
    wants_logprobs: bool

    @classmethod
    def of(
        cls, client: AsyncOpenAI, model: str, *, n: int, params: Mapping[str, Any] | None, token_ids: bool, max_retries: int
    ) -> "ChatRequest":
        """Raises UserError for whatever can be known to be wrong before a request is made."""
        if isinstance(client, openai.OpenAI):
            raise UserError(f"client is a {type(client).__name__}; sampling is concurrent: give an AsyncOpenAI client")
        if not isinstance(model, str) or not model:
            raise UserError(f"model is {model!r}; give the name under which the server serves it")
        _check_int("n", n, at_least=1)
        _check_int("max_retries", max_retries, at_least=0)
        kwargs = request_kwargs(params)
        kwargs.setdefault("logprobs", True)
        if token_ids:
            kwargs["extra_body"] = {**kwargs.get("extra_body", {}), "return_token_ids": True}
        return cls(
            client=client.with_options(max_retries=0),
            kwargs={**kwargs, "model": model, "n": n, "stream": False},
            max_retries=max_retries,
            wants_logprobs=bool(kwargs["logprobs"]),
        )


def request_kwargs(params: Mapping[str, Any] | None) -> dict[str, Any]:
    """Turns sampling parameters into arguments of the OpenAI client: vLLM's own (top_k, min_p, …) go into `extra_body`.

    Parameters that are None are left to the server. Raises UserError for names that neither knows (vLLM would ignore a misspelt
    one without a word) and for values that cannot be meant.
    """
    if params is None:
        return {}
    if not isinstance(params, Mapping):
        raise UserError(f"params is {params!r}; give a dict of sampling parameters such as {{'temperature': 1.0}}")
    given = {name: value for name, value in params.items() if value is not None}
    kwargs: dict[str, Any] = {}
    extra_body = given.pop("extra_body", {})
    if not isinstance(extra_body, Mapping):
        raise UserError(f"params['extra_body'] is {extra_body!r}; give a dict")
    extra_body = dict(extra_body)
    for name, value in given.items():
        if name in _OURS:
            raise UserError(f"params[{name!r}] cannot be set: {_OURS[name]}")
        if name in _openai_params():
            kwargs[name] = value
        elif name in VLLM_PARAMS:
            extra_body[name] = value
        else:
            near = difflib.get_close_matches(str(name), sorted(_openai_params() | VLLM_PARAMS), n=1)
            hint = f"did you mean {near[0]!r}?" if near else "if your server knows it, give it in params['extra_body']"
            raise UserError(f"params[{name!r}] is no sampling parameter of the OpenAI API or of vLLM; {hint}")
    _check_number("params['temperature']", kwargs.get("temperature"), 0.0, math.inf)
    _check_number("params['top_p']", kwargs.get("top_p"), 0.0, 1.0)
    for name in ("max_tokens", "max_completion_tokens"):
        if name in kwargs:
            _check_int(f"params[{name!r}]", kwargs[name], at_least=1)
    if extra_body:
        kwargs["extra_body"] = extra_body
    return kwargs


def _check_int(name: str, value: object, *, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise UserError(f"{name} is {value!r}; give a whole number of at least {at_least}")


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if value is None:
        return
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not (low <= value <= high and math.isfinite(value)):
        above = f"and at most {high:g}" if math.isfinite(high) else "and finite"
        raise UserError(f"{name} is {value!r}; give a number of at least {low:g} {above}")


async def get_chat_completion(request: ChatRequest, messages: list[dict[str, Any]]) -> ChatCompletion:
    """One request, retried with growing pauses on connection errors, timeouts, 408, 429 and 5xx, never on another refusal.

    Raises ServerError with the server's own words, the number of attempts, and where the server was looked for.
    """
    attempts = request.max_retries + 1
    for attempt in range(1, attempts + 1):
        try:
            completion = await request.client.chat.completions.create(messages=messages, **request.kwargs)  # type: ignore[call-overload]
        except openai.APIError as error:
            if attempt == attempts or not _is_worth_a_retry(error):
                raise ServerError(_explain(error, request.client, attempt)) from error
            delay = _delay(error, attempt)
            logger.debug("%s; trying again in %.1f s", _explain(error, request.client, attempt), delay)
            await asyncio.sleep(delay)
            continue
        except openai.OpenAIError as error:  # no key, no credentials: the client gave up before it sent anything
            raise ServerError(f"{request.client.base_url}: the client could not send the request: {error}") from error
        except ValueError as error:  # the body said that it was JSON and is not
            raise ServerError(f"{request.client.base_url}: the server's answer cannot be read: {error}") from error
        return _checked(completion, request.client)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _checked(completion: object, client: AsyncOpenAI) -> ChatCompletion:
    """The client returns text as it is where the answer is not JSON, and leaves fields out that the JSON lacks."""
    if not isinstance(completion, ChatCompletion):
        raise ServerError(f"{client.base_url}: the server answered {_short(completion)}, which is no chat completion")
    if not isinstance(getattr(completion, "choices", None), list):
        raise ServerError(f"{client.base_url}: the server's answer has no choices: {_short(completion.to_dict())}")
    return completion


def _is_worth_a_retry(error: openai.APIError) -> bool:
    if isinstance(error, openai.APIConnectionError):  # APITimeoutError is one
        return True
    return isinstance(error, openai.APIStatusError) and (error.status_code in (408, 429) or error.status_code >= 500)


def _delay(error: openai.APIError, attempt: int) -> float:
    if isinstance(error, openai.APIStatusError):
        try:
            seconds = float(error.response.headers.get("retry-after", ""))
        except ValueError:  # absent, or a date
            seconds = math.nan
        if 0.0 <= seconds <= LONGEST_RETRY_AFTER:
            return seconds
    return min(FIRST_DELAY * 2 ** min(attempt - 1, 16), LONGEST_DELAY) * (1.0 - 0.25 * random.random())


def _explain(error: openai.APIError, client: AsyncOpenAI, attempts: int) -> str:
    tried = f" ({attempts} attempts)" if attempts > 1 else ""
    if isinstance(error, openai.APIStatusError):
        body = error.body
        words = body.get("message") if isinstance(body, Mapping) else None
        return f"{client.base_url}: HTTP {error.status_code}{tried}: {_short(words or body or error.message)}"
    if isinstance(error, openai.APITimeoutError):
        return f"{client.base_url}: no answer within the client's timeout of {_seconds(client.timeout)}{tried}"
    cause = error.__cause__
    why = f"{type(cause).__name__}: {cause}" if cause is not None else error.message
    return f"{client.base_url}: no connection{tried}: {_short(why)}; is the server running?"


def _seconds(timeout: object) -> str:
    read = getattr(timeout, "read", timeout)
    return f"{read:g} s" if isinstance(read, int | float) else str(read)


def _short(value: object, length: int = 400) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 1] + "…"
