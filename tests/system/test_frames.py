"""Results as DataFrames."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.packages import without

from ttrl.evaluation.eval_results import EvalResult, SetResult
from ttrl.loop.train import RunResult
from ttrl.records import Sample, TaskResult
from ttrl.rollouts.results import TaskResults
from ttrl.tasks.task import Task

pandas = pytest.importorskip("pandas")
MESSAGES = [{"role": "user", "content": "?"}]


def samples(task: str) -> TaskResult:
    right = Sample(
        task_id=task,
        sample=0,
        messages=MESSAGES,
        text="yes",
        token_ids=[1, 2],
        finish_reason="stop",
        reward=1.0,
        metrics={"exact": 1.0, "sometimes": 0.5},
    )
    wrong = Sample(
        task_id=task,
        sample=1,
        messages=MESSAGES,
        text="no",
        token_ids=[3],
        reward=0.0,
        metrics={"exact": 0.0},
    )
    failed = Sample(task_id=task, sample=2, messages=MESSAGES, error="ServerError: gone")
    return TaskResult(task_id=task, messages=MESSAGES, samples=[right, wrong, failed])


def test_samples_have_a_row_each() -> None:
    frame = TaskResults([samples("a"), samples("b")]).to_pandas()
    assert list(frame.columns) == [
        *("task_id", "sample", "reward", "error", "finish_reason", "tokens", "cached", "text"),
        *("metrics.exact", "metrics.sometimes"),
    ]
    assert list(frame["task_id"]) == ["a"] * 3 + ["b"] * 3
    assert frame.groupby("task_id")["reward"].mean().to_dict() == {"a": 0.5, "b": 0.5}
    assert frame["reward"].isna().sum() == 2
    assert frame["metrics.sometimes"].notna().sum() == 2
    assert list(frame["tokens"][:2]) == [2, 1]
    assert TaskResults([]).to_pandas().shape == (0, 8)


def test_an_evaluation_has_a_row_for_each_sample_of_each_set() -> None:
    def grader(choice: object) -> float:
        return 0.0

    tasks = [Task(MESSAGES, grader, id=name) for name in ("a", "b")]
    one = SetResult.of(
        "mine", tasks, TaskResults([samples("a"), samples("b")]), score="exact", samples_per_task=3
    )
    frame = EvalResult(model="m", settings={}, sets=[one]).to_pandas()
    assert list(frame.columns) == ["set", "task_id", "digest", "sample", "score"]
    assert list(frame["sample"]) == [0, 1, 2] * 2
    assert frame["score"].mean() == one.accuracy.mean == 0.5
    html = EvalResult(model="m", settings={}, sets=[one])._repr_html_()
    assert "mine" in html and "0.500" in html


def test_a_run_has_a_row_for_each_iteration() -> None:
    rows = [
        {"iteration": 0, "validation_reward": 0.25},
        {"iteration": 1, "reward": 0.5, "train": {"loss": 0.125}},
    ]
    frame = (
        RunResult(Path("r"), Path("c"), Path("c"), rows, Path("r"))
        .to_pandas()
        .set_index("iteration")
    )
    assert list(frame.columns) == ["validation_reward", "reward", "train.loss"]
    assert frame.loc[1, "train.loss"] == 0.125
    assert pandas.isna(frame.loc[0, "train.loss"])


def test_without_pandas_it_says_what_to_install(tmp_path: Path) -> None:
    code = "from ttrl.system.frames import data_frame\ndata_frame([])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=without(tmp_path, "pandas"),
        capture_output=True,
        text=True,
    )
    assert "UserError: to_pandas() needs pandas: pip install pandas, or 'ttrl[" in done.stderr
