"""Keep the published results: docs/results/results.json, and all that is made of it.

    python tools/results.py add NAME RUN [LABEL=RUN …] --title TEXT --command TEXT [--note TEXT]
    python tools/results.py

`add` takes the figures of a result from its run folders: held-out curve with intervals, commit,
machine, minutes. It replaces an earlier result of this name. Several runs, each with a label, share
a picture. Then, and without arguments, the tool draws docs/results/NAME.svg and writes the tables
of both pages between their two comments: docs/results.md, and with `--tiny`
docs/results/tiny_models.md. Everything is made of the one file, so a test can make it again. The
file has the figures unrounded: only what is shown is rounded, once.
"""

import argparse
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ttrl.evaluation.eval_results import read_result
from ttrl.facts import MetricsRow, number
from ttrl.intervals import estimate_mean
from ttrl.report.charts import HEIGHT, WIDTH, Series, line_chart
from ttrl.run_folder.reader import RunData, read_run
from ttrl.system.files import write_text

DOCS = Path(__file__).resolve().parent.parent / "docs"
FOLDER = "results"
PAGES = {False: "results.md", True: "results/tiny_models.md"}
"""By whether the models are tiny."""
DATA = "results.json"
BEGIN = "<!-- tools/results.py writes from here -->"
END = "<!-- to here -->"
LEGEND = 26
"""Height of the names above a picture."""
_LETTER = 7.4  # about the width of one
STYLE = """
:root { color-scheme: light dark; }
text { font: 13px system-ui, sans-serif; fill: #57606a; }
.name { fill: #24292f; }
.grid { stroke: #e1e4e8; }
.line { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
.dashed { stroke-dasharray: 5 5; }
.band { opacity: .18; }
.f1 { fill: #2563b8; } .s1 { stroke: #2563b8; } .f2 { fill: #d9730d; } .s2 { stroke: #d9730d; }
.f3 { fill: #2f8f6b; } .s3 { stroke: #2f8f6b; } .f4 { fill: #b8385e; } .s4 { stroke: #b8385e; }
.f5 { fill: #7a5bc4; } .s5 { stroke: #7a5bc4; } .f6 { fill: #9aa0a6; } .s6 { stroke: #9aa0a6; }
@media (prefers-color-scheme: dark) {
  text { fill: #9da7b3; }
  .name { fill: #e6edf3; }
  .grid { stroke: #30363d; }
  .f1 { fill: #6ea8fe; } .s1 { stroke: #6ea8fe; } .f2 { fill: #f2a65a; } .s2 { stroke: #f2a65a; }
  .f3 { fill: #5cc29a; } .s3 { stroke: #5cc29a; } .f4 { fill: #ee7f9f; } .s4 { stroke: #ee7f9f; }
  .f5 { fill: #b49af0; } .s5 { stroke: #b49af0; }
}
"""


class Point(NamedTuple):
    """A point of a curve, with its interval if there is one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


class Curve(NamedTuple):
    """A named line of a picture. Lines of one colour belong together, such as seeds of a method."""

    name: str
    points: Sequence[Point]
    color: int = 1
    dashed: bool = False


def picture(title: str, curves: Sequence[Curve], axis: str = "iteration") -> str:
    """Return curves as the text of an SVG file, each name once, in its colour, above."""
    x = sorted({point.x for curve in curves for point in curve.points})
    series = []
    for curve in curves:
        known = {point.x: point for point in curve.points}
        found = [known.get(one, Point(one, float("nan"))) for one in x]
        low = [point.low for point in found]
        high = [point.high for point in found]
        if all(one is None for one in low):
            low, high = None, None
        values = [point.y for point in found]
        series.append(Series(curve.name, values, curve.color, low, high, curve.dashed))
    chart = line_chart(title, x, series, percent=True, y_range=(0.0, 1.0), axis=axis)
    assert chart is not None, f"{title}: no figure to draw"
    body = str(chart).partition(">")[2].removesuffix("</svg>")
    names = {curve.name: curve for curve in curves}
    place = 58.0
    legend = []
    for name, curve in names.items():
        dashed = " dashed" if curve.dashed else ""
        legend.append(
            f'<line class="line s{curve.color}{dashed}" x1="{place:.0f}" x2="{place + 18:.0f}" '
            f'y1="12" y2="12"/><text class="name" x="{place + 24:.0f}" y="16">{name}</text>'
        )
        place += 44 + _LETTER * len(name)
    size = f'viewBox="0 0 {WIDTH} {HEIGHT + LEGEND}" width="{WIDTH}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">'
        f'<style>{STYLE}</style>{"".join(legend)}<g transform="translate(0 {LEGEND})">{body}</g>'
        "</svg>\n"
    )


def held_out_points(run: RunData, metric: str) -> list[list[float | None]]:
    """Return [iteration, mean, low, high, FLOPs so far] of each policy that was asked the held-out
    tasks. The FLOPs leave out those of held-out tasks.
    """
    found = []
    flops = 0.0
    for row in run.rows:
        flops += (row.flops.total or 0.0) - (row.flops.validation or 0.0)
        mean = number(row.held_out(metric))
        if mean is not None:
            low, high = (row.validation_intervals or {}).get(metric, (None, None))
            found.append([row.iteration, mean, low, high, flops])
    return found


def asked_points(files: Sequence[Path], iterations: Sequence[int]) -> list[list[float | None]]:
    """Return the points of evaluations by `ttrl eval`, for runs without held-out tasks."""
    found = []
    for file, iteration in zip(files, iterations, strict=True):
        [one] = read_result(file).sets.values()
        share = estimate_mean([task.known for task in one.tasks])
        found.append([iteration, share.mean, share.low, share.high, 0.0])
    return found


def machine(environment: Mapping[str, Any]) -> str:
    """Return the machine of a run in words."""
    gpus = environment.get("gpus") or ["no GPU"]
    memory = environment.get("memory_gb")
    return f"{environment.get('cores')} cores, {memory} GB, {', '.join(map(str, gpus))}"


def minutes(rows: Sequence[MetricsRow]) -> float:
    """Return the minutes of all iterations together."""
    return round(sum(row.seconds.total or 0.0 for row in rows) / 60, 1)


def taken(
    runs: Mapping[str, Path], metric: str | None = None, asked: Sequence[Path] = ()
) -> dict[str, Any]:
    """Return the figures of run folders, by their labels.

    metric: of the held-out tasks; None: the first run's `validation_metric`.
    asked: evaluations of the first and the last policy, for a run without held-out tasks.
    """
    read = {label: read_run(folder) for label, folder in runs.items()}
    first = next(iter(read.values()))
    metric = metric or str(first.config.get("validation_metric", "reward"))
    curves = []
    for label, run in read.items():
        points = held_out_points(run, metric)
        if asked:
            points = asked_points(asked, [0, run.iterations[-1]])
        if not points:
            sys.exit(f"results: {run.folder} has no held-out figure {metric}")
        rewards = [(row.iteration, number(row.reward)) for row in run.trained]
        curves.append(
            {
                "label": label,
                "held_out": points,
                "rewards": [one for one in rewards if one[1] is not None],
                "minutes": minutes(run.rows),
            }
        )
    environment = first.environment
    tasks = next((row.validation_samples for row in first.rows if row.validation_samples), None)
    if asked:
        tasks = sum(len(one.tasks) for one in read_result(asked[0]).sets.values())
    return {
        "metric": metric,
        "tasks": tasks,
        "commit": str(environment.get("git_commit", "unknown")),
        "machine": machine(environment),
        "curves": curves,
    }


def _value(point: Sequence[float | None]) -> str:
    _, mean, low, high, _ = point
    if low is None or high is None:
        return f"{mean:.3f}"
    return f"{mean:.3f} ({low:.3f} to {high:.3f})"


def _labels(result: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return a result's curves by label, without the seeds behind a dash."""
    found: dict[str, list[Any]] = {}
    for curve in result["curves"]:
        found.setdefault(curve["label"].partition("-")[0], []).append(curve)
    return found


def _anchor(title: str) -> str:
    """Return the anchor of a heading, as GitHub and the site make it."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _row(result: Mapping[str, Any], label: str, curves: Sequence[Any]) -> str:
    """Return a row of the table; with several seeds, means without an interval."""
    ends = [curve["held_out"][place] for place in (0, -1) for curve in curves]
    before, after = ends[: len(curves)], ends[len(curves) :]
    if len(curves) == 1:
        shown = [_value(before[0]), _value(after[0])]
    else:
        each = ", ".join(f"{one[1]:.3f}" for one in after)
        shown = [f"{statistics.fmean(one[1] for one in before):.3f}", f"{each} (seeds)"]
    what = result["title"]
    if len(result["curves"]) > 1:
        what = f"{what}: {label}"
    iterations = ", ".join(dict.fromkeys(f"{one[0]:g}" for one in after))
    spent = ", ".join(f"{curve['minutes']:g}" for curve in curves)
    known, plus, changes = result["commit"].partition("+")
    commit = f"{known[:8]}{plus}{changes}"
    tasks = f"{result['metric']}, {result['tasks']}"
    link = f"[{what}](#{_anchor(result['title'])})"
    return f"| {link} | {tasks} | {' | '.join(shown)} | {iterations} | {spent} | {commit} |"


def tables(results: Mapping[str, Any], pictures: str = f"{FOLDER}/") -> str:
    """Return the part of a page made of the data: a table, then a section for each result."""
    lines = [
        "| result | measure, held-out tasks | before | after | iterations | minutes | commit |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for result in results.values():
        for label, curves in _labels(result).items():
            lines.append(_row(result, label, curves))
    for name, result in results.items():
        lines += ["", f"## {result['title']}", ""]
        lines += ["```", *result["command"].splitlines(), "```", ""]
        lines += [textwrap.fill(" ".join(result["note"].split()), 100), ""]
        lines += [f"![{result['title']}]({pictures}{name}.svg)"]
    return "\n".join(lines)


def pictures(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each picture, by its file's name: a run over its iterations, several over
    their FLOPs.
    """
    made = {}
    for name, result in results.items():
        labels = list(_labels(result))
        curves = []
        for one in result["curves"]:
            label = one["label"].partition("-")[0]
            alone = len(result["curves"]) == 1
            if alone:
                shown = f"held out, {result['metric']}"
                points = [Point(*point[:4]) for point in one["held_out"]]
            else:
                shown = label
                points = [Point(point[4], point[1]) for point in one["held_out"]]
            curves.append(Curve(shown, points, 1 + labels.index(label)))
            if alone:
                rewards = [Point(*point) for point in one["rewards"]]
                curves.append(Curve("reward of the samples", rewards, 2, dashed=True))
        axis = "iteration" if len(result["curves"]) == 1 else "FLOP"
        made[f"{name}.svg"] = picture(result["title"], curves, axis)
    return made


def page_with(text: str, results: Mapping[str, Any], *, tiny: bool) -> str:
    """Return a page with the tables of its results between its comments."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"docs/{PAGES[tiny]} lacks {BEGIN} or {END}"
    own = {name: result for name, result in results.items() if result["tiny"] == tiny}
    made = tables(own, "" if tiny else f"{FOLDER}/")
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def write(docs: Path = DOCS) -> None:
    """Draw the pictures, and write the tables of the pages."""
    results = json.loads((docs / FOLDER / DATA).read_text(encoding="utf-8"))
    for name, text in pictures(results).items():
        write_text(docs / FOLDER / name, text)
    for tiny, name in PAGES.items():
        page = docs / name
        write_text(page, page_with(page.read_text(encoding="utf-8"), results, tiny=tiny))


def runs_of(arguments: Sequence[str]) -> dict[str, Path]:
    """Read [LABEL=]RUN; a run alone needs no label."""
    found = {}
    for text in arguments:
        label, equals, folder = text.partition("=")
        found[label if equals else "run"] = Path(folder if equals else label)
    return found


def main() -> None:
    """Add a result, or write everything again."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    commands = parser.add_subparsers(dest="action")
    add = commands.add_parser("add", help="take a result from run folders")
    add.add_argument("name")
    add.add_argument("runs", nargs="+", metavar="[LABEL=]RUN")
    add.add_argument("--title", required=True)
    add.add_argument("--command", required=True)
    add.add_argument("--metric", help="of the held-out tasks (the run's own)")
    both = "evaluations (ttrl eval --output) of the first and last policy of a run without its own"
    add.add_argument("--asked", nargs=2, type=Path, default=[], metavar="FILE", help=both)
    add.add_argument("--note", default="", help="what a reader should know, good or bad")
    add.add_argument("--tiny", action="store_true", help="on the page of tiny models")
    arguments = parser.parse_args()
    if arguments.action == "add":
        file = DOCS / FOLDER / DATA
        results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        told = {name: getattr(arguments, name) for name in ("title", "command", "note", "tiny")}
        results[arguments.name] = told | taken(
            runs_of(arguments.runs), arguments.metric, arguments.asked
        )
        file.parent.mkdir(exist_ok=True)
        write_text(file, json.dumps(results, indent=1) + "\n")
    write()


if __name__ == "__main__":
    main()
