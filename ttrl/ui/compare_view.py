"""Compare runs over iterations, FLOPs, tokens or seconds."""

from collections.abc import Sequence
from typing import Any

from starlette.datastructures import QueryParams

from ttrl.errors import TtrlError, UserError
from ttrl.facts import Figure, MetricsRow, number
from ttrl.monitoring.followed_runs import Runs, readable
from ttrl.report.compared_runs import (
    BY,
    UNITS,
    By,
    Curve,
    compare_runs,
    curves_over,
    differing_settings,
)
from ttrl.run_folder.reader import RunData, held_out_metric
from ttrl.text import is_number
from ttrl.ui.pages import View, page, run_named, stamp_of_all

_MOST_COMPARED = 50


def compare_page(runs: Runs, query: QueryParams) -> View:
    """Compare runs over iterations, FLOPs, tokens or seconds."""
    names = _names(runs, query.getlist("runs"))
    by: By = next((one for one in BY if one == query.get("x")), "iteration")
    wanted = query.get("metric", "")
    chosen = [run_named(runs, name) for name in names]
    stamp = stamp_of_all([str(query), [(run.name, run.stamp()) for run in chosen], len(runs.all())])

    def render() -> str:
        read = [(run.name, readable(run)) for run in chosen]
        whole = [(name, data) for name, data in read if isinstance(data, RunData)]
        problems = [f"{name}: {data}" for name, data in read if isinstance(data, TtrlError)]
        datas = [data for _, data in whole]
        comparison = None
        if len(datas) > 1:
            try:
                comparison = compare_runs(datas, by=by)
            except UserError as error:
                problems.append(str(error))
        metrics = _metric_names(datas)
        shown = wanted if wanted in metrics else _usual_metric(datas)
        curves = [Curve(name, data, lambda row: value_named(row, shown)) for name, data in whole]
        figure = curves_over(by, f"{shown} over {UNITS[by]}", "A colour is a run.", curves)
        return page(
            "compare.html",
            stamp,
            chosen=[name for name, _ in whole],
            all_runs=[run.name for run in runs.all()],
            units={one: UNITS[one] for one in BY},
            by=by,
            metric=shown,
            metrics=metrics,
            figures=[] if figure is None else [figure],
            comparison=comparison,
            problems=problems,
            settings=differing_settings(datas),
        )

    return View(stamp, render)


def value_named(row: MetricsRow, name: str) -> Figure:
    """Return a figure by its flat name, such as "train.entropy" or "validation.exact"."""
    value: Any = row
    parts = name.split(".")
    while parts and value is not None:
        if isinstance(value, dict):  # a metric's own name may hold dots
            return number(value.get(".".join(parts)))
        value = getattr(value, parts.pop(0), None)
    return number(value)


def _metric_names(runs: Sequence[RunData]) -> list[str]:
    """Return the names of all figures in the newest and the middle row of each run."""
    rows = [row for run in runs for row in (run.rows[len(run.rows) // 2 :][:1] + run.rows[-2:])]
    names = {name for row in rows for name, value in row.by_name().items() if is_number(value)}
    return sorted(names - {"iteration"})


def _usual_metric(runs: Sequence[RunData]) -> str:
    for run in runs:
        judged = held_out_metric(run)
        if judged is not None:
            return "validation_reward" if judged.name == "reward" else f"validation.{judged.name}"
    return "reward"


def _names(runs: Runs, given: Sequence[str]) -> list[str]:
    """Return the named runs, written once each or with commas; names may hold commas themselves."""
    names: list[str] = []
    for one in given:
        names += [one] if runs.named(one) else [part for part in one.split(",") if part]
    return list(dict.fromkeys(names))[:_MOST_COMPARED]
