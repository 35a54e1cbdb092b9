"""A whole run on fake parts: the real loop, run folder, sampling, grading and packing; a server and
a trainer that only pretend.

The server answers through the OpenAI client's own transport, in this process. A checkpoint is a
folder with a number in it: the iteration that "trained" it, which the server's answers and every
check depend on.
"""

import asyncio
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from ttrl import Task, TrainConfig
from ttrl.errors import ServerDiedError, ServerError
from ttrl.facts import Sync
from ttrl.loop.phases import Phases
from ttrl.loop.train import Parts, train_checked
from ttrl.plans.plan_machine import gpus_here
from ttrl.report.page import FILE_NAME, leave_report
from ttrl.system.files import append_jsonl, atomic_folder, read_jsonl, write_json

try:
    import httpx2 as http
except ImportError:
    import httpx as http

WARM = "version.txt"


def version_of(checkpoint: Path) -> int:
    path = checkpoint / WARM
    return int(path.read_text()) if path.exists() else 0


class FakeServer:
    """Stands in for PolicyServer; its world keeps the record."""

    world: "World"

    def __init__(self, config: TrainConfig, logs: Path, console: Any, **_: Any) -> None:
        self.checkpoint: Path | None = None
        self.version = 0

    def start(self, model_folder: Path) -> None:
        self.world.note("start")

    def serve(
        self, checkpoint: Path, handover: Any = None, start_from: Path | None = None
    ) -> Sync | None:
        """In the place of weights in memory, this world hands over the version."""
        assert handover is not None or (checkpoint / "config.json").is_file(), checkpoint
        assert start_from is None or (start_from / "config.json").is_file(), start_from
        if handover is not None and self.world.server_reads_files_only:
            if start_from is not None:
                raise ServerError("it cannot map the memory, and nobody writes files")
            handover = None
        if self.checkpoint == checkpoint:
            return None
        self.version = version_of(checkpoint) if handover is None else handover
        self.world.note(f"serve {self.version}")
        self.checkpoint = checkpoint
        return Sync(mode="reload", seconds=0.0, canary_max_difference=0.0)

    def check(self) -> None:
        if self.checkpoint is None:
            raise ServerError("no server is running; serve() starts one")
        if self.world.server_is_dead:
            raise ServerDiedError(
                "the vLLM server was killed by signal 9; its last log lines: boom"
            )

    def endpoints(self) -> list[openai.AsyncOpenAI]:
        """A client stands in for an address, as its transport can be one within this process."""
        transport = http.MockTransport(self.answer)
        return [
            openai.AsyncOpenAI(
                base_url="http://fake/v1",
                api_key="k",
                http_client=http.AsyncClient(transport=transport),
            )
        ]

    async def answer(self, request: Any) -> Any:
        while request.method == "POST" and self.world.hold(
            json.loads(request.content)["messages"][-1]["content"]
        ):
            await asyncio.sleep(0.001)
        return self.handle(request)

    def handle(self, request: Any) -> Any:
        if request.method == "GET":  # /metrics
            return http.Response(404)
        body = json.loads(request.content)
        prompt = body["messages"][-1]["content"]
        version = self.version
        if self.world.server_is_dead or prompt in self.world.refused:
            return http.Response(400, json={"error": {"message": "as told"}})
        # Of samples that are asked for one by one, the second is number 1. Counted before the
        # request is noted: training's and validation's threads note theirs in one list, and what
        # stands last in it may be the other's.
        before = self.world.requests.count((version, prompt)) if body.get("stream") else 0
        self.world.requests.append((version, prompt))
        self.world.samples[prompt] += body["n"]
        self.world.temperatures.setdefault(prompt.split()[0], set()).add(body["temperature"])
        prompt_ids = self.world.tokenizer.encode(f"<|user|>{prompt}<|end|><|assistant|>")
        choices = []
        for k in range(before, before + body["n"]):
            text = self.world.answer(prompt, k, version)
            ids = [*self.world.tokenizer.encode(text), self.world.tokenizer.eos_token_id]
            logprobs = [self.world.logprob(k, place) for place in range(len(ids))]
            choices.append(
                {
                    "index": k - before,
                    "message": {"role": "assistant", "content": text},
                    "logprobs": {
                        "content": [
                            {"token": "", "logprob": p, "bytes": None, "top_logprobs": []}
                            for p in logprobs
                        ]
                    },
                    "finish_reason": "stop",
                    "token_ids": ids,
                }
            )
        usage = {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": 1,
            "total_tokens": len(prompt_ids) + 1,
        }
        content = {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": choices,
            "usage": usage,
        }
        self.world.sampled(prompt)
        if body.get("stream"):
            return self._stream(content | {"prompt_token_ids": prompt_ids})
        return http.Response(200, json=content | {"prompt_token_ids": prompt_ids})

    def _stream(self, content: dict[str, Any]) -> Any:
        """The same answer, of one choice, token by token."""
        (choice,), usage, prompt_ids = (
            content["choices"],
            content.pop("usage"),
            content.pop("prompt_token_ids"),
        )
        content |= {"object": "chat.completion.chunk"}
        tokens = list(zip(choice["token_ids"], choice["logprobs"]["content"], strict=True))
        chunks = [
            content
            | {
                "choices": [{"index": 0, "delta": {"role": "assistant"}}],
                "prompt_token_ids": prompt_ids,
            }
        ]
        for token, logprob in tokens:
            end = choice["finish_reason"] if token == tokens[-1][0] else None
            part = {
                "delta": {
                    "content": self.world.tokenizer.decode([token], skip_special_tokens=True)
                },
                "token_ids": [token],
            }
            chunks.append(
                content
                | {
                    "choices": [
                        part
                        | {"index": 0, "logprobs": {"content": [logprob]}, "finish_reason": end}
                    ]
                }
            )
        chunks.append(content | {"choices": [], "usage": usage})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        return http.Response(
            200,
            headers={"Content-Type": "text/event-stream"},
            content="".join([*lines, "data: [DONE]\n\n"]),
        )

    def weights_digest(self) -> str:
        return f"weights {self.version}"

    def request(self, method: str, path: str) -> Any:
        raise ServerError(f"{method} {path}: 404")

    def stop(self) -> None:
        self.world.note("stop")
        self.checkpoint = None

    rest = stop
    model_name = "policy"


class PowerCut(BaseException):
    """Nothing reaches the disk any more."""


class Disk:
    """Counts what changes names on the disk; from the n-th time on, nothing changes any more, not
    in anybody's clean-up.
    """

    NAMES = ("replace", "mkdir", "unlink", "rmdir", "fsync", "ftruncate")

    def __init__(
        self, patch: pytest.MonkeyPatch, last: int | None, names: Sequence[str] = NAMES
    ) -> None:
        self.count, self._last = 0, last
        self._lock = threading.Lock()
        for name in names:
            patch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def change(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self.count += 1
                if self._last is not None and self.count > self._last:
                    raise PowerCut
            return original(*arguments, **options)

        return change


class World:
    """What a test sees of a run, and what it may change."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.run = folder / "run"
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.events: list[str] = []
        self.requests: list[tuple[int, str]] = []
        """(version of the weights that answered, prompt)."""
        self.samples: Counter[str] = Counter()
        """Number asked for, by prompt."""
        self.temperatures: dict[str, set[float]] = {}
        """By the first word of the prompts."""
        self.recipes: list[dict[str, Any]] = []
        """The recipe's config at each training."""
        self.step_facts: dict[int, dict[str, Any]] = {}
        """More of what the trainer says of its step, by iteration."""
        self.refused: set[str] = set()
        """Prompts that the server answers with 400."""
        self.server_is_dead = False
        self.server_reads_files_only = False
        self.writes_reports = False
        """Whether report.html is written, which takes a third of the time of such a run, after each
        iteration.
        """
        self.server_class: Callable[..., Any] = type("Server", (FakeServer,), {"world": self})
        """What takes the place of the run's server; for tests to replace."""
        self.trainer_class: Callable[..., Any] = self.trainer()
        """What takes the place of the run's trainer; for tests to replace."""
        self.phases_class: Callable[..., Phases] = Phases
        """The run's phases; for tests to replace."""
        self.gpus = gpus_here()
        """Bytes of each; for tests to replace."""

    @property
    def parts(self) -> Parts:
        """A run's parts, as this world has them now."""
        return Parts(
            server=self.server_class,
            trainer=self.trainer_class,
            phases=self.phases_class,
            report=self.leave_report,
            gpus=lambda: self.gpus,
        )

    def leave_report(self, run_folder: Path, rows: Any = None) -> Path:
        return leave_report(run_folder, rows) if self.writes_reports else run_folder / FILE_NAME

    def note(self, event: str) -> None:
        self.events.append(event)

    def count(self) -> Counter[str]:
        return Counter(self.events)

    def sampled(self, prompt: str) -> None:
        """Called after each request; for tests to replace."""

    def server_version(self) -> int:
        """Of the weights that the server has."""
        return int(
            next(event for event in reversed(self.events) if event.startswith("serve")).split()[1]
        )

    def hold(self, prompt: str) -> bool:
        """While it is true, the request waits; for tests to replace."""
        return False

    def answer(self, prompt: str, k: int, version: int) -> str:
        """1, 2 or 3 of the samples of a group are right, by the version; number 0 always is."""
        return "yes" if k < 1 + version % 3 else "no"

    def logprob(self, k: int, place: int) -> float:
        """Of a token of the k-th sample of a request."""
        return -1.0

    def grade(self, choice: Any) -> tuple[float, dict[str, float]]:
        right = float(choice.message.content == "yes")
        return right, {"right": right}

    def tasks(self, count: int, name: str = "task") -> list[Task]:
        def grader(choice: Any) -> Any:
            return self.grade(choice)

        return [
            Task([{"role": "user", "content": f"{name} {n}"}], grader, id=f"{name}/{n}")
            for n in range(count)
        ]

    def config(self, **changes: Any) -> TrainConfig:
        values: dict[str, Any] = {
            "run": str(self.run),
            "model": str(self.model),
            "iterations": 3,
            "num_threads": 1,
            "seq_len": 128,
        }
        values |= {
            "tasks_per_iteration": 2,
            "samples_per_task": 4,
            "max_tokens": 8,
            "device": "cpu",
        }
        return TrainConfig(**(values | changes))

    def train(
        self,
        tasks: list[Task] | None = None,
        validation: list[Task] | None = None,
        *,
        allow_changes: Sequence[str] = (),
        redo: int | None = None,
        quiet: bool = False,
        **changes: Any,
    ) -> Any:
        tasks = self.tasks(6) if tasks is None else tasks
        validation = self.tasks(2, "held-out") if validation is None else validation
        return train_checked(
            self.config(**changes),
            tasks,
            validation,
            allow_changes=allow_changes,
            redo=redo,
            quiet=quiet,
            parts=self.parts,
        )

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]

    @contextmanager
    def interrupted_after(self, kept: int, number: int = signal.SIGINT) -> Iterator[None]:
        """That signal when this many further groups of rollouts have been kept; the server answers
        for no others.
        """
        before, samples = len(self.requests), self.samples.copy()
        is_told = False

        def hold(prompt: str) -> bool:
            nonlocal is_told
            answered = [one for _, one in self.requests[before:] if not one.startswith("held-out")]
            if prompt.startswith("held-out") or len(answered) < kept:
                return False
            expected = {one: self.samples[one] - samples[one] for one in answered}
            if not is_told and self.has_kept(expected):
                is_told = True
                os.kill(os.getpid(), number)
            return True

        self.hold = hold  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.hold

    def has_kept(self, samples: Mapping[str, int]) -> bool:
        """Whether so many samples of these prompts are in the run's files."""
        kept = Counter[str]()
        for path in self.run.glob("iterations/*/rollouts*.jsonl"):
            for row in read_jsonl(path):
                group = row.get("samples", [row])
                kept[group[0]["messages"][-1]["content"]] += len(group)
        return all(kept[prompt] >= count for prompt, count in samples.items())

    def fake_tune(self, config: dict[str, Any], config_path: Path, **_: Any) -> Path:
        number = config["iteration"]
        self.note(f"train {number}")
        self.recipes.append(config)
        assert Path(config["packed"]).is_file()
        assert (Path(config["model"]) / "config.json").is_file()
        assert config["state"] is None or any(Path(config["state"]).iterdir())
        output = Path(config["output_dir"])
        if config["save"] or not config["hand_over"]:  # as the recipe
            self.fake_files(output, number)
        output.mkdir(parents=True, exist_ok=True)
        row = {
            "global_step": number,
            "iteration": number,
            "lr": 1e-4,
            "loss": 0.5,
            "policy_loss": 0.5,
            "entropy": 1.0,
        }
        row |= {
            "grad_norm": 1.0,
            "clip_fraction_low": 0.0,
            "clip_fraction_high": 0.0,
        } | self.step_facts.get(number, {})
        append_jsonl(output / "train.jsonl", row)
        write_json(output / "trainer_logprobs.safetensors", {})
        return output / "checkpoint"

    def fake_files(self, output: Path, number: int) -> None:
        with atomic_folder(output / "checkpoint") as temporary:
            (temporary / "config.json").write_text("{}")
            (temporary / WARM).write_text(str(number))
        with atomic_folder(output / "state") as temporary:
            (temporary / "state.txt").write_text(str(number))

    def trainer(self) -> type:
        """Stands in for ttrl's own class; every training is done as soon as it has begun."""
        world = self

        class FakeTrainer:
            holding = compared = None

            def __init__(self, *_: Any) -> None:
                pass

            def start(self, recipe_config: dict[str, Any]) -> None:
                assert (Path(recipe_config["model"]) / "config.json").is_file()

            def make_checkpoint(self, number: int, recipe_config: dict[str, Any]) -> Path:
                assert recipe_config["kept"] is None, "this one holds nothing"
                output = Path(recipe_config["output_dir"])
                if recipe_config["packed"]:
                    assert number == recipe_config["iteration"]
                    world.fake_tune(recipe_config, output / "grpo.yaml")
                else:
                    world.fake_canary(output / "checkpoint")
                return output / "checkpoint"

            def handover(self, number: int) -> None:
                return None

            def wait_until_saved(self) -> bool:
                return True

            def check(self) -> None:
                pass

            def stop(self) -> None:
                pass

        return FakeTrainer

    def fake_canary(self, checkpoint: Path) -> None:
        self.note("canary")
        assert (checkpoint / "config.json").is_file()
        write_json(checkpoint / "canary.json", {"schema": 1, "dtype": "float32"})
