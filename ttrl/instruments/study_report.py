"""Report the findings of a study (`ttrl.instruments.study`), as text for a terminal, as study.json
and as pictures.
"""

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ttrl.facts import read_facts
from ttrl.instruments.precision import Precision, precision_text
from ttrl.instruments.precision_sweep import PrecisionSweep, draw_precision, sweep_text
from ttrl.instruments.tokens import outliers_text
from ttrl.system.files import write_json

_WIDTH = 100


def study_text(found: Mapping[str, Any]) -> str:
    """Describe the findings, for a terminal."""
    step = found["step"]
    entropy = found["entropy"]
    parts = found["parts"]
    regime = found["linear_regime"]
    lines = [
        *textwrap.wrap(headline(found), _WIDTH),
        "",
        *textwrap.wrap(how_computed(found), _WIDTH),
        f"Step {found['global_step']}, lr {found['lr']:.3g}: the vector by hand against the "
        "true step: cosine "
        f"{step['cosine']:.7f}, norm {step['norm_ratio']:.6f} of its {step['norm']:.4g}",
        f"Entropy of an answer: {entropy['rao_blackwell']['value']:.4f} ± "
        f"{entropy['rao_blackwell']['error']:.4f} nats "
        f"(plain: {entropy['plain']['value']:.4f} ± {entropy['plain']['error']:.4f}), "
        f"{found['sequences']} answers",
        _where_entropy_is(entropy["by_position"]),
        f"⟨∇H, v⟩ = {found['slope']:.4g}: "
        + ", ".join(f"{name} {value:.4g}" for name, value in parts.items()),
        f"vᵀ∇²H v = {found['curvature']:.4g}",
        "",
        f"{'η / lr':>8} {'measured δH':>24} {'first order':>12} {'with second':>12} {'ESS':>6}",
    ]
    for one in sorted(found["sweep"], key=lambda one: one["eta"]):
        measured = f"{one['measured']:.4g} ± {one['error']:.2g}"
        both = one["first"] + one["second"]
        ess = one["effective_size"]
        lines.append(
            f"{one['eta'] / found['lr']:>8.3g} {measured:>24} {one['first']:>12.4g} "
            f"{both:>12.4g} {ess:>6.2f}"
        )
    within = "nowhere in this sweep"
    if regime:
        within = (
            f"from {regime[0] / found['lr']:.3g} to {regime[1] / found['lr']:.3g} learning rates"
        )
    lines += [
        "",
        f"The first order is within 10% of what was measured {within}.",
        "",
        *outliers_text(found["covariance"]),
        "",
    ]
    trainer = f"Trainer in {found['run_dtype']}"
    for name, part in found["mismatch"].items():
        if "share" in part and name != "whole":
            share = f", {part['share']:.0%} of its variance"
        else:
            share = ""
        sizes = f"mean |Δ| {part['mean']:.2g}, rms {part['rms']:.2g} nats"
        lines.append(f"{trainer} − sampler, {name}: {sizes}{share}")
    kernel = found.get("kernel")
    if kernel:
        for kind in ("sgd", "adamw", "rmsprop"):
            if kind in kernel:
                one = kernel[kind]
                count = kernel["tokens"]
                lines.append(
                    f"Fisher kernel of {count} tokens ({kind}): δH/η {one['whole']:.4g} = "
                    f"{one['own']:.4g} from tokens "
                    f"themselves + {one['others']:.4g} from others"
                )
    sweep = found.get("precision_sweep")
    if sweep:
        lines += ["", sweep_text(read_facts(PrecisionSweep, sweep))]
    rounding = found["step"].get("moment_rounding")
    if rounding:
        sizes = ", ".join(f"{name} {share:.2%}" for name, share in rounding.items())
        lines.append(
            f"The run's optimizer then rounds its moments to 8 bits: {sizes} of their size"
        )
    return "\n".join(lines)


def headline(found: Mapping[str, Any]) -> str:
    """Describe the measurement and its meaning."""
    entropy = found["entropy"]["rao_blackwell"]["value"]
    text = (
        f"What optimizer step {found['global_step']} did to the entropy of whole answers: how far "
        f"the policy is from always answering the same, {entropy:.4g} nats before the step. "
    )
    own = next((one for one in found["sweep"] if math.isclose(one["eta"], found["lr"])), None)
    if own is None:
        return text + "The sweep has no step of the run's own learning rate (--factors 1)."
    kind = change_text(own["measured"], own["error"])
    text += (
        f"With half of the step's answers, it {kind}: {own['measured']:+.3g} ± {own['error']:.2g}"
    )
    if entropy:
        text += f" ({100 * own['measured'] / entropy:+.2g}%)"
    text += (
        f", measured on other answers. {_MEANINGS[kind]} The gradient predicts {own['first']:+.3g}"
    )
    regime = found["linear_regime"]
    if regime and regime[1] >= found["lr"] * (1 - 1e-9):
        return (
            text + f", and is right within 10% up to {regime[1] / found['lr']:.3g} learning rates."
        )
    return (
        f"{text}, which is off by more than 10%: such a step is too large, or its effect too "
        "small, for the first order."
    )


def change_text(measured: float, error: float) -> str:
    """Describe the direction of the entropy, if it is clear: beyond two standard errors."""
    if abs(measured) <= 2 * error:
        return CHANGES[2]
    if measured < 0:
        return CHANGES[0]
    return CHANGES[1]


CHANGES = ("fell", "rose", "did not change beyond the noise")
_MEANINGS = {
    "fell": "Answers become more alike; at 0, all are the same and nothing is left to learn from.",
    "rose": "Answers become more varied.",
    "did not change beyond the noise": "More answers (--sequences) would tell a smaller change.",
}


def how_computed(found: Mapping[str, Any]) -> str:
    """Describe a study's dtype and device."""
    device = {"cpu": "the CPU", "cuda": "a GPU"}[found["device"]]
    text = f"Computed in {found['dtype']} on {device}; the run trained in {found['run_dtype']}."
    if "precision" in found:
        return f"{text} {precision_text(read_facts(Precision, found['precision']))}"
    return text


def _where_entropy_is(by_position: Sequence[float]) -> str:
    reached = list(itertools.accumulate(by_position))
    half = next((place for place, sofar in enumerate(reached, 1) if 2 * sofar >= reached[-1]), 0)
    return f"Half of it is in the first {half} of {len(by_position)} tokens (position.png)"


def write_study(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write study.json and the pictures into a folder. Raises StorageError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "study.json"
    picture = folder / "study.png"
    write_json(path, _known(found))
    draw_response(found, picture)
    pictures = [picture, draw_position(found["entropy"]["by_position"], folder / "position.png")]
    pictures.append(draw_tokens(found, folder / "tokens.png"))
    if "precision_sweep" in found:
        sweep = read_facts(PrecisionSweep, found["precision_sweep"])
        pictures.append(draw_precision(sweep, folder / "precision.png"))
    return [
        path,
        *pictures,
        *([draw_kernel(found["kernel"], folder / "kernel.png")] if "kernel" in found else []),
    ]


def _known(value: Any) -> Any:
    """Return a value for JSON: errors of a single group, without a number, become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _known(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_known(item) for item in value]
    return value


def draw_response(found: Mapping[str, Any], path: Path) -> None:
    """Draw the measurements and the orders' predictions, over η in learning rates."""
    sweep = sorted(found["sweep"], key=lambda one: one["eta"])
    x = [one["eta"] / found["lr"] for one in sweep]
    figure = Figure(figsize=(7, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.errorbar(
        x,
        [one["measured"] for one in sweep],
        [one["error"] for one in sweep],
        fmt="o",
        label="measured",
    )
    above.plot(x, [one["first"] for one in sweep], label="first order")
    above.plot(x, [one["first"] + one["second"] for one in sweep], "--", label="with second order")
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
    figure.savefig(path, dpi=150)


def draw_position(by_position: Sequence[float], path: Path) -> Path:
    """Draw the entropy by position in the answer. Returns the path."""
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
    figure.savefig(path, dpi=150)
    return path


def draw_kernel(found: Mapping[str, Any], path: Path) -> Path:
    """Draw the kernel's cosines: of tokens, with lines between answers, and of answers, with lines
    between prompts. Returns the path."""
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    both = figure.subplots(1, 2)
    answers = found["sequences"]
    for axes, cosines, owners, what in (
        (both[0], found["cosines"], found["sequence"], "token"),
        (both[1], answers["cosines"], answers["task"], "answer"),
    ):
        picture = axes.imshow(cosines, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
        for place in (
            place for place in range(1, len(owners)) if owners[place] != owners[place - 1]
        ):
            axes.axhline(place - 0.5, linewidth=0.4, color="black")
            axes.axvline(place - 0.5, linewidth=0.4, color="black")
        axes.set(
            title=f"cosines of the gradients of {what}s", xlabel=f"{what} t′", ylabel=f"{what} t"
        )
    figure.colorbar(picture, ax=both)
    figure.savefig(path, dpi=150)
    return path


def draw_tokens(found: Mapping[str, Any], path: Path) -> Path:
    """Draw the tokens with the largest effect on the entropy, the differences of trainer and
    sampler, and the parts of the kernel's δH: effects of tokens on themselves and on each other.
    Returns the path.
    """
    kernel: Mapping[str, Any] = found.get("kernel", {})
    kinds = [kind for kind in ("sgd", "adamw", "rmsprop") if kind in kernel]
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    left, *others = figure.subplots(
        1, 3 if kinds else 2, width_ratios=(2, 1, 1)[: 3 if kinds else 2]
    )
    tokens = found["covariance"]["tokens"][::-1]
    left.barh(range(len(tokens)), [one["covariance"] for one in tokens])
    texts = [f"{one['before'][-24:]!a} → {one['text']!a}" for one in tokens]
    # A model's text may look like mathematics.
    left.set_yticks(range(len(tokens)), texts, fontsize=7, parse_math=False)
    left.set(title=f"(log π − mean)·(A − mean); the mean is {found['covariance']['mean']:.3g}")
    names = list(found["mismatch"])
    others[0].bar(names, [found["mismatch"][name]["rms"] for name in names])
    trainer = f"trainer in {found['run_dtype']}"
    others[0].set(title=f"{trainer} − sampler", ylabel="rms of log π, nats")
    if kinds:
        for part, shift in (("own", -0.2), ("others", 0.2)):
            places = [place + shift for place in range(len(kinds))]
            others[1].bar(
                places,
                [kernel[kind][part] for kind in kinds],
                0.4,
                label={"own": "t = t′", "others": "t ≠ t′"}[part],
            )
        others[1].set_xticks(range(len(kinds)), kinds)
        others[1].set(title="δH/η, Fisher kernel")
        others[1].legend()
    figure.savefig(path, dpi=150)
    return path
