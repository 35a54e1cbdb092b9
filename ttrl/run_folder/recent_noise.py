"""Average the gradient noise of optimizer steps, and derive the best batch from it.

The estimates of single steps are those of ttrl.instruments.gradient_noise, from train.jsonl.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ttrl.facts import GradientNoise, Step, StepNoise, number
from ttrl.intervals import ratio_of_means

WINDOW = 16
"""Optimizer steps in the averages of numerator and denominator."""


def recent_noise(steps: Sequence[Step]) -> GradientNoise:
    """Average the noise of the last `WINDOW` optimizer steps, numerators and denominators
    separately. steps: oldest first. Returns the fields of metrics.jsonl; empty if no step has any.

    scale: S/|G|² in prompts, the batch with noise equal to signal. low, high: its 95% interval
    (Fieller's, from the scatter between steps; without high if the signal may be 0). prompts: of a
    step, on average. noise, signal, and share, S/(B|G|²), their ratio. from_sketch: all of these
    are the sketch's, as no step has two pieces. from_samples: the share of the noise removable by
    more samples of the same prompts. layers: S/(B|G|²) of each group of layers. best_samples,
    best_prompts, gain: `best_allocation` by trained positions.
    """
    known = [
        (step, step.gradient_noise)
        for step in steps
        if step.skipped is None and step.gradient_noise is not None and step.gradient_noise.prompts
    ][-WINDOW:]
    if not known:
        return GradientNoise()
    last = [noise for _, noise in known]
    found = GradientNoise(
        steps=len(last), prompts=statistics.fmean(one.prompts or 0.0 for one in last)
    )
    measured = [
        _Measured(one.prompts or 0.0, one.noise, one.signal or 0.0)
        for one in last
        if one.noise is not None
    ]
    nested = [(one.prompts or 0.0, one.nested) for one in last if one.nested is not None]
    if measured:
        layers = [one.layers or {} for one in last if one.noise is not None]
        found = _with_scale(found, measured).replace(layers=_of_layers(layers))
    elif nested:
        sketched = [
            _Measured(prompts, one.prompts + one.samples, one.signal) for prompts, one in nested
        ]
        found = _with_scale(found, sketched).replace(from_sketch=True)
    if nested:
        prompts = max(0.0, statistics.fmean(one.prompts for _, one in nested))
        samples = max(0.0, statistics.fmean(one.samples for _, one in nested))
        if prompts + samples > 0:
            from_samples = samples / (prompts + samples)
            best = _advice([step for step, _ in known], last, from_samples)
            found = found.replace(
                from_samples=from_samples,
                best_samples=best.samples,
                best_prompts=best.prompts,
                gain=best.gain,
            )
    return found


class _Measured(NamedTuple):
    """The noise of one step."""

    prompts: float
    noise: float
    signal: float


def _with_scale(found: GradientNoise, steps: Sequence[_Measured]) -> GradientNoise:
    noise = statistics.fmean(step.noise for step in steps)
    signal = statistics.fmean(step.signal for step in steps)
    ratio = ratio_of_means(
        [step.noise * step.prompts for step in steps], [step.signal for step in steps]
    )
    return found.replace(
        noise=noise,
        signal=signal,
        scale=number(ratio.value),
        low=number(ratio.low),
        high=number(ratio.high),
        share=noise / signal if signal > 0 else None,
    )


def _advice(
    steps: Sequence[Step], noises: Sequence[StepNoise], from_samples: float
) -> "Allocation":
    prompts = sum(one.prompts or 0.0 for one in noises)
    samples = sum(one.samples or 0 for one in noises)
    answers = sum(step.trained_tokens or 0 for step in steps)
    rest = sum(step.row_tokens or 0 for step in steps) - answers
    return best_allocation(
        prompts / len(steps), samples / prompts, from_samples, rest / prompts, answers / samples
    )


def _of_layers(steps: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    sums: dict[str, list[float]] = {}
    for step in steps:
        for name, (noise, signal) in step.items():
            noises, signals = sums.setdefault(name, [0.0, 0.0])
            sums[name] = [noises + noise, signals + signal]
    return {name: noise / signal for name, (noise, signal) in sums.items() if signal > 0}


@dataclass(frozen=True)
class Allocation:
    """The best division of a budget into prompts and samples of each."""

    samples: int
    """Of each prompt."""
    prompts: int
    """At the same cost."""
    gain: float
    """The step's present noise over its noise then, at the same cost."""


def best_allocation(
    prompts: float, samples: float, from_samples: float, prompt_cost: float, sample_cost: float
) -> Allocation:
    """Divide the cost of `prompts` × `samples` optimally. from_samples: the samples' share of the
    noise. Costs in any unit, such as tokens: of one more prompt, and of one more sample.

    By (3), N prompts with M samples have n·cost = (P + E/M)·(c + M·d), for any N. It is least at M
    = √(E·c / (P·d)): few samples if prompts are cheap or differ much, many if each prompt is dear
    (Cochran, "Sampling techniques", section 10.6). At least two samples, since a single one has no
    advantage, and at least two prompts.
    """
    between, within = 1 - from_samples, from_samples * samples  # in units of n·N
    cost = prompts * (prompt_cost + samples * sample_cost)

    def product(count: float) -> float:
        return (between + within / count) * (prompt_cost + count * sample_cost)

    most = max(2, int((cost / 2 - prompt_cost) / sample_cost))
    if between > 0:
        exact = math.sqrt(within * prompt_cost / (between * sample_cost))
    else:
        exact = math.inf
    if exact < most:
        choices = {max(2, math.floor(exact)), min(most, max(2, math.ceil(exact)))}
    else:
        choices = {most}
    best = min(choices, key=product)
    return Allocation(
        best,
        max(2, round(cost / (prompt_cost + best * sample_cost))),
        product(samples) / product(best),
    )
