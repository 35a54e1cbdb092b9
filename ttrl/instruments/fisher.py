"""Measure the effect of one answer's update on another's log-probability: the empirical Fisher
kernel between tokens, or sequences.

With g_i = ∇log π(i) the gradient of the log-probability of a token or a sequence, and a diagonal
preconditioner P (the identity for SGD; 1/(√v̂ + ε) for AdamW, v̂ taken as given),

    K(i, j) = g_iᵀ P g_j = Σ_α P_α ∂_α log π(i) ∂_α log π(j).

A step θ ← θ + η·P·Σ_j f_j with the forces f_j = A(j)·g_j moves log-probabilities by

    δ log π(i) = η Σ_j g_iᵀ P f_j + O(η²) = η Σ_j K(i, j)·A(j) + O(η²).                      (1)

The entropy -E[log π(i)] has the gradient -E[(log π(i) - b)·g_i] for any b independent of i, as
E[g_i] = 0. So

    δH = -η Σ_j E[(log π(i) - b)·K(i, j)·A(j)].                                              (2)

`ttrl.instruments.entropy` has an estimate h_i of the same gradient with a smaller variance, so the
split uses δH = η·mean_i Σ_j h_iᵀ P f_j. Its terms are the effect of an answer on itself (i = j:
the covariance of log π and A, arXiv 2505.22617, weighted with |g_i|²), of answers to the same
prompt on each other, and of different prompts.

**One batch for both.** If the answers of the update also measure the entropy, the terms of one
prompt are no effect of the step on fresh answers: with G independent prompts, a = Σh and f = Σf of
a prompt,

    E[naive] - ⟨∇H, P E f⟩ = (E⟨a, P f⟩ - ⟨E a, P E f⟩)/G                                    (3)

(for a scale with naive = ⟨mean a, P mean f⟩). The U-statistic leaves out the pairs of one prompt,
and divides by G(G - 1) instead of G²: it has no bias. A baseline from other samples keeps this, as
the expectation of its term is 0 (`others_mean`).

**Projection.** K is a Gram matrix, so a random projection S with E[SᵀS] = 1 keeps it: (S√P g_i)ᵀ
(S√P g_j). `Projection` is a count sketch: each parameter is added, with a random sign, to one of r
sums. Two parameters of different blocks share a sum with probability 1/r, those of one block never,
so an entry has no bias, and its variance is at most (|g_i|²|g_j|² + (g_iᵀg_j)²)/r. No matrix is
held, and an addition per block of r parameters is fast.

Shapes: N sequences, M forces, r sums of a projection, or all parameters.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SUMS = 2**16
"""Sums of a projection: an error of at most 1/181 of |g_i||g_j|, in 256 KB for each gradient."""
MOST_WHOLE = 4 * 10**9
"""The most bytes of gradients to hold whole, for an exact kernel: in float32, 1,000 gradients of an
adapter with a million parameters."""

_COLUMNS = 2**16


class Projection:
    """Sketch vectors over named parameters: `projection(vector.items())` is [r]."""

    def __init__(self, parameters: Mapping[str, Tensor], size: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.size = size
        self._device = next(iter(parameters.values())).device
        self._signs: dict[str, Tensor] = {}
        self._offsets: dict[str, list[int]] = {}
        for name, parameter in parameters.items():
            count = parameter.numel()
            signs = torch.randint(2, (count,), generator=generator, dtype=torch.int8) * 2 - 1
            self._signs[name] = signs.to(parameter.device)
            blocks = math.ceil(count / size)
            self._offsets[name] = torch.randint(size, (blocks,), generator=generator).tolist()

    def __call__(self, vector: Iterable[tuple[str, Tensor]]) -> Tensor:
        """Return the sums [r]. vector: its tensors by name, one at a time."""
        sums = torch.zeros(self.size, dtype=torch.float64, device=self._device)
        for name, value in vector:
            signed = value.flatten() * self._signs[name]
            for block, offset in zip(signed.split(self.size), self._offsets[name], strict=True):
                # The block lies on a circle of r sums, from its offset on.
                straight = block[: self.size - offset]
                around = block[self.size - offset :]
                sums[offset : offset + len(straight)] += straight
                sums[: len(around)] += around
        return sums


def projection_of(
    parameters: Mapping[str, Tensor], rows: int, seed: int = 0, most_whole: int = MOST_WHOLE
) -> Projection | None:
    """Return a projection for so many gradients, or None if they fit whole. most_whole: bytes."""
    if rows * sum(one.nbytes for one in parameters.values()) <= most_whole:
        return None
    return Projection(parameters, SUMS, seed)


@torch.no_grad()
def row_of(
    vector: Mapping[str, Tensor],
    projection: Projection | None = None,
    scale: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Return √P·vector as a row [r], projected in float64, or whole in the vector's own dtype.
    scale: P; None: 1. One tensor is scaled at a time.
    """
    scaled: Iterable[tuple[str, Tensor]] = vector.items()
    if scale is not None:
        scaled = ((name, one * scale[name].sqrt()) for name, one in vector.items())
    if projection is not None:
        return projection(scaled)
    return torch.cat([one.flatten() for _, one in scaled])


@torch.no_grad()
def dot(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return ⟨one, other⟩: products in their own dtype, added up in float64."""
    return math.fsum(float((one[name] * other[name]).sum(dtype=torch.float64)) for name in one)


def cosines(rows: Tensor, others: Tensor) -> Tensor:
    """Return the cosines of all pairs of rows [N, M]; 0 for a row of zeros."""
    norm = rows.norm(dim=1, dtype=torch.float64)
    other_norm = others.norm(dim=1, dtype=torch.float64)
    found: Tensor = products(rows, others) / (norm[:, None] * other_norm[None, :])
    return found.nan_to_num()


def products(rows: Tensor, others: Tensor) -> Tensor:
    """Return the products of all pairs of rows [N, M], in float64. Columns are widened in blocks,
    so rows in float32 are not copied whole."""
    found = rows.new_zeros(len(rows), len(others), dtype=torch.float64)
    for block, other in zip(rows.split(_COLUMNS, 1), others.split(_COLUMNS, 1), strict=True):
        found += block.double() @ other.double().T
    return found


def projection_error(rows: Tensor, total: Tensor, exact: Tensor) -> float:
    """Return the root mean square of (S a_i)ᵀ(S b) - a_iᵀ b over |a_i||b| √(2/r), the bound of its
    standard deviation: at most about 1. rows: S a_i [N, r]. total: S b [r]. exact: a_iᵀ b [N]."""
    bound = rows.norm(dim=1) * total.norm() * math.sqrt(2 / len(total))
    shares = ((rows @ total - exact) / bound).nan_to_num()
    return float(shares.square().mean().sqrt())


@dataclass(frozen=True)
class Split:
    """Hold ⟨∇H, v⟩ of a batch for both, update and entropy, by pairs of answers."""

    own: float
    """The effect of each answer on itself."""
    same_prompt: float
    """Of different answers to one prompt."""
    other_prompts: float
    """Of answers to different prompts."""
    prompts: int
    """G."""

    @property
    def naive(self) -> float:
        """The sum of all pairs."""
        return self.own + self.same_prompt + self.other_prompts

    @property
    def unbiased(self) -> float:
        """The U-statistic; NaN for a single prompt."""
        if self.prompts < 2:
            return math.nan
        return self.other_prompts * self.prompts / (self.prompts - 1)

    @property
    def bias(self) -> float:
        """The estimated bias of `naive`, by (3)."""
        return self.naive - self.unbiased

    def to_json(self) -> dict[str, float]:
        """Return the parts and the three sums."""
        sums = {"naive": self.naive, "unbiased": self.unbiased, "bias": self.bias}
        return vars(self) | sums


def score_form(logprobs: Tensor, moves: Tensor, weights: Tensor | float = 1.0) -> float:
    """Return δH/η by (2) from (K·A)_i [N] and log π(i) [N]: the baseline of each is the mean
    log-probability of the others, so it is a U-statistic; NaN for a single sequence. weights: of
    sequences sampled by another policy.
    """
    return float(-(weights * _centred(logprobs) * moves.double()).mean())


def score_split(
    logprobs: Tensor, effects: Tensor, tasks: Sequence[str], weights: Tensor | float = 1.0
) -> Split:
    """Split `score_form` by pairs of answers: effects are K·A by pairs [N, N], of each force on
    each answer; tasks: of the answers. NaN for a single one.
    """
    terms = -(weights * _centred(logprobs))[:, None] * effects.double() / len(logprobs)
    same = torch.tensor([[one == other for other in tasks] for one in tasks])
    own = float(terms.diagonal().sum())
    of_prompts = float(terms[same].sum())
    whole = float(terms.sum())
    return Split(own, of_prompts - own, whole - of_prompts, len(set(tasks)))


def _centred(logprobs: Tensor) -> Tensor:
    """Subtract from each the mean of the others; NaN for a single one."""
    logprobs = logprobs.detach().double()
    count = len(logprobs)
    if count < 2:
        return torch.full_like(logprobs, math.nan)
    return (logprobs - logprobs.mean()) * (count / (count - 1))


@dataclass(frozen=True)
class Fit:
    """Hold the comparison of predicted and measured changes."""

    count: int
    sign: float
    """Share with the same sign."""
    slope: float
    """Of the measured ones over the predicted ones, through 0: 1 for an exact first order."""
    r_squared: float
    """1 - Σ(measured - predicted)²/Σ(measured - mean)²; at most 1, and negative for a prediction
    worse than the mean."""


def fit_of(predicted: Sequence[float], measured: Sequence[float]) -> Fit:
    """Compare changes; NaN if one kind is all 0."""
    x = torch.tensor(predicted, dtype=torch.float64)
    y = torch.tensor(measured, dtype=torch.float64)
    same = (torch.sign(x) == torch.sign(y)).double().mean()
    slope = (x * y).sum() / x.square().sum()
    left = (y - x).square().sum() / (y - y.mean()).square().sum()
    return Fit(len(x), float(same), float(slope), float(1 - left))
