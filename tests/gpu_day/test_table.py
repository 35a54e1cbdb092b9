"""docs/reference/hardware.md: which results count, which are refused, and that it is up to date."""

import json
import subprocess
import sys

import table

LINE = {
    "step": 3,
    "name": "decoding",
    "title": "Decoding",
    "status": "passed",
    "passed": True,
    "problem": None,
    "seconds": 61.5,
    "figures": [{"name": "start", "value": 31.25, "unit": "s"}],
    "tables": [
        {"name": "tokens/s", "columns": ["asked for", "64"], "rows": [["chat | <ids>", 12345.6]]},
    ],
    "checks": [],
    "stand_ins": [],
    "rehearsal": False,
    "started": "2026-12-01 10:00",
    "card": "NVIDIA H100 80GB HBM3",
    "driver": "580.159",
    "commit": "abcdef0123",
}


def test_the_page_in_the_tree_is_what_the_results_in_the_tree_say():
    lines = table.read_lines(table.MEASURED)
    assert table.PAGE.read_text(encoding="utf-8") == table.page(lines)
    assert lines and not any(line["rehearsal"] for line in lines)
    assert all(line.get("source") or line["seconds"] for line in lines)


def test_a_line_becomes_a_row_of_what_passed_and_its_figures():
    page = table.page([LINE])
    assert "## NVIDIA H100 80GB HBM3, 2026-12-01, commit abcdef0" in page
    assert "| 3 | Decoding | passed | 61.5 |  |" in page
    assert "| start | 31.25 s |" in page
    assert "| chat \\| \\<ids> | 12,346 |" in page


def test_the_last_result_of_a_step_counts_unless_it_was_left_out():
    failed = LINE | {"status": "failed", "problem": "ended after its 240 s"}
    left_out = LINE | {"status": "left out", "problem": "needs about 70 s"}
    other = LINE | {"commit": "fedcba9876", "started": "2026-12-02 09:00"}
    assert table.newest([failed, LINE, left_out]) == [LINE]
    assert table.newest([LINE, failed]) == [failed]
    assert len(table.newest([LINE, other])) == 2
    page = table.page([LINE, other])
    assert page.index("commit fedcba9") < page.index("commit abcdef0")


def run(*arguments):
    command = [sys.executable, table.__file__, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_rehearsal_is_marked_and_never_written(tmp_path):
    measured, page, results = (
        tmp_path / "measured.jsonl",
        tmp_path / "hardware.md",
        tmp_path / "results.jsonl",
    )
    results.write_text(json.dumps(LINE | {"rehearsal": True, "card": "a CPU"}) + "\n")
    where = ("--measured", measured, "--page", page)
    refused = run("--write", results, *where)
    assert refused.returncode == 1 and "results of a rehearsal" in refused.stderr
    assert not measured.exists() and not page.exists()
    assert table.REHEARSED in run(results, *where).stdout
    # The second line was cut off while it was written.
    results.write_text(json.dumps(LINE) + "\n" + json.dumps(LINE)[:40])
    for _ in range(2):
        assert run("--write", results, *where).returncode == 0
    assert [json.loads(line) for line in measured.read_text().splitlines()] == [LINE]
    assert page.read_text() == table.page([LINE]) and table.REHEARSED not in page.read_text()
    assert "no results" in run(tmp_path / "missing.jsonl", *where).stderr
