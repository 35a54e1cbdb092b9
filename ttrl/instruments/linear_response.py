"""Compute an optimizer step's effect from its update vector: AdamW's vector by hand, and a
quantity's response along it.

AdamW takes θ ← θ + η·v with

    v = -(m̂ / (√v̂ + ε) + λθ),   m̂ = m/(1 - β₁ᵗ),  v̂ = s/(1 - β₂ᵗ),
    m ← β₁m + (1 - β₁)g,  s ← β₂s + (1 - β₂)g²,

so a quantity H moves by δH = η⟨∇H, v⟩ + ½η²·vᵀ∇²H v + O(η³). v is linear in m and θ for given √v̂,
so δH₁ = η⟨∇H, v⟩ is a sum over the sources of v: this step's gradient, (1 - β₁)g in m; those of
earlier steps, β₁m; and weight decay.

**Linear regime.** For large η the second order takes over; for small η, rounding does: in fp32 few
parameters move by more than their last bits, and the difference of two nearly equal sums is lost.
`linear_regime` finds the range of a correct first order in between.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Vector = dict[str, Tensor]
"""A direction in the space of parameters, by their names."""


@dataclass(frozen=True)
class AdamW:
    """Hold the numbers of a step. `step` counts from 1, this step included."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


@dataclass(frozen=True)
class Update:
    """Hold AdamW's vector v, as the sum of its parts."""

    current: Vector
    """From this step's gradient."""
    earlier: Vector
    """From the earlier momentum."""
    decay: Vector
    """From weight decay."""

    def whole(self) -> Vector:
        """Return v."""
        return {
            name: self.current[name] + self.earlier[name] + self.decay[name]
            for name in self.current
        }

    def parts(self) -> dict[str, Vector]:
        return {"current": self.current, "earlier": self.earlier, "decay": self.decay}


@torch.no_grad()
def adamw_update(
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    moments: Mapping[str, Tensor],
    settings: AdamW,
    dtype: torch.dtype = torch.float64,
) -> Update:
    """Compute AdamW's vector in float64, for a result of `dtype`; it takes three times the model's
    size. moments: "NAME.exp_avg" and "NAME.exp_avg_sq" before the step, zeros at the first.
    gradients: as the optimizer sees them, clipped. Only matrices have weight decay.
    """
    first = 1 - settings.beta1**settings.step
    second = 1 - settings.beta2**settings.step
    current = {}
    earlier = {}
    decay = {}
    for name, gradient in gradients.items():
        g, m, s = (
            tensor.double()
            for tensor in (gradient, moments[f"{name}.exp_avg"], moments[f"{name}.exp_avg_sq"])
        )
        s = settings.beta2 * s + (1 - settings.beta2) * g.square()
        divisor = (s / second).sqrt() + settings.eps
        current[name] = (-(1 - settings.beta1) * g / first / divisor).to(dtype)
        earlier[name] = (-settings.beta1 * m / first / divisor).to(dtype)
        if parameters[name].ndim >= 2:
            rate = settings.weight_decay
        else:
            rate = 0.0
        decay[name] = (-rate * parameters[name].double()).to(dtype)
    return Update(current, earlier, decay)


def inner(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return ⟨one, other⟩, in float64."""
    return math.fsum(float((one[name].double() * other[name].double()).sum()) for name in one)


@dataclass(frozen=True)
class Agreement:
    """Hold the comparison of two vectors."""

    cosine: float
    norm_ratio: float
    """‖one‖ / ‖other‖."""


def agreement(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Agreement:
    """Compare two vectors; NaN where one of them is 0."""
    norms = [math.sqrt(inner(vector, vector)) for vector in (one, other)]
    if not all(norms):
        return Agreement(math.nan, math.nan)
    return Agreement(inner(one, other) / norms[0] / norms[1], norms[0] / norms[1])


def moved(parameters: Mapping[str, Tensor], vector: Mapping[str, Tensor], eta: float) -> Vector:
    """Return θ + η·v, in the parameters' own dtype, rounded once."""
    return {
        name: (parameters[name].double() + eta * vector[name]).to(parameters[name].dtype)
        for name in vector
    }


@dataclass(frozen=True)
class Response:
    """Hold the measurements at one η of a sweep."""

    eta: float
    measured: float
    """H(θ + ηv) - H(θ), on the same sequences."""
    error: float
    """Its standard error, over prompts."""
    first: float
    """δH₁ = η⟨∇H, v⟩."""
    second: float
    """½η²·vᵀ∇²H v."""
    effective_size: float
    """(Σw)²/Σw² of the sequences' importance weights, as a share."""


def linear_regime(sweep: Sequence[Response], tolerance: float = 0.1) -> tuple[float, float] | None:
    """Return the smallest and the largest |η| of the longest run of neighbours, in order of |η|,
    with the measurement within `tolerance` of the first order, relative to it; None without any.
    """
    ordered = sorted((one for one in sweep if one.eta), key=lambda one: abs(one.eta))
    best: list[Response] = []
    run: list[Response] = []
    for one in ordered:
        if abs(one.measured - one.first) <= tolerance * abs(one.first):
            run = [*run, one]
        else:
            run = []
        best = max(best, run, key=len)
    if best:
        return (abs(best[0].eta), abs(best[-1].eta))
    return None
