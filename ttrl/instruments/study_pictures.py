"""Draw the findings of a study: of one step (`ttrl.instruments.study_report`), or of all steps of a
run (`ttrl.instruments.study_run`).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ttrl.facts import MetricsRow
from ttrl.instruments.precision_sweep import TOLERANCE, PrecisionSweep


def save_figures(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Save figures by their file names; return the paths."""
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=150)
    return [folder / name for name in figures]


def draw_response(found: Mapping[str, Any]) -> Figure:
    """Draw the measurements and the orders' predictions, over η in learning rates."""
    sweep = sorted(found["sweep"], key=lambda one: one["eta"])
    x = [one["eta"] / found["lr"] for one in sweep]
    figure = Figure(figsize=(7, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _draw_orders(above, x, sweep, ("-", "--"))
    above.set(
        ylabel="change of entropy, nats", title=f"step {found['global_step']}: H(θ + ηv) − H(θ)"
    )
    below.plot(x, [one["effective_size"] for one in sweep], "o-")
    below.set(xlabel="η in learning rates", ylabel="effective\nsample size", ylim=(0, 1.05))
    for axes in (above, below):
        axes.set_xscale("symlog", linthresh=0.25)
    regime = found["linear_regime"]
    if regime:
        above.axvspan(
            regime[0] / found["lr"],
            regime[1] / found["lr"],
            alpha=0.1,
            label="first order within 10%",
        )
    above.legend()
    return figure


def _draw_orders(
    axes: Axes, x: Sequence[float], rows: Sequence[Mapping[str, Any]], styles: tuple[str, str]
) -> None:
    """Draw measurements with their errors, and the predictions of both orders in these styles."""
    measured = [one["measured"] for one in rows]
    axes.errorbar(x, measured, [one["error"] for one in rows], fmt="o", label="measured")
    first, second = styles
    axes.plot(x, [one["first"] for one in rows], first, markersize=12, label="first order")
    both = [one["first"] + one["second"] for one in rows]
    axes.plot(x, both, second, label="with second order")


def draw_position(by_position: Sequence[float]) -> Figure:
    """Draw the entropy by position in the answer."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    places = range(1, len(by_position) + 1)
    axes.step(places, by_position, where="mid", label="E[H_k], 0 behind the end")
    axes.set(
        xlabel="token k of the answer", ylabel="nats", title="entropy of whole answers by position"
    )
    whole = axes.twinx()
    whole.plot(places, list(itertools.accumulate(by_position)), "--", color="grey")
    whole.set(ylabel="their sum up to k (dashed)", ylim=(0, None))
    axes.set_ylim(bottom=0)
    return figure


def draw_tokens(found: Mapping[str, Any]) -> Figure:
    """Draw the tokens with the largest effect on the entropy, and the differences of trainer and
    sampler.
    """
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    tokens = found["covariance"]["tokens"][::-1]
    left.barh(range(len(tokens)), [one["covariance"] for one in tokens])
    texts = [f"{one['before'][-24:]!a} → {one['text']!a}" for one in tokens]
    # A model's text may look like mathematics.
    left.set_yticks(range(len(tokens)), texts, fontsize=7, parse_math=False)
    left.set(title=f"(log π − mean)·(A − mean); the mean is {found['covariance']['mean']:.3g}")
    names = list(found["mismatch"])
    right.bar(names, [found["mismatch"][name]["rms"] for name in names])
    trainer = f"trainer in {found['run_dtype']}"
    right.set(title=f"{trainer} − sampler", ylabel="rms of log π, nats")
    return figure


def draw_noise(rows: Sequence[MetricsRow]) -> Figure:
    """Draw the gradient noise scale with its interval, and the samples' share of the noise. rows:
    of metrics.jsonl.
    """
    x = [row.iteration for row in rows]
    noise = [row.gradient_noise for row in rows]
    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    scales = [_plotted(one.scale) for one in noise]
    lows = [_plotted(one.scale if one.low is None else one.low) for one in noise]
    highs = [_plotted(one.high) for one in noise]
    above.plot(x, scales, label="noise scale")
    above.fill_between(x, lows, highs, alpha=0.2, label="95% interval")
    above.plot(x, [_plotted(one.prompts) for one in noise], "--", label="prompts per step")
    above.set(yscale="log", ylabel="prompts", title="the batch with as much noise as signal")
    above.legend()
    below.plot(x, [_plotted(one.from_samples) for one in noise])
    below.xaxis.get_major_locator().set_params(integer=True)
    below.set(xlabel="iteration", ylabel="share of the noise\nfrom samples", ylim=(0, 1))
    return figure


def _plotted(value: float | None) -> float:
    """Return matplotlib's value: NaN for a missing one."""
    if value is None:
        return math.nan
    return value


def draw_steps(found: Mapping[str, Any]) -> Figure:
    """Draw predicted against measured changes, and the entropy, over optimizer steps."""
    steps = found["steps"]
    x = [one["global_step"] for one in steps]
    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    above.axhline(0, color="grey", linewidth=0.6)
    _draw_orders(above, x, steps, ("_", "x"))
    seen = [one["measured"] + side * one["error"] for one in steps for side in (-1, 1)] + [
        one["first"] for one in steps
    ]
    # A second order far off would leave none for the rest.
    room = 0.1 * (max(seen) - min(seen)) or 1.0
    above.set(
        ylim=(min(0.0, *seen) - room, max(0.0, *seen) + room),
        ylabel="change of entropy\nby the step, nats",
        title="what each step does to the entropy,\nmeasured on answers that it was not made of",
    )
    # Outside: within, it would cover error bars.
    above.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    entropies = [(one["entropy"]["value"], one["entropy"]["error"]) for one in steps]
    below.errorbar(
        x, [value for value, _ in entropies], [error for _, error in entropies], fmt="o-"
    )
    below.xaxis.get_major_locator().set_params(integer=True)
    below.set(xlabel="optimizer step", ylabel="entropy of an\nanswer, nats", ylim=(0, None))
    return figure


def draw_split(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the sources of δH₁ of each step: on the entropy batch, by this step's and earlier
    gradients, against the measurement; on the step's own answers, by pairs, against the
    U-statistic; and by the tokens of high covariance. rows: as `split_row` makes them.
    """
    figure = Figure(figsize=(9, 10), layout="constrained")
    above, below, last = figure.subplots(3, 1, sharex=True)
    fresh = [
        {
            "this step, same prompt": row["same_prompt"],
            "this step, other prompts": row["other_prompts"],
            **{_age_text(age): age["value"] for age in row["ages"][:_AGES]},
            "older steps": sum(age["value"] for age in row["ages"][_AGES:]),
            "weight decay": row["decay"],
        }
        for row in rows
    ]
    x = list(range(len(rows)))
    _stack(above, fresh)
    errors = [_plotted(row["error"]) for row in rows]
    above.errorbar(
        x,
        [_plotted(row["measured"]) for row in rows],
        errors,
        fmt="ko",
        capsize=3,
        label="measured",
    )
    above.plot(x, [row["first"] for row in rows], "D", color="white", mec="black", label="sum")
    where = {row["batch"] for row in rows}
    above.set(ylabel="δH₁, nats", title=f"effect on {' and '.join(sorted(where))}, by source")
    own = [
        {
            "an answer on itself": row["one_batch"]["own"],
            "same prompt": row["one_batch"]["same_prompt"],
            "other prompts": row["one_batch"]["other_prompts"],
        }
        for row in rows
    ]
    _stack(below, own)
    below.plot(x, [one["one_batch"]["naive"] for one in rows], "kx", label="naive: the sum")
    unbiased = [_plotted(one["one_batch"]["unbiased"]) for one in rows]
    below.plot(x, unbiased, "k_", markersize=14, label="U-statistic")
    below.set(ylabel="δH₁, nats", title="effect of this step's gradient on its own answers")
    _draw_tokens_parts(last, [row["tokens"] for row in rows])
    last.set_xticks(x, [str(row["global_step"]) for row in rows])
    last.set(xlabel="optimizer step")
    for axes in (above, below, last):
        axes.axhline(0, color="grey", linewidth=0.6)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    return figure


def _draw_tokens_parts(axes: Axes, rows: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Draw bars next to each other: of all tokens, and of each kind with high covariance."""
    names = [one["name"] for one in rows[0]]
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        values = [parts[number]["effect"] for parts in rows]
        counts = [parts[number]["tokens"] for parts in rows]
        places = [place + (number + 0.5) * width - 0.4 for place in range(len(rows))]
        label = f"{name}: {sum(counts):,}"
        axes.bar(places, values, width, label=label, color=f"C{number}")
    axes.set(
        ylabel="δH₁, nats",
        title="effect of this step's gradient, by its tokens of high covariance of log π and A",
    )


_LAST = ("older steps", "weight decay")
"""Parts at the end of a bar."""
_AGES = 3
"""Ages with a colour of their own."""


def _age_text(age: Mapping[str, Any]) -> str:
    if age["oldest"] is None:
        return "older steps"
    return f"{age_text(age)} before"


def age_text(age: Mapping[str, Any]) -> str:
    """Describe an Age, in steps ago: "1", "2 to 3", "4 and more"."""
    if age["oldest"] is None:
        return f"{age['newest']} and more"
    if age["newest"] == age["oldest"]:
        return str(age["newest"])
    return f"{age['newest']} to {age['oldest']}"


def _stack(axes: Axes, bars: Sequence[Mapping[str, float]]) -> None:
    """Draw bars of parts, those below 0 downwards."""
    names = list(dict.fromkeys(name for bar in bars for name in bar))
    names.sort(key=lambda name: name in _LAST)
    ends = {True: [0.0] * len(bars), False: [0.0] * len(bars)}
    for number, name in enumerate(names):
        values = [bar.get(name, 0.0) for bar in bars]
        if not any(values):
            continue
        bottoms = []
        for place, value in enumerate(values):
            bottoms.append(ends[value > 0][place])
            ends[value > 0][place] += value
        colour = f"C{number}"
        axes.bar(range(len(bars)), values, 0.6, bottom=bottoms, label=name, color=colour)


def draw_logprobs(
    predicted: Sequence[float], measured: Sequence[float], fit: Mapping[str, Any]
) -> Figure:
    """Draw the measured change of each answer's log-probability over the predicted one."""
    figure = Figure(figsize=(6, 5.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(predicted, measured, ".", alpha=0.5)
    ends = [min(*predicted, *measured, 0.0), max(*predicted, *measured, 0.0)]
    axes.plot(ends, ends, color="grey", linewidth=0.8, label="equal")
    axes.set(
        xlabel="predicted: η Σ g·v, nats",
        ylabel="measured after the step, nats",
        title=f"δ log π of {fit['count']} answers: {fit_text(fit)}",
    )
    axes.legend()
    return figure


def fit_text(fit: Mapping[str, Any]) -> str:
    """Describe a Fit."""
    text = f"sign right in {fit['sign']:.0%}, slope {fit['slope']:.3g}"
    if math.isfinite(fit["r_squared"]):  # a single change has no variance to explain
        text += f", R² {fit['r_squared']:.3g}"
    return text


def draw_kernel(cosines: Tensor, answers: int, tasks: Sequence[str]) -> Figure:
    """Draw the cosines of all pairs of gradients. answers: of the entropy batch, the first rows.
    tasks: of the update's answers, the others; lines divide their prompts.
    """
    figure = Figure(figsize=(7.5, 6.5), layout="constrained")
    axes = figure.subplots()
    picture = axes.imshow(cosines.numpy(), cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
    borders = [place for place in range(1, len(tasks)) if tasks[place] != tasks[place - 1]]
    for place in (0, *borders):
        if place:
            width = 0.3
        else:
            width = 1.2
        axes.axhline(answers + place - 0.5, linewidth=width, color="black")
        axes.axvline(answers + place - 0.5, linewidth=width, color="black")
    axes.set(
        title=f"cosines of ∇log π: {answers} answers of the entropy batch,\nthen {len(tasks)} of "
        "the update by prompt",
        xlabel="answer j",
        ylabel="answer i",
    )
    figure.colorbar(picture, ax=axes)
    return figure


def draw_precision(found: PrecisionSweep) -> Figure:
    """Draw the relative difference of measurement and first order over η, and below it the range
    of each dtype between both ends.
    """
    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    for number, one in enumerate(found.sweeps):
        color = f"C{number}"
        x = [point.eta / found.lr for point in one.points]
        above.plot(x, [point.off for point in one.points], "o-", color=color, label=one.dtype)
        if one.precision_ends is None or one.linearity_ends is None:
            continue
        ends = (one.precision_ends / found.lr, one.linearity_ends / found.lr)
        below.plot(ends, [number, number], color=color)
        marks = ("|" if one.precision_is_seen else "<", "|" if one.linearity_is_seen else ">")
        for end, mark in zip(ends, marks, strict=True):
            below.plot(end, number, mark, color=color, markersize=9)
    above.axhline(TOLERANCE, color="grey", linewidth=0.6, linestyle="--")
    above.set(
        xscale="log",
        yscale="log",
        ylabel="|measured δH − η⟨∇H, v⟩| / |η⟨∇H, v⟩|",
        title="where precision ends (left) and linearity ends (right)",
    )
    above.legend()
    below.set_yticks(range(len(found.sweeps)), [one.dtype for one in found.sweeps])
    below.set(
        ylim=(len(found.sweeps) - 0.5, -0.5),
        xlabel="η in learning rates (arrows: the sweep ends before the range)",
    )
    return figure
