"""A request that is made of one server after another until one answers: what is counted and noted
of it, and how it is made.

All n samples of a task come from one request that is not streamed wherever nobody listens: the
client's cost is then a few microseconds per token, where streams or n requests of one sample cost
several times as much. Retries are in `Servers.send`.
"""

from asyncio import Event
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ttrl.errors import RequestError
from ttrl.records import raw_prompt
from ttrl.rollouts.client.assembly import OnChunk
from ttrl.rollouts.client.chat_completions import ChatRequest
from ttrl.rollouts.client.detokenize import ServerTokenizer
from ttrl.rollouts.client.opening import with_opening
from ttrl.rollouts.client.stream import stream_answers
from ttrl.rollouts.client.transport import Transport
from ttrl.rollouts.client.wire import Answer, loads, read_answers

STREAM_INTERVAL = 8
"""Tokens per chunk where streams are only counted: each chunk costs the client."""
# Words in which servers refuse a request that is too long: those of OpenAI, vLLM and llama.cpp.
_TOO_LONG = (
    "context length", "context_length", "context window", "max_model_len", "maximum model length",
    "maximum input length", "context size",
)  # fmt: skip
# What of a request its prompt depends on.
_OF_THE_PROMPT = (
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)


@dataclass(kw_only=True)
class CountedAttempt:
    """Count the tokens of one request; `attempt(transport)` makes it once."""

    n: int = 1
    """Samples that are asked for."""
    had: int = 0
    """Of the answers' tokens, those that were there before."""
    count: Callable[[int], None] | None = None
    """Told of k more tokens as they come; of -k where they were lost with their stream."""
    cut: Event | None = None
    """When set, the server is stopped, and what came is kept."""
    base_url: str = field(default="", init=False)
    """Of the server that was tried last."""
    _counted: int = field(default=0, init=False)

    async def __call__(self, transport: Transport) -> list[Answer | None]:
        """Return n entries, None for a choice that the server did not return. Exactly their tokens
        are counted then, and none where it fails. Raises RequestError, also where nothing came."""
        self.base_url = transport.base_url
        self._counted = 0
        if self.is_cut:
            return [None] * self.n
        try:
            answers = await self.sample_from(transport)
        except BaseException:
            self.add(-self._counted)
            raise
        got = [answer for answer in answers if answer is not None]
        total = sum(answer.completion_tokens or 0 for answer in got) - self.had
        if total != self._counted:  # not streamed, or a server that gives no ids
            self.add(total - self._counted)
        if not got and not self.is_cut:
            if self.n == 1:
                asked = "1 was"
            else:
                asked = f"{self.n} were"
            raise RequestError(
                f"{self.base_url}: the server returned 0 choices, {asked} asked for", "malformed"
            )
        return answers

    async def sample_from(self, transport: Transport) -> list[Answer | None]:
        """Return what a server answers; tokens that come in a stream are told to `add`. Raises
        RequestError.
        """
        raise NotImplementedError

    @property
    def is_cut(self) -> bool:
        """Whether nothing more is to be sampled."""
        return self.cut is not None and self.cut.is_set()

    def add(self, tokens: int) -> None:
        """Count tokens that have come."""
        self._counted += tokens
        if self.count is not None:
            self.count(tokens)


@dataclass(kw_only=True)
class ChatAttempt(CountedAttempt):
    """A request for n samples of one prompt; streamed with `on_chunk`, `cut` or `watch`."""

    request: ChatRequest
    messages: Sequence[Mapping[str, Any]]
    seed_offset: int = 0
    """Added to the seed of a seeded request: the number of its first sample, as vLLM seeds choice i
    with seed + i.
    """
    on_chunk: OnChunk | None = None
    """See `stream_answers`; whatever it raises comes through, and ends the request."""
    watch: OnChunk | None = None
    """Sees chunks too, but need not see each token alone, and ends nothing."""

    async def sample_from(self, transport: Transport) -> list[Answer | None]:
        request = self.request
        streamed = any(one is not None for one in (self.on_chunk, self.cut, self.watch))
        # Only vLLM knows stream_interval, and only vLLM is asked for token ids.
        if self.on_chunk is None and request.token_ids:
            interval = STREAM_INTERVAL
        else:
            interval = 1
        body = request.body(
            self.messages, self.n, seed_offset=self.seed_offset, stream=streamed, interval=interval
        )
        if streamed:
            answers = await stream_answers(
                transport,
                body,
                self.n,
                stall_timeout=request.stall_timeout,
                on_chunk=self.on_chunk if self.watch is None else self._see,
                on_tokens=self.add,
                cut=self.cut,
            )
        else:
            answers = read_answers(
                await transport.post("/chat/completions", body), self.n, transport.base_url
            )
        return [
            None if answer is None else with_opening(answer, self.messages, request.parameters)
            for answer in answers
        ]

    def _see(self, chunk: Any, completion: Any) -> None:
        assert self.watch is not None
        self.watch(chunk, completion)
        if self.on_chunk is not None:
            self.on_chunk(chunk, completion)


async def without_second_beginning(
    prompt: str,
    transport: Transport,
    request: ChatRequest,
) -> dict[str, bool]:
    """Return the parameter that keeps a server from putting `<bos>` before a text that begins with
    it; nothing for other texts, and where the request says itself. Raises RequestError."""
    if "add_special_tokens" in request.parameters:
        return {"add_special_tokens": request.parameters["add_special_tokens"]}
    if await ServerTokenizer.of(transport, request.model).brings_beginning(prompt):
        return {"add_special_tokens": False}
    return {}


async def room_left(
    error: RequestError,
    transport: Transport,
    request: ChatRequest,
    messages: Sequence[Mapping[str, Any]],
) -> int | None:
    """Return how many tokens the model could still generate; None where the error says something
    else, 0 where the server does not tell.

    A request is refused as a whole where prompt and `max_tokens` together are more than the
    context, so there may be room for a shorter answer. vLLM's /tokenize tells.
    """
    if error.status not in (400, 413, 422) or not any(words in str(error) for words in _TOO_LONG):
        return None
    body = {name: request.parameters[name] for name in _OF_THE_PROMPT if name in request.parameters}
    prompt = raw_prompt(messages)
    if prompt is None:
        body["messages"] = messages
    elif isinstance(prompt, str):
        body = {"prompt": prompt}
    else:
        body = {"prompt": ""}
    try:
        if isinstance(prompt, str):
            body |= await without_second_beginning(prompt, transport, request)
        answer = loads(
            await transport.post("/tokenize", {**body, "model": request.model}, root=True)
        )
    except RequestError:
        return 0
    count, most = (
        answer.get(name) if isinstance(answer, dict) else None
        for name in ("count", "max_model_len")
    )
    if isinstance(prompt, list):
        count = len(prompt)
    if type(count) is int and type(most) is int:
        return max(0, most - count)
    return 0
