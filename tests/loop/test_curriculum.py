"""A curriculum: what teaches nothing has its turn less often, levels are opened, and interrupted
runs go on as they would.
"""

import itertools
import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrl import Task, TrainConfig
from ttrl.errors import ConfigError, TaskError
from ttrl.facts import RolloutsFacts, read_facts
from ttrl.loop.checks import checked
from ttrl.loop.task_stream import Curriculum, TaskStream
from ttrl.records import Sample, TaskResult
from ttrl.replays.replay import replay
from ttrl.run_folder.folder import RunFolder
from ttrl.system.files import read_jsonl
from ttrl.tasks.task import in_levels, question


class Markers:
    """Stands in for a run folder: what was measured in each iteration, as its marker would
    hold it.
    """

    def __init__(self):
        self.found = {}

    def iteration(self, number):
        found = self.found.get(number)
        return SimpleNamespace(
            marker=lambda kind: (
                None if found is None else read_facts(kind, {"curriculum": json.loads(found)})
            )
        )

    def mark(self, number, measured):
        self.found[number] = json.dumps(measured.to_json())


CONFIG = TrainConfig(run="r", model="m", iterations=1, curriculum=True)


def tasks(count, name="task"):
    return [Task(question(f"{name} {n}"), float, id=f"{name}/{n}") for n in range(count)]


def group(task, rewards, **metrics):
    samples = [
        Sample(
            task_id=task.id,
            sample=k,
            messages=task.messages,
            reward=reward,
            metrics=metrics,
            finish_reason="stop",
        )
        for k, reward in enumerate(rewards)
    ]
    return TaskResult(task_id=task.id, messages=task.messages, samples=samples)


def simulate(given, rewards, iterations, folder=None, first=1, **changes):
    """The tasks of each iteration, with rewards(task, iteration) as those of its samples; and what
    the markers hold.
    """
    config = TrainConfig(
        **{"run": "r", "model": "m", "iterations": 1, "tasks_per_iteration": 4, "curriculum": True}
        | changes
    )
    folder = folder or Markers()
    made, chosen = Curriculum(config, folder, given), []
    for number in range(first, first + iterations):
        chosen.append(made.choose(number, config.tasks_per_iteration, ()))
        folder.mark(
            number,
            made.measured(number, [group(task, rewards(task, number)) for task in chosen[-1]]),
        )
    return chosen, folder


ALWAYS, NEVER, SOMETIMES = (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)


def by_number(task, number):
    """Of every three tasks, one is solved, one is hopeless and one teaches something."""
    return (ALWAYS, NEVER, SOMETIMES)[int(task.id.split("/")[1]) % 3]


def test_a_task_without_a_signal_is_due_after_2_rounds_then_up_to_4_8_and_16():
    plain, given = tasks(3), tasks(20, "odd")
    for same in (ALWAYS, NEVER):
        _, folder = simulate(
            [*plain, *given], lambda task, _, same=same: SOMETIMES if task in plain else same, 400
        )
        turns = {task.id: [] for task in given}
        by_key = {
            key: task.id
            for key, task in zip(Curriculum(CONFIG, folder, given)._keys, given, strict=True)
        }
        for number in range(1, 401):
            for key, turn in json.loads(folder.found[number])["turns"].items():
                if key in by_key:
                    turns[by_key[key]].append(turn)
        waits = [[due - now for now, due, _, _ in some] for some in turns.values()]
        assert {some[0] for some in waits} == {2} and {some[1] for some in waits} == {3, 4}
        assert {some[2] for some in waits} <= set(range(5, 9)) and len(
            {some[2] for some in waits}
        ) > 2
        later = {wait for some in waits for wait in some[3:]}
        assert later <= set(range(9, 17)) and len(later) > 5
        for some in turns.values():  # and then it comes
            assert all(now[1] == then[0] for now, then in itertools.pairwise(some))


def test_one_turn_with_a_signal_brings_it_back_into_every_round():
    plain, (odd,) = tasks(3), tasks(1, "odd")
    chosen, _ = simulate(
        [*plain, odd],
        lambda task, n: NEVER if task is odd and n < 60 else SOMETIMES,
        160,
        tasks_per_iteration=2,
    )
    late = Counter(task.id for pair in chosen[100:] for task in pair)
    assert late["odd/0"] == 30  # of 120, as each


def test_where_all_have_a_signal_it_is_the_plain_stream():
    given = tasks(12)
    chosen, _ = simulate(given, lambda *_: SOMETIMES, 15, seed=5)
    config = TrainConfig(run="r", model="m", iterations=1, seed=5)
    assert [task for some in chosen for task in some] == TaskStream(
        config, Markers(), given
    ).tasks_from(0, 60)


def test_most_of_the_samples_go_where_they_teach():
    chosen, folder = simulate(tasks(30), by_number, 100, tasks_per_iteration=6)
    late = [by_number(task, 0) for some in chosen[50:] for task in some]
    # 10 of 30 tasks; 10 of 10 + 20/16 in the long run.
    assert late.count(SOMETIMES) / len(late) > 0.85
    counts = json.loads(folder.found[100])
    assert {name: counts[name] for name in ("total", "unseen", "solved", "hopeless", "between")} == {
        "total": 30, "unseen": 0, "solved": 10, "hopeless": 10, "between": 10,
    }  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.integers(4, 40), st.integers(1, 4), st.integers(0, 3), st.integers(0, 99), st.booleans())
def test_properties_of_every_curriculum(total, size, seed, luck, in_two_levels):
    """Each task once in an iteration; those that were never sampled first; none left out for long;
    the same from the markers.
    """
    given = tasks(total)
    if in_two_levels:
        given = in_levels(given[:size], given[size:])

    def rewards(task, number):
        draw = random.Random(f"{luck}/{task.id}/{number}")
        return draw.choice([ALWAYS, NEVER, SOMETIMES, SOMETIMES, ()])  # () where all of them failed

    run = {"tasks_per_iteration": size, "seed": seed, "level_up_at": -1.0}
    chosen, folder = simulate(given, rewards, 60, **run)
    seen = set()
    for some in chosen:
        ids = {task.id for task in some}
        assert len(ids) == len(some) == size
        if not in_two_levels and ids & seen:
            assert len(seen | ids) == total
        seen |= ids
    if in_two_levels:  # opened after the first iteration that had a grade
        assert {task.level for task in chosen[0]} == {0}
    elif 60 * size >= 20 * total:
        assert seen == {task.id for task in given}
    again, _ = simulate(given, rewards, 20, folder, first=41, **run)
    assert [[task.id for task in some] for some in again] == [
        [task.id for task in some] for some in chosen[40:]
    ]


def test_a_small_set_of_tasks_is_sampled_again_where_there_are_no_others():
    given = tasks(4)
    made = Curriculum(
        TrainConfig(run="r", model="m", iterations=1, curriculum=True), Markers(), given
    )
    first = made.choose(1, 3, ())
    more = made.choose(1, 6, first)
    assert {task.id for task in first} | {more[0].id} == {task.id for task in given}
    assert len(more) == 6 and len({task.id for task in more[1:5]}) == 4


# Levels


def level_run(rewards, iterations, sizes=(8, 20, 20), **changes):
    given = in_levels(*(tasks(size, f"level{level}") for level, size in enumerate(sizes)))
    chosen, folder = simulate(given, rewards, iterations, **changes)
    return [[task.level for task in some] for some in chosen], [
        json.loads(folder.found[n]) for n in range(1, iterations + 1)
    ]


def test_the_next_level_is_opened_when_the_highest_reaches_the_score():
    levels, found = level_run(
        lambda task, n: (1.0, 0.0) if n < 5 or task.level else (1.0, 1.0, 1.0, 0.0),
        12,
        curriculum=False,
    )
    assert [one["level"] for one in found] == [0] * 4 + [1] * 8  # 0.75 ≥ 0.7, and then 0.5 < 0.7
    assert [one["level_score"] for one in found[:5]] == [0.5] * 4 + [None]
    assert all(set(some) == {0} for some in levels[:5])
    assert all(some == [1, 0, 1, 0] for some in levels[5:])
    levels, found = level_run(lambda *_: (1.0, 1.0, 1.0, 0.0), 12)
    # Two iterations for four groups of level 1.
    assert [one["level"] for one in found] == [1, 1, *[2] * 10]
    assert levels[:4] == [[0] * 4, *[[1, 0, 1, 0]] * 2, levels[3]] and Counter(levels[3])[2] == 2
    _, found = level_run(lambda *_: (1.0, 0.0), 30, level_up_at=0.5, tasks_per_iteration=8)
    assert found[-1]["level"] == 2


def test_a_level_whose_solved_tasks_are_left_out_is_judged_as_if_they_were_not():
    """Three quarters of its tasks are solved for good, so 7 of 8 answers are right; what is sampled
    most are the others.
    """

    def rewards(task, number):
        return (1.0, 0.0) if int(task.id.split("/")[1]) % 4 == 0 else ALWAYS

    run = {"sizes": (80, 40), "level_up_at": 2.0}
    for size in (20, 40):
        _, found = level_run(rewards, 80, **run, tasks_per_iteration=size)
        late = [one["level_score"] for one in found[20:]]
        assert sum(late) / len(late) == pytest.approx(7 / 8, abs=0.04)
    run["tasks_per_iteration"] = 20
    _, found = level_run(
        lambda task, n: rewards(task, n) if n > 20 else (1.0, 0.0), 60, **run | {"level_up_at": 0.8}
    )
    assert (found[19]["level"], found[-1]["level"]) == (0, 1)


def test_the_score_is_the_validation_metric_where_training_has_it():
    given = in_levels(tasks(4), tasks(4, "hard"))
    config = TrainConfig(
        run="r", model="m", iterations=1, tasks_per_iteration=4, validation_metric="exact"
    )
    made = Curriculum(config, Markers(), given)
    right = made.measured(1, [group(task, (0.2, 0.2), exact=1.0) for task in given[:4]]).to_json()
    assert (right["level"], right["solved"], right["hopeless"]) == (1, 4, 0)
    wrong = made.measured(1, [group(task, (0.9, 0.9), exact=0.0) for task in given[:4]]).to_json()
    assert (wrong["level"], wrong["solved"], wrong["hopeless"]) == (0, 0, 4)
    without = made.measured(1, [group(task, (0.9, 0.9)) for task in given[:4]]).to_json()
    assert (without["level"], without["hopeless"]) == (1, 4)


def test_other_tasks_at_a_level_begin_anew():
    given = in_levels(tasks(4), tasks(4, "hard"))
    _, folder = simulate(given, lambda *_: SOMETIMES, 3)
    other = in_levels(tasks(5, "new"), tasks(4, "hard"))
    made = Curriculum(CONFIG, folder, other)
    assert {task.id for task in made.choose(4, 5, ())} == {task.id for task in other[:5]}
    none_graded = made.measured(4, [group(task, ()) for task in other[:4]]).to_json()
    assert (none_graded["level_score"], none_graded["unseen"], none_graded["between"]) == (
        None,
        9,
        0,
    )


def test_levels_are_whole_numbers_and_part_of_what_a_run_remembers():
    with pytest.raises(TaskError, match="level is 'hard'; give a whole number"):
        Task(question("x"), float, level="hard")
    easy, hard = in_levels(tasks(1), tasks(1))
    assert (easy.level, hard.level) == (0, 1) and easy.as_json() == tasks(1)[
        0
    ].as_json() != hard.as_json()


def test_what_is_wrong_with_levels_is_said_at_once():
    given = in_levels(tasks(3), tasks(9, "hard"))
    config = TrainConfig(run="r", model="tiny", iterations=1, tasks_per_iteration=4)
    with pytest.raises(ConfigError) as caught:
        checked(config, given, [], problems=["another"])
    assert caught.value.problems == [
        "another", "tasks_per_iteration is 4, but the lowest level, the first of the run, has only 3 " "tasks",
    ]  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        TrainConfig(run="r", model="tiny", curriculum="yes", level_up_at="high").check("config")
    assert [line.partition(";")[0] for line in caught.value.problems][:2] == [
        "iterations is missing",
        "curriculum is 'yes'",
    ]
    assert caught.value.problems[2] == "level_up_at is 'high'; it must be a number"


# Whole runs

RUN = {"iterations": 7, "tasks_per_iteration": 3, "validation": [], "curriculum": True}


@pytest.fixture
def mixed(world):
    """A world in which a third of the tasks is solved, a third hopeless, and the rest has a
    signal.
    """
    world.answer = lambda prompt, k, version: (
        "yes" if k < (4, 0, 1 + version % 3)[int(prompt.split()[1]) % 3] else "no"
    )
    return world


def asked(world, number):
    rows = read_jsonl(world.run / f"iterations/{number:04d}/rollouts.jsonl")
    return [row["task_id"] for row in rows if row["sample"] == 0]


def measured(world, number):
    return RunFolder(world.run).iteration(number).marker(RolloutsFacts).curriculum.to_json()


def test_a_run_skips_what_it_need_not_see(mixed, capsys):
    mixed.writes_reports = True
    mixed.train(mixed.tasks(9), **RUN | {"iterations": 9})
    ids = [task_id for n in range(1, 10) for task_id in asked(mixed, n)]
    first, late = ids[:9], ids[9:]
    assert sorted(first) == [f"task/{n}" for n in range(9)]
    with_signal = sum(int(task_id.split("/")[1]) % 3 == 2 for task_id in late)
    assert with_signal >= 10  # of 18; without a curriculum 6
    row = mixed.rows()[3]["curriculum"]
    assert row == {"round": 0, "total": 9, "unseen": 0, "solved": 3, "hopeless": 3, "between": 3}
    assert "of 9 tasks 3 solved, 3 hopeless" in capsys.readouterr().out
    page = (mixed.run / "report.html").read_text()
    assert "<b>Curriculum</b>" in page and "not graded yet" in page and "<b>Level</b>" not in page
    mixed.run = mixed.run.parent / "plain"
    mixed.train(mixed.tasks(9), **RUN | {"curriculum": False})
    assert (
        "curriculum" not in mixed.rows()[3]
        and "<b>Curriculum</b>" not in (mixed.run / "report.html").read_text()
    )


@pytest.mark.long(but=["14-{'dynamic_sampling': 2, 'max_extra_tasks': 4}"])
@pytest.mark.parametrize(
    ("after", "more"),
    [
        (1, {}),
        pytest.param(5, {}, marks=pytest.mark.long),
        pytest.param(8, {"off_policy_steps": 1}, marks=pytest.mark.long),
        (14, {"off_policy_steps": 1}),
        pytest.param(8, {"dynamic_sampling": 2, "max_extra_tasks": 4}, marks=pytest.mark.long),
        (14, {"dynamic_sampling": 2, "max_extra_tasks": 4}),
    ],
    ids=str,
)
def test_interrupted_it_chooses_what_it_would_have(mixed, tmp_path, after, more):
    """Long for three of six places: only these lie before the level rises. Each way is interrupted
    later.

    Long for the other settings: only these stop after one task, or sample off policy.
    """
    given = in_levels(mixed.tasks(9), mixed.tasks(9, "hard"))
    run = RUN | {"level_up_at": 0.5} | more
    mixed.train(given, **run)
    whole = [(asked(mixed, n), measured(mixed, n)) for n in range(1, 8)]
    assert whole[-1][1]["level"] == 1
    mixed.run = tmp_path / "again"
    with mixed.interrupted_after(after), pytest.raises(KeyboardInterrupt):
        mixed.train(given, **run)
    mixed.train(given, **run)
    assert [(asked(mixed, n), measured(mixed, n)) for n in range(1, 8)] == whole


def test_a_curriculum_may_begin_or_end_later(mixed, monkeypatch):
    given = mixed.tasks(9)
    mixed.train(given, **RUN | {"curriculum": False, "iterations": 2})
    monkeypatch.setenv("TTRL_ALLOW_CHANGES", "curriculum")
    mixed.train(given, **RUN | {"iterations": 8})
    assert [row["curriculum"]["unseen"] for row in mixed.rows()[3:]] == [6, 3, 0, 0, 0, 0]
    mixed.train(given, **RUN | {"curriculum": False, "iterations": 9})
    plain = TaskStream(mixed.config(tasks_per_iteration=3), RunFolder(mixed.run), given).tasks_from(
        24, 3
    )
    assert asked(mixed, 9) == [task.id for task in plain]


def test_a_run_with_levels_shows_them_and_is_replayed_and_trained_again(mixed, capsys):
    mixed.writes_reports = True
    mixed.train(in_levels(mixed.tasks(9), mixed.tasks(3, "hard")), **RUN | {"iterations": 2})
    row = mixed.rows()[1]["curriculum"]
    assert (
        row["level"] == 0
        and f"level 0 (reward {row['level_score']:.3f})" in capsys.readouterr().out
    )
    assert "<b>Level</b>" in (mixed.run / "report.html").read_text()
    result = replay(mixed.run, grader=lambda choice, sample: sample.reward, train=True, quiet=True)
    assert result.total.changed == 0 and result.checkpoint is not None
