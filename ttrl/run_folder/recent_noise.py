"""Average the gradient noise of optimizer steps, and derive the best batch from it.

The estimates of single steps are those of ttrl.instruments.gradient_noise, as train.jsonl has them.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ttrl.intervals import ratio_of_means

WINDOW = 16
"""Optimizer steps over which numerator and denominator are averaged."""


def recent_noise(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Average what the last `WINDOW` optimizer steps say, numerators and denominators apart. steps:
    lines of train.jsonl, oldest first. Returns what metrics.jsonl says; empty where no step has
    any.

    "scale": S/|G|² in prompts, the batch at which noise equals signal, and "low", "high": its 95%
    interval (Fieller's, from the scatter between steps; "high" is left out where the signal may be
    0). "prompts": of a step, on the average. "noise", "signal", and "share", S/(B|G|²), their
    ratio. "from_sketch": all of these are the sketch's, as no step has two pieces. "from_samples":
    the share of the noise that more samples of the same prompts would take away. "layers":
    S/(B|G|²) of each group of layers. "best_samples", "best_prompts", "gain": `best_allocation` by
    positions that are trained on.
    """
    lines = [
        step
        for step in steps
        if "skipped" not in step and (step.get("gradient_noise") or {}).get("prompts")
    ][-WINDOW:]
    if not lines:
        return {}
    last = [line["gradient_noise"] for line in lines]
    mean: dict[str, Any] = {
        "steps": len(last),
        "prompts": statistics.fmean(step["prompts"] for step in last),
    }
    measured = [step for step in last if step.get("noise") is not None]
    if measured:
        mean |= _scale(measured) | {"layers": _of_layers([step["layers"] for step in measured])}
    elif sketched := [step | _sketched(step["nested"]) for step in last if step.get("nested")]:
        mean |= _scale(sketched) | {"from_sketch": True}
    nested = [step["nested"] for step in last if step.get("nested")]
    if nested:
        prompts, samples = (
            max(0.0, statistics.fmean(one[name] for one in nested))
            for name in ("prompts", "samples")
        )
        if prompts + samples > 0:
            mean["from_samples"] = samples / (prompts + samples)
            mean |= _advice(lines, mean["from_samples"])
    return mean


def _sketched(nested: Mapping[str, float]) -> dict[str, float]:
    return {"noise": nested["prompts"] + nested["samples"], "signal": nested["signal"]}


def _scale(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    mean = {name: statistics.fmean(step[name] for step in steps) for name in ("noise", "signal")}
    ratio = ratio_of_means(
        [step["noise"] * step["prompts"] for step in steps], [step["signal"] for step in steps]
    )
    found = {"scale": ratio.value, "low": ratio.low, "high": ratio.high}
    mean |= {
        name: value for name, value in found.items() if value is not None and math.isfinite(value)
    }
    return mean | ({"share": mean["noise"] / mean["signal"]} if mean["signal"] > 0 else {})


def _advice(lines: Sequence[Mapping[str, Any]], from_samples: float) -> dict[str, float]:
    prompts, samples = (
        sum(line["gradient_noise"][name] for line in lines) for name in ("prompts", "samples")
    )
    answers = sum(line["trained_tokens"] for line in lines)
    costs = (sum(line["row_tokens"] for line in lines) - answers) / prompts, answers / samples
    best = best_allocation(prompts / len(lines), samples / prompts, from_samples, *costs)
    return {"best_samples": best.samples, "best_prompts": best.prompts, "gain": best.gain}


def _of_layers(steps: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    sums: dict[str, list[float]] = {}
    for step in steps:
        for name, (noise, signal) in step.items():
            noises, signals = sums.setdefault(name, [0.0, 0.0])
            sums[name] = [noises + noise, signals + signal]
    return {name: noise / signal for name, (noise, signal) in sums.items() if signal > 0}


@dataclass(frozen=True)
class Allocation:
    """How a budget is best divided into prompts and samples of each."""

    samples: int
    """Of each prompt."""
    prompts: int
    """For the cost that was paid."""
    gain: float
    """Noise of the step as it is, over its noise then, for the same cost."""


def best_allocation(
    prompts: float, samples: float, from_samples: float, prompt_cost: float, sample_cost: float
) -> Allocation:
    """Divide the cost of `prompts` × `samples` anew. from_samples: the share of the noise that
    comes from samples; costs in any unit, such as tokens: of one more prompt, and of one more
    sample.

    By (3) there, N prompts with M samples have n·cost = (P + E/M)·(c + M·d), whatever N is. It is
    least at M = √(E·c / (P·d)): few samples where prompts are cheap or differ much, many where each
    prompt is dear (Cochran, "Sampling techniques", section 10.6). At least two, without which there
    is no advantage, and at least two prompts.
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
