"""Step 3: tokens per second of a server, by the number of sequences and by what is asked for.

Prompts and groups are of gsm8k's size: about 150 tokens, eight samples of each. Every answer has
the same length. Next to the speed stand the CPU seconds of the API server: where these grow faster
than tokens, it is the API server that limits decoding.
"""

import asyncio
import random
import shutil
import time
from typing import Any

import aiohttp
from made_model import QWEN_1_5B, TINY, random_model
from serving import NAME, SEQUENCES, cpu_seconds, make_adapter, make_server
from steps import Place

from ttrl.records import ADAPTER_FOLDER
from ttrl.server.connection import ADAPTER_NAME
from ttrl.server.vllm import VLLMServer

GROUP = 8
PROMPT_TOKENS = 150
CHAT = "/v1/chat/completions"
TOKENS = "/inference/v1/generate"
WAYS = ["chat", "chat, log-probabilities", "tokens, log-probabilities"]


class Decoding:
    """Ask one server for many answers at the same time, and measure it."""

    def __init__(self, place: Place, server: VLLMServer, vocabulary: int, model: str) -> None:
        self.place = place
        self.server = server
        self.vocabulary = vocabulary
        self.model = model
        self.length = 16 if place.rehearse else 256
        self._draw = random.Random(0)

    def body(self, way: str, length: int) -> tuple[str, dict[str, Any]]:
        """Return path and body of a request for one group."""
        if way.startswith("tokens"):
            ids = [self._draw.randrange(self.vocabulary - 8) for _ in range(PROMPT_TOKENS)]
            sampling = {"n": GROUP, "max_tokens": length, "ignore_eos": True, "logprobs": 0}
            return TOKENS, {"model": self.model, "token_ids": ids, "sampling_params": sampling}
        words = " ".join(str(self._draw.randrange(10**6)) for _ in range(PROMPT_TOKENS // 4))
        body: dict[str, Any] = {"model": self.model, "n": GROUP, "max_tokens": length}
        body |= {"messages": [{"role": "user", "content": words}], "ignore_eos": True}
        if "log-probabilities" in way:
            body |= {"logprobs": True, "return_token_ids": True}
        return CHAT, body

    async def ask(self, way: str, sequences: int, length: int) -> None:
        """Ask for so many sequences at once; raise for any other answer than success."""
        requests = [self.body(way, length) for _ in range(max(1, sequences // GROUP))]
        headers = {"Authorization": f"Bearer {self.server.api_key}"}
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=600)
        options = {"headers": headers, "connector": connector, "timeout": timeout}
        async with aiohttp.ClientSession(**options) as session:

            async def one(path: str, body: dict[str, Any]) -> None:
                async with session.post(self.server.root_url + path, json=body) as answer:
                    text = await answer.read()
                    if answer.status != 200:
                        raise RuntimeError(f"{path} answered {answer.status}: {text[:300]!r}")

            await asyncio.gather(*(one(path, body) for path, body in requests))

    def measure(self, way: str, sequences: int) -> dict[str, float]:
        """Return tokens/s, and CPU seconds for each thousand tokens."""
        before = cpu_seconds(self.server)
        began = time.monotonic()
        asyncio.run(self.ask(way, sequences, self.length))
        seconds = time.monotonic() - began
        after = cpu_seconds(self.server)
        tokens = max(1, sequences // GROUP) * GROUP * self.length
        per_thousand = {who: 1e3 * (after[who] - before[who]) / tokens for who in after}
        return {"tokens/s": tokens / seconds} | per_thousand


def decoding(place: Place) -> None:
    """Report the speed of a plain server in three ways, then of an adapter."""
    shape = TINY if place.rehearse else QWEN_1_5B
    model = random_model(place.models / "1.5b", shape, place.device)
    counts = [8, 16, 32] if place.rehearse else [64, 256, SEQUENCES]
    if place.rehearse:
        place.report.stand_in("8, 16 and 32 sequences of 16 tokens")
    results = Results(place, counts)
    with make_server(place, model, "plain", enable_scale_out=True) as server:
        place.report.figure("start", server.start_seconds, "s")
        plain = Decoding(place, server, shape["vocab_size"], NAME)
        for way in WAYS:
            results.add(way, plain)
    folder = place.models / "step-3"
    shutil.rmtree(folder, ignore_errors=True)
    adapter = make_adapter(place, model, folder) / ADAPTER_FOLDER
    with make_server(place, model, "adapters", adapters=True) as server:
        place.report.figure("start with adapters", server.start_seconds, "s")
        body = {"lora_name": ADAPTER_NAME, "lora_path": str(adapter)}
        server.request("POST", "/v1/load_lora_adapter", body)
        results.add("chat", Decoding(place, server, shape["vocab_size"], ADAPTER_NAME), "LoRA, ")
    shutil.rmtree(folder)
    place.report.check("every way was measured", len(results.rows) == len(WAYS) + 1)


class Results:
    """Collect the measurements of all ways into two tables, reported as they grow."""

    def __init__(self, place: Place, counts: list[int]) -> None:
        self.place = place
        self.counts = counts
        self.rows: list[list[float | str]] = []
        self._cpu: list[list[float | str]] = []

    def add(self, way: str, decoding: Decoding, before: str = "") -> None:
        """Measure one way at every number of sequences."""
        asyncio.run(decoding.ask(way, self.counts[-1], 4))  # compiles and fills what is lazy
        found = [decoding.measure(way, count) for count in self.counts]
        name = before + way
        self.rows.append([name, *(one["tokens/s"] for one in found)])
        self._cpu.append([name, *(one["API server"] for one in found)])
        columns = ["asked for", *(f"{count} sequences" for count in self.counts)]
        self.place.report.table("decoding, tokens/s", columns, self.rows)
        name = "CPU seconds of the API server for 1,000 tokens"
        self.place.report.table(name, columns, self._cpu)
