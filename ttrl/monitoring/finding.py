"""What findings are made of: one thing that stands out, a run's rows and the questions that rules
ask of them, a trend.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ttrl.run_folder.reader import number

RECENT = 5
"""Iterations that are judged together: one alone is noise, and twenty would tell a person too late.
"""

Severity = Literal["stop", "warn", "note"]
Examples = Literal["wrong", "right", "truncated", "failed", "repeated", "longest", "empty"]


@dataclass(frozen=True)
class Finding:
    """One thing that stands out."""

    key: str
    """Its name in code, such as "truncated"."""
    severity: Severity
    """"stop": going on is of no use; "warn": learning suffers; "note": worth knowing."""
    title: str
    """What stands out, as a sentence with its numbers."""
    advice: str
    examples: Examples | None = None
    """Which samples show it (`ttrl.report.samples.examples`)."""

    def line(self) -> str:
        return f"{self.title} {self.advice}"


@dataclass
class History:
    """The rows of a run, and the questions that rules ask of them."""

    rows: list[dict[str, Any]]
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def iterations(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["iteration"] > 0]

    @property
    def recent(self) -> list[dict[str, Any]]:
        """Return the last RECENT of them."""
        return self.iterations[-RECENT:]

    @property
    def recently(self) -> str:
        """Return their numbers: "iterations 3 to 7"."""
        numbers = [row["iteration"] for row in self.recent]
        if len(numbers) == 1:
            return f"iteration {numbers[0]}"
        return f"iterations {numbers[0]} to {numbers[-1]}"

    def values(self, path: str, rows: Sequence[dict[str, Any]] | None = None) -> list[float]:
        """Return what is known at a path, in order."""
        return [
            known
            for row in (self.iterations if rows is None else rows)
            if (known := number(row, path)) is not None
        ]

    def points(self, path: str) -> list[tuple[int, float]]:
        """Return [(iteration, value)] of all rows that know it, the starting model's included."""
        return [
            (row["iteration"], known)
            for row in self.rows
            if (known := number(row, path)) is not None
        ]

    def names(self, group: str) -> list[str]:
        """Return the names in a group of metrics, such as "validation", sorted."""
        groups = [row[group] for row in self.rows if isinstance(row.get(group), dict)]
        return sorted({name for one in groups for name in one})

    def now(self, path: str) -> float | None:
        """Return the mean over the recent iterations; None where there is nothing."""
        values = self.values(path, self.recent)
        if values:
            return statistics.fmean(values)
        return None

    def at_start(self, path: str) -> float | None:
        """Return the mean over the first three iterations that lie before the recent ones; None
        where there are none.
        """
        values = self.values(path, self.iterations[: -len(self.recent)] if self.recent else [])[:3]
        if values:
            return statistics.fmean(values)
        return None

    def share(self, part: str, whole: str) -> float | None:
        """Return sum over sum of the recent iterations."""
        pairs = [(number(row, part), number(row, whole)) for row in self.recent]
        known = [(p, w) for p, w in pairs if p is not None and w is not None]
        total = sum(w for _, w in known)
        if total:
            return sum(p for p, _ in known) / total
        return None

    def held_out(self) -> tuple[str, list[tuple[int, float]]]:
        """Return the name and the points [(iteration, value)] of the config's validation metric,
        else of the held-out reward.
        """
        name = self.config.get("validation_metric")
        if isinstance(name, str) and name != "reward":
            paths = [f"validation.{name}"]
        else:
            paths = []
        for path in [*paths, "validation_reward"]:
            points = self.points(path)
            if points:
                return path.removeprefix("validation.").replace(
                    "validation_reward", "reward"
                ), points
        return "reward", []


@dataclass(frozen=True)
class Trend:
    """A straight line through values, by least squares."""

    slope: float
    """Per iteration."""
    error: float
    """Standard error of it, from the scatter around the line."""
    count: int

    @property
    def t(self) -> float:
        """Return slope / error; infinite where the points lie on a line."""
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
