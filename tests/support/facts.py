"""Facts out of plain values, as tests write them down."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ttrl.facts import (
    MetricsRow,
    PackFacts,
    PhaseFacts,
    PrepareFacts,
    RolloutsFacts,
    SaveFacts,
    TrainFacts,
    ValidateFacts,
    read_facts,
)
from ttrl.run_folder.folder import IterationFolder

KINDS: dict[str, type[PhaseFacts]] = {
    kind.phase: kind
    for kind in (PrepareFacts, RolloutsFacts, PackFacts, TrainFacts, SaveFacts, ValidateFacts)
}


def rows_of(rows: Iterable[Mapping[str, Any]]) -> list[MetricsRow]:
    """Return rows of metrics.jsonl."""
    return [read_facts(MetricsRow, row) for row in rows]


def row_of(row: Mapping[str, Any]) -> MetricsRow:
    """Return a row of metrics.jsonl."""
    return read_facts(MetricsRow, row)


def mark(
    iteration: IterationFolder,
    phase: str,
    files: Sequence[str],
    facts: Mapping[str, Any],
    known: Mapping[str, str] | None = None,
) -> None:
    """Mark a phase as done."""
    iteration.mark(read_facts(KINDS[phase], facts), files, known)
