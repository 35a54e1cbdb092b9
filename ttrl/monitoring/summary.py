"""Sum up a whole run in a few lines, for the end of the console output and of `ttrl report`.

    held-out exact: start 0.5 (0), end 0.9 (20), best 0.91 (18), worst 0.48 (2); up 14, down 5, flat
    1; last 10: 0.88 … training reward: …
    advantages -2 to 2; KL 0.011, its share 8.2%, gradient norm 5.1, β 0.005 (means); 61.2 reward/s;
    graders 0.3 s an iteration, summed over samples

Steps up and down compare neighbouring values. These are noisy; the means of the last ten and
twenty, with their slopes (least squares), say more.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ttrl.facts import MetricsRow, Pick, held_out, metric, number, numbers, points
from ttrl.text import compact, percent

_WINDOWS = (10, 20)
_EQUAL = 1e-9


@dataclass(frozen=True)
class Course:
    """The course of a metric over a run: values with their iterations."""

    values: list[float]
    iterations: list[int]

    @property
    def steps(self) -> tuple[int, int, int]:
        """Count the steps up, down and flat."""
        steps = [after - before for before, after in itertools.pairwise(self.values)]
        up = sum(step > _EQUAL for step in steps)
        down = sum(step < -_EQUAL for step in steps)
        return up, down, len(steps) - up - down

    def moving(self, window: int) -> tuple[float, float] | None:
        """Return the mean of the last `window` values and their slope per iteration; None if there
        are fewer.
        """
        if len(self.values) < window:
            return None
        line = statistics.linear_regression(self.iterations[-window:], self.values[-window:])
        return statistics.fmean(self.values[-window:]), line.slope

    def line(self) -> str:
        """Write the whole course in one line."""

        def at(place: int) -> str:
            return f"{compact(self.values[place])} ({self.iterations[place]})"

        best, worst = (self.values.index(choose(self.values)) for choose in (max, min))
        up, down, flat = self.steps
        ends = (
            f"start {at(0)}, end {at(-1)}, best {at(best)}, worst {at(worst)}; up {up}, down "
            f"{down}, flat {flat}"
        )
        for window in _WINDOWS:
            moving = self.moving(window)
            if moving is not None:
                mean, slope = moving
                sign = "+" if slope >= 0 else ""
                ends += f"; MA{window} {compact(mean)}, {sign}{compact(slope)} an iteration"
        return ends


def course(rows: Sequence[MetricsRow], pick: Pick) -> Course | None:
    """Return the course of a figure; None with fewer than two values."""
    known = points(rows, pick)
    if len(known) > 1:
        return Course([value for _, value in known], [iteration for iteration, _ in known])
    return None


def summary_lines(
    rows: Sequence[MetricsRow], config: Mapping[str, Any], *, overfits: bool = False
) -> list[str]:
    """Return the lines. rows: of metrics.jsonl, ascending. overfits: whether the run validates on
    its training tasks.
    """
    name = str(config.get("validation_metric") or "reward")
    titles = {
        validated(name, overfits=overfits): held_out(name),
        "training reward": metric("reward"),
    }
    courses = {title: course(rows, pick) for title, pick in titles.items()}
    lines = [f"{title}: {one.line()}" for title, one in courses.items() if one is not None]
    if overfits and lines:
        lines.insert(
            0,
            "overfit mode: validated on the training tasks themselves, which says nothing about "
            "others",
        )

    def values(pick: Pick) -> list[float]:
        return numbers(map(pick, rows))

    parts = []
    lowest = values(lambda row: row.pack.advantages.lowest)
    if lowest:
        highest = values(lambda row: row.pack.advantages.highest)
        parts.append(f"advantages {compact(min(lowest))} to {compact(max(highest))}")
    found = {title: values(pick) for title, pick in _MEANS.items()}
    means = [
        f"{title} {(percent if title == 'its share' else compact)(statistics.fmean(of))}"
        for title, of in found.items()
        if of
    ]
    parts += [f"{', '.join(means)} (means)"] if means else []
    earned = sum((number(row.reward) or 0.0) * (row.samples or 0) for row in rows)
    seconds = sum(row.seconds.total or 0.0 for row in rows)
    parts += [f"{compact(earned / seconds)} reward/s"] if seconds and earned else []
    graded = values(lambda row: row.grading_seconds)
    if graded:
        mean = compact(statistics.fmean(graded))
        parts.append(f"graders {mean} s an iteration, summed over samples")
    return lines + (["; ".join(parts)] if lines and parts else [])


_MEANS: dict[str, Pick] = {
    "KL": lambda row: row.train.kl,
    "its share": lambda row: row.train.kl_share,
    "gradient norm": lambda row: row.train.grad_norm,
    "β": lambda row: row.train.kl_coefficient,
}


def validated(name: str, *, overfits: bool) -> str:
    """Name a metric of the validation: "held-out exact"; of a run that validates on its training
    tasks, "exact on the training tasks".
    """
    if overfits:
        return f"{name} on the training tasks"
    return f"held-out {name}"


def overfits(tasks: Mapping[str, object]) -> bool:
    """Tell from tasks.json whether a run validates on its training tasks."""
    one = tasks.get("tasks")
    other = tasks.get("validation_tasks")
    return bool(one) and one == other
