"""What the report shows of a run against its plan (plan.json): planned and measured, line by
line.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrl.errors import TtrlError
from ttrl.plans.measured import PLAN_FILE, measured_in_run, signal_share
from ttrl.run_folder.reader import number
from ttrl.text import duration, gib, percent, si_spaced

NEAR = 0.25
"""Lines that are further apart are marked."""
_FROM = {
    "assumed": "assumed",
    "tasks": "counted",
    "rough": "rough",
    "probe": "measured before the run",
    "run": "measured in an earlier part of the run",
}


@dataclass(frozen=True)
class PlanOutcome:
    """One figure as planned and as it came out."""

    name: str
    planned: float
    real: float
    write: Callable[[float], str]
    """Writes the number for people, with its unit."""
    source: str
    """What the plan's figure rests on."""

    @property
    def is_near(self) -> bool:
        """Tell whether what came out is within NEAR of what was planned."""
        return not self.planned or abs(self.real / self.planned - 1) <= NEAR

    def cells(self) -> list[str]:
        if self.planned:
            ratio = f"{self.real / self.planned:.2f}{'' if self.is_near else ' *'}"
        else:
            ratio = ""
        return [self.name, self.write(self.planned), self.write(self.real), ratio, self.source]


def plan_table(run_folder: Path, rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table; empty where the run has no plan or no finished iteration. rows:
    of metrics.jsonl.

    Never raises for what lies in the folder.
    """
    try:
        plan = json.loads((run_folder / PLAN_FILE).read_text(encoding="utf-8"))
        return [one.cells() for one in outcomes(plan, rows)]
    except (
        OSError,
        ValueError,
        ArithmeticError,
        LookupError,
        TypeError,
        AttributeError,
        TtrlError,
    ):
        return []  # of another version, or damaged


def outcomes(plan: Mapping[str, Any], metrics: Sequence[dict[str, Any]]) -> list[PlanOutcome]:
    """Compare a plan, as in plan.json, with rows of metrics.jsonl. Empty before the first iteration
    is finished.
    """
    rows = [row for row in metrics if row["iteration"] > 0]
    if not rows:
        return []

    def values(path: str) -> list[float]:
        return [known for row in rows if (known := number(row, path)) is not None]

    def mean(path: str) -> float | None:
        found = values(path)
        if found:
            return sum(found) / len(found)
        return None

    def both(one: str, other: str) -> float | None:
        first = mean(one)
        if first is None:
            return None
        return first + (mean(other) or 0.0)

    work = plan["work"]
    phases = plan["seconds"]["phases"]
    lengths = _FROM[plan["completions_from"]]
    made = "as the lengths"
    lines: list[tuple[str, float | None, float | None, Callable[[float], str], str]] = [
        ("samples of an iteration", work["samples"], mean("samples"), si_spaced, "counted"),
        (
            "tokens sampled",
            work["completion_tokens"],
            mean("completion_tokens"),
            si_spaced,
            lengths,
        ),
        (
            "prompt tokens",
            work["prompt_tokens"],
            mean("prompt_tokens"),
            si_spaced,
            _FROM[plan["prompts_from"]],
        ),
        (
            "groups with a signal",
            work["signal_share"],
            signal_share(rows),
            percent,
            _FROM[plan["signal_from"]],
        ),
        ("packed rows", work["rows"], mean("pack.rows"), si_spaced, made),
        ("tokens in rows", work["row_tokens"], mean("pack.row_tokens"), si_spaced, made),
        ("optimizer steps", work["optimizer_steps"], mean("train.steps"), si_spaced, made),
        (
            "sampling, FLOP",
            plan["flops"]["sampling"],
            both("flops.prefill", "flops.decode"),
            si_spaced,
            "counted, " + lengths,
        ),
        (
            "training, FLOP",
            plan["flops"]["training"],
            mean("train.flops"),
            si_spaced,
            "exact for the lengths",
        ),
    ]
    measured = {name: value.seconds for name, value in measured_in_run(metrics).items()}
    for name, phase in phases.items():
        lines.append(
            (
                f"seconds: {name}",
                phase["seconds"],
                measured.get(name),
                _seconds,
                _FROM[phase["source"]],
            )
        )
    source = _FROM[
        "rough" if any(phase["source"] == "rough" for phase in phases.values()) else "probe"
    ]
    lines.append(
        (
            "seconds: an iteration",
            plan["seconds"]["iteration"],
            measured["iteration"],
            _seconds,
            source,
        )
    )
    peak = max(values("train.memory_peaks.host"), default=None)
    lines.append(("trainer's memory", plan["memory"]["trainer"], peak, gib, "estimated"))
    return [
        PlanOutcome(name, planned, real, write, source)
        for name, planned, real, write, source in lines
        if planned is not None and real is not None
    ]


def _seconds(value: float) -> str:
    if value < 120:
        return f"{value:.2f} s"
    return duration(value)
