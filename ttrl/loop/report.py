"""report.html of a run: what happened, in words, curves and examples; one file that needs nothing else.

Written again after each iteration and by `ttrl report RUN`. It loads nothing from anywhere (a content security policy in the page
forbids it), has no scripts, follows the reader's light or dark setting and fits a phone. What the model wrote is untrusted: all
text goes through `text_html`, which escapes it and makes control characters visible.
"""

import json
import logging
from pathlib import Path
from typing import Any

from ttrl.errors import TtrlError
from ttrl.files import write_text
from ttrl.loop import report_words as words
from ttrl.loop.charts import Series, legend, line_chart, stacked_bars
from ttrl.loop.report_conversations import conversations
from ttrl.loop.report_data import PHASES, RunData, held_out_metric, interval, phase_columns, read_run
from ttrl.loop.report_html import figure, grid, section, text_html
from ttrl.loop.token_text import run_token_text

logger = logging.getLogger(__name__)

FILE_NAME = "report.html"
_CSS = Path(__file__).with_name("report.css")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_report(run_folder: Path) -> Path:
    """Writes RUN/report.html from what the run folder holds, atomically; returns its path.

    Raises RunFolderError for a folder that is no run or whose metrics are damaged, StorageError when it cannot be written.
    """
    run = read_run(Path(run_folder))
    page = "".join(
        [
            _head(run),
            _notices(run),
            _learning(run),
            _time(run),
            _training(run),
            conversations(run),
            _packed_row(run),
            _table(run),
            _settings(run),
        ]
    )
    title = text_html(run.folder.absolute().name)
    css = _CSS.read_text(encoding="utf-8")
    html = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title} · ttrl</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><style>{css}</style></head>'
        f"<body><main>{page}</main></body></html>\n"
    )
    path = run.folder / FILE_NAME
    write_text(path, html)
    return path


def _head(run: RunData) -> str:
    tiles = "".join(f"<div><dt>{text_html(name)}</dt><dd>{text_html(value)}</dd></div>" for name, value in words.tiles(run))
    model = words.model_name(run)
    return (
        f"<header><p class=kicker>ttrl report</p><h1>{text_html(run.folder.absolute().name)}</h1>"
        + (f"<p class=model>Model: <code>{text_html(model)}</code></p>" if model else "")
        + f"<p class=summary>{text_html(words.summary(run))}</p>"
        + (f"<dl class=tiles>{tiles}</dl>" if tiles else "")
        + "</header>"
    )


def _notices(run: RunData) -> str:
    items = "".join(f"<li>{text_html(notice)}</li>" for notice in words.notices(run))
    return f'<section class="notices"><h2>Worth knowing</h2><ul>{items}</ul></section>' if items else ""


def _learning(run: RunData) -> str:
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
    held_out = [one for one in held_out if any(value is not None for value in one.values)]
    training = [Series("reward", run.column("reward"), 2, dashed=True), Series(label, run.column(f"metrics.{name}"), 1)]
    training = [one for one in reversed(training) if any(value is not None for value in one.values)]
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


def _time(run: RunData) -> str:
    columns = phase_columns(run)
    phases = [
        Series(name, columns[name], color)
        for color, name in enumerate([*PHASES, "other"], 1)
        if any((value or 0) > 0 for value in columns[name])
    ]
    bars = stacked_bars("seconds per phase", run.iterations, phases, unit=" s")
    speed = [Series("tokens per second", run.column("tokens_per_second"))]
    caption = "Where the time goes: seconds of each iteration."
    if bars is not None and bars[1] > 1:
        caption += f" Each bar is the mean of {bars[1]} iterations."
    return section(
        "Time",
        grid(
            figure("Seconds per phase", bars[0] if bars else None, caption, legend(phases)),
            figure(
                "Tokens per second",
                line_chart("tokens per second", run.iterations, speed, from_zero=True),
                "Sampled tokens, while sampling.",
            ),
        ),
    )


def _completion_figure(run: RunData) -> str:
    completion = [
        tokens / samples if tokens is not None and samples else None
        for tokens, samples in zip(run.column("completion_tokens"), run.column("samples"), strict=True)
    ]
    chart = line_chart("tokens per completion", run.iterations, [Series("mean length", completion)], from_zero=True)
    return figure("Tokens per completion", chart, "Mean length of what the model answers.")


def _training(run: RunData) -> str:
    def one(title: str, path: str, caption: str, **options: Any) -> str:
        return figure(title, line_chart(title, run.iterations, [Series(title, run.column(path))], **options), caption)

    groups = [
        Series(name, words.group_shares(run, key), color)
        for key, name, color in (
            ("all_right", "all right", 3),
            ("all_wrong", "all wrong", 4),
            ("other_equal", "equal otherwise", 6),
        )
    ]
    groups = [series for series in groups if any((value or 0) > 0 for value in series.values)]
    no_signal = stacked_bars("share of groups without signal", run.iterations, groups, percent=True)
    apart = [
        Series("mean", run.column("sampler_trainer.mean")),
        Series("99.9th percentile", run.column("sampler_trainer.p999"), 2),
    ]
    clipped = [
        Series("from above", run.column("train.clip_fraction_high"), 1),
        Series("from below", run.column("train.clip_fraction_low"), 2),
    ]
    return section(
        "Inside the training",
        grid(
            figure(
                "Groups without signal",
                no_signal[0] if no_signal else None,
                "Share of tasks whose samples all got the same reward: they teach nothing and are left out.",
                legend(groups),
            ),
            one("Entropy", "train.entropy", "Nats per token: how undecided the model is. At zero all its samples are the same."),
            _completion_figure(run),
            one("Gradient norm", "train.grad_norm", "Before clipping.", from_zero=True),
            one("KL to the reference model", "train.kl", "k3 estimate, weighted as in the loss.", from_zero=True),
            figure(
                "Sampler against trainer",
                line_chart("difference of log-probabilities", run.iterations, apart, log=True),
                "|difference| of the log-probabilities that both give the sampled tokens, nats. In fp32 about 1e-6; above "
                "0.01, they no longer compute with the same weights or settings.",
                legend(apart),
            ),
            one(
                "Effective sample size",
                "sampler_trainer.ess",
                "Share of the tokens that counts after weighting by trainer/sampler. 100%: what was sampled is what is trained.",
                percent=True,
                y_range=(0.0, 1.0),
            ),
            figure(
                "Clipped tokens",
                line_chart("share of clipped tokens", run.iterations, clipped, percent=True, from_zero=True),
                "Share of the tokens whose ratio left the trusted range, so that they gave no gradient.",
                legend(clipped),
            ),
        ),
    )


def _packed_row(run: RunData) -> str:
    there = run.numbers_with("packed.safetensors")
    if not there:
        return ""
    from ttrl.data.packing import PackedTensors
    from ttrl.data.plot import packed_row_svg

    path = run.iteration_folder(there[-1]) / "packed.safetensors"
    try:
        packed = PackedTensors.load(path)
        if packed.num_rows == 0:
            return ""
        picture = packed_row_svg(packed, 0, run_token_text(run, there[-1]))
    except TtrlError as error:
        logger.warning("the report has no picture of a packed row: %s", error)
        return section("A packed row", f"<p>{text_html(error)}</p>")
    lead = (
        f"Row 1 of {packed.num_rows} of iteration {there[-1]}: what the trainer reads at once. What samples have in common "
        "before their answers is stored once; the answers that follow it continue it without seeing each other."
    )
    return section("A packed row", f'<div class="wide">{picture}</div>', lead)


def _table(run: RunData) -> str:
    if not run.rows:
        return ""
    columns = words.table_columns(run)
    head = "".join(f"<th>{text_html(name)}</th>" for name, _ in columns)
    lines = []
    for index, row in enumerate(run.rows):
        cells = "".join(f"<td>{text_html(values[index])}</td>" for _, values in columns)
        lines.append(f"<tr><th>{row['iteration']}</th>{cells}</tr>")
    table = (
        f'<div class="wide"><table><thead><tr><th>iteration</th>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )
    return f"<section><details><summary>All figures, iteration by iteration</summary>{table}</details></section>"


def _settings(run: RunData) -> str:
    parts = []
    for title, values in (("Config (config.yaml)", run.config), ("Environment (environment.json)", run.environment)):
        if values:
            text = json.dumps(values, indent=2, ensure_ascii=False, default=str)
            parts.append(f"<details><summary>{title}</summary><pre>{text_html(text)}</pre></details>")
    return f"<section>{''.join(parts)}</section>" if parts else ""
