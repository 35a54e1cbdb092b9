"""Searching samples, against a search by plain Python over the same file."""

import json
from pathlib import Path

import pytest
from support.many_runs import make_run

from ttrl.errors import UserError
from ttrl.run_folder.reader import read_run
from ttrl.ui.search import Place, Query, place_named, sample_at, search


def plain(folder: Path, iteration: int) -> list[dict]:
    path = folder / "iterations" / f"{iteration:04d}" / "rollouts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", seed=1, iterations=4, sampled=4)


@pytest.mark.parametrize(
    ("query", "holds"),
    [
        ({}, lambda one: True),
        ({"conditions": "reward<0.5"}, lambda one: one["reward"] < 0.5),
        ({"conditions": "reward >= 1, exact != 0"}, lambda one: one["reward"] == 1),
        ({"conditions": "exact=0 reward=0"}, lambda one: one["reward"] == 0),
        ({"conditions": "unknown>0"}, lambda one: False),
        ({"finish": "length"}, lambda one: one["finish_reason"] == "length"),
        ({"text": "ADD THE NUMBERS of sum/1"}, lambda one: one["task_id"] == "sum/1"),
        ({"text": "sum is 1"}, lambda one: "sum is 1" in one["text"]),
        (
            {"text": "sum", "finish": "stop", "conditions": "reward>0"},
            lambda one: one["finish_reason"] == "stop" and one["reward"] > 0,
        ),
    ],
)
def test_conditions(folder: Path, query: dict[str, str], holds) -> None:
    result = search(read_run(folder), Query("training", 1, 4, **query))
    expected = [
        (iteration, place)
        for iteration in (4, 3, 2, 1)
        for place, one in enumerate(plain(folder, iteration))
        if holds(one)
    ]
    assert [(one.place.iteration, one.place.line) for one in result.found] == expected
    assert (result.searched, result.matching) == (32, len(expected))
    assert result.stopped_at is None


def test_disagreement_between_runs(tmp_path: Path) -> None:
    """Only tasks with other mean rewards, the widest gaps first."""
    runs = [
        make_run(tmp_path / f"run{seed}", seed=seed, iterations=4, sampled=4) for seed in (1, 2)
    ]
    result = search(read_run(runs[0]), Query("training", 1, 4), read_run(runs[1]))
    means = []
    for folder in runs:
        by_task: dict[tuple[int, str], list[float]] = {}
        for iteration in range(1, 5):
            for one in plain(folder, iteration):
                by_task.setdefault((iteration, one["task_id"]), []).append(one["reward"])
        means.append({task: sum(values) / 4 for task, values in by_task.items()})
    gaps = {task: means[0][task] - means[1][task] for task in means[0]}
    expected = {task: gap for task, gap in gaps.items() if gap}
    assert 0 < len(expected) < len(gaps)
    found = {(one.place.iteration, one.line.task_id): one.gap for one in result.found}
    assert found == pytest.approx(expected)
    sizes = [abs(one.gap or 0) for one in result.found]
    assert sizes == sorted(sizes, reverse=True)


def test_a_condition_that_cannot_be_read_is_explained(folder: Path) -> None:
    for text in ("reward", "reward<", "reward<x", "<0.5", "reward=<1", "reward<1e"):
        with pytest.raises(UserError, match="no condition"):
            search(read_run(folder), Query("training", 1, 4, text))


def test_damaged_and_odd_lines_are_left_out(folder: Path) -> None:
    path = folder / "iterations" / "0004" / "rollouts.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    odd = [
        b"[1]\n",
        b"{damaged\n",
        b'{"task_id": 3}\n',
        b"\xff\xfe\n",
        b'{"task_id": "x", "messages": [1]}\n',
    ]
    path.write_bytes(b"".join(odd + lines))
    result = search(read_run(folder), Query("training", 4, 4, text="sum"))
    assert [one.place.line for one in result.found] == list(range(5, 13))


@pytest.mark.parametrize("name", ["7-12", "v7-12", "0-0"])
def test_addresses_of_samples(name: str) -> None:
    assert str(place_named(name)) == name


@pytest.mark.parametrize(
    "name", ["", "7", "-1-2", "7-", "a7-1", "../7-1", "7-1/..", "７-1", "7-9999999999"]
)
def test_other_texts_are_no_addresses(name: str) -> None:
    assert place_named(name) is None


def test_a_sample_by_its_address(folder: Path) -> None:
    run = read_run(folder)
    for line, one in enumerate(plain(folder, 4)):
        sample = sample_at(run, Place("training", 4, line))
        assert sample is not None
        assert (sample.text, sample.token_ids) == (one["text"], one["token_ids"])
    assert sample_at(run, Place("training", 4, 8)) is None
    assert sample_at(run, Place("training", 99, 0)) is None
