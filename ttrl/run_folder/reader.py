"""Read a run folder for reports: metrics by iteration, example conversations, words for numbers.

Anything may be missing: from a run stopped in its first iteration, an older version, a pruned file.
Missing values are None or an empty list here, and left out on the page.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ttrl.configs.base import Settings
from ttrl.errors import RunFolderError
from ttrl.facts import ConfigChange, Figure, MetricsRow, Pick, number, numbers, parse_facts
from ttrl.intervals import wilson
from ttrl.run_folder.config_changes import history
from ttrl.run_folder.folder import check_run_folder, read_yaml
from ttrl.text import counted, present

PHASES = ("sample", "pack", "train", "sync", "validate")


@dataclass
class RunData:
    """A run folder's content, as far as present."""

    folder: Path
    rows: list[MetricsRow]
    """By iteration, ascending; iteration 0 is the starting model."""
    config: Settings = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    config_history: list[ConfigChange] = field(default_factory=list)

    @property
    def iterations(self) -> list[int]:
        return [row.iteration for row in self.rows]

    @property
    def trained(self) -> list[MetricsRow]:
        """Return the rows of real iterations, without the starting model's."""
        return [row for row in self.rows if row.iteration > 0]

    def column(self, pick: Pick) -> list[float | None]:
        """Return one value per row; None if missing or not a finite number."""
        return [number(pick(row)) for row in self.rows]

    def iteration_folder(self, iteration: int) -> Path:
        return self.folder / "iterations" / f"{iteration:04d}"

    def numbers_with(self, name: str) -> list[int]:
        """Return the iterations of the metrics with a file `name` in their folder."""
        known = _FILES.setdefault((self.folder, name), set())
        for one in self.iterations:
            if one not in known and (self.iteration_folder(one) / name).exists():
                known.add(one)
        return [one for one in self.iterations if one in known]


_FILES: dict[tuple[Path, str], set[int]] = {}
"""Iterations with the file at an earlier look. Saves searching a long run again: reported files are
never removed.
"""


def read_run(folder: Path, rows: Sequence[MetricsRow] | None = None) -> RunData:
    """Read a run folder; `rows` of metrics.jsonl may be given. Raises RunFolderError for damaged
    metrics, or another folder.
    """
    check_run_folder(folder)
    if rows is None:
        rows = _rows(folder / "metrics.jsonl")
    known = {row.iteration: row for row in rows}
    ordered = [known[key] for key in sorted(known)]
    config, environment = (
        read_mapping(folder / name) for name in ("config.yaml", "environment.json")
    )
    return RunData(folder, ordered, config, environment, _history(folder))


def _rows(path: Path) -> list[MetricsRow]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return [*rows_in(data.split(b"\n"), path)]


def rows_in(lines: Sequence[bytes], path: Path, first: int = 1) -> Iterator[MetricsRow]:
    """Read lines of metrics.jsonl at `path`, from line number `first`. An interrupted append may
    have damaged the last one: it is left out. Raises RunFolderError for another damaged line.
    """
    for place, line in enumerate(lines, first):
        if not line.strip():
            continue
        try:
            yield parse_facts(MetricsRow, line)
        except ValueError as error:
            if place == first + len(lines) - 1:
                return
            raise RunFolderError(
                f"{path}, line {place}: not JSON ({error}); remove that line, or move the file "
                "away: only reports read it"
            ) from error
        except TypeError:  # no object, or one without an iteration
            continue


def _history(folder: Path) -> list[ConfigChange]:
    try:
        return history(folder)
    except RunFolderError:
        return []


def read_mapping(path: Path) -> Mapping[str, Any]:
    """Read a mapping in a YAML or JSON file (JSON is YAML); empty if unreadable."""
    try:
        stat = path.stat()
        return _parsed(path, stat.st_mtime_ns, stat.st_size)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}


@functools.lru_cache(maxsize=256)
def _parsed(path: Path, changed: int, size: int) -> Mapping[str, Any]:
    """Parse a file once while it is unchanged: parsing YAML takes longer than looking at the rest
    of a run folder.
    """
    value = read_yaml(path)
    if isinstance(value, dict):
        return value
    return {}


def interval(row: MetricsRow, name: str) -> tuple[float, float] | None:
    """Return the 95% interval of a held-out metric, or of the reward; None if unknown."""
    if row.validation_intervals is not None:
        return row.validation_intervals.get(name)
    share = number(row.held_out(name))
    count = row.validation_samples
    if share is None or count is None or count < 1 or not 0 <= share <= 1:
        return None
    right = round(share * count)
    # Partial credit.
    if abs(share * count - right) <= 1e-6 * count:
        return wilson(right, count)
    return None


@dataclass(frozen=True)
class Metric:
    """The metric compared between start and end."""

    name: str
    """"reward", or a metric of the graders."""
    is_share: bool
    """All its values lie between 0 and 1, and it is not a reward: shown in percent."""

    @property
    def label(self) -> str:
        """Return the name for a legend: "exact match"."""
        if self.name == "exact":
            return "exact match"
        return self.name

    def of(self, row: MetricsRow) -> Figure:
        """Return its held-out value."""
        return row.held_out(self.name)


def held_out_text(row: MetricsRow, name: str) -> str:
    """Write a held-out metric, its interval, and its sampling: "0.484 (95%: 0.363 to 0.606; greedy,
    64 tasks)".
    """
    span = interval(row, name)
    how = _sampling(row, name)
    more = []
    if span is not None:
        more.append(f"95%: {span[0]:.3f} to {span[1]:.3f}")
    if how:
        more.append(how)
    return f"{number(row.held_out(name)):.3f}" + (f" ({'; '.join(more)})" if more else "")


def held_out_sampling(run: RunData) -> str | None:
    """Describe the sampling of the newest held-out samples: "greedy, 64 tasks"; None for runs
    without a note of it.
    """
    metric = held_out_metric(run)
    name = "reward" if metric is None else metric.name
    sampled = present(_sampling(row, name) for row in run.rows)
    if sampled:
        return sampled[-1]
    return None


def _sampling(row: MetricsRow, name: str) -> str | None:
    """Describe a row's held-out sampling, the ungraded samples, and the number with the metric if
    not all: "greedy, 64 tasks, 3 samples failed, exact of 12 samples".
    """
    if row.validation_sampling is None:
        return None
    parts = [row.validation_sampling]
    if row.validation_failed:
        parts.append(f"{counted(row.validation_failed, 'sample')} failed")
    some = (row.validation_partial_metrics or {}).get(name)
    if some is not None:
        parts.append(f"{name} of {counted(some, 'sample')}")
    return ", ".join(parts)


def held_out_metric(run: RunData) -> Metric | None:
    """Return the validation metric of the run's config, else exact match, else the held-out reward;
    None without any.
    """
    names = [
        name
        for name in (run.config.get("validation_metric"), "exact")
        if isinstance(name, str) and name != "reward"
    ]
    for name in (*names, "reward"):
        values = numbers(row.held_out(name) for row in run.rows)
        if values:
            return Metric(name, name != "reward" and all(0 <= value <= 1 for value in values))
    return None


def phase_columns(run: RunData) -> dict[str, list[float | None]]:
    """Return seconds per phase and row; "other" is the rest of the total."""
    rows = [row.seconds.by_phase() for row in run.rows]
    columns: dict[str, list[float | None]] = {
        phase: [row.get(phase) for row in rows] for phase in PHASES
    }
    other: list[float | None] = []
    for row, seconds in zip(run.rows, rows, strict=True):
        known = sum(seconds.get(phase, 0.0) for phase in PHASES)
        total = row.seconds.total
        other.append(max(total - known, 0.0) if total is not None else None)
    return columns | {"other": other}


def total_seconds(run: RunData) -> float:
    """Return the total seconds of all rows; overlapping phases count once if an iteration's total
    is known.
    """
    total = 0.0
    for row in run.rows:
        if row.seconds.total is not None:
            total += row.seconds.total
        else:
            seconds = row.seconds.by_phase()
            total += sum(seconds.get(phase, 0.0) for phase in PHASES)
    return total


def model_name(run: RunData) -> str:
    """Return the config's model; "" without one."""
    value = run.config.get("model")
    if isinstance(value, str):
        return value
    return ""
