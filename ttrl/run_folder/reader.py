"""What a report says, read from a run folder: metrics by iteration, example conversations, words
for numbers.

Everything may be missing: a run that stopped in its first iteration, one of an older version, a
pruned file. Missing is None or an empty list here, and left out on the page.
"""

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ttrl.errors import RunFolderError
from ttrl.intervals import wilson
from ttrl.run_folder.config_changes import HISTORY_FILE
from ttrl.run_folder.folder import check_run_folder, read_yaml
from ttrl.system.files import read_jsonl
from ttrl.text import counted, flat, is_number

PHASES = ("sample", "pack", "train", "sync", "validate")


@dataclass
class RunData:
    """A run folder's content, as far as it is there."""

    folder: Path
    rows: list[dict[str, Any]]
    """metrics.jsonl by iteration, ascending; iteration 0 is the starting model."""
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    config_history: list[dict[str, Any]] = field(default_factory=list)
    """Changed settings (`ttrl.run_folder.config_changes`): {"iteration": the first, "time",
    "changes": {name: [before, now]}}.
    """

    @property
    def iterations(self) -> list[int]:
        return [row["iteration"] for row in self.rows]

    @property
    def trained(self) -> list[dict[str, Any]]:
        """Return the rows of real iterations, without the starting model's."""
        return [row for row in self.rows if row["iteration"] > 0]

    @functools.cached_property
    def flat(self) -> list[dict[str, float]]:
        """Return the numbers of each row by dotted names."""
        return [_flat(row) for row in self.rows]

    def column(self, path: str) -> list[float | None]:
        """Return one value per row: column("train.entropy"); None where it is missing or not a
        finite number.
        """
        return [row.get(path) for row in self.flat]

    def iteration_folder(self, iteration: int) -> Path:
        return self.folder / "iterations" / f"{iteration:04d}"

    def numbers_with(self, name: str) -> list[int]:
        """Return the iterations of the metrics whose folder holds the file `name`."""
        known = _FILES.setdefault((self.folder, name), set())
        for one in self.iterations:
            if one not in known and (self.iteration_folder(one) / name).exists():
                known.add(one)
        return [one for one in self.iterations if one in known]


_FILES: dict[tuple[Path, str], set[int]] = {}
"""Iterations that had a file when a report looked, so that a long run is not searched again:
reported files are never removed.
"""
_FLAT: dict[int, tuple[dict[str, Any], dict[str, float]]] = {}
"""By identity of the row, which is held here, so that no other can have it."""


def _flat(row: dict[str, Any]) -> dict[str, float]:
    """Return the row's numbers by dotted names. A run gives the same rows to each of its
    reports.
    """
    known = _FLAT.get(id(row))
    if known is not None and known[0] is row:
        return known[1]
    numbers = {name: float(value) for name, value in flat(row).items() if is_number(value)}
    if len(_FLAT) > 5000:
        _FLAT.clear()
    _FLAT[id(row)] = row, numbers
    return numbers


def number(row: dict[str, Any], path: str) -> float | None:
    """Return the value at a dotted path; None when it is not there or not a finite number."""
    value: Any = row
    for key in path.split("."):
        if isinstance(value, dict):
            value = value.get(key)
        else:
            value = None
    if is_number(value):
        return float(value)
    return None


def read_run(folder: Path, rows: Sequence[dict[str, Any]] | None = None) -> RunData:
    """Read a run folder; `rows` of metrics.jsonl may be given. Raises RunFolderError for damaged
    metrics, or another folder.
    """
    check_run_folder(folder)
    metrics = folder / "metrics.jsonl"
    try:
        if rows is None:
            lines = read_jsonl(metrics)
        else:
            lines = list(rows)
    except ValueError as error:
        raise RunFolderError(
            f"{error}; remove that line, or move the file away: it is only read for reports"
        ) from error
    known = {
        row["iteration"]: row
        for row in lines
        if isinstance(row, dict) and isinstance(row.get("iteration"), int)
    }
    ordered = [known[key] for key in sorted(known)]
    config, environment = (
        read_mapping(folder / name) for name in ("config.yaml", "environment.json")
    )
    return RunData(folder, ordered, config, environment, _lines(folder / HISTORY_FILE))


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return read_jsonl(path)
    except ValueError:
        return []


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file (JSON is YAML) as a dictionary; empty when it cannot be read."""
    try:
        stat = path.stat()
        return copy.deepcopy(_parsed(path, stat.st_mtime_ns, stat.st_size))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}


@functools.lru_cache(maxsize=8)
def _parsed(path: Path, changed: int, size: int) -> dict[str, Any]:
    """Parse a file once as long as it stays what it is: YAML takes longer to parse than the rest of
    a run folder to look at.
    """
    value = read_yaml(path)
    if isinstance(value, dict):
        return value
    return {}


def interval(row: dict[str, Any], metric: str) -> tuple[float, float] | None:
    """Return the 95% interval of a held-out metric; None when it is not known."""
    known = row.get("validation_intervals")
    if isinstance(known, dict):
        if metric == "validation_reward":
            name = "reward"
        else:
            name = metric.removeprefix("validation.")
        if name in known:
            return (known[name][0], known[name][1])
        return None
    share = number(row, metric)
    count = number(row, "validation_samples")
    if share is None or count is None or count < 1 or not 0 <= share <= 1:
        return None
    right = round(share * count)
    # Partial credit.
    if abs(share * count - right) <= 1e-6 * count:
        return wilson(right, count)
    return None


@dataclass(frozen=True)
class Metric:
    """What is compared between start and end."""

    path: str
    label: str
    """In a legend: "exact match"."""
    is_share: bool
    """All its values lie between 0 and 1, and it is not a reward: shown in percent."""


def held_out_text(row: dict[str, Any], name: str) -> str:
    """Write a held-out metric, its interval, and how it was sampled: "0.484 (95%: 0.363 to 0.606;
    greedy, 64 tasks)".
    """
    if name == "reward":
        path = "validation_reward"
    else:
        path = f"validation.{name}"
    span = interval(row, path)
    how = _sampling(row, name)
    if span is None:
        more = []
    else:
        more = [f"95%: {span[0]:.3f} to {span[1]:.3f}"]
    more += [how] if how else []
    return f"{number(row, path):.3f}" + (f" ({'; '.join(more)})" if more else "")


def held_out_sampling(run: RunData) -> str | None:
    """Say how the newest held-out samples were drawn: "greedy, 64 tasks"; None for runs that did
    not note it.
    """
    metric = held_out_metric(run)
    if metric is None:
        name = "reward"
    else:
        name = metric.path.removeprefix("validation.")
    known = [how for row in run.rows if (how := _sampling(row, name)) is not None]
    if known:
        return known[-1]
    return None


def _sampling(row: dict[str, Any], name: str) -> str | None:
    """Say how a row's held-out samples were drawn, how many have no grade, and how many have the
    metric if not all do: "greedy, 64 tasks, 3 samples failed, exact of 12 samples"."""
    how = row.get("validation_sampling")
    failed = row.get("validation_failed")
    if not isinstance(how, str):
        return None
    parts = [how]
    if failed:
        parts.append(f"{counted(failed, 'sample')} failed")
    some = (row.get("validation_partial_metrics") or {}).get(name)
    if some is not None:
        parts.append(f"{name} of {counted(some, 'sample')}")
    return ", ".join(parts)


def held_out_metric(run: RunData) -> Metric | None:
    """Return what the run's config calls its validation metric, else exact match, else the held-out
    reward; None without any.
    """
    names = [
        name
        for name in (run.config.get("validation_metric"), "exact")
        if isinstance(name, str) and name != "reward"
    ]
    for path, label in [
        *((f"validation.{name}", name) for name in names),
        ("validation_reward", "reward"),
    ]:
        values = [value for value in run.column(path) if value is not None]
        if values:
            is_share = label != "reward" and all(0 <= value <= 1 for value in values)
            return Metric(path, "exact match" if label == "exact" else label, is_share)
    return None


def phase_columns(run: RunData) -> dict[str, list[float | None]]:
    """Return seconds per phase and row; "other" is what remains of the total."""
    columns = {phase: run.column(f"seconds.{phase}") for phase in PHASES}
    other: list[float | None] = []
    for index, total in enumerate(run.column("seconds.total")):
        known = sum(columns[phase][index] or 0.0 for phase in PHASES)
        other.append(max(total - known, 0.0) if total is not None else None)
    return columns | {"other": other}


def total_seconds(run: RunData) -> float:
    """Return the seconds of all rows together; phases that overlap count once, where the total of
    an iteration is known.
    """
    phases = zip(*(run.column(f"seconds.{phase}") for phase in PHASES), strict=True)
    totals = zip(run.column("seconds.total"), phases, strict=True)
    return sum(
        sum(value or 0.0 for value in known) if total is None else total for total, known in totals
    )


def model_name(run: RunData) -> str:
    """Return what the config calls the model; "" where it does not."""
    value = run.config.get("model")
    if isinstance(value, str):
        return value
    return ""
