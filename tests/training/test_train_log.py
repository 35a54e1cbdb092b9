"""train.jsonl: what its lines hold, and that they are of one attempt."""

import math

import torch

from ttrl.configs import GRPOConfig
from ttrl.facts import SamplerTrainer, Step
from ttrl.system.files import read_jsonl
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.timing import Stopwatch
from ttrl.training.train_log import TrainLog

CPU = torch.device("cpu")
ROW = Step(global_step=1, row_tokens=10)


def written(folder, *rows, here=Ranks(0, 1, CPU)):  # noqa: B008  # frozen
    """What one run of a recipe writes."""
    config = GRPOConfig(model="", packed="", output_dir=str(folder), measure_peak=False)
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
