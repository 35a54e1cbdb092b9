"""Which checkpoints the rules keep, and what a run needs on disk."""

import errno
import json
import random

import pytest
from support import os_calls
from support.facts import mark

from ttrl import TrainConfig
from ttrl.configs.run import ConfigError
from ttrl.errors import StorageError
from ttrl.facts import MetricsRow
from ttrl.plans.disk import DiskNeeds, disk_needs, judge_disk
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.pruning import best_policies, kept_of, most_kept, prune
from ttrl.tiny_model import make_tiny_model


def config(tmp_path, **changes):
    return TrainConfig(run=str(tmp_path / "run"), model="m", iterations=20, **changes)


def folder_of(path, trained):
    """Iterations with the marker and the folders of a training, or with the marker alone."""
    folder = RunFolder(path)
    for number, yes in enumerate(trained):
        one = folder.iteration(number)
        if yes:
            for name in ("checkpoint", "state") if number else ("checkpoint",):
                (one.path / name).mkdir(parents=True)
                (one.path / name / "weights").write_bytes(
                    b"x" * (1000 if name == "checkpoint" else 3000)
                )
        mark(one, "train" if number else "prepare", [], {"trained": yes})
    return folder


def rows(*rewards):
    return [
        MetricsRow(iteration=number, validation_reward=reward)
        for number, reward in enumerate(rewards)
    ]


def test_newest_best_and_every_nth(tmp_path):
    folder = folder_of(tmp_path, [True] * 10)
    rewards = rows(0.9, 0.1, 0.8, 0.3, 0.85, 0.2, 0.1, 0.1, 0.1, 0.1)
    kept = kept_of(folder, rewards, config(tmp_path, keep_best=2, keep_every=3), 9)
    assert kept.checkpoints == {0, 4} | {3, 6, 9} | {7, 8, 9}
    assert kept.states == {7, 8, 9}
    assert kept_of(folder, rewards, config(tmp_path), 9).checkpoints == {0, 7, 8, 9}
    prune(folder, rewards, config(tmp_path, keep_every=4), 9)
    there = [n for n in range(10) if (folder.iteration(n).path / "checkpoint").exists()]
    assert there == [0, 4, 7, 8, 9]


def test_one_more_than_there_are_iterations_keeps_all_and_the_start(tmp_path):
    """So that each step can be studied from where it began, the first one too."""
    folder = folder_of(tmp_path, [True] * 7)
    kept = kept_of(folder, rows(*[0.5] * 7), config(tmp_path, keep_checkpoints=7), 6)
    assert kept.checkpoints == set(range(7)) and set(range(1, 7)) <= kept.states
    assert (
        0
        not in kept_of(
            folder, rows(*[0.5] * 7), config(tmp_path, keep_checkpoints=6), 6
        ).checkpoints
    )


def test_the_best_are_policies_not_iterations(tmp_path):
    """Iterations that trained nothing have the policy before; of equals the newest counts, and it
    counts once.
    """
    folder = folder_of(tmp_path, [True, True, False, True])
    assert best_policies(folder, rows(0.1, 0.9, 0.9, 0.5), config(tmp_path, keep_best=2)) == [1, 3]
    assert best_policies(folder, rows(0.5, 0.5, 0.5, 0.5), config(tmp_path, keep_best=9)) == [
        3,
        1,
        0,
    ]
    assert best_policies(folder, rows(None, None, None, None), config(tmp_path)) == []


def test_policies_that_were_not_written(tmp_path):
    """They are neither counted nor kept, and the policy before them is no stand-in for them."""
    folder, every_third = RunFolder(tmp_path), config(tmp_path, save_every=3, weight_sync="memory")
    mark(folder.iteration(0), "prepare", [], {})
    for number in range(1, 9):
        mark(folder.iteration(number), "train", [], {"trained": True, "saved": number % 3 == 0})
    assert folder.written_until(8) == [6, 3, 0] and (
        folder.written_version(8),
        folder.policy_version(8),
    ) == (6, 8)
    rewards = rows(0.1, 0.2, 0.3, 0.4, 0.9, 0.5, 0.3, 0.2, 0.8)
    assert best_policies(folder, rewards, every_third) == [3]
    mark(folder.iteration(8), "save", [], {})  # written after all
    assert folder.written_until(8) == [8, 6, 3, 0] and best_policies(
        folder, rewards, every_third
    ) == [8]
    assert most_kept(every_third, 9) == (3, 3) and most_kept(config(tmp_path), 9) == (5, 4)


def test_a_policy_that_is_written_while_another_thread_prunes(tmp_path):
    """That thread has just seen that it is not."""
    folder = RunFolder(tmp_path)
    mark(folder.iteration(1), "train", [], {"trained": True, "saved": False})

    def look_too_early(path, *_):
        if str(path).endswith("done/save.json"):
            mark(folder.iteration(1), "save", [], {})
            raise FileNotFoundError(errno.ENOENT, "not there yet", str(path))

    with os_calls.before("open", look_too_early):
        assert folder.written_until(1) == [0]
    assert folder.written_until(1) == [1, 0]


@pytest.mark.parametrize("seed", range(20))
def test_no_rules_take_what_is_needed(tmp_path, seed):
    """Pruned after each iteration: the newest two iterations can be trained again, the best so far
    are there, and there is never more than was estimated."""
    chance = random.Random(seed)
    settings = config(
        tmp_path,
        keep_checkpoints=3,
        keep_best=chance.randint(1, 3),
        keep_every=chance.choice([None, 1, 2, 5]),
    )
    folder, scores = folder_of(tmp_path, [True]), [chance.random()]
    for number in range(1, 8):
        yes = chance.random() < 0.8
        one = folder.iteration(number)
        for name in ("checkpoint", "state") if yes else ():
            (one.path / name).mkdir(parents=True)
        mark(one, "train", [], {"trained": yes})
        scores.append(chance.random())
        for name, most in zip(("checkpoint", "state"), most_kept(settings, number), strict=True):
            assert (
                sum((folder.iteration(n).path / name).exists() for n in range(1, number + 1))
                <= most
            )
        prune(folder, rows(*scores), settings, number)
        for again in range(max(1, number - 1), number + 1):
            assert folder.checkpoint(again - 1).is_dir()
            state = folder.state(again - 1)
            assert state is None or state.is_dir()
        assert folder.checkpoint(number).is_dir()
        for best in best_policies(folder, rows(*scores), settings)[:1]:
            assert (folder.iteration(best).path / "checkpoint").is_dir()


@pytest.mark.parametrize(
    "wrong", [{"keep_best": 0}, {"keep_every": 0}, {"mirror": " "}, {"keep_checkpoints": 2}]
)
def test_wrong_rules(tmp_path, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        config(tmp_path, **wrong).check("TrainConfig")


# Disk


def test_a_new_run_is_estimated_from_the_model(tmp_path):
    model = make_tiny_model(tmp_path / "model", layers=1, width=16, heads=1)
    stored = (model / "model.safetensors").stat().st_size
    folder = RunFolder(tmp_path / "run")
    settings = config(tmp_path, tasks_per_iteration=2, samples_per_task=4, max_tokens=10)
    needs = disk_needs(settings, model, folder, validation_tasks=3)
    assert needs.checkpoint == pytest.approx(stored, rel=0.15)  # the file has a header
    assert needs.state == 2 * needs.checkpoint  # two moments in fp32
    assert needs.next == 2 * needs.checkpoint + 2 * needs.state
    assert needs.whole == pytest.approx(5 * needs.checkpoint + 4 * needs.state + 20 * needs.others)
    assert 0 < needs.others < 100 * 110 * 4
    assert needs.free > 0


def test_a_run_that_is_continued_is_measured(tmp_path):
    folder = folder_of(tmp_path / "run", [True] * 5)
    prune(folder, rows(0.1, 0.2, 0.3, 0.4, 0.5), config(tmp_path), 4)
    needs = disk_needs(config(tmp_path), tmp_path / "no model", folder)
    assert (needs.checkpoint, needs.state) == (1000, 3000)
    # Of 3 + 1 best checkpoints, one is the best and among the newest at the same time.
    assert needs.next == 2 * 1000 + 3000
    assert disk_needs(config(tmp_path), tmp_path / "no model", RunFolder(tmp_path / "new")) is None
    done = TrainConfig(run=str(tmp_path / "run"), model="m", iterations=4)
    assert disk_needs(done, tmp_path, folder).next == disk_needs(done, tmp_path, folder).whole == 0


def test_too_little_room(tmp_path):
    needs = DiskNeeds(checkpoint=4e9, state=8e9, others=1e8, next=24e9, whole=60e9, free=100e9)
    assert judge_disk(needs, tmp_path) is None
    warning = judge_disk(DiskNeeds(**(vars(needs) | {"free": 30e9})), tmp_path)
    for word in ("60 GB more", "4 GB a checkpoint", "30 GB are free", "keep_checkpoints=3"):
        assert word in warning
    with pytest.raises(
        StorageError, match=r"next 2 iterations need 24 GB .* but only 20 GB are free; .*"
    ):
        judge_disk(DiskNeeds(**(vars(needs) | {"free": 20e9})), tmp_path)
    assert judge_disk(DiskNeeds(**(vars(needs) | {"free": None})), tmp_path) is None


def test_an_unknown_family_is_not_estimated(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mystery"}))
    assert disk_needs(config(tmp_path), tmp_path, RunFolder(tmp_path / "run")) is None
