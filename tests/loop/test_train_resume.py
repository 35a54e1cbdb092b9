"""Runs that were interrupted, finished or damaged, and started again: on fake parts (see
conftest.py).
"""

import json
import signal
import sys
import types

import pytest

from ttrl import Task, TrainConfig, train
from ttrl.errors import (
    RunFolderError,
)
from ttrl.loop.phases import Phases
from ttrl.loop.task_stream import TaskStream
from ttrl.run_folder.folder import IterationFolder, RunFolder
from ttrl.system.console import Console
from ttrl.system.files import read_jsonl


class BoomError(Exception):
    pass


def test_a_finished_run_does_nothing_and_starts_no_server(world):
    first = world.train()
    environment = (world.run / "environment.json").stat().st_mtime_ns
    files = {path: path.stat().st_mtime_ns for path in (world.run / "iterations").rglob("*")}
    world.events.clear()
    world.requests.clear()
    again = world.train()
    assert world.events == ["stop"]  # which is harmless, and nothing else
    assert world.requests == []
    assert again.metrics == first.metrics
    assert again.checkpoint == first.checkpoint
    assert files == {
        path: path.stat().st_mtime_ns for path in (world.run / "iterations").rglob("*")
    }
    # Still that of the run.
    assert environment == (world.run / "environment.json").stat().st_mtime_ns


@pytest.mark.parametrize("steps", [0, 1])
def test_another_number_of_tasks_goes_on_where_the_stream_of_tasks_was(world, steps):
    def asked(iterations):
        return [
            [
                row["task_id"]
                for row in read_jsonl(world.run / f"iterations/{n:04d}/rollouts.jsonl")[::4]
            ]
            for n in iterations
        ]

    run = {"off_policy_steps": steps, "iterations": 2}
    world.train(world.tasks(24), **run)
    changed = run | {"iterations": 4, "tasks_per_iteration": 5}
    world.train(world.tasks(24), allow_changes=["tasks_per_iteration"], **changed)
    more = world.config(**changed)
    stream = [
        task.id
        for task in TaskStream(more, RunFolder(world.run), world.tasks(24)).tasks_from(0, 14)
    ]
    assert asked(range(1, 5)) == [stream[:2], stream[2:4], stream[4:9], stream[9:]]


def test_more_iterations_continue_a_finished_run(world):
    world.train(iterations=1)
    world.events.clear()
    world.train(iterations=2)
    assert world.events == ["start", "serve 1", "train 2", "serve 2", "stop"]


@pytest.mark.long(but=["train-before its marker"])
@pytest.mark.parametrize(
    ("phase", "moment"),
    [
        pytest.param(
            phase,
            moment,
            marks=[pytest.mark.long]
            * (moment == "after" or (moment == "before" and phase in ("pack", "validate"))),
        )
        for phase in ("rollouts", "pack", "train", "validate")
        for moment in ("before", "before its marker", "after")
    ],
)
def test_interrupted_anywhere_it_continues_there(world, phase, moment):
    """An exception before a phase, between its work and its marker, and after its marker: what was
    marked is not repeated.

    Long for six of twelve: only these end right after a marker. For the next phase that is the same
    as before it, which stays.

    Long for the other phases: each only stops at its own marker.
    """
    done = []

    world.phases_class = phases_that_note(done, phase, moment)
    with pytest.raises(BoomError):
        world.train(iterations=2)
    assert world.events[-1] == "stop"  # nothing is left running
    finished = list(done)
    world.phases_class = phases_that_note(done)
    world.events.append("again")
    world.train(iterations=2)
    whole = [("validate", 0)] + [
        (n, i) for i in (1, 2) for n in ("rollouts", "pack", "train", "validate")
    ]
    assert sorted(done) == sorted(whole)  # each once: none repeated, none left out
    assert done[: len(finished)] == finished
    for i in (1, 2):  # the validation of the policy before shares the server with the rollouts
        assert [n for n, number in done if number == i] == ["rollouts", "pack", "train", "validate"]
        assert done.index(("validate", i - 1)) < done.index(("validate", i))
    trained_again = 1 if phase == "train" and moment == "before its marker" else 0
    assert sum(event.startswith("train") for event in world.events) == 2 + trained_again
    assert [row["iteration"] for row in world.rows()] == [0, 1, 2]
    # What was sampled came from the weights that it should, whoever sampled it.
    for number in (1, 2):
        rows = read_jsonl(world.run / f"iterations/{number:04d}/rollouts.jsonl")
        assert {row["weights_version"] for row in rows} == {number - 1}
        rows = read_jsonl(world.run / f"iterations/{number:04d}/validation.jsonl")
        assert {row["weights_version"] for row in rows} == {number}


class Unmarked(IterationFolder):
    def mark(self, *_):
        raise BoomError


class UnmarkedRun(RunFolder):
    """A run's folder in which iteration 1 gets no further marker."""

    def __init__(self, folder):
        vars(self).update(vars(folder))

    def iteration(self, number):
        folder = super().iteration(number)
        return Unmarked(folder.path, number, self.lease) if number == 1 else folder


def phases_that_note(done, broken="", moment=""):
    """The run's phases, which append (name, iteration) to `done` where one was not done before.
    Iteration 1's phase `broken` raises BoomError "before" or "after" its work, or "before its
    marker".
    """

    class Noting(Phases):
        def _noted(self, name, work, number):
            is_broken = (name, number) == (broken, 1)
            if is_broken and moment == "before":
                raise BoomError
            if is_broken and moment == "before its marker":
                self.folder = UnmarkedRun(self.folder)
            was_done = self.folder.iteration(number).is_done(name)
            work(number)
            if not was_done:
                done.append((name, number))
            if is_broken and moment == "after":
                raise BoomError

        def rollouts(self, number):
            self._noted("rollouts", super().rollouts, number)

        def pack(self, number):
            self._noted("pack", super().pack, number)

        def train_policy(self, number):
            self._noted("train", super().train_policy, number)

        def validate(self, number):
            self._noted("validate", super().validate, number)

    return Noting


def test_interrupted_while_preparing(world):
    computes, world.fake_canary = (
        world.fake_canary,
        lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt),
    )
    with pytest.raises(KeyboardInterrupt):
        world.train()
    world.fake_canary = computes
    assert world.events == ["start", "stop"]
    assert not list(world.run.rglob(".partial-*"))
    world.train(iterations=1)
    assert [row["iteration"] for row in world.rows()] == [0, 1]


def test_interrupted_while_sampling_only_what_is_missing_is_sampled(world, capsys):
    """Twice, after two of five tasks by Ctrl-C and after one more by SIGTERM; and speeds are not
    made up.
    """
    run = {"tasks": world.tasks(5), "validation": [], "tasks_per_iteration": 5, "iterations": 1}
    with world.interrupted_after(2), pytest.raises(KeyboardInterrupt):
        world.train(**run)
    assert world.events.pop() == "stop"
    with (
        world.interrupted_after(1, signal.SIGTERM),
        pytest.raises(SystemExit) as ended,
        Console().interruptible("this way on"),
    ):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # which would end pytest
        world.train(**run)
    assert world.events[-1] == "stop" and ended.value.code == 143
    assert capsys.readouterr().err.count("interrupted; this way on\n") == 1
    partial = world.run / "iterations/0001/rollouts.partial.jsonl"
    kept = {row["position"]: row["samples"] for row in read_jsonl(partial)}
    assert 3 <= len(kept) < 5
    with open(partial, "a") as file:
        file.write('{"position": 4, "sam')  # torn by a kill
    world.requests.clear()
    result = world.train(**run)
    assert len(world.requests) == 5 - len(kept)
    row = result.metrics[1]
    assert row["samples"] == 20
    assert row["tokens_per_second"] is None  # most were sampled by processes that are gone
    rows = read_jsonl(world.run / "iterations/0001/rollouts.jsonl")
    assert [row["task_id"] for row in rows] == [
        task.id for task in first_tasks(world, run) for _ in range(4)
    ]
    for position, samples in kept.items():
        assert rows[4 * position : 4 * position + 4] == samples
    assert not partial.exists()


def first_tasks(world, run):
    config = world.config(iterations=1, tasks_per_iteration=run["tasks_per_iteration"])
    return Phases(
        config, RunFolder(world.run), world.model, tasks=run["tasks"], server=None, console=None
    ).stream.tasks_of(1)


@pytest.mark.parametrize("kept", [1, 2])
def test_kept_samples_of_the_same_task_twice_in_an_iteration(world, kept):
    same = Task([{"role": "user", "content": "twice"}], lambda choice: world.grade(choice))
    other = Task([{"role": "user", "content": "once"}], lambda choice: world.grade(choice))
    same_name = Task(
        [{"role": "user", "content": "third"}], lambda choice: world.grade(choice), id=same.id
    )
    run = {
        "tasks": [same, other, same, same_name],
        "validation": [],
        "tasks_per_iteration": 4,
        "iterations": 1,
    }
    with world.interrupted_after(kept), pytest.raises(KeyboardInterrupt):
        world.train(**run)
    finished = len(read_jsonl(world.run / "iterations/0001/rollouts.partial.jsonl"))
    assert kept <= finished < 4
    world.requests.clear()
    world.train(**run)
    assert len(world.requests) == 4 - finished
    rows = read_jsonl(world.run / "iterations/0001/rollouts.jsonl")
    contents = [row["messages"][0]["content"] for row in rows]
    assert contents == [
        task.messages[0]["content"] for task in first_tasks(world, run) for _ in range(4)
    ]
    pack = json.loads((world.run / "iterations/0001/done/pack.json").read_text())
    assert pack["facts"]["groups"]["total"] == 4


def test_a_torn_last_line_of_the_metrics_is_written_again(world):
    world.train()
    metrics = world.run / "metrics.jsonl"
    before = world.rows()
    metrics.write_bytes(metrics.read_bytes()[:-40])
    world.events.clear()
    result = world.train()
    assert world.events == ["stop"]
    assert [row["iteration"] for row in world.rows()] == [0, 1, 2, 3]
    assert result.checkpoint == world.run / "iterations/0003/checkpoint"
    for name in before[-1].keys() - {"seconds", "dead_seconds", "machine"}:
        assert world.rows()[-1][name] == before[-1][name]  # put together from the markers alone


def test_metrics_that_were_removed_are_put_together_from_the_markers(world):
    world.train()
    before = world.rows()
    (world.run / "metrics.jsonl").unlink()
    world.events.clear()
    world.train()
    assert world.events == ["stop"]
    for old, new in zip(before, world.rows(), strict=True):
        # The last one where a phase is slow.
        measured = {"seconds": 0, "dead_seconds": 0, "machine": 0}
        assert old | measured == new | measured
        assert "dead_seconds" not in new  # nobody remembers
        assert new["seconds"]["total"] == pytest.approx(
            sum(v for k, v in new["seconds"].items() if k != "total")
        )


def test_metrics_damaged_in_the_middle(world):
    world.train(iterations=1)
    metrics = world.run / "metrics.jsonl"
    metrics.write_text("{broken\n" + metrics.read_text())
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl, line 1: not JSON"):
        world.train(iterations=1)


def test_rollouts_that_were_changed_after_they_were_graded_are_not_trained_on(world):
    world.phases_class = phases_that_note([], "pack", "before")
    with pytest.raises(BoomError):
        world.train()
    world.phases_class = Phases
    path = world.run / "iterations/0001/rollouts.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    # Every group torn apart.
    path.write_text("".join(lines[::4] + lines[1::4] + lines[2::4] + lines[3::4]))
    with pytest.raises(
        RunFolderError,
        match=r"rollouts\.jsonl was changed .* remove .*rollouts\.json to run that phase again",
    ):
        world.train()
    (world.run / "iterations/0001/done/rollouts.json").unlink()
    world.train()
    assert len(world.rows()) == 4


def test_a_packed_file_that_is_gone(world):
    trains, world.fake_tune = world.fake_tune, lambda *_, **__: (_ for _ in ()).throw(BoomError)
    with pytest.raises(BoomError):
        world.train()
    world.fake_tune = trains
    (world.run / "iterations/0001/packed.safetensors").unlink()
    with pytest.raises(RunFolderError, match=r"packed\.safetensors is gone"):
        world.train()


def test_another_config_is_refused_with_the_differences(world):
    world.train(iterations=1, sampling={"stop": ("x", "y")})
    with pytest.raises(
        RunFolderError,
        match=r"(?s)- temperature: 1\.0.*\+ temperature: 0\.5.*choose another run folder",
    ):
        world.train(iterations=1, temperature=0.5, sampling={"stop": ("x", "y")})
    # A tuple is a list in YAML: the same config.
    world.train(iterations=2, sampling={"stop": ["x", "y"]})


@pytest.mark.parametrize("changed", ["tasks", "validation_tasks"])
def test_other_tasks_are_refused_until_the_person_says_that_they_are_meant(world, changed):
    world.train(iterations=1)
    other = (
        {"tasks": world.tasks(7)}
        if changed == "tasks"
        else {"validation": world.tasks(3, "held-out")}
    )
    with pytest.raises(RunFolderError, match=rf"other tasks \({changed}: \d before, \d now"):
        world.train(iterations=2, **other)
    assert len(world.rows()) == 2
    (world.run / "tasks.json").unlink()
    world.train(iterations=2, **other)
    assert len(world.rows()) == 3


def test_kept_samples_of_other_tasks_are_not_used(world):
    with world.interrupted_after(2), pytest.raises(KeyboardInterrupt):
        world.train(tasks=world.tasks(4), validation=[], tasks_per_iteration=4, iterations=1)
    (world.run / "tasks.json").unlink()
    world.train(tasks=world.tasks(4, "new"), validation=[], tasks_per_iteration=4, iterations=1)
    rows = read_jsonl(world.run / "iterations/0001/rollouts.jsonl")
    assert {row["task_id"] for row in rows} == {f"new/{n}" for n in range(4)}


def test_a_run_of_before_held_out_samples_were_greedy_goes_on_as_it_was_begun(world, capsys):
    world.train(iterations=1, temperature=0.7)
    path = world.run / "config.yaml"
    path.write_text(
        path.read_text().replace("validation_temperature: 0.0\n", "validation_temperature: null\n")
    )
    world.temperatures.clear()
    world.train(iterations=2, temperature=0.7)
    assert world.temperatures == {"held-out": {0.7}, "task": {0.7}}
    assert "held-out samples use temperature 0.7" in capsys.readouterr().out
    assert "validation_temperature: 0.7\n" in path.read_text()


def test_on_a_cluster_what_may_change_is_asked_where_the_command_runs(tmp_path, monkeypatch):
    """The variables of the lead's machine are those of `ray start`."""
    told = []
    lead = types.ModuleType("ttrl.cluster.lead")
    lead.run_detached = lambda config, work, arguments, console: told.append(arguments)
    monkeypatch.setitem(sys.modules, "ttrl.cluster.lead", lead)
    monkeypatch.setenv("TTRL_REDO", "3")
    monkeypatch.setenv("TTRL_ALLOW_CHANGES", "training.lr,seed")
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(
        run="runs/r", model="tiny", iterations=5, tasks_per_iteration=1, cluster="auto"
    )
    train(
        config,
        [Task([{"role": "user", "content": "?"}], lambda choice: 1.0)],
        allow_changes=["max_tokens"],
    )
    (arguments,) = told
    assert arguments["redo"] == 3 and arguments["allow_changes"] == [
        "max_tokens",
        "training.lr",
        "seed",
    ]
    assert arguments["config"].run == str(tmp_path / "runs/r")
