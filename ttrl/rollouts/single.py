"""One chat completion, from the cache or from a server, with retries: for scripts that want no
tasks and no graders.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from ttrl.errors import UserError
from ttrl.messages import request_messages
from ttrl.records import Endpoint, Sample
from ttrl.rollouts.cache.completions import Cache, request_digest, sample_key
from ttrl.rollouts.client.assembly import STOPPED_EARLY, OnChunk
from ttrl.rollouts.client.attempts import ChatAttempt
from ttrl.rollouts.client.chat_completions import STALL_TIMEOUT, ChatRequest, plain
from ttrl.rollouts.client.choices import chat_completion, read_choice, writable
from ttrl.rollouts.client.transport import Transport, answer_identity, transport_for
from ttrl.rollouts.client.wire import Answer
from ttrl.rollouts.group import NOT_TO_KEEP
from ttrl.rollouts.request import CacheLike
from ttrl.rollouts.requests_log import RequestsLog
from ttrl.rollouts.sample_logs import sample_text
from ttrl.rollouts.scheduling.servers import Servers, Size
from ttrl.system import files


async def get_chat_completion(
    client: AsyncOpenAI | str | Endpoint,
    messages: Sequence[Mapping[str, Any]],
    model: str,
    *,
    params: Mapping[str, Any] | None = None,
    token_ids: bool = False,
    sample: int = 0,
    cache: CacheLike = None,
    weights_digest: str | None = None,
    on_chunk: OnChunk | None = None,
    max_retries: int = 4,
    stall_timeout: float = STALL_TIMEOUT,
    requests_log: str | os.PathLike[str] | None = None,
    log_path: str | os.PathLike[str] | None = None,
) -> ChatCompletion:
    """Sample one chat completion.

    client: an AsyncOpenAI client, or a base URL ("http://127.0.0.1:8000/v1"; the key is then taken
        from OPENAI_API_KEY).
    params: sampling parameters of the OpenAI API or of vLLM. Logprobs are asked for unless it says
        {"logprobs": False}.
    token_ids: asks for the server's own token ids (vLLM's return_token_ids).
    sample: which of the samples of this prompt; the cache keeps each, and a seed is raised by it.
    cache: where completions are kept and looked for: a folder, "memory://", "s3://…", …, a list of
        them, or a Cache.
    weights_digest: names the weights that the server serves; needed with a cache and a server on
        this machine.
    on_chunk: `on_chunk(chunk, completion)` sees every chunk; StopIteration ends the completion,
        with the finish_reason "stopped_early" (which no cache keeps). Not called for a completion
        from the cache.
    max_retries: on broken connections, timeouts, stalled streams, 408, 429 and 5xx, with pauses of
        0.5, 1, 2 … s.
    stall_timeout: seconds without a byte after which a stream counts as broken.
    requests_log: a jsonl file to which one line is appended.
    log_path: a file for the conversation as readable text.

    Raises UserError for arguments that are wrong, RequestError with the server's own words when all
    attempts have failed.
    """
    request = ChatRequest.of(
        model,
        params=params,
        token_ids=token_ids,
        max_retries=max_retries,
        stall_timeout=stall_timeout,
    )
    if isinstance(client, list | tuple):
        raise UserError("client is a list; get_chat_completion asks one server")
    if not isinstance(sample, int) or isinstance(sample, bool) or sample < 0:
        raise UserError(f"sample is {sample!r}; give a whole number of at least 0")
    if on_chunk is not None and not callable(on_chunk):
        raise UserError(f"on_chunk is {on_chunk!r}; give a function of (chunk, completion)")
    if (
        isinstance(messages, str | bytes | Mapping)
        or not isinstance(messages, Sequence)
        or not messages
    ):
        raise UserError(
            f"messages is {messages!r}; give a list such as [{{'role': 'user', 'content': '…'}}]"
        )
    transport = transport_for(client)
    store = Cache.of(cache)
    asked = request_messages(plain(messages, "messages"))
    identity = answer_identity([transport], weights_digest, has_cache=store is not None)
    digest = request_digest(identity, request.cache_body(asked))
    key = sample_key(digest, sample)
    if requests_log is None:
        log = None
    else:
        log = RequestsLog(requests_log)
    facts: dict[str, Any] = {
        "base_url": transport.base_url,
        "model": model,
        "digest": digest,
        "samples": [sample],
    }
    read = Sample(
        task_id=digest[:12] if log_path is None else Path(log_path).stem,
        sample=sample,
        messages=asked,
    )
    began = time.monotonic()
    if store is None:
        answer = None
    else:
        answer = await store.get(key)
    try:
        hit = answer is not None
        if answer is None:
            answer = await _asked(
                transport,
                ChatAttempt(request=request, messages=asked, seed_offset=sample, on_chunk=on_chunk),
            )
    except Exception as error:
        if log is not None:
            log.append(**facts, hit=False, seconds=time.monotonic() - began, error=error)
        raise
    finally:
        await transport.close()
    if log is not None:
        facts |= {
            "prompt_tokens": answer.prompt_tokens,
            "cached_prompt_tokens": answer.cached_tokens,
        }
        log.append(
            **facts,
            completion_tokens=answer.completion_tokens,
            hit=hit,
            seconds=time.monotonic() - began,
        )
    # Checks ids and logprobs against each other, so that nothing wrong is returned or cached.
    read_choice(
        read, answer, transport.base_url, token_ids=token_ids, logprobs=request.wants_logprobs
    )
    if store is not None and not hit and read.finish_reason not in NOT_TO_KEEP | {STOPPED_EARLY}:
        await store.put(key, answer, request.cache_body(asked))
    if log_path is not None:
        files.write_text(log_path, writable(sample_text(read)))
    return chat_completion([answer])


async def _asked(transport: Transport, attempt: ChatAttempt) -> Answer:
    """Ask the server, again where it fails. Raises RequestError."""
    request = attempt.request
    async with Servers([transport], concurrency=1) as servers:
        size = Size.of(attempt.messages, 1, request.max_tokens)
        answers = await servers.send(attempt, size=size, max_retries=request.max_retries)
    assert answers[0] is not None
    return answers[0]
