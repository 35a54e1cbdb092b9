"""Checkpoints that are written while the servers, which took the weights out of memory, sample from them: on fake parts."""

from pathlib import Path

import pytest

from ttrl.errors import StorageError, TrainerDiedError
from ttrl.run_folder.folder import RunFolder
from ttrl.system.files import read_jsonl


@pytest.fixture
def beside(world):
    """The world's trainer hands over at once, and writes when it is waited for: `beside.fail[N]` is what happens then, once."""

    class HandsOver(world.trainer()):
        fail: dict[int, BaseException] = {}  # noqa: RUF012 - of this fixture
        holds = None

        def train(self, number, recipe_config):
            self.holds = None
            if recipe_config["packed"]:
                world.note(f"compute {number}")
                assert recipe_config["hand_over"]
                self.holds = number, recipe_config
                return Path(recipe_config["output_dir"], "checkpoint")
            return super().train(number, recipe_config)

        def handover(self, number):
            return number if self.holds is not None and self.holds[0] == number else None

        def wait_until_saved(self):
            number, recipe_config = self.holds
            if (error := self.fail.pop(number, None)) is not None:
                self.holds = None
                raise error
            world.fake_tune(recipe_config, Path(recipe_config["output_dir"], "grpo.yaml"))

    HandsOver.fail = {}
    world.trainer_class = HandsOver
    return HandsOver


@pytest.mark.parametrize("steps", [0, 1])
def test_the_same_run(world, beside, steps, tmp_path):
    """What is sampled, packed and trained does not depend on when files are written; and the server has the policy before."""
    world.train(weight_sync="memory", off_policy_steps=steps)
    early, events = world.run, list(world.events)
    for number in (1, 2, 3):
        assert events.index(f"compute {number}") < events.index(f"serve {number}") < events.index(f"train {number}")
        assert "save_seconds" in RunFolder(early).iteration(number).marker("train")
    world.trainer_class, world.run = world.trainer(), tmp_path / "another"
    world.events.clear()
    world.train(off_policy_steps=steps)
    for number in (1, 2, 3):
        one, other = (read_jsonl(run / f"iterations/{number:04d}/rollouts.jsonl") for run in (early, world.run))
        assert [(row["task_id"], row["text"], row["weights_version"]) for row in one] == [
            (row["task_id"], row["text"], row["weights_version"]) for row in other
        ]


def test_a_trainer_that_dies_while_it_writes_trains_again(world, beside):
    beside.fail[2] = TrainerDiedError("the trainer failed (killed by signal 9)")
    world.train(weight_sync="memory")
    assert world.count()["compute 2"] == 2 and world.count()["train 2"] == 1 and world.count()["serve 2"] == 1
    assert [row["iteration"] for row in world.rows()] == [0, 1, 2, 3]


def test_one_that_dies_whenever_it_writes_ends_the_run(world, beside):
    class Dies(dict):
        def pop(self, number, default):
            return TrainerDiedError("the trainer failed (killed by signal 9)") if number == 2 else default

    beside.fail = Dies()
    with pytest.raises(TrainerDiedError):
        world.train(weight_sync="memory", trainer_restarts=1)
    assert world.count()["compute 2"] == 2


def test_what_was_not_written_is_trained_again_and_what_was_sampled_from_it_stays(world, beside):
    beside.fail[2] = StorageError("the disk is full")
    with pytest.raises(StorageError):
        world.train(weight_sync="memory", validation=[])
    iteration = RunFolder(world.run).iteration
    assert iteration(2).marker("train") is None and [row["iteration"] for row in world.rows()] == [0, 1]
    sampled = len(world.requests)
    had_sampled = iteration(3).marker("rollouts") is not None  # a matter of time
    world.train(weight_sync="memory", validation=[])
    assert world.count()["compute 2"] == 2 and world.count()["train 2"] == 1
    assert [row["iteration"] for row in world.rows()] == [0, 1, 2, 3]
    if had_sampled:
        assert len(world.requests) == sampled


def test_a_cache_goes_by_files(world, beside, tmp_path):
    world.train(weight_sync="memory", cache=[str(tmp_path / "cache")])
    for number in (1, 2, 3):
        assert world.events.index(f"train {number}") < world.events.index(f"serve {number}")
