"""The run that `tools/crash_test.py` kills: the real loop, run folder and trainer, and a stand-in
for the inference server.

    python tools/crash_test_run.py --run DIR --model DIR --recording FILE [--record]
        [--requests FILE] [--settings JSON]

Recorded rollouts take the server's place: a completion is identified by the digest of the weights
that sampled it, its prompt and its number. With --record, the completions are sampled with
transformers and recorded; without it, one that is not in the recording is refused, so a run whose
weights differ in a single bit ends at its next request. Each request that is answered is appended
to the requests file, with the time. Answers take a while, each its own, so that a run may also die
between two groups.
"""

import argparse
import asyncio
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import openai

try:
    import httpx2 as http
except ImportError:
    import httpx as http

from ttrl import Task, TrainConfig
from ttrl.errors import ServerError
from ttrl.facts import Sync
from ttrl.loop.train import Parts, train_checked

TASKS_PER_ITERATION = 3
SAMPLES = 4
MAX_TOKENS = 6
VALIDATION = 3
LONGEST_ANSWER = 0.6  # seconds
Choice = tuple[list[int], list[float]]
"""Token ids and their log-probabilities."""


def weights_of(files: list[Path]) -> dict[str, tuple[str, list[int], bytes]]:
    """Dtype, shape and bytes by name, of files or of a trainer's memory, which is laid out as
    one.
    """
    found = {}
    for path in files:
        content = path.read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:begin]).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                found[name] = entry["dtype"], entry["shape"], content[begin + first : begin + last]
    return found


def digest_of(weights: dict[str, tuple[str, list[int], bytes]]) -> str:
    hashed = hashlib.sha256()
    for name in sorted(weights):
        dtype, shape, content = weights[name]
        hashed.update(f"{name} {dtype} {shape} ".encode() + content)
    return hashed.hexdigest()


class Recording:
    """Completions by weights, prompt and number, in a file of JSON lines."""

    def __init__(self, path: Path, *, writable: bool) -> None:
        self._file = open(path, "a", encoding="utf-8") if writable else None  # noqa: SIM115 - open as long as the process
        self._known: dict[str, list[Choice]] = {}
        if not writable:
            for line in path.read_text(encoding="utf-8").splitlines():
                key, choices = json.loads(line)
                self._known[key] = [tuple(choice) for choice in choices]

    def get(self, key: str) -> list[Choice] | None:
        return self._known.get(key)

    @property
    def writable(self) -> bool:
        return self._file is not None

    def add(self, key: str, choices: list[Choice]) -> None:
        assert self._file is not None
        self._known[key] = choices
        self._file.write(json.dumps([key, choices]) + "\n")
        self._file.flush()


class RecordedServer:
    """Takes PolicyServer's place in the loop."""

    recording: Recording
    model: Path
    """The starting model: config and tokenizer of all policies."""
    requests: Path | None = None
    model_name = "policy"

    def __init__(self, *_: Any, **__: Any) -> None:
        self._checkpoint: Path | None = None
        self._digest, self._weights = "", dict[str, tuple[str, list[int], bytes]]()
        self._models: dict[str, Any] = {}
        self._tokenizer: Any = None

    def start(self, model_folder: Path, *_: Any, **__: Any) -> None:
        pass

    def serve(
        self, checkpoint: Path, handover: Any = None, start_from: Path | None = None
    ) -> Sync | None:
        if self._checkpoint == checkpoint:
            return None
        files = (
            sorted(checkpoint.glob("*.safetensors"))
            if handover is None
            else [Path(handover.memory)]
        )
        self._weights = weights_of(files)
        self._checkpoint, self._digest, self._models = checkpoint, digest_of(self._weights), {}
        mode = "reload" if handover is None else "memory"
        return Sync(mode=mode, seconds=0.0, canary_max_difference=0.0, fell_back=None)

    def stop(self) -> None:
        self._checkpoint = None

    rest = stop
    model_name = "policy"

    def check(self) -> None:
        if self._checkpoint is None:
            raise ServerError("serve() comes first")

    def weights_digest(self) -> str:
        return self._digest

    def endpoints(self) -> list[openai.AsyncOpenAI]:
        """A client stands in for an address, as its transport can be one within this process."""
        transport = http.MockTransport(self._answer)
        return [
            openai.AsyncOpenAI(
                base_url="http://recorded/v1",
                api_key="k",
                http_client=http.AsyncClient(transport=transport),
            )
        ]

    async def _answer(self, request: Any) -> Any:
        if request.method == "GET":  # /metrics
            return http.Response(404)
        body = json.loads(request.content)
        messages = body["messages"]
        count = body["n"]
        key = json.dumps([self._digest, messages, count, body["max_tokens"], body["temperature"]])
        key = hashlib.sha256(key.encode()).hexdigest()
        prompt = self._prompt(messages)
        choices = self.recording.get(key)
        if choices is None:
            if not self.recording.writable:
                error = (
                    "these weights never answered this prompt when the rollouts were recorded: "
                    "they are other weights"
                )
                return http.Response(400, json={"error": {"message": error}})
            choices = self._sample(
                prompt, count, body["max_tokens"], body["temperature"], int(key[:15], 16)
            )
            self.recording.add(key, choices)
        await asyncio.sleep(LONGEST_ANSWER * int(key[-4:], 16) / 0xFFFF)
        self._note(messages[-1]["content"])
        answers = [self._choice(index, *choice) for index, choice in enumerate(choices)]
        tokens = sum(len(ids) for ids, _ in choices)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": tokens,
            "total_tokens": len(prompt) + tokens,
        }
        content = {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": answers,
        }
        return http.Response(200, json=content | {"usage": usage, "prompt_token_ids": prompt})

    def _note(self, prompt: str) -> None:
        if self.requests is not None:
            assert self._checkpoint is not None
            line = {
                "time": time.time(),
                "pid": os.getpid(),
                "policy": int(self._checkpoint.parent.name),
                "prompt": prompt,
            }
            with open(self.requests, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _choice(self, index: int, ids: list[int], logprobs: list[float]) -> dict[str, Any]:
        ended = ids[-1] == self._tokenizer.eos_token_id
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        content = [
            {"token": "", "logprob": value, "bytes": None, "top_logprobs": []} for value in logprobs
        ]
        return {
            "index": index,
            "message": {"role": "assistant", "content": text},
            "logprobs": {"content": content},
            "finish_reason": "stop" if ended else "length",
            "token_ids": ids,
        }

    def _prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self.model)
        text = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _sample(
        self, prompt: list[int], count: int, length: int, temperature: float, seed: int
    ) -> list[Choice]:
        """Completions with log-probabilities under softmax(logits / temperature); greedy ones,
        under softmax(logits), at 0.
        """
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        if self._digest not in self._models:
            made = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(self.model), dtype=torch.float32
            ).eval()
            tensors = {
                name: torch.frombuffer(
                    bytearray(content), dtype={"F32": torch.float32}[dtype]
                ).view(shape)
                for name, (dtype, shape, content) in self._weights.items()
            }
            wrong = made.load_state_dict(tensors, strict=False)
            assert not wrong.unexpected_keys and set(wrong.missing_keys) <= {"lm_head.weight"}, (
                wrong
            )
            self._models = {self._digest: made}
        model = self._models[self._digest]
        generator = torch.Generator().manual_seed(seed)
        choices: list[Choice] = []
        for _ in range(count):
            ids: list[int] = []
            logprobs: list[float] = []
            while len(ids) < length and self._tokenizer.eos_token_id not in ids:
                with torch.no_grad():
                    logits = model(torch.tensor([prompt + ids])).logits[0, -1]
                values = torch.log_softmax(logits / (temperature or 1.0), -1)
                drawn = (
                    torch.multinomial(values.exp(), 1, generator=generator)
                    if temperature
                    else values.argmax()
                )
                ids.append(int(drawn))
                logprobs.append(float(values[ids[-1]]))
            choices.append((ids, logprobs))
        return choices


def grader(choice: Any) -> tuple[float, dict[str, float]]:
    """Something that differs from answer to answer, so that every iteration has something to
    learn.
    """
    number = int(hashlib.sha256(choice.message.content.encode()).hexdigest()[:8], 16) % 11
    return number / 10, {"even": float(number % 2 == 0)}


def tasks(name: str, count: int) -> list[Task]:
    return [
        Task([{"role": "user", "content": f"{name} {n}"}], grader, id=f"{name}/{n}")
        for n in range(count)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--recording", type=Path, required=True)
    parser.add_argument(
        "--record", action="store_true", help="sample what is not in the recording, and record it"
    )
    parser.add_argument("--requests", type=Path, help="a line for each request that was answered")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument(
        "--settings", type=json.loads, default={}, help="further settings of TrainConfig, as JSON"
    )
    arguments = parser.parse_args()
    RecordedServer.recording = Recording(arguments.recording, writable=arguments.record)
    RecordedServer.requests, RecordedServer.model = arguments.requests, Path(arguments.model)
    settings = {
        "run": arguments.run,
        "model": arguments.model,
        "iterations": arguments.iterations,
        "tasks_per_iteration": TASKS_PER_ITERATION,
        "samples_per_task": SAMPLES,
        "max_tokens": MAX_TOKENS,
        "seq_len": 128,
        "num_threads": 1,
        "device": "cpu",
        "training": {"lr": 1e-3, "updates_per_iteration": 2, "num_output_chunks": 1},
    }
    # One epoch: each task belongs to one iteration, so that a request tells which one it was made
    # for.
    training = tasks("task", arguments.iterations * TASKS_PER_ITERATION)
    train_checked(
        TrainConfig(**(settings | arguments.settings)),
        training,
        tasks("held-out", VALIDATION),
        quiet=True,
        parts=Parts(server=RecordedServer),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
