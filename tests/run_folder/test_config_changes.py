"""A config that changed since a run was begun: the difference, what is allowed, and what is
remembered.
"""

import json
from pathlib import Path

import pytest
import yaml
from support import os_calls

from ttrl.errors import RunFolderError
from ttrl.report.page import write_report
from ttrl.run_folder.config_changes import (
    ALLOW_VARIABLE,
    allowed_names,
    as_diff,
    changes,
    check_changes,
    history,
)
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.reader import read_run

BEFORE = {
    "seed": 0,
    "num_threads": 2,
    "iterations": 3,
    "training": {"lr": 1e-4, "kl_coefficient": 0.1},
    "server": {},
    "loggers": [],
}


def test_settings_inside_mappings_are_compared_one_by_one():
    now = BEFORE | {"training": {"lr": 2e-4, "weight_decay": 0.1}, "server": {"max_model_len": 64}}
    assert changes(BEFORE, BEFORE) == {}
    found = changes(BEFORE, now)
    assert list(found) == [
        "server.max_model_len",
        "training.kl_coefficient",
        "training.lr",
        "training.weight_decay",
    ]
    assert as_diff(
        {
            "training.lr": found["training.lr"],
            "training.weight_decay": found["training.weight_decay"],
        }
    ) == (
        "  - training.lr: 0.0001\n  + training.lr: 0.0002\n  - training.weight_decay: (not "
        "set)\n  + training.weight_decay: 0.1"
    )


@pytest.mark.parametrize(
    "allow", [["lr", "seed"], ["training.lr", "seed"], ["training", "seed"], ["all"]]
)
def test_changes_are_allowed_by_name(tmp_path, allow):
    found = changes(BEFORE, BEFORE | {"seed": 1, "training": BEFORE["training"] | {"lr": 1.0}})
    with pytest.raises(
        RunFolderError,
        match=r"(?s)- seed: 0.*\+ seed: 1.*lr: 1\.0.*TTRL_ALLOW_CHANGES=seed,training\.lr",
    ):
        check_changes(found, [], tmp_path)
    with pytest.raises(RunFolderError) as caught:
        check_changes(found, ["seed"], tmp_path)
    # What is allowed is no longer named.
    assert "seed" not in str(caught.value).replace("seed,", "").split("allow_changes")[0]
    assert check_changes(found, allow, tmp_path) == []


def test_the_environment_allows_too(monkeypatch):
    monkeypatch.setenv(ALLOW_VARIABLE, "lr, seed model")
    assert allowed_names(["x"]) == ["x", "lr", "seed", "model"]


def test_another_number_of_threads_is_said_and_not_refused(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.remember_config(BEFORE) == []
    (note,) = folder.remember_config(BEFORE | {"num_threads": 8})
    assert note.startswith("num_threads was 2 and is 8 now: rounding changes")
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["num_threads"] == 8


def test_what_changed_is_remembered_with_the_iteration_from_which_it_holds(tmp_path):
    folder = RunFolder(tmp_path)
    folder.remember_config(BEFORE)
    assert history(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"iteration": n}) + "\n" for n in range(4))
    )
    now = BEFORE | {"iterations": 9, "training": BEFORE["training"] | {"lr": 1.0}}
    with pytest.raises(RunFolderError):
        folder.remember_config(now)
    assert history(tmp_path) == []  # a refused change leaves no trace
    folder.remember_config(now, allow=["lr"])
    folder.remember_config(now)
    (line,) = history(tmp_path)
    assert (line.iteration, line.changes) == (
        4,
        {"iterations": [3, 9], "training.lr": [1e-4, 1.0]},
    )
    folder.remember_config(now | {"iterations": 10})
    assert [entry.changes for entry in history(tmp_path)][1:] == [{"iterations": [9, 10]}]


def test_killed_between_history_and_config(tmp_path):
    folder = RunFolder(tmp_path)
    folder.remember_config(BEFORE)

    def killed(source, target, *_):
        assert Path(target).name == "config.yaml"
        raise KeyboardInterrupt

    with os_calls.before("os.rename", killed), pytest.raises(KeyboardInterrupt):
        folder.remember_config(BEFORE | {"iterations": 4})
    assert len(history(tmp_path)) == 1
    folder.remember_config(BEFORE | {"iterations": 4})
    assert len(history(tmp_path)) == 1


def test_the_report_tells_what_was_changed(tmp_path):
    folder = RunFolder(tmp_path)
    folder.remember_config(BEFORE)
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"iteration": 0, "seconds": {"total": 1.0}}) + "\n"
    )
    folder.remember_config(BEFORE | {"iterations": 7})
    assert read_run(tmp_path).config_history[0].changes == {"iterations": [3, 7]}
    page = write_report(tmp_path).read_text()
    assert "from iteration 1" in page and "config_history.jsonl" in page
    (tmp_path / "config_history.jsonl").write_text("{\n{\n")
    assert read_run(tmp_path).config_history == []


def test_lines_of_the_history_without_an_object_say_nothing(tmp_path):
    RunFolder(tmp_path).remember_config(BEFORE)
    RunFolder(tmp_path).remember_config(BEFORE | {"iterations": 4})
    path = tmp_path / "config_history.jsonl"
    path.write_text("[]\nnull\n5\n" + path.read_text())
    (change,) = history(tmp_path)
    assert change.changes == {"iterations": [3, 4]}
