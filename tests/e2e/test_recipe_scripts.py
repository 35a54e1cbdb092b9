"""A script of recipes/ as its header says to try it out: a real server, a real trainer, and a checkpoint that was trained."""

import subprocess
import sys
from pathlib import Path

import pytest

from ttrl.system.files import read_jsonl

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_tiny(tmp_path):
    command = [sys.executable, str(ROOT / "recipes" / "spelling.py"), "--tiny", "--run", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held-out words spelled: " in done.stdout
    assert (tmp_path / "run" / "iterations" / "0001" / "checkpoint" / "config.json").exists()
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]["train"]["steps"] == 1
