"""Represent the turns of a sample as tokens, and as sequences: a turn continues the tokens before
it, or begins a sequence of its own.
"""

import base64
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ttrl.data.chat.templates import ChatTokens, tokenize_chat, tokenize_completion
from ttrl.errors import TokenizationError
from ttrl.messages import Message, Tool
from ttrl.records import Sample, Turn


@dataclass
class TurnTokens:
    """One reply of the model."""

    where: str
    """How messages call it."""
    prompt: list[int]
    """Ids beyond those of `continues`."""
    continues: int | None
    """The turn with its prompt and generated tokens before `prompt`; None: none."""
    token_ids: list[int]
    """Generated."""
    logprobs: list[float]
    versions: list[int]
    finish_reason: str | None
    text: str
    is_taken_apart: bool = False
    """Whether the server took reasoning or tool calls out of the text."""
    logprob_tokens: list[str] | None = None
    before: list[int] = field(default_factory=list)
    """The last id of the whole prompt."""
    routed_experts: str | None = None
    """As in Sample, of the whole prompt and the reply."""


@dataclass
class TokenSequence:
    """Tokens as the model saw them. Lists of one entry per token, `versions` of one per token from
    `prompt_length` on.
    """

    prompt_length: int
    token_ids: list[int]
    assistant_mask: list[bool]
    logprobs: list[float]
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    experts: np.ndarray | None = None
    """[up to tokens, layers, experts per token]: the sampler's, of the first tokens."""

    @classmethod
    def begun(cls, prompt: list[int]) -> "TokenSequence":
        """Begin a sequence with an untrained prompt."""
        return cls(len(prompt), list(prompt), [False] * len(prompt), [math.nan] * len(prompt))


def join(turns: list[TurnTokens]) -> list[TokenSequence]:
    """Join turns to sequences, with every turn's tokens trained once. A turn extends the sequence
    of its preceding turn, if nothing else does yet; else it begins one with the same tokens as an
    untrained prompt.
    """
    sequences: list[TokenSequence] = []
    ends: list[tuple[int, int]] = []  # of each turn: its sequence, and the length up to its end
    for turn in turns:
        number = len(sequences)
        if turn.continues is None:
            sequences.append(TokenSequence.begun(turn.prompt))
        else:
            number, end = ends[turn.continues]
            one = sequences[number]
            if len(one.token_ids) == end:
                one.token_ids += turn.prompt
                one.assistant_mask += [False] * len(turn.prompt)
                one.logprobs += [math.nan] * len(turn.prompt)
                one.versions += turn.versions[:1] * len(turn.prompt) or [-1] * len(turn.prompt)
            else:
                number = len(sequences)
                sequences.append(TokenSequence.begun(one.token_ids[:end] + turn.prompt))
        one = sequences[number]
        one.token_ids += turn.token_ids
        one.assistant_mask += [True] * len(turn.token_ids)
        one.logprobs += turn.logprobs
        one.versions += turn.versions
        one.finish_reason = turn.finish_reason
        _add_experts(one, turn)
        ends.append((number, len(one.token_ids)))
    return sequences


def _add_experts(one: TokenSequence, turn: TurnTokens) -> None:
    """Add the experts of a turn's tokens. Those of earlier turns stay as they were when these were
    sampled.
    """
    if turn.routed_experts is None:
        return
    try:
        experts = np.load(io.BytesIO(base64.b64decode(turn.routed_experts)), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise TokenizationError(
            f"{turn.where}: the server's routed_experts cannot be read: {error}"
        ) from error
    expected = len(one.token_ids) - 1
    if experts.ndim != 3 or len(experts) != expected or experts.dtype.kind not in "iu":
        raise TokenizationError(
            f"{turn.where}: the server's routed_experts are {experts.dtype} {list(experts.shape)} "
            f"for {len(one.token_ids)} tokens; expected whole numbers [{expected}, layers, experts]"
        )
    experts = experts.astype(np.int16)
    known = one.experts
    if known is not None and known.shape[1:] != experts.shape[1:]:
        shapes = f"{list(experts.shape[1:])}, and before {list(known.shape[1:])}"
        raise TokenizationError(
            f"{turn.where}: routed_experts are [layers, experts] {shapes}; sample all turns from "
            "one model"
        )
    if known is None:
        one.experts = experts
    else:
        one.experts = np.concatenate([known, experts[len(known) :]])


def turns_by_ids(where: str, sample: Sample) -> list[TurnTokens]:
    """Return the turns by the server's own ids. Raises TokenizationError, naming the sample, for
    inconsistent lists.
    """
    prompt = sample.prompt_token_ids
    completion = sample.token_ids
    assert prompt is not None and completion is not None
    if not prompt:
        raise TokenizationError(
            f"{where}: the prompt has no tokens, so no token predicts the first of the completion"
        )
    if sample.logprobs is not None:
        logprobs = sample.logprobs
    else:
        logprobs = [math.nan] * len(completion)
    if len(logprobs) != len(completion):
        raise TokenizationError(
            f"{where}: the server returned {len(completion)} token ids but {len(logprobs)} "
            "logprobs; "
            "request return_token_ids and logprobs together"
        )
    versions = sample.token_versions
    if versions is not None and len(versions) != len(completion):
        raise TokenizationError(
            f"{where}: {len(completion)} token ids but {len(versions)} token_versions; a continued "
            "sample needs one for each"
        )
    turns = _turns_of(where, sample)
    told = sum(turn.num_tokens for _, turn in turns)
    if told != len(completion):
        raise TokenizationError(
            f"{where}: {len(completion)} token ids, but its {len(turns)} turns have {told} tokens"
        )
    found = []
    begin = 0
    for number, (place, turn) in enumerate(turns):
        if turn.prompt_token_ids is None or (turn.continues is None and not turn.prompt_token_ids):
            raise TokenizationError(
                f"{place}: the server returned no token ids of its prompt; sample "
                "with token_ids=True"
            )
        if turn.continues is not None and not 0 <= turn.continues < number:
            raise TokenizationError(
                f"{place}: it continues turn {turn.continues}, but that is not an earlier turn"
            )
        own = slice(begin, begin := begin + turn.num_tokens)
        found.append(
            TurnTokens(
                place,
                turn.prompt_token_ids,
                turn.continues,
                completion[own],
                logprobs[own],
                versions[own] if versions is not None else [turn.weights_version] * turn.num_tokens,
                turn.finish_reason,
                turn.reply.get("content") or "",
                is_taken_apart(turn.reply),
                None if sample.logprob_tokens is None else sample.logprob_tokens[own],
                routed_experts=turn.routed_experts,
            )
        )
    return found


def _turns_of(where: str, sample: Sample) -> list[tuple[str, Turn]]:
    """Return the turns of a sample, the only one if it has none of its own, with their names."""
    if sample.turns is not None:
        return [(f"{where}, turn {number}", turn) for number, turn in enumerate(sample.turns)]
    tokens = sample.logprobs if sample.token_ids is None else sample.token_ids
    one = Turn(
        messages=[],
        follows=-1,
        reply={"role": "assistant", "content": sample.text},
        prompt_token_ids=sample.prompt_token_ids,
        num_tokens=len(tokens or ()),
        finish_reason=sample.finish_reason,
        weights_version=sample.weights_version,
        routed_experts=sample.routed_experts,
    )
    return [(where, one)]


def is_taken_apart(message: Mapping[str, Any]) -> bool:
    """Tell whether an assistant's message is more than its content."""
    return any(message.get(name) for name in ("tool_calls", "reasoning", "reasoning_content"))


def turns_by_template(
    where: str,
    sample: Sample,
    tokenizer: Any,
    tools: list[Tool] | None,
    end_of_turn: bool,
    template_kwargs: Mapping[str, Any],
) -> list[TurnTokens]:
    """Return the turns by the chat template, for samples without ids; log-probabilities are those
    of the server's tokens, not yet of the ids. Raises TokenizationError, naming the sample, if the
    template cannot reproduce the model's text.
    """
    if sample.turns is None and sample.finish_reason == "tool_calls":
        raise TokenizationError(
            f"{where}: the server removed tool calls from the reply, and a sample without "
            "token ids does not store them; sample with token_ids=True, or with a rollout: "
            "its turns store whole messages"
        )
    found: list[TurnTokens] = []
    wholes: list[list[int]] = []
    begin = 0
    for number, (place, turn) in enumerate(_turns_of(where, sample)):
        messages = list(sample.messages)
        if sample.turns is not None:
            messages = sample.sent(number)
        ended = end_of_turn and turn.finish_reason in ("stop", "tool_calls")
        try:
            chat, generated = _tokens(
                tokenizer, messages, turn.reply, turn.tools or tools, ended, template_kwargs
            )
        except TokenizationError as error:
            raise TokenizationError(f"{place}: {error}") from error
        whole = chat.token_ids[: generated.stop]
        prompt = whole[: generated.start]
        ids = whole[generated.start :]
        continues = next(
            (k for k in range(number - 1, -1, -1) if prompt[: len(wholes[k])] == wholes[k]), None
        )
        own = slice(begin, begin := begin + turn.num_tokens)
        found.append(
            TurnTokens(
                place,
                prompt if continues is None else prompt[len(wholes[continues]) :],
                continues,
                ids,
                (sample.logprobs or [])[own],
                [turn.weights_version] * len(ids),
                turn.finish_reason,
                turn.reply.get("content") or "",
                is_taken_apart(turn.reply),
                None if sample.logprob_tokens is None else sample.logprob_tokens[own],
                prompt[-1:],
            )
        )
        wholes.append(whole)
    return found


def _tokens(
    tokenizer: Any,
    messages: list[Message],
    reply: Message,
    tools: list[Tool] | None,
    ended: bool,
    template_kwargs: Mapping[str, Any],
) -> tuple[ChatTokens, slice]:
    """Return the conversation up to the reply, and the model's tokens in it."""
    if not is_taken_apart(reply):
        chat = tokenize_completion(
            tokenizer, messages, reply.get("content") or "", tools, ended=ended, **template_kwargs
        )
        return chat, slice(chat.turns[-1].start, chat.turns[-1].end)
    chat = tokenize_chat(tokenizer, [*messages, reply], tools, turns="last", **template_kwargs)
    turn = chat.turns[-1]
    # The end-of-turn token was not sampled.
    return chat, slice(turn.start, turn.end if ended else turn.end - 1)
