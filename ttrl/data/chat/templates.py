"""Turn conversations into token sequences with a mask of generated tokens, through a model's own
chat template.

For supervised examples, and for samples from servers without token ids. (Samples with ids need no
template: `ttrl.data.tokenization`.) `ttrl.data.chat.turns` finds the model's text; here the text
becomes tokens.

A prompt is tokenized as the server does it, as one string. If a token of the whole conversation
would span the border between prompt and answer, both are tokenized apart, because a model
continuing the prompt cannot generate half a token; such borders are counted (`ChatTokens.splits`).
Special tokens in any text become special tokens, as they do at the server.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from ttrl.data.chat.generation_tags import checked_tags
from ttrl.data.chat.rendering import ChatTemplate
from ttrl.data.chat.tokenizer import tokens_at
from ttrl.data.chat.turns import ChatAnswer, TurnFinder
from ttrl.errors import TokenizationError
from ttrl.messages import Message, Tool
from ttrl.records import TokenizedResult

Turns = Literal["all", "last"]


@dataclass(frozen=True)
class ChatTurn:
    """An assistant message. If it is trained, its tokens are [start, end), the last one is its
    end-of-turn token, and `reason` is None; else `reason` says why not, and `start` and `end` are
    0.
    """

    message: int
    """Its place in the conversation, from 0."""
    start: int
    end: int
    reason: str | None = None


@dataclass(frozen=True)
class ChatTokens:
    """A conversation up to the last trained token. `token_ids` and `assistant_mask` have one entry
    for each token.
    """

    token_ids: list[int]
    assistant_mask: list[bool]
    """True for generated tokens, end-of-turn tokens included."""
    turns: list[ChatTurn]
    text: str
    tagged_template: str | None
    """The chat template with `{% generation %}` tags, checked on this conversation; None if the
    template never writes `text` (`ChatAnswer.written`): no tags can be around it.
    """
    splits: int
    """Borders with prompt and answer tokenized apart, because a token would have spanned them."""

    @property
    def untrained(self) -> list[ChatTurn]:
        """Return the untrained assistant's turns, with reasons."""
        return [turn for turn in self.turns if turn.reason is not None]

    def result(self, task_id: str) -> TokenizedResult:
        """Return the conversation as a sample, with logprobs NaN and advantage 1."""
        return TokenizedResult(
            task_id=task_id,
            sample=0,
            token_ids=self.token_ids,
            assistant_mask=self.assistant_mask,
            input_pos=range(len(self.token_ids)),
            logprobs=[math.nan] * len(self.token_ids),
            prompt_length=self.assistant_mask.index(True),
            reward=0.0,
            advantage=1.0,
        )


def tokenize_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: list[Tool] | None = None,
    *,
    turns: Turns = "all",
    stop_tokens: Collection[str] | None = None,
    now: datetime | None = None,
    **template_kwargs: Any,
) -> ChatTokens:
    """Return the tokens of a conversation, and the assistant's among them.

    `turns`: "all" trains each trainable turn; "last" only the last message, necessarily the
    assistant's. `stop_tokens` are the model's stop tokens, as text, if known (`eos_token_id` of
    generation_config.json); else the end-of-turn token is found by rendering. `now` is the present
    time for templates writing the date. `template_kwargs` go to the template
    (`enable_thinking=False`, …); among them `chat_template` chooses one of a list of named
    templates, or gives one.

    Raises ModelFolderError for a tokenizer without a chat template; TokenizationError, with the
    template's place and the reason, if no turn can be trained, or the last one cannot with
    turns="last".
    """
    chat = _Chat(tokenizer, messages, tools, stop_tokens, now, template_kwargs)
    if turns == "last" and (not chat.answers or chat.answers[-1].message != len(messages) - 1):
        raise TokenizationError(
            f"the last message must be the assistant's; it is {messages[-1:]!r:.120}"
        )
    return chat.tokens(
        len(messages), skip={a.message for a in chat.answers[:-1]} if turns == "last" else set()
    )


def tokenize_chat_turns(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: list[Tool] | None = None,
    *,
    stop_tokens: Collection[str] | None = None,
    now: datetime | None = None,
    **template_kwargs: Any,
) -> list[ChatTokens]:
    """Return enough token sequences to train every trainable turn exactly once.

    One if the template keeps earlier turns as they are. If it rewrites them (most templates of
    thinking models), the differing turns are trained in sequences ending with them; the longest
    comes first. Arguments and errors as for `tokenize_chat`.
    """
    chat = _Chat(tokenizer, messages, tools, stop_tokens, now, template_kwargs)
    left = {answer.message for answer in chat.answers if answer.reason is None}
    upto = len(messages)
    made = []
    while upto and left:
        whole = chat.rendered(upto)
        trained = {
            a.message
            for a in chat.answers
            if a.message in left and a.message < upto and a.reason_within(whole) is None
        }
        if trained:
            made.append(
                chat.tokens(upto, skip={answer.message for answer in chat.answers} - trained)
            )
            left -= trained
        upto = max((message + 1 for message in left if message + 1 < upto), default=0)
    return made or [chat.tokens(len(messages), skip=set())]  # raises: nothing can be trained


def tokenize_completion(
    tokenizer: Any,
    messages: Sequence[Message],
    text: str,
    tools: list[Tool] | None = None,
    *,
    ended: bool,
    stop_tokens: Collection[str] | None = None,
    now: datetime | None = None,
    **template_kwargs: Any,
) -> ChatTokens:
    """Return the tokens of a server's input (`messages`, to be answered) and of its plain text
    answer.

    For samples from servers without token ids. Nothing is rendered again: the template's changes to
    the answer (stripping its thinking, trimming it) play no part. `ended`: whether the model ended
    it by itself (finish reason "stop"); then the end-of-turn token follows, as it was sampled. An
    answer parsed by the server (tool calls, reasoning) is no plain text: see `tokenize_chat`.

    Raises ModelFolderError and TokenizationError as `tokenize_chat`, and for an answer without any
    token.
    """
    template = ChatTemplate(tokenizer, tools, now, template_kwargs)
    prepared = template.prepared(messages)
    prompt = template.render(prepared, answer_next=True)
    finder = TurnFinder(
        template, [*prepared, {"role": "assistant", "content": text}], messages, stop_tokens
    )
    end = finder.end_of_turn(len(prepared)) if ended else None
    if ended and end is None:
        raise TokenizationError(
            f"{template.place}: it writes no special token after a reply, so the sampled "
            "end-of-turn token is unknown; set stop_tokens to the model's own"
        )
    if not text and not ended:
        raise TokenizationError("the reply is empty and was cut off: there is nothing to train")
    whole = prompt + text + (end or "")
    anchor = end or next(iter(tokenizer.all_special_tokens), "")
    found = tokens_at(tokenizer, whole, [len(prompt), len(whole)], [end], anchor)
    start, stop = found.borders
    return ChatTokens(
        token_ids=found.ids,
        assistant_mask=[False] * start + [True] * (stop - start),
        turns=[ChatTurn(len(prepared), start, stop)],
        text=whole,
        tagged_template=None,
        splits=found.splits,
    )


class _Chat:
    def __init__(
        self,
        tokenizer: Any,
        messages: Sequence[Message],
        tools: list[Tool] | None,
        stop_tokens: Collection[str] | None,
        now: datetime | None,
        template_kwargs: Mapping[str, Any],
    ) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, tools, now, template_kwargs)
        if not any(message.get("role") == "assistant" for message in messages):
            raise TokenizationError(
                "no message of the conversation is the assistant's: there is nothing to train"
            )
        self._messages = self._template.prepared(messages)
        self._wholes = {len(messages): self._template.render(self._messages, answer_next=False)}
        self.answers: list[ChatAnswer] = TurnFinder(
            self._template, self._messages, messages, stop_tokens
        ).answers()

    def rendered(self, upto: int) -> str:
        """Return the first `upto` messages as text; an answer at their end as it was sent."""
        ending = next((a for a in self.answers if a.message == upto - 1), None)
        if ending is not None and ending.reason is None and not ending.written:
            return ending.text
        if upto not in self._wholes:
            self._wholes[upto] = self._template.render(self._messages[:upto], answer_next=False)
        return self._wholes[upto]

    def tokens(self, upto: int, skip: set[int]) -> ChatTokens:
        """Return the first `upto` messages as tokens; the answers in `skip` are not trained, for
        the caller's reasons.
        """
        whole = self.rendered(upto)
        answers = [answer for answer in self.answers if answer.message < upto]
        reasons = {answer.message: answer.reason_within(whole) for answer in answers}
        trained = [
            answer
            for answer in answers
            if reasons[answer.message] is None and answer.message not in skip
        ]
        if not trained:
            told = "; ".join(
                f"message {a.message}: {reasons[a.message]}"
                for a in answers
                if a.message not in skip
            )
            raise TokenizationError(f"{self._template.place}: nothing can be trained; {told}")
        text = whole[: len(trained[-1].text)]
        borders = [border for answer in trained for border in (answer.start, len(answer.text))]
        found = tokens_at(
            self._tokenizer, text, borders, [a.end_of_turn for a in trained], trained[0].end_of_turn
        )
        mask = [False] * len(found.ids)
        spans = {}
        for answer, start, end in zip(
            trained, found.borders[::2], found.borders[1::2], strict=True
        ):
            mask[start:end] = [True] * (end - start)
            spans[answer.message] = (start, end)
        return ChatTokens(
            token_ids=found.ids,
            assistant_mask=mask,
            turns=[
                ChatTurn(a.message, *spans[a.message])
                if a.message in spans
                else ChatTurn(
                    a.message,
                    0,
                    0,
                    reasons[a.message] or "it is trained elsewhere, or was not requested",
                )
                for a in answers
            ],
            text=text,
            tagged_template=self._tagged(
                upto, whole, [a for a in answers if reasons[a.message] is None]
            ),
            splits=found.splits,
        )

    def _tagged(self, upto: int, whole: str, told: list[ChatAnswer]) -> str | None:
        """Return the tagged template, checked on the first `upto` messages; their answers `told`
        occur in `whole`.
        """
        if not all(answer.written for answer in told):
            return None
        wanted = {(answer.start, len(answer.text)) for answer in told}
        others = sum(answer.message < upto for answer in self.answers) - len(told)
        ends = {answer.end_of_turn for answer in self.answers if answer.reason is None}
        return checked_tags(self._template, self._messages[:upto], whole, wanted, others, ends)
