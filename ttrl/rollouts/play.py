"""Play one sample of a task with a `rollout`: its coroutine may ask the model any number of times,
and all replies become one Sample.

Each reply is a normal request, with cache, retries, admission, counts and logs. Conversations under
way go before new ones, while the server's prefix cache still holds them. Failures cost this sample
only: an exception of the rollout (RolloutError), a step over its time limit, a permanent server
failure (RequestError).

A reply continues an earlier one if its prompt, as the server made it, begins with exactly the
earlier prompt and generated ids. Otherwise it starts another sequence (`Turn.continues`). Nothing
is tokenized here, and no log-probability is guessed.
"""

import asyncio
import copy
import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from openai.types.chat.chat_completion import Choice

from ttrl.errors import (
    GraderError,
    RequestError,
    RolloutError,
    RolloutLimitError,
    ServerError,
    TokenizationError,
    describe,
)
from ttrl.messages import Message, Tool, part_that_is_no_text, request_messages, without_nulls
from ttrl.records import PROMPT, Sample, Turn, raw_prompt
from ttrl.rollouts.cache.completions import request_digest
from ttrl.rollouts.client.attempts import ChatAttempt, room_left
from ttrl.rollouts.client.chat_completions import ChatRequest, plain
from ttrl.rollouts.client.choices import openai_choice, read_choice, with_messages, writable
from ttrl.rollouts.client.prompts import sample_after_prompt
from ttrl.rollouts.client.transport import Transport
from ttrl.rollouts.client.wire import Answer, is_ids
from ttrl.rollouts.graders.grading import own_traceback, type_and_message
from ttrl.rollouts.group import Group
from ttrl.rollouts.scheduling.servers import Size
from ttrl.tasks.task import Chat, Grade
from ttrl.text import present

_ENDED_BY = {"turns": "max_turns", "seconds": "max_seconds"}
"""Finish reasons at these limits; "length" at all others."""
_REASONING = ("reasoning", "reasoning_content")


@dataclasses.dataclass
class _Reply:
    """One answer of the model and its request."""

    messages: list[Message]
    tools: list[Tool] | None
    answer: Answer
    read: Sample
    message: Message

    @functools.cached_property
    def ids(self) -> list[int] | None:
        """Prompt and generated tokens."""
        prompt = self.read.prompt_token_ids
        generated = self.read.token_ids
        if prompt is None or generated is None:
            return None
        return prompt + generated


@dataclasses.dataclass(kw_only=True)
class _FittingAttempt(ChatAttempt):
    """Asks for a shorter reply if the model's context has too little room for `max_tokens`."""

    place: str
    """Names the sample in errors."""

    async def sample_from(self, transport: Transport) -> list[Answer | None]:
        is_chat = raw_prompt(self.messages) is None
        return await (
            super().sample_from(transport) if is_chat else sample_after_prompt(self, transport)
        )

    async def __call__(self, transport: Transport) -> list[Answer | None]:
        try:
            return await super().__call__(transport)
        except RequestError as error:
            room = await room_left(error, transport, self.request, self.messages)
            if room is None:
                raise
            if room < 1 or (
                self.request.max_tokens is not None and room >= self.request.max_tokens
            ):
                full = f"{self.place}: the conversation fills the model's context: {error}"
                raise RolloutLimitError(full, "context") from None
        self.request = dataclasses.replace(
            self.request, parameters={**self.request.parameters, **self.request.limited(room)}
        )
        return await super().__call__(transport)


class Play:
    """One sample's rollout in progress."""

    def __init__(self, group: Group, sample: Sample) -> None:
        self.group = group
        self.sample = sample
        self.sampling = group.sampling
        self.task = group.task
        self.place = sample.where
        self._number = group.first + sample.sample
        """For cache keys, seeds and logs."""
        self._replies: list[_Reply | None] = []
        """In request order; None for missing replies."""
        self._generated = 0
        self._waiting: set[asyncio.Task[Any]] = set()
        self._clock: asyncio.Timeout | None = None
        self._ticket = group.sampling.servers.ticket()
        self._is_over = False

    async def run(self) -> None:
        """Run the rollout from its first request to the grade. Raises only CancelledError."""
        sample = self.sample
        ended_by = None
        try:
            try:
                output = await self._played()
            except RolloutLimitError as limit:
                has_grader = self.task.grader is not None or self.task.group_grader is not None
                if not has_grader or not any(self._replies):
                    raise
                output = None
                ended_by = _ENDED_BY.get(limit.limit, "length")
            finally:
                self._fill()
            sample.finish_reason = ended_by or sample.finish_reason
            if output is not None or self.task.grader is not None or self.task.group_grader is None:
                grade = await self._grade(output)
                sample.reward = grade.reward
                sample.metrics = grade.metrics
        except Exception as error:  # noqa: BLE001 - one bad sample never costs another
            sample.error = writable(type_and_message(error))
            if not isinstance(error, GraderError):
                sample.finish_reason = None
        self.group.done(sample)

    # The coroutine

    async def _played(self) -> Any:
        """Return the rollout's result. Raises the errors of `chat`, RolloutError for all others."""
        sample = self.sample
        params = self.sampling.chat_request.parameters
        chat = Chat(
            self.ask,
            self.group.messages,
            sample.task_id,
            sample.sample,
            params=params,
            count_time=self._count_time,
        )
        seconds = self.task.limits.seconds
        total = self.task.limits.total_seconds
        whole = asyncio.timeout(total)
        assert self.task.rollout is not None
        try:
            async with whole, asyncio.timeout(seconds) as self._clock:
                coroutine = self.task.rollout(chat)
                if not inspect.isawaitable(coroutine):
                    raise RolloutError(
                        f"{self.place}: the rollout is not a coroutine function; write it as async "
                        "def rollout(chat)"
                    )
                output = await coroutine
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # our own cancellation
            raise self._raised(error) from None
        except TimeoutError as error:
            if whole.expired():
                raise RolloutLimitError(
                    f"{self.place}: the rollout reached its limit of {total:g} s", "seconds"
                ) from None
            if self._clock is None or not self._clock.expired():
                raise self._raised(error) from None
            raise RolloutError(
                f"{self.place}: the rollout worked for more than {seconds:g} s between two "
                "requests; make it faster, or raise "
                "limits=RolloutLimits(seconds=…)"
            ) from None
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001
            # Whatever the user's code raises costs one sample.
            raise self._raised(error) from None
        finally:
            self._is_over = True
            for task in self._waiting - {asyncio.current_task()}:
                task.cancel()  # requests left behind by the rollout
        if not any(self._replies):
            raise RolloutError(
                f"{self.place}: the rollout ended without asking the model; ask it with await "
                "chat(…)"
            )
        return output

    def _raised(self, error: BaseException) -> Exception:
        """Return our own errors unchanged, also out of exception groups; wrap others in a
        RolloutError with their traceback.
        """
        first = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if isinstance(first, GraderError | RolloutError | ServerError | TokenizationError):
            return first
        return RolloutError(
            f"{self.place}: the rollout raised {describe(error)}\n{own_traceback(error, __file__)}"
        )

    # The grade

    async def _grade(self, output: Any) -> Grade:
        """Return the rollout's grade, or the grader's. Raises GraderError."""
        if output is not None:
            return Grade.of(output, self.place, who="rollout")
        if self.task.grader is None:
            raise GraderError(
                f"{self.place}: the rollout returned no reward, and the task has no grader; add "
                "one of them"
            )
        last = next(reply for reply in reversed(self._replies) if reply is not None)
        choice = with_messages(
            openai_choice(last.answer), [*last.messages, last.message], self.sample
        )
        return await self.sampling.graders.grade(self.task, choice, self.place)

    # Requests

    async def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        max_tokens: int | None,
        stop: str | Sequence[str] | None,
    ) -> tuple[Choice, Message]:
        """Ask the model, as specified by `ttrl.tasks.task.Ask`."""
        try:
            self._check_limits()
        except RolloutError:
            # A rollout catching the error and asking again in a loop must not block all others.
            await asyncio.sleep(0)
            raise
        number = len(self._replies)
        self._replies.append(None)
        sent = _clean(request_messages(plain(messages, "messages")))
        if not sent:
            raise RolloutError(f"{self.place}: there are no messages to answer")
        self._check_messages(sent)
        own_tools = None
        if tools:
            own_tools = _clean(without_nulls(plain(tools, "tools")))
        request = self._request({"tools": own_tools, "stop": plain(stop, "stop")}, max_tokens)
        waiting = asyncio.current_task()
        assert waiting is not None
        self._waiting.add(waiting)
        self._count_time(False)
        try:
            answer, digest, cached = await self._answer(request, sent, number)
        finally:
            self._waiting.discard(waiting)
            self._count_time(not self._waiting)
        usage = self.group.usage
        tokens = answer.completion_tokens or 0
        self._generated += tokens
        usage.completion += tokens
        usage.new_completion += 0 if cached else tokens
        read = Sample(
            task_id=self.sample.task_id, sample=self.sample.sample, messages=sent, cached=cached
        )
        read.weights_version = self.sampling.request.weights_version
        # Check one sample token by token, as for single answers. vLLM sends no bytes for text
        # completions.
        first = self.group.position == 0 and self.sample.sample == 0 and raw_prompt(sent) is None
        read_choice(
            read,
            answer,
            self.place,
            token_ids=self.sampling.request.token_ids,
            logprobs=request.wants_logprobs,
            strings=first,
        )
        if not cached:
            await self.sampling.keep(
                digest, self._number, answer, read.finish_reason, sent, request
            )
        choice = openai_choice(answer)
        reply = _Reply(sent, own_tools, answer, read, _clean(_sent_back(choice)))
        self._check_over()
        self._replies[number] = reply
        known = answer.prompt_tokens or len(answer.prompt_token_ids or ())
        # vLLM's field, in its place for text completions.
        choice.prompt_token_ids = read.prompt_token_ids  # type: ignore[attr-defined]
        counted = {
            "prompt_tokens": known,
            "completion_tokens": tokens,
            "total_tokens": known + tokens,
        }
        choice.usage = counted  # type: ignore[attr-defined]
        # A copy, because the rollout may change its messages.
        return choice, copy.deepcopy(reply.message)

    def _check_over(self) -> None:
        if self._is_over:
            raise RolloutError(
                f"{self.place}: the rollout is over; await all requests before it returns"
            )

    def _check_messages(self, messages: list[Message]) -> None:
        """Raise RolloutError for non-text parts, and for a prompt among chat messages."""
        if all(message.get("role") != PROMPT for message in messages):
            for number, message in enumerate(messages):
                found = part_that_is_no_text(message.get("content"))
                if found is not None:
                    where = f"{self.place}: message {number}"
                    raise RolloutError(
                        f"{where} holds {found}; send text only: the policy trains on text"
                    )
            return
        content = messages[0].get("content")
        settings = self.sampling.request
        if len(messages) > 1 or not (isinstance(content, str) or is_ids(content)) or not content:
            raise RolloutError(
                f"{self.place}: a message of role {PROMPT!r} must be the only one, and a text or a "
                "list of token ids"
            )
        if not settings.token_ids or settings.on_chunk is not None:
            raise RolloutError(
                f"{self.place}: a prompt without a chat needs token_ids=True, and no on_chunk"
            )

    def _check_limits(self) -> None:
        self._check_over()
        limits = self.task.limits
        if len(self._replies) >= limits.turns:
            raise RolloutLimitError(
                f"{self.place}: the rollout reached its limit of {limits.turns} turns", "turns"
            )
        if limits.tokens is not None and self._generated >= limits.tokens:
            raise RolloutLimitError(
                f"{self.place}: the rollout reached its limit of {limits.tokens} tokens", "tokens"
            )

    def _request(self, own: Mapping[str, Any], max_tokens: int | None) -> ChatRequest:
        """Return the request for this reply."""
        parameters = {
            **self.sampling.chat_request.parameters,
            **{name: value for name, value in own.items() if value is not None},
        }
        given = (max_tokens, self.sampling.chat_request.max_tokens)
        most = present(given)[:1]
        if self.task.limits.tokens is not None:
            most.append(self.task.limits.tokens - self._generated)
        if most:
            parameters |= self.sampling.chat_request.limited(min(most))
        return dataclasses.replace(self.sampling.chat_request, parameters=parameters)

    def _count_time(self, counts: bool) -> None:
        """Restart the rollout's clock with each reply; stop it during requests."""
        if self._clock is not None and not self._is_over and not self._clock.expired():
            now = asyncio.get_running_loop().time()
            self._clock.reschedule(now + self.task.limits.seconds if counts else None)

    def _digest(self, request: ChatRequest, messages: list[Message], number: int) -> str | None:
        """Return the digest of a request. A first request unchanged by the rollout has the task's
        digest. Others include task and turn, so no two share an answer.
        """
        task = self.group.digest
        if task is None:
            return None
        body = self.sampling.cache_body(messages, request)
        if number == 0 and body == self.sampling.cache_body(self.group.messages):
            return task
        return request_digest({"task": task, "turn": number}, body)

    async def _answer(
        self, request: ChatRequest, messages: list[Message], number: int
    ) -> tuple[Answer, str | None, bool]:
        """Return a reply from the cache or a server: (answer, digest, whether it was cached)."""
        digest = self._digest(request, messages, number)
        found = (await self.sampling.cached(digest, [self._number]))[0]
        if found is not None:
            return found, digest, True
        seed = self._number
        if number > 0 or digest != self.group.digest:
            made_of = f"{self._number}/{number}".encode()
            seed = int.from_bytes(hashlib.sha256(made_of).digest()[:6], "big")
        attempt = _FittingAttempt(
            request=request,
            messages=messages,
            seed_offset=seed,
            on_chunk=self.sampling.request.on_chunk,
            watch=self.group.watch([self.sample], messages),
            count=self.sampling.count_tokens,
            place=self.place,
        )
        size = Size.of(messages, 1, request.max_tokens)
        answer = (
            await self.group.send(attempt, [self.sample], size, digest=digest, ticket=self._ticket)
        )[0]
        assert answer is not None
        return answer, digest, False

    # The sample

    def _fill(self) -> None:
        """Fill the replies into the sample, as its turns."""
        sample = self.sample
        replies = present(self._replies)
        sample.turns = [
            _turn(replies, number, self.group.messages) for number in range(len(replies))
        ]
        if not replies:
            return
        first = replies[0].answer
        usage = self.group.usage
        usage.prompt = max(usage.prompt, first.prompt_tokens or len(first.prompt_token_ids or ()))
        reads = [reply.read for reply in replies]
        last = reads[-1]
        sample.text = last.text
        sample.opening = last.opening
        sample.finish_reason = last.finish_reason
        sample.cached = all(read.cached for read in reads)
        if self.sampling.request.token_ids:
            sample.prompt_token_ids = list(reads[0].prompt_token_ids or ())
            sample.token_ids = [token for read in reads for token in read.token_ids or ()]
        if any(read.logprobs is not None for read in reads):
            sample.logprobs = [logprob for read in reads for logprob in read.logprobs or ()]
        if (
            all(len(read.logprob_tokens or ()) == len(read.logprobs or ()) for read in reads)
            and sample.logprobs
        ):
            sample.logprob_tokens = [token for read in reads for token in read.logprob_tokens or ()]


def _turn(replies: Sequence[_Reply], number: int, given: list[Message]) -> Turn:
    reply = replies[number]
    read = reply.read
    messages = reply.messages
    follows = next(
        (
            k
            for k in range(number - 1, -1, -1)
            if _begins(messages, [*replies[k].messages, replies[k].message])
        ),
        None,
    )
    if follows is not None:
        known = len(replies[follows].messages) + 1
    else:
        follows, known = (-1, len(given)) if _begins(messages, given) else (None, 0)
    prompt = read.prompt_token_ids
    continues = None
    shown = 0
    if prompt is not None:
        for k in range(number - 1, -1, -1):
            ids = replies[k].ids
            if ids is not None and _begins(prompt, ids):
                continues = k
                shown = len(ids)
                break
    return Turn(
        messages=messages[known:],
        follows=follows,
        reply=reply.message,
        tools=reply.tools,
        prompt_token_ids=None if prompt is None else prompt[shown:],
        continues=continues,
        num_tokens=len(read.token_ids if read.token_ids is not None else read.logprobs or ()),
        finish_reason=read.finish_reason,
        weights_version=read.weights_version,
        cached=read.cached,
        prefix_cached=read.prefix_cached,
        routed_experts=read.routed_experts,
    )


def _begins(whole: list[Any], part: list[Any]) -> bool:
    """Return whether `whole` begins with `part`. Compares the ends first, because conversations
    usually differ there.
    """
    return (
        len(part) <= len(whole)
        and (not part or whole[len(part) - 1] == part[-1])
        and whole[: len(part)] == part
    )


def _sent_back(choice: Choice) -> Message:
    """Return the model's message in the form for later requests."""
    message = choice.message
    sent: Message = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        sent["tool_calls"] = without_nulls(plain(message.tool_calls, "tool_calls"))
    for name in _REASONING:
        reasoning = getattr(message, name, None)
        if isinstance(reasoning, str) and reasoning:
            sent[name] = reasoning
    return sent


def _clean(value: Any) -> Any:
    """Replace halves of surrogate pairs; neither requests nor files can hold them."""
    if isinstance(value, str):
        if value.isascii():
            return value
        return writable(value)
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return value
