"""Compute the gated delta rule (Qwen 3.5, Qwen 3 Next) in float32 on CPUs.

vLLM 0.32 has kernels only for bf16, with heads of 128. A server on a CPU computes in float32, for
comparison with the trainer to the last digits. These functions replace vLLM's kernels there: a step
of one token for each sequence, and transformers' own scan for prompts.

Shapes: n sequences, L tokens, K and V widths of a head's keys and values, H heads of keys, G heads
of values.
"""

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from vllm.utils.torch_utils import LayerNameType

_EPSILON = 1e-6  # of the lengths of queries and keys, as in transformers


def compute_in_float32() -> None:
    """Replace vLLM's functions by those of this file; bf16 is computed as before."""
    theirs: Any = importlib.import_module("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention")
    own_core = theirs.cpu_gdn_attention_core
    theirs.ops = _Operations(theirs.ops)

    def core(
        mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType
    ) -> None:
        if mixed_qkv.dtype is not torch.float32:
            own_core(mixed_qkv, b, a, core_attn_out, layer_name)
            return
        context = theirs.get_forward_context()
        layer = context.no_compile_layers[theirs._resolve_layer_name(layer_name)]
        if (
            context.attn_metadata is None
            or not context.attn_metadata[layer.prefix].num_actual_tokens
        ):
            return
        # Weights of convolutions are packed only for kernels of bf16.
        packed: Any = torch.cpu._is_avx512_bf16_supported
        torch.cpu._is_avx512_bf16_supported = lambda: False
        try:
            theirs._cpu_gdn_attention_nonspec(
                layer, context.attn_metadata[layer.prefix], mixed_qkv, b, a, core_attn_out
            )
        finally:
            torch.cpu._is_avx512_bf16_supported = packed

    theirs.cpu_gdn_attention_core = core


class _Operations:
    """Replace vLLM's operations of the delta rule in float32."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    def fused_gdn_gating_cpu(
        self, A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return log decays and rates of change, [1, L, G] each, of a and b [L, G]."""
        if a.dtype is not torch.float32:
            found: tuple[Tensor, Tensor] = self._theirs.fused_gdn_gating_cpu(
                A_log=A_log, a=a, b=b, dt_bias=dt_bias
            )
            return found
        decay = -A_log.float().exp() * F.softplus(a + dt_bias)
        return decay.unsqueeze(0), b.sigmoid().unsqueeze(0)

    def fused_sigmoid_gating_delta_rule_update_cpu(self, **given: Any) -> Tensor:
        """Return [n, 1, G, V] for one token of each sequence, and change its state in place."""
        if given["q"].dtype is not torch.float32:
            theirs: Tensor = self._theirs.fused_sigmoid_gating_delta_rule_update_cpu(**given)
            return theirs
        value = given["v"].flatten(0, -3)
        times = value.shape[1] // given["q"].shape[-2]
        query, key = (
            _unit(given[name].flatten(0, -3)).repeat_interleave(times, 1) for name in ("q", "k")
        )
        gates = {name: given[name] for name in ("A_log", "a", "b", "dt_bias")}
        decay, rate = (part[0] for part in self.fused_gdn_gating_cpu(**gates))
        states = given["initial_state_source"]
        index = given["initial_state_indices"].long()
        state = states[index] * decay.exp()[..., None, None]
        change = (value - torch.einsum("ngk,ngkv->ngv", key, state)) * rate.unsqueeze(-1)
        state = state + torch.einsum("ngk,ngv->ngkv", key, change)
        states[index] = state
        out = torch.einsum("ngk,ngkv->ngv", query * query.shape[-1] ** -0.5, state)
        return out.unsqueeze(1)

    def chunk_gated_delta_rule_cpu(self, **given: Any) -> tuple[Tensor, Tensor]:
        """Return [1, L, G, V] for whole prompts, and change their states in place."""
        if given["query"].dtype is not torch.float32:
            return self._theirs.chunk_gated_delta_rule_cpu(**given)  # type: ignore[no-any-return]
        modeling: Any = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
        value = given["value"]
        states = given["initial_state"]
        index = given["initial_state_indices"].tolist()
        times = value.shape[2] // given["query"].shape[2]
        query, key = (given[name].repeat_interleave(times, 2) for name in ("query", "key"))
        bounds = given["cu_seqlens"].tolist()
        outputs = []
        for place, begin, end in zip(index, bounds[:-1], bounds[1:], strict=True):
            out, state = modeling.torch_chunk_gated_delta_rule(
                *(x[:, begin:end] for x in (query, key, value)),
                g=given["g"][:, begin:end],
                beta=given["beta"][:, begin:end],
                initial_state=states[place].unsqueeze(0),
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            states[place] = state[0].to(states.dtype)
            outputs.append(out)
        return torch.cat(outputs, 1), states


def _unit(x: Tensor) -> Tensor:
    """Return vectors [..., K] of length 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPSILON)
