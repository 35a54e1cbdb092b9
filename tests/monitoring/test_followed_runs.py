"""Following runs: is each state of a growing folder what reading it whole gives?"""

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.many_runs import make_run, rows, write_samples

from ttrl.errors import RunFolderError, UserError
from ttrl.monitoring.followed_runs import FollowedRun, Runs
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.reader import read_run


@given(cuts=st.lists(st.integers(0, 4_000), max_size=6))
def test_a_growing_file_is_read_as_a_whole_one(tmp_path_factory, cuts: list[int]) -> None:
    """Appends may end anywhere: between lines, or within one."""
    folder = tmp_path_factory.mktemp("run")
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows(3, 5))
    path = folder / "metrics.jsonl"
    path.touch()
    run = FollowedRun("run", folder)
    edges = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    begin = 0
    for edge in edges:
        with path.open("ab") as file:
            file.write(data[begin:edge])
        begin = edge
        whole = data[: data[:edge].rfind(b"\n") + 1]
        assert run.data().iterations == [
            json.loads(line)["iteration"] for line in whole.split(b"\n")[:-1]
        ]
    assert run.data().rows == read_run(folder).rows


def test_a_replaced_file_is_read_again(tmp_path: Path) -> None:
    """As when iterations are thrown away: another file has the name."""
    folder = make_run(tmp_path / "run", iterations=6)
    run = FollowedRun("run", folder)
    assert run.data().iterations == list(range(7))
    other = folder / "other"
    other.write_text("".join(json.dumps(row) + "\n" for row in rows(9, 3)))
    os.replace(other, folder / "metrics.jsonl")
    assert run.data().rows == read_run(folder).rows
    assert run.data().iterations == [0, 1, 2, 3]


def test_a_later_line_of_an_iteration_counts(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", iterations=2)
    run = FollowedRun("run", folder)
    assert run.data().rows[2].reward != 0.25
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 2, "reward": 0.25}\n')
    assert run.data().rows[2].reward == 0.25
    assert run.data().iterations == [0, 1, 2]


def test_a_damaged_line_is_named_until_it_is_repaired(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", iterations=2)
    run = FollowedRun("run", folder)
    run.data()
    path = folder / "metrics.jsonl"
    good = path.read_bytes()
    path.write_bytes(good + b"{damaged\n" + b'{"iteration": 3}\n')
    with pytest.raises(RunFolderError, match="line 4"):
        run.data()
    path.write_bytes(good + b'{"iteration": 3}\n')
    assert run.data().iterations == [0, 1, 2, 3]


def test_runs_are_found_below_folders_and_named_once(tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "one", iterations=1)
    make_run(tmp_path / "a" / "sweep" / "lr=1,seed=0", iterations=1)
    make_run(tmp_path / "b" / "one", iterations=1)
    (tmp_path / "a" / "linked").symlink_to(tmp_path / "b")
    make_run(tmp_path / "a" / ".hidden", iterations=1)
    runs = Runs([tmp_path / "a", tmp_path / "b", tmp_path / "b" / "one"])
    assert sorted(run.name for run in runs.all()) == ["one", "one~2", "sweep~lr=1,seed=0"]
    found = runs.named("one~2")
    assert found is not None
    assert found.folder == tmp_path / "b" / "one"
    for name in ("..", ".", "a", "", "/etc", "one/../one"):
        assert runs.named(name) is None
    with pytest.raises(UserError, match="no such folder"):
        Runs([tmp_path / "missing"])


def test_the_state_of_a_run(tmp_path: Path) -> None:
    """Its owner tells whether it goes on, its markers tell the phase."""
    folder = make_run(tmp_path / "run", iterations=3, planned=5)
    run = FollowedRun("run", folder)
    assert run.state().word == "ended"
    with RunFolder(folder).locked():
        state = run.state()
        assert state.word == "running"
        assert state.under_way == ()
        assert state.left == pytest.approx(2 * 8.3)
        write_samples(folder, 4)
        done = folder / "iterations" / "0004" / "done"
        (only,) = run.state().under_way
        assert (only.iteration, only.doing, only.done) == (4, "sampling", ())
        assert only.usual == pytest.approx(3.0)
        for name in ("rollouts", "pack"):
            (done / f"{name}.json").write_text("{}")
        (only,) = run.state().under_way
        assert (only.doing, only.done) == ("training", ("rollouts", "pack"))
        assert abs(only.since - time.time()) < 60
        write_samples(folder, 5)  # sampled meanwhile
        assert [one.doing for one in run.state().under_way] == ["training", "sampling"]
    assert run.state().word == "ended"
    complete = FollowedRun("whole", make_run(tmp_path / "whole", iterations=3))
    assert complete.state().word == "finished"


def test_the_starting_model_is_prepared_and_then_measured(tmp_path: Path) -> None:
    """It is never sampled for training."""
    done = tmp_path / "run" / "iterations" / "0000" / "done"
    done.mkdir(parents=True)
    run = FollowedRun("run", tmp_path / "run")
    with RunFolder(run.folder).locked():
        assert [one.doing for one in run.state().under_way] == ["preparing"]
        (done / "prepare.json").write_text("{}")
        assert [one.doing for one in run.state().under_way] == ["validating"]
