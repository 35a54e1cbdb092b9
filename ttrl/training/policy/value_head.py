"""A value head: predicts the reward from the decoder's hidden states. Trained with the returns of
GAE.

Shapes: N trained positions, D width of the hidden states, W width of the head.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from ttrl.errors import ModelFolderError

FILE_NAME = "value_head.safetensors"


class ValueHead(nn.Module):
    """A two-layer perceptron, hidden states [N, D] → values [N], in fp32. The last layer starts
    at 0: the first values are 0. width: of its hidden layer; None: the width of the hidden
    states. grad_in_decoder: whether the value loss trains the decoder too."""

    def __init__(
        self, dim: int, width: int | None = None, *, grad_in_decoder: bool = False
    ) -> None:
        super().__init__()
        self.up = nn.Linear(dim, width or dim)
        self.down = nn.Linear(width or dim, 1)
        self.grad_in_decoder = grad_in_decoder
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, h_ND: Tensor) -> Tensor:
        """Return values [N], or of any leading shape; the gradient stops at `h` unless
        `grad_in_decoder`.
        """
        if not self.grad_in_decoder:
            h_ND = h_ND.detach()
        with torch.autocast(h_ND.device.type, enabled=False):
            inner_NW = F.silu(self.up(h_ND.to(self.up.weight.dtype)))
            # Not a view of [N, 1]: FSDP would warn.
            return inner_NW @ self.down.weight[0] + self.down.bias


def value_loss(
    values_N: Tensor,
    returns_N: Tensor,
    old_values_N: Tensor | None = None,
    clip: float | None = None,
) -> Tensor:
    """Return ½·(V - R)² of each token [N]; with `clip`, ½·max((V - R)², (V_old + clip(V - V_old,
    -clip, clip) - R)²): once a value has moved by `clip` towards its return, no gradient moves it
    further (PPO2's, J. Schulman, 2017; arXiv 2005.12729 on its use).

    old_values: the values behind the advantages; needed with `clip`.
    """
    error_N = (values_N - returns_N).square()
    if clip is not None:
        assert old_values_N is not None, "clipping of values needs the old ones"
        near_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
        error_N = torch.maximum(error_N, (near_N - returns_N).square())
    return 0.5 * error_N


def save_value_head(weights: dict[str, Tensor], folder: str | Path) -> None:
    """Write whole weights (of `state_dict`, gathered if sharded) to the folder's
    value_head.safetensors.
    """
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()},
        Path(folder, FILE_NAME),
    )


def load_value_head(head: ValueHead, folder: str | Path) -> bool:
    """Read the weights written by `save_value_head`; False if the folder has none: the head starts
    fresh. Raises ModelFolderError for unreadable weights or another shape."""
    file = Path(folder, FILE_NAME)
    if not file.exists():
        return False
    try:
        weights = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ModelFolderError(
            f"{file} cannot be read ({error}); delete it to train a value head from the start"
        ) from error
    own = head.state_dict()
    shapes, wanted = ({name: list(t.shape) for name, t in some.items()} for some in (weights, own))
    if shapes != wanted:
        raise ModelFolderError(
            f"{file}: it holds {shapes}, but the value head is {wanted}; does it belong to "
            "another model?"
        )
    head.load_state_dict(weights)
    return True
