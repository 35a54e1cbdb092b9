"""Reads what a server returned: choices in their order, each into a Sample, with its token ids and logprobs checked."""

import math
from typing import Any

from openai.types.chat.chat_completion import ChatCompletion, Choice

from ttrl.errors import ServerError, TokenizationError
from ttrl.records import Sample

UNKNOWN_LOGPROB = -9999.0
"""What vLLM sends for a logprob that it does not know: JSON has no NaN."""


def writable(text: str) -> str:
    """Replaces lone surrogates, which JSON can carry but no UTF-8 file can hold: one of them would cost the whole file."""
    return text.encode("utf-8", "replace").decode("utf-8")


def token_usage(completion: ChatCompletion) -> tuple[int, int] | None:
    """(prompt tokens, completion tokens of all choices) as the server counted them."""
    usage = completion.usage
    counts = (getattr(usage, "prompt_tokens", None), getattr(usage, "completion_tokens", None))
    return counts if all(type(count) is int for count in counts) else None  # type: ignore[return-value]


def choices_by_number(completion: ChatCompletion, n: int) -> list[Choice | None]:
    """Choices by their index, in whatever order they come; by position where a server numbers them wrongly.

    n entries, None for a choice that is missing.
    """
    choices = [choice for choice in completion.choices if choice is not None]
    numbered: dict[Any, Choice] = {getattr(choice, "index", None): choice for choice in choices}
    if len(numbered) == len(choices) and all(type(index) is int and 0 <= index < n for index in numbered):
        return [numbered.get(k) for k in range(n)]
    return [choices[k] if k < len(choices) else None for k in range(n)]


def read_choice(
    sample: Sample, choice: Choice, completion: ChatCompletion, place: str, *, token_ids: bool, logprobs: bool
) -> None:
    """Copies text, finish reason, ids and logprobs into the sample, before a grader can change anything.

    vLLM: `prompt_token_ids` lies in the response, `token_ids` in the choice; ids and logprobs both include the sampled
    end-of-turn token, which the text does not. A token whose logprob is unknown carries -9999.

    Raises TokenizationError when ids and logprobs are missing or disagree, ServerError when the server gave up on the completion.
    """
    message = choice.message
    if message is None:
        raise ServerError(f"{place}: the server returned a choice without a message")
    if message.content is None and not message.tool_calls:
        message.content = ""  # so that a grader may say choice.message.content.strip()
    sample.text = writable(message.content or "")
    sample.finish_reason = choice.finish_reason
    entries = choice.logprobs.content or [] if choice.logprobs is not None else None
    values = None if entries is None else [_logprob(entry.logprob) for entry in entries]
    if choice.finish_reason in ("abort", "error"):
        raise ServerError(f"{place}: the server ended the completion with finish_reason {choice.finish_reason!r}")
    if not token_ids:
        sample.logprobs = values
        return
    ids, prompt_ids = getattr(choice, "token_ids", None), getattr(completion, "prompt_token_ids", None)
    if not _is_ids(ids) or not _is_ids(prompt_ids):
        missing = "token_ids" if not _is_ids(ids) else "prompt_token_ids"
        raise TokenizationError(
            f"{place}: the server returned no {missing}; use a vLLM server that knows return_token_ids, or token_ids=False"
        )
    sample.prompt_token_ids, sample.token_ids = list(prompt_ids), list(ids)
    if logprobs:
        count = "no" if values is None else str(len(values))
        if values is None or len(values) != len(ids):
            raise TokenizationError(
                f"{place}: the server returned {len(ids)} token ids but {count} logprobs; "
                "request return_token_ids and logprobs together"
            )
        sample.logprobs = values


def _logprob(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and UNKNOWN_LOGPROB < value < math.inf else math.nan


def _is_ids(ids: object) -> bool:
    return isinstance(ids, list) and all(type(i) is int for i in ids)
