"""Make a request to one server after another until one answers, and count its tokens.

Without listeners, all n samples of a task come from one request without streaming: it costs the
client a few microseconds per token. Streams, or n requests of one sample, cost several times as
much. Retries are in `Servers.send`.
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
from ttrl.rollouts.client.wire import Answer, loads, object_of, read_answers
from ttrl.text import present

STREAM_INTERVAL = 8
"""Tokens per chunk if streams are only counted: each chunk costs the client."""
# Words of servers refusing a request as too long: those of OpenAI, vLLM and llama.cpp.
_TOO_LONG = (
    "context length", "context_length", "context window", "max_model_len", "maximum model length",
    "maximum input length", "context size",
)  # fmt: skip
# vLLM's words if the prompt fills the context exactly, and the request leaves max_tokens to it.
_NO_TOKEN_LEFT = "max_tokens must be at least 1, got 0"
# Parameters the prompt depends on.
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
    """Samples requested."""
    had: int = 0
    """Tokens of the answers sampled before this request."""
    count: Callable[[int], None] | None = None
    """Called with k for new tokens; with -k for tokens lost with their stream."""
    cut: Event | None = None
    """When set, the server is stopped, and all received tokens are kept."""
    base_url: str = field(default="", init=False)
    """Of the server tried last."""
    _counted: int = field(default=0, init=False)

    async def __call__(self, transport: Transport) -> list[Answer | None]:
        """Return n entries, None for missing choices; on success exactly their tokens are counted,
        on failure none. Raises RequestError, also for an empty answer.
        """
        self.base_url = transport.base_url
        self._counted = 0
        if self.is_cut:
            return [None] * self.n
        try:
            answers = await self.sample_from(transport)
        except BaseException:
            self.add(-self._counted)
            raise
        got = present(answers)
        total = sum(answer.completion_tokens or 0 for answer in got) - self.had
        if total != self._counted:  # not streamed, or a server without ids
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
        """Return a server's answers; report streamed tokens to `add`. Raises RequestError."""
        raise NotImplementedError

    @property
    def is_cut(self) -> bool:
        """Whether to sample no more."""
        return self.cut is not None and self.cut.is_set()

    def add(self, tokens: int) -> None:
        """Count received tokens."""
        self._counted += tokens
        if self.count is not None:
            self.count(tokens)


@dataclass(kw_only=True)
class ChatAttempt(CountedAttempt):
    """Requests n samples of one prompt; streamed with `on_chunk`, `cut` or `watch`."""

    request: ChatRequest
    messages: Sequence[Mapping[str, Any]]
    seed_offset: int = 0
    """Added to the seed of a seeded request: the number of its first sample; vLLM seeds choice i
    with seed + i.
    """
    on_chunk: OnChunk | None = None
    """See `stream_answers`; its exceptions pass through and end the request."""
    watch: OnChunk | None = None
    """Also sees chunks, but perhaps several tokens at once, and ends nothing."""

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
    """Return the parameter to keep a server from repeating the `<bos>` of a text; empty for other
    texts, or if the request sets it. Raises RequestError.
    """
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
    """Return the number of tokens the model could still generate; None for another error, 0 if the
    server does not tell.

    A request is refused as a whole if prompt and `max_tokens` together exceed the context, so there
    may be room for a shorter answer. vLLM's /tokenize tells.
    """
    is_full = any(words in str(error) for words in _TOO_LONG)
    if request.max_tokens is None and _NO_TOKEN_LEFT in str(error):
        is_full = True
    if error.status not in (400, 413, 422) or not is_full:
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
        data = await transport.post("/tokenize", {**body, "model": request.model}, root=True)
    except RequestError:
        return 0
    answer = object_of(loads(data))
    most = answer.get("max_model_len")
    count = answer.get("count")
    if isinstance(prompt, list):
        count = len(prompt)
    if type(count) is int and type(most) is int:
        return max(0, most - count)
    return 0
