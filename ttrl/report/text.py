"""What a report says, in a few lines for a terminal."""

import textwrap
from pathlib import Path

from ttrl.monitoring.findings import findings
from ttrl.report.words import summary, tiles
from ttrl.run_folder.reader import read_run

_MARKS = {"stop": "!!", "warn": " !", "note": " ·"}


def report_text(run_folder: Path, width: int = 100) -> str:
    """The summary, the main figures, and what stands out, wrapped to `width` columns. Raises RunFolderError as `read_run`."""
    run = read_run(Path(run_folder))
    width = max(40, min(width, 120))
    lines = textwrap.wrap(summary(run), width)
    figures = tiles(run)
    widest = max((len(name) for name, _ in figures), default=0)
    lines += ["", *(f"  {name:<{widest}}  {value}" for name, value in figures)] if figures else []
    found = findings(run.rows, run.config)
    if found:
        lines += ["", "What stands out:"]
        for finding in found:
            lines += textwrap.wrap(finding.title, width, initial_indent=f"{_MARKS[finding.severity]} ", subsequent_indent="   ")
            lines += textwrap.wrap(finding.advice, width, initial_indent="   ", subsequent_indent="   ")
    elif run.trained:
        lines += ["", "Nothing stands out."]
    return "\n".join(lines)
