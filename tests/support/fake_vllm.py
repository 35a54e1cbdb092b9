"""A stand-in for vLLM: the same paths and answers, a "model" of two numbers, and misbehaviour on
demand; starts in a moment.

The real one is tested in tests/e2e/test_server.py.
"""

import hashlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ttrl.server.connection import JoinedServer
from ttrl.server.vllm import VLLMServer


class KeepsItsCache(JoinedServer):
    """A client of a real server, whose prefix cache stays as it is whatever it answers."""

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        timeout: float = 300.0,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """Send all requests but that one."""
        if path == "/reset_prefix_cache":
            return {"success": True}
        return super().request(method, path, body, timeout, headers)


# logprob of a token = −(token mod 7) − weight − (cached weight of the prefix)/10; the weight stands
# in the model folder. So stale "keys and values" show in generations alone, as in vLLM.
FAKE = r"""
import hashlib, http.server, json, os, pathlib, sys, time
from ttrl.server.auth import derived
port, model, behaviour, names = int(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3], sys.argv[4:]
key = os.environ["VLLM_API_KEY"]
state = {"weight": float((model / "weight").read_text()), "cache": {}, "refusals": 2, "calls": []}
print("loading", model, flush=True)
if behaviour == "die":
    print("(EngineCore) ERROR ValueError: the root of it all", flush=True)
    for i in range(40):
        print("line", i, flush=True)
    sys.exit(3)
if behaviour == "hang":
    time.sleep(600)

def held(path):
    path = pathlib.Path(path)
    return (path / "weight" if path.is_dir() else path).read_text()

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def answer(self, status, body):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status); self.send_header("Content-Length", str(len(data))); self.end_headers(); self.wfile.write(data)
    def do_GET(self): self.do_POST()
    def do_DELETE(self): self.do_POST()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        path = self.path
        if path == "/health": return self.answer(503 if behaviour == "dead-engine" and state.get("models") else 200, b"")
        if path == "/version": state["models"] = True
        if path.startswith("/ttrl/proof?"):
            return self.answer(200, {"name": "it", "proof": derived(key, "proof", path[12:], "it")})
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if given not in (key, derived(key, "key", "it")) and behaviour != "open": return self.answer(401, {"error": "no"})
        if path == "/metrics":
            return self.answer(200, b'# HELP\nvllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n')
        if path == "/crash": os._exit(9)
        wanted = self.headers.get("X-TTRL-Weights")
        if path == "/ttrl/weights":
            if self.command != "GET": state["open"] = wanted
            return self.answer(200, {"weights": state.get("open")})
        if wanted and wanted != state.get("open"): return self.answer(503, {"error": "other weights"})
        if path == "/v1/models":
            served = names + ["policy-adapter"] * state.get("adapters", False)
            return self.answer(200, {"data": [{"id": name} for name in served]})
        if path == "/version":
            return self.answer(200, {})
        if path == "/collective_rpc":
            if behaviour == "refuse": return self.answer(500, {"error": "shape mismatch"})
            memory = body["kwargs"].get("memory")
            place = memory or body["kwargs"].get("folder") or body["kwargs"].get("weights_path")
            if body["method"] != "ttrl_compare_weights": state["calls"].append(body["method"] + " memory" * bool(memory))
            if not pathlib.Path(place).exists(): return self.answer(500, {"error": "no such memory"})
            weight = held(place)
            if body["method"] == "ttrl_compare_weights":
                equal = behaviour != "differs" and float(weight) == state["weight"]
                problems = [] if equal or behaviour == "blind" else ["w: 1 elements are not those of the files"]
                name = body["kwargs"]["parts"][0][0] + " 0" if body["kwargs"].get("parts") else "w"
                tensors = {name: hashlib.sha256(weight.encode()).hexdigest()}
                result = {"problems": problems, "tensors": tensors, "compared": 2}
                result |= {"unchecked": int("proven" not in behaviour), "exact": behaviour != "proven-roughly"}
                result["failed"] = "KeyError: 'w'" if behaviour == "cannot-compare" else None
                return self.answer(200, {"results": [result, result]})
            assert body["method"] in ("ttrl_load_weights", "reload_weights")
            if memory and behaviour == "refuse-memory": return self.answer(500, {"error": "shape mismatch"})
            ignores = behaviour in ("ignore-reload", "blind") or (memory and behaviour == "ignore-memory")
            if not ignores: state["weight"] = float(weight)
            return self.answer(200, {"results": [None]})
        if path == "/calls": return self.answer(200, state["calls"])
        if path.startswith(("/sleep", "/wake_up")):
            state["calls"].append(path)
            return self.answer(200, {})
        if path == "/v1/unload_lora_adapter":
            state["adapters"] = False
            return self.answer(200, b"Success")
        if path == "/v1/load_lora_adapter":
            if behaviour == "no-adapters": return self.answer(400, {"error": "vLLM does not yet support DoRA."})
            assert not body.get("load_inplace") and body["lora_name"] == "policy-adapter"
            if state.get("adapters"): return self.answer(400, {"error": "has already been loaded"})
            state["adapters"] = True
            state["weight"] = float((pathlib.Path(body["lora_path"]).parent / "weight").read_text())
            return self.answer(200, b"Success")
        if path == "/reset_prefix_cache":
            state["refusals"] -= 1
            success = state["refusals"] < 0
            if success and "keep-cache" not in behaviour: state["cache"].clear()
            return self.answer(200, {"success": success})
        assert path == "/v1/completions", path
        if body["model"] not in (["policy-adapter"] if state.get("adapters") else names):
            return self.answer(404, {"error": "no model"})
        prompt, weight = body["prompt"], state["weight"] + (float("nan") if "nan" in behaviour else 0)
        if "prompt_logprobs" in body:
            rows = [None] + [{str(t): {"logprob": -(t % 7) - weight - weight / 10}} for t in prompt[1:]]
            return self.answer(200, {"choices": [{"prompt_logprobs": rows}]})
        usage = {"prompt_tokens_details": {"cached_tokens": len(prompt) - 1} if str(prompt) in state["cache"] else None}
        old = state["cache"].setdefault(str(prompt), state["weight"])
        count = body["max_tokens"]
        tokens = [1000 + i for i in range(count)]
        if behaviour == "other-token": tokens[-1] = 5
        logprobs = [-1.0 - weight - old / 10] * count
        self.answer(200, {"choices": [{"token_ids": tokens, "logprobs": {"token_logprobs": logprobs}}], "usage": usage})

http.server.ThreadingHTTPServer.allow_reuse_port = True  # as ttrl.vllm_worker.api_server has it
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class FakeVLLM(VLLMServer):
    """Everything of VLLMServer but the command."""

    behaviour = "fine"

    def _command(self) -> list[str]:
        real = super()._command()
        names = itertools.takewhile(
            lambda word: not word.startswith("--"), real[real.index("--served-model-name") + 1 :]
        )
        return [
            sys.executable,
            "-c",
            FAKE,
            str(self.port),
            str(self.model_folder),
            self.behaviour,
            *names,
        ]


def canary_of(weight: float, margin: float = 1.0) -> dict[str, Any]:
    """What a trainer computes with a weight."""
    tokens = list(range(3, 40))
    return {
        "schema": 1,
        "dtype": "float32",
        "token_ids": tokens,
        "logprobs": [None] + [-(t % 7) - 1.1 * weight for t in tokens[1:]],
        "greedy_token_ids": [1000 + i for i in range(8)],
        "greedy_logprobs": [-1.0 - 1.1 * weight] * 8,
        "greedy_margins": [margin] * 8,
    }


def write_checkpoint(folder: Path, weight: float, margin: float = 1.0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_text("x")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "weight").write_text(str(weight))
    canary = canary_of(weight, margin)
    canary["weights"] = {"w": hashlib.sha256(str(weight).encode()).hexdigest()}
    (folder / "canary.json").write_text(json.dumps(canary))
    return folder


@pytest.fixture
def checkpoints(tmp_path):
    return write_checkpoint(tmp_path / "old", 0.5), write_checkpoint(tmp_path / "new", 0.75)


@pytest.fixture
def fake_server(tmp_path, checkpoints):
    """A function that makes a server (not started yet) with a behaviour; all are stopped at the
    end.
    """
    made: list[VLLMServer] = []

    def make(behaviour: str = "fine", **arguments) -> VLLMServer:
        arguments = {
            "served_model_name": "m",
            "log_path": tmp_path / "server.log",
            "dtype": "float32",
            **arguments,
        }
        server = FakeVLLM(checkpoints[0], **arguments)
        server.behaviour = behaviour
        made.append(server)
        return server

    yield make
    for server in made:
        server.stop()
