"""What a report says, read from a run folder: metrics by iteration, example conversations, words for numbers.

Everything may be missing: a run that stopped in its first iteration, one of an older version, a pruned file. Missing is None or
an empty list here, and left out on the page.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ttrl.errors import RunFolderError
from ttrl.files import read_jsonl
from ttrl.loop.charts import is_number
from ttrl.records import Sample

T = TypeVar("T")

PHASES = ("sample", "pack", "train", "sync", "validate")
EXAMPLES = 3
_SCANNED_LINES = 5000  # of a rollouts file: enough for any sensible example, without reading gigabytes


@dataclass
class RunData:
    """A run folder's content, as far as it is there."""

    folder: Path
    rows: list[dict[str, Any]]
    """metrics.jsonl by iteration, ascending; iteration 0 is the starting model."""
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def iterations(self) -> list[int]:
        """Numbers of the rows."""
        return [row["iteration"] for row in self.rows]

    @property
    def trained(self) -> list[dict[str, Any]]:
        """The rows of real iterations, without the starting model's."""
        return [row for row in self.rows if row["iteration"] > 0]

    def column(self, path: str) -> list[float | None]:
        """One value per row: column("train.entropy"); None where it is missing or no finite number."""
        return [number(row, path) for row in self.rows]

    def iteration_folder(self, iteration: int) -> Path:
        """iterations/0001 and so on."""
        return self.folder / "iterations" / f"{iteration:04d}"

    def numbers_with(self, name: str) -> list[int]:
        """The iterations of the metrics whose folder holds the file `name`."""
        return [one for one in self.iterations if (self.iteration_folder(one) / name).is_file()]


def number(row: dict[str, Any], path: str) -> float | None:
    """The value at a dotted path, None when it is not there or no finite number."""
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if is_number(value) else None


def read_run(folder: Path) -> RunData:
    """Reads a run folder. Raises RunFolderError when it is none, or when its metrics are damaged."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file() and not (folder / "iterations").is_dir():
        there = sorted(path.parent.name for path in folder.parent.glob("*/metrics.jsonl"))
        others = f"; there are: {', '.join(there)}" if there else ""
        what = "has neither metrics.jsonl nor iterations/" if folder.exists() else "does not exist"
        raise RunFolderError(f"{folder} is no run folder: it {what}; give the folder of a run, such as runs/NAME{others}")
    try:
        lines = read_jsonl(metrics)
    except ValueError as error:
        raise RunFolderError(f"{error}; remove that line, or move the file away: it is only read for reports") from error
    rows = {row["iteration"]: row for row in lines if isinstance(row, dict) and isinstance(row.get("iteration"), int)}
    ordered = [rows[key] for key in sorted(rows)]
    return RunData(folder, ordered, _mapping(folder / "config.yaml"), _mapping(folder / "environment.json"))


def _mapping(path: Path) -> dict[str, Any]:
    """A YAML or JSON file (JSON is YAML) as a dictionary; empty when it cannot be read."""
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


def read_samples(path: Path) -> list[Sample]:
    """Samples of a rollouts or validation file, at most the first few thousand; lines that are none are left out."""
    samples: list[Sample] = []
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line, _ in zip(file, range(_SCANNED_LINES), strict=False):
                try:
                    samples.append(Sample.from_json(json.loads(line)))
                except (ValueError, TypeError, AttributeError):
                    continue
    except OSError:
        return []
    return samples


def spread(items: Sequence[T], count: int = EXAMPLES) -> list[T]:
    """`count` items at even distances, the first one included: chosen by place, never by how good they look."""
    return [items[index * len(items) // count] for index in range(min(count, len(items)))]


def examples(samples: Iterable[Sample]) -> list[Sample]:
    """The first sample of tasks at even distances."""
    first: dict[str, Sample] = {}
    for sample in samples:
        first.setdefault(sample.task_id, sample)
    return spread(list(first.values()))


def before_and_after(before: Sequence[Sample], after: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Samples of the same task from both, for tasks at even distances."""
    later: dict[str, Sample] = {}
    for sample in after:
        later.setdefault(sample.task_id, sample)
    earlier: dict[str, Sample] = {}
    for sample in before:
        earlier.setdefault(sample.task_id, sample)
    return [(earlier[task], later[task]) for task in spread([task for task in earlier if task in later])]


def wilson(share: float, count: float, z: float = 1.96) -> tuple[float, float]:
    """The 95% interval (Wilson's) of a share of `count` independent trials; good near 0 and 1, unlike share ± z·error."""
    center = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, center - half), min(1.0, center + half)


def interval(row: dict[str, Any], metric: str) -> tuple[float, float] | None:
    """The interval of a held-out share; None when the value is no count of successes or the count is unknown."""
    share, count = number(row, metric), number(row, "validation_samples")
    if share is None or count is None or count < 1 or not 0 <= share <= 1:
        return None
    if abs(share * count - round(share * count)) > 1e-6 * count:
        return None  # partial credit: not a number of successes
    return wilson(share, count)


@dataclass(frozen=True)
class Metric:
    """What is compared between start and end."""

    path: str
    label: str
    """In a legend: "exact match"."""
    is_share: bool
    """All its values lie between 0 and 1, and it is no reward: shown in percent."""


def held_out_metric(run: RunData) -> Metric | None:
    """What the run's config calls its validation metric, else exact match, else the held-out reward; None without any."""
    names = [name for name in (run.config.get("validation_metric"), "exact") if isinstance(name, str) and name != "reward"]
    for path, label in [*((f"validation.{name}", name) for name in names), ("validation_reward", "reward")]:
        values = [value for value in run.column(path) if value is not None]
        if values:
            is_share = label != "reward" and all(0 <= value <= 1 for value in values)
            return Metric(path, "exact match" if label == "exact" else label, is_share)
    return None


def duration(seconds: float) -> str:
    """3.4 s, 2 min 41 s, 1 h 05 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes = int(seconds + 0.5) // 60
    if minutes < 60:
        return f"{minutes} min {int(seconds + 0.5) % 60:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def percent(value: float) -> str:
    """0.945 → 94.5%."""
    return f"{value * 100:.1f}".removesuffix(".0") + "%"


def phase_columns(run: RunData) -> dict[str, list[float | None]]:
    """Seconds per phase and row; "other" is what remains of the total."""
    columns = {phase: run.column(f"seconds.{phase}") for phase in PHASES}
    other: list[float | None] = []
    for index, total in enumerate(run.column("seconds.total")):
        known = sum(columns[phase][index] or 0.0 for phase in PHASES)
        other.append(max(total - known, 0.0) if total is not None else None)
    return columns | {"other": other}


def total_seconds(run: RunData) -> float:
    """Of all rows together."""
    return sum(value or 0.0 for column in phase_columns(run).values() for value in column)
