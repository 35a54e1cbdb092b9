"""Compute a prompt once if several sequences of a step begin with it: for vLLM's workers on CPUs.

vLLM shares a prompt only through its prefix cache, in whole blocks of 128 tokens (at least 32, on
CPUs). So the 16 samples of a short prompt, and the last tokens of a long one, are computed 16
times. Here, tokens of a step with the same preceding tokens, in this step and in the same cached
blocks, pass through the layers once. Each attention layer receives all of them, so vLLM's own
kernels write and read every sequence's cache. The result has all tokens again.

`share_prompts` switches this on, or logs why not for other models or another vLLM (written for vLLM
0.32). The first, second, fourth, eighth … sharing step is also computed vLLM's own way; a
difference, or an error in any step, ends sharing for good.
"""

import functools
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import CompilationMode
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM's handler shows only its own children

LEAST_SAVED = 32
"""Tokens a step must save by sharing to be worth the gathering."""
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
"""Largest difference of a token's hidden states, relative to their norm: products of fewer rows may
be summed in another order. Those of another token differ by about 1."""


def share_prompts(worker: Any) -> None:
    """Put `SharedPrompts` into vLLM's worker, or log why not; does nothing when repeated."""
    if getattr(worker, "ttrl_shares_prompts", None) is None:
        try:
            why_not = _why_not(worker)
            if why_not is None:
                SharedPrompts(
                    worker.model_runner,
                    worker.vllm_config.compilation_config.static_forward_context,
                )
        except (AttributeError, IndexError, KeyError, TypeError) as error:  # another vLLM
            why_not = f"{type(error).__name__}: {error}"
        worker.ttrl_shares_prompts = why_not is None
        logger.info(
            "prompts of several samples are computed %s",
            "once" if why_not is None else f"for each: {why_not}",
        )


def _why_not(worker: Any) -> str | None:
    config = worker.vllm_config
    runner = worker.model_runner
    layers = config.compilation_config.static_forward_context
    if runner.device.type != "cpu" or not hasattr(runner, "_model_forward"):
        return "an unknown model runner for CPUs"
    if config.compilation_config.mode != CompilationMode.NONE:
        return "the model is compiled"
    if (
        config.lora_config is not None
        or config.speculative_config is not None
        or config.parallel_config.world_size != 1
    ):
        return "adapters, speculative decoding, or several workers"
    if config.aux_output_config.enabled:
        return "the experts of every token are returned"
    if runner.uses_mrope or config.model_config.dtype not in TOLERANCES:
        return f"positions of several dimensions, or {config.model_config.dtype}"
    if not layers or any(
        type(layer) is not Attention or layer.attn_type != AttentionType.DECODER
        for layer in layers.values()
    ):
        return "layers other than decoder attention mix tokens"
    if (
        len(groups := runner.kv_cache_config.kv_cache_groups) != 1
        or worker.vllm_config.cache_config.kv_sharing_fast_prefill
    ):
        return "several kinds of cache"
    sizes = {layer.kv_cache.shape[2] for layer in layers.values()}
    # A step's preceding tokens are identified by their blocks.
    if sizes != {groups[0].kv_cache_spec.block_size}:
        return (
            f"caches whose blocks have {sorted(sizes)} tokens instead of "
            f"{groups[0].kv_cache_spec.block_size}"
        )
    return None


class SharedPrompts:
    """Replace the forward pass of one model runner. active: until the first difference or error.
    saved: tokens not computed."""

    def __init__(self, runner: Any, layers: Mapping[str, Any]) -> None:
        self._forward, self._name = runner._model_forward, next(iter(layers))
        self._block_size: int = layers[self._name].kv_cache.shape[2]
        # While a step shares: the representing row of each of its tokens.
        self._rows: Tensor | None = None
        self._first: Tensor | None = None  # for each row, the first token of its group
        self.active, self.saved, self._steps = True, 0, 0  # sharing steps
        for layer in layers.values():
            layer.forward = functools.partial(self._attend, layer.forward)
        runner._model_forward = self

    def __call__(self, input_ids: Any = None, positions: Any = None, **others: Any) -> Any:
        """Run `GPUModelRunner._model_forward`. Steps of comparison return vLLM's own result."""
        shared = None
        if (
            self.active
            and input_ids is not None
            and positions.dim() == 1
            and all(other is None for other in others.values())
        ):
            try:
                shared = self._shared(input_ids, positions, others)
            # Another vLLM or model: vLLM's own way rewrites all of the step's cache.
            except Exception as error:
                logger.exception("a step with shared prompts has failed")
                self._stop(f"{type(error).__name__}: {error}")
        if shared is not None and self._steps & (self._steps - 1):  # not a power of two
            return shared
        own = self._forward(input_ids=input_ids, positions=positions, **others)
        if shared is not None:
            difference = float(
                ((shared - own).float().norm(dim=-1) / own.float().norm(dim=-1)).max()
            )
            if not difference <= TOLERANCES[own.dtype]:
                self._stop(
                    f"hidden states differ by {difference:g} of their norm, more than "
                    f"{TOLERANCES[own.dtype]:g}"
                )
        return own

    def _stop(self, why: str) -> None:
        self.active = False
        logger.error("prompts of several samples are no longer computed once: %s", why)

    def _shared(
        self, input_ids: Tensor, positions: Tensor, others: dict[str, None]
    ) -> Tensor | None:
        plan = self._plan(input_ids)
        if plan is None:
            return None
        rows, first = self._rows, self._first = plan
        try:
            hidden: Tensor = self._forward(
                input_ids=input_ids[first], positions=positions[first], **others
            )[rows]
        finally:
            self._rows = self._first = None
        self.saved += len(rows) - len(first)
        self._steps += 1
        return hidden

    def _plan(self, input_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return (the row of each token, the first token of each row); None if there is little to
        share.
        """
        by_layer = get_forward_context().attn_metadata
        if isinstance(by_layer, dict):
            metadata = by_layer.get(self._name)
        else:
            metadata = None
        if not isinstance(metadata, CPUAttentionMetadata) or metadata.num_actual_tokens != len(
            input_ids
        ):
            return None
        starts = metadata.query_start_loc.numpy()
        if len(input_ids) - (len(starts) - 1) < LEAST_SAVED:  # one new token each
            return None
        ids = input_ids.numpy()
        lengths = np.diff(starts)
        before = metadata.seq_lens.numpy()[: len(lengths)] - lengths
        blocks = -(-before // self._block_size)
        table = metadata.block_table.numpy()
        known: dict[tuple[bytes, int, bytes], int] = {}
        rows = np.empty(len(ids), dtype=np.int64)
        first = []
        taken = 0
        for request, (start, length) in enumerate(
            zip(starts.tolist(), lengths.tolist(), strict=False)
        ):
            end = start + length
            key = (
                ids[start:end].tobytes(),
                int(before[request]),
                table[request, : blocks[request]].tobytes(),
            )
            row = known.setdefault(key, taken)
            if row == taken:
                first.append(np.arange(start, end))
                taken += length
            rows[start:end] = np.arange(row, row + length)
        if len(ids) - taken < LEAST_SAVED:
            return None
        return torch.from_numpy(rows), torch.from_numpy(np.concatenate(first))

    def _attend(
        self,
        forward: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        *others: Any,
        **named: Any,
    ) -> Tensor:
        """Give an attention layer's `forward` every token of the step; return one token for each
        row.
        """
        rows = self._rows
        first = self._first
        out: Tensor
        if rows is None:
            out = forward(query, key, value, *others, **named)
            return out
        if others or named:
            raise RuntimeError(
                f"attention with {len(others)} and {sorted(named)} more arguments: share no "
                "prompts for this model"
            )
        key, value = (None if part is None else part[rows] for part in (key, value))
        out = forward(query[rows], key, value)[first]
        return out
