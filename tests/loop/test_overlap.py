"""Which phases run at the same time, on fake parts (see conftest.py): what may overlap does, and
what ends first is no matter.
"""

import asyncio
import random
import shutil
import threading

import pytest
from support.world import Disk, PowerCut

from ttrl.errors import ConfigError, ServerError
from ttrl.facts import Step
from ttrl.loop.jobs import Jobs
from ttrl.loop.phases import Phases
from ttrl.loop.timeline import Timeline
from ttrl.run_folder.folder import RunFolder
from ttrl.system.files import digest, read_jsonl


def meet(world):
    """Held-out tasks wait until the same policy was asked for a task, and the other way round;
    returns the policies that met.
    """
    arrived = {"held-out": set(), "task": set()}

    def hold(prompt):
        kind = prompt.split()[0]
        other = "task" if kind == "held-out" else "held-out"
        arrived[kind].add(world.server_version())
        return world.server_version() not in arrived[other] and world.server_version() < 3

    world.hold = hold
    return arrived


def versions_of(world, number, name="rollouts"):
    return {
        row["weights_version"]
        for row in read_jsonl(world.run / f"iterations/{number:04d}/{name}.jsonl")
    }


def everything(world):
    """What a run came to, but for times."""
    found = {}
    for path in sorted((world.run / "iterations").rglob("*")):
        name = str(path.relative_to(world.run))
        if path.name in ("rollouts.jsonl", "validation.jsonl"):
            # The first sample of each call keeps the strings of its tokens, and a run that is
            # continued makes another call.
            found[name] = [{**row, "logprob_tokens": None} for row in read_jsonl(path)]
        elif path.is_file() and (
            path.suffix in (".safetensors", ".txt") or path.name == "train.jsonl"
        ):
            found[name] = digest(path)
    times = (
        "seconds",
        "dead_seconds",
        "tokens_per_second",
        "grading_seconds",
        "sync",
        "server",
        "machine",
    )
    return found | {
        row["iteration"]: {key: row[key] for key in row if key not in times} for row in world.rows()
    }


def test_validation_and_the_next_rollouts_share_the_server(world):
    arrived = meet(world)
    world.train()
    assert arrived["held-out"] == {0, 1, 2, 3} and arrived["task"] == {0, 1, 2}
    for number in (1, 2, 3):
        assert versions_of(world, number) == {number - 1}
        assert versions_of(world, number, "validation") == {number}
    assert world.events == [
        *["start", "canary", "serve 0"],
        *["train 1", "serve 1", "train 2", "serve 2", "train 3", "serve 3"],
        "stop",
    ]


def test_the_order_in_which_groups_end_changes_nothing(world, tmp_path):
    world.train(world.tasks(12), tasks_per_iteration=6)
    in_order, first = everything(world), world.run
    waits = {}

    def hold(prompt):
        left = waits.setdefault(prompt, random.Random(prompt).randrange(30))
        waits[prompt] = left - 1
        return left > 0

    world.hold, world.run = hold, tmp_path / "again"
    world.train(world.tasks(12), tasks_per_iteration=6)
    assert everything(world) == in_order
    # … nor does it matter whether they were tokenized as they came or are read from the file.
    (first / "iterations/0002/packed.safetensors").rename(tmp_path / "packed")
    (first / "iterations/0002/done/pack.json").rename(tmp_path / "pack.json")
    Phases(
        world.config(tasks_per_iteration=6),
        RunFolder(first),
        world.model,
        server=None,
        console=None,
    ).pack(2)
    assert digest(tmp_path / "packed") == digest(first / "iterations/0002/packed.safetensors")


def test_stop_at_ends_rollouts_that_were_begun_and_a_higher_one_goes_on_with_them(world):
    best = 1
    world.answer = lambda prompt, k, version: (
        "yes" if k < (2 if prompt.startswith("task") else 4 * (version >= best)) else "no"
    )
    world.hold = lambda prompt: prompt.startswith("task") and world.server_version() == best
    run = {"iterations": 3, "validation_samples": 4}
    result = world.train(stop_at=0.9, **run)
    assert [row["iteration"] for row in world.rows()] == [0, 1]
    assert result.checkpoint == world.run / "iterations/0001/checkpoint"
    assert not RunFolder(world.run).iteration(2).is_done("rollouts")
    assert world.events[-1] == "stop" and "train 2" not in world.events
    assert not [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith(("rollouts", "validation"))
    ]
    world.train(stop_at=0.9, **run)
    assert [row["iteration"] for row in world.rows()] == [0, 1]  # it stays ended
    world.hold = lambda prompt: False
    world.train(stop_at=None, **run)
    assert [row["iteration"] for row in world.rows()] == [0, 1, 2, 3]
    assert versions_of(world, 2) == {1}


def test_a_validation_that_fails_ends_the_rollouts_beside_it(world):
    world.refused = {"held-out 0", "held-out 1"}
    world.hold = lambda prompt: prompt.startswith("task")
    with pytest.raises(ServerError, match="all 2 samples of 2 tasks failed"):
        world.train()
    assert world.events[-1] == "stop" and not (world.run / "metrics.jsonl").exists()
    world.refused, world.hold = set(), lambda prompt: False
    world.train()
    assert len(world.rows()) == 4


def test_a_validation_that_is_slow_does_not_hold_up_the_trainer(world):
    """… unless the run may end with it."""
    trained = threading.Event()
    tune = world.fake_tune

    def fake_tune(config, *args, **kwargs):
        checkpoint = tune(config, *args, **kwargs)
        trained.set()
        return checkpoint

    world.fake_tune = fake_tune
    world.hold = lambda prompt: prompt.startswith("held-out") and not trained.is_set()
    world.train(iterations=1)
    assert [row["iteration"] for row in world.rows()] == [0, 1]


# One step off policy


def test_while_the_trainer_works_the_server_samples_the_next_rollouts(world):
    """Each training ends only after a rollout of the next iteration was asked for."""
    asked = threading.Semaphore(0)
    world.sampled = lambda prompt: asked.release() if prompt.startswith("task") else None
    tune, iterations = world.fake_tune, 4

    def fake_tune(config, *args, **kwargs):
        tasks = 2 * min(config["iteration"] + 1, iterations)
        for _ in range(tasks - fake_tune.seen):
            assert asked.acquire(timeout=60)
        fake_tune.seen = tasks
        return tune(config, *args, **kwargs)

    fake_tune.seen = 0
    world.fake_tune = fake_tune
    world.train(iterations=iterations, off_policy_steps=1)
    assert [versions_of(world, number) for number in (1, 2, 3, 4)] == [{0}, {0}, {1}, {2}]
    assert [versions_of(world, number, "validation") for number in range(5)] == [
        {0},
        {1},
        {2},
        {3},
        {4},
    ]
    # The trainer itself goes on from the newest policy, and corrects for the sampler's being older.
    folder = world.run / "iterations"
    assert [config["model"] for config in world.recipes] == [
        str(folder / f"{n:04d}/checkpoint") for n in range(4)
    ]
    assert {config["off_policy"] for config in world.recipes} == {"token"}
    # … and is told which policy sampled, to be compared with that one.
    told = [(config["sampler_model"], config["sampler_version"]) for config in world.recipes]
    assert told == [(None, None)] + [(str(folder / f"{n:04d}/checkpoint"), n) for n in range(3)]
    assert [event for event in world.events if event.startswith("serve")] == [
        f"serve {n}" for n in range(5)
    ]


def test_the_correction_may_be_chosen_and_is_none_on_policy(world):
    assert world.config().recipe_config({}).off_policy == "none"
    assert world.config(off_policy_steps=1).recipe_config({}).off_policy == "token"
    assert (
        world.config(off_policy_steps=1, training={"off_policy": "mask"})
        .recipe_config({})
        .off_policy
        == "mask"
    )
    for number in range(1, 6):
        for steps in (0, 1):
            config = world.config(off_policy_steps=steps)
            assert number in config.rollouts_of_policy(config.policy_of_rollouts(number))
            assert sum(number in config.rollouts_of_policy(policy) for policy in range(7)) == 1


def test_a_server_cannot_sleep_while_it_samples(world):
    with pytest.raises(ConfigError, match="off_policy_steps is 1 with weight_sync 'sleep'"):
        world.train(off_policy_steps=1, weight_sync="sleep")
    world.train(off_policy_steps=1, weight_sync="restart")
    assert world.events.count("stop") == 1  # at the end alone


def test_one_step_off_policy_with_a_stop_and_untrained_iterations(world):
    def answer(prompt, k, version):
        if prompt.startswith("held-out"):
            return "yes" if k < version else "no"
        return (
            "yes"
            if k < 2 and len([p for _, p in world.requests if p.startswith("task")]) > 4
            else "no"
        )

    world.answer = answer  # the first two iterations have no signal
    world.train(iterations=9, off_policy_steps=1, stop_at=0.9, validation_samples=4)
    rows = world.rows()
    assert [row.get("trained") for row in rows][:4] == [None, False, False, True]
    assert rows[-1]["validation_reward"] >= 0.9 and all(
        row["validation_reward"] < 0.9 for row in rows[:-1]
    )
    assert versions_of(world, 4) == {0} and versions_of(world, 5) == {3}


# Death at any moment


DURABLE = ("replace", "fsync")


def test_killed_at_any_file_it_ends_as_it_would_have(world, monkeypatch):
    """On policy: see test_no_lost_work.py."""

    def train():
        world.train(iterations=2, tasks_per_iteration=2, off_policy_steps=1, stop_at=None)

    with monkeypatch.context() as patch:
        disk = Disk(patch, None, DURABLE)
        train()
    whole = everything(world)
    for count in range(27, disk.count, 41):
        shutil.rmtree(world.run)
        with monkeypatch.context() as patch:
            Disk(patch, count, DURABLE)
            with pytest.raises(PowerCut):
                train()
        requests = len(world.requests)
        train()
        assert everything(world) == whole
        assert not list(world.run.rglob(".partial-*")) and not list(
            world.run.rglob("rollouts.partial.jsonl")
        )
        # Nothing is sampled more often than in a run from the start.
        assert len(world.requests) - requests <= 2 * 2 + 3 * 2


# The parts


def test_jobs_raise_what_failed_first_and_end_the_others():
    jobs, over = Jobs(), threading.Event()

    def fails():
        raise KeyError("x")

    jobs.begin("waits", lambda: over.wait(60))
    jobs.begin("fails", fails)
    with pytest.raises(KeyError):
        jobs.wait_for_all()
    over.set()
    jobs.close()
    jobs.wait_for_all()


def test_a_job_that_was_cancelled_by_nobody_has_failed():
    def cancelled():
        raise asyncio.CancelledError

    jobs = Jobs()
    jobs.begin("samples", cancelled)
    with pytest.raises(RuntimeError, match="samples: cancelled"):
        jobs.wait_for_all()


def test_what_a_server_computes_in_a_second_counts_phases_at_the_same_time():
    timeline = Timeline()
    assert timeline.served(0.0, 4.0, 40.0) == 10.0
    assert timeline.served(2.0, 10.0, 100.0) == (100.0 + 20.0) / 8
    timeline.forget_before(5.0)
    assert timeline.served(0.0, 4.0, 0.0) == 100.0 * 2 / 8 / 4


def test_time_that_is_neither_sampling_nor_training(monkeypatch):
    timeline = Timeline()
    # 11 to 19.
    timeline.add_training(
        10.0, 20.0, [Step(seconds_by_part={"forward": 3.0, "backward": 3.0}), Step(seconds=2.0)]
    )
    timeline.add_training(30.0, 40.0, [Step(seconds_by_part={"forward": 10.0, "checkpoint": 5.0})])
    assert timeline.at(15.0) == {"train"} and timeline.at(20.0) == set()
    assert timeline.busy(0.0, 50.0) == 18.0
    assert timeline.busy(12.0, 35.0) == 12.0
    assert timeline.busy(0.0, 50.0, kinds=("sample",)) == 0.0
    timeline.forget_before(25.0)
    assert timeline.busy(0.0, 50.0) == 10.0
    with timeline.span("sample"):
        assert timeline.busy(0.0, 1.0) == 0.0
