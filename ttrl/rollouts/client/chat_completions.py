"""Check sampling parameters before anything is sent, and make request bodies for chat
completions.
"""

import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openai import NotGiven
from openai.resources.chat.completions import AsyncCompletions

from ttrl.errors import UserError
from ttrl.messages import JsonObject, without_nulls
from ttrl.rollouts.client.wire import EXPERTS
from ttrl.text import is_number

STALL_TIMEOUT = 120.0
"""Seconds without a byte before a stream counts as broken."""
# Sampling parameters of vLLM's chat completions that the OpenAI API does not have; they travel in
# the request's body. fmt: off
VLLM_PARAMS = frozenset(
    [
        "top_k",
        "min_p",
        "repetition_penalty",
        "length_penalty",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "min_tokens",
        "bad_words",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "truncate_prompt_tokens",
        "allowed_token_ids",
        "structured_outputs",
        "priority",
        "chat_template",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "thinking_token_budget",
        "include_reasoning",
        EXPERTS,
    ]
)
# fmt: on
_OURS = {
    "messages": "they come from the tasks",
    "model": "give it as get_task_results(model=…)",
    "n": "give it as get_task_results(n=…)",
    "stream": "set on_chunk to stream completions",
    "stream_options": "set on_chunk to stream completions",
    "extra_headers": "give them to the client, as AsyncOpenAI(default_headers=…)",
    "extra_query": "give it to the client, as AsyncOpenAI(default_query=…)",
    "timeout": "give it to the client, as AsyncOpenAI(timeout=…)",
}


@functools.cache
def _known_parameters() -> frozenset[str]:
    openai = inspect.signature(AsyncCompletions.create).parameters
    return VLLM_PARAMS.union(openai) - {"self"}


@dataclass(frozen=True)
class ChatRequest:
    """The common part of one call's requests. Make it with `ChatRequest.of`, to check
    everything.
    """

    model: str
    parameters: Mapping[str, Any]
    """Of the body, as plain JSON: everything except messages, n and streaming."""
    wants_logprobs: bool
    token_ids: bool
    stall_timeout: float = STALL_TIMEOUT
    """Seconds without a byte before a started stream counts as broken."""

    @classmethod
    def of(
        cls,
        model: str,
        *,
        params: Mapping[str, Any] | None,
        token_ids: bool,
        stall_timeout: float = STALL_TIMEOUT,
    ) -> "ChatRequest":
        """Check everything. Raises UserError for all errors detectable before a request."""
        if not isinstance(model, str) or not model:
            raise UserError(f"model is {model!r}; give the server's name for the model")
        if not is_number(stall_timeout) or stall_timeout <= 0:
            raise UserError(
                f"stall_timeout is {stall_timeout!r}; give a positive number of seconds"
            )
        parameters = plain({"logprobs": True, **checked_parameters(params)}, "params")
        if "tools" in parameters:
            parameters["tools"] = without_nulls(parameters["tools"])
        if token_ids:
            parameters["return_token_ids"] = True
        return cls(
            model=model,
            parameters=parameters,
            wants_logprobs=bool(parameters["logprobs"]),
            token_ids=token_ids,
            stall_timeout=float(stall_timeout),
        )

    @property
    def seed(self) -> int | None:
        """Of sample 0."""
        return self.parameters.get("seed")

    @property
    def max_tokens(self) -> int | None:
        """Of each completion; None if the server decides."""
        newer = self.parameters.get("max_completion_tokens")
        return newer if newer is not None else self.parameters.get("max_tokens")

    def limited(self, most: int) -> dict[str, int]:
        """Return the parameter limiting each completion to `most` tokens, by the name used in this
        request.
        """
        return {
            "max_completion_tokens"
            if "max_completion_tokens" in self.parameters
            else "max_tokens": most
        }

    def body(
        self,
        messages: Sequence[Mapping[str, Any]],
        n: int,
        *,
        seed_offset: int = 0,
        stream: bool = False,
        interval: int = 1,
    ) -> JsonObject:
        """Return the request body. interval: tokens per chunk, for servers with vLLM's
        stream_interval.
        """
        body = {
            "model": self.model,
            "messages": messages,
            "n": n,
            "stream": stream,
            **self.parameters,
        }
        if self.token_ids:
            body["return_prompt_text"] = True  # vLLM's, for the opening of the reply
        if self.seed is not None:
            body["seed"] = self.seed + seed_offset
        if stream:
            body["stream_options"] = {"include_usage": True}
            if interval > 1:
                body.setdefault("stream_interval", interval)
        return body

    def cache_body(self, messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the inputs of an answer: the body without n and streaming. The seed stays in
        it.
        """
        body = {"model": self.model, "messages": messages, **self.parameters}
        body.pop("stream_interval", None)
        return body


def checked_parameters(params: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return sampling parameters by name, including those of `extra_body`.

    None leaves a parameter to the server. Raises UserError for names unknown to both the OpenAI API
    and vLLM (vLLM would ignore a misspelt one without a word) and for invalid values.
    """
    if params is None:
        return {}
    if not isinstance(params, Mapping):
        raise UserError(
            f"params is {params!r}; give a dict of sampling parameters such as {{'temperature': "
            f"1.0}}"
        )
    given = {
        name: value
        for name, value in params.items()
        if value is not None and not _is_left_out(value)
    }
    extra_body = given.pop("extra_body", {})
    if not isinstance(extra_body, Mapping):
        raise UserError(f"params['extra_body'] is {extra_body!r}; give a dict")
    for where, named in (("params", given), ("params['extra_body']", extra_body)):
        for name in _OURS.keys() & named.keys():
            raise UserError(f"{where}[{name!r}] cannot be set: {_OURS[name]}")
    for name in given:
        if name in _known_parameters():
            continue
        near = difflib.get_close_matches(str(name), sorted(_known_parameters()), n=1)
        if near:
            hint = f"did you mean {near[0]!r}?"
        else:
            hint = "if your server accepts it, give it in params['extra_body']"
        raise UserError(
            f"params[{name!r}] is not a sampling parameter of the OpenAI API or of vLLM; {hint}"
        )
    _check_number("params['temperature']", given.get("temperature"), math.inf)
    _check_number("params['top_p']", given.get("top_p"), 1.0)
    for name in ("max_tokens", "max_completion_tokens"):
        if name in given:
            check_int(f"params[{name!r}]", given[name], at_least=1)
    if "seed" in given:
        check_int("params['seed']", given["seed"], at_least=-(2**63))
    return {**given, **extra_body}


def check_int(name: str, value: object, *, at_least: int) -> None:
    """Raise UserError for anything but a whole number of at least this."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise UserError(f"{name} is {value!r}; give a whole number of at least {at_least}")


def _check_number(name: str, value: Any, high: float) -> None:
    if value is not None and not (is_number(value) and 0.0 <= value <= high):
        if math.isfinite(high):
            above = f"and at most {high:g}"
        else:
            above = "and finite"
        raise UserError(f"{name} is {value!r}; give a number of at least 0 {above}")


def _is_left_out(value: object) -> bool:
    """Return whether this is the openai client's mark for an omitted argument (NOT_GIVEN, omit)."""
    return isinstance(value, NotGiven) or type(value).__name__ == "Omit"


def plain(value: Any, where: str) -> Any:
    """Return plain JSON values, also of openai's own objects. Raises UserError for values without a
    JSON form.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        if not math.isfinite(value):
            raise UserError(
                f"{where} is {value}, which JSON cannot represent; leave it out or give a finite "
                "number"
            )
        return float(value)
    if not isinstance(value, type) and hasattr(value, "model_dump"):  # pydantic's
        return value.model_dump(mode="json", exclude_unset=True, by_alias=True)
    if isinstance(value, Mapping):
        items = ((name, item) for name, item in value.items() if not _is_left_out(item))
        return {str(name): plain(item, f"{where}[{name!r}]") for name, item in items}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, type) and hasattr(value, "model_json_schema"):
        raise UserError(
            f"{where} is the class {value.__name__}; give {{'type': 'json_schema', "
            f"'json_schema': {{'name': …, "
            f"'schema': {value.__name__}.model_json_schema()}}}}"
        )
    raise UserError(
        f"{where} is a {type(value).__name__}, not JSON; give plain numbers, strings, lists and "
        "dicts"
    )
