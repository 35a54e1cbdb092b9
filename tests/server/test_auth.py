"""The middleware alone, called as an ASGI application."""

import asyncio
import hmac
import json
import os

import pytest

from ttrl.server.auth import RequireKey

PROOFS = [("key", "one"), ("key", "another"), ("proof", "17", "one")]


def ask(path="/collective_rpc", headers=(), kind="http", key="right", monkeypatch=None, **more):
    """What reaches the application behind the middleware, and what is sent back."""
    monkeypatch.setenv("VLLM_API_KEY", key)
    reached, sent = [], []

    async def app(scope, receive, send):
        reached.append(scope["type"])

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request"}

    scope = {
        "type": kind,
        "path": path,
        "method": "POST",
        "headers": [(k.encode(), v.encode()) for k, v in headers],
        **more,
    }
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
@pytest.mark.parametrize(
    "path", ["/collective_rpc", "/health/", "/Health", "//health", "/v1/models", "/metrics", ""]
)
def test_without_the_key_nothing_is_reached(path, headers, monkeypatch):
    reached, sent = ask(path, headers, monkeypatch=monkeypatch)
    assert reached == [] and sent[0]["status"] == 401 and b"OPENAI_API_KEY" in sent[1]["body"]


def test_an_address_without_v1_is_told_so(monkeypatch):
    reached, sent = ask(
        "/chat/completions", headers=[("authorization", "Bearer right")], monkeypatch=monkeypatch
    )
    assert (
        reached == []
        and sent[0]["status"] == 404
        and b"the server's address ends in /v1" in sent[1]["body"]
    )


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_with_the_key_everything_is_reached(scheme, monkeypatch):
    assert ask(headers=[("authorization", f"{scheme} right")], monkeypatch=monkeypatch) == (
        ["http"],
        [],
    )


def test_its_proof_and_the_key_derived_for_it(monkeypatch):
    monkeypatch.setenv("TTRL_SERVER_NAME", "one")
    reached, sent = ask("/ttrl/proof", monkeypatch=monkeypatch, query_string=b"17")
    right = {
        words: hmac.new(b"right", "\n".join(words).encode(), "sha256").hexdigest()
        for words in PROOFS
    }
    assert reached == [] and json.loads(sent[1]["body"]) == {
        "name": "one",
        "proof": right["proof", "17", "one"],
    }
    for words, given in right.items():
        reached, sent = ask(
            headers=[("x", "y"), ("authorization", f"Bearer {given}")], monkeypatch=monkeypatch
        )
        assert (reached == ["http"]) == (words == ("key", "one")) == (sent == [])
    scope = {
        "type": "http",
        "headers": [(b"authorization", b"Bearer " + right["key", "one"].encode())],
    }
    # For vLLM's own check.
    assert RequireKey(None)._has_key(scope) and scope["headers"] == [
        (b"authorization", b"Bearer right")
    ]


def test_health_and_lifespan_are_open_and_websockets_closed(monkeypatch):
    assert ask("/health", monkeypatch=monkeypatch) == (["http"], [])
    assert ask(kind="lifespan", monkeypatch=monkeypatch) == (["lifespan"], [])
    reached, sent = ask(kind="websocket", monkeypatch=monkeypatch)
    assert reached == [] and sent[0]["type"] == "websocket.close"


def test_a_server_without_a_key_does_not_start(monkeypatch):
    with pytest.raises(RuntimeError, match="VLLM_API_KEY is not set"):
        ask(key="", monkeypatch=monkeypatch)


# The fence


@pytest.fixture
def fence(monkeypatch, tmp_path):
    """A function that sends a request with the key to a server that can tell weights, and returns
    whether it got through, the status and the answer."""
    monkeypatch.setenv("TTRL_WEIGHTS_FILE", str(tmp_path / "weights"))

    def send(method, path, version=None, key="right"):
        headers = [("authorization", f"Bearer {key}")] + (
            [("x-ttrl-weights", version)] if version else []
        )
        monkeypatch.setenv("VLLM_API_KEY", "right")
        reached, sent = [], []

        async def app(scope, receive, send):
            reached.append(scope["path"])

        async def send_back(message):
            sent.append(message)

        scope = {
            "type": "http",
            "path": path,
            "method": method,
            "headers": [(k.encode(), v.encode()) for k, v in headers],
        }
        # Made anew each time, as if each went to another API server.
        asyncio.run(RequireKey(app)(scope, None, send_back))
        return (
            bool(reached),
            sent[0]["status"] if sent else None,
            json.loads(sent[1]["body"]) if sent else None,
        )

    return send


def test_requests_for_weights_pass_from_when_it_is_opened_to_them_until_it_is_closed(fence):
    ask = lambda version: fence("POST", "/v1/chat/completions", version)[:2]  # noqa: E731
    assert fence("GET", "/ttrl/weights") == (False, 200, {"weights": None})
    assert ask(None) == (True, None) and ask("v1") == (False, 503)
    assert fence("POST", "/ttrl/weights", "v1") == (False, 200, {"weights": "v1"})
    assert ask("v1") == (True, None) and ask("v2") == (False, 503)
    assert fence("GET", "/v1/models", "v2")[1] == 503  # what watchers ask to see whether it is back
    assert fence("POST", "/ttrl/weights", "v2")[1] == 200
    assert ask("v1") == (False, 503) and ask("v2") == (True, None)
    message = fence("POST", "/v1/completions", "v1")[2]["error"]["message"]
    assert (
        message == "this server has other weights (v2) than the request needs (v1); sync it first"
    )
    for _ in range(2):
        assert fence("DELETE", "/ttrl/weights") == (False, 200, {"weights": None})
    assert ask("v2") == (False, 503)


@pytest.mark.parametrize("reopened", [False, True])
def test_an_answer_during_which_it_was_closed_is_broken_off(reopened, monkeypatch, tmp_path):
    (file := tmp_path / "weights").write_bytes(b"v1")
    monkeypatch.setenv("TTRL_WEIGHTS_FILE", str(file))
    monkeypatch.setenv("VLLM_API_KEY", "right")
    sent = []

    async def app(scope, receive, send):
        await send("computed with v1")
        file.unlink()
        if reopened:
            (tmp_path / "another").write_bytes(b"another inode")
            file.write_bytes(b"v1")
            os.utime(file, ns=(1, 1))
        await send("perhaps not")

    async def send(message):
        sent.append(message)

    headers = [(b"authorization", b"Bearer right"), (b"x-ttrl-weights", b"v1")]
    scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": headers}
    with pytest.raises(RuntimeError, match="the weights changed during"):
        asyncio.run(RequireKey(app)(scope, None, send))
    assert sent == ["computed with v1"]


def test_nobody_opens_it_without_the_key_or_without_a_name(fence):
    assert fence("POST", "/ttrl/weights", "v1", key="wrong")[1] == 401
    assert fence("POST", "/ttrl/weights")[1] == 400
    assert fence("GET", "/ttrl/weights")[2] == {"weights": None}


def test_a_server_that_cannot_tell_weights_refuses_whoever_asks_for_some(fence, monkeypatch):
    monkeypatch.delenv("TTRL_WEIGHTS_FILE")
    assert fence("POST", "/ttrl/weights", "v1")[1] == 501
    assert fence("POST", "/v1/completions", "v1")[1] == 503
