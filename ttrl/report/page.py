"""report.html of a run: what happened, in words, curves and examples; one file that needs nothing else.

Written again after each iteration and by `ttrl report RUN`. It loads nothing from anywhere (a content security policy in the page
forbids it), has no scripts, follows the reader's light or dark setting and fits a phone. What the model wrote is untrusted: all
text goes through `text_html`, which escapes it and makes control characters visible.

It must not cost a run time: files are read as far as they are shown, what was read is kept while the file stays what it is,
curves of long runs are thinned out, and the table shows some of many iterations.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ttrl.configs.base import without_secrets
from ttrl.errors import StorageError, TtrlError
from ttrl.report import figures as charts
from ttrl.report import words
from ttrl.report.conversations import conversations
from ttrl.report.findings import drift_section, findings_section
from ttrl.report.markup import section, text_html
from ttrl.report.plan import plan_section
from ttrl.report.samples import spread, token_text_of
from ttrl.run_folder.reader import RunData, model_name, read_run
from ttrl.system.files import write_text

logger = logging.getLogger(__name__)

FILE_NAME = "report.html"
MAX_TABLE_ROWS = 120
_CSS = Path(__file__).with_name("report.css")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_report(run_folder: Path, rows: Sequence[dict[str, Any]] | None = None) -> Path:
    """Writes RUN/report.html from what the run folder holds, atomically; returns its path.

    rows: those of metrics.jsonl, where the caller has them anyway.

    Raises RunFolderError for a folder that is no run or whose metrics are damaged, StorageError when it cannot be written.
    """
    run = read_run(Path(run_folder), rows)
    page = "".join(
        [
            _head(run),
            drift_section(run),
            findings_section(run),
            charts.learning(run),
            conversations(run),
            charts.time(run),
            plan_section(run.folder, run.rows),
            charts.sampling(run),
            charts.training(run),
            _packed_row(run),
            charts.every_metric(run),
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


def leave_report(run_folder: Path, rows: Sequence[dict[str, Any]] | None = None) -> Path:
    """`write_report` for a run under way, which no page may end: what goes wrong is logged. Returns its path.

    Raises StorageError alone: there is no room for the run's own files either.
    """
    try:
        return write_report(run_folder, rows)
    except StorageError:
        raise
    except Exception as error:  # noqa: BLE001 - it shows whatever a model wrote, out of files that anybody may have touched
        logger.warning("report.html could not be written: %s: %s", type(error).__name__, error)
        return Path(run_folder) / FILE_NAME


def _head(run: RunData) -> str:
    tiles = "".join(f"<div><dt>{text_html(name)}</dt><dd>{text_html(value)}</dd></div>" for name, value in words.tiles(run))
    model = model_name(run)
    return (
        f"<header><p class=kicker>ttrl report</p><h1>{text_html(run.folder.absolute().name)}</h1>"
        + (f"<p class=model>Model: <code>{text_html(model)}</code></p>" if model else "")
        + f"<p class=summary>{text_html(words.summary(run))}</p>"
        + (f"<dl class=tiles>{tiles}</dl>" if tiles else "")
        + "</header>"
    )


def _packed_row(run: RunData) -> str:
    there = run.numbers_with("packed.safetensors")
    if not there:
        return ""
    from ttrl.data.packing.packed import PackedTensors
    from ttrl.data.packing.packed_file import load_packed
    from ttrl.data.pictures.plot import packed_row_svg

    path = run.iteration_folder(there[-1]) / "packed.safetensors"
    try:
        tensors, samples, header = load_packed(path)  # mapped into memory: only the row that is drawn is read and checked
        packed = PackedTensors(**tensors, samples=samples, **header)
        if packed.num_rows == 0:
            return ""
        first = packed.rows([0])
        first.check(str(path))
        picture = packed_row_svg(first, 0, token_text_of(run, there[-1]), max_positions=600)
    except TtrlError as error:
        logger.warning("the report has no picture of a packed row: %s", error)
        return section("A packed row", f"<p>{text_html(error)}</p>")
    lead = (
        f"Row 1 of {packed.num_rows} of iteration {there[-1]}: what the trainer reads at once. What samples have in common "
        "before their answers is stored once; the answers that follow it continue it without seeing each other. "
        "<code>ttrl view</code> shows all rows."
    )
    return section("A packed row", f'<div class="wide">{picture}</div>', lead)


def _table(run: RunData) -> str:
    if not run.rows:
        return ""
    count, newest = len(run.rows), MAX_TABLE_ROWS // 2
    shown = list(range(count))
    left_out = ""
    if count > MAX_TABLE_ROWS:
        shown = [*spread(count - newest, MAX_TABLE_ROWS - newest), *range(count - newest, count)]
        left_out = f"<p class=lead>{len(shown)} of {count} iterations: some of the older ones, the newest {newest}.</p>"
    columns = words.table_columns(run, shown)
    head = "".join(f"<th>{text_html(name)}</th>" for name, _ in columns)
    lines = []
    for place, index in enumerate(shown):
        cells = "".join(f"<td>{text_html(values[place])}</td>" for _, values in columns)
        lines.append(f"<tr><th>{run.rows[index]['iteration']}</th>{cells}</tr>")
    table = (
        f'<div class="wide"><table><thead><tr><th>iteration</th>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )
    return f"<section><details><summary>The main figures, iteration by iteration</summary>{left_out}{table}</details></section>"


def _settings(run: RunData) -> str:
    parts = []
    history = {f"from iteration {line.get('iteration')}": line.get("changes") for line in run.config_history}
    for title, values in (
        ("Config (config.yaml)", run.config),
        ("Settings that were changed when the run was continued: before, after (config_history.jsonl)", history),
        ("Environment (environment.json)", run.environment),
    ):
        if values:
            text = json.dumps(without_secrets(values), indent=2, ensure_ascii=False, default=str)
            parts.append(f"<details><summary>{title}</summary><pre>{text_html(text)}</pre></details>")
    return f"<section>{''.join(parts)}</section>" if parts else ""
