"""Keep, recompute or offload the forward pass's activations for the backward pass.

- Full checkpointing (arXiv 1604.06174) keeps only a layer's input; every k-th layer can be
  recomputed, the others kept.
- Selective checkpointing keeps expensive results and recomputes cheap ones (arXiv 2205.05198):
  results of matrix products and of attention stay.

Both are exact: they repeat the same operations on the same numbers. Layers have no dropout: no
random state is stored; but adapters may have.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torchtune.training import OffloadActivations

from ttrl.configs import TrainingConfig

_aten = torch.ops.aten
PRODUCTS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.inductor_compiled_code,  # attention on GPUs
]
"""Operations with results kept by selective checkpointing."""


def checkpoint_layers(layers: nn.ModuleList, config: TrainingConfig) -> None:
    """Wrap the layers to recompute: number 0, k, 2k, … for `checkpoint_every` k."""
    wrap = functools.partial(
        checkpoint_wrapper,
        checkpoint_impl=CheckpointImpl.NO_REENTRANT,
        preserve_rng_state=config.lora_dropout > 0,
    )
    if config.checkpoint_keeps == "products":
        kept = functools.partial(create_selective_checkpoint_contexts, PRODUCTS)
        wrap = functools.partial(wrap, context_fn=kept)
    for number in range(0, len(layers), config.checkpoint_every):
        layers[number] = wrap(layers[number])


def offload_activations(
    decoder: Any, make: Callable[[], AbstractContextManager[Any]] = OffloadActivations
) -> None:
    """Move the layers' saved activations to pinned CPU memory during the forward pass, and back
    shortly before the backward pass needs them (torchtune's OffloadActivations on a separate
    stream; it cannot be created on a machine without a GPU). The head's saved tensors stay: it
    takes gradients in its forward pass. make: makes what moves them.
    """
    hidden_states: Callable[..., Tensor] = decoder.hidden_states
    offloading = make()

    def offloaded(*inputs: Any, **options: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return hidden_states(*inputs, **options)
        with offloading:
            return hidden_states(*inputs, **options)

    decoder.hidden_states = offloaded
