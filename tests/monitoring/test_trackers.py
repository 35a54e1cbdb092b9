"""Trackers: one run of W&B, MLflow, trackio or SwanLab for a run folder, also when it is continued.

The first tests use stand-ins with the packages' signatures. The last ones use the packages
themselves where they are installed, without a network.
"""

import contextlib
import importlib.util
import json
import os
import signal
import sqlite3
import struct
import subprocess
import sys

import pytest
from support.facts import row_of, rows_of
from support.tracker_stand_ins import Trackers

from ttrl.errors import ConfigError, TrainerError
from ttrl.monitoring.loggers import make_loggers
from ttrl.system.console import Console

ALL = ("wandb", "mlflow", "trackio", "swanlab")
ROWS = rows_of(
    [
        {"iteration": 0, "reward": 0.5},
        {"iteration": 1, "reward": 0.25, "train": {"entropy": 0.125}},
        {"iteration": 2, "reward": 0.75},
    ]
)
CONFIG = {
    "model": "m",
    "training": {"lr": 1e-5, "note": "n" * 10},
    "server": {"hf_token": "sesame"},
    "loggers": [{"name": "wandb", "api_key": "sesame"}],
}


@pytest.fixture
def trackers(monkeypatch):
    made = Trackers()
    for name, module in made.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


def made(folder, *entries, config=CONFIG):
    return make_loggers(entries, folder, Console(), config)


def only_run(trackers, tracker):
    (run,) = trackers.runs[tracker].values()
    return run


@pytest.mark.parametrize("tracker", ALL)
def test_a_run_folder_is_one_run_also_when_it_is_continued(
    tmp_path, trackers, tracker, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["train.py", "--api-key", "sesame", "--run", "runs/x"])
    for rows in (ROWS[:2], ROWS):
        loggers = made(tmp_path / "x", tracker)
        loggers.log(rows)
        loggers.close()
    other = made(tmp_path / "other" / "x", tracker)
    other.close()
    assert len(trackers.runs[tracker]) == 2
    run = next(iter(trackers.runs[tracker].values()))
    assert run.rows == [
        (0, {"reward": 0.5}),
        (1, {"reward": 0.25, "train/entropy": 0.125}),
        (2, {"reward": 0.75}),
    ]
    assert run.ends == ["well", "well"]
    lr = run.config.get("training/lr") or run.config["training"]["lr"]
    assert float(lr) == 1e-5
    for path in tmp_path.rglob("*.json"):
        assert "sesame" not in path.read_text()
    assert "sesame" not in f"{run.config} {run.words}"
    assert sys.argv[2] == "sesame"
    said = capsys.readouterr()
    assert said.out == "" and "says hello" in said.err


@pytest.mark.parametrize("tracker", ALL)
def test_a_run_that_fails_or_is_interrupted_is_marked_so(tmp_path, trackers, tracker):
    for number, error in enumerate((TrainerError("broken"), KeyboardInterrupt())):
        with contextlib.suppress(type(error)), contextlib.ExitStack() as ends:
            loggers = made(tmp_path / str(number), tracker)
            ends.callback(loggers.close)
            loggers.log(ROWS[:1])
            raise error
    ends = [run.ends for run in trackers.runs[tracker].values()]
    assert (
        ends
        == {
            "wandb": [["failed"], ["failed"]],
            "mlflow": [["failed"], ["aborted"]],
            "trackio": [["well"], ["well"]],  # it knows no other end
            "swanlab": [["failed"], ["aborted"]],
        }[tracker]
    )


def test_ctrl_c_and_the_printing_of_errors_stay_ours(tmp_path, trackers):
    before = signal.getsignal(signal.SIGINT), sys.excepthook
    made(tmp_path, "swanlab").close()
    assert (signal.getsignal(signal.SIGINT), sys.excepthook) == before


def test_mlflow_keeps_a_row_with_names_that_it_refuses(tmp_path, trackers):
    loggers = made(tmp_path, "mlflow", config={"tasks": {"a@b": 1}})
    loggers.log([row_of({"iteration": 1, "validation": {"by_task/x@y": 0.5, "é": 1.0}})])
    run = only_run(trackers, "mlflow")
    assert run.rows == [(1, {"validation/by_task/x_y": 0.5, "validation/_": 1.0})]
    assert run.config == {"tasks/a_b": "1"}


def test_mlflow_gets_a_row_once_if_the_process_was_killed_after_it(tmp_path, trackers):
    made(tmp_path, "mlflow").log(ROWS[:2])
    (tmp_path / "logs" / "loggers.json").write_text('{"seen": {"mlflow": 0}}')
    again = made(tmp_path, "mlflow")
    again.log(ROWS)
    assert [step for step, _ in only_run(trackers, "mlflow").rows] == [0, 1, 2]


def test_mlflow_keeps_the_first_value_of_a_changed_setting(tmp_path, trackers):
    made(tmp_path, "mlflow", config={"lr": 1}).close()
    made(tmp_path, "mlflow", config={"lr": 2, "new": [3]}).close()
    assert only_run(trackers, "mlflow").config == {"lr": "1", "new": "[3]"}


def test_a_password_in_mlflows_address_is_refused(tmp_path, trackers):
    entry = {"name": "mlflow", "tracking_uri": "https://me:sesame@mlflow.example"}
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as error:
        made(tmp_path, entry)
    assert "sesame" not in str(error.value)


LOG_ROWS = """
import json, sys
from pathlib import Path
from ttrl.facts import MetricsRow
from ttrl.monitoring.loggers import make_loggers
from ttrl.system.console import Console
config = {"lr": 1.5, "server": {"hf_token": "sesame"}}
if __name__ == "__main__":
    loggers = make_loggers([json.loads(sys.argv[2])], Path("logged"), Console(), config)
    try:
        rows = [MetricsRow(iteration=k, reward=k / 4) for k in range(int(sys.argv[1]))]
        loggers.log(rows)
        if len(rows) == 3:
            raise ValueError("broken")
    finally:
        loggers.close()
"""


def logged_by_the_real(tmp_path, tracker, **arguments):
    """Run two processes that log to the installed package; the second one continues, and fails."""
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed")
    script = tmp_path / "log_rows.py"
    script.write_text(LOG_ROWS)
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "TRACKIO_DIR": str(tmp_path / "trackio")}
    for rows in (2, 3):
        entry = json.dumps({"name": tracker, **arguments})
        done = subprocess.run(
            [sys.executable, str(script), str(rows), entry, "--api-key", "sesame"],
            cwd=tmp_path, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert ("ValueError: broken" in done.stderr) == (rows == 3), done.stderr
        assert done.stdout == "" and "failed" not in done.stderr, done.stdout + done.stderr
    script.unlink()
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"sesame" not in path.read_bytes(), path


def rows_in(database, query):
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return connection.execute(query).fetchall()


def test_the_real_mlflow(tmp_path):
    logged_by_the_real(tmp_path, "mlflow", tracking_uri="sqlite:///mlflow.db")
    database = tmp_path / "mlflow.db"
    assert rows_in(database, "select key, step, value from metrics order by step") == [
        ("reward", 0, 0.0),
        ("reward", 1, 0.25),
        ("reward", 2, 0.5),
    ]
    assert rows_in(database, "select name, status from runs") == [("logged", "FAILED")]
    assert ("lr", "1.5") in rows_in(database, "select key, value from params")


def test_the_real_trackio(tmp_path):
    logged_by_the_real(tmp_path, "trackio", project="p", auto_log_cpu=False)
    database = tmp_path / "trackio" / "p.db"
    logged = rows_in(database, "select step, metrics, run_id from metrics order by step")
    assert [(step, json.loads(text)) for step, text, _ in logged] == [
        (0, {"reward": 0.0}),
        (1, {"reward": 0.25}),
        (2, {"reward": 0.5}),
    ]
    assert len({run for _, _, run in logged}) == 1
    ((config,),) = rows_in(database, "select config from configs")
    assert json.loads(config)["lr"] == 1.5


def test_the_real_swanlab(tmp_path):
    logged_by_the_real(tmp_path, "swanlab", mode="offline")
    id = json.loads((tmp_path / "logged/logs/swanlab_id.json").read_text())["id"]
    files = sorted((tmp_path / "logged/logs/swanlab").glob(f"run-*-{id}/run-{id}.swanlab"))
    assert len(files) == len(list((tmp_path / "logged/logs/swanlab").glob("run-*"))) == 2
    first, second = (path.read_bytes() for path in files)
    assert b"reward" in first and struct.pack("<d", 0.25) in first
    assert struct.pack("<d", 0.5) in second and b"ValueError" in second
    assert "1.5" in next(files[0].parent.glob("files/config.yaml")).read_text()


def test_wandb_offline_is_one_run_when_continued(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for rows in (ROWS[:2], ROWS):
        loggers = made(tmp_path, {"name": "wandb", "project": "p"})
        loggers.log(rows)
        loggers.close()
    ids = {
        path.name.rpartition("-")[2] for path in (tmp_path / "logs" / "wandb").glob("offline-run-*")
    }
    assert ids == {json.loads((tmp_path / "logs" / "wandb_id.json").read_text())["id"]}


LOGS_TO_WANDB = """
import sys
from pathlib import Path
from ttrl.facts import MetricsRow
from ttrl.monitoring.loggers import make_loggers
from ttrl.system.console import Console
command = list(sys.argv)
loggers = make_loggers(("wandb",), Path("logged"), Console(), {"lr": 1})
loggers.log([MetricsRow(iteration=0, reward=0.5)])
loggers.close()
assert sys.argv == command
"""
STANDS_IN = """
import pathlib, sys, types
Settings = dict
def init(**_):
    pathlib.Path("seen").write_text(" ".join(sys.argv))
    return types.SimpleNamespace(log=lambda *_, **__: None, finish=lambda **_: None)
"""


def test_wandb_is_not_told_what_could_be_a_secret_in_the_command(tmp_path):
    """It stores the command line with the run, and uploads it. Where it is installed, the real one
    is looked at.
    """
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "run.py").write_text(LOGS_TO_WANDB)
    stands_in = importlib.util.find_spec("wandb") is None
    if stands_in:
        (tmp_path / "code" / "wandb.py").write_text(STANDS_IN)
    words = "--lr 1 -k sesame --webhook=https://h/sesame --run runs/x"
    done = subprocess.run(
        [sys.executable, str(tmp_path / "code" / "run.py"), *words.split()],
        cwd=tmp_path,
        env={**os.environ, "WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    if stands_in:
        shown = "run.py --lr … -k … --webhook=… --run runs/x"
        assert (tmp_path / "seen").read_text() == shown
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"sesame" not in path.read_bytes(), path
