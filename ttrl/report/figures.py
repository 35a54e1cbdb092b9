"""The report's charts: learning, time, what is sampled, how the training went, and every other metric as a small curve."""

from typing import Any

from ttrl.report import words
from ttrl.report.charts import Series, legend, line_chart, sparkline, stacked_bars
from ttrl.report.markup import figure, grid, section, text_html
from ttrl.run_folder.reader import PHASES, RunData, held_out_metric, interval, phase_columns
from ttrl.text import compact

MOST = 200
"""Columns: a run whose rows hold other names in each iteration must not make a page without end."""


def all_metrics(run: RunData) -> list[tuple[str, list[float | None]]]:
    """(dotted name, one value per row), by name. Figures by weights version are left out: each iteration has other names."""
    names = {name: None for row in run.flat for name in row}
    shown = [name for name in names if name != "iteration" and not any(part.lstrip("-").isdigit() for part in name.split("."))]
    return [(name, run.column(name)) for name in sorted(shown[:MOST])]


def _has(series: Series) -> bool:
    return any(value is not None for value in series.values)


def learning(run: RunData) -> str:
    """Reward and validation, with intervals."""
    rewards = [value for path in ("reward", "validation_reward") for value in run.column(path) if value is not None]
    unit_range = (0.0, 1.0) if all(0 <= value <= 1 for value in rewards) else None
    held_out: list[Series] = []
    bands, label, name = "", "exact match", "exact"
    if (metric := held_out_metric(run)) is not None and metric.path != "validation_reward":
        label, name = metric.label, metric.path.removeprefix("validation.")
        intervals = [interval(row, metric.path) for row in run.rows]
        low, high = ([one[side] if one else None for one in intervals] for side in (0, 1))
        has_band = any(one is not None for one in intervals)
        bands = f"95% interval of {label}" if has_band else ""
        held_out.append(Series(label, run.column(metric.path), 1, low if has_band else None, high if has_band else None))
    held_out.append(Series("reward", run.column("validation_reward"), 2, dashed=bool(held_out)))
    held_out = [one for one in held_out if _has(one)]
    training = [Series("reward", run.column("reward"), 2, dashed=True), Series(label, run.column(f"metrics.{name}"), 1)]
    training = [one for one in reversed(training) if _has(one)]
    caption = "Tasks that are never trained on. Iteration 0 is the starting model."
    if bands:
        caption += " The band: Wilson's interval, the samples taken as independent."
    return section(
        "Learning",
        grid(
            figure(
                "Held out",
                line_chart("held-out results", run.iterations, held_out, y_range=unit_range),
                caption,
                legend(held_out, bands=bands),
            ),
            figure(
                "Training",
                line_chart("training results", run.iterations, training, y_range=unit_range),
                "Mean over the samples of each iteration, before that iteration's update.",
                legend(training),
            ),
        ),
    )


def time(run: RunData) -> str:
    """Seconds of each phase, dead time, tokens per second, and how busy the machine was."""
    columns = phase_columns(run)
    phases = [
        Series(name, columns[name], color)
        for color, name in enumerate([*PHASES, "other"], 1)
        if any((value or 0) > 0 for value in columns[name])
    ]
    bars = stacked_bars("seconds per phase", run.iterations, phases, unit=" s")
    caption = "Where the time goes: seconds of each iteration. Phases that overlap are counted in full."
    if bars is not None and bars[1] > 1:
        caption += f" Each bar is the mean of {bars[1]} iterations."
    dead = [Series("dead time", words.dead_shares(run), 4)]
    busy = [
        Series("of the peak, while training", run.column("train.peak_share")),
        Series("over the whole iteration", words.utilisation(run), 2),
    ]
    busy = [one for one in busy if _has(one)]
    return section(
        "Time",
        grid(
            figure("Seconds per phase", bars[0] if bars else None, caption, legend(phases)),
            figure(
                "Dead time",
                line_chart("share of dead time", run.iterations, dead, percent=True, y_range=(0.0, 1.0)),
                "Share of an iteration in which nothing was sampled and nothing was trained.",
            ),
            figure(
                "Tokens per second",
                line_chart(
                    "tokens per second", run.iterations, [Series("tokens", run.column("tokens_per_second"))], from_zero=True
                ),
                "Sampled tokens, while sampling.",
            ),
            figure(
                "Utilisation",
                line_chart("utilisation", run.iterations, busy, percent=True, from_zero=True),
                "The trainer's FLOP/s as a share of the machine's largest matrix product.",
                legend(busy),
            ),
        ),
    )


def sampling(run: RunData) -> str:
    """What the model writes, and how old it is."""
    completion = [
        tokens / samples if tokens is not None and samples else None
        for tokens, samples in zip(run.column("completion_tokens"), run.column("samples"), strict=True)
    ]
    groups = [
        Series(name, words.group_shares(run, key), color)
        for key, name, color in (
            ("all_right", "all right", 3),
            ("all_wrong", "all wrong", 4),
            ("other_equal", "equal otherwise", 6),
            ("low_std", "kept, but below the floor", 5),
        )
    ]
    groups = [series for series in groups if any((value or 0) > 0 for value in series.values)]
    no_signal = stacked_bars("share of groups without signal", run.iterations, groups, percent=True)
    endings = [
        Series("cut off at the limit", run.column("rollouts.truncated"), 4),
        Series("repeated in their group", run.column("rollouts.repeated"), 1),
        Series("failed", words.failed_shares(run), 2),
    ]
    endings = [one for one in endings if _has(one)]
    return section(
        "What is sampled",
        grid(
            figure(
                "Groups without signal",
                no_signal[0] if no_signal else None,
                "Share of tasks whose samples all got the same reward: they teach nothing and are left out.",
                legend(groups),
            ),
            figure(
                "Endings and repetitions",
                line_chart("endings", run.iterations, endings, percent=True, from_zero=True),
                "Share of the samples. Where tasks are solved, equal answers are as they should be.",
                legend(endings),
            ),
            figure(
                "Tokens per completion",
                line_chart("tokens per completion", run.iterations, [Series("mean length", completion)], from_zero=True),
                "Mean length of what the model answers.",
            ),
            _one(
                run,
                "Reward against length",
                "rollouts.length_correlation",
                "Correlation within groups: above 0, longer answers get more reward.",
                y_range=(-1.0, 1.0),
            ),
            _one(
                run,
                "Staleness",
                "staleness.mean",
                "Iterations between the policy that sampled a token and the newest one.",
                from_zero=True,
            ),
            _one(
                run, "Unfinished samples", "unfinished.samples", "Cut off by the token budget, to be continued.", from_zero=True
            ),
            _one(
                run,
                "Extra tasks",
                "extra_tasks",
                "Further tasks that dynamic sampling took for groups with signal.",
                from_zero=True,
            ),
        ),
    )


def _one(run: RunData, title: str, path: str, caption: str, **options: Any) -> str:
    series = Series(title, run.column(path))
    return figure(title, line_chart(title, run.iterations, [series], **options), caption)


def training(run: RunData) -> str:
    """How the policy moves."""
    apart = [
        Series("mean", run.column("sampler_trainer.mean")),
        Series("99.9th percentile", run.column("sampler_trainer.p999"), 2),
    ]
    own = Series("99.9th percentile under the sampler's own weights", run.column("sampler_trainer.own_weights.p999"), 3)
    if any(value is not None for value in own.values):
        apart.append(own)
    clipped = [
        Series("from above", run.column("train.clip_fraction_high"), 1),
        Series("from below", run.column("train.clip_fraction_low"), 2),
    ]
    return section(
        "Inside the training",
        grid(
            _one(
                run,
                "Entropy",
                "train.entropy",
                "Nats per token: how undecided the model is. At zero all its samples are the same.",
            ),
            _one(run, "Gradient norm", "train.grad_norm", "Before clipping.", from_zero=True),
            figure(
                "Clipped tokens",
                line_chart("share of clipped tokens", run.iterations, clipped, percent=True, from_zero=True),
                "Share of the tokens whose ratio left the trusted range, so that they gave no gradient.",
                legend(clipped),
            ),
            _one(run, "KL to the reference model", "train.kl", "k3 estimate, weighted as in the loss.", from_zero=True),
            figure(
                "Sampler against trainer",
                line_chart("difference of log-probabilities", run.iterations, apart, log=True),
                "|difference| of the log-probabilities that both give the sampled tokens, nats. In fp32 about 1e-6; above "
                "0.01, they no longer compute with the same weights or settings (or the tokens are of an older policy).",
                legend(apart),
            ),
            _one(
                run,
                "Effective sample size",
                "sampler_trainer.ess",
                "Share of the tokens that counts after weighting by trainer/sampler. 100%: what was sampled is what is trained.",
                percent=True,
                y_range=(0.0, 1.0),
            ),
        ),
    )


def every_metric(run: RunData) -> str:
    """All numbers of metrics.jsonl as small curves with their first, lowest, highest and last value; folded away."""
    rows = []
    for name, values in all_metrics(run):
        known = [value for value in values if value is not None]
        figures = "".join(f"<td>{compact(value)}</td>" for value in (known[0], min(known), max(known), known[-1]))
        rows.append(f"<tr><th>{text_html(name)}</th><td>{sparkline(values)}</td>{figures}</tr>")
    if not rows:
        return ""
    head = "<thead><tr><th>metric</th><th></th><th>first</th><th>lowest</th><th>highest</th><th>last</th></tr></thead>"
    table = f'<div class="wide"><table class="metrics">{head}<tbody>{"".join(rows)}</tbody></table></div>'
    return f"<section><details><summary>Every metric ({len(rows)})</summary>{table}</details></section>"
