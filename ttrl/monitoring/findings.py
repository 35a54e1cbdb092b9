"""Why a run may not learn: what stands out in its metrics, in words, with the numbers and what to try.

    findings(rows, config) → [Finding, …], the gravest first; none for a healthy run

Everything is judged over the last RECENT iterations, against the first ones or against a limit whose reason stands beside it in
the rules. A limit is where something is nearly always wrong, not where it might be: a list that cries wolf is not read. Pure
functions of metrics.jsonl's rows: the same at the terminal, in the report, and later from a run folder alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ttrl.monitoring.finding import Finding, History
from ttrl.monitoring.findings_policy import POLICY
from ttrl.monitoring.findings_sampling import SAMPLING
from ttrl.monitoring.findings_trouble import TROUBLE

_ORDER = ("stop", "warn", "note")


def findings(rows: Sequence[dict[str, Any]], config: Mapping[str, Any] | None = None) -> list[Finding]:
    """What stands out in a run.

    rows: of metrics.jsonl, by iteration; whatever is missing or null in them is left out. config: config.yaml's content, for what
    only it can say (limits that the person set).
    """
    history = History([row for row in rows if isinstance(row.get("iteration"), int)], dict(config or {}))
    found = [finding for rule in (*POLICY, *TROUBLE, *SAMPLING) if (finding := rule(history)) is not None]
    return sorted(found, key=lambda finding: _ORDER.index(finding.severity))
