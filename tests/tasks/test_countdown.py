"""Countdown: expressions that reach the target with the numbers given, and all that only seem
to.
"""

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttrl.errors import TaskError
from ttrl.tasks.countdown import CountdownGrader, evaluate, get_countdown_tasks


@pytest.mark.parametrize(
    ("content", "reward"),
    [
        ("<answer>(1 + 2) * 5 - 5</answer>", 1.0),
        ("<answer>(1+2)*5-5</answer>", 1.0),
        # Deeper than anyone writes.
        ("<answer>" + "(" * 40 + "(1+2)*5-5" + ")" * 40 + "</answer>", 0.0),
        ("<answer>" + "(" * 39 + "(1+2)*5-5" + ")" * 39 + "</answer>", 1.0),
        ("<answer>(1 + 2) * 5 - 5 = 10</answer>", 1.0),
        ("<answer>(1 + 2) × 5 − 5</answer>", 1.0),
        ("<answer>\u2060(1 + 2)\u200b * 5 – 5</answer>", 1.0),
        ("<answer>((1 + 2) * (5)) - 5</answer>", 1.0),
        ("<answer>[(1 + 2) * 5] - 5</answer>", 1.0),
        ("<answer>-5 + (2 + 1) * 5</answer>", 1.0),
        ("<answer>+(2 + 1) * 5 - +5</answer>", 1.0),
        ("<answer>(１ ＋ ２) × ５ － ５</answer>", 1.0),
        ("<answer>(١ + ٢) * ٥ - ٥</answer>", 1.0),
        ("<answer>5 / 5 * (1 * 2)</answer>", 0.1),
        ("\\boxed{(1 + 2) \\times 5 - 5}", 1.0),
        ("\\boxed{\\left(1 + 2\\right) \\cdot 5 - 5}", 1.0),
        ("$(1 + 2) * 5 - 5$", 1.0),
        ("<answer>**(1 + 2) * 5 - 5**</answer>", 1.0),
        ("__(1 + 2) * 5 - 5__", 1.0),
        ("<answer>(1 + 2) * 5 - 5 *</answer>", 0.0),
        ("<answer>(1 + 2) * 5 ** - 5</answer>", 0.0),
        ("<answer>(1 + 2)5 - 5</answer>", 0.0),
        ("<answer>(1 + 2)² + 5 / 5</answer>", 0.0),
        ("(1 + 2) * 5 - 5", 1.0),
        ("`(1 + 2) * 5 - 5`", 1.0),
        ("Voilà:\n(1 + 2) * 5 - 5.", 1.0),
        ("<think>1 + 2</think><answer>(1 + 2) * 5 - 5</answer>", 1.0),
        ("<answer>1 + 2</answer> no: <answer>(1 + 2) * 5 - 5</answer>", 1.0),
        ("<answer>(1 + 2) * 5 - 5", 1.0),
        ("<answer>\n(1 + 2) * 5 - 5\n</answer>\nDone!", 1.0),
        ("x" * 100_000 + "<answer>(1 + 2) * 5 - 5</answer>", 1.0),
        ("<answer>(1 + 2) * 5 - 5</answer><answer>1 + 2</answer>", 0.0),
        ("<answer>(1 + 2) * 5 - 5 = 11</answer>", 0.1),
        ("<answer>1 + 2 + 5 + 5</answer>", 0.1),
        ("<answer>10</answer>", 0.0),
        ("<answer>5 + 5</answer>", 0.0),
        ("<answer>5 + 5 + (2 - 1) * 0</answer>", 0.0),
        ("<answer>2 * 5 * 1</answer>", 0.0),
        ("<answer>(1 + 2) * 5 - 5 + 0</answer>", 0.0),
        ("<answer>(1 + 2) * 5 - 5 + 5 - 5</answer>", 0.0),
        ("<answer>12 + 5 - 5</answer>", 0.0),
        ("<answer>5 ** 1 * 2 + 5</answer>", 0.0),
        ("<answer>5 // 1 * 2 - 5</answer>", 0.0),
        ("<answer>(1 + 2) * 5 - 5; import os</answer>", 0.0),
        ("<answer>__import__('os').system('true')</answer>", 0.0),
        ("<answer>1 - 1 / (5 - 5) + 2</answer>", 0.0),
        ("<answer>(1 + 2 * 5 - 5</answer>", 0.0),
        ("<answer>1 2 5 5</answer>", 0.0),
        ("<answer>5(2 * 1) - 5 + 5</answer>", 0.0),
        ("<answer>(1 + 2) * 5 - 5 = 10 = 10</answer>", 0.0),
        ("<answer>10 = (1 + 2) * 5 - 5</answer>", 0.0),
        ("<answer>1.0 + 2 + 5 + 5</answer>", 0.0),
        ("<answer>five times (one plus two) minus five</answer>", 0.0),
        ("<answer>" + "(" * 5000 + "1" + ")" * 5000 + "</answer>", 0.0),
        ("<answer>" + "9" * 50 + "</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("<think>(1 + 2) * 5 - 5", 0.0),
        ("", 0.0),
        (None, 0.0),
        ("²", 0.0),
    ],
)
def test_grader(reply, content, reward):
    grader = CountdownGrader((5, 1, 5, 2), 10, "(1 + 2) * 5 - 5", valid_reward=0.1)
    got, metrics = grader(reply(content))
    assert (got, metrics) == (reward, {"exact": float(reward == 1.0), "valid": float(reward > 0)})


numbers = st.integers(1, 99)
expressions = st.recursive(
    numbers.map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(
        lambda t: f"({t[0]} {t[1]} {t[2]})"
    ),
    max_leaves=6,
)


@given(expressions)
def test_property_values_are_those_of_python(expression):
    names = expression.replace("(", " ( ").replace(")", " ) ").split()
    source = " ".join(f"Fraction({name})" if name.isdigit() else name for name in names)
    try:
        expected = eval(source, {"Fraction": Fraction})
    except ZeroDivisionError:
        expected = None
    read = evaluate(expression)
    assert (None if read is None else read[0]) == expected
    if read is not None:
        assert read[1] == [int(name) for name in names if name.isdigit()]


@given(st.text("0123456789+-*/() =.²", max_size=40))
def test_property_nothing_raises(text):
    evaluate(text)


def test_long_replies(grade_long_replies):
    grade_long_replies(CountdownGrader((1, 2), 3, "1 + 2"), "(1+", "-", "1/0")


def test_puzzles(reply):
    tasks = get_countdown_tasks("train", 300, seed=1)
    assert {len(task.grader.numbers) for task in tasks} == {3, 4}
    for task in tasks:
        assert task.grader(reply(task.grader.reference()))[0] == 1.0
        assert 1 <= task.grader.target <= 999 and task.grader.target not in task.grader.numbers
        assert (
            f"numbers {', '.join(map(str, task.grader.numbers))} exactly"
            in task.messages[0]["content"]
        )
    assert [t.id for t in get_countdown_tasks("train", 20, seed=1)] == [t.id for t in tasks[:20]]
    assert [t.id for t in get_countdown_tasks("train", 20, seed=2)] != [t.id for t in tasks[:20]]
    assert {
        len(t.grader.numbers)
        for t in get_countdown_tasks("train", 20, min_numbers=6, max_numbers=6)
    } == {6}


def test_validation_is_held_out():
    validation = get_countdown_tasks("validation", 100)
    assert len({task.id for task in validation}) == 100
    assert [t.id for t in get_countdown_tasks("validation", 40, seed=7)] == [
        t.id for t in validation[:40]
    ]
    assert validation[0].id == "countdown/78-9-1/702"  # the same in every version
    held_out = {tuple(sorted(task.grader.numbers)) for task in validation}
    seen = {
        tuple(sorted(task.grader.numbers))
        for seed in range(3)
        for task in get_countdown_tasks("train", 300, seed)
    }
    assert not held_out & seen


def test_shuffled_solutions_earn_nothing_for_other_numbers(reply):
    tasks = get_countdown_tasks("train", 100)
    replies = [task.grader.reference() for task in tasks]
    random.Random(0).shuffle(replies)
    for task, text in zip(tasks, replies, strict=True):
        same = sorted(evaluate(text[8:-9])[1]) == sorted(task.grader.numbers)
        assert task.grader(reply(text))[0] <= float(same)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split": "test"}, "countdown has 'train', 'validation'"),
        ({"n": 0}, "n is 0"),
        ({"min_numbers": 1}, "min_numbers 1 and max_numbers 4"),
        ({"max_numbers": 9}, "max_numbers 9"),
        ({"largest": 9}, "largest is 9; give"),
        ({"valid_reward": 1.0}, r"valid_reward is 1\.0"),
        (
            {"split": "validation", "n": 60, "max_numbers": 2, "min_numbers": 2, "largest": 10},
            "found .*; ask for fewer",
        ),
    ],
)
def test_refusals(changes, words):
    with pytest.raises(TaskError, match=words):
        get_countdown_tasks(**changes)
