"""What `TTRL_TEST_RESULTS=FILE pytest …` leaves, above all where pytest is killed; and what
tests/gpu needs of an environment.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = """
import os, signal
import pytest

def test_good(record_property):
    record_property("errors", "1e-6")

def test_bad():
    assert 1 + 1 == 3

@pytest.mark.skip(reason="no such device")
def test_left_out():
    pass

@pytest.fixture
def broken():
    raise ValueError("the fixture broke")

def test_with_a_broken_fixture(broken):
    pass

@pytest.fixture
def ends_badly():
    yield
    raise ValueError("the end broke")

def test_that_ends_badly(ends_badly):
    pass

def test_killed():
    os.kill(os.getpid(), signal.SIGKILL)

def test_never_reached():
    pass
"""


def run(
    folder: Path, *options: str, blocked: str = ""
) -> tuple[subprocess.CompletedProcess[str], list[dict]]:
    """Run pytest in `folder` with this folder's conftest, and return what it says and what stands
    in the file.
    """
    results = folder / "results.jsonl"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST")
    }
    if blocked:
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    environment |= {
        "TTRL_TEST_RESULTS": str(results),
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "tools")]),
    }
    start = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked.split()!r})); import pytest; "
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-P", "-c", start, "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return done, [json.loads(line) for line in lines]


def ends(rows: list[dict]) -> list[tuple[str, str, str]]:
    return [
        (row["test"].split("::")[-1], row["outcome"], row["when"])
        for row in rows
        if row["event"] == "end"
    ]


UNTIL_KILLED = [
    ("test_good", "passed", "call"),
    ("test_bad", "failed", "call"),
    ("test_left_out", "skipped", "setup"),
    ("test_with_a_broken_fixture", "error", "setup"),
    ("test_that_ends_badly", "passed", "call"),
    ("test_that_ends_badly", "error", "teardown"),
]


def test_a_pytest_that_is_killed_loses_no_name(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SOURCE, encoding="utf-8")
    done, rows = run(tmp_path, "-p", "conftest", "-p", "no:randomly", "test_it.py")
    assert done.returncode == -9, done.stdout + done.stderr
    assert ends(rows) == UNTIL_KILLED
    # It was this one.
    assert (rows[-1]["test"], rows[-1]["event"]) == ("test_it.py::test_killed", "start")
    by_name = {
        row["test"].split("::")[-1]: row
        for row in rows
        if row["event"] == "end" and row["when"] != "teardown"
    }
    assert (
        by_name["test_good"]["properties"] == {"errors": "1e-6"}
        and by_name["test_good"]["device"] == "cpu"
    )
    assert 0 <= by_name["test_good"]["seconds"] < 60
    assert by_name["test_bad"]["reason"] == "assert (1 + 1) == 3"
    assert by_name["test_left_out"]["reason"].endswith("no such device")
    assert by_name["test_with_a_broken_fixture"]["reason"].endswith("ValueError: the fixture broke")


def test_with_several_processes_each_line_comes_once(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "test_it.py").write_text(SOURCE, encoding="utf-8")
    done, rows = run(
        tmp_path, "-p", "conftest", "-n", "1", "--max-worker-restart", "1", "test_it.py"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = ends(rows)
    assert found[: len(UNTIL_KILLED)] == UNTIL_KILLED
    assert [(name, outcome) for name, outcome, _ in found[len(UNTIL_KILLED) :]] == [
        ("test_killed", "failed"),  # xdist says that its process ended
        ("test_never_reached", "passed"),
    ]
    assert all(row["device"] == "cpu" for row in rows if row.get("outcome") == "passed")


def test_an_import_that_fails_is_a_line_too(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import nowhere_at_all\n", encoding="utf-8")
    done, rows = run(tmp_path, "-p", "conftest", "test_it.py")
    assert done.returncode == 2
    assert (
        ends(rows) == [("test_it.py", "error", "collect")] and "nowhere_at_all" in rows[0]["reason"]
    )


@pytest.mark.long
def test_the_tests_for_gpus_need_pytest_and_no_other_tool_of_tests(tmp_path: Path) -> None:
    """A machine that is lent for a quarter of an hour has no network, and nobody installs tools
    there.

    Long: only this imports all tests for GPUs without the tools. Most changes touch none of them.
    """
    tools = (
        "hypothesis pytest_timeout xdist pytest_rerunfailures execnet certifi matplotlib mypy ruff"
    )
    done, rows = run(tmp_path, "-rs", str(TESTS / "gpu"), blocked=tools)
    assert done.returncode == 0, done.stdout + done.stderr
    if "cuda" not in done.stdout.lower():  # on a machine without one
        assert re.search(r"\d+ skipped", done.stdout)
    assert len(rows) > 100 and "Unknown pytest.mark" not in done.stdout
