"""The whole way of a rollout's request: the run's client, the scheduling of requests, the
middleware before the server.
"""

import asyncio
import json

from aiohttp import web

from ttrl import Task
from ttrl.records import Endpoint
from ttrl.rollouts.task_results import get_task_results
from ttrl.server.auth import FENCE_HEADER, RequireKey

KEY = "k" * 20


class Host:
    """A server behind the real middleware. After so many refusals its keeper syncs it, and opens it
    to the new weights.
    """

    def __init__(self, refusals):
        self.weights, self.refusals, self.answered_by = "old", refusals, []
        self.middleware = RequireKey(self.app)

    async def app(self, scope, receive, send):
        body = {"object": "list", "data": []}
        if scope["path"].endswith("/chat/completions"):
            self.answered_by.append(self.weights)
            message = {"role": "assistant", "content": self.weights}
            choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            body = {
                "id": "c",
                "object": "chat.completion",
                "created": 1,
                "model": "m",
                "choices": [choice],
                "usage": usage,
            }
        await send(
            {
                "type": "http.response.start",
                "status": 404 if scope["path"] == "/metrics" else 200,
                "headers": [],
            }
        )
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    async def handle(self, request):
        sent = []

        async def send(message):
            sent.append(message)

        headers = [(name.encode(), value.encode()) for name, value in request.headers.items()]
        scope = {"type": "http", "path": request.path, "method": request.method, "headers": headers}
        await self.middleware(scope, None, send)
        if sent[0]["status"] == 503:
            self.refusals -= 1
            if not self.refusals:
                self.weights = "new"
                await self.middleware(
                    {
                        "type": "http",
                        "path": "/ttrl/weights",
                        "method": "POST",
                        "headers": [
                            (b"authorization", f"Bearer {KEY}".encode()),
                            (FENCE_HEADER.encode(), b"new"),
                        ],
                    },
                    None,
                    send,
                )
        return web.Response(
            status=sent[0]["status"], body=sent[1]["body"], content_type="application/json"
        )


def test_no_request_is_answered_by_a_server_with_other_weights(monkeypatch, tmp_path):
    """One that was started anew looks healthy and knows the key; requests wait until it was synced,
    and none is lost.
    """
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    monkeypatch.setenv("TTRL_WEIGHTS_FILE", str(tmp_path / "weights"))
    host = Host(refusals=6)

    async def run():
        runner = web.AppRunner(application := web.Application())
        application.router.add_route("*", "/{path:.*}", host.handle)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        server = Endpoint(f"http://127.0.0.1:{port}/v1", KEY, {FENCE_HEADER: "new"})
        tasks = [
            Task([{"role": "user", "content": str(number)}], lambda choice: 1.0, id=str(number))
            for number in range(4)
        ]
        try:
            return await get_task_results(
                tasks,
                server,
                "m",
                params={"logprobs": False},
                token_ids=False,
                pbar=False,
                max_retries=1,
            )
        finally:
            await runner.cleanup()

    results = asyncio.run(run())
    assert [sample.text for sample in results.samples] == ["new"] * 4
    assert set(host.answered_by) == {"new"} and host.refusals <= 0
