"""The report's sentences and figures: what happened, what is worth knowing, the tiles and the table.

Every sentence is computed from the metrics and says no more than they show: a rise that lies within the noise is called that.
"""

import math
from typing import Any

from ttrl.loop.charts import compact
from ttrl.loop.metrics_row import TOO_LONG_WORDS
from ttrl.loop.report_data import (
    PHASES,
    RunData,
    duration,
    held_out_metric,
    interval,
    number,
    percent,
    phase_columns,
    total_seconds,
)

DISAGREEMENT = 0.01  # nats: above it sampler and trainer are not the same model any more


def model_name(run: RunData) -> str:
    """What the config calls the model, "" where it does not."""
    for key in ("model", "model_folder", "base_model"):
        value = run.config.get(key)
        if isinstance(value, dict):
            value = value.get("path") or value.get("name")
        if isinstance(value, str):
            return value
    return ""


def _ends(run: RunData, path: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The first and the last row that have a value; None when there are not two."""
    rows = [row for row in run.rows if number(row, path) is not None]
    return (rows[0], rows[-1]) if len(rows) > 1 else None


def _value(value: float, is_share: bool) -> str:
    return percent(value) if is_share else compact(value)


def _verb(first: dict[str, Any], last: dict[str, Any], path: str) -> str:
    """How the value moved, judged against the noise of the counts where they are known."""
    start, end = number(first, path) or 0.0, number(last, path) or 0.0
    counts = [number(row, "validation_samples") for row in (first, last)]
    if interval(first, path) is not None and interval(last, path) is not None and counts[0] and counts[1]:
        noise = 1.96 * math.sqrt(start * (1 - start) / counts[0] + end * (1 - end) / counts[1])
        if abs(end - start) <= noise:
            return "did not change beyond the noise: it went"
    if end == start:
        return "stayed the same, going"
    return "rose" if end > start else "fell"


def summary(run: RunData) -> str:
    """One or two sentences: from what to what, in how many iterations, in how much time."""
    count = len(run.trained)
    if not run.rows:
        return "No iteration is finished yet."
    if not count:
        return "Only the starting model has been measured; no iteration is finished yet."
    within = f"{count} iteration{'s' if count != 1 else ''}"
    seconds = total_seconds(run)
    time = f", {duration(seconds)} in all" if seconds else ""
    metric = held_out_metric(run)
    is_share = False
    if metric is not None and (ends := _ends(run, metric.path)) is not None:
        path, name, is_share = metric.path, f"Held-out {metric.label}", metric.is_share
    elif (ends := _ends(run, "reward")) is not None:
        path, name = "reward", "The training reward"
    else:
        return f"{within}{time}; too few measurements to compare start and end."
    first, last = ends
    start, end = number(first, path) or 0.0, number(last, path) or 0.0
    span = interval(last, path)
    bounds = f" (95% interval {percent(span[0])} to {percent(span[1])})" if span and is_share else ""
    return (
        f"{name} {_verb(first, last, path)} from {_value(start, is_share)} to {_value(end, is_share)}{bounds} in {within}{time}."
        + _best(run, path, end, is_share)
    )


def _best(run: RunData, path: str, end: float, is_share: bool) -> str:
    """A word about the best iteration when it was clearly better than the last one."""
    known = [(value, iteration) for value, iteration in zip(run.column(path), run.iterations, strict=True) if value is not None]
    best, iteration = max(known, key=lambda pair: pair[0])
    scale = max(abs(best), abs(end), 1e-12)
    if best - end <= 0.02 * scale:
        return ""
    return f" The best was {_value(best, is_share)}, in iteration {iteration}."


def tiles(run: RunData) -> list[tuple[str, str]]:
    """(name, figure) for the top of the page."""
    found: list[tuple[str, str]] = []
    metric = held_out_metric(run)
    if metric is not None and (ends := _ends(run, metric.path)) is not None:
        start, end = (_value(number(row, metric.path) or 0.0, metric.is_share) for row in ends)
        found.append((f"Held-out {metric.label}", f"{start} → {end}"))
    if run.trained:
        found.append(("Iterations", str(len(run.trained))))
    if seconds := total_seconds(run):
        found.append(("Time", duration(seconds)))
    totals = sorted(value for row in run.trained if (value := number(row, "seconds.total")) is not None)
    if totals:
        found.append(("Typical iteration", duration(totals[len(totals) // 2])))
    tokens = sum(number(row, "completion_tokens") or 0.0 for row in run.rows)
    if tokens:
        found.append(("Tokens sampled", compact(tokens) if tokens < 1e6 else f"{tokens / 1e6:.3g} million"))
    return found


def group_shares(run: RunData, key: str) -> list[float | None]:
    """The share of all groups that were left out for one reason, per row."""
    shares: list[float | None] = []
    for row in run.rows:
        part, total = number(row, f"groups.{key}"), number(row, "groups.total")
        shares.append(part / total if part is not None and total else None)
    return shares


def _list(iterations: list[int]) -> str:
    """3, 4 and 9; long lists are counted."""
    texts = [str(one) for one in iterations]
    if len(texts) > 6:
        return f"{len(texts)} iterations, {', '.join(texts[:3])} and so on"
    one_or_more = "iteration " if len(texts) == 1 else "iterations "
    return one_or_more + (texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " and " + texts[-1])


def notices(run: RunData) -> list[str]:
    """What a reader should know before trusting the curves; empty when there is nothing."""
    found: list[str] = []
    untrained = [row["iteration"] for row in run.trained if row.get("trained") is False]
    if untrained:
        found.append(f"Nothing was trained in {_list(untrained)}: no group of samples had different rewards.")
    failed = sum(number(row, "failed") or 0.0 for row in run.rows)
    if failed:
        sampled = sum(number(row, "samples") or 0.0 for row in run.rows)
        share = f" of {compact(sampled)}" if sampled >= failed else ""
        found.append(f"{failed:g}{share} samples failed and did not count; rollouts.jsonl says why for each.")
    for name, text in TOO_LONG_WORDS.items():
        if count := sum(number(row, f"pack.dropped.{name}") or 0.0 for row in run.rows):
            left_out = "; they were left out" if name == "too_long" else ""
            found.append(f"{count:g} samples were longer than a row of seq_len ({text}){left_out}.")
    fell_back = [row["iteration"] for row in run.rows if isinstance(row.get("sync"), dict) and row["sync"].get("fell_back")]
    if fell_back:
        found.append(
            f"The server did not reproduce the trainer's numbers after the weights were loaded in place in {_list(fell_back)}; "
            "it was restarted, and then it did."
        )
    apart = [row["iteration"] for row in run.rows if (number(row, "sampler_trainer.p999") or 0.0) > DISAGREEMENT]
    if apart:
        found.append(
            f"Sampler and trainer disagreed by more than {DISAGREEMENT:g} nats (99.9th percentile) in {_list(apart)}: what was "
            "sampled is not quite what was trained."
        )
    empty = [row["iteration"] for row in run.trained if number(row, "groups.kept") == 0]
    all_wrong = sum(number(row, "groups.all_wrong") or 0.0 for row in run.trained)
    total = sum(number(row, "groups.total") or 0.0 for row in run.trained)
    if total and all_wrong / total > 0.5:
        found.append(
            f"In {percent(all_wrong / total)} of the groups every sample was wrong. The task may be too hard for this model: "
            "an easier one, a warm start or more samples per task give it something to learn from."
        )
    elif empty and not untrained:
        found.append(f"No group had any signal in {_list(empty)}.")
    return found


def table_columns(run: RunData) -> list[tuple[str, list[str]]]:
    """(heading, one cell per row) for every figure that the run recorded."""
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
        ("clipped above", "train.clip_fraction_high"),
        ("clipped below", "train.clip_fraction_low"),
        ("learning rate", "train.lr"),
        ("steps", "train.steps"),
        ("|Δ logprob| mean", "sampler_trainer.mean"),
        ("|Δ logprob| p99.9", "sampler_trainer.p999"),
        ("ESS", "sampler_trainer.ess"),
        ("canary |Δ|", "sync.canary_max_difference"),
    ]
    columns = [(name, run.column(path)) for name, path in wanted]
    phases = phase_columns(run)
    columns += [(f"{phase}, s", phases[phase]) for phase in (*PHASES, "other")]
    columns.append(("total, s", run.column("seconds.total")))
    return [
        (name, ["–" if value is None else compact(value) for value in values])
        for name, values in columns
        if any(value is not None for value in values)
    ]
