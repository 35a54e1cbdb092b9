"""Checkpoints that are written while the servers, which took the weights out of memory, sample from
them: on fake parts.
"""

import json
import re
from pathlib import Path

import pytest
from support.world import version_of

from ttrl.errors import ConfigError, DriftError, RunFolderError, StorageError, TrainerDiedError
from ttrl.facts import SamplerTrainer, TrainFacts, read_facts
from ttrl.run_folder.folder import RunFolder
from ttrl.system.files import read_jsonl


class HeldOut(int):
    """Stands for weights in memory: the number of their policy."""

    bits = ""

    @property
    def digests(self):
        return {"embeddings": f"of {int(self)}", "head": f"of {int(self)}{self.bits}"}


def trainer_that_hands_over(world):
    """A trainer that hands over at once, and writes when it is waited for, if at all. It holds what
    it trained last, as the real one.
    """

    class HandsOver(world.trainer()):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.asked = self.holding = self.at = None

        def make_checkpoint(self, number, recipe_config):
            kept, output = recipe_config["kept"], Path(recipe_config["output_dir"])
            assert kept is None or kept == self.holding, (kept, self.holding)
            if not recipe_config["packed"] and kept is not None:
                world.note(f"write {kept}")
                world.fake_files(output, kept)
                self.asked = self.holding = None
            elif recipe_config["packed"]:
                self.asked = self.holding = None
                if (error := self.dies.pop(number, None)) is not None:
                    raise error
                before = version_of(Path(recipe_config["model"])) if kept is None else kept
                world.note(f"compute {number} from {before}")
                assert recipe_config["hand_over"]
                self.asked, self.is_lost = (number, recipe_config), False
                self.holding = None if recipe_config["save"] else number
                figures = world.step_facts.get(number, {}).get("sampler_trainer", {})
                self.compared = read_facts(SamplerTrainer, figures)
                if not recipe_config["save"]:
                    world.fake_tune(recipe_config, output / "grpo.yaml")
            else:
                super().make_checkpoint(number, recipe_config)
            return output / "checkpoint"

        def handover(self, number):
            if number in self.lost and self.asked is not None and self.asked[0] == number:
                self.lost[number] -= 1
                if self.lost[number] < 0:  # somebody noticed that it died
                    self.asked = self.holding = None
                    self.is_lost = bool(self.lost.pop(number))
            if self.asked is None or self.asked[0] != number:
                return None
            held_out = HeldOut(number)
            held_out.bits = self.bits.get(number, "")
            return held_out

        def wait_until_saved(self):
            if self.asked is None:
                return self.holding is None and not self.is_lost
            number, recipe_config = self.asked
            if (error := self.fail.pop(number, None)) is not None:
                self.asked = self.holding = None
                raise error
            if recipe_config["save"]:
                world.fake_tune(recipe_config, Path(recipe_config["output_dir"], "grpo.yaml"))
            return True

        is_lost = False

    return HandsOver


@pytest.fixture
def beside(world):
    """The world's trainer hands over: `beside.fail[N]` is what happens when it is waited for, once;
    `beside.dies[N]`, when it is asked for an iteration; after `beside.lost[N]` looks it is gone;
    `beside.bits[N]` changes the bits of a tensor.
    """
    made = trainer_that_hands_over(world)
    made.fail, made.dies, made.lost, made.bits = {}, {}, {}, {}
    world.trainer_class = made
    return made


def computed(world):
    return [event for event in world.events if event.startswith("compute")]


def written(world):
    return [n for n in range(1, 20) if (world.run / f"iterations/{n:04d}/checkpoint").is_dir()]


@pytest.mark.long(but=["1"])
@pytest.mark.parametrize("steps", [0, 1])
def test_the_same_run(world, beside, steps, tmp_path):
    """What is sampled, packed and trained does not depend on when files are written; and the server
    has the policy before.

    Long for on-policy runs: only these hand over at once.
    """
    world.train(weight_sync="memory", off_policy_steps=steps)
    early, events = world.run, list(world.events)
    for number in (1, 2, 3):
        begun, served = (
            events.index(f"compute {number} from {number - 1}"),
            events.index(f"serve {number}"),
        )
        assert begun < served < events.index(f"train {number}")
        assert RunFolder(early).iteration(number).marker(TrainFacts).save_seconds is not None
    world.trainer_class, world.run = world.trainer(), tmp_path / "another"
    world.events.clear()
    world.train(off_policy_steps=steps)
    for number in (1, 2, 3):
        one, other = (
            read_jsonl(run / f"iterations/{number:04d}/rollouts.jsonl")
            for run in (early, world.run)
        )
        assert [(row["task_id"], row["text"], row["weights_version"]) for row in one] == [
            (row["task_id"], row["text"], row["weights_version"]) for row in other
        ]


def test_a_trainer_that_dies_while_it_writes_trains_again(world, beside):
    beside.fail[2] = TrainerDiedError("the trainer failed (killed by signal 9)")
    world.train(weight_sync="memory")
    assert (
        world.count()["compute 2 from 1"] == 2
        and world.count()["train 2"] == 1
        and world.count()["serve 2"] == 1
    )
    assert [row["iteration"] for row in world.rows()] == [0, 1, 2, 3]


@pytest.mark.parametrize("every", [1, 3])
def test_one_that_is_gone_before_the_server_has_its_weights(world, beside, every):
    beside.lost[2] = 1
    world.train(weight_sync="memory", save_every=every)
    again = [2, 3] if every == 1 else [1, 2, 3]
    assert computed(world) == [f"compute {n} from {n - 1}" for n in [1, 2, *again]]
    assert [row["iteration"] for row in world.rows()] == [0, 1, 2, 3] and written(world) == (
        [1, 2, 3] if every == 1 else [3]
    )
    assert world.count()["serve 2"] == 1


def test_one_that_dies_whenever_it_writes_ends_the_run(world, beside):
    class Dies(dict):
        def pop(self, number, default):
            return (
                TrainerDiedError("the trainer failed (killed by signal 9)")
                if number == 2
                else default
            )

    beside.fail = Dies()
    with pytest.raises(TrainerDiedError):
        world.train(weight_sync="memory", trainer_restarts=1)
    assert world.count()["compute 2 from 1"] == 2


def test_what_was_not_written_is_trained_again_and_what_was_sampled_from_it_stays(world, beside):
    beside.fail[2] = StorageError("the disk is full")
    with pytest.raises(StorageError):
        world.train(weight_sync="memory", validation=[])
    iteration = RunFolder(world.run).iteration
    assert not iteration(2).is_done("train") and [row["iteration"] for row in world.rows()] == [
        0,
        1,
    ]
    sampled = len(world.requests)
    had_sampled = iteration(3).is_done("rollouts")  # a matter of time
    world.train(weight_sync="memory", validation=[])
    assert world.count()["compute 2 from 1"] == 2 and world.count()["train 2"] == 1
    assert [row["iteration"] for row in world.rows()] == [0, 1, 2, 3]
    if had_sampled:
        assert len(world.requests) == sampled


def test_a_cache_goes_by_files(world, beside, tmp_path):
    world.train(weight_sync="memory", cache=[str(tmp_path / "cache")])
    for number in (1, 2, 3):
        assert world.events.index(f"train {number}") < world.events.index(f"serve {number}")


# save_every

DEAD = "the trainer failed (killed by signal 9)"


def assert_finished(world, iterations, sampled):
    """Every iteration was sampled once from the policy before it, and its numbers are there."""
    assert [row["iteration"] for row in world.rows()] == list(range(iterations + 1))
    for number in range(1, iterations + 1):
        rows = read_jsonl(world.run / f"iterations/{number:04d}/rollouts.jsonl")
        assert {row["weights_version"] for row in rows} == {number - 1}
    assert len(world.requests) == sampled


@pytest.mark.long(but=["0"])
@pytest.mark.parametrize("steps", [0, 1])
def test_only_every_nth_policy_is_written_and_the_last(world, beside, steps):
    """Long for off-policy runs: only these keep two policies."""
    world.train(
        weight_sync="memory",
        save_every=3,
        iterations=7,
        off_policy_steps=steps,
        tasks=world.tasks(14),
    )
    assert computed(world) == [f"compute {n} from {n - 1}" for n in range(1, 8)]
    assert written(world) == [3, 6, 7]
    marker = RunFolder(world.run).iteration(4).marker(TrainFacts)
    assert (
        marker.trained
        and marker.saved is False
        and "checkpoint" not in str(RunFolder(world.run).iteration(4).files("train"))
    )
    assert [recipe["kept"] for recipe in world.recipes] == [None, 1, 2, None, 4, 5, None]
    assert [version_of(Path(recipe["model"])) for recipe in world.recipes] == [0, 0, 0, 3, 3, 3, 6]


def test_killed_it_goes_back_to_the_last_that_was_written_and_samples_nothing_again(world, beside):
    beside.dies[6] = KeyboardInterrupt()  # policies 4 and 5 are lost with the process
    settings = {"weight_sync": "memory", "save_every": 3, "iterations": 7, "tasks": world.tasks(14)}
    with pytest.raises(KeyboardInterrupt):
        world.train(**settings)
    assert [row["iteration"] for row in world.rows()] == [0, 1, 2, 3, 4, 5]
    before = {path: path.read_bytes() for path in world.run.rglob("iterations/*/*.json*")}
    world.events.clear()
    world.train(**settings)
    assert computed(world) == [f"compute {n} from {n - 1}" for n in (4, 5, 6, 7)]
    assert before == {path: path.read_bytes() for path in before}, (
        "what finished phases wrote was touched"
    )
    assert written(world) == [3, 6, 7]
    assert_finished(world, 7, 7 * 2 + 8 * 2)


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ({}, "rows and settings are the same, so the cause is another processor"),
        ({"num_threads": 2}, "since then, num_threads was 1 and is 2"),
        ({"device": "cuda"}, None),
    ],
    ids=str,
)
def test_other_bits_than_servers_had_end_the_run(more, cause, world, beside, caplog):
    """… until what changed is put back, or the records are given up. On a GPU it is said."""
    beside.dies[6] = KeyboardInterrupt()
    settings = {"weight_sync": "memory", "save_every": 3, "iterations": 7, "tasks": world.tasks(14)}
    settings |= {name: value for name, value in more.items() if name == "device"}
    with pytest.raises(KeyboardInterrupt):
        world.train(**settings)
    records = {n: world.run / f"iterations/{n:04d}/weights.json" for n in range(1, 6)}
    before = {path: path.read_bytes() for path in records.values()}
    beside.bits[5] = " another"
    world.events.clear()
    said = (
        r"iteration 5 was trained again, and 1 of 2 tensors differ from the servers' earlier .* "
        r"such as head: "
    )
    if cause is None:
        world.train(**settings)
        assert re.search(said, caplog.text)
        return
    with pytest.raises(RunFolderError, match=f"{said}{cause}"):
        world.train(**settings | more)
    assert (
        computed(world) == ["compute 4 from 3", "compute 5 from 4"]
        and "serve 5" not in world.events
    )
    assert before == {path: path.read_bytes() for path in before}
    if not more:  # not as it was, and to go on all the same
        records[5].unlink()
    else:
        beside.bits.clear()
    world.train(**settings)
    assert_finished(world, 7, 7 * 2 + 8 * 2)


def test_what_was_not_finished_may_be_trained_with_other_settings(world, beside, monkeypatch):
    beside.fail[2] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        world.train(weight_sync="memory")
    beside.bits[2] = " another"
    with pytest.raises(RunFolderError, match="iteration 2 was trained again"):
        world.train(weight_sync="memory")
    monkeypatch.setenv("TTRL_ALLOW_CHANGES", "training.lr")
    world.train(weight_sync="memory", training={"lr": 0.5})
    record = json.loads((world.run / "iterations/0002/weights.json").read_text())
    assert record["of"]["lr"] == 0.5 and record["tensors"]["head"] == "of 2 another"
    assert "weights.json" in RunFolder(world.run).iteration(2).files("train")


def test_a_policy_that_was_lost_is_made_again_for_what_it_has_not_sampled(world, beside):
    beside.dies[3] = KeyboardInterrupt()
    settings = {"weight_sync": "memory", "save_every": 4, "iterations": 4, "tasks": world.tasks(8)}
    with pytest.raises(KeyboardInterrupt):
        world.train(**settings)
    folder = RunFolder(world.run)
    for phase in ("rollouts", "pack"):  # as if it had been killed while policy 2 sampled
        (world.run / f"iterations/0003/done/{phase}.json").unlink()
    world.events.clear()
    world.train(**settings)
    assert [e for e in world.events if e.split()[0] in ("compute", "serve")] == [
        "compute 1 from 0", "compute 2 from 1", "serve 2", "compute 3 from 2", "serve 3",
        "compute 4 from 3", "serve 4",
    ]  # fmt: skip
    assert folder.written_until(4) == [4, 0]
    assert [row["iteration"] for row in world.rows()] == [0, 1, 2, 3, 4]


def test_a_trainer_that_dies_is_brought_to_where_it_was(world, beside):
    beside.dies[5] = TrainerDiedError(DEAD)
    beside.fail[2] = TrainerDiedError(DEAD)
    world.train(weight_sync="memory", save_every=3, iterations=6, tasks=world.tasks(12))
    assert computed(world) == [f"compute {n} from {n - 1}" for n in (1, 2, 1, 2, 3, 4, 4, 5, 6)]
    assert written(world) == [3, 6]
    assert_finished(world, 6, 6 * 2 + 7 * 2)


def test_a_trainer_that_starts_again_leaves_what_validation_is_writing(world, beside):
    left = [
        ".partial-1-checkpoint/model.safetensors",
        ".partial-1-validation.jsonl",
        "done/.partial-1-validate.json",
    ]
    there = []

    class DyingOnce(beside):
        def make_checkpoint(self, number, recipe_config):
            folder = world.run / f"iterations/{number:04d}"
            if number == 2:
                if not there:
                    for name in left:
                        (folder / name).parent.mkdir(parents=True, exist_ok=True)
                        (folder / name).touch()
                    beside.dies[2] = TrainerDiedError(DEAD)
                there.append([name for name in left if (folder / name).exists()])
            return super().make_checkpoint(number, recipe_config)

    world.trainer_class = DyingOnce
    world.train(weight_sync="memory", iterations=2)
    assert there == [left, left[1:]]


def test_a_server_that_cannot_take_it_is_given_files(world, beside):
    world.server_reads_files_only = True
    world.train(weight_sync="memory", save_every=3)
    assert [event for event in world.events if event.startswith("write")] == ["write 1", "write 2"]
    assert written(world) == [1, 2, 3]
    assert RunFolder(world.run).iteration(1).files("train").keys() >= {
        "checkpoint/config.json",
        "state/state.txt",
    }


def test_the_last_policy_is_written_wherever_the_run_ends(world, beside):
    """Also where that was not known when it was trained: the validation reached its goal, or fewer
    iterations are enough.
    """
    settings = {
        "weight_sync": "memory",
        "save_every": 5,
        "iterations": 9,
        "tasks": world.tasks(18),
        "stop_at": 1.0,
    }
    settings["validation_metric"] = "goal"
    world.grade = lambda choice: (
        float(choice.message.content == "yes"),
        {"goal": float(world.server_version() >= 2)},
    )
    result = world.train(**settings)
    assert (
        written(world) == [2]
        and result.checkpoint == world.run / "iterations/0002/checkpoint" == result.best_checkpoint
    )
    folder = RunFolder(world.run)
    assert folder.iteration(2).is_done("save") and folder.written_until(2) == [2, 0]
    assert "state/state.txt" in folder.iteration(2).files("train")
    world.events.clear()
    assert world.train(**settings).checkpoint == result.checkpoint and not computed(world)
    (world.run / "iterations/0002/done/save.json").unlink()
    assert world.train(**settings).checkpoint == result.checkpoint
    assert computed(world) == ["compute 1 from 0", "compute 2 from 1"]


def test_files_again_where_memory_is_given_up(world, beside):
    """Continued with servers that read files, what was lost is trained again and written."""
    beside.dies[3] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        world.train(weight_sync="memory", save_every=5, iterations=4, tasks=world.tasks(8))
    world.trainer_class = world.trainer()
    world.train(weight_sync="reload", iterations=4, tasks=world.tasks(8), keep_checkpoints=5)
    assert written(world) == [1, 2, 3, 4]
    assert [row["iteration"] for row in world.rows()] == [0, 1, 2, 3, 4]


def test_a_fresh_machine_trains_again_what_the_mirror_has_no_files_of(world, beside, tmp_path):
    beside.dies[6] = KeyboardInterrupt()
    settings = {"weight_sync": "memory", "save_every": 3, "iterations": 7, "tasks": world.tasks(14)}
    settings["mirror"] = (tmp_path / "store").as_uri()
    with pytest.raises(KeyboardInterrupt):
        world.train(**settings)
    world.run = tmp_path / "another"
    world.events.clear()
    world.train(**settings)
    assert computed(world) == [f"compute {n} from {n - 1}" for n in (4, 5, 6, 7)]
    assert [row["iteration"] for row in world.rows()] == list(range(8)) and written(world) == [
        3,
        6,
        7,
    ]


def test_an_iteration_is_done_again_whose_start_was_not_written(world, beside, monkeypatch):
    figures = {
        "tokens": 50,
        "mean": 1.0,
        "p999": 2.0,
        "ess": 0.1,
        "outside": 0.5,
        "max": 3.0,
        "worst": [],
        "by_position": [],
    }
    world.step_facts[5] = {"sampler_trainer": {**figures, "by_version": {"4": figures}}}
    settings = {"weight_sync": "memory", "save_every": 3, "iterations": 6, "tasks": world.tasks(12)}
    with pytest.raises(DriftError):
        world.train(**settings)
    world.step_facts.clear()
    world.events.clear()
    monkeypatch.setenv("TTRL_REDO", "5")
    world.train(**settings)
    assert computed(world) == [f"compute {n} from {n - 1}" for n in (4, 5, 6)]
    assert [row["iteration"] for row in world.rows()] == list(range(7)) and written(world) == [3, 6]


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"weight_sync": "reload"}, "servers read the files of each iteration"),
        ({"training": {"lora_rank": 4}}, "an adapter's files are small"),
        ({"trainer": "once"}, "ended by then"),
        ({"cache": ["somewhere"]}, "cache"),
        ({"joined_servers": ["http://10.0.0.7:8000"]}, "joined servers"),
        ({"keep_every": 7}, "multiples of save_every"),
    ],
)
def test_where_files_are_needed_it_is_refused(world, settings, what, monkeypatch):
    monkeypatch.setenv("TTRL_SERVER_KEY", "k")
    with pytest.raises(ConfigError, match=what):
        world.train(**{"weight_sync": "memory", "save_every": 5} | settings)


@pytest.mark.parametrize("every", [1, 3])
def test_drift_is_found_before_the_policy_samples(world, beside, every):
    figures = {
        "tokens": 50,
        "mean": 1.0,
        "p999": 2.0,
        "ess": 0.1,
        "outside": 0.5,
        "max": 3.0,
        "worst": [],
        "by_position": [],
    }
    world.step_facts[2] = {"sampler_trainer": {**figures, "by_version": {"1": figures}}}
    with pytest.raises(DriftError):
        world.train(weight_sync="memory", save_every=every)
    assert "compute 2 from 1" in world.events and "serve 2" not in world.events
    assert RunFolder(world.run).iteration(2).is_done("train"), (
        "what it trained is kept, to be looked at"
    )
