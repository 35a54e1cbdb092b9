"""Read what a run measured (rows of metrics.jsonl) in the terms of a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PLAN_FILE = "plan.json"
"""In a run folder."""


@dataclass(frozen=True)
class Seconds:
    """An expectation, and what it rests on: "rough", "probe" (measured before the run) or "run"
    (measured in it).
    """

    seconds: float
    source: str


def measured_in_run(rows: Sequence[Mapping[str, Any]], source: str = "run") -> dict[str, Seconds]:
    """Return the mean seconds of each phase over a run's iterations, of all of them together
    ("iteration": less than their sum where they overlap), and of what happens once: "server start",
    "trainer start". The first iteration waits for a trainer that starts, and the last one samples
    for nobody: the others count, if there are any. Where nothing was trained, nothing is known of
    training, nor of whole iterations.
    """
    seconds = {row["iteration"]: row["seconds"] for row in rows}
    numbers = sorted(number for number in seconds if number > 0)
    trained = {row["iteration"] for row in rows if row.get("trained") is not False}
    counted = [numbers[1:-1], numbers[1:], numbers]
    untrained = not trained.intersection(numbers)
    chosen = next(
        filter(None, ([seconds[n] for n in some if untrained or n in trained] for some in counted)),
        [],
    )
    if not chosen:
        return {}
    found = {
        name: mean
        for name in seconds_columns(chosen)
        if (mean := sum(row.get(name, 0.0) for row in chosen) / len(chosen))
    }
    found["other"] = sum(unnamed_seconds(row) for row in chosen) / len(chosen)
    found["iteration"] = sum(row["total"] for row in chosen) / len(chosen)
    if "prepare" in seconds.get(0, {}):
        found["server start"] = seconds[0]["prepare"]
    if untrained:
        found = {
            name: value
            for name, value in found.items()
            if name not in ("train", "sync", "iteration")
        }
    elif len(numbers) > 1 and numbers[0] in trained:
        found["trainer start"] = max(
            0.0, seconds[numbers[0]].get("train", 0.0) - found.get("train", 0.0)
        )
    return {name: Seconds(value, source) for name, value in found.items()}


def seconds_columns(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the phases of metrics rows' "seconds", in their order."""
    return list(dict.fromkeys(name for row in rows for name in row if name != "total"))


def unnamed_seconds(row: Mapping[str, float]) -> float:
    """Return what none of an iteration's phases took."""
    return max(0.0, row["total"] - sum(value for name, value in row.items() if name != "total"))


def signal_share(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of a run's groups that were trained on; None where none was packed."""
    groups = [row["groups"] for row in rows if "groups" in row]
    total = sum(group["total"] for group in groups)
    return sum(group["kept"] for group in groups) / total if total else None
