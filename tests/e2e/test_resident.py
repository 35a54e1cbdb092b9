"""The resident trainer over real processes: torchrun, FSDP over gloo, and a rank that is killed."""

import hashlib
import time
from pathlib import Path

import psutil
import pytest
import yaml
from support.tiny_models import random_samples

from ttrl import TrainConfig
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.errors import TrainerError
from ttrl.launch.trainer import Trainer
from ttrl.run_folder.folder import RunFolder
from ttrl.system.console import Console
from ttrl.system.files import read_jsonl

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def trainer(model_folder, tmp_path):
    """A resident trainer of two ranks."""
    config = TrainConfig(
        run=str(tmp_path),
        model=str(model_folder()),
        iterations=2,
        trainer="resident",
        nproc_per_node=2,
    )
    made = Trainer(config, RunFolder(tmp_path), Console(quiet=True))
    yield made
    made.stop()


@pytest.fixture
def configs(model_folder, tmp_path):
    """Those of iterations 1 and 2."""
    found = []
    state = None
    model = str(model_folder())
    for number in (1, 2):
        packed = packed_tensors_from_tokenized_results(
            random_samples(number, completions=6), seq_len=24, pad_id=0
        )
        packed.save(tmp_path / f"packed{number}.safetensors")
        output = tmp_path / "iterations" / str(number)
        found.append(
            {
                **{"model": model, "state": state, "output_dir": str(output), "iteration": number},
                **{
                    "packed": str(tmp_path / f"packed{number}.safetensors"),
                    "device": "cpu",
                    "num_threads": 1,
                },
                **{
                    "lr": 0.01,
                    "updates_per_iteration": 2,
                    "rows_per_microbatch": 1,
                    "checkpoint_dtype": "bf16",
                },
            }
        )
        model, state = str(output / "checkpoint"), str(output / "state")
    return found


def digests(output):
    files = [path for name in ("checkpoint", "state") for path in sorted((output / name).iterdir())]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_two_ranks_leave_the_same_files_and_the_death_of_one_is_noticed(
    trainer, configs, recipe_worker, tmp_path
):
    """A checkpoint in bf16, so that memory has to take what was written; others do the second
    iteration from the files.

    Only this starts ranks by torchrun, and kills one of a resident trainer.
    """
    trainer.start(configs[0])
    for number, config in enumerate(configs, 1):
        output = Path(config["output_dir"])
        assert trainer.make_checkpoint(number, config) == output / "checkpoint"
        assert "2 optimizer steps" in (output / "train.log").read_text()
    other = tmp_path / "other"
    other.mkdir()
    (other / "grpo.yaml").write_text(yaml.safe_dump(configs[1] | {"output_dir": str(other)}))
    assert (
        recipe_worker(["ttrl/grpo_recipe", "--config", str(other / "grpo.yaml")], other / "log", 2)
        == 0
    )
    assert digests(output) == digests(other)
    losses = [
        [row["loss"] for row in read_jsonl(folder / "train.jsonl")] for folder in (output, other)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 2
    log = tmp_path / "logs/trainer.log"
    assert "loading" not in log.read_text() and "optimizer steps" not in log.read_text()

    ranks = [
        process
        for process in psutil.Process().children(recursive=True)
        if "ttrl.grpo_recipe" in process.cmdline()
    ]
    assert len(ranks) == 2
    ranks[1].kill()
    with pytest.raises(TrainerError, match=r"(?s)the trainer failed \(exit code 1\).*SIGKILL"):
        while True:  # a timeout would say nothing: the test has one
            trainer.check()
            time.sleep(0.02)
    assert not any(process.is_running() for process in ranks)
