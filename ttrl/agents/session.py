"""Capture an external agent's requests to the policy, in any API, as one sample's rollout.

A request is one reply of the sample's rollout (`ttrl.tasks.task.Chat`), with everything rollouts
have: the server's ids and log-probabilities, caches, retries, limits, and the tree of prefixes to
tell branches, parallel calls, repeated requests and rewritten histories apart. Only tokens sampled
by the policy are trained, and only if the client waited for the reply.

Keys are random; the server's own key stays with ttrl. Replies are sent complete, even as streams:
ttrl can retry a stream broken at the server, because the agent has read none of it.
"""

import asyncio
import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from aiohttp import web

from ttrl.agents import chat_endpoint, completions_endpoint, responses
from ttrl.agents.request_parameters import MODEL, Asked, check_parameters, least_tokens, read_json
from ttrl.errors import RolloutError, RolloutLimitError, ServerError, TtrlError
from ttrl.messages import JsonObject, Message
from ttrl.records import Endpoint
from ttrl.rollouts.client.transport import Transport, transport_for
from ttrl.tasks.task import Chat, Grade
from ttrl.text import short

APIS: dict[str, ModuleType] = {
    "/chat/completions": chat_endpoint,
    "/completions": completions_endpoint,
    "/responses": responses,
}


class Session:
    """Give an agent access to the model.

    base_url, api_key, model: for any OpenAI client; the model's name is always "policy".
    names: further names for it in requests.
    messages, task_id, sample: the task, and the number of this rollout.
    reward_url, reward_key: address and key for `POST {"reward": 1.0, "metrics": {…}}`. The separate
    key keeps the agent from rewarding itself through code written by the model.
    """

    def __init__(
        self,
        chat: Chat,
        ignore: frozenset[str] = frozenset(),
        beside: "Mapping[str, str | Endpoint] | None" = None,
        names: Iterable[str] = (),
    ) -> None:
        self.messages = [dict(message) for message in chat.messages]
        self.task_id = chat.task_id
        self.sample = chat.sample
        self.model = MODEL
        self.id, self.api_key, self.reward_key = (
            secrets.token_hex(8),
            secrets.token_urlsafe(32),
            secrets.token_urlsafe(32),
        )
        self.base_url = self.reward_url = ""
        """Set by a listener."""
        self.reward: Grade | None = None
        """The posted reward."""
        self.rewarded = asyncio.Event()
        self.num_replies = 0
        self.failure: TtrlError | None = None
        """First refused or failed request: its effect on the agent is not the policy's fault."""
        self.limit: RolloutLimitError | None = None
        self.written: asyncio.Future[None] | None = None
        """If not None, a reward is answered once this is done."""
        self._requests: set[asyncio.Task[Any]] = set()
        self.is_over = False
        self._chat = chat
        self._ignore = ignore
        self._names = list(dict.fromkeys([MODEL, *names]))
        self._beside = {name: transport_for(server) for name, server in (beside or {}).items()}
        self._place = f"task {chat.task_id!r}, sample {chat.sample}"
        self._responses: dict[str, list[Message]] = {}
        """Conversations by the ids of their last response, without instructions."""
        self._answered: dict[str, JsonObject] = {}
        """Responses by their ids."""

    @property
    def environment(self) -> dict[str, str]:
        """Return environment variables for OpenAI's clients."""
        direct = ",".join(
            filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1"])
        )
        names = {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
        }
        return {**names, "no_proxy": direct, "NO_PROXY": direct}

    @property
    def models(self) -> list[str]:
        """Return the names of its models."""
        return list(dict.fromkeys([*self._names, *self._beside]))

    async def close(self) -> None:
        """Cancel its requests and refuse further ones."""
        self.is_over = True
        for request in self._requests:
            request.cancel()
        for transport in self._beside.values():
            await transport.close()

    # Requests

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request to one of APIS."""
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        try:
            return await self._answer(request)
        except RolloutLimitError as error:
            self.limit = error
            raise
        finally:
            self._requests.discard(task)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        with self._keeping_failures():
            body = await read_json(request)
        path = request.path.removeprefix("/v1")
        name = body.get("model", MODEL)
        if isinstance(name, str) and (other := self._beside.get(name)) is not None:
            return await _passed_on(other, path, body)
        with self._keeping_failures():
            api = APIS[path]
            own = self._chat.params
            check_parameters(body, own, self._ignore, api.FREE, api.NEUTRAL, self._names)
            if api is not responses:
                whole: web.Response = api.answer(body, *await self._ask(api.read(body)))
                return whole
            asked = responses.read(body, self._responses)
            message, choice = await self._ask(asked)
            name = f"resp_{secrets.token_hex(12)}"
            self._responses[name] = [
                *asked.messages[1 if body.get("instructions") else 0 :],
                message,
            ]
            self._answered[name], answer = responses.answer(body, message, choice, name)
            return answer

    async def response(self, request: web.Request) -> web.Response:
        """Repeat an earlier response of this session."""
        name = request.match_info["response"]
        found = self._answered.get(name)
        if found is None:
            raise web.HTTPNotFound(reason=f"this session has no response {short(name, 60)}")
        return web.json_response(found)

    async def take_reward(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        self.reward = Grade.of(
            (body.get("reward"), body.get("metrics") or {}), self._place, who="agent"
        )
        self.rewarded.set()
        if self.written is not None:
            await asyncio.shield(self.written)
        return web.json_response({"reward": self.reward.reward})

    @contextlib.contextmanager
    def _keeping_failures(self) -> Iterator[None]:
        """Keep the first failure of the session's requests; limits are no failures."""
        try:
            yield
        except RolloutLimitError:
            raise
        except (ServerError, RolloutError) as error:
            self.failure = self.failure or error
            raise
        except Exception as error:
            refused = RolloutError(f"{self._place}: the agent's request was refused: {error}")
            self.failure = self.failure or refused
            raise

    async def _ask(self, asked: Asked) -> tuple[Message, Any]:
        """Return the policy's message and choice."""
        chat = self._chat.copy(asked.messages)
        limit = least_tokens(asked.max_tokens, self._chat.params)
        choice = await chat(tools=asked.tools, max_tokens=limit, stop=asked.stop)
        self.num_replies += 1
        return chat.messages[-1], choice


async def _passed_on(transport: Transport, path: str, body: Mapping[str, Any]) -> web.Response:
    """Return the answer of another model, uncaptured."""
    if not body.get("stream"):
        return web.Response(body=await transport.post(path, body), content_type="application/json")
    async with transport.stream(path, body) as parts:
        return web.Response(
            body=b"".join([part async for part in parts]), content_type="text/event-stream"
        )
