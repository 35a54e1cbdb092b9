"""Whole runs on fake parts: what the options ask for is what lies in the packed tensors and in the
metrics.
"""

import logging
import re

import numpy as np
import pytest
import torch

from ttrl.data.packing.packed import PackedTensors
from ttrl.facts import PackFacts
from ttrl.run_folder.folder import RunFolder
from ttrl.system.files import read_jsonl


@pytest.fixture
def graded(world):
    """Answers of different lengths with rewards from -0.25 to 1, the last group all alike; one
    sample has no grade.
    """

    def answer(prompt, k, version):
        task = int(prompt.split()[1])
        return "a" * (3 if task == 5 else 1 + (k * k + task * (k + 1)) % 6)

    def grade(choice):
        length = len(choice.message.content)
        if length == 6:
            raise ValueError("too long")
        return (length - 2) / 3, {"middle": float(length // 2)}

    world.answer, world.grade = answer, grade
    world.logprob = lambda k, place: -0.25 * (1 + place) - 0.125 * k
    return world


def transcription(groups, kind, floor, clip, power, bonus, until):
    """From the rows of rollouts.jsonl, as the formulas stand, in float64: {(task, sample):
    advantage} of groups with signal.
    """
    shaped = {}
    for task, rows in groups.items():
        values = {}
        for row in rows:
            if row["reward"] is None:
                continue
            end = int(row["metrics"][until]) if until else len(row["logprobs"])
            s = -np.mean(row["logprobs"][:end]) if end else 0.0
            acc = np.sign(row["reward"]) * abs(row["reward"]) ** power
            values[row["sample"]] = (1 - bonus) * acc + bonus * acc * s
        if len(values) > 1 and np.ptp(list(values.values())) > 1e-9:
            shaped[task] = values
    centred = {
        task: np.array(list(values.values())) - np.mean(list(values.values()))
        for task, values in shaped.items()
    }
    scale = max(np.std(np.concatenate(list(centred.values()))), floor)
    found = {}
    for task, values in shaped.items():
        r = centred[task]
        n = len(r)
        a = {
            "mean": r,
            "std": r / max(np.std(r), floor),
            "leave_one_out": r * n / (n - 1),
            "batch": r / scale,
        }[kind]
        a = a if clip is None else np.clip(a, -clip, clip)
        found |= {(task, sample): value for sample, value in zip(values, a, strict=True)}
    return found


@pytest.mark.long(but=["surprise-batch"])
@pytest.mark.parametrize(
    "kind",
    [
        "std",
        "batch",
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("mean", "leave_one_out")),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"advantage_std_floor": 0.4, "advantage_clip": 0.47},
        {"reward_power": 2.0},
        {"surprise_bonus": 0.5},
        {
            "reward_power": 3.0,
            "surprise_bonus": 0.25,
            "surprise_until": "middle",
            "advantage_clip": 1.25,
        },
    ],
    ids=["plain", "floor and clip", "power", "surprise", "all"],
)
def test_options_reach_the_packed_advantages(graded, kind, options):
    """Long for two of four kinds: only these take them through a run. Their numbers:
    tests/data/test_advantages.py.

    Long for the other options: each only sets one of those that this case sets together.
    """
    graded.train(iterations=1, tasks_per_iteration=6, validation=[], advantages=kind, **options)
    folder = graded.run / "iterations/0001"
    groups: dict[str, list] = {}
    for row in read_jsonl(folder / "rollouts.jsonl"):
        groups.setdefault(row["task_id"], []).append(row)
    names = (
        "advantage_std_floor",
        "advantage_clip",
        "reward_power",
        "surprise_bonus",
        "surprise_until",
    )
    given = {
        "advantage_std_floor": 1e-6,
        "advantage_clip": None,
        "reward_power": 1.0,
        "surprise_bonus": 0.0,
    } | options
    expected = transcription(groups, kind, *[given.get(name) for name in names])
    packed = PackedTensors.load(folder / "packed.safetensors")
    assert {(sample.task_id, sample.sample) for sample in packed.samples} == expected.keys()
    rewards = {
        (row["task_id"], row["sample"]): row["reward"] for rows in groups.values() for row in rows
    }
    for place, sample in enumerate(packed.samples):
        key = sample.task_id, sample.sample
        trained = packed.advantages[(packed.sample_ids == place) & (packed.labels >= 0)]
        assert len(trained) == sample.num_trained > 0
        torch.testing.assert_close(
            trained, torch.full_like(trained, expected[key]), rtol=1e-5, atol=1e-6
        )
        assert sample.reward == rewards[key]  # the grader's, not the shaped one
    row = graded.rows()[1]
    assert row["groups"]["kept"] == len({task for task, _ in expected})
    assert row["groups"]["total"] == 6 == row["groups"]["kept"] + row["groups"]["no_signal"]
    assert row["groups"]["no_signal_share"] == pytest.approx(row["groups"]["no_signal"] / 6)
    facts = row["pack"]["advantages"]
    assert facts["mean_abs"] == pytest.approx(np.mean(np.abs(list(expected.values()))))
    if "advantage_clip" in options:
        uncut = transcription(
            groups, kind, *[given.get(name) if name != "advantage_clip" else None for name in names]
        )
        assert facts["clipped"] == sum(
            abs(value) > options["advantage_clip"] for value in uncut.values()
        )
    assert ("surprise" in facts) == ("surprise_bonus" in options)
    if "surprise_until" in options:
        no_token = [
            row for rows in groups.values() for row in rows if row["metrics"].get("middle") == 0
        ]
        assert facts["surprise_unknown"] == len(no_token) > 0


def test_all_right_groups_get_a_signal_from_surprise_alone(world):
    world.answer = lambda prompt, k, version: "yes"
    world.logprob = lambda k, place: -1.0 - k
    run = {"iterations": 1, "validation": []}
    world.train(**run)
    assert (world.rows()[1]["groups"]["no_signal"], world.rows()[1]["trained"]) == (2, False)
    world.run = world.folder / "other"
    world.train(**run, surprise_bonus=0.5, advantages="mean")
    row = world.rows()[1]
    assert (row["groups"]["kept"], row["groups"]["no_signal"], row["trained"]) == (2, 0, True)
    packed = PackedTensors.load(world.run / "iterations/0001/packed.safetensors")
    assert [sample.advantage for sample in packed.samples] == [-0.75, -0.25, 0.25, 0.75] * 2


def test_low_deviations_are_counted_and_warned_of(graded, caplog):
    with caplog.at_level(logging.WARNING, "ttrl.data.advantages"):
        graded.train(iterations=1, tasks_per_iteration=6, validation=[], advantage_std_floor=5.0)
    marker = RunFolder(graded.run).iteration(1).marker(PackFacts)
    assert marker.groups.low_std == marker.groups.kept > 0
    assert graded.rows()[1]["groups"]["low_std"] == marker.groups.low_std
    assert len(re.findall("below the floor of 5", caplog.text)) == 1


def test_an_unknown_metric_means_all_tokens(graded):
    graded.train(
        iterations=1,
        tasks_per_iteration=6,
        validation=[],
        surprise_bonus=0.5,
        surprise_until="nowhere",
    )
    first = PackedTensors.load(graded.run / "iterations/0001/packed.safetensors")
    graded.run = graded.folder / "other"
    graded.train(iterations=1, tasks_per_iteration=6, validation=[], surprise_bonus=0.5)
    second = PackedTensors.load(graded.run / "iterations/0001/packed.safetensors")
    assert torch.equal(first.advantages, second.advantages)
