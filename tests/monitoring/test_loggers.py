"""Loggers: every row once, whatever happens in between; what is wrong with an entry is said before
a run starts.
"""

import importlib.util
import json
import logging

import pytest
from support.facts import row_of, rows_of
from support.recorders import Recorder

from ttrl import TrainConfig
from ttrl.configs.logger_settings import logger_problems, normalised
from ttrl.errors import ConfigError
from ttrl.monitoring.loggers import Loggers, flattened, make_loggers
from ttrl.run_folder.metrics import forget_rows
from ttrl.system.console import Console

ROWS = rows_of(
    [
        {"iteration": 0, "validation_reward": 0.5, "seconds": {"validate": 1.5, "total": 2}},
        {
            "iteration": 1,
            "trained": True,
            "reward": 0.25,
            "train": {"entropy": 0.1, "kl": None, "note": "x", "lr": float("nan")},
            "sampler_trainer": {
                "mean": 1e-6,
                "by_version": {"0": {"mean": 1e-6}},
                "by_position": [1.0],
            },
        },
        {"iteration": 2, "reward": 0.75},
    ]
)


@pytest.fixture
def recorder():
    Recorder.seen, Recorder.failing, Recorder.closed = [], set(), 0
    return Recorder


HOME = "support.recorders"
NAME = f"{HOME}.Recorder"


def made(folder, *entries):
    return make_loggers(entries, folder, Console(), {"lr": 1})


def test_rows_become_numbers_by_flat_names():
    assert flattened(ROWS[1]) == {
        "trained": 1.0,
        "reward": 0.25,
        "train/entropy": 0.1,
        "sampler_trainer/mean": 1e-6,
    }
    assert flattened(ROWS[0]) == {
        "validation_reward": 0.5,
        "seconds/validate": 1.5,
        "seconds/total": 2.0,
    }
    assert flattened(
        row_of({"iteration": 1, "validation": {"level/3": 0.5, "5": 1.0, "x": 2.0}})
    ) == {
        "validation/level/3": 0.5,
        "validation/5": 1.0,
        "validation/x": 2.0,
    }


def test_each_row_is_logged_once_also_by_a_run_that_is_continued(tmp_path, recorder):
    first = made(tmp_path, NAME)
    first.log(ROWS[:1])
    first.log(ROWS[:2])
    first.close()
    second = made(tmp_path, NAME)
    second.log(ROWS)
    second.log(ROWS)
    assert [step for step, _ in recorder.seen] == [0, 1, 2]
    assert json.loads((tmp_path / "logs" / "loggers.json").read_text()) == {"seen": {NAME: 2}}


def test_a_row_that_is_made_again_is_logged_again(tmp_path, recorder):
    made(tmp_path, NAME).log(ROWS)
    for first in (2, 1):
        forget_rows(tmp_path, first)
        again = made(tmp_path, NAME)
        again.log(ROWS[: first + 1])
        again.log(ROWS)
    assert [step for step, _ in recorder.seen] == [0, 1, 2, 2, 1, 2]
    forget_rows(tmp_path / "other", 1)
    assert not (tmp_path / "other").exists()
    (tmp_path / "logs" / "loggers.json").write_text('{"seen": {"one": Infinity}}')
    forget_rows(tmp_path, 1)  # a damaged file is as none


def test_a_logger_that_is_added_later_gets_the_rows_from_the_start(tmp_path, recorder, capsys):
    made(tmp_path, "stdout").log(ROWS[:2])
    both = made(tmp_path, "stdout", {"_component_": NAME, "tag": "t"})
    both.log(ROWS)
    assert [step for step, _ in recorder.seen] == [0, 1, 2]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["iteration 0", "iteration 1", "iteration 2"]
    assert (
        lines[1]
        == "iteration 1: reward=0.25 trained=1 train/entropy=0.1 sampler_trainer/mean=1e-06"
    )


def test_a_logger_that_fails_stops_nothing_and_is_said_once(tmp_path, recorder, caplog):
    recorder.failing = {1}
    both = made(tmp_path, NAME, "stdout")
    with caplog.at_level(logging.WARNING):
        both.log(ROWS[:2])
        both.log(ROWS)
    assert [step for step, _ in recorder.seen] == [0]
    assert len([r for r in caplog.records if "the network is gone" in r.getMessage()]) == 1
    recorder.failing = set()
    both.log(ROWS)  # it is back: nothing is missing
    assert [step for step, _ in recorder.seen] == [0, 1, 2]


def test_a_damaged_state_file_logs_everything_again(tmp_path, recorder):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "loggers.json").write_text('{"seen": ')
    made(tmp_path, NAME).log(ROWS)
    assert len(recorder.seen) == 3


def test_the_same_logger_twice_is_two(tmp_path, recorder):
    made(tmp_path, NAME, {"name": NAME, "tag": "other"}).log(ROWS)
    assert len(recorder.seen) == 6


WRONG = [
    ("tensorbord", "did you mean 'tensorboard'"),
    ("nothing", "choose from stdout, tensorboard, wandb, mlflow, trackio, swanlab"),
    ({"name": "mlflow", "experimnt": "x"}, "mlflow has no argument 'experimnt'"),
    (3, "neither a name nor a mapping"),
    ({"log_dir": "x"}, "names no logger"),
    ({"name": "stdout", "log_dir": "x"}, "stdout has no argument 'log_dir'"),
    ({"_component_": "torchtune.training.metric_logging.MyLogger"}, "torchtune has no"),
]


@pytest.mark.parametrize(("entry", "said"), WRONG)
def test_an_entry_that_is_wrong_is_said_before_a_run_starts(entry, said):
    (problem,) = logger_problems(entry)
    assert said in problem
    config = TrainConfig(run="r", model="m", iterations=1, loggers=[entry])
    assert problem in config.problems()


NEED = {
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "swanlab": "swanlab",
    "torchtune.training.metric_logging.TensorBoardLogger": "tensorboard",
    "torchtune.training.metric_logging.CometLogger": "comet_ml",
}


def test_a_missing_package_is_named_with_what_to_install():
    missing = [name for name in NEED if importlib.util.find_spec(NEED[name]) is None]
    if not missing:
        pytest.skip("every logger's package is installed")
    for name in missing:
        (problem,) = logger_problems(name)
        package = NEED[name]
        assert problem.startswith(
            f"loggers: {name} needs the package {package}: pip install {package}"
        )
        assert ("'ttrl[loggers]'" in problem) == (package not in ("swanlab", "comet_ml"))
    assert (
        logger_problems("stdout")
        == []
        == logger_problems("torchtune.training.metric_logging.DiskLogger")
    )


def test_a_key_is_in_no_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be made") as error:
        made(
            tmp_path, {"_component_": "collections.OrderedDict", "api_key": "abc123", "log_dir": 3}
        )
    assert "abc123" not in str(error.value)


def test_what_cannot_be_made_is_an_error_and_closes_the_others(tmp_path, recorder):
    with pytest.raises(
        ConfigError, match=r"(?s)no log_dict.*No module named 'no_such_module'.*unexpected keyword"
    ):
        made(
            tmp_path,
            NAME,
            f"{HOME}.NoLogger",
            "no_such_module.Logger",
            {"_component_": NAME, "colour": 1},
        )
    assert recorder.closed == 1


def test_arguments_of_an_entry():
    assert normalised("wandb") == ("wandb", {})
    assert normalised({"name": "wandb", "project": "p"}) == ("wandb", {"project": "p"})
    component = "torchtune.training.metric_logging.WandBLogger"
    assert normalised({"_component_": component, "name": "mine", "project": "p"}) == (
        component,
        {"name": "mine", "project": "p"},
    )


def test_torchtunes_own_loggers_by_their_names(tmp_path):
    entry = {
        "_component_": "torchtune.training.metric_logging.DiskLogger",
        "log_dir": "logs",
        "filename": "all.txt",
    }
    loggers = made(tmp_path, entry)
    loggers.log(ROWS)
    loggers.close()
    lines = (tmp_path / "logs" / "all.txt").read_text().splitlines()
    assert [line.split(" | ")[0] for line in lines] == [
        "Step 0",
        "Step 1",
        "Step 2",
    ] and "train/entropy:0.1" in lines[1]


def test_tensorboard_event_files_hold_each_step_once(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = made(tmp_path, "tensorboard")
    first.log(ROWS[:2])
    first.close()
    # Killed before it was written.
    (tmp_path / "logs" / "loggers.json").write_text(json.dumps({"seen": {"tensorboard": 0}}))
    second = made(tmp_path, "tensorboard")
    second.log(ROWS)
    second.close()
    events = EventAccumulator(str(tmp_path / "logs" / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [
        (1, 0.25),
        (2, 0.75),
    ]


def test_no_loggers_are_the_default(tmp_path):
    assert TrainConfig(run="r", model="m", iterations=1).loggers == []
    loggers = made(tmp_path)
    loggers.log(ROWS)
    loggers.close()
    assert not (tmp_path / "logs").exists() and isinstance(loggers, Loggers)
