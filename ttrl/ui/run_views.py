"""Show the list of runs, a run, and an iteration."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.datastructures import QueryParams

from ttrl.facts import MetricsRow
from ttrl.live.essentials import run_line
from ttrl.monitoring.followed_runs import Runs, read_some, stamp_of
from ttrl.report.charts import sparkline
from ttrl.report.conversations import Message
from ttrl.report.page import report_body
from ttrl.text import compact, is_number
from ttrl.ui.pages import NotFoundError, View, page, run_named, stamp_of_all, state_of
from ttrl.ui.search import FILES, Query, search

_MOST_LIVE = 6
_LIVE_BYTES = 20_000


def home(runs: Runs, query: QueryParams) -> View:
    """List all runs. Those not read after a second follow with the browser's next request."""
    shown = runs.all()
    read_some(shown)
    parts = [(run.name, run.stamp(), state_of(run) if run.is_read else None) for run in shown]
    stamp = stamp_of_all(parts)

    def render() -> str:
        lines = [run_line(run) for run in shown]
        return page("runs.html", stamp, lines=lines, sparkline=sparkline)

    return View(stamp, render)


def run_page(runs: Runs, name: str, query: QueryParams) -> View:
    """Show a run: its state, then its report."""
    run = run_named(runs, name)
    state = state_of(run)
    data = run.data()
    # Held-out samples are written before their line of the metrics.
    folders = [data.iteration_folder(one.iteration) for one in state.under_way]
    files = [stamp_of(folder / file) for folder in folders for file in FILES.values()]
    stamp = stamp_of_all([run.stamp(), state, files])
    return View(
        stamp,
        lambda: page(
            "run.html",
            stamp,
            run=name,
            state=state,
            total=data.config.get("iterations"),
            newest=data.iterations[-1] if data.iterations else None,
            body=report_body(data),
        ),
    )


def iteration_page(runs: Runs, name: str, number_: int, query: QueryParams) -> View:
    """Show an iteration: its figures next to those before it, and its samples."""
    run = run_named(runs, name)
    data = run.data()
    folder = data.iteration_folder(number_)
    row = next((one for one in data.rows if one.iteration == number_), None)
    if row is None and not folder.is_dir():
        raise NotFoundError(f"{name} has no iteration {number_}")
    files = [*FILES.values(), "packed.safetensors"]
    there = {file: (folder / file).is_file() for file in files}
    live = [] if there["rollouts.jsonl"] else _live_texts(folder)
    state = state_of(run)
    stamp = stamp_of_all([run.stamp(), [stamp_of(folder / file) for file in files], live, state])

    def render() -> str:
        before = next((one for one in data.rows if one.iteration == number_ - 1), None)
        query_ = Query("training" if there["rollouts.jsonl"] else "held out", number_, number_)
        return page(
            "iteration.html",
            stamp,
            run=name,
            number=number_,
            newest=data.iterations[-1] if data.iterations else None,
            under_way=[one for one in state.under_way if one.iteration == number_],
            figures=_figures(row, before),
            there=there,
            live=live,
            result=search(data, query_),
            kind=query_.kind,
        )

    return View(stamp, render)


def _figures(row: MetricsRow | None, before: MetricsRow | None) -> list[tuple[str, str, str]]:
    """Return (name, figure, figure before) of an iteration."""
    if row is None:
        return []
    earlier: Mapping[str, Any] = {} if before is None else before.by_name()

    def shown(value: Any) -> str:
        if is_number(value):
            return compact(value)
        return ""

    values = row.by_name()
    return [
        (name, shown(value), shown(earlier.get(name)))
        for name, value in values.items()
        if is_number(value) and name != "iteration"
    ]


def _live_texts(folder: Path) -> list[Message]:
    """Return the ends of the newest texts of samples under way (`sample_files`)."""
    try:
        paths = [
            path
            for path in (folder / "samples").iterdir()
            if path.suffix == ".txt" and path.is_file() and not path.is_symlink()
        ]
        newest = sorted(paths, key=lambda path: -path.stat().st_mtime_ns)[:_MOST_LIVE]
        shown = []
        for path in sorted(newest):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _LIVE_BYTES))
                text = file.read(_LIVE_BYTES).decode("utf-8", "replace")
            shown.append(Message(path.stem, text, "answer"))
    except OSError:
        return []
    return shown
