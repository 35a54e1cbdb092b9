"""Convert a server's choices into Samples, with checked ids and logprobs, and into openai's types
for graders.
"""

import copy
import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from openai import BaseModel
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion import ChatCompletion, Choice, ChoiceLogprobs

from ttrl.errors import ServerError, TokenizationError
from ttrl.facts import Facts, read_facts
from ttrl.messages import JsonObject, Message
from ttrl.records import Sample
from ttrl.rollouts.client.wire import Answer, as_texts, dumped, object_of, text_of
from ttrl.text import is_number

UNKNOWN_LOGPROB = -9999.0
"""vLLM's value for an unknown logprob: JSON has no NaN."""


_SURROGATE = re.compile("[\ud800-\udfff]")


def writable(text: str) -> str:
    """Replace lone surrogates: JSON can hold them, but in a UTF-8 file one would cost the whole
    file.
    """
    return text.encode("utf-8", "replace").decode("utf-8")


# Into samples


class _Entry(msgspec.Struct):
    logprob: float = UNKNOWN_LOGPROB


class _Entries(Facts):
    content: list[_Entry] | None = None


class _Message(Facts):
    content: str | list[Any] | None = None


class _Read(Facts):
    """The fields of a choice kept in a sample."""

    message: _Message | None = None
    finish_reason: str | None = None
    logprobs: _Entries | None = None
    token_ids: list[int] | None = None
    routed_experts: str | None = None
    opening: str = ""


_read_decoder = msgspec.json.Decoder(_Read)


def read_choice(
    sample: Sample,
    answer: Answer,
    place: str,
    *,
    token_ids: bool,
    logprobs: bool,
    strings: bool = False,
) -> None:
    """Copy text, finish reason, ids and logprobs into the sample; without ids or with `strings`
    also the logprobs' own tokens, for checking them against ids.

    In vLLM, the response has `prompt_token_ids`, the choice `token_ids`. Ids and logprobs both
    include the sampled end-of-turn token; the text does not. A token of unknown logprob has -9999.

    Raises TokenizationError if ids and logprobs are missing or disagree, ServerError if the server
    gave up on the completion.
    """
    read = _read(answer, place)
    if read.message is None:
        raise ServerError(f"{place}: the server returned a choice without a message")
    sample.text = writable(text_of(read.message.content) or "")
    sample.opening = writable(read.opening)
    sample.finish_reason = read.finish_reason
    sample.prefix_cached = answer.cached_tokens
    if read.logprobs is None:
        values = None
    else:
        values = [entry.logprob for entry in read.logprobs.content or ()]
    if values and min(values) <= UNKNOWN_LOGPROB:
        values = [math.nan if value <= UNKNOWN_LOGPROB else value for value in values]
    if read.finish_reason in ("abort", "error"):
        raise ServerError(
            f"{place}: the server ended the completion with finish_reason {read.finish_reason!r}"
        )
    if (strings or not token_ids) and values is not None:
        sample.logprob_tokens = _token_bytes(answer, len(values))
    if not token_ids:
        sample.logprobs = values
        return
    ids = read.token_ids
    prompt_ids = answer.prompt_token_ids
    if ids is None or prompt_ids is None:
        if ids is None:
            missing = "token_ids"
        else:
            missing = "prompt_token_ids"
        raise TokenizationError(
            f"{place}: the server returned no {missing}; use a vLLM server with return_token_ids, "
            "or token_ids=False"
        )
    sample.prompt_token_ids = list(prompt_ids)
    sample.token_ids = ids
    sample.routed_experts = read.routed_experts
    if logprobs:
        if values is None:
            count = "no"
        else:
            count = str(len(values))
        if values is None or len(values) != len(ids):
            raise TokenizationError(
                f"{place}: the server returned {len(ids)} token ids but {count} logprobs; "
                "request return_token_ids and logprobs together"
            )
        sample.logprobs = values


def _token_bytes(answer: Answer, count: int) -> list[str] | None:
    """Return the bytes of each log-probability's token as Latin-1 text; None if some are
    missing.
    """
    try:
        content = _loads(answer.choice)["logprobs"]["content"] or ()
        found = [_bytes_of(entry) for entry in content]
    except (LookupError, TypeError, ValueError, AttributeError):
        return None
    if len(found) == count:
        return [token.decode("latin-1") for token in found]
    return None


def _bytes_of(entry: Mapping[str, Any]) -> bytes:
    if entry.get("bytes") is not None:
        return bytes(entry["bytes"])
    # Half of a surrogate pair is a part of a character, as U+FFFD is.
    return _SURROGATE.sub("\ufffd", entry["token"]).encode()


def _read(answer: Answer, place: str) -> _Read:
    try:
        return _read_decoder.decode(answer.choice)
    except ValueError:
        pass
    # NaN, halves of surrogate pairs, and values of wrong types.
    choice = _json(answer, place)
    logprobs = choice.get("logprobs")
    if isinstance(logprobs, dict):
        entries = [{"logprob": _known(entry)} for entry in logprobs.get("content") or ()]
        choice["logprobs"] = {"content": entries}
    return read_facts(_Read, choice)


def _known(entry: Any) -> float:
    value = object_of(entry).get("logprob")
    if is_number(value) and value > UNKNOWN_LOGPROB:
        return float(value)
    return UNKNOWN_LOGPROB


def _json(answer: Answer, place: str = "choice") -> dict[str, Any]:
    try:
        choice = json.loads(answer.choice)
    except (ValueError, RecursionError) as error:
        raise ServerError(f"{place}: the server's choice cannot be read: {error}") from error
    if not isinstance(choice, dict):
        raise ServerError(
            f"{place}: the server returned {type(choice).__name__} instead of a choice"
        )
    return choice


# Into openai's types


class _LazyLogprobs(ChoiceLogprobs):
    """Openai's ChoiceLogprobs, built on first access: it is most of a choice, and few graders use
    it.

    Every access reads an attribute; the first one turns the object into a plain ChoiceLogprobs.
    """

    def __getattribute__(self, name: str) -> Any:
        fields = _raw_fields(self)
        object.__setattr__(self, "__class__", ChoiceLogprobs)
        if "source" in fields:  # otherwise a copy of a built one
            source = _logprobs_json(fields["source"])
            try:  # as the openai client does with nullable values
                built = ChoiceLogprobs.model_validate(source)
            except ValueError:
                built = ChoiceLogprobs.construct(**source)
            for state in (
                "__dict__",
                "__pydantic_fields_set__",
                "__pydantic_extra__",
                "__pydantic_private__",
            ):
                object.__setattr__(self, state, getattr(built, state))
        return getattr(self, name)


def _raw_fields(model: BaseModel) -> dict[str, object]:
    """Return the `__dict__` of any model, even if the model hides it."""
    fields: dict[str, object] = object.__getattribute__(model, "__dict__")
    return fields


def _lazy(source: "msgspec.Raw | Sequence[float]") -> ChoiceLogprobs:
    made = _LazyLogprobs.__new__(_LazyLogprobs)
    _raw_fields(made)["source"] = source
    return made


def unbuilt_logprobs(choice: Choice) -> bytes | None:
    """Return the JSON of a choice's unread logprobs, for passing on; None after a first access."""
    logprobs = choice.__dict__.get("logprobs")
    if type(logprobs) is _LazyLogprobs:
        source = _raw_fields(logprobs).get("source")
    else:
        source = None
    if source is None:
        return None
    if isinstance(source, msgspec.Raw):
        return bytes(source)
    return msgspec.json.encode(_logprobs_json(source))


def _logprobs_json(source: object) -> Any:
    if isinstance(source, msgspec.Raw):
        return _loads(bytes(source))
    assert isinstance(source, list)
    content: list[JsonObject] = [
        {
            "token": "",
            "logprob": UNKNOWN_LOGPROB if value != value else value,
            "bytes": None,
            "top_logprobs": [],
        }
        for value in source
    ]
    return {"content": content, "refusal": None}


def _loads(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except ValueError:
        return json.loads(data)


_parts_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def openai_choice(answer: Answer, index: int | None = None) -> Choice:
    """Build the choice as the openai client would, with every field from the server; its logprobs
    on first access.

    Content is a text, so a grader may use choice.message.content.strip(): content in parts is
    joined, and null is "" if no tool is called.

    index: replaces the one in the answer.
    """
    try:
        raws = _parts_decoder.decode(answer.choice)
        logprobs = raws.pop("logprobs", None)
        raws.pop("routed_experts", None)  # megabytes no grader reads
        fields = {name: msgspec.json.decode(raw) for name, raw in raws.items()}
    except ValueError:
        fields = _json(answer)
        if "logprobs" in fields:
            logprobs = msgspec.Raw(dumped(fields.pop("logprobs")))
        else:
            logprobs = None
    if index is not None:
        fields["index"] = index
    message = fields.get("message")
    if isinstance(message, dict):
        as_texts(message)
        if message.get("content") is None and not message.get("tool_calls"):
            message["content"] = ""
        fields["message"] = _model(ChatCompletionMessage, message)
    if logprobs is not None:
        fields["logprobs"] = (
            _lazy(logprobs.copy()) if bytes(logprobs)[:1] == b"{" else _loads(bytes(logprobs))
        )
    return _model(Choice, fields)


_SIMPLE = frozenset({type(None), str, int, float, bool, ChatCompletionMessage, _LazyLogprobs})

_ModelT = TypeVar("_ModelT", ChatCompletionMessage, Choice)


def _model(kind: type[_ModelT], values: Mapping[str, Any]) -> _ModelT:
    """Return `kind.construct(**values)`, in a tenth of the time if all fields are simple values."""
    defaults = _defaults(kind)
    for name, value in values.items():
        if type(value) not in _SIMPLE and name in defaults and value != []:
            return kind.construct(**values)
    made = kind.__new__(kind)
    extra = {name: value for name, value in values.items() if name not in defaults}
    known = {
        name: default if values.get(name) is None else values[name]
        for name, default in defaults.items()
    }
    object.__setattr__(made, "__dict__", known)
    object.__setattr__(made, "__pydantic_private__", None)
    object.__setattr__(made, "__pydantic_extra__", extra)
    object.__setattr__(made, "__pydantic_fields_set__", values.keys() - extra.keys())
    return made


@functools.cache
def _defaults(kind: type[BaseModel]) -> JsonObject:
    fields = kind.model_fields
    assert all(field.alias is None for field in fields.values()), kind
    return {
        name: None if field.is_required() else field.get_default() for name, field in fields.items()
    }


def with_messages(choice: Choice, messages: list[Message], sample: Sample) -> Choice:
    """Set two fields for graders of rollouts: `choice.messages`, the last conversation with its
    reply, and `choice.turns`, in request order: each reply's messages with it, tools and finish
    reason.
    """
    turns = sample.turns or []
    told = [
        {
            "messages": [*sample.sent(n), turn.reply],
            "tools": turn.tools,
            "finish_reason": turn.finish_reason,
        }
        for n, turn in enumerate(turns)
    ]
    # One copy, to keep the conversations' shared parts shared. They are extra fields of openai's
    # model.
    choice.messages, choice.turns = copy.deepcopy((messages, told))  # type: ignore[attr-defined]
    return choice


def choice_of_sample(sample: Sample) -> Choice:
    """Rebuild a sample's choice from its data: token strings are empty, and tool calls are lost
    except in rollouts; of them it is the last choice.
    """
    message = {"role": "assistant", "content": sample.text}
    logprobs = sample.logprobs
    ids = sample.token_ids
    finish_reason = sample.finish_reason
    if sample.turns:
        turn = sample.turns[-1]
        message = {**turn.reply, "content": turn.reply.get("content") or ""}
        finish_reason = turn.finish_reason
        if logprobs is not None:
            logprobs = logprobs[len(logprobs) - turn.num_tokens :]
        if ids is not None:
            ids = ids[len(ids) - turn.num_tokens :]
    fields = {
        "index": sample.sample,
        "message": _model(ChatCompletionMessage, message),
        "finish_reason": finish_reason,
        "logprobs": None if logprobs is None else _lazy(list(logprobs)),
    }
    if ids is not None:
        fields["token_ids"] = list(ids)
    if sample.opening:
        fields["opening"] = sample.opening
    choice = _model(Choice, fields)
    if sample.turns:
        return with_messages(choice, [*sample.sent(-1), sample.turns[-1].reply], sample)
    return choice


def chat_completion(answers: Sequence[Answer]) -> ChatCompletion:
    """Build a completion of openai's from one or several answers to the same request, with its
    choices numbered in this order.
    """
    assert answers, "a completion has at least one choice"
    first = answers[0]
    sampled = [answer.completion_tokens for answer in answers]
    usage: dict[str, object] | None = None
    if first.prompt_tokens is not None and None not in sampled:
        count = sum(tokens or 0 for tokens in sampled)
        usage = {
            "prompt_tokens": first.prompt_tokens,
            "completion_tokens": count,
            "total_tokens": first.prompt_tokens + count,
        }
        if first.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": first.cached_tokens}
    completion = ChatCompletion.construct(
        id=first.completion_id,
        choices=[],
        created=first.created,
        model=first.model,
        object="chat.completion",
        usage=usage,
    )
    if first.prompt_token_ids is not None:
        # The field is vLLM's extension.
        completion.prompt_token_ids = list(first.prompt_token_ids)  # type: ignore[attr-defined]
    completion.choices = [openai_choice(answer, index) for index, answer in enumerate(answers)]
    return completion
