"""Ask judging models: requests are retried, cached, counted and priced, but never trained."""

import asyncio
import functools
import hashlib
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from openai import APIStatusError, AsyncOpenAI, OpenAIError

from ttrl.errors import GraderError, UserError, describe
from ttrl.messages import text_of
from ttrl.rollouts.cache.completions import Cache, request_digest, sample_key
from ttrl.rollouts.client import wire
from ttrl.tasks.task import Choice
from ttrl.text import short

Verdict = TypeVar("Verdict")
_clients: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, Any]]" = (
    weakref.WeakKeyDictionary()
)
"""Clients and semaphores by event loop: they belong to one, and a judge may be used in several or
pickled.
"""


@functools.cache
def _cache_at(address: str) -> Cache | None:
    """Return the process's cache at an address. Raises UserError for a malformed one."""
    return Cache.of(address)


@dataclass(frozen=True)
class Answer:
    """A judge's answer, and its cost this time: nothing for a cached one."""

    body: Any
    """Text, or JSON."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: bool = False


@dataclass(frozen=True)
class Asked:
    """Connect to a judging model.

    model: its name there.
    base_url: of an OpenAI-compatible server.
    key_variable: environment variable of the key, read on demand and never written.
    prices: dollars per million tokens, (input, output).
    cache: store of answers, as in `get_task_results`: a folder, "s3://…"; the same question is not
        paid twice.
    retries: further tries of a failed request, with growing pauses.
    timeout: seconds of one request.
    at_once: concurrent requests.
    params: sampling parameters, greedy by default.
    """

    model: str
    base_url: str = "https://api.openai.com/v1"
    key_variable: str = "OPENAI_API_KEY"
    prices: tuple[float, float] = (0.0, 0.0)
    cache: str | os.PathLike[str] | None = None
    retries: int = 4
    timeout: float = 120.0
    at_once: int = 16
    params: Mapping[str, Any] = field(
        default_factory=lambda: {"temperature": 0.0, "max_tokens": 1024}
    )

    def __post_init__(self) -> None:
        if not self.model or not self.base_url.startswith(("http://", "https://")):
            raise UserError(
                f"the judge's model is {self.model!r}, at {self.base_url!r}; give a model name and "
                "a server's address"
            )
        if (
            len(self.prices) != 2
            or min(self.prices) < 0
            or self.retries < 0
            or self.timeout <= 0
            or self.at_once < 1
        ):
            raise UserError(
                "a judge needs two prices, each at least 0, retries of at least 0, and timeout "
                "and at_once above 0"
            )
        self._cache()

    def _cache(self) -> Cache | None:
        if self.cache is None:
            return None
        return _cache_at(os.fspath(self.cache))

    async def chat(self, messages: Sequence[Mapping[str, str]], seed: int = 0) -> Answer:
        """Return the model's reply as text. Raises GraderError."""
        body = {"model": self.model, "messages": list(messages), "seed": seed, **self.params}
        answer = await self.post("/chat/completions", body)
        try:
            text = answer.body["choices"][0]["message"]["content"]
        except (LookupError, TypeError):
            raise GraderError(
                f"the judge {self.model} sent no reply: {short(answer.body, 120)}"
            ) from None
        return replace(answer, body=text or "")

    async def post(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Return the server's JSON answer, or its cached copy. Raises GraderError."""
        cache = self._cache()
        key = sample_key(request_digest({"base_url": self.base_url, "path": path}, body), 0)
        if cache is not None and (kept := await cache.get(key)) is not None:
            return Answer(wire.loads(kept.choice), cached=True)
        client, limit = self._client()
        try:
            async with limit:
                found: Any = await client.post(path, cast_to=object, body=dict(body))
        except OpenAIError as error:
            if _is_final(error):
                tries = ""
            else:
                tries = f" ({self.retries + 1} tries)"
            raise GraderError(
                f"the judge {self.model} at {self.base_url}: {describe(error)}{tries}"
            ) from error
        usage = wire.object_of(wire.object_of(found).get("usage"))
        answer = Answer(
            found, int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        )
        if cache is not None:
            await cache.put(key, wire.Answer(wire.encoded(found)), body)
        return answer

    def costs(self, answers: Sequence[Answer], parts: int = 1) -> dict[str, float]:
        """Return metrics: the cost of these answers, shared by `parts` samples, and the cached
        share.
        """
        dollars = (
            sum(
                one.prompt_tokens * self.prices[0] + one.completion_tokens * self.prices[1]
                for one in answers
            )
            / 1e6
        )
        cached = sum(one.cached for one in answers) / len(answers)
        return {"judge_dollars": dollars / parts, "judge_cached": cached}

    def _client(self) -> tuple[AsyncOpenAI, asyncio.Semaphore]:
        mine = _clients.setdefault(asyncio.get_running_loop(), {})
        key = (self.base_url, self.key_variable, self.retries, self.timeout, self.at_once)
        if key not in mine:
            secret = os.environ.get(self.key_variable) or "none"
            client = AsyncOpenAI(
                base_url=self.base_url,
                api_key=secret,
                max_retries=self.retries,
                timeout=self.timeout,
            )
            mine[key] = client, asyncio.Semaphore(self.at_once)
        found: tuple[AsyncOpenAI, asyncio.Semaphore] = mine[key]
        return found


@dataclass(frozen=True, kw_only=True)
class Verdicts(Asked):
    """Ask a model to judge by a rubric.

    rubric: the criteria, in words.
    task: the question behind the replies, shown to the judge.
    tries: attempts to get a readable verdict. After the first, the judge sees its last answer: a
        greedy judge would repeat it.

    Raises UserError.
    """

    rubric: str
    task: str = ""
    tries: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rubric.strip() or self.tries < 1:
            raise UserError(
                f"the judge's rubric is {short(self.rubric, 80)} and its tries are {self.tries}; "
                "describe a good reply in words, and give at least one try"
            )

    async def verdict(
        self, content: str, form: str, read: Callable[[str], Verdict | None], seed: int = 0
    ) -> tuple[Verdict, list[Answer]]:
        """Ask until `read` finds a verdict; return it, and all answers.

        form: required ending of an answer, in words. Raises GraderError after the last try.
        """
        messages = [{"role": "user", "content": content}]
        answers = list[Answer]()
        for number in range(self.tries):
            answers.append(await self.chat(messages, seed + number))
            found = read(answers[-1].body)
            if found is not None:
                return found, answers
            messages.append({"role": "assistant", "content": answers[-1].body or "…"})
            messages.append(
                {
                    "role": "user",
                    "content": f"That did not end with {form}. Answer with that alone.",
                }
            )
        raise GraderError(
            f"the judge {self.model} did not end with {form} in {self.tries} tries; its last "
            f"answer ended {short(answers[-1].body[-200:], 200)}"
        )


def _is_final(error: OpenAIError) -> bool:
    """Tell whether openai's client never retries the error, such as for an overlong request."""
    return (
        isinstance(error, APIStatusError)
        and error.status_code < 500
        and error.status_code not in (408, 409, 429)
    )


def conversation_of(choice: Choice) -> tuple[str, str]:
    """Return the judge's view of a choice: the earlier messages (if known), and the last reply."""
    before = [
        message
        for message in (getattr(choice, "messages", None) or [])[:-1]
        if message.get("content")
    ]
    said = [f"{one['role']}: {text_of(one['content']) or one['content']}" for one in before]
    return "\n\n".join(said), choice.message.content or ""


def fenced(text: str, name: str, salt: str) -> str:
    """Put text between tags it cannot close: their names hold a digest of the judged text."""
    tag = f"{name}-{hashlib.sha256(salt.encode(errors='surrogatepass')).hexdigest()[:8]}"
    return f"<{tag}>\n{text}\n</{tag}>"
