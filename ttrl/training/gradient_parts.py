"""How much of a step's gradient is KL's, by the norms of its parts.

Loss values cannot say it: with advantages that sum to zero, a policy loss is 0 on-policy however large its gradient, and so KL
seems to be everything.

Where each part of the loss depends on the labels' log-probabilities alone, the gradient at the final hidden state h of a token
is one direction, ∂ log π/∂h, times the derivatives of the parts by log π, which are known in closed form. So the backward pass,
as it comes by, can be split into its parts, and

    G_part = Σ_n g_part,n ⊗ h_n      over all tokens of the step

is the exact gradient of a matrix I + M that stands between the last norm and the head, at M = 0 (the head's own gradient, seen
through the head). Tokens that pull in opposite directions cancel in it, as they do in every parameter's. Two products of D × K
for each trained token, less than a hundredth of a step. Its share is near that of all parameters' gradients, not equal to it.

Not for a gradient of whole distributions (entropy bonus, KL over the vocabulary), whose direction is another one, nor where a
value head trains the decoder.

Shapes: N trained positions, D width, K the first of these that h is taken at.
"""

import functools

import torch
from torch import Tensor

from ttrl.training.parallel.distributed import Ranks

_MOST_INPUTS = 512


class GradientParts:
    """Collects the gradient of one optimizer step, over its microbatches: `expect` before each backward pass."""

    def __init__(self) -> None:
        self._of_kl: Tensor | None = None
        self._whole: Tensor | float = 0.0
        self._kl: Tensor | float = 0.0

    def expect(self, whole_N: Tensor, kl_N: Tensor) -> None:
        """Take the derivatives of the loss and of its KL part by log-probabilities; where they cancel, a token is left out."""
        told_N = whole_N.abs() > 1e-4 * kl_N.abs()
        self._of_kl = torch.where(told_N, kl_N / torch.where(told_N, whole_N, 1.0), 0.0)

    def watch_hidden(self, h_ND: Tensor) -> None:
        """Have the loss' gradient at the hidden states added in the backward pass."""
        if h_ND.requires_grad:
            h_ND.register_hook(functools.partial(self.add, h_ND.detach()))

    @torch.no_grad()
    def add(self, h_ND: Tensor, gradient_ND: Tensor) -> None:
        """Add the loss' gradient at the hidden states."""
        assert self._of_kl is not None, "expect comes first"
        h_NK, gradient_ND = h_ND[:, :_MOST_INPUTS].float(), gradient_ND.float()
        self._whole = self._whole + gradient_ND.T @ h_NK
        self._kl = self._kl + (gradient_ND * self._of_kl.unsqueeze(1)).T @ h_NK
        self._of_kl = None

    def share(self, here: Ranks) -> float | None:
        """Return ‖KL‖ / (‖policy‖ + ‖KL‖) over all ranks, which must all have added something; None where both are 0."""
        if not isinstance(self._whole, Tensor) or not isinstance(self._kl, Tensor):
            return None
        whole, kl = here.sum(self._whole), here.sum(self._kl)
        of_kl, of_policy = float(kl.norm()), float((whole - kl).norm())
        return of_kl / (of_kl + of_policy) if of_kl + of_policy > 0 else None
