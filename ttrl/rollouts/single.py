"""Get one chat completion from the cache or a server, with retries: for scripts without tasks and
graders.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from ttrl.errors import UserError
from ttrl.messages import Message, request_messages
from ttrl.records import Endpoint, Sample
from ttrl.rollouts.client.assembly import OnChunk
from ttrl.rollouts.client.attempts import ChatAttempt
from ttrl.rollouts.client.chat_completions import STALL_TIMEOUT, check_int, plain
from ttrl.rollouts.client.choices import chat_completion, read_choice, writable
from ttrl.rollouts.client.wire import Answer
from ttrl.rollouts.request import CacheLike, SamplingRequest
from ttrl.rollouts.sample_logs import sample_text
from ttrl.rollouts.sampling import Sampling
from ttrl.rollouts.scheduling.servers import Size
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
    params: sampling parameters of the OpenAI API or of vLLM. Logprobs are requested unless it says
        {"logprobs": False}.
    token_ids: requests the server's own token ids (vLLM's return_token_ids).
    sample: its number among this prompt's samples; the cache keeps each, and a seed is raised by
        it.
    cache: stores and finds completions: a folder, "memory://", "s3://…", …, a list of them, or a
        Cache.
    weights_digest: names the served weights; needed with a cache and a server on this machine.
    on_chunk: `on_chunk(chunk, completion)` sees every chunk; StopIteration ends the completion,
        with the finish_reason "stopped_early". Not called for a completion from the cache.
    max_retries: on broken connections, timeouts, stalled streams, 408, 429 and 5xx, with pauses of
        0.5, 1, 2 … s.
    stall_timeout: seconds without a byte before a stream counts as broken.
    requests_log: a jsonl file; gets one line.
    log_path: a file for the conversation as readable text.

    Raises UserError for wrong arguments, RequestError with the server's own words after all
    attempts have failed.

    >>> question = {"role": "user", "content": "What is 2 + 3?"}
    >>> completion = get_chat_completion("http://127.0.0.1:8000/v1", [question], model="m")
    >>> asyncio.run(completion).choices[0].message.content
    '5'
    """
    if isinstance(client, list | tuple):
        raise UserError("client is a list; get_chat_completion asks one server: give one client")
    check_int("sample", sample, at_least=0)
    if (
        isinstance(messages, str | bytes | Mapping)
        or not isinstance(messages, Sequence)
        or not messages
    ):
        raise UserError(
            f"messages is {messages!r}; give a list such as [{{'role': 'user', 'content': '…'}}]"
        )
    sampling = Sampling(
        SamplingRequest(
            client=client,
            model=model,
            params=params,
            token_ids=token_ids,
            cache=cache,
            weights_digest=weights_digest,
            concurrency=1,
            max_retries=max_retries,
            stall_timeout=stall_timeout,
            on_chunk=on_chunk,
            pbar=False,
            requests_log=requests_log,
        )
    )
    asked = request_messages(plain(messages, "messages"))
    digest = sampling.digest(asked)
    [found] = await sampling.cached(digest, [sample])
    answer = found or await _asked(sampling, asked, sample, digest)
    # Checks ids and logprobs against each other before returning or caching them.
    name = "" if log_path is None else Path(log_path).stem
    read = Sample(task_id=name, sample=sample, messages=asked)
    place = sampling.transports[0].base_url
    wants_logprobs = sampling.chat_request.wants_logprobs
    read_choice(read, answer, place, token_ids=token_ids, logprobs=wants_logprobs)
    if found is None:
        await sampling.keep(digest, sample, answer, read.finish_reason, asked)
    if log_path is not None:
        files.write_text(log_path, writable(sample_text(read)))
    return chat_completion([answer])


async def _asked(
    sampling: Sampling, messages: list[Message], sample: int, digest: str | None
) -> Answer:
    """Ask the server, with retries. Raises RequestError."""
    request = sampling.chat_request
    attempt = ChatAttempt(
        request=request,
        messages=messages,
        seed_offset=sample,
        on_chunk=sampling.request.on_chunk,
    )
    size = Size.of(messages, 1, request.max_tokens)
    async with sampling.running():
        [answer] = await sampling.send(attempt, digest, [sample], size)
    assert answer is not None
    return answer
