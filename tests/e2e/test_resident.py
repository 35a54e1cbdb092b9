"""The resident trainer over real processes: `tune run` and torchrun, FSDP over gloo, and a rank that is killed."""

import hashlib
import time

import psutil
import pytest
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
def trainers(model_folder, tmp_path):
    """`trainers("resident")`: two ranks; `trainers.config("resident", number)`: the config of iteration 1 or 2."""
    made = []
    for number in (1, 2):
        packed = packed_tensors_from_tokenized_results(random_samples(number, completions=6), seq_len=24, pad_id=0)
        packed.save(tmp_path / f"packed{number}.safetensors")

    def make(form):
        run = tmp_path / form
        config = TrainConfig(run=str(run), model=str(model_folder()), iterations=2, trainer=form, nproc_per_node=2)
        made.append(Trainer(config, RunFolder(run), Console(quiet=True)))
        return made[-1]

    def config(form, number):
        output, before = (tmp_path / form / "iterations" / str(n) for n in (number, number - 1))
        return {
            **{"model": str(before / "checkpoint" if number > 1 else model_folder())},
            **{"state": str(before / "state") if number > 1 else None, "output_dir": str(output), "iteration": number},
            **{"packed": str(tmp_path / f"packed{number}.safetensors"), "device": "cpu", "num_threads": 1},
            **{"lr": 0.01, "updates_per_iteration": 2, "rows_per_microbatch": 1, "checkpoint_dtype": "bf16"},
        }

    make.config = config
    yield make
    for trainer in made:
        trainer.stop()


def digests(output):
    files = [path for name in ("checkpoint", "state") for path in sorted((output / name).iterdir())]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_two_ranks_leave_the_same_files_and_the_death_of_one_is_noticed(trainers, tmp_path):
    """A checkpoint in bf16, so that memory has to take what was written."""
    once, resident = trainers("once"), trainers("resident")
    resident.start(trainers.config("resident", 1))
    for number in (1, 2):
        outputs = [tmp_path / form / "iterations" / str(number) for form in ("once", "resident")]
        for trainer, output in zip((once, resident), outputs, strict=True):
            assert trainer.train(number, trainers.config(output.parts[-3], number)) == output / "checkpoint"
        assert digests(outputs[0]) == digests(outputs[1])
        losses = [[row["loss"] for row in read_jsonl(output / "train.jsonl")] for output in outputs]
        assert losses[0] == losses[1] and len(losses[0]) == 2
        assert "2 optimizer steps" in (outputs[1] / "train.log").read_text()
    log = tmp_path / "resident/logs/trainer.log"
    assert "loading" not in log.read_text() and "optimizer steps" not in log.read_text()

    ranks = [process for process in psutil.Process().children(recursive=True) if "ttrl.grpo_recipe" in process.cmdline()]
    assert len(ranks) == 2
    ranks[1].kill()
    with pytest.raises(TrainerError, match=r"(?s)the trainer failed \(exit code 1\).*SIGKILL"):
        while True:  # a timeout would say nothing: the test has one
            resident.check()
            time.sleep(0.02)
    assert not any(process.is_running() for process in ranks)
