"""What a step reports: figures, tables and checks, each written to a file at once.

A step that is killed keeps what it had reported until then. `day.py` reads the file when the step
has ended, however it ended, and makes one line of results.jsonl of it.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

Value = float | int | str


@dataclass(frozen=True)
class Figure:
    """Name one measured value."""

    name: str
    value: Value
    unit: str = ""


@dataclass(frozen=True)
class Table:
    """Hold values that belong together, a list for each row."""

    name: str
    columns: list[str]
    rows: list[list[Value]]


@dataclass(frozen=True)
class Check:
    """Say whether something was as it must be, and what was found."""

    name: str
    passed: bool
    found: str = ""


@dataclass
class Reported:
    """Hold everything that a step has reported."""

    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    stand_ins: list[str] = field(default_factory=list)
    """What a rehearsal had in place of the real thing."""

    def as_json(self) -> dict[str, object]:
        """Return it as JSON holds it."""
        return asdict(self)


_KINDS = {"figure": Figure, "table": Table, "check": Check}


class Report:
    """Write what a step reports, a line at a time.

    folder: where logs and small files go that are to be kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "reported.jsonl"

    def figure(self, name: str, value: Value, unit: str = "") -> None:
        """Report a value."""
        self._write("figure", asdict(Figure(name, _rounded(value), unit)))

    def table(self, name: str, columns: list[str], rows: list[list[Value]]) -> None:
        """Report a table. A later one of the same name replaces it, so it can grow."""
        rounded = [[_rounded(value) for value in row] for row in rows]
        self._write("table", asdict(Table(name, columns, rounded)))

    def check(self, name: str, passed: bool, found: str = "") -> None:
        """Report whether something was as it must be."""
        self._write("check", asdict(Check(name, bool(passed), found)))

    def stand_in(self, what: str) -> None:
        """Say what a rehearsal has in place of the real thing."""
        self._write("stand_in", {"what": what})

    def _write(self, kind: str, content: dict[str, object]) -> None:
        append_line(self._path, {"kind": kind} | content)
        shown = content
        if "rows" in content:
            shown = {"name": content["name"], "last row": content["rows"][-1:]}
        print(json.dumps({kind: shown}, ensure_ascii=False), flush=True)


def read_reported(folder: Path) -> Reported:
    """Return what a step has reported into a folder; a torn last line is left out."""
    found = Reported()
    tables: dict[str, Table] = {}
    for content in read_lines(folder / "reported.jsonl"):
        kind = str(content.pop("kind"))
        if kind == "stand_in":
            found.stand_ins.append(str(content["what"]))
        elif kind == "table":
            table = Table(**content)
            tables[table.name] = table
        elif kind == "figure":
            found.figures.append(Figure(**content))
        else:
            found.checks.append(Check(**content))
    found.tables = list(tables.values())
    return found


def append_line(path: Path, content: dict[str, object]) -> None:
    """Append one JSON line, and return when it is on the disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(content, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict]:
    """Return the JSON lines of a file, without one that was not written to its end."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _rounded(value: Value) -> Value:
    """Return a number with four significant digits, as many as a measurement is worth."""
    if isinstance(value, bool) or not isinstance(value, float):
        return value
    return float(f"{value:.4g}")
