"""`ttrl eval` with a model folder: a real server is started for it, asked, and ended, with a cache.

Long: only this starts vLLM for the command. test_tools.py evaluates a model folder without it; the
command with a server that is there: tests/evaluation/test_evaluate.py.
"""

import json
from pathlib import Path

import pytest

from ttrl import cli
from ttrl.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]


def test_a_model_folder_is_served_and_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_model(tmp_path / "model", seed=1, layers=2, width=64, heads=2, context=256)
    output, cache = tmp_path / "result.json", tmp_path / "cache"
    arguments = [
        "--tasks",
        "letter_counting,sort_letters",
        "--n",
        "6",
        "--samples",
        "2",
        "--max-tokens",
        "5",
    ]
    assert (
        cli.main(["eval", str(model), *arguments, "--cache", str(cache), "--output", str(output)])
        == 0
    )
    assert "6 x 2" in capsys.readouterr().out
    result = json.loads(output.read_text())
    assert result["complete"] is True and list(result["sets"]) == [
        "letter_counting",
        "sort_letters",
    ]
    for one in result["sets"].values():
        assert (one["num_tasks"], one["num_samples"], one["num_failed"]) == (6, 12, 0)
        assert one["accuracy"]["low"] <= one["accuracy"]["mean"] <= one["accuracy"]["high"]
        # One to five each, whatever a random model says.
        assert 12 <= one["completion_tokens"] <= 60
    assert any(path.is_file() for path in cache.rglob("*"))
