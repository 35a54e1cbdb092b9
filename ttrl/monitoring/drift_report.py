"""Read and write drift.json: the worst tokens of a drift and its likely causes."""

from pathlib import Path
from typing import Literal

from ttrl.facts import Difference, Facts, parse
from ttrl.run_folder.folder import DRIFT_FILE

Verdict = Literal["found", "ruled out", "could not be checked"]


class WorstToken(Facts, omit_defaults=False):
    """A token with a large difference between sampler and trainer, in its context."""

    task_id: str
    sample: int
    place: int
    """Its number among the generated tokens, from 0."""
    text: str
    before: str
    after: str
    position: int = 0
    """Its position in the whole sequence."""
    token_id: int = 0
    trainer: float | None = None
    sampler: float | None = None
    as_sent: bool | None = None
    """Whether the pack's ids up to it match the ids given to the sampler; None if unknown, or with
    several turns.
    """

    def line(self) -> str:

        def shown(text: str) -> str:
            return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)

        sampler, trainer = (
            "not finite" if value is None else f"{value:.4f}"
            for value in (self.sampler, self.trainer)
        )
        return (
            f"  sampler {sampler}, trainer {trainer}: task {self.task_id!r}, sample "
            f"{self.sample}, token {self.place} "
            f"(position {self.position}, id {self.token_id}): "
            f"…{shown(self.before)}[{shown(self.text)}]{shown(self.after)}…"
        )


class Cause(Facts, omit_defaults=False):
    """One likely cause and its evidence."""

    name: str
    verdict: Verdict
    detail: str
    way_out: str = ""

    def line(self) -> str:
        marks = {"found": "FOUND", "could not be checked": "not checked"}
        mark = marks.get(self.verdict, self.verdict)
        if self.way_out and self.verdict != "ruled out":
            way = f" → {self.way_out}"
        else:
            way = ""
        return f"  {mark:<11} {self.name}: {self.detail}{way}"


class DriftReport(Facts, omit_defaults=False):
    """The content of drift.json."""

    iteration: int
    version: int
    """The sampling policy."""
    exceeded: list[str]
    """The exceeded limits, in words."""
    worst: list[WorstToken]
    causes: list[Cause]
    figures: Difference = Difference()

    @property
    def lead(self) -> str:
        """Return the text above the tokens."""
        return (
            f"Iteration {self.iteration}, tokens of policy {self.version}: "
            f"{'; '.join(self.exceeded)}. The worst tokens, and the likely causes, checked:"
        )


def read_newest_report(run: Path) -> DriftReport | None:
    """Read the newest drift.json of a run; None if it is missing, damaged or of another version."""
    paths = sorted((run / "iterations").glob(f"[0-9]*/{DRIFT_FILE}"))
    if not paths:
        return None
    try:
        return parse(DriftReport, paths[-1].read_bytes())
    except (OSError, ValueError):
        return None
