"""Find where precision ends and where linearity ends: one sweep of η in bf16, fp32 and fp64.

Each dtype measures H(θ + ηv) - H(θ) along the same v on the same answers. The first order is that
of float64. Its relative difference from a measurement has two branches over η: below some η the
dtype rounds the change away, and above another the second order takes over. Between these two ends
the difference is at most a tenth.
"""

import dataclasses
import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from ttrl.configs import GRPOConfig
from ttrl.facts import Facts, Number
from ttrl.instruments.entropy_batch import EntropyBatch, counted_off
from ttrl.instruments.linear_response import Response, Vector, linear_regime, moved
from ttrl.instruments.precision import TORCH_DTYPES, Dtype
from ttrl.text import counted
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.policy.loading import load_policy
from ttrl.training.policy.lora import adapted

logger = logging.getLogger(__name__)

PRECISION_FACTORS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""The sweep of η, in multiples of the learning rate."""
TOLERANCE = 0.1


class SweepPoint(Facts, omit_defaults=False):
    """One η of a sweep. `off`: |measured - first order| / |first order|."""

    eta: float
    measured: float
    off: float


class DtypeSweep(Facts, omit_defaults=False):
    """The sweep in one dtype, and both ends of the linear regime, in η; None without one.

    An end at the first or last η of the sweep is only a bound: the true one lies outside.
    """

    dtype: Dtype
    device: str
    points: list[SweepPoint]
    precision_ends: Number
    """Below it, rounding."""
    linearity_ends: Number
    """Above it, the second order."""

    @property
    def precision_is_seen(self) -> bool:
        """Tell whether the sweep goes below the end of precision."""
        return self.precision_ends is not None and self.precision_ends > self.points[0].eta

    @property
    def linearity_is_seen(self) -> bool:
        """Tell whether the sweep goes beyond the end of linearity."""
        return self.linearity_ends is not None and self.linearity_ends < self.points[-1].eta


class PrecisionSweep(Facts, omit_defaults=False):
    """The sweeps, the widest dtype last, and the first order per unit of η, in float64."""

    slope: float
    lr: float
    sweeps: list[DtypeSweep]


def precision_sweep(
    batches: Iterable[tuple[Dtype, EntropyBatch]],
    start: Vector,
    vector: Vector,
    found: Mapping[str, Any],
    lr: float,
) -> PrecisionSweep:
    """Measure the sweep in each dtype. start, vector: in float64; found: the findings of the study
    in float64, with its slope, curvature and sweep.
    """
    slope = float(found["slope"])
    ascending = sorted(found["sweep"], key=lambda one: one["eta"])
    exact = {one["eta"]: one["measured"] for one in ascending if one["eta"] > 0}
    sweeps = []
    for dtype, batch in batches:
        if dtype == "fp64":
            measured = exact
        else:
            logger.info("measuring the sweep in %s: %s", dtype, counted(len(exact), "step"))
            measured = _measured(batch, start, vector, list(exact))
        sweeps.append(dtype_sweep(dtype, batch.device.type, measured, exact, slope))
    return PrecisionSweep(slope=slope, lr=lr, sweeps=sweeps)


def batches_by_dtype(
    config: GRPOConfig, here: Ranks, origin: Vector, own: EntropyBatch
) -> Iterator[tuple[Dtype, EntropyBatch]]:
    """Yield the entropy batch under policies that compute in bf16, fp32 and fp64. origin: the
    parameters of the sampling policy. own: the batch in fp64.
    """
    narrower: tuple[Literal["bf16", "fp32"], ...] = ("bf16", "fp32")
    for dtype in narrower:
        policy = load_policy(dataclasses.replace(config, dtype=dtype), here)
        for layer in adapted(policy).values():
            layer.dropout = 0.0
        held = policy.parameters_by_name()
        with torch.no_grad():
            for name, value in origin.items():
                held[name].copy_(value)
        yield dtype, own.under(policy)
    yield "fp64", own


def _measured(
    batch: EntropyBatch, start: Vector, vector: Vector, etas: Sequence[float]
) -> dict[float, float]:
    # Parameters are in fp32, as in training; a policy in bf16 rounds them in its products.
    held = {name: value.to(TORCH_DTYPES["fp32"]) for name, value in start.items()}
    here = batch.values(held)[0]
    return {
        eta: batch.mean(batch.values(held | moved(held, vector, eta))[0] - here).value
        for eta in counted_off(etas, "steps of the sweep")
    }


def dtype_sweep(
    dtype: Dtype,
    device: str,
    measured: Mapping[float, float],
    exact: Mapping[float, float],
    slope: float,
) -> DtypeSweep:
    """Return the sweep of a dtype with its ends. measured, exact: by η, ascending, in the dtype and
    in fp64.

    Linearity ends where it does in fp64. From there down, precision ends where rounding first adds
    more than `TOLERANCE`: a lone point further down is right by chance.
    """
    in_fp64 = [
        Response(eta, value, math.nan, eta * slope, math.nan, math.nan)
        for eta, value in exact.items()
    ]
    regime = linear_regime(in_fp64, TOLERANCE)
    points = [
        SweepPoint(eta=eta, measured=value, off=_off(value, eta * slope, eta * slope))
        for eta, value in measured.items()
    ]
    precise = []
    if regime is not None:
        downwards = [eta for eta in reversed(measured) if regime[0] <= eta <= regime[1]]
        precise = list(
            itertools.takewhile(
                lambda eta: _off(measured[eta], exact[eta], eta * slope) <= TOLERANCE, downwards
            )
        )
    return DtypeSweep(
        dtype=dtype,
        device=device,
        points=points,
        precision_ends=precise[-1] if precise else None,
        linearity_ends=precise[0] if precise else None,
    )


def _off(value: float, wanted: float, first: float) -> float:
    """Return the distance of two values, as a share of the first order."""
    if first:
        return abs(value - wanted) / abs(first)
    return math.inf


def sweep_text(found: PrecisionSweep) -> str:
    """Describe the ends, for a terminal."""
    lines = [
        "The first order, from the gradient in fp64, is within a tenth of the measurement in fp64,",
        "and rounding adds less than another tenth in the narrower dtypes:",
    ]
    for one in found.sweeps:
        if one.precision_ends is None or one.linearity_ends is None:
            where = "nowhere in this sweep"
        else:
            below = "below: rounding" if one.precision_is_seen else "the least in this sweep"
            above = "above: second order" if one.linearity_is_seen else "the most in this sweep"
            where = f"from {one.precision_ends / found.lr:.3g} ({below}) to "
            where += f"{one.linearity_ends / found.lr:.3g} learning rates ({above})"
        device = {"cpu": "the CPU", "cuda": "a GPU"}[one.device]
        lines.append(f"  {one.dtype} on {device}: {where}")
    return "\n".join(lines)
