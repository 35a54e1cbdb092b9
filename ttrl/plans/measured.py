"""Read a run's measurements (rows of metrics.jsonl) in the terms of a plan."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ttrl.facts import MetricsRow, ratio

PLAN_FILE = "plan.json"
"""In a run folder."""


@dataclass(frozen=True)
class Seconds:
    """Hold an expectation and its source: "rough", "probe" (measured before the run) or "run"
    (measured in it).
    """

    seconds: float
    source: str


def measured_in_run(rows: Sequence[MetricsRow], source: str = "run") -> dict[str, Seconds]:
    """Return a run's mean seconds of each phase, of whole iterations ("iteration": less than the
    sum if phases overlap), and of the one-time "server start" and "trainer start".

    The first iteration waits for a starting trainer, and the last one samples for no later one:
    only the others count, if there are any. Without training, training and whole iterations stay
    unknown.
    """
    seconds = {row.iteration: row.seconds for row in rows}
    numbers = sorted(number for number in seconds if number > 0)
    trained = {row.iteration for row in rows if row.trained is not False}
    counted = [numbers[1:-1], numbers[1:], numbers]
    untrained = not trained.intersection(numbers)
    chosen = next(
        filter(None, ([seconds[n] for n in some if untrained or n in trained] for some in counted)),
        [],
    )
    if not chosen:
        return {}
    phases = [row.by_phase() for row in chosen]
    totals: Counter[str] = Counter()
    for row in phases:
        totals.update(row)
    found = {name: total / len(phases) for name, total in totals.items() if total}
    found["other"] = sum(row.unnamed for row in chosen) / len(chosen)
    found["iteration"] = sum(row.total or 0.0 for row in chosen) / len(chosen)
    if 0 in seconds and seconds[0].prepare is not None:
        found["server start"] = seconds[0].prepare
    if untrained:
        found = {
            name: value
            for name, value in found.items()
            if name not in ("train", "sync", "iteration")
        }
    elif len(numbers) > 1 and numbers[0] in trained:
        first = seconds[numbers[0]].train or 0.0
        found["trainer start"] = max(0.0, first - found.get("train", 0.0))
    return {name: Seconds(value, source) for name, value in found.items()}


def signal_share(rows: Sequence[MetricsRow]) -> float | None:
    """Return the share of a run's groups used in training; None if none was packed."""
    return ratio(sum(row.groups.kept for row in rows), sum(row.groups.total for row in rows))
