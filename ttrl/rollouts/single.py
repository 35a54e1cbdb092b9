"""One chat completion, from the cache or from a server, with retries: for scripts that want no tasks and no graders."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from ttrl.errors import ServerError, UserError
from ttrl.records import Sample
from ttrl.rollouts.cache.completions import Cache, request_digest, sample_key
from ttrl.rollouts.client.assembly import STOPPED_EARLY
from ttrl.rollouts.client.chat_completions import STALL_TIMEOUT, ChatRequest, plain, request_answers
from ttrl.rollouts.client.choices import chat_completion, read_choice, writable
from ttrl.rollouts.client.stream import OnChunk
from ttrl.rollouts.client.transport import Transport, answer_identity, transport_for
from ttrl.rollouts.client.wire import Answer
from ttrl.rollouts.requests_log import RequestsLog
from ttrl.rollouts.sample_logs import sample_text
from ttrl.rollouts.scheduling.servers import Servers, Size
from ttrl.system import files

_NOT_TO_KEEP = frozenset({"abort", "error", STOPPED_EARLY})


async def get_chat_completion(
    client: AsyncOpenAI | str,
    messages: Sequence[Mapping[str, Any]],
    model: str,
    *,
    params: Mapping[str, Any] | None = None,
    token_ids: bool = False,
    sample: int = 0,
    cache: Cache | str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    weights_digest: str | None = None,
    on_chunk: OnChunk | None = None,
    max_retries: int = 4,
    stall_timeout: float = STALL_TIMEOUT,
    requests_log: str | os.PathLike[str] | None = None,
    log_path: str | os.PathLike[str] | None = None,
) -> ChatCompletion:
    """Samples one chat completion.

    client: an AsyncOpenAI client, or a base URL ("http://127.0.0.1:8000/v1"; the key is then taken from OPENAI_API_KEY).
    params: sampling parameters of the OpenAI API or of vLLM. Logprobs are asked for unless it says {"logprobs": False}.
    token_ids: asks for the server's own token ids (vLLM's return_token_ids).
    sample: which of the samples of this prompt; the cache keeps each, and a seed is raised by it.
    cache: where completions are kept and looked for: a folder, "memory://", "s3://…", …, a list of them, or a Cache.
    weights_digest: names the weights that the server serves; needed with a cache and a server on this machine.
    on_chunk: `on_chunk(chunk, completion)` sees every chunk; StopIteration ends the completion, with the finish_reason
        "stopped_early" (which no cache keeps). Not called for a completion from the cache.
    max_retries: on broken connections, timeouts, stalled streams, 408, 429 and 5xx, with pauses of 0.5, 1, 2 … s.
    stall_timeout: seconds without a byte after which a stream counts as broken.
    requests_log: a jsonl file to which one line is appended.
    log_path: a file for the conversation as readable text.

    Raises UserError for arguments that are wrong, RequestError with the server's own words when all attempts have failed.
    """
    request = ChatRequest.of(
        client, model, params=params, token_ids=token_ids, max_retries=max_retries, stall_timeout=stall_timeout
    )
    if isinstance(client, list | tuple):
        raise UserError("client is a list; get_chat_completion asks one server")
    if not isinstance(sample, int) or isinstance(sample, bool) or sample < 0:
        raise UserError(f"sample is {sample!r}; give a whole number of at least 0")
    if on_chunk is not None and not callable(on_chunk):
        raise UserError(f"on_chunk is {on_chunk!r}; give a function of (chunk, completion)")
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise UserError(f"messages is {messages!r}; give a list such as [{{'role': 'user', 'content': '…'}}]")
    asked = plain(messages, "messages")
    store = Cache.of(cache)
    transport = transport_for(client)
    digest = request_digest(answer_identity([transport], weights_digest, has_cache=store is not None), request.cache_body(asked))
    one = _One(transport, request, asked, sample, digest, store, on_chunk)
    try:
        answer = await one.answer(None if requests_log is None else RequestsLog(requests_log))
    finally:
        await transport.close()
    if log_path is not None:
        _write_log(Path(log_path), answer, asked, sample, request)
    return chat_completion([answer])


class _One:
    """One sample and where it comes from."""

    def __init__(
        self,
        transport: Transport,
        request: ChatRequest,
        messages: list[dict[str, Any]],
        sample: int,
        digest: str,
        cache: Cache | None,
        on_chunk: OnChunk | None,
    ) -> None:
        self.transport, self.request, self.messages, self.sample = transport, request, messages, sample
        self.digest, self.cache, self.on_chunk = digest, cache, on_chunk

    async def answer(self, log: RequestsLog | None) -> Answer:
        began = time.monotonic()
        key = sample_key(self.digest, self.sample)
        cached = await self.cache.get(key) if self.cache is not None else None
        if cached is not None:
            self._log(log, began, cached, hit=True)
            return cached
        try:
            answer = await self._ask()
        except Exception as error:
            self._log(log, began, None, error=error)
            raise
        self._log(log, began, answer)
        read = self._read(answer)
        if self.cache is not None and read.finish_reason is not None and read.finish_reason not in _NOT_TO_KEEP:
            await self.cache.put(key, answer, self.request.cache_body(self.messages))
        return answer

    async def _ask(self) -> Answer:
        async def attempt(transport: Transport) -> list[Answer | None]:
            return await request_answers(
                transport, self.request, self.messages, 1, seed_offset=self.sample, on_chunk=self.on_chunk
            )

        prompt = sum(len(str(message.get("content") or "")) for message in self.messages)
        async with Servers([self.transport], concurrency=1) as servers:
            size = Size(prompt=prompt, n=1, max_tokens=self.request.max_tokens)
            answers = await servers.send(attempt, size=size, max_retries=self.request.max_retries)
        if answers[0] is None:
            raise ServerError(f"{self.transport.base_url}: the server returned no choices")
        return answers[0]

    def _read(self, answer: Answer) -> Sample:
        """Checks ids and logprobs against each other, so that nothing wrong is returned or cached."""
        read = Sample(task_id=self.digest[:12], sample=self.sample, messages=self.messages)
        request = self.request
        read_choice(read, answer, self.transport.base_url, token_ids=request.token_ids, logprobs=request.wants_logprobs)
        return read

    def _log(
        self, log: RequestsLog | None, began: float, answer: Answer | None, *, hit: bool = False, error: Exception | None = None
    ) -> None:
        if log is not None:
            log.append(
                base_url=self.transport.base_url,
                model=self.request.model,
                digest=self.digest,
                samples=[self.sample],
                hit=hit,
                prompt_tokens=None if answer is None else answer.prompt_tokens,
                cached_prompt_tokens=None if answer is None else answer.cached_tokens,
                completion_tokens=None if answer is None else answer.completion_tokens,
                seconds=time.monotonic() - began,
                error=error,
            )


def _write_log(path: Path, answer: Answer, messages: list[dict[str, Any]], number: int, request: ChatRequest) -> None:
    read = Sample(task_id=path.stem, sample=number, messages=messages)
    read_choice(read, answer, str(path), token_ids=request.token_ids, logprobs=request.wants_logprobs)
    files.write_text(path, writable(sample_text(read)))
