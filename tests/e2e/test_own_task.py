"""`ttrl tasks try` with a model folder: a real server is started for it, asked, and ended.

Long: only this starts vLLM for `tasks try`. A server that is there is asked in
tests/cli/test_tasks.py, and test_tools.py starts one the same way for an evaluation.
"""

from pathlib import Path

import pytest

from ttrl import cli
from ttrl.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]


def test_a_model_folder_is_served_and_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_model(tmp_path / "model", seed=1, layers=2, width=64, heads=2, context=256)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["tasks", "new", "sums.py"]) == 0
    arguments = ["--n", "2", "--samples", "2", "--max-tokens", "5", "--model", str(model)]
    assert cli.main(["tasks", "try", "sums.py", *arguments]) == 0
    text = capsys.readouterr().out
    assert "task 2 of 2: sums/train/0/1" in text
    assert text.count("  reply:\n") == text.count("  reward ") == 4
