"""Write a run's report.html: its story in words, curves and examples, in one self-contained file.

Each iteration and `ttrl report RUN` write it again. The page loads nothing (its content security
policy forbids it), has no scripts, follows the reader's light or dark setting and fits a phone. The
HTML templates report.html and parts.html lie next to this file; the modules here compute the
values. A model's text is untrusted: the templates escape all of it, and control characters become
visible symbols.

A report must not slow down its run. It reads only the shown parts of files and keeps them until the
file changes. Curves of long runs are thinned out, and the table shows a selection of many
iterations.
"""

import base64
import functools
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from markupsafe import Markup

from ttrl.configs.base import without_secrets
from ttrl.errors import StorageError, TtrlError, describe
from ttrl.facts import MetricsRow
from ttrl.monitoring.drift_report import read_newest_report
from ttrl.report import figures, phrases
from ttrl.report.conversations import held_out_pages, shown_findings, template, training_pages
from ttrl.report.samples import spread, token_text_of
from ttrl.run_folder.reader import RunData, model_name, read_run
from ttrl.system.files import write_text
from ttrl.text import percent

logger = logging.getLogger(__name__)

FILE_NAME = "report.html"
MAX_TABLE_ROWS = 120
MAX_PICTURE = 2**20
"""Size limit of a study's picture, in bytes."""
_STUDY_PICTURES = (
    "steps.png",
    "noise.png",
    "study.png",
    "split.png",
    "logprobs.png",
    "position.png",
    "tokens.png",
    "kernel.png",
    "precision.png",
)
_PNG = b"\x89PNG"
_HERE = Path(__file__).parent
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@functools.cache
def css() -> Markup:
    """Return the CSS of our pages."""
    return Markup((_HERE / "report.css").read_text(encoding="utf-8"))


def write_report(run_folder: Path, rows: Sequence[MetricsRow] | None = None) -> Path:
    """Write RUN/report.html from the run folder, atomically, and return its path.

    rows: those of metrics.jsonl, if the caller has them anyway.

    Raises RunFolderError for a folder without a run or with damaged metrics, StorageError when the
    report cannot be written.
    """
    run = read_run(Path(run_folder), rows)
    html = template("report.html").render(
        css=css(), name=run.folder.absolute().name, body=report_body(run)
    )
    path = run.folder / FILE_NAME
    write_text(path, visible(html))
    return path


def report_body(run: RunData) -> Markup:
    """Return the page's content, for other pages too."""
    from ttrl.report.plan_table import NEAR, plan_table  # it loads PyTorch

    html = template("report_body.html").render(
        name=run.folder.absolute().name,
        model=model_name(run),
        summary=phrases.summary(run),
        tiles=phrases.tiles(run),
        course=phrases.course_lines(run),
        drift=read_newest_report(run.folder),
        findings=shown_findings(run),
        learning=figures.learning(run),
        held_out=held_out_pages(run),
        overfits=phrases.is_overfit(run),
        training_samples=training_pages(run),
        time=figures.time(run),
        plan=plan_table(run.folder, run.rows),
        near=percent(NEAR),
        sampling=figures.sampling(run),
        training=figures.training(run),
        packed_row=_packed_row(run),
        studies=_studies(run),
        metrics=figures.every_metric(run),
        table=_table(run),
        settings=_settings(run),
    )
    return Markup(html)


def visible(html: str) -> str:
    """Return the page with control characters as visible symbols, and lone surrogates as question
    marks.
    """
    shown = _CONTROL.sub(
        lambda match: chr(0x2421 if match[0] == "\x7f" else 0x2400 + ord(match[0])), html
    )
    return shown.encode("utf-8", "replace").decode("utf-8")


def leave_report(run_folder: Path, rows: Sequence[MetricsRow] | None = None) -> Path:
    """Write the report of a run under way and return its path. No page may end a run: errors are
    logged.

    Raises only StorageError: then the run's own files have no room either.
    """
    try:
        return write_report(run_folder, rows)
    except StorageError:
        raise
    except Exception as error:  # noqa: BLE001
        # The page shows a model's text from files that others may have edited.
        logger.warning("report.html could not be written: %s", describe(error))
        return Path(run_folder) / FILE_NAME


@dataclass(frozen=True)
class PackedRow:
    """The picture of a packed row, or the reason for its absence."""

    error: str = ""
    rows: int = 0
    """Number of rows of the pack."""
    iteration: int = 0
    picture: Markup = field(default_factory=Markup)


def _packed_row(run: RunData) -> PackedRow | None:
    there = run.numbers_with("packed.safetensors")
    if not there:
        return None
    from ttrl.data.packing.packed import PackedTensors
    from ttrl.data.pictures.rows_page import packed_row_html

    path = run.iteration_folder(there[-1]) / "packed.safetensors"
    try:
        # Mapped into memory: only the drawn row is read and checked.
        packed = PackedTensors.load(path, checked=False)
        if packed.num_rows == 0:
            return None
        first = packed.rows([0])
        first.check(str(path))
        picture = packed_row_html(first, 0, token_text_of(run, there[-1]), max_positions=600)
    except TtrlError as error:
        logger.warning("the report has no picture of a packed row: %s", error)
        return PackedRow(error=str(error))
    return PackedRow(rows=packed.num_rows, iteration=there[-1], picture=Markup(picture))


def _studies(run: RunData) -> list[tuple[str, list[str]]]:
    """Return (title, pictures as data: addresses) of `ttrl study`, from the run's folder and its
    newest iteration with a study.
    """
    folders = [("every step", run.folder / "study")]
    folders += [
        (f"the step of iteration {n}", run.iteration_folder(n) / "study")
        for n in run.numbers_with("study")[-1:]
    ]
    found = []
    for title, folder in folders:
        pictures = []
        for path in (folder / name for name in _STUDY_PICTURES):
            if not path.is_file() or path.stat().st_size > MAX_PICTURE:
                continue
            data = path.read_bytes()
            if data.startswith(_PNG):
                pictures.append("data:image/png;base64," + base64.b64encode(data).decode("ascii"))
        found += [(title, pictures)] if pictures else []
    return found


@dataclass(frozen=True)
class Table:
    """The main figures of the iterations."""

    iterations: list[int]
    columns: list[tuple[str, list[str]]]
    left_out: str
    """The iterations not shown; "" if none."""


def _table(run: RunData) -> Table:
    count = len(run.rows)
    newest = MAX_TABLE_ROWS // 2
    shown = list(range(count))
    left_out = ""
    if count > MAX_TABLE_ROWS:
        shown = [*spread(count - newest, MAX_TABLE_ROWS - newest), *range(count - newest, count)]
        left_out = (
            f"{len(shown)} of {count} iterations: some of the older ones, the newest {newest}."
        )
    iterations = [run.iterations[place] for place in shown]
    return Table(iterations, phrases.table_columns(run, shown), left_out)


def _settings(run: RunData) -> list[tuple[str, str]]:
    history = {f"from iteration {line.iteration}": line.changes for line in run.config_history}
    files = {
        "Config (config.yaml)": run.config,
        "Settings changed on continuing: before, after (config_history.jsonl)": history,
        "Environment (environment.json)": run.environment,
    }
    return [
        (title, json.dumps(without_secrets(values), indent=2, ensure_ascii=False, default=str))
        for title, values in files.items()
        if values
    ]
