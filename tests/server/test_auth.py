"""The middleware alone, called as an ASGI application."""

import asyncio

import pytest

from ttrl.server.auth import RequireKey


def ask(path="/collective_rpc", headers=(), kind="http", key="right", monkeypatch=None):
    """What reaches the application behind the middleware, and what is sent back."""
    monkeypatch.setenv("VLLM_API_KEY", key)
    reached, sent = [], []

    async def app(scope, receive, send):
        reached.append(scope["type"])

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request"}

    scope = {"type": kind, "path": path, "method": "POST", "headers": [(k.encode(), v.encode()) for k, v in headers]}
    asyncio.run(RequireKey(app)(scope, receive, send))
    return reached, sent


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "Bearer wrong")],
        [("authorization", "Bearer ")],
        [("authorization", "right")],
        [("authorization", "Basic right")],
        [("authorization", "Bearer right ")],
        [("x-authorization", "Bearer right")],
        [("authorization", "Bearer wrong"), ("authorization", "Bearer right")],
    ],
)
@pytest.mark.parametrize("path", ["/collective_rpc", "/health/", "/Health", "//health", "/v1/models", "/metrics", ""])
def test_without_the_key_nothing_is_reached(path, headers, monkeypatch):
    reached, sent = ask(path, headers, monkeypatch=monkeypatch)
    assert reached == [] and sent[0]["status"] == 401


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_with_the_key_everything_is_reached(scheme, monkeypatch):
    assert ask(headers=[("authorization", f"{scheme} right")], monkeypatch=monkeypatch) == (["http"], [])


def test_health_and_lifespan_are_open_and_websockets_closed(monkeypatch):
    assert ask("/health", monkeypatch=monkeypatch) == (["http"], [])
    assert ask(kind="lifespan", monkeypatch=monkeypatch) == (["lifespan"], [])
    reached, sent = ask(kind="websocket", monkeypatch=monkeypatch)
    assert reached == [] and sent[0]["type"] == "websocket.close"


def test_a_server_without_a_key_does_not_start(monkeypatch):
    with pytest.raises(RuntimeError, match="VLLM_API_KEY is not set"):
        ask(key="", monkeypatch=monkeypatch)
