"""Compute in float64 with code written for float32.

Model classes of transformers convert to float32 if 16 bits would be too few: in norms, softmax,
rotary embeddings, scans. For numbers in float64, the conversion would round to 24 bits in the
middle of a computation, and hide differences below 1e-7. In this mode such conversions leave
float64 as it is.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class KeepDoubles(TorchFunctionMode):
    """Inside the block, float64 is not converted to float32.

    Example: `with KeepDoubles(): assert x.double().float().dtype is torch.float64`.
    """

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        given: tuple[Any, ...] = (),
        named: dict[str, Any] | None = None,
    ) -> Any:
        named = dict(named or {})
        first = given[0] if given else named.get("input")
        if not isinstance(first, Tensor) or first.dtype is not torch.float64:
            return function(*given, **named)
        if function is torch.Tensor.float:
            return first
        if function in (torch.Tensor.to, torch.Tensor.type):
            given = tuple(torch.float64 if one is torch.float32 else one for one in given)
        if named.get("dtype") is torch.float32:
            named["dtype"] = torch.float64
        return function(*given, **named)
