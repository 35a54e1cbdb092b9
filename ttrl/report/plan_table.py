"""Compare a run with its plan (plan.json) for the report: planned and measured, line by line."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttrl.facts import MetricsRow, Pick, numbers
from ttrl.plans.measured import measured_in_run, signal_share
from ttrl.plans.plan import Plan
from ttrl.text import duration, gib, percent, si_spaced

NEAR = 0.25
"""Lines further apart are marked."""
_FROM = {
    "assumed": "assumed",
    "tasks": "counted",
    "rough": "rough",
    "probe": "measured before the run",
    "run": "measured in an earlier part of the run",
}


@dataclass(frozen=True)
class PlanOutcome:
    """One figure, planned and measured."""

    name: str
    planned: float
    real: float
    write: Callable[[float], str]
    """Formats the number for people, with its unit."""
    source: str
    """The basis of the plan's figure."""

    @property
    def is_near(self) -> bool:
        """Tell whether the measured figure is within NEAR of the planned one."""
        return not self.planned or abs(self.real / self.planned - 1) <= NEAR

    def cells(self) -> list[str]:
        if self.planned:
            ratio = f"{self.real / self.planned:.2f}{'' if self.is_near else ' *'}"
        else:
            ratio = ""
        return [self.name, self.write(self.planned), self.write(self.real), ratio, self.source]


def plan_table(run_folder: Path, rows: Sequence[MetricsRow]) -> list[list[str]]:
    """Return the rows of the table; empty without a plan or a finished iteration.

    Never raises for the folder's content.
    """
    try:
        return [one.cells() for one in outcomes(Plan.load(run_folder), rows)]
    except (OSError, ValueError, ArithmeticError, LookupError):
        return []  # of another version, or damaged


def outcomes(plan: Plan, metrics: Sequence[MetricsRow]) -> list[PlanOutcome]:
    """Compare a plan with rows of metrics.jsonl. Empty before the first iteration is finished."""
    rows = [row for row in metrics if row.iteration > 0]
    if not rows:
        return []

    def mean(pick: Pick) -> float | None:
        found = numbers(map(pick, rows))
        if found:
            return sum(found) / len(found)
        return None

    def sampling(row: MetricsRow) -> float | None:
        if row.flops.prefill is None:
            return None
        return row.flops.prefill + (row.flops.decode or 0.0)

    work = plan.work
    phases = plan.seconds.phases
    lengths = _FROM[plan.completions_from]
    prompts = _FROM[plan.prompts_from]
    made = "as for the lengths"
    measured = {name: value.seconds for name, value in measured_in_run(metrics).items()}
    rough = any(phase.source == "rough" for phase in phases.values())
    memory = [row.train.memory_peaks or {} for row in rows]
    peaks = [peak["host"] for peak in memory if "host" in peak]
    lines: list[PlanOutcome] = []

    def line(
        name: str,
        planned: float,
        real: float | None,
        source: str,
        write: Callable[[float], str] = si_spaced,
    ) -> None:
        if real is not None:
            lines.append(PlanOutcome(name, planned, real, write, source))

    line("samples of an iteration", work.samples, mean(lambda row: row.samples), "counted")
    line("tokens sampled", work.completion_tokens, mean(lambda row: row.completion_tokens), lengths)
    line("prompt tokens", work.prompt_tokens, mean(lambda row: row.prompt_tokens), prompts)
    kept = signal_share(rows)
    line("groups with a signal", work.signal_share, kept, _FROM[plan.signal_from], percent)
    line("packed rows", work.rows, mean(lambda row: row.pack.rows), made)
    line("tokens in rows", work.row_tokens, mean(lambda row: row.pack.row_tokens), made)
    line("optimizer steps", work.optimizer_steps, mean(lambda row: row.train.steps), made)
    line("sampling, FLOP", plan.flops.sampling, mean(sampling), "counted, " + lengths)
    exact = "exact for the lengths"
    line("training, FLOP", plan.flops.training, mean(lambda row: row.train.flops), exact)
    for name, phase in phases.items():
        source = _FROM[phase.source]
        line(f"seconds: {name}", phase.seconds, measured.get(name), source, _seconds)
    source = _FROM["rough" if rough else "probe"]
    whole = measured.get("iteration")
    line("seconds: an iteration", plan.seconds.iteration, whole, source, _seconds)
    line("trainer's memory", plan.memory.trainer, max(peaks, default=None), "estimated", gib)
    return lines


def _seconds(value: float) -> str:
    if value < 120:
        return f"{value:.2f} s"
    return duration(value)
