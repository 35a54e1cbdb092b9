"""Continue completions cut off by a token budget, exactly from their token ids.

The server gets prompt and completion so far as ids, so nothing is tokenized again. Every further
token has the same distribution as without the cut, under today's weights (`Sample.token_versions`
records the weights of each token). Sampling parameters travel along. Parameters without an exact
continuation are refused before anything is sent:

- presence and frequency penalties, bad_words and n-gram detection consider only generated tokens,
  and earlier ones are now prompt. (repetition_penalty considers both, so it stays unchanged;
  min_tokens and max_tokens are counted down.)
- structured outputs, tools, thinking budgets and parsers have state, lost at the cut; a sample
  keeps no top_logprobs of the earlier part.

A seed is replaced by one made of it, the sample's number, its prompt and its tokens so far; the old
seed would repeat the random numbers of the beginning. The same cuts give the same tokens; other
cuts give others.

An `on_chunk` such as InferenceEarlyStop sees the kept part as one chunk, and then the new tokens
one by one. So what it computes of log-probabilities goes on from where it was, with no state of its
own to keep: it ends a completion at the token at which it would have ended it uncut.

Stop strings are also found across the border. The completion is cut behind the token completing
one, as the server would have done. detokenize.py explains the exact text.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ttrl.errors import RequestError, TokenizationError, UserError
from ttrl.messages import JsonObject
from ttrl.records import Sample
from ttrl.rollouts.client.assembly import STOPPED_EARLY, LiveCompletion, OnChunk
from ttrl.rollouts.client.attempts import CountedAttempt
from ttrl.rollouts.client.chat_completions import ChatRequest
from ttrl.rollouts.client.choices import read_choice
from ttrl.rollouts.client.detokenize import INCOMPLETE, ServerTokenizer
from ttrl.rollouts.client.text_stream import Piece, ask, chat_answer, chat_chunk
from ttrl.rollouts.client.transport import Transport
from ttrl.rollouts.client.wire import EXPERTS, Answer
from ttrl.text import present

BRIDGE = 16
"""Tokens in the first request if the kept part ends within a character; after it, stop strings and
text are exact.
"""

# Sampling parameters that /chat/completions and /completions understand alike, and that look at
# single positions. fmt: off
_SAME = frozenset(
    [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "logit_bias",
        "allowed_token_ids",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "length_penalty",
        "priority",
        "user",
        "cache_salt",
        "return_tokens_as_token_ids",
        "vllm_xargs",
    ]
)
# They made the prompt, now given as ids; or each continuation sets its own.
_DONE = frozenset(
    [
        "model",
        "messages",
        "prompt",
        "n",
        "stream",
        "stream_options",
        "stream_interval",
        "return_token_ids",
        "logprobs",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "seed",
        "chat_template",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "truncate_prompt_tokens",
        "documents",
        "reasoning_effort",
        EXPERTS,
    ]
)
# fmt: on
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "top_logprobs": (0,),
    "bad_words": ([],),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "include_reasoning": (True,),
    "response_format": ({"type": "text"},),
    "thinking_token_budget": (-1,),
    "echo": (False,),
    "use_beam_search": (False,),
    "store": (False,),
}
"""Parameters a continuation cannot keep, with their neutral values."""
_WHY = {
    "presence_penalty": "it would no longer count the tokens generated before the cut",
    "frequency_penalty": "it would no longer count the tokens generated before the cut",
    "bad_words": "the server would miss a word across the cut",
    "top_logprobs": "a sample stores no alternatives of its tokens",
    "tools": "a tool call cut in two cannot be read",
    "response_format": "its grammar would start over",
    "structured_outputs": "its grammar would start over",
    "thinking_token_budget": "its count would start over",
    "repetition_detection": "it would no longer see the tokens generated before the cut",
}


@dataclass(frozen=True)
class TokenBudget:
    """Completion tokens a call may sample; a later call continues the unfinished ones.

    Raises UserError for invalid numbers, or if both are None.

    >>> TokenBudget.of(100_000)
    TokenBudget(per_sample=None, total=100000)
    """

    per_sample: int | None = None
    """New tokens of each completion in one call."""
    total: int | None = None
    """New tokens of the whole call. At the limit all streams are ended, possibly a few tokens
    late.
    """

    def __post_init__(self) -> None:
        for name, value in (("per_sample", self.per_sample), ("total", self.total)):
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise UserError(
                    f"token budget: {name} is {value!r}; give a number of tokens of at least 1, "
                    "or None"
                )
        if self.per_sample is None and self.total is None:
            raise UserError(
                "token budget: neither per_sample nor total is given; give one of them, or no "
                "budget (None)"
            )

    @classmethod
    def of(cls, budget: "int | TokenBudget | None") -> "TokenBudget | None":
        """Read a budget: a number is a `total`. Raises UserError for anything else."""
        if budget is None or isinstance(budget, TokenBudget):
            return budget
        if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
            raise UserError(
                f"token_budget is {budget!r}; give a number of tokens of at least 1, a "
                "TokenBudget, or None"
            )
        return cls(total=budget)


def check_continuable(request: ChatRequest) -> None:
    """Raise UserError for parameters a continuation could not keep exactly."""
    parameters = request.cache_body([])
    for name, value in parameters.items():
        if value is None or name in _SAME or name in _DONE or value in _NEUTRAL.get(name, ()):
            continue
        why = _WHY.get(name, "ttrl does not know how it would continue")
        raise UserError(
            f"params[{name!r}] is {value!r}, but completions cut off by a token budget cannot "
            f"continue with it: {why}"
        )
    if parameters.get("min_tokens") and parameters.get("stop"):
        raise UserError(
            "params: min_tokens with stop strings cannot be continued exactly; leave one out"
        )


def first_part(request: ChatRequest, budget: TokenBudget | None) -> ChatRequest:
    """Return the request for an empty completion; a budget may lower its `max_tokens`."""
    most = None if budget is None else budget.per_sample
    if most is None or (request.max_tokens is not None and request.max_tokens <= most):
        return request
    parameters = {**request.parameters, **request.limited(most)}
    if parameters.get("min_tokens"):  # a server refuses more than max_tokens
        parameters["min_tokens"] = min(parameters["min_tokens"], most)
    return dataclasses.replace(request, parameters=parameters)


@dataclass(kw_only=True)
class ContinueAttempt(CountedAttempt):
    """Requests the rest of a cut completion; its answer is the whole, as if uncut.

    Its finish_reason is null if the budget ended it again (`max_tokens` or `cut`), "stopped_early"
    if `on_chunk` did, otherwise the server's. `sample` is not changed. Raises TokenizationError for
    a sample without the needed ids or logprobs, RequestError.
    """

    request: ChatRequest
    sample: Sample
    max_tokens: int | None
    """Limit on new tokens; None: as many as `request.max_tokens` and the model's context allow."""
    number: int
    """Distinguishes samples of equal tasks for seeds."""
    on_chunk: OnChunk | None = None
    """Sees the kept part as one chunk, then every further one; its exceptions pass through."""

    async def sample_from(self, transport: Transport) -> list[Answer | None]:
        request = self.request
        sample = self.sample
        place = sample.where
        if not sample.prompt_token_ids or not sample.token_ids:
            raise TokenizationError(
                f"{place}: it has no token ids, so it cannot be continued; sample with "
                "token_ids=True"
            )
        if request.wants_logprobs and (
            sample.logprobs is None or len(sample.logprobs) != len(sample.token_ids)
        ):
            raise TokenizationError(
                f"{place}: it was sampled without logprobs, but you ask for them now; use the "
                "earlier parameters"
            )
        going = _Continued(self, transport, place)
        context = await going.tokenizer.context()
        room = None if context is None else context - len(sample.prompt_token_ids)
        limits = present((request.max_tokens, room))
        if not limits and self.max_tokens is None:
            raise UserError(
                "params: give max_tokens, because the server does not report its longest completion"
            )
        had = len(sample.token_ids)
        if limits:
            limit = min(limits)
        else:
            limit = len(sample.prompt_token_ids) + had + (self.max_tokens or 0) + 1
        await going.run(
            limit, limit if self.max_tokens is None else min(limit, had + self.max_tokens)
        )
        return [going.answer()]


class _Continued:
    """A completion in progress."""

    def __init__(self, attempt: ContinueAttempt, transport: Transport, place: str) -> None:
        self.attempt = attempt
        self.transport = transport
        self.place = place
        self.request = attempt.request
        sample = attempt.sample
        self.prompt: list[int] = list(sample.prompt_token_ids or ())
        ids = list(sample.token_ids or ())
        self.whole = Piece(text=sample.text, token_ids=ids, model=self.request.model)
        if self.request.wants_logprobs:
            # A sample keeps no token strings: people read the text, programs the ids.
            self.whole.tokens = [""] * len(ids)
            self.whole.logprobs = list(sample.logprobs or ())
        self.parameters = {
            name: value for name, value in self.request.cache_body([]).items() if value is not None
        }
        stop = self.parameters.get("stop") or []
        self.stops: list[str] = [stop] if isinstance(stop, str) else [one for one in stop if one]
        self.skip_special = bool(self.parameters.get("skip_special_tokens", True))
        self.tokenizer = ServerTokenizer.of(transport, self.request.model)
        self.live: LiveCompletion | None = None
        """The completion as `on_chunk` sees it."""
        if attempt.on_chunk is not None:
            self.live = LiveCompletion(1, attempt.on_chunk)

    async def run(self, limit: int, stop_at: int) -> None:
        """Ask until the completion has ended or has `stop_at` tokens; `limit` is its own maximum
        length.
        """
        whole = self.whole
        if len(whole.token_ids) >= limit:
            whole.finish_reason = "length"
        if self.live is not None and self._show(whole, 0, whole.text):
            whole.finish_reason = STOPPED_EARLY
        while (
            whole.finish_reason is None
            and len(whole.token_ids) < stop_at
            and not self.attempt.is_cut
        ):
            exact = await self._put_text_right()
            asked = stop_at - len(whole.token_ids)
            if not exact:
                asked = min(asked, BRIDGE)
            piece = await self._go_on(asked, exact)
            if (
                whole.finish_reason == "length"
                and len(whole.token_ids) < limit
                and len(piece.token_ids) >= asked
            ):
                whole.finish_reason = None  # the budget's end, not the completion's

    async def _go_on(self, max_tokens: int, exact: bool) -> Piece:
        """Make one request. Without `exact`, ignore its text and stop strings."""
        is_ended = False
        seen = Piece()

        def ends(piece: Piece) -> bool:
            nonlocal is_ended, seen
            text = piece.text[len(seen.text) :] if exact else ""
            is_ended = self._show(piece, len(seen.token_ids), text)
            seen = Piece(text=piece.text, token_ids=list(piece.token_ids))
            return is_ended

        piece = await ask(
            self.transport,
            self._body(max_tokens, with_stop=exact),
            on_tokens=self.attempt.add,
            cut=self.attempt.cut,
            stall_timeout=self.request.stall_timeout,
            ends=None if self.live is None else ends,
        )
        if self.request.wants_logprobs and len(piece.logprobs) != len(piece.token_ids):
            raise RequestError(
                f"{self.transport.base_url}: {len(piece.token_ids)} token ids but "
                f"{len(piece.logprobs)} logprobs",
                "malformed",
            )
        whole = self.whole
        had = len(whole.token_ids)
        before = whole.text
        whole.token_ids += piece.token_ids
        whole.tokens += piece.tokens
        whole.logprobs += piece.logprobs
        whole.finish_reason = piece.finish_reason
        whole.stop_reason = piece.stop_reason
        whole.completion_id = piece.completion_id
        whole.created = piece.created
        whole.model = piece.model
        if whole.cached_tokens is None:
            whole.cached_tokens = piece.cached_tokens
        if exact:
            whole.text += piece.text
        # The server held back the end of a cut stream if it might have become a stop string.
        if not exact or (self.stops and piece.finish_reason is None):
            self.whole.text = await self._shown(self._ids_of_text(), self.whole.text)
        if self.stops:
            await self._stop_over_the_border(had, before)
        # A stop string may have ended it before.
        if is_ended and len(whole.token_ids) == had + len(piece.token_ids):
            whole.finish_reason = STOPPED_EARLY
        return piece

    def _show(self, piece: Piece, first: int, text: str) -> bool:
        """Show `on_chunk` the piece's tokens from `first` on; return whether it ends here."""
        assert self.live is not None
        return self.live.take(chat_chunk(piece, first, text, self.request.wants_logprobs))

    def _body(self, max_tokens: int, *, with_stop: bool) -> JsonObject:
        body = {name: value for name, value in self.parameters.items() if name in _SAME}
        if not with_stop:
            body.pop("stop", None)
        body |= {
            "model": self.request.model,
            "prompt": [*self.prompt, *self.whole.token_ids],
            "max_tokens": max_tokens,
        }
        body |= {"return_token_ids": True, "add_special_tokens": False}
        if self.request.wants_logprobs:
            body["logprobs"] = 0
        if self.parameters.get("min_tokens"):
            body["min_tokens"] = min(
                max(0, self.parameters["min_tokens"] - len(self.whole.token_ids)), max_tokens
            )
        if self.parameters.get("seed") is not None:
            number = self.attempt.number
            made_of = f"{self.parameters['seed']}/{number}/{self.prompt}/{self.whole.token_ids}"
            body["seed"] = int.from_bytes(hashlib.sha256(made_of.encode()).digest()[:7], "big")
        return body

    # Text

    async def _put_text_right(self) -> bool:
        """Bring the text up to the ids; return False if they end within a character."""
        text = await self.tokenizer.text(
            self.prompt,
            self.whole.token_ids,
            self.whole.text,
            skip_special=self.skip_special,
            place=self.place,
        )
        if not text.endswith(INCOMPLETE):
            self.whole.text = text
            return True
        self.whole.text = await self._shown(self.whole.token_ids, self.whole.text)
        return False

    async def _shown(self, ids: list[int], begins: str) -> str:
        return await self.tokenizer.shown(
            self.prompt, ids, begins, skip_special=self.skip_special, place=self.place
        )

    def _ids_of_text(self) -> list[int]:
        """Return the ids of the text, without the final stop token."""
        by_token = self.whole.finish_reason == "stop" and not isinstance(
            self.whole.stop_reason, str
        )
        if by_token and not self.parameters.get("include_stop_str_in_output"):
            return self.whole.token_ids[:-1]
        return self.whole.token_ids

    async def _stop_over_the_border(self, had: int, before: str) -> None:
        """End the completion at a stop string across the border: part of it was prompt, so the
        server could not see it.

        had, before: tokens and text before the last request.
        """
        whole = self.whole
        include = bool(self.parameters.get("include_stop_str_in_output"))
        text = whole.text
        if isinstance(whole.stop_reason, str) and not include:
            text += whole.stop_reason  # found by the server
        first = _first_stop(text, self.stops, len(before))
        if first is None:
            return
        begin, end, string = first
        if string == whole.stop_reason and end == len(text):
            return  # the server's own
        count = had + 1
        while (
            count < len(whole.token_ids)
            and len(await self._shown(whole.token_ids[:count], before)) < end
        ):
            count += 1
        del whole.token_ids[count:]
        del whole.tokens[count:]
        del whole.logprobs[count:]
        whole.text = text[: end if include else begin]
        whole.finish_reason = "stop"
        whole.stop_reason = string

    def answer(self) -> Answer:
        """Return the completion so far."""
        known = self.whole.cached_tokens
        if known is not None:
            self.whole.cached_tokens = min(known, len(self.prompt))
        opening = self.attempt.sample.opening
        return chat_answer(self.whole, self.prompt, opening, self.request.wants_logprobs)


def extend(sample: Sample, answer: Answer, weights_version: int) -> None:
    """Fill a continued answer into its sample: earlier tokens keep their version, new ones get
    `weights_version`.

    `sample.weights_version` becomes the last token's. Raises as read_choice does, before changing
    the sample.
    """
    had = len(sample.token_ids or ())
    versions = sample.token_versions or [sample.weights_version] * had
    read = Sample(task_id=sample.task_id, sample=sample.sample, messages=sample.messages)
    place = sample.where
    read_choice(read, answer, place, token_ids=True, logprobs=sample.logprobs is not None)
    ids = read.token_ids or []
    if ids[:had] != sample.token_ids or read.prompt_token_ids != sample.prompt_token_ids:
        raise TokenizationError(
            f"{place}: the continued completion does not begin with the {had} stored tokens"
        )
    sample.text = read.text
    sample.token_ids = ids
    sample.logprobs = read.logprobs
    # Text completions bring none.
    sample.prefix_cached = read.prefix_cached
    sample.routed_experts = None
    if read.finish_reason is None:
        sample.finish_reason = "unfinished"
    else:
        sample.finish_reason = read.finish_reason
    versions = versions + [weights_version] * (len(ids) - had)
    if len(ids) > had:
        sample.weights_version = weights_version
    if any(version != sample.weights_version for version in versions):
        sample.token_versions = versions
    else:
        sample.token_versions = None


def _first_stop(text: str, stops: list[str], searched: int) -> tuple[int, int, str] | None:
    """Return (begin, end, string) of the first complete stop string after the searched text."""
    found = []
    for number, string in enumerate(stops):
        begin = text.find(string, max(0, searched - len(string) + 1))
        if begin >= 0:
            found.append((begin + len(string), number, begin, string))
    if not found:
        return None
    end, _, begin, string = min(found)
    return begin, end, string
