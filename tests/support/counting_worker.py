"""ttrl's extension of vLLM's worker, which counts what the worker computes, by PyTorch's own
counter and from the real calls.
"""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula
from vllm.forward_context import get_forward_context

from ttrl.vllm_worker import WeightSync


class Counting(WeightSync):
    """`counted_flops` over /collective_rpc: what was computed since the last call, from the second
    call on.
    """

    _counter: FlopCounterMode | None = None

    def counted_flops(self) -> dict[str, int]:
        """Return operations by operator; of vLLM's own operators those that do products of matrices
        are known.
        """
        found: dict[str, int] = {}
        if self._counter is None:
            for name, formula in (
                ("onednn_mm", _product),
                ("weight_packed_linear", _packed_product),
            ):
                if hasattr(torch.ops._C, name):  # the second one needs AVX-512
                    register_flop_formula(getattr(torch.ops._C, name), get_raw=True)(formula)
            register_flop_formula(torch.ops.vllm.unified_attention_with_output, get_raw=True)(
                _attention
            )
        else:
            self._counter.__exit__(None, None, None)
            found = {
                str(name): int(count)
                for name, count in self._counter.get_flop_counts().get("Global", {}).items()
            }
        self._counter = FlopCounterMode(display=False)
        self._counter.__enter__()  # of the thread that also runs the model
        return found


def _product(out: torch.Tensor, x: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * out.numel() * x.shape[-1]


def _packed_product(x: torch.Tensor, *_: Any, out_val: torch.Tensor, **__: Any) -> int:
    return 2 * out_val.numel() * x.shape[-1]


def _attention(query: torch.Tensor, *_: Any, **__: Any) -> int:
    """Queries and keys that see each other, as the step says which tokens are whose; without a
    window.
    """
    metadata = next(iter(get_forward_context().attn_metadata.values()))
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    assert len(query) >= starts[-1]
    pairs = 0
    for length, start, end in zip(lengths, starts, starts[1:], strict=False):
        pairs += sum(length - behind for behind in range(end - start))
    return 4 * query.shape[1:].numel() * pairs
