"""`ttrl tasks generate`: the same rows however many processes make them, and nothing where it
fails.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ttrl import cli
from ttrl.cli.generate_puzzles import generate
from ttrl.errors import UserError
from ttrl.tasks.temporal_clue import get_temporal_clue_tasks
from ttrl.tasks.zebra_grid import get_zebra_grid_tasks


def test_processes_change_nothing_but_the_time(tmp_path: Path) -> None:
    one = generate(
        "temporal-clue", 6, tmp_path / "one.jsonl", seed=3, size="tiny", processes=1, pbar=False
    )
    two = generate(
        "temporal-clue", 6, tmp_path / "two.jsonl", seed=3, size="tiny", processes=2, pbar=False
    )
    assert one.read_bytes() == two.read_bytes()
    rows = [json.loads(line) for line in one.read_text(encoding="utf-8").splitlines()]
    assert len({row["prompt"] for row in rows}) == 6
    assert rows[0].keys() == {"prompt", "solution", "num_clues"}
    splits = [get_temporal_clue_tasks(split, None, path=one) for split in ("train", "validation")]
    assert sum(map(len, splits)) == 6


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "folder" / "zebra.jsonl"
    arguments = [
        "tasks",
        "generate",
        "zebra-grid",
        "--n",
        "3",
        "--size",
        "3x2",
        "--processes",
        "1",
        "--out",
        str(path),
    ]
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{path}\n"
    assert len(get_zebra_grid_tasks("train", None, path=path)) <= 3
    assert {json.loads(line)["size"] for line in path.read_text(encoding="utf-8").splitlines()} == {
        "3*2"
    }


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (
            "sudoku",
            {},
            "no puzzles are called 'sudoku'; choose one of temporal-clue, temporal-clue-night, "
            "zebra-grid",
        ),
        ("zebra-grid", {"n": 0}, "n is 0; ask for at least one"),
        ("zebra-grid", {"processes": 0}, "processes is 0; give at least one"),
        ("zebra-grid", {"size": "7x2"}, "zebra-grid has no size '7x2'; give houses x attributes"),
        ("zebra-grid", {"size": "large"}, "zebra-grid has no size 'large'"),
        (
            "temporal-clue",
            {"size": "5x4"},
            "temporal-clue has no size '5x4'; choose one of tiny, small, medium, large",
        ),
    ],
)
def test_wrong_arguments(tmp_path: Path, family: str, options: dict, message: str) -> None:
    with pytest.raises(UserError) as caught:
        generate(family, **{"n": 1, "output": tmp_path / "x.jsonl", "pbar": False, **options})
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_without_the_solver_no_process_is_started(tmp_path: Path) -> None:
    """The processes would have it: it is missing in the first one alone."""
    code = """
import sys
from pathlib import Path
from ttrl.cli.generate_puzzles import generate
sys.modules["pysat.solvers"] = None
generate("zebra-grid", 3, Path("x.jsonl"), processes=2, pbar=False)
"""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "python-sat: pip install 'ttrl[tasks]'" in ended.stderr
    assert list(tmp_path.iterdir()) == []
