"""Measure a quantity's response along an optimizer's update vector v
(`ttrl.instruments.update_rules`).

A step θ ← θ + η·v moves a quantity H by δH = η⟨∇H, v⟩ + ½η²·vᵀ∇²H v + O(η³). The first order is
linear in v, so it is a sum over the parts of v.

**Linear regime.** For large η the second order takes over; for small η, rounding does: in fp32 few
parameters move by more than their last bits, and the difference of two nearly equal sums is lost.
`linear_regime` finds the range of a correct first order in between.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

Vector = dict[str, Tensor]
"""A direction in the space of parameters, by their names."""


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

    def is_near(one: Response) -> bool:
        return abs(one.measured - one.first) <= tolerance * abs(one.first)

    ordered = sorted((one for one in sweep if one.eta), key=lambda one: abs(one.eta))
    runs = [list(run) for near, run in itertools.groupby(ordered, key=is_near) if near]
    best = max(runs, key=len, default=None)
    if best is None:
        return None
    return (abs(best[0].eta), abs(best[-1].eta))
