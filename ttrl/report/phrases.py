"""Write the report's sentences and figures: the summary, the tiles, the table, and columns combined
from several metrics.

Every sentence is computed from the metrics and claims no more than they show: a rise within the
noise is called noise. `ttrl.monitoring.findings` words the findings.
"""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

from ttrl.facts import MetricsRow, Pick, held_out, metric, number, numbers, points, ratio
from ttrl.monitoring.finding import MARKS
from ttrl.monitoring.findings import findings
from ttrl.monitoring.summary import overfits, summary_lines, validated
from ttrl.run_folder.reader import (
    PHASES,
    RunData,
    held_out_metric,
    held_out_sampling,
    interval,
    phase_columns,
    read_mapping,
    read_run,
    total_seconds,
)
from ttrl.text import compact, duration, percent, present, si_spaced


def _ends(run: RunData, pick: Pick) -> tuple[MetricsRow, MetricsRow] | None:
    """Return the first and the last row with a value; None with fewer than two."""
    rows = [row for row in run.rows if number(pick(row)) is not None]
    if len(rows) > 1:
        return (rows[0], rows[-1])
    return None


def written(value: float, is_share: bool) -> str:
    """Write a figure of a metric for people."""
    if is_share:
        return percent(value)
    return compact(value)


def _verb(start: float, end: float, spans: Sequence[tuple[float, float] | None]) -> str:
    """Name the movement of a value, judged against the noise of known counts. spans: the intervals
    of start and end."""
    before, after = spans
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
    """Sum up the change in one or two sentences: start and end values, iterations and time."""
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
    judged = held_out_metric(run)
    pick = metric("reward")
    name = "The training reward"
    is_share = False
    how = None
    spans: list[tuple[float, float] | None] = [None, None]
    ends = None if judged is None else _ends(run, judged.of)
    if judged is not None and ends is not None:
        pick = judged.of
        name = _whose(run, judged.label)
        is_share = judged.is_share
        how = held_out_sampling(run)
        spans = [interval(row, judged.name) for row in ends]
    ends = ends or _ends(run, pick)
    if ends is None:
        return f"{within}{time}; too few measurements to compare start and end."
    start, end = (number(pick(row)) or 0.0 for row in ends)
    span = spans[1]
    if span:
        more = [f"95% interval {written(span[0], is_share)} to {written(span[1], is_share)}"]
    else:
        more = []
    more += [how] if how else []
    bounds = f" ({'; '.join(more)})" if more else ""
    judged_by_reward = judged is not None and pick == judged.of and judged.name == "reward"
    return (
        f"{name} {_verb(start, end, spans)} from {written(start, is_share)} to "
        f"{written(end, is_share)}{bounds} in {within}{time}."
        + _best(run, pick, end, is_share)
        + (_other_shares(run, ends) if judged_by_reward else "")
    )


def _other_shares(run: RunData, ends: tuple[MetricsRow, MetricsRow]) -> str:
    """Describe the other held-out metrics if the headline is the reward: it may rise with nothing
    solved."""
    found = []
    for name in sorted({name for row in ends for name in row.validation or {}}):
        values = present(run.column(held_out(name)))
        before, after = (number(row.held_out(name)) for row in ends)
        if before is not None and after is not None and all(0 <= value <= 1 for value in values):
            found.append(f"{name} {percent(before)} → {percent(after)}")
    if found:
        where = "on the training tasks" if is_overfit(run) else "held out"
        return f" Also {where}: {', '.join(found[:_OTHERS])}."
    return ""


def _whose(run: RunData, label: str) -> str:
    text = validated(label, overfits=is_overfit(run))
    return f"{text[:1].upper()}{text[1:]}"


def _best(run: RunData, pick: Pick, end: float, is_share: bool) -> str:
    """Name the best iteration if it was clearly better than the last one."""
    iteration, best = max(points(run.rows, pick), key=lambda pair: pair[1])
    scale = max(abs(best), abs(end), 1e-12)
    if best - end <= 0.02 * scale:
        return ""
    return f" The best was {written(best, is_share)}, in iteration {iteration}."


def tiles(run: RunData) -> list[tuple[str, str]]:
    """Return (name, figure) for the top of the page."""
    found: list[tuple[str, str]] = []
    metric = held_out_metric(run)
    ends = None if metric is None else _ends(run, metric.of)
    if metric is not None and ends is not None:
        start, end = (written(number(metric.of(row)) or 0.0, metric.is_share) for row in ends)
        found.append((_whose(run, metric.label), f"{start} → {end}"))
    if run.trained:
        found.append(("Iterations", str(len(run.trained))))
    seconds = total_seconds(run)
    if seconds:
        found.append(("Time", duration(seconds)))
    totals = sorted(numbers(row.seconds.total for row in run.trained))
    if totals:
        found.append(("Typical iteration", duration(totals[len(totals) // 2])))
    tokens = sum(row.completion_tokens or 0 for row in run.rows)
    if tokens:
        found.append(
            ("Tokens sampled", compact(tokens) if tokens < 1e6 else f"{tokens / 1e6:.3g} million")
        )
    spent = max(numbers(row.flops.cumulated for row in run.rows), default=0.0)
    if spent:
        found.append(("FLOPs", si_spaced(spent)))
    return found


def failed_shares(run: RunData) -> list[float | None]:
    """Return failed samples as a share of all, per row; None throughout if none ever failed."""
    if any(row.failed for row in run.rows):
        return run.column(lambda row: ratio(row.failed, row.samples))
    return [None] * len(run.rows)


def utilisation(run: RunData) -> list[float | None]:
    """Return FLOPs of training over the machine's capacity in the whole iteration, per row."""

    def share(row: MetricsRow) -> float | None:
        # Older rows lack the time of the steps.
        seconds = row.seconds.train if row.train.seconds is None else row.train.seconds
        part = ratio(seconds, row.seconds.total)
        if row.train.peak_share is None or part is None:
            return None
        return min(1.0, row.train.peak_share * part)

    return run.column(share)


def allocation(run: RunData) -> str:
    """Return the advice of the newest measurement of the gradient's noise; "" without one."""
    for row in reversed(run.trained):
        noise = row.gradient_noise
        prompts = noise.best_prompts
        samples = noise.best_samples
        gain = noise.gain
        if prompts is not None and samples is not None and gain is not None:
            if gain < 1.1:
                return (
                    "The batch is divided well: no other number of samples per prompt would lower "
                    "its noise by a tenth at the same cost."
                )
            return (
                f"At the same cost in tokens, a step of {prompts:.0f} prompts with {samples:.0f} "
                f"samples each (counting those with a signal) would have 1/{gain:.1f} of its noise."
            )
    return ""


def table_columns(run: RunData, shown: Sequence[int]) -> list[tuple[str, list[str]]]:
    """Return (heading, cells of the rows at the places in `shown`) for the run's recorded main
    figures.
    """
    on_training_tasks = is_overfit(run)
    wanted: list[tuple[str, Pick]] = [
        ("reward", lambda row: row.reward),
        (validated("reward", overfits=on_training_tasks), lambda row: row.validation_reward),
        (validated("exact", overfits=on_training_tasks), held_out("exact")),
        (validated("samples", overfits=on_training_tasks), lambda row: row.validation_samples),
        ("groups", lambda row: row.groups.total or None),
        ("groups kept", lambda row: row.groups.kept if row.groups.total else None),
        ("samples", lambda row: row.samples),
        ("failed", lambda row: row.failed),
        ("prompt tokens", lambda row: row.prompt_tokens),
        ("completion tokens", lambda row: row.completion_tokens),
        ("tokens/s", lambda row: row.tokens_per_second),
        ("loss", lambda row: row.train.loss),
        ("KL", lambda row: row.train.kl),
        ("entropy", lambda row: row.train.entropy),
        ("gradient norm", lambda row: row.train.grad_norm),
        ("noise scale", lambda row: row.gradient_noise.scale),
        ("clipped above", lambda row: row.train.clip_fraction_high),
        ("clipped below", lambda row: row.train.clip_fraction_low),
        ("learning rate", lambda row: row.train.lr),
        ("steps", lambda row: row.train.steps),
        ("|Δ logprob| mean", lambda row: row.compared.mean),
        ("|Δ logprob| p99.9", lambda row: row.compared.p999),
        ("ESS", lambda row: row.compared.ess),
        ("canary |Δ|", lambda row: row.sync.canary_max_difference),
        ("dead, s", lambda row: row.dead_seconds),
        ("CPU, sampling", lambda row: row.machine.sample.cpu),
        ("CPU, training", lambda row: row.machine.train.cpu),
        ("GPU, sampling", lambda row: row.machine.sample.gpu_busy),
        ("GPU, training", lambda row: row.machine.train.gpu_busy),
        ("watts, sampling", lambda row: row.machine.sample.watts),
        ("watts, training", lambda row: row.machine.train.watts),
    ]
    columns = [(name, run.column(pick)) for name, pick in wanted]
    phases = phase_columns(run)
    columns += [(f"{phase}, s", phases[phase]) for phase in (*PHASES, "other")]
    columns.append(("total, s", run.column(lambda row: row.seconds.total)))

    def written(value: float | None) -> str:
        return "–" if value is None else compact(value)

    return [
        (name, [written(values[place]) for place in shown])
        for name, values in columns
        if any(value is not None for value in values)
    ]


_OTHERS = 3
"""Number of metrics in the headline besides the reward."""


def course_lines(run: RunData) -> list[str]:
    """Return the summary lines of the whole run (`ttrl.monitoring.summary`)."""
    return summary_lines(run.rows, run.config, overfits=is_overfit(run))


def is_overfit(run: RunData) -> bool:
    """Tell whether a run validates on its training tasks."""
    return overfits(read_mapping(run.folder / "tasks.json"))


def report_text(run_folder: Path, width: int = 100) -> str:
    """Return the summary, the main figures and the findings, wrapped to `width` columns. Raises
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
                initial_indent=f"{MARKS[finding.severity]} ",
                subsequent_indent="   ",
            )
            lines += textwrap.wrap(
                finding.advice, width, initial_indent="   ", subsequent_indent="   "
            )
    elif run.trained:
        lines += ["", "Nothing stands out."]
    return "\n".join(lines)
