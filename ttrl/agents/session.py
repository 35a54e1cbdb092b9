"""An OpenAI-compatible endpoint in front of the policy, for one session of an agent that ttrl knows nothing of.

A request is one reply of the sample's rollout (`ttrl.tasks.task.Chat`), so what is true of rollouts is true here: the server's
ids and log-probabilities, caches, retries, limits, and the tree of prefixes, by which branches, parallel calls, repeated requests
and rewritten histories are told apart. Only what the policy sampled is trained, and only if its request was still waited for.

Each session listens on a port of its own, on the loopback, so that nothing is shared and nothing stays when it ends. Its keys are
random; the server's own key stays with ttrl. Answers are complete when they are sent, streamed ones too: a stream that breaks
between server and ttrl is asked for again, which could not be done if the agent had read a part of it.

Not here: /v1/completions, /v1/responses, pictures.
"""

import asyncio
import hmac
import json
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from ttrl.errors import GraderError, RequestError, RolloutError, RolloutLimitError, ServerError, TtrlError, UserError
from ttrl.tasks.task import Chat, Grade
from ttrl.text import short

MODEL = "policy"
MAX_BODY = 64 * 2**20
"""Bytes of a request."""
# What of a request does not change what is sampled for a given prompt, or is read below. A seed is the run's matter: with one of
# the agent's own, all samples of a task would be equal.
# fmt: off
_FREE = frozenset([
    "messages", "model", "tools", "stop", "max_tokens", "max_completion_tokens", "stream", "stream_options", "logprobs", "seed",
    "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier",
])
# fmt: on
_NEUTRAL: dict[str, Any] = {
    "n": 1,
    "temperature": 1,
    "top_p": 1,
    "min_p": 0,
    "top_logprobs": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
}
_FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter")


class Session:
    """What an agent is given to reach the model.

    base_url, api_key, model: for any OpenAI client; the model's name is always "policy".
    messages, task_id, sample: the task, and which rollout of it this is.
    reward_url, reward_key: where `POST {"reward": 1.0, "metrics": {…}}` gives the reward, with a key of its own, so that what the
        model writes and the agent runs cannot reward itself with the agent's key.
    """

    def __init__(self, chat: Chat, ignore: frozenset[str] = frozenset()) -> None:
        self.messages = [dict(message) for message in chat.messages]
        self.task_id, self.sample, self.model = chat.task_id, chat.sample, MODEL
        self.id, self.api_key, self.reward_key = secrets.token_hex(8), secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self.base_url = self.reward_url = ""
        """Known when it listens."""
        self.reward: Grade | None = None
        """That was posted."""
        self.num_replies = 0
        self.failure: TtrlError | None = None
        """Of the first request that was refused or failed: what the agent made of it is not the policy's doing."""
        self.limit: RolloutLimitError | None = None
        self._chat, self._ignore = chat, ignore
        self._place = f"task {chat.task_id!r}, sample {chat.sample}"
        self._requests: set[asyncio.Task[Any]] = set()
        self._is_over = False
        self._runner: web.AppRunner | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables by which OpenAI's clients find the session."""
        direct = ",".join(filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1"]))
        names = {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key, "OPENAI_MODEL": self.model}
        return {**names, "no_proxy": direct, "NO_PROXY": direct}

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guarded])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post(f"/sessions/{self.id}/reward", self._take_reward)
        # A request whose client is gone is cancelled, up to the server: nobody acted on its answer.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        try:
            await self._runner.setup()
            await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        except BaseException:
            await self._runner.cleanup()
            raise
        root = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self.base_url, self.reward_url = f"{root}/v1", f"{root}/sessions/{self.id}/reward"
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_over = True
        assert self._runner is not None
        for request in self._requests:
            request.cancel()
        await asyncio.shield(self._runner.cleanup())

    # Requests

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Ask for the key; answer whatever goes wrong in the API's words, and so that OpenAI's clients do not try again."""
        key = self.reward_key if request.path.startswith("/sessions/") else self.api_key
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {key}".encode()):
            return _refusal(401, "this session wants its own key", "invalid_api_key")
        if self._is_over:
            return _refusal(410, "the session is over", "session_over")
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        try:
            return await handler(request)
        except RolloutLimitError as error:
            self.limit = error
            return _refusal(400, str(error), "context_length_exceeded" if error.limit == "context" else f"session_{error.limit}")
        except (UserError, GraderError) as error:
            return _refusal(400, str(error), "refused")
        except TtrlError as error:
            is_own_fault = isinstance(error, RequestError) and error.status is not None and 400 <= error.status < 500
            return _refusal(400 if is_own_fault else 502, str(error), "policy_failed")
        except web.HTTPException as error:
            known = "/v1/chat/completions and /v1/models"
            return _refusal(error.status, f"{request.method} {request.path}: {error.reason}; a session has {known}", "not_found")
        finally:
            self._requests.discard(task)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "ttrl"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        try:
            body = await _json(request)
            self._check(body)
            chat = self._chat.copy(_messages(body.get("messages")))
            tools = body.get("tools") if body.get("tool_choice") != "none" else None
            choice = await chat(tools=tools or None, max_tokens=self._max_tokens(body), stop=body.get("stop"))
            answer = _answer(body, chat.messages[-1], choice)
        except RolloutLimitError:
            raise
        except Exception as error:
            own = error if isinstance(error, ServerError | RolloutError) else None
            self.failure = self.failure or own or RolloutError(f"{self._place}: the agent's request was refused: {error}")
            raise
        self.num_replies += 1
        return answer

    async def _take_reward(self, request: web.Request) -> web.Response:
        body = await _json(request)
        self.reward = Grade.of((body.get("reward"), body.get("metrics") or {}), self._place, who="agent")
        return web.json_response({"reward": self.reward.reward})

    def _check(self, body: Mapping[str, Any]) -> None:
        """Raise UserError for what would sample another distribution than the one that is trained."""
        if body.get("model", MODEL) != MODEL:
            raise UserError(
                f"model is {short(body['model'], 60)}; a session has {MODEL!r} alone: ask other models where they are"
            )
        tools = body.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise UserError(f"tools is {short(tools, 60)}; give a list of objects")
        if not isinstance(body.get("stream_options") or {}, dict):
            raise UserError(f"stream_options is {short(body['stream_options'], 60)}; give an object")
        for name, value in body.items():
            if name in _FREE or name in self._ignore or value is None or (name == "tool_choice" and value == "none"):
                continue
            own = self._chat.params.get(name, _NEUTRAL.get(name))
            if value != own:
                shown = "does not set it" if own is None else f"samples with {short(own, 60)}"
                raise UserError(
                    f"{name} is {short(value, 60)}, but the run {shown}, and no other distribution can be trained; leave it "
                    f"out, set it for the run, or let it be ignored: agent_task(…, ignore=[{name!r}])"
                )

    def _max_tokens(self, body: Mapping[str, Any]) -> int | None:
        """Return the least of the agent's limits; None: the run's own."""
        names = ("max_completion_tokens", "max_tokens")
        found = [body[name] for name in names if body.get(name) is not None]
        for value in found:
            if type(value) is not int or value < 1:
                raise UserError(f"max_tokens is {short(value, 60)}; give a whole number of at least 1")
        own = [self._chat.params[name] for name in names if self._chat.params.get(name) is not None]
        return min([*found, *own[:1]]) if found else None


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise UserError(f"the request's body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise UserError(f"the request's body is {short(body, 60)}; send an object")
    return body


def _messages(given: Any) -> list[dict[str, Any]]:
    """Return a request's messages without fields that are null, as clients send what they were sent. Raises UserError."""
    if not isinstance(given, list) or not given or not all(isinstance(message, dict) for message in given):
        raise UserError(f"messages is {short(given, 60)}; give a non-empty list of objects")
    for number, message in enumerate(given):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else part
            if kind != "text":
                raise UserError(f"messages[{number}] holds a part of type {short(kind, 60)}; the policy is trained on text alone")
    return [{key: value for key, value in message.items() if value is not None or key == "content"} for message in given]


def _answer(body: Mapping[str, Any], message: dict[str, Any], choice: Any) -> web.Response:
    """Return a completion, or the stream of one, as the API has it."""
    finish_reason = choice.finish_reason if choice.finish_reason in _FINISH_REASONS else "stop"
    logprobs = choice.logprobs.model_dump(mode="json") if body.get("logprobs") and choice.logprobs is not None else None
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": MODEL}
    if not body.get("stream"):
        one = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}
        return web.json_response({**head, "object": "chat.completion", "choices": [one], "usage": choice.usage})
    delta = dict(message)
    if calls := message.get("tool_calls"):
        delta["tool_calls"] = [{**call, "index": number} for number, call in enumerate(calls)]
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish_reason}]},
    ]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({"choices": [], "usage": choice.usage})
    events = [json.dumps({**head, "object": "chat.completion.chunk", **chunk}) for chunk in chunks]
    return web.Response(text="".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]), content_type="text/event-stream")


def _refusal(status: int, message: str, code: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error" if status < 500 else "server_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status, headers={"x-should-retry": "false"})
