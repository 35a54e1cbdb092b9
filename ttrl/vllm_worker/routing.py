"""Return vLLM's chosen experts for each token (`--enable-return-routed-experts`).

vLLM 0.32 returns them in whole answers of servers on GPUs. Here it also returns them in the last
chunk of a stream (`stream_experts`), and on CPUs (`capture_on_cpus`), since the CPU model runner
records no choices.

The stream has run on CPUs only. Servers on GPUs record the choices with vLLM's own code.
"""

import importlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

OPTION = "--enable-return-routed-experts"
ASKED = "routed_experts_prompt_start"
"""A field of requests. Streams bring experts only for requests with this field."""


def stream_experts() -> None:
    """Add `routed_experts` to the last chunk of each choice of a streamed chat completion, encoded
    as in whole answers: `.npy` in base64, [tokens - 1, layers, experts per token]."""
    serving: Any = importlib.import_module("vllm.entrypoints.openai.chat_completion.serving")
    encode: Any = importlib.import_module("vllm.utils.serial_utils").numpy2base64
    theirs = serving.OpenAIServingChat.chat_completion_stream_generator

    async def generate(
        self: Any, request: Any, results: Any, *given: Any, **named: Any
    ) -> AsyncIterator[str]:
        experts: dict[int, str] = {}

        async def watched() -> AsyncIterator[Any]:
            async for result in results:
                for output in result.outputs:
                    if output.routed_experts is not None:
                        experts[output.index] = encode(output.routed_experts)
                yield result

        asked = ASKED in request.model_fields_set
        async for event in theirs(self, request, watched() if asked else results, *given, **named):
            yield _with_experts(event, experts) if experts else event

    serving.OpenAIServingChat.chat_completion_stream_generator = generate


def _with_experts(event: str, experts: dict[int, str]) -> str:
    """Add the experts of the choices ending in this event of a stream, and forget them."""
    prefix = "data: "
    if not event.startswith(prefix + "{"):
        return event
    chunk = json.loads(event[len(prefix) :])
    ended = [
        choice for choice in chunk.get("choices", ()) if choice.get("finish_reason") is not None
    ]
    for choice in ended:
        choice["routed_experts"] = experts.pop(choice["index"], None)
    if ended:
        return f"{prefix}{json.dumps(chunk, ensure_ascii=False)}\n\n"
    return event


@dataclass
class _Recorder:
    """Record the experts of running requests, by request id."""

    capturer: Any
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    """[positions, layers, experts per token], with room for later tokens."""
    step: list[tuple[str, int, int]] = field(default_factory=list)
    """The request, first position and number of tokens of each part of the current step."""

    def begin(self, runner: Any, counts: np.ndarray) -> None:
        """Note the tokens of the step, in the order of its rows."""
        batch = runner.input_batch
        starts = batch.num_computed_tokens_cpu[: len(counts)].tolist()
        self.step = list(zip(batch.req_ids, starts, counts.tolist(), strict=True))

    def end(self, scheduled: Any) -> dict[str, object]:
        """Keep the choices of the step, and return each request's choices not yet returned."""
        connector: Any = importlib.import_module("vllm.distributed.aux_output_connector.connector")
        for request in scheduled.finished_req_ids:
            self.rows.pop(request, None)
        chosen = self.capturer.device_buffer[: sum(count for _, _, count in self.step)]
        chosen = chosen.to(self.capturer.output_dtype).numpy()
        found: dict[str, object] = {}
        offset = 0
        for request, start, count in self.step:
            rows = self._room(request, start + count)
            rows[start : start + count] = chosen[offset : offset + count]
            offset += count
            first = scheduled.aux_output_connector_metadata.requests[request]
            found[request] = connector.AuxRequestOutput(first, rows[first : start + count].copy())
        return found

    def _room(self, request: str, length: int) -> np.ndarray:
        rows = self.rows.get(request)
        if rows is None or len(rows) < length:
            larger = np.zeros(
                (2 * length, *self.capturer.shape_per_token), self.capturer.output_dtype_name
            )
            if rows is not None:
                larger[: len(rows)] = rows
            self.rows[request] = rows = larger
        return rows


def capture_on_cpus() -> None:
    """Record the choices in vLLM's model runner for CPUs, as its runner for GPUs does. Without a
    prefix cache: the experts of a cached prompt would be lost."""
    config: Any = importlib.import_module("vllm.config.vllm").VllmConfig
    runners: Any = importlib.import_module("vllm.v1.worker.cpu_model_runner")
    capturers: Any = importlib.import_module(
        "vllm.model_executor.layers.fused_moe.routed_experts_capturer"
    )
    runner = runners.CPUModelRunner
    load = runner.load_model
    prepare = runner._prepare_inputs
    sample = runner.sample_tokens

    def verify(self: Any) -> None:
        """Replace vLLM's checks for the GPU runner."""
        if not self.model_config.is_moe:
            raise ValueError(f"{OPTION}: the model has no experts")
        if self.cache_config.enable_prefix_caching:
            raise ValueError(f"{OPTION} needs --no-enable-prefix-caching on a CPU")

    def load_model(self: Any, *given: Any, **named: Any) -> None:
        load(self, *given, **named)
        most = self.vllm_config.scheduler_config.max_num_batched_tokens
        capturer = capturers.RoutedExpertsCapturer(most, self.vllm_config)
        capturers.bind_routed_experts_capturer(self.model, capturer)
        self.routing = _Recorder(capturer)

    def prepare_inputs(self: Any, scheduled: Any, counts: np.ndarray) -> Any:
        self.routing.begin(self, counts)
        return prepare(self, scheduled, counts)

    def sample_tokens(self: Any, grammar: Any) -> Any:
        if self.execute_model_state is None:
            scheduled = None
        else:
            scheduled = self.execute_model_state[0]
        output = sample(self, grammar)
        if scheduled is not None:
            output.aux_output_connector_output = self.routing.end(scheduled)
        return output

    config._verify_aux_output_compatibility = verify
    runner.load_model = load_model
    runner._prepare_inputs = prepare_inputs
    runner.sample_tokens = sample_tokens
