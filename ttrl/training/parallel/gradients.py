"""Compute the global norm of gradients spread over processes, and clip to it."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ttrl.training.parallel.distributed import TENSOR
from ttrl.training.parallel.sharding import full_tensor, local_part


def settle(parameters: Iterable[nn.Parameter]) -> None:
    """Sum gradients split over processes, such as those of q/k norms under tensor parallelism."""
    for parameter in parameters:
        gradient = parameter.grad
        if (
            isinstance(parameter, DTensor)
            and isinstance(gradient, DTensor)
            and gradient.placements != parameter.placements
        ):
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def sharded_dims(tensor: DTensor) -> tuple[str, ...]:
    """Return the mesh's dimensions with different parts of a tensor along them."""
    names = tensor.device_mesh.mesh_dim_names
    assert names is not None
    return tuple(
        name
        for name, placement in zip(names, tensor.placements, strict=True)
        if not placement.is_replicate()
    )


class SquaredNorm:
    """Σ g² over gradients spread over processes in different ways, with one reduction for each way,
    at the end.
    """

    def __init__(self) -> None:
        self._squares: dict[tuple[str, ...], Tensor] = {}
        self._mesh: DeviceMesh | None = None

    def add(self, gradient: Tensor) -> None:
        dims: tuple[str, ...] = ()
        if isinstance(gradient, DTensor):
            self._mesh, dims = gradient.device_mesh, sharded_dims(gradient)
        square = torch.linalg.vector_norm(local_part(gradient), dtype=torch.float32).square()
        self._squares[dims] = self._squares[dims] + square if dims in self._squares else square

    def norm(self) -> Tensor:
        """Return the square root of the sum over all processes; a collective if something was
        sharded.
        """
        total: Tensor | float = 0.0
        for dims in sorted(self._squares):
            square = self._squares[dims]
            for dim in dims:
                assert self._mesh is not None
                torch.distributed.all_reduce(square, group=self._mesh.get_group(dim))
            total = total + square
        return torch.as_tensor(total).sqrt()


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], limit: float | None) -> float:
    """Scale all gradients to a global norm of at most `limit` (None: leave them unchanged). Returns
    the norm before, independent of the number of processes. A collective if parameters are sharded.
    """
    parameters = list(parameters)
    settle(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    first = gradients[0] if gradients else None
    if not (isinstance(first, DTensor) and TENSOR in (first.device_mesh.mesh_dim_names or ())):
        return float(
            full_tensor(nn.utils.clip_grad_norm_(parameters, math.inf if limit is None else limit))
        )
    squares = SquaredNorm()
    for gradient in gradients:
        squares.add(gradient)
    norm = squares.norm()
    if limit is not None:
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grad_norm_
        for gradient in gradients:
            local_part(gradient).mul_(factor.to(gradient.device))
    return float(norm)
