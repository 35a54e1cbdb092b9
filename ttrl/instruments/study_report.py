"""Report the findings of a study (`ttrl.instruments.study`), as text for a terminal, as study.json
and as pictures (`ttrl.instruments.study_pictures`).
"""

import itertools
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ttrl.facts import dumped, read_facts
from ttrl.instruments.precision import Precision, precision_text
from ttrl.instruments.precision_sweep import PrecisionSweep, sweep_text
from ttrl.instruments.study_pictures import (
    age_text,
    draw_kernel,
    draw_logprobs,
    draw_position,
    draw_precision,
    draw_response,
    draw_split,
    draw_tokens,
    fit_text,
    save_figures,
)
from ttrl.instruments.tokens import outliers_text, parts_text
from ttrl.system.files import atomic_file, write_json

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
        f"{found['sequences']} {batch_text(found['entropy_batch'])}",
        _where_entropy_is(entropy["by_position"]),
        f"⟨∇H, v⟩ = {found['slope']:.4g}: "
        + ", ".join(f"{name} {value:.4g}" for name, value in parts.items()),
        f"vᵀ∇²H v = {found['curvature']:.4g}",
        *_split_lines(split_row(found)),
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
        f"The first order is within 10% of the measured change {within}.",
        "",
        *outliers_text(found["covariance"]),
        *textwrap.wrap(parts_text(split_row(found)["tokens"]), _WIDTH, break_on_hyphens=False),
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
    if "kernel" in found:
        lines += _kernel_lines(found["kernel"])
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


def batch_text(batch: Mapping[str, Any]) -> str:
    """Describe the entropy batch: "answers to the run's held-out tasks, …"."""
    share = f"{batch['effective_size']:.0%} effective"
    if batch["tasks"] is None:
        return f"answers of the pack, {share}"
    text = f"answers to {batch['tasks']}, sampled before iteration {batch['iteration']}, {share}"
    if batch.get("mismatch") is not None:
        text += f"; mean |trainer − server| {batch['mismatch']:.2g} nats per token"
    return text


def split_row(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sources of δH₁ at the run's own learning rate, in nats, with the measurement (None
    if the sweep has none there).
    """
    lr = found["lr"]
    own: Mapping[str, Any] = next(
        (one for one in found["sweep"] if math.isclose(one["eta"], lr)), {}
    )
    counts = {"prompts": found["one_batch"]["prompts"]}
    return {
        "global_step": found["global_step"],
        "first": lr * found["slope"],
        "measured": own.get("measured"),
        "error": own.get("error"),
        "same_prompt": lr * found["current"]["same_prompt"],
        "other_prompts": lr * found["current"]["other_prompts"],
        "earlier": lr * found["parts"]["earlier"],
        "decay": lr * found["parts"]["decay"],
        "ages": [one | {"value": lr * one["value"]} for one in found["ages"]],
        "one_batch": {name: lr * value for name, value in found["one_batch"].items()} | counts,
        "tokens": [one | {"effect": lr * one["slope"]} for one in found["covariance"]["parts"]],
        "batch": found["entropy_batch"]["tasks"] or "other answers of the pack",
    }


def _split_lines(row: Mapping[str, Any]) -> list[str]:
    """Describe the sources of δH₁."""
    current = row["same_prompt"] + row["other_prompts"]
    one = row["one_batch"]
    lines = [
        f"δH₁ = {row['first']:.4g} at the learning rate; this step's gradient gives "
        f"{current:.4g}: {row['same_prompt']:.4g} from answers to the same prompts, "
        f"{row['other_prompts']:.4g} from others",
    ]
    if row["ages"]:
        ages = ", ".join(
            f"{age_text(age)} {age['value']:.3g}" for age in row["ages"][:_AGES_IN_TEXT]
        )
        lines.append(f"Earlier gradients give {row['earlier']:.4g}, by steps ago: {ages}")
    lines.append(
        f"On its own {one['prompts']} prompts: {one['naive']:.4g} = {one['own']:.4g} of answers on "
        f"themselves + {one['same_prompt']:.4g} on others to the same prompt + "
        f"{one['other_prompts']:.4g} on other prompts"
    )
    if math.isfinite(one["unbiased"]):
        lines.append(
            f"The U-statistic of these is {one['unbiased']:.4g}: measuring on its own answers is "
            f"off by {one['bias']:+.4g}"
        )
    return lines


_AGES_IN_TEXT = 6


def _kernel_lines(kernel: Mapping[str, Any]) -> list[str]:
    """Describe the Fisher kernel."""
    if kernel["sums"] is None:
        how = "exact"
    else:
        how = f"projected to {kernel['sums']:,} numbers"
    lines = [
        f"Fisher kernel of {kernel['answers']} answers of the entropy batch and "
        f"{kernel['update_answers']} of the update, {how}",
        f"δ log π of these, measured against η Σ g·v: {fit_text(kernel['fit'])}",
    ]
    for name, kind in kernel["kinds"].items():
        parts = [f"{name}: K·A against the measurement: {fit_text(kind['fit'])}"]
        for label, key in (
            ("same prompt", "same_prompt_cosine"),
            ("other prompts", "other_prompts_cosine"),
            ("entropy batch", "entropy_cosine"),
        ):
            if kind[key] is not None:
                parts.append(f"mean cosine, {label}: {kind[key]:.3f}")
        if kind["projection_error"] is not None:
            parts.append(f"projection error {kind['projection_error']:.2f} of its bound")
        lines.append("; ".join(parts))
    return lines


def headline(found: Mapping[str, Any]) -> str:
    """Describe the measurement and its meaning."""
    entropy = found["entropy"]["rao_blackwell"]["value"]
    text = (
        f"The effect of optimizer step {found['global_step']} on the entropy of whole answers: "
        f"{entropy:.4g} nats before the step; at 0, the policy always gives the same answer. "
    )
    own = next((one for one in found["sweep"] if math.isclose(one["eta"], found["lr"])), None)
    if own is None:
        return text + "The sweep has no step of the run's own learning rate (--factors 1)."
    kind = change_text(own["measured"], own["error"])
    if found.get("entropy_batch", {}).get("tasks") is None:
        made_of = "With half of the step's answers, it"
    else:
        made_of = "It"
    text += f"{made_of} {kind}: {own['measured']:+.3g} ± {own['error']:.2g}"
    if entropy:
        text += f" ({100 * own['measured'] / entropy:+.2g}%)"
    text += (
        f", measured on other answers. {CHANGES[kind]} The gradient predicts {own['first']:+.3g}"
    )
    regime = found["linear_regime"]
    if regime and regime[1] >= found["lr"] * (1 - 1e-9):
        return (
            text + f", and is right within 10% up to {regime[1] / found['lr']:.3g} learning rates."
        )
    return (
        f"{text}, off by more than 10%: for the first order, the step is too large or its effect "
        "too small."
    )


def change_text(measured: float, error: float) -> str:
    """Describe the direction of the entropy, if it is clear: beyond two standard errors."""
    if abs(measured) <= 2 * error:
        return "did not change beyond the noise"
    if measured < 0:
        return "fell"
    return "rose"


CHANGES = {
    "fell": "Answers become more alike; at 0, all are the same and nothing is left to learn.",
    "rose": "Answers become more varied.",
    "did not change beyond the noise": "More answers (--entropy-samples) would show less.",
}
"""Their meanings."""


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
    told = {name: value for name, value in found.items() if name != "matrices"}
    path = folder / "study.json"
    write_json(path, known(told))
    figures = {
        "study.png": draw_response(found),
        "position.png": draw_position(found["entropy"]["by_position"]),
        "tokens.png": draw_tokens(found),
    }
    if "precision_sweep" in found:
        sweep = read_facts(PrecisionSweep, found["precision_sweep"])
        figures["precision.png"] = draw_precision(sweep)
    figures["split.png"] = draw_split([split_row(found)])
    if "kernel" not in found:
        return [path, *save_figures(figures, folder)]
    kernel = found["kernel"]
    matrices: dict[str, Tensor] = found["matrices"]
    with atomic_file(folder / "kernel.safetensors") as temporary:
        save_file(matrices, temporary)
    cosines = matrices[f"{list(kernel['kinds'])[-1]}.cosines"]
    tasks = found["current"]["tasks"]
    figures["kernel.png"] = draw_kernel(cosines, kernel["answers"], tasks)
    figures["logprobs.png"] = draw_logprobs(kernel["predicted"], kernel["measured"], kernel["fit"])
    return [path, *save_figures(figures, folder), folder / "kernel.safetensors"]


def known(value: Any) -> Any:
    """Return a value for JSON: errors of a single group, without a number, become null."""
    return json.loads(dumped(value))
