"""Parameters from the files of a model folder."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ttrl.training.models import check_weights, iter_weights
from ttrl.training.parallel.sharding import copy_whole


def fill_parameters(
    parameters: Mapping[str, nn.Parameter], folder: str | Path, put: Callable[[Tensor, Tensor], None] = copy_whole
) -> None:
    """Copies the weights of a folder into parameters under torchtune's names, sharded or not, tensor by tensor; `put` does so
    with one.

    Raises ModelFolderError with missing names, unknown names and other shapes; the parameters are of no use then.
    """
    seen: dict[str, Tensor] = {}
    for name, weight in iter_weights(folder):
        seen[name] = torch.empty(weight.shape, device="meta")
        if name in parameters and parameters[name].shape == weight.shape:
            put(parameters[name], weight)
    check_weights(parameters, seen, folder)
