"""Turn results into docs/reference/hardware.md: `python tools/gpu_day/table.py [RESULTS ...]`

Reads measured.jsonl, which is kept in the tree, and the files that are named; prints the page.
`--write` adds the new lines to measured.jsonl and writes docs/reference/hardware.md. Of several
results for a step on the same card and commit, the last one counts. Lines of a rehearsal say
nothing of hardware: with `--write` they are refused, and printed they are marked.
"""

import argparse
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from record import append_line, read_lines

HERE = Path(__file__).resolve().parent
MEASURED = HERE / "measured.jsonl"
PAGE = HERE.parents[1] / "docs" / "reference" / "hardware.md"
HEAD = """\
# What ran on which hardware

Each section shows one card at one commit, as measured there. Hardware without a section has not
run. `python tools/gpu_day/table.py --write RESULTS` writes this page from the results of
[a day with a GPU](../how-to/gpu_day.md). Figures entered by hand name their source. No figure comes
from a CPU in place of a GPU.

"Of 989 TFLOP/s" is the share of an H100's dense bf16 speed, by its data sheet. "Of the best
product" is the share of the fastest matrix product on the same card. FLOPs are exact and leave
recomputation out.
"""
REHEARSED = "**Rehearsed on a CPU with stand-ins: no figure here says anything of a GPU.**"


class TableError(Exception):
    """Say which results cannot be used, and why."""


def newest(lines: Iterable[dict]) -> list[dict]:
    """Return the last line for every card, commit and step; a step left out replaces nothing."""
    found: dict[tuple[str, str, str], dict] = {}
    for line in lines:
        key = (str(line["card"]), str(line["commit"]), str(line["name"]))
        if line["status"] == "left out" and key in found:
            continue
        found.pop(key, None)
        found[key] = line
    return list(found.values())


def page(lines: Iterable[dict]) -> str:
    """Return the page in Markdown: newest sections first, steps in their order."""
    sections: dict[tuple[str, str, bool], list[dict]] = {}
    for line in newest(lines):
        key = (str(line["card"]), str(line["commit"]), bool(line["rehearsal"]))
        sections.setdefault(key, []).append(line)
    ordered = sorted(sections.values(), key=lambda some: str(some[-1]["started"]), reverse=True)
    return HEAD + "".join(f"\n{section(some).rstrip()}\n" for some in ordered)


def section(lines: Sequence[dict]) -> str:
    """Return the section of one card at one commit."""
    lines = sorted(lines, key=lambda line: int(line["step"]))
    first = lines[0]
    date = str(first["started"])[:10]
    text = f"## {first['card']}, {date}, commit {str(first['commit'])[:7]}\n\n"
    if first["rehearsal"]:
        text += f"{REHEARSED}\n\n"
    if first.get("python"):
        text += f"Driver {first['driver']}, Python {first['python']}.\n\n"
    text += overview(lines)
    for line in lines:
        text += step_text(line)
    return text


def overview(lines: Sequence[dict]) -> str:
    """Return the table of what passed."""
    rows = []
    for line in lines:
        number = line["step"] or ""
        seconds = line.get("seconds", "")
        rows.append([number, line["title"], line["status"], seconds, line.get("problem") or ""])
    return markdown_table(["step", "", "result", "seconds", "why not"], rows) + "\n"


def step_text(line: dict) -> str:
    """Return figures and tables of one step."""
    figures = line.get("figures") or []
    tables = line.get("tables") or []
    if not figures and not tables:
        return ""
    text = f"### {line['title']}\n\n"
    if line.get("source"):
        text += f"Entered by hand from {line['source']}.\n\n"
    if line.get("note"):
        text += wrapped(line["note"])
    if line.get("stand_ins"):
        text += wrapped(f"Stand-ins: {'; '.join(line['stand_ins'])}.")
    if figures:
        rows = [[one["name"], f"{number(one['value'])} {one['unit']}".strip()] for one in figures]
        text += markdown_table(["", ""], rows) + "\n"
    for table in tables:
        text += f"*{table['name']}*\n\n" + markdown_table(table["columns"], table["rows"]) + "\n"
    return text


def wrapped(text: str) -> str:
    """Return a paragraph of lines that are as short as those of the other pages."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False) + "\n\n"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cell(value) for value in line)} |\n" for line in lines)


def cell(value: object) -> str:
    """Return a value as a table shows it."""
    text = " ".join(number(value).split()).replace("|", "\\|")
    return text.replace("<", "\\<")  # a page would hide <this> as a tag


def number(value: object) -> str:
    """Return a number with four significant digits and thousands apart, others as they are."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def check_real(lines: Sequence[dict], path: Path) -> None:
    """Raise TableError for results that are no measurements of a GPU."""
    if any(line["rehearsal"] for line in lines):
        raise TableError(f"{path}: results of a rehearsal; they are not written to {PAGE.name}")


def main() -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--measured", type=Path, default=MEASURED)
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    known = read_lines(arguments.measured)
    new: list[dict] = []
    try:
        for path in arguments.results:
            lines = read_lines(path)
            if not lines:
                raise TableError(f"{path} has no results")
            if arguments.write:
                check_real(lines, path)
            new += [line for line in lines if line not in known and line not in new]
    except TableError as error:
        print(f"table: {error}", file=sys.stderr)
        return 1
    if not arguments.write:
        print(page([*known, *new]), end="")
        return 0
    for line in new:
        append_line(arguments.measured, line)
    arguments.page.write_text(page([*known, *new]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
