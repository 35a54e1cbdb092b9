"""Measure KL's share of a step's gradient: ‖KL‖ / (‖policy‖ + ‖KL‖ + ‖entropy‖).

Loss values cannot show it: with advantages of sum zero, an on-policy policy loss is 0 whatever its
gradient, and KL would seem to be everything.

Terms of the label's log-probability share one direction of the gradient at a token's final hidden
state h, ∂ log π/∂h. Their known derivatives by log π separate them. Terms of whole distributions
(entropy bonus, KL over the vocabulary) have another direction: the head computes their gradient
separately, one more product for each (`ttrl.training.kernels.logprobs`). So the backward pass can
be split into its parts, and

    G_part = Σ_n g_part,n ⊗ h_n      over all tokens of the step

is the exact gradient of a matrix I + M between the last norm and the head, at M = 0 (the head's own
gradient, seen through the head). Tokens with opposite directions cancel in it, as they do in every
parameter's. The cost is a product of D × K for each part and trained token, less than a hundredth
of a step. The share is near the share over all parameters' gradients, not equal.

Not available if a value head trains the decoder.

Shapes: N trained positions, n of a chunk, D width, K the leading components of h in use.
"""

import functools

import torch
from torch import Tensor

from ttrl.training.parallel.distributed import Ranks

_MOST_INPUTS = 512


class GradientParts:
    """Collects one optimizer step's gradient over its microbatches: call `expect` before each
    backward pass. apart: the loss terms of whole distributions."""

    def __init__(self, apart: tuple[str, ...] = ()) -> None:
        self._of_kl: Tensor | None = None
        self._apart: dict[str, list[Tensor]] = {name: [] for name in apart}
        self._sums: list[Tensor] = []
        """G of everything, of KL, and of the entropy bonus if there is one."""

    def expect(self, whole_N: Tensor, kl_N: Tensor) -> None:
        """Take the derivatives of the loss and of its KL part by log-probabilities; a token is left
        out if they cancel.
        """
        told_N = whole_N.abs() > 1e-4 * kl_N.abs()
        self._of_kl = torch.where(told_N, kl_N / torch.where(told_N, whole_N, 1.0), 0.0).float()

    def watch_hidden(self, h_ND: Tensor) -> None:
        """Have the loss' gradient at the hidden states added in the backward pass."""
        if h_ND.requires_grad:
            h_ND.register_hook(functools.partial(self.add, h_ND.detach()))

    def add_apart(self, name: str, gradient_nD: Tensor) -> None:
        """Add the distribution terms' gradient at the next chunk's hidden states."""
        self._apart[name].append(gradient_nD.float())

    @torch.no_grad()
    def add(self, h_ND: Tensor, gradient_ND: Tensor) -> None:
        """Add the loss' gradient at the hidden states."""
        assert self._of_kl is not None, "expect comes first"
        h_NK = h_ND[:, :_MOST_INPUTS].float()
        gradient_ND = gradient_ND.float()
        apart = {
            name: torch.cat(chunks) if chunks else torch.zeros_like(gradient_ND)
            for name, chunks in self._apart.items()
        }
        by_label_ND = gradient_ND - sum(apart.values(), torch.zeros(()))
        kl_ND = by_label_ND * self._of_kl.unsqueeze(1)
        if "divergence" in apart:
            kl_ND = kl_ND + apart["divergence"]
        parts = [gradient_ND, kl_ND, *([apart["entropy"]] if "entropy" in apart else [])]
        found = [part_ND.T @ h_NK for part_ND in parts]
        if self._sums:
            self._sums = [one + other for one, other in zip(self._sums, found, strict=True)]
        else:
            self._sums = found
        self._of_kl = None
        for chunks in self._apart.values():
            chunks.clear()

    def share(self, here: Ranks) -> float | None:
        """Return KL's share over all ranks, each with data; None if all parts are 0."""
        if not self._sums:
            return None
        whole, *parts = (here.sum(total) for total in self._sums)
        policy = whole - sum(parts, torch.zeros(()))
        of_kl, *others = (float(part.norm()) for part in (*parts, policy))
        if of_kl + sum(others) > 0:
            return of_kl / (of_kl + sum(others))
        return None
