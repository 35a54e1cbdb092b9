"""Training again on new grades, with a trainer that pretends: from which checkpoints, and what is
not done twice.
"""

import json
import sys

import pytest

from ttrl.cli import main
from ttrl.errors import RunFolderError, TrainerError, UserError
from ttrl.replays.replay import replay
from ttrl.run_folder.folder import RunFolder
from ttrl.system.files import digest, read_jsonl, write_json


def inverse(choice):
    return float(choice.message.content == "no"), {"length": len(choice.message.content)}


def unchanged(choice, sample):
    return sample.reward, sample.metrics


def test_training_goes_on_from_its_own_checkpoints(run, world, capsys):
    run.train()
    before = run.files()
    result = replay(run.folder.path, grader=inverse, train=True)
    own, iterations = result.folder / "iterations", run.folder.path / "iterations"
    assert [config["model"] for config in world.recipes] == [
        str(iterations / "0000/checkpoint"), str(own / "0001/checkpoint"),
        str(own / "0002/checkpoint"),
    ]  # fmt: skip
    assert [config["state"] for config in world.recipes] == [
        None,
        str(own / "0001/state"),
        str(own / "0002/state"),
    ]
    assert [config["packed"] for config in world.recipes] == [
        str(own / f"000{n}/packed.safetensors") for n in (1, 2, 3)
    ]
    assert {config["seed"] for config in world.recipes} == {0}
    assert result.checkpoint == own / "0003/checkpoint"
    assert run.files() == before
    said = capsys.readouterr().out
    assert "After iteration 1, the rollouts are off-policy" in said
    assert f"checkpoint: {result.checkpoint}" in said
    rows = read_jsonl(result.folder / "metrics.jsonl")
    assert [(row["iteration"], row["reward"], row["trained"]) for row in rows] == [
        (1, 0.5, True),
        (2, 0.75, True),
        (3, 0.25, True),
    ]
    assert (
        "0.75" in (result.folder / "report.html").read_text()
        and main(["report", str(result.folder)]) == 0
    )


def test_a_logger_of_the_run_need_not_be_installed_here(run, world):
    """The run was made on another machine; a replay sends nothing to its loggers."""
    run.folder.remember_config({**run.config.to_dict(), "loggers": ["not_installed_here"]})
    result = run.replay(unchanged, train=True)
    assert len(world.recipes) == 3
    assert RunFolder(result.folder).config()["loggers"] == []


def test_an_unchanged_grader_gives_the_same_packed_rows(run):
    run.train()
    result = run.replay(unchanged, train=True)
    for number in (1, 2, 3):
        name = f"iterations/{number:04d}/packed.safetensors"
        assert digest(result.folder / name) == digest(run.folder.path / name)


def test_training_can_begin_later(run, world):
    run.train()
    run.replay(inverse, train=True, iterations=[2, 3])
    assert world.recipes[0]["model"] == str(run.folder.path / "iterations/0001/checkpoint")
    assert world.recipes[0]["state"] == str(run.folder.path / "iterations/0001/state")
    assert world.recipes[0]["iteration"] == 2


def test_training_from_the_checkpoints_of_the_run(run, world, capsys):
    run.train()
    replay(run.folder.path, grader=inverse, train=True, from_checkpoints=True)
    iterations = run.folder.path / "iterations"
    assert [config["model"] for config in world.recipes] == [
        str(iterations / f"000{n}/checkpoint") for n in (0, 1, 2)
    ]
    assert [config["state"] for config in world.recipes] == [
        None,
        str(iterations / "0001/state"),
        str(iterations / "0002/state"),
    ]
    assert (
        "each iteration from the run's own checkpoint of its sampling policy"
        in capsys.readouterr().out
    )


def test_the_starting_model_outlives_its_links(run, world):
    run.train()
    run.folder.prune(3, 2, None)
    assert not (run.folder.path / "iterations/0000/checkpoint").exists()
    run.replay(inverse, train=True)
    assert world.recipes[0]["model"] == str(world.model)
    marker = json.loads((run.start.path / "done/prepare.json").read_text())
    write_json(
        run.start.path / "done/prepare.json",
        marker | {"files": {"checkpoint/model.safetensors": "0" * 64}},
    )
    with pytest.raises(RunFolderError, match=r"is not the starting model of"):
        run.replay(inverse, train=True)


def states(folder):
    """Every entry of a run but its replays: kind, link or size, time of the last change."""
    paths = [path for path in folder.rglob("*") if "replays" not in path.relative_to(folder).parts]
    return {
        str(path): (
            path.lstat().st_mode,
            path.is_symlink() and path.readlink(),
            path.lstat().st_size,
            path.lstat().st_mtime_ns,
        )
        for path in paths
        if path.name != "replays"
    }


def test_the_model_of_a_run_with_a_chat_template_stays_untouched(run, world):
    """Its folder of links was removed, or leads to a model elsewhere since: a replay makes its
    own."""
    template = "{{ messages }}"
    config = {**run.config.to_dict(), "chat_template": template}
    run.folder.remember_config(config, allow=["chat_template"])
    run.train()
    run.folder.prune(3, 2, None)
    before = states(run.folder.path)
    model = states(world.model)
    result = run.replay(inverse, train=True)
    assert states(run.folder.path) == before
    own = result.folder.absolute() / "model"
    assert world.recipes[0]["model"] == str(own)
    assert (own / "chat_template.jinja").read_text() == template
    stale = run.folder.path / "model"
    stale.mkdir()
    (stale / "chat_template.jinja").write_text("of another time")
    before = states(run.folder.path)
    run.replay(unchanged, train=True)
    assert states(run.folder.path) == before
    assert states(world.model) == model


@pytest.mark.parametrize(
    "how", [{}, {"train": True}, {"train": True, "from_checkpoints": True}], ids=str
)
def test_a_run_stays_untouched(run, how):
    run.train()
    before = states(run.folder.path)
    run.replay(inverse, **how)
    run.replay(inverse, **how, again=True)
    assert states(run.folder.path) == before


def test_checkpoints_that_are_gone(run, world):
    run.train()
    run.folder.prune(3, 2, None)
    with pytest.raises(
        RunFolderError,
        match=r"of iteration 1, from which .*Training can start at iteration 1, 3: choose",
    ):
        run.replay(inverse, train=True, from_checkpoints=True)
    with pytest.raises(RunFolderError, match="of iteration 1, from which"):
        run.replay(inverse, train=True, iterations=[2, 3])
    assert not world.recipes and not (run.folder.path / "replays").exists()
    run.replay(inverse, train=True, from_checkpoints=True, iterations=[1, 3])
    assert len(world.recipes) == 2


def test_a_replay_that_was_interrupted_continues(run, world, place):
    place(
        "mine",
        "calls = []\ndef grade(choice):\n    calls.append(1)\n    return "
        "len(choice.message.content)",
    )

    def dies(config, *args, **kwargs):
        if config["iteration"] == 2:
            raise TrainerError("killed")
        return trains(config, *args, **kwargs)

    trains = world.fake_tune
    world.fake_tune = dies
    with pytest.raises(TrainerError):
        run.replay("mine:grade", train=True)
    world.fake_tune = trains
    result = run.replay("mine:grade", train=True)
    assert (
        world.events == ["train 1", "train 2", "train 3"] and len(sys.modules["mine"].calls) == 24
    )
    assert run.replay("mine:grade", train=True).checkpoint == result.checkpoint
    assert len(world.events) == 3
    with pytest.raises(
        RunFolderError,
        match="holds another training: each iteration from the one before, iterations 1, 2, 3",
    ):
        run.replay("mine:grade", train=True, iterations=[1, 3])


def test_other_grades_undo_what_was_trained_on_them(run, world, tmp_path):
    shift = 0

    def grader(choice, sample):
        return (sample.sample + shift) % 2

    for expected in (3, 3):  # the same grades again: nothing is trained twice
        run.replay(grader, train=True, output=tmp_path / "out")
        assert len(world.events) == expected
    shift = 1
    run.replay(grader, train=True, output=tmp_path / "out")
    assert world.events == ["train 1", "train 2", "train 3"] * 2


def test_nothing_to_learn(run, world, capsys):
    result = replay(run.folder.path, grader=lambda choice: 1.0, train=True)
    assert result.checkpoint is None and not world.recipes
    assert "iteration   1  no group had a signal: nothing trained" in capsys.readouterr().out


class ForEvaluation:
    only_evaluates = "a program can read its tests"

    def __call__(self, choice):
        return 1.0


def test_no_policy_is_trained_on_grades_that_are_for_evaluation_alone(run):
    grader = ForEvaluation()
    with pytest.raises(
        UserError, match="this grader is for evaluation only: a program can read its tests"
    ):
        run.replay(lambda choice: grader(choice), train=True)
    run.replay(grader)
