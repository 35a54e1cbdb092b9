"""The report's section that holds a run against its plan (plan.json), as HTML."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrl.errors import TtrlError
from ttrl.plans.measured import PLAN_FILE, measured_in_run, signal_share
from ttrl.report.markup import section, text_html
from ttrl.text import gib
from ttrl.text import rough_duration as duration
from ttrl.text import si_spaced as si

NEAR = 0.25
"""What is further apart is marked."""
_FROM = {
    "assumed": "assumed",
    "tasks": "counted",
    "rough": "rough",
    "probe": "measured before the run",
    "run": "measured in an earlier part of the run",
}


@dataclass(frozen=True)
class Outcome:
    """A line of the comparison."""

    name: str
    planned: float
    real: float
    write: Callable[[float], str]
    """The number for people, with its unit."""
    source: str
    """What the plan's figure rests on."""

    @property
    def ratio(self) -> float | None:
        """What came out, of what was planned."""
        return self.real / self.planned if self.planned else None

    @property
    def is_near(self) -> bool:
        """Within a quarter."""
        return self.ratio is None or abs(self.ratio - 1) <= NEAR


def plan_section(run_folder: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Planned and measured, line by line; empty where the run has no plan or no finished iteration. rows: of metrics.jsonl. Never
    raises for what lies in the folder."""
    try:
        plan = json.loads((run_folder / PLAN_FILE).read_text(encoding="utf-8"))
        lines = outcomes(plan, rows)
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, TtrlError):
        return ""  # of another version, or damaged
    if not lines:
        return ""
    body = ""
    for line in lines:
        ratio = "" if line.ratio is None else f"{line.ratio:.2f}{'' if line.is_near else ' *'}"
        cells = (line.write(line.planned), line.write(line.real), ratio, line.source)
        body += f"<tr><th>{text_html(line.name)}</th>{''.join(f'<td>{text_html(cell)}</td>' for cell in cells)}</tr>"
    head = "<th></th><th>planned</th><th>came out</th><th>came out / planned</th><th>the plan's figure is</th>"
    table = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    lead = (
        "What was expected before the first iteration (plan.json), and the mean of the iterations. Lines that are more than "
        f"{100 * NEAR:.0f}% apart are marked with *."
    )
    return section("Plan and outcome", table, lead)


def outcomes(plan: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """plan: as in plan.json; metrics: rows of metrics.jsonl. Empty before the first iteration is finished."""
    rows = [row for row in metrics if row["iteration"] > 0]
    if not rows:
        return []
    work, seconds = plan["work"], plan["seconds"]
    lengths, signal = _FROM[plan["completions_from"]], _FROM[plan["signal_from"]]
    made = "as the lengths"
    lines = [
        ("samples of an iteration", work["samples"], _mean(rows, "samples"), si, "counted"),
        ("tokens sampled", work["completion_tokens"], _mean(rows, "completion_tokens"), si, lengths),
        ("prompt tokens", work["prompt_tokens"], _mean(rows, "prompt_tokens"), si, _FROM[plan["prompts_from"]]),
        ("groups with a signal", work["signal_share"], signal_share(rows), _percent, signal),
        ("packed rows", work["rows"], _mean(rows, "pack.rows"), si, made),
        ("tokens in rows", work["row_tokens"], _mean(rows, "pack.row_tokens"), si, made),
        ("optimizer steps", work["optimizer_steps"], _mean(rows, "train.steps"), si, made),
        ("training, FLOP", plan["flops"]["training"], _mean(rows, "train.flops"), si, "exact for the lengths"),
    ]
    measured = {name: value.seconds for name, value in measured_in_run(metrics).items()}
    for name, phase in seconds["phases"].items():
        lines.append((f"seconds: {name}", phase["seconds"], measured.get(name), _seconds, _FROM[phase["source"]]))
    rough = any(phase["source"] == "rough" for phase in seconds["phases"].values())
    source = _FROM["rough" if rough else "probe"]
    lines.append(("seconds: an iteration", seconds["iteration"], measured["iteration"], _seconds, source))
    lines.append(("trainer's memory", plan["memory"]["trainer"], _mean(rows, "train.memory_peaks.host", max), gib, "estimated"))
    return [
        Outcome(name, planned, real, *rest) for name, planned, real, *rest in lines if planned is not None and real is not None
    ]


def _mean(rows: Sequence[Mapping[str, Any]], path: str, of: Any = None) -> float | None:
    """Of the number at a dotted path, over the rows that have it. of: another function of the list."""
    found = []
    for row in rows:
        value: Any = row
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, int | float):
            found.append(float(value))
    if not found:
        return None
    return float(of(found)) if of is not None else sum(found) / len(found)


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 120 else duration(value)
