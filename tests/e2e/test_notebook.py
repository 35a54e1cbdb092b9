"""examples/first_run.ipynb, as a kernel executes it: with a real server, and a tiny model."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "first_run.ipynb"
pytestmark = pytest.mark.timeout(600)


def cells() -> list[dict]:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def test_it_is_kept_without_outputs() -> None:
    for cell in cells():
        if cell["cell_type"] == "code":
            ast.parse("".join(cell["source"]))
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
        assert max(map(len, "".join(cell["source"]).splitlines())) <= 100


def test_its_links_lead_somewhere() -> None:
    import re

    links = re.findall(r"\]\(([^)#:]+)", "".join("".join(cell["source"]) for cell in cells()))
    assert links
    for link in links:
        assert (NOTEBOOK.parent / link).is_file(), link


@pytest.mark.e2e
def test_it_trains_and_shows_its_curves(tmp_path: Path) -> None:
    """Two iterations: the display follows the run, and the tables show its results."""
    script = ROOT / "tests" / "support" / "run_notebook.py"
    smaller = 'model, iterations, tasks_per_iteration = "tiny", 2, 2'
    command = [sys.executable, str(script), str(NOTEBOOK), "outputs.json", smaller]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = json.loads((tmp_path / "outputs.json").read_text(encoding="utf-8"))
    live = [one for one in outputs if "followed by ttrl" in one["data"].get("text/plain", "")]
    assert [one["update"] for one in live[:3]] == [False, False, True]
    updates = "".join(one["data"]["text/html"] for one in live)
    assert "waiting" in updates and "0: preparing" in updates
    assert "iteration 2 of 2" in updates and updates.count("<svg") > 4
    tables = [one["data"] for one in outputs if "<table" in one["data"].get("text/html", "")]
    assert len(tables) >= 3
    rows = (tmp_path / "runs/first_run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["iteration"] for row in rows] == [0, 1, 2]
    assert json.loads(rows[2])["trained"]
