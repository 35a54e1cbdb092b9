"""The report's sentences and figures: what happened, the tiles, the table, and columns that are
made of several metrics.

Every sentence is computed from the metrics and says no more than they show: a rise that lies within
the noise is called that. What stands out is said by `ttrl.monitoring.findings`.
"""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ttrl.monitoring.findings import findings
from ttrl.monitoring.summary import overfits, summary_lines
from ttrl.run_folder.reader import (
    PHASES,
    RunData,
    held_out_metric,
    held_out_sampling,
    interval,
    number,
    phase_columns,
    read_mapping,
    read_run,
    total_seconds,
)
from ttrl.text import compact, duration, flat, percent, si_spaced


def _ends(run: RunData, path: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the first and the last row that have a value; None when there are not two."""
    rows = [row for row in run.rows if number(row, path) is not None]
    if len(rows) > 1:
        return (rows[0], rows[-1])
    return None


def _value(value: float, is_share: bool) -> str:
    if is_share:
        return percent(value)
    return compact(value)


def _verb(first: dict[str, Any], last: dict[str, Any], path: str) -> str:
    """Say how the value moved, judged against the noise of the counts where they are known."""
    start = number(first, path) or 0.0
    end = number(last, path) or 0.0
    before = interval(first, path)
    after = interval(last, path)
    if before is not None and after is not None:
        noise = math.hypot(before[1] - before[0], after[1] - after[0]) / 2
        if abs(end - start) <= noise:
            return "did not change beyond the noise: it went"
    if end == start:
        return "stayed the same, going"
    if end > start:
        return "rose"
    return "fell"


def summary(run: RunData) -> str:
    """Say in one or two sentences what changed: from what to what, in how many iterations, in how
    much time.
    """
    count = len(run.trained)
    if not run.rows:
        return "No iteration is finished yet."
    if not count:
        return "Only the starting model has been measured; no iteration is finished yet."
    within = f"{count} iteration{'s' if count != 1 else ''}"
    seconds = total_seconds(run)
    if seconds:
        time = f", {duration(seconds)} in all"
    else:
        time = ""
    metric = held_out_metric(run)
    is_share = False
    how = None
    if metric is not None and (ends := _ends(run, metric.path)) is not None:
        path = metric.path
        name = _whose(run, metric.label)
        is_share = metric.is_share
        how = held_out_sampling(run)
    elif (ends := _ends(run, "reward")) is not None:
        path = "reward"
        name = "The training reward"
    else:
        return f"{within}{time}; too few measurements to compare start and end."
    first, last = ends
    start = number(first, path) or 0.0
    end = number(last, path) or 0.0
    span = interval(last, path)
    if span:
        more = [f"95% interval {_value(span[0], is_share)} to {_value(span[1], is_share)}"]
    else:
        more = []
    more += [how] if how else []
    bounds = f" ({'; '.join(more)})" if more else ""
    return (
        f"{name} {_verb(first, last, path)} from {_value(start, is_share)} to "
        f"{_value(end, is_share)}{bounds} in {within}{time}."
        + _best(run, path, end, is_share)
        + (_other_shares(run, ends) if path == "validation_reward" else "")
    )


def _other_shares(run: RunData, ends: tuple[dict[str, Any], dict[str, Any]]) -> str:
    """Say how other held-out metrics went where the headline is the reward, which may rise while
    nothing is solved."""
    found = []
    for path in sorted(
        {name for row in ends for name in flat(row) if name.startswith("validation.")}
    ):
        values = [value for value in run.column(path) if value is not None]
        before, after = (number(row, path) for row in ends)
        if before is not None and after is not None and all(0 <= value <= 1 for value in values):
            found.append(f"{path.removeprefix('validation.')} {percent(before)} → {percent(after)}")
    if found:
        return f" Held out, too: {', '.join(found[:_OTHERS])}."
    return ""


def _whose(run: RunData, label: str) -> str:
    if is_overfit(run):
        return f"{label[:1].upper()}{label[1:]} on the trained tasks"
    return f"Held-out {label}"


def _best(run: RunData, path: str, end: float, is_share: bool) -> str:
    """Name the best iteration when it was clearly better than the last one."""
    known = [
        (value, iteration)
        for value, iteration in zip(run.column(path), run.iterations, strict=True)
        if value is not None
    ]
    best, iteration = max(known, key=lambda pair: pair[0])
    scale = max(abs(best), abs(end), 1e-12)
    if best - end <= 0.02 * scale:
        return ""
    return f" The best was {_value(best, is_share)}, in iteration {iteration}."


def tiles(run: RunData) -> list[tuple[str, str]]:
    """Return (name, figure) for the top of the page."""
    found: list[tuple[str, str]] = []
    metric = held_out_metric(run)
    if metric is not None and (ends := _ends(run, metric.path)) is not None:
        start, end = (_value(number(row, metric.path) or 0.0, metric.is_share) for row in ends)
        found.append((_whose(run, metric.label), f"{start} → {end}"))
    if run.trained:
        found.append(("Iterations", str(len(run.trained))))
    seconds = total_seconds(run)
    if seconds:
        found.append(("Time", duration(seconds)))
    totals = sorted(
        value for row in run.trained if (value := number(row, "seconds.total")) is not None
    )
    if totals:
        found.append(("Typical iteration", duration(totals[len(totals) // 2])))
    tokens = sum(number(row, "completion_tokens") or 0.0 for row in run.rows)
    if tokens:
        found.append(
            ("Tokens sampled", compact(tokens) if tokens < 1e6 else f"{tokens / 1e6:.3g} million")
        )
    spent = max(
        (value for value in run.column("flops.cumulated") if value is not None), default=0.0
    )
    if spent:
        found.append(("FLOPs", si_spaced(spent)))
    return found


def ratios(run: RunData, part: str, whole: str) -> list[float | None]:
    """Return one metric over another, per row; None where one is missing or the other is zero."""
    pairs = zip(run.column(part), run.column(whole), strict=True)
    return [a / b if a is not None and b else None for a, b in pairs]


def failed_shares(run: RunData) -> list[float | None]:
    """Return failed samples as a share of all, per row; None throughout where none ever failed."""
    if any(run.column("failed")):
        return ratios(run, "failed", "samples")
    return [None] * len(run.rows)


def dead_shares(run: RunData) -> list[float | None]:
    """Return the share of each iteration in which nothing was sampled and nothing trained; None
    where it was not measured.
    """
    return [
        None if share is None else max(0.0, min(1.0, share))
        for share in ratios(run, "dead_seconds", "seconds.total")
    ]


def utilisation(run: RunData) -> list[float | None]:
    """Return FLOPs of training over what the machine could have computed in the whole iteration,
    per row.
    """
    # Older rows.
    exact = ratios(run, "train.seconds", "seconds.total")
    rough = ratios(run, "seconds.train", "seconds.total")
    parts = [one if one is not None else other for one, other in zip(exact, rough, strict=True)]
    shares = zip(run.column("train.peak_share"), parts, strict=True)
    return [
        min(1.0, share * part) if share is not None and part is not None else None
        for share, part in shares
    ]


def allocation(run: RunData) -> str:
    """Say what the newest measurement of the gradient's noise advises; "" where there is none."""
    for row in reversed(run.trained):
        prompts, samples, gain = (
            number(row, f"gradient_noise.{name}")
            for name in ("best_prompts", "best_samples", "gain")
        )
        if prompts is not None and samples is not None and gain is not None:
            if gain < 1.1:
                return (
                    "The batch is divided well: no other number of samples would lower its noise "
                    "by a tenth for the same cost."
                )
            return (
                f"For the cost of a step in tokens, {prompts:.0f} prompts with {samples:.0f} "
                "samples each (of those that have a "
                f"signal) would have 1/{gain:.1f} of its noise."
            )
    return ""


def table_columns(run: RunData, shown: Sequence[int]) -> list[tuple[str, list[str]]]:
    """Return (heading, cells of the rows whose places are in `shown`) for the main figures that the
    run recorded.
    """
    wanted = [
        ("reward", "reward"),
        ("held-out reward", "validation_reward"),
        ("held-out exact", "validation.exact"),
        ("held-out samples", "validation_samples"),
        ("groups", "groups.total"),
        ("groups kept", "groups.kept"),
        ("samples", "samples"),
        ("failed", "failed"),
        ("prompt tokens", "prompt_tokens"),
        ("completion tokens", "completion_tokens"),
        ("tokens/s", "tokens_per_second"),
        ("loss", "train.loss"),
        ("KL", "train.kl"),
        ("entropy", "train.entropy"),
        ("gradient norm", "train.grad_norm"),
        ("noise scale", "gradient_noise.scale"),
        ("clipped above", "train.clip_fraction_high"),
        ("clipped below", "train.clip_fraction_low"),
        ("learning rate", "train.lr"),
        ("steps", "train.steps"),
        ("|Δ logprob| mean", "sampler_trainer.mean"),
        ("|Δ logprob| p99.9", "sampler_trainer.p999"),
        ("ESS", "sampler_trainer.ess"),
        ("canary |Δ|", "sync.canary_max_difference"),
        ("dead, s", "dead_seconds"),
        ("CPU, sampling", "machine.sample.cpu"),
        ("CPU, training", "machine.train.cpu"),
        ("GPU, sampling", "machine.sample.gpu_busy"),
        ("GPU, training", "machine.train.gpu_busy"),
        ("watts, sampling", "machine.sample.watts"),
        ("watts, training", "machine.train.watts"),
    ]
    columns = [(name, run.column(path)) for name, path in wanted]
    phases = phase_columns(run)
    columns += [(f"{phase}, s", phases[phase]) for phase in (*PHASES, "other")]
    columns.append(("total, s", run.column("seconds.total")))
    return [
        (name, ["–" if (value := values[place]) is None else compact(value) for place in shown])
        for name, values in columns
        if any(value is not None for value in values)
    ]


_OTHERS = 3
"""Metrics that the headline names besides the reward."""
_MARKS = {"stop": "!!", "warn": " !", "note": " ·"}


def course_lines(run: RunData) -> list[str]:
    """Return what the whole run came to: see `ttrl.monitoring.summary`."""
    return summary_lines(run.rows, run.config, overfits=is_overfit(run))


def is_overfit(run: RunData) -> bool:
    """Tell whether a run is validated on the tasks that it is trained on."""
    return overfits(read_mapping(run.folder / "tasks.json"))


def report_text(run_folder: Path, width: int = 100) -> str:
    """Return the summary, the main figures and what stands out, wrapped to `width` columns. Raises
    RunFolderError as `read_run`."""
    run = read_run(Path(run_folder))
    width = max(40, min(width, 120))
    lines = textwrap.wrap(summary(run), width)
    figures = tiles(run)
    widest = max((len(name) for name, _ in figures), default=0)
    lines += ["", *(f"  {name:<{widest}}  {value}" for name, value in figures)] if figures else []
    for line in course_lines(run):
        lines += ["", *textwrap.wrap(line, width)]
    found = findings(run.rows, run.config)
    if found:
        lines += ["", "What stands out:"]
        for finding in found:
            lines += textwrap.wrap(
                finding.title,
                width,
                initial_indent=f"{_MARKS[finding.severity]} ",
                subsequent_indent="   ",
            )
            lines += textwrap.wrap(
                finding.advice, width, initial_indent="   ", subsequent_indent="   "
            )
    elif run.trained:
        lines += ["", "Nothing stands out."]
    return "\n".join(lines)
