"""Every number that a run recorded, as columns over its iterations."""

from ttrl.run_folder.reader import RunData

MOST = 200
"""Columns: a run whose rows hold other names in each iteration must not make a page without end."""


def all_metrics(run: RunData) -> list[tuple[str, list[float | None]]]:
    """(dotted name, one value per row), by name. Figures by weights version are left out: each iteration has other names."""
    names = {name: None for row in run.flat for name in row}
    shown = [name for name in names if name != "iteration" and not any(part.lstrip("-").isdigit() for part in name.split("."))]
    return [(name, run.column(name)) for name in sorted(shown[:MOST])]
