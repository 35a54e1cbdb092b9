"""Define findings, and give their rules a run's history and trends."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ttrl.configs.base import Settings
from ttrl.facts import MetricsRow, Pick, held_out, number, numbers, points

RECENT = 5
"""Iterations judged together: one is noise, and twenty would tell a person too late."""

Severity = Literal["stop", "warn", "note"]
MARKS: dict[Severity, str] = {"stop": "!!", "warn": " !", "note": " ·"}
Examples = Literal["wrong", "right", "truncated", "failed", "repeated", "longest", "empty"]


@dataclass(frozen=True)
class Finding:
    """One conspicuous fact about a run."""

    key: str
    """Its name in code, such as "truncated"."""
    severity: Severity
    """"stop": continuing is of no use; "warn": learning suffers; "note": worth knowing."""
    title: str
    """The fact as a sentence with its numbers."""
    advice: str
    examples: Examples | None = None
    """The kind of samples to show for it (`ttrl.report.samples.examples`)."""

    def line(self) -> str:
        return f"{self.title} {self.advice}"


@dataclass
class History:
    """The rows of a run, with queries for the rules."""

    rows: list[MetricsRow]
    config: Settings = field(default_factory=dict)

    @property
    def iterations(self) -> list[MetricsRow]:
        return [row for row in self.rows if row.iteration > 0]

    @property
    def recent(self) -> list[MetricsRow]:
        """Return the last RECENT rows."""
        return self.iterations[-RECENT:]

    @property
    def recently(self) -> str:
        """Return the numbers of the recent iterations: "iterations 3 to 7"."""
        numbers = [row.iteration for row in self.recent]
        if len(numbers) == 1:
            return f"iteration {numbers[0]}"
        return f"iterations {numbers[0]} to {numbers[-1]}"

    def values(self, pick: Pick, rows: Sequence[MetricsRow] | None = None) -> list[float]:
        """Return the known values of a figure, in order."""
        return numbers(map(pick, self.iterations if rows is None else rows))

    def points(self, pick: Pick) -> list[tuple[int, float]]:
        """Return [(iteration, value)] of all rows with the figure, the starting model included."""
        return points(self.rows, pick)

    def now(self, pick: Pick) -> float | None:
        """Return the mean over the recent iterations; None without values."""
        values = self.values(pick, self.recent)
        if values:
            return statistics.fmean(values)
        return None

    def at_start(self, pick: Pick) -> float | None:
        """Return the mean over the first three iterations before the recent ones; None without
        any.
        """
        values = self.values(pick, self.iterations[: -len(self.recent)] if self.recent else [])[:3]
        if values:
            return statistics.fmean(values)
        return None

    def share(self, part: Pick, whole: Pick) -> float | None:
        """Return the ratio of two sums over the recent iterations."""
        pairs = [(number(part(row)), number(whole(row))) for row in self.recent]
        known = [(p, w) for p, w in pairs if p is not None and w is not None]
        total = sum(w for _, w in known)
        if total:
            return sum(p for p, _ in known) / total
        return None

    @property
    def overfits(self) -> bool:
        """Tell whether the run validates on its training tasks on purpose."""
        return bool(self.config.get("overfit"))

    def held_out(self) -> tuple[str, list[tuple[int, float]]]:
        """Return name and points [(iteration, value)] of the config's validation metric, else of
        the held-out reward.
        """
        name = self.config.get("validation_metric")
        names = [name, "reward"] if isinstance(name, str) else ["reward"]
        for name in names:
            points = self.points(held_out(name))
            if points:
                return name, points
        return "reward", []


@dataclass(frozen=True)
class Trend:
    """A straight line through values, by least squares."""

    slope: float
    """Per iteration."""
    error: float
    """Standard error of the slope, from the scatter around the line."""
    count: int

    @property
    def t(self) -> float:
        """Return slope / error; infinite for points exactly on a line."""
        if self.error > 0:
            return self.slope / self.error
        if self.slope:
            return math.copysign(math.inf, self.slope)
        return 0.0


def trend(points: Sequence[tuple[float, float]]) -> Trend | None:
    """Fit a line. None for fewer than four points: three leave one degree of freedom to tell noise
    from slope.
    """
    if len(points) < 4 or len({x for x, _ in points}) < 2:
        return None
    x_mean, y_mean = (statistics.fmean(column) for column in zip(*points, strict=True))
    spread = sum((x - x_mean) ** 2 for x, _ in points)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in points) / spread
    residual = sum((y - y_mean - slope * (x - x_mean)) ** 2 for x, y in points)
    return Trend(slope, math.sqrt(residual / (len(points) - 2) / spread), len(points))
