"""train.jsonl: what its lines hold, and that they are of one attempt."""

import math

import pytest
import torch

from ttrl import TrainConfig
from ttrl.configs import GRPOConfig
from ttrl.errors import ConfigError
from ttrl.facts import SamplerTrainer, Step
from ttrl.system.files import read_jsonl
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.timing import Stopwatch
from ttrl.training.train_log import TrainLog

CPU = torch.device("cpu")
ROW = Step(global_step=1, row_tokens=10)


def written(folder, *rows, here=Ranks(0, 1, CPU), **settings):  # noqa: B008  # frozen
    """What one run of a recipe writes."""
    config = GRPOConfig(model="", packed="", output_dir=str(folder), measure_peak=False, **settings)
    log = TrainLog(config, None, here, Stopwatch(CPU))
    for row in rows:
        log.line(row, 1e6)
    log.close()
    return read_jsonl(folder / "train.jsonl")


def test_numbers_that_are_not_finite_are_null_wherever_they_are(tmp_path):
    """A step is skipped because log-probabilities are NaN, and so is the distance of sampler and
    trainer beside its loss.
    """
    (line,) = written(
        tmp_path,
        ROW.replace(
            loss=math.nan,
            sampler_trainer=SamplerTrainer(tokens=3, mean=math.nan, ess=math.inf),
        ),
    )
    assert line["loss"] is None and line["sampler_trainer"] == {
        "tokens": 3,
        "mean": None,
        "ess": None,
    }
    assert line["tokens_per_second"] > 0


def test_a_second_attempt_begins_a_new_file(tmp_path):
    written(tmp_path, ROW, ROW.replace(global_step=2))
    assert [line["global_step"] for line in written(tmp_path, ROW)] == [1]
    # Only the first rank writes.
    assert [line["global_step"] for line in written(tmp_path, here=Ranks(1, 2, CPU))] == [1]


def test_the_config_names_loggers_of_the_steps(tmp_path, capsys):
    """ttrl's names and torchtune's, each step once, only by the first rank."""
    disk = {
        "_component_": "torchtune.training.metric_logging.DiskLogger",
        "log_dir": f"{tmp_path}/logs",  # as torchtune's configs write ${output_dir}/logs
        "filename": "steps.txt",
    }
    steps = [
        ROW.replace(loss=0.5, sampler_trainer=SamplerTrainer(ess=0.25)),
        ROW.replace(global_step=2, loss=0.125),
    ]
    lines = written(tmp_path, *steps, metric_logger=["stdout", disk])
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    logged = (tmp_path / "logs" / "steps.txt").read_text().splitlines()
    for number, loss in ((1, 0.5), (2, 0.125)):
        assert f" loss={loss} " in said[number - 1] and said[number - 1].startswith(
            f"step {number}"
        )
        assert logged[number - 1].startswith(f"Step {number} | ")
        assert f"loss:{loss} " in logged[number - 1]
        assert f"seconds:{lines[number - 1]['seconds']} " in logged[number - 1]
    assert "sampler_trainer/ess=0.25" in said[0] and len(said) == len(logged) == 2

    written(tmp_path / "b", *steps, metric_logger="stdout", here=Ranks(1, 2, CPU))
    assert "step " not in capsys.readouterr().out


def test_a_logger_that_cannot_be_is_a_mistake_of_the_config():
    config = {"model": "m", "packed": "p", "output_dir": "o"}
    for entry, said in (("stdot", "did you mean 'stdout'"), (["stdout", 3], "3 is neither")):
        with pytest.raises(ConfigError, match=f"metric_logger: .*{said}"):
            GRPOConfig.parse(config | {"metric_logger": entry}, "config")


def test_a_run_has_loggers_of_its_own():
    config = TrainConfig(run="r", model="m", iterations=1, training={"metric_logger": "stdout"})
    assert "training: 'metric_logger' is for the recipe alone; set the run's loggers" in (
        config.problems()
    )
