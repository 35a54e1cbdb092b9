"""What the report shows of findings, each with samples that show it, and of sampler against trainer
where they differ.
"""

import json
from typing import Any

from ttrl.monitoring.finding import Finding
from ttrl.monitoring.findings import findings
from ttrl.report.conversations import Page, sample_pages
from ttrl.report.samples import examples, stamp_of
from ttrl.run_folder.folder import DRIFT_FILE
from ttrl.run_folder.reader import RunData

_MEANS = {"stop": "going on is of no use", "warn": "learning suffers", "note": "worth knowing"}
_TOKEN_KEYS = ("task_id", "sample", "place", "before", "text", "after", "sampler", "trainer")
_CAUSE_KEYS = ("name", "verdict", "detail", "way_out")


def shown_findings(run: RunData) -> list[tuple[Finding, str, list[Page]]]:
    """Return what stands out, the most serious first, with what its severity means and pages of
    samples.
    """
    return [
        (one, _MEANS[one.severity], _example_pages(run, one))
        for one in findings(run.rows, run.config)
    ]


def _example_pages(run: RunData, finding: Finding) -> list[Page]:
    """Return samples that show it, of the newest iteration that has any."""
    if finding.examples is None:
        return []
    for number in run.numbers_with("rollouts.jsonl")[:-6:-1]:
        path = run.iteration_folder(number) / "rollouts.jsonl"
        samples = examples(path, finding.examples, stamp_of(path))
        if samples:
            return sample_pages(run, number, samples)
    return []


def newest_drift(run: RunData) -> dict[str, Any] | None:
    """Return the newest drift.json: tokens, causes and a lead; None where the run was always within
    its limits.
    """
    reports = sorted((run.folder / "iterations").glob(f"[0-9]*/{DRIFT_FILE}"))
    if not reports:
        return None
    try:
        report = json.loads(reports[-1].read_text(encoding="utf-8"))
        lead = (
            f"Iteration {report['iteration']}, tokens of policy {report['version']}: "
            f"{'; '.join(report['exceeded'])}. The tokens "
            "that are furthest apart, and the likely causes, checked:"
        )
        tokens = [{key: token[key] for key in _TOKEN_KEYS} for token in report["worst"]]
        causes = [{key: cause[key] for key in _CAUSE_KEYS} for cause in report["causes"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # of another version, or damaged
    return {"lead": lead, "tokens": tokens, "causes": causes}
