"""Grade zebra-grid: read the last markdown table of a reply, after any thinking, with a row for
each house.

A table is lines with `|`, one after the other: a heading, a line of dashes (may be missing), a row
for each house. Spaces, the bars at the ends, bold, upper and lower case and variants in typing a
word (`ttrl.tasks.words.comparable`) do not matter. The headings tell the columns apart if all of
them are there, otherwise their order does; house numbers do so for the rows if they are 1, 2, ...
in any order, otherwise their order does.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from ttrl.errors import TaskError
from ttrl.records import ANSWER_END
from ttrl.tasks.answers import after_thinking, place_in_content, reply_text
from ttrl.tasks.task import Choice
from ttrl.tasks.words import comparable

_MARKS = " \t*_`~\"'.,;"
_LONGEST_LINE = 2000  # characters; a row of a grid has less than 200

Table = list[list[str]]


def read_tables(reply: str) -> list[tuple[Table, int]]:
    """Return every markdown table: rows of normalised cells, the heading first, lines of dashes
    left out; and its end.
    """
    tables: list[tuple[Table, int]] = []
    block: list[tuple[list[str], int]] = []
    end = 0
    for line in [*reply.splitlines(keepends=True), ""]:
        if "|" in line and len(line) <= _LONGEST_LINE:
            block.append((_cells(line), end + len(line.rstrip())))
        elif block:
            tables += _tables_of(block)
            block = []
        end += len(line)
    return tables


def _cells(line: str) -> list[str]:
    text = line.strip().lstrip("> ")
    return [_normalise(cell) for cell in text.removeprefix("|").removesuffix("|").split("|")]


def _normalise(cell: str) -> str:
    return comparable(unicodedata.normalize("NFKC", cell)).strip(_MARKS)


def _is_rule(cells: list[str]) -> bool:
    """Return whether it is a line like |---|:-:|."""
    return all(cell and not cell.strip(":- ") and "-" in cell for cell in cells)


def _tables_of(block: list[tuple[list[str], int]]) -> list[tuple[Table, int]]:
    """Cut lines into tables: those without an empty line between them begin one line above their
    dashes.
    """
    rules = [number for number, (cells, _) in enumerate(block) if _is_rule(cells)]
    starts = sorted({0, *(number - 1 for number in rules if number > 0)})
    parts = [block[start:end] for start, end in zip(starts, [*starts[1:], len(block)])]
    return [([cells for cells, _ in part if not _is_rule(cells)], part[-1][1]) for part in parts]


@dataclass(frozen=True)
class ZebraGridGrader:
    """reward = right cells / cells; the column of house numbers does not count."""

    header: Sequence[str]
    """["House", "Name", ...]: the first column holds the house numbers."""
    rows: Sequence[Sequence[str]]
    """["1", "Anton", ...] for each house, in order."""

    def __post_init__(self) -> None:
        if len(self.header) < 2 or not self.rows:
            raise TaskError(
                f"zebra-grid: a solution of {len(self.header)} columns and {len(self.rows)} "
                "rows; give House and more"
            )
        for number, row in enumerate(self.rows, 1):
            if len(row) != len(self.header):
                raise TaskError(
                    f"zebra-grid: row {number} of the solution has {len(row)} cells, the header "
                    f"{len(self.header)}"
                )
            empty = [name for name, cell in zip(self.header, row) if not _normalise(cell)]
            if empty:
                raise TaskError(
                    f"zebra-grid: row {number} of the solution has nothing in {empty[0]!r}"
                )
        if len({_normalise(name) for name in self.header}) < len(self.header):
            raise TaskError(f"zebra-grid: two columns of the same name in {list(self.header)}")

    def __call__(self, choice: Choice) -> tuple[float, dict[str, float]]:
        """Return (reward, {"solved": 0 or 1, "table": 1 if there was one of the right height}), and
        the end of that table (`ttrl.records.ANSWER_END`)."""
        answer = after_thinking(reply_text(choice))
        fitting = [
            (table, end) for table, end in read_tables(answer) if len(table) == len(self.rows) + 1
        ]
        if not fitting:
            return 0.0, {"solved": 0.0, "table": 0.0}
        table, end = fitting[-1]
        given = self._in_order(table)
        wanted = [_normalise(cell) for row in self.rows for cell in row[1:]]
        right = sum(mine == theirs for mine, theirs in zip(given, wanted))
        ends = place_in_content(choice, answer, end)
        return right / len(wanted), {
            "solved": float(right == len(wanted)),
            "table": 1.0,
            ANSWER_END: ends,
        }

    def reference(self) -> str:
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.header, *self.rows)]
        return "\n".join([lines[0], "|" + "---|" * len(self.header), *lines[1:]])

    def _in_order(self, table: Table) -> list[str]:
        """Return the cells of the grid, row by row, in the order of the solution; "" for those
        missing from the table.
        """
        heading, *rows = table
        names = [_normalise(name) for name in self.header]
        columns = list(range(len(names)))
        if all(heading.count(name) == 1 for name in names[1:]):
            # Without a column of house numbers, the order of the rows decides.
            columns = [
                heading.index(names[0]) if heading.count(names[0]) == 1 else -1,
                *map(heading.index, names[1:]),
            ]
        cells = [
            [row[column] if 0 <= column < len(row) else "" for column in columns] for row in rows
        ]
        numbers = [row[0].removeprefix("house").strip(" #:") for row in cells]
        places = [str(number) for number in range(1, len(rows) + 1)]
        if sorted(numbers) == sorted(places):
            cells = [cells[numbers.index(place)] for place in places]
        return [cell for row in cells for cell in row[1:]]
