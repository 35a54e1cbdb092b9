"""Conversations as token sequences with a mask of what the assistant wrote, through a model's own chat template.

For supervised examples. (Samples of a server carry their own ids and need no template: `ttrl.data.tokenization`.)

The template is rendered twice: up to the place where the assistant is to answer, and as a whole. The whole must begin with the
first, and the rest must begin with the answer, so that a template that rewrites, strips or forgets something is an error and
never a silently wrong mask.
"""

import math
from typing import Any

from jinja2 import TemplateError

from ttrl.errors import ModelFolderError, TokenizationError
from ttrl.records import TokenizedResult


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else "…" + text[-60:])


def chat_tokens(tokenizer: Any, messages: list[dict[str, Any]], task_id: str = "example") -> TokenizedResult:
    """The token ids of a conversation whose last message is the assistant's; that message and its end-of-turn token are trained.

    The ids are those of the whole turn where they begin with the ids of the prompt alone, which is what a server is sent; where
    a token would span the border, prompt and answer are tokenized apart, if that gives the same text. What the template puts
    behind the end-of-turn token (often a newline) is left out: no model samples it. Logprobs are NaN, the advantage is 1.

    Raises ModelFolderError for a tokenizer without a chat template, TokenizationError for conversations that end otherwise and
    for templates that do not keep the answer as it is.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ModelFolderError("the tokenizer has no chat template; put a chat_template.jinja into the model's folder")
    if not messages or messages[-1].get("role") != "assistant" or not isinstance(messages[-1].get("content"), str):
        raise TokenizationError(
            f"{task_id}: the last message must be the assistant's and have text; it is {messages[-1:]!r:.120}"
        )
    answer = messages[-1]["content"]
    try:
        prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, TypeError, KeyError) as error:
        raise TokenizationError(f"{task_id}: the chat template refuses the conversation: {error}") from error
    if not answer and prompt == tokenizer.apply_chat_template(messages[:-1], tokenize=False):
        raise TokenizationError(
            f"{task_id}: the answer is empty and the template ignores add_generation_prompt: nothing marks it"
        )
    if not whole.startswith(prompt):
        raise TokenizationError(
            f"{task_id}: the template renders the prompt as {_short(prompt)} when an answer is to follow, but the whole "
            "conversation does not begin so; examples made with it would differ from what a server is asked"
        )
    if not whole[len(prompt) :].startswith(answer):
        raise TokenizationError(
            f"{task_id}: the template changes the answer {_short(answer)} to {_short(whole[len(prompt) :])}; the model would be "
            "trained on something that was never written"
        )
    ending = _end_of_turn(tokenizer, whole[len(prompt) + len(answer) :], task_id)
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    turn_ids = tokenizer(prompt + answer + tokenizer.decode([ending]), add_special_tokens=False)["input_ids"]
    answer_ids = turn_ids[len(prompt_ids) :]
    if turn_ids[: len(prompt_ids)] != prompt_ids or answer_ids[-1:] != [ending]:
        answer_ids = [*tokenizer(answer, add_special_tokens=False)["input_ids"], ending]
        if tokenizer.decode([*prompt_ids, *answer_ids]) != tokenizer.decode(turn_ids):
            raise TokenizationError(
                f"{task_id}: a token of this tokenizer spans the border between prompt and answer, and taken apart they read "
                f"{_short(tokenizer.decode([*prompt_ids, *answer_ids]))}; the model would be trained on something else"
            )
    ids = [*prompt_ids, *answer_ids]
    return TokenizedResult(
        task_id=task_id,
        sample=0,
        token_ids=ids,
        assistant_mask=[False] * len(prompt_ids) + [True] * len(answer_ids),
        input_pos=list(range(len(ids))),
        logprobs=[math.nan] * len(ids),
        prompt_length=len(prompt_ids),
        reward=0.0,
        advantage=1.0,
    )


def _end_of_turn(tokenizer: Any, rest: str, task_id: str) -> int:
    """The end-of-turn token that follows the answer: the first token of `rest`, which must be a special one."""
    ids = tokenizer(rest, add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) | {
        token for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items() if added.special
    }
    if not ids or ids[0] not in special:
        raise TokenizationError(
            f"{task_id}: the template puts {_short(rest)} behind the answer, which does not begin with a special token; without "
            "an end-of-turn token the model would never learn to stop"
        )
    return ids[0]
