"""Guard a vLLM server as ASGI middleware: ask for the API key on every path, and refuse requests
for weights it does not have.

vLLM's own key guards only some paths: the development endpoints, needed by weight sync, run any
method of the worker for any local user, and /metrics, /tokenize and /invocations are open as well.
vLLM loads this class in its own process through `--middleware`. It is added last, so it runs first.
It imports next to nothing: neither torch nor the rest of ttrl.

The fence. A client names the server's expected weights in each request (header X-TTRL-Weights). A
server answers such requests while it is open to those weights: from the proof of a sync until the
next sync begins, or until the server restarts. After a crash during the rollouts it comes back with
other weights. Until its next sync it then answers 503, and clients treat it as a server that is
down. Closing the fence during an answer suppresses the answer or cuts it short: a part may come
from other weights. Requests without the header pass. The state is a file, since vLLM may have
several API servers; each start removes it first.

Joining. Before a client sends a server anything, it asks for a proof, an HMAC of its own number. It
never sends the key itself, only one derived from it for this server: an impostor at a server's
address learns only this derived key, which opens no other server.
"""

import contextlib
import hashlib
import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ttrl.messages import JsonObject

KEY_VARIABLE = "VLLM_API_KEY"
OPEN_PATHS = frozenset({"/health"})
"""Says only "up", for monitors without the key."""
FENCE_VARIABLE = "TTRL_WEIGHTS_FILE"
FENCE_PATH = "/ttrl/weights"
"""GET returns {"weights": the weights it is open to, or null, "chat_template": its digest, if
known}; POST, with the header, opens it to those; DELETE closes it."""
FENCE_HEADER = "X-TTRL-Weights"
NAME_VARIABLE = "TTRL_SERVER_NAME"
TEMPLATE_VARIABLE = "TTRL_CHAT_TEMPLATE"
"""SHA-256 of the chat template for the server's prompts."""
PROOF_PATH = "/ttrl/proof"
"""GET ?NUMBER, without a key: {"name": the server's, "proof": derived(key, "proof", NUMBER, name)}.
"""
_WITHOUT_V1 = frozenset(
    {"/models", "/chat/completions", "/completions", "/embeddings", "/responses"}
)
_FENCE_HEADER = FENCE_HEADER.lower().encode()

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def derived(key: str, *words: str) -> str:
    """Return an HMAC of these words; it proves knowledge of the key without revealing it."""
    return hmac.new(key.encode(), "\n".join(words).encode(), "sha256").hexdigest()


class RequireKey:
    """Answer 401 to every request without `Authorization: Bearer KEY`. KEY is the environment
    variable VLLM_API_KEY, or derived from it for this server.

    Raises RuntimeError without a key: a server meant to be closed must not start open.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        key = os.environ.get(KEY_VARIABLE)
        if not key:
            raise RuntimeError(
                f"{KEY_VARIABLE} is not set: this server would be open to every local user"
            )
        self._app, self._key, self._name = app, key, os.environ.get(NAME_VARIABLE, "")
        self._digests = [
            hashlib.sha256(one.encode()).digest() for one in (key, derived(key, "key", self._name))
        ]
        self._fence = os.environ.get(FENCE_VARIABLE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in OPEN_PATHS:
            return await self._app(scope, receive, send)
        if scope.get("path") == PROOF_PATH and scope["type"] == "http":
            number = scope.get("query_string", b"").decode("latin-1")
            return await answer(
                send,
                200,
                {"name": self._name, "proof": derived(self._key, "proof", number, self._name)},
            )
        if not self._has_key(scope):
            if scope["type"] == "websocket":
                return await send(
                    {"type": "websocket.close", "code": 1008, "reason": "Unauthorized"}
                )
            places = (
                "OpenAI's clients and ttrl take it from OPENAI_API_KEY, a run from TTRL_SERVER_KEY"
            )
            message = f"Unauthorized: this server needs its key; {places}"
            return await answer(send, 401, _error(message, 401), (b"www-authenticate", b"Bearer"))
        if scope.get("path") in _WITHOUT_V1:
            return await answer(
                send,
                404,
                _error(f"no {scope['path']} here: the server's address ends in /v1", 404),
            )
        wanted = next(
            (value for name, value in scope["headers"] if name.lower() == _FENCE_HEADER), None
        )
        if scope.get("path") == FENCE_PATH and scope["type"] == "http":
            return await self._set_fence(scope["method"], wanted, send)
        if wanted is None:
            return await self._app(scope, receive, send)
        opened = self._opened()
        has = self._open_to()
        if wanted != has:
            if scope["type"] == "websocket":
                return await send(
                    {"type": "websocket.close", "code": 1013, "reason": "other weights"}
                )
            message = (
                f"this server has other weights ({_text(has)}) than the request needs "
                f"({_text(wanted)}); sync it first"
            )
            return await answer(send, 503, _error(message, 503, "other_weights"))

        async def send_while_open(message: MutableMapping[str, Any]) -> None:
            if self._opened() != opened:
                raise RuntimeError(
                    "the weights changed during this request; its answer is not sent"
                )
            await send(message)

        await self._app(scope, receive, send_while_open)

    def _opened(self) -> tuple[int, int] | None:
        """Return a stamp of the fence's state; cheaper than reading it, as this runs for each part
        of a stream.
        """
        try:
            found = os.stat(self._fence or os.devnull)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _open_to(self) -> bytes | None:
        try:
            with open(self._fence or os.devnull, "rb") as file:
                return file.read() or None
        except OSError:
            return None

    async def _set_fence(self, method: str, wanted: bytes | None, send: Send) -> None:
        if self._fence is None:
            return await answer(
                send,
                501,
                {"error": f"{FENCE_VARIABLE} is not set, so the weights cannot be identified"},
            )
        if method == "POST" and wanted:
            temporary = f"{self._fence}.{os.getpid()}"
            with open(temporary, "wb") as file:
                file.write(wanted)
            os.replace(temporary, self._fence)
        elif method == "DELETE":
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._fence)
        elif method != "GET":
            return await answer(send, 400, {"error": f"{method} without {FENCE_HEADER}"})
        has = self._open_to()
        weights = None if has is None else _text(has)
        template = os.environ.get(TEMPLATE_VARIABLE)
        if template is None:
            known = {}
        else:
            known = {"chat_template": template}
        await answer(send, 200, {"weights": weights, **known})

    def _has_key(self, scope: Scope) -> bool:
        for place, (name, value) in enumerate(scope["headers"]):
            if name.lower() == b"authorization":
                scheme, _, given = value.partition(b" ")
                # Digests have one length, so comparing them takes the same time for any input.
                found = hashlib.sha256(given).digest()
                if scheme.lower() != b"bearer" or not any(
                    [hmac.compare_digest(found, right) for right in self._digests]
                ):
                    return False
                rest = scope["headers"]  # vLLM compares with the key itself
                scope["headers"] = [
                    *rest[:place],
                    (name, b"Bearer " + self._key.encode()),
                    *rest[place + 1 :],
                ]
                return True
        return False


def _text(value: bytes | None) -> str:
    if value is None:
        return "no verified weights"
    return value.decode("latin-1")


def _error(message: str, code: int, kind: str = "invalid_request_error") -> JsonObject:
    """Write an error as OpenAI does."""
    return {"error": {"message": message, "type": kind, "code": code}}


async def answer(send: Send, status: int, body: JsonObject, *headers: tuple[bytes, bytes]) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", b"application/json"), *headers],
        }
    )
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
