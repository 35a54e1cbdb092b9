"""Serve sessions over HTTP at one address, told apart by their keys.

Every request needs a key. Errors use the API's format and keep OpenAI's clients from retrying. A
request from a disconnected client is cancelled up to the server: its reply had no effect. Closing
leaves nothing running.

A request costs 0.4 to 0.6 ms of CPU more than `await chat(…)` (tools/bench_rollouts.py --fake, on
two busy cores).
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

from aiohttp import web

from ttrl.agents.request_parameters import refusal
from ttrl.agents.session import APIS, Session
from ttrl.errors import GraderError, RequestError, RolloutLimitError, TtrlError, UserError

MAX_BODY = 64 * 2**20
"""Bytes of a request."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Listener:
    """Serve sessions while entered. `own`: further routes with their own keys, (method, path,
    handler, key).
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        own: Sequence[tuple[str, str, Handler, str]] = (),
    ) -> None:
        self.root = ""
        """Address, once listening."""
        self._host = host
        self._port = port
        self._own = own
        self._agents: dict[bytes, Session] = {}
        self._rewarders: dict[bytes, Session] = {}
        """By digests of the keys, so the time of a lookup reveals nothing about a key."""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[_explained])
        app.router.add_get("/v1/models", self._guarded(self._agents, _models))
        for path in APIS:
            app.router.add_post(f"/v1{path}", self._guarded(self._agents, Session.answer))
        app.router.add_get(
            "/v1/responses/{response}", self._guarded(self._agents, Session.response)
        )
        app.router.add_post(
            "/sessions/{id}/reward", self._guarded(self._rewarders, Session.take_reward)
        )
        for method, path, handler, key in self._own:
            app.router.add_route(method, path, _with_key(handler, key))
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0
        )
        try:
            await self._runner.setup()
            await web.TCPSite(self._runner, self._host, self._port).start()
        except BaseException:
            await self._runner.cleanup()
            raise
        if ":" in self._host:
            host = f"[{self._host}]"
        else:
            host = self._host
        self.root = f"http://{host}:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        for session in list(self._agents.values()):
            await session.close()
        await asyncio.shield(self._runner.cleanup())

    def add(self, session: Session) -> None:
        """Add a session."""
        session.base_url = f"{self.root}/v1"
        session.reward_url = f"{self.root}/sessions/{session.id}/reward"
        self._agents[_digest(session.api_key)] = self._rewarders[_digest(session.reward_key)] = (
            session
        )

    async def remove(self, session: Session) -> None:
        """End a session: cancel its requests and forget its keys."""
        del self._agents[_digest(session.api_key)], self._rewarders[_digest(session.reward_key)]
        await session.close()

    def _guarded(
        self,
        keys: dict[bytes, Session],
        handler: Callable[[Session, web.Request], Awaitable[web.StreamResponse]],
    ) -> Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            session = keys.get(_digest(_key(request)))
            if session is None or request.match_info.get("id", session.id) != session.id:
                return refusal(
                    401,
                    "unknown key: send the key of an open session",
                    "invalid_api_key",
                )
            if session.is_over:
                return refusal(410, "the session is over", "session_over")
            return await handler(session, request)

        return answer


def _with_key(handler: Handler, key: str) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        if _digest(_key(request)) != _digest(key):
            return refusal(
                401, "unknown key: opening a session needs the proxy's own key", "invalid_api_key"
            )
        return await handler(request)

    return answer


def _key(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key
    return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


@web.middleware
async def _explained(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Report any error in the API's format."""
    try:
        return await handler(request)
    except RolloutLimitError as error:
        return refusal(
            400,
            str(error),
            "context_length_exceeded" if error.limit == "context" else f"session_{error.limit}",
        )
    except (UserError, GraderError) as error:
        return refusal(400, str(error), "refused")
    except TtrlError as error:
        is_own_fault = isinstance(error, RequestError) and 400 <= (error.status or 0) < 500
        return refusal(400 if is_own_fault else 502, str(error), "policy_failed")
    except web.HTTPException as error:
        known = ", ".join(f"/v1{path}" for path in (*APIS, "/models"))
        return refusal(
            error.status,
            f"{request.method} {request.path}: {error.reason}; a session has {known}",
            "not_found",
        )


async def _models(session: Session, request: web.Request) -> web.Response:
    data = [
        {"id": name, "object": "model", "created": 0, "owned_by": "ttrl"} for name in session.models
    ]
    return web.json_response({"object": "list", "data": data})
