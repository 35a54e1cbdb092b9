"""ASGI middleware that asks for the api key on every path of a vLLM server.

vLLM's own key guards only some paths: the development endpoints, which we need for weight sync, run any method of the worker for
any local user, and /metrics, /tokenize and /invocations are open as well. vLLM loads this class in its own process through
`--middleware` and adds it last, so that it runs first. It imports next to nothing: neither torch nor the rest of ttrl.
"""

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY_VARIABLE = "VLLM_API_KEY"
OPEN_PATHS = frozenset({"/health"})
"""Says nothing but "up", and is asked by watchers that know no key."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class RequireKey:
    """Answers 401 to every request without `Authorization: Bearer KEY`; the key comes from the environment variable VLLM_API_KEY.

    Raises RuntimeError when made without a key: a server that was meant to be closed must not start open.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        key = os.environ.get(KEY_VARIABLE)
        if not key:
            raise RuntimeError(f"{KEY_VARIABLE} is not set: this server would be open to every local user")
        self._app = app
        self._digest = hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in OPEN_PATHS or self._has_key(scope):
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008, "reason": "Unauthorized"})
        headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})

    def _has_key(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name.lower() == b"authorization":
                scheme, _, given = value.partition(b" ")
                # Digests have one length, and their comparison takes one time whatever is given.
                return scheme.lower() == b"bearer" and hmac.compare_digest(hashlib.sha256(given).digest(), self._digest)
        return False
