"""Compare runs at equal cost: `ttrl compare RUN RUN …`.

Runs with the same settings, except for the seed, form one arm. The comparison point is the end of
the shortest run in iterations, FLOPs, tokens or seconds. Each run enters with its newest validation
up to there. The other arms are compared with the first, task by task. A caller may also name the
arms (`recipes/rl_vs_sft.py`). They are then compared seed by seed, each with its validation nearest
to the end of the seed's shortest run: arms of whole steps end a little above or below each other.

The interval of a difference holds for other tasks of the kind. If both arms have two seeds or more,
it also holds for other seeds (`ttrl.intervals.difference_over_seeds`). With one seed, two runs of
the same settings may well differ by more.
"""

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ttrl.configs.base import Settings, without_secrets
from ttrl.errors import UserError
from ttrl.facts import MetricsRow, Pick, number
from ttrl.intervals import Difference, difference_over_seeds, estimate_mean
from ttrl.report.charts import COLOURS, Series, line_chart
from ttrl.report.conversations import template
from ttrl.report.figures import Figure
from ttrl.report.page import css, visible
from ttrl.run_folder.config_changes import flat
from ttrl.run_folder.reader import RunData, held_out_metric, read_run
from ttrl.system.files import read_jsonl, write_text
from ttrl.system.frames import data_frame
from ttrl.system.html_table import html_table
from ttrl.text import compact, counted, duration, present, si_spaced

if TYPE_CHECKING:
    from ttrl.system.frames import DataFrame

By = Literal["iteration", "flops", "tokens", "seconds"]
BY: tuple[By, ...] = ("iteration", "flops", "tokens", "seconds")
UNITS = {"iteration": "iteration", "flops": "FLOP", "tokens": "answer tokens", "seconds": "seconds"}
_OURS = frozenset({"run", "seed", "cache", "loggers", "mirror", "sample_files", "requests_log"})
"""Settings without effect on the arm."""
_FEW_TASKS = 30
"""Below this number of held-out tasks, a comparison states the weight of one task."""

SEARCHED = "The search for the learning rate of supervised training; its FLOPs count for no arm"

Scores = dict[str, list[float]]
"""Scores of a task's samples, by task."""


@dataclass(frozen=True)
class Point:
    """A run at its compared validation."""

    run: RunData
    iteration: int
    spent: dict[str, float | None]
    """By the names of BY; None if the run did not record it."""
    reward: float | None
    """The training reward at this iteration."""
    scores: Scores


@dataclass(frozen=True)
class Arm:
    """Runs with the same settings but different seeds."""

    name: str
    points: list[Point]
    settings: Settings
    """The settings with differences between arms."""
    mean: float | None
    interval: tuple[float, float] | None
    """For other tasks, over all seeds."""
    difference: Difference | None
    """To the first arm; None for that one."""


@dataclass(frozen=True)
class RunComparison:
    """Arms compared at `reached` units of `by`."""

    by: By
    reached: float
    metric: str
    confidence: float
    arms: list[Arm]
    num_tasks: int
    """Held-out tasks common to all runs."""
    notes: list[str]
    apart: float | None = None
    """With named arms: the largest difference in `by` between compared runs of a seed, as a
    share.
    """
    sets: list[list[str]] = field(default_factory=list)
    """A table of further held-out sets, its heading first (`ttrl.cli.arms`)."""
    searched: list[list[str]] = field(default_factory=list)
    """A table of the learning rates tried for supervised arms, its heading first."""

    def rows(self) -> list[list[str]]:
        """Return the table, its heading first."""
        span = f"{self.confidence * 100:g}% interval"
        heads = [
            "arm",
            "seeds",
            "iteration",
            f"held-out {self.metric}",
            span,
            "difference",
            span,
            "p",
        ]
        table = [[*heads, "training reward", "FLOP", "tokens", "time"]]
        for arm in self.arms:
            row = [
                arm.name,
                str(len(arm.points)),
                " ".join(str(point.iteration) for point in arm.points),
            ]
            row += ["" if arm.mean is None else f"{arm.mean:.3f}"]
            row += ["" if arm.interval is None else "{:.3f} to {:.3f}".format(*arm.interval)]
            d = arm.difference
            row += (
                ["", "", ""]
                if d is None
                else [f"{d.mean:+.3f}", f"{d.low:+.3f} to {d.high:+.3f}", f"{d.p_value:.2g}"]
            )
            rewards = [point.reward for point in arm.points if point.reward is not None]
            row += [f"{statistics.fmean(rewards):.3f}" if rewards else ""]
            for name, write in (("flops", si_spaced), ("tokens", si_spaced), ("seconds", duration)):
                spent = present(point.spent[name] for point in arm.points)
                row += [
                    write(statistics.fmean(spent)).strip() if len(spent) == len(arm.points) else ""
                ]
            table.append(row)
        return table

    def to_pandas(self) -> "DataFrame":
        """Return a DataFrame with a row for each arm: name, seeds, mean and its interval, and the
        fields of the difference as difference.NAME. Raises UserError without pandas.
        """
        rows = []
        for arm in self.arms:
            row: dict[str, object] = {
                "arm": arm.name,
                "seeds": len(arm.points),
                "mean": arm.mean,
                "low": None if arm.interval is None else arm.interval[0],
                "high": None if arm.interval is None else arm.interval[1],
            }
            if arm.difference is not None:
                row["difference"] = asdict(arm.difference)
            rows.append(row)
        return data_frame(rows, columns=("arm", "seeds", "mean", "low", "high"))

    def _repr_html_(self) -> str:
        """Return the results for a notebook."""
        notes = [*self.notes, *self.verdicts()]
        return html_table(self.rows(), caption=self.matched(), notes=notes)

    def settings(self) -> list[tuple[str, list[str]]]:
        """Return the differing settings, with each arm's value."""
        names = dict.fromkeys(name for arm in self.arms for name in arm.settings)
        return [(name, [_shown(arm.settings.get(name)) for arm in self.arms]) for name in names]

    def matched(self) -> str:
        """Name the point of comparison."""
        if self.apart is None:
            return (
                f"compared at {self._amount(self.reached)}, the furthest point of all runs, on "
                f"{self.num_tasks} shared held-out tasks"
            )
        costs = [point.spent[self.by] or 0.0 for point in self.arms[0].points]
        ends = dict.fromkeys([self._amount(min(costs)), self._amount(max(costs))])
        return (
            f"compared seed by seed at about {' to '.join(ends)}, the furthest point of all arms, "
            f"at most {100 * self.apart:.2f}% apart, on {self.num_tasks} shared held-out tasks"
        )

    def _amount(self, value: float) -> str:
        """Write a cost with its unit."""
        if self.by == "seconds":
            return duration(value)
        if self.by == "iteration":
            return f"iteration {value:g}"
        return f"{si_spaced(value)}{UNITS[self.by]}"

    def verdicts(self) -> list[str]:
        """Judge each further arm against the first, with the certainty.

        Only several seeds tell arms apart. With one, the verdict is about the two runs.
        """
        first = self.arms[0]
        sure = f"{self.confidence * 100:g}%"
        found = []
        for arm in self.arms[1:]:
            d = arm.difference
            if d is None:
                continue
            interval = f"{sure}: {d.low:+.3f} to {d.high:+.3f}"
            figures = f"held-out {self.metric} {d.mean:+.3f} ({interval}; p = {d.p_value:.2g})"
            verdict = d.verdict(self.confidence)
            if verdict == "no difference":
                between = f"{first.name} and {arm.name}"
                found.append(f"no difference seen between {between}: {figures}; {_ruled_out(d)}")
                continue
            higher = first.name
            lower = arm.name
            if verdict == "better":
                higher, lower = lower, higher
            what = f"{figures}, {arm.name} less {first.name}"
            if min(len(arm.points), len(first.points)) > 1:
                found.append(f"{higher} is better than {lower}: {what}")
            else:
                seen = f"{higher} scored higher than {lower} on these tasks"
                found.append(f"with one seed, {seen}: {what}")
        return found

    def table(self) -> str:
        """Write the comparison for a terminal: its point, its limits, then the results."""
        differ = [
            ["differs", *(arm.name for arm in self.arms)],
            *([name, *values] for name, values in self.settings()),
        ]
        blocks = [[self.matched()], self.notes, self.verdicts(), _aligned(self.rows())]
        blocks += [_aligned(self.sets)] if self.sets else []
        blocks += [[SEARCHED, *_aligned(self.searched)]] if self.searched else []
        blocks += [_aligned(differ)] if len(differ) > 1 else []
        return "\n\n".join("\n".join(block) for block in blocks if block)

    def write_html(self, path: Path) -> Path:
        """Write a page with curves. Raises StorageError."""
        html = template("comparison.html").render(
            css=css(), matched=self.matched(), rows=self.rows(), settings=self.settings(),
            notes=self.notes, sets=self.sets, searched=self.searched, searched_title=SEARCHED,
            verdicts=self.verdicts(),
            arms=[arm.name for arm in self.arms], figures=list(filter(None, map(self._figure, BY))),
        )  # fmt: skip
        write_text(path, visible(html))
        return path

    def _figure(self, by: By) -> Figure | None:
        """Draw held-out curves over the cost: one colour an arm, one line a seed."""
        curves = []
        for arm in self.arms:
            for point in arm.points:
                metric = held_out_metric(point.run)
                if metric is not None:
                    curves.append(Curve(arm.name, point.run, metric.of))
        title = f"Held-out {self.metric} over {UNITS[by]}"
        return curves_over(by, title, "A colour is an arm, a line a seed.", curves)


class Curve(NamedTuple):
    """A figure of a run, to draw over its cost."""

    name: str
    """Curves of one name share a colour."""
    run: RunData
    pick: Pick


def curves_over(by: By, title: str, caption: str, curves: Sequence[Curve]) -> Figure | None:
    """Draw figures of runs over iterations, FLOPs, tokens or seconds; None with fewer than two
    points.
    """
    names = list(dict.fromkeys(curve.name for curve in curves))
    lines: list[tuple[str, dict[float, float]]] = []
    for curve in curves:
        ends = zip(spent(curve.run)[by], curve.run.column(curve.pick), strict=True)
        line = {x: y for x, y in ends if x is not None and y is not None}
        lines.append((curve.name, line))
    xs = sorted({x for _, line in lines for x in line})
    if len(xs) < 2:
        return None
    series = []
    for name, line in lines:
        place = names.index(name)
        values = [line.get(x) for x in xs]
        series.append(Series(name, values, place % COLOURS + 1, dashed=place >= COLOURS))
    chart = line_chart(title, xs, series, axis=UNITS[by])
    if chart is None:
        return None
    keys = [(f"f{place % COLOURS + 1}", name) for place, name in enumerate(names)]
    return Figure(title, caption, chart, keys)


def compare_runs(
    folders: Sequence[Path | RunData],
    *,
    by: By = "iteration",
    confidence: float = 0.95,
    arms: Sequence[str] | None = None,
) -> RunComparison:
    """Compare runs, finished or not, by their folders or as already read.

    arms: the arm name of each run; the k-th runs of all arms have one seed. None: runs with the
        same settings, except for the seed, form an arm.

    Raises RunFolderError for other folders, UserError with nothing to compare: fewer than two runs,
    other held-out tasks or metrics, no figures for `by`."""
    if len(folders) < 2:
        raise UserError("only one run to compare; give two or more")
    if not 0.5 <= confidence <= 0.9999:
        raise UserError(
            f"confidence is {confidence!r}; give a number from 0.5 to 0.9999, such as 0.95"
        )
    runs = [one if isinstance(one, RunData) else read_run(Path(one)) for one in folders]
    metrics = {run.folder: held_out_metric(run) for run in runs}
    names = {None if metric is None else metric.name for metric in metrics.values()}
    if None in names or len(names) > 1:
        listed = ", ".join(
            f"{folder}: {'none' if one is None else one.name}" for folder, one in metrics.items()
        )
        raise UserError(
            f"the runs share no held-out metric ({listed}); give them the same validation_metric"
        )
    name = str(names.pop())
    reach = [max(present(spent(run)[by]), default=None) for run in runs]
    missing = [str(run.folder) for run, most in zip(runs, reach, strict=True) if most is None]
    if missing:
        raise UserError(
            f"{', '.join(missing)}: no {by} recorded; compare by another of {', '.join(BY)}"
        )
    if arms is None:
        choose = _newest
        seeds = [0] * len(runs)
    else:
        choose = _nearest
        seeds = [list(arms[:place]).count(arm) for place, arm in enumerate(arms)]
    ends = list(zip(present(reach), seeds, strict=True))
    limits = [min(most for most, other in ends if other == seed) for seed in seeds]
    points = [_point(run, by, limit, name, choose) for run, limit in zip(runs, limits, strict=True)]
    shared = set.intersection(*(set(point.scores) for point in points))
    if not shared:
        raise UserError("the runs share no held-out task; give them the same validation tasks")
    configs = [_config(point.run) for point in points]
    differing = _differing(configs)
    if arms is not None:  # named arms are made in different ways and share few settings
        differing = [key for key in differing if all(key in config for config in configs)]
    settings = [
        json.dumps({key: config.get(key) for key in differing}, default=str) for config in configs
    ]
    groups: dict[str, list[int]] = defaultdict(list)
    for place, arm in enumerate(settings if arms is None else arms):
        groups[arm].append(place)
    first = [_of(points[place], shared) for place in next(iter(groups.values()))]
    compared: list[Arm] = []
    for arm, places in groups.items():
        members = [points[place] for place in places]
        scores = [_of(point, shared) for point in members]
        by_task = [[value for run in scores for value in run[task]] for task in range(len(shared))]
        mean = estimate_mean(by_task, confidence)
        compared.append(
            Arm(
                name=arm if arms is not None else _name([point.run.folder for point in members]),
                points=members,
                settings=json.loads(settings[places[0]]),
                mean=mean.mean,
                interval=None if mean.low is None or mean.high is None else (mean.low, mean.high),
                difference=difference_over_seeds(first, scores, confidence) if compared else None,
            )
        )
    return RunComparison(
        by=by,
        reached=min(limits),
        metric=name,
        confidence=confidence,
        arms=compared,
        num_tasks=len(shared),
        notes=_notes(compared, points, len(shared)),
        apart=None if arms is None else _apart(points, seeds, by),
    )


def _name(folders: Sequence[Path]) -> str:
    """Name an arm by its folders; those of a sweep by their common part."""
    names = [folder.absolute().name for folder in folders]
    shared = {name.rpartition(",seed=")[0] for name in names}
    if len(shared) == 1 and all(shared):
        return min(shared)
    return ", ".join(names)


def _ruled_out(difference: Difference) -> str:
    """State the difference still possible if none was seen."""
    if difference.low <= 0 <= difference.high:
        most = max(abs(difference.low), abs(difference.high))
        return f"a difference of more than {most:.3f} either way is ruled out"
    return f"by chance in {100 * difference.p_value:.2g}% of cases"


def _apart(points: Sequence[Point], seeds: Sequence[int], by: By) -> float:
    """Return the largest difference in cost between runs of a seed, as a share of the largest."""
    by_seed: dict[int, list[float]] = defaultdict(list)
    for point, seed in zip(points, seeds, strict=True):
        by_seed[seed].append(point.spent[by] or 0.0)
    return max(1 - min(each) / max(each) if max(each) else 0.0 for each in by_seed.values())


def _notes(arms: Sequence[Arm], points: Sequence[Point], shared: int) -> list[str]:
    notes = []
    if len(arms) == 1:
        notes.append(
            "the runs differ only in their seeds: they are one arm, and there is no other to "
            "compare"
        )
    if len(arms) > 1 and min(len(arm.points) for arm in arms) < 2:
        notes.append(
            "an arm has one seed: its differences tell two runs apart, not their settings, "
            "because seeds may differ as much; use three seeds or more per arm (`ttrl sweep`)"
        )
    if shared < _FEW_TASKS:
        tasks = counted(shared, "held-out task")
        notes.append(f"only {tasks}: each is {1 / shared:.2g} of the score")
    others = len({task for point in points for task in point.scores}) - shared
    if others:
        notes.append(
            f"{others} held-out tasks are left out: not asked in all runs, or without a grade"
        )
    if len(arms) > 2:
        notes.append(f"{len(arms) - 1} differences: by chance, one in twenty has p < 0.05")
    return notes


def _newest(costs: Mapping[int, float], reached: float) -> int | None:
    """Return the last place that costs at most `reached`."""
    return max((place for place, cost in costs.items() if cost <= reached), default=None)


def _nearest(costs: Mapping[int, float], reached: float) -> int | None:
    """Return the place with a cost nearest to `reached`; of two, the earlier."""
    return min(costs, key=lambda place: (abs(costs[place] - reached), place), default=None)


def _point(
    run: RunData,
    by: By,
    reached: float,
    name: str,
    choose: Callable[[Mapping[int, float], float], int | None],
) -> Point:
    """Return the run at its validation chosen by the costs."""
    known_spent = spent(run)
    iterations = run.iterations
    there = set(run.numbers_with("validation.jsonl"))
    costs = {
        place: cost
        for place, cost in enumerate(known_spent[by])
        if cost is not None and iterations[place] in there
    }
    place = choose(costs, reached)
    if place is None:
        raise UserError(f"{run.folder}: no validation up to {compact(reached)} {UNITS[by]}")
    scores: Scores = defaultdict(list)
    iteration = iterations[place]
    for row in read_jsonl(run.iteration_folder(iteration) / "validation.jsonl"):
        if name == "reward":
            value = row.get("reward")
        else:
            value = (row.get("metrics") or {}).get(name)
        if value is not None and row.get("reward") is not None:
            scores[json.dumps([row["task_id"], row["messages"]], sort_keys=True)].append(
                float(value)
            )
    figures = {one: column[place] for one, column in known_spent.items()}
    return Point(run, iteration, figures, number(run.rows[place].reward), dict(scores))


def spent(run: RunData) -> dict[str, list[float | None]]:
    """Return the cumulative cost of a run at each row.

    "flops" covers sampling and training, without held-out samples and recomputation in the backward
    pass. Both depend on the way of watching and computing a run.
    """

    def running(pick: Pick) -> list[float]:
        return list(itertools.accumulate(value or 0.0 for value in run.column(pick)))

    def left_out(row: MetricsRow) -> float:
        return (row.flops.validation or 0.0) + (row.flops.recomputation or 0.0)

    totals = zip(run.rows, running(left_out), strict=True)
    return {
        "iteration": [float(one) for one in run.iterations],
        "flops": [
            None if row.flops.cumulated is None else row.flops.cumulated - less
            for row, less in totals
        ],
        "tokens": [*running(lambda row: row.completion_tokens)],
        "seconds": [*running(lambda row: row.seconds.total)],
    }


def differing_settings(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Return the settings with differences between the runs, with each run's value."""
    configs = [_config(run) for run in runs]
    shown = [without_secrets(config) for config in configs]
    return [(key, [_shown(config.get(key)) for config in shown]) for key in _differing(configs)]


def _differing(configs: Sequence[Settings]) -> list[str]:
    """Return the names of the settings with differences, without those of `_OURS`."""
    return sorted(
        {
            key
            for a, b in itertools.pairwise(configs)
            for key in (a.keys() | b.keys()) - _OURS
            if a.get(key) != b.get(key)
        }
    )


def _config(run: RunData) -> Settings:
    """Return the settings, with paths in the run's own folder, such as a warm start, made equal."""
    own = str(run.config.get("run") or run.folder.absolute())
    return {
        key: value.replace(own, "RUN") if isinstance(value, str) else value
        for key, value in flat(run.config).items()
    }


def _of(point: Point, shared: set[str]) -> list[list[float]]:
    return [point.scores[task] for task in sorted(shared)]


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    if not isinstance(value, str):
        return json.dumps(value)
    return value


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
