"""Complete vLLM 0.32's layerwise reload. It misses three kinds of weights.

- A tied head on CPUs: no tensor of a checkpoint names it, so it keeps the packed copy of the old
  embeddings (`pack_again`).
- Experts on CPUs: vLLM packs them only for a new kernel (`unpack_experts`).
- Parameters written by a model's `load_weights` without their loaders: the reload has put them on
  the meta device, and a copy there is lost (`KeepDirectWrites`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

_WRITTEN_DIRECTLY = {"GptOssForCausalLM": ("w13_", "w2_", "sinks")}
"""Class of a model → first letters of the parameters written by its own `load_weights`."""


def unpack_experts(model: nn.Module) -> None:
    """Make the next reload pack the experts of a CPU server again."""
    layer: Any
    for layer in model.modules():
        if packs_experts(layer):
            layer.quant_method.moe_kernel = None


@torch.no_grad()
def pack_again(model: nn.Module) -> None:
    """Pack the weights of layers again if vLLM kept their old packed copies."""
    layer: Any
    for layer in model.modules():
        if hasattr(layer, "cpu_linear") and layer.weight.numel() and not layer.weight.is_meta:
            layer.quant_method.process_weights_after_loading(layer)


def packs_experts(layer: nn.Module) -> bool:
    """Tell whether vLLM computes a layer's experts only from packed copies, as it does on CPUs."""
    method: Any = getattr(layer, "quant_method", None)
    return (
        isinstance(method, UnquantizedFusedMoEMethod) and method.unquantized_backend.name == "CPU"
    )


class KeepDirectWrites(TorchDispatchMode):
    """Pass a model's direct writes to the loader of the layer's reload.

    Use it around `load_weights` during a layerwise reload:

        with KeepDirectWrites(model):
            model.load_weights(weights)
    """

    def __init__(self, model: nn.Module) -> None:
        prepare: Callable[[], None] = super().__init__
        prepare()
        self._model = model
        self._prefixes = _WRITTEN_DIRECTLY.get(type(model).__name__, ())
        self._parameters: dict[int, nn.Parameter] | None = None

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].is_meta:
            parameter = self._owner(args[0])
            if parameter is not None:
                loader: Any = parameter
                loader.weight_loader(parameter, args[1])
                return args[0]
        return func(*args, **(kwargs or {}))

    def _owner(self, tensor: Tensor) -> nn.Parameter | None:
        """Return the parameter sharing a tensor's storage, if the model writes it directly."""
        if self._parameters is None:
            self._parameters = self._collect()
        return self._parameters.get(tensor.untyped_storage()._cdata)

    def _collect(self) -> dict[int, nn.Parameter]:
        """Give these parameters a loader for whole copies. Call it once the reload has begun."""
        found = {}
        for layer in self._model.modules():
            for name, parameter in layer.named_parameters(recurse=False):
                if name.startswith(self._prefixes) and parameter.is_meta:
                    loaded: Any = parameter
                    loaded.weight_loader = default_weight_loader
                    loaded.weight_loader = make_online_process_loader(layer, name)
                    found[parameter.untyped_storage()._cdata] = parameter
        return found
