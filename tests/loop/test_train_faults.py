"""What goes wrong in the middle of a run, and what is kept of it: on fake parts (see
conftest.py).
"""

import math

import pytest

from ttrl.errors import (
    GraderError,
    RunFolderError,
    ServerDiedError,
    ServerError,
    StorageError,
    TrainerError,
)
from ttrl.run_folder.folder import RunFolder
from ttrl.system.files import digest, read_jsonl


def test_no_signal_trains_nothing_and_the_next_iteration_still_works(world, capsys):
    def answer(prompt, k, version):
        asked = len([p for _, p in world.requests if p.startswith("task")])
        return "yes" if k < 2 and asked > 4 else "no"  # nothing is right in iterations 1 and 2

    world.answer = answer
    result = world.train(iterations=4)
    assert [row.get("trained") for row in world.rows()] == [None, False, False, True, True]
    assert "train 1" not in world.events
    assert "train 2" not in world.events
    out = capsys.readouterr().out
    assert out.count("no group had a signal: nothing trained") == 2
    for number, version in ((1, 0), (2, 0), (3, 0), (4, 3)):
        rows = read_jsonl(world.run / f"iterations/{number:04d}/rollouts.jsonl")
        assert {row["weights_version"] for row in rows} == {version}
    assert world.recipes[0]["model"] == str(world.run / "iterations/0000/checkpoint")
    assert world.recipes[0]["state"] is None
    assert world.recipes[1]["model"] == str(world.run / "iterations/0003/checkpoint")
    assert world.recipes[1]["state"] == str(world.run / "iterations/0003/state")
    assert world.count()["serve 0"] == 1  # nothing to sync where nothing was trained
    assert result.checkpoint == world.run / "iterations/0004/checkpoint"


def test_a_run_that_never_had_a_signal_ends_with_the_starting_model(world):
    world.answer = lambda prompt, k, version: "no"
    result = world.train(iterations=2)
    assert result.checkpoint == result.best_checkpoint == world.run / "iterations/0000/checkpoint"
    assert (result.checkpoint / "model.safetensors").resolve() == (
        world.model / "model.safetensors"
    ).resolve()


@pytest.mark.parametrize("bad", ["raises", "nan", "text"])
def test_a_grader_that_fails_costs_its_samples_and_the_run_goes_on(world, bad, capsys):
    def grade(choice):
        if choice.index == 3:
            if bad == "raises":
                raise ZeroDivisionError("by zero")
            return math.nan if bad == "nan" else "1.0"
        return float(choice.message.content == "yes")

    world.grade = grade
    world.train(iterations=1, validation=[])
    row = world.rows()[1]
    assert row["failed"] == 2
    assert row["samples"] == 8
    assert row["trained"] is True
    errors = [
        s["error"]
        for s in read_jsonl(world.run / "iterations/0001/rollouts.jsonl")
        if s["reward"] is None
    ]
    assert len(errors) == 2
    assert all("GraderError" in error for error in errors)
    assert "2 samples failed" in capsys.readouterr().out


def test_when_every_grade_fails_the_run_stops_and_a_repaired_grader_continues_it(world):
    def broken(choice):
        raise ZeroDivisionError("by zero")

    good = world.grade
    world.grade = broken
    with pytest.raises(
        GraderError, match=r"all 8 samples of 2 tasks failed.*ZeroDivisionError: by zero"
    ):
        world.train(validation=[], iterations=1)
    assert world.events[-1] == "stop"
    world.grade = good
    world.train(validation=[], iterations=1)
    assert world.rows()[1]["failed"] == 0
    assert world.rows()[1]["reward"] == 0.25


def test_a_request_that_the_server_refuses_costs_its_task_alone(world):
    world.refused = {"task 0", "task 1", "task 2"}
    world.train(tasks_per_iteration=6, iterations=1)
    row = world.rows()[1]
    assert (row["samples"], row["failed"], row["groups"]["too_few"], row["trained"]) == (
        24,
        12,
        3,
        True,
    )


def test_when_every_request_fails_on_a_living_server(world):
    world.refused = {f"task {n}" for n in range(6)}
    with pytest.raises(ServerError, match=r"all 8 samples of 2 tasks failed.*HTTP 400: as told"):
        world.train(iterations=1)
    assert world.events[-1] == "stop"


def test_a_server_that_dies_while_it_samples_is_named_and_what_it_sampled_is_kept(world):
    def sampled(prompt):
        if len(world.requests) == 2:
            world.server_is_dead = True

    world.sampled = sampled
    with pytest.raises(ServerDiedError, match="killed by signal 9; its last log lines: boom"):
        world.train(tasks_per_iteration=6, iterations=1, validation=[])
    assert world.events[-1] == "stop"
    world.server_is_dead, world.sampled = False, lambda prompt: None
    world.train(tasks_per_iteration=6, iterations=1, validation=[])
    prompts = [prompt for _, prompt in world.requests]
    assert len(prompts) == len(set(prompts)) == 6


@pytest.mark.parametrize(
    "error",
    [TrainerError("the trainer failed (exit code 1)"), StorageError("no space left on device")],
)
def test_a_trainer_that_fails_is_run_again_on_the_same_rows(world, error):
    trains, world.fake_tune = world.fake_tune, lambda *_, **__: (_ for _ in ()).throw(error)
    with pytest.raises(type(error), match=str(error).replace("(", r"\(").replace(")", r"\)")):
        world.train()
    world.fake_tune = trains
    packed = digest(world.run / "iterations/0001/packed.safetensors")
    asked = len(world.requests)
    world.train(iterations=1)
    assert packed == digest(world.run / "iterations/0001/packed.safetensors")
    assert len(world.requests) == asked + 2  # the validation after it; nothing was sampled again


def test_rows_too_short_for_everything_can_be_made_longer(world):
    with pytest.raises(ValueError, match="seq_len is 4, below max_tokens 8: raise it"):
        world.train(iterations=1, seq_len=4)
    world.train(iterations=1, seq_len=128)
    assert world.rows()[1]["trained"] is True


def test_weights_by_restart_stop_the_server_while_training(world):
    world.train(iterations=2, weight_sync="restart")
    middle = world.events[world.events.index("train 1") - 1 :]
    assert middle == ["stop", "train 1", "serve 1", "stop", "train 2", "serve 2", "stop"]


def test_the_run_is_locked_while_it_works(world):
    held = []

    def sampled(prompt):
        with (
            pytest.raises(RunFolderError, match="in use by another process"),
            RunFolder(world.run).locked(),
        ):
            pass
        held.append(prompt)

    world.sampled = sampled
    world.train(iterations=1)
    assert held
    with RunFolder(world.run).locked():
        pass
